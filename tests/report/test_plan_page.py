"""`oper explain`: the page is self-contained, and what-if compares before and after."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from oper.errors import InvalidInputError, MissingDependencyError
from oper.plan import Plan
from oper.report.plan_page import write_page
from oper.search import make_plan, make_problem
from oper.search.explain.what_if import changed_problem, parse_change
from oper.search.planner import plan_problem
from oper.stats import AccessStats, TableStats
from oper.tables import TableSpec
from oper.topology import Costs, Domain, Topology
from tests.support import check_page, run_command

TOPOLOGY = """name = "mine"
[[domain]]
copies = 4
memory_bytes = "12MB"
read_gbps = 2000
cache_gbps = 4000
cache_bytes = "1MB"
link_gbps = 100
[costs]
phase_us = 2.0
"""
NUM_TABLES = 5


def topology(memory_bytes: int = 12_000_000) -> Topology:
    return Topology("mine", tuple(
        Domain((r,), 0, memory_bytes, 2000.0, 4000.0, 1_000_000, 100.0, 100.0)
        for r in range(4)), Costs(phase_us=2.0))


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """A plan, its statistics and its topology."""
    specs, stats = [], {}
    for k in range(NUM_TABLES):
        rows = 2000 * (k + 1)
        counts = np.rint(1e6 / np.arange(1, rows + 1)).astype(np.int64)
        name = "<b>&t0" if k == 0 else f"t{k}"
        specs.append(TableSpec(name, rows, 64, (f"f{k}",)))
        stats[name] = TableStats.from_counts(rows, np.arange(rows), counts, (
            np.array([1]), np.array([int(counts.sum())])))
    AccessStats(1_000_000, stats, "generated", True).save(tmp_path / "stats.npz")
    (tmp_path / "mine.toml").write_text(TOPOLOGY)
    plan = make_plan(specs, AccessStats.load(tmp_path / "stats.npz"), topology(), batch_size=1024)
    plan.save(tmp_path / "plan.json")
    return {"plan": str(tmp_path / "plan.json"), "stats": str(tmp_path / "stats.npz"),
            "topology": str(tmp_path / "mine.toml")}


def explain(files: dict[str, str], *words: str) -> int:
    return run_command("explain", files["plan"], "--stats", files["stats"], "--topology",
                       files["topology"], *words)


def test_page_is_complete_in_itself(files, tmp_path, capsys) -> None:
    target = tmp_path / "plan.html"
    assert explain(files, "--html", str(target)) == 0
    text = target.read_text()
    check_page(text)
    assert text.count("<svg") == 4 and not re.search("<b>|<iframe|<img|<object", text)
    plan, words = Plan.load(files["plan"]), html.unescape(text)
    for part in (f"{plan.lower_bound_us:,.1f} us", "imbalance", "forward", "rank", "update",
                 "share of lookups", "replicated", "<b>&t0", "Bytes by link",
                 "own memory", "out, within the host"):
        assert part in words, part
    for k in range(1, NUM_TABLES):
        assert re.search(rf"<text[^>]*>t{k}</text>", text)  # a label of the placement map
    assert f"{plan.lower_bound_us:.1f} us" in capsys.readouterr().out


def test_equal_plans_give_equal_pages(files, tmp_path) -> None:
    for name in ("a.html", "b.html"):
        explain(files, "--html", str(tmp_path / name))
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_the_verb_loads_no_plotting_without_a_page(files) -> None:
    code = ("import sys; from oper.cli import main; "
            f"assert main(['explain', {files['plan']!r}, '--stats', {files['stats']!r}, "
            f"'--topology', {files['topology']!r}]) == 0; "
            "assert not {'matplotlib', 'jinja2'} & set(sys.modules)")
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_missing_package_is_named(files, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingDependencyError, match=r"jinja2.*oper\[report\]"):
        explain(files, "--html", str(tmp_path / "x.html"))
    assert not (tmp_path / "x.html").exists()


def test_what_if_compares_before_and_after(files, capsys) -> None:
    assert explain(files, "--what-if", "link=x0.25", "--what-if", "batch=2048", "--json") == 0
    found = json.loads(capsys.readouterr().out)["what_if"]
    before, after = found["before"], found["after"]
    assert found["changes"] == ["link=x0.25", "batch=2048"]
    assert (before["batch_size"], after["batch_size"]) == (1024, 2048)
    assert before["lower_bound_us"] <= before["planned_step_us"] <= before["step_us"] * (1 + 1e-9)
    assert after["step_us"] > before["step_us"]
    assert after["lower_bound_us"] > before["lower_bound_us"]
    assert explain(files, "--what-if", "link=x0.25") == 0
    out = capsys.readouterr().out
    assert "what if link=x0.25" in out and "before" in out
    line = next(x for x in out.splitlines() if x.startswith("  this plan  "))
    assert line.rstrip().endswith("%") and "+" in line


def test_what_if_reports_infeasibility(files, capsys) -> None:
    assert explain(files, "--what-if", "memory=-98%", "--json") == 0
    after = json.loads(capsys.readouterr().out)["what_if"]["after"]
    assert after["fits"] is False and after["planned_step_us"] is None
    assert explain(files, "--what-if", "memory=-98%") == 0
    assert "infeasible" in capsys.readouterr().out


def test_changes_scale_what_they_name() -> None:
    base = replace(topology(), source="measured")
    made, batch = changed_problem(base, 1000, [parse_change(x) for x in (
        "memory=+10%", "read=x2", "cross=-50%", "batch=+5%")])
    d = made.domains[3]
    assert d.memory_bytes == pytest.approx(1.1 * 12_000_000) and batch == 1050
    assert (d.read_gbps, d.cache_gbps, d.link_gbps, d.cross_gbps) == (4000.0, 8000.0, 100.0, 50.0)
    assert made.source == "assumed" and made.name == "mine memory=+10% read=x2 cross=-50%"
    assert changed_problem(base, 1000, [parse_change("batch=7")]) == (base, 7)


@pytest.mark.parametrize("text", ["memory", "memory=10", "memory=+x%", "speed=+10%", "link=-100%",
                                  "batch=0", "read=x0", "memory=4096"])
def test_invalid_changes_are_named(text: str) -> None:
    with pytest.raises(InvalidInputError, match="what-if"):
        parse_change(text)


def test_page_shows_host_memory_and_copies_per_host(tmp_path) -> None:
    rng = np.random.default_rng(1)
    specs = [TableSpec(f"t{k}", 4000, 16, (f"f{k}",)) for k in range(3)]
    weight = np.arange(1, 4001, dtype=float) ** -1.1
    counts = np.rint(weight / weight.sum() * 200_000).astype(np.int64)
    stats = AccessStats(200_000, {s.name: TableStats.from_counts(
        4000, rng.permutation(4000), counts, (np.array([1]), np.array([200_000])))
        for s in specs}, "generated", True)
    domains = tuple(Domain((r,), r // 2, 1_000_000, 2000.0, 4000.0, 1 << 20, 100.0, 10.0)
                    for r in range(4))
    machine = Topology("two hosts", domains, Costs(phase_us=2.0), host_memory_bytes=10**7,
                       host_gbps=20.0)
    held = {"tables": {"t0": {"pinned": [
        {"rows": [0, 500], "place": "replicated", "ranks": [1, 2]},
        {"rows": [2000, 4000], "place": "striped", "ranks": [0, 1, 2, 3], "memory": "host"}]}}}
    problem = make_problem(specs, stats, machine, batch_size=256, constraints=held)
    write_page(tmp_path / "plan.html", plan_problem(problem), problem)
    page = (tmp_path / "plan.html").read_text()
    assert "copy per host" in page and page.count("host memory") >= 3
