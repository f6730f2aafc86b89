"""From logs to statistics and batches."""
