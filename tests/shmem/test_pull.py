"""De-duplicated pull: neighbours' rows are read once per batch; equal bits, fewer reads."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from oper.errors import InvalidInputError
from oper.plan import uniform_plan
from oper.rows.traffic import Traffic
from oper.shmem.exchange import pull
from oper.shmem.exchange.pull import (
    Duplication,
    PullCosts,
    choose_automatically,
    choose_pull,
    duplication,
    measured_costs,
)
from oper.shmem.memory.numa import Node
from oper.shmem.optim.optimizers import SGD
from oper.shmem.tables import ShardedTables
from oper.tables import TableSpec
from tests.runtime_support import (
    OPTIMIZERS,
    Case,
    assert_bitwise,
    dlrm_case,
    make_steps,
    mixed_plan,
    open_tables,
    run_ranks,
    same_bits,
    train_virtual,
)
from tests.shmem.test_traffic import all_plans, assert_equal, executed


def always(tables: ShardedTables, step: int) -> None:
    if step == 0:
        choose_pull(tables, True)


@pytest.mark.parametrize("world_size, weighted", [(1, False), (2, False), (2, True), (4, True)])
def test_the_same_bits(world_size: int, weighted: bool) -> None:
    case = replace(dlrm_case("rowwise_adagrad"), weighted=weighted,
                   id_dtype=torch.int32 if weighted else torch.int64)
    steps = make_steps(case, world_size, 3)
    chosen = OPTIMIZERS["rowwise_adagrad"]
    for name, plan in all_plans(case, world_size).items():
        direct = train_virtual(case, plan, steps, chosen)
        same_bits(train_virtual(case, plan, steps, chosen, between=always), direct, name)


def looked_up(group: Any, choice: bool, pooled: bool) -> tuple[torch.Tensor, Traffic]:
    """Look up 16-bit rows, with a batch that one rank has resolved in advance."""
    kind = "sum" if pooled else "none"
    tables = (TableSpec("t", 900, 16, ("f", "g"), kind, "bfloat16", optimizer="sgd"),
              TableSpec("u", 70, 16, ("h",), kind, optimizer="sgd"))
    case = Case(tables, ("g", "f", "h"))
    (batches,) = make_steps(case, group.world_size, 1)
    opened = open_tables(case, mixed_plan(tables, group.world_size, 4), group, SGD(lr=0.5))
    choose_pull(opened, choice)
    batch = replace(batches[group.rank].lookup(case), pooled=pooled)
    with torch.no_grad():
        out = opened.lookup(opened.resolve(batch) if group.rank else batch).clone()
    found = opened.traffic()
    opened.barrier()
    opened.close()
    return out, found


@pytest.mark.parametrize("pooled", [True, False])
def test_unpooled_16_bit_rows_and_resolved_batches(pooled: bool) -> None:
    direct = run_ranks(2, lambda g: looked_up(g, False, pooled))
    once = run_ranks(2, lambda g: looked_up(g, True, pooled))
    for (a, reads), (b, fewer) in zip(direct, once, strict=True):
        assert_bitwise(a, b, "outputs")
        assert fewer.num_bytes.sum() < reads.num_bytes.sum()


def test_reads_are_counted_as_replayed() -> None:
    case = dlrm_case("sgd")
    steps = make_steps(case, 2, 3)
    for plan in all_plans(case, 2).values():
        found = run_ranks(2, lambda g, plan=plan: executed(
            case, plan, steps, OPTIMIZERS["sgd"], g, prepare=lambda t: choose_pull(t, True)))
        assert_equal(case, plan, steps, found, deduplicates=True)


def measured(group: Any, costs: PullCosts) -> list[Duplication]:
    """Duplication of two striped tables: one with few, repeated ids, one with distinct ids."""
    tables = (TableSpec("hot", 4000, 32, ("a",), "sum", optimizer="sgd"),
              TableSpec("cold", 4000, 32, ("b",), "sum", optimizer="sgd"))
    case = Case(tables, ("a", "b"))
    (batches,) = make_steps(case, 2, 1)
    ids = torch.cat([torch.arange(2000) % 20, torch.arange(2000)])
    lengths = torch.full((400,), 10, dtype=batches[0].lengths.dtype)
    opened = open_tables(case, uniform_plan(tables, 2, "striped"), group, None)
    choose_pull(opened, costs)
    batch = replace(batches[0].lookup(case), ids=ids, lengths=lengths, batch_size=200)
    opened.forward(batch)
    found = duplication(opened)
    opened.barrier()
    opened.close()
    return found


def test_pull_is_chosen_by_measured_duplication() -> None:
    hot, cold = run_ranks(2, lambda g: measured(g, PullCosts(extra_per_byte=0.1)))[0]
    assert hot == ("hot", 1000, 10, True)
    assert cold == ("cold", 1000, 1000, False)
    # Ranks of one memory: nothing can be gained, and nothing is counted.
    assert run_ranks(2, lambda g: measured(g, PullCosts()))[0] == []
    with pytest.raises(InvalidInputError, match="extra_per_byte"):
        PullCosts(extra_per_byte=-1.0)


def test_an_invalid_id_and_another_plan() -> None:
    """A bad id is named in the error, and the choice persists after a move to another plan."""
    case = dlrm_case("sgd")
    (batches,) = make_steps(case, 2, 1)

    def body(group: Any) -> list[Duplication]:
        tables = open_tables(case, uniform_plan(case.tables, 2, "striped"), group,
                             OPTIMIZERS["sgd"])
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
        tables.barrier()
        tables.close()
        return found

    assert all(d.is_deduplicated for d in run_ranks(2, body)[0])


def self_chosen(group: Any) -> tuple[PullCosts, list[Duplication]]:
    case = dlrm_case("sgd")
    (batches,) = make_steps(case, group.world_size, 1)
    tables = open_tables(case, uniform_plan(case.tables, group.world_size, "striped"), group,
                         OPTIMIZERS["sgd"])
    group.all_gather(None)
    costs = measured_costs(tables, 2048, 3)
    assert tables.pull is False
    choose_pull(tables, costs)
    with torch.no_grad():
        tables.lookup(batches[group.rank].lookup(case))
    found = duplication(tables)
    tables.barrier()
    tables.close()
    return costs, found


def test_costs_are_measured_here() -> None:
    """A single rank has no neighbours; two ranks on one node measure copies but use none."""
    assert run_ranks(1, self_chosen)[0] == (PullCosts(), [])
    for costs, found in run_ranks(2, self_chosen):
        assert 0 < costs.per_copied_byte < 1e3 and 0 <= costs.per_id < 1e6
        assert costs != PullCosts()
        assert not any(d.is_deduplicated for d in found if d.num_ids == d.num_rows)


def test_pull_is_chosen_if_ranks_run_on_different_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only ranks on different nodes measure costs; all use the mean and decide table by table."""
    case = dlrm_case("sgd")
    (batches,) = make_steps(case, 4, 1)
    where = threading.local()
    monkeypatch.setattr(pull, "find_nodes", lambda: [Node(k, (k,)) for k in range(2)])
    monkeypatch.setattr(pull, "local_domain", lambda nodes: where.node)

    def body(group: Any, nodes: tuple[int, ...]) -> tuple[Any, list[Duplication], int]:
        where.node = nodes[group.rank]
        monkeypatch.setattr(pull, "measured_costs", lambda tables: PullCosts(
            extra_per_byte=0.2 * tables.group.rank, per_id=1.0))
        tables = open_tables(case, uniform_plan(case.tables, group.world_size, "striped"), group,
                             None)
        choose_automatically(tables)
        chosen, read = tables.pull, int(tables.traffic().counts.sum())
        tables.forward(batches[0].lookup(case), collective=True)
        found = duplication(tables)
        tables.barrier()
        tables.close()
        return chosen, found, read

    for chosen, found, _ in run_ranks(2, lambda g: body(g, (1, 1))):
        assert chosen is False and found == []
    for chosen, found, read in run_ranks(2, lambda g: body(g, (0, 1))):
        assert chosen == PullCosts(extra_per_byte=0.1, per_id=1.0) and read == 0
        assert {d.is_deduplicated for d in found} == {False, True}
        assert all(d.num_ids > d.num_rows for d in found if d.is_deduplicated)
    # Two hosts; the ranks of one of them lie on two nodes.
    several = run_ranks(4, lambda g: body(g, (0, 0, 0, 1)), domains=(0, 0, 1, 1))
    assert [chosen for chosen, _, _ in several] == [
        False, False, *[PullCosts(extra_per_byte=0.5, per_id=1.0)] * 2]
