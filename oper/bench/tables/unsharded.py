"""Single-process contenders: `nn.EmbeddingBag`s, TorchRec's unsharded collection, fbgemm's bags."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from oper.bench.core.measure import Call
from oper.bench.core.workload import Workload, make_kjt

if TYPE_CHECKING:
    from oper.train.engines import Engine

PEERS = ("nn_embedding_bag", "ebc", "fbgemm")
LEARNING_RATE, EPS = 0.02, 1e-8  # row-wise Adagrad of all contenders' tables


def fbgemm_bags(num_rows: Sequence[int], dim: int, rows_of: Callable[[int], torch.Tensor],
                device: torch.device | None = None, location: str = "DEVICE",
                dtype: str = "float32") -> Any:
    """fbgemm's table-batched embedding bags with exact row-wise Adagrad.

    Args:
        num_rows: rows of each table.
        dim: columns of each table.
        rows_of: function from a table's index to its initial rows [num_rows, dim].
        device: device of the kernels; the CPU by default.
        location: where a GPU's rows are: ``"DEVICE"``, ``"MANAGED"`` (host memory that kernels
            read) or ``"MANAGED_CACHING"`` (host memory with a cache in device memory).
        dtype: dtype of the rows, ``"float32"`` or ``"float16"``; outputs are float32.
    """
    from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    device = device or torch.device("cpu")
    on_gpu = device.type == "cuda"
    where = EmbeddingLocation[location] if on_gpu else EmbeddingLocation.HOST
    compute = ComputeDevice.CUDA if on_gpu else ComputeDevice.CPU
    is_half = dtype == "float16"
    bags = SplitTableBatchedEmbeddingBagsCodegen(
        [(n, dim, where, compute) for n in num_rows], pooling_mode=PoolingMode.SUM, device=device,
        weights_precision=SparseType.FP16 if is_half else SparseType.FP32,
        output_dtype=SparseType.FP32, stochastic_rounding=is_half,
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD, learning_rate=LEARNING_RATE, eps=EPS)
    for k, weight in enumerate(bags.split_embedding_weights()):
        weight.copy_(rows_of(k).detach())
    return bags


def fbgemm_of(collection: Any) -> Any:
    """`fbgemm_bags` on the CPU with the weights of an `EmbeddingBagCollection`."""
    weights = [bag.weight for bag in collection.embedding_bags.values()]
    return fbgemm_bags([w.shape[0] for w in weights], weights[0].shape[1], weights.__getitem__)


def step_on_shares(engine: Engine, shares: Sequence[Any], seed: int | None = None
                   ) -> list[tuple[torch.Tensor, Any]]:
    """Train an unsharded model for one step on the mean loss of the ranks' batches, `shares`.

    With `seed`, torch's seed is `seed` + r in the forward pass of rank r's batch. Returns by rank
    the detached loss and the rest of the model's result.
    """
    for optimizer in engine.optimizers:
        optimizer.zero_grad()
    found = []
    for rank, batch in enumerate(shares):
        if seed is not None:
            torch.manual_seed(seed + rank)
        loss, rest = engine.module(batch)
        (loss / len(shares)).backward()
        found.append((loss.detach(), rest))
    for optimizer in engine.optimizers:
        optimizer.step()
    return found


def whole_batches(work: Workload, everyones: Sequence[Sequence[np.ndarray]]
                  ) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Ids int64 [L] and offsets int64 [F * B + 1] of batches that join all ranks' shares.
    `everyones` holds ids [F, B / W * pooling], indexed by batch and rank."""
    kjts = [make_kjt(work, np.concatenate(x, axis=1)) for x in everyones]
    return [(k.values(), k.offsets().long()) for k in kjts]


def make_peers(work: Workload, collection: Any, everyones: Sequence[Sequence[np.ndarray]]
               ) -> dict[str, Call]:
    """Functions by contender of `PEERS` that look up a batch of all ranks' samples by its index.

    Args:
        work: the workload.
        collection: `EmbeddingBagCollection` on CPU; ``fbgemm`` copies its weights, the remaining
            contenders share them.
        everyones: ids int64 [F, batch_size / W * pooling], indexed by batch and rank.
    """
    ids = [np.concatenate(x, axis=1) for x in everyones]
    kjts = [make_kjt(work, x) for x in ids]
    bags = list(collection.embedding_bags.values())
    starts = torch.arange(0, work.batch_size * work.pooling, work.pooling)
    columns = [[torch.from_numpy(row) for row in x] for x in ids]
    fused, flat = fbgemm_of(collection), [(k.values(), k.offsets().long()) for k in kjts]
    return {
        "nn_embedding_bag": lambda k: [
            torch.nn.functional.embedding_bag(row, bag.weight, starts, mode="sum")
            for bag, row in zip(bags, columns[k % len(columns)], strict=True)],
        "ebc": lambda k: collection(kjts[k % len(kjts)]).values(),
        "fbgemm": lambda k: fused(*flat[k % len(flat)])}
