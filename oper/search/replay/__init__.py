"""Replay of batches under a plan, id by id: what each rank does, the bytes moved, timelines."""
