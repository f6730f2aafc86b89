"""Column generation: what tables cost at given prices, and the master that finds the prices."""
