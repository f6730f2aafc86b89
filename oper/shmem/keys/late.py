"""Backward passes of dynamic tables that follow other updates since their lookup."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from oper.errors import InvalidInputError
from oper.shmem.batch import SeenKeys

_REMEDY = ("call backward() for all lookups before the next update, at once or within oper.no_sync")


@dataclass(frozen=True, slots=True)
class _Update:
    """Rows that an update has given to other keys: ``rows[bounds[t]:bounds[t + 1]]`` of dynamic
    table t; rows: int64 [n]."""

    number: int
    rows: torch.Tensor
    bounds: Sequence[int]


class RowHistory:
    """Records which rows updates have given to other keys, while lookups await their backward pass.

    Args:
        last: calls the operator ``keys_new``, which returns the rows that the last update has given
            to new keys (column 0 of int64 [n, 2] or [n, 1]), and where the rows of each table
            begin.

    Attributes:
        num_updates: number of updates and loads of the directories so far.
    """

    def __init__(self, last: Callable[[], tuple[torch.Tensor, Sequence[int]]]) -> None:
        self._last = last
        self.num_updates = 0
        self._loaded = 0  # `num_updates` at the last load
        self._waiting: weakref.WeakSet[SeenKeys] = weakref.WeakSet()
        self._updates: list[_Update] = []

    def wait(self, seen: SeenKeys) -> None:
        """Record a lookup that may have a backward pass."""
        self._waiting.add(seen)

    def keep(self) -> None:
        """Record the rows of the last update if a lookup from before it still awaits its backward
        pass, and drop rows of updates that no such lookup precedes. Called before each further
        update; in a training loop with one lookup per step, nothing is recorded."""
        oldest = min((s.updates for s in self._waiting), default=self.num_updates)
        self._updates = [u for u in self._updates if u.number > oldest]
        last = max((u.number for u in self._updates), default=self._loaded)
        if oldest < self.num_updates != last:
            new, bounds = self._last()
            self._updates.append(_Update(self.num_updates, new[:, 0].abs(), bounds))

    def load(self) -> None:
        """Record that the directories were loaded, so all keys may have other rows."""
        self.num_updates += 1
        self._loaded = self.num_updates
        self._updates = []

    def check(self, seen: SeenKeys, parts: Iterable[tuple[int, int, int]], names: Sequence[str]
              ) -> None:
        """Raise InvalidInputError if a gradient would go to the row of another key.

        Args:
            seen: the keys that the lookup found and missed.
            parts: numbers of dynamic tables, with begin and end of their ids.
            names: names of the dynamic tables, by number.
        """
        if seen.updates < self._loaded:
            raise InvalidInputError("cannot update dynamic tables", "loaded since the lookup",
                                    list(names), "no load between lookup and backward pass",
                                    "look up again after loading a state")
        for number, begin, end in parts:
            moved = [u.rows[u.bounds[number]:u.bounds[number + 1]] for u in self._updates
                     if u.number > seen.updates]
            if not moved:
                continue
            lost_rows = torch.cat(moved).to(seen.rows.device)
            at = begin + torch.isin(seen.rows[begin:end], lost_rows).nonzero()[:, 0]
            if not at.numel():
                continue
            what, lost = "keys that have lost their rows since the lookup", seen.ids
            if seen.version < 0 or lost._version != seen.version:  # `ids` may have changed
                what, lost = "rows that keys have lost since the lookup", seen.rows
            raise InvalidInputError(f"cannot update dynamic table {names[number]!r}", what,
                                    lost[at].unique()[:4].tolist(),
                                    "none, since gradients must go to the rows that were looked up",
                                    _REMEDY)
