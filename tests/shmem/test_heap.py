"""The symmetric heap, tiers in host memory, and read-only tables with one copy per domain."""

import copy
import fcntl
import gc
import itertools
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from oper.errors import MissingDependencyError, OperError
from oper.plan import Piece, Plan, TablePlan, Tier, uniform_plan
from oper.rows.read_only import one_copy_per_domain
from oper.shmem import library
from oper.shmem.group.groups import ProcessGroup
from oper.shmem.memory import host_heap as heap_module
from oper.shmem.memory.host_heap import HostHeap
from oper.shmem.memory.quantise import dequantise, quantise
from oper.shmem.optim.optimizers import SGD, RowWiseAdagrad
from oper.shmem.tables import ShardedTables
from oper.tables import TableSpec
from tests import random_plans as rp, runtime_support as rs
from tests.support import map_tiers
from tests.world_support import descriptors, held_segments, run_world, segments


def _permissions(rank: int, world_size: int) -> tuple[list[str], list[str], int]:
    heap = HostHeap(ProcessGroup(), [4096 * (r + 1) for r in range(world_size)])
    held, opened = [fields[1] for fields in segments()], descriptors()
    heap.close()
    return held, opened, held_segments()


def test_a_rank_can_write_only_its_own_arena() -> None:
    for held, opened, after in run_world(2, _permissions):
        # Own arena and the control segment are writable, the peer's arena is not.
        assert sorted(held) == ["r--s", "rw-s", "rw-s"]
        assert not any("memfd" in f for f in opened), "segments are held by their mappings alone"
        assert after == 0


def test_segments_are_sealed() -> None:
    fd = heap_module.create_segment(8192)
    try:
        for size in (4096, 16384):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)


def test_unreferenced_tables_release_their_memory() -> None:
    """Unreferenced models release their memory, as a hyperparameter search needs."""
    gc.collect()
    before = len(segments())
    case = rs.dlrm_case("sgd")
    tables = rs.open_alone(case, SGD())
    batch = rs.make_batch(case, 0, 4)
    out = tables.lookup(batch.lookup(case))
    del tables
    rs.rank_loss(out, batch.target).backward()  # the graph still needs them
    assert len(segments()) == before + 2
    del out
    gc.collect()
    assert len(segments()) == before


def test_tables_cannot_be_pickled() -> None:
    """Tables cannot be pickled, since training either of two handles would change both."""
    case = rs.dlrm_case("sgd")
    tables = rs.open_alone(case, SGD())
    for attempt in (copy.copy, pickle.dumps):
        with pytest.raises(OperError, match="state_dict"):
            attempt(tables)


def test_a_virtual_rank_may_close_while_another_reads() -> None:
    case = rs.dlrm_case("sgd")

    def body(group) -> torch.Tensor:
        tables = rs.open_tables(case, uniform_plan(case.tables, 2), group, SGD())
        if group.rank == 0:
            tables.close()
        group.all_gather(None)
        found = tables.read("large") if group.rank == 1 else torch.zeros(0)
        tables.close()
        return found

    assert rs.run_ranks(2, body)[1].shape == (20000, 64)


def test_page_kinds_are_reported() -> None:
    case = rs.dlrm_case("sgd")
    tables = rs.open_alone(case, SGD())
    want = tables.read("large")
    kind = tables.use_huge_pages()
    assert kind == tables.page_kind and ("2MiB" in kind or kind == "4KiB")
    assert torch.equal(tables.read("large"), want)


def test_the_error_for_a_missing_library_names_the_build_command(monkeypatch: pytest.MonkeyPatch,
                                                                 tmp_path: Path) -> None:
    monkeypatch.setattr(library, "__file__", str(tmp_path / "oper" / "shmem" / "library.py"))
    with pytest.raises(MissingDependencyError, match="make setup"):
        library.register.__wrapped__()
    folder = tmp_path / "oper" / "_lib"
    folder.mkdir(parents=True)
    (folder / "liboper_host.so").write_bytes(b"not a library")
    with pytest.raises(MissingDependencyError, match="build it again"):
        library.register.__wrapped__()


# ---- tiers in host memory ------------------------------------------------------------------------

ROWS, DIM = 60_000, 64


def in_host(plan: Plan, every: int) -> Plan:
    """The plan with every n-th tier in host memory."""
    turn = itertools.count()
    return map_tiers(plan, lambda x: x if next(turn) % every else replace(x, memory="host"))


@pytest.mark.parametrize("world_size, every", [(1, 1), (3, 1), (3, 2)])
def test_tiers_in_host_memory_change_no_bit(world_size: int, every: int) -> None:
    case = rs.dlrm_case("rowwise_adagrad")
    steps = rs.make_steps(case, world_size, 8)
    for seed in (1, 2):
        plan = rp.mixed_plan(case.tables, world_size, seed)
        want = rs.train_virtual(case, plan, steps, rs.OPTIMIZERS["rowwise_adagrad"])
        got = rs.train_virtual(case, in_host(plan, every), steps, rs.OPTIMIZERS["rowwise_adagrad"])
        rs.same_bits(got, want)


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
    spec = TableSpec("t", ROWS, DIM, ("f",))
    tiers = (Tier(0, 1000, "replicated", (0, 1), memory="host"),
             Tier(1000, ROWS // 2, "striped", (0, 1)),
             Tier(ROWS // 2, ROWS, "striped", (1, 0), (2, 1), memory="host"))
    plan = Plan(2, (TablePlan(spec, (Piece(0, DIM, tiers),)),))
    tables = ShardedTables(plan, [("f", "t")], ProcessGroup(), RowWiseAdagrad(), 0.5)
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


# ---- read-only tables: one copy per memory domain ------------------------------------------------


def plan(dtype: str) -> Plan:
    spec = TableSpec("t", 50, 16, ("f",), "sum", dtype, "none")
    tiers = (Tier(0, 10, "replicated", (0, 1, 2, 3)), Tier(10, 50, "striped", (0, 1, 2, 3)))
    return Plan(4, (TablePlan(spec, (Piece(0, 16, tiers),)),), objective="inference")


def test_a_replica_of_one_domain_only_is_no_replica() -> None:
    owned = Plan(2, (TablePlan(TableSpec("t", 10, 4), (
        Piece(0, 4, (Tier(0, 10, "replicated", (1,)),)),)),))
    (tier,) = one_copy_per_domain(owned, [0, 1]).tables[0].tiers
    assert (tier.placement, tier.ranks) == ("striped", (1,))


@pytest.mark.parametrize("dtype", ["float32", "int8", "int4"])
@pytest.mark.parametrize("domains", [None, [0, 0, 1, 1]])
def test_read_only_copies_return_the_stored_rows(dtype: str, domains: list[int] | None) -> None:
    torch.manual_seed(0)
    values = torch.randn(50, 16)
    stored = values if dtype == "float32" else dequantise(quantise(values, dtype), dtype, 16)
    shared = one_copy_per_domain(plan(dtype), [0, 0, 0, 0] if domains is None else [0, 0, 1, 1])

    def rank(group) -> tuple[torch.Tensor, ...]:
        tables = ShardedTables(shared, [("f", "t")], group, None)
        tables.write("t", values)
        tables.flush_replicas()
        ids = torch.randperm(50, generator=torch.Generator().manual_seed(group.rank))
        out = tables.lookup(rs.bags_of_one(ids))
        read = tables.read("t")
        tables.barrier()
        held = torch.tensor(sum(tables.memory_bytes()["device"]))
        tables.close()
        return out, stored[ids], read, held

    row = shared.tables[0].table.row_bytes
    for out, expected, read, held in rs.run_ranks(4, rank, domains=domains):
        assert torch.equal(out, expected)
        assert torch.equal(read, stored)
        assert held == row * (50 if domains is None else 50 + 2 * 10)
