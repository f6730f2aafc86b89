"""Choice of dtypes for rows by the error measured when a model's rows are quantised."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from oper.integration.checkpoint.weights import Weights
from oper.plan import Piece, Plan, TablePlan, Tier
from oper.rows.directory import TableDirectory
from oper.rows.read_only import with_row_dtypes
from oper.search.precision import ROW_TYPES, Precision, RowErrors, blocks_of, choose_dtypes
from oper.shmem.memory.quantise import squared_errors
from oper.stats import AccessStats
from oper.tables import TableSpec

_SAMPLED = 1 << 14  # rows per block whose error is measured, at evenly spaced positions


def types_by_hotness(source: Weights, keys: dict[str, str], held: dict[str, TableSpec],
                     stats: AccessStats, error_budget: float) -> Precision:
    """Choose row dtypes that take the fewest bytes within an error budget.

    Args:
        source: the rows, on which quantisation errors are measured.
        keys: maps table names to their keys in `source`.
        held: the tables by name, with the dtypes in `source`.
        stats: access statistics.
        error_budget: see `oper.search.precision.choose_dtypes`.

    Returns:
        The dtypes of each table's ranges of rows, and the expected error.
    """
    errors = {name: _measured(source, keys[name], spec, stats) for name, spec in held.items()}
    return choose_dtypes(list(held.values()), stats, errors, error_budget)


def by_precision(plan: Plan, chosen: Precision, stats: AccessStats) -> Plan:
    """Return `plan`, of read-only tables, with the chosen dtypes and their error in its notes."""
    tables = []
    for entry in plan.tables:
        hottest = blocks_of(entry.table, stats).head_ids
        tables.append(with_row_dtypes(entry, chosen.dtypes[entry.table.name], hottest))
    notes = {**plan.notes, "row_error": chosen.error}
    return replace(plan, tables=tuple(tables), notes=notes)


def _measured(source: Weights, key: str, held: TableSpec, stats: AccessStats) -> RowErrors:
    blocks = blocks_of(held, stats)
    edges, dtypes = blocks.edges, [d for d in ROW_TYPES if d != "int4" or held.dim % 2 == 0]
    ids, block = _sample(held, edges, blocks.head_ids)
    sums = np.zeros((1 + len(dtypes), edges.size - 1))
    # As float32 even if `held` is quantised: rows may be quantised again to fewer bits.
    for begin, rows in source.rows(key, held, replace(held, dtype="float32", optimizer="none")):
        first, last = np.searchsorted(ids, [begin, begin + rows.shape[0]])
        if first == last:
            continue
        values = rows[torch.from_numpy(ids[first:last] - begin)].float()
        each = [values.double().square_().sum(dim=1), *(squared_errors(values, d) for d in dtypes)]
        for k, x in enumerate(each):
            sums[k] += np.bincount(block[first:last], x.numpy(), edges.size - 1)
    energy, *squared = sums / np.bincount(block, minlength=edges.size - 1)
    return RowErrors(edges, energy, dict(zip(dtypes, squared, strict=True)))


def _sample(spec: TableSpec, edges: np.ndarray, hottest: np.ndarray
            ) -> tuple[np.ndarray, np.ndarray]:
    """Return ascending ids of sampled rows of every block, and their blocks; int64 [n] each."""
    sizes = np.diff(edges)
    counts = np.minimum(sizes, _SAMPLED)
    positions = np.concatenate([begin + np.arange(count) * size // count for begin, count, size in
                                zip(edges[:-1], counts, sizes, strict=True)])
    # Rows at the first positions, which are ids without a hotness order.
    num_hot = int(edges[-2]) if edges.size > 2 and hottest.size else 0
    tiers = tuple(Tier(a, b, "owned", (0,))
                  for a, b in pairwise(sorted({0, num_hot, spec.num_rows})))
    entry = TablePlan(spec, (Piece(0, spec.dim, tiers),), hottest[:num_hot])
    ids = TableDirectory(entry, 1).ids_at(positions)
    order = np.argsort(ids)
    return ids[order], np.repeat(np.arange(sizes.size), counts)[order]
