"""Branch and bound over parts of the space of plans, and the proof that its trees provide."""
