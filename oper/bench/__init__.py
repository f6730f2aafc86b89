"""Comparisons with other systems and with physical limits.

`core` holds what all benchmarks share, `verbs` the command line, and one package per theme the
cases.
"""
