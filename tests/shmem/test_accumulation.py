"""Gradient accumulation: k backward passes and one update, as one batch of all their samples."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import oper
from oper.errors import InvalidInputError
from oper.shmem.batch import Lookup
from oper.shmem.group.groups import SingleGroup
from oper.shmem.optim.optimizers import Optimizer
from tests.optimizer_support import EVERY
from tests.runtime_support import (
    Batch,
    Case,
    assert_bitwise,
    dlrm_case,
    make_batch,
    mixed_plan,
    open_tables,
    rich_plan,
    run_ranks,
)

MICRO = 3


def joined(case: Case, batches: list[Batch]) -> Batch:
    """One batch of all samples, in order."""
    ids, weights = [], []
    for key in range(len(case.keys)):
        for b in batches:
            lengths = b.lengths.reshape(len(case.keys), b.size)
            ends = [0, *lengths.sum(1).cumsum(0).tolist()]
            ids.append(b.ids[ends[key]:ends[key + 1]])
            if b.weights is not None:
                weights.append(b.weights[ends[key]:ends[key + 1]])
    lengths = torch.cat([b.lengths.reshape(len(case.keys), b.size) for b in batches], 1)
    return Batch(lengths.reshape(-1), torch.cat(ids), torch.cat(weights) if weights else None,
                 torch.cat([b.target for b in batches]))


def micro_batches(case: Case, rank: int, step: int) -> list[Batch]:
    return [make_batch(case, 100 * step + 10 * rank + m, size)
            for m, size in enumerate((7, 0 if rank else 12, 5))]


def train(case: Case, plan: object, optimizer: Optimizer, group, at_once: bool, pooled: bool = True
          ) -> dict[str, torch.Tensor]:
    tables = open_tables(case, plan, group, optimizer)
    for step in range(3):
        parts = micro_batches(case, group.rank, step)
        if at_once:
            parts = [joined(case, parts)]
        for m, part in enumerate(parts):
            batch = replace(part.lookup(case), pooled=pooled)
            if m + 1 < len(parts):
                with tables.no_sync():
                    out = tables.lookup(batch)
                    out.backward(gradient(out, part, pooled))
            else:
                out = tables.lookup(batch)
                out.backward(gradient(out, part, pooled))
    tables.barrier()
    assert tables.num_steps == 3
    return {t.name: tables.read(t.name) for t in case.tables}


def gradient(out: torch.Tensor, batch: Batch, pooled: bool) -> torch.Tensor:
    """What does not depend on how samples are grouped."""
    if pooled:
        return (out - batch.target).detach()
    return out.detach() * 2 + 1


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad_l2", "adam"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_equals_one_batch(world_size: int, optimizer: str) -> None:
    """Bitwise, under plans of all kinds: the rows stand still meanwhile."""
    case = dlrm_case(weighted=True)
    for plan in (mixed_plan(case.tables, world_size, 1),
                 rich_plan(case.tables, world_size, 3, True)):
        micro, whole = (run_ranks(world_size, lambda g, at_once=at_once, plan=plan: train(
            case, plan, EVERY[optimizer], g, at_once)) for at_once in (False, True))
        assert_bitwise(micro, whole, "micro-batches and one batch")


def test_unpooled() -> None:
    tables = tuple(replace(t, dim=16, pooling="none") for t in dlrm_case().tables)
    case = replace(dlrm_case(), tables=tables)
    micro, whole = (run_ranks(2, lambda g, at_once=at_once: train(
        case, mixed_plan(tables, 2, 1), EVERY["sgd"], g, at_once, False))
        for at_once in (False, True))
    assert_bitwise(micro, whole, "micro-batches and one batch")


def test_keys_in_another_order_and_optional_weights() -> None:
    """Micro-batches need not be laid out alike; no weights are weights of one."""
    from oper.tables import TableSpec

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
