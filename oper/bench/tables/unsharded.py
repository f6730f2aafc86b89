"""Unsharded tables in one process: `nn.EmbeddingBag`s, TorchRec's collection, fbgemm's bags."""

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
    """fbgemm's table-batched bags with exact row-wise Adagrad.

    Args:
        num_rows: rows of each table.
        dim: columns of all tables.
        rows_of: initial rows of a table by its number, [num_rows, dim].
        device: where it runs; the CPU by default.
        location: place of its rows on a GPU: ``"DEVICE"``, ``"MANAGED"`` (host memory that kernels
            read) or ``"MANAGED_CACHING"`` (host memory behind a cache in device memory).
        dtype: type of its rows, ``"float32"`` or ``"float16"``.
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
    """One step of an unsharded model on the mean of its losses on the ranks' batches.

    For each batch the model draws random numbers from `seed` plus the rank; returns its results by
    rank.
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
    """Ids and offsets in fbgemm's form of whole batches, joined from `everyones` by number and
    rank."""
    kjts = [make_kjt(work, np.concatenate(x, axis=1)) for x in everyones]
    return [(k.values(), k.offsets().long()) for k in kjts]


def make_peers(work: Workload, collection: Any, everyones: Sequence[Sequence[np.ndarray]]
               ) -> dict[str, Call]:
    """Lookups of whole batches, by name of `PEERS`; each takes a batch number.

    Args:
        work: the workload.
        collection: `EmbeddingBagCollection` on CPU; its weights are shared or copied.
        everyones: ids of each batch by rank, int64 [F, batch_size / W * pooling].
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
