"""The outbox is sized for the tables; memory that cannot be had is one clear error."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from oper.errors import OperError
from oper.plan import Piece, Plan, TablePlan, Tier, uniform_plan
from oper.shmem.batch import Lookup
from oper.shmem.group.groups import Group, ProcessGroup, SingleGroup, ThreadGroup
from oper.shmem.memory import host_heap as heap_module
from oper.shmem.memory.host_heap import HostHeap
from oper.shmem.optim.optimizers import SGD, RowWiseAdagrad
from oper.shmem.placement.outbox import needed_bytes
from oper.shmem.tables import ShardedTables
from oper.tables import TableSpec
from tests.runtime_support import run_ranks
from tests.world_support import run_world

SMALL = TableSpec("t", 1024, 16, ("f",), "sum", optimizer="sgd")  # 64 KiB


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _shapes(world_size: int, count: int) -> list[TableSpec]:
    """Tables for which no array of the outbox ends at an alignment boundary."""
    return [TableSpec(f"t{k}", 3000 + 7 * k, 4 * (1 + k % 5) + 2 * (k % 2), (f"f{k}",), "sum",
                      optimizer="rowwise_adagrad") for k in range(count)]


def _in_columns(spec: TableSpec, world_size: int) -> TablePlan:
    cut = spec.dim // 2
    pieces = tuple(Piece(a, b, (Tier(0, spec.num_rows, "striped", tuple(range(world_size))),))
                   for a, b in ((0, cut), (cut, spec.dim)))
    return TablePlan(spec, pieces)


def _whole_tables(specs: list[TableSpec], times: int) -> Lookup:
    """A batch with every row of every table, several times."""
    size = max(s.num_rows for s in specs)
    ids, lengths = [], []
    for s in specs:
        each = torch.zeros(size, dtype=torch.int64)
        each[:s.num_rows] = times
        lengths.append(each)
        ids.append(torch.arange(s.num_rows).repeat_interleave(times))
    return Lookup(torch.cat(ids), torch.cat(lengths), torch.arange(len(specs)), size)


# ---- what is reserved ----------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("kind", ["striped", "replicated", "columns"])
@pytest.mark.parametrize("count", [1, 9])
def test_batches_of_all_rows_fit_the_computed_size(monkeypatch: pytest.MonkeyPatch, world_size: int,
                                                   kind: str, count: int) -> None:
    """Batches of all rows fit the computed size, which is not rounded up in this test."""
    monkeypatch.setattr("oper.shmem.placement.outbox._HUGE", 1)
    specs = _shapes(world_size, count)
    plan = uniform_plan(specs, world_size, kind) if kind != "columns" else Plan(
        world_size, tuple(_in_columns(s, world_size) for s in specs))
    features = [(f"f{k}", s.name) for k, s in enumerate(specs)]

    def body(group: ThreadGroup) -> None:
        tables = ShardedTables(plan, features, group, RowWiseAdagrad(lr=0.1), 1 / world_size)
        needed = needed_bytes(tables.directories)
        assert needed == tables._layout.outbox_bytes
        assert needed <= sum(s.num_rows * (s.dim + 2) * 4 for s in specs) + 4096 * (3 + count)
        with tables.no_sync():  # passes that are added up name the same rows
            tables.lookup(_whole_tables(specs, 1)).sum().backward()
        tables.lookup(_whole_tables(specs, 3)).sum().backward()
        tables.barrier()
        assert (tables.read(specs[-1].name) != 0).all()

    run_ranks(world_size, body)


def test_a_smaller_outbox_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slightly smaller outbox is too small for a batch of all rows, which raises an error."""
    monkeypatch.setattr("oper.shmem.placement.outbox._HUGE", 1)
    tables = ShardedTables(uniform_plan([SMALL], 1), [("f", "t")], SingleGroup(), SGD(lr=1.0))
    monkeypatch.setenv("OPER_OUTBOX_BYTES", str(tables._layout.outbox_bytes - 4096 - 256))
    less = ShardedTables(uniform_plan([SMALL], 1), [("f", "t")], SingleGroup(), SGD(lr=1.0))
    tables.lookup(_whole_tables([SMALL], 1)).sum().backward()
    with pytest.raises(OperError, match=r"OPER_OUTBOX_BYTES=.*raise OPER_OUTBOX_BYTES"):
        less.lookup(_whole_tables([SMALL], 1)).sum().backward()
    assert (less.read("t") == 0).all() and (tables.read("t") == -1).all()


def test_a_small_table_reserves_little() -> None:
    before = _address_space()
    tables = ShardedTables(uniform_plan([SMALL], 1), [("f", "t")], SingleGroup(), SGD(lr=1.0))
    assert _address_space() - before < 16 << 20
    assert tables._layout.outbox_bytes == 2 << 20


def test_a_single_rank_sends_no_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oper.shmem.placement.outbox._HUGE", 1)
    tier = Tier(0, 1024, "owned", (0,), mode="push")
    plan = Plan(1, (TablePlan(SMALL, (Piece(0, 16, (tier,)),)),))
    tables = ShardedTables(plan, [("f", "t")], SingleGroup(), SGD(lr=1.0))
    assert tables._layout.outbox_bytes < 256 << 10
    tables.lookup(_whole_tables([SMALL], 300)).sum().backward()
    assert (tables.read("t") == -300).all()


def test_a_pushed_tier_reserves_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """For pushed tiers the setting decides, since requests grow with the batch."""
    tiers = (Tier(0, 10, "owned", (0,)), Tier(10, 1024, "owned", (0,), mode="push"))
    plan = Plan(1, (TablePlan(SMALL, (Piece(0, 16, tiers),)),))
    monkeypatch.setenv("OPER_OUTBOX_BYTES", str(64 << 20))
    tables = ShardedTables(plan, [("f", "t")], SingleGroup(), SGD(lr=1.0))
    assert needed_bytes(tables.directories) is None
    assert tables._layout.outbox_bytes == 64 << 20
    tables.lookup(_whole_tables([SMALL], 300)).sum().backward()
    assert (tables.read("t") == -300).all()
    monkeypatch.setenv("OPER_OUTBOX_BYTES", str(1 << 20))
    small = ShardedTables(plan, [("f", "t")], SingleGroup(), SGD(lr=1.0))
    with pytest.raises(OperError, match="OPER_OUTBOX_BYTES=1048576"):
        small.lookup(_whole_tables([SMALL], 300)).sum().backward()


# ---- what cannot be had --------------------------------------------------------------------------


def _under_a_limit(rank: int, world_size: int, room: int, spec: TableSpec, victim: int | None,
                   outbox: str) -> tuple[str, str]:
    """Shard and train with `room` more bytes of address space, on rank `victim` or all ranks;
    returns type and text of the error, or empty texts."""
    if outbox:
        os.environ["OPER_OUTBOX_BYTES"] = outbox
    plan = uniform_plan([spec], world_size)
    group: Group = ProcessGroup() if world_size > 1 else SingleGroup()
    warm = ShardedTables(uniform_plan([SMALL], world_size), [("f", "t")], group, SGD(lr=1.0))
    warm.lookup(_whole_tables([SMALL], 1)).sum().backward()
    if victim in (None, rank):
        limit = _address_space() + room
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        tables = ShardedTables(plan, [("f", spec.name)], group, SGD(lr=1.0), 1 / world_size)
        tables.lookup(_whole_tables([SMALL], 1)).sum().backward()
        tables.barrier()
        assert (tables.read(spec.name, 0, 1024) == -1).all()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_small_table_fits_into_little_address_space(world_size: int) -> None:
    found = run_world(world_size, _under_a_limit, 256 << 20, SMALL, None, "")
    assert found == [("", "")] * world_size


@pytest.mark.parametrize("world_size, victim", [(1, None), (2, None), (2, 1)])
def test_too_little_address_space_is_reported_on_all_ranks(world_size: int,
                                                           victim: int | None) -> None:
    """The rank with the limit reports it; other ranks name that rank, and no rank waits."""
    large = TableSpec("t", 1 << 22, 16, ("f",), "sum", optimizer="sgd")  # 256 MiB, and its outbox
    found = run_world(world_size, _under_a_limit, 200 << 20, large, victim, "")
    for rank, (kind, text) in enumerate(found):
        assert kind == "OperError", text
        assert "RLIMIT_AS=" in text and "`ulimit -v`" in text and "OPER_OUTBOX_BYTES" in text
        assert "bytes=" in text
        if victim not in (None, rank):
            assert f"rank={victim}," in text


def test_the_remedy_named_by_the_error_helps() -> None:
    large = TableSpec("t", 1 << 21, 16, ("f",), "sum", optimizer="sgd")  # 128 MiB
    room = 220 << 20
    (kind, text), = run_world(1, _under_a_limit, room, large, None, "")
    assert kind == "OperError" and "OPER_OUTBOX_BYTES" in text
    assert run_world(1, _under_a_limit, room, large, None, str(8 << 20)) == [("", "")]


@pytest.mark.parametrize("number, told", [
    (12, "bytes=8192.*Cannot allocate"), (24, "RLIMIT_NOFILE=.*ulimit -n"),
    (27, "RLIMIT_FSIZE=.*ulimit -f")])
def test_errors_name_the_limit_of_the_system(monkeypatch: pytest.MonkeyPatch, number: int, told: str
                                             ) -> None:
    def refused(num_bytes: int, name: str = "") -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(heap_module, "create_segment", refused)
    with pytest.raises(OperError, match=told):
        HostHeap(SingleGroup(), [8192])


class _Group:
    """Rank 0 of two ranks, of which the other has closed its socket."""

    rank, world_size, is_local = 0, 2, False

    def all_gather(self, value: Any) -> list[Any]:
        return [value, (os.getpid(), "\0oper-closed") if isinstance(value, tuple) else value]


def test_a_lost_connection_is_not_reported_as_lack_of_memory() -> None:
    with pytest.raises(OperError, match="cannot attach to a peer's arena: connection="):
        HostHeap(_Group(), [8192] * 2)


def _all_but_one(rank: int, world_size: int) -> tuple[str, str]:
    def refused(num_bytes: int, name: str = "") -> Any:
        raise OSError(24, "Too many open files")

    if rank == 1:
        heap_module.create_segment = refused
    try:
        HostHeap(ProcessGroup(), [8192] * world_size)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def test_a_rank_without_descriptors_releases_the_others() -> None:
    found = run_world(3, _all_but_one)
    assert [kind for kind, _ in found] == ["OperError"] * 3
    assert all("RLIMIT_NOFILE" in text for _, text in found)
    assert "rank=1," in found[0][1] and "rank=1," in found[2][1]
