"""Splitting batches by samples, and joining a model's outputs for the parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from oper.errors import InvalidInputError

_ARRAYS = torch.Tensor | np.ndarray


def split_batch(batch: Any, num_parts: int | Sequence[int]) -> tuple[list[Any], list[int]]:
    """Split a batch by samples, in order.

    Args:
        batch: tensors, arrays and `KeyedTensor`s with one row per sample, `JaggedTensor`s with one
            bag per sample, and `KeyedJaggedTensor`s, also within dataclasses (TorchRec's `Batch`),
            tuples, lists and dicts; other values are passed to every part.
        num_parts: number of parts, whose sizes differ by at most one sample; or their sizes in
            proportion, such as (1, 2).

    Returns:
        The parts, and the number of samples of each.

    Raises:
        InvalidInputError: a part would have no sample; tensors or features differ in their
            numbers of samples; the features of a `KeyedJaggedTensor` have different batch sizes
            (variable batch per feature); or an object that is not listed above has tensors as
            attributes.
    """
    sizes = {_num_samples(x) for x in _leaves(batch) if not isinstance(x, _ARRAYS) or x.ndim}
    shares = [1] * num_parts if isinstance(num_parts, int) else num_parts
    size = min(sizes, default=0)
    bounds = [size * x // sum(shares) for x in accumulate(shares, initial=0)]
    if len(sizes) != 1 or any(a == b for a, b in pairwise(bounds)):
        raise InvalidInputError("cannot split a batch", "numbers of samples of its tensors",
                                sorted(sizes),
                                "one number, which leaves no part of num_parts="
                                f"{num_parts} without a sample",
                                "pass a function as split=, use fewer parts, or drop the last, "
                                "smaller batch")
    return _split(batch, bounds), [b - a for a, b in pairwise(bounds)]


def _children(value: Any) -> list[Any] | None:
    """Return the contents of a container; None if `value` is not a container."""
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, tuple | list):
        return list(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, f.name) for f in dataclasses.fields(value)]
    return None


def _like(value: Any, children: list[Any]) -> Any:
    """Return a container of the type of `value` with other contents."""
    if isinstance(value, Mapping):
        return dict(zip(value, children, strict=True))
    if isinstance(value, tuple | list):
        return type(value)(*children) if hasattr(value, "_fields") else type(value)(children)
    return type(value)(*children)


def features_in(batch: Any) -> list[KeyedJaggedTensor]:
    """Return the `KeyedJaggedTensor`s in a batch, in order."""
    return [x for x in _leaves(batch) if isinstance(x, KeyedJaggedTensor)]


def _num_samples(value: Any) -> int:
    if isinstance(value, KeyedJaggedTensor):
        return value.stride()
    if isinstance(value, KeyedTensor):  # keys in columns (key_dim 1), or in rows: no samples
        return len(value.values()) if value.key_dim() else 0
    return value.lengths().numel() if isinstance(value, JaggedTensor) else len(value)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, _ARRAYS | KeyedJaggedTensor | JaggedTensor | KeyedTensor):
        yield value
    else:
        for child in _children(value) or ():
            yield from _leaves(child)


def _split(value: Any, bounds: Sequence[int]) -> list[Any]:
    if isinstance(value, KeyedJaggedTensor):
        return _split_features(value, bounds)
    if isinstance(value, JaggedTensor):
        return _split_bags(value, bounds)
    if isinstance(value, KeyedTensor):
        return [KeyedTensor(value.keys(), value.length_per_key(), x, value.key_dim())
                for x in _split(value.values(), bounds)]
    if isinstance(value, _ARRAYS) and value.ndim:
        return [value[a:b] for a, b in pairwise(bounds)]
    children = _children(value)
    if children is None or isinstance(value, _ARRAYS):
        held = [k for k, x in getattr(value, "__dict__", {}).items() if isinstance(x, _ARRAYS)]
        if held:  # passing all samples to every part would train them several times
            raise InvalidInputError("cannot split a batch", f"tensors in {type(value).__name__}",
                                    held[:8], "tensors in tuples, lists, dicts or dataclasses",
                                    "pass a function as split=")
        return [value] * (len(bounds) - 1)
    return [_like(value, list(of)) for of in zip(*(_split(c, bounds) for c in children),
                                                 strict=True)] or [value] * (len(bounds) - 1)


def _split_bags(bags: JaggedTensor, bounds: Sequence[int]) -> list[JaggedTensor]:
    offsets, lengths, weights = bags.offsets().tolist(), bags.lengths(), bags.weights_or_none()
    return [JaggedTensor(bags.values()[offsets[a]:offsets[b]],
                         None if weights is None else weights[offsets[a]:offsets[b]],
                         lengths[a:b]) for a, b in pairwise(bounds)]


def _split_features(features: KeyedJaggedTensor, bounds: Sequence[int]
                    ) -> list[KeyedJaggedTensor]:
    if features.variable_stride_per_key() or features.inverse_indices_or_none() is not None:
        raise InvalidInputError("cannot split a batch", "features",
                                "with a variable batch per feature or inverse_indices",
                                "one bag per sample and feature", "pass a function as split=")
    keys, size, weights = features.keys(), features.stride(), features.weights_or_none()
    lengths = features.lengths().view(len(keys), size)
    at = torch.tensor([[k * size + b for k in range(len(keys))] for b in bounds])
    begins = features.offsets()[at].tolist()  # per part and key, the index of its first id
    parts = []
    for (begin, end), (first, last) in zip(pairwise(bounds), pairwise(begins), strict=True):
        pieces = [slice(a, b) for a, b in zip(first, last, strict=True)]
        parts.append(KeyedJaggedTensor(
            keys, torch.cat([features.values()[x] for x in pieces]),
            None if weights is None else torch.cat([weights[x] for x in pieces]),
            lengths[:, begin:end].reshape(-1), stride=end - begin))
    return parts


def detached(value: Any) -> Any:
    """Return a model's output with all tensors detached from the autograd graph."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    children = _children(value)
    return value if children is None else _like(value, [detached(c) for c in children])


def joined(found: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Join the outputs of the parts of a batch into one output.

    Tensors and arrays are concatenated along the first dimension. Scalars that differ are averaged,
    weighted by `sizes`, the parts' numbers of samples.

    Raises:
        InvalidInputError: a value of another type differs between parts.
    """
    first = found[0]
    if isinstance(first, torch.Tensor):
        if first.dim():
            return torch.cat(list(found))
        return torch.stack([x * n for x, n in zip(found, sizes, strict=True)]).sum() / sum(sizes)
    if isinstance(first, np.ndarray) and first.ndim:
        return np.concatenate(found)
    children = _children(first)
    if children is None and all(x is first or x == first for x in found):
        return first
    if isinstance(first, int | float):
        return sum(x * n for x, n in zip(found, sizes, strict=True)) / sum(sizes)
    if children is None:
        raise InvalidInputError(
            "cannot join the outputs of the parts of a batch", "type of an output",
            type(first).__name__, "tensors, numbers, values equal in all parts, and "
            "tuples, lists, dicts and dataclasses of these", "return only such values")
    of_parts = zip(*(_children(x) or [] for x in found), strict=True)
    return _like(first, [joined(x, sizes) for x in of_parts])
