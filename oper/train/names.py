"""Names of tables inside a model: columns may be called anything, a model's parts may not."""

from __future__ import annotations

import os
from dataclasses import replace

from torch import nn

from oper.plan import Plan
from oper.stats import AccessStats

_PROBE = nn.ModuleDict()


def table_name(column: str) -> str:
    """What the table of a column is called inside a model: the column's name where that can be.

    torch takes no dots, and no name that its containers use themselves, such as ``type`` or
    ``items``. Dots become ``%2E``, a taken name gets ``_`` at its end; different columns keep
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
    """A statistics file with tables named as in the model; errors as of `AccessStats.load`."""
    stats = AccessStats.load(path)
    return replace(stats, tables={table_name(n): t for n, t in stats.tables.items()})


def model_plan(path: str | os.PathLike[str]) -> Plan:
    """A plan file with tables named as in the model; errors as of `Plan.load`."""
    plan = Plan.load(path)
    return replace(plan, tables=tuple(
        replace(t, table=replace(t.table, name=table_name(t.table.name))) for t in plan.tables))
