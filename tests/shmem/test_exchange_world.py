"""Processes that act as if on several hosts: the same bits, and errors that name ranks."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch

from oper.errors import DeadlineError, PeerLostError
from oper.plan import Plan, uniform_plan
from oper.shmem.group.domains import find_domains
from oper.shmem.group.groups import ProcessGroup
from oper.shmem.group.transport import transport_of
from oper.shmem.optim.optimizers import RowWiseAdagrad
from oper.shmem.tables import ShardedTables
from tests.faults.pauses import timed
from tests.runtime_support import (
    OPTIMIZERS,
    Batch,
    Case,
    Result,
    assert_bitwise,
    dlrm_case,
    make_batch,
    make_steps,
    merge_ranks,
    mixed_plan,
    open_tables,
    rank_loss,
    rich_plan,
    train_rank,
    train_virtual,
)
from tests.world_support import leftovers, report, run_world, world

CASE = dlrm_case()


def _separate(rank: int, labels: str) -> None:
    """Give this process the domain that its letter names."""
    os.environ["OPER_DOMAIN"] = labels[rank]


def _train(rank: int, world_size: int, labels: str, case: Case, plan: Plan,
           steps: list[list[Batch]]) -> tuple[list[int], Result]:
    _separate(rank, labels)
    group = ProcessGroup()
    found = find_domains(group)
    return found, train_rank(case, plan, steps, OPTIMIZERS["rowwise_adagrad"], group)


@pytest.mark.parametrize("labels, domains", [
    ("ab", [0, 1]), ("aabb", [0, 0, 1, 1]), ("abbb", [0, 1, 1, 1]), ("abcd", [0, 1, 2, 3])])
def test_processes_equal_one_domain(labels: str, domains: list[int]) -> None:
    steps = make_steps(CASE, len(labels), 6)
    plan = rich_plan(CASE.tables, len(labels), 1, columns=True)
    ranks = run_world(len(labels), _train, labels, CASE, plan, steps)
    assert all(found == domains for found, _ in ranks)
    got = merge_ranks([result for _, result in ranks])
    one = train_virtual(CASE, plan, steps, OPTIMIZERS["rowwise_adagrad"])
    for part in ("outputs", "weights", "states", "replicas"):
        assert_bitwise(getattr(got, part), getattr(one, part), part)


def _exchanged(rank: int, world_size: int) -> list[list[int]]:
    """What a rank receives, by sender; r sends 3 r + s bytes of value 16 r + s to s."""
    transport = transport_of(ProcessGroup())
    there = [0 if (rank, s) == (2, 0) else 3 * rank + s for s in range(world_size)]
    back = [0 if (r, rank) == (2, 0) else 3 * r + rank for r in range(world_size)]
    send = torch.cat([torch.full((n,), 16 * rank + s, dtype=torch.uint8)
                      for s, n in enumerate(there)])
    recv = torch.zeros(sum(back), dtype=torch.uint8)
    for _ in range(2):
        transport.exchange(send, there, recv, back)
    return [part.tolist() for part in recv.split(back)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_segment_arrives(world_size: int) -> None:
    for rank, found in enumerate(run_world(world_size, _exchanged)):
        assert found == [[16 * r + rank] * (0 if (r, rank) == (2, 0) else 3 * r + rank)
                         for r in range(world_size)]


def _train_and_move(rank: int, world_size: int, labels: str, plans: tuple[Plan, Plan],
                    steps: list[list[Batch]]) -> tuple[int, Result]:
    _separate(rank, labels)
    switched: list[int] = []

    def between(tables: ShardedTables, step: int) -> None:
        if step == 1:
            tables.start_migration(plans[1], 3_000_000)
        elif step > 1 and tables.migration is None:
            switched.append(step)

    result = train_rank(CASE, plans[0], steps, OPTIMIZERS["rowwise_adagrad"], ProcessGroup(),
                        between)
    return switched[0], result


@pytest.mark.parametrize("labels", ["ab", "aab"])
def test_a_move_between_hosts_changes_no_bit(labels: str) -> None:
    """Rows and optimizer states go to another plan over gloo while the tables are trained."""
    steps = make_steps(CASE, len(labels), 8)
    plans = mixed_plan(CASE.tables, len(labels), 0), uniform_plan(CASE.tables, len(labels))
    ranks = run_world(len(labels), _train_and_move, labels, plans, steps)
    assert len({step for step, _ in ranks}) == 1 and 2 < ranks[0][0] < 8, ranks[0][0]
    got = merge_ranks([result for _, result in ranks])
    stayed = train_virtual(CASE, plans[0], steps, OPTIMIZERS["rowwise_adagrad"])
    for part in ("outputs", "weights", "states"):
        assert_bitwise(getattr(got, part), getattr(stayed, part), part)


# ---- dead and stalled peers ----------------------------------------------------------------------


def _until_it_breaks(rank: int, world_size: int, labels: str, suicide: int) -> dict[str, Any]:
    """Train for ever; rank `suicide` ends itself between a forward and its backward pass."""
    _separate(rank, labels)
    tables = open_tables(CASE, mixed_plan(CASE.tables, world_size, 0), ProcessGroup(),
                         RowWiseAdagrad())
    batches = [make_batch(CASE, 10 * rank + k, 16) for k in range(4)]
    found: dict[str, Any] = {}
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
        found = {"kind": type(error).__name__, "text": str(error), "time": time.monotonic()}
    tables.close()
    return found


def _check(running: Any, victim: int, since: float, kind: str, within_s: float) -> None:
    for rank in range(len(running.processes)):
        if rank == victim:
            continue
        found = running.receive(rank)
        assert found["kind"] == kind, found
        assert f"rank={victim}," in found["text"], (rank, found)
        assert found["time"] - since < within_s, f"rank {rank} took {found['time'] - since} s"


@pytest.mark.parametrize("labels, victim", [("ab", 0), ("aabb", 1), ("abbb", 2), ("abcd", 3)])
@timed
def test_a_peer_that_dies(labels: str, victim: int) -> None:
    with world(len(labels), _until_it_breaks, labels, victim) as running:
        since = [running.receive(rank) for rank in range(len(labels))][victim]
        _check(running, victim, since, "PeerLostError", 4.0)
    assert leftovers(running.pids) == []


@pytest.mark.parametrize("labels, victim", [("ab", 1), ("aabb", 2)])
@timed
def test_a_peer_that_is_killed_somewhere(labels: str, victim: int) -> None:
    with world(len(labels), _until_it_breaks, labels, -1) as running:
        for rank in range(len(labels)):
            running.receive(rank)
        time.sleep(0.15)
        since = time.monotonic()
        running.processes[victim].kill()
        _check(running, victim, since, "PeerLostError", 4.0)
    assert leftovers(running.pids) == []


@pytest.mark.parametrize("labels", ["ab", "aabb"])
@timed
def test_a_stalled_peer_ends_in_a_deadline_that_names_it(labels: str) -> None:
    env = {"OPER_DEADLINE_S": "2"}
    with world(len(labels), _until_it_breaks, labels, -1, env=env) as running:
        for rank in range(len(labels)):
            running.receive(rank)
        since = time.monotonic()
        os.kill(running.pids[1], signal.SIGSTOP)
        _check(running, 1, since, "DeadlineError", 2.0 + 3.0)
        assert time.monotonic() - since > 1.9
        os.kill(running.pids[1], signal.SIGCONT)
        woken = running.receive(1)
        assert woken["kind"] in ("PeerLostError", "DeadlineError")
    assert leftovers(running.pids) == []
