"""Measurements of tables: traffic, phases, changed rows, progress."""
