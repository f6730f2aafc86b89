"""Preprocessed rows as the batches that TorchRec's DLRM takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from oper.data import ArrayBatch


def to_batch(arrays: ArrayBatch, keys: Sequence[str]) -> Any:
    """A TorchRec ``Batch`` of one id per sample and feature.

    Args:
        arrays: labels float32 [B], dense float32 [B, D], ids int64 [C, B].
        keys: the features, int [C] of them.

    The KJT's lengths are int32 (what FBGEMM's CPU kernels are fastest with) and its offsets are
    worked out, so that no engine pays for that.
    """
    from torchrec.datasets.utils import Batch
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    num_keys, size = arrays.ids.shape
    kjt = KeyedJaggedTensor(
        list(keys), torch.from_numpy(arrays.ids.reshape(-1)),
        lengths=torch.ones(num_keys * size, dtype=torch.int32), stride=size,
        length_per_key=[size] * num_keys)
    kjt.offsets()
    return Batch(torch.from_numpy(arrays.dense), kjt, torch.from_numpy(arrays.labels))
