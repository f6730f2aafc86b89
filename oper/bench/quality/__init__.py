"""Benchmarks of the quality of recommendations."""
