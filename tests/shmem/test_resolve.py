"""Ids resolved in advance: bitwise the same results, whenever and wherever it is done."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from oper.errors import InvalidInputError
from oper.plan import Piece, uniform_plan
from oper.shmem.batch import Lookup
from oper.shmem.group.groups import SingleGroup
from oper.shmem.tables import ShardedTables
from tests.runtime_support import (
    OPTIMIZERS,
    Case,
    assert_bitwise,
    dlrm_case,
    make_batch,
    make_steps,
    merge_ranks,
    mixed_plan,
    open_tables,
    rank_loss,
    run_ranks,
    same_bits,
    train_rank,
    train_virtual,
    with_tables,
)
from tests.support import pushed

RWA = OPTIMIZERS["rowwise_adagrad"]
STEPS = 5


def some_plans(case: Case, world_size: int) -> dict:
    striped = uniform_plan(case.tables, world_size, "striped")
    split = []
    for entry in striped.tables:
        (tier,) = entry.tiers
        dim = entry.table.dim
        cuts = (Piece(0, dim // 2, (tier,)), Piece(dim // 2, dim, (tier,)))
        split.append(replace(entry, pieces=cuts if dim > 8 else entry.pieces))
    return {"mixed0": mixed_plan(case.tables, world_size, 0), "striped": striped,
            "push": pushed(striped), "columns": replace(striped, tables=tuple(split))}


def resolved_ahead(tables: ShardedTables, lookups: list[Lookup]) -> Iterator[Lookup]:
    """Resolve each batch on another thread while the previous one is trained."""
    with ThreadPoolExecutor(1) as ahead:
        coming = ahead.submit(tables.resolve, lookups[0])
        for following in lookups[1:]:
            resolved = coming.result()
            coming = ahead.submit(tables.resolve, following)
            yield resolved
        yield coming.result()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("plan", ["mixed0", "striped", "push", "columns"])
def test_training_is_the_same_bit_for_bit(plan: str, world_size: int, weighted: bool) -> None:
    case = dlrm_case(weighted=weighted, id_dtype=torch.int32 if weighted else torch.int64)
    steps = make_steps(case, world_size, STEPS, seed=4)
    chosen = some_plans(case, world_size)[plan]
    want = train_virtual(case, chosen, steps, RWA)
    same_bits(merge_ranks(run_ranks(world_size, lambda group: train_rank(
        case, chosen, steps, RWA, group, prepared=resolved_ahead))), want)


def test_a_batch_resolved_before_a_move_is_resolved_again() -> None:
    case = dlrm_case()
    tables = open_tables(case, mixed_plan(case.tables, 1, 1), SingleGroup(), RWA)
    other = open_tables(case, mixed_plan(case.tables, 1, 1), SingleGroup(), RWA)
    batch = make_batch(case, 3, 20)
    lookup = tables.resolve(batch.lookup(case))
    tables.migrate(with_tables(mixed_plan(case.tables, 1, 2), tables.specs.values()))
    for one, found in ((tables, lookup), (other, batch.lookup(case))):
        rank_loss(one.lookup(found), batch.target).backward()
    for t in case.tables:
        assert_bitwise(tables.read(t.name), other.read(t.name), t.name)


def test_sequences() -> None:
    case = replace(dlrm_case(), tables=(dlrm_case().table("large"),), keys=("f5",))
    tables = open_tables(case, mixed_plan(case.tables, 1, 5), SingleGroup(), RWA)
    batch = make_batch(case, 2, 50)
    lookup = replace(batch.lookup(case), pooled=False)
    with torch.no_grad():
        assert torch.equal(tables.lookup(tables.resolve(lookup)), tables.lookup(lookup))


@pytest.mark.parametrize("size", [0, 9])
def test_batches_without_ids(size: int) -> None:
    case = dlrm_case()
    tables = open_tables(case, mixed_plan(case.tables, 1, 5), SingleGroup(), RWA)
    empty = Lookup(torch.zeros(0, dtype=torch.int64),
                   torch.zeros(size * len(case.keys), dtype=torch.int64), case.key_of, size)
    out = tables.lookup(tables.resolve(empty))
    assert out.shape == (size, case.columns) and not out.any()
    out.sum().backward()


def test_a_bad_batch_is_refused_by_its_lookup() -> None:
    """The lookup notifies the other ranks; `resolve` does nothing for a bad batch."""
    case = dlrm_case()
    tables = open_tables(case, mixed_plan(case.tables, 1, 5), SingleGroup(), RWA)
    lookup = make_batch(case, 2, 50).lookup(case)
    bad = lookup.ids.clone()
    at = int(lookup.lengths[:50 * 3].sum())  # the first id of key "f5"
    bad[at] = 20000
    for batch, words in ((replace(lookup, ids=bad), r"'f5' in table 'large'.*id=20000"),
                         (replace(lookup, ids=lookup.ids[:-1]), "lengths"),
                         (replace(lookup, ids=lookup.ids.to("meta")), "device of ids='meta'")):
        resolved = tables.resolve(batch)
        assert resolved.resolved is None
        with pytest.raises(InvalidInputError, match=words):
            tables.lookup(resolved)


def test_batches_resolved_for_other_ids_are_not_used() -> None:
    case = dlrm_case(weighted=True)
    tables = open_tables(case, mixed_plan(case.tables, 1, 5), SingleGroup(), None)
    resolved = tables.resolve(make_batch(case, 2, 50).lookup(case))
    other = make_batch(case, 3, 50).lookup(case)
    assert torch.equal(tables.lookup(replace(other, resolved=resolved.resolved)),
                       tables.lookup(other))
    doubled = replace(resolved, weights=2 * resolved.weights)  # a feature processor's, say
    assert_bitwise(tables.lookup(doubled), 2 * tables.lookup(resolved), "weights exchanged")
    with pytest.raises(InvalidInputError, match="weights"):
        tables.lookup(replace(resolved, weights=resolved.weights[1:]))
