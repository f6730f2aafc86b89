"""Published tables: complete epochs, one copy, readers and publishers that die."""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from oper.bench.core.memory import pss_bytes
from oper.errors import DeadlineError, FileFormatError, InvalidInputError, OperError
from oper.plan import Plan, uniform_plan
from oper.shmem.batch import Lookup
from oper.shmem.publication import publisher as publication
from oper.shmem.publication.buffers import Layout
from oper.shmem.publication.handshake import HANDSHAKE, receive_handshake
from oper.shmem.publication.publisher import Publisher, Rows
from oper.shmem.publication.reader import SEGMENT_NAME, PublishedTables, Reader
from oper.tables import TableSpec
from tests.runtime_support import bags_of_one
from tests.support import wait_for
from tests.world_support import World, child_of, leftovers, received, report, world

SPECS = [TableSpec("a", 30000, 64, ("f",), "sum", "float32", "none"),
         TableSpec("b", 900, 32, ("g",), "mean", "int8", "none")]
FEATURES = [("f", "a"), ("g", "b")]
TABLES = f"/memfd:{SEGMENT_NAME}"


def plan(num_domains: int) -> Plan:
    return uniform_plan(SPECS, num_domains, "owned" if num_domains == 1 else "striped")


def constant(value: int):
    """Rows for `publish_rows` in which every number is `value`."""
    def rows(name: str) -> Rows:
        spec = next(s for s in SPECS if s.name == name)
        for begin in range(0, spec.num_rows, 9000):
            yield begin, torch.full((min(9000, spec.num_rows - begin), spec.dim), float(value))
    return rows


def dense(value: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((3000,), float(value)), "n": torch.tensor(value)}


def look(reader: Reader, last: int) -> tuple[int, int, int]:
    """Read everything until epoch `last`; returns numbers of reads, mixed reads and epochs."""
    tables = [PublishedTables(reader, buffer, FEATURES) for buffer in range(2)]
    generator = torch.Generator().manual_seed(os.getpid())
    looks = torn = 0
    seen: set[int] = set()
    while last not in seen:
        ids = torch.cat([torch.randint(0, s.num_rows, (200,), generator=generator) for s in SPECS])
        batch = bags_of_one(ids, 2)
        with reader.pinned() as epoch:
            out = tables[epoch & 1].lookup(batch)
            weights = reader.dense(epoch & 1)
            same = (out == epoch).all() and (weights["w"] == epoch).all() and weights["n"] == epoch
            out = tables[epoch & 1].lookup(batch)  # later in the same epoch
            torn += not (same and (out == epoch).all())
        seen.add(epoch)
        looks += 1
    return looks, torn, len(seen)


@pytest.fixture
def name() -> str:
    return f"test-{os.getpid()}-{time.monotonic_ns()}"


@pytest.fixture
def publisher(name: str) -> Iterator[Publisher]:
    """A publisher in its first epoch."""
    found = Publisher(name, plan(1), dense(0))
    found.publish_rows(constant(1), dense(1))
    yield found
    found.close()


@pytest.fixture
def reader(publisher: Publisher, name: str) -> Iterator[Reader]:
    found = Reader(name)
    yield found
    found.close()


def _read(rank: int, world_size: int, name: str, num_domains: int, last: int) -> None:
    """A reader, which reports its reads until epoch `last`, and its memory when it is asked."""
    reader = Reader(name, 180.0, rank % num_domains)
    report("ready")
    report(look(reader, last))
    received()
    report(pss_bytes(os.getpid(), TABLES))
    received()


def _hold(rank: int, world_size: int, name: str) -> None:
    """A reader that stays within an epoch."""
    with Reader(name, 180.0, 0).pinned():
        report("ready")
        received()


@contextlib.contextmanager
def holding(name: str) -> Iterator[int]:
    """Hold an epoch in a process until the block ends; yields the process."""
    with world(1, _hold, name) as running:
        assert running.receive(0) == "ready"
        yield running.pids[0]


def _publish(rank: int, world_size: int, name: str) -> None:
    """A publisher, which begins to change rows in place when it is asked."""
    publisher = Publisher(name, plan(1), dense(0))
    publisher.publish_rows(constant(1), dense(1))
    report("ready")
    received()
    torch.ops.oper.publication_set_epoch(publisher._state.control, -1)
    report("changes")
    received()


@contextlib.contextmanager
def publishing(name: str, num_domains: int, last: int) -> Iterator[tuple[Publisher, World]]:
    """A publisher in its first epoch, and two readers, which must see only whole epochs."""
    publisher = Publisher(name, plan(num_domains), dense(0))
    publisher.publish_rows(constant(1), dense(1))
    with world(2, _read, name, num_domains, last) as readers:
        assert [readers.receive(rank) for rank in range(2)] == ["ready"] * 2
        assert publisher.readers() == sorted(readers.pids)
        yield publisher, readers
    publisher.close()


def assert_whole_epochs(readers: World) -> None:
    for looks, torn, epochs in (readers.receive(rank) for rank in range(2)):
        assert torn == 0
        assert looks >= epochs > 3


@pytest.mark.parametrize("num_domains", [1, 2])
def test_readers_see_whole_epochs_of_one_copy(num_domains: int, name: str) -> None:
    with publishing(name, num_domains, 20) as (publisher, readers):
        for epoch in range(2, 21):
            assert publisher.publish_rows(constant(epoch), dense(epoch)) == epoch
            time.sleep(0.01)  # where processors are few, readers have their turn
        assert_whole_epochs(readers)
        wait_for(lambda: publisher.memory_bytes()["spare"] == 0)
        pss = [pss_bytes(os.getpid(), TABLES)]
        for rank in range(2):
            readers.send(rank, None)
            pss.append(readers.receive(rank))
        held = publisher.memory_bytes()
    # One copy, whoever reads it, in whole huge pages; three would be three times as much.
    copy = held["tables"] + held["dense"]
    assert 0.9 * copy < sum(pss) < copy + (num_domains + 1) * (2 << 20) + (1 << 20) < 2.2 * copy


@pytest.mark.parametrize("num_domains", [1, 2])
def test_rows_that_change_in_place_are_seen_whole(num_domains: int, name: str) -> None:
    with publishing(name, num_domains, 41) as (publisher, readers):
        ids = {s.name: np.random.default_rng(s.dim).permutation(s.num_rows) for s in SPECS}
        for epoch in range(3, 42, 2):
            rows = {s.name: (ids[s.name], torch.full((s.num_rows, s.dim), float(epoch)))
                    for s in SPECS}
            assert publisher.commit(publisher.prepare_rows(rows, dense(epoch))) == epoch
            time.sleep(0.01)
        assert_whole_epochs(readers)
        assert publisher.memory_bytes()["spare"] == 0
        reader = Reader(name)
        with pytest.raises(FileFormatError, match="checksums='none'"):
            reader.verify()
        publisher.publish_rows(constant(42), dense(42))
        assert reader.verify() == 42
        reader.close()


def test_changes_wait_for_readers_and_need_a_first_publication(name: str) -> None:
    publisher = Publisher(name, plan(1), dense(0))
    rows = {"b": (np.arange(3), torch.ones(3, 32))}
    with pytest.raises(InvalidInputError, match="publish all weights first"):
        publisher.commit(publisher.prepare_rows(rows, {}))
    publisher.publish_rows(constant(1), dense(1))
    with holding(name) as pid:
        with pytest.raises(DeadlineError, match=str(pid)):
            publisher.commit(publisher.prepare_rows(rows, {}), timeout_s=0.2)
        for ids, found in ((np.array([1, 2, 1]), r"repeated ids=\[1\]"), (torch.arange(3), "ids=t"),
                           ([0, 1, 2], r"ids=\[0, 1, 2\]"), (np.array(3), "ids=.*int64"),
                           (np.array([True, False, True]), "ids=.*bool")):
            with pytest.raises(InvalidInputError, match=f"rows of table 'b': {found}"):
                publisher.prepare_rows({"b": (ids, torch.ones(3, 32))}, {})
        with Reader(name).pinned() as epoch:  # the old one goes on
            assert epoch == 1
    assert publisher.commit(publisher.prepare_rows(rows, {})) == 3
    publisher.close()


def test_no_change_follows_one_that_has_failed_half_way(
        publisher: Publisher, reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would show readers the rows that the failed one has written, without its others."""
    prepared = publisher.prepare_rows({"b": (np.arange(3), torch.ones(3, 32))}, {})
    with monkeypatch.context() as patch:
        patch.setattr(publication, "_write_header", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            publisher.commit(prepared)
    with pytest.raises(OperError, match="last change, of epoch 1='failed half-way'"):
        publisher.commit(prepared)
    assert publisher.publish_rows(constant(2), dense(2)) == 2
    assert publisher.commit(prepared) == 4
    with reader.pinned() as epoch:
        assert epoch == 4


def test_the_slot_of_a_killed_reader_is_freed(name: str, publisher: Publisher) -> None:
    other = Reader(name)
    with holding(name) as pid:
        publisher.publish_rows(constant(2), dense(2))
        with pytest.raises(DeadlineError, match=str(pid)):
            publisher.publish_rows(constant(3), dense(3), timeout_s=0.2)
        assert other.epoch == 2
    assert publisher.publish_rows(constant(3), dense(3)) == 3
    assert publisher.readers() == [os.getpid()]
    with other.pinned() as epoch:
        assert epoch == 3
        assert (other.dense(1)["w"] == 3).all()
    other.close()
    wait_for(lambda: not publisher.readers())


def test_a_publisher_killed_during_a_change_leaves_no_torn_rows(
        name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with world(1, _publish, name) as running:
        assert running.receive(0) == "ready"
        reader = Reader(name)
        running.send(0, None)
        assert running.receive(0) == "changes"
        assert reader.epoch == 1
        monkeypatch.setattr("oper.shmem.publication.reader._CHANGE_S", 0.1)
        with pytest.raises(OperError, match="stuck while it changed rows of epoch 1"), \
                reader.pinned():
            pass
        monkeypatch.undo()
    with pytest.raises(OperError, match="ended while it changed rows of epoch 1"), reader.pinned():
        pass
    reader.close()


def test_readers_outlive_a_killed_publisher(name: str) -> None:
    with world(1, _publish, name) as running:
        assert running.receive(0) == "ready"
        reader = Reader(name)
        (pid,) = running.pids
        assert reader.publisher_pid == pid and reader.publisher_alive
    assert not reader.publisher_alive
    tables = PublishedTables(reader, 1, FEATURES)
    batch = bags_of_one(torch.tensor([5, 6]), 2)
    with reader.pinned():
        assert (tables.lookup(batch) == 1).all()
    assert reader.verify() == 1
    assert leftovers([pid]) == []
    assert not [n for n in os.listdir("/dev/shm") if name in n]
    with pytest.raises(OperError, match="no such publication"):
        Reader(name, timeout_s=0.1)
    # The name is free again at once.
    again = Publisher(name, plan(1), dense(0))
    again.publish_rows(constant(1), dense(1))
    Reader(name).close()
    reader.close()
    again.close()


def test_memory_of_the_other_buffer(name: str) -> None:
    for keep, most in ((False, 0), (True, 1)):
        publisher = Publisher(name, plan(1), dense(0), keep_spare=keep)
        publisher.publish_rows(constant(1), dense(1))
        reader = Reader(name)
        with reader.pinned() as epoch:
            publisher.publish_rows(constant(2), dense(2))
            assert (reader.dense(epoch & 1)["w"] == 1).all()  # not given back yet
        wait_for(lambda p=publisher, most=most: (p.memory_bytes()["spare"] > 0) == (most > 0))
        reader.close()
        publisher.close()


def test_memory_includes_rows_that_a_plan_puts_into_host_memory() -> None:
    there = plan(1)
    here = replace(there, tables=tuple(replace(t, pieces=tuple(
        replace(p, tiers=tuple(replace(x, memory="host") for x in p.tiers)) for p in t.pieces))
        for t in there.tables))
    assert Layout(here, []).num_bytes == Layout(there, []).num_bytes > 0


def test_weights_that_do_not_fit_change_nothing(publisher: Publisher, reader: Reader) -> None:
    def with_number(number: float, table: str = "a") -> Callable[[str], Rows]:
        def rows(name: str) -> Rows:
            for begin, values in constant(2)(name):
                if name == table and begin == 9000 * (name == "a"):
                    values[5, 3] = number
                yield begin, values
        return rows

    nan, inf = float("nan"), float("inf")
    for rows, weights, words in (
            (lambda n: [(0, torch.zeros(5, next(s.dim for s in SPECS if s.name == n)))], {}, None),
            (lambda n: [(29999, torch.zeros(5, 64))], {}, None),
            (lambda n: [(0, torch.zeros(30000, 63))], {}, None),
            (constant(2), {"w": torch.zeros(3)}, None), (constant(2), {"n": None}, None),
            (with_number(nan), {}, "table 'a': row 9005='inf or nan'"),
            (with_number(inf), {}, "table 'a': row 9005='inf or nan'"),
            (with_number(nan, "b"), {}, "table 'b': row 5='inf or nan'"),
            (constant(2), {"w": torch.full((3000,), nan)}, "w='nan'")):
        given = {n: x for n, x in (dense(2) | weights).items() if x is not None}
        with pytest.raises(InvalidInputError, match=words):
            publisher.publish_rows(rows, given)
        assert reader.epoch == reader.verify() == 1
    large = dense(2) | {"w": torch.full((3000,), 3e38)}
    assert publisher.publish_rows(with_number(3e38), large) == 2  # the sums are not finite


def test_infinite_numbers_of_a_mask_may_stay(name: str) -> None:
    mask = {"mask": torch.tensor([0.0, -float("inf")])}
    publisher = Publisher(name, plan(1), mask)
    publisher.publish_rows(constant(1), mask)
    assert publisher.commit(publisher.prepare_rows({}, mask)) == 3
    with pytest.raises(InvalidInputError, match="mask='inf or nan'"):
        publisher.prepare_rows({}, {"mask": -mask["mask"]})
    publisher.close()


def test_checksums_detect_damage(publisher: Publisher, reader: Reader) -> None:
    assert reader.verify() == 1
    address = publisher._state.buffers[1].addresses[0]
    torch.ops.oper.segment_bytes(address, 100)[77] ^= 1
    with pytest.raises(FileFormatError, match="domain 0"):
        reader.verify()


def test_a_forked_child_is_neither_reader_nor_publisher(publisher: Publisher, reader: Reader
                                                        ) -> None:
    def read() -> None:
        with pytest.raises(OperError):
            reader.epoch  # noqa: B018

    assert child_of(read) == 0
    assert publisher.publish_rows(constant(2), dense(2)) == 2
    assert publisher.readers() == [os.getpid()]


def test_a_child_that_is_forked_inside_a_block_leaves_its_pin(publisher: Publisher, reader: Reader
                                                              ) -> None:
    def leave() -> None:
        with pytest.raises(OperError), reader.pinned():
            pass
        pin.__exit__(None, None, None)

    pin = reader.pinned()
    pin.__enter__()
    assert child_of(leave) == 0
    publisher.publish_rows(constant(2), dense(2))
    with pytest.raises(DeadlineError):  # it would overwrite what this process may still read
        publisher.publish_rows(constant(3), dense(3), 0.2)
    pin.__exit__(None, None, None)
    assert publisher.publish_rows(constant(3), dense(3)) == 3


def test_a_bad_handshake_leaves_no_descriptor() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        before = os.listdir("/proc/self/fd")
        socket.send_fds(theirs, [HANDSHAKE.pack(b"OPERPUB0", 0)], [theirs.fileno()])
        with pytest.raises(ValueError, match="OPERPUB0"):
            receive_handshake(ours)
        assert os.listdir("/proc/self/fd") == before


def test_threads_of_one_reader(publisher: Publisher, reader: Reader) -> None:
    """Threads of one process share a slot, but each pins its own epoch."""
    with ThreadPoolExecutor(3) as pool:
        found = [pool.submit(look, reader, 12) for _ in range(3)]
        for epoch in range(2, 13):
            publisher.publish_rows(constant(epoch), dense(epoch))
    assert [done.result()[1] for done in found] == [0, 0, 0]
    with pytest.raises(OperError, match="outside of its epoch"):
        PublishedTables(reader, 0, FEATURES).lookup(
            Lookup(torch.tensor([5, 6]), torch.tensor([1, 1]), torch.tensor([0, 1]), 1))


@pytest.mark.parametrize("bad", ["", "a/b", "x" * 65, "ä"])
def test_invalid_names_are_refused(bad: str) -> None:
    with pytest.raises(InvalidInputError, match="name"):
        Reader(bad)
