"""Are the numbers the same? A step of a dynamic collection against its records and formulas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from oper.bench.core.workload import Workload
from oper.bench.tables.unsharded import EPS, LEARNING_RATE
from oper.bench.tables.verify import Verdict


@dataclass(frozen=True, slots=True)
class State:
    """What a table holds between two steps.

    Attributes:
        keys: int64 [n], ascending, those with a row; owners: int64 [n], their rows.
        rows: float32 [R, D]; squares: float32 [R], row-wise Adagrad's.
    """

    keys: np.ndarray
    owners: np.ndarray
    rows: torch.Tensor
    squares: torch.Tensor

    @staticmethod
    def read(tables: Any, name: str) -> State:
        """A table's state. No rank may be in an update."""
        records = tables.keys.read(name, "keys", 0, tables.keys.num_records(name, False)).numpy()
        held = np.flatnonzero(records[:, 2] >= 0)
        order = np.argsort(records[held, 0], kind="stable")
        return State(records[held, 0][order], held[order] + 1, tables.read(name),
                     tables.read(name, part="momentum1"))

    def rows_of(self, keys: np.ndarray) -> torch.Tensor:
        """Rows of keys of any shape, 0 = none."""
        if not self.keys.size:
            return torch.zeros(keys.shape, dtype=torch.int64)
        at = np.minimum(np.searchsorted(self.keys, keys), self.keys.size - 1)
        return torch.from_numpy(np.where(self.keys[at] == keys, self.owners[at], 0))


def compare(verdict: Verdict, work: Workload, before: State, after: State,
            batches: Sequence[tuple[np.ndarray, torch.Tensor]], out: torch.Tensor) -> None:
    """One table's step.

    Args:
        verdict: takes what was found.
        work: the workload.
        before, after: the table's state.
        batches: by rank, its keys int64 [B * pooling] and the gradient of its output [B, D].
        out: rank 0's output, float32 [B, D].
    """
    rows = [before.rows_of(keys.reshape(-1, work.pooling)) for keys, _ in batches]
    verdict.compare("pooled", out, before.rows[rows[0]].sum(1))
    total = torch.zeros_like(before.rows)
    for of, (_, gradient) in zip(rows, batches, strict=True):
        total.index_add_(0, of.reshape(-1), gradient.repeat_interleave(work.pooling, dim=0))
    total /= len(batches)  # the mean of the ranks' losses
    touched = torch.cat([of.reshape(-1) for of in rows]).unique()
    # Rows that have gone to other keys since begin anew.
    kept = np.isin(touched.numpy(), after.owners[~np.isin(after.keys, before.keys)], invert=True)
    touched = touched[torch.from_numpy(kept)]
    squares = before.squares[touched] + total[touched].square().mean(1)
    rate = LEARNING_RATE / (squares.sqrt() + EPS)
    verdict.compare("rows", after.rows[touched],
                    before.rows[touched] - rate[:, None] * total[touched])
    verdict.compare("tables", after.squares[touched], squares)
