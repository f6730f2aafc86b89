"""From a relaxed solution to a plan: rounding, annealing, local search."""
