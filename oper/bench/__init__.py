"""Benchmarks against peers and against physical limits."""
