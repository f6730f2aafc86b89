"""From a preprocessed folder to batches for training."""
