"""Reports about plans: summary, bottlenecks, differences, what-if analysis, infeasibility."""
