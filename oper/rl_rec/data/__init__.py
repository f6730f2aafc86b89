"""Interactions with held-out targets, evaluation protocols of published tables, and batches."""
