"""A synthetic click log in the format of Criteo Kaggle.

No row is real. The cardinality of each column is the published one; popularity follows a bounded
power law that drifts over seven days, and fields are missing at typical rates. Labels come from a
logistic model with one effect per value, which a model with embeddings can learn.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow as pa
from pyarrow import csv
from tqdm import tqdm

from oper.data.generate.ids import drifted, power_law_ids, uniform64
from oper.data.generate.published import CRITEO_KAGGLE_ROWS
from oper.data.preprocessing.manifest import ABOUT_SUFFIX
from oper.errors import require_fields
from oper.ranges import Amount, Count, Positive, Share, rules_of
from oper.support.files import atomic_write, write_text
from oper.support.numeric import falling_root, mix64

NUM_DENSE, NUM_DAYS = 13, 7
# By column: its group, whose columns are missing together, and the share of missing fields.
_MISSING = {"I1": (0, 0.45), "I10": (0, 0.45), "I12": (1, 0.77), "I3": (2, 0.21), "I4": (2, 0.21),
            "I13": (2, 0.21), "I6": (3, 0.22), "C19": (4, 0.45), "C20": (4, 0.45),
            "C25": (4, 0.45), "C26": (4, 0.45), "C22": (5, 0.76), "C3": (6, 0.03),
            "C4": (6, 0.03), "C12": (6, 0.03), "C16": (6, 0.03), "C21": (6, 0.03),
            "C24": (6, 0.03), "C6": (7, 0.12)}
_MIN_DRIFT_ROWS = 100  # columns with fewer values do not drift
_LINES = 1 << 15       # rows drawn and formatted at once


@dataclass(frozen=True, slots=True)
class SyntheticLog:
    """Parameters of a synthetic log.

    Attributes:
        num_rows: rows, spread evenly over seven days.
        seed: seed of all random draws.
        cardinalities: number of possible values of each of C1..C26.
        click_rate: share of rows with label 1.
        effect: standard deviation of the log-odds over rows; larger = higher achievable AUC.
        drift: probability that a hot rank moves to a random value from one day to the next.
    """

    num_rows: Positive = 200_000
    seed: Count = 1
    cardinalities: tuple[int, ...] = CRITEO_KAGGLE_ROWS
    click_rate: float = 0.25
    effect: Amount = 1.6
    drift: Share = 0.1

    def __post_init__(self) -> None:
        require_fields(
            self, "cannot make a synthetic log", "choose a value in this range", *rules_of(self),
            ("cardinalities", len(self.cardinalities) == 26 and min(self.cardinalities) >= 1
             and max(self.cardinalities) <= 2**31, "26 numbers in 1..2^31"),
            ("click_rate", 0 < self.click_rate < 1, "between 0 and 1"))


def write_synthetic_log(
    path: str | os.PathLike[str], log: SyntheticLog | None = None, show_progress: bool = False
) -> Path:
    """Write a synthetic log to `path`, compressed by gzip if it ends in ``.gz``; returns the path.

    ``<path>.about.json`` records that the log is synthetic, and its parameters; preprocessing
    copies this record into its manifest. Equal parameters give equal bytes. `log` None = defaults.
    """
    log = log or SyntheticLog()
    target = Path(path)
    model = _Model(log)
    with (atomic_write(target) as file, _compressed(file, target) as out,
          tqdm(total=log.num_rows, desc="synthetic log", unit=" rows", unit_scale=True,
               disable=not show_progress) as bar):
        for start in range(0, log.num_rows, _LINES):
            stop = min(start + _LINES, log.num_rows)
            out.write(format_rows(*model.draw(start, stop)))
            bar.update(stop - start)
    about = {"synthetic": True, "made_by": "oper.data.generate.synthetic", **asdict(log)}
    write_text(f"{os.fspath(path)}{ABOUT_SUFFIX}", json.dumps(about, indent=1) + "\n")
    return target


@contextlib.contextmanager
def _compressed(file: IO[bytes], target: Path) -> Iterator[IO[bytes]]:
    if target.suffix != ".gz":
        yield file
        return
    with gzip.GzipFile(filename="", mode="wb", compresslevel=3, fileobj=file, mtime=0) as packed:
        yield packed  # type: ignore[misc]


class _Model:
    """Draws ranks from power laws, maps ranks and days to values, and draws labels given these."""

    def __init__(self, log: SyntheticLog) -> None:
        self._log = log
        self._keys = [int(k) for k in mix64(np.arange(1, 40, dtype=np.uint64)
                                            + np.uint64(1_000_003 * log.seed))]
        sizes = np.log10(np.maximum(log.cardinalities, 2))
        # In columns of few values one dominates; columns of millions have a hot head and a heavy
        # tail. A random offset per column makes exponents differ.
        wobble = uniform64(np.array(self._keys[:26], np.uint64)) * 0.3 - 0.15
        self._exponents = np.select([sizes < 3.2, sizes < 5.0], [1.35, 0.95], 1.05) + wobble
        # Columns of 10 to 100,000 values get most of the weight: their effects can be learnt.
        weight = np.exp(-((sizes - 2.8) ** 2) / 3.0)
        self._weights = weight / np.sqrt((weight**2).sum()) * log.effect
        self._bias = self._calibrate()

    def _calibrate(self) -> float:
        """Find the intercept that gives `click_rate`, by bisection on a sample of rows."""
        rows = np.unique(np.linspace(0, self._log.num_rows - 1, 20_000).astype(np.int64))
        log_odds = self._log_odds(*self._values(rows, np.random.default_rng((self._log.seed, 2))))
        return falling_root(lambda bias: self._log.click_rate - float(
            np.mean(1 / (1 + np.exp(-log_odds - bias)))), -20.0, 20.0, 50)

    def draw(
        self, start: int, stop: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Draw rows `start..stop-1`.

        Returns:
            Labels int64 [n], dense values int64 [13, n], categorical values uint32 [26, n], and
            masks of missing fields bool [39, n] (dense columns first).
        """
        rng = np.random.default_rng((self._log.seed, 0, start))
        ids, dense = self._values(np.arange(start, stop), rng)
        chance = 1 / (1 + np.exp(-self._log_odds(ids, dense) - self._bias))
        labels = (rng.random(stop - start) < chance).astype(np.int64)
        raw = np.empty(ids.shape, np.uint32)
        for c, key in enumerate(self._keys[:26]):
            raw[c] = _to_raw(ids[c], key)
        missing = np.zeros((NUM_DENSE + 26, stop - start), bool)
        groups = rng.random((8, stop - start))
        for name, (group, share) in _MISSING.items():
            at = int(name[1:]) - 1 + (NUM_DENSE if name[0] == "C" else 0)
            missing[at] = groups[group] < share
        return labels, dense, raw, missing

    def _values(
        self, rows: np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw ids int64 [26, n], >= 0 and < cardinality, and dense values int64 [13, n]."""
        days = rows * NUM_DAYS // self._log.num_rows
        ids = np.empty((26, rows.size), np.int64)
        for c, num_rows in enumerate(self._log.cardinalities):
            exponent = float(self._exponents[c])
            ranks = power_law_ids(num_rows, rows.size, exponent, rng, scatter=False)
            ids[c] = ranks if num_rows < _MIN_DRIFT_ROWS else drifted(
                ranks, days, num_rows, self._keys[c], self._log.drift)
        scale = np.linspace(0.6, 3.5, NUM_DENSE)[:, None]
        dense = np.floor(np.exp(rng.normal(size=(NUM_DENSE, rows.size)) * 1.2 + scale))
        dense = np.minimum(dense, 9_999_999) - (dense < 2)  # many zeros, as in counters
        dense[1] -= 2 * (rng.random(rows.size) < 0.1)    # I2 goes below zero
        return ids, np.maximum(dense, -3).astype(np.int64)

    def _log_odds(self, ids: np.ndarray, dense: np.ndarray) -> np.ndarray:
        """Compute the log-odds of a click without the intercept, float64 [n]."""
        total = np.zeros(ids.shape[1])
        for c in range(26):
            key = np.uint64(self._keys[c])
            # The sum of three uniform numbers is close enough to a normal one; variance 1/4.
            normal = sum(uniform64(ids[c].astype(np.uint64) * np.uint64(4) + np.uint64(k) ^ key)
                         for k in range(3)) - 1.5
            total += 2.0 * self._weights[c] * normal
        return total + 0.15 * self._log.effect * (np.log1p(np.maximum(dense[4], 0)) - 2.0)


def _to_raw(ids: np.ndarray, key: int) -> np.ndarray:
    """Scramble ids below 2^32 by a bijection of uint32 that depends on `key`."""
    x = ids.astype(np.uint32) ^ np.uint32(key & 0xFFFFFFFF)
    for factor in (0x7FEB352D, 0x846CA68B):
        x = (x ^ (x >> np.uint32(16))) * np.uint32(factor)
    return x ^ (x >> np.uint32(15))


def format_rows(labels: np.ndarray, dense: np.ndarray, raw: np.ndarray,
                missing: np.ndarray) -> bytes:
    """Format n rows as TAB-separated text.

    Args:
        labels: int64 [n], 0 or 1.
        dense: int64 [D, n].
        raw: uint32 [C, n], written as eight hexadecimal digits.
        missing: bool [D + C, n], fields that are left empty.
    """
    columns = [pa.array(labels)]
    columns += [pa.array(x, mask=m) for x, m in zip(dense, missing, strict=False)]
    columns += [_hexadecimal(x, m) for x, m in zip(raw, missing[len(dense):], strict=True)]
    out = io.BytesIO()
    csv.write_csv(pa.table(columns, names=[str(k) for k in range(len(columns))]), out,
                  csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none"))
    return out.getvalue()


def _hexadecimal(values: np.ndarray, missing: np.ndarray) -> pa.Array:
    """Format uint32 values as eight lower-case hexadecimal digits, null where missing."""
    text = values.astype(">u4").tobytes().hex().encode()
    ends = np.arange(0, len(text) + 1, 8, dtype=np.int32)
    return pa.StringArray.from_buffers(
        values.size, pa.py_buffer(ends), pa.py_buffer(text),
        pa.py_buffer(np.packbits(~missing, bitorder="little")))
