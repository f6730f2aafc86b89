"""Plan where embedding rows live, with a certified lower bound on the modelled step time.

`problem` and `cost` state the problem; `relaxation`, `pricing` and `branching` bound it; `rounding`
makes the plan; `certificate` checks the bound. The names below are imported on first use, and the
solvers only when a search runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from oper.support.lazy import lazy_exports

_PUBLIC, __getattr__, __dir__ = lazy_exports(__name__, {
    "oper.search.planner": ("make_plan",),
    "oper.search.problem.statement": ("make_problem", "Problem"),
    "oper.search.cost.model": ("evaluate", "Evaluation"),
    "oper.search.pricing.master": ("lower_bound",),
    "oper.search.explain.summary": ("summary",),
    "oper.search.problem.constraints": ("Constraints", "TableConstraint"),
    "oper.search.problem.space": ("EXECUTABLE", "EVERYTHING", "executed_space"),
    "oper.search.problem.presets": ("topology_preset",),
    "oper.search.certificate.check": ("verify_plan", "Verdict"),
})

__all__ = sorted(_PUBLIC)

if TYPE_CHECKING:
    from oper.search.certificate.check import Verdict as Verdict, verify_plan as verify_plan
    from oper.search.cost.model import Evaluation as Evaluation, evaluate as evaluate
    from oper.search.explain.summary import summary as summary
    from oper.search.planner import make_plan as make_plan
    from oper.search.pricing.master import lower_bound as lower_bound
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
