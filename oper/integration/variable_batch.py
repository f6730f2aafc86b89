"""TorchRec's variable batch per feature: samples share bags, and each bag is looked up once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from oper.errors import InvalidInputError
from oper.shmem.batch import SharedBags
from oper.support.own_rows import are_own_rows

_Inverse: TypeAlias = tuple[list[str], torch.Tensor]  # as `KeyedJaggedTensor.inverse_indices`
_WHAT = "cannot pool a variable batch per feature"


def padded_lengths(features: KeyedJaggedTensor, names: Sequence[str], pooled: bool,
                   shares: bool) -> tuple[torch.Tensor, int, SharedBags | None]:
    """Pad the lengths of a variable batch to the same number of bags for every key.

    Args:
        features: the bags, with ``inverse_indices`` [features, B]: the bag of each of B samples.
        names: the features, in the order of the output.
        pooled: whether bags are pooled.
        shares: whether the lookup expands pooled bags to samples; if not, `spread` does it.

    Returns:
        Lengths [num_keys * n] in the dtype of the input, where each key's bags are followed by
        empty bags; n; and the bags of samples for the lookup to expand, or None if the lookup does
        not expand them or sample b of every key has bag b.

    Raises:
        InvalidInputError: `pooled` is set but there are no ``inverse_indices``, they are missing
            for a feature or are not int64 [features, B] in host memory; the number of lengths
            differs from the number of bags.
    """
    inverse = features.inverse_indices_or_none()
    if pooled and inverse is None:
        raise InvalidInputError(_WHAT, "inverse_indices", None,
                                "for every feature, the bag of each sample",
                                "pass inverse_indices to the KeyedJaggedTensor")
    strides, lengths = features.stride_per_key(), features.lengths()
    size, least = max(strides, default=0), min(strides, default=0)
    samples = (_samples(inverse, names, size, least)
               if inverse is not None and pooled and shares else None)
    if samples is not None:
        size = max(size, samples.shape[1])  # the output, of B rows, first holds the bags' rows
    elif size == least:
        return lengths, size, None
    if not lengths.is_cpu or (samples is None and torch.compiler.is_compiling()):
        parts = torch.split(lengths, strides)
        padded = torch.cat([torch.nn.functional.pad(p, (0, size - p.numel())) for p in parts])
        return padded, size, None
    if sum(strides) != lengths.numel():
        raise InvalidInputError(_WHAT, "number of lengths", lengths.numel(),
                                f"{sum(strides)}, the sum of stride_per_key()",
                                "pass one length per bag of each key")
    padded, bags = torch.ops.oper.pad_lengths.default(lengths.contiguous(), strides, size)
    return padded, size, None if samples is None else SharedBags(bags, samples)


def _samples(inverse: _Inverse, names: Sequence[str], size: int, least: int
             ) -> torch.Tensor | None:
    """Return the bag of each sample, int64 [F, B] in the order of `names`. None if every key has B
    bags and sample b has bag b. A key has `least` to `size` bags."""
    keys, rows = inverse
    if (rows.dtype != torch.int64 or rows.dim() != 2 or rows.shape[0] != len(keys)
            or not rows.is_cpu):
        raise InvalidInputError(_WHAT, "inverse_indices",
                                (rows.dtype, tuple(rows.shape), str(rows.device)),
                                f"int64 [{len(keys)}, B] in host memory, like the tables",
                                "convert or move inverse_indices")
    are_as_many = size == least == rows.shape[1]
    if are_as_many and are_own_rows(rows):
        return None
    rows = _rows_of(inverse, names).contiguous()
    if are_as_many and torch.ops.oper.are_own_rows.default(rows):
        return None
    return rows


def _rows_of(inverse: _Inverse, names: Sequence[str]) -> torch.Tensor:
    """Return inverse indices in order of `names`; raises InvalidInputError if one is missing."""
    keys, rows = inverse
    if keys == names:
        return rows
    at = {key: k for k, key in enumerate(keys)}
    missing = [n for n in names if n not in at]
    if missing:
        raise InvalidInputError(_WHAT, "features without inverse_indices", missing[:8], "none",
                                f"pass inverse_indices of every feature, not only {list(at)[:8]}")
    return rows[[at[n] for n in names]]


def spread(values: torch.Tensor, ends: Sequence[int], names: Sequence[str],
           features: KeyedJaggedTensor) -> torch.Tensor:
    """Expand pooled rows of bags to the samples of the batch, using the ``inverse_indices``.

    Args:
        values: float32 [n, sum of dims], pooled rows; n as `padded_lengths` returns it.
        ends: first column of each feature, followed by the end of the last; [F + 1].
        names: the features, in the order of the columns.
        features: the bags, with ``inverse_indices`` [features, B]: the bag of each of B samples.

    Returns:
        float32 [B, sum of dims].

    Raises:
        InvalidInputError: inverse indices are missing for a feature.
        IndexError: an index exceeds a feature's bags; on GPUs, torch's device-side assertion fails.
    """
    rows = _rows_of(features.inverse_indices(), names)
    bags = dict(zip(features.keys(), features.stride_per_key(), strict=True))
    # Cut off the padding, which no index may refer to.
    parts = [values[:bags[name], a:b]
             for name, (a, b) in zip(names, itertools.pairwise(ends), strict=True)]
    # `embedding`, since its gradient is summed in the order of samples, unlike index_select's.
    return torch.cat([torch.nn.functional.embedding(*x)
                      for x in zip(rows, parts, strict=True)], dim=1)
