"""Names of tables in a model, which torch restricts more than names of columns, and statistics and
plans whose tables have them."""

from __future__ import annotations

import os
from dataclasses import replace

from torch import nn

from oper.data import Folder
from oper.errors import require
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


def data_numbering(data: str) -> str:
    """Return the identifier of a preprocessed folder's mapping from values to rows; "" if it is
    unknown, or `data` is empty."""
    if not data:
        return ""
    return str(Folder.open(data, allow_raw=True).manifest.get("numbering", ""))


def model_stats(path: str | os.PathLike[str], data: str = "") -> AccessStats:
    """Load access statistics and name tables as in a model.

    Args:
        path: file of the statistics.
        data: the preprocessed folder that the model is trained on, if any.

    Raises:
        The errors of `AccessStats.load`.
        InvalidInputError: rows of the statistics are known to stand for other values than in
            `data`.
    """
    stats, own = AccessStats.load(path), data_numbering(data)
    require(f"cannot use the statistics {os.fspath(path)!r}",
            "count the data itself by oper analyze, or after 'oper vocabulary extend --reorder' "
            "renumber them by oper analyze --merge --remap", (
                "numbering of their rows", stats.numbering,
                not (own and stats.numbering) or own == stats.numbering,
                f"{own}, the numbering of {data!r}"))
    return replace(stats, tables={table_name(n): t for n, t in stats.tables.items()})


def model_plan(path: str | os.PathLike[str]) -> Plan:
    """Load a plan and name its tables as in a model; raises as `Plan.load`."""
    plan = Plan.load(path)
    return replace(plan, tables=tuple(
        replace(t, table=replace(t.table, name=table_name(t.table.name))) for t in plan.tables))
