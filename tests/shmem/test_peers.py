"""A rank that refuses its batch releases the others. Of lost ranks: tests/faults."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from oper.errors import InvalidInputError, OperError, PeerLostError
from oper.plan import Plan, uniform_plan
from oper.shmem.batch import Lookup, SharedBags
from oper.shmem.group.groups import ThreadGroup
from oper.shmem.optim.optimizers import SGD
from oper.shmem.settings import deadline_s
from oper.shmem.tables import ShardedTables
from oper.tables import TableSpec
from tests.runtime_support import bags_of_one, run_ranks
from tests.support import pushed


def _one_rank_refuses(plan: Plan, batch_of: Callable[[int], Lookup], bounds: str = "fatal"
                      ) -> list[OperError]:
    """What ranks are told of a batch that one of two refuses: they leave it out, and go on."""
    errors: list[OperError] = []

    def body(group: ThreadGroup) -> None:
        tables = ShardedTables(plan, [("f", "t")], group, SGD(lr=0.1), 0.5)
        tables.bounds.mode = bounds
        before = tables.read("t", 0, 20)
        start = time.monotonic()
        with pytest.raises(OperError) as caught:
            tables.lookup(batch_of(group.rank)).sum().backward()
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
    errors = _one_rank_refuses(plan, lambda rank: bags_of_one(
        torch.arange(5_000 if rank == 1 else 10)))
    assert any("OPER_OUTBOX_BYTES" in str(e) for e in errors)
    assert any(isinstance(e, PeerLostError) and e.rank == 1 for e in errors)


_IDS = torch.arange(10)
_ONE_BAG = SharedBags(torch.tensor([1]), torch.tensor([[0] * 9 + [1]]))


@pytest.mark.parametrize(("batch", "words"), [
    (bags_of_one(torch.where(_IDS == 3, 100, _IDS)), "id=100"),
    (replace(bags_of_one(_IDS), lengths=torch.full((10,), 2)), r"sum\(lengths\)"),
    (replace(bags_of_one(_IDS), lengths=torch.ones(9, dtype=torch.int64)), "lengths"),
    (Lookup(_IDS[:1], torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), 1,
            shared=_ONE_BAG), "inverse_indices"),
], ids=["id", "sum of lengths", "number of lengths", "bag"])
def test_a_batch_refused_where_owners_pool_releases_the_others(batch: Lookup, words: str) -> None:
    """All ranks leave that batch out, and the next one trains as if it had not been there."""
    plan = pushed(uniform_plan([TableSpec("t", 100, 4, ("f",), "sum", optimizer="sgd")], 2,
                               "striped"))
    errors = _one_rank_refuses(plan, lambda rank: batch if rank else bags_of_one(_IDS))
    (mine,) = [e for e in errors if isinstance(e, InvalidInputError)]
    (others,) = [e for e in errors if isinstance(e, PeerLostError)]
    assert re.search(words, str(mine)), mine
    assert others.rank == 1 and "refused its batch" in str(others)


@pytest.mark.parametrize("batch", [
    replace(bags_of_one(_IDS), lengths=torch.ones(9, dtype=torch.int64)),
    replace(bags_of_one(_IDS), ids=_IDS.to("meta")),
    replace(bags_of_one(_IDS[:0]), lengths=torch.ones(10, dtype=torch.int64), batch_size=0),
], ids=["number of lengths", "device", "batch size"])
@pytest.mark.parametrize("bounds", ["fatal", "warning"])
def test_a_malformed_batch_releases_the_others(batch: Lookup, bounds: str) -> None:
    """Also one that is found to be malformed before it comes to the kernels."""
    plan = pushed(uniform_plan([TableSpec("t", 100, 4, ("f",), "sum", optimizer="sgd")], 2,
                               "striped"))
    errors = _one_rank_refuses(plan, lambda rank: batch if rank else bags_of_one(_IDS), bounds)
    (others,) = [e for e in errors if isinstance(e, PeerLostError)]
    assert others.rank == 1 and "refused its batch" in str(others)
