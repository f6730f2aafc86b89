"""Comparison of two plans: which tables are placed differently, and the effect on the step time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from oper.plan import Plan, TablePlan
from oper.search.cost.model import evaluate
from oper.search.explain.bottleneck import describe
from oper.search.problem.statement import Problem
from oper.tables import format_bytes

_MAX_TABLES = 40  # tables that `as_text` lists


def diff(before: Plan, after: Plan, problem: Problem) -> dict[str, Any]:
    """Compare two plans of the same tables; returns values that JSON can represent.

    Args:
        before, after: the plans.
        problem: the problem with which both are evaluated, each with its own bits of messages.

    Returns:
        ``{"tables": [{"table", "before", "after", "num_bytes"}], "num_tables", "before": figures,
        "after": figures}``. ``tables`` has only those that are placed differently; figures have
        ``step_us``, ``fits``, ``imbalance``, ``phases_us``, ``most_held_bytes`` and
        ``message_bits``.

    Raises:
        PlanError: a plan is for other tables or another number of ranks.
    """
    changed = []
    for t in problem.tables:
        old, new = before.table(t.spec.name), after.table(t.spec.name)
        if _text(old) != _text(new) or not np.array_equal(old.head_ids, new.head_ids):
            changed.append({"table": t.spec.name, "before": _text(old), "after": _text(new),
                            "num_bytes": t.spec.bytes_for(problem.training)})
    return {"tables": changed, "num_tables": len(problem.tables),
            "before": _figures(before, problem), "after": _figures(after, problem)}


def _text(entry: TablePlan) -> str:
    """Tiers of a table in split / broadcast / partial notation, hottest rows first, with their
    ranks; the pieces of a column split are preceded by ``S(columns)``."""
    parts = []
    for piece in entry.pieces:
        columns = "" if len(entry.pieces) == 1 else f"S({piece.start}:{piece.stop}) "
        tiers = " ".join(
            f"{x.stop - x.start}:{describe(x)}"
            + (f"{list(x.ranks)}" if len(x.ranks) > 1 else "")
            + (f"*{list(x.weights)}" if x.weights else "")
            + (f" {x.dtype}" if x.dtype else "") for x in piece.tiers)
        parts.append(columns + tiers)
    return " | ".join(parts)


def _figures(plan: Plan, problem: Problem) -> dict[str, Any]:
    found = evaluate(plan, replace(problem, message_bits=plan.message_bits))
    return {"step_us": found.step_us, "fits": found.fits, "imbalance": found.imbalance,
            "phases_us": {p.name: p.time_us for p in found.phases},
            "most_held_bytes": float(found.held_bytes.max()),
            "message_bits": plan.message_bits.to_json()}


def as_text(found: dict[str, Any], names: tuple[str, str]) -> str:
    """Format the result of `diff` as text; `names` are the names of the two plans."""
    old, new = found["before"], found["after"]
    rows = [("step us", old["step_us"], new["step_us"])]
    rows += [(f"  {k} us", v, new["phases_us"][k]) for k, v in old["phases_us"].items()]
    lines = [f"from {names[0]} to {names[1]}",
             f"  {'':<22}{'before':>14}{'after':>14}{'change':>10}"]
    for title, a, b in rows:
        change = f"{100 * (b / a - 1):+.1f} %" if a > 0 else ""
        lines.append(f"  {title:<22}{a:>14.1f}{b:>14.1f}{change:>10}".rstrip())
    lines.append(f"  {'imbalance':<22}{old['imbalance']:>14.3f}{new['imbalance']:>14.3f}")
    lines.append(f"  {'most held by a rank':<22}{format_bytes(old['most_held_bytes']):>14}"
                 f"{format_bytes(new['most_held_bytes']):>14}")
    lines.append(f"  {'fits':<22}" + "".join(f"{'yes' if x['fits'] else 'no':>14}"
                                              for x in (old, new)))
    if old["message_bits"] != new["message_bits"]:
        lines.append(f"  bits of messages (answers, gradients): {old['message_bits']} before, "
                     f"{new['message_bits']} after")
    lines.append(f"{len(found['tables'])} of {found['num_tables']} tables are placed differently")
    for entry in found["tables"][:_MAX_TABLES]:
        lines += [f"  {entry['table']} ({format_bytes(entry['num_bytes'])})",
                  f"    - {entry['before']}", f"    + {entry['after']}"]
    if len(found["tables"]) > _MAX_TABLES:
        lines.append(f"  and {len(found['tables']) - _MAX_TABLES} more")
    return "\n".join(lines) + "\n"
