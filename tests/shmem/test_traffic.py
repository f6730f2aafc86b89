"""Counters of the runtime: rows read, bytes sent and times of phases, compared with a replay."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from oper.plan import Piece, Plan, TablePlan, Tier, uniform_plan
from oper.rows.traffic import KIND, KINDS, SENT, Traffic
from oper.search.replay.simulate import Bags, RankBatch, Replay
from oper.search.replay.wire import WireReplay
from oper.shmem.batch import Lookup
from oper.shmem.counters.changes import ChangedRows
from oper.shmem.counters.phases import BUCKETS_US, PHASES
from oper.shmem.keys.rules import DynamicTable
from oper.shmem.optim.optimizers import SGD, RowWiseAdagrad
from oper.shmem.tables import ShardedTables
from oper.tables import TableSpec
from tests import random_plans as rp, runtime_support as rs
from tests.support import pushed


def as_bags(case: rs.Case, batch: rs.Batch, trains_weights: bool = False) -> RankBatch:
    lengths = batch.lengths.reshape(len(case.keys), batch.size).numpy().astype(np.int64)
    ends = np.concatenate([[0], np.cumsum(lengths.sum(axis=1))])
    ids = batch.ids.numpy().astype(np.int64)
    return {key: Bags(ids[ends[k]:ends[k + 1]], lengths[k], case.weighted, trains_weights)
            for k, key in enumerate(case.keys)}


def executed(case: rs.Case, plan: Plan, steps: list[list[rs.Batch]], optimizer: Any, group: Any,
             read: Callable[[ShardedTables], Any] = ShardedTables.traffic,
             prepare: Callable[[ShardedTables], None] = lambda tables: None,
             trains_weights: bool = False) -> Any:
    """Train `steps` on one rank after ``prepare(tables)``; returns ``read(tables)``, by default the
    counters."""
    tables = rs.open_tables(case, plan, group, optimizer)
    prepare(tables)
    tables.sent_bytes(reset=True)
    for batches in steps:
        batch = batches[group.rank]
        if trains_weights:
            batch.weights = batch.weights.detach().requires_grad_()
        rs.rank_loss(tables.lookup(batch.lookup(case)), batch.target).backward()
    found = read(tables)
    tables.barrier()
    tables.close()
    return found


def assert_equal(case: rs.Case, plan: Plan, steps: list[list[rs.Batch]], found: list[Traffic],
                 trains_weights: bool = False, **options: Any) -> None:
    """Check that the counters equal those of a replay with these `options`."""
    replay = Replay(rp.with_tables(plan, case.tables), **options)
    total = replay.empty()
    for batches in steps:
        step = replay.step([as_bags(case, b, trains_weights) for b in batches])
        total = [a.plus(b) for a, b in zip(total, step, strict=True)]
    for mine, theirs in zip(total, found, strict=True):
        assert mine.tables == theirs.tables and mine.columns == theirs.columns
        assert mine.rank == theirs.rank and mine.num_backward == theirs.num_backward
        for k, kind in enumerate(KINDS):
            assert np.array_equal(mine.counts[k], theirs.counts[k]), f"{kind}, rank {mine.rank}"
        assert np.array_equal(mine.num_bytes, theirs.num_bytes)


def all_plans(case: rs.Case, world_size: int) -> list[Plan]:
    """Plans with tiers of all kinds, with and without column pieces."""
    return [uniform_plan(case.tables, world_size, "replicated"),
            *(rp.mixed_plan(case.tables, world_size, seed) for seed in (0, 1)),
            rp.rich_plan(case.tables, world_size, 1, columns=False),
            *(rp.rich_plan(case.tables, world_size, seed, columns=True) for seed in (1, 2))]


@pytest.mark.parametrize("world_size, optimizer", [
    (1, "sgd"), (2, "rowwise_adagrad"), (4, "sgd"), (4, "rowwise_adagrad")])
def test_replayed_traffic_is_the_executed_traffic(world_size: int, optimizer: str) -> None:
    case = rs.dlrm_case(optimizer)
    steps = rs.make_steps(case, world_size, 4)
    for plan in all_plans(case, world_size):
        found = rs.run_ranks(world_size, lambda g, plan=plan: executed(
            case, plan, steps, rs.OPTIMIZERS[optimizer], g))
        assert_equal(case, plan, steps, found)


def test_a_replica_of_the_own_domain_is_read() -> None:
    """A rank without a copy of a tier reads the one in its memory domain."""
    case, domains = rs.dlrm_case("sgd"), (0, 0, 1, 1)
    steps = rs.make_steps(case, 4, 2)
    plan = uniform_plan(case.tables, 4, "striped")
    plan = replace(plan, tables=tuple(
        e if e.table.num_rows < 2 else TablePlan(e.table, (Piece(0, e.table.dim, (
            Tier(0, (half := e.table.num_rows // 2), "replicated", (1, 2)),
            Tier(half, e.table.num_rows, "striped", (0, 1, 2, 3)))),)) for e in plan.tables))
    found = rs.run_ranks(4, lambda g: executed(case, plan, steps, rs.OPTIMIZERS["sgd"], g),
                         domains=domains)
    assert found[0].counts[KIND["rows"]][:, 1].sum() > 0
    assert_equal(case, plan, steps, found, domain_of=domains)


@pytest.mark.parametrize("optimizer", [SGD(lr=0.1, max_row_norm=0.01),
                                       RowWiseAdagrad(lr=0.05, max_row_norm=0.01)],
                         ids=["sgd", "rowwise_adagrad"])
def test_squares_of_clipped_rows_equal_the_replay(optimizer: Any) -> None:
    case = rs.dlrm_case(optimizer.name)
    steps = rs.make_steps(case, 2, 3)
    plan = rp.rich_plan(case.tables, 2, 1, columns=True)
    found = rs.run_ranks(2, lambda g: executed(case, plan, steps, optimizer, g))
    assert found[0].counts[KIND["squares"]].sum() > 0
    assert_equal(case, plan, steps, found, clipped=[t.name for t in case.tables])


def test_weights_and_their_gradients_are_counted() -> None:
    case = replace(rs.dlrm_case(), weighted=True, id_dtype=torch.int32)
    steps = rs.make_steps(case, 2, 3)
    plan = rp.rich_plan(case.tables, 2, 3, columns=True)
    for trains_weights in (False, True):
        found = rs.run_ranks(2, lambda g, trains=trains_weights: executed(
            case, plan, steps, rs.OPTIMIZERS["rowwise_adagrad"], g, trains_weights=trains),
            num_threads=2)
        assert_equal(case, plan, steps, found, trains_weights)
        assert (found[0].counts[KIND["weight_rows"]].sum() > 0) == trains_weights


def test_reads_without_gradients_and_reset() -> None:
    """A lookup without gradients reads pushed tiers directly; a reset sets counters to zero."""
    case = rs.dlrm_case("sgd")
    plan = rp.rich_plan(case.tables, 2, 1, columns=False)
    (batches,) = rs.make_steps(case, 2, 1)

    def body(group: Any) -> tuple[Traffic, Traffic]:
        tables = rs.open_tables(case, plan, group, SGD(lr=0.1))
        with torch.no_grad():
            tables.lookup(batches[group.rank].lookup(case))
        found = tables.traffic(reset=True)
        return found, tables.traffic()

    own = rp.with_tables(plan, case.tables)
    expected = Replay(own, training=False).step([as_bags(case, b) for b in batches])
    for (found, after), mine in zip(rs.run_ranks(2, body), expected, strict=True):
        assert np.array_equal(found.counts, mine.counts) and found.num_forward == 1
        assert not after.counts.any() and after.num_forward == 0


# ---- bytes between memory domains ----------------------------------------------------------------

DOMAINS = [(0, 1), (0, 1, 0, 1), (0, 0, 1, 2)]


def assert_sent(total: Any, found: list[dict[str, list[int]]]) -> None:
    """Compare the bytes of a replay with those that ranks have counted."""
    for k, kind in enumerate(SENT):
        counted = np.array([sent[kind] for sent in found])
        assert np.array_equal(total[k], counted), f"{kind}: {total[k]} {counted}"


def check(case: rs.Case, plan: Plan, domains: tuple[int, ...], optimizer: Any, **options: Any
          ) -> None:
    world = len(domains)
    steps = rs.make_steps(case, world, 3)
    found = rs.run_ranks(world, lambda g: executed(case, plan, steps, optimizer, g,
                                                   ShardedTables.sent_bytes), domains=domains)
    own = rp.with_tables(plan, case.with_optimizer(optimizer.name).tables)
    replay = WireReplay(own, domains, training=True, **options)
    total = sum(replay.step([as_bags(case, b) for b in batches]) for batches in steps)
    assert_sent(total, found)
    assert total.sum() > 0


@pytest.mark.parametrize("optimizer, domains", [
    *(("rowwise_adagrad", d) for d in DOMAINS), ("sgd", (0, 1, 0, 1))], ids=str)
def test_sent_bytes_equal_the_replay(optimizer: str, domains: tuple[int, ...]) -> None:
    case = replace(rs.dlrm_case(optimizer), weighted=optimizer == "sgd")
    owned = pushed(uniform_plan(case.tables, len(domains), "owned"))
    for plan in (owned, *all_plans(case, len(domains))):
        check(case, plan, domains, rs.OPTIMIZERS[optimizer])


@pytest.mark.parametrize("domains", DOMAINS, ids=str)
def test_replayed_keys_are_the_sent_keys(domains: tuple[int, ...]) -> None:
    """Keys with and without a row, of one table with two features and of small tables."""
    case, world = rs.dlrm_case(), len(domains)
    names = {"two_features", "large", "tiny"}
    rule = DynamicTable(admit_after=3, init_bound=0.1)
    plan = uniform_plan(case.tables, world, "striped")
    steps = rs.make_steps(case, world, 4)

    def body(group: Any) -> tuple[list[RankBatch], dict[str, list[int]]]:
        tables = rs.open_tables(case, plan, group, rs.OPTIMIZERS["rowwise_adagrad"])
        tables.open_keys({name: rule for name in names})
        tables.sent_bytes(reset=True)
        found = []
        for batches in steps:
            batch = batches[group.rank]
            with torch.no_grad():
                rows = tables.keys.translate(batch.lookup(case)).ids
            found.append(as_bags(case, replace(batch, ids=rows)))
            tables.lookup(batch.lookup(case)).sum().backward()
        return found, tables.sent_bytes()

    found = rs.run_ranks(world, body, domains=domains)
    replay = WireReplay(plan, domains, training=True, dynamic=names)
    rows, sent = zip(*found, strict=True)
    total = sum(replay.step(ranks) for ranks in zip(*rows, strict=True))
    assert_sent(total, list(sent))
    assert total[-1].sum() > 4 * 1024 * np.count_nonzero(replay.far)


@pytest.mark.parametrize("domains", DOMAINS, ids=str)
def test_read_only_tables_are_pooled_by_owners_between_domains(domains: tuple[int, ...]) -> None:
    """Results are bitwise those of training, bytes those of a replay; in one domain rows are read
    directly and nothing is sent."""
    case = rs.dlrm_case("sgd")
    (batches,) = rs.make_steps(case, len(domains), 1)

    def body(group: Any, optimizer: Any) -> tuple[torch.Tensor, dict[str, list[int]], np.ndarray]:
        tables = rs.open_tables(case, plan, group, optimizer)
        tables.sent_bytes(reset=True)
        tables.traffic(reset=True)
        out = [tables.lookup(batches[group.rank].lookup(case)).detach() for _ in range(2)]
        assert torch.equal(*out)
        found = out[0].clone(), tables.sent_bytes(), tables.traffic().counts
        return found

    for plan in all_plans(case, len(domains)):
        read, trained = (rs.run_ranks(len(domains), lambda g, o=o: body(g, o), domains=domains)
                         for o in (None, rs.OPTIMIZERS["sgd"]))
        direct = rs.run_ranks(len(domains), lambda g: body(g, None))
        for (out, *_), (want, *_), (near, sent, _) in zip(read, trained, direct, strict=True):
            assert torch.equal(out, want) and not any(map(sum, sent.values()))
            torch.testing.assert_close(out, near)
        own = replace(plan, tables=tuple(replace(plan.table(t.name), table=t) for t in case.tables))
        ids = [as_bags(case, b) for b in batches]
        total = 2 * WireReplay(own, domains, training=False).step(ids)
        assert_sent(total, [sent for _, sent, _ in read])
        replay = Replay(own, training=False, domain_of=domains)
        for (_, _, counts), mine in zip(read, replay.step(ids), strict=True):
            for kind in ("ids", "partial_sums"):
                assert np.array_equal(counts[KIND[kind]], 2 * mine.counts[KIND[kind]]), kind


def test_quantised_rows_are_not_pooled_for_others() -> None:
    """Owners cannot sum quantised rows, so readers fetch the rows."""
    case = rs.dlrm_case("sgd")
    coded = replace(case, tables=tuple(replace(t, dtype="int8", optimizer="none")
                                       for t in case.tables if t.dim % 4 == 0))
    plan = pushed(uniform_plan(coded.tables, 2, "owned"))
    ids = [as_bags(coded, b) for b in rs.make_steps(coded, 2, 1)[0]]
    sent = WireReplay(plan, (0, 1), training=False).step(ids).sum(axis=(1, 2))
    assert sent[SENT.index("rows")] > 0 and not sent[SENT.index("partial_sums")]


@pytest.mark.parametrize("bits", [16, 8, (8, 32), (32, 16), (16, 8),
                                  {"wide": (8, 16), "large": 8, "left": 8, "means": 16}], ids=str)
def test_fewer_bits_and_clipped_rows(bits: Any) -> None:
    """Bytes are equal for tables of 1 to 200 columns and for their column pieces."""
    case = rs.dlrm_case("rowwise_adagrad")
    case = replace(case, tables=tuple(replace(t, dtype="float16") if t.name == "large" else t
                                      for t in case.tables))
    plan = replace(rp.rich_plan(case.tables, 2, 1, columns=True), message_bits=bits)
    assert min(p.stop - p.start for t in plan.tables for p in t.pieces) < 3
    check(case, plan, (0, 1), RowWiseAdagrad(lr=0.05, max_row_norm=0.01),
          clipped=[t.name for t in case.tables])


def sent_again(case: rs.Case, plan: Plan, batches_of: Callable[[int], list[Lookup]],
               order: list[int]) -> list[list[int]]:
    """Bytes of requests that each rank sends again in the backward passes of its batches, which run
    in this order after all lookups. The rows must be those of one domain."""
    def body(group: Any) -> tuple[list[int], dict[str, torch.Tensor]]:
        tables = rs.open_tables(case, plan, group, rs.OPTIMIZERS["sgd"])
        sums, sent = [tables.lookup(batch).sum() for batch in batches_of(group.rank)], []
        for k in order:
            tables.sent_bytes(reset=True)
            sums[k].backward()
            sent.append(sum(tables.sent_bytes().get("gradient_ids", [])))
        return sent, rs.read_all(tables)

    several, one = rs.run_ranks(2, body, domains=(0, 1)), rs.run_ranks(2, body)
    rs.assert_bitwise([rows for _, rows in several], [rows for _, rows in one], "rows")
    return [sent for sent, _ in several]


def test_long_requests_with_another_last_id_are_sent_again() -> None:
    """Owners keep the requests of the last two lookups."""
    table = TableSpec("t", 300, 4, ("f",), "sum", optimizer="sgd")
    plan = Plan(2, (TablePlan(table, (Piece(0, 4, (
        Tier(0, 300, "owned", (1,), mode="push"),)),)),))
    ids = torch.arange(5000) % 299
    batches = [rs.bags_of_one(torch.cat([ids, torch.tensor([last])])) for last in (299, 7, 7)]
    sent = sent_again(rs.Case((table,), ("f",)), plan, lambda rank: batches, [1, 2, 0])
    slots, bags = (-(-5001 * bits // 32) * 4 for bits in (9, 1))
    assert sent == [[0, 0, slots + bags], [0, 0, 0]]


def test_ids_are_sent_again_only_if_they_differ() -> None:
    """The backward pass of an earlier batch, or with other weights, sends its requests again."""
    case = replace(rs.dlrm_case("sgd"), weighted=True)
    steps = rs.make_steps(case, 2, 3)

    def batches_of(rank: int) -> list[Lookup]:
        first, second, third = (step[rank].lookup(case) for step in steps)
        return [replace(second, weights=2 * second.weights), first, second, third]

    sent = sent_again(case, pushed(uniform_plan(case.tables, 2, "striped")), batches_of,
                      [1, 2, 3, 0])
    oldest, last, newest, other = np.sum(sent, axis=0).tolist()
    assert oldest > 0 and last == newest == 0 and other > 0


# ---- times of phases -----------------------------------------------------------------------------


def assert_not_updated(found: Traffic, name: str) -> None:
    """Check that no rows of the table `name` were updated or refreshed, but rows of others."""
    for kind in ("updated_rows", "refreshed_rows"):
        of = dict(zip(found.tables, found.counts[KIND[kind]].sum(axis=1), strict=True))
        assert of.pop(name) == 0 and any(of.values()), kind


def test_rows_of_frozen_tables_neither_change_nor_are_refreshed() -> None:
    case = rs.dlrm_case("sgd")
    plan, steps = uniform_plan(case.tables, 2, "replicated"), rs.make_steps(case, 2, 1)
    name = case.tables[0].name

    def freeze(tables: ShardedTables) -> None:
        tables.frozen = frozenset({name})
        changed.append(ChangedRows(tables))

    def read(tables: ShardedTables) -> tuple[Traffic, set[str]]:
        (rows,) = (c.take() for c in changed if c.tables is tables)
        assert rows is not None
        return tables.traffic(), {tables.directories[k].table.name for k in rows if rows[k].size}

    changed: list[ChangedRows] = []
    for found, names in rs.run_ranks(2, lambda g: executed(
            case, plan, steps, rs.OPTIMIZERS["sgd"], g, read, freeze)):
        assert names and name not in names
        assert_not_updated(found, name)


def test_every_batch_is_counted() -> None:
    case = rs.dlrm_case("sgd")
    tables = rs.open_alone(case, rs.OPTIMIZERS["sgd"])
    taken: dict[str, list[int]] = defaultdict(list)
    for seed in range(8):
        batch = rs.make_batch(case, seed, 16)
        rs.rank_loss(tables.lookup(batch.lookup(case)), batch.target).backward()
        for name, ns in tables.phase_ns().items():
            taken[name].append(ns)
    found = tables.phase_histograms()
    assert list(found) == list(PHASES)
    for name, (sum_ns, counts) in found.items():
        want = [0] * (len(BUCKETS_US) + 1)
        for ns in taken[name]:
            want[np.searchsorted(BUCKETS_US, ns / 1000, "right")] += 1  # the first bound above it
        assert sum_ns == sum(taken[name]) and list(counts) == want, name
    assert tables.phase_histograms(reset=True) == found
    with torch.no_grad():
        tables.lookup(batch.lookup(case))
    assert {name: sum(h.counts) for name, h in tables.phase_histograms().items()} == {
        **dict.fromkeys(PHASES, 0), "forward": 1}
    tables.close()
