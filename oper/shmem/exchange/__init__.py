"""Rows, sums and gradients between memory domains, and how neighbours' rows are read."""
