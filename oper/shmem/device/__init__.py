"""Sharded tables in device memory, and what Python does in the middle of their steps."""
