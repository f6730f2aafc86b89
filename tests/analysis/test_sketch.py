"""Sketches compared with exact counts and with Apache DataSketches."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from oper import analysis
from oper.analysis.counting import AdaptiveCounter
from oper.analysis.presence import Lookups
from oper.analysis.sketch import CountTable, sampled, sketched_stats
from oper.errors import InvalidInputError
from oper.stats import AccessStats, TableStats
from tests.support import counts_by


def zipf(num_rows: int, size: int, exponent: float) -> np.ndarray:
    """Draw ids from a bounded power law and scatter the hot rows."""
    rng = np.random.default_rng(0)
    p = np.arange(1, num_rows + 1) ** -exponent
    ranks = np.searchsorted(np.cumsum(p / p.sum()), rng.random(size))
    return np.random.default_rng(9).permutation(num_rows)[np.minimum(ranks, num_rows - 1)]


@given(st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=60), min_size=1, max_size=12),
       st.integers(1, 12), st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_counts_are_within_the_stated_error(batches: list[list[int]], entries: int, parts: int
                                            ) -> None:
    summaries = [analysis.HeavyHitters(entries) for _ in range(parts)]
    true: Counter[int] = Counter()
    for k, batch in enumerate(batches):
        true.update(batch)
        summaries[k % parts].add(*np.unique(np.array(batch, np.int64), return_counts=True))
    for other in summaries[1:]:
        summaries[0].merge(other)
    ids, counts = summaries[0].result()
    error = summaries[0].error
    found = counts_by(ids, counts)
    assert len(found) <= entries and (np.diff(ids) > 0).all()
    assert all(count - error <= found.get(i, 0) <= count for i, count in true.items())
    assert error <= true.total() / entries


@pytest.mark.parametrize("kind", [np.int8, np.uint16, np.int32, np.uint64])
def test_summaries_count_ids_of_any_integer_type(kind: type) -> None:
    ids = np.array([3, 0, 3, 7, 100, 3], kind)[::-1]
    for summary in (analysis.HeavyHitters(), analysis.DistinctSample()):
        summary.add(ids)
        summary.add(ids[:2], np.array([5, 6], kind))
        assert counts_by(*summary.result()) == {0: 1, 3: 8, 7: 1, 100: 7}


@pytest.mark.parametrize("exponent", [0.6, 1.05, 1.3])
def test_statistics_from_sketches_are_close_to_exact_ones(exponent: float,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    num_rows, ids = 400_000, zipf(400_000, 1_500_000, exponent)
    monkeypatch.setattr("oper.analysis.sketch.HEAVY_ENTRIES", 20_000)
    exact, sketched = (analysis.TableCounter("t", num_rows, dense, sparse_budget_bytes=1 << 18)
                       for dense in (True, False))
    for counter in (exact, sketched):
        if isinstance(counter._counter, AdaptiveCounter):
            counter._counter.heavy = analysis.HeavyHitters(20_000)
            counter._counter.sample = analysis.DistinctSample(20_000)
        for part in np.array_split(ids, 50):
            counter.add([Lookups(part)])
    a, b = exact.finish(), sketched.finish()
    assert a.is_exact and not b.is_exact
    assert b.num_accesses == a.num_accesses == ids.size
    assert b.num_touched_rows == pytest.approx(a.num_touched_rows, rel=0.05)
    assert b.unseen_mass == pytest.approx(a.unseen_mass, rel=0.1, abs=0.002)
    sizes = np.array([10, 100, 1000, 10_000, 100_000])
    np.testing.assert_allclose(b.coverage(sizes), a.coverage(sizes), atol=0.02)
    true = counts_by(a.head_ids, a.head_counts)
    for i, count in zip(b.head_ids.tolist(), b.head_counts.tolist(), strict=True):
        assert abs(count - true[i]) <= 0.1 * true[i] + 1


def test_a_summary_lists_its_ids_once_and_counts_on_after_a_result() -> None:
    ids = np.repeat(np.arange(5000), np.arange(5000) // 100 + 1)
    summary, whole = analysis.HeavyHitters(1000), analysis.HeavyHitters(1000)
    summary.add(ids)
    first, error = summary.result(), summary.error
    assert summary.result() is first and error > 0
    assert summary.counted.num_ids == 0  # the table's memory is released
    summary.add(first[0])
    again = summary.result()
    np.testing.assert_array_equal(again[0], first[0])
    np.testing.assert_array_equal(again[1], first[1] + 1)
    assert summary.error == error
    whole.merge(summary)
    np.testing.assert_array_equal(whole.result(), again)
    assert whole.error == error


@given(parts=st.lists(st.lists(st.integers(0, 300) | st.integers(0, 2**63 - 1), max_size=300),
                      max_size=6), repeat=st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_a_table_counts_everything_that_it_takes(parts: list[list[int]], repeat: int) -> None:
    table, found = CountTable(1 << 20), Counter()
    for part in parts:
        ids = np.unique(np.array(part, np.int64))
        assert table.add(ids, np.full(ids.size, repeat)) == ids.size
        assert table.add(np.repeat(ids, 2)) == 2 * ids.size
        found.update(dict.fromkeys(ids.tolist(), repeat + 2))
    ids, counts = table.result()
    assert ids.tolist() == sorted(found)
    assert counts.tolist() == [found[i] for i in ids.tolist()]
    some = table.sample(1)
    assert some[0].tolist() == ids[sampled(ids, 1)].tolist()
    keep = len(found) // 3 + 1
    table.purge(keep)
    left = counts_by(*table.result())
    assert len(left) == table.num_ids <= keep
    assert table.error <= sum(found.values()) / keep
    assert all(n - table.error <= left.get(i, 0) <= n for i, n in found.items())
    table.add(np.array(sorted(left), np.int64))  # ids that are left are still found
    assert counts_by(*table.result()) == {i: n + 1 for i, n in left.items()}


def test_a_table_counts_beyond_32_bits() -> None:
    table = CountTable(1 << 20)
    ids, many = np.array([3, 2**32 - 1]), np.array([2**32 - 5, 7])
    for k in range(3):  # counts become 64-bit before one could overflow
        assert table.add(ids, many) == 2
        assert table.result()[1].tolist() == ((k + 1) * many).tolist()
    full = CountTable(1 << 16)
    assert full.add(np.arange(10_000)) == 6144  # three quarters of 8192 entries
    assert full.add(np.array([1 << 40])) == 0
    full.purge(3072)
    assert full.add(np.array([1 << 40])) == 0 or full.num_ids <= 3072
    full.purge(100)
    assert full.add(np.array([1 << 40])) == 1 and (1 << 40) in full.result()[0]
    table.purge(1)
    assert (table.result()[0].tolist(), table.error) == ([3], 21)


@pytest.mark.parametrize("max_bytes", [0, 1 << 16, 1 << 18])
def test_a_table_stays_within_its_memory_and_reports_what_did_not_fit(max_bytes: int) -> None:
    table, ids = CountTable(max_bytes), np.arange(100_000) * 12_345_677
    taken = table.add(ids)
    assert 0.74 * max_bytes - 1024 <= taken * 16 <= max_bytes
    assert table.result()[0].tolist() == ids[:taken].tolist()


@pytest.mark.parametrize("budget", [1 << 30, 1 << 16])
def test_a_counter_beyond_its_budget_keeps_its_bounds_when_the_hot_ids_change(
    budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter, true = AdaptiveCounter(budget), Counter()
    counter.heavy, counter.sample = analysis.HeavyHitters(2000), analysis.DistinctSample(2000)
    for day in range(4):
        ids = (zipf(30_000, 40_000, 1.1) + 7919 * day) % 30_000  # different rows are hot each day
        for part in np.array_split(ids.astype(np.int32), 13):
            counter.add(part)
        true.update(ids.tolist())
    found = counts_by(*counter.result())
    assert counter.is_exact == (budget == 1 << 30)
    error = 0 if counter.is_exact else counter.heavy.error
    assert error <= 160_000 / 2000
    assert all(n - error <= found.get(i, 0) <= n for i, n in true.items())
    assert counts_by(*counter.sample.result()).items() <= true.items()


def test_exact_and_sketched_counters_merge() -> None:
    rng = np.random.default_rng(0)
    for budgets in ((1 << 30, 1 << 30), (1 << 30, 0), (0, 0)):
        counters = [AdaptiveCounter(b) for b in budgets]
        parts = [rng.zipf(1.5, 5000) % 2000 for _ in budgets]
        for counter, part in zip(counters, parts, strict=True):
            counter.add(part)
            counter.result()
            counter.add(part)
        counters[0].merge(counters[1])
        ids, counts = counters[0].result()
        # The sketches have room for all ids, so nothing is lost.
        expected = Counter(np.concatenate(parts + parts).tolist())
        assert counts_by(ids, counts) == expected
        assert counters[0].num_accesses == 20_000


def test_buckets_of_a_sketched_table_hold_its_hottest_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(analysis.counting, "_BUCKET_ENTRIES", 8)
    counter = analysis.TableCounter("t", 1000, dense=False, sparse_budget_bytes=0)
    for day in ("mon", "tue"):
        ids = np.concatenate([np.full(50, 7), np.arange(100)])
        counter.add([Lookups(ids)], day)
    stats = counter.finish()
    assert [b.label for b in stats.buckets] == ["mon", "tue"]
    assert all(b.ids.size == 8 and 51 in b.counts.tolist() for b in stats.buckets)
    assert stats.num_accesses == 300


# All numbers of ids are equally likely, so that most are more than the sketches keep.
@given(st.integers(1, 200), st.integers(0, 300).flatmap(
           lambda n: st.lists(st.integers(0, 199), min_size=n, max_size=n)),
       st.integers(1, 40), st.integers(1, 40))
@settings(max_examples=100, deadline=None)
def test_rows_and_accesses_always_add_up(num_rows: int, ids: list[int], entries: int, sample: int
                                         ) -> None:
    heavy, distinct = analysis.HeavyHitters(entries), analysis.DistinctSample(sample)
    array = np.array([i % num_rows for i in ids], np.int64)
    for part in np.array_split(array, 5):
        heavy.add(*np.unique(part, return_counts=True))
        distinct.add(*np.unique(part, return_counts=True))
    empty = np.zeros(0, np.int64)
    stats = sketched_stats(num_rows, heavy, distinct, array.size, (empty, empty),
                           (empty, np.zeros(0), empty))
    assert isinstance(stats, TableStats)  # its own checks: rows add up, order, distinct ids
    assert stats.num_accesses == array.size


def test_files_of_sketched_parts_merge(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rng = np.random.default_rng(8)
    monkeypatch.setattr(analysis.HeavyHitters.__init__, "__defaults__", (2000,))
    days = [np.minimum(rng.zipf(1.3, 60_000), 10**6) - 1 for _ in range(5)]
    paths = []
    for k, ids in enumerate(days):
        # The last day is counted exactly, the others are not; "small" is exact throughout.
        budget = 10**9 if k == 4 else 20_000
        counter = analysis.TableCounter("t", 10**6, False, sparse_budget_bytes=budget)
        small = analysis.TableCounter("small", 50)
        counter.add([Lookups(ids)], f"day {k}")
        small.add([Lookups(ids % 50)], f"day {k}")
        paths.append(tmp_path / f"{k}.npz")
        AccessStats(60_000, {"t": counter.finish(), "small": small.finish()}, "log").save(paths[-1])
    stats = [AccessStats.load(p) for p in paths]
    assert [s.tables["t"].is_exact for s in stats] == [False] * 4 + [True]
    whole = analysis.merge_stats(iter(stats))
    found, every = whole.tables["t"], np.concatenate(days)
    assert whole.num_samples == found.num_accesses == every.size == 300_000
    assert [b.label for b in found.buckets] == [f"day {k}" for k in range(5)]
    assert whole.tables["small"].is_exact and not found.is_exact
    assert whole.tables["small"].head_counts.sum() == every.size
    assert found.sketch is not None and 0 < found.sketch.heavy_error <= every.size / 2000
    exact = np.bincount(every, minlength=10**6)
    kept = found.sketch
    assert (kept.heavy_counts <= exact[kept.heavy_ids]).all()
    assert (exact[kept.heavy_ids] <= kept.heavy_counts + kept.heavy_error).all()
    assert exact[np.setdiff1d(np.arange(10**6), kept.heavy_ids)].max() <= kept.heavy_error
    assert (kept.sample_counts == exact[kept.sample_ids]).all()
    assert np.abs(found.head_counts - exact[found.head_ids]).max() <= kept.heavy_error
    assert abs(found.num_touched_rows / np.count_nonzero(exact) - 1) < 0.1
    # Merged statistics can be merged again, saved and loaded.
    whole.save(tmp_path / "all.npz")
    again = analysis.merge_stats([AccessStats.load(tmp_path / "all.npz"), stats[0]])
    assert again.tables["t"].num_accesses == 360_000


def test_statistics_that_cannot_be_merged() -> None:
    modelled = TableStats(10, tail_values=np.array([1, 2]), tail_num_rows=np.array([5, 5]))
    part = AccessStats(15, {"t": modelled})
    with pytest.raises(InvalidInputError, match="modelled"):
        analysis.merge_stats([part, part])
    with pytest.raises(InvalidInputError, match="at least one"):
        analysis.merge_stats([])
    with pytest.raises(InvalidInputError, match="same tables"):
        analysis.merge_stats([part, AccessStats(1, {"u": modelled})])
    assert analysis.merge_stats([part]) is part
