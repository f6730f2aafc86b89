"""Certificates: bounds are valid or not certified, and contain every cost of the cost model."""

import ast
import copy
import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oper.search.certificate
from oper.messages import MessageBits
from oper.plan import Piece, Plan, TablePlan, Tier
from oper.search import evaluate, make_plan, make_problem, verify_plan
from oper.search.certificate.carried import not_certified, problem_digest, with_bound
from oper.search.cost.load_vector import NUM_ROWS, LoadVector, Row
from oper.search.cost.model import CostModel
from oper.search.cost.space import PUSH, REPLICATED, SHARD, hosts_are_interchangeable, outside_space
from oper.search.explain.summary import as_json, summary
from oper.search.planner import plan_problem, tighten_bound
from oper.search.pricing.node import (
    ALL_PUSHED,
    ONE_TIER,
    TIERS,
    TIERS_PUSHED,
    Configuration,
    Node,
    PieceChoice,
)
from oper.search.problem.presets import topology_preset
from oper.search.problem.space import EVERYTHING
from oper.search.problem.statement import NUM_FEATURES, TOUCHED, Problem, TableProblem, with_overlap
from oper.search.relaxation.relaxation import Relaxation
from oper.stats import AccessStats
from oper.tables import TableSpec
from oper.topology import Costs
from tests.search.search_cases import (
    counted,
    gpus,
    host,
    racked,
    shared,
    space_bound,
    tables_and_stats,
    with_host_memory,
)


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
def test_plans_outside_of_the_space_are_not_certified(tier: Tier, columns: int, word: str) -> None:
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


def test_column_pieces_with_pinned_rows_need_a_hotness_order() -> None:
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


def test_hosts_are_interchangeable_only_with_equal_overlap() -> None:
    """Also with more overlaps than are distinguished."""
    specs, stats = tables_and_stats(4, 0)
    problem = make_problem(specs, stats, gpus(8, per_host=2), batch_size=4096)
    hidden = [0.0, 0.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0]
    stated = with_overlap(problem, {"forward": hidden, "update": hidden})
    assert hosts_are_interchangeable(CostModel(problem))
    assert not hosts_are_interchangeable(CostModel(stated))


def test_explain_states_why_a_plan_is_not_certified(stats_file, printed, tmp_path) -> None:
    plan = plan_problem(make_problem(*tables_and_stats(5, 2), topology_preset("h100-8"),
                                     batch_size=256))

    def explained(plan: Plan, *words: str) -> str:
        plan.save(tmp_path / "plan.json")
        return printed("explain", tmp_path / "plan.json", "--stats", stats_file, *words)

    assert "not certified" not in explained(plan)
    assert "verified: no plan of the searched space is faster" in explained(plan)
    assert json.loads(explained(plan, "--json"))["verified"] is True
    noted = {k: v for k, v in plan.notes["certificate"].items() if k != "parts"}
    assert "not certified: " in explained(replace(plan, notes={**plan.notes, "certificate": noted}))
    t = plan.tables[0]
    copies = replace(t, pieces=(Piece(0, t.table.dim, (
        Tier(0, t.table.num_rows, "replicated", (0, 2)),)),))
    edited = replace(plan, tables=(copies, *plan.tables[1:]))
    assert "not certified: the plan lies outside the space" in explained(edited)
    value = json.loads(explained(edited, "--json"))
    assert value["gap"] is None and "replicated on ranks [0, 2]" in value["not_certified"]
    # Another batch size: the bound is recomputed.
    value = json.loads(explained(plan, "--json", "--batch-size", "512"))
    assert value["gap"] >= 0 and value["lower_bound_us"] > plan.lower_bound_us


# ---- the checker: valid plans are certified, edited ones are not ---------------------------------


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


def _other_branching(proof: dict[str, Any]) -> None:
    trees = [p["tree"] for p in proof["parts"] if "load" in p["tree"]]
    assert trees
    for tree in trees:
        tree["at_us"] /= 50.0


def _negative(proof: dict[str, Any]) -> None:
    prices = _leaf(proof["parts"][0]["tree"])["prices"]
    prices[next(iter(prices))] = -1.0


@pytest.mark.parametrize(("change", "word"), [
    (_higher_price, "its prices prove"),
    (_other_branching, "its prices prove"),
    (_no_half, "cannot be read"),
    (_negative, "of the proof is -1"),
    (lambda p: p.update(parts=p["parts"][:1]), "no part of the proof bounds"),
    (lambda p: p.update(parts=[]), "no part of the proof bounds"),
    (lambda p: _name_classes(p, 99), "cannot be read"),
    (lambda p: _name_classes(p, -1), "negative class index: -1"),
    (lambda p: p["parts"][0].update(plans=["all"]), "but the kinds are"),
    (lambda p: p["parts"][0]["tree"].update(prices={"999": 1.0}, parts=None), "cannot be read"),
    (lambda p: p.update(problem="0" * 64), "another problem"),
    (lambda p: p.pop("parts"), "no proof"),
    (lambda p: _name_classes(p, float("inf")), "cannot be read"),
    (lambda p: p.update(cutoff_us=float("nan")), "not a number"),
    (lambda p: p.update(cutoff_us="soon"), "cannot be read"),
])
def test_an_incomplete_proof_is_not_accepted(case: tuple[Plan, Problem],
                                             change: Callable[[dict[str, Any]], None], word: str
                                             ) -> None:
    plan, problem = case
    proof = copy.deepcopy(plan.notes["certificate"])
    change(proof)
    found = verify_plan(replace(plan, notes={**plan.notes, "certificate": proof}), problem)
    assert not found.certified and np.isnan(found.gap)
    assert word in found.why



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


def test_verb_verify(stats_file, printed, tmp_path) -> None:
    plan = plan_problem(make_problem(*tables_and_stats(5, 2), topology_preset("h100-2x8"),
                                     batch_size=512))
    plan.save(tmp_path / "plan.json")
    words = ("verify", tmp_path / "plan.json", "--stats", stats_file)
    text = printed(*words)
    assert "verified" in text and "gap" in text
    value = json.loads(printed(*words, "--json"))
    assert value["certified"] and value["bound_us"] >= plan.lower_bound_us * (1 - 1e-6)
    assert "not certified: the bound is for another problem" in printed(
        *words, "--batch-size", 513, status=1)


def test_pins_of_whole_tables_do_not_widen_the_space(stats_file, printed, tmp_path) -> None:
    """The plan copies a table to some of the ranks, which its space does not include."""
    specs, stats = tables_and_stats(5, 2)
    pin = {"tiers": [{"rows": [0, specs[0].num_rows], "place": "replicated", "ranks": [0, 1]}]}
    problem = make_problem(specs, stats, topology_preset("h100-8"), batch_size=512,
                           constraints={"tables": {specs[0].name: pin}})
    plan = plan_problem(problem)
    plan.save(tmp_path / "plan.json")
    assert "verified" in printed("verify", tmp_path / "plan.json", "--stats", stats_file)
    assert plan_problem(problem, seed=1, target_gap=plan.gap, start=plan).tables == plan.tables


def test_plans_that_need_host_memory_are_certified() -> None:
    """The problem allows it only because nothing else fits."""
    specs, stats = tables_and_stats(3, 5, min_rows=2000)
    need = sum(s.num_rows * s.row_bytes for s in specs)
    topology = with_host_memory(gpus(2, memory_bytes=0.3 * need))
    problem = make_problem(specs, stats, topology, objective="inference", batch_size=64)
    plan = plan_problem(problem)
    assert "host" in set(plan.notes["allow"]) - problem.allow
    assert verify_plan(plan, problem).certified and "not certified" not in summary(plan, problem)
    assert verify_plan(tighten_bound(plan, problem, max_work=0), problem).certified


# ---- the relaxation, compared with the cost model cost by cost -----------------------------------

FIELDS = [f.name for f in fields(Costs) if f.name != "phase_us"]
TOPOLOGIES = {"gpus": gpus(4), "hosts": gpus(4, per_host=2), "host": host(3)}


def stated(name: str, objective: str, **costs: float) -> Problem:
    specs, stats = tables_and_stats(3, 4, lengths=(4, 20))
    none = dict.fromkeys(FIELDS, 0.0)
    topology = replace(TOPOLOGIES[name], costs=Costs(phase_us=1.0, **{**none, **costs}))
    return make_problem(specs, stats, topology, objective=objective, batch_size=512,
                        allow=EVERYTHING)


def tiers_of(t: TableProblem, kinds: list[str], world: int, rng: np.random.Generator
             ) -> tuple[Tier, ...]:
    """Tiers that end at block edges; pushed rows have one owner, pulled rows are striped evenly."""
    inner = rng.choice(t.edges[1:-1], len(kinds) - 1, replace=False) if len(kinds) > 1 else []
    edges = [0, *sorted(int(e) for e in inner), t.spec.num_rows]
    everyone = tuple(range(world))
    made = {REPLICATED: lambda a, b: Tier(a, b, "replicated", everyone),
            SHARD: lambda a, b: Tier(a, b, "striped", everyone),
            PUSH: lambda a, b: Tier(a, b, "owned", (1,), mode="push")}
    return tuple(made[kind](a, b) for kind, a, b in zip(kinds, edges, edges[1:], strict=False))


def configuration(relaxation: Relaxation, k: int, pieces: tuple[Piece, ...]) -> Configuration:
    """The same placement as a configuration of the relaxation."""
    t, parts = relaxation.tables[k], []
    option = {o.kind: n for n, o in enumerate(relaxation.options)}
    for piece in pieces:
        choice = np.zeros(t.blocks.shape[0], np.int64)
        for tier in piece.tiers:
            kind = REPLICATED if tier.placement == "replicated" else (
                PUSH if tier.mode == "push" else SHARD)
            choice[(t.edges[:-1] >= tier.start) & (t.edges[:-1] < tier.stop)] = option[kind]
        amount = np.zeros((len(relaxation.options), NUM_FEATURES))
        np.add.at(amount, choice, t.blocks)
        pushes = any(x.mode == "push" for x in piece.tiers)
        mode = (ALL_PUSHED, TIERS_PUSHED)[len(piece.tiers) > 1] if pushes else (
            ONE_TIER, TIERS)[len(piece.tiers) > 1]
        width = piece.stop - piece.start
        parts.append(PieceChoice(width / t.spec.dim, t.spec.dim / width, 0, mode, choice, amount))
    return tuple(parts)


def both(problem: Problem, k: int, pieces: tuple[Piece, ...]) -> tuple[np.ndarray, np.ndarray]:
    """A placement's consumption of the resource rows by the relaxation, and by the cost model."""
    model = CostModel(problem)
    relaxation = Relaxation(model)
    asked = Node(relaxation).resources(np.array([k]), [configuration(relaxation, k, pieces)])[0]
    vector = model.load_vector(relaxation.tables[k], pieces, True)
    return asked[:relaxation.rows.phase_of.size], relaxation.rows.of_load_vector(vector)


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("name", sorted(TOPOLOGIES))
def test_consumption_of_a_piece_equals_the_cost_model(name, field):
    rng = np.random.default_rng(FIELDS.index(field))
    for objective in ("training", "inference"):
        # Pieces of a table that pushes in other pieces may pay the lesser charge.
        other = {"push_tier_ns": 1.0} if field == "tier_ns" else {}
        free = stated(name, objective, **other)
        dear = stated(name, objective, **other, **{field: 0.7})
        for kinds in ([REPLICATED], [SHARD], [PUSH], [REPLICATED, SHARD], [REPLICATED, PUSH],
                      [REPLICATED, SHARD, PUSH]):
            if PUSH in kinds and objective == "inference":
                continue  # nothing is pushed there
            k = int(rng.integers(3))
            t = free.tables[k]
            tiers = tiers_of(t, kinds, free.machine.world_size, rng)
            (none, true_none), (asked, true) = (both(x, k, (Piece(0, t.spec.dim, tiers),))
                                                for x in (free, dear))
            # Tabulated partial sums are a lower bound.
            assert (asked <= true * (1 + 1e-9)).all() and asked == pytest.approx(true, rel=1e-4)
            if field not in ("warm_share", "wire_ns"):  # of bytes, those of partial sums too
                assert asked - none == pytest.approx(true - true_none, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", sorted(TOPOLOGIES))
def test_costs_of_several_pieces_include_id_streams_and_charges(name):
    rng = np.random.default_rng(3)
    charges = {"table_us": 3.0, "tier_ns": 2.0, "push_tier_ns": 2.0}
    for objective in ("training", "inference"):
        free, dear = (stated(name, objective, id_ns=0.1, **x) for x in ({}, charges))
        for _ in range(10):
            k = int(rng.integers(3))
            t = free.tables[k]
            if t.spec.dim < 16:
                continue
            tiers = tiers_of(t, [REPLICATED, SHARD], free.machine.world_size, rng)
            pieces = (Piece(0, 8, tiers), Piece(8, t.spec.dim, tiers))
            asked, true = both(free, k, pieces)
            more, truly_more = both(dear, k, pieces)
            # The squares of one piece are not charged.
            assert (asked <= true + 1e-9).all() and asked == pytest.approx(true, rel=1e-2)
            assert more - asked == pytest.approx(truly_more - true, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", sorted(TOPOLOGIES))
def test_directories_of_keys_cost_as_much_in_the_bound_as_in_the_model(name):
    """Finding, counting, inserting and exchanging keys, term by term; plans with keys are certified
    as tightly as plans without."""
    specs, stats = tables_and_stats(3, 4, lengths=(4, 20))
    share = 0.1
    dynamic = replace(stats, tables=stats.tables | {
        n: replace(stats.tables[n], default_share=share) for n in ("t0", "t2")})
    topology = replace(TOPOLOGIES[name], costs=Costs(
        phase_us=1.0, key_ns=20.0, key_count_ns=19.0, key_insert_ns=630.0))
    static, keyed = (make_problem(specs, x, topology, batch_size=512) for x in (stats, dynamic))
    world, near = topology.world_size, keyed.machine.num_domain[0]
    tables = [t for t in keyed.tables if t.default_share is not None]
    assert [t.spec.name for t in tables] == ["t0", "t2"]
    ids = sum(t.traffic.num_ids for t in tables)
    distinct = sum(t.total[TOUCHED] for t in tables)
    before, after = (CostModel(x).base().rows[:, 0] for x in (static, keyed))
    added = np.zeros(NUM_ROWS)
    added[Row.FORWARD_NS] = 20 * ids
    added[Row.UPDATE_NS] = world / near * (19 * distinct + 630 * share * ids)
    added[[Row.GRADS, Row.RETURNED]] = 8 * (distinct + share * ids) / near
    assert after - before == pytest.approx(added)
    relaxations = [Relaxation(CostModel(x)) for x in (static, keyed)]
    rows = relaxations[0].rows
    size = rows.phase_of.size
    assert relaxations[1].base[:size] - relaxations[0].base[:size] == pytest.approx(
        rows.of_load_vector(LoadVector(np.repeat(added[:, None], world, 1))))
    plan = make_plan(specs, dynamic, topology, batch_size=512)
    assert 0.98 * plan.step_us < plan.lower_bound_us <= plan.step_us
    assert verify_plan(plan, keyed).certified


@pytest.mark.parametrize("per_host", [4, 2])
def test_a_few_pushed_rows_may_be_cheaper_than_tiers_that_are_not_pushed(per_host):
    """If passes over ids cost less with pushed tiers, few rows are pushed and all others stay."""
    specs, stats = tables_and_stats(1, 4, lengths=(20,))
    topology = replace(gpus(4, per_host=per_host), costs=Costs(phase_us=1.0, tier_ns=50.0))
    problem = make_problem(specs, stats, topology, batch_size=512, allow=EVERYTHING)
    t, everyone = problem.tables[0], (0, 1, 2, 3)
    rows = t.spec.num_rows
    bound = space_bound(problem, max_work=1400)
    for edge in (1, 5, rows // 2, rows - 1):
        for last in (Tier(edge, rows, "owned", (1,), mode="push"),
                     Tier(edge, rows, "striped", everyone)):
            tiers = (Tier(0, edge, "replicated", everyone), last)
            plan = Plan(4, (TablePlan(t.spec, (Piece(0, t.spec.dim, tiers),)),), "training", 512)
            assert bound <= evaluate(plan, problem).step_us * (1 + 1e-9)
