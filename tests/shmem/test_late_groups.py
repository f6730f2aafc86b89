"""Replica groups of which one skips updates, and with them the synchronizations due after these."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from oper.errors import InvalidInputError, OperError
from oper.plan import uniform_plan
from oper.shmem.optim.optimizers import SGD
from oper.shmem.replica_groups.groups import ReplicaGroups
from oper.shmem.tables import ShardedTables
from oper.tables import TableSpec
from tests import runtime_support as rs
from tests.replica_groups_support import open_in_group, run_in_groups

# ---- a group that has skipped the updates after which synchronizations were due ------------------
# In a model of two collections, the other groups wait for it in the order in which they update the
# collections.

FEW_ROWS, EVERY, STEPS = 20, 2, 8
SPECS = [TableSpec(f"t{k}", FEW_ROWS, 4, ("f",), "sum", optimizer="sgd") for k in range(2)]
ONE_RANK = [uniform_plan([spec], 1) for spec in SPECS]


def step(both: list[ShardedTables], number: int, shift: int = 0) -> None:
    g = torch.Generator().manual_seed(number)
    batch = rs.bags_of_one(torch.randint(0, FEW_ROWS, (3,), generator=g) + shift)
    outputs = [tables.lookup(batch) for tables in both]
    torch.stack([x.square().mean() for x in outputs]).sum().backward()


def opened(every: int, delay: int, bits: int,
           body: Callable[[list[ShardedTables], int], Any]) -> list[Any]:
    """Run `body(tables, group)` on two groups of one rank, with two collections."""
    rows = torch.randn(FEW_ROWS, 4, generator=torch.Generator().manual_seed(5))

    def on_rank(groups: ReplicaGroups) -> Any:
        both = [open_in_group(groups, plan, [("f", spec.name)], SGD(lr=1.0), {spec.name: rows})
                for spec, plan in zip(SPECS, ONE_RANK, strict=True)]
        both[0].family.update(both)
        both[1].family = both[0].family
        return body(both, groups.whole.rank)

    return run_in_groups(on_rank, 1, every, delay=delay, bits=bits)


def synchronized(both: list[ShardedTables]) -> list[torch.Tensor]:
    for tables in both:
        tables.replicas.synchronize()
    return [tables.read(spec.name) for tables, spec in zip(both, SPECS, strict=True)]


def trained_late(refused: int, what: str, delay: int, bits: int) -> list[list[torch.Tensor]]:
    """Train two groups of one rank; the second refuses batches 3, ..., 2 + `refused`. Then `what`
    follows."""
    def body(both: list[ShardedTables], k: int) -> list[torch.Tensor]:
        for number in range(STEPS):
            if k and 3 <= number < 3 + refused:
                with pytest.raises(InvalidInputError):
                    step(both, 10 * number + k, 1000)
            else:
                step(both, 10 * number + k)
            if number == 2 + refused:
                for tables, plan in zip(both, ONE_RANK, strict=True):
                    if what == "synchronize":
                        tables.replicas.synchronize()
                    elif what == "move":
                        tables.migrate(plan)
        return synchronized(both)

    return opened(EVERY, delay, bits, body)


@pytest.mark.parametrize(("delay", "bits"), [(0, 32), (1, 8)])
@pytest.mark.parametrize("what", ["train", "synchronize", "move"])
@pytest.mark.parametrize("refused", [1, 4])
def test_a_late_group_synchronizes_in_the_order_of_updates(refused: int, what: str, delay: int,
                                                           bits: int) -> None:
    first, second = trained_late(refused, what, delay, bits)
    rs.assert_bitwise(first, second, "two groups")


def test_refused_batches_do_not_count_in_frozen_collections() -> None:
    def body(both: list[ShardedTables], k: int) -> list[torch.Tensor]:
        both[0].frozen = frozenset(both[0].specs)
        for number in range(STEPS):
            refuses = k and number in (3, 4, 5)
            with pytest.raises(InvalidInputError) if refuses else nullcontext():
                step(both[::-1], 10 * number + k, 1000 if refuses else 0)
        assert [tables.num_steps for tables in both] == [1, STEPS]
        return synchronized(both)

    first, second = opened(EVERY, 0, 32, body)
    rs.assert_bitwise(first, second, "two groups")


@pytest.mark.parametrize("left_out_before", [True, False])
def test_a_refused_batch_of_unknown_collections_ends_the_run(left_out_before: bool) -> None:
    """The group cannot know which rows the others have trained with it: its next batch raises."""
    def body(both: list[ShardedTables], k: int) -> None:
        step(both, k)
        if left_out_before:
            step(both[:1], 10 + k)
        with pytest.raises(InvalidInputError) if k else nullcontext():
            step(both[:1], 20 + k, 1000 * k)
        if not left_out_before:
            step(both[:1], 30 + k)
        with pytest.raises(OperError, match="has refused a batch") if k else nullcontext():
            step(both, 40 + k)
        if k:
            with pytest.raises(OperError, match="has refused a batch"):
                both[1].replicas.synchronize()

    opened(9, 0, 32, body)
