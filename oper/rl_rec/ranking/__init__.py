"""Full ranking of the catalogue, and ranking metrics."""
