"""Names of tables inside a model, which are more restricted than names of columns."""

from __future__ import annotations

import os
from dataclasses import replace

from torch import nn

from oper.plan import Plan
from oper.stats import AccessStats

_PROBE = nn.ModuleDict()


def table_name(column: str) -> str:
    """Name of a column's table inside a model: the column's name, if that is allowed there.

    torch allows no dots, and no name that its containers use themselves, such as ``type`` or
    ``items``. Dots become ``%2E``, and a reserved name gets a trailing ``_``; different columns get
    different names.
    """
    name = column
    if "." in name or "%" in name:
        name = name.replace("%", "%25").replace(".", "%2E")
    shortest = len(name.rstrip("_"))
    if any(hasattr(_PROBE, name[:k]) for k in range(shortest, len(name) + 1)):
        name += "_"
    return name


def model_stats(path: str | os.PathLike[str]) -> AccessStats:
    """A statistics file with tables named as in the model; errors as for `AccessStats.load`."""
    stats = AccessStats.load(path)
    return replace(stats, tables={table_name(n): t for n, t in stats.tables.items()})


def model_plan(path: str | os.PathLike[str]) -> Plan:
    """A plan file with tables named as in the model; errors as for `Plan.load`."""
    plan = Plan.load(path)
    return replace(plan, tables=tuple(
        replace(t, table=replace(t.table, name=table_name(t.table.name))) for t in plan.tables))
