"""Statistics from published value counts."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from oper.analysis.value_counts import ValueCountOptions, stats_from_value_counts
from oper.errors import FileFormatError, InvalidInputError
from tests.support import real_data


def write(path: Path, rows: list[tuple[str, str, int]], header: str = "Field,Value,Total") -> Path:
    path.write_text(header + "\n" + "".join(f"{f},{v},{c}\n" for f, v, c in rows))
    return path


def test_complete_counts_are_exact(tmp_path: Path) -> None:
    path = write(tmp_path / "counts.csv", [("a", "x", 5), ("b", "x", 9), ("a", "y", 7)])
    (tmp_path / "counts.csv.gz").write_bytes(gzip.compress(path.read_bytes()))
    for file in (path, tmp_path / "counts.csv.gz"):
        stats = stats_from_value_counts(file, ValueCountOptions(num_samples=12, min_count=1))
        a = stats.tables["a"]
        assert (a.head_ids.tolist(), a.head_counts.tolist(), a.num_rows) == ([1, 2], [7, 5], 3)
        assert a.is_exact and stats.ids_in_hotness_order and stats.num_samples == 12
        assert stats.tables["b"].num_accesses == 12, "the missing ones are values seen once"


@pytest.mark.parametrize("exponent", [1.0, 1.3])
def test_cut_tails_are_continued(tmp_path: Path, exponent: float) -> None:
    """For power-law counts cut at 50, the model's rows and coverage are close to the uncut ones."""
    ranks = np.arange(1, 200_001)
    counts = np.maximum(0, np.round(4e6 * (ranks + 3.0) ** -exponent)).astype(int)
    counts = counts[counts > 0]
    path = write(tmp_path / "c.csv", [("f", str(k), int(c)) for k, c in enumerate(counts)
                                      if c >= 50])
    total = int(counts.sum())
    for known in (None, {"f": counts.size}):
        stats = stats_from_value_counts(path, ValueCountOptions(total, 50, known))
        table = stats.tables["f"]
        assert table.num_accesses == total and "modelled" in stats.source
        # Counts are integers: small counts are the least accurate.
        assert table.num_touched_rows == pytest.approx(counts.size, rel=0.02 if known else 0.35)
        sizes = np.array([10, 1000, 20_000, 60_000])
        exact = np.array([counts[:n].sum() / total for n in sizes])
        np.testing.assert_allclose(table.coverage(sizes), exact, atol=0.02)


def test_facts_of_avazu() -> None:
    path = real_data("avazu_value_counts/avazu_train_value_counts_ge50.csv.gz")
    stats = stats_from_value_counts(path, ValueCountOptions(min_count=50,
                                                            num_rows={"device_ip": 6_730_000}))
    assert stats.num_samples == 40_428_967 and len(stats.tables) == 21
    assert sum(t.head_ids.size for t in stats.tables.values()) == 105_906
    assert all(t.num_accesses == 40_428_967 for t in stats.tables.values())
    device = stats.tables["device_id"]
    assert device.head_counts[0] / 40_428_967 == pytest.approx(0.825, abs=5e-4)
    assert device.head_counts.sum() / 40_428_967 == pytest.approx(1 - 0.157, abs=5e-4)
    ip = stats.tables["device_ip"]
    assert ip.head_counts.sum() / 40_428_967 == pytest.approx(0.467, abs=5e-4)
    assert ip.num_touched_rows == pytest.approx(6_730_000, rel=0.001)
    assert stats.tables["site_id"].head_counts[0] / 40_428_967 == pytest.approx(0.36, abs=0.005)


@pytest.mark.parametrize(("text", "words"), [
    ("", "header"), ("a,b\n1,2\n", "header"), ("field,value,count\n", "rows"),
    ("field,value,count\na,b\n", "line 2"), ("field,value,count\na,b,0\n", "line 2"),
    ("field,value,count\na,b,1.5\n", "line 2"), ("field,value,count\na,b,1\na,b,2\n", "line 3"),
    ("field,value,count\na,b,99999999999999999999\n", "line 2"),
])
def test_bad_files(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "c.csv"
    path.write_text(text)
    with pytest.raises(FileFormatError, match=words):
        stats_from_value_counts(path)


def test_bad_options_and_damage(tmp_path: Path) -> None:
    path = write(tmp_path / "c.csv", [("a", "x", 5)])
    for options, word in ((ValueCountOptions(num_samples=4), "num_samples"),
                          (ValueCountOptions(num_rows={"b": 3}), "num_rows")):
        with pytest.raises(InvalidInputError, match=word):
            stats_from_value_counts(path, options)
    path.write_bytes(gzip.compress(b"field,value,count\n" + b"a,b,1\n" * 100)[:-9])
    with pytest.raises(FileFormatError):
        stats_from_value_counts(path)
