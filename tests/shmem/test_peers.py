"""A rank that refuses its batch releases the others. Of lost ranks: tests/faults."""

from __future__ import annotations

import time

import pytest
import torch

from oper.errors import InvalidInputError, OperError, PeerLostError
from oper.plan import Piece, Plan, TablePlan, Tier, uniform_plan
from oper.shmem.batch import Lookup
from oper.shmem.group.groups import ThreadGroup
from oper.shmem.optim.optimizers import SGD
from oper.shmem.settings import deadline_s
from oper.shmem.tables import ShardedTables
from oper.tables import TableSpec
from tests.runtime_support import run_ranks


def test_a_full_outbox_on_one_rank_releases_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank with the large batch says why; its peer need not wait for the deadline."""
    monkeypatch.setenv("OPER_OUTBOX_BYTES", str(1 << 16))
    table = TableSpec("t", 10_000, 64, ("f",), "sum", optimizer="sgd")
    plan = uniform_plan([table], 2)
    errors: list[str] = []

    def body(group: ThreadGroup) -> None:
        tables = ShardedTables(plan, [("f", "t")], group, SGD(lr=0.1), 0.5)
        before = tables.read("t", 0, 20)
        n = 5_000 if group.rank == 1 else 10
        batch = Lookup(torch.arange(n), torch.ones(n, dtype=torch.int64),
                       torch.zeros(1, dtype=torch.int64), n)
        start = time.monotonic()
        with pytest.raises(OperError) as caught:
            tables.lookup(batch).sum().backward()
        assert time.monotonic() - start < deadline_s() / 10
        errors.append(f"{type(caught.value).__name__} {caught.value}")
        # No rank has trained that batch, and all go on with the next.
        assert tables.num_steps == 0 and torch.equal(tables.read("t", 0, 20), before)
        few = Lookup(torch.arange(10), torch.ones(10, dtype=torch.int64),
                     torch.zeros(1, dtype=torch.int64), 10)
        tables.lookup(few).sum().backward()
        tables.barrier()
        assert tables.num_steps == 1
        assert torch.equal(tables.read("t", 0, 10), before[:10] - 0.1)
        assert torch.equal(tables.read("t", 10, 20), before[10:])

    run_ranks(2, body)
    assert any("OPER_OUTBOX_BYTES" in e for e in errors)
    assert any("PeerLostError" in e and "rank=1" in e for e in errors)


def test_an_id_out_of_range_where_owners_pool_releases_the_others() -> None:
    """All ranks leave that batch out, and the next one trains as if it had not been there."""
    table = TableSpec("t", 100, 4, ("f",), "sum", optimizer="sgd")
    tier = Tier(0, table.num_rows, "striped", (0, 1), mode="push")
    plan = Plan(2, (TablePlan(table, (Piece(0, table.dim, (tier,)),)),))
    errors: list[OperError] = []

    def body(group: ThreadGroup) -> None:
        tables = ShardedTables(plan, [("f", "t")], group, SGD(lr=0.1), 0.5)
        before = tables.read("t")
        ids, lengths = torch.arange(10), torch.ones(10, dtype=torch.int64)
        bad = torch.where(ids == 3, 100, ids) if group.rank == 1 else ids
        start = time.monotonic()
        with pytest.raises(OperError) as caught:
            tables.lookup(Lookup(bad, lengths, torch.zeros(1, dtype=torch.int64), 10))
        assert time.monotonic() - start < deadline_s() / 10
        errors.append(caught.value)
        tables.lookup(Lookup(ids, lengths, torch.zeros(1, dtype=torch.int64), 10)).sum().backward()
        tables.barrier()
        assert tables.num_steps == 1
        assert torch.equal(tables.read("t", 0, 10), before[:10] - 0.1)
        assert torch.equal(tables.read("t", 10, 100), before[10:])

    run_ranks(2, body)
    (mine,) = [e for e in errors if isinstance(e, InvalidInputError)]
    (others,) = [e for e in errors if isinstance(e, PeerLostError)]
    assert "id=100" in str(mine) and others.rank == 1 and "refused its batch" in str(others)
