"""Bounds are valid or not certified: pins, replica subsets, host memory, overlaps."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from search_cases import (
    KINDS,
    counted,
    examples,
    gpus,
    host,
    racked,
    random_plan,
    shared,
    space_bound,
    tables_and_stats,
    with_host_memory,
)

from oper.errors import PlanInfeasibleError
from oper.messages import MessageBits
from oper.plan import Piece, Plan, Tier
from oper.search import make_problem
from oper.search.certificate.carried import not_certified, problem_digest, with_bound
from oper.search.cost.model import evaluate
from oper.search.cost.space import outside_space
from oper.search.explain.summary import as_json, summary
from oper.search.peers.baselines import peers
from oper.search.peers.markov import markov_chain
from oper.search.planner import plan_problem, tighten_bound
from oper.search.problem.constraints import violations
from oper.search.problem.pins import impose
from oper.search.problem.presets import topology_preset
from oper.search.problem.space import ACROSS_HOSTS, EVERYTHING, EXECUTABLE
from oper.search.problem.statement import Problem, with_overlap
from oper.search.rounding.placing import table_plan
from oper.stats import AccessStats
from oper.tables import TableSpec
from oper.topology import Costs, Domain, Topology
from tests.support import run_command

QUICK = settings(max_examples=examples(40), deadline=None, phases=[Phase.explicit, Phase.generate],
                 suppress_health_check=[HealthCheck.too_slow])
# A Markov chain takes longer than all others together: here it is a short one.
OTHERS = {**peers(), "flexflow-markov-chain": partial(markov_chain, num_proposals=100)}


def test_replicas_pinned_on_some_ranks_are_in_the_bound() -> None:
    rng, rows = np.random.default_rng(0), 20_000
    specs = [TableSpec("a", rows, 64), TableSpec("b", rows, 64), TableSpec("c", 1000, 8)]
    stats = AccessStats(200_000, {s.name: counted(s.num_rows, 0.1, rng, length=20)
                                  for s in specs}, "generated", True)

    def pinned(ranks: list[int]) -> dict[str, object]:
        return {"pinned": [{"rows": [0, rows], "place": "replicated", "ranks": ranks}]}

    problem = make_problem(
        specs, stats, gpus(4, per_host=2, memory_bytes=1.15 * rows * 256), objective="inference",
        batch_size=1024,
        constraints={"tables": {"a": pinned([0, 2]), "b": pinned([1, 3]), "c": {"ranks": [0]}}})
    plan = plan_problem(problem)
    assert not not_certified(plan, problem)
    assert 0.99 * plan.step_us <= space_bound(problem) <= plan.step_us * (1 + 1e-9)


def test_a_bound_above_the_step_is_not_certified() -> None:
    specs, stats = tables_and_stats(4, 3)
    problem = make_problem(specs, stats, gpus(4), batch_size=256)
    plan = plan_problem(problem)
    wrong = with_bound(replace(plan, lower_bound_us=0.0), problem, plan.step_us * 1.01)
    assert np.isnan(wrong.gap) and "report this" in not_certified(wrong, problem)
    assert "not certified" in summary(wrong, problem)
    assert as_json(wrong, problem)["gap"] is None


@pytest.mark.filterwarnings("ignore:no access statistics")
def test_a_bound_applies_to_one_problem() -> None:
    specs, stats = tables_and_stats(4, 3)
    problem = make_problem(specs, stats, gpus(4), batch_size=256)
    plan = plan_problem(problem)
    assert not not_certified(plan, problem)
    others = [make_problem(specs, stats, gpus(4), batch_size=257),
              make_problem(specs, stats, gpus(4, memory_bytes=70e9), batch_size=256),
              make_problem(specs, stats, gpus(4), batch_size=256, allow=EVERYTHING),
              make_problem(specs, stats, gpus(4), batch_size=256,
                           constraints={"tables": {"t0": {"ranks": [1]}}}),
              make_problem(specs, None, gpus(4), batch_size=256),
              with_overlap(problem, {"update": 3.0}),
              *(replace(problem, message_bits=MessageBits.parse(x))
                for x in [(16, 16), (16, 8), {"t0": 16}, {"t1": 16}]),
              *(make_problem(specs, stats, t, batch_size=256) for t in (
                  shared(gpus(4)), *(racked(gpus(4, per_host=1), *x) for x in [(1, 1), (1, 2)])))]
    assert len({problem_digest(x) for x in [problem, *others]}) == len(others) + 1
    for other in others:
        assert "another problem" in not_certified(plan, other)
    # A bound of another problem is not used as a start.
    forged = replace(plan, lower_bound_us=plan.step_us)
    better = tighten_bound(forged, others[1], max_work=280)
    assert better.lower_bound_us < plan.step_us * (1 - 1e-9) or (
        space_bound(others[1]) >= plan.step_us * (1 - 1e-6))


@pytest.mark.parametrize(("tier", "columns", "word"), [
    (Tier(0, 0, "replicated", (0, 2, 3)), 64, "replicated on ranks"),
    (Tier(0, 0, "owned", (1,), mode="push", memory="host"), 64, "host memory"),
    (Tier(0, 0, "owned", (1,), mode="push"), 4, "pushes columns"),
])
def test_what_lies_outside_of_the_space_is_not_certified(tier: Tier, columns: int, word: str
                                                        ) -> None:
    specs, stats = tables_and_stats(3, 5)
    specs = [replace(s, dim=64) for s in specs]
    problem = make_problem(specs, stats, with_host_memory(gpus(4, per_host=2)), batch_size=256,
                           allow=EVERYTHING | {"per_host"})
    plan = plan_problem(problem, time_budget_s=1.0)
    entry = plan.tables[0]
    whole = replace(tier, stop=entry.table.num_rows)
    pieces = (Piece(0, columns, (whole,)), *(
        [Piece(columns, 64, (whole,))] if columns < 64 else []))
    edited = replace(plan, tables=(replace(entry, pieces=pieces), *plan.tables[1:]))
    edited = replace(edited, step_us=evaluate(edited, problem).step_us, lower_bound_us=0.0)
    assert word in outside_space(edited, problem)
    edited = with_bound(edited, problem, plan.lower_bound_us)
    assert "outside the space" in not_certified(edited, problem) and edited.lower_bound_us == 0


def test_column_pieces_beside_pinned_rows_need_a_hotness_order() -> None:
    specs, stats = tables_and_stats(2, 5, in_order=False)
    specs = [replace(s, dim=64) for s in specs]
    pinned = {"t0": {"pinned": [{"rows": [0, 1], "place": "owned", "ranks": [1]}]}}
    problem = make_problem(specs, stats, gpus(2), batch_size=64, allow=EVERYTHING,
                           constraints={"tables": pinned})
    rest = Tier(1, specs[0].num_rows, "striped", (0, 1))
    for tiers, word in (((Tier(0, specs[0].num_rows, "owned", (1,)),), ""),
                        ((Tier(0, 1, "owned", (1,)), rest), "no hotness order")):
        plan = plan_problem(problem, time_budget_s=1.0)
        entry = replace(plan.tables[0], pieces=(Piece(0, 32, tiers), Piece(32, 64, tiers)),
                        head_ids=np.zeros(0, np.int64))
        found = outside_space(replace(plan, tables=(entry, *plan.tables[1:])), problem)
        assert word in found and bool(word) == bool(found)


def test_hosts_are_alike_only_with_equal_dense_compute_beside_them() -> None:
    """With more overlaps than are distinguished, or pinned loads, no host is distinguished."""
    for seed in range(3):
        specs, stats = tables_and_stats(4, seed, lengths=(20, 50))
        problem = make_problem(specs, stats, gpus(8, per_host=2), batch_size=4096,
                               allow=EVERYTHING)
        alike = plan_problem(problem, time_budget_s=1.0)
        hidden = [0.0, 0.0, *(alike.step_us * (1 + 0.1 * n) for n in range(6))]
        stated = with_overlap(problem, {"forward": hidden, "update": hidden})
        bound = space_bound(stated, max_work=1400)
        rng = np.random.default_rng(seed)
        steps = [plan_problem(stated, time_budget_s=1.0).step_us] + [
            evaluate(random_plan(stated, rng, KINDS), stated).step_us for _ in range(20)]
        assert bound <= min(steps) * (1 + 1e-9)


def test_explain_states_why_a_plan_is_not_certified(tmp_path, capsys) -> None:
    specs, stats = tables_and_stats(4, 7, max_rows=3000)
    stats.save(tmp_path / "stats.npz")
    plan = plan_problem(make_problem(specs, stats, topology_preset("h100-8"), batch_size=256))

    def told(plan: Plan, *words: str) -> str:
        plan.save(tmp_path / "plan.json")
        run_command("explain", tmp_path / "plan.json", "--stats", tmp_path / "stats.npz", *words)
        return capsys.readouterr().out

    assert "not certified" not in told(plan)
    assert "verified: no plan of the searched space is faster" in told(plan)
    assert json.loads(told(plan, "--json"))["verified"] is True
    noted = {k: v for k, v in plan.notes["certificate"].items() if k != "parts"}
    assert "not certified: " in told(replace(plan, notes={**plan.notes, "certificate": noted}))
    t = plan.tables[0]
    copies = replace(t, pieces=(Piece(0, t.table.dim, (
        Tier(0, t.table.num_rows, "replicated", (0, 2)),)),))
    edited = replace(plan, tables=(copies, *plan.tables[1:]))
    assert "not certified: the plan lies outside the space" in told(edited)
    value = json.loads(told(edited, "--json"))
    assert value["gap"] is None and "replicated on ranks [0, 2]" in value["not_certified"]
    # Another batch size: the bound is recomputed.
    value = json.loads(told(plan, "--json", "--batch-size", "512"))
    assert value["gap"] >= 0 and value["lower_bound_us"] > plan.lower_bound_us


def near_and_far(world: int, domain_bytes: float) -> Topology:
    """One host with memory domains of two ranks each."""
    domains = tuple(Domain(tuple(range(r, min(r + 2, world))), 0, int(domain_bytes), 40.0, 120.0,
                           32 << 20, 2.0, 2.0) for r in range(0, world, 2))
    return Topology("near-and-far", domains, Costs(2.0, 0.1, 0.1, 0.1, 0.1))


@st.composite
def constrained(draw: st.DrawFn) -> Problem:
    """Small problems with constraints, pins anywhere, unequal ranks and links, overlaps."""
    world = draw(st.integers(2, 6))
    specs, stats = tables_and_stats(draw(st.integers(1, 5)), draw(st.integers(0, 999)),
                                    in_order=draw(st.booleans()), max_rows=2000)
    need = sum(s.num_bytes for s in specs) / world
    memory = draw(st.sampled_from([1.3, 3.0, 1000.0])) * need + 1e6
    topology = draw(st.sampled_from([
        gpus(world, memory_bytes=memory), host(world, memory * world),
        gpus(world, memory_bytes=memory, per_host=2),
        gpus(world, memory_bytes=2 * memory, slow=world // 2, per_host=2),
        near_and_far(world, 2 * memory),
        with_host_memory(gpus(world, memory_bytes=memory, per_host=3), 4 * memory)]))
    if draw(st.booleans()):
        domains = tuple(replace(d, cross_gbps=d.cross_gbps * draw(st.sampled_from([0.1, 1.0, 2.0])))
                        for d in topology.domains)
        topology = replace(topology, domains=domains)
    hosts = topology.num_hosts
    topology = replace(topology, hosts_share_links=draw(st.booleans()))
    if hosts > 1 and draw(st.booleans()):
        topology = racked(topology, *draw(st.sampled_from([(5.0, 5.0), (25.0, 8.0)])))
    if draw(st.booleans()):  # measured or random constants
        costs = {f.name: draw(st.sampled_from([0.0, 1.0, 10.0])) for f in fields(Costs)
                 if f.name not in ("phase_us", "warm_share")}
        costs["warm_share"] = draw(st.sampled_from([0.0, 0.8]))
        topology = replace(topology, costs=replace(topology.costs, **costs))
    ranks = st.lists(st.integers(0, world - 1), min_size=1, unique=True)
    tables: dict[str, object] = {}
    for s in specs:
        kind = draw(st.sampled_from(["free", "free", "ranks", "owned", "rows", "tiers", "copies"]))
        if kind == "ranks":
            tables[s.name] = {"ranks": draw(ranks)}
        elif kind == "owned":
            tables[s.name] = {"placements": ["owned"]}
        elif kind == "copies":
            tables[s.name] = {"replicate": [[0, max(1, s.num_rows // 2)]]}
        elif kind != "free":
            start = 0 if kind == "tiers" else draw(st.integers(0, s.num_rows - 1))
            stop = s.num_rows if kind == "tiers" else draw(st.integers(start + 1, s.num_rows))
            some = draw(ranks)
            place = "owned" if len(some) == 1 else draw(st.sampled_from(["striped", "replicated"]))
            tier: dict[str, object] = {"rows": [start, stop], "place": place, "ranks": some}
            if place == "striped" and stop - start < len(some):
                tier.update(place="owned", ranks=some[:1])
            if place != "replicated" and draw(st.booleans()):
                tier["mode"] = "push"
            if topology.host_memory_bytes and draw(st.booleans()):
                tier["memory"] = "host"
            tables[s.name] = {"tiers" if kind == "tiers" else "pinned": [tier]}
    allow = draw(st.sampled_from([None, EXECUTABLE, EVERYTHING, ACROSS_HOSTS]))
    constraints: dict[str, object] = {
        "tables": tables, "reserve_bytes": draw(st.sampled_from([0, 100_000]))}
    group = draw(st.lists(st.sampled_from(specs), max_size=3, unique_by=lambda s: s.name))
    if len(group) > 1:
        label = draw(st.sampled_from(["keep_together", "keep_apart"]))
        constraints[label] = [[s.name for s in group]]
    problem = make_problem(
        specs, stats, topology, batch_size=draw(st.integers(1, 2000)), allow=allow,
        objective=draw(st.sampled_from(["training", "inference"])), constraints=constraints)
    phases = ("resolve", "forward", "backward", "update") if problem.training else ("forward",)
    one = st.floats(0, 300)
    overlap = draw(st.dictionaries(st.sampled_from(phases), st.one_of(
        one, st.lists(one, min_size=world, max_size=world))))
    one_bits = st.sampled_from([(32, 32), (8, 8), (4, 4), (16, 16), (16, 8), (32, 8), (4, 32)])
    bits = MessageBits.parse(draw(st.one_of(
        one_bits, st.fixed_dictionaries({s.name: one_bits for s in specs}))))
    return replace(with_overlap(problem, overlap).in_need(), message_bits=bits)


def held_to(plan: Plan, problem: Problem) -> Plan:
    """The plan changed to satisfy pins and ranks of owners."""
    entries = []
    for t, entry in zip(problem.tables, plan.tables, strict=True):
        held, pieces = problem.held(t.spec.name), entry.pieces
        if held.tiers is not None:
            pieces = (Piece(0, t.spec.dim, held.tiers),)
        elif held.ranks is not None:
            pieces = tuple(replace(p, tiers=tuple(replace(
                x, placement="owned", ranks=held.ranks[:1], weights=()) for x in p.tiers))
                for p in pieces)
        entries.append(table_plan(t, impose(held, pieces)))
    return replace(plan, tables=tuple(entries))


def placed_steps(problem: Problem, seed: int) -> list[float]:
    """Steps (us) of those plans that fit, among random plans of the space and some peers' plans,
    changed to satisfy the constraints."""
    rng = np.random.default_rng(seed)
    kinds = tuple(k for k in KINDS if {k.partition("-")[0]} | (
        {k.partition("-")[2] or "pull"} - {"pull"}) <= problem.allow)
    in_host = ("striped", "owned") if problem.topology.host_memory_bytes else ()
    plans = [held_to(random_plan(problem, rng, kinds, 3 if "columns" in problem.allow else 1,
                                 in_host), problem) for _ in range(8)]
    found = [p(problem, seed % 97) for p in OTHERS.values()] if seed % 4 == 0 else []
    plans += [held_to(x, problem) for x in found if x is not None]
    return steps_in_space(plans, problem)


def steps_in_space(plans: list[Plan], problem: Problem) -> list[float]:
    """Steps (us) of the plans that fit, satisfy the constraints and lie in the space."""
    steps = []
    for plan in plans:
        price = evaluate(plan, problem)
        if price.fits and not violations(plan, problem.constraints) and not outside_space(
                plan, problem):
            steps.append(price.step_us)
    return steps


@QUICK
@given(constrained(), st.integers(0, 10**6))
def test_no_plan_of_the_space_is_below_the_uncapped_bound(problem: Problem, seed: int) -> None:
    """Neither random plans nor the planner's."""
    steps = placed_steps(problem, seed)
    with suppress(PlanInfeasibleError):
        steps += steps_in_space([plan_problem(problem, time_budget_s=0.3, seed=seed % 7)], problem)
    bound = space_bound(problem, max_work=420)
    assert min(steps, default=np.inf) >= bound * (1 - 1e-9)
    assert bound > 0 or not steps  # 0 says that no plan fits
