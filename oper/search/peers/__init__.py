"""Other systems' planners, as published, under the same cost model."""
