"""Replay of batches under a plan, id by id: counts, bytes between ranks, timelines."""
