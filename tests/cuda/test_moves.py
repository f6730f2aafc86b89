"""Moving device tables to another plan during training does not change any bit."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from oper.errors import InvalidInputError
from oper.shmem.tables import ShardedTables
from tests import runtime_support
from tests.cuda.emulated import on_devices
from tests.cuda.test_domains import small_case
from tests.runtime_support import (
    ALL_OPTIMIZERS,
    OPTIMIZERS,
    assert_bitwise,
    make_steps,
    plans_for,
    rich_plan,
    run_ranks,
    same_bits,
    train_virtual,
)

STEPS, START = 7, 1


# Bytes per step; a rank is to hold two to four times as much.
@pytest.mark.parametrize("optimizer, first, other, budget", [
    ("rowwise_adagrad", "striped", "mixed1", 60_000),
    ("partial_rowwise_adam", "mixed0", "replicated", 150_000)])
def test_a_move_in_steps_changes_no_bit(emulation: pytest.MonkeyPatch, optimizer: str, first: str,
                                        other: str, budget: int) -> None:
    """Compared with the host back end without a move; all ranks switch after the same step."""
    case = small_case(optimizer)
    chosen = ALL_OPTIMIZERS[optimizer]
    steps = make_steps(case, 2, STEPS)
    plans = plans_for(case.tables, 2)
    switched: dict[int, int] = {}
    copied: list[int] = []

    def between(tables: ShardedTables, step: int) -> None:
        if step == START:
            tables.start_migration(plans[other], budget)
        move = tables.migration
        if step > START and move is None:
            switched.setdefault(tables.group.rank, step)
        elif move is not None and tables.group.rank == 0:
            copied.append(move.num_copied_bytes)

    stayed = train_virtual(case, plans[first], steps, chosen)
    with on_devices(emulation):
        moved = train_virtual(case, plans[first], steps, chosen, between=between)
        there = train_virtual(case, plans[other], steps, chosen)
    assert len(set(switched.values())) == 1 and START + 1 < switched[0] <= STEPS, switched
    touched = 40_000  # rows of a step that are copied again
    assert all(b - a <= budget + touched for a, b in itertools.pairwise(copied)), copied
    same_bits(moved, stayed)
    assert_bitwise(moved.replicas, there.replicas, "replicas are those of the new plan")


def test_at_once_to_push_and_column_pieces_and_back(emulation: pytest.MonkeyPatch) -> None:
    case = small_case("rowwise_adagrad")
    chosen = OPTIMIZERS["rowwise_adagrad"]
    steps = make_steps(case, 2, 4)
    plain, rich = plans_for(case.tables, 2)["mixed2"], rich_plan(case.tables, 2, 1, columns=True)

    def between(tables: ShardedTables, step: int) -> None:
        if step in (1, 3):
            tables.migrate(rich if step == 1 else plain)
            assert tables.migration is None

    host = train_virtual(case, plain, steps, chosen, between=between)
    with on_devices(emulation):
        device = train_virtual(case, plain, steps, chosen, between=between)
    assert_bitwise(vars(host), vars(device), "result")


def test_a_move_is_given_up(emulation: pytest.MonkeyPatch, on_device: None) -> None:
    case = small_case("sgd")
    plans = plans_for(case.tables, 2)
    steps = make_steps(case, 2, 2)

    def body(group: Any) -> None:
        tables = runtime_support.open_tables(case, plans["striped"], group, OPTIMIZERS["sgd"])
        tables.start_migration(plans["owned"], 1000)
        with pytest.raises(InvalidInputError, match="a move is under way"):
            tables.start_migration(plans["owned"], 1000)
        tables.stop_migration()
        assert tables.migration is None
        batch = steps[1][group.rank]
        runtime_support.rank_loss(tables.lookup(batch.lookup(case)), batch.target).backward()
        assert tables.plan.table("two").pieces[0].tiers[0].placement == "striped"
        tables.barrier()
        tables.close()

    run_ranks(2, body)
