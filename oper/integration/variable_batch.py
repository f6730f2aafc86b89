"""TorchRec's variable batch per feature: samples share bags, of which each is looked up once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from oper.errors import InvalidInputError
from oper.shmem.batch import SharedBags
from oper.support.own_rows import are_own_rows

_WHAT = "cannot pool a variable batch per feature"


def padded_lengths(features: KeyedJaggedTensor, names: Sequence[str], pooled: bool,
                   shares: bool) -> tuple[torch.Tensor, int, SharedBags | None]:
    """Arguments for the lookup of a variable batch per feature.

    Args:
        features: bags, and with ``inverse_indices`` the bag of each of the batch's B samples.
        names: the features, in the order of the output.
        pooled: whether bags are pooled.
        shares: whether the lookup gives every sample the rows of its bags; if not, `spread` does.

    Returns:
        Lengths as for one batch size, int [num_keys * n], with empty bags behind a key's own; n;
        and the bags of samples, or None where each sample has its own or the lookup gives no rows
        of samples.

    Raises:
        InvalidInputError: `pooled` is set but there are no ``inverse_indices``, they are missing
            for a feature, or have another form; there are not as many lengths as bags.
    """
    if pooled and features.inverse_indices_or_none() is None:
        raise InvalidInputError(_WHAT, "inverse_indices", None,
                                "the sample of the whole batch by feature",
                                "pass inverse_indices to the KeyedJaggedTensor")
    strides, lengths = features.stride_per_key(), features.lengths()
    size, least = max(strides, default=0), min(strides, default=0)
    samples = _samples(features, names, strides) if pooled and shares else None
    if samples is not None:
        size = max(size, samples.shape[1])  # in whose place the rows of bags can be put first
    elif size == least:
        return lengths, size, None
    if not lengths.is_cpu or torch.compiler.is_compiling():
        parts = torch.split(lengths, strides)
        padded = torch.cat([torch.nn.functional.pad(p, (0, size - p.numel())) for p in parts])
        return padded, size, None
    if sum(strides) != lengths.numel():
        raise InvalidInputError(_WHAT, "number of lengths", lengths.numel(),
                                f"{sum(strides)}, one per bag of each key", "correct the batch")
    padded, bags = torch.ops.oper.pad_lengths.default(lengths.contiguous(), strides, size)
    return padded, size, None if samples is None else SharedBags(bags, samples)


def _samples(features: KeyedJaggedTensor, names: Sequence[str], strides: Sequence[int]
             ) -> torch.Tensor | None:
    """The bag of each sample, int64 [F, B] in the order of `names`; None if every key has B bags
    and sample b has bag b. `strides`: number of bags of each key.

    Raises:
        InvalidInputError: inverse indices are missing for a feature, or have another form.
    """
    keys, rows = features.inverse_indices()
    if (rows.dtype != torch.int64 or rows.dim() != 2 or rows.shape[0] != len(keys)
            or not rows.is_cpu):
        raise InvalidInputError(_WHAT, "inverse_indices",
                                (rows.dtype, tuple(rows.shape), str(rows.device)),
                                f"int64 [{len(keys)}, B] in host memory, where the tables are",
                                "convert the batch")
    are_as_many = all(n == rows.shape[1] for n in strides)
    if are_as_many and are_own_rows(rows):
        return None
    rows = _rows_of(features, names).contiguous()
    if are_as_many and torch.ops.oper.are_own_rows.default(rows):
        return None
    return rows


def _rows_of(features: KeyedJaggedTensor, names: Sequence[str]) -> torch.Tensor:
    """Inverse indices in the order of `names`; raises InvalidInputError where one is missing."""
    keys, rows = features.inverse_indices()
    if keys == names:
        return rows
    at = {key: k for k, key in enumerate(keys)}
    missing = [n for n in names if n not in at]
    if missing:
        raise InvalidInputError(_WHAT, "features without inverse_indices", missing[:8], "none",
                                f"pass those of every feature, not only of {list(at)[:8]}")
    return rows[[at[n] for n in names]]


def spread(values: torch.Tensor, ends: Sequence[int], names: Sequence[str],
           features: KeyedJaggedTensor) -> torch.Tensor:
    """Expand pooled rows of distinct samples to the whole batch, by the ``inverse_indices``.

    Args:
        values: float32 [n of the lookup, sum of dims].
        ends: where the columns of each feature begin, and the end of the last; [F + 1].
        names: the features, in the order of the columns.
        features: their bags, and with ``inverse_indices`` the row of each of the batch's B samples.

    Returns:
        float32 [B, sum of dims].

    Raises:
        InvalidInputError: inverse indices are missing for a feature.
        IndexError: an index exceeds a feature's bags; in device memory, torch's device-side error.
    """
    rows = _rows_of(features, names)
    bags = dict(zip(features.keys(), features.stride_per_key(), strict=True))
    # Without the padding up to the most bags of a feature, to which no index may refer.
    parts = [values[:bags[name], a:b]
             for name, (a, b) in zip(names, itertools.pairwise(ends), strict=True)]
    # Unlike that of index_select, its gradient adds up in the order of the samples.
    return torch.cat([torch.nn.functional.embedding(*x)
                      for x in zip(rows, parts, strict=True)], dim=1)
