"""Branch and bound over the parts of the plan space, and proofs of the bounds."""
