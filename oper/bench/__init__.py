"""Comparisons with other systems and with physical limits."""
