"""Gradient accumulation: k backward passes and one update equal one combined batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import oper
from oper.errors import InvalidInputError
from oper.shmem.batch import Lookup
from oper.shmem.group.groups import SingleGroup
from oper.tables import TableSpec
from tests.optimizer_formulas import EVERY
from tests.runtime_support import (
    Case,
    assert_bitwise,
    dlrm_case,
    mixed_plan,
    open_tables,
    rich_plan,
    run_ranks,
)
from tests.shmem.test_micro_batches import train


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad_l2", "adam"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_equals_one_batch(world_size: int, optimizer: str) -> None:
    """The result is bitwise that of one batch, under plans of all kinds."""
    case = dlrm_case(weighted=True)
    for plan in (mixed_plan(case.tables, world_size, 1),
                 rich_plan(case.tables, world_size, 3, True)):
        micro, whole = (run_ranks(world_size, lambda g, how=how, plan=plan: train(
            case, plan, EVERY[optimizer], g, how)) for how in ("whole", "joined"))
        assert_bitwise(micro, whole, "micro-batches and one batch")


def test_unpooled() -> None:
    tables = tuple(replace(t, dim=16, pooling="none") for t in dlrm_case().tables)
    case = replace(dlrm_case(), tables=tables)
    micro, whole = (run_ranks(2, lambda g, how=how: train(
        case, mixed_plan(tables, 2, 1), EVERY["sgd"], g, how))
        for how in ("whole", "joined"))
    assert_bitwise(micro, whole, "micro-batches and one batch")


def test_keys_in_another_order_and_optional_weights() -> None:
    """Micro-batches may order their keys differently; missing weights count as weights of 1."""
    case = Case((TableSpec("a", 9, 4, ("f", "g"), "sum", optimizer="sgd"),), ("f", "g"))
    found = []
    for batches in ([((0, 1), [1, 2, 3], [1, 2], None), ((1, 0), [5, 1, 1], [1, 2], [1.0, 1, 1])],
                    [((0, 1), [1, 1, 1, 2, 3, 5], [1, 2, 2, 1], None)]):
        tables = open_tables(case, mixed_plan(case.tables, 1, 0), SingleGroup(), EVERY["sgd"])
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
    assert_bitwise(found[0], found[1], "two layouts")


def test_a_model_without_tables_accumulates_nothing() -> None:
    with pytest.raises(InvalidInputError, match="accumulate"), oper.no_sync(torch.nn.Linear(1, 1)):
        pass
