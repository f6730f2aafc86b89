"""Column generation: the tables' pricing problems, and the master problem that gives prices."""
