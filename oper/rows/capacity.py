"""Forecast of a dynamic table's behaviour on a log of keys, and statistics of its rows.

This is a model, not a replay: lookups are independent draws from the counted frequencies. Keys are
hashed into buckets, and a bucket can be full before the table is; the expected number of rows in
use follows from a Poisson distribution of the keys per bucket. Eviction ``"lru"`` is approximated
as by Che, Tung and Wang ("Hierarchical Web caching systems", 2002): a key has a row if it was seen
within the last T lookups, with T such that the number of these keys equals the rows in use;
``"lfu"`` keeps the keys that are seen most often. With ``"distance_lfu"`` a key of count n has a
row if it was seen within the last n T lookups, since its score is then at least 1 / T.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from oper.errors import require
from oper.stats import AccessStats, TableStats
from oper.support.numeric import falling_root
from oper.tables import KEY_BUCKET_ROWS, KEY_EVICTIONS

_WHAT = "cannot forecast a dynamic table"


@dataclass(frozen=True, slots=True)
class KeyForecast:
    """Expected behaviour of a dynamic table that is empty at the start of a log.

    Attributes:
        rows: rows available to keys, that is, without the default row.
        keys: distinct keys of the log.
        occupied: rows that keys have at the end of the log.
        default_share: share of the lookups that read the default row.
        inserts_per_lookup: number of times that a key gets a row, per lookup.
        evictions_per_lookup: number of times that a key loses its row to another key, per lookup.
        unseen_mass: Good-Turing estimate of the share of the next lookups that bring new keys.
    """

    rows: int
    keys: int
    occupied: float
    default_share: float
    inserts_per_lookup: float
    evictions_per_lookup: float
    unseen_mass: float


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """Keys grouped by access count, hottest first; each array is float64 [K].

    Attributes:
        keys: number of distinct keys.
        held: number of keys that have a row at the end.
        hits, misses: number of lookups that read a key's own row, and the default row.
        inserts: number of times that a key gets a row.
    """

    keys: np.ndarray
    held: np.ndarray
    hits: np.ndarray
    misses: np.ndarray
    inserts: np.ndarray


def forecast(table: TableStats, num_rows: int, admit_after: int = 1, eviction: str = "lru"
             ) -> KeyForecast:
    """Predict how a dynamic table would behave on a log like the counted one.

    Args:
        table: statistics of the keys, see `KeyCounter`.
        num_rows: rows of the dynamic table, including the default row; at least 2.
        admit_after, eviction: see `oper.DynamicTable`.

    Raises:
        InvalidInputError: an argument is out of range.
    """
    of = _held(table, num_rows, admit_after, eviction)
    lookups, occupied = max(1, table.num_accesses), float(of.held.sum())
    inserts = float(of.inserts.sum())
    return KeyForecast(
        num_rows - 1, int(of.keys.sum()), occupied, float(of.misses.sum()) / lookups,
        inserts / lookups, max(0.0, inserts - occupied) / lookups, table.unseen_mass)


def rows_of_keys(table: TableStats, num_rows: int, admit_after: int = 1, eviction: str = "lru"
                 ) -> TableStats:
    """Predict the statistics of a dynamic table's rows, from which the table can be planned.

    The row that a key will get is unknown, so the head contains only the default row, and the tail
    has the number of rows by access count. The lookups of keys that successively have the same row
    are summed. Arguments and errors are those of `forecast`.
    """
    of = _held(table, num_rows, admit_after, eviction)
    num_missed = round(float(of.misses.sum()))
    # Whole rows, hottest first; classes of less than one row are merged with colder ones.
    ends = np.rint(np.cumsum(of.held)).astype(np.int64)
    is_row = np.diff(ends, prepend=0) > 0
    rows = np.diff(ends[is_row], prepend=0)
    each = np.rint(np.diff(np.cumsum(of.hits)[is_row], prepend=0.0) / rows).astype(np.int64)
    head = np.array([num_missed] if num_missed else [], np.int64)
    rows = np.append(rows, num_rows - head.size - int(rows.sum()))
    values, at = np.unique(np.append(each, 0), return_inverse=True)
    rows = np.bincount(at, rows, minlength=values.size).astype(np.int64)
    values, rows = values[rows > 0], rows[rows > 0]
    share = float(of.misses.sum()) / max(1, table.num_accesses)
    ids = table.presence_samples * table.pooling_factor
    return TableStats(
        num_rows, np.zeros(head.size, np.int64), head, values, rows, table.length_values,
        table.length_counts, table.presence_samples,
        # A lookup that misses counts as a distinct key, but all misses read the default row.
        np.maximum(1.0, table.presence_rows - share * ids + head.size), table.presence_windows)


def stats_of_rows(stats: AccessStats, tables: Mapping[str, tuple[int, int, str]]) -> AccessStats:
    """Convert the statistics of dynamic tables from keys to rows.

    If row numbers stand for hotness in `stats`, or a table has no accesses, all rows of the dynamic
    table are assumed to be equally hot.

    Args:
        stats: statistics of keys.
        tables: arguments of `rows_of_keys` by table, for the dynamic ones.

    Raises:
        InvalidInputError: an argument is out of range.
    """
    found = {}
    for name, (num_rows, admit_after, eviction) in tables.items():
        keys = stats.tables.get(name)
        if keys is None:
            continue
        if stats.ids_in_hotness_order or not keys.num_accesses:
            found[name] = TableStats(num_rows, tail_values=np.zeros(1, np.int64),
                                     tail_num_rows=np.array([num_rows]))
        else:
            found[name] = rows_of_keys(keys, num_rows, admit_after, eviction)
    return replace(stats, tables=stats.tables | found)


def _held(table: TableStats, num_rows: int, admit_after: int, eviction: str) -> _Held:
    require(_WHAT, "pass num_rows and admit_after in range, and an eviction of oper.DynamicTable",
            ("num_rows", num_rows, num_rows >= 2, ">= 2, for the default row and a key"),
            ("admit_after", admit_after, admit_after >= 1, ">= 1"),
            ("eviction", eviction, eviction in KEY_EVICTIONS, f"one of {KEY_EVICTIONS}"))
    counts, keys = table.count_histogram()
    counts, keys = counts[counts > 0].astype(float), keys[counts > 0].astype(float)
    waits = np.minimum(counts, admit_after)  # lookups of a key until it has a row
    admitted = np.where(counts >= admit_after, keys, 0.0)
    in_use = _rows_in_use(float(admitted.sum()), num_rows - 1)
    if eviction == "lfu":
        before = np.cumsum(admitted) - admitted
        held = np.clip(in_use - before, 0.0, admitted)
        stays = np.divide(held, admitted, out=np.zeros_like(held), where=admitted > 0)
    else:
        share = counts / max(1.0, float(counts @ keys))
        stays = _seen_lately(share * counts if eviction == "distance_lfu" else share, admitted,
                             in_use)
        held = admitted * stays
    hits = admitted * (counts - waits) * stays
    # A key that misses gets a row, even if it loses it at the next new key.
    inserts = admitted * (1.0 + (counts - waits) * (1.0 - stays))
    return _Held(keys, held, hits, counts * keys - hits, inserts)


def _rows_in_use(num_keys: float, num_rows: int) -> float:
    """Return the expected number of rows in use after hashing `num_keys` keys into the buckets of a
    table with `num_rows` rows."""
    num_buckets = -(-num_rows // KEY_BUCKET_ROWS)
    mean = num_keys / num_buckets
    if mean == 0:
        return 0.0
    size, larger = divmod(num_rows, num_buckets)
    places = np.arange(size + 1)
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, size + 1)))])
    below = np.cumsum(np.exp(places * np.log(mean) - mean - log_factorial))
    more = np.maximum(0.0, 1.0 - below)  # probability of more than 0, 1, ... keys in a bucket
    return float(num_buckets * more[:size].sum() + larger * more[size])


def _seen_lately(rates: np.ndarray, keys: np.ndarray, in_use: float) -> np.ndarray:
    """Return the probability [K] that a key is seen within T, where `rates` are expected numbers of
    occurrences per unit of T; the module's docstring defines T."""
    def seen(log_t: float) -> np.ndarray:
        found: np.ndarray = -np.expm1(-rates * np.exp(log_t))
        return found

    return seen(falling_root(lambda log_t: in_use - float(keys @ seen(log_t)), -60.0, 120.0, 100))
