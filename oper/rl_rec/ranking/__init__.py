"""Full ranking and its metrics."""
