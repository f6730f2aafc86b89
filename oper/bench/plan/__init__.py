"""The planner on modelled machines, beside the planners of other systems."""
