"""Replica groups, each of which holds all tables, and their synchronization."""
