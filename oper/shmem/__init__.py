"""The runtime, which executes a plan: memory, lookups, updates. Imports no analysis or search."""
