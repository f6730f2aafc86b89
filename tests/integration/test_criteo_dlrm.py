"""DLRM on real clicks: sharded training equals the unsharded model."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from oper.shmem.optim.optimizers import RowWiseAdagrad
from tests.runtime_support import assert_bitwise, run_ranks
from tests.support import real_data

STEPS, BATCH, DIM = 22, 48, 16
OPTIMIZER = RowWiseAdagrad(lr=0.05, eps=1e-8)
DENSE_LR = 0.05
# Rows per categorical field; ids are the hashes modulo these. One field has a single row.
ROWS = [1 if k == 8 else 4000 if k in (2, 3, 11, 15, 20) else 37 + 61 * k for k in range(26)]


@functools.cache
def click_log() -> tuple[np.ndarray, np.ndarray, list[list[list[int]]]]:
    """Labels, log-scaled dense features, and the ids of each sample and field (missing = none)."""
    labels, dense, ids = [], [], []
    with real_data("criteo_kaggle_10k/train.txt").open(encoding="ascii") as lines:
        for line in lines:
            fields = line.rstrip("\n").split("\t")
            labels.append(int(fields[0]))
            dense.append([np.log1p(max(0, int(x or 0))) for x in fields[1:14]])
            ids.append([[int(x, 16) % ROWS[k]] if x else [] for k, x in enumerate(fields[14:40])])
    return np.array(labels), np.array(dense, np.float32), ids


def batches(world_size: int, double: bool = False) -> list[list[Any]]:
    from torchrec import KeyedJaggedTensor
    from torchrec.datasets.utils import Batch

    labels, dense, ids = click_log()
    parts, at = [], 0
    for step in range(STEPS):
        ranks = []
        for rank in range(world_size):
            size = BATCH - 5 * ((rank + step) % 3)  # unequal batches
            rows = range(at, at + size)
            at += size
            bags = [ids[r][k] for k in range(26) for r in rows]
            ranks.append(Batch(
                torch.from_numpy(dense[at - size:at].astype(np.float64 if double else np.float32)),
                KeyedJaggedTensor.from_lengths_sync(
                    [f"c{k}" for k in range(26)],
                    torch.tensor([i for bag in bags for i in bag]),
                    torch.tensor([len(bag) for bag in bags])),
                torch.from_numpy(labels[at - size:at])))
        parts.append(ranks)
    return parts


def make_model() -> Any:
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType
    from torchrec.models.dlrm import DLRM, DLRMTrain

    torch.manual_seed(0)
    tables = [EmbeddingBagConfig(
        name=f"t{k}", num_embeddings=ROWS[k], embedding_dim=DIM, feature_names=[f"c{k}"],
        pooling=PoolingType.MEAN if k % 3 == 0 else PoolingType.SUM) for k in range(26)]
    return DLRMTrain(DLRM(EmbeddingBagCollection(tables=tables, device=torch.device("cpu")), 13,
                          [32, DIM], [32, 1], dense_device=torch.device("cpu")))


@functools.cache
def unsharded(world_size: int, double: bool) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    from tests.dlrm_support import train_unsharded

    model = make_model().to(torch.float64 if double else torch.float32)
    outputs = train_unsharded(model, batches(world_size, double), OPTIMIZER, DENSE_LR)
    return [torch.cat(o) for o in outputs], {k: v.detach() for k, v in model.state_dict().items()}


@functools.cache
def sharded(world_size: int, kind: str) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    import oper
    from tests.dlrm_support import EBC, copies, plan_for, train_sharded_rank, virtual_ranks

    base = make_model()
    plan = plan_for(base.get_submodule(EBC), world_size, kind)
    models, data = copies(base, world_size), batches(world_size)
    with virtual_ranks() as local:
        def body(group):
            local.group = group
            model = oper.shard(models[group.rank], plan=plan, optimizer=OPTIMIZER)
            outputs = train_sharded_rank(model, data, group, DENSE_LR)
            return outputs, model.state_dict()

        ranks = run_ranks(world_size, body)
    for _, state in ranks[1:]:
        assert_bitwise(state, ranks[0][1], "the ranks' models")
    return [torch.cat(step) for step in zip(*(o for o, _ in ranks), strict=True)], ranks[0][1]


@pytest.mark.parametrize("kind", ["replicated", "striped", "owned", "mixed0"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_dlrm_on_real_clicks(world_size: int, kind: str) -> None:
    click_log()
    from tests.dlrm_support import assert_close

    (want, weights), (best, best_weights) = (unsharded(world_size, d) for d in (False, True))
    got, state = sharded(world_size, kind)
    for step in range(STEPS):
        assert_close(got[step], want[step], f"logits of step {step}")
    assert_close(torch.cat(got), torch.cat(want), "all logits", torch.cat(best))
    assert list(state) == list(weights)
    start = make_model().state_dict()
    for name, want_weight in weights.items():
        assert state[name].shape == want_weight.shape
        assert_close(state[name], want_weight, name, best_weights[name])
        assert not torch.equal(state[name], start[name]), f"{name} has not been trained"


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_plans_agree_bit_for_bit_on_real_clicks(world_size: int) -> None:
    click_log()
    outputs, state = sharded(world_size, "striped")
    for kind in ("replicated", "owned", "mixed0"):
        others, other_state = sharded(world_size, kind)
        assert_bitwise(others, outputs, f"{kind}: logits")
        assert_bitwise(other_state, state, f"{kind}: weights")
