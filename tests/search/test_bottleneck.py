"""Bottlenecks of a plan, savings by moves, and the comparison of two plans."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from search_cases import KINDS, gpus, host, problem, random_plan, tables_and_stats

from oper.errors import PlanError
from oper.plan import Plan, Tier, uniform_plan
from oper.search import evaluate, make_plan, make_problem, summary
from oper.search.explain.bottleneck import bottlenecks, describe
from oper.search.explain.diff import as_text, diff
from oper.search.explain.summary import as_json
from oper.search.problem.space import EVERYTHING
from tests.support import map_tiers, run_command


def placed(plan, found, tier):
    """`plan` with the bottleneck's tier placed as `tier`."""
    tables = []
    for entry in plan.tables:
        if entry.table.name == found.table:
            entry = replace(entry, pieces=tuple(replace(p, tiers=tuple(
                replace(tier, start=x.start, stop=x.stop)
                if (p.start, p.stop, x.start, x.stop) == (*found.columns, *found.rows) else x
                for x in p.tiers)) for p in entry.pieces))
        tables.append(entry)
    return replace(plan, tables=tuple(tables))


@pytest.mark.parametrize("seed", range(4))
def test_loads_and_savings_equal_the_cost_model(seed):
    stated = problem(6, seed, gpus(3), allow=EVERYTHING)
    plan = random_plan(stated, np.random.default_rng(seed), KINDS, max_pieces=2)
    found = evaluate(plan, stated)
    phase = max(found.phases, key=lambda p: p.time_us)
    every = bottlenecks(plan, stated, count=1000)
    assert [x.load_us for x in every] == sorted((x.load_us for x in every), reverse=True)
    assert bottlenecks(plan, stated) == every[:5]
    # Tiers add up to the rank's load, but for outputs, column sums and the tables' partial sums.
    most = phase.groups[:, phase.slowest_rank].max() * 1e6
    assert 0.3 * most < sum(x.load_us for x in every) <= most * 1.05
    saved = 0
    for x in every:
        best = found.step_us
        for one in _alternatives(stated, x):
            best = min(best, evaluate(placed(plan, x, one), stated).step_us)
        assert x.saves_us == pytest.approx(found.step_us - best, abs=1e-6)
        assert bool(x.move) == (x.saves_us > 1e-6)
        saved += x.saves_us > 0
    assert saved


def _alternatives(stated, found):
    """Every owner and mode, stripes over all ranks in both orders, replicas."""
    everybody = tuple(range(stated.machine.world_size))
    for mode in ("pull", "push"):
        for r in everybody:
            yield Tier(*found.rows, "owned", (r,), mode=mode)
        for ranks in (everybody, everybody[::-1]):
            yield Tier(*found.rows, "striped", ranks, mode=mode)
    yield Tier(*found.rows, "replicated", everybody)


def test_bottlenecks_of_a_bad_plan_suggest_moves():
    specs, stats = tables_and_stats(8, 3)
    stated = make_problem(specs, stats, gpus(4), batch_size=2048)
    plan = uniform_plan(specs, 4, "owned", batch_size=2048)
    plan = map_tiers(plan, lambda x: replace(x, ranks=(0,)))
    first = bottlenecks(plan, stated)[0]
    assert first.saves_us > 0.05 * evaluate(plan, stated).step_us
    text = summary(plan, stated)
    assert "bottleneck" in text and f"{first.saves_us:.1f} us as {first.move}" in text
    assert as_json(plan, stated)["bottlenecks"][0]["table"] == first.table


def test_no_move_is_suggested_for_pinned_tables():
    specs, stats = tables_and_stats(3, 3)
    held = {"tables": {s.name: {"tiers": [{"rows": [0, s.num_rows], "place": "owned",
                                           "ranks": [0]}]} for s in specs}}
    stated = make_problem(specs, stats, gpus(2), batch_size=2048, constraints=held)
    plan = make_plan(specs, stats, gpus(2), batch_size=2048, constraints=held)
    assert {x.move for x in bottlenecks(plan, stated)} == {""}
    assert "constraints: all satisfied (tables)" in summary(plan, stated)
    other = uniform_plan(specs, 2, "striped", batch_size=2048)
    assert "constraints: 3 violated" in summary(other, stated)
    assert len(as_json(other, stated)["broken_constraints"]) == 3


def test_diff_lists_moved_tables_and_costs():
    specs, stats = tables_and_stats(5, 3)
    stated = make_problem(specs, stats, host(2), batch_size=512)
    one = uniform_plan(specs, 2, "striped", batch_size=512)
    tier = one.tables[2].tiers[0]
    entry = replace(one.tables[2], pieces=(replace(one.tables[2].pieces[0], tiers=(
        replace(tier, placement="owned", ranks=(1,)),)),))
    two = replace(one, tables=(*one.tables[:2], entry, *one.tables[3:]))
    found = diff(one, two, stated)
    assert [x["table"] for x in found["tables"]] == ["t2"]
    assert found["before"]["step_us"] == evaluate(one, stated).step_us
    assert found["after"]["step_us"] == evaluate(two, stated).step_us
    text = as_text(found, ("one", "two"))
    assert "1 of 5 tables" in text and "- " in text and f"+ {specs[2].num_rows}:S@1" in text
    assert diff(one, one, stated)["tables"] == []
    with pytest.raises(PlanError):
        diff(one, uniform_plan(specs[:3], 2), stated)


def test_verb_compares_two_plan_files(tmp_path, capsys):
    specs, _ = tables_and_stats(3, 3)
    for kind, name in (("striped", "a.json"), ("owned", "b.json")):
        uniform_plan(specs, 2, kind, topology="this-host-2", batch_size=64).save(tmp_path / name)
    for more in ([], ["--json"]):
        with pytest.warns(UserWarning, match="statistics"):
            run_command("explain", tmp_path / "a.json", "--diff", tmp_path / "b.json", *more)
        out = capsys.readouterr().out
        tables = json.loads(out)["tables"] if more else []
        assert len(tables) == 3 if more else "3 of 3 tables are placed differently" in out
    assert isinstance(Plan.load(tmp_path / "a.json"), Plan)


def test_notation():
    assert [describe(t) for t in (
        Tier(0, 1, "owned", (3,)), Tier(0, 1, "striped", (0, 1)),
        Tier(0, 1, "replicated", (0, 1)), Tier(0, 1, "striped", (0, 1), mode="push"))] == [
            "S@3", "Sx2", "Bx2", "Px2"]
