"""Bytes between memory domains: the exchange's counters equal a replay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from oper.plan import Piece, Plan, TablePlan, Tier, uniform_plan
from oper.rows.traffic import KIND, SENT
from oper.search.replay.simulate import RankBatch, Replay
from oper.search.replay.wire import WireReplay
from oper.shmem.keys.rules import DynamicTable
from oper.shmem.optim.optimizers import RowWiseAdagrad
from oper.shmem.tables import ShardedTables
from oper.tables import TableSpec
from tests.runtime_support import (
    OPTIMIZERS,
    Case,
    assert_bitwise,
    bags_of_one,
    dlrm_case,
    make_steps,
    open_tables,
    rank_loss,
    rich_plan,
    run_ranks,
    same_bits,
    train_virtual,
    with_tables,
)
from tests.shmem.test_traffic import all_plans, as_bags, executed
from tests.support import pushed

DOMAINS = [(0, 1), (0, 1, 0, 1), (0, 0, 1, 2)]


def check(case: Case, plan: Plan, domains: tuple[int, ...], optimizer: Any, **options: Any) -> None:
    world = len(domains)
    steps = make_steps(case, world, 3)
    found = run_ranks(world, lambda g: executed(case, plan, steps, optimizer, g,
                                                ShardedTables.sent_bytes), domains=domains)
    own = with_tables(plan, case.with_optimizer(optimizer.name).tables)
    replay = WireReplay(own, domains, training=True, **options)
    total = sum(replay.step([as_bags(case, b) for b in batches]) for batches in steps)
    for k, kind in enumerate(SENT):
        counted = np.array([sent[kind] for sent in found])
        assert np.array_equal(total[k], counted), f"{kind}: {total[k]} {counted}"
    assert total.sum() > 0


@pytest.mark.parametrize("optimizer, domains", [
    *(("rowwise_adagrad", d) for d in DOMAINS), ("sgd", (0, 1, 0, 1))], ids=str)
def test_sent_bytes_equal_the_replay(optimizer: str, domains: tuple[int, ...]) -> None:
    case = replace(dlrm_case(optimizer), weighted=optimizer == "sgd")
    owned = pushed(uniform_plan(case.tables, len(domains), "owned"))
    for plan in (owned, *all_plans(case, len(domains)).values()):
        check(case, plan, domains, OPTIMIZERS[optimizer])


@pytest.mark.parametrize("domains", DOMAINS, ids=str)
def test_replayed_keys_are_the_sent_keys(domains: tuple[int, ...]) -> None:
    """Keys with and without a row, of one table with two features and of small tables."""
    case, world = dlrm_case(), len(domains)
    names = {"two_features", "large", "tiny"}
    rule = DynamicTable(admit_after=3, init_bound=0.1)
    plan = uniform_plan(case.tables, world, "striped")
    steps = make_steps(case, world, 4)

    def body(group: Any) -> tuple[list[RankBatch], dict[str, list[int]]]:
        tables = open_tables(case, plan, group, OPTIMIZERS["rowwise_adagrad"])
        tables.open_keys({name: rule for name in names})
        tables.sent_bytes(reset=True)
        found = []
        for batches in steps:
            batch = batches[group.rank]
            with torch.no_grad():
                rows = tables.keys.translate(batch.lookup(case)).ids
            found.append(as_bags(case, replace(batch, ids=rows)))
            tables.lookup(batch.lookup(case)).sum().backward()
        sent = tables.sent_bytes()
        tables.barrier()
        tables.close()
        return found, sent

    found = run_ranks(world, body, domains=domains)
    replay = WireReplay(plan, domains, training=True, dynamic=names)
    for k, kind in enumerate(SENT):
        total = sum(replay.step(ranks)[k]
                    for ranks in zip(*(rows for rows, _ in found), strict=True))
        counted = np.array([sent[kind] for _, sent in found])
        assert np.array_equal(total, counted), f"{kind}: {total} {counted}"
    assert counted.sum() > 4 * 1024 * np.count_nonzero(replay.far)


@pytest.mark.parametrize("domains", DOMAINS, ids=str)
def test_read_only_tables_are_pooled_by_owners_between_domains(domains: tuple[int, ...]) -> None:
    """Results are bitwise those of training, bytes those of a replay; in one domain rows are read
    directly and nothing is sent."""
    case = dlrm_case("sgd")
    (batches,) = make_steps(case, len(domains), 1)

    def body(group: Any, optimizer: Any) -> tuple[torch.Tensor, dict[str, list[int]], np.ndarray]:
        tables = open_tables(case, plan, group, optimizer)
        tables.sent_bytes(reset=True)
        tables.traffic(reset=True)
        out = [tables.lookup(batches[group.rank].lookup(case)).detach() for _ in range(2)]
        assert torch.equal(*out)
        found = out[0].clone(), tables.sent_bytes(), tables.traffic().counts
        tables.barrier()
        tables.close()
        return found

    for plan in all_plans(case, len(domains)).values():
        read, trained = (run_ranks(len(domains), lambda g, o=o: body(g, o), domains=domains)
                         for o in (None, OPTIMIZERS["sgd"]))
        direct = run_ranks(len(domains), lambda g: body(g, None))
        for (out, *_), (want, *_), (near, sent, _) in zip(read, trained, direct, strict=True):
            assert torch.equal(out, want) and not any(map(sum, sent.values()))
            torch.testing.assert_close(out, near)
        own = replace(plan, tables=tuple(replace(plan.table(t.name), table=t) for t in case.tables))
        ids = [as_bags(case, b) for b in batches]
        total = 2 * WireReplay(own, domains, training=False).step(ids)
        for k, kind in enumerate(SENT):
            executed = np.array([sent[kind] for _, sent, _ in read])
            assert np.array_equal(total[k], executed), f"{kind}: {total[k]} {executed}"
        replay = Replay(own, training=False, num_domains=len(set(domains)))
        for (_, _, counts), mine in zip(read, replay.step(ids), strict=True):
            for kind in ("ids", "partial_sums"):
                assert np.array_equal(counts[KIND[kind]], 2 * mine.counts[KIND[kind]]), kind


def test_quantised_rows_are_not_pooled_for_others() -> None:
    """Owners cannot sum quantised rows, so readers fetch the rows."""
    case = dlrm_case("sgd")
    coded = replace(case, tables=tuple(replace(t, dtype="int8", optimizer="none")
                                       for t in case.tables if t.dim % 4 == 0))
    plan = pushed(uniform_plan(coded.tables, 2, "owned"))
    ids = [as_bags(coded, b) for b in make_steps(coded, 2, 1)[0]]
    sent = WireReplay(plan, (0, 1), training=False).step(ids).sum(axis=(1, 2))
    assert sent[SENT.index("rows")] > 0 and not sent[SENT.index("partial_sums")]


@pytest.mark.parametrize("bits", [16, 8, (8, 32), (32, 16), (16, 8),
                                  {"wide": (8, 16), "large": 8, "left": 8, "means": 16}], ids=str)
def test_fewer_bits_and_clipped_rows(bits: Any) -> None:
    """Bytes are equal for tables of 1 to 200 columns and for their column pieces."""
    case = dlrm_case("rowwise_adagrad")
    case = replace(case, tables=tuple(replace(t, dtype="float16") if t.name == "large" else t
                                      for t in case.tables))
    plan = replace(rich_plan(case.tables, 2, 1, columns=True), message_bits=bits)
    assert min(p.stop - p.start for t in plan.tables for p in t.pieces) < 3
    check(case, plan, (0, 1), RowWiseAdagrad(lr=0.05, max_row_norm=0.01),
          clipped=[t.name for t in case.tables])


def test_owners_of_pushed_tables_read_their_own_rows() -> None:
    """A rank that owns an entire pushed table reads it like a pulled one."""
    case = dlrm_case("rowwise_adagrad")
    steps = make_steps(case, 4, 3)
    chosen = OPTIMIZERS["rowwise_adagrad"]
    plan = pushed(uniform_plan(case.tables, 4, "owned"))
    same_bits(train_virtual(case, plan, steps, chosen, domains=(0, 1, 1, 2)),
              train_virtual(case, plan, steps, chosen))
    found = sum(t.counts[:, :, t.rank] for t in run_ranks(4, lambda g: executed(
        case, plan, steps[:1], chosen, g)))
    assert found[KIND["rows"]].sum() > 0
    assert not found[[KIND["ids"], KIND["partial_sums"], KIND["gradient_ids"]]].any()


def test_long_requests_with_another_last_id_are_sent_again() -> None:
    """The backward pass of a batch older than the last two lookups sends its requests again."""
    table = TableSpec("t", 300, 4, ("f",), "sum", optimizer="sgd")
    plan = Plan(2, (TablePlan(table, (Piece(0, 4, (
        Tier(0, 300, "owned", (1,), mode="push"),)),)),))
    case, num_ids = Case((table,), ("f",)), 5000
    ids = torch.arange(num_ids) % 299

    def body(group: Any) -> tuple[list[int], torch.Tensor]:
        tables = open_tables(case, plan, group, OPTIMIZERS["sgd"])
        found, sums = [], []
        for last in (299, 7, 7):
            batch = bags_of_one(torch.cat([ids, torch.tensor([last])]))
            sums.append(tables.lookup(batch).sum())
        for each in sums[1:] + sums[:1]:
            tables.sent_bytes(reset=True)
            each.backward()
            found.append(sum(tables.sent_bytes().get("gradient_ids", [])))
        rows = tables.read("t")
        tables.barrier()
        tables.close()
        return found, rows

    several, one = run_ranks(2, body, domains=(0, 1)), run_ranks(2, body)
    assert_bitwise([rows for _, rows in several], [rows for _, rows in one], "rows")
    slots, bags = (-(-(num_ids + 1) * bits // 32) * 4 for bits in (9, 1))
    assert [sent for sent, _ in several] == [[0, 0, slots + bags], [0, 0, 0]]


def test_ids_are_sent_again_only_if_they_differ() -> None:
    """Owners keep the requests of the last two lookups; the backward pass of an earlier batch, or
    with other weights, sends its requests again."""
    case = replace(dlrm_case("sgd"), weighted=True)
    plan = pushed(uniform_plan(case.tables, 2, "striped"))
    steps = make_steps(case, 2, 3)

    def body(group: Any) -> tuple[list[int], list[torch.Tensor]]:
        tables = open_tables(case, plan, group, OPTIMIZERS["sgd"])
        sent = []
        batches = [step[group.rank] for step in steps]
        losses = [rank_loss(tables.lookup(x.lookup(case)), x.target) for x in batches]
        for loss in losses:
            tables.sent_bytes(reset=True)
            loss.backward()
            sent.append(sum(tables.sent_bytes().get("gradient_ids", [])))
        b = batches[1]
        other = replace(b, weights=b.weights * 2)
        loss = rank_loss(tables.lookup(other.lookup(case)), b.target)
        for _ in range(2):
            tables.lookup(b.lookup(case))
        tables.sent_bytes(reset=True)
        loss.backward()
        sent.append(sum(tables.sent_bytes().get("gradient_ids", [])))
        rows = [tables.read(t.name) for t in case.tables]
        tables.barrier()
        tables.close()
        return sent, rows

    several, one = run_ranks(2, body, domains=(0, 1)), run_ranks(2, body)
    assert_bitwise([rows for _, rows in several], [rows for _, rows in one], "rows")
    oldest, last, newest, other = np.sum([sent for sent, _ in several], axis=0).tolist()
    assert oldest > 0 and last == newest == 0 and other > 0
