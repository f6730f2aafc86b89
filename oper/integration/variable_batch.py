"""TorchRec's variable batch per feature: distinct samples looked up once, then spread out again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from oper.errors import InvalidInputError, fail


def padded_lengths(features: KeyedJaggedTensor, pooled: bool) -> tuple[torch.Tensor, int]:
    """Lengths as for one batch size, int [num_keys * B], and B: the largest, others end in empty
    bags.

    Raises:
        InvalidInputError: `pooled`, and no ``inverse_indices``.
    """
    if pooled and features.inverse_indices_or_none() is None:
        raise InvalidInputError(
            fail("cannot pool a variable batch per feature", "inverse_indices", None,
                 "the sample of the whole batch by feature",
                 "pass inverse_indices to the KeyedJaggedTensor"))
    strides = features.stride_per_key()
    size = max(strides, default=0)
    parts = torch.split(features.lengths(), strides)
    return torch.cat([torch.nn.functional.pad(p, (0, size - p.numel())) for p in parts]), size


def spread(values: torch.Tensor, dims: Sequence[int], names: Sequence[str], keys: Sequence[str],
           samples: torch.Tensor) -> torch.Tensor:
    """Pooled rows of distinct samples as those of the whole batch, by the ``inverse_indices``.

    Args:
        values: float32 [B of the lookup, sum of dims].
        dims: columns of each feature.
        names: the features, in the order of the columns.
        keys: features of the ``inverse_indices``.
        samples: int64 [keys, B of the whole batch], the row of each sample.

    Returns:
        float32 [B of the whole batch, sum of dims].

    Raises:
        InvalidInputError: not of every feature.
    """
    at = {key: k for k, key in enumerate(keys)}
    missing = [n for n in names if n not in at]
    if missing:
        raise InvalidInputError(fail("cannot pool a variable batch per feature",
                                     "inverse_indices of", missing[:8], f"keys {list(at)[:8]}",
                                     "pass those of every feature"))
    parts = list(torch.split(values, list(dims), dim=1))
    size = samples.shape[1]
    whole = torch.arange(size, device=samples.device)
    are_whole = True
    for k, name in enumerate(names):
        rows = samples[at[name]]
        if samples.is_cpu and torch.equal(rows, whole):  # every sample has a bag of its own
            parts[k] = parts[k][:size]
        else:
            # Unlike that of index_select, its gradient adds up in the order of the samples, and
            # whole rows at a time.
            parts[k] = torch.nn.functional.embedding(rows, parts[k])
            are_whole = False
    return values[:size] if are_whole else torch.cat(parts, dim=1)
