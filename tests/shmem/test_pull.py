"""Ways to read rows: once per batch, or resolved in advance. Equal bits, fewer reads."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from oper.errors import InvalidInputError
from oper.plan import uniform_plan
from oper.rows.traffic import Traffic
from oper.shmem.batch import Lookup
from oper.shmem.exchange import pull
from oper.shmem.exchange.pull import (
    PullCosts,
    choose_automatically,
    choose_pull,
    measured_costs,
)
from oper.shmem.group.groups import SingleGroup
from oper.shmem.memory.numa import Node
from oper.shmem.optim.optimizers import SGD
from oper.shmem.tables import ShardedTables
from oper.tables import TableSpec
from tests import random_plans as rp, runtime_support as rs
from tests.shmem.test_traffic import all_plans, assert_equal, executed
from tests.support import pushed


class Duplication(NamedTuple):
    """Duplication of ids in one column piece of a table, as last counted: ids whose rows neighbours
    own, distinct rows among them, and whether these are currently copied once per batch."""

    table: str
    num_ids: int
    num_rows: int
    is_deduplicated: bool


def duplication(tables: ShardedTables) -> list[Duplication]:
    """By directory; empty if duplication is not counted."""
    flat = torch.ops.oper.context_duplication(tables.handle)
    n = len(flat) // 3
    names = [d.table.name for d in tables.directories]
    return [Duplication(names[k], flat[k], flat[n + k], bool(flat[2 * n + k])) for k in range(n)]


# ---- rows of neighbours, read once per batch -----------------------------------------------------


@pytest.mark.parametrize("world_size, weighted", [(2, False), (2, True), (4, True)])
def test_the_same_bits(world_size: int, weighted: bool) -> None:
    case = replace(rs.dlrm_case("rowwise_adagrad"), weighted=weighted,
                   id_dtype=torch.int32 if weighted else torch.int64)
    steps = rs.make_steps(case, world_size, 3)
    chosen = rs.OPTIMIZERS["rowwise_adagrad"]
    for k, plan in enumerate(all_plans(case, world_size)):
        direct = rs.train_virtual(case, plan, steps, chosen)
        once = rs.train_virtual(case, plan, steps, chosen, between=lambda tables, step: (
            choose_pull(tables, True) if step == 0 else None))
        rs.same_bits(once, direct, f"plan {k}")


def looked_up(group: Any, choice: bool, pooled: bool) -> tuple[torch.Tensor, Traffic]:
    """Look up 16-bit rows of a batch, also resolved in advance."""
    kind = "sum" if pooled else "none"
    tables = (TableSpec("t", 900, 16, ("f", "g"), kind, "bfloat16", optimizer="sgd"),
              TableSpec("u", 70, 16, ("h",), kind, optimizer="sgd"))
    case = rs.Case(tables, ("g", "f", "h"))
    (batches,) = rs.make_steps(case, group.world_size, 1)
    opened = rs.open_tables(case, rp.mixed_plan(tables, group.world_size, 4), group, SGD(lr=0.5))
    choose_pull(opened, choice)
    batch = replace(batches[group.rank].lookup(case), pooled=pooled)
    with torch.no_grad():
        out = opened.lookup(batch).clone()
        assert torch.equal(opened.lookup(opened.resolve(batch)), out)
    found = opened.traffic()
    return out, found


@pytest.mark.parametrize("pooled", [True, False])
def test_unpooled_16_bit_rows_and_resolved_batches(pooled: bool) -> None:
    direct = rs.run_ranks(2, lambda g: looked_up(g, False, pooled))
    once = rs.run_ranks(2, lambda g: looked_up(g, True, pooled))
    for (a, reads), (b, fewer) in zip(direct, once, strict=True):
        rs.assert_bitwise(a, b, "outputs")
        assert fewer.num_bytes.sum() < reads.num_bytes.sum()


def test_reads_are_counted_as_replayed() -> None:
    case = rs.dlrm_case("sgd")
    steps = rs.make_steps(case, 2, 3)
    for plan in all_plans(case, 2):
        found = rs.run_ranks(2, lambda g, plan=plan: executed(
            case, plan, steps, rs.OPTIMIZERS["sgd"], g, prepare=lambda t: choose_pull(t, True)))
        assert_equal(case, plan, steps, found, deduplicates=True)


def measured(group: Any, costs: PullCosts) -> list[Duplication]:
    """Duplication of two striped tables: one with few, repeated ids, one with distinct ids."""
    tables = (TableSpec("hot", 4000, 32, ("a",), "sum", optimizer="sgd"),
              TableSpec("cold", 4000, 32, ("b",), "sum", optimizer="sgd"))
    case = rs.Case(tables, ("a", "b"))
    ids = torch.cat([torch.arange(2000) % 20, torch.arange(2000)])
    opened = rs.open_tables(case, uniform_plan(tables, 2, "striped"), group, None)
    choose_pull(opened, costs)
    opened.forward(Lookup(ids, torch.full((400,), 10), case.key_of, 200))
    found = duplication(opened)
    return found


def test_pull_is_chosen_by_measured_duplication() -> None:
    hot, cold = rs.run_ranks(2, lambda g: measured(g, PullCosts(extra_per_byte=0.1)))[0]
    assert hot == ("hot", 1000, 10, True)
    assert cold == ("cold", 1000, 1000, False)
    # Ranks of one memory: nothing can be gained, and nothing is counted.
    assert rs.run_ranks(2, lambda g: measured(g, PullCosts()))[0] == []
    with pytest.raises(InvalidInputError, match="extra_per_byte"):
        PullCosts(extra_per_byte=-1.0)


def test_an_invalid_id_and_another_plan() -> None:
    """A bad id is named in the error, and the choice persists after a move to another plan."""
    case = rs.dlrm_case("sgd")
    (batches,) = rs.make_steps(case, 2, 1)

    def body(group: Any) -> list[Duplication]:
        tables = rs.open_tables(case, uniform_plan(case.tables, 2, "striped"), group,
                                rs.OPTIMIZERS["sgd"])
        choose_pull(tables, True)
        batch = batches[0].lookup(case)
        bad = batch.ids.clone()
        bad[bad == bad[-1]] = 10**9
        with pytest.raises(InvalidInputError, match="1000000000"), torch.no_grad():
            tables.lookup(replace(batch, ids=bad))
        tables.barrier()
        specs = [t.table for t in tables.plan.tables]
        tables.migrate(replace(tables.plan, tables=uniform_plan(specs, 2, "owned").tables))
        with torch.no_grad():
            tables.lookup(batch)
        found = duplication(tables)
        return found

    assert {d.is_deduplicated for d in rs.run_ranks(2, body)[0]} == {True}


def self_chosen(group: Any) -> tuple[PullCosts, list[Duplication]]:
    case = rs.dlrm_case("sgd")
    (batches,) = rs.make_steps(case, group.world_size, 1)
    tables = rs.open_tables(case, uniform_plan(case.tables, group.world_size, "striped"), group,
                            rs.OPTIMIZERS["sgd"])
    group.all_gather(None)
    costs = measured_costs(tables, 2048, 3)
    assert tables.pull is False
    choose_pull(tables, costs)
    with torch.no_grad():
        tables.lookup(batches[group.rank].lookup(case))
    found = duplication(tables)
    return costs, found


def test_costs_are_measured_here() -> None:
    """A single rank has no neighbours. Of two ranks, one counts duplication, the condition of a
    copy, only if reads of the other's rows took longer than those of its own."""
    assert rs.run_ranks(1, self_chosen)[0] == (PullCosts(), [])
    for costs, found in rs.run_ranks(2, self_chosen):
        assert 0 < costs.per_copied_byte < 1e3 and 0 <= costs.per_id < 1e6
        assert costs != PullCosts()
        assert bool(found) == (costs.extra_per_byte > 0)
        assert not any(d.is_deduplicated for d in found if d.num_ids == d.num_rows)


def test_pull_is_chosen_if_ranks_run_on_different_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only ranks on different nodes measure costs; all use the mean and decide table by table."""
    case = rs.dlrm_case("sgd")
    (batches,) = rs.make_steps(case, 4, 1)
    where = threading.local()
    monkeypatch.setattr(pull, "find_nodes", lambda: [Node(k, (k,)) for k in range(2)])
    monkeypatch.setattr(pull, "local_domain", lambda nodes: where.node)

    def body(group: Any, nodes: tuple[int, ...]) -> tuple[Any, list[Duplication], int]:
        where.node = nodes[group.rank]
        monkeypatch.setattr(pull, "measured_costs", lambda tables: PullCosts(
            extra_per_byte=0.2 * tables.group.rank, per_id=1.0))
        tables = rs.open_tables(case, uniform_plan(case.tables, group.world_size, "striped"), group,
                                None)
        choose_automatically(tables)
        chosen, read = tables.pull, int(tables.traffic().counts.sum())
        tables.forward(batches[0].lookup(case), collective=True)
        found = duplication(tables)
        return chosen, found, read

    for chosen, found, _ in rs.run_ranks(2, lambda g: body(g, (1, 1))):
        assert chosen is False and found == []
    for chosen, found, read in rs.run_ranks(2, lambda g: body(g, (0, 1))):
        assert chosen == PullCosts(extra_per_byte=0.1, per_id=1.0) and read == 0
        assert {d.is_deduplicated for d in found} == {False, True}
        assert all(d.num_ids > d.num_rows for d in found if d.is_deduplicated)
    # Two hosts; the ranks of one of them lie on two nodes.
    several = rs.run_ranks(4, lambda g: body(g, (0, 0, 0, 1)), domains=(0, 0, 1, 1))
    assert [chosen for chosen, _, _ in several] == [
        False, False, *[PullCosts(extra_per_byte=0.5, per_id=1.0)] * 2]


# ---- ids resolved in advance ---------------------------------------------------------------------

RWA = rs.OPTIMIZERS["rowwise_adagrad"]
STEPS = 5


def some_plans(case: rs.Case, world_size: int) -> dict:
    striped = uniform_plan(case.tables, world_size, "striped")
    return {"mixed0": rp.mixed_plan(case.tables, world_size, 0), "striped": striped,
            "push": pushed(striped), "columns": rp.in_columns(case.tables, world_size, "striped")}


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
    case = rs.dlrm_case(weighted=weighted, id_dtype=torch.int32 if weighted else torch.int64)
    steps = rs.make_steps(case, world_size, STEPS, seed=4)
    chosen = some_plans(case, world_size)[plan]
    want = rs.train_virtual(case, chosen, steps, RWA)
    rs.same_bits(rs.merge_ranks(rs.run_ranks(world_size, lambda group: rs.train_rank(
        case, chosen, steps, RWA, group, prepared=resolved_ahead))), want)


def test_a_batch_resolved_before_a_move_is_resolved_again() -> None:
    case = rs.dlrm_case()
    tables = rs.open_tables(case, rp.mixed_plan(case.tables, 1, 1), SingleGroup(), RWA)
    other = rs.open_tables(case, rp.mixed_plan(case.tables, 1, 1), SingleGroup(), RWA)
    batch = rs.make_batch(case, 3, 20)
    lookup = tables.resolve(batch.lookup(case))
    tables.migrate(rp.with_tables(rp.mixed_plan(case.tables, 1, 2), tables.specs.values()))
    for one, found in ((tables, lookup), (other, batch.lookup(case))):
        rs.rank_loss(one.lookup(found), batch.target).backward()
    for t in case.tables:
        rs.assert_bitwise(tables.read(t.name), other.read(t.name), t.name)


@pytest.mark.parametrize("size", [0, 9])
def test_batches_without_ids(size: int) -> None:
    case = rs.dlrm_case()
    tables = rs.open_tables(case, rp.mixed_plan(case.tables, 1, 5), SingleGroup(), RWA)
    empty = Lookup(torch.zeros(0, dtype=torch.int64),
                   torch.zeros(size * len(case.keys), dtype=torch.int64), case.key_of, size)
    for batch in (empty, tables.resolve(empty)):
        out = tables.lookup(batch)
        assert out.shape == (size, case.columns) and not out.any()
        out.sum().backward()
        with torch.no_grad():
            assert torch.equal(tables.lookup(batch), out)
    rs.assert_bitwise(rs.read_all(tables), rs.initial_weights(case), "rows")


def test_a_bad_batch_is_refused_by_its_lookup() -> None:
    """The lookup notifies the other ranks; `resolve` does nothing for a bad batch."""
    case = rs.dlrm_case()
    tables = rs.open_tables(case, rp.mixed_plan(case.tables, 1, 5), SingleGroup(), RWA)
    lookup = rs.make_batch(case, 2, 50).lookup(case)
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
    case = rs.dlrm_case(weighted=True)
    tables = rs.open_tables(case, rp.mixed_plan(case.tables, 1, 5), SingleGroup(), None)
    resolved = tables.resolve(rs.make_batch(case, 2, 50).lookup(case))
    assert resolved.resolved is not None
    other = rs.make_batch(case, 3, 50).lookup(case)
    assert torch.equal(tables.lookup(replace(other, resolved=resolved.resolved)),
                       tables.lookup(other))
    doubled = replace(resolved, weights=2 * resolved.weights)  # a feature processor's, say
    rs.assert_bitwise(tables.lookup(doubled), 2 * tables.lookup(resolved), "weights exchanged")
    with pytest.raises(InvalidInputError, match="weights"):
        tables.lookup(replace(resolved, weights=resolved.weights[1:]))
