"""Rows in host memory: their cost, when plans use it, and the bound of such plans."""

from __future__ import annotations

import json

import numpy as np
import pytest
from search_cases import gpus, problem, tables_and_stats, with_host_memory

from oper.errors import PlanInfeasibleError
from oper.plan import Piece, Plan, TablePlan, Tier
from oper.search import EXECUTABLE, evaluate, make_plan, make_problem, summary
from oper.search.planner import plan_problem
from oper.search.problem.machine import Term
from oper.search.problem.statement import IDS, ROWS, TOUCHED, TOUCHED_ALL
from tests.support import run_command

WITH_HOST = EXECUTABLE | {"host"}


def memories(plan):
    return {x.memory for t in plan.tables for p in t.pieces for x in p.tiers}


def scarce(objective, share, *, hosts=1, host_share=10.0, num_tables=8, seed=5):
    """Tables, statistics and four ranks with room for `share` of the rows."""
    specs, stats = tables_and_stats(num_tables, seed, max_rows=50_000)
    need = sum(s.num_bytes if objective == "training" else s.num_rows * s.row_bytes for s in specs)
    buffers = 1.5e6 if objective == "training" else 0.0
    topology = gpus(4, per_host=4 // hosts, memory_bytes=need * share / 4 + buffers)
    return specs, stats, with_host_memory(topology, need * host_share / hosts)


def test_ranks_read_the_memory_of_their_host_and_owners_send_to_others():
    stated = problem(1, 3, with_host_memory(gpus(6, per_host=3)), allow=WITH_HOST)
    t = stated.tables[0]
    tier = Tier(0, t.spec.num_rows, "owned", (1,), memory="host")
    plan = Plan(6, (TablePlan(t.spec, (Piece(0, t.spec.dim, (tier,)),)),))
    found = evaluate(plan, stated)
    _, forward, _, update = found.phases
    row, distinct = t.spec.row_bytes, t.total[TOUCHED]
    mine = np.array([1, 1, 1, 0, 0, 0]) * t.total[IDS] * row
    mine[1] += 3 * distinct * row  # for the three ranks of the other host
    assert forward.units[Term.HOST_MEMORY] == pytest.approx(mine)
    assert forward.units[Term.CROSS_IN] == pytest.approx([0, 0, 0, *[distinct * row] * 3])
    assert not forward.units[Term.LINK_IN].any()  # gradients take the links, rows do not
    state = t.spec.num_bytes / t.spec.num_rows - row
    assert update.units[Term.HOST_MEMORY] == pytest.approx(
        [0, t.total[TOUCHED_ALL] * 2 * (row + state), 0, 0, 0, 0], rel=1e-6)
    assert found.host_bytes == pytest.approx([t.total[ROWS] * (row + state), 0], rel=1e-6)
    in_device = evaluate(plan, stated).held_bytes
    assert in_device == pytest.approx(np.full(6, in_device[0]))  # buffers alone


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("objective", ["training", "inference"])
def test_rows_that_do_not_fit_go_to_host_memory_and_the_coldest_do(objective, hosts):
    specs, stats, topology = scarce(objective, 0.4, hosts=hosts)
    given = {"objective": objective, "batch_size": 256}
    with pytest.raises(PlanInfeasibleError, match=r"'host' in `allow`"):
        make_plan(specs, stats, topology, allow=EXECUTABLE, **given)
    stated = make_problem(specs, stats, topology, allow=WITH_HOST, **given)
    plan = plan_problem(stated, target_gap=0.0)
    found = evaluate(plan, stated)
    assert found.fits and memories(plan) == {"device", "host"}
    assert 0 <= plan.gap <= 0.02
    held = {m: np.zeros(4) for m in ("device", "host")}
    for t, entry in zip(stated.tables, plan.tables, strict=True):
        for x in entry.tiers:
            held[x.memory] += t.features(x.start, x.stop, True)
    assert held["host"][ROWS] >= 0.3 * (held["host"] + held["device"])[ROWS]
    hotness = {m: v[IDS] / v[ROWS] for m, v in held.items()}
    assert hotness["host"] < 0.5 * hotness["device"]


def test_by_default_host_memory_is_the_last_resort():
    specs, stats, topology = scarce("inference", 0.5)
    given = {"objective": "inference", "batch_size": 256}
    tight = make_plan(specs, stats, topology, **given)
    assert memories(tight) == {"device", "host"} and "host" in tight.notes["allow"]
    roomy = make_plan(specs, stats, with_host_memory(gpus(4)), **given)
    assert memories(roomy) == {"device"} and "host" not in roomy.notes["allow"]
    held = {"tables": {"*": {"memories": ["device"]}}}
    with pytest.raises(PlanInfeasibleError):
        make_plan(specs, stats, topology, constraints=held, **given)
    only = make_plan(specs, stats, topology, allow=WITH_HOST, **given,
                     constraints={"tables": {"t0": {"memories": ["host"]}}})
    assert {x.memory for x in only.table("t0").tiers} == {"host"}


def test_host_memory_that_is_too_small_is_named():
    specs, stats, topology = scarce("inference", 0.3, host_share=0.1)
    with pytest.raises(PlanInfeasibleError, match="per domain and per host times"):
        make_plan(specs, stats, topology, objective="inference", batch_size=256)
    specs, stats, topology = scarce("inference", 0.3, host_share=0.75)
    stated = make_problem(specs, stats, topology, objective="inference", batch_size=256)
    plan = plan_problem(stated)
    found = evaluate(plan, stated.with_fallback())
    assert found.fits and found.host_bytes[0] > 0.9 * found.host_capacity_bytes[0]


def test_explain_names_host_memory(tmp_path, capsys):
    specs, stats, topology = scarce("training", 0.4)
    plan = make_plan(specs, stats, topology, batch_size=256, allow=WITH_HOST)
    text = summary(plan, make_problem(specs, stats, topology, batch_size=256, allow=WITH_HOST))
    assert "in host memory" in text and "host 0" in text and "host_memory us" in text


def test_verbs_plan_and_explain_with_host_memory(tmp_path, capsys):
    _, stats = tables_and_stats(5, 2)
    stats.save(tmp_path / "stats.npz")
    machine = tmp_path / "small.toml"
    need = sum(t.num_rows for t in stats.tables.values()) * 256
    machine.write_text(f'name = "small"\nhost_memory_bytes = "1GB"\nhost_gbps = 20\n[[domain]]\n'
                       f'copies = 2\nmemory_bytes = {int(0.2 * need)}\nread_gbps = 1000\n'
                       'link_gbps = 200\n')
    words = [tmp_path / "stats.npz", "--topology", machine, "--objective", "inference", "-o",
             tmp_path / "a.json"]

    def call(*words):
        run_command(*words)
        return capsys.readouterr().out

    with pytest.raises(PlanInfeasibleError):
        call("plan", *words, "--allow", "replicated,striped,pull")
    call("plan", *words)
    first = Plan.load(tmp_path / "a.json")
    assert memories(first) == {"device", "host"}
    explain = (tmp_path / "a.json", "--topology", machine, "--stats", tmp_path / "stats.npz")
    value = json.loads(call("explain", *explain, "--json"))
    assert value["lower_bound_us"] == pytest.approx(first.lower_bound_us)
    assert value["host_bytes"][0] > 0 and value["fits"]
    what = json.loads(call("explain", *explain, "--json", "--what-if", "host-link=x2"))["what_if"]
    assert what["after"]["planned_step_us"] < what["before"]["planned_step_us"]
    call("plan", *words[:-1], tmp_path / "b.json", "--seed", "5")
    found = json.loads(call("explain", *explain, "--diff", tmp_path / "b.json", "--json"))
    assert "memory" in json.dumps(found)
