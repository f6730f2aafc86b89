"""Bounds are about the plan and the problem that they stand beside, or they are left out."""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import Phase, assume, given, settings, strategies as st
from search_cases import (
    counted,
    gpus,
    host,
    random_plan,
    random_tier,
    tables_and_stats,
    with_host_memory,
)

from oper.errors import InvalidInputError, PlanInfeasibleError
from oper.plan import Piece, Plan, TablePlan, Tier
from oper.search import evaluate, make_problem
from oper.search.certified import PROBLEM, REASON, certified, digest, outside
from oper.search.constraints import Constraints, TableConstraint, violations
from oper.search.pins import impose
from oper.search.planner import plan_problem, proved, space_bound
from oper.search.presets import topology_preset
from oper.search.problem import with_overlap
from oper.search.space import ACROSS_HOSTS, EVERYTHING, EXECUTABLE
from oper.search.verbs import configure_explain, run_explain
from oper.stats import AccessStats
from oper.tables import TableSpec

KINDS = ("replicated", "striped", "owned", "striped-push", "owned-push")


def stated(topology, **more):
    specs, stats = tables_and_stats(4, 7, max_rows=3000)
    return make_problem(specs, stats, topology, batch_size=256, **{"allow": EVERYTHING} | more)


# ---- plans that the bound does not cover ---------------------------------------------------------


def pinned_copies():
    """Two tables whose copies are pinned to different ranks of each host, and a table held to a
    rank, so that ranks differ and the relaxation has no copies per host."""
    rng, rows = np.random.default_rng(0), 20_000
    specs = [TableSpec("a", rows, 64, ("fa",)), TableSpec("b", rows, 64, ("fb",)),
             TableSpec("c", 1000, 8, ("fc",))]
    stats = AccessStats(200_000, {s.name: counted(s.num_rows, 0.1, rng, num_ids=200_000)
                                  for s in specs}, "generated", True)
    tables = {name: {"pinned": [{"rows": [0, rows], "place": "replicated", "ranks": ranks}]}
              for name, ranks in (("a", [0, 2]), ("b", [1, 3]))}
    return make_problem(specs, stats, gpus(4, per_host=2, memory_bytes=1.15 * rows * 256),
                        objective="inference", batch_size=1024,
                        constraints={"tables": {**tables, "c": {"ranks": [0]}}})


def test_pins_outside_of_the_space_leave_no_bound():
    problem = pinned_copies()
    plan = plan_problem(problem)
    assert space_bound(problem) > plan.step_us, "the case shows nothing"
    assert plan.lower_bound_us == 0 and np.isnan(plan.gap)
    assert "table 'a' is replicated on ranks [0, 2] alone" in plan.notes[REASON]
    again = proved(plan, problem, max_boxes=1)
    assert again.lower_bound_us == 0 and again.notes[REASON] == plan.notes[REASON]


def test_pins_inside_of_the_space_keep_it():
    problem = stated(gpus(4), constraints={"tables": {"t0": {
        "pinned": [{"rows": [0, 2], "place": "replicated", "ranks": [0, 1, 2, 3]}]}}})
    plan = plan_problem(problem)
    assert 0 < plan.lower_bound_us <= plan.step_us and REASON not in plan.notes


@pytest.mark.parametrize(("tier", "words"), [
    (Tier(0, 9, "replicated", (0, 1)), "is replicated on ranks [0, 1] alone"),
    (Tier(0, 9, "owned", (1,), mode="push", memory="host"), "host memory that are not pulled"),
    (Tier(0, 9, "owned", (1,), mode="push"), "owned by push in device memory"),
    (Tier(0, 9, "striped", (0, 1), memory="host"), "striped by pull in host memory"),
    (Tier(0, 9, "owned", (3,)), "has rows on ranks [3]"),
])
def test_what_a_hand_may_write(tier, words):
    problem = stated(gpus(4, per_host=2), allow=EXECUTABLE | {"per_host"},
                     constraints={"tables": {"t0": {"ranks": [0, 1, 2]}}})
    plan = plan_problem(problem)
    assert outside(plan, problem) == ""
    first = plan.tables[0]
    entry = TablePlan(first.table, (Piece(0, first.table.dim, (
        tier, Tier(9, first.table.num_rows, "owned", (0,)))),), first.head_ids)
    assert words in outside(replace(plan, tables=(entry, *plan.tables[1:])), problem)


def test_columns_that_no_plan_is_cut_at():
    problem = stated(gpus(2))
    wide = next(t.spec for t in problem.tables if t.spec.dim >= 16)
    plan = plan_problem(problem)

    def cut(*at):
        edges = [0, *at, wide.dim]
        pieces = tuple(Piece(a, b, (Tier(0, wide.num_rows, "owned", (0,), mode="push"),))
                       for a, b in itertools.pairwise(edges))
        return replace(plan, tables=tuple(TablePlan(wide, pieces) if t.table == wide else t
                                          for t in plan.tables))

    assert outside(cut(8), problem) == ""
    for at in ((4,), (10,), (8, 12)):
        assert "is split at columns" in outside(cut(*at), problem)
    narrow = replace(problem, allow=problem.allow - {"columns"})
    assert "is split by columns" in outside(cut(8), narrow)


def test_a_bound_above_the_step_is_told_and_not_capped():
    problem = stated(gpus(2))
    plan = plan_problem(problem)
    found = certified(plan, problem, plan.step_us, plan.step_us * 1.01)
    assert found.lower_bound_us == 0 and "above the plan's step" in found.notes[REASON]
    # Branching may leave no faster plan, while the bound of all plans is below the step.
    found = certified(plan, problem, plan.step_us, plan.step_us * 1.01, plan.step_us / 2)
    assert found.gap == 0 and REASON not in found.notes


# ---- plans of other problems ---------------------------------------------------------------------


def test_everything_that_a_bound_depends_on_is_in_the_digest():
    base = stated(gpus(2))
    specs, stats = tables_and_stats(4, 7, max_rows=3000)
    costs = replace(base.topology.costs, phase_us=base.topology.costs.phase_us + 1)
    others = [
        stated(gpus(2), allow=EXECUTABLE), stated(gpus(2, slow=1)), stated(gpus(2, per_host=1)),
        stated(replace(base.topology, costs=costs)), stated(gpus(2), objective="inference"),
        stated(gpus(2), constraints={"tables": {"t0": {"ranks": [0]}}}),
        stated(gpus(2), constraints={"reserve_bytes": 1}),
        with_overlap(base, {"update": 3}), make_problem(specs, stats, gpus(2), batch_size=255,
                                                        allow=EVERYTHING),
        make_problem(specs, None, gpus(2), batch_size=256, allow=EVERYTHING),
        make_problem([replace(specs[0], optimizer="sgd"), *specs[1:]], stats, gpus(2),
                     batch_size=256, allow=EVERYTHING),
    ]
    assert digest(base) == digest(stated(gpus(2)))
    assert len({digest(p) for p in (base, *others)}) == 1 + len(others)


def test_the_bound_of_another_problem_is_not_taken():
    problem = stated(gpus(2))
    plan = replace(plan_problem(problem), notes={PROBLEM: "of another one"})
    forged = replace(plan, lower_bound_us=plan.step_us)
    found = proved(forged, problem, max_boxes=1)
    assert 0 < found.lower_bound_us < plan.step_us
    kept = proved(replace(forged, notes={PROBLEM: digest(problem)}), problem, max_boxes=1)
    assert kept.lower_bound_us == plan.step_us


def test_explain_says_why_there_is_no_bound(tmp_path, capsys):
    specs, stats = tables_and_stats(4, 7, max_rows=3000)
    stats.save(tmp_path / "stats.npz")
    plan = plan_problem(make_problem(specs, stats, topology_preset("h100-8"), batch_size=256))
    parser = argparse.ArgumentParser()
    configure_explain(parser)

    def told(plan: Plan, *words: str) -> str:
        plan.save(tmp_path / "plan.json")
        run_explain(parser.parse_args([
            str(tmp_path / "plan.json"), "--stats", str(tmp_path / "stats.npz"), *words]))
        return capsys.readouterr().out

    assert "not certified" not in told(plan) and "no plan of this space is faster" in told(plan)
    t = plan.tables[0]
    copies = TablePlan(t.table, (Piece(0, t.table.dim, (
        Tier(0, t.table.num_rows, "replicated", (0, 2)),)),))
    edited = replace(plan, tables=(copies, *plan.tables[1:]))
    assert "not certified: table 't0' is replicated on ranks [0, 2] alone" in told(edited)
    value = json.loads(told(edited, "--json"))
    assert value["gap"] is None and "[0, 2] alone" in value["not_certified"]
    # Another batch size: the bound is made anew.
    value = json.loads(told(plan, "--json", "--batch-size", "512"))
    assert value["gap"] >= 0 and value["lower_bound_us"] > plan.lower_bound_us


# ---- no plan is below the bound ------------------------------------------------------------------


@st.composite
def held_problems(draw):
    """Small problems with pins, constraints, unequal machines, host memory and overlaps."""
    world = draw(st.integers(2, 5))
    specs, stats = tables_and_stats(draw(st.integers(1, 4)), draw(st.integers(0, 99)),
                                    in_order=draw(st.booleans()), max_rows=2000)
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    tables = {}
    for t in specs:
        kind = draw(st.sampled_from(["free", "ranks", "placements", "modes", "memories", "tiers",
                                     "pinned", "unreplicated"]))
        size = int(rng.integers(1, world + 1))
        ranks = tuple(sorted(int(r) for r in rng.permutation(world)[:size]))
        start = int(rng.integers(0, max(1, t.num_rows - 1)))
        stop = int(rng.integers(start + 1, t.num_rows + 1))
        tier = random_tier(start, stop, str(rng.choice(KINDS)), world, rng)
        if tier.placement == "replicated" and rng.random() < 0.5:
            tier = replace(tier, ranks=ranks)
        held = {"ranks": {"ranks": ranks}, "placements": {"placements": frozenset(
                    rng.choice(["replicated", "striped", "owned"], 2).tolist())},
                "modes": {"modes": frozenset({str(rng.choice(["pull", "push"]))})},
                "memories": {"memories": frozenset({str(rng.choice(["device", "host"]))})},
                "tiers": {"tiers": (replace(tier, start=0, stop=t.num_rows),)},
                "pinned": {"pinned": (tier,)}, "unreplicated": {"unreplicated": ((start, stop),)}}
        if kind != "free":
            tables[t.name] = TableConstraint(**held[kind])
    topology = draw(st.sampled_from([
        gpus(world), host(world), gpus(world, slow=1, per_host=2), gpus(world, per_host=2),
        with_host_memory(gpus(world, per_host=3))]))
    training = draw(st.booleans())
    try:
        problem = make_problem(
            specs, stats, topology, batch_size=draw(st.integers(1, 600)),
            objective="training" if training else "inference", constraints=Constraints(tables),
            allow=draw(st.sampled_from([EXECUTABLE, EVERYTHING, ACROSS_HOSTS, None])))
    except InvalidInputError:
        assume(False)
    phases = ["forward", "backward", "update"] if training else ["forward"]
    each = st.lists(st.floats(0, 60), min_size=world, max_size=world)
    return with_overlap(problem, draw(st.dictionaries(st.sampled_from(phases), each, max_size=2)))


def placements(problem, rng, count):
    """Random plans that keep the constraints."""
    for _ in range(count):
        plan = random_plan(problem, rng, KINDS, 2 if "columns" in problem.allow else 1)
        entries = []
        for t, entry in zip(problem.tables, plan.tables, strict=True):
            held = problem.constraints.tables.get(t.spec.name)
            pieces = entry.pieces if held is None or held.tiers is None else (
                Piece(0, t.spec.dim, held.tiers),)
            pieces = impose(held, pieces)
            several = any(len(p.tiers) > 1 for p in pieces)
            head = t.head_ids if several and not t.ids_are_positions else t.head_ids[:0]
            entries.append(TablePlan(t.spec, pieces, head))
        plan = replace(plan, tables=tuple(entries))
        if not violations(plan, problem.constraints):
            yield plan


@settings(max_examples=60, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(held_problems(), st.integers(0, 1000))
def test_no_placement_that_the_bound_covers_is_below_it(problem, seed):
    bound = space_bound(problem)
    for plan in placements(problem, np.random.default_rng(seed), 12):
        found = evaluate(plan, problem)
        if found.fits and not outside(plan, problem):
            assert found.step_us >= bound * (1 - 1e-9), plan
    try:
        plan = plan_problem(problem, time_budget_s=0.1)
    except PlanInfeasibleError:
        return
    if REASON not in plan.notes:
        assert bound <= plan.step_us * (1 + 1e-9)
        assert "above the plan's step" not in plan.notes.get(REASON, "")


def test_hosts_beside_unequal_dense_compute_are_told_apart():
    """With more different overlaps than the relaxation tells apart, hosts are not interchangeable:
    the one with the largest piece is any of them."""
    problem = with_overlap(stated(gpus(6, per_host=1)), {"forward": [0, 9, 18, 27, 36, 200]})
    plan = plan_problem(problem)
    bound = proved(plan, problem, max_boxes=40).lower_bound_us
    rng = np.random.default_rng(0)
    steps = [evaluate(p, problem).step_us for p in placements(problem, rng, 60)]
    assert 0 < bound <= min(plan.step_us, *steps) * (1 + 1e-9)
