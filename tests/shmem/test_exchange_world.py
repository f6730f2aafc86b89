"""Processes that act as if on several hosts: the same bits."""

from __future__ import annotations

import os

import pytest
import torch

from oper.plan import Plan, uniform_plan
from oper.shmem.group.domains import find_domains
from oper.shmem.group.groups import ProcessGroup
from oper.shmem.group.transport import transport_of
from oper.shmem.tables import ShardedTables
from tests.runtime_support import (
    OPTIMIZERS,
    Batch,
    Case,
    Result,
    dlrm_case,
    make_steps,
    merge_ranks,
    mixed_plan,
    rich_plan,
    same_bits,
    train_rank,
    train_virtual,
)
from tests.world_support import run_world

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
    same_bits(merge_ranks([result for _, result in ranks]),
              train_virtual(CASE, plan, steps, OPTIMIZERS["rowwise_adagrad"]), replicas=True)


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
    same_bits(merge_ranks([result for _, result in ranks]),
              train_virtual(CASE, plans[0], steps, OPTIMIZERS["rowwise_adagrad"]))
