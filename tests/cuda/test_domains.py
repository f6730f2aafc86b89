"""Device tables between memory domains, in moves to other plans, and their counters."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from oper.errors import InvalidInputError, OperError
from oper.plan import Plan, uniform_plan
from oper.rows.traffic import KIND, KINDS, Traffic
from oper.shmem.exchange import device_squares
from oper.shmem.group.groups import ThreadGroup
from oper.shmem.optim.optimizers import SGD, Optimizer, RowWiseAdagrad
from oper.shmem.tables import ShardedTables
from tests import random_plans as rp, runtime_support as rs
from tests.cuda.emulated import on_devices, small_case
from tests.shmem.test_traffic import assert_equal, assert_not_updated, executed
from tests.support import pulled

HEADER_BYTES = 1024  # of a phase of few tables


@pytest.mark.parametrize("bits", [32, 16, (32, 16), (16, 32)], ids=str)
def test_sent_bytes_equal_those_of_the_host_back_end(emulation: pytest.MonkeyPatch, bits: Any
                                                     ) -> None:
    """Compares all bytes of pulled tiers, and those of the forward pass of pushed ones."""
    case = small_case("sgd")
    steps = rs.make_steps(case, 4, 2)
    domains = (0, 1, 0, 1)
    for plan, kinds in ((rp.mixed_plan(case.tables, 4, 1), None),
                        (rp.rich_plan(case.tables, 4, 1, columns=False),
                         ("row_ids", "rows", "ids", "partial_sums", "refreshed_rows"))):
        plan = replace(plan, message_bits=bits)

        def body(group: ThreadGroup, plan: Plan = plan) -> Any:
            return executed(case, plan, steps, SGD(lr=0.1), group, lambda t: t.sent_bytes())

        host = rs.run_ranks(4, body, domains=domains)
        with on_devices(emulation):
            device = rs.run_ranks(4, body, domains=domains)
        for a, b in zip(host, device, strict=True):
            for kind in kinds or a:
                assert a[kind] == b[kind], kind
            assert sum(itertools.chain(*b.values())) > 0
            # Devices ask for rows and for sums one after the other: a phase more of every step.
            more = 0 if kinds is None else len(steps) * HEADER_BYTES
            assert b["headers"] == [x + more * (x > 0) for x in a["headers"]]


class _Liar:
    """A transport that corrupts numbers in this rank's first or second message."""

    def __init__(self, inner: Any, wrong: int) -> None:
        self._inner, self._wrong, self._count = inner, wrong, 0
        self.at = inner.at

    def exchange(self, send: torch.Tensor, there: list[int], recv: torch.Tensor, back: list[int]
                 ) -> None:
        self._count += 1
        if self._count == self._wrong:  # behind what heads begin with, or all slots
            send = send.clone()
            send[32 if self._count == 1 else 0:there[0]] = 0x7F
        self._inner.exchange(send, there, recv, back)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def error_of_step(tables: Any, lookup: Any, group: ThreadGroup) -> str:
    """Train one step; return its error, after the other ranks are released, or "nothing"."""
    try:
        tables.lookup(lookup).sum().backward()
    except OperError as error:
        group.abort()
        return str(error)
    return "nothing"


@pytest.mark.parametrize("wrong, problem", [
    (1, "has sent invalid data"), (2, "row number from another memory domain is invalid")])
def test_invalid_counts_and_slots_are_refused(emulation: pytest.MonkeyPatch, on_device: None,
                                              wrong: int, problem: str) -> None:
    """Invalid counts are refused before memory is allocated, slots before rows are read."""
    case = small_case("sgd")
    plan = rp.plans_for(case.tables, 2)["striped"]
    (batches,) = rs.make_steps(case, 2, 1)

    def body(group: ThreadGroup) -> str:
        tables = rs.open_tables(case, plan, group, SGD(lr=0.1))
        if group.rank == 1:
            tables._exchange._transport = _Liar(tables._exchange._transport, wrong)
        return error_of_step(tables, batches[group.rank].lookup(case), group)

    victim, _ = rs.run_ranks(2, body, domains=(0, 1))
    assert problem in victim


@pytest.mark.parametrize("domains", [(0, 1), (0, 0, 1, 1)])
def test_a_missing_sum_of_squares_is_refused(emulation: pytest.MonkeyPatch, on_device: None,
                                             domains: tuple[int, ...]) -> None:
    """The counts are possible for the plan; only the rows with gradients tell. No rank waits for
    the rank that refuses."""
    case, liar = small_case("rowwise_adagrad"), len(domains) - 1
    plan = rp.rich_plan(case.tables, len(domains), 1, columns=True)
    (batches,) = rs.make_steps(case, len(domains), 1)
    found_all = device_squares._list

    def leave_out(exchange: Any, *arguments: Any) -> Any:
        sent, received, totals = found_all(exchange, *arguments)
        if exchange.rank == liar:
            sent = type(sent)(*(x[:-1] for x in sent))
        return sent, received, totals

    emulation.setattr(device_squares, "_list", leave_out)

    def body(group: ThreadGroup) -> str:
        tables = rs.open_tables(case, plan, group, rs.OPTIMIZERS["rowwise_adagrad"])
        return error_of_step(tables, batches[group.rank].lookup(case), group)

    found = rs.run_ranks(len(domains), body, domains=domains)
    assert any(f"has sent invalid data: rank={liar}" in x for x in found[:liar]), found
    assert "nothing" not in found


def test_codes_are_for_host_memory(on_device: None) -> None:
    case = small_case("sgd")
    plan = replace(rp.mixed_plan(case.tables, 2, 1), message_bits=(32, 8))
    with pytest.raises(InvalidInputError, match=r"message_bits=\[32, 8\], expected 32 or 16"):
        rs.run_ranks(2, lambda g: rs.open_tables(case, plan, g, SGD(lr=0.1)),
                     domains=(0, 1))


# ---- moves to another plan -----------------------------------------------------------------------

STEPS, START = 7, 1


# Bytes per step; a rank is to hold two to four times as much.
@pytest.mark.parametrize("optimizer, first, other, budget", [
    ("rowwise_adagrad", "striped", "mixed1", 60_000),
    ("partial_rowwise_adam", "mixed0", "replicated", 150_000)])
def test_a_move_in_steps_changes_no_bit(emulation: pytest.MonkeyPatch, optimizer: str, first: str,
                                        other: str, budget: int) -> None:
    """Compared with the host back end without a move; all ranks switch after the same step."""
    case = small_case(optimizer)
    chosen = rs.ALL_OPTIMIZERS[optimizer]
    steps = rs.make_steps(case, 2, STEPS)
    plans = rp.plans_for(case.tables, 2)
    switched: dict[int, int] = {}
    copied: list[int] = []

    def between(tables: ShardedTables, step: int) -> None:
        if step == 0:  # a move that is cancelled
            tables.start_migration(plans[other], 1000)
            tables.stop_migration()
            assert tables.migration is None
        if step == START:
            tables.start_migration(plans[other], budget)
        move = tables.migration
        if step > START and move is None:
            switched.setdefault(tables.group.rank, step)
        elif move is not None and tables.group.rank == 0:
            copied.append(move.num_copied_bytes)

    stayed = rs.train_virtual(case, plans[first], steps, chosen)
    with on_devices(emulation):
        moved = rs.train_virtual(case, plans[first], steps, chosen, between=between)
        there = rs.train_virtual(case, plans[other], steps, chosen)
    assert len(set(switched.values())) == 1 and START + 1 < switched[0] <= STEPS, switched
    touched = 40_000  # rows of a step that are copied again
    assert all(b - a <= budget + touched for a, b in itertools.pairwise(copied)), copied
    rs.same_bits(moved, stayed)
    rs.assert_bitwise(moved.replicas, there.replicas, "replicas are those of the new plan")


def test_moves_to_push_and_column_pieces_and_back(emulation: pytest.MonkeyPatch) -> None:
    case = small_case("rowwise_adagrad")
    chosen = rs.OPTIMIZERS["rowwise_adagrad"]
    steps = rs.make_steps(case, 2, 4)
    plain = rp.plans_for(case.tables, 2)["mixed2"]
    rich = rp.rich_plan(case.tables, 2, 1, columns=True)

    def between(tables: ShardedTables, step: int) -> None:
        if step in (1, 3):
            tables.migrate(rich if step == 1 else plain)
            assert tables.migration is None

    host = rs.train_virtual(case, plain, steps, chosen, between=between)
    with on_devices(emulation):
        device = rs.train_virtual(case, plain, steps, chosen, between=between)
    rs.assert_bitwise(vars(host), vars(device), "result")


# ---- counters ------------------------------------------------------------------------------------


def counted(case: rs.Case, plan: Plan, steps: list[list[rs.Batch]], optimizer: Optimizer,
            group: Any, trains_weights: bool = False) -> Traffic:
    """As `executed`, on the device."""
    def prepare(tables: Any) -> None:
        with pytest.raises(OperError, match="start_counting"):
            tables.traffic()
        tables.start_counting()

    def read(tables: Any) -> Traffic:
        found: Traffic = tables.traffic(reset=True)
        assert not tables.traffic().counts.any()
        return found

    found: Traffic = executed(case, plan, steps, optimizer, group, read, prepare, trains_weights)
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_pulled_and_replicated_rows_and_column_pieces(
        emulation: pytest.MonkeyPatch, on_device: None, size: int) -> None:
    """All counters equal the replay's."""
    case = small_case("rowwise_adagrad", weighted=size == 2)
    steps = rs.make_steps(case, size, 2)
    for plan in (rp.plans_for(case.tables, size)["mixed1"],
                 pulled(rp.rich_plan(case.tables, size, 1, columns=True))):
        found = rs.run_ranks(size, lambda g, plan=plan: counted(
            case, plan, steps, rs.OPTIMIZERS["rowwise_adagrad"], g, size == 2))
        assert_equal(case, plan, steps, found, size == 2)


def test_rows_of_frozen_tables_are_not_refreshed(
        emulation: pytest.MonkeyPatch, on_device: None) -> None:
    case = small_case("sgd")
    name = case.tables[0].name

    def freeze(tables: Any) -> None:
        tables.frozen = frozenset({name})
        tables.start_counting()

    for found in rs.run_ranks(2, lambda g: executed(
            case, uniform_plan(case.tables, 2, "replicated"), rs.make_steps(case, 2, 1),
            rs.OPTIMIZERS["sgd"], g, lambda tables: tables.traffic(), freeze)):
        assert_not_updated(found, name)


def test_in_several_domains_and_with_two_rounds_of_squares(emulation: pytest.MonkeyPatch) -> None:
    """Counters equal the host back end's, which also reads rows of other domains from messages."""
    case = small_case("rowwise_adagrad")
    steps = rs.make_steps(case, 4, 2)
    plan = pulled(rp.rich_plan(case.tables, 4, 1, columns=True))
    chosen = RowWiseAdagrad(lr=0.05, max_row_norm=0.01)
    domains = (0, 1, 0, 1)
    host = rs.run_ranks(4, lambda g: executed(case, plan, steps, chosen, g), domains=domains)
    with on_devices(emulation):
        device = rs.run_ranks(4, lambda g: counted(case, plan, steps, chosen, g), domains=domains)
    for a, b in zip(host, device, strict=True):
        for kind, k in KIND.items():
            assert np.array_equal(a.counts[k], b.counts[k]), kind


def test_pushed_rows(emulation: pytest.MonkeyPatch) -> None:
    """The forward pass counts as on the host; gradients are counted after reduction by row."""
    case = small_case("sgd", weighted=True)
    steps = rs.make_steps(case, 2, 2)
    plan = rp.rich_plan(case.tables, 2, 2, columns=False)
    host = rs.run_ranks(2, lambda g: executed(case, plan, steps, rs.OPTIMIZERS["sgd"], g))
    with on_devices(emulation):
        device = rs.run_ranks(2, lambda g: counted(case, plan, steps, rs.OPTIMIZERS["sgd"], g))
    for a, b in zip(host, device, strict=True):
        for kind, phase in KINDS.items():
            if phase == "forward" or kind in ("updated_rows", "refreshed_rows"):
                assert np.array_equal(a.counts[KIND[kind]], b.counts[KIND[kind]]), kind
        assert a.counts[KIND["ids"]].any() and a.counts[KIND["partial_sums"]].any()
        assert not b.counts[KIND["bag_gradients"]].any()
        assert b.counts[KIND["gradient_rows"]].sum() > a.counts[KIND["gradient_rows"]].sum()
