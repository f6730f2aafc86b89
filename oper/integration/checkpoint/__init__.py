"""Checkpoints: planners, folders, deltas, and the state of sharded tables."""
