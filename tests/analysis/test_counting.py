"""Exact counts, bag lengths, buckets and merging, compared with a brute-force count."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, strategies as st

from oper.analysis import CountOptions, TableCounter
from oper.analysis.presence import Lookups
from oper.errors import InvalidInputError
from tests.support import counts_by


def random_bags(rng: np.random.Generator, rows: int, bags: int) -> Lookups:
    lengths = rng.integers(0, 5, bags)
    return Lookups(rng.integers(0, rows, int(lengths.sum())), lengths)


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint64])
def test_counts_lengths_and_buckets_are_exact(dense: bool, dtype: type) -> None:
    rng = np.random.default_rng(1)
    counter = TableCounter("t", 50, dense, presence_samples=(4,))
    ids_of: dict[str, Counter[int]] = {}
    lengths: Counter[int] = Counter()
    for label in ("mon", "mon", "tue", "wed", "mon"):
        parts = [random_bags(rng, 50, 20) for _ in range(2)]
        counter.add([Lookups(p.ids.astype(dtype), p.lengths) for p in parts], label)
        for part in parts:
            ids_of.setdefault(label, Counter()).update(part.ids.tolist())
            lengths.update(part.lengths.tolist() if part.lengths is not None else [])
    stats = counter.finish()
    assert counts_by(stats.head_ids, stats.head_counts) == dict(sum(ids_of.values(), Counter()))
    assert counts_by(stats.length_values, stats.length_counts) == {
        k: v for k, v in lengths.items() if v}
    assert [b.label for b in stats.buckets] == ["mon", "tue", "wed"]
    for bucket in stats.buckets:
        assert counts_by(bucket.ids, bucket.counts) == dict(ids_of[bucket.label])
        assert (np.diff(bucket.ids) > 0).all()
    assert stats.num_bags == 5 * 2 * 20


def test_dense_and_sparse_agree_and_spilling_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from oper.analysis import counting

    monkeypatch.setattr(counting, "_UINT32_MAX", 150)
    rng = np.random.default_rng(2)
    both = [TableCounter("t", 30, dense) for dense in (True, False)]
    total: Counter[int] = Counter()
    for _ in range(20):
        ids = rng.integers(0, 30, 100)
        total.update(ids.tolist())
        for counter in both:
            counter.add([Lookups(ids)])
    for stats in (c.finish() for c in both):
        assert counts_by(stats.head_ids, stats.head_counts) == dict(total)


@given(st.lists(st.lists(st.integers(0, 9), max_size=30), min_size=2, max_size=6))
def test_parts_merge_to_the_whole(batches: list[list[int]]) -> None:
    whole = TableCounter("t", 10, presence_samples=(2,))
    parts = []
    for k, batch in enumerate(batches):
        lookups = [Lookups(np.array(batch, np.int64))]
        part = TableCounter("t", 10, dense=k % 2 == 0, presence_samples=(2,))
        for counter in (whole, part):
            counter.add(lookups, f"day {k % 2}")
        parts.append(part.finish())
    merged = parts[0]
    for part_stats in parts[1:]:
        merged = merged.merge(part_stats)
    expected = whole.finish()
    assert counts_by(merged.head_ids, merged.head_counts) == counts_by(
        expected.head_ids, expected.head_counts)
    assert merged.length_counts.tolist() == expected.length_counts.tolist()
    # A bucket exists from its first id; buckets are in the order of the log.
    assert [b.label for b in merged.buckets] == [b.label for b in expected.buckets]
    for a, b in zip(merged.buckets, expected.buckets, strict=True):
        assert a.ids.tolist() == b.ids.tolist() and a.counts.tolist() == b.counts.tolist()


@pytest.mark.parametrize(("ids", "lengths", "words"), [
    ([0, 10], None, ["'clicks'", "10", "num_rows=10"]),
    ([0, -1], None, ["'clicks'", "-1", "num_rows=10"]),
    ([0, 1], [1, 2], ["sum(lengths)", "3", "len(ids)=2"]),
    ([0, 1], [3, -1], ["min(lengths)", "-1", ">= 0"]),
    ([0.5, 1.0], None, ["float64", "integer"]),
])
def test_bad_lookups_are_one_clear_error(
    ids: list[float], lengths: list[int] | None, words: list[str]
) -> None:
    counter = TableCounter("clicks", 10)
    lookups = Lookups(np.array(ids), None if lengths is None else np.array(lengths))
    with pytest.raises(InvalidInputError) as error:
        counter.add([lookups])
    assert all(word in str(error.value) for word in words), str(error.value)
    assert counter.finish().num_accesses == 0


def test_features_of_a_table_must_have_the_same_samples() -> None:
    counter = TableCounter("t", 10)
    with pytest.raises(InvalidInputError, match="same samples"):
        counter.add([Lookups(np.array([1, 2])), Lookups(np.array([1]))])


def test_dense_budget_goes_to_the_smallest_tables_first() -> None:
    options = CountOptions(dense_budget_bytes=4 * 1100)
    assert options.dense_tables([1000, 10, 90, 50_000]) == [True, True, True, False]
    assert options.dense_tables([1001, 10, 90]) == [False, True, True]
