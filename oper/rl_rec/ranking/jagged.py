"""Jagged arrays of item ids, such as users' histories and held-out targets."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from oper.errors import InvalidInputError


@dataclass(frozen=True)
class Jagged:
    """N concatenated rows of item ids; raises InvalidInputError for invalid offsets.

    Attributes:
        values: int64 [L].
        offsets: int64 [N + 1], non-decreasing from 0 to L; row n is ``values[offsets[n]:offsets[n +
            1]]``.
    """

    values: torch.Tensor
    offsets: torch.Tensor

    def __post_init__(self) -> None:
        o = self.offsets
        if (o.ndim != 1 or o.numel() < 1 or int(o[0]) != 0 or int(o[-1]) != self.values.numel()
                or self.values.ndim != 1 or bool((o.diff() < 0).any())):
            raise InvalidInputError(
                "cannot read rows", "offsets", o.tolist()[:8],
                f"int64 [N + 1], non-decreasing from 0 to {self.values.numel()}, the number of "
                "values", "use Jagged.from_lengths with the length of each row")

    @classmethod
    def from_lengths(cls, values: torch.Tensor, lengths: torch.Tensor) -> Jagged:
        """Make rows from values [L] and the length of each row, int64 [N]."""
        return cls(values, torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]))

    def __len__(self) -> int:
        return self.offsets.numel() - 1

    @property
    def lengths(self) -> torch.Tensor:
        """Length of each row, int64 [N]."""
        return self.offsets.diff()

    @property
    def rows(self) -> torch.Tensor:
        """Row index of each value, int64 [L]."""
        return torch.repeat_interleave(torch.arange(len(self)), self.lengths)

    def __getitem__(self, chosen: torch.Tensor | slice) -> Jagged:
        """Select rows by indices int64 [M] (in that order) or by a slice."""
        rows = torch.arange(len(self))[chosen]
        lengths = self.lengths[rows]
        picked = Jagged.from_lengths(self.values.new_empty(int(lengths.sum())), lengths)
        start = torch.repeat_interleave(self.offsets[rows] - picked.offsets[:-1], lengths)
        return Jagged(self.values[start + torch.arange(start.numel())], picked.offsets)
