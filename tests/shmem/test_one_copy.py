"""Read-only tables: one copy per memory domain, the same results on every rank."""

from __future__ import annotations

import pytest
import torch

from oper.plan import Piece, Plan, TablePlan, Tier
from oper.rows.read_only import one_copy_per_domain
from oper.shmem.memory.quantise import dequantise, quantise
from oper.shmem.tables import ShardedTables
from oper.tables import TableSpec
from tests.runtime_support import bags_of_one, run_ranks


def plan(dtype: str) -> Plan:
    spec = TableSpec("t", 50, 16, ("f",), "sum", dtype, "none")
    tiers = (Tier(0, 10, "replicated", (0, 1, 2, 3)), Tier(10, 50, "striped", (0, 1, 2, 3)))
    return Plan(4, (TablePlan(spec, (Piece(0, 16, tiers),)),), objective="inference")


def test_a_single_domain_has_one_copy_of_every_row() -> None:
    (tier,) = one_copy_per_domain(plan("float32"), [0, 0, 0, 0]).tables[0].tiers
    assert tier == Tier(0, 50, "striped", (0, 1, 2, 3))


def test_every_domain_has_a_replica() -> None:
    hot, cold = one_copy_per_domain(plan("float32"), [0, 0, 1, 1]).tables[0].tiers
    assert (hot.placement, hot.ranks, hot.stop) == ("replicated", (0, 2), 10)
    assert cold == Tier(10, 50, "striped", (0, 1, 2, 3))
    # A replica of one domain only is no replica.
    spec = TableSpec("t", 10, 4)
    owned = Plan(2, (TablePlan(spec, (Piece(0, 4, (Tier(0, 10, "replicated", (1,)),)),)),))
    (tier,) = one_copy_per_domain(owned, [0, 1]).tables[0].tiers
    assert (tier.placement, tier.ranks) == ("striped", (1,))


@pytest.mark.parametrize("dtype", ["float32", "int8", "int4"])
@pytest.mark.parametrize("domains", [None, [0, 0, 1, 1]])
def test_numbers(dtype: str, domains: list[int] | None) -> None:
    torch.manual_seed(0)
    values = torch.randn(50, 16)
    stored = values if dtype == "float32" else dequantise(quantise(values, dtype), dtype, 16)
    shared = one_copy_per_domain(plan(dtype), [0, 0, 0, 0] if domains is None else [0, 0, 1, 1])

    def rank(group) -> tuple[torch.Tensor, ...]:
        tables = ShardedTables(shared, [("f", "t")], group, None)
        tables.write("t", values)
        tables.flush_replicas()
        ids = torch.randperm(50, generator=torch.Generator().manual_seed(group.rank))
        out = tables.lookup(bags_of_one(ids))
        read = tables.read("t")
        tables.barrier()
        held = torch.tensor(sum(tables.memory_bytes()["device"]))
        tables.close()
        return out, stored[ids], read, held

    row = shared.tables[0].table.row_bytes
    for out, expected, read, held in run_ranks(4, rank, domains=domains):
        assert torch.equal(out, expected)
        assert torch.equal(read, stored)
        assert held == row * (50 if domains is None else 50 + 2 * 10)
