"""Column generation: the pricing of tables, and the master problem that finds the prices."""
