"""The recommenders under `oper.shard`: the same losses as unsharded, step by step."""

from __future__ import annotations

import pytest
import torch

from oper.integration.table_tensor import TableParameter
from oper.rl_rec.models.autoencoders.cadvae import (
    CaDVAE,
    CaDVAEConfig,
    Concepts,
    MacridVAEConfig,
)
from oper.rl_rec.models.autoencoders.multvae import MultVAE, MultVAEConfig
from oper.rl_rec.models.base import Histories, Recommender, Sequences
from oper.rl_rec.models.cdt4rec import CDT4Rec, CDT4RecConfig
from oper.rl_rec.models.hstu import HSTU, HSTUConfig
from oper.rl_rec.models.sasrec import SASRec, SASRecConfig
from oper.train.config import OptimizerConfig, TrainConfig
from oper.train.engines import is_table, unsharded, with_oper
from tests.world_support import run_world

NUM_ITEMS, NUM_USERS, STEPS = 400, 40, 24
AUTOENCODERS = ("cadvae", "cadvae-learned", "multvae", "macridvae")


def rule_of(kind: str, scale: float = 1.0) -> OptimizerConfig:
    tables_lr = 0.1 if kind in AUTOENCODERS else 0.05
    return OptimizerConfig(tables_lr=tables_lr * scale, dense="adagrad", dense_lr=0.02 * scale)


def build(kind: str) -> Recommender:
    """Build a model with the same weights on every rank."""
    torch.manual_seed(5)
    if kind == "multvae":
        return MultVAE(NUM_ITEMS, MultVAEConfig(hidden=24, dim=8, decoder_hidden=12, sampled=40))
    if kind == "macridvae":
        return CaDVAE(NUM_ITEMS, MacridVAEConfig(num_concepts=3, hidden=24, dim=8, temperature=0.5),
                      Concepts(graph=torch.zeros(3, 3)))
    if kind == "sasrec":
        return SASRec(SASRecConfig(dim=16, steps=6, window=4, negatives=50), NUM_ITEMS)
    if kind == "hstu":
        return HSTU(HSTUConfig(dim=16, steps=6, window=4, negatives=50, rank_weight=0.5), NUM_ITEMS)
    if kind == "hstu-features":
        content = torch.stack([torch.randint(0, n, (NUM_ITEMS,)) for n in (9, 30)])
        return HSTU(HSTUConfig(dim=16, steps=6, window=4, negatives=50, rank_weight=0.5), NUM_ITEMS,
                    content=content, num_actions=4)
    if kind not in AUTOENCODERS:
        config = CDT4RecConfig(dim=16, user_dim=8, steps=6, window=4, negatives=50,
                               tied=kind != "untied",
                               backbone="interleaved" if kind == "interleaved" else "causal")
        return CDT4Rec(config, NUM_USERS, NUM_ITEMS, (4.0, 3.0))
    common = {"num_concepts": 3, "hidden": 24, "dim": 8, "temperature": 0.5, "sampled": 40}
    if kind == "cadvae-learned":  # gradients reach the weights of the bags
        return CaDVAE(NUM_ITEMS, CaDVAEConfig(**common))
    shares = torch.softmax(3 * torch.randn(NUM_ITEMS, 3), 1)
    graph = torch.tensor([[0.0, 0.6, 0.0], [0.0, 0.0, -0.5], [0.0, 0.0, 0.0]])
    return CaDVAE(NUM_ITEMS, CaDVAEConfig(**common, layer="nonlinear"),
                  Concepts(shares, graph, torch.zeros(3), torch.ones(3)))


def batch_of(kind: str, step: int, rank: int) -> Histories | Sequences:
    """Make batches with skewed items, of different sizes by rank, with users without items."""
    g = torch.Generator().manual_seed(1000 * step + rank)
    size = 12 - rank
    skip = torch.randint(0, 5, (size,), generator=g)
    lengths = skip + torch.randint(0, 7, (size,), generator=g)
    lengths[0] = skip[0] + 6
    total = int(lengths.sum())
    items = 1 + (torch.rand(total, generator=g) ** 3 * (NUM_ITEMS - 1)).long()
    users = torch.randint(1, NUM_USERS, (size,), generator=g)
    rewards = (torch.rand(total, generator=g) > 0.3).float()
    if kind in AUTOENCODERS:
        return Histories(users, items, rewards, lengths)
    return Sequences(users, items, rewards, lengths, skip, 4 * torch.rand(total, generator=g),
                     times=torch.randint(0, 100_000, (total,), generator=g).cumsum(0),
                     actions=torch.randint(0, 4, (total,), generator=g))


def unsharded_losses(kind: str, world_size: int, scale: float = 1.0) -> list[float]:
    """Compute the mean losses over ranks' batches in one process, with scaled learning rates."""
    engine = unsharded(build(kind).train(), rule_of(kind, scale))
    losses = []
    for step in range(STEPS):
        engine.bare.schedule(step, STEPS)
        for optimizer in engine.optimizers:
            optimizer.zero_grad()
        total = torch.zeros(())
        for rank in range(world_size):
            torch.manual_seed(7 * step + rank)  # dropout, noise and candidates of that rank
            total = total + engine.module(batch_of(kind, step, rank))[0] / world_size
        total.backward()
        for optimizer in engine.optimizers:
            optimizer.step()
        losses.append(total.item())
    return losses


def sharded_losses(rank: int, world_size: int, kind: str) -> tuple[list[float], list[str]]:
    import torch.distributed as dist

    import oper

    model = build(kind)
    torch.manual_seed(0)
    stats = oper.collect((model.lookups(batch_of(kind, 1000 + k, 0)) for k in range(8)), model)
    engine = with_oper(model, TrainConfig(data="-", batch_size=12, optimizer=rule_of(kind)),
                       stats=stats)
    left = [n for n, p in engine.bare.named_parameters()
            if is_table(n) and not isinstance(p, TableParameter)]
    losses = []
    for step in range(STEPS):
        engine.bare.schedule(step, STEPS)
        torch.manual_seed(7 * step + rank)
        mean = engine.step(batch_of(kind, step, rank))[0] / world_size
        dist.all_reduce(mean)
        losses.append(float(mean))
    engine.bare.eval()
    with torch.no_grad():  # one rank can use the model alone
        if rank == 0:
            encoded = engine.bare.encode(batch_of(kind, 0, 0))
            scores = engine.bare.scores(encoded, torch.arange(1, NUM_ITEMS))
            assert scores.shape == (12, NUM_ITEMS - 1)
    return losses, left


@pytest.mark.parametrize("kind", [
    "cadvae", "cadvae-learned", "multvae", "macridvae", "causal", "untied", "interleaved", "sasrec",
    "hstu", "hstu-features"])
def test_losses_equal_the_unsharded_ones(kind: str) -> None:
    want = unsharded_losses(kind, 2)
    for losses, left in run_world(2, sharded_losses, kind):
        assert left == []  # OPER has replaced all tables
        assert losses == pytest.approx(want, rel=1e-5, abs=1e-5)
    # Without updates of the tables, the last loss would differ.
    assert abs(unsharded_losses(kind, 2, scale=1e-9)[-1] - want[-1]) > 0.01
