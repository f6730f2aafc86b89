"""Synthetic lookups for benchmarks: tables, batches, and statistics of other batches."""

from __future__ import annotations

import functools
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from oper.errors import InvalidInputError, fail
from oper.tables import TableSpec

if TYPE_CHECKING:
    from oper.stats import AccessStats

# Distinct values of the 26 categorical columns of the Criteo Kaggle log.
CRITEO_KAGGLE_ROWS = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992,
    5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572)
NUM_DENSE = 13  # dense features of a sample, as in the Criteo logs
# Streams of random numbers; batches of different streams are independent.
TIMED, STATISTICS, CHECKED = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Workload:
    """What is looked up.

    Attributes:
        num_rows: rows of each table; one feature per table.
        dim: columns of all tables.
        batch_size: samples per step, over all ranks.
        pooling: ids per bag, the same for all bags.
        exponent: ids follow a bounded power law of this exponent; 0 = uniform.
        seed: of all random numbers.
    """

    num_rows: tuple[int, ...] = tuple(min(n, 1_000_000) for n in CRITEO_KAGGLE_ROWS)
    dim: int = 64
    batch_size: int = 4096
    pooling: int = 1
    exponent: float = 1.05
    seed: int = 20240229

    def __post_init__(self) -> None:
        for name in ("dim", "batch_size", "pooling"):
            if getattr(self, name) < 1:
                raise InvalidInputError(fail("invalid workload", name, getattr(self, name), ">= 1",
                                             "choose a positive value"))

    @property
    def name(self) -> str:
        """For a person and for records."""
        return (f"{len(self.num_rows)} tables, pooling {self.pooling}, dim {self.dim}, "
                f"exponent {self.exponent:g}")

    @property
    def features(self) -> list[str]:
        """Feature names, one per table."""
        return [f"f{k}" for k in range(len(self.num_rows))]

    def tables(self) -> list[TableSpec]:
        """The tables, with row-wise Adagrad state."""
        return [TableSpec(f"t{k}", n, self.dim, (f"f{k}",)) for k, n in enumerate(self.num_rows)]

    def to_json(self) -> dict[str, Any]:
        """Fields as JSON-able values."""
        return {**asdict(self), "num_rows": list(self.num_rows)}

    @staticmethod
    def from_json(value: dict[str, Any]) -> Workload:
        """The workload written by `to_json`."""
        return Workload(**{**value, "num_rows": tuple(value["num_rows"])})


@functools.lru_cache(maxsize=64)
def _scatter(num_rows: int, seed: int, table: int) -> np.ndarray:
    """The id of the k-th hottest row: a fixed permutation, int32 [num_rows]."""
    return np.random.default_rng((seed, table)).permutation(num_rows).astype(np.int32)


def draw_ids(rng: np.random.Generator, num_rows: int, size: int, exponent: float) -> np.ndarray:
    """Ranks of a bounded power law, int64 [size] in [0, num_rows).

    Inverse distribution function of the continuous density x**-exponent on [1, num_rows + 1).
    """
    u = rng.random(size)
    if abs(exponent - 1.0) < 1e-9:
        x = np.exp(u * math.log(num_rows + 1.0))
    else:
        a = 1.0 - exponent
        x = (u * ((num_rows + 1.0) ** a - 1.0) + 1.0) ** (1.0 / a)
    return np.clip(x.astype(np.int64) - 1, 0, num_rows - 1)


def batch_ids(work: Workload, rank: int, world_size: int, number: int, stream: int = TIMED
              ) -> np.ndarray:
    """Ids of a rank's batch, key-major: int64 [tables, batch_size / world_size * pooling]."""
    rng = np.random.default_rng((work.seed, stream, rank, number, work.pooling))
    size = work.batch_size // world_size * work.pooling
    return np.stack([
        _scatter(n, work.seed, t)[draw_ids(rng, n, size, work.exponent)].astype(np.int64)
        for t, n in enumerate(work.num_rows)])


@functools.lru_cache(maxsize=2)
def timed_ids(work: Workload, rank: int, world_size: int, num_batches: int
              ) -> tuple[np.ndarray, ...]:
    """The first `num_batches` timed batches of a rank; kept, since cases share workloads."""
    return tuple(batch_ids(work, rank, world_size, k) for k in range(num_batches))


def make_kjt(work: Workload, ids: np.ndarray) -> Any:
    """A `KeyedJaggedTensor` of `batch_ids` output, with lengths and offsets worked out."""
    import torch
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    values = torch.from_numpy(ids.reshape(-1))
    lengths = torch.full((values.numel() // work.pooling,), work.pooling, dtype=torch.int32)
    kjt = KeyedJaggedTensor.from_lengths_sync(work.features, values, lengths)
    kjt.offsets()
    return kjt


def make_batch(work: Workload, ids: np.ndarray, seed: tuple[int, ...]) -> Any:
    """A TorchRec `Batch`: the lookups with random dense features and labels."""
    import torch
    from torchrec.datasets.utils import Batch

    rng = np.random.default_rng((work.seed, 99, *seed))
    size = ids.shape[1] // work.pooling
    dense = torch.from_numpy(rng.random((size, NUM_DENSE), np.float32))
    labels = torch.from_numpy((rng.random(size) < 0.25).astype(np.float32))
    return Batch(dense, make_kjt(work, ids), labels)


@functools.lru_cache(maxsize=2)
def collect_stats(work: Workload, rank: int, world_size: int, num_batches: int) -> AccessStats:
    """Access statistics of this rank's part of batches that are never timed."""
    from oper.analysis import Collector

    collector = Collector(work.tables())
    lengths = np.full(work.batch_size // world_size, work.pooling, np.int64)
    for number in range(num_batches):
        ids = batch_ids(work, rank, world_size, number, STATISTICS)
        collector.add({f: (ids[k], lengths) for k, f in enumerate(work.features)})
    return collector.finish(f"{num_batches} other batches of {work.batch_size // world_size}")
