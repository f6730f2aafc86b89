"""The planner on modelled machines, compared with the planners of other systems."""
