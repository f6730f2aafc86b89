"""The checker of certificates: valid plans are certified, edited ones are not."""

from __future__ import annotations

import ast
import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from search_cases import gpus, tables_and_stats

import oper.search.certificate
from oper.plan import Plan, Tier
from oper.search import evaluate, make_problem, verify_plan
from oper.search.planner import plan_problem, tighten_bound
from oper.search.problem.space import EVERYTHING
from oper.search.problem.statement import Problem, with_overlap
from oper.stats import AccessStats
from oper.tables import TableSpec
from tests.support import run_command


@pytest.fixture(scope="module")
def case() -> tuple[Plan, Problem]:
    """A plan with tables pushed between hosts, whose proof has a tree with several levels."""
    specs, stats = tables_and_stats(4, 3, lengths=(20, 50), min_rows=5000)
    specs = [replace(s, dim=64) for s in specs]
    problem = make_problem(specs, stats, gpus(8, per_host=2), batch_size=4096, allow=EVERYTHING)
    plan = tighten_bound(plan_problem(problem, target_gap=0.05), problem, max_work=4200)
    assert json.dumps(plan.notes["certificate"]).count('"parts"') > 2
    return plan, problem


def test_a_plan_as_made_is_certified(case: tuple[Plan, Problem], tmp_path: Path) -> None:
    plan, problem = case
    found = verify_plan(plan, problem)
    assert found.certified and not found.why and found.num_leaves > 2
    assert found.lower_bound_us >= plan.lower_bound_us * (1 - 1e-6)
    assert found.gap <= plan.gap + 1e-6
    plan.save(tmp_path / "plan.json")
    assert verify_plan(Plan.load(tmp_path / "plan.json"), problem) == found


def _leaf(tree: dict[str, Any]) -> dict[str, Any]:
    while "parts" in tree:
        tree = tree["parts"][0]
    return tree


def _higher_price(proof: dict[str, Any]) -> None:
    prices = _leaf(proof["parts"][-1]["tree"])["prices"]
    prices.update({k: v * 0.5 for k, v in prices.items()})


def _no_half(proof: dict[str, Any]) -> None:
    next(p for p in proof["parts"] if "parts" in p["tree"])["tree"]["parts"].pop()


def _name_classes(proof: dict[str, Any], number: int) -> None:
    part = proof["parts"][0]
    part["rows"] = [[*x[:-1], number] if x[0] == "load" else x for x in part["rows"]]


def _negative(proof: dict[str, Any]) -> None:
    prices = _leaf(proof["parts"][0]["tree"])["prices"]
    prices[next(iter(prices))] = -1.0


@pytest.mark.parametrize(("change", "word"), [
    (_higher_price, "its prices prove"),
    (_no_half, "cannot be read"),
    (_negative, "a price of the proof is -1"),
    (lambda p: p.update(parts=p["parts"][:1]), "no part of the proof bounds"),
    (lambda p: p.update(parts=[]), "no part of the proof bounds"),
    (lambda p: _name_classes(p, 99), "cannot be read"),
    (lambda p: _name_classes(p, -1), "negative class index: -1"),
    (lambda p: p["parts"][0].update(plans=["all"]), "not some of"),
    (lambda p: p["parts"][0]["tree"].update(prices={"999": 1.0}, parts=None), "cannot be read"),
    (lambda p: p.update(problem="0" * 64), "another problem"),
    (lambda p: p.pop("parts"), "no proof"),
    (lambda p: _name_classes(p, float("inf")), "cannot be read"),
    (lambda p: p.update(cutoff_us=float("nan")), "not a number"),
    (lambda p: p.update(cutoff_us="soon"), "cannot be read"),
])
def test_a_proof_with_a_hole_is_none(case: tuple[Plan, Problem],
                                     change: Callable[[dict[str, Any]], None], word: str) -> None:
    plan, problem = case
    proof = copy.deepcopy(plan.notes["certificate"])
    change(proof)
    found = verify_plan(replace(plan, notes={**plan.notes, "certificate": proof}), problem)
    assert not found.certified and np.isnan(found.gap)
    assert word in found.why


def test_half_a_tree_bounds_less(case: tuple[Plan, Problem]) -> None:
    """The checker uses the value of a branching: if it is changed, the bound is another."""
    plan, problem = case
    proof = copy.deepcopy(plan.notes["certificate"])
    trees = [p["tree"] for p in proof["parts"] if "load" in p["tree"]]
    assert trees
    for tree in trees:
        tree["at_us"] /= 50.0
    found = verify_plan(replace(plan, notes={**plan.notes, "certificate": proof}), problem)
    assert not found.certified and "its prices prove" in found.why


def test_an_edited_plan_is_not_certified(case: tuple[Plan, Problem]) -> None:
    plan, problem = case
    assert plan.gap > 2e-4
    between = (plan.step_us + plan.lower_bound_us) / 2
    found = verify_plan(replace(plan, step_us=between), problem)
    assert not found.certified and "its placement takes" in found.why
    higher = replace(plan, lower_bound_us=plan.step_us * 0.9999)
    assert "its prices prove" in verify_plan(higher, problem).why
    entry = plan.tables[0]
    rows = entry.table.num_rows
    moved = tuple(replace(p, tiers=(Tier(0, rows, "owned", (1,)),)) for p in entry.pieces)
    edited = replace(plan, tables=(replace(entry, pieces=moved), *plan.tables[1:]))
    assert "its placement takes" in verify_plan(edited, problem).why
    # An edited plan with its own step is another plan: the bound holds for it, too.
    edited = replace(edited, step_us=evaluate(edited, problem).step_us)
    found = verify_plan(edited, problem)
    assert found.certified and found.gap > plan.gap
    other = with_overlap(problem, {"update": 3.0})
    assert "another problem" in verify_plan(plan, other).why


def test_the_checker_shares_nothing_with_the_search() -> None:
    folder = Path(oper.search.certificate.__file__).parent
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("oper.search"):
                package = node.module.split(".")[2]
                assert package in ("problem", "cost", "certificate"), f"{path.name}: {node.module}"


def test_verb_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    specs = [TableSpec(f"t{k}", 2000, 64, (f"f{k}",)) for k in range(3)]
    _, stats = tables_and_stats(3, 1, min_rows=2000, max_rows=2001)
    stats = AccessStats(stats.num_samples, {s.name: replace(x, num_rows=2000) for s, x in zip(
        specs, stats.tables.values(), strict=True)}, "generated", True)
    stats.save(tmp_path / "stats.npz")
    from oper.search.problem.presets import topology_preset

    problem = make_problem(specs, stats, topology_preset("h100-2x8"), batch_size=512)
    plan = plan_problem(problem)
    plan.save(tmp_path / "plan.json")

    def told(*words: str) -> int:
        return run_command("verify", tmp_path / "plan.json", "--stats", tmp_path / "stats.npz",
                           *words)

    assert told() == 0
    text = capsys.readouterr().out
    assert "verified" in text and "gap" in text
    assert told("--json") == 0
    value = json.loads(capsys.readouterr().out)
    assert value["certified"] and value["bound_us"] >= plan.lower_bound_us * (1 - 1e-6)
    assert told("--batch-size", "513") == 1
    assert "not certified: the bound is for another problem" in capsys.readouterr().out
