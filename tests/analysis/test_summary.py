"""Skew and drift on counts whose answers are known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from oper.analysis import describe, drift, skew
from oper.stats import AccessStats, TableStats, TimeBucket


def table(
    counts: list[int], num_rows: int = 1000, buckets: tuple[TimeBucket, ...] = ()
) -> TableStats:
    ids = np.arange(len(counts))
    return TableStats.from_counts(num_rows, ids, np.array(counts),
                                  (np.array([1]), np.array([sum(counts)])), buckets=buckets)


def bucket(label: str, **counts: int) -> TimeBucket:
    ids = [int(row.removeprefix("r")) for row in counts]
    return TimeBucket(label, np.array(ids), np.array(list(counts.values())))


def test_skew_of_known_counts() -> None:
    # 200 touched rows: 2 are the hottest 1 %, 20 the hottest 10 %.
    found = skew(table([300, 100] + [10] * 18 + [2] * 30 + [1] * 150))
    total = 300 + 100 + 180 + 60 + 150
    assert found.num_touched_rows == 200 and found.num_accesses == total
    assert found.hottest == pytest.approx(300 / total)
    assert found.top_1pct == pytest.approx(400 / total)
    assert found.top_10pct == pytest.approx(580 / total)
    assert found.unseen_mass == pytest.approx(150 / total)
    assert found.rows_for_half == 2  # 395 accesses are within the first two rows' 400
    assert found.rows_for_90pct == 121  # 711 = 640 + 71 of the rows touched once, after 50 rows
    assert math.isnan(found.drift)


def test_uniform_rows() -> None:
    found = skew(table([3] * 100, 100))
    assert (found.hottest, found.top_1pct, found.rows_for_half) == (0.01, 0.01, 50)
    assert found.unseen_mass == 0


def test_drift_is_the_mean_total_variation() -> None:
    same, moved, gone = bucket("1", r0=2, r1=2), bucket("2", r0=3, r1=1), bucket("3", r5=9)
    assert drift(table([1], buckets=(same, same))) == 0
    assert drift(table([1], buckets=(same, moved))) == pytest.approx(0.25)
    assert drift(table([1], buckets=(same, moved, gone))) == pytest.approx((0.25 + 1) / 2)


def test_describe_is_json_and_has_no_nan() -> None:
    import json

    stats = AccessStats(4, {"t": table([3, 1])}, "a test")
    text = json.dumps(describe(stats), allow_nan=False)
    assert json.loads(text)["tables"]["t"]["drift"] is None
    assert json.loads(text)["num_accesses"] == 4


def test_empty_table() -> None:
    found = skew(table([]))
    assert (found.num_accesses, found.hottest, found.rows_for_half) == (0, 0.0, 0)
