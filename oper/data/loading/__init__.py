"""Make training batches from a preprocessed folder."""
