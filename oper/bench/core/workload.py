"""Synthetic lookups for benchmarks: tables, batches, and access statistics."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from oper.data.generate.ids import power_law_ids
from oper.data.generate.published import CRITEO_KAGGLE_ROWS
from oper.tables import TableSpec

if TYPE_CHECKING:
    from oper.stats import AccessStats

NUM_DENSE = 13  # dense features of a sample, as in the Criteo logs
# Streams of random numbers; batches of different streams are independent.
TIMED, STATISTICS, CHECKED = 0, 1, 2  # for timing, for access statistics, for verification
NO_ID = -1  # padding in arrays of ids: no lookup
EXPONENTS = {"": 1.05, "-alpha0.6": 0.6, "-uniform": 0.0}  # power law, by suffix of a case's name


@dataclass(frozen=True, slots=True)
class Workload:
    """Tables and the distribution of their lookups.

    Attributes:
        num_rows: rows of each table; one feature per table.
        dim: columns of all tables.
        batch_size: samples per step, summed over ranks.
        pooling: ids per bag; if `lengths` is given, its maximum.
        exponent: exponent of the bounded power law of the ids; 0 = uniform.
        seed: seed of all random numbers.
        lengths: ids per bag of each table; empty = `pooling` for all tables.
    """

    num_rows: tuple[int, ...] = tuple(min(n, 1_000_000) for n in CRITEO_KAGGLE_ROWS)
    dim: int = 64
    batch_size: int = 4096
    pooling: int = 1
    exponent: float = 1.05
    seed: int = 20240229
    lengths: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The label of this workload in printouts and records."""
        lengths = "-".join(map(str, sorted(set(self.bag_lengths))))
        return (f"{len(self.num_rows)} tables, pooling {lengths}, dim {self.dim}, "
                f"exponent {self.exponent:g}")

    @property
    def bag_lengths(self) -> tuple[int, ...]:
        """Ids per bag of each table."""
        return self.lengths or (self.pooling,) * len(self.num_rows)

    @property
    def features(self) -> list[str]:
        """Feature names, one per table."""
        return [f"f{k}" for k in range(len(self.num_rows))]

    def tables(self) -> list[TableSpec]:
        """The table specifications, one per entry of `num_rows`."""
        return [TableSpec(f"t{k}", n, self.dim, (f"f{k}",)) for k, n in enumerate(self.num_rows)]


def data_files(pattern: str) -> list[str]:
    """Sorted paths that match a glob pattern in the folder OPER_DATA; none if it is unset."""
    folder = os.environ.get("OPER_DATA")
    return sorted(map(str, Path(folder).glob(pattern))) if folder else []


def batch_ids(work: Workload, rank: int, world_size: int, number: int, stream: int = TIMED
              ) -> np.ndarray:
    """Ids of a rank's batch, key-major: int64 [tables, batch_size / world_size * pooling]. Each bag
    has `pooling` entries; those beyond its table's bag length are `NO_ID`."""
    rng = np.random.default_rng((work.seed, stream, rank, number, work.pooling))
    num_bags = work.batch_size // world_size
    found = np.full((len(work.num_rows), num_bags, work.pooling), NO_ID)
    for t, (n, length) in enumerate(zip(work.num_rows, work.bag_lengths, strict=True)):
        ids = power_law_ids(n, num_bags * length, work.exponent, rng)
        found[t, :, :length] = ids.reshape(num_bags, length)
    return found.reshape(len(work.num_rows), -1)


@functools.lru_cache(maxsize=2)
def timed_ids(work: Workload, rank: int, world_size: int, num_batches: int
              ) -> tuple[np.ndarray, ...]:
    """The first `num_batches` timed batches of a rank; cached, since cases share workloads."""
    return tuple(batch_ids(work, rank, world_size, k) for k in range(num_batches))


def bags_of(work: Workload, ids: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Ids (int64 [L]) and bag lengths (int64 [B]) of every table, from `batch_ids` output."""
    num_bags = ids.shape[1] // work.pooling
    return [(row[row != NO_ID], np.full(num_bags, length, np.int64))
            for row, length in zip(ids, work.bag_lengths, strict=True)]


def make_kjt(work: Workload, ids: np.ndarray) -> Any:
    """A `KeyedJaggedTensor` from `batch_ids` output, with lengths and offsets computed."""
    import torch
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    bags = ids.reshape(-1, work.pooling)
    lengths = torch.from_numpy((bags != NO_ID).sum(1, np.int32))
    kjt = KeyedJaggedTensor.from_lengths_sync(
        work.features, torch.from_numpy(bags[bags != NO_ID]), lengths)
    kjt.offsets()
    return kjt


def make_batch(work: Workload, ids: np.ndarray, seed: tuple[int, ...]) -> Any:
    """A TorchRec `Batch` of the lookups `ids` with random dense features and labels."""
    import torch
    from torchrec.datasets.utils import Batch

    rng = np.random.default_rng((work.seed, 99, *seed))
    size = ids.shape[1] // work.pooling
    dense = torch.from_numpy(rng.random((size, NUM_DENSE), np.float32))
    labels = torch.from_numpy((rng.random(size) < 0.25).astype(np.float32))
    return Batch(dense, make_kjt(work, ids), labels)


@functools.lru_cache(maxsize=2)
def collect_stats(work: Workload, rank: int, world_size: int, num_batches: int) -> AccessStats:
    """Access statistics of this rank's share of `num_batches` untimed batches."""
    from oper.analysis import Collector

    collector = Collector(work.tables())
    for number in range(num_batches):
        ids = batch_ids(work, rank, world_size, number, STATISTICS)
        collector.add(dict(zip(work.features, bags_of(work, ids), strict=True)))
    return collector.finish(f"{num_batches} other batches of {work.batch_size // world_size}")
