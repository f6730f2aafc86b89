"""Summaries of plans, the command-line verbs, and the shipped topologies."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from search_cases import gpus, host, tables_and_stats

from oper.errors import (
    FileFormatError,
    InvalidInputError,
    PlanInfeasibleError,
    UsageError,
)
from oper.plan import Piece, Plan, TablePlan, Tier
from oper.search import evaluate, make_problem, summary, topology_preset
from oper.search.explain.summary import as_json
from oper.search.planner import plan_problem
from oper.search.problem.presets import preset_names
from oper.stats import AccessStats, TableStats
from oper.tables import TableSpec
from tests.support import run_command


def planned(topology, objective="training", num_tables=6):
    specs, stats = tables_and_stats(num_tables, 4)
    stated = make_problem(specs, stats, topology, objective=objective, batch_size=256)
    return plan_problem(stated), stated


def test_summary_prints_the_evaluation():
    plan, stated = planned(gpus(4))
    found = evaluate(plan, stated)
    text = summary(plan, stated)
    assert f"{found.step_us:.1f} us" in text and f"{plan.lower_bound_us:.1f} us" in text
    gap = float(re.search(r"gap +([-0-9.]+) %", text)[1])
    assert gap == pytest.approx(100 * plan.gap, abs=1e-3)
    for phase in found.phases:
        line = next(x for x in text.splitlines() if x.startswith(f"  {phase.name} "))
        assert f"{phase.time_us:.1f}" in line and f"rank {phase.slowest_rank}" in line
        assert phase.binding in line
    memory = text[text.index("\nmemory\n"):].splitlines()
    assert len([x for x in memory if x.endswith("%") and "GB" in x]) >= 4
    assert "replicas: " in text and "assumed constants" in text


def test_per_rank_terms_add_up_to_the_rank_total():
    plan, stated = planned(host(2))
    text = summary(plan, stated)
    part = text[text.index("forward, per rank"):].splitlines()
    assert part[1].split() == ["rank", "total", "us", "memory", "us", "compute", "us", "memory",
                               "bytes"]
    for line in part[2:4]:
        _, total, memory, compute = line.split()[:4]
        assert float(total) == pytest.approx(float(memory) + float(compute), abs=0.11)


def test_many_ranks_are_summarised():
    plan, stated = planned(gpus(32), "inference")
    text = summary(plan, stated)
    assert "most: " in text and "(16 more domains)" in text
    assert len(text.splitlines()) < 80


def test_json_holds_the_same_figures():
    plan, stated = planned(gpus(4))
    value = json.loads(json.dumps(as_json(plan, stated)))
    found = evaluate(plan, stated)
    assert value["step_us"] == found.step_us and value["gap"] == pytest.approx(plan.gap)
    assert sum(p["time_us"] for p in value["phases"]) == pytest.approx(value["step_us"])
    assert len(value["phases"][0]["rank_us"]) == 4


@pytest.fixture
def stats_file(tmp_path):
    _, stats = tables_and_stats(5, 2)
    stats.save(tmp_path / "stats.npz")
    return tmp_path / "stats.npz"


def test_verb_plan_writes_a_plan_and_prints_loads_bound_and_gap(stats_file, tmp_path, capsys):
    out = tmp_path / "plan.json"
    code = run_command("plan", stats_file, "--topology", "this-host", "--world-size", 3, "--dim",
                       16, "-o", out)
    assert code == 0
    text = capsys.readouterr().out
    assert "lower bound" in text and "gap" in text and "forward, per rank" in text
    plan = Plan.load(out)
    assert plan.world_size == 3 and {t.table.dim for t in plan.tables} == {16}
    assert plan.lower_bound_us > 0 and plan.gap < 0.01
    assert run_command("explain", out, "--stats", stats_file) == 0
    assert f"{plan.lower_bound_us:.1f} us" in capsys.readouterr().out


def test_verb_explain_bounds_a_plan_anew_for_another_machine(stats_file, tmp_path, capsys):
    out = tmp_path / "plan.json"
    run_command("plan", stats_file, "--topology", "h100-8", "-o", out, "--json")
    first = json.loads(capsys.readouterr().out)
    run_command("explain", out, "--stats", stats_file, "--topology", "a100-8", "--json")
    slower = json.loads(capsys.readouterr().out)
    run_command("explain", out, "--stats", stats_file)
    assert " 8 ranks, 8 memory domains, 1 host (" in capsys.readouterr().out
    assert slower["lower_bound_us"] > first["lower_bound_us"]
    assert slower["step_us"] >= slower["lower_bound_us"] * (1 - 1e-9)


def test_verb_explain_refuses_statistics_of_another_order(tmp_path):
    spec, ranks = TableSpec("t", 3, 4, ("t",)), (0, 1)
    tiers = (Tier(0, 1, "replicated", ranks), Tier(1, 3, "striped", ranks))
    Plan(2, (TablePlan(spec, (Piece(0, 4, tiers),), np.array([2])),)).save(tmp_path / "plan.json")
    words = ("explain", tmp_path / "plan.json", "--topology", "this-host", "--batch-size", 8)
    for ids in ([2, 1, 0], [0, 1, 2]):
        AccessStats(10, {"t": TableStats(
            3, np.array(ids), np.array([9, 5, 1]), length_values=np.array([1]),
            length_counts=np.array([15]))}).save(tmp_path / f"{ids[0]}.npz")
    assert run_command(*words, "--stats", tmp_path / "2.npz") == 0
    with pytest.raises(InvalidInputError, match=r"another hotness order in the statistics=\['t'\]"):
        run_command(*words, "--stats", tmp_path / "0.npz")


def test_verb_plan_json_presets_and_files(stats_file, tmp_path, capsys):
    out = tmp_path / "plan.json"
    assert run_command("plan", stats_file, "--topology", "h100-8", "--objective", "inference", "-o",
                       out, "--json") == 0
    value = json.loads(capsys.readouterr().out)
    assert value["world_size"] == 8 and value["source"] == "published"
    mine = tmp_path / "mine.toml"
    mine.write_text('name = "mine"\n[[domain]]\nranks = 2\nmemory_bytes = "1GB"\nread_gbps = 10\n')
    tables = tmp_path / "tables.json"
    specs, _ = tables_and_stats(5, 2)
    tables.write_text(json.dumps([s.to_json() for s in specs]))
    assert run_command("plan", stats_file, "--topology", mine, "--tables", tables, "-o", out) == 0
    assert [t.table for t in Plan.load(out).tables] == specs
    assert "mine" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "error", "match"), [
    (["--topology", "abacus-8"], InvalidInputError, "abacus-8"),
    (["--topology", "h100-8", "--world-size", "4"], InvalidInputError, "world_size"),
    (["--topology", "this-host", "--dtype", "int8"], UsageError, "--objective inference"),
    (["--topology", "this-host", "--dim", "10000000000"], PlanInfeasibleError, "largest table"),
])
def test_verb_plan_errors_name_the_cause(stats_file, tmp_path, words, error, match):
    with pytest.raises(error, match=match):
        run_command("plan", stats_file, *words, "-o", tmp_path / "p.json")
    assert not (tmp_path / "p.json").exists()


def test_verb_plan_refuses_foreign_files(stats_file, tmp_path):
    broken = tmp_path / "broken.npz"
    broken.write_bytes(stats_file.read_bytes()[:200])
    with pytest.raises(FileFormatError):
        run_command("plan", broken, "--topology", "this-host", "-o", tmp_path / "p")
    tables = tmp_path / "tables.json"
    tables.write_text("{")
    with pytest.raises(FileFormatError, match="JSON"):
        run_command("plan", stats_file, "--topology", "this-host", "--tables", tables, "-o",
                    tmp_path / "p")


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_loads_and_says_that_it_is_published(name):
    topology = topology_preset(name)
    assert topology.name == name and topology.source == "published"
    kind, size = name.split("-")
    hosts = int(size.split("x")[0]) if "x" in size else 1
    assert topology.num_hosts == hosts and topology.world_size == 8 * hosts
    d = topology.domains[0]
    assert d.cross_gbps < d.link_gbps < d.read_gbps < d.cache_gbps, kind


def test_presets_cover_the_gpus_and_scale_to_more_hosts():
    assert {n.split("-")[0] for n in preset_names()} == {"a100", "h100", "h200", "b200"}
    many = topology_preset("h100-16x8")
    assert many.world_size == 128 and many.num_hosts == 16
    assert many.domains[127].host == 15
    with pytest.raises(InvalidInputError):
        topology_preset("h100-0x8")
