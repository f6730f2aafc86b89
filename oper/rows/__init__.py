"""Rows under a plan: their owners, their renumbering, and counts of transfers between ranks."""
