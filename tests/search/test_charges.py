"""The relaxation contains every cost of the cost model: the two are compared cost by cost."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from search_cases import gpus, host, space_bound, tables_and_stats

from oper.plan import Piece, Plan, TablePlan, Tier
from oper.search import make_plan, verify_plan
from oper.search.cost.model import CostModel, evaluate
from oper.search.cost.space import PUSH, REPLICATED, SHARD
from oper.search.cost.tally import NUM_ROWS, Row, Tally
from oper.search.pricing.node import (
    ALL_PUSHED,
    ONE_TIER,
    TIERS,
    TIERS_PUSHED,
    Configuration,
    Node,
    PieceChoice,
)
from oper.search.problem.space import EVERYTHING
from oper.search.problem.statement import NUM_FEATURES, TOUCHED, Problem, TableProblem, make_problem
from oper.search.relaxation.relaxation import Relaxation
from oper.topology import Costs

FIELDS = [f.name for f in fields(Costs) if f.name != "phase_us"]
TOPOLOGIES = {"gpus": gpus(4), "hosts": gpus(4, per_host=2), "host": host(3)}


def stated(name: str, objective: str, **costs: float) -> Problem:
    specs, stats = tables_and_stats(3, 4, lengths=(4, 20))
    none = dict.fromkeys(FIELDS, 0.0)
    topology = replace(TOPOLOGIES[name], costs=Costs(phase_us=1.0, **{**none, **costs}))
    return make_problem(specs, stats, topology, objective=objective, batch_size=512,
                        allow=EVERYTHING)


def tiers_of(t: TableProblem, kinds: list[str], world: int, rng: np.random.Generator
             ) -> tuple[Tier, ...]:
    """Tiers that end at block edges; pushed rows have one owner, pulled rows are striped evenly."""
    inner = rng.choice(t.edges[1:-1], len(kinds) - 1, replace=False) if len(kinds) > 1 else []
    edges = [0, *sorted(int(e) for e in inner), t.spec.num_rows]
    everyone = tuple(range(world))
    made = {REPLICATED: lambda a, b: Tier(a, b, "replicated", everyone),
            SHARD: lambda a, b: Tier(a, b, "striped", everyone),
            PUSH: lambda a, b: Tier(a, b, "owned", (1,), mode="push")}
    return tuple(made[kind](a, b) for kind, a, b in zip(kinds, edges, edges[1:], strict=False))


def configuration(relaxation: Relaxation, k: int, pieces: tuple[Piece, ...]) -> Configuration:
    """The same placement as a configuration of the relaxation."""
    t, parts = relaxation.tables[k], []
    option = {o.kind: n for n, o in enumerate(relaxation.options)}
    for piece in pieces:
        choice = np.zeros(t.blocks.shape[0], np.int64)
        for tier in piece.tiers:
            kind = REPLICATED if tier.placement == "replicated" else (
                PUSH if tier.mode == "push" else SHARD)
            choice[(t.edges[:-1] >= tier.start) & (t.edges[:-1] < tier.stop)] = option[kind]
        amount = np.zeros((len(relaxation.options), NUM_FEATURES))
        np.add.at(amount, choice, t.blocks)
        pushes = any(x.mode == "push" for x in piece.tiers)
        mode = (ALL_PUSHED, TIERS_PUSHED)[len(piece.tiers) > 1] if pushes else (
            ONE_TIER, TIERS)[len(piece.tiers) > 1]
        width = piece.stop - piece.start
        parts.append(PieceChoice(width / t.spec.dim, t.spec.dim / width, 0, mode, choice, amount))
    return tuple(parts)


def both(problem: Problem, k: int, pieces: tuple[Piece, ...]) -> tuple[np.ndarray, np.ndarray]:
    """A placement's consumption of the resource rows by the relaxation, and by the cost model."""
    model = CostModel(problem)
    relaxation = Relaxation(model)
    asked = Node(relaxation).resources(np.array([k]), [configuration(relaxation, k, pieces)])[0]
    tally = model.tally(relaxation.tables[k], pieces, True)
    return asked[:relaxation.rows.phase_of.size], relaxation.rows.of_tally(tally)


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("name", sorted(TOPOLOGIES))
def test_consumption_of_a_piece_equals_the_cost_model(name, field):
    rng = np.random.default_rng(FIELDS.index(field))
    for objective in ("training", "inference"):
        # Pieces of a table that pushes in other pieces may pay the lesser charge.
        other = {"push_tier_ns": 1.0} if field == "tier_ns" else {}
        free = stated(name, objective, **other)
        dear = stated(name, objective, **other, **{field: 0.7})
        for kinds in ([REPLICATED], [SHARD], [PUSH], [REPLICATED, SHARD], [REPLICATED, PUSH],
                      [REPLICATED, SHARD, PUSH]):
            if PUSH in kinds and objective == "inference":
                continue  # nothing is pushed there
            k = int(rng.integers(3))
            t = free.tables[k]
            tiers = tiers_of(t, kinds, free.machine.world_size, rng)
            (none, true_none), (asked, true) = (both(x, k, (Piece(0, t.spec.dim, tiers),))
                                                for x in (free, dear))
            # Tabulated partial sums are a lower bound.
            assert (asked <= true * (1 + 1e-9)).all() and asked == pytest.approx(true, rel=1e-4)
            if field not in ("warm_share", "wire_ns"):  # of bytes, those of partial sums too
                assert asked - none == pytest.approx(true - true_none, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", sorted(TOPOLOGIES))
def test_several_pieces_pay_id_streams_and_all_charges(name):
    rng = np.random.default_rng(3)
    charges = {"table_us": 3.0, "tier_ns": 2.0, "push_tier_ns": 2.0}
    for objective in ("training", "inference"):
        free, dear = (stated(name, objective, id_ns=0.1, **x) for x in ({}, charges))
        for _ in range(10):
            k = int(rng.integers(3))
            t = free.tables[k]
            if t.spec.dim < 16:
                continue
            tiers = tiers_of(t, [REPLICATED, SHARD], free.machine.world_size, rng)
            pieces = (Piece(0, 8, tiers), Piece(8, t.spec.dim, tiers))
            asked, true = both(free, k, pieces)
            more, truly_more = both(dear, k, pieces)
            # The squares of one piece are not charged.
            assert (asked <= true + 1e-9).all() and asked == pytest.approx(true, rel=1e-2)
            assert more - asked == pytest.approx(truly_more - true, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", sorted(TOPOLOGIES))
def test_directories_of_keys_cost_as_much_in_the_bound_as_in_the_model(name):
    """Finding, counting, inserting and exchanging keys, term by term; plans with keys are certified
    as tightly as plans without."""
    specs, stats = tables_and_stats(3, 4, lengths=(4, 20))
    share = 0.1
    dynamic = replace(stats, tables=stats.tables | {
        n: replace(stats.tables[n], default_share=share) for n in ("t0", "t2")})
    topology = replace(TOPOLOGIES[name], costs=Costs(
        phase_us=1.0, key_ns=20.0, key_count_ns=19.0, key_insert_ns=630.0))
    static, keyed = (make_problem(specs, x, topology, batch_size=512) for x in (stats, dynamic))
    world, near = topology.world_size, keyed.machine.num_near[0]
    tables = [t for t in keyed.tables if t.default_share is not None]
    assert [t.spec.name for t in tables] == ["t0", "t2"]
    ids = sum(t.traffic.num_ids for t in tables)
    distinct = sum(t.total[TOUCHED] for t in tables)
    before, after = (CostModel(x).base().rows[:, 0] for x in (static, keyed))
    added = np.zeros(NUM_ROWS)
    added[Row.FORWARD_NS] = 20 * ids
    added[Row.UPDATE_NS] = world / near * (19 * distinct + 630 * share * ids)
    added[[Row.GRADS, Row.RETURNED]] = 8 * (distinct + share * ids) / near
    assert after - before == pytest.approx(added)
    relaxations = [Relaxation(CostModel(x)) for x in (static, keyed)]
    rows = relaxations[0].rows
    size = rows.phase_of.size
    assert relaxations[1].base[:size] - relaxations[0].base[:size] == pytest.approx(
        rows.of_tally(Tally(np.repeat(added[:, None], world, 1))))
    plan = make_plan(specs, dynamic, topology, batch_size=512)
    assert 0.98 * plan.step_us < plan.lower_bound_us <= plan.step_us
    assert verify_plan(plan, keyed).certified


@pytest.mark.parametrize("per_host", [4, 2])
def test_a_few_pushed_rows_may_be_cheaper_than_tiers_that_are_not_pushed(per_host):
    """If passes over ids cost less with pushed tiers, few rows are pushed and all others stay."""
    specs, stats = tables_and_stats(1, 4, lengths=(20,))
    topology = replace(gpus(4, per_host=per_host), costs=Costs(phase_us=1.0, tier_ns=50.0))
    problem = make_problem(specs, stats, topology, batch_size=512, allow=EVERYTHING)
    t, everyone = problem.tables[0], (0, 1, 2, 3)
    rows = t.spec.num_rows
    bound = space_bound(problem, max_work=1400)
    for edge in (1, 5, rows // 2, rows - 1):
        for last in (Tier(edge, rows, "owned", (1,), mode="push"),
                     Tier(edge, rows, "striped", everyone)):
            tiers = (Tier(0, edge, "replicated", everyone), last)
            plan = Plan(4, (TablePlan(t.spec, (Piece(0, t.spec.dim, tiers),)),), "training", 512)
            assert bound <= evaluate(plan, problem).step_us * (1 + 1e-9)
