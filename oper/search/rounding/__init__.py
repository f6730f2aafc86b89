"""From the relaxed solution to a plan: rounding, annealing, local search."""
