"""Summary figures of access statistics: skew, unseen mass and drift."""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from oper.errors import InvalidInputError
from oper.stats import AccessStats, TableStats, TimeBucket


@dataclass(frozen=True, slots=True)
class Skew:
    """Skew of one table. Shares are of all accesses; "touched" rows have at least one access.

    Attributes:
        num_rows: rows of the table.
        num_touched_rows: distinct rows looked up.
        num_accesses: ids looked up.
        pooling_factor: mean number of ids per bag.
        hottest: share of the hottest row.
        top_1pct: share of the hottest 1 % of the touched rows (rounded up).
        top_10pct: share of the hottest 10 % of the touched rows (rounded up).
        rows_for_half: number of hottest rows with half of the accesses.
        rows_for_90pct: number of hottest rows with 90 % of the accesses.
        unseen_mass: Good-Turing estimate of the probability that the next id is a new one.
        drift: mean total variation distance of consecutive time buckets; NaN with fewer than two.
    """

    num_rows: int
    num_touched_rows: int
    num_accesses: int
    pooling_factor: float
    hottest: float
    top_1pct: float
    top_10pct: float
    rows_for_half: int
    rows_for_90pct: int
    unseen_mass: float
    drift: float


def skew(table: TableStats) -> Skew:
    """Compute the skew of one table's accesses."""
    values, rows = table.count_histogram()
    values, rows = values[values > 0], rows[values > 0]
    mass = np.concatenate([[0.0], np.cumsum(values * rows, dtype=np.float64)])
    ends = np.concatenate([[0.0], np.cumsum(rows, dtype=np.float64)])
    touched = table.num_touched_rows
    sizes = np.array([1, math.ceil(touched * 0.01), math.ceil(touched * 0.1)])
    hottest, top_1pct, top_10pct = (float(share) for share in table.coverage(sizes))

    def rows_for(share: float) -> int:
        # Rows of equal count have equal shares, so the mass grows linearly between two counts.
        return math.ceil(float(np.interp(share * mass[-1], mass, ends)) - 1e-9)

    return Skew(
        table.num_rows, touched, table.num_accesses, table.pooling_factor,
        hottest, top_1pct, top_10pct, rows_for(0.5), rows_for(0.9), table.unseen_mass, drift(table))


def drift(table: TableStats) -> float:
    """Return the mean total variation distance of consecutive time buckets, 0 (equal) to 1.

    The distance is half the sum over rows of the absolute difference of access shares. It includes
    sampling noise: a stationary log with many rare ids has a drift above 0. If a table has sketches
    (`TableStats.sketch`), its buckets may hold only their most accessed ids. Shares are then of the
    accesses to these ids, and the drift is usually lower, since rare ids add no noise. NaN with
    fewer than two buckets.
    """
    found = bucket_distances(table)
    return float(np.mean(found)) if found else float("nan")


def bucket_distances(table: TableStats) -> list[float]:
    """Return the total variation distance, 0 to 1, of each time bucket from the previous one.

    Buckets with less than a twentieth of the mean number of lookups are left out: the training part
    often ends shortly after a bucket has begun, and the distance of a few samples is only noise.
    """
    sizes = [int(bucket.counts.sum()) for bucket in table.buckets]
    kept = [bucket for bucket, size in zip(table.buckets, sizes, strict=True)
            if 20 * len(sizes) * size >= sum(sizes)]
    return [_distance(a, b) for a, b in itertools.pairwise(kept)]


def distance(old: TableStats, new: TableStats) -> float:
    """Return the total variation distance of two statistics of a table, 0 (equal) to 1 (disjoint).

    Rows outside a head count with the mean of their tail, so the distance is exact if both heads
    contain all touched rows (`TableStats.is_exact`). See `drift` for time buckets.

    Raises:
        InvalidInputError: the tables differ in size, one has no accesses, or they are of raw keys.
    """
    if old.num_rows != new.num_rows or not old.num_accesses or not new.num_accesses:
        raise InvalidInputError("cannot compare statistics", "num_rows, num_accesses",
                                [(s.num_rows, s.num_accesses) for s in (old, new)],
                                "equal numbers of rows, and accesses in both",
                                "compare statistics of the same table; after 'oper vocabulary "
                                "extend', count earlier logs with the extended vocabulary, too")
    if old.new_ids.size or new.new_ids.size:
        raise InvalidInputError(
            "cannot compare statistics", "ids", "raw keys", "row numbers of a vocabulary",
            "compare their new_ids: statistics of keys do not contain the keys")
    ids = np.union1d(old.head_ids, new.head_ids)
    shares = []
    for stats in (old, new):
        rest = stats.num_rows - stats.head_ids.size
        tail = 1.0 - stats.head_counts.sum() / stats.num_accesses
        share = np.full(ids.size + 1, tail / rest if rest else 0.0)  # last: each row in no head
        share[np.searchsorted(ids, stats.head_ids)] = stats.head_counts / stats.num_accesses
        shares.append(share)
    common = np.minimum(*shares)
    found = 1.0 - common[:-1].sum() - common[-1] * (old.num_rows - ids.size)
    return max(0.0, float(found))  # rounding may make it slightly negative


def _distance(a: TimeBucket, b: TimeBucket) -> float:
    _, at_a, at_b = np.intersect1d(a.ids, b.ids, assume_unique=True, return_indices=True)
    share_a, share_b = a.counts / a.counts.sum(), b.counts / b.counts.sum()
    # The sum of |x - y| / 2 over all rows equals 1 minus the sum of min(x, y).
    return max(0.0, 1.0 - float(np.minimum(share_a[at_a], share_b[at_b]).sum()))


def describe(stats: AccessStats) -> dict[str, Any]:
    """Return all tables' skew in a form that JSON can represent (NaN becomes None); for raw keys
    also the number of new keys in each time bucket."""
    tables = {}
    for name, table in stats.tables.items():
        fields = asdict(skew(table))
        tables[name] = {k: None if isinstance(v, float) and math.isnan(v) else v
                        for k, v in fields.items()}
        if table.new_ids.size:
            tables[name]["new_ids"] = table.new_ids.tolist()
    return {
        "source": stats.source,
        "num_samples": stats.num_samples,
        "ids_in_hotness_order": stats.ids_in_hotness_order,
        "num_accesses": sum(t.num_accesses for t in stats.tables.values()),
        "tables": tables,
    }
