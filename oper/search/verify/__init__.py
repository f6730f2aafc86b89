"""Checking a plan's certificate, without the code that made it."""
