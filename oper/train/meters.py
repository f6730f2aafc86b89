"""Phases of lookups and updates, and keys of dynamic tables, for the metrics file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from oper.integration.checkpoint.saving import tables_of
from oper.shmem.counters.phases import BUCKETS_US, PHASES
from oper.shmem.tables import ShardedTables
from oper.train.metrics import sum_over_ranks

_BOUNDS = (*map(str, BUCKETS_US), "inf")
_COLUMNS = 8  # columns of `Keys.own_counts`; the first two are levels: occupied, full buckets
_LEVELS = 2
_EVENTS = ("admitted", "evicted", "expired", "refused", "lookups")


def take_phases(tables: Sequence[ShardedTables]) -> torch.Tensor:
    """Return and reset the phase times of this rank's tables, summed over collections.

    Returns:
        float64 [phases * (1 + buckets)]: for each of `PHASES`, nanoseconds of all batches, then the
        number of batches in each bucket of `Histogram`; [0] without tables.
    """
    if not tables:
        return torch.zeros(0, dtype=torch.float64)
    found = [t.phase_histograms(reset=True) for t in tables]
    return torch.tensor([[[x[name].sum_ns, *x[name].counts] for name in PHASES] for x in found],
                        dtype=torch.float64).sum(dim=0).reshape(-1)


def by_phase(phases: torch.Tensor) -> dict[str, Any]:
    """Convert the result of `take_phases`, or its sum over ranks, to JSON-serializable values.

    Returns:
        By phase, except phases without a batch: ``count``, the number of batches; ``sum_s``, their
        total time in seconds; and ``below_us``, which maps the upper bound b of a bucket, in
        microseconds, to the number of batches in [b / 2, b), or [0, 1) for b = 1. The bound
        ``"inf"`` is for all longer ones.
    """
    found: dict[str, Any] = {}
    for name, row in zip(PHASES, phases.reshape(-1, 1 + len(_BOUNDS)).tolist(), strict=False):
        sum_ns, *counts = row
        if any(counts):
            found[name] = {
                "count": round(sum(counts)), "sum_s": round(sum_ns * 1e-9, 9),
                "below_us": {b: round(n) for b, n in zip(_BOUNDS, counts, strict=True) if n}}
    return found


class KeyMeter:
    """Counts events of keys in a model's dynamic tables since construction or the last call of
    `read`.

    Args:
        model: a sharded model; without dynamic tables, all results are empty.
    """

    def __init__(self, model: nn.Module) -> None:
        self._tables = [(t.keys, name) for t in tables_of(model)
                        if isinstance(t, ShardedTables) and t.keys for name in t.keys.tables]
        self._before = self._own()

    def _own(self) -> torch.Tensor:
        return torch.tensor([keys.own_counts(name) for keys, name in self._tables],
                            dtype=torch.float64).reshape(-1, _COLUMNS)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the lookups of the block out of the next `take`."""
        began = self._own()
        yield
        self._before += self._own() - began

    def take(self) -> torch.Tensor:
        """Return this rank's counts, float64 [T * 8], with events since the last call; the sum over
        the ranks is for `by_table`."""
        now = self._own()
        found = now.clone()
        found[:, _LEVELS:] -= self._before[:, _LEVELS:]
        self._before = now
        return found.reshape(-1)

    def read(self) -> dict[str, Any]:
        """Return the counts of all ranks together since the last call, as `by_table` returns them.
        Collective if there are dynamic tables."""
        return self.by_table(sum_over_ranks(self.take())) if self._tables else {}

    def by_table(self, counts: torch.Tensor) -> dict[str, Any]:
        """Convert the sum of all ranks' `take` to JSON-serializable values.

        Returns:
            By table: ``occupancy``, ``full_buckets`` (as a share of the buckets), ``admitted``,
            ``evicted``, ``expired``, ``refused``, ``lookups`` and ``default_share`` of
            `oper.shmem.keys.directories.KeyCounts`.
        """
        found = {}
        rows = counts.reshape(-1, _COLUMNS).long().tolist()
        for (keys, name), row in zip(self._tables, rows, strict=True):
            of = keys.counts_of(name, row)
            found[name] = {"occupancy": of.occupancy, "full_buckets": of.full_buckets / of.buckets,
                           **{event: getattr(of, event) for event in _EVENTS},
                           "default_share": of.default_share}
        return found
