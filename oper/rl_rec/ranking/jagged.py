"""Jagged arrays of item ids, such as users' histories and held-out targets."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from oper.errors import require


@dataclass(frozen=True, slots=True, eq=False)
class Jagged:
    """N concatenated rows of item ids; raises InvalidInputError if lengths do not match.

    Attributes:
        values: int64 [L].
        lengths: length of each row, int64 [N], >= 0; they sum to L.
    """

    values: torch.Tensor
    lengths: torch.Tensor

    def __post_init__(self) -> None:
        negative = (self.lengths < 0).nonzero().flatten().tolist()
        total = int(self.lengths.sum())
        require("cannot read rows", "pass the length of each row",
                ("rows of negative length", negative[:8], not negative, "none"),
                ("sum of lengths", total, total == len(self.values),
                 f"{len(self.values)}, the number of values"))

    def __len__(self) -> int:
        return self.lengths.numel()

    @property
    def rows(self) -> torch.Tensor:
        """Row index of each value, int64 [L]."""
        return torch.repeat_interleave(self.lengths)
