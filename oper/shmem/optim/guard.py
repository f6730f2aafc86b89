"""The guard against gradients that are not finite: raises an error or sets them to zero."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import torch

from oper.errors import InvalidInputError, fail
from oper.shmem.batch import Lookup
from oper.shmem.by_feature import key_bounds
from oper.tables import TableSpec

GUARDS = ("off", "stop", "skip")


class GradientGuard:
    """Checks the gradient of a lookup's output before it is used.

    Args:
        features: (feature name, table name) in output order.
        specs: the tables by name.

    Attributes:
        mode: one of `GUARDS`: ``"off"`` does nothing, ``"stop"`` raises an error, ``"skip"`` warns
            and sets the gradient row that is not finite to zero (a row is a sample's gradient, or
            an id's in unpooled lookups).
    """

    def __init__(self, features: Sequence[tuple[str, str]], specs: Mapping[str, TableSpec]
                 ) -> None:
        self._tables = [table for _, table in features]
        self._ends = torch.tensor([specs[table].dim for table in self._tables]).cumsum(0)
        self.mode = "off"

    def choose(self, mode: str) -> None:
        """Set the mode; raises InvalidInputError unless it is one of `GUARDS`."""
        if mode not in GUARDS:
            raise InvalidInputError("cannot guard gradients", "gradient_guard", mode,
                                    f"one of {GUARDS}", "correct the name of the guard")
        self.mode = mode

    def apply(self, grad: torch.Tensor, batch: Lookup, offsets: torch.Tensor, step: int
              ) -> torch.Tensor:
        """Check a gradient; returns it, with rows that are not finite set to zero.

        Args:
            grad: float32 [B, columns] (pooled) or [N, D] (unpooled).
            batch: the batch of the forward pass.
            offsets: int64 [num_keys * B + 1], bounds of its bags.
            step: number of the update, for the message.

        Raises:
            InvalidInputError: a number is not finite, and the mode is ``"stop"``.
        """
        # The sum is the cheapest test; a sum of finite numbers may overflow, so check again.
        if bool(torch.isfinite(grad.sum())):
            return grad
        finite = torch.isfinite(grad)
        if bool(finite.all()):
            return grad
        row, column = (int(x) for x in (~finite).nonzero()[0])
        text = fail(f"the gradient of table {self._table(batch, offsets, row, column)!r} in update "
                    f"{step} is not finite", f"number at {(row, column)}", float(grad[row, column]),
                    "finite numbers", "lower the learning rate, or clip gradients")
        if self.mode == "stop":
            raise InvalidInputError(text)
        bad = ~finite.all(dim=1, keepdim=True)
        warnings.warn(f"{text}; {int(bad.sum())} of {grad.shape[0]} gradient rows count as zero",
                      stacklevel=2)
        return grad.masked_fill(bad, 0.0)

    def _table(self, batch: Lookup, offsets: torch.Tensor, row: int, column: int) -> str:
        """Return the name of the table to which an element of the gradient belongs."""
        if batch.pooled:
            return self._tables[int(torch.searchsorted(self._ends, column, right=True))]
        bounds = key_bounds(batch, offsets)
        for table, key in zip(self._tables, batch.key_of.tolist(), strict=True):
            row -= bounds[key + 1] - bounds[key]
            if row < 0:
                return table
        raise AssertionError("a row of no feature")
