"""Access statistics of the rows of dynamic tables, as their directories have counted them.

Before training, the rows that hot keys will get are unknown, so a plan can give a tier of its own
to the default row only. While a table trains, its directory counts the occurrences of every key. A
plan made from these counts gives the hottest rows their own tiers, and `oper.migrate` moves the
tables to it. Keys keep their rows, so directories, checkpoints and deltas do not depend on the
plan.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from oper.errors import InvalidInputError
from oper.rows.capacity import with_bags_of_keys
from oper.sharding import tables_of
from oper.stats import AccessStats, TableStats, hotness_order

if TYPE_CHECKING:
    from torch import nn

    from oper.shmem.tables import ShardedTables

_WHAT = "cannot return statistics of rows"
_HEAD = 1 << 16  # hottest rows of a table that are listed one by one
_CHUNK = 1 << 20  # slots read at a time


def row_stats(model: nn.Module, stats: AccessStats) -> AccessStats:
    """Return access statistics of rows, those of dynamic tables by their directories' counts.

    Collective; call it between two training steps. The result does not depend on the number of
    ranks or on the plan.

    A row's access count is the count of its key, halved as `DynamicTable.half_life` states; without
    a half-life it covers the time since the key got the row. The default row's count is chosen such
    that its share of the table's accesses equals the share of lookups that have read it since the
    tables were made. Only ratios between a table's counts are meaningful: their sum differs from
    the sum of the bag lengths, which are from `stats`. The 65,536 hottest rows are listed one by
    one.

    Args:
        model: the result of `oper.shard`, or a model that contains it.
        stats: statistics of keys, for bag lengths and presence, and of the static tables' rows.

    Raises:
        InvalidInputError: the model has no dynamic tables, or `stats` lacks one of them.

    Example::

        learned = oper.row_stats(model, stats)
        found = oper.replan(plan, learned, topology)
        if found.break_even_steps < steps_left / 10:
            oper.migrate(model, found.plan)
    """
    dynamic = [(t, name) for t in tables_of(model, _WHAT) if t.keys is not None
               for name in t.keys.tables]
    missing = sorted({name for _, name in dynamic} - stats.tables.keys())
    if not dynamic or missing:
        raise InvalidInputError(
            _WHAT, "tables without statistics" if missing else "dynamic tables", missing,
            "none" if missing else "at least one", "pass statistics of all keys, see oper.collect"
            if missing else "shard the model with dynamic=")
    found = {name: _learned(t, name, stats.tables[name]) for t, name in dynamic}
    return replace(stats, tables=stats.tables | found, ids_in_hotness_order=False)


def _learned(tables: ShardedTables, name: str, keys: TableStats) -> TableStats:
    """Return the statistics of a dynamic table's rows. Collective."""
    assert tables.keys is not None
    num_rows = tables.specs[name].num_rows
    tables.barrier()  # all ranks have finished their update
    ids, counts = _counted(tables, name)
    order = hotness_order(ids, counts)
    hottest, rest = order[:_HEAD], order[_HEAD:]
    parts = tables.all_gather((ids[hottest], counts[hottest], *np.unique(
        counts[rest], return_counts=True)))
    ids, counts = (np.concatenate([part[k] for part in parts]) for k in (0, 1))
    usage = tables.keys.counts(name)
    num_hits, num_default = int(counts.sum()) + sum(int(p[2] @ p[3]) for p in parts), usage.missed
    if usage.lookups > usage.missed and num_hits:
        num_default = math.ceil(num_hits * usage.missed / (usage.lookups - usage.missed))
    if num_default:
        ids, counts = np.append(ids, 0), np.append(counts, num_default)
    order = hotness_order(ids, counts)
    head, below = order[:_HEAD], order[_HEAD:]
    values = np.concatenate([np.zeros(1, np.int64), counts[below], *(p[2] for p in parts)])
    rows = np.concatenate([np.zeros(1, np.int64), np.ones(below.size, np.int64),
                           *(p[3] for p in parts)])
    rows[0] = num_rows - head.size - int(rows.sum())  # without accesses
    values, at = np.unique(values, return_inverse=True)
    rows = np.bincount(at, rows, minlength=values.size).astype(np.int64)
    return with_bags_of_keys(
        TableStats(num_rows, ids[head], counts[head], values[rows > 0], rows[rows > 0]), keys,
        usage.default_share)


def _counted(tables: ShardedTables, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return rows with accesses and their counts, int64 [n] each, of this rank's share of slots."""
    assert tables.keys is not None
    num_slots, size, rank = (tables.keys.num_records(name, False), tables.group.world_size,
                             tables.group.rank)
    ids, counts = [], []
    last = num_slots * (rank + 1) // size
    for begin in range(num_slots * rank // size, last, _CHUNK):
        found = tables.keys.present_counts(name, begin, min(last, begin + _CHUNK)).numpy()
        held = np.flatnonzero(found)
        ids.append(begin + held + 1)
        counts.append(found[held])
    empty = np.zeros(0, np.int64)
    return np.concatenate([empty, *ids]), np.concatenate([empty, *counts])
