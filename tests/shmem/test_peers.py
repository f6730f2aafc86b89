"""A rank that refuses its batch releases the other ranks. For lost ranks see tests/faults."""

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
from oper.shmem.keys.directories import Keys
from oper.shmem.keys.rules import DynamicTable
from oper.shmem.micro_batches import MicroBatches
from oper.shmem.optim.optimizers import SGD
from oper.shmem.settings import deadline_s
from oper.shmem.tables import ShardedTables
from oper.tables import TableSpec
from tests.runtime_support import bags_of_one, run_ranks
from tests.support import pushed


def _train(tables: ShardedTables, batch: Lookup) -> None:
    tables.lookup(batch).sum().backward()


def _train_resolved(tables: ShardedTables, batch: Lookup) -> None:
    _train(tables, tables.resolve(batch))


def _train_in_parts(tables: ShardedTables, batch: Lookup) -> None:
    with MicroBatches([tables]):
        _train(tables, batch)


_MALFORMED = {
    "number of lengths": lambda b: replace(b, lengths=b.lengths[1:]),
    "device": lambda b: replace(b, ids=b.ids.to("meta")),
    "batch size": lambda b: replace(b, ids=b.ids[:0], batch_size=0),
    "sum of lengths": lambda b: replace(b, lengths=b.lengths - 1),
}


def _one_rank_refuses(plan: Plan, batch_of: Callable[[int], Lookup], bounds: str = "fatal",
                      train: Callable[[ShardedTables, Lookup], None] = _train) -> list[OperError]:
    """Errors of both ranks for a batch that one of them refuses; then they train the next batch."""
    errors: list[OperError] = []

    def body(group: ThreadGroup) -> None:
        tables = ShardedTables(plan, [("f", "t")], group, SGD(lr=0.1), 0.5)
        tables.bounds.mode = bounds
        before = tables.read("t", 0, 20)
        start = time.monotonic()
        with pytest.raises(OperError) as caught:
            train(tables, batch_of(group.rank))
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
    """The rank with the large batch raises an error; its peer does not wait for the deadline."""
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
@pytest.mark.parametrize("pushes", [True, False], ids=["pushed", "pulled"])
def test_a_refused_batch_releases_the_others(batch: Lookup, words: str, pushes: bool) -> None:
    """All ranks skip the batch, and the next one is trained as if it had not existed."""
    plan = uniform_plan([TableSpec("t", 100, 4, ("f",), "sum", optimizer="sgd")], 2, "striped")
    plan = pushed(plan) if pushes else plan
    errors = _one_rank_refuses(plan, lambda rank: batch if rank else bags_of_one(_IDS))
    (mine,) = [e for e in errors if isinstance(e, InvalidInputError)]
    (others,) = [e for e in errors if isinstance(e, PeerLostError)]
    assert re.search(words, str(mine)), mine
    assert others.rank == 1 and "refused its batch" in str(others)


@pytest.mark.parametrize("spoil", _MALFORMED.values(), ids=_MALFORMED)
@pytest.mark.parametrize("bounds", ["fatal", "warning"])
@pytest.mark.parametrize("train", [_train, _train_resolved, _train_in_parts],
                         ids=["at once", "resolved", "in parts"])
@pytest.mark.parametrize("pushes", [True, False], ids=["pushed", "pulled"])
def test_a_malformed_batch_releases_the_others(
        spoil: Callable[[Lookup], Lookup], bounds: str,
        train: Callable[[ShardedTables, Lookup], None], pushes: bool) -> None:
    """Includes batches that a thread has resolved in advance."""
    plan = uniform_plan([TableSpec("t", 100, 4, ("f",), "sum", optimizer="sgd")], 2, "striped")
    plan = pushed(plan) if pushes else plan
    errors = _one_rank_refuses(plan, lambda rank: (spoil if rank else replace)(bags_of_one(_IDS)),
                               bounds, train)
    (others,) = [e for e in errors if isinstance(e, PeerLostError)]
    assert others.rank == 1 and "refused its batch" in str(others)


def test_a_refused_gradient_of_weights_releases_the_others() -> None:
    """Read-only tables between memory domains: the other rank gets its rows, and both continue."""
    plan = pushed(uniform_plan([TableSpec("t", 100, 4, ("f",), "sum")], 2, "striped"))

    def body(group: ThreadGroup) -> None:
        tables = ShardedTables(plan, [("f", "t")], group, None)
        weights = torch.ones(10, requires_grad=group.rank == 1)
        batch, start = replace(bags_of_one(_IDS), weights=weights), time.monotonic()
        want = tables.lookup(bags_of_one(_IDS))
        if group.rank == 1:
            with pytest.raises(InvalidInputError, match="requires_grad"):
                tables.lookup(batch)
        else:
            assert torch.equal(tables.lookup(batch), want)
        assert torch.equal(tables.lookup(bags_of_one(_IDS)), want)
        assert time.monotonic() - start < deadline_s() / 10

    run_ranks(2, body, domains=[0, 1])


@pytest.mark.parametrize("spoil", _MALFORMED.values(), ids=_MALFORMED)
def test_a_malformed_batch_of_keys_releases_the_others(spoil: Callable[[Lookup], Lookup]) -> None:
    plan = pushed(uniform_plan([TableSpec("t", 100, 4, ("f",), "sum", optimizer="sgd")], 2,
                               "striped"))

    def body(group: ThreadGroup) -> type:
        tables = ShardedTables(plan, [("f", "t")], group, SGD(lr=0.1), 0.5)
        tables.keys = Keys(tables, {"t": DynamicTable()})
        batch, start = bags_of_one(_IDS + 10**12), time.monotonic()
        with pytest.raises(OperError) as caught:
            _train(tables, spoil(batch) if group.rank else batch)
        assert time.monotonic() - start < deadline_s() / 10
        _train(tables, batch)
        assert tables.num_steps == 1 and tables.keys.counts("t").admitted == 10
        return caught.type

    assert run_ranks(2, body) == [PeerLostError, InvalidInputError]


def test_an_invalid_id_of_a_resolved_batch_releases_the_others() -> None:
    plan = pushed(uniform_plan([TableSpec("t", 100, 4, ("f",), "sum", optimizer="sgd")], 2,
                               "striped"))
    errors = _one_rank_refuses(plan, lambda rank: bags_of_one(_IDS + 95 * rank),
                               train=_train_resolved)
    assert {type(e) for e in errors} == {InvalidInputError, PeerLostError}


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize("spoil", [*_MALFORMED.values(), lambda b: replace(b, ids=_IDS + 95)],
                         ids=[*_MALFORMED, "id"])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_batch_refused_between_domains_releases_the_others(
        mode: str, spoil: Callable[[Lookup], Lookup], dtype: str) -> None:
    """Covers several domains, where lookups without gradients are collective, too."""
    plan = uniform_plan([TableSpec("t", 100, 4, ("f",), "sum", dtype, "none")], 2, "striped")
    plan = pushed(plan) if mode == "push" else plan

    def body(group: ThreadGroup) -> tuple[type, float]:
        tables = ShardedTables(plan, [("f", "t")], group, None)
        batch = bags_of_one(_IDS)
        start = time.monotonic()
        with pytest.raises(OperError) as caught:
            tables.lookup(spoil(batch) if group.rank else batch)
        waited = time.monotonic() - start
        group.all_gather(None)
        tables.close()
        return caught.type, waited

    found = run_ranks(2, body, domains=[0, 1])
    assert [kind for kind, _ in found] == [PeerLostError, InvalidInputError]
    assert max(s for _, s in found) < deadline_s() / 10


def _train_both(both: list[ShardedTables], batches: list[Lookup]) -> None:
    torch.stack([tables.lookup(batch).sum() for tables, batch in zip(both, batches, strict=True)]
                ).sum().backward()


@pytest.mark.parametrize("pushes", [(True, True), (False, True), (True, False), (False, False)])
@pytest.mark.parametrize("refused", [0, 1])
@pytest.mark.parametrize("accumulates", [False, True], ids=["at once", "accumulated"])
def test_a_refused_batch_releases_the_others_in_all_tables_of_the_model(
        pushes: tuple[bool, bool], refused: int, accumulates: bool) -> None:
    """Wherever they wait; the next batch is trained as if the refused one, and what was accumulated
    for its update, had not existed."""
    plan = uniform_plan([TableSpec("t", 100, 4, ("f",), "sum", optimizer="sgd")], 2, "striped")
    good = [bags_of_one(_IDS)] * 2
    bad = [bags_of_one(_IDS + 95) if k == refused else x for k, x in enumerate(good)]

    def body(group: ThreadGroup) -> type:
        both = [ShardedTables(pushed(plan) if push else plan, [("f", "t")], group, SGD(lr=0.1), 0.5)
                for push in pushes]
        both[0].family.update(both)
        both[1].family = both[0].family
        before = [tables.read("t", 0, 20) for tables in both]
        start = time.monotonic()
        if accumulates:
            with both[0].no_sync(), both[1].no_sync():
                _train_both(both, good)
        with pytest.raises(OperError) as caught:
            _train_both(both, bad if group.rank else good)
        _train_both(both, good)
        _train_both(both, good)
        assert time.monotonic() - start < deadline_s() / 10
        for tables, rows in zip(both, before, strict=True):
            tables.barrier()
            assert tables.num_steps == 2
            assert torch.equal(tables.read("t", 0, 10), rows[:10] - 0.1 - 0.1)
        return caught.type

    assert run_ranks(2, body) == [PeerLostError, InvalidInputError]
