"""Logs that are split by time, against a direct computation."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from oper.data import PreprocessOptions, load_recipe, merging, preprocess

TWEETS = load_recipe("movietweetings")
START = 1_400_000_000


def write(path: Path, times: np.ndarray) -> str:
    """A log of one row per time, whose item is the row's number in the file."""
    path.write_text("".join(f"{k % 7}::{k}::9::{t}\n" for k, t in enumerate(times.tolist())))
    return str(path)


@pytest.mark.parametrize("memory", [merging._MEMORY_BYTES, 5000])
def test_a_split_sees_every_minute_of_the_log(
    tmp_path: Path, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Minutes come in slices, of runs that may lie on disk; the parts follow from all of them."""
    rng = np.random.default_rng(1)
    times = START + 60 * rng.permutation(3000) + rng.integers(0, 60, 3000)
    log = write(tmp_path / "ratings.dat", times)
    monkeypatch.setattr(merging, "_SLICE", 400)
    monkeypatch.setattr(merging.RunMerger.__init__, "__defaults__", (memory,))
    manifest = preprocess(TWEETS, [log], tmp_path / "out", PreprocessOptions(
        valid="0.2", test="0.1", unit_bytes=9_000))
    assert manifest["rows"] == {"train": 2100, "valid": 600, "test": 300}
    ordered = np.sort(times)
    assert manifest["split"]["first_valid_second"] == ordered[2100] // 60 * 60
    assert manifest["split"]["valid"] == str(Fraction(1, 5))
