"""Ranks that make different calls: all errors name the same rank, collection and phase."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import oper
from oper.errors import DeadlineError, DesyncError, OperError, PeerLostError
from oper.plan import Piece, Plan, TablePlan, Tier
from oper.shmem.group.desync import CollectivePhase, Verdict, out_of_step
from oper.shmem.group.status import Status
from oper.shmem.tables import ShardedTables
from oper.tables import TableSpec
from tests.faults.pauses import timed
from tests.world_support import report, run_world, world

DEADLINE_S = 2.0
ENV = {"OPER_DEADLINE_S": str(DEADLINE_S)}
Found = dict[str, Any]
_HELD: list[nn.Module] = []


class Model(nn.Module):
    """A model with two collections."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.EmbeddingBag(60, 4, mode="sum")
        self.items = nn.EmbeddingBag(40, 8, mode="sum")


def _plan(world_size: int, mode: str) -> Plan:
    ranks = tuple(range(world_size))
    tables = [TableSpec("users", 60, 4, ("users",), "sum", optimizer="sgd"),
              TableSpec("items", 40, 8, ("items",), "sum", optimizer="sgd")]
    return Plan(world_size, tuple(
        TablePlan(t, (Piece(0, t.dim, (Tier(0, t.num_rows, "striped", ranks, mode=mode),)),))
        for t in tables))


def _open(world_size: int, mode: str = "pull") -> Model:
    model = oper.shard(Model(), plan=_plan(world_size, mode), optimizer=oper.SGD(lr=0.1))
    for name in ("users", "items"):  # warm, and all together
        _step(model, name)
    return model


def _step(model: Model, name: str) -> None:
    getattr(model, name)(torch.arange(20).reshape(5, 4)).sum().backward()


def _told(call: Any) -> Found:
    """The error that `call` raises, and the seconds until it was raised."""
    begin = time.monotonic()
    try:
        call()
    except OperError as error:
        return {"kind": type(error).__name__, "text": str(error),
                "rank": getattr(error, "rank", None), "time": time.monotonic() - begin}
    return {"kind": "", "text": "", "rank": None, "time": time.monotonic() - begin}


def _when_all_know(found: Found) -> Found:
    """Keep this process alive until all ranks have raised their errors."""
    store, ranks = dist.distributed_c10d._get_default_store(), range(dist.get_world_size())
    store.set(f"knows {dist.get_rank()}", "")
    store.wait([f"knows {rank}" for rank in ranks])
    return found


def _check(found: list[Found], kind: type[OperError], rank: int, phase: str) -> None:
    """Check that all ranks name the same late rank and the phase in which others wait for it."""
    for who, one in enumerate(found):
        assert one["kind"] == kind.__name__, (who, one)
        assert one["rank"] == rank and f"rank={rank}," in one["text"], (who, one)
        assert f"the {phase}" in one["text"], (who, one)
        assert ("this rank" in one["text"]) == (who == rank), (who, one)


# ---- a rank skips a step -------------------------------------------------------------------------


def _skip(rank: int, world_size: int, mode: str, alone: bool) -> Found:
    """Rank 1 skips a step and returns after the other ranks have given up; if `alone`, after their
    processes have exited."""
    model = _open(world_size, mode)
    report("open")
    _HELD.append(model)  # a process that ends, not one that closes its tables before

    def go_on() -> None:
        for _ in range(3):
            _step(model, "users")
            _step(model, "items")

    if rank == 1:
        _step(model, "users")
        time.sleep(2.5 * DEADLINE_S)
    found = _told(go_on)
    return found if alone else _when_all_know(found)


# Domain of each rank, mode, and whether the others end; one after another, they would mostly wait.
SKIPS = {"two": [("aa", "pull", False), ("aa", "pull", True), ("aa", "push", False),
                 ("ab", "pull", False), ("aba", "pull", False)],
         "three": [("aaa", "pull", False), ("aab", "pull", False)]}


@pytest.mark.parametrize("worlds", SKIPS)
@timed
def test_a_rank_that_skips_a_step(worlds: str) -> None:
    with contextlib.ExitStack() as stack:
        running = []
        for labels, mode, alone in SKIPS[worlds]:
            running.append(stack.enter_context(world(
                len(labels), _skip, mode, alone, labels=labels, env=ENV)))
            for rank in range(len(labels)):
                assert running[-1].receive(rank) == "open"
        for (labels, mode, _), one in zip(SKIPS[worlds], running, strict=True):
            found = [one.receive(rank) for rank in range(len(labels))]
            is_pulled = mode == "pull" and len(set(labels)) == 1
            phase = "gradient exchange" if is_pulled else "forward lookup"
            _check(found, DeadlineError, 1, f"{phase} of collection 'items' (tables items)")
            if is_pulled:
                assert found[0]["time"] < 2.4 * DEADLINE_S, "it waited for rank 1 to come back"


# ---- another order -------------------------------------------------------------------------------


def _order(rank: int, world_size: int) -> Found:
    model = _open(world_size)
    outs = [getattr(model, name)(torch.arange(20).reshape(5, 4)).sum()
            for name in ("users", "items")]
    return _when_all_know(_told(lambda: [
        out.backward() for out in (reversed(outs) if rank == 1 else outs)]))


@pytest.mark.parametrize("world_size", [2, 3])
@timed
def test_a_rank_that_runs_collections_in_another_order(world_size: int) -> None:
    found = run_world(world_size, _order, env=ENV)
    _check(found, DeadlineError, 1, "gradient exchange of collection 'users' (tables users)")
    assert "it waits in the gradient exchange of collection 'items'" in found[0]["text"]


def _order_far(rank: int, world_size: int) -> Found:
    model = _open(world_size)
    names = ("items", "users") if rank == 1 else ("users", "items")
    return _when_all_know(_told(lambda: [_step(model, name) for name in names]))


@pytest.mark.parametrize("labels", ["ab", "abc"])
@timed
def test_another_order_between_domains_is_detected_at_once(labels: str) -> None:
    found = run_world(len(labels), _order_far, labels=labels,
                      env={"OPER_DEADLINE_S": "60"})
    _check(found, DesyncError, 1, "forward lookup of collection 'users' (tables users)")


# ---- another phase -------------------------------------------------------------------------------


def _phase(rank: int, world_size: int) -> Found:
    """Rank 1 saves a state while the other ranks train."""
    model = _open(world_size)
    found = _told(lambda: model.state_dict() and model.users.tables.barrier()
                  if rank == 1 else _step(model, "users"))
    return _when_all_know(found)


@pytest.mark.parametrize("world_size", [2, 3])
@timed
def test_a_rank_that_reads_while_the_others_train(world_size: int) -> None:
    found = run_world(world_size, _phase, env={"OPER_DEADLINE_S": "60"})
    _check(found, DesyncError, 1, "gradient exchange of collection 'users' (tables users)")
    assert all(one["time"] < 30 for one in found), "nobody waits for the deadline"


@pytest.mark.parametrize("labels, kind", [
    ("ab", DesyncError), ("abb", DeadlineError)])  # rank 1 waits for its neighbour first
@timed
def test_a_rank_of_another_domain_that_reads_while_the_others_train(
        labels: str, kind: type[OperError]) -> None:
    found = run_world(len(labels), _phase, labels=labels, env={"OPER_DEADLINE_S": "3"})
    _check(found, kind, 1, "forward lookup of collection 'users' (tables users)")


def _close(rank: int, world_size: int) -> Found:
    model = _open(world_size)
    if rank == 1:
        model.users.tables.close()
    return _when_all_know(_told(lambda: None if rank == 1 else _step(model, "users")))


@timed
def test_a_rank_that_has_closed_its_tables_is_named() -> None:
    waited, _ = run_world(2, _close, env={"OPER_DEADLINE_S": "60"})
    assert waited["kind"] == PeerLostError.__name__ and waited["rank"] == 1
    assert "has closed its tables" in waited["text"]
    assert "gradient exchange of collection 'users'" in waited["text"] and waited["time"] < 30


def _migrate(rank: int, world_size: int) -> Found:
    model = _open(world_size)
    tables: ShardedTables = model.users.tables
    plan = Plan(world_size, (_plan(world_size, "pull").tables[0],))
    found = _told(lambda: tables.start_migration(plan) if rank == 0 else _step(model, "users"))
    return _when_all_know(found)


@timed
def test_a_rank_that_moves_tables_alone() -> None:
    found = run_world(2, _migrate, env={"OPER_DEADLINE_S": "60"})
    _check(found, DesyncError, 1, "migration of collection 'users' (tables users)")
    assert "it was last seen in the gradient exchange" in found[0]["text"]


# ---- the verdict ---------------------------------------------------------------------------------


def test_verdicts_survive_packing() -> None:
    for verdict in (Verdict(2, 0, CollectivePhase(0, 0)),
                    Verdict(12, 65535, CollectivePhase((1 << 24) - 1, 8))):
        assert Verdict.unpack(verdict.pack()) == verdict
        assert 0 < verdict.pack() < 1 << 63
    assert Verdict.unpack(0) is None


def test_the_rank_that_differs_from_most_is_named() -> None:
    a, b, c = CollectivePhase(1, 3), CollectivePhase(2, 3), CollectivePhase(1, 7)
    assert out_of_step(Status.PEER_LATE, [a, b], 0) == Verdict(Status.PEER_LATE, 1, a)
    assert out_of_step(Status.PEER_LATE, [a, b, b], 0) == Verdict(Status.PEER_LATE, 0, b)
    assert out_of_step(Status.PEER_LATE, [a, b, c], 0) == Verdict(Status.PEER_LATE, 1, a)
    assert out_of_step(Status.PEER_LATE, [a, b, c], 0, [5, 5, 4]) == Verdict(Status.PEER_LATE, 2, a)
    assert out_of_step(Status.PEER_LATE, [a, a], 1) == Verdict(Status.PEER_LATE, 1, a)
