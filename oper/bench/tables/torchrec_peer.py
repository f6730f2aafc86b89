"""TorchRec's plans in a comparison, on CPU over gloo."""

from __future__ import annotations

PLAN_KINDS = ("table_wise", "mixed")
# On CPU, TorchRec has no row-wise, table-row-wise or grid sharding of pooled tables.
CPU_PLAN_KINDS = (*PLAN_KINDS, "column_wise", "any")
MIXED_MAX_ROWS = 10_000  # tables up to this size are data-parallel in the mixed plan


def sharding_types(kind: str, num_rows: int) -> list[str] | None:
    """The sharding types that a table of `num_rows` rows may have; None = all that TorchRec
    supports.

    Args:
        kind: ``"table_wise"``; ``"column_wise"``; ``"mixed"`` (tables of at most `MIXED_MAX_ROWS`
            rows data-parallel, larger ones table-wise); or ``"any"`` (the planner's choice).
        num_rows: rows of the table.
    """
    if kind == "any":
        return None
    if kind == "mixed":
        return ["data_parallel" if num_rows <= MIXED_MAX_ROWS else "table_wise"]
    return [kind]
