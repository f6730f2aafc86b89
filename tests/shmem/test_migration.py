"""Moving tables to another plan while they are trained: bitwise the same results."""

import contextlib
import gc
import itertools
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from oper.errors import InvalidInputError, OperError, PlanError
from oper.plan import Plan, uniform_plan
from oper.shmem import migration
from oper.shmem.optim.optimizers import STATE_PARTS
from oper.shmem.tables import ShardedTables
from oper.support import kernel
from tests import random_plans as rp, runtime_support as rs
from tests.world_support import segments

STEPS = 12
START = 2
BUDGET = 200_000  # bytes; the tables have 8 MB, so that a move at START takes some steps


def moving(plan: Plan, budget: int | None, switched: dict[int, int] | None = None,
           copied: list[int] | None = None) -> Callable[[ShardedTables, int], None]:
    """A callback that starts a move before step START, and records when each rank has switched and
    the bytes that rank 0 has copied before each step."""
    def between(tables: ShardedTables, step: int) -> None:
        if step == START:
            tables.start_migration(plan, budget)
        if step >= START and tables.migration is None and switched is not None:
            switched.setdefault(tables.group.rank, step)
        if copied is not None and tables.group.rank == 0 and tables.migration is not None:
            copied.append(tables.migration.num_copied_bytes)
    return between


def assert_kept(budget: int, copied: list[int]) -> None:
    """Bytes copied per step are at most the budget, plus the rows that the step has changed."""
    assert copied[0] == 0 and max(b - a for a, b in itertools.pairwise(copied)) < 1.5 * budget


@pytest.mark.parametrize("world_size, optimizer", [
    (1, "sgd"), (3, "rowwise_adagrad"), (2, "partial_rowwise_adam"), (3, "momentum_sgd"),
    (2, "partial_rowwise_lamb")])
def test_a_move_in_steps_changes_no_bit(world_size: int, optimizer: str) -> None:
    """Moves between plans of pulled tiers; every rank switches after the same step."""
    chosen = rs.ALL_OPTIMIZERS[optimizer]
    case = rs.dlrm_case(optimizer)
    steps = rs.make_steps(case, world_size, STEPS)
    plans = list(rp.plans_for(case.tables, world_size).values())
    first, *others = plans if optimizer == "rowwise_adagrad" else plans[3:5]
    stayed = rs.train_virtual(case, first, steps, chosen)
    budget = 3_500_000 if any(not by_row for _, by_row in STATE_PARTS[chosen.name]) else 2_000_000
    for other in others:
        switched, copied = dict[int, int](), list[int]()
        moved = rs.train_virtual(case, first, steps, chosen,
                                 between=moving(other, budget, switched, copied))
        assert_kept(budget, copied)
        assert len(set(switched.values())) == 1 and START + 2 < switched[0] < STEPS, switched
        rs.same_bits(moved, stayed)
        there = rs.train_virtual(case, other, steps, chosen)
        rs.assert_bitwise(moved.replicas, there.replicas, "replicas are those of the new plan")


@pytest.mark.parametrize("seed", [1, 2])
def test_to_and_from_push_and_columns(seed: int) -> None:
    """Results equal those of a run that moves all rows at once."""
    chosen = rs.OPTIMIZERS["rowwise_adagrad"]
    case = rs.dlrm_case("rowwise_adagrad")
    steps, fp32, fp64 = rs.references(case, 2, "rowwise_adagrad", STEPS)
    rich = rp.rich_plan(case.tables, 2, seed, columns=True)
    plain = rp.mixed_plan(case.tables, 2, seed)
    other = rp.rich_plan(case.tables, 2, seed + 10, columns=True)
    for old, new in ((plain, rich), (rich, plain), (rich, other)):
        switched: dict[int, int] = {}
        moved = rs.train_virtual(case, old, steps, chosen, between=moving(new, 2_000_000, switched))

        def at_once(tables: ShardedTables, step: int, new: Plan = new,
                    when: int = switched[0]) -> None:
            if step == when:
                tables.migrate(new)
                assert tables.migration is None

        assert START + 1 < switched[0] < STEPS
        want = rs.train_virtual(case, old, steps, chosen, between=at_once)
        rs.same_bits(moved, want)
        rs.assert_exact(case, moved, fp32, fp64)


def test_writes_during_a_move_are_not_lost() -> None:
    case = rs.dlrm_case("rowwise_adagrad")
    steps = rs.make_steps(case, 2, STEPS)
    plan = uniform_plan(case.tables, 2, "striped")

    def writing(tables: ShardedTables, step: int) -> None:
        if step == START + 2:
            tables.barrier()
            tables.write("large", torch.full((20000, 64), 0.25))
            tables.flush_replicas()

    def both(tables: ShardedTables, step: int) -> None:
        moving(uniform_plan(case.tables, 2, "replicated"), 4_000_000)(tables, step)
        writing(tables, step)
        if step == STEPS:
            assert tables.migration is None

    chosen = rs.OPTIMIZERS["rowwise_adagrad"]
    rs.same_bits(rs.train_virtual(case, plan, steps, chosen, between=both),
                 rs.train_virtual(case, plan, steps, chosen, between=writing))


def test_rows_whose_copy_was_interrupted_are_copied_again() -> None:
    case = rs.dlrm_case()
    (steps,), copy = zip(*rs.make_steps(case, 1, 3), strict=True), migration.Migration._copy
    rows, calls = [], itertools.count()

    def interrupted(*arguments: Any) -> None:
        if next(calls) == 4:
            raise KeyboardInterrupt
        copy(*arguments)

    for moves in (False, True):
        tables = rs.open_alone(case, rs.OPTIMIZERS["sgd"])
        if moves:
            tables.start_migration(rp.mixed_plan(case.tables, 1, 1), BUDGET)
        for k, batch in enumerate(steps):
            loss = rs.rank_loss(tables.lookup(batch.lookup(case)), batch.target)
            with (mock.patch.object(migration.Migration, "_copy", interrupted) if k == 1 and moves
                  else contextlib.nullcontext()):
                try:
                    loss.backward()
                except KeyboardInterrupt:
                    assert moves and k == 1
        tables.finish_migration()
        rows.append(rs.read_all(tables))
    assert next(calls) > 4
    rs.assert_bitwise(*rows, "rows")


@pytest.mark.parametrize("files", [
    {"job/memory.max": "1000", "job/memory.current": "900",
     "job/memory.stat": "anon 100\nactive_file 300\ninactive_file 400"},
    {"memory/memory.limit_in_bytes": "1000", "memory/memory.usage_in_bytes": "900",
     "memory/memory.stat": "active_file 1\ninactive_file 2\ntotal_inactive_file 400\n"
                           "total_active_file 300"}], ids=["version 2", "version 1"])
def test_cached_files_leave_room_in_a_control_group(files: dict[str, str],
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    files = {f"/sys/fs/cgroup/{name}": text for name, text in files.items()} | {
        "/proc/meminfo": "MemAvailable: 5000 kB", "/proc/self/cgroup": "1:memory:/job\n0::/job"}
    monkeypatch.setattr(kernel, "read", lambda path: files.get(re.sub("/+", "/", path), ""))
    assert kernel.available_memory() == 1000 - (900 - 700)


# ---- what fails ----------------------------------------------------------------------------------


TABLES = rs.dlrm_case("rowwise_adagrad").tables


@pytest.mark.parametrize("bad, words", [
    (uniform_plan(TABLES, 3), "world_size=3"), (uniform_plan(TABLES[1:], 2), "'one'"),
    (uniform_plan([replace(t, num_rows=t.num_rows + 1) for t in TABLES], 2), "num_rows")],
    ids=["world", "tables", "rows"])
def test_a_plan_that_does_not_fit_leaves_the_old_one(bad: Plan, words: str) -> None:
    case = rs.dlrm_case("rowwise_adagrad")
    steps = rs.make_steps(case, 2, 5)
    chosen = rs.OPTIMIZERS["rowwise_adagrad"]
    plan = rp.mixed_plan(case.tables, 2, 1)

    def between(tables: ShardedTables, step: int) -> None:
        if step == START:
            with pytest.raises(PlanError, match=words):
                tables.start_migration(bad, BUDGET)
            assert tables.migration is None

    rs.assert_bitwise(rs.train_virtual(case, plan, steps, chosen, between=between).weights,
                      rs.train_virtual(case, plan, steps, chosen).weights, "weights")


def test_failed_and_cancelled_moves_release_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # tables of earlier tests
    case, chosen = rs.dlrm_case("rowwise_adagrad"), rs.OPTIMIZERS["rowwise_adagrad"]
    (batches,) = rs.make_steps(case, 2, 1)
    other = uniform_plan(case.tables, 2, "owned")
    has_room, available = threading.local(), kernel.available_memory
    monkeypatch.setattr(kernel, "available_memory", lambda: (
        available() if getattr(has_room, "here", True) else 1000))
    # Of other tests, whose threads may yet let them go.
    outside = {fields[4] for fields in segments()}

    def body(group: Any) -> None:
        def count() -> int:
            group.all_gather(None)
            found = sum(fields[4] not in outside for fields in segments())
            group.all_gather(None)
            return found

        tables, plain = (rs.open_tables(case, rp.mixed_plan(case.tables, 2, 1), group, chosen)
                         for _ in range(2))
        before = count()
        has_room.here = group.rank == 0  # one rank without room is enough
        with pytest.raises(OperError, match="not enough memory for the new plan"):
            tables.migrate(other)
        assert count() == before
        has_room.here = True
        tables.start_migration(other, BUDGET)
        for move in (tables.start_migration, tables.migrate):
            with pytest.raises(InvalidInputError, match="under way"):
                move(other)
        for trained in (tables, plain):
            batch = batches[group.rank]
            rs.rank_loss(trained.lookup(batch.lookup(case)), batch.target).backward()
        # Two virtual ranks map two arenas and a control segment each.
        assert count() == before + 6
        tables.stop_migration()
        assert count() == before
        rs.assert_bitwise(rs.read_all(tables), rs.read_all(plain), "rows")

    rs.run_ranks(2, body)


def test_read_only_tables_move_in_one_call() -> None:
    case = rs.dlrm_case("rowwise_adagrad")
    steps = rs.make_steps(case, 2, 1)[0]

    def body(group: Any) -> None:
        tables = rs.open_tables(case, rp.mixed_plan(case.tables, 2, 1), group, None)
        batch = steps[group.rank].lookup(case)
        before = tables.forward(batch)[0].clone()
        plan = uniform_plan(case.with_optimizer("sgd").tables, 2, "replicated")
        for wrong in (0, 1.5, "64"):
            with pytest.raises(InvalidInputError, match="bytes_per_step"):
                tables.start_migration(plan, wrong)
        tables.start_migration(plan, BUDGET)
        tables.finish_migration()
        assert tables.plan.tables[0].tiers[0].placement == "replicated"
        rs.assert_bitwise(tables.forward(batch)[0], before, "outputs")

    rs.run_ranks(2, body)


# ---- ranks that share no memory ------------------------------------------------------------------


@pytest.mark.parametrize("domains, optimizer", [
    ((0, 1, 0), "rowwise_adagrad"), ((0, 1), "partial_rowwise_adam")], ids=str)
def test_between_memory_domains(domains: tuple[int, ...], optimizer: str) -> None:
    """The budget is kept, and results are bitwise those of one domain, with columns and push."""
    chosen = rs.ALL_OPTIMIZERS[optimizer]
    case = rs.dlrm_case(optimizer)
    size = len(domains)
    steps = rs.make_steps(case, size, STEPS)
    rich = rp.rich_plan(case.tables, size, 2, columns=True)
    plans = rp.plans_for(case.tables, size)
    budget = 3_500_000 if optimizer == "partial_rowwise_adam" else 2_000_000
    for old, new in ((plans["owned"], plans["striped"]), (plans["mixed0"], rich),
                     (rich, plans["replicated"])):
        switched, copied = dict[int, int](), list[int]()
        got = rs.train_virtual(case, old, steps, chosen, domains=domains,
                               between=moving(new, budget, switched, copied))
        want = rs.train_virtual(case, old, steps, chosen, between=moving(new, budget))
        assert len(set(switched.values())) == 1 and START + 1 < switched[0] < STEPS, switched
        assert_kept(budget, copied)
        rs.same_bits(got, want, replicas=True)


def test_hosts_with_different_page_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requesting huge pages is collective, so all ranks do it or none."""
    monkeypatch.setenv("OPER_DEADLINE_S", "10")
    monkeypatch.setattr(ShardedTables, "page_kind",
                        property(lambda t: "2MiB" if t.group.rank else "4KiB"))
    case = rs.dlrm_case("sgd")
    steps, plans = rs.make_steps(case, 2, STEPS), rp.plans_for(case.tables, 2)
    switched: dict[int, int] = {}
    got = rs.train_virtual(case, plans["owned"], steps, rs.OPTIMIZERS["sgd"], domains=(0, 1),
                           between=moving(plans["striped"], None, switched))
    want = rs.train_virtual(case, plans["owned"], steps, rs.OPTIMIZERS["sgd"], domains=(0, 1))
    assert len(set(switched.values())) == 1
    rs.assert_bitwise(got.outputs, want.outputs, "outputs")
