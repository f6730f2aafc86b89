"""What ranks of different memory domains send: counted by the exchange, and replayed; equal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from oper.plan import Plan, Tier, uniform_plan
from oper.rows.traffic import KIND, SENT
from oper.search.replay.wire import WireReplay
from oper.shmem.optim.optimizers import RowWiseAdagrad
from tests.runtime_support import (
    OPTIMIZERS,
    Batch,
    Case,
    assert_bitwise,
    dlrm_case,
    make_steps,
    open_tables,
    plans_for,
    rank_loss,
    rich_plan,
    run_ranks,
    train_virtual,
)
from tests.shmem.test_traffic import as_bags

DOMAINS = [(0, 1), (0, 1, 0, 1), (0, 0, 1, 2)]


def owned_push(plan: Plan) -> Plan:
    """Tables that one rank owns, in push mode."""
    def pushed(tier: Tier) -> Tier:
        return replace(tier, mode="push")

    return replace(plan, tables=tuple(replace(t, pieces=tuple(
        replace(p, tiers=tuple(map(pushed, p.tiers))) for p in t.pieces)) for t in plan.tables))


def all_plans(case: Case, world_size: int) -> dict[str, Plan]:
    plans = plans_for(case.tables, world_size)
    plans["owned push"] = owned_push(uniform_plan(case.tables, world_size, "owned"))
    for seed in (1, 2):
        plans[f"push, columns{seed}"] = rich_plan(case.tables, world_size, seed, columns=True)
    return plans


def sent_by(case: Case, plan: Plan, steps: list[list[Batch]], optimizer: Any, group: Any
            ) -> dict[str, list[int]]:
    tables = open_tables(case, plan, group, optimizer)
    tables.sent_bytes(reset=True)
    for batches in steps:
        batch = batches[group.rank]
        rank_loss(tables.lookup(batch.lookup(case)), batch.target).backward()
    found = tables.sent_bytes()
    tables.barrier()
    tables.close()
    return found


def check(case: Case, plan: Plan, domains: tuple[int, ...], optimizer: Any, **options: Any) -> None:
    world = len(domains)
    steps = make_steps(case, world, 3)
    found = run_ranks(world, lambda g: sent_by(case, plan, steps, optimizer, g), domains=domains)
    own = case.with_optimizer(optimizer.name)
    plan = replace(plan, tables=tuple(replace(plan.table(t.name), table=t) for t in own.tables))
    replay = WireReplay(plan, domains, training=True, **options)
    total = sum(replay.step([as_bags(case, b) for b in batches]) for batches in steps)
    for k, kind in enumerate(SENT):
        executed = np.array([sent[kind] for sent in found])
        assert np.array_equal(total[k], executed), f"{kind}: {total[k]} {executed}"
    assert total.sum() > 0


@pytest.mark.parametrize("optimizer, domains", [
    *(("rowwise_adagrad", d) for d in DOMAINS), ("sgd", (0, 1, 0, 1))], ids=str)
def test_replayed_bytes_are_the_sent_bytes(optimizer: str, domains: tuple[int, ...]) -> None:
    case = replace(dlrm_case(optimizer), weighted=optimizer == "sgd")
    for plan in all_plans(case, len(domains)).values():
        check(case, plan, domains, OPTIMIZERS[optimizer])


def test_half_the_bytes_and_clipped_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    case = dlrm_case("rowwise_adagrad")
    monkeypatch.setenv("OPER_WIRE", "bf16")
    check(case, rich_plan(case.tables, 2, 1, columns=True), (0, 1),
          RowWiseAdagrad(lr=0.05, max_row_norm=0.01), is_half=True,
          clipped=[t.name for t in case.tables])


def test_owners_of_pushed_tables_read_their_own_rows() -> None:
    """No rank asks itself: bits and reads are those of a pulled table where it owns all of it."""
    case = dlrm_case("rowwise_adagrad")
    steps = make_steps(case, 4, 3)
    chosen = OPTIMIZERS["rowwise_adagrad"]
    plan = owned_push(uniform_plan(case.tables, 4, "owned"))
    one = train_virtual(case, plan, steps, chosen)
    several = train_virtual(case, plan, steps, chosen, domains=(0, 1, 1, 2))
    for part in ("outputs", "weights", "states"):
        assert_bitwise(getattr(one, part), getattr(several, part), part)

    def body(group: Any) -> np.ndarray:
        tables = open_tables(case, plan, group, chosen)
        batch = steps[0][group.rank]
        tables.lookup(batch.lookup(case)).sum().backward()
        found = tables.traffic().counts[:, :, group.rank]
        tables.barrier()
        tables.close()
        return found

    found = sum(run_ranks(4, body))
    assert found[KIND["rows"]].sum() > 0
    assert not found[[KIND["ids"], KIND["partial_sums"], KIND["gradient_ids"]]].any()


def test_ids_are_sent_again_only_when_they_are_others() -> None:
    """The backward pass of an earlier batch, or with other weights, brings its own requests."""
    case = replace(dlrm_case("sgd"), weighted=True)
    plan = owned_push(uniform_plan(case.tables, 2, "striped"))
    first, second = make_steps(case, 2, 2)

    def body(group: Any) -> tuple[list[int], list[torch.Tensor]]:
        tables = open_tables(case, plan, group, OPTIMIZERS["sgd"])
        sent = []
        a, b = (x[group.rank] for x in (first, second))
        losses = [rank_loss(tables.lookup(x.lookup(case)), x.target) for x in (a, b)]
        for loss in (losses[0], losses[1]):  # of another batch than the last lookup; the same
            tables.sent_bytes(reset=True)
            loss.backward()
            sent.append(sum(tables.sent_bytes().get("gradient_ids", [])))
        other = replace(b, weights=b.weights * 2)
        tables.lookup(b.lookup(case))
        loss = rank_loss(tables.lookup(other.lookup(case)), b.target)
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
    again, same, other = np.sum([sent for sent, _ in several], axis=0).tolist()
    assert again > 0 and same == 0 and other > 0
