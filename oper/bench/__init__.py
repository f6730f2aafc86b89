"""Benchmarks: OPER compared with other systems and with physical limits.

`core` is the code shared by all benchmarks, `verbs` the command line, and each remaining package
has the cases of one topic.
"""
