"""Backward passes of dynamic tables that come after other updates."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from oper.errors import InvalidInputError
from oper.shmem.batch import SeenKeys

_TODO = ("call backward() for all lookups before the next update, at once or within oper.no_sync")


@dataclass(frozen=True, slots=True)
class _Update:
    """Rows that changed their key in an update, int64 [n]; those of table t are in ``[bounds[t],
    bounds[t + 1])``."""

    number: int
    rows: torch.Tensor
    bounds: Sequence[int]


class RowHistory:
    """Which rows have gone to other keys, kept while lookups wait for their backward passes.

    Attributes:
        num_updates: number of updates of the directories so far, plus the number of times they were
            loaded.
    """

    def __init__(self) -> None:
        self.num_updates = 0
        self._loaded = 0  # number of the last load
        self._waiting: weakref.WeakSet[SeenKeys] = weakref.WeakSet()
        self._updates: list[_Update] = []

    def wait(self, seen: SeenKeys) -> None:
        """Note a lookup that may have a backward pass."""
        self._waiting.add(seen)

    def note(self, new: torch.Tensor, bounds: Sequence[int]) -> None:
        """Count an update; `new`, int64 [n, 2], and `bounds` are the result of ``keys_new``."""
        self.num_updates += 1
        oldest = min((s.updates for s in self._waiting), default=self.num_updates)
        self._updates = [u for u in self._updates if u.number > oldest]
        if new.shape[0] and oldest < self.num_updates:
            self._updates.append(_Update(self.num_updates, new[:, 0].abs(), bounds))

    def load(self) -> None:
        """Note that all keys may have changed."""
        self.num_updates += 1
        self._loaded = self.num_updates
        self._updates = []

    def check(self, seen: SeenKeys, names: Sequence[str]) -> None:
        """Raise InvalidInputError if a gradient would go to the row of another key.

        Args:
            seen: the keys that the lookup found and missed.
            names: names of the dynamic tables, by number.
        """
        if seen.updates < self._loaded:
            raise InvalidInputError("cannot update dynamic tables", "loaded since the lookup",
                                    list(names), "keys as they were looked up",
                                    "look up again after loading a state")
        for number, begin, end, *_ in seen.parts.tolist():
            moved = [u.rows[u.bounds[number]:u.bounds[number + 1]] for u in self._updates
                     if u.number > seen.updates]
            if not moved:
                continue
            at = begin + torch.isin(seen.rows[begin:end], torch.cat(moved)).nonzero()[:, 0]
            if not at.numel():
                continue
            what, lost = "keys that have lost their rows since the lookup", seen.ids
            if seen.version < 0 or lost._version != seen.version:  # they may be other ones by now
                what, lost = "rows that keys have lost since the lookup", seen.rows
            raise InvalidInputError(f"cannot update dynamic table {names[number]!r}", what,
                                    lost[at].unique()[:4].tolist(),
                                    "none, so that gradients reach the rows that were looked up",
                                    _TODO)
