"""Savings by caches, within a batch and from one batch to the next.

Within a batch, repeated reads of a row come from cache for the part of the table's working set that
fits the cache. From batch to batch, the cache keeps the rows and buffers used within its
characteristic time `T`, in batches: a row that the ranks of a domain look up `a` times per batch is
missed with probability `exp(-a T)`. `T` is such that the rows and buffers used within T fill the
cache (the characteristic-time approximation of least-recently-used caches: Che, Tung and Wang
2002). Buffers of a batch (outputs, their gradients, the send buffer) are used once per batch.
`Costs.warm_share` is the share of a cache available for this; with 0, the default, every batch
begins with a cold cache.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from oper.search.problem.statement import IDS, ROWS, TOUCHED, TOUCHED_ALL, Problem, TableProblem

_FLOAT_BYTES = 4


class Caching:
    """Costs of reads relative to reads from memory, by rank."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._domains = domains = problem.topology.domains
        self._first: dict[str, np.ndarray] = {}
        self._again: dict[tuple[str, bool], np.ndarray] = {}
        self._ranks = np.array([len(d.ranks) for d in domains], float)
        self._cache_bytes = np.array([d.cache_bytes for d in domains], float) / self._ranks
        self._ratio = np.array([min(1.0, d.read_gbps / d.cache_gbps) for d in domains])
        self._domain_of = np.array(problem.topology.domain_of(), np.int64)

    def relative_cost(self, miss: np.ndarray) -> np.ndarray:
        """Cost of reads that miss the domains' caches with probability `miss`.

        Args:
            miss: float64 [num_domains].

        Returns:
            float64 [W]; 1 = all from memory.
        """
        return np.asarray(((1.0 - miss) * self._ratio + miss)[self._domain_of])

    def again(self, t: TableProblem, pushed: bool = False) -> np.ndarray:
        """Cost of reading a row again within a batch, relative to a read from memory; float64 [W].

        The share of the working set that fits the rank's part of the cache is read at cache
        bandwidth, the rest at memory bandwidth. With `pushed`, owners read rows for all ranks, else
        each reader for itself.
        """
        key = t.spec.name, pushed
        if key not in self._again:
            size = max(1.0, float(t.total[TOUCHED_ALL if pushed else TOUCHED]) * t.spec.row_bytes)
            self._again[key] = self.relative_cost(1.0 - np.minimum(1.0, self._cache_bytes / size))
        return self._again[key]

    def first(self, t: TableProblem) -> np.ndarray:
        """Cost of reading a batch's distinct rows of a table for the first time, relative to reads
        from memory; float64 [W]."""
        if t.spec.name not in self._first:
            rows, ids = _used(t)
            touched = t.blocks[t.blocks[:, ROWS] > 0, TOUCHED]
            window, which = np.unique(self._ranks * self.windows, return_inverse=True)
            miss = np.exp(-np.outer(window, ids / rows)) @ touched / max(
                float(touched.sum()), 1e-300)
            self._first[t.spec.name] = self.relative_cost(miss[which])
        return self._first[t.spec.name]

    @cached_property
    def buffers(self) -> np.ndarray:
        """Cost of reading or writing buffers that are used once per batch, relative to reads from
        memory; float64 [W]."""
        return self.relative_cost(np.exp(-self.windows))

    @cached_property
    def windows(self) -> np.ndarray:
        """Characteristic time of each domain's cache, in batches; float64 [num_domains]."""
        share = self.problem.topology.costs.warm_share
        if share == 0:
            return np.zeros(len(self._domains))
        sizes, rates, streamed = [], [], 0.0
        for t in self.problem.tables:
            rows, ids = _used(t)
            sizes.append(rows * t.spec.row_bytes)
            rates.append(ids / rows)
            streamed += t.num_outputs * t.spec.dim * _FLOAT_BYTES
            if self.problem.training:
                streamed += (t.num_outputs + float(t.total[TOUCHED])) * t.spec.dim * _FLOAT_BYTES
        size, rate = np.concatenate(sizes), np.concatenate(rates)
        # Once per kind of domain: there may be hundreds of equal domains and a million blocks.
        found = {(n, cache): _window(size, rate * n, streamed * n, share * cache)
                 for n, cache in {(len(d.ranks), d.cache_bytes) for d in self._domains}}
        return np.array([found[len(d.ranks), d.cache_bytes] for d in self._domains])


def _used(t: TableProblem) -> tuple[np.ndarray, np.ndarray]:
    """Rows of each block of a table, and ids per rank and batch; float64 [K] each."""
    blocks = t.blocks[t.blocks[:, ROWS] > 0]
    return blocks[:, ROWS], blocks[:, IDS]


def _window(size: np.ndarray, rate: np.ndarray, streamed: float, capacity: float) -> float:
    """The characteristic time T of a cache of `capacity` bytes, at which rows (`size` bytes, `rate`
    lookups per batch) and `streamed` buffer bytes per batch fill it; bisection in log T."""
    low, high = 1e-6, 1e9
    for _ in range(60):
        middle = float(np.sqrt(low * high))
        held = float(size @ -np.expm1(-rate * middle)) + min(middle, 1.0) * streamed
        low, high = (low, middle) if held > capacity else (middle, high)
    return float(np.sqrt(low * high))
