"""TorchRec's variable batch per feature: distinct samples looked up once, then spread out again."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from oper.errors import InvalidInputError
from oper.support.own_rows import are_own_rows


def padded_lengths(features: KeyedJaggedTensor, pooled: bool
                   ) -> tuple[torch.Tensor, int, torch.Tensor | None]:
    """Lengths as for one batch size, int [num_keys * B]; B, the largest: others end in empty bags;
    and int64 [num_keys], how many each key has if nobody reads pooled rows of those behind them.

    Raises:
        InvalidInputError: `pooled` is set but there are no ``inverse_indices``.
    """
    inverse = features.inverse_indices_or_none()
    if pooled and inverse is None:
        raise InvalidInputError("cannot pool a variable batch per feature", "inverse_indices", None,
                                "the sample of the whole batch by feature",
                                "pass inverse_indices to the KeyedJaggedTensor")
    strides, lengths = features.stride_per_key(), features.lengths()
    size = max(strides, default=0)
    if size == min(strides, default=0):
        return lengths, size, None
    if not lengths.is_cpu or torch.compiler.is_compiling():
        parts = torch.split(lengths, strides)
        padded = torch.cat([torch.nn.functional.pad(p, (0, size - p.numel())) for p in parts])
        return padded, size, None
    padded, bags = torch.ops.oper.pad_lengths.default(lengths.contiguous(), strides, size)
    is_spread = pooled and inverse is not None and inverse[1].is_cpu
    return padded, size, bags if is_spread else None


def spread(values: torch.Tensor, ends: Sequence[int], names: Sequence[str],
           features: KeyedJaggedTensor, reads_all: bool = False) -> torch.Tensor:
    """Expand pooled rows of distinct samples to the whole batch, by the ``inverse_indices``.

    Args:
        values: float32 [n of the lookup, sum of dims]; rows of a feature after its own samples are
            not read.
        ends: where the columns of each feature begin, and the end of the last; [F + 1].
        names: the features, in the order of the columns.
        features: their bags, and with ``inverse_indices`` the row of each of the batch's B samples.
        reads_all: whether the gradient of all rows is read; if not, that of rows after a feature's
            own samples is left undefined.

    Returns:
        float32 [B, sum of dims]; `values` itself if no samples share bags.

    Raises:
        InvalidInputError: inverse indices are missing for a feature, or exceed its samples.
    """
    what = "cannot pool a variable batch per feature"
    keys, rows = features.inverse_indices()
    limits = features.stride_per_key()
    in_graph = torch.compiler.is_compiling()
    if (not in_graph and keys == names and are_own_rows(rows)
            and min(limits, default=0) == rows.shape[1] == values.shape[0]):
        return values
    if keys != names:
        at = {key: k for k, key in enumerate(keys)}
        missing = [n for n in names if n not in at]
        if missing:
            raise InvalidInputError(what, "inverse_indices of", missing[:8],
                                    f"keys {list(at)[:8]}", "pass those of every feature")
        rows = rows[[at[n] for n in names]]
    if not rows.is_cpu or in_graph:
        parts = [values[:, a:b] for a, b in itertools.pairwise(ends)]
        # Unlike that of index_select, its gradient adds up in the order of the samples.
        return torch.cat([torch.nn.functional.embedding(*x)
                          for x in zip(rows, parts, strict=True)], dim=1)
    rows = rows.contiguous()
    if features.keys() != names:
        of = dict(zip(features.keys(), limits, strict=True))
        limits = [of[name] for name in names]
    kind = torch.ops.oper.kind_of_rows.default(rows, limits)
    if kind < len(names):
        found = rows[kind]
        raise InvalidInputError(what, f"inverse_indices of {names[kind]}",
                                (int(found.min()), int(found.max())),
                                f"0 <= row < {limits[kind]}, the feature's samples",
                                "number the distinct samples from 0")
    if kind > len(names):  # every sample has bags of its own
        size = rows.shape[1]
        return values if len(values) == size else values[:size]
    spread_out: torch.Tensor = _Spread.apply(  # type: ignore[no-untyped-call]
        values, rows, ends, limits, reads_all)
    return spread_out


class _Spread(torch.autograd.Function):
    """Rows of samples; gradients add up in the order of the samples."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, rows: torch.Tensor, *layout: Any) -> torch.Tensor:
        ends, limits, reads_all = layout
        ctx.save_for_backward(rows)
        ctx.arguments = ends, len(values), limits, reads_all
        out: torch.Tensor = torch.ops.oper.spread_rows(values, rows, ends)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, = ctx.saved_tensors
        return (torch.ops.oper.gather_rows(gradient.contiguous(), rows, *ctx.arguments),
                None, None, None, None)
