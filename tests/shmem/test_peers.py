"""A rank that refuses its batch, or lacks memory for its send buffer, releases the others.

For lost ranks see tests/faults.
"""

import contextlib
import os
import re
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from oper.errors import InvalidInputError, OperError, PeerLostError
from oper.plan import Piece, Plan, TablePlan, Tier, uniform_plan
from oper.rows.directory import TableDirectory
from oper.shmem.batch import Lookup, SharedBags
from oper.shmem.group.groups import Group, ProcessGroup, SingleGroup, ThreadGroup
from oper.shmem.keys.directories import Keys
from oper.shmem.keys.rules import DynamicTable
from oper.shmem.memory import host_heap as heap_module
from oper.shmem.memory.host_heap import HostHeap
from oper.shmem.micro_batches import in_parts
from oper.shmem.optim.optimizers import SGD, RowWiseAdagrad
from oper.shmem.placement.send_buffer import needed_bytes, reserved_bytes
from oper.shmem.settings import deadline_s
from oper.shmem.tables import ShardedTables
from oper.tables import TableSpec
from tests.random_plans import in_columns
from tests.runtime_support import bags_of_one, run_ranks
from tests.support import pushed
from tests.world_support import caught, run_world


def _train(tables: ShardedTables, batch: Lookup) -> None:
    tables.lookup(batch).sum().backward()


def _train_resolved(tables: ShardedTables, batch: Lookup) -> None:
    _train(tables, tables.resolve(batch))


def _train_in_parts(tables: ShardedTables, batch: Lookup) -> None:
    with in_parts([tables]):
        _train(tables, batch)


_IDS = torch.arange(10)
Spoil = Callable[[Lookup], Lookup]
_MALFORMED: dict[str, Spoil] = {
    "number of lengths": lambda b: replace(b, lengths=b.lengths[1:]),
    "device": lambda b: replace(b, ids=b.ids.to("meta")),
    "batch size": lambda b: replace(b, ids=b.ids[:0], batch_size=0),
    "sum of lengths": lambda b: replace(b, lengths=b.lengths - 1),
}
_REFUSED: dict[str, Spoil] = {**_MALFORMED, "id": lambda b: replace(b, ids=_IDS + 95)}
# Of these, bounds="warning" repairs the ids.
_FATAL: dict[str, Spoil] = {**_REFUSED, "bag": lambda b: Lookup(
    _IDS[:1], torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), 1,
    shared=SharedBags(torch.tensor([1]), torch.tensor([[0] * 9 + [1]])))}
_WORDS = {"id": "id=100", "sum of lengths": r"sum\(lengths\)", "number of lengths": "lengths",
          "device": "device of ids", "batch size": "lengths", "bag": "inverse_indices"}


def _plan(pushes: bool = True, kind: str = "striped", **fields: Any) -> Plan:
    """100 rows of one table on two ranks."""
    spec = TableSpec("t", 100, 4, ("f",), "sum", **{"optimizer": "sgd"} | fields)
    plan = uniform_plan([spec], 2, kind)
    return pushed(plan) if pushes else plan


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


def test_a_full_send_buffer_on_one_rank_releases_the_others(monkeypatch: pytest.MonkeyPatch
                                                            ) -> None:
    """The rank with the large batch raises an error; its peer does not wait for the deadline."""
    monkeypatch.setenv("OPER_SEND_BUFFER_BYTES", str(1 << 16))
    plan = uniform_plan([TableSpec("t", 10_000, 64, ("f",), "sum", optimizer="sgd")], 2)
    errors = _one_rank_refuses(plan, lambda rank: bags_of_one(
        torch.arange(5_000 if rank == 1 else 10)))
    assert any("OPER_SEND_BUFFER_BYTES" in str(e) for e in errors)
    assert any(isinstance(e, PeerLostError) and e.rank == 1 for e in errors)


@pytest.mark.parametrize("kind, bounds", [
    *((kind, bounds) for kind in _MALFORMED for bounds in ("fatal", "warning")),
    ("id", "fatal"), ("bag", "fatal")])
@pytest.mark.parametrize("train", [_train, _train_resolved, _train_in_parts],
                         ids=["at once", "resolved", "in parts"])
@pytest.mark.parametrize("pushes", [True, False], ids=["pushed", "pulled"])
def test_a_refused_batch_releases_the_others(
        kind: str, bounds: str, train: Callable[[ShardedTables, Lookup], None], pushes: bool
        ) -> None:
    """All ranks skip the batch, also one that a thread has resolved in advance, and the next one is
    trained as if it had not existed."""
    errors = _one_rank_refuses(_plan(pushes), lambda rank: (_FATAL[kind] if rank else replace)(
        bags_of_one(_IDS)), bounds, train)
    (mine,) = [e for e in errors if isinstance(e, InvalidInputError)]
    (others,) = [e for e in errors if isinstance(e, PeerLostError)]
    assert re.search(_WORDS[kind], str(mine)), mine
    assert others.rank == 1 and "refused its batch" in str(others)


def test_a_refused_gradient_of_weights_releases_the_others() -> None:
    """Read-only tables between memory domains: the other rank gets its rows, and both continue."""
    plan = _plan(optimizer="rowwise_adagrad")

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
def test_a_malformed_batch_of_keys_releases_the_others(spoil: Spoil) -> None:
    def body(group: ThreadGroup) -> type:
        tables = ShardedTables(_plan(), [("f", "t")], group, SGD(lr=0.1), 0.5)
        tables.keys = Keys(tables, {"t": DynamicTable()})
        batch, start = bags_of_one(_IDS + 10**12), time.monotonic()
        with pytest.raises(OperError) as caught:
            _train(tables, spoil(batch) if group.rank else batch)
        assert time.monotonic() - start < deadline_s() / 10
        _train(tables, batch)
        assert tables.num_steps == 1 and tables.keys.counts("t").admitted == 10
        return caught.type

    assert run_ranks(2, body) == [PeerLostError, InvalidInputError]


@pytest.mark.parametrize("pushes", [True, False], ids=["pushed", "pulled"])
@pytest.mark.parametrize("spoil", _REFUSED.values(), ids=_REFUSED)
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_batch_refused_between_domains_releases_the_others(
        pushes: bool, spoil: Spoil, dtype: str) -> None:
    """Covers several domains, where lookups without gradients are collective, too."""
    plan = _plan(pushes, dtype=dtype, optimizer="none")

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


@pytest.mark.parametrize("spoil", _REFUSED.values(), ids=_REFUSED)
def test_replicas_in_all_domains_are_not_trained_with_another_batch(spoil: Spoil) -> None:
    """Lookups of replicated rows do not wait, so the others notice the failure in their update."""
    plan = _plan(False, "replicated")

    def body(group: ThreadGroup) -> type:
        tables = ShardedTables(plan, [("f", "t")], group, SGD(lr=1.0))
        batch = bags_of_one(_IDS)
        with torch.no_grad(), pytest.raises(OperError) if group.rank else contextlib.nullcontext():
            tables.lookup(spoil(batch) if group.rank else batch)  # without consequences
        with tables.no_sync(), pytest.raises(OperError) if group.rank else contextlib.nullcontext():
            _train(tables, spoil(batch) if group.rank else batch)  # only missing from the update
        _train(tables, batch)
        with pytest.raises(OperError) as caught:
            _train(tables, spoil(batch) if group.rank else batch)
        assert tables.num_steps == 1
        with pytest.raises(PeerLostError):
            _train(tables, batch)
        tables.close()
        return caught.type

    assert run_ranks(2, body, domains=[0, 1]) == [PeerLostError, InvalidInputError]


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
    good = [bags_of_one(_IDS)] * 2
    bad = [bags_of_one(_IDS + 95) if k == refused else x for k, x in enumerate(good)]

    def body(group: ThreadGroup) -> type:
        both = [ShardedTables(_plan(push), [("f", "t")], group, SGD(lr=0.1), 0.5)
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


# ---- the send buffer is sized for the tables; lack of memory is one clear error
# -----------------------

SMALL = TableSpec("t", 1024, 16, ("f",), "sum", optimizer="sgd")  # 64 KiB


def _small(*tiers: Tier) -> ShardedTables:
    """Open `SMALL` with these tiers on one rank."""
    tiers = tiers or (Tier(0, 1024, "owned", (0,)),)
    return ShardedTables(Plan(1, (TablePlan(SMALL, (Piece(0, 16, tiers),)),)), [("f", "t")],
                         SingleGroup(), SGD(lr=1.0))


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _shapes(world_size: int, count: int) -> list[TableSpec]:
    """Tables for which no array of the send buffer ends at an alignment boundary."""
    return [TableSpec(f"t{k}", 3000 + 7 * k, 4 * (1 + k % 5) + 2 * (k % 2), (f"f{k}",), "sum",
                      optimizer="rowwise_adagrad") for k in range(count)]


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
    monkeypatch.setattr("oper.shmem.placement.send_buffer._HUGE", 1)
    specs = _shapes(world_size, count)
    plan = (in_columns(specs, world_size, "striped") if kind == "columns"
            else uniform_plan(specs, world_size, kind))
    features = [(f"f{k}", s.name) for k, s in enumerate(specs)]

    def body(group: ThreadGroup) -> None:
        tables = ShardedTables(plan, features, group, RowWiseAdagrad(lr=0.1), 1 / world_size)
        needed = needed_bytes(tables.directories)
        assert needed == tables._layout.send_buffer_bytes
        most = sum(t.table.num_rows * (t.table.dim + max(2, len(t.pieces))) * 4
                   for t in plan.tables)
        assert needed <= most + 4096 * (3 + count)
        with tables.no_sync():  # passes that are added up name the same rows
            tables.lookup(_whole_tables(specs, 1)).sum().backward()
        tables.lookup(_whole_tables(specs, 3)).sum().backward()
        tables.barrier()
        assert (tables.read(specs[-1].name) != 0).all()

    run_ranks(world_size, body)


def test_the_smallest_send_buffer_has_its_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels write them before they notice that the rows do not fit."""
    monkeypatch.setenv("OPER_SEND_BUFFER_BYTES", "64")
    specs = [TableSpec(f"t{k}", 5000, 8, (f"f{k}",), "sum") for k in range(46)]
    directories = [TableDirectory(t, 8) for t in uniform_plan(specs, 8).tables]
    assert reserved_bytes(directories, True) >= 2 * (64 + 46 * (64 + 40 * 8))


def test_a_smaller_send_buffer_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slightly smaller send buffer is too small for a batch of all rows, which raises an
    error."""
    monkeypatch.setattr("oper.shmem.placement.send_buffer._HUGE", 1)
    tables = _small()
    monkeypatch.setenv("OPER_SEND_BUFFER_BYTES", str(tables._layout.send_buffer_bytes - 4096 - 256))
    less = _small()
    tables.lookup(_whole_tables([SMALL], 1)).sum().backward()
    with pytest.raises(OperError, match=r"OPER_SEND_BUFFER_BYTES=.*raise OPER_SEND_BUFFER_BYTES"):
        less.lookup(_whole_tables([SMALL], 1)).sum().backward()
    assert (less.read("t") == 0).all() and (tables.read("t") == -1).all()


def test_a_small_table_reserves_little() -> None:
    before = _address_space()
    tables = _small()
    assert _address_space() - before < 16 << 20
    assert tables._layout.send_buffer_bytes == 2 << 20


def test_a_single_rank_sends_no_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oper.shmem.placement.send_buffer._HUGE", 1)
    tables = _small(Tier(0, 1024, "owned", (0,), mode="push"))
    assert tables._layout.send_buffer_bytes < 256 << 10
    tables.lookup(_whole_tables([SMALL], 300)).sum().backward()
    assert (tables.read("t") == -300).all()


def test_a_pushed_tier_reserves_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """For pushed tiers the setting decides, since requests grow with the batch."""
    tiers = (Tier(0, 10, "owned", (0,)), Tier(10, 1024, "owned", (0,), mode="push"))
    monkeypatch.setenv("OPER_SEND_BUFFER_BYTES", str(64 << 20))
    tables = _small(*tiers)
    assert needed_bytes(tables.directories) is None
    assert tables._layout.send_buffer_bytes == 64 << 20
    tables.lookup(_whole_tables([SMALL], 300)).sum().backward()
    assert (tables.read("t") == -300).all()
    monkeypatch.setenv("OPER_SEND_BUFFER_BYTES", str(1 << 20))
    small = _small(*tiers)
    with pytest.raises(OperError, match="OPER_SEND_BUFFER_BYTES=1048576"):
        small.lookup(_whole_tables([SMALL], 300)).sum().backward()


# ---- what cannot be had --------------------------------------------------------------------------


def _under_a_limit(rank: int, world_size: int, room: int, spec: TableSpec, victim: int | None,
                   send_buffer: str) -> list[str]:
    """Shard and train with `room` more bytes of address space, on rank `victim` or all ranks;
    returns the error, if any."""
    if send_buffer:
        os.environ["OPER_SEND_BUFFER_BYTES"] = send_buffer
    plan = uniform_plan([spec], world_size)
    group: Group = ProcessGroup() if world_size > 1 else SingleGroup()
    warm = ShardedTables(uniform_plan([SMALL], world_size), [("f", "t")], group, SGD(lr=1.0))
    warm.lookup(_whole_tables([SMALL], 1)).sum().backward()
    if victim in (None, rank):
        limit = _address_space() + room
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with caught(Exception) as errors:
        tables = ShardedTables(plan, [("f", spec.name)], group, SGD(lr=1.0), 1 / world_size)
        tables.lookup(_whole_tables([SMALL], 1)).sum().backward()
        tables.barrier()
        assert (tables.read(spec.name, 0, 1024) == -1).all()
    return errors


_NAMED = ("RLIMIT_AS=", "`ulimit -v`", "OPER_SEND_BUFFER_BYTES", "bytes=")


@pytest.mark.parametrize("victim", [None, 1])
def test_too_little_address_space_is_reported_on_all_ranks(victim: int | None) -> None:
    """The rank with the limit reports it; other ranks name that rank, and no rank waits."""
    # 256 MiB, and its send buffer
    large = TableSpec("t", 1 << 22, 16, ("f",), "sum", optimizer="sgd")
    found = run_world(2, _under_a_limit, 200 << 20, large, victim, "")
    for rank, (text,) in enumerate(found):
        assert text.startswith("OperError: ") and all(word in text for word in _NAMED), text
        if victim not in (None, rank):
            assert f"rank={victim}," in text


def test_the_remedy_named_by_the_error_helps() -> None:
    large = TableSpec("t", 1 << 21, 16, ("f",), "sum", optimizer="sgd")  # 128 MiB
    room = 220 << 20
    (text,), = run_world(1, _under_a_limit, room, large, None, "")
    assert text.startswith("OperError: ") and all(word in text for word in _NAMED), text
    assert run_world(1, _under_a_limit, room, large, None, str(8 << 20)) == [[]]


@pytest.mark.parametrize("number, message", [
    (12, "bytes=8192.*Cannot allocate"), (24, "RLIMIT_NOFILE=.*ulimit -n"),
    (27, "RLIMIT_FSIZE=.*ulimit -f")])
def test_errors_name_the_limit_of_the_system(monkeypatch: pytest.MonkeyPatch, number: int,
                                             message: str) -> None:
    def refused(num_bytes: int, name: str = "") -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(heap_module, "create_segment", refused)
    with pytest.raises(OperError, match=message):
        HostHeap(SingleGroup(), [8192])


class _Group:
    """Rank 0 of two ranks, of which the other has closed its socket."""

    rank, world_size, is_local = 0, 2, False

    def all_gather(self, value: Any) -> list[Any]:
        return [value, (os.getpid(), "\0oper-closed") if isinstance(value, tuple) else value]


def test_a_lost_connection_is_not_reported_as_lack_of_memory() -> None:
    with pytest.raises(OperError, match="cannot attach to a peer's arena: connection="):
        HostHeap(_Group(), [8192] * 2)


def _all_but_one(rank: int, world_size: int) -> str:
    def refused(num_bytes: int, name: str = "") -> Any:
        raise OSError(24, "Too many open files")

    if rank == 1:
        heap_module.create_segment = refused
    with pytest.raises(OperError, match="RLIMIT_NOFILE") as error:
        HostHeap(ProcessGroup(), [8192] * world_size)
    return str(error.value)


def test_a_rank_without_descriptors_releases_the_others() -> None:
    first, _, third = run_world(3, _all_but_one)
    assert "rank=1," in first and "rank=1," in third
