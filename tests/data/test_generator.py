"""Synthetic lookups have the requested or published statistics."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from oper.analysis import CountOptions, collect, skew
from oper.data.generate import published
from oper.data.generate.generator import (
    PRESETS,
    Workload,
    criteo_1tb,
    load_workload,
    meta_2021,
    workload_from_dict,
    workload_from_stats,
)
from oper.data.generate.popularity import Popularity, fit_cardinality, power_law
from oper.errors import InvalidInputError
from oper.stats import AccessStats
from oper.tables import TableSpec


def count(workload: Workload, num_samples: int, batch: int = 5000) -> AccessStats:
    tables = [TableSpec(t.name, t.num_rows, 4, (t.name,)) for t in workload.tables]
    lookups = ((day, {n: (x.ids, x.lengths) for n, x in found.items()})
               for day, found in workload.batches(num_samples, batch))
    return collect((_Batch(d, b) for d, b in lookups), tables, options=CountOptions((1024,)),
                   bucket_of=lambda b: f"day {b.day}")


class _Batch:
    def __init__(self, day: int, features: object) -> None:
        self.day, self.sparse_features = day, features


@given(st.integers(1, 100_000), st.floats(0, 3), st.floats(0, 100),
       st.lists(st.floats(0.001, 0.2), max_size=3))
def test_power_laws_have_their_rows_and_shares(
    num_rows: int, exponent: float, shift: float, heavy: list[float]
) -> None:
    if len(heavy) > num_rows - 1:
        heavy = []
    found = power_law(num_rows, exponent, shift, heavy)
    assert found.num_rows == num_rows and found.mass.sum() == pytest.approx(1)
    per_row = found.mass / found.rows
    assert (np.diff(per_row) <= 1e-12).all()
    for share in heavy:
        assert np.isclose(per_row, share).any()
    # The popularity of the tail's first and last row has the ratio of the law.
    tail = [p for p in per_row if not np.isclose(p, heavy).any()]
    if not heavy and num_rows > 1 and found.rows[0] == 1:
        ratio = ((num_rows + shift) / (1 + shift)) ** exponent
        assert tail[0] / tail[-1] == pytest.approx(ratio, rel=0.05)


def test_draws_follow_the_popularity() -> None:
    found = Popularity.of(np.array([1, 10, 1000]), np.array([5.0, 1.0, 0.02]))
    ranks = found.draw(400_000, np.random.default_rng(0))
    counts = np.bincount(ranks, minlength=1011)
    assert counts[0] / 400_000 == pytest.approx(5 / 35, abs=0.003)
    assert counts[1:11].sum() / 400_000 == pytest.approx(10 / 35, abs=0.004)
    assert (counts[11:] > 0).mean() > 0.99 and ranks.max() == 1010
    assert found.expected(1000) == pytest.approx(
        np.mean([np.unique(found.draw(1000, np.random.default_rng(k))).size for k in range(40)]),
        rel=0.02)


def test_metas_locality_histogram_is_reproduced_within_a_hundredth() -> None:
    scale = 1 / 60
    popularity = meta_2021(scale)[0].popularity
    ranks = popularity.draw(round(published.META_2021_INDICES * scale), np.random.default_rng(3))
    counts = np.bincount(ranks)
    counts = counts[counts > 0]
    bins = np.searchsorted([1 << k for k in range(16)], counts)  # (0, 1], (1, 2], (2, 4], ...
    for weights, expected in ((None, published.META_2021_ROW_SHARES),
                              (counts, published.META_2021_ACCESS_SHARES)):
        found = np.bincount(bins, weights, minlength=17)
        assert np.abs(found / found.sum() - expected).max() < 0.01
    assert counts.size == pytest.approx(published.META_2021_ROWS * scale, rel=0.01)


def test_criteo_columns_have_the_published_numbers_of_values() -> None:
    columns = [*zip(criteo_1tb(), published.CRITEO_1TB_DISTINCT, published.CRITEO_1TB_FREQUENT,
                    strict=True)]
    for table, distinct, frequent in columns[::4]:
        expected = partial(table.popularity.expected, published.CRITEO_1TB_ROWS)
        assert expected() == pytest.approx(distinct, rel=0.005, abs=0.5)
        assert expected(3) == pytest.approx(frequent, rel=0.005, abs=1.0)


def test_cardinality_fit_finds_a_known_law() -> None:
    law = power_law(50_000, 1.1)
    found = fit_cardinality(200_000, round(law.expected(200_000)),
                            round(law.expected(200_000, 3)), 3)
    # Two counts do not determine the law, but the fit matches both and has nearly the same head.
    for least in (1, 2, 3, 10):
        assert found.expected(200_000, least) == pytest.approx(law.expected(200_000, least),
                                                               rel=0.02)
    assert found.mass[0] == pytest.approx(law.mass[0], rel=0.3)


def test_mlperf_bags_are_fixed_per_first_id() -> None:
    workload = load_workload("mlperf-dlrm-v2")
    lengths = [t.lengths[0].tolist() for t in workload.tables]
    assert lengths == [[n] for n in published.MLPERF_MULTI_HOT]
    assert sum(t.num_rows for t in workload.tables) == pytest.approx(204_184_588, rel=0.002)
    assert "synthetic" in workload.name
    _, batch = next(workload.batches(400, 400))
    bags = batch["C5"].ids.reshape(400, 6)
    of_first: dict[int, list[int]] = {}
    for bag in bags.tolist():
        assert of_first.setdefault(bag[0], bag) == bag
    assert len(of_first) < 400, "some first id came twice"
    assert len({b[1] for b in of_first.values()}) > 0.9 * len(of_first)


def test_statistics_are_recovered_from_their_lookups() -> None:
    spec = {"name": "s", "table": [
        {"name": "a", "rows": 5000, "exponent": 1.2, "heavy": [0.3], "lengths": [0, 1, 7],
         "weights": [1, 2, 1]}, {"name": "b", "rows": 300, "exponent": 0.0}]}
    first = count(workload_from_dict(spec), 100_000)
    again = count(workload_from_stats(first), 100_000)
    for name in ("a", "b"):
        one, two = first.tables[name], again.tables[name]
        assert one.num_rows == two.num_rows
        assert two.pooling_factor == pytest.approx(one.pooling_factor, rel=0.02)
        assert two.length_values.tolist() == one.length_values.tolist()
        sizes = np.array([1, 10, 100, 1000])
        np.testing.assert_allclose(two.coverage(sizes), one.coverage(sizes), atol=0.015)
        assert two.head_ids[0] == one.head_ids[0] or name == "b", "hot rows keep their ids"
    assert skew(first.tables["a"]).hottest == pytest.approx(0.3, abs=0.01)
    assert "synthetic" in workload_from_stats(first).name


def test_drift_replaces_hot_rows_overnight() -> None:
    def distance(drift: float) -> float:
        spec = {"days": 3, "table": [{"name": "t", "rows": 100_000, "exponent": 1.3,
                                      "drift": drift}]}
        return skew(count(workload_from_dict(spec), 90_000).tables["t"]).drift

    low, middle, high = distance(0.0), distance(0.1), distance(0.5)
    assert low + 0.03 < middle < high - 0.1


def test_the_same_arguments_give_the_same_ids(tmp_path: Path) -> None:
    path = tmp_path / "w.toml"
    path.write_text('name = "x"\ndays = 2\n[[table]]\nname = "t"\nrows = 100\ncount = 2\n'
                    'length = 3\ndrift = 0.2\n')
    one, two = (list(load_workload(path, seed=5).batches(100, 30)) for _ in range(2))
    assert [d for d, _ in one] == [0, 0, 1, 1] and set(one[0][1]) == {"t0", "t1"}
    for (_, a), (_, b) in zip(one, two, strict=True):
        assert all((a[n].ids == b[n].ids).all() for n in a)
    assert (one[0][1]["t0"].ids != one[0][1]["t1"].ids).any()
    stats = tmp_path / "s.npz"
    count(load_workload(path), 50).save(stats)
    assert {t.name for t in load_workload(stats).tables} == {"t0", "t1"}


@pytest.mark.parametrize("change", [
    {"rows": 0}, {"rows": "x"}, {"exponent": -1}, {"heavy": [0.9, 0.9]}, {"lengths": [-1]},
    {"weights": [1, 2]}, {"drift": 2}, {"count": 0}, {"colour": 1}, {"shift": -1}])
def test_bad_specifications(change: dict[str, object]) -> None:
    with pytest.raises(InvalidInputError):
        workload_from_dict({"table": [{"name": "t", "rows": 10, **change}]})
    for value in ({}, {"table": []}, {"days": 0, "table": [{"name": "t", "rows": 1}]},
                  {"table": [{"name": "t", "rows": 1}] * 2}):
        with pytest.raises(InvalidInputError):
            workload_from_dict(value)
    with pytest.raises(InvalidInputError, match="meta-2021"):
        load_workload("meta-2022")
    for seed in (-1, 2**32):
        with pytest.raises(InvalidInputError, match=f"seed={seed}"):
            workload_from_dict({"table": [{"name": "t", "rows": 1}]}, seed)


def test_presets_can_be_drawn() -> None:
    for name in PRESETS:
        _, batch = next(load_workload(name).batches(8, 8))
        assert all(x.ids.size and x.ids.min() >= 0 for x in batch.values())
