"""The sequence models under `oper.shard`: the same losses as unsharded, step by step."""

from __future__ import annotations

import pytest
import torch

from tests.world_support import run_world

pytest.importorskip("torchrec")
from oper.integration.table_tensor import TableParameter
from oper.rl_rec.models.base import Recommender, Sequences
from oper.rl_rec.models.cdt4rec import CDT4Rec, CDT4RecConfig
from oper.rl_rec.models.sasrec import SASRec, SASRecConfig
from oper.train.config import OptimizerConfig
from oper.train.engines import is_table, unsharded

NUM_ITEMS, NUM_USERS, STEPS = 500, 40, 24
RULE = OptimizerConfig(tables_lr=0.05, dense="adagrad", dense_lr=0.02)


def build(kind: str) -> Recommender:
    """The same weights on every rank."""
    torch.manual_seed(5)
    if kind == "sasrec":
        return SASRec(SASRecConfig(dim=16, steps=6, window=4, negatives=50), NUM_ITEMS)
    config = CDT4RecConfig(dim=16, user_dim=8, steps=6, window=4, negatives=50,
                           tied=kind != "untied",
                           backbone="interleaved" if kind == "interleaved" else "causal")
    return CDT4Rec(config, NUM_USERS, NUM_ITEMS, (4.0, 3.0))


def batch_of(step: int, rank: int) -> Sequences:
    """Skewed items; ranks of unequal batches, users without any item."""
    g = torch.Generator().manual_seed(1000 * step + rank)
    size = 12 - rank
    skip = torch.randint(0, 5, (size,), generator=g)
    lengths = skip + torch.randint(0, 7, (size,), generator=g)
    lengths[0] = skip[0] + 6
    total = int(lengths.sum())
    items = 1 + (torch.rand(total, generator=g) ** 3 * (NUM_ITEMS - 1)).long()
    return Sequences(torch.randint(1, NUM_USERS, (size,), generator=g), items,
                     (torch.rand(total, generator=g) > 0.4).float(), lengths, skip,
                     4 * torch.rand(total, generator=g))


def unsharded_losses(kind: str, world_size: int) -> list[float]:
    """Mean of the ranks' losses."""
    engine = unsharded(build(kind).train(), RULE)
    losses = []
    for step in range(STEPS):
        for optimizer in engine.optimizers:
            optimizer.zero_grad()
        total = torch.zeros(())
        for rank in range(world_size):
            torch.manual_seed(7 * step + rank)  # dropout and candidates of that rank
            total = total + engine.module(batch_of(step, rank))[0] / world_size
        total.backward()
        for optimizer in engine.optimizers:
            optimizer.step()
        losses.append(total.item())
    return losses


def sharded_losses(rank: int, world_size: int, kind: str) -> tuple[list[float], list[str]]:
    import torch.distributed as dist

    import oper
    from oper.train.config import TrainConfig
    from oper.train.engines import with_oper

    model = build(kind)
    stats = oper.collect((tuple(model.lookups(batch_of(1000 + k, 0))) for k in range(8)), model)
    engine = with_oper(model, TrainConfig(data="-", batch_size=12, optimizer=RULE), stats=stats)
    left = [n for n, p in engine.bare.named_parameters()
            if is_table(n) and not isinstance(p, TableParameter)]
    losses = []
    for step in range(STEPS):
        torch.manual_seed(7 * step + rank)
        mean = engine.step(batch_of(step, rank))[0] / world_size
        dist.all_reduce(mean)
        losses.append(float(mean))
    engine.bare.eval()
    with torch.no_grad():  # one rank asks alone
        if rank == 0:
            batch = batch_of(0, 0)
            scores = engine.bare.scores(engine.bare.encode(batch), torch.arange(1, NUM_ITEMS))
            assert scores.shape == (12, NUM_ITEMS - 1)
    return losses, left


@pytest.mark.parametrize(("kind", "world_size"), [
    ("causal", 2), ("causal", 4), ("untied", 2), ("interleaved", 2), ("sasrec", 2)])
def test_losses_equal_the_unsharded_ones(kind: str, world_size: int) -> None:
    want = unsharded_losses(kind, world_size)
    for losses, left in run_world(world_size, sharded_losses, kind):
        assert left == []  # the tables are OPER's now
        assert losses == pytest.approx(want, rel=1e-5, abs=1e-5)
    assert want[-1] < want[0]  # something was learned: the comparison is of more than one state
