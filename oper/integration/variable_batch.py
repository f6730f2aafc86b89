"""TorchRec's variable batch per feature: distinct samples looked up once, then spread out again."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from oper.errors import InvalidInputError


def padded_lengths(features: KeyedJaggedTensor, pooled: bool) -> tuple[torch.Tensor, int]:
    """Lengths as for one batch size, int [num_keys * B], and B: the largest, others end in empty
    bags.

    Raises:
        InvalidInputError: `pooled`, and no ``inverse_indices``.
    """
    if pooled and features.inverse_indices_or_none() is None:
        raise InvalidInputError("cannot pool a variable batch per feature", "inverse_indices", None,
                                "the sample of the whole batch by feature",
                                "pass inverse_indices to the KeyedJaggedTensor")
    strides = features.stride_per_key()
    size = max(strides, default=0)
    if size == min(strides, default=0):
        return features.lengths(), size
    parts = torch.split(features.lengths(), strides)
    return torch.cat([torch.nn.functional.pad(p, (0, size - p.numel())) for p in parts]), size


def spread(values: torch.Tensor, dims: Sequence[int], names: Sequence[str],
           features: KeyedJaggedTensor) -> torch.Tensor:
    """Pooled rows of distinct samples as those of the whole batch, by the ``inverse_indices``.

    Args:
        values: float32 [n of the lookup, sum of dims].
        dims: columns of each feature.
        names: the features, in the order of the columns.
        features: their bags, and with ``inverse_indices`` the row of each of the batch's B samples.

    Returns:
        float32 [B, sum of dims]; `values` itself where every sample has bags of its own.

    Raises:
        InvalidInputError: not of every feature, or a row that the feature has not.
    """
    what = "cannot pool a variable batch per feature"
    keys, samples = features.inverse_indices()
    at = {key: k for k, key in enumerate(keys)}
    missing = [n for n in names if n not in at]
    if missing:
        raise InvalidInputError(what, "inverse_indices of", missing[:8], f"keys {list(at)[:8]}",
                                "pass those of every feature")
    rows = samples if list(names) == list(keys) else samples[[at[n] for n in names]]
    if not rows.is_cpu or torch.compiler.is_compiling():
        parts = torch.split(values, list(dims), dim=1)
        # Unlike that of index_select, its gradient adds up in the order of the samples.
        return torch.cat([torch.nn.functional.embedding(*x)
                          for x in zip(rows, parts, strict=True)], dim=1)
    rows = rows.contiguous()
    rows_of = dict(zip(features.keys(), features.stride_per_key(), strict=True))
    limits = [rows_of[name] for name in names]
    kind = torch.ops.oper.kind_of_rows(rows, limits)
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
        values, rows, [0, *itertools.accumulate(dims)])
    return spread_out


class _Spread(torch.autograd.Function):
    """Rows of samples; gradients add up in the order of the samples."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, rows: torch.Tensor, ends: list[int]
                ) -> torch.Tensor:
        ctx.save_for_backward(rows)
        ctx.ends, ctx.num_rows = ends, len(values)
        out: torch.Tensor = torch.ops.oper.spread_rows(values, rows, ends)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        rows, = ctx.saved_tensors
        return torch.ops.oper.gather_rows(gradient.contiguous(), rows, ctx.ends,
                                          ctx.num_rows), None, None
