"""Interactions with held-out targets, the protocols of published tables, training batches."""
