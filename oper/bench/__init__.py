"""Comparisons with other systems and with physical limits.

`core` has what all share, `verbs` the command; a package per theme has the cases.
"""
