"""Estimation of a policy's value from the log of another policy."""
