"""Batches trained in parts, and gradients accumulated for one update: as complete batches."""

import gc
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import replace
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch

import oper
from oper.errors import InvalidInputError, OperError
from oper.plan import Plan, uniform_plan
from oper.shmem.batch import Lookup
from oper.shmem.group.groups import ProcessGroup, SingleGroup
from oper.shmem.micro_batches import in_parts
from oper.shmem.optim.optimizers import SGD, Optimizer
from oper.shmem.tables import ShardedTables
from oper.tables import TableSpec
from tests import random_plans as rp, runtime_support as rs
from tests.references import EVERY
from tests.support import wait_for
from tests.world_support import caught, report, world

STEPS = 3


def parts_of(case: rs.Case, rank: int, step: int) -> list[rs.Batch]:
    return [rs.make_batch(case, 100 * step + 10 * rank + m, size)
            for m, size in enumerate((7, 0 if rank else 12, 5))]


def gradient(out: torch.Tensor, batch: rs.Batch) -> torch.Tensor:
    """A gradient of the output that does not depend on how samples are grouped into parts."""
    return (out.detach() - batch.target if out.shape == batch.target.shape else
            out.detach() * 2 + 1)


def one_pass(tables: ShardedTables, case: rs.Case, part: rs.Batch) -> torch.Tensor:
    """Run a forward and a backward pass; returns the lookup's result."""
    out = tables.lookup(part.lookup(case))
    out.backward(gradient(out, part))
    return out


@pytest.fixture
def alone() -> tuple[rs.Case, ShardedTables, rs.Batch]:
    """A case, its tables on one rank, and a part of a batch."""
    case = rs.dlrm_case()
    return (case, rs.open_alone(case, SGD(lr=0.3)),
            parts_of(case, 0, 0)[0])


def joined(case: rs.Case, batches: list[rs.Batch]) -> rs.Batch:
    """Concatenate batches, with all samples in order."""
    ids, weights = [], []
    for key in range(len(case.keys)):
        for b in batches:
            lengths = b.lengths.reshape(len(case.keys), b.size)
            ends = [0, *lengths.sum(1).cumsum(0).tolist()]
            ids.append(b.ids[ends[key]:ends[key + 1]])
            if b.weights is not None:
                weights.append(b.weights[ends[key]:ends[key + 1]])
    lengths = torch.cat([b.lengths.reshape(len(case.keys), b.size) for b in batches], 1)
    return rs.Batch(lengths.reshape(-1), torch.cat(ids), torch.cat(weights) if weights else None,
                    torch.cat([b.target for b in batches]))


def train_in_parts(tables: ShardedTables, batches: list[Lookup], ahead: bool,
                   body: Callable[[int, torch.Tensor], None]) -> None:
    """Train one batch in parts. `ahead`: each lookup starts before the passes of the previous part,
    and the last pass starts the update."""
    with in_parts([tables], len(batches) if ahead else None):
        if ahead:
            begun = [tables.turns.parts.start(batches[0])]
        for k, batch in enumerate(batches):
            if ahead:
                begun += [tables.turns.parts.start(x) for x in batches[k + 1:k + 2]]
                batch = begun[k].result()
            body(k, tables.lookup(batch))


def train(case: rs.Case, plan: Plan, optimizer: Optimizer, group: Any, how: str
          ) -> dict[str, torch.Tensor]:
    """Train in one of four ways and return the rows. `how`: ``"joined"`` (parts concatenated),
    ``"whole"`` (no_sync), ``"parts"`` (micro-batches), ``"ahead"`` (prefetched)."""
    tables = rs.open_tables(case, plan, group, optimizer)
    for step in range(STEPS):
        parts = parts_of(case, group.rank, step)
        if how == "joined":
            parts = [joined(case, parts)]
        batches = [p.lookup(case) for p in parts]
        before = tables.read("large")

        def passes(k: int, out: torch.Tensor, parts: list[rs.Batch] = parts) -> None:
            out.backward(gradient(out, parts[k]))

        if how in ("joined", "whole"):
            for k, batch in enumerate(batches[:-1]):
                with tables.no_sync():
                    passes(k, tables.lookup(batch))
            passes(len(batches) - 1, tables.lookup(batches[-1]))
        else:
            train_in_parts(tables, batches, how == "ahead", passes)
        assert tables.num_steps == step + 1
        assert not torch.equal(before, tables.read("large"))
    return rs.read_all(tables)


@pytest.mark.parametrize("optimizer", [
    "sgd", "rowwise_adagrad_l2", "adam", "rowwise_adagrad_clipped"])
@pytest.mark.parametrize("domains", [None, (0, 1), (0, 0, 1)])
def test_equals_whole_batches(domains: tuple[int, ...] | None, optimizer: str) -> None:
    """Covers plans of all kinds, with lookups that are prefetched and lookups that are not."""
    case = rs.dlrm_case(weighted=optimizer == "adam")
    size = len(domains or (0, 1))
    for plan in (rp.mixed_plan(case.tables, size, 1), rp.rich_plan(case.tables, size, 3, True)):
        whole, parts, ahead = (rs.run_ranks(size, lambda g, how=how, plan=plan: train(
            case, plan, EVERY[optimizer], g, how), domains=domains)
            for how in ("whole", "parts", "ahead"))
        rs.assert_near(ahead[0], parts[0], "ahead", 2e-5)
        rs.assert_bitwise(parts[0], parts[-1], "two ranks")
        rs.assert_near(parts[0], whole[0], "parts", 2e-5)


@pytest.mark.parametrize("world_size, how, tolerance", [(1, "ahead", 2e-5), (2, "joined", 0.0)])
def test_unpooled(world_size: int, how: str, tolerance: float) -> None:
    tables = tuple(replace(t, dim=16, pooling="none") for t in rs.dlrm_case().tables)
    case = replace(rs.dlrm_case(), tables=tables)
    plan = rp.mixed_plan(tables, world_size, 1)
    whole, other = (rs.run_ranks(world_size, lambda g, how=how: train(
        case, plan, EVERY["sgd"], g, how)) for how in ("whole", how))
    rs.assert_near(other, whole, how, tolerance)


def test_messages_of_eight_bits_are_reproducible() -> None:
    case = rs.dlrm_case()
    plan = replace(rp.mixed_plan(case.tables, 2, 1), message_bits=8)
    runs = [rs.run_ranks(2, lambda g: train(case, plan, EVERY["sgd"], g, "ahead"), domains=(0, 1))
            for _ in range(2)]
    rs.assert_bitwise(runs[0], runs[1], "two runs")


def test_rows_do_not_change_inside_the_block() -> None:
    """Reads, lookups and barriers inside the block see the old rows; one update follows."""
    case = rs.dlrm_case()
    plan = rp.rich_plan(case.tables, 2, 3, True)

    def body(group: Any, looks: bool) -> Any:
        tables = rs.open_tables(case, plan, group, EVERY["rowwise_adagrad"])
        parts = parts_of(case, group.rank, 0)
        seen = []
        with in_parts([tables]):
            for k, part in enumerate(parts):
                if k + 1 < len(parts):
                    tables.turns.parts.start(parts[k + 1].lookup(case))
                out = one_pass(tables, case, part)
                if looks:
                    tables.barrier()
                    seen.append(tables.read("large"))
                    with torch.no_grad():
                        seen.append(tables.lookup(part.lookup(case)))
                    rs.assert_bitwise(seen[-1], out.detach(), "rows inside")
        rs.assert_bitwise(seen[::2], seen[:1] * (len(seen) // 2), "rows inside")
        tables.barrier()
        rows = tables.read("large")
        assert not looks or not torch.equal(rows, seen[0])
        return rows

    rs.assert_bitwise(*(rs.run_ranks(2, lambda g, looks=looks: body(g, looks), domains=(0, 1))
                        for looks in (False, True)), "looked at and not")


def test_prefetched_lookups_end_with_the_update() -> None:
    case = rs.dlrm_case()

    def body(group: Any) -> None:
        tables = rs.open_tables(case, uniform_plan(case.tables, 2), group, SGD(lr=0.3))
        part = parts_of(case, group.rank, 0)[0]
        with in_parts([tables]):
            kept = tables.turns.parts.start(part.lookup(case))
            one_pass(tables, case, part)
        with torch.no_grad():
            old, new = kept.result().looked_up.out, tables.lookup(part.lookup(case))
            assert not torch.equal(old, new)
            rs.assert_bitwise(tables.lookup(kept.result()), new, "looked up again")

    rs.run_ranks(2, body, domains=(0, 1))


@pytest.mark.parametrize("domains", [None, (0, 1)])
def test_an_error_within_a_step_updates_nothing(domains: tuple[int, ...] | None) -> None:
    case = rs.dlrm_case()
    plan = rp.rich_plan(case.tables, 2, 3, True)

    def body(group: Any, fails: bool) -> Any:
        tables = rs.open_tables(case, plan, group, EVERY["rowwise_adagrad"])
        parts = parts_of(case, group.rank, 0)
        batches = [p.lookup(case) for p in parts]

        def passes(k: int, out: torch.Tensor) -> None:
            out.backward(gradient(out, parts[k]))

        def failing(k: int, out: torch.Tensor) -> None:
            if k:
                raise ZeroDivisionError
            passes(k, out)

        if fails:
            before = tables.read("large")
            with pytest.raises(ZeroDivisionError):
                train_in_parts(tables, batches, True, failing)
            tables.barrier()
            assert tables.num_steps == 0
            rs.assert_bitwise(tables.read("large"), before, "rows after an error")
        train_in_parts(tables, batches, True, passes)
        return rs.read_all(tables)

    rs.assert_bitwise(*(rs.run_ranks(2, lambda g, fails=fails: body(g, fails), domains=domains)
                        for fails in (False, True)), "after an error and without")


def test_refusals(alone: Any) -> None:
    case, tables, part = alone
    plan = uniform_plan(case.tables, 1)
    read_only = rs.open_tables(case, plan, SingleGroup(), None)
    with pytest.raises(InvalidInputError, match="read-only"), in_parts([read_only]):
        pass
    with pytest.raises(InvalidInputError, match="no_sync"), tables.no_sync(), in_parts(
            [tables]):
        pass
    with in_parts([tables]):
        with pytest.raises(InvalidInputError, match="in parts already"), in_parts([tables]):
            pass
        with pytest.raises(InvalidInputError, match="accumulate"), tables.no_sync():
            pass
        with pytest.raises(InvalidInputError, match="another plan"):
            tables.start_migration(plan)
    with pytest.raises(InvalidInputError, match="frozen"), in_parts([tables]):
        for frozen in (frozenset({"large"}), frozenset[str]()):
            tables.frozen = frozen
            one_pass(tables, case, part)
    tables.frozen = frozenset()
    assert tables.num_steps == 0 and tables.turns.parts is None
    with pytest.raises(InvalidInputError, match="num_passes=1"), in_parts([tables], 1):
        for _ in range(2):
            one_pass(tables, case, part)
    assert tables.turns.lock.acquire(blocking=False)


def test_ids_must_not_change_while_the_thread_uses_them(alone: Any) -> None:
    case, tables, part = alone
    batch = part.lookup(case)
    before = tables.read("large")
    with (pytest.raises(InvalidInputError, match="changed in place"), in_parts([tables])):
        begun = tables.turns.parts.start(batch).result()
        batch.ids.zero_()
        tables.lookup(begun)
    rs.assert_bitwise(tables.read("large"), before, "rows")


@pytest.mark.parametrize("num_passes", [None, 1])
def test_gradients_must_not_change_while_the_thread_uses_them(
        num_passes: int | None, alone: Any) -> None:
    case, tables, part = alone
    before, begin = tables.read("large"), threading.Event()
    with (pytest.raises(InvalidInputError, match="changed in place"),
          in_parts([tables], num_passes)):
        out = tables.lookup(part.lookup(case))
        tables.turns.parts._worker.submit(begin.wait, 20)  # the thread is busy
        grad = gradient(out, part)
        out.backward(grad)
        grad.zero_()
        begin.set()
    assert tables.num_steps == 0
    rs.assert_bitwise(tables.read("large"), before, "rows")


def test_reads_wait_for_the_update_under_way(alone: Any) -> None:
    case, tables, part = alone
    step = tables.step

    def slow(*arguments: Any, **options: Any) -> None:
        time.sleep(0.3)
        step(*arguments, **options)

    with mock.patch.object(tables, "step", slow), in_parts([tables], 1):
        one_pass(tables, case, part)
        inside = tables.read("large")
    rs.assert_bitwise(inside, tables.read("large"), "rows")


def test_rows_written_after_a_lookup_began_are_looked_up() -> None:
    case = rs.dlrm_case()

    def body(group: Any) -> None:
        tables = rs.open_tables(case, uniform_plan(case.tables, 2), group, SGD(lr=0.3))
        part = parts_of(case, group.rank, 0)[0]
        with in_parts([tables]):
            begun = tables.turns.parts.start(part.lookup(case))
            begun.result()
            tables.write("large", torch.full(tables.shape("large"), 7.0))
            tables.flush_replicas()
            with torch.no_grad():
                want = tables.lookup(part.lookup(case))
            out = tables.lookup(begun.result())
            rs.assert_bitwise(out.detach(), want, "rows")
            out.backward(gradient(out, part))
        assert tables.num_steps == 1

    rs.run_ranks(2, body, domains=(0, 1))


def test_gradients_of_earlier_parts_cannot_be_dropped(alone: Any) -> None:
    case, tables, part = alone
    with in_parts([tables]):
        tables.drop_gradients()
        one_pass(tables, case, part)
        with pytest.raises(InvalidInputError, match="zero_grad"):
            tables.drop_gradients()
    assert tables.num_steps == 1


def test_all_batches_use_one_thread_which_ends_with_the_tables() -> None:
    def calls() -> list[int]:
        case = rs.dlrm_case()
        tables, found = rs.open_alone(case, SGD(lr=0.3)), list[int]()
        tables.on_update.append(lambda: found.append(threading.get_ident()))
        for _ in range(3):
            with in_parts([tables], 1):
                one_pass(tables, case, parts_of(case, 0, 0)[0])
        assert {t.ident for t in threading.enumerate() if t.name.startswith("oper-parts")} >= {
            found[0]}
        tables.close()
        return found

    first, *others = calls()
    assert others == [first, first] and first != threading.get_ident()
    gc.collect()
    wait_for(lambda: all(t.ident != first for t in threading.enumerate()))


def test_an_interrupted_end_leaves_tables_that_can_be_trained(alone: Any) -> None:
    case, tables, part = alone
    interrupted, step = threading.Event(), tables.step

    def slow(*arguments: Any, **options: Any) -> None:
        interrupted.wait(10)
        time.sleep(0.2)
        step(*arguments, **options)

    def interrupt_once(futures: Any) -> None:
        if interrupted.is_set():
            wait(futures)
        else:
            interrupted.set()
            raise KeyboardInterrupt

    with (mock.patch("oper.shmem.micro_batches.wait", interrupt_once),
          mock.patch.object(tables, "step", slow), pytest.raises(KeyboardInterrupt),
          in_parts([tables], 1)):
        one_pass(tables, case, part)
    assert tables.num_steps == 1  # the thread no longer uses the tables
    one_pass(tables, case, part)
    assert tables.num_steps == 2


def _two_collections(group: Any) -> str:
    """Rank 1 refuses its second part in the first of two collections."""
    case = rs.dlrm_case()
    plan = uniform_plan(case.tables, 2)
    both = [rs.open_tables(case, plan, group, SGD(lr=0.3)) for _ in range(2)]
    both[0].guard.choose("stop")
    parts = parts_of(case, group.rank, 0)
    with pytest.raises(OperError) as error, in_parts(both):
        for k, part in enumerate(parts[::2]):
            for tables in both:
                out = tables.lookup(part.lookup(case))
                bad = k == 1 and group.rank == 1
                out.backward(gradient(out, part) * (float("nan") if bad else 1.0))
    for tables in both:
        tables.barrier()
        assert tables.num_steps == 0
    return error.type.__name__


def test_a_refused_part_stops_all_collections() -> None:
    error_name = rs.run_ranks(2, _two_collections, timeout_s=60)
    assert error_name == ["PeerLostError", "InvalidInputError"]


def _lose_a_peer(rank: int, world_size: int) -> NoReturn:
    case = rs.dlrm_case()
    tables = rs.open_tables(case, uniform_plan(case.tables, 2), ProcessGroup(),
                            rs.OPTIMIZERS["rowwise_adagrad"])
    parts = parts_of(case, rank, 0)

    def passes(k: int, out: torch.Tensor) -> None:
        if k == 1 and rank == 1:
            os._exit(9)
        out.backward(gradient(out, parts[k]))

    with caught() as errors:
        train_in_parts(tables, [p.lookup(case) for p in parts], True, passes)
    report(errors[0])
    os._exit(0)  # no rank is left to wait for


def test_a_peer_that_ends_inside_is_named() -> None:
    with world(2, _lose_a_peer, labels="ab", env={"OPER_DEADLINE_S": "20"}) as running:
        error_name = running.receive(0)
    assert error_name.startswith("PeerLostError") and "rank=1" in error_name, error_name


# ---- accumulation: k passes and one update equal one combined batch ------------------------------


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad_l2", "adam"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_equals_one_batch(world_size: int, optimizer: str) -> None:
    """The result is bitwise that of one batch, under plans of all kinds."""
    case = rs.dlrm_case(weighted=True)
    for plan in (rp.mixed_plan(case.tables, world_size, 1),
                 rp.rich_plan(case.tables, world_size, 3, True)):
        micro, whole = (rs.run_ranks(world_size, lambda g, how=how, plan=plan: train(
            case, plan, EVERY[optimizer], g, how)) for how in ("whole", "joined"))
        rs.assert_bitwise(micro, whole, "micro-batches and one batch")


def test_keys_in_another_order_and_optional_weights() -> None:
    """Micro-batches may order their keys differently; missing weights count as weights of 1."""
    case = rs.Case((TableSpec("a", 9, 4, ("f", "g"), "sum", optimizer="sgd"),), ("f", "g"))
    found = []
    for batches in ([((0, 1), [1, 2, 3], [1, 2], None), ((1, 0), [5, 1, 1], [1, 2], [1.0, 1, 1])],
                    [((0, 1), [1, 1, 1, 2, 3, 5], [1, 2, 2, 1], None)]):
        tables = rs.open_tables(case, rp.mixed_plan(case.tables, 1, 0), SingleGroup(), EVERY["sgd"])
        for m, (keys, ids, lengths, weights) in enumerate(batches):
            batch = Lookup(torch.tensor(ids, dtype=torch.int32 if m else torch.int64),
                           torch.tensor(lengths), torch.tensor(keys), len(lengths) // 2,
                           None if weights is None else torch.tensor(weights))
            if m + 1 < len(batches):
                with tables.no_sync():
                    tables.lookup(batch).sum().backward()
            else:
                tables.lookup(batch).sum().backward()
        found.append(tables.read("a"))
    rs.assert_bitwise(found[0], found[1], "two layouts")


def test_lengths_may_change_after_the_lookup() -> None:
    found = []
    for reuses in (False, True):
        case = rs.Case((TableSpec("a", 9, 4, ("f",), "sum", optimizer="sgd"),), ("f",))
        tables, total = rs.open_alone(case, EVERY["sgd"]), torch.zeros(4)
        lengths = torch.empty(2, dtype=torch.int64)
        for k, values in enumerate(([1, 2], [2, 1])):
            lengths = lengths if reuses else torch.empty_like(lengths)
            out = tables.lookup(Lookup(torch.arange(3) + k, lengths.copy_(torch.tensor(values)),
                                       torch.zeros(1, dtype=torch.int64), 2))
            total = total + out[0] - 3 * out[1]
        total.sum().backward()
        found.append(tables.read("a"))
    rs.assert_bitwise(found[0], found[1], "lengths of their own and of one tensor")


def test_a_model_without_tables_accumulates_nothing() -> None:
    with pytest.raises(InvalidInputError, match="accumulate"), oper.no_sync(torch.nn.Linear(1, 1)):
        pass
