"""``oper bench plan``: the planner on modelled machines, compared with other systems' planners."""
