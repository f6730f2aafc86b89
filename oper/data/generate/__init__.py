"""Synthetic logs and lookups."""
