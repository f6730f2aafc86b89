"""What a plan executes: batches replayed id by id, bytes and timelines."""
