"""From access statistics and a topology to a plan with a certified lower bound.

`problem` -> `bound` -> `heuristic` -> `Plan`. The names below load on first use; solvers load only
when a search runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from oper.support.lazy import lazy_exports

_PUBLIC = {
    "make_plan": "oper.search.planner",
    "make_problem": "oper.search.problem.statement",
    "Problem": "oper.search.problem.statement",
    "evaluate": "oper.search.cost.model",
    "Evaluation": "oper.search.cost.model",
    "lower_bound": "oper.search.bound.master",
    "summary": "oper.search.explain.summary",
    "Constraints": "oper.search.problem.constraints",
    "TableConstraint": "oper.search.problem.constraints",
    "EXECUTABLE": "oper.search.problem.space",
    "EVERYTHING": "oper.search.problem.space",
    "executed_space": "oper.search.problem.space",
    "topology_preset": "oper.search.problem.presets",
    "verify_plan": "oper.search.verify.check",
    "Verdict": "oper.search.verify.check",
}

__all__ = sorted(_PUBLIC)

if TYPE_CHECKING:
    from oper.search.bound.master import lower_bound as lower_bound
    from oper.search.cost.model import Evaluation as Evaluation, evaluate as evaluate
    from oper.search.explain.summary import summary as summary
    from oper.search.planner import make_plan as make_plan
    from oper.search.problem.constraints import (
        Constraints as Constraints,
        TableConstraint as TableConstraint,
    )
    from oper.search.problem.presets import topology_preset as topology_preset
    from oper.search.problem.space import (
        EVERYTHING as EVERYTHING,
        EXECUTABLE as EXECUTABLE,
        executed_space as executed_space,
    )
    from oper.search.problem.statement import Problem as Problem, make_problem as make_problem
    from oper.search.verify.check import Verdict as Verdict, verify_plan as verify_plan

__getattr__, __dir__ = lazy_exports(__name__, _PUBLIC)
