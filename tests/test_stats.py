"""Access statistics: merging, derived numbers, the file; counts of values."""

from collections import Counter
from dataclasses import fields
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, strategies as st

from oper.analysis import merge_stats
from oper.analysis.sketch import sampled
from oper.data.preprocessing.staging import encode
from oper.data.vocabulary.building import assign_ids, lookup
from oper.errors import FileFormatError, InvalidInputError
from oper.stats import (
    STATS_KIND,
    STATS_VERSION,
    AccessStats,
    TableStats,
    TimeBucket,
    table_stats_for,
)
from oper.support.counts import merge_counts
from oper.support.files import read_arrays, write_arrays
from oper.support.numeric import mix64
from tests.support import access_stats, counts_by, table_stats

INT = np.int64


def assert_equal(a: TableStats, b: TableStats, any_bucket_order: bool = False) -> None:
    for f in fields(TableStats):
        x, y = getattr(a, f.name), getattr(b, f.name)
        if f.name == "presence_rows":
            np.testing.assert_allclose(x, y, rtol=1e-12)
        elif f.name == "buckets":
            p = [(k.label, k.ids.tolist(), k.counts.tolist()) for k in x]
            q = [(k.label, k.ids.tolist(), k.counts.tolist()) for k in y]
            assert (sorted(p) == sorted(q)) if any_bucket_order else (p == q)
        elif isinstance(x, np.ndarray):
            assert x.dtype == y.dtype
            assert x.tolist() == y.tolist()
        else:
            assert x == y


def dense_counts(stats: TableStats) -> np.ndarray:
    counts = np.zeros(stats.num_rows, INT)
    counts[stats.head_ids] = stats.head_counts
    return counts


@given(table_stats(), table_stats())
def test_merge_adds_counts_and_is_commutative(a: TableStats, b: TableStats) -> None:
    both = a.merge(b)
    total = dense_counts(a) + dense_counts(b)
    np.testing.assert_array_equal(dense_counts(both), total)
    order = [r for r in np.lexsort((np.arange(total.size), -total)) if total[r]]
    assert both.head_ids.tolist() == order
    lengths: Counter[int] = Counter()
    for part in (a, b):
        lengths.update(counts_by(part.length_values, part.length_counts))
    assert counts_by(both.length_values, both.length_counts) == lengths
    assert_equal(both, b.merge(a), any_bucket_order=True)


@given(table_stats(), table_stats(), table_stats())
def test_merge_is_associative(a: TableStats, b: TableStats, c: TableStats) -> None:
    assert_equal(a.merge(b).merge(c), a.merge(b.merge(c)))


@given(table_stats())
def test_merge_with_nothing_changes_nothing(a: TableStats) -> None:
    nothing = TableStats.from_counts(a.num_rows, np.zeros(0, INT), np.zeros(0, INT),
                                     (np.zeros(0, INT), np.zeros(0, INT)))
    assert_equal(a.merge(nothing), a)


def test_presence_merges_as_a_weighted_mean() -> None:
    def part(samples: list[int], rows: list[float], windows: list[int]) -> TableStats:
        empty = np.zeros(0, INT)
        return TableStats.from_counts(9, empty, empty, (empty, empty), (
            np.array(samples, INT), np.array(rows), np.array(windows, INT)))

    both = part([8, 64], [2.0, 5.0], [3, 1]).merge(part([8, 16], [6.0, 4.0], [1, 2]))
    assert both.presence_samples.tolist() == [8, 16, 64]
    assert both.presence_rows.tolist() == [3.0, 4.0, 5.0]
    assert both.presence_windows.tolist() == [4, 2, 1]


@given(st.lists(access_stats(), min_size=1, max_size=5))
def test_all_parts_merge_as_one_by_one(parts: list[AccessStats]) -> None:
    tree, chain = merge_stats(parts), reduce(lambda a, b: a + b, parts)
    assert tree.num_samples == chain.num_samples == sum(p.num_samples for p in parts)
    assert tree.ids_in_hotness_order == all(p.ids_in_hotness_order for p in parts)
    for name in ("a", "b"):
        assert_equal(tree.tables[name], chain.tables[name])


@given(table_stats())
def test_derived_numbers(stats: TableStats) -> None:
    counts = np.sort(dense_counts(stats))[::-1]
    total = int(counts.sum())
    assert stats.num_accesses == total
    assert stats.num_touched_rows == (counts > 0).sum()
    assert stats.is_exact
    assert stats.unseen_mass == (counts == 1).sum() / max(1, total)
    values, rows = stats.count_histogram()
    assert np.repeat(values, rows).tolist() == counts.tolist()
    assert (np.diff(values) < 0).all()
    hot = np.arange(stats.num_rows + 1)
    expected = np.concatenate([[0], np.cumsum(counts)]) / max(1, total)
    np.testing.assert_allclose(stats.coverage(hot), expected, rtol=1e-12)


def test_numbers_with_a_tail() -> None:
    """Two rows are in the head, three more are seen once, and four never."""
    stats = TableStats(9, np.array([5, 2]), np.array([10, 7]), np.array([0, 1]), np.array([4, 3]),
                       np.array([0, 2]), np.array([2, 10]))
    assert stats.num_accesses == 20
    assert stats.num_bags == 12
    assert stats.pooling_factor == 20 / 12
    assert stats.num_touched_rows == 5
    assert not stats.is_exact
    assert stats.unseen_mass == 3 / 20
    assert stats.coverage(np.array([0, 1, 2, 3, 9])).tolist() == [0, 0.5, 0.85, 0.9, 1.0]
    with pytest.raises(InvalidInputError, match="merge_stats"):
        stats.merge(stats)


def test_merge_refuses_other_tables() -> None:
    a = TableStats(3, tail_values=np.array([0]), tail_num_rows=np.array([3]))
    b = TableStats(4, tail_values=np.array([0]), tail_num_rows=np.array([4]))
    with pytest.raises(InvalidInputError, match=r"num_rows=\(3, 4\)"):
        a.merge(b)
    with pytest.raises(InvalidInputError, match=r"first part.: \['u'\].*second part.: \['v'\]"):
        AccessStats(0, {"t": a, "u": a}).merge(AccessStats(0, {"t": a, "v": a}))


VALID: dict[str, Any] = {
    "num_rows": 5, "head_ids": [3, 0, 4], "head_counts": [9, 2, 2], "tail_values": [0],
    "tail_num_rows": [2], "length_values": [0, 1], "length_counts": [2, 13],
    "presence_samples": [4], "presence_rows": [1.5], "presence_windows": [3]}


@pytest.mark.parametrize(("change", "words"), [
    ({"num_rows": 0}, "num_rows=0"),
    ({"num_rows": "5"}, "num_rows='5', expected an integer"),
    ({"default_share": "x"}, "default_share="),
    ({"num_rows": 6}, "rows in head and tail=5, expected num_rows=6"),
    ({"head_ids": [3, 0, 5]}, "largest id=5"),
    ({"head_ids": [3, 0, -1]}, "head_ids="),
    ({"head_ids": [3, 0, 3]}, "distinct ids"),
    ({"head_ids": [3, 4, 0]}, "ties by ascending id"),
    ({"head_ids": [3, 0]}, "equal shapes"),
    ({"head_ids": [[3, 0, 4]]}, "a flat array"),
    ({"head_ids": [3.5, 0.0, 4.0]}, "a flat array of integers"),
    ({"head_counts": [2, 9, 2]}, "descending"),
    ({"head_counts": [9, 2, 0]}, "counts >= 1"),
    ({"tail_values": [1, 0], "tail_num_rows": [1, 1]}, "tail_values"),
    ({"length_values": [1, 1]}, "ascending"),
    ({"presence_rows": [float("nan")]}, "presence_rows"),
    ({"presence_windows": []}, "equal shapes"),
])
def test_contradictions_are_refused(change: dict[str, Any], words: str) -> None:
    TableStats(**{k: np.asarray(v) if k != "num_rows" else v for k, v in VALID.items()})
    with pytest.raises(InvalidInputError, match=words):
        TableStats(**{k: np.asarray(v) if k != "num_rows" else v
                      for k, v in {**VALID, **change}.items()})


@pytest.mark.parametrize(("ids", "counts", "words"), [
    ([1, 0], [1, 1], "ascending"), ([0, 1], [1, 0], ">= 1"), ([0], [1, 1], "equal shapes"),
    ([0, 9], [1, 1], "largest id=9")])
def test_bad_time_buckets_are_refused(ids: list[int], counts: list[int], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        TableStats(5, tail_values=np.array([0]), tail_num_rows=np.array([5]),
                   buckets=(TimeBucket("day", np.array(ids), np.array(counts)),))


@given(stats=access_stats())
def test_save_and_load(tmp_path_factory: pytest.TempPathFactory, stats: AccessStats) -> None:
    path = tmp_path_factory.mktemp("stats") / "x.npz"
    stats.save(path)
    loaded = AccessStats.load(path)
    for name in ("num_samples", "source", "ids_in_hotness_order"):
        assert getattr(loaded, name) == getattr(stats, name)
    assert list(loaded.tables) == list(stats.tables)
    for name, table in stats.tables.items():
        assert_equal(loaded.tables[name], table)


def saved(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    table = TableStats.from_counts(5, np.array([3, 0]), np.array([9, 2]),
                                   (np.array([1]), np.array([11])))
    AccessStats(11, {"t": table}, "log").save(path)
    return read_arrays(path, STATS_KIND, STATS_VERSION)


def test_numbers_are_stored_in_the_narrowest_type(tmp_path: Path) -> None:
    arrays, _ = saved(tmp_path / "x")
    assert arrays["0.head_ids"].dtype == np.uint8


@pytest.mark.parametrize("lacking", ["tables", "num_samples", "source", "ids_in_hotness_order",
                                     "0.head_counts"])
def test_a_file_without_a_field_or_an_array_is_refused(tmp_path: Path, lacking: str) -> None:
    arrays, meta = saved(tmp_path / "x")
    del (arrays if lacking in arrays else meta)[lacking]
    write_arrays(tmp_path / "x", STATS_KIND, STATS_VERSION, arrays, meta)
    with pytest.raises(FileFormatError, match=f"missing=\"'{lacking}'\""):
        AccessStats.load(tmp_path / "x")


def test_a_file_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    arrays, meta = saved(tmp_path / "x")
    arrays["0.head_ids"] = np.array([3, 7], np.uint8)
    write_arrays(tmp_path / "x", STATS_KIND, STATS_VERSION, arrays, meta)
    with pytest.raises(InvalidInputError, match="largest id=7"):
        AccessStats.load(tmp_path / "x")


def test_statistics_of_another_table_are_refused(tmp_path: Path) -> None:
    saved(tmp_path / "x")
    stats = AccessStats.load(tmp_path / "x")
    assert table_stats_for(stats, "t", 5) is stats.tables["t"]
    with pytest.raises(InvalidInputError, match="no statistics for a table: table='u'"):
        table_stats_for(stats, "u", 5)
    with pytest.raises(InvalidInputError, match="num_rows=5, expected 6"):
        table_stats_for(stats, "t", 6)


# ---- counting ------------------------------------------------------------------------------------

DTYPES = (np.uint32, np.int64, np.uint64)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def numbers(dtype: Any) -> st.SearchStrategy[list[int]]:
    bounds = np.iinfo(dtype)
    near = st.integers(max(bounds.min, -300), 300)
    return st.lists(st.one_of(near, st.integers(int(bounds.min), int(bounds.max))), max_size=400)


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
def test_codes_count_and_order_distinct_values(dtype: Any, data: st.DataObject) -> None:
    values = [None, *data.draw(numbers(dtype))]
    given = [values[k] for k in data.draw(st.lists(st.integers(0, len(values) - 1), max_size=400))]
    offset = data.draw(st.integers(0, len(given)))
    ids, given = pa.array(given, pa.from_numpy_dtype(dtype))[offset:], given[offset:]
    codes, found = encode(ids)
    want = Counter(v for v in given if v is not None)
    assert found.values.dtype == dtype and found.values.tolist() == sorted(want)
    assert found.counts.tolist() == [want[v] for v in sorted(want)]
    assert found.num_missing == given.count(None)
    back = [None, *found.values.tolist()]
    assert [back[c] for c in codes] == given
    assert codes.dtype == np.min_scalar_type(max(1, len(want)))


@pytest.mark.parametrize("num", [255, 256, 65_535, 65_536])
def test_codes_of_many_values(num: int) -> None:
    rng = np.random.default_rng(num)
    values = rng.permutation(np.repeat(rng.choice(2**32, num, replace=False), 2)).astype(np.uint32)
    codes, found = encode(pa.array(values))
    assert (found.values[codes.astype(np.int64) - 1] == values).all()
    assert (found.values[1:] > found.values[:-1]).all()
    assert found.counts.tolist() == [2] * num and found.num_missing == 0
    assert codes.dtype == np.min_scalar_type(num)


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
def test_merging_adds_counts_up(dtype: Any, data: st.DataObject) -> None:
    lists = data.draw(st.lists(numbers(dtype), min_size=1, max_size=6))
    parts = [np.unique(np.array(x, dtype), return_counts=True) for x in lists]
    want = Counter(v for x in lists for v in x)
    values, counts = merge_counts(parts)
    assert (values.dtype, counts.dtype) == (np.dtype(dtype), np.dtype(np.int64))
    assert dict(zip(values.tolist(), counts.tolist(), strict=True)) == want
    assert (values[1:] > values[:-1]).all()


def test_merging_counts_of_text_and_of_nothing() -> None:
    text = [(np.array([b"a", b"c"]), np.array([1, 2])), (np.array([b"b", b"c"]), np.array([3, 4]))]
    values, counts = merge_counts(text)
    assert (values.tolist(), counts.tolist()) == ([b"a", b"b", b"c"], [1, 3, 6])
    empty = (np.zeros(0, np.int64), np.zeros(0, np.int64))
    assert [a.size for a in merge_counts([empty, empty])] == [0, 0]


def test_lookup_finds_known_values_only() -> None:
    rng = np.random.default_rng(1)
    for dtype in DTYPES:
        for num in (0, 1, 2, 1000):
            known = np.unique(rng.integers(0, 3000, num).astype(dtype))
            ids = rng.integers(1, 2**31, known.size).astype(np.int32)
            table = dict(zip(known.tolist(), ids.tolist(), strict=True))
            for size in (0, 1, 30, 2000):
                values = np.unique(rng.integers(0, 3000, size).astype(dtype))
                want = [table.get(v, 0) for v in values.tolist()]
                assert lookup(known, ids, values).tolist() == want


def test_ids_are_assigned_by_count() -> None:
    rng = np.random.default_rng(2)
    counts = np.concatenate([rng.integers(1, 6, 500), rng.integers(4000, 4200, 500)])
    rng.shuffle(counts)
    levels, num = np.unique(counts, return_counts=True)
    room = np.minimum(num, rng.integers(0, 60, levels.size))
    first = 1 + np.concatenate([np.cumsum(room[::-1])[::-1][1:], [0]])
    given = np.zeros(levels.size, np.int64)
    found = np.concatenate([assign_ids(part, (levels, room, first), given)
                            for part in np.array_split(counts, 7)])
    for k, level in enumerate(levels):
        want = [*range(first[k], first[k] + room[k])] + [0] * (num[k] - room[k])
        assert found[counts == level].tolist() == want
    assert given.tolist() == num.tolist()


@given(values=numbers(np.int64), level=st.integers(0, 5))
def test_samples_are_the_ids_whose_hash_begins_with_zeros(values: list[int], level: int) -> None:
    want = [k for k, v in enumerate(values)
            if not int(mix64(np.array([v], np.int64).astype(np.uint64) + _GOLDEN)[0]) >> 64 - level]
    assert sampled(np.array(values, np.int64), level).tolist() == want
