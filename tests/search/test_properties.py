"""Properties of all problems: rows placed once, memory limits, bounds, relabelling, more memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st
from search_cases import (
    KINDS,
    gpus,
    random_plan,
    space_bound,
    tables_and_stats,
    with_host_memory,
)

from oper.plan import Plan
from oper.search import evaluate, make_problem
from oper.search.explain.what_if import compare
from oper.search.planner import plan_problem
from oper.search.problem.space import EVERYTHING, EXECUTABLE
from oper.stats import AccessStats
from oper.topology import Topology
from tests.search.random_problems import QUICK
from tests.support import run_command


def renumbered(topology, order):
    """The topology with its domains in another order, and the new number of every rank."""
    domains, number, at = [], {}, 0
    for k in order:
        d = topology.domains[k]
        ranks = tuple(range(at, at + len(d.ranks)))
        number.update(zip(d.ranks, ranks, strict=True))
        domains.append(replace(d, ranks=ranks))
        at += len(d.ranks)
    return Topology(topology.name, tuple(domains), topology.costs), number


@QUICK
@given(st.data(), st.integers(0, 99))
def test_relabelling_changes_nothing(data, seed):
    """Ranks renumbered, tables renamed and listed in another order."""
    specs, stats = tables_and_stats(5, seed, max_rows=3000)
    topology = gpus(4, slow=2, per_host=2)
    order = data.draw(st.permutations(range(4)))
    listed = data.draw(st.permutations(range(5)))
    other, number = renumbered(topology, order)
    renamed = [replace(specs[k], name=f"other-{k}") for k in listed]
    again = AccessStats(stats.num_samples, {f"other-{k}": stats.tables[f"t{k}"] for k in listed},
                        stats.source, stats.ids_in_hotness_order)
    arguments = {"batch_size": 256, "allow": EVERYTHING}
    one = make_problem(specs, stats, topology, **arguments)
    two = make_problem(renamed, again, other, **arguments)
    plan = random_plan(one, np.random.default_rng(seed), KINDS, max_pieces=2)
    tables = []
    for k, spec in zip(listed, renamed, strict=True):
        pieces = tuple(replace(p, tiers=tuple(
            replace(x, ranks=tuple(number[r] for r in x.ranks)) for x in p.tiers))
            for p in plan.tables[k].pieces)
        tables.append(replace(plan.tables[k], table=spec, pieces=pieces))
    moved = replace(plan, tables=tuple(tables))
    before, after = evaluate(plan, one), evaluate(moved, two)
    assert after.step_us == pytest.approx(before.step_us, rel=1e-12)
    assert after.held_bytes[[number[r] for r in range(4)]] == pytest.approx(before.held_bytes)
    assert space_bound(two) == pytest.approx(space_bound(one), rel=3e-4)


def test_names_change_nothing_in_a_plan():
    specs, stats = tables_and_stats(12, 3)
    renamed = [replace(s, name=f"{99 - k}-{s.name}") for k, s in enumerate(specs)]
    again = AccessStats(stats.num_samples, {
        r.name: stats.tables[s.name] for s, r in zip(specs, renamed, strict=True)},
        stats.source, stats.ids_in_hotness_order)
    one, two = (plan_problem(make_problem(s, x, gpus(4), batch_size=512, allow=EVERYTHING))
                for s, x in ((specs, stats), (renamed, again)))
    assert [t.pieces for t in one.tables] == [t.pieces for t in two.tables]
    assert (one.step_us, one.lower_bound_us) == (two.step_us, two.lower_bound_us)


@QUICK
@given(st.integers(0, 99), st.lists(st.floats(1.02, 3.0), min_size=2, max_size=4), st.booleans())
def test_more_memory_never_gives_a_slower_plan(seed, factors, in_host):
    """Exactly if started from the plan with less memory, else within the certified gap."""
    specs, stats = tables_and_stats(6, seed, max_rows=3000)
    memory = 0.45 * sum(s.num_rows * s.row_bytes for s in specs) + 1e5
    plan = None
    for factor in (1.0, *factors):
        memory *= factor
        topology, allow = gpus(4, memory_bytes=memory), EXECUTABLE
        if in_host:  # of both kinds, of which one alone is too little
            topology = with_host_memory(gpus(4, memory_bytes=memory / 4), 4 * memory)
            allow = EXECUTABLE | {"host"}
        stated = make_problem(specs, stats, topology, batch_size=256, objective="inference",
                              allow=allow)
        made = plan_problem(stated, start=plan, time_budget_s=0.2)
        assert evaluate(made, stated).fits
        if plan is not None:
            assert made.lower_bound_us * (1 - 1e-9) <= made.step_us <= plan.step_us
            alone = plan_problem(stated, time_budget_s=0.2)
            assert alone.step_us <= plan.step_us * (1 + alone.gap) * (1 + 1e-9)
        plan = made


def test_a_start_outside_of_the_space_is_ignored():
    specs, stats = tables_and_stats(6, 4)
    wide = make_problem(specs, stats, gpus(4), batch_size=256)
    narrow = make_problem(specs, stats, gpus(4), batch_size=256, allow={"owned", "pull"})
    best = plan_problem(wide)
    plan = plan_problem(narrow, start=best)
    assert {x.placement for t in plan.tables for x in t.tiers} == {"owned"}
    assert plan.to_text() == plan_problem(narrow).to_text()
    held = make_problem(specs, stats, gpus(4), batch_size=256,
                        constraints={"tables": {"t0": {"ranks": [2]}}})
    assert plan_problem(held, start=best).table("t0").tiers[0].ranks == (2,)


def test_what_if_starts_from_the_plan():
    specs, stats = tables_and_stats(8, 5)
    need = sum(s.num_rows * s.row_bytes for s in specs)
    before, after = (make_problem(specs, stats, gpus(4, memory_bytes=x * need), batch_size=256,
                                  objective="inference") for x in (0.5, 0.55))
    found = compare(plan_problem(before), before, after)
    assert found["after"]["planned_step_us"] <= found["before"]["planned_step_us"]
    assert found["before"]["planned_step_us"] <= found["before"]["step_us"]


def test_verb_starts_from_a_plan(tmp_path, capsys):
    _, stats = tables_and_stats(5, 2)
    stats.save(tmp_path / "stats.npz")
    words = ["plan", tmp_path / "stats.npz", "--topology", "h100-8", "-o", tmp_path / "a.json"]
    run_command(*words)
    first = Plan.load(tmp_path / "a.json")
    run_command(*words, "--seed", "1", "--start", tmp_path / "a.json")
    assert Plan.load(tmp_path / "a.json").step_us <= first.step_us
    assert "gap" in capsys.readouterr().out
