"""Tiers in host memory: the same results from a separate segment without huge pages."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oper.plan import Piece, Plan, TablePlan, Tier
from oper.shmem.optim.optimizers import RowWiseAdagrad
from oper.shmem.tables import ShardedTables
from oper.tables import TableSpec
from tests.runtime_support import (
    OPTIMIZERS,
    dlrm_case,
    make_steps,
    mixed_plan,
    same_bits,
    train_virtual,
)
from tests.support import map_tiers
from tests.world_support import run_world

ROWS, DIM = 60_000, 64


def in_host(plan: Plan, every: int) -> Plan:
    """The plan with every n-th tier in host memory."""
    turn = itertools.count()
    return map_tiers(plan, lambda x: x if next(turn) % every else replace(x, memory="host"))


@pytest.mark.parametrize("world_size, every", [(1, 1), (3, 1), (3, 2)])
def test_the_same_bits(world_size: int, every: int) -> None:
    case = dlrm_case("rowwise_adagrad")
    steps = make_steps(case, world_size, 8)
    for seed in (1, 2):
        plan = mixed_plan(case.tables, world_size, seed)
        want = train_virtual(case, plan, steps, OPTIMIZERS["rowwise_adagrad"])
        got = train_virtual(case, in_host(plan, every), steps, OPTIMIZERS["rowwise_adagrad"])
        same_bits(got, want)


def _segments() -> list[dict[str, Any]]:
    """Mappings of memory files in this process: size, resident and huge bytes, flags."""
    found: list[dict[str, Any]] = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head, _, rest = line.partition(" ")
        if "-" in head and ":" not in head:
            found.append({"name": rest})
        elif found:
            found[-1][head.rstrip(":")] = (rest.split() if head == "VmFlags:"
                                           else int(rest.split()[0]) << 10)
    return [s for s in found if "memfd:oper" in s["name"]]


def _bytes_of_a_rank(rank: int, world_size: int) -> dict[str, Any]:
    """Memory of a table: replicated head, striped tier, and half of its rows on the host."""
    from oper.shmem.group.groups import ProcessGroup

    spec = TableSpec("t", ROWS, DIM, ("f",))
    tiers = (Tier(0, 1000, "replicated", (0, 1), memory="host"),
             Tier(1000, ROWS // 2, "striped", (0, 1)),
             Tier(ROWS // 2, ROWS, "striped", (1, 0), (2, 1), memory="host"))
    plan = Plan(2, (TablePlan(spec, (Piece(0, DIM, tiers),)),))
    tables = ShardedTables(plan, [("f", "t")], ProcessGroup(), RowWiseAdagrad(), 0.5)
    import torch

    values = torch.arange(ROWS, dtype=torch.float32)[:, None].expand(ROWS, DIM).contiguous()
    tables.write("t", values)
    tables.write("t", values[:, 0].contiguous(), part="momentum1")
    tables.flush_replicas()
    tables.use_huge_pages()
    assert torch.equal(tables.read("t"), values)
    assert torch.equal(tables.read("t", part="momentum1"), values[:, 0])
    small = [s for s in _segments() if "nh" in s["VmFlags"]]
    found = {"memory": tables.memory_bytes(), "small": sum(s["Size"] for s in small),
             "huge": sum(s["ShmemPmdMapped"] for s in small)}
    tables.barrier()
    tables.close()
    assert not _segments()
    return found


def test_bytes_in_host_memory_are_counted_apart() -> None:
    per_row = DIM * 4 + 4
    # Rows of the host tier are dealt 2 : 1 to ranks 1 and 0; masters of the head are striped.
    in_host_rows = [ROWS // 2 // 3 + 500, ROWS // 2 * 2 // 3 + 500]
    host = [n * per_row + 1000 * DIM * 4 for n in in_host_rows]
    device = [(ROWS // 2 - 1000) // 2 * per_row] * 2
    for found in run_world(2, _bytes_of_a_rank):
        assert found["memory"] == {"device": device, "host": host}
        # Both ranks' host pages are mapped here; whole pages only, so a few less than the bytes.
        assert sum(host) - 8 * 4096 <= found["small"] <= sum(host)
        assert found["huge"] == 0
