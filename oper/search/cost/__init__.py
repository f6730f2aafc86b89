"""What a placement costs: loads of every rank, phase by phase, and the step that follows."""
