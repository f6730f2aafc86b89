"""Threads of one process that use one rank's tables at the same time."""

import gc
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import oper
from oper.errors import InvalidInputError
from oper.plan import Piece, Plan, TablePlan, Tier, uniform_plan
from oper.shmem.exchange.pull import PullCosts, choose_pull
from oper.shmem.group import desync
from oper.shmem.group.groups import SingleGroup, ThreadGroup
from oper.shmem.optim.optimizers import SGD, STATE_PARTS
from oper.shmem.tables import ShardedTables
from oper.tables import TableSpec
from tests.references import EVERY
from tests.runtime_support import bags_of_one, run_ranks
from tests.world_support import child_of

ROWS, DIM, BATCH = 256, 8, 32


def _spec(optimizer: str, name: str = "t") -> TableSpec:
    return TableSpec(name, ROWS, DIM, (name,), "sum", optimizer=optimizer)


def _pushed(spec: TableSpec) -> Plan:
    """A plan for a single rank with half of the rows pushed, so that lookups use the send
    buffer."""
    pieces = tuple(Piece(a, b, (Tier(0, ROWS // 2, "owned", (0,)),
                                Tier(ROWS // 2, ROWS, "owned", (0,), mode="push")))
                   for a, b in ((0, 4), (4, 8)))
    return Plan(1, (TablePlan(spec, pieces),))


def _alone() -> ShardedTables:
    """Tables with lr = 1 for gradients of 1, so that a row counts its own lookups."""
    return ShardedTables(uniform_plan([_spec("sgd")], 1), [("t", "t")], SingleGroup(), SGD(lr=1))


def _counted(lookups: Iterable[torch.Tensor]) -> torch.Tensor:
    """The rows that these lookups should give, starting from zeros."""
    counts = torch.zeros(ROWS)
    for ids in lookups:
        counts.index_add_(0, ids, torch.ones(ids.numel()))
    return -counts[:, None].expand(-1, DIM)


def _ids(thread: int, num_threads: int, step: int) -> torch.Tensor:
    """Ids of rows that only one thread uses; over the steps, each equally often."""
    mine = torch.arange(thread, ROWS, num_threads)
    return mine.roll(step)[:BATCH].clone()


def _at_once(num_threads: int, body: Callable[[int], None]) -> None:
    """Run `body(thread)` on threads that start together; raises the first error."""
    start = threading.Barrier(num_threads)

    def run(thread: int) -> None:
        torch.set_num_threads(1)
        start.wait(60)
        body(thread)

    with ThreadPoolExecutor(num_threads) as pool:
        for done in [pool.submit(run, k) for k in range(num_threads)]:
            done.result(120)


def _contents(tables: ShardedTables) -> dict[str, torch.Tensor]:
    """States, and rows except Adam's, which depend on the number of the step."""
    kind = tables.specs["t"].optimizer
    parts = [*(() if kind == "adam" else ("rows",)), *(part for part, _ in STATE_PARTS[kind])]
    return {part: tables.read("t", part=part) for part in parts}


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad", "adagrad", "adam"])
def test_every_backward_pass_is_applied_once(optimizer: str, mode: str) -> None:
    """Threads that use different rows give bitwise the result of sequential training."""
    steps, num_threads = 300, 4

    def train(at_once: bool) -> tuple[ShardedTables, list[float]]:
        spec = _spec(optimizer)
        plan = _pushed(spec) if mode == "push" else uniform_plan([spec], 1)
        tables = ShardedTables(plan, [("t", "t")], SingleGroup(), EVERY[optimizer])
        seen = [0.0] * num_threads

        def body(thread: int) -> None:
            for step in range(steps):
                out = tables.lookup(bags_of_one(_ids(thread, num_threads, step)))
                seen[thread] += float(out.detach().double().abs().sum())
                out.sum().backward()

        if at_once:
            _at_once(num_threads, body)
        else:
            for thread in range(num_threads):
                body(thread)
        return tables, seen

    together, saw = train(True)
    in_turn, want = train(False)
    assert together.num_steps == in_turn.num_steps == num_threads * steps
    for part, rows in _contents(in_turn).items():
        assert torch.equal(rows, _contents(together)[part]), part
    if optimizer != "adam":
        assert saw == want, "lookups of rows that no other thread trains"


def test_threads_that_share_rows() -> None:
    steps, num_threads = 500, 4
    tables = _alone()

    def ids_of(step: int) -> torch.Tensor:
        return torch.arange(BATCH).mul(step % 7 + 1).remainder(ROWS)

    def body(thread: int) -> None:
        for step in range(steps):
            tables.lookup(bags_of_one(ids_of(step))).sum().backward()

    _at_once(num_threads, body)
    assert torch.equal(tables.read("t"), num_threads * _counted(map(ids_of, range(steps))))


def test_a_sharded_module_with_prefetched_batches() -> None:
    """Two threads train and one evaluates, through the module and its resolving thread."""
    bag = nn.EmbeddingBag(ROWS, DIM, mode="sum")
    nn.init.zeros_(bag.weight)
    model = oper.shard(nn.Sequential(bag), optimizer=oper.SGD(lr=1.0))
    tables, steps = model[0].tables, 300
    done = threading.Event()

    def body(thread: int) -> None:
        if thread == 2:
            while not done.is_set():
                with torch.no_grad():
                    out = model(torch.arange(ROWS)[:, None])
                assert torch.equal(out, out.round())
            return
        try:
            for step in range(steps):
                batch = tables.resolve(bags_of_one(_ids(thread, 2, step)))
                tables.lookup(batch).sum().backward()
        finally:
            if thread == 0:
                done.set()

    _at_once(3, body)
    want = _counted(_ids(thread, 2, step) for step in range(steps) for thread in range(2))
    assert torch.equal(model.state_dict()["0.weight"], want)


def test_accumulated_gradients_of_several_threads() -> None:
    """Blocks of `no_sync` overlap between threads; no gradient is lost, and no block stays open."""
    tables = _alone()

    def body(thread: int) -> None:
        for step in range(100):
            with tables.no_sync():
                tables.lookup(bags_of_one(_ids(thread, 4, step))).sum().backward()
            tables.lookup(bags_of_one(_ids(thread, 4, step))).sum().backward()

    _at_once(4, body)
    tables.lookup(bags_of_one(torch.zeros(0, dtype=torch.int64))).sum().backward()
    want = _counted(_ids(thread, 4, step) for step in range(100) for thread in range(4))
    assert torch.equal(tables.read("t"), 2 * want)


def test_lookups_without_gradients_do_not_wait() -> None:
    tables = _alone()

    def evaluate() -> torch.Tensor:
        with torch.no_grad():
            return tables.lookup(bags_of_one(torch.arange(4)))

    # As while a backward pass waits for its peers.
    with ThreadPoolExecutor(1) as pool, tables.turns.lock:
        assert pool.submit(evaluate).result(60).shape == (4, DIM)


@pytest.mark.parametrize("how", ["lookup", "read"])
def test_tables_move_while_another_thread_reads(how: str) -> None:
    """No arena is unmapped while a lookup or a copy of rows still reads it."""
    tables = ShardedTables(uniform_plan([replace(_spec("sgd"), num_rows=50_000)], 1), [("t", "t")],
                           SingleGroup(), SGD(lr=1))
    tables.write("t", torch.arange(50_000.0)[:, None].expand(-1, DIM))
    ids = torch.arange(50_000)
    done = threading.Event()

    def body(thread: int) -> None:
        if thread == 0:
            try:
                for _ in range(15):
                    tables.migrate(tables.plan)
            finally:
                done.set()
        while not done.is_set():
            with torch.no_grad():
                found = tables.lookup(bags_of_one(ids)) if how == "lookup" else tables.read("t")
            assert torch.equal(found[:, 0], ids.float())

    _at_once(3, body)


@pytest.mark.parametrize("what", ["lookups", "turn"])
def test_a_forked_child_does_not_wait_for_its_parents_threads(what: str) -> None:
    tables, begun, done = _alone(), threading.Event(), threading.Event()
    ids = torch.randint(0, ROWS, (200_000,))

    def look_up() -> None:
        begun.set()
        with torch.no_grad():
            while not done.is_set():
                tables.lookup(bags_of_one(ids))

    def hold() -> None:
        with tables.turns.lock, tables.turns.resolving:
            begun.set()
            done.wait()

    def read_and_close() -> None:
        tables.read("t", 0, 1)
        tables.close()

    thread = threading.Thread(target=look_up if what == "lookups" else hold)
    thread.start()
    begun.wait()
    try:
        for _ in range(3):  # most likely in the middle of a lookup
            assert child_of(read_and_close) == 0
    finally:
        done.set()
        thread.join()


def test_a_child_finds_no_mutex_locked(tmp_path: Path) -> None:
    source, program = Path(__file__).with_name("fork_mutex.cpp"), tmp_path / "program"
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no compiler")
    subprocess.run([compiler, "-std=c++20", "-pthread", f"-I{source.parents[2] / 'csrc'}",
                    str(source), "-o", str(program)], check=True)
    subprocess.run([str(program)], check=True)


def test_tables_are_dropped_while_a_thread_reads_their_barriers(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """A monitor's thread reads them; its errors would end it."""
    class Tables(SimpleNamespace):
        """Allows weak references."""

    kept: list[Any] = [Tables(name="", specs={}, handle=k, is_watched=True, members=[0, 1])
                       for k in range(2)]
    register = desync.Register()
    for tables in kept:
        register.add(tables)
    del tables

    def read(handle: int) -> list[desync.BarrierState]:
        kept.clear()
        return [desync.BarrierState(arrivals, 3, 0, 0, 0, 0, 0) for arrivals in (2, 1)]

    monkeypatch.setattr(desync, "barrier_states", read)
    assert register.waits(0) == (1, 3)
    assert register.waits(0) is None


def test_a_child_forked_in_a_turn_ends_it() -> None:
    tables = _alone()

    def end_turn() -> None:
        tables.turns.lock.release()
        with tables.turns.lock:
            pass

    with tables.turns.lock:
        assert child_of(end_turn) == 0


def test_concurrent_lookups_with_deduplicated_pull() -> None:
    """De-duplicated pull has one set of buffers, so a concurrent lookup reads rows in place. A
    thread that chooses again waits for a lookup that uses them."""
    spec = _spec("sgd")

    def body(group: ThreadGroup) -> None:
        tables = ShardedTables(uniform_plan([spec], 2), [("t", "t")], group, None)
        tables.write("t", torch.arange(ROWS)[:, None].expand(-1, DIM).float())
        tables.flush_replicas()
        choose_pull(tables, True)
        if group.rank == 0:
            def look(thread: int) -> None:
                for step in range(200):
                    ids = torch.arange(step, step + 500 + 100 * thread).remainder(ROWS)
                    out = tables.lookup(bags_of_one(ids))
                    assert torch.equal(out[:, 0], ids.float())
            def choose(thread: int) -> None:
                if thread < 3:
                    return look(thread)
                for step in range(200):
                    choose_pull(tables, (True, False, PullCosts(0.5))[step % 3])

            _at_once(4, choose)
        tables.barrier()

    run_ranks(2, body)


# ---- several ranks -------------------------------------------------------------------------------


def _in_thread(name: str, body: Callable[[], object]) -> BaseException | None:
    with ThreadPoolExecutor(1, name) as pool:
        return pool.submit(body).exception(60)


@pytest.mark.parametrize("domains", [None, (0, 1)])
def test_with_several_ranks_one_thread_trains(domains: tuple[int, int] | None) -> None:
    def body(group: ThreadGroup) -> None:
        tables = ShardedTables(uniform_plan([_spec("sgd")], 2), [("t", "t")], group, SGD(lr=1), 0.5)
        batch = bags_of_one(torch.arange(8))
        out = tables.lookup(batch)
        error = _in_thread("second", lambda: tables.lookup(batch))
        assert isinstance(error, InvalidInputError)
        assert "two threads" in str(error) and "'second_0'" in str(error)
        out.sum().backward()
        # One after another they may: the calls of a rank stay in one order.
        for name in ("second", "third"):
            assert _in_thread(name, lambda: tables.lookup(batch).sum().backward()) is None
        # A lookup whose result is not referenced does not count.
        out = tables.lookup(batch)
        del out
        gc.collect()
        assert _in_thread("fourth", lambda: tables.lookup(batch).sum().backward()) is None
        want = torch.zeros(ROWS, DIM)
        want[:8] = -4.0
        assert torch.equal(tables.read("t"), want)

    run_ranks(2, body, domains=domains)
