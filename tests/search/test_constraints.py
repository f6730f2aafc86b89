"""Constraints: valid files, plans that satisfy them, and errors if no plan can."""

import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from oper.errors import (
    FileFormatError,
    InvalidInputError,
    OperError,
    PlanError,
    PlanInfeasibleError,
)
from oper.plan import Plan, Tier
from oper.search import (
    EXECUTABLE,
    Constraints,
    TableConstraint,
    evaluate,
    make_plan,
    make_problem,
    verify_plan,
)
from oper.search.peers.baselines import peers
from oper.search.planner import plan_problem
from oper.search.problem.constraints import check_constraints, parse_constraints, violations
from oper.search.problem.space import EVERYTHING
from oper.search.problem.statement import Problem
from oper.search.rounding import search
from oper.search.verbs import read_constraints
from oper.tables import OPTIMIZERS, TableSpec
from tests.search.search_cases import gpus, problem, space_bound, tables_and_stats


def ranks_of(plan, name):
    return {r for p in plan.table(name).pieces for t in p.tiers for r in t.ranks}


@pytest.mark.parametrize(("value", "word"), [
    (["t0"], "constraints"), ({"t0": {}}, "keys"), ({"tables": None}, "tables"),
    ({"tables": {"nobody": {}}}, "table"), ({"tables": {"t0": None}}, r"tables\.t0=None"),
    ({"tables": {"t0": {"ranks": None}}}, r"tables\.t0\.ranks=None, expected a list of integers"),
    ({"tables": {"t0": {"ranks": [9]}}}, "ranks"),
    ({"tables": {"t0": {"ranks": 3}}}, "ranks=3, expected a list of integers"),
    ({"tables": {"t0": {"ranks": ["a"]}}}, r"ranks\[0\]='a', expected an integer"),
    ({"tables": {"t0": {"ranks": [1.0]}}}, r"ranks\[0\]=1\.0, expected an integer"),
    ({"tables": {"t0": {"ranks": []}}}, "ranks"),
    ({"tables": {"t0": {"color": 1}}}, r"unknown keys=\['tables\.t0\.color'\]"),
    ({"tables": {"t0": {"replicate": 1}}}, "replicate=1, expected true or false"),
    ({"tables": {"t0": {"modes": [1, "x"]}}}, r"modes\[0\]=1, expected text"),
    ({"tables": {"t0": {"modes": ["x"]}}}, "modes"),
    ({"tables": {"t0": {"tiers": [{"rows": [0, 5]}]}}}, r"missing keys=.*tiers\[0\]\.place"),
    ({"tables": {"t0": {"modes": ["push"]}}}, "constraint"),
    ({"tables": {"t0": {"memories": ["disk"]}}}, "memories"),
    ({"tables": {"t0": {"memories": ["host"]}}}, "constraint"),
    ({"reserve_bytes": "much"}, "reserve_bytes"), ({"reserve_bytes": True}, "reserve_bytes"),
    ({"reserve_bytes": -1}, "reserve_bytes"), ({"reserve_bytes": [1]}, "reserve_bytes"),
    ({"reserve_bytes": None}, "reserve_bytes"), ({"memory_bytes": None}, "memory_bytes"),
    ({"memory_bytes": [1, 2, 3]}, "memory_bytes"),
    ({"keep_apart": "t0"}, "keep_apart"), ({"keep_apart": [["t0"]]}, "keep_apart"),
    ({"keep_apart": [["t0", "t0"]]}, "keep_apart"), ({"keep_apart": [["t0", "x"]]}, "keep_apart"),
    ({"keep_together": [["t0", "t1"]], "keep_apart": [["t1", "t0"]]}, "one of the two"),
])
def test_invalid_constraints_are_named(value, word):
    specs, stats = tables_and_stats(2, 0)
    with pytest.raises(InvalidInputError, match=word):
        make_problem(specs, stats, gpus(2), batch_size=8, constraints=value, allow=EXECUTABLE)


@pytest.mark.parametrize(("held", "word"), [
    ({"rows": [0, 9], "ranks": [7]}, "ranks=.7"), ({"rows": [0, 5], "ranks": [0]}, "rows"),
    ({"rows": [0, 9], "ranks": [0, 1], "weights": [1]}, "weights"),
    ({"rows": [0, 9], "ranks": [1]}, "some of .0.")])
def test_complete_tiers_are_checked_before_the_search(held, word):
    """Like those of a plan, and against the table's other constraints."""
    spec = TableSpec("t", 9, 4)
    with pytest.warns(UserWarning), pytest.raises(
            InvalidInputError, match=f"constraint of table 't'.*{word}"):
        make_problem([spec], None, gpus(2), batch_size=8, constraints={"tables": {
            "t": {"tiers": [{"place": "striped", **held}], "ranks": [0]}}})


def test_missing_host_memory_is_named():
    with pytest.warns(UserWarning), pytest.raises(
            InvalidInputError, match=r"\['host'\]}}, .*host_memory_bytes"):
        make_problem([TableSpec("t", 9, 4)], None, gpus(2), batch_size=8,
                     constraints={"tables": {"t": {"memories": ["host"]}}})


def test_json_round_trip_and_default_entry():
    value = {"tables": {"*": {"replicate": False}, "t1": {"ranks": [1]}},
             "keep_apart": [["t0", "t1"]], "memory_bytes": "1GB", "reserve_bytes": [1, 2]}
    value["tables"]["t0"] = {"tiers": [{"rows": [0, 9], "place": "owned", "ranks": [1]}]}
    held = parse_constraints(value, ["t0", "t1", "t2"], 2)
    assert held == Constraints(
        {"t0": TableConstraint(tiers=(Tier(0, 9, "owned", (1,)),)),
         "t1": TableConstraint(ranks=(1,)),
         "t2": TableConstraint(placements=frozenset({"striped", "owned"}))},
        keep_apart=(("t0", "t1"),), memory_bytes=10**9, reserve_bytes=(1, 2))
    assert parse_constraints(held.to_json(), ["t0", "t1", "t2"], 2) == held
    assert Constraints().to_json() == {}


def test_a_table_that_is_constrained_twice_is_refused(tmp_path):
    path = tmp_path / "held.json"
    path.write_text('{"tables": {"t": {"ranks": [0]}, "t": {"modes": ["pull"]}}}')
    with pytest.raises(FileFormatError, match=r"keys given twice: \['t'\]"):
        read_constraints(str(path))


def test_constraints_may_hold_lists_and_sizes_as_text():
    """As their JSON form."""
    held = Constraints(keep_apart=[["a", "b"]], memory_bytes=["1kB", 2000], reserve_bytes="3B")
    assert parse_constraints(held, ["a", "b"], 2) == Constraints(
        keep_apart=(("a", "b"),), memory_bytes=(1000, 2000), reserve_bytes=3)
    assert TableConstraint(placements=["owned"], ranks=[1]) == TableConstraint(
        placements=frozenset({"owned"}), ranks=(1,))
    with pytest.raises(InvalidInputError, match=r"memory_bytes=\[5, 5\]|memory_bytes=\(5, 5\)"):
        parse_constraints(Constraints(memory_bytes=[5, 5]), ["a"], 3)


def test_reserve_and_cap_limit_the_memory_of_a_rank():
    specs, stats = tables_and_stats(12, 3)
    need = sum(s.num_rows * s.row_bytes for s in specs)
    free = make_plan(specs, stats, gpus(4), objective="inference", batch_size=256)
    stated = make_problem(specs, stats, gpus(4), objective="inference", batch_size=256)
    for held in ({"memory_bytes": int(0.5 * need)},
                 {"reserve_bytes": [int(80e9 - (0.4 + 0.1 * r) * need) for r in range(4)]}):
        plan = make_plan(specs, stats, gpus(4), objective="inference", batch_size=256,
                         constraints=held)
        used = evaluate(plan, stated).held_bytes
        most = [0.5 * need] * 4 if "memory_bytes" in held else [
            (0.4 + 0.1 * r) * need for r in range(4)]
        assert (used <= np.array(most) * (1 + 1e-9)).all()
        assert plan.step_us > free.step_us and plan.lower_bound_us > free.lower_bound_us


def test_keep_together_and_keep_apart():
    specs, stats = tables_and_stats(8, 9)
    for allow in ({"owned", "pull"}, EVERYTHING):
        # The bound ignores groups, so that the gap stays larger, however long the search.
        plan = make_plan(specs, stats, gpus(4), batch_size=128, allow=allow, target_gap=0.15,
                         constraints={
            "keep_together": [["t0", "t1", "t2"]],
            "keep_apart": [["t3", "t4", "t5"], ["t0", "t6"]]})
        assert ranks_of(plan, "t0") == ranks_of(plan, "t1") == ranks_of(plan, "t2")
        apart = [ranks_of(plan, f"t{k}") for k in (3, 4, 5)]
        assert sum(len(x) for x in apart) == len(set.union(*apart))
        assert not ranks_of(plan, "t0") & ranks_of(plan, "t6")
        # The bound ignores groups.
        whole = make_problem(specs, stats, gpus(4), batch_size=128, allow=allow)
        assert plan.lower_bound_us <= plan.step_us * (1 + 1e-9)
        bound = space_bound(whole)
        assert plan.lower_bound_us >= min(bound, plan.step_us) * (1 - 1e-6)
        assert plan.notes["relaxation_us"] == pytest.approx(bound, rel=1e-6)


def test_groups_respect_pins_or_are_infeasible():
    specs, stats = tables_and_stats(4, 9)
    pinned = {"t0": {"tiers": [{"rows": [0, specs[0].num_rows], "place": "owned", "ranks": [2]}]}}
    plan = make_plan(specs, stats, gpus(4), batch_size=128, constraints={
        "tables": pinned, "keep_together": [["t0", "t1"]], "keep_apart": [["t1", "t2"]]})
    assert ranks_of(plan, "t1") == {2} and 2 not in ranks_of(plan, "t2")
    clash = {**pinned, "t1": {"ranks": [1]}}
    with pytest.raises(PlanInfeasibleError, match=r"keep_together \['t0', 't1'\]"):
        make_plan(specs, stats, gpus(4), batch_size=128, constraints={
            "tables": clash, "keep_together": [["t0", "t1"]]})
    with pytest.raises(PlanInfeasibleError, match="keep_apart"):
        make_plan(specs, stats, gpus(2), batch_size=128, constraints={
            "keep_apart": [["t0", "t1", "t2"]]})


def test_more_memory_with_which_groups_fit_is_named():
    specs = [TableSpec("a", 1000, 8, optimizer="sgd"), TableSpec("b", 100, 8, optimizer="sgd")]
    need, held = sum(s.num_bytes for s in specs), {"keep_apart": [["a", "b"]]}
    with pytest.warns(UserWarning), pytest.raises(
            PlanInfeasibleError, match=r"keep_apart.*or pass memory per domain times") as caught:
        make_plan(specs, None, gpus(2, memory_bytes=0.7 * need), batch_size=64, constraints=held)
    factor = float(str(caught.value).split("per domain times ")[1].split()[0])
    with pytest.warns(UserWarning):
        make_plan(specs, None, gpus(2, memory_bytes=0.7 * need * factor), batch_size=64,
                  constraints=held)


@pytest.mark.parametrize(("held", "words"), [
    (lambda need: {"reserve_bytes": int(80e9)}, "removing reserve_bytes, or more memory per"),
    (lambda need: {"reserve_bytes": int(90e9)}, r"than constraints reserve.*need_bytes=\d+,"),
    (lambda need: {"memory_bytes": int(need / 100)}, "removing memory_bytes"),
    (lambda need: {"tables": {"t3": {"ranks": [0]}}, "memory_bytes": [2 * 10**5, 10**10]},
     "removing memory_bytes or the constraint of table 't3'"),
])
def test_the_constraint_that_makes_plans_infeasible_is_named(held, words):
    specs, stats = tables_and_stats(6, 1)
    need = sum(s.num_bytes for s in specs)
    with pytest.raises(PlanInfeasibleError, match=words):
        make_plan(specs, stats, gpus(2), batch_size=64, constraints=held(need))


def test_a_limit_that_is_too_low_is_to_be_raised_not_the_memory():
    specs, stats = tables_and_stats(6, 1)
    need = sum(s.num_bytes for s in specs)

    def fails(limit, **topology):
        with pytest.raises(PlanInfeasibleError) as caught:
            make_plan(specs, stats, gpus(2, **topology), batch_size=64,
                      constraints={"memory_bytes": int(limit)})
        return str(caught.value)

    for topology, words in (({}, ": removing memory_bytes, or memory_bytes times "),
                            ({"memory_bytes": 0.31 * need},
                             ": memory_bytes and memory per domain times ")):
        factor = float(fails(0.3 * need, **topology).split(words)[1].split()[0])
        more = {name: factor * x for name, x in topology.items()}
        make_plan(specs, stats, gpus(2, **more), batch_size=64,
                  constraints={"memory_bytes": int(factor * 0.3 * need)})


def test_violated_constraints_are_listed():
    stated = problem(3, 2, gpus(2))
    plan = plan_problem(stated)
    held = parse_constraints({
        "tables": {"t0": {"tiers": [{"rows": [0, stated.tables[0].spec.num_rows],
                                     "place": "owned", "ranks": [1]}]},
                   "t1": {"ranks": [0]}, "t2": {"placements": ["owned"], "pinned": [
                       {"rows": [1, 2], "place": "owned", "ranks": [1]}]}},
        "keep_apart": [["t1", "t2"]]}, ["t0", "t1", "t2"], 2)
    lines = violations(plan, held)
    assert len(lines) == 5 and all(f"'t{k}'" in " ".join(lines) for k in range(3))
    assert sum("pinned on rows 1:2" in line for line in lines) == 1
    with pytest.raises(PlanError, match="pinned"):
        check_constraints(plan, held)


def test_verb_stores_constraints_in_the_plan(stats_file, printed, tmp_path):
    specs, stats = tables_and_stats(5, 2)
    path, out = tmp_path / "held.json", tmp_path / "plan.json"
    words = (stats_file, "--topology", "h100-8", "--constraints", path, "-o", out)
    for text in ("null", "[]", "3", "{", '{"t0": {}}'):
        path.write_text(text)
        with pytest.raises(OperError):
            printed("plan", *words)
        assert not out.exists()
    path.write_text(json.dumps({"tables": {"t1": {"ranks": [3]}}, "reserve_bytes": "1GB"}))
    printed("plan", *words)
    plan = Plan.load(out)
    assert ranks_of(plan, "t1") == {3}
    assert plan.notes["constraints"] == {"tables": {"t1": {"ranks": [3]}},
                                         "reserve_bytes": 10**9}
    value = json.loads(printed("explain", out, "--stats", stats_file, "--json"))
    assert value["capacity_bytes"][0] == pytest.approx(
        make_problem(specs, stats, gpus(1), batch_size=1).machine.capacity_bytes[0] - 10**9)
    assert value["lower_bound_us"] == pytest.approx(plan.lower_bound_us)


# ---- tables whose optimizer needs whole rows -----------------------------------------------------

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
def test_the_planner_splits_only_tables_that_may_be_split(name: str) -> None:
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
    """If ranks' compute is the bottleneck, a table with one owner is slower than one with several,
    although these send more."""
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


def test_peers_do_not_split_tables_that_need_whole_rows() -> None:
    found = set()
    for optimizers in (("lamb", "adam"), ("adam", "lamb")):  # one of the tables is the larger one
        for name in ("hugectr-split-and-place", "neuroshard-beam"):
            plan = peers()[name](stated(optimizers, EVERYTHING), 0)
            assert plan is not None
            found |= split(plan)
    assert found == {"adam"}
