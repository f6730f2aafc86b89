"""Sharded tables in device memory, and the Python callbacks within their steps."""
