"""Re-planning: when another plan pays, and migration to it while training continues."""

from oper.replanning.decision import Replanning, replan, step_us
from oper.replanning.learned import row_stats
from oper.replanning.watch import Event, Replanner, WatchOptions

__all__ = ["Event", "Replanner", "Replanning", "WatchOptions", "replan", "row_stats",
           "step_us"]
