"""`oper.row_stats`: hot keys of dynamic tables get their own tiers from the directories' counts."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import oper
from oper.analysis import KeyCounter
from oper.analysis.presence import Lookups
from oper.errors import InvalidInputError
from oper.plan import Piece, Plan, TablePlan, Tier
from oper.replanning import learned
from oper.stats import AccessStats
from tests.integration.module_support import shard
from tests.references import Oracle
from tests.runtime_support import assert_bitwise
from tests.world_support import run_world

ROWS, DIM, BATCH, STEPS, HOT = 300, 8, 64, 8, 20
RULE = oper.DynamicTable(eviction="lfu", half_life=3, time_to_live=4, init_bound=0.5)


def keys_of(step: int) -> torch.Tensor:
    """Skewed keys [BATCH, 2]."""
    rng = np.random.default_rng(step)
    return torch.from_numpy((rng.zipf(1.2, (BATCH, 2)) % 4000) * 0x5851F42D4C957F2D)


def key_stats() -> AccessStats:
    counter = KeyCounter()
    for step in range(STEPS):
        counter.add([Lookups(keys_of(step).reshape(-1).numpy(), np.full(BATCH, 2))], "now")
    return AccessStats(BATCH * STEPS, {"weight": counter.finish()})


def bag(rule: oper.DynamicTable = RULE, **fields: Any) -> Any:
    torch.manual_seed(1)
    return shard(nn.EmbeddingBag(ROWS, DIM, mode="sum"), dynamic=rule,
                 optimizer=oper.RowWiseAdagrad(lr=0.1), **fields)


def step_of(model: Any, step: int, rank: int = 0, world_size: int = 1) -> torch.Tensor:
    out = model(keys_of(step).chunk(world_size)[rank])
    (out * torch.arange(DIM)).sum().mul(world_size).backward()
    return out.detach().clone()


def test_counts_equal_those_of_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, counts after half-lives and expiry, and the share of the default row."""
    model, oracle = bag(), Oracle(ROWS - 1, RULE)
    for step in range(STEPS):
        step_of(model, step)
        oracle.update(keys_of(step).reshape(-1).tolist())
    counts = {e.row: oracle.now_counts(e) for e in oracle.held.values() if oracle.is_live(e)}
    counts = {row: n for row, n in counts.items() if n}
    found = oper.row_stats(model, key_stats()).tables["weight"]
    usage = model.tables.keys.counts("weight")
    of = dict(zip(found.head_ids.tolist(), found.head_counts.tolist(), strict=True))
    default = of.pop(0)
    assert of == counts and len(counts) > 50
    assert default / found.num_accesses == pytest.approx(usage.default_share, abs=0.01)
    assert found.length_values.tolist() == [2] and found.num_rows == ROWS
    with monkeypatch.context() as changed:  # few of the counted lookups were of keys without rows
        changed.setattr(model.tables.keys, "counts", lambda name: replace(
            usage, lookups=10**9, missed=1))
        rare = oper.row_stats(model, key_stats()).tables["weight"]
        assert rare.head_counts[rare.head_ids == 0].tolist() == [1]
    monkeypatch.setattr(learned, "_HEAD", HOT)
    short = oper.row_stats(model, key_stats()).tables["weight"]
    assert short.head_ids.tolist() == found.head_ids[:HOT].tolist()
    assert [x.tolist() for x in short.count_histogram()] == [
        x.tolist() for x in found.count_histogram()]


def tiers_of(stats: AccessStats, plan: Plan) -> Plan:
    """A plan with the hottest rows in the replicated tier."""
    (entry,) = plan.tables
    ranks = tuple(range(plan.world_size))
    tiers = (Tier(0, HOT, "replicated", ranks), Tier(HOT, ROWS, "striped", ranks))
    return Plan(plan.world_size, (TablePlan(entry.table, (Piece(0, DIM, tiers),),
                                            stats.tables["weight"].head_ids[:HOT]),))


def _trained(rank: int, world_size: int, moves: bool) -> Any:
    model = bag()
    keys, found, outputs = model.tables.keys, [], []
    for step in range(STEPS):
        if step in (3, 6) and moves:
            stats = oper.row_stats(model, key_stats())
            found.append(stats.tables["weight"].head_ids.tolist())
            oper.migrate(model, tiers_of(stats, model.tables.plan))
        outputs.append(step_of(model, step, rank, world_size))
    return [torch.cat(outputs), keys.read("weight", "keys", 0, ROWS - 1),
            model.tables.read("weight"), model.tables.read("weight", part="momentum1")], found


def test_hot_keys_follow_the_plan() -> None:
    """Two hosts that twice move their hot keys to the replicated tier give bitwise the results of
    one host that keeps its plan. The learned statistics equal those of one rank."""
    (_, alone), = run_world(1, _trained, True)
    stays = run_world(2, _trained, False)
    for (moved, found), (stayed, _) in zip(run_world(2, _trained, True, labels="ab"), stays,
                                           strict=True):
        assert found == alone and found[0] != found[1]
        assert_bitwise(moved, stayed, "moved")


def test_other_models_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="dynamic tables="):
        oper.row_stats(shard(nn.EmbeddingBag(9, 4), optimizer=oper.SGD(lr=0.1)), key_stats())
    with pytest.raises(InvalidInputError, match=r"without statistics=\['weight'\]"):
        oper.row_stats(bag(), AccessStats(1, {}))
