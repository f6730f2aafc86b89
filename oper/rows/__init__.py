"""Rows under a plan: where each of them lives, its new numbers, and transfers between ranks."""
