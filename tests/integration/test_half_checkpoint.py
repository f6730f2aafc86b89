"""16-bit rows in checkpoints and across hosts: rows and state are bit-identical under any plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

import oper
from oper.integration.torchrec_modules import table_specs
from tests.checkpoint_support import batch_of, flat, run_ranks
from tests.runtime_support import assert_bitwise, rich_plan

TYPES = {"a": DataType.FP16, "b": DataType.FP32, "c": DataType.BF16}
SIZES = {"a": 37, "b": 1, "c": 500}


def collection(seed: int) -> EmbeddingBagCollection:
    torch.manual_seed(seed)
    return EmbeddingBagCollection([EmbeddingBagConfig(
        name=f"t{f}", num_embeddings=SIZES[f], embedding_dim=8, feature_names=[f], data_type=t)
        for f, t in TYPES.items()])


def go_on(rank: int, world_size: int, plan: int, steps: range, load: str | None, save: str | None
          ) -> dict[str, torch.Tensor]:
    """Load, train and save."""
    bags = collection(0 if load is None else 9)
    kinds = {f"t{f}": "rowwise_adagrad" for f in TYPES}
    layout = rich_plan(table_specs(bags, kinds), world_size, plan, columns=True)
    model: Any = oper.shard(bags, plan=layout, optimizer=oper.RowWiseAdagrad(lr=0.1))
    if load is not None:
        oper.load_checkpoint(load, model, model.fused_optimizer)
    for step in steps:
        model(batch_of(step, rank, world_size)).values().float().square().sum().backward()
    if save is not None:
        oper.save_checkpoint(save, model, model.fused_optimizer, chunk_bytes=512)
        state = {"plain": dict(model.state_dict())}
        dcp.save(state, checkpoint_id=save + "-plain", no_dist=world_size == 1)
    return flat({"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()})


@pytest.mark.parametrize("labels, plan", [("a", 3), ("aa", 102), ("ab", 104)])
def test_16_bit_rows_move_between_plans_and_hosts(labels: str, plan: int, tmp_path: Path) -> None:
    """From two ranks to one, to two under another plan, and to two that do not share memory."""
    first = str(tmp_path / "first")
    held = run_ranks(go_on, 2, 101, range(3), None, first)
    dtypes = {v.dtype for v in held.values()}
    assert {torch.float16, torch.bfloat16, torch.float32} <= dtypes
    again = str(tmp_path / "again")
    there = run_ranks(go_on, len(labels), plan, range(3, 3), first, again,
                      labels=labels)
    assert_bitwise(there, held, "loaded by others")
    assert_bitwise(run_ranks(go_on, 2, 101, range(3, 3), again, None), held, "and back")
    # Plain calls of a program that OPER is no part of. (TorchRec makes fp16 of its bf16 tables.)
    rows = {k.removeprefix("/model/"): v for k, v in held.items() if k.startswith("/model/")}
    state = {"plain": {k: torch.empty_like(v) for k, v in rows.items()}}
    dcp.load(state, checkpoint_id=again + "-plain", no_dist=True)
    assert_bitwise(state["plain"], rows, "read without OPER")
