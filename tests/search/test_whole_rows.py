"""Tables whose optimizer needs whole rows are never split by columns; other tables may be."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from oper.plan import Plan
from oper.search import evaluate, verify_plan
from oper.search.peers.baselines import peers
from oper.search.planner import plan_problem
from oper.search.problem.space import EVERYTHING
from oper.search.problem.statement import Problem, make_problem
from oper.search.rounding import search
from oper.tables import OPTIMIZERS
from tests.search.search_cases import gpus, tables_and_stats

PUSHED = frozenset({"owned", "push", "columns"})  # where columns are the only way to cut a table


def stated(optimizers: tuple[str, ...], allow: frozenset[str] = PUSHED,
           cross_gbps: float = 2.5) -> Problem:
    """Two tables on four ranks, the optimizers in turn; links between hosts bind by far, or not."""
    specs, stats = tables_and_stats(2, 1, min_rows=5000)
    specs = [replace(t, dim=128, optimizer=optimizers[k % len(optimizers)])
             for k, t in enumerate(specs)]
    machine = gpus(4, per_host=2)
    machine = replace(machine, domains=tuple(replace(d, cross_gbps=cross_gbps)
                                             for d in machine.domains))
    return make_problem(specs, stats, machine, batch_size=4096, allow=allow)


@cache
def planned(*optimizers: str, allow: frozenset[str] = PUSHED) -> Plan:
    return plan_problem(stated(optimizers, allow), target_gap=0.03)


def split(plan: Plan) -> set[str]:
    return {t.table.optimizer for t in plan.tables if len(t.pieces) > 1}


@pytest.mark.parametrize("name", ["lars_sgd", "lamb", "partial_rowwise_lamb"])
def test_the_planner_splits_only_what_may_be_split(name: str) -> None:
    assert split(planned("adam")) == {"adam"}
    assert split(planned("adam", name)) == {"adam"}
    assert not split(planned(name))
    assert "columns" not in stated((name,)).allow


def test_the_bound_is_that_of_the_smaller_space() -> None:
    """LAMB has Adam's state, so its tables equal Adam's tables without column splits."""
    assert OPTIMIZERS["lamb"].state_bytes(64) == OPTIMIZERS["adam"].state_bytes(64) == 512
    free, mixed, whole = planned("adam"), planned("lamb", "adam"), planned("lamb")
    unsplit = planned("adam", allow=PUSHED - {"columns"})
    assert whole.lower_bound_us == pytest.approx(unsplit.lower_bound_us)
    assert whole.step_us == pytest.approx(unsplit.step_us)
    assert free.step_us < mixed.lower_bound_us  # attainable only with column splits
    for plan in (free, mixed, whole):
        assert plan.lower_bound_us <= plan.step_us <= 1.05 * plan.lower_bound_us


@pytest.mark.parametrize("optimizers", [("lamb",), ("lamb", "adam")])
def test_rows_that_may_not_be_striped_are_divided_by_ranges(
        optimizers: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """If own time binds, one owner of a table is slower than several owners of its rows, although
    these send more."""
    problem = stated(optimizers, cross_gbps=gpus(4, per_host=2).domains[0].cross_gbps)
    plan = plan_problem(problem, target_gap=0.03)
    tables = [t for t in plan.tables if t.table.optimizer == "lamb"]
    assert max(len({x.ranks for x in t.pieces[0].tiers}) for t in tables) > 1
    assert {(x.placement, x.mode, len(x.ranks)) for t in plan.tables for p in t.pieces
            for x in p.tiers} == {("owned", "push", 1)}
    assert plan.lower_bound_us <= plan.step_us <= 1.05 * plan.lower_bound_us
    assert plan.step_us == pytest.approx(evaluate(plan, problem).step_us)
    assert verify_plan(plan, problem).certified
    monkeypatch.setattr(search, "divide_rows", lambda _, placements, over: list(placements))
    assert plan.step_us < 0.93 * plan_problem(problem, target_gap=0.03).step_us


def test_ranges_keep_to_the_ranks_that_may_own() -> None:
    held = {"tables": {"t0": {"ranks": [1, 3]}}}
    problem = stated(("lamb",), cross_gbps=gpus(4, per_host=2).domains[0].cross_gbps)
    problem = make_problem([t.spec for t in problem.tables], tables_and_stats(
        2, 1, min_rows=5000)[1], problem.topology, batch_size=4096, allow=PUSHED, constraints=held)
    plan = plan_problem(problem, target_gap=0.03)
    assert {r for x in plan.table("t0").pieces[0].tiers for r in x.ranks} == {1, 3}


def test_peers_that_split_columns_leave_them_whole() -> None:
    found = set()
    for optimizers in (("lamb", "adam"), ("adam", "lamb")):  # one of the tables is the larger one
        for name in ("hugectr-split-and-place", "neuroshard-beam"):
            plan = peers()[name](stated(optimizers, EVERYTHING), 0)
            assert plan is not None
            found |= split(plan)
    assert found == {"adam"}
