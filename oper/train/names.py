"""Conversion of column names to table names, which torch restricts more."""

from __future__ import annotations

import os
from dataclasses import replace

from torch import nn

from oper.plan import Plan
from oper.stats import AccessStats

_PROBE = nn.ModuleDict()


def table_name(column: str) -> str:
    """Return the name of a column's table in a model: the column's name, if torch allows it.

    torch allows neither dots nor the names of its containers' attributes, such as ``type`` or
    ``items``. Dots are replaced by ``%2E`` and percent signs by ``%25``; ``_`` is appended to a
    reserved name. Different columns get different names.
    """
    name = column
    if "." in name or "%" in name:
        name = name.replace("%", "%25").replace(".", "%2E")
    shortest = len(name.rstrip("_"))
    if any(hasattr(_PROBE, name[:k]) for k in range(shortest, len(name) + 1)):
        name += "_"
    return name


def model_stats(path: str | os.PathLike[str]) -> AccessStats:
    """Load access statistics and name tables as in a model; raises as `AccessStats.load`."""
    stats = AccessStats.load(path)
    return replace(stats, tables={table_name(n): t for n, t in stats.tables.items()})


def model_plan(path: str | os.PathLike[str]) -> Plan:
    """Load a plan and name its tables as in a model; raises as `Plan.load`."""
    plan = Plan.load(path)
    return replace(plan, tables=tuple(
        replace(t, table=replace(t.table, name=table_name(t.table.name))) for t in plan.tables))
