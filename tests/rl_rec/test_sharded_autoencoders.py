"""The autoencoders under `oper.shard`: the same losses as unsharded, step by step."""

from __future__ import annotations

import pytest
import torch

from tests.world_support import run_world

pytest.importorskip("torchrec")
from oper.integration.table_tensor import TableParameter
from oper.rl_rec.models.base import Histories, Recommender
from oper.rl_rec.models.cadvae import CaDVAE, CaDVAEConfig, Concepts
from oper.rl_rec.models.macridvae import MacridVAE, MacridVAEConfig
from oper.rl_rec.models.multvae import MultVAE, MultVAEConfig

NUM_ITEMS, USERS, STEPS, TABLE_LR, LR, EPS = 300, 12, 24, 0.1, 0.02, 1e-8


def build(kind: str) -> Recommender:
    """The same weights on every rank."""
    torch.manual_seed(5)
    if kind == "multvae":
        return MultVAE(NUM_ITEMS, MultVAEConfig(hidden=24, dim=8, decoder_hidden=12, sampled=40))
    if kind == "macridvae":
        return MacridVAE(NUM_ITEMS, MacridVAEConfig(num_concepts=3, dim=8, temperature=0.5))
    shares = torch.softmax(3 * torch.randn(NUM_ITEMS, 3), 1)
    graph = torch.tensor([[0.0, 0.6, 0.0], [0.0, 0.0, -0.5], [0.0, 0.0, 0.0]])
    config = CaDVAEConfig(num_concepts=3, hidden=24, dim=8, temperature=0.5, sampled=40,
                          layer="linear" if kind == "cadvae-learned" else "nonlinear")
    if kind == "cadvae-learned":  # gradients reach the weights of the bags
        return CaDVAE(NUM_ITEMS, config)
    return CaDVAE(NUM_ITEMS, config, Concepts(shares, graph, torch.zeros(3), torch.ones(3)))


def batch_of(step: int, rank: int) -> Histories:
    """Skewed items; ranks of unequal batches, users without any item."""
    g = torch.Generator().manual_seed(1000 * step + rank)
    lengths = torch.randint(0, 9, (USERS - rank,), generator=g)
    total = int(lengths.sum())
    items = 1 + (torch.rand(total, generator=g) ** 3 * (NUM_ITEMS - 1)).long()
    return Histories(torch.arange(USERS - rank), items,
                     (torch.rand(total, generator=g) > 0.2).float(), lengths)


def is_table(name: str) -> bool:
    return "item_in." in name or "item_out." in name


def unsharded_losses(kind: str, world_size: int, train: bool = True) -> list[float]:
    """Mean of the ranks' losses; row-wise Adagrad written out, torch's Adagrad for the rest."""
    model = build(kind).train()
    tables = {n: p for n, p in model.named_parameters() if is_table(n)}
    sums = {n: torch.zeros(len(p)) for n, p in tables.items()}
    dense = torch.optim.Adagrad([p for n, p in model.named_parameters() if not is_table(n)], lr=LR)
    losses = []
    for step in range(STEPS):
        model.zero_grad()
        model.schedule(step, STEPS)
        total = torch.zeros(())
        for rank in range(world_size):
            torch.manual_seed(7 * step + rank)  # dropout, xi and candidates of that rank
            total = total + model(batch_of(step, rank))[0] / world_size
        total.backward()
        losses.append(total.item())
        if not train:
            continue
        dense.step()
        with torch.no_grad():
            for name, weight in tables.items():
                assert weight.grad is not None
                sums[name] += weight.grad.square().mean(1)
                weight -= TABLE_LR * weight.grad / (sums[name].sqrt() + EPS).unsqueeze(1)
    return losses


def sharded_losses(rank: int, world_size: int, kind: str) -> tuple[list[float], list[str]]:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import oper

    model = build(kind)
    torch.manual_seed(0)
    stats = oper.collect((model.lookups(batch_of(1000 + step, 0)) for step in range(8)), model)
    sharded = oper.shard(model, stats, optimizer=oper.RowWiseAdagrad(TABLE_LR, EPS),
                         batch_size=USERS)
    left = [n for n, p in sharded.named_parameters() if is_table(n) and p.numel() > 0
            and p.shape[0] == NUM_ITEMS and not isinstance(p, TableParameter)]
    ddp = DistributedDataParallel(sharded)
    dense = torch.optim.Adagrad([p for n, p in ddp.named_parameters() if not is_table(n)], lr=LR)
    losses = []
    for step in range(STEPS):
        dense.zero_grad()
        sharded.schedule(step, STEPS)
        torch.manual_seed(7 * step + rank)
        loss, _ = ddp(batch_of(step, rank))
        loss.backward()
        dense.step()
        mean = loss.detach() / world_size
        dist.all_reduce(mean)
        losses.append(float(mean))
    return losses, left


@pytest.mark.parametrize(("kind", "world_size"), [
    ("cadvae", 2), ("cadvae", 4), ("cadvae-learned", 2), ("multvae", 2), ("macridvae", 2)])
def test_losses_equal_the_unsharded_ones(kind: str, world_size: int) -> None:
    want = unsharded_losses(kind, world_size)
    for losses, left in run_world(world_size, sharded_losses, kind):
        assert left == []  # the tables are OPER's now
        assert losses == pytest.approx(want, rel=1e-5, abs=1e-5)
    # The updates matter: without them the last losses are others.
    assert abs(unsharded_losses(kind, world_size, train=False)[-1] - want[-1]) > 0.01
