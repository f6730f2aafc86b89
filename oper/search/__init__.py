"""From access statistics and a topology to a plan with a certified lower bound.

`problem` -> `bound` -> `heuristic` -> `Plan`. The names below load on first use; solvers load only
when a search runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from oper.lazy import lazy_exports

_PUBLIC = {
    "make_plan": "oper.search.planner",
    "make_problem": "oper.search.problem",
    "Problem": "oper.search.problem",
    "evaluate": "oper.search.cost",
    "Evaluation": "oper.search.cost",
    "lower_bound": "oper.search.bound",
    "summary": "oper.search.explain",
    "Constraints": "oper.search.constraints",
    "TableConstraint": "oper.search.constraints",
    "EXECUTABLE": "oper.search.space",
    "EVERYTHING": "oper.search.space",
    "executed_space": "oper.search.space",
    "topology_preset": "oper.search.presets",
}

__all__ = sorted(_PUBLIC)

if TYPE_CHECKING:
    from oper.search.bound import lower_bound as lower_bound
    from oper.search.constraints import (
        Constraints as Constraints,
        TableConstraint as TableConstraint,
    )
    from oper.search.cost import Evaluation as Evaluation, evaluate as evaluate
    from oper.search.explain import summary as summary
    from oper.search.planner import make_plan as make_plan
    from oper.search.presets import topology_preset as topology_preset
    from oper.search.problem import Problem as Problem, make_problem as make_problem
    from oper.search.space import (
        EVERYTHING as EVERYTHING,
        EXECUTABLE as EXECUTABLE,
        executed_space as executed_space,
    )

__getattr__, __dir__ = lazy_exports(__name__, _PUBLIC)
