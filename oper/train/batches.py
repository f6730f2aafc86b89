"""Preprocessed rows as the batches that TorchRec's DLRM takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from oper.data import ArrayBatch
from oper.data.loading.kjt import torchrec_batch


def to_batch(arrays: ArrayBatch, keys: Sequence[str]) -> Any:
    """A TorchRec ``Batch`` of B samples.

    Args:
        arrays: labels float32 [B], dense float32 [B, D], ids int64 [C, B] (one each) or [L] with
            lengths int32 [C, B] (bags).
        keys: the features, int [C] of them.

    The KJT's lengths are int32 (what FBGEMM's CPU kernels are fastest with) and its offsets are
    worked out, so that no engine pays for that.
    """
    size = arrays.num_samples
    if arrays.lengths is None:
        lengths = torch.ones(len(keys) * size, dtype=torch.int32)
        per_key = [size] * len(keys)
    else:
        lengths = torch.from_numpy(arrays.lengths.reshape(-1))
        per_key = arrays.lengths.sum(axis=1).tolist()
    return torchrec_batch(
        torch.from_numpy(arrays.dense),
        {"keys": list(keys), "values": torch.from_numpy(arrays.ids.reshape(-1)),
         "lengths": lengths, "stride": size, "length_per_key": per_key},
        torch.from_numpy(arrays.labels))
