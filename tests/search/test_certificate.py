"""Bounds are valid or not certified: pins, replica subsets, host memory, overlaps."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from search_cases import (
    KINDS,
    counted,
    gpus,
    racked,
    random_plan,
    shared,
    space_bound,
    tables_and_stats,
    with_host_memory,
)

from oper.messages import MessageBits
from oper.plan import Piece, Plan, Tier
from oper.search import make_problem
from oper.search.certificate.carried import not_certified, problem_digest, with_bound
from oper.search.cost.model import CostModel, evaluate
from oper.search.cost.space import hosts_are_alike, outside_space
from oper.search.explain.summary import as_json, summary
from oper.search.planner import plan_problem, tighten_bound
from oper.search.problem.presets import topology_preset
from oper.search.problem.space import EVERYTHING
from oper.search.problem.statement import with_overlap
from oper.stats import AccessStats
from oper.tables import TableSpec
from tests.support import run_command


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
        assert hosts_are_alike(CostModel(problem)) and not hosts_are_alike(CostModel(stated))
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
