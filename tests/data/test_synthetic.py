"""Power-law ids and the synthetic log: format, distribution, determinism, learnability."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from oper.analysis import skew
from oper.data import SyntheticLog, analyze_folder, load_recipe, power_law_ids, preprocess
from oper.data.generate.ids import scatter_ids
from oper.data.generate.synthetic import write_synthetic_log
from oper.errors import InvalidInputError
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


def test_the_hot_set_drifts_only_when_asked(tmp_path: Path) -> None:
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
