"""Branch and bound over parts of the space, and the proof that its trees make."""
