"""A rank that refuses its batch releases the others. Of lost ranks: tests/faults."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from oper.errors import InvalidInputError, OperError, PeerLostError
from oper.plan import Plan, uniform_plan
from oper.shmem.group.groups import ThreadGroup
from oper.shmem.optim.optimizers import SGD
from oper.shmem.settings import deadline_s
from oper.shmem.tables import ShardedTables
from oper.tables import TableSpec
from tests.runtime_support import bags_of_one, run_ranks
from tests.support import pushed


def _one_rank_refuses(plan: Plan, ids_of: Callable[[int], torch.Tensor]) -> list[OperError]:
    """What ranks are told of a batch that one of two refuses: they leave it out, and go on."""
    errors: list[OperError] = []

    def body(group: ThreadGroup) -> None:
        tables = ShardedTables(plan, [("f", "t")], group, SGD(lr=0.1), 0.5)
        before = tables.read("t", 0, 20)
        start = time.monotonic()
        with pytest.raises(OperError) as caught:
            tables.lookup(bags_of_one(ids_of(group.rank))).sum().backward()
        assert time.monotonic() - start < deadline_s() / 10
        errors.append(caught.value)
        assert tables.num_steps == 0 and torch.equal(tables.read("t", 0, 20), before)
        tables.lookup(bags_of_one(torch.arange(10))).sum().backward()
        tables.barrier()
        assert tables.num_steps == 1
        assert torch.equal(tables.read("t", 0, 10), before[:10] - 0.1)
        assert torch.equal(tables.read("t", 10, 20), before[10:])

    run_ranks(2, body)
    return errors


def test_a_full_outbox_on_one_rank_releases_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank with the large batch says why; its peer need not wait for the deadline."""
    monkeypatch.setenv("OPER_OUTBOX_BYTES", str(1 << 16))
    plan = uniform_plan([TableSpec("t", 10_000, 64, ("f",), "sum", optimizer="sgd")], 2)
    errors = _one_rank_refuses(plan, lambda rank: torch.arange(5_000 if rank == 1 else 10))
    assert any("OPER_OUTBOX_BYTES" in str(e) for e in errors)
    assert any(isinstance(e, PeerLostError) and e.rank == 1 for e in errors)


def test_an_id_out_of_range_where_owners_pool_releases_the_others() -> None:
    """All ranks leave that batch out, and the next one trains as if it had not been there."""
    plan = pushed(uniform_plan([TableSpec("t", 100, 4, ("f",), "sum", optimizer="sgd")], 2,
                               "striped"))
    ids = torch.arange(10)
    errors = _one_rank_refuses(plan, lambda rank: torch.where(ids == 3, 100, ids) if rank else ids)
    (mine,) = [e for e in errors if isinstance(e, InvalidInputError)]
    (others,) = [e for e in errors if isinstance(e, PeerLostError)]
    assert "id=100" in str(mine) and others.rank == 1 and "refused its batch" in str(others)
