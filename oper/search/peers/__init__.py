"""Other systems' planners, re-implemented from publications and scored by the same cost model."""
