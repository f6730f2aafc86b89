"""What-if analysis: the cost of a plan, and of a new plan, on a modified machine."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from oper.errors import PlanInfeasibleError, require
from oper.plan import Plan
from oper.search.cost.model import evaluate
from oper.search.planner import plan_problem
from oper.search.problem.statement import Problem
from oper.topology import Topology

# Fields of a topology, of its domains or of its racks that each quantity is about.
_FIELDS = {"memory": ("memory_bytes",), "read": ("read_gbps", "cache_gbps"),
           "link": ("link_gbps",), "cross": ("cross_gbps",), "uplink": ("uplink_gbps",),
           "host-memory": ("host_memory_bytes",), "host-link": ("host_gbps",)}
NAMES = (*_FIELDS, "batch")
_FORM = "NAME=+10%, NAME=-10% or NAME=x1.5 (batch=4096 as well)"


@dataclass(frozen=True, slots=True)
class Change:
    """One modified quantity of a problem.

    Attributes:
        text: the change as the user wrote it.
        name: one of `NAMES`.
        factor: the factor by which the quantity is multiplied; 0 if `value` is given.
        value: the new batch size, or None.
    """

    text: str
    name: str
    factor: float
    value: int | None = None


def parse_change(text: str) -> Change:
    """Parse a change such as ``memory=+10%``, ``link=x2`` or ``batch=4096``.

    Raises:
        InvalidInputError: the name is unknown, or the new value would not be a number above 0.
    """
    name, _, amount = text.partition("=")
    percent = re.fullmatch(r"([+-]\d+(?:\.\d+)?)%", amount)
    times = re.fullmatch(r"x(\d+(?:\.\d+)?)", amount)
    factor = 1 + float(percent[1]) / 100 if percent else float(times[1]) if times else 0.0
    whole = int(amount) if name == "batch" and amount.isdecimal() else 0
    require("cannot change the problem", "write the change as memory=+10% or batch=8192",
            ("what-if", text, name in NAMES and (0 < factor < math.inf or whole >= 1),
             f"{_FORM} with a name of {list(NAMES)}, and a finite result above 0"))
    return Change(text, name, factor, whole or None)


def changed_problem(topology: Topology, batch_size: int, changes: Iterable[Change]
                    ) -> tuple[Topology, int]:
    """Return the topology and the batch size after the changes.

    The constants of a changed topology have the source ``assumed``, because they are no longer
    measured or published values.

    Raises:
        InvalidInputError: the topology has no such quantity, such as uplinks of racks.
    """
    for change in changes:
        if change.name == "batch":
            batch_size = change.value or max(1, round(batch_size * change.factor))
            continue
        changed = replace(_scaled(topology, change),
                          domains=tuple(_scaled(d, change) for d in topology.domains),
                          racks=tuple(_scaled(r, change) for r in topology.racks))
        require("cannot change the problem", "leave this change out, or state the quantity in a "
                "topology file", ("what-if", change.text, changed != topology or change.factor == 1,
                                  "a quantity that the topology states"))
        topology = replace(changed, name=f"{topology.name} {change.text}", source="assumed")
    return topology, batch_size


def _scaled(of: Any, change: Change) -> Any:
    """Return a topology, a domain or a rack with its fields of a change multiplied by the factor.
    """
    new = {n: getattr(of, n) * change.factor for n in _FIELDS[change.name] if hasattr(of, n)}
    return replace(of, **{n: int(x) if n.endswith("_bytes") else x for n, x in new.items()})


def compare(plan: Plan, before: Problem, after: Problem) -> dict[str, Any]:
    """Evaluate a plan, and a new plan, before and after a change; returns values that JSON can
    represent.

    Args:
        plan: a plan for the tables of both problems.
        before: the unchanged problem.
        after: the changed problem.

    Returns:
        ``{"before": figures, "after": figures}``. Of `plan`: ``step_us``, ``fits``,
        ``slowest_phase``, ``binding``, ``imbalance`` and ``memory_used``. Of a new plan:
        ``planned_step_us`` and ``lower_bound_us``, None if no plan fits. Also ``batch_size``.
    """
    old, planned = _figures(plan, before, plan)
    # The earlier plan is the starting point, so that a better machine never gives a slower plan.
    return {"before": old, "after": _figures(plan, after, planned)[0]}


def _figures(plan: Plan, problem: Problem, start: Plan) -> tuple[dict[str, Any], Plan]:
    """Figures of a problem as in `compare`, and a new plan for it (`start` if no plan fits)."""
    found = evaluate(plan, problem)
    longest = max(found.phases, key=lambda p: p.time_us)
    values: dict[str, Any] = {
        "batch_size": problem.batch_size, "step_us": found.step_us, "fits": found.fits,
        "planned_step_us": None, "lower_bound_us": None, "slowest_phase": longest.name,
        "binding": longest.binding, "imbalance": found.imbalance,
        "memory_used": found.fullest}
    try:
        new = plan_problem(problem, start=start)
    except PlanInfeasibleError:
        return values, start
    return {**values, "planned_step_us": new.step_us, "lower_bound_us": new.lower_bound_us}, new


def as_text(changes: Sequence[Change], found: dict[str, Any]) -> str:
    """Format the result of `compare` as text."""
    us: Callable[[Any], str] = lambda x: "infeasible" if x is None else f"{x:.1f} us"  # noqa: E731
    rows: list[tuple[str, str, Callable[[Any], str]]] = [
        ("samples per rank", "batch_size", str), ("this plan", "step_us", us),
        ("this plan fits", "fits", lambda x: "yes" if x else "no"),
        ("fullest memory", "memory_used", lambda x: f"{100 * x:.1f} %"),
        ("longest phase", "slowest_phase", str), ("bound by", "binding", str),
        ("imbalance", "imbalance", lambda x: f"{x:.3f}"), ("a new plan", "planned_step_us", us),
        ("lower bound", "lower_bound_us", us)]
    lines = ["what if " + " ".join(c.text for c in changes),
             f"  {'':<18}{'before':>14}{'after':>14}{'change':>10}"]
    for title, key, show in rows:
        old, new = found["before"][key], found["after"][key]
        number = isinstance(new, float) and isinstance(old, float) and old > 0
        change = f"{100 * (new / old - 1):+.1f} %" if number else ""
        lines.append(f"  {title:<18}{show(old):>14}{show(new):>14}{change:>10}".rstrip())
    return "\n".join(lines) + "\n"
