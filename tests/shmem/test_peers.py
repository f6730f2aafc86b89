"""Dead and stalled peers: every survivor says who, soon, and nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from oper.errors import DeadlineError, InvalidInputError, OperError, PeerLostError
from oper.plan import Piece, Plan, TablePlan, Tier, uniform_plan
from oper.shmem.batch import Lookup
from oper.shmem.group.groups import ProcessGroup, ThreadGroup
from oper.shmem.optim.optimizers import SGD, RowWiseAdagrad
from oper.shmem.settings import deadline_s
from oper.shmem.tables import ShardedTables
from oper.tables import TableSpec
from tests.faults.pauses import timed
from tests.runtime_support import (
    dlrm_case,
    make_batch,
    mixed_plan,
    open_tables,
    rank_loss,
    run_ranks,
)
from tests.world_support import World, held_segments, leftovers, report, world

CASE = dlrm_case()


def _train_until_it_breaks(rank: int, world_size: int, labels: str, suicide: int
                           ) -> dict[str, Any]:
    """Train for ever; rank `suicide` ends itself between a forward and its backward pass."""
    if len(set(labels)) > 1:
        os.environ["OPER_DOMAIN"] = labels[rank]
    plan = mixed_plan(CASE.tables, world_size, 0)
    tables = open_tables(CASE, plan, ProcessGroup(), RowWiseAdagrad())
    batches = [make_batch(CASE, 10 * rank + k, 16) for k in range(4)]
    try:
        for step in range(10**9):
            batch = batches[step % 4]
            loss = rank_loss(tables.lookup(batch.lookup(CASE)), batch.target)
            if step == 3:
                report(time.monotonic())
                if rank == suicide:
                    os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
    except (PeerLostError, DeadlineError) as error:
        seen = time.monotonic()
        found = {"kind": type(error).__name__, "text": str(error), "time": seen}
    tables.close()
    return {**found, "mapped": held_segments()}


@contextlib.contextmanager
def _training(labels: str, suicide: int = -1, **env: str) -> Iterator[tuple[World, list[float]]]:
    """A world in which every rank has trained for some steps, and when; nothing is left of it."""
    with world(len(labels), _train_until_it_breaks, labels, suicide, env=env) as running:
        yield running, [running.receive(rank) for rank in range(len(labels))]
    assert leftovers(running.pids) == []


def _check_survivors(running: World, victim: int, since: float, kind: str, within_s: float) -> None:
    for rank, process in enumerate(running.processes):
        if rank == victim:
            continue
        found = running.receive(rank)
        assert found["kind"] == kind, found
        assert f"rank={victim}," in found["text"], (rank, found)
        assert found["time"] - since < within_s, f"rank {rank} took {found['time'] - since} s"
        assert found["mapped"] == 0, f"rank {rank} still holds segments"
        process.join(20)
        assert process.exitcode == 0, f"rank {rank} does not end"


# Ranks of equal letters share memory (of one memory domain: tests/faults/test_faults.py); a loss
# that goes over the network takes longer.
@pytest.mark.parametrize("labels, victim, within_s", [
    ("aaaa", 2, 2.0), ("ab", 0, 4.0), ("aabb", 2, 4.0), ("abcd", 3, 4.0)])
@timed
def test_a_peer_that_dies_before_its_backward_pass(labels: str, victim: int, within_s: float
                                                   ) -> None:
    with _training(labels, victim) as (running, since):
        _check_survivors(running, victim, since[victim], "PeerLostError", within_s)


@pytest.mark.parametrize("labels, within_s", [("aa", 2.0 + 2.0), ("aabb", 2.0 + 3.0)])
@timed
def test_a_stalled_peer_ends_in_a_deadline_and_learns_of_it_when_it_wakes(
        labels: str, within_s: float) -> None:
    with _training(labels, OPER_DEADLINE_S="2") as (running, _):
        since = time.monotonic()
        os.kill(running.pids[1], signal.SIGSTOP)
        _check_survivors(running, 1, since, "DeadlineError", within_s)
        assert time.monotonic() - since > 1.9
        os.kill(running.pids[1], signal.SIGCONT)
        woken = running.receive(1)
        assert woken["kind"] in ("PeerLostError", "DeadlineError")
        if len(set(labels)) == 1:  # between domains it may find that others are late for it
            assert "rank=1," in woken["text"], "both sides say who was late"


def test_all_ranks_killed_leave_nothing() -> None:
    with _training("aa") as (running, _):
        for process in running.processes:
            process.kill()
        for process in running.processes:
            process.join(10)
        assert leftovers(running.pids) == []


def test_leftovers_can_be_seen(tmp_path: Path) -> None:
    """The check itself: it must see a process, a name and a socket."""
    import socket

    name = Path("/dev/shm") / f"test-{os.getpid()}"  # no name that tests beside this one look for
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0oper-{os.getpid()}-test")
        name.touch()
        try:
            text = " ".join(leftovers([os.getpid()]))
        finally:
            name.unlink()
    assert "process" in text and "socket" in text and "/dev/shm" in text


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
