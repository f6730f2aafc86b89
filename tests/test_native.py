"""The compiled counting against plain Python."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from oper.data.generate.ids import mix64
from oper.errors import MissingDependencyError
from oper.support import native

DTYPES = (np.uint32, np.int64, np.uint64)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def numbers(dtype: Any) -> st.SearchStrategy[list[int]]:
    bounds = np.iinfo(dtype)
    near = st.integers(max(bounds.min, -300), 300)
    return st.lists(st.one_of(near, st.integers(int(bounds.min), int(bounds.max))), max_size=400)


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
def test_codes_count_and_order_distinct_values(dtype: Any, data: st.DataObject) -> None:
    values = data.draw(numbers(dtype))
    is_there = data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values)))
    offset = data.draw(st.integers(0, 9))
    bits = np.packbits(np.array([False] * offset + is_there, bool), bitorder="little")
    found = native.encode(np.array(values, dtype), bits, offset)
    codes, distinct, counts = found
    want = Counter(v for v, ok in zip(values, is_there, strict=True) if ok)
    assert distinct.tolist() == sorted(want)
    assert counts.tolist() == [is_there.count(False), *(want[v] for v in sorted(want))]
    back = [None, *distinct.tolist()]
    assert [back[c] for c in codes] == [v if ok else None
                                        for v, ok in zip(values, is_there, strict=True)]
    assert codes.dtype == np.min_scalar_type(max(1, len(want)))


@pytest.mark.parametrize("num", [200, 255, 256, 60_000, 65_535, 65_536, 200_000])
def test_codes_of_many_values(num: int) -> None:
    rng = np.random.default_rng(num)
    values = rng.permutation(np.repeat(rng.choice(2**32, num, replace=False), 2)).astype(np.uint32)
    codes, distinct, counts = native.encode(values, None, 0)
    assert (distinct[codes.astype(np.int64) - 1] == values).all()
    assert (distinct[1:] > distinct[:-1]).all()
    assert distinct.size == num
    assert counts.tolist() == [0] + [2] * num
    assert codes.dtype == np.min_scalar_type(num)


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
def test_merging_adds_counts_up(dtype: Any, data: st.DataObject) -> None:
    lists = data.draw(st.lists(numbers(dtype), min_size=1, max_size=6))
    parts = [np.unique(np.array(x, dtype), return_counts=True) for x in lists]
    want = Counter(v for x in lists for v in x)
    values, counts = native.merge_counts(parts)
    assert (values.dtype, counts.dtype) == (np.dtype(dtype), np.dtype(np.int64))
    assert dict(zip(values.tolist(), counts.tolist(), strict=True)) == want
    assert (values[1:] > values[:-1]).all()


def test_merging_text_and_nothing() -> None:
    text = [(np.array([b"a", b"c"]), np.array([1, 2])), (np.array([b"b", b"c"]), np.array([3, 4]))]
    values, counts = native.merge_counts(text)
    assert (values.tolist(), counts.tolist()) == ([b"a", b"b", b"c"], [1, 3, 6])
    empty = (np.zeros(0, np.int64), np.zeros(0, np.int64))
    assert [a.size for a in native.merge_counts([empty, empty])] == [0, 0]


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
                assert native.lookup(known, ids, values).tolist() == want


def test_ids_are_assigned_by_count() -> None:
    rng = np.random.default_rng(2)
    counts = np.concatenate([rng.integers(1, 6, 500), rng.integers(4000, 4200, 500)])
    rng.shuffle(counts)
    levels, num = np.unique(counts, return_counts=True)
    room = np.minimum(num, rng.integers(0, 60, levels.size))
    first = 1 + np.concatenate([np.cumsum(room[::-1])[::-1][1:], [0]])
    given = np.zeros(levels.size, np.int64)
    found = np.concatenate([native.assign_ids(part, (levels, room, first), given)
                            for part in np.array_split(counts, 7)])
    for k, level in enumerate(levels):
        want = [*range(first[k], first[k] + room[k])] + [0] * (num[k] - room[k])
        assert found[counts == level].tolist() == want
    assert given.tolist() == num.tolist()


def test_the_library_needs_no_torch() -> None:
    code = ("import sys\nfrom oper.support import native\nnative.library()\n"
            "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'pyarrow')])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_missing_library_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> Callable[[], None]:
        raise OSError("no such file")

    monkeypatch.setattr("ctypes.CDLL", missing)
    native.library.cache_clear()
    try:
        with pytest.raises(MissingDependencyError, match=r"no such file.*build_ext"):
            native.encode(np.zeros(3, np.int64), None, 0)
    finally:
        native.library.cache_clear()


@given(values=numbers(np.int64), level=st.integers(0, 5))
def test_samples_are_the_ids_whose_hash_begins_with_zeros(values: list[int], level: int) -> None:
    want = [k for k, v in enumerate(values)
            if not int(mix64(np.array([v], np.int64).astype(np.uint64) + _GOLDEN)[0]) >> 64 - level]
    assert native.sampled(np.array(values, np.int64), level).tolist() == want
