"""Dense compute that overlaps with phases: only if declared, and the bound stays valid."""

from __future__ import annotations

import json

import numpy as np
import pytest
from search_cases import KINDS, gpus, host, random_plan, tables_and_stats

from oper.errors import InvalidInputError
from oper.plan import Plan
from oper.search import evaluate, make_plan, make_problem
from oper.search.explain.summary import summary
from oper.search.planner import plan_problem
from oper.search.problem.overlap import overlap_to_json, parse_overlap
from oper.search.problem.statement import with_overlap
from tests.support import run_command


def stated(topology, overlap=None, objective="training", num_tables=6, **more):
    specs, stats = tables_and_stats(num_tables, 4)
    problem = make_problem(specs, stats, topology, objective=objective, batch_size=256, **more)
    return with_overlap(problem, overlap)


def test_a_rank_is_delayed_by_what_is_longer_than_its_own_dense_compute():
    plan = random_plan(stated(gpus(3)), np.random.default_rng(0), KINDS)
    plain = evaluate(plan, stated(gpus(3)))
    hidden = {"forward": [3.0, 0.0, 50.0], "update": 4.0}
    found = evaluate(plan, stated(gpus(3), hidden))
    step = 0.0
    for before, after in zip(plain.phases, found.phases, strict=True):
        dense = np.broadcast_to(hidden.get(before.name, 0.0), 3)
        rank_us = before.groups.max(axis=0) * 1e6
        want = max(0.0, (rank_us - dense).max()) + before.fixed_us
        assert after.time_us == pytest.approx(want)
        assert (after.units == before.units).all()
        step += want
    assert found.step_us == pytest.approx(step) and found.step_us < plain.step_us
    # With unlimited dense compute only fixed costs remain.
    every = dict.fromkeys(("forward", "backward", "update"), 1e9)
    assert evaluate(plan, stated(gpus(3), every)).step_us == pytest.approx(
        sum(p.fixed_us for p in plain.phases))


def test_no_overlap_by_default():
    assert stated(host(2)).overlap == {} == stated(host(2), {"update": 0}).overlap
    specs, stats = tables_and_stats(6, 4)
    plan = make_plan(specs, stats, host(2), batch_size=256)
    assert "overlap_us" not in plan.notes and "dense" not in summary(plan, stated(host(2)))


def test_sorting_ahead_is_a_phase_of_its_own():
    plain, ahead = stated(host(1)), stated(host(1), {"resolve": 7.0})
    # Gradients of pushed rows are sorted after they arrive, which cannot run ahead.
    plan = random_plan(plain, np.random.default_rng(1), KINDS[:3])
    before, after = evaluate(plan, plain), evaluate(plan, ahead)
    assert [p.name for p in after.phases] == ["resolve", "forward", "backward", "update"]
    ids = sum(t.total[1] for t in plain.tables)
    assert after.phases[0].seconds.sum() == pytest.approx(ids * 5e-9)  # sort_ns of `host`
    assert after.step_us == pytest.approx(before.step_us - min(7.0, ids * 5e-3))
    # Without a cost per sorted id there is nothing to run ahead.
    assert len(evaluate(plan, stated(gpus(1), {"resolve": 7.0})).phases) == 3


@pytest.mark.parametrize("overlap", [
    {"update": 100.0}, {"update": [20.0, 200.0, 20.0, 20.0]}, {"backward": 60.0, "resolve": 5.0}])
def test_the_plan_stays_near_the_bound(overlap):
    for topology in (host(4), gpus(4)):
        plan = plan_problem(stated(topology, overlap, num_tables=30))
        assert plan.gap <= 0.03, (topology.name, plan.gap)


@pytest.mark.parametrize(("value", "word"), [
    ([3], "overlap"), ({"lunch": 3}, "phase"), ({"update": -1}, "update"),
    ({"update": "4"}, "update"), ({"update": [1, 2, 3]}, "one number or 2"),
    ({"update": float("nan")}, "update"), ({"update": True}, "update"),
    ({"update": None}, "update"),
])
def test_what_makes_no_sense_is_named(value, word):
    with pytest.raises(InvalidInputError, match=word):
        stated(host(2), value)
    with pytest.raises(InvalidInputError, match="phase"):
        stated(host(2), {"update": 3}, "inference")


def test_json_round_trip():
    made = parse_overlap({"update": 3, "forward": [1, 2]}, ("forward", "update"), 2)
    assert overlap_to_json(made) == {"update": 3.0, "forward": [1.0, 2.0]}
    assert parse_overlap(overlap_to_json(made), ("forward", "update"), 2) == made


def test_verbs_store_overlap_in_the_plan(tmp_path, capsys):
    _, stats = tables_and_stats(5, 2)
    stats.save(tmp_path / "stats.npz")
    out = tmp_path / "plan.json"
    words = (tmp_path / "stats.npz", "--topology", "h100-8", "-o", out)
    run_command("plan", *words)
    alone = Plan.load(out).step_us
    with pytest.raises(SystemExit):
        run_command("plan", *words, "--overlap", "update=fast")
    assert "PHASE=US" in capsys.readouterr().err
    run_command("plan", *words, "--overlap", "update=5", "--overlap", "backward=2")
    plan = Plan.load(out)
    assert plan.notes["overlap_us"] == {"update": 5.0, "backward": 2.0}
    assert plan.step_us < alone
    assert "overlapped us" in capsys.readouterr().out
    run_command("explain", out, "--stats", tmp_path / "stats.npz", "--json")
    value = json.loads(capsys.readouterr().out)
    assert value["step_us"] == pytest.approx(plan.step_us)
    assert [p["hidden_us"][0] for p in value["phases"]] == pytest.approx([0.0, 2.0, 5.0])
