"""The cost model: loads of every rank by phase, and the step time of a plan."""
