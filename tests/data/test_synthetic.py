"""Synthetic logs: power-law ids, and the requested or published statistics."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, strategies as st

from oper.analysis import CountOptions, collect, skew
from oper.data import SyntheticLog, analyze_folder, load_recipe, power_law_ids, preprocess
from oper.data.generate import generator, published
from oper.data.generate.ids import scatter_ids
from oper.data.generate.popularity import Popularity, fit_cardinality, power_law
from oper.data.generate.synthetic import write_synthetic_log
from oper.errors import InvalidInputError
from oper.report import simulation
from oper.stats import AccessStats, TableStats
from oper.tables import TableSpec
from oper.train.metrics import auc


@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 64, 1000, 65_537])
def test_scattering_is_a_permutation(num_rows: int) -> None:
    scattered = scatter_ids(np.arange(num_rows), num_rows)
    assert np.array_equal(np.sort(scattered), np.arange(num_rows))
    if num_rows >= 1000:  # neighbours do not stay neighbours
        near = np.abs(np.diff(scattered)) <= num_rows // 100
        assert near.mean() < 0.05


@pytest.mark.parametrize("exponent", [0.0, 0.6, 1.0, 1.05, 2.0])
def test_power_law_shares(exponent: float) -> None:
    rows, size = 1000, 400_000
    ids = power_law_ids(rows, size, exponent, np.random.default_rng(5), scatter=False)
    found = np.bincount(ids, minlength=rows) / size
    edges = np.arange(1, rows + 2, dtype=np.float64)
    powers = np.log(edges) if exponent == 1 else edges ** (1 - exponent) / (1 - exponent)
    expected = np.diff(powers) / (powers[-1] - powers[0])
    assert found.size == rows and np.abs(found - expected).max() < 0.004
    scattered = power_law_ids(rows, size, exponent, np.random.default_rng(5))
    assert np.array_equal(scattered, scatter_ids(ids, rows))


def test_power_law_arguments_are_checked() -> None:
    rng = np.random.default_rng(0)
    assert power_law_ids(5, 0, 1.05, rng).dtype == np.int64
    for arguments in ((0, 5, 1.0), (5, -1, 1.0), (5, 5, -0.1)):
        with pytest.raises(InvalidInputError):
            power_law_ids(*arguments, rng)


def naive_bayes(folder: Path, num_rows: dict[str, int]) -> float:
    """Compute the validation AUC of the sum of log-odds per id, a lower bound for models."""
    train, valid = (pq.read_table(folder / s) for s in ("train", "valid"))
    labels = train["label"].to_numpy()
    base = labels.mean()
    score = np.zeros(valid.num_rows)
    for name, rows in num_rows.items():
        ids = train[name].to_numpy()
        seen = np.bincount(ids, minlength=rows) + 30
        clicks = np.bincount(ids, labels, minlength=rows) + 30 * base
        score += np.log(clicks / (seen - clicks))[valid[name].to_numpy()]
    return auc(score, valid["label"].to_numpy())


def test_a_log_has_the_format_and_can_be_learnt(tmp_path: Path) -> None:
    path = write_synthetic_log(tmp_path / "synthetic.txt", SyntheticLog(num_rows=40_000))
    lines = path.read_text().split("\n")
    assert lines.pop() == "" and len(lines) == 40_000
    assert {line.count("\t") for line in lines} == {39}
    manifest = preprocess(load_recipe("criteo-kaggle"), [str(path)], tmp_path / "out")
    assert manifest["bad_rows"]["count"] == 0 and manifest["synthetic"] is True
    assert manifest["inputs"][0]["about"]["num_rows"] == 40_000
    clicks = sum(line[0] == "1" for line in lines) / len(lines)
    assert 0.2 < clicks < 0.3
    sizes = {name: t["num_rows"] for name, t in manifest["tables"].items()}
    assert naive_bayes(tmp_path / "out", sizes) > 0.65
    distinct = {name: t["num_distinct"] for name, t in manifest["tables"].items()}
    assert distinct["C9"] <= 4 and distinct["C20"] <= 5 and distinct["C3"] > 10_000
    stats = analyze_folder(tmp_path / "out")
    assert "synthetic" in stats.source
    empty = np.mean([[f == "" for f in line.split("\t")] for line in lines[:5000]], axis=0)
    assert 0.4 < empty[1] < 0.5 and 0.7 < empty[12] < 0.85 and 0.7 < empty[35] < 0.85
    assert any(line.split("\t")[2].startswith("-") for line in lines)


def test_the_hot_set_drifts_only_on_request(tmp_path: Path) -> None:
    drifts = []
    for drift in (0.0, 0.3):
        log = SyntheticLog(num_rows=30_000, drift=drift)
        path = write_synthetic_log(tmp_path / f"synthetic-{drift}.txt", log)
        preprocess(load_recipe("criteo-kaggle"), [str(path)], tmp_path / f"out-{drift}")
        stats = analyze_folder(tmp_path / f"out-{drift}")
        # A column of 633 values: large enough to drift, small enough for little sampling noise.
        drifts.append(skew(stats.tables["C8"]).drift)
    assert drifts[1] > drifts[0] + 0.1


def test_same_seed_same_bytes_packed_or_not(tmp_path: Path) -> None:
    import gzip

    log = SyntheticLog(num_rows=3000, seed=7)
    a = write_synthetic_log(tmp_path / "a.txt", log).read_bytes()
    b = write_synthetic_log(tmp_path / "b.txt.gz", log).read_bytes()
    assert gzip.decompress(b) == a
    assert write_synthetic_log(tmp_path / "c.txt.gz", log).read_bytes() == b
    other = write_synthetic_log(tmp_path / "d.txt", SyntheticLog(num_rows=3000, seed=8))
    assert other.read_bytes() != a
    about = json.loads((tmp_path / "a.txt.about.json").read_text())
    assert about["synthetic"] is True and about["seed"] == 7


@pytest.mark.parametrize("change", [
    {"num_rows": 0}, {"seed": -1}, {"cardinalities": (1, 2)}, {"click_rate": 0.0},
    {"effect": -1.0}, {"drift": 1.5}])
def test_bad_parameters(change: dict[str, object]) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(change))):
        SyntheticLog(**change)  # type: ignore[arg-type]


def test_tiny_logs_and_other_cardinalities(tmp_path: Path) -> None:
    log = SyntheticLog(num_rows=5, cardinalities=(2**31, *[1] * 25))
    lines = write_synthetic_log(tmp_path / "s.txt", log).read_text().splitlines()
    assert [line.count("\t") for line in lines] == [39] * 5


# ---- lookups with requested or published statistics ----------------------------------------------


def count(workload: generator.Workload, num_samples: int, batch: int = 5000) -> AccessStats:
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
def test_power_laws_have_their_rows_and_shares(num_rows: int, exponent: float, shift: float,
                                               heavy: list[float]) -> None:
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
    popularity = generator.meta_2021(scale)[0].popularity
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
    columns = [*zip(generator.criteo_1tb(), published.CRITEO_1TB_DISTINCT,
                    published.CRITEO_1TB_FREQUENT, strict=True)]
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
    workload = generator.load_workload("mlperf-dlrm-v2")
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


def test_rows_of_a_head_that_are_colder_than_others_keep_their_shares() -> None:
    """As the default row of a dynamic table, whose other rows are known only by their counts."""
    table = TableStats(10, np.array([0]), np.array([5]), np.array([1, 20]), np.array([8, 1]),
                       np.ones(1, np.int64), np.array([33]))
    for model in (generator.workload_from_stats(AccessStats(33, {"t": table})).tables[0],
                  simulation._model("t", table)):
        ids = model.draw(20_000, 0, 0, np.random.default_rng(0)).ids
        shares = np.sort(np.bincount(ids, minlength=10)[1:] / ids.size)
        assert np.mean(ids == 0) == pytest.approx(5 / 33, abs=0.01)
        assert shares == pytest.approx([1 / 33] * 8 + [20 / 33], abs=0.01)


def test_statistics_are_recovered_from_their_lookups() -> None:
    spec = {"name": "s", "table": [
        {"name": "a", "rows": 5000, "exponent": 1.2, "heavy": [0.3], "lengths": [0, 1, 7],
         "weights": [1, 2, 1]}, {"name": "b", "rows": 300, "exponent": 0.0}]}
    first = count(generator.workload_from_dict(spec), 100_000)
    again = count(generator.workload_from_stats(first), 100_000)
    for name in ("a", "b"):
        one, two = first.tables[name], again.tables[name]
        assert one.num_rows == two.num_rows
        assert two.pooling_factor == pytest.approx(one.pooling_factor, rel=0.02)
        assert two.length_values.tolist() == one.length_values.tolist()
        sizes = np.array([1, 10, 100, 1000])
        np.testing.assert_allclose(two.coverage(sizes), one.coverage(sizes), atol=0.015)
        assert two.head_ids[0] == one.head_ids[0] or name == "b", "hot rows keep their ids"
    assert skew(first.tables["a"]).hottest == pytest.approx(0.3, abs=0.01)
    assert "synthetic" in generator.workload_from_stats(first).name


def test_drift_replaces_hot_rows_overnight() -> None:
    def distance(drift: float) -> float:
        spec = {"days": 3, "table": [{"name": "t", "rows": 100_000, "exponent": 1.3,
                                      "drift": drift}]}
        return skew(count(generator.workload_from_dict(spec), 90_000).tables["t"]).drift

    low, middle, high = distance(0.0), distance(0.1), distance(0.5)
    assert low + 0.03 < middle < high - 0.1


def test_the_same_arguments_give_the_same_ids(tmp_path: Path) -> None:
    path = tmp_path / "w.toml"
    path.write_text('name = "x"\ndays = 2\n[[table]]\nname = "t"\nrows = 100\ncount = 2\n'
                    'length = 3\ndrift = 0.2\n')
    one, two = (list(generator.load_workload(path, seed=5).batches(100, 30)) for _ in range(2))
    assert [d for d, _ in one] == [0, 0, 1, 1] and set(one[0][1]) == {"t0", "t1"}
    for (_, a), (_, b) in zip(one, two, strict=True):
        assert all((a[n].ids == b[n].ids).all() for n in a)
    assert (one[0][1]["t0"].ids != one[0][1]["t1"].ids).any()
    stats = tmp_path / "s.npz"
    count(generator.load_workload(path), 50).save(stats)
    assert {t.name for t in generator.load_workload(stats).tables} == {"t0", "t1"}


@pytest.mark.parametrize("change", [
    {"rows": 0}, {"rows": "x"}, {"exponent": -1}, {"heavy": [0.9, 0.9]}, {"lengths": [-1]},
    {"weights": [1, 2]}, {"drift": 2}, {"count": 0}, {"colour": 1}, {"shift": -1}])
def test_bad_specifications(change: dict[str, object]) -> None:
    with pytest.raises(InvalidInputError):
        generator.workload_from_dict({"table": [{"name": "t", "rows": 10, **change}]})
    for value in ({}, {"table": []}, {"days": 0, "table": [{"name": "t", "rows": 1}]},
                  {"table": [{"name": "t", "rows": 1}] * 2}):
        with pytest.raises(InvalidInputError):
            generator.workload_from_dict(value)
    with pytest.raises(InvalidInputError, match="meta-2021"):
        generator.load_workload("meta-2022")
    for seed in (-1, 2**32):
        with pytest.raises(InvalidInputError, match=f"seed={seed}"):
            generator.workload_from_dict({"table": [{"name": "t", "rows": 1}]}, seed)


def test_presets_can_be_drawn() -> None:
    for name in generator.PRESETS:
        _, batch = next(generator.load_workload(name).batches(8, 8))
        assert all(x.ids.size and x.ids.min() >= 0 for x in batch.values())
