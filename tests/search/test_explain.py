"""Summaries of plans, bottlenecks, verbs, shipped topologies; replays of batches."""

import itertools
import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from oper.errors import (
    FileFormatError,
    InvalidInputError,
    PlanError,
    PlanInfeasibleError,
    UsageError,
)
from oper.messages import MessageBits
from oper.plan import Piece, Plan, TablePlan, Tier, uniform_plan
from oper.rows.traffic import KIND, SENT, link_classes
from oper.search import evaluate, make_plan, make_problem, summary, topology_preset
from oper.search.cost.evaluation import Phase
from oper.search.explain.bottleneck import bottlenecks, describe
from oper.search.explain.diff import as_text, diff
from oper.search.explain.summary import as_json
from oper.search.planner import plan_problem
from oper.search.problem.machine import GROUPS, TERMS, Term, copy_sets
from oper.search.problem.presets import preset_names
from oper.search.problem.space import EVERYTHING
from oper.search.problem.statement import Problem
from oper.search.replay.realized import RealizedLoad, StepLoad
from oper.search.replay.simulate import Bags, RankBatch, Replay
from oper.search.replay.timeline import DENSE, LANES, LOOKUPS, Schedule, run
from oper.search.replay.wire import WireReplay
from oper.stats import AccessStats, TableStats
from oper.tables import TableSpec
from oper.topology import Costs, Topology
from tests.search.search_cases import (
    KINDS,
    counted,
    gpus,
    host,
    problem,
    racked,
    random_plan,
    shared,
    tables_and_stats,
    with_host_memory,
)
from tests.support import map_tiers, read_trace, run_command


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


def test_verb_plan_writes_a_plan_and_prints_loads_bound_and_gap(stats_file, printed, tmp_path):
    out = tmp_path / "plan.json"
    text = printed("plan", stats_file, "--topology", "this-host", "--world-size", 3, "--dim", 16,
                   "-o", out)
    assert "lower bound" in text and "gap" in text and "forward, per rank" in text
    plan = Plan.load(out)
    assert plan.world_size == 3 and {t.table.dim for t in plan.tables} == {16}
    assert plan.lower_bound_us > 0 and plan.gap < 0.01
    assert f"{plan.lower_bound_us:.1f} us" in printed("explain", out, "--stats", stats_file)


def test_verb_explain_bounds_a_plan_anew_for_another_machine(stats_file, printed, tmp_path):
    out = tmp_path / "plan.json"
    first = json.loads(printed("plan", stats_file, "--topology", "h100-8", "-o", out, "--json"))
    words = ("explain", out, "--stats", stats_file)
    slower = json.loads(printed(*words, "--topology", "a100-8", "--json"))
    assert " 8 ranks, 8 memory domains, 1 host (" in printed(*words)
    assert slower["lower_bound_us"] > first["lower_bound_us"]
    assert slower["step_us"] >= slower["lower_bound_us"] * (1 - 1e-9)


def test_verb_explain_refuses_statistics_of_another_order(tmp_path):
    spec, ranks = TableSpec("t", 3, 4, ("t",)), (0, 1)
    tiers = (Tier(0, 1, "replicated", ranks), Tier(1, 3, "striped", ranks))
    Plan(2, (TablePlan(spec, (Piece(0, 4, tiers),), np.array([2])),)).save(tmp_path / "plan.json")
    plain = Plan(2, (TablePlan(spec, (Piece(0, 4, (Tier(0, 3, "striped", ranks),)),)),))
    plain.save(tmp_path / "plain.json")
    words = ("explain", tmp_path / "plan.json", "--topology", "this-host", "--batch-size", 8)
    diff = ("explain", tmp_path / "plain.json", *words[2:], "--diff", tmp_path / "plan.json")
    for name, ids, in_order in (("raw", [2, 1, 0], False), ("other", [0, 1, 2], False),
                                ("sorted", [0, 1, 2], True)):
        AccessStats(10, {"t": TableStats(
            3, np.array(ids), np.array([9, 5, 1]), length_values=np.array([1]),
            length_counts=np.array([15]))}, "", in_order).save(tmp_path / f"{name}.npz")
    for command in (words, diff):
        assert run_command(*command, "--stats", tmp_path / "raw.npz") == 0
        for name in ("other", "sorted"):
            with pytest.raises(InvalidInputError, match=r"plan.json.* statistics=\['t'\]"):
                run_command(*command, "--stats", tmp_path / f"{name}.npz")


def test_verb_explain_asks_for_the_topology_that_a_plan_does_not_state(tmp_path):
    uniform_plan([TableSpec("t", 3, 4, ("t",))], 2).save(tmp_path / "plan.json")
    words = ("explain", tmp_path / "plan.json", "--batch-size", 8)
    with pytest.raises(UsageError, match=r"topology=''.* with --topology"):
        run_command(*words)
    with pytest.raises(InvalidInputError, match="no such topology"):
        run_command(*words, "--topology", tmp_path)


def test_verb_plan_json_presets_and_files(stats_file, printed, tmp_path):
    out = tmp_path / "plan.json"
    value = json.loads(printed("plan", stats_file, "--topology", "h100-8", "--objective",
                               "inference", "-o", out, "--json"))
    assert value["world_size"] == 8 and value["source"] == "published"
    mine = tmp_path / "mine.toml"
    mine.write_text('name = "mine"\n[[domain]]\nranks = 2\nmemory_bytes = "1GB"\nread_gbps = 10\n')
    tables = tmp_path / "tables.json"
    specs, _ = tables_and_stats(5, 2)
    tables.write_text(json.dumps([s.to_json() for s in specs]))
    assert "mine" in printed("plan", stats_file, "--topology", mine, "--tables", tables, "-o", out)
    assert [t.table for t in Plan.load(out).tables] == specs
    printed("verify", out, "--stats", stats_file, "--topology", mine)
    for verb in ("verify", "explain"):
        with pytest.raises(UsageError, match=r"topology='mine'.* with --topology"):
            run_command(verb, out, "--stats", stats_file)
    for name in ("h100-8", "h100-3x8"):  # which `oper explain` would take for the preset
        mine.write_text(mine.read_text().replace("mine", name).replace("h100-8", name))
        with pytest.warns(UserWarning, match="the name of a preset"):
            printed("plan", stats_file, "--topology", mine, "--tables", tables, "-o", out)


@pytest.mark.parametrize(("words", "error", "match"), [
    (["--topology", "abacus-8"], InvalidInputError, "abacus-8"),
    (["--topology", "h100-8", "--world-size", "4"], UsageError, "--world-size=4, expected 8"),
    (["--topology", "this-host", "--dtype", "int8"], UsageError, "--objective inference"),
    (["--topology", "this-host", "--dim", "10000000000"], PlanInfeasibleError, "largest table"),
])
def test_verb_plan_errors_name_the_cause(stats_file, tmp_path, words, error, match):
    with pytest.raises(error, match=match):
        run_command("plan", stats_file, *words, "-o", tmp_path / "p.json")
    assert not (tmp_path / "p.json").exists()


def test_verb_plan_refuses_a_folder_as_output_before_it_plans(stats_file, tmp_path, monkeypatch):
    monkeypatch.setattr("oper.search.planner.plan_problem", None)
    with pytest.raises(InvalidInputError, match="a file, not a folder"):
        run_command("plan", stats_file, "--topology", "this-host", "-o", tmp_path)


def test_verb_plan_refuses_files_of_another_kind(stats_file, tmp_path):
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
def test_every_preset_loads_and_is_marked_as_published(name):
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


# ---- bottlenecks, savings by moves, two plans compared -------------------------------------------


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
    codes = uniform_plan([replace(s, dtype="int8", optimizer="none") for s in specs], 2)
    wider = map_tiers(codes, lambda x: replace(x, dtype="float16"))
    reading = make_problem([t.table for t in codes.tables], stats, host(2), batch_size=512,
                           objective="inference")
    found = diff(codes, wider, reading)  # modelled with the table's own type
    assert len(found["tables"]) == 5 and "float16" in as_text(found, ("one", "two"))
    assert "bits" not in text
    across = make_problem(specs, stats, gpus(2, per_host=1), batch_size=512)
    found = diff(one, replace(one, message_bits=MessageBits(8, 8)), across)
    assert found["tables"] == [] and "[32, 32] before, [8, 8] after" in as_text(found, ("", ""))
    assert found["after"]["step_us"] < found["before"]["step_us"] == evaluate(one, across).step_us
    with pytest.raises(PlanError):
        diff(one, uniform_plan(specs[:3], 2), stated)


def test_verb_compares_two_plan_files(printed, tmp_path):
    specs, _ = tables_and_stats(3, 3)
    for kind, name in (("striped", "a.json"), ("owned", "b.json")):
        uniform_plan(specs, 2, kind, topology="this-host-2", batch_size=64).save(tmp_path / name)
    for more in ([], ["--json"]):
        with pytest.warns(UserWarning, match="statistics"):
            out = printed("explain", tmp_path / "a.json", "--diff", tmp_path / "b.json", *more)
        tables = json.loads(out)["tables"] if more else []
        assert len(tables) == 3 if more else "3 of 3 tables are placed differently" in out


def test_notation():
    assert [describe(t) for t in (
        Tier(0, 1, "owned", (3,)), Tier(0, 1, "striped", (0, 1)),
        Tier(0, 1, "replicated", (0, 1)), Tier(0, 1, "striped", (0, 1), mode="push"))] == [
            "S@3", "Sx2", "Bx2", "Px2"]


# ---- replayed batches and the cost model ---------------------------------------------------------

BATCH = 256


def stated(topology: Topology, objective: str = "training") -> tuple[Problem, list[np.ndarray]]:
    """A problem of three tables, and the probability of each row of each."""
    rng = np.random.default_rng(3)
    shapes = ((2000, 16, "sgd", 4), (300, 64, "rowwise_adagrad", 1), (900, 8, "adagrad", 2))
    specs, stats, chances = [], {}, []
    for k, (rows, dim, optimizer, length) in enumerate(shapes):
        specs.append(TableSpec(f"t{k}", rows, dim, (f"f{k}",), optimizer=optimizer))
        stats[f"t{k}"] = counted(rows, 0.9, rng, length=length)
        counts = np.zeros(rows)
        counts[stats[f"t{k}"].head_ids] = stats[f"t{k}"].head_counts
        chances.append(counts / counts.sum())
    every = AccessStats(200_000, stats, "generated", True)
    return make_problem(specs, every, topology, objective=objective, batch_size=BATCH), chances


def draw(problem: Problem, chances: list[np.ndarray], rng: np.random.Generator) -> list[RankBatch]:
    batches = []
    for _ in range(problem.machine.world_size):
        batch = {}
        for t, chance in zip(problem.tables, chances, strict=True):
            lengths = np.full(BATCH, int(t.traffic.lengths[0]))
            ids = rng.choice(chance.size, int(lengths.sum()), p=chance)
            batch[t.spec.features[0]] = Bags(ids, lengths)
        batches.append(batch)
    return batches


def dynamic(problem: Problem, chances: list[np.ndarray]) -> Problem:
    """The problem with tables t0 and t2 dynamic; keys without a row read row 0."""
    return replace(problem, tables=tuple(
        t if t.spec.name == "t1" else replace(t, default_share=float(chance[0]))
        for t, chance in zip(problem.tables, chances, strict=True)))


def _one_copy_per_host(plan: Plan, problem: Problem, seed: int) -> Plan:
    """A plan in which every other replicated tier is copied to only one rank per host."""
    sets, turn = copy_sets(problem.machine), itertools.count(seed)

    def moved(x: Tier) -> Tier:
        if not sets or x.placement != "replicated" or x.memory == "host" or next(turn) % 2:
            return x
        return replace(x, ranks=sets[seed % len(sets)])

    return map_tiers(plan, moved)


@pytest.mark.parametrize("objective", ["training", "inference"])
@pytest.mark.parametrize(("topology", "bits"), [
    (gpus(4, per_host=2), 32), (gpus(4, per_host=2), (8, 8)), (gpus(4, per_host=2), (16, 32)),
    (host(3), 32), (racked(gpus(4, per_host=1), 9.0, 5.0), 32),
    (shared(racked(gpus(6, per_host=2), 9.0, 5.0)), 32)],
    ids=["hosts", "8 bits", "16 bits", "one memory", "racks", "shared"])
def test_the_mean_of_many_steps_is_what_the_model_predicts(topology: Topology, bits: Any,
                                                           objective: str) -> None:
    costs = Costs(phase_us=2.0, id_ns=1.0, sort_ns=2.0, reduce_ns=3.0, update_ns=4.0, run_ns=5.0,
                  refresh_ns=6.0, tier_ns=7.0, push_ns=8.0, table_us=9.0, warm_share=0.5,
                  key_ns=20.0, key_count_ns=19.0, key_insert_ns=630.0)
    problem, chances = stated(with_host_memory(replace(topology, costs=costs)), objective)
    problem = dynamic(replace(problem, message_bits=MessageBits.parse(bits)), chances)
    kinds = KINDS if objective == "training" else KINDS[:3]
    rng = np.random.default_rng(11)
    for seed in range(6):
        plan = random_plan(problem, np.random.default_rng(seed), kinds, max_pieces=2,
                           in_host=KINDS)
        plan = _one_copy_per_host(plan, problem, seed)
        predicted = evaluate(plan, problem)
        load = RealizedLoad(plan, problem)
        steps = [load.step(draw(problem, chances, rng)).phases for _ in range(12)]
        for k, phase in enumerate(predicted.phases):
            units = np.mean([s[k].units for s in steps], axis=0)
            for n, term in enumerate(TERMS):
                if bits != 32 and n not in (Term.CROSS_IN, Term.CROSS_OUT):
                    continue  # headers count as numbers, also within a host
                # Host memory is read once per id; the mean of few ids is inaccurate.
                size = max(float(phase.units[n].max()), 1e4 if n == Term.HOST_MEMORY else 1.0)
                assert np.allclose(units[n], phase.units[n], rtol=0.1, atol=0.05 * size), (
                    seed, phase.name, term)
            assert steps[0][k].fixed_us == phase.fixed_us


def test_rows_between_two_gpus_are_the_distinct_ones() -> None:
    problem, _ = stated(gpus(2))
    spec = problem.tables[0].spec
    entries = [TablePlan(t.spec, (Piece(0, t.spec.dim, (
        Tier(0, t.spec.num_rows, "owned", (1,)),)),)) for t in problem.tables]
    plan = Plan(2, tuple(entries))
    one = {"f0": Bags(np.array([5, 5, 7, 9]), np.array([3, 1]))}
    load = RealizedLoad(plan, problem).step([one, {}])
    forward, backward, update = load.phases
    assert forward.units[Term.LINK_IN].tolist() == [3 * spec.row_bytes, 0]
    assert forward.units[Term.LINK_OUT].tolist() == [0, 3 * spec.row_bytes]
    assert update.units[Term.LINK_IN].tolist() == [0, 3 * (4 * spec.dim + 4)]  # with their slots
    assert not backward.units[Term.LINK_IN].any() and not forward.units[Term.CROSS_IN].any()
    counts = Replay(plan).step([one, {}])
    assert counts[0].counts[KIND["rows"], 0].tolist() == [0, 4]
    assert counts[1].counts[KIND["gradient_rows"], 0].tolist() == [3, 0]
    assert counts[0].by_link(gpus(2))["forward"] == {
        "own rank": 0, "memory domain": 0, "host": 4 * spec.row_bytes, "cross host": 0}


def test_only_ranks_with_a_copy_update_it() -> None:
    topology = gpus(4, per_host=2)
    problem, chances = stated(replace(topology, costs=replace(topology.costs, refresh_ns=50.0)))
    entries = [TablePlan(t.spec, (Piece(0, t.spec.dim, (
        Tier(0, t.spec.num_rows, "replicated", (0, 2)),)),)) for t in problem.tables]
    plan = Plan(4, tuple(entries))
    predicted = evaluate(plan, problem).phases[-1]
    real = RealizedLoad(plan, problem).step(draw(problem, chances, np.random.default_rng(0)))
    for phase in (predicted, real.phases[-1]):
        refreshing = phase.units[Term.COMPUTE] > 1e4
        assert refreshing.tolist() == [True, False, True, False]


def test_every_id_of_an_unpooled_table_is_a_bag() -> None:
    """Its owner sends a row for each, as the cost model counts."""
    problem, _ = stated(gpus(2, per_host=1))
    spec = replace(problem.tables[0].spec, pooling="none")
    plan = Plan(2, (TablePlan(spec, (Piece(0, spec.dim, (
        Tier(0, spec.num_rows, "owned", (1,), mode="push"),)),)),))
    lookups = [{"f0": Bags(np.array([5, 5, 7, 9]), np.array([3, 1]))}, {}]
    assert Replay(plan, domain_of=[0, 1]).step(lookups)[0].counts[KIND["partial_sums"], 0, 1] == 4
    sent = WireReplay(plan, [0, 1]).step(lookups)
    assert sent[SENT.index("partial_sums"), 1, 0] == 4 * 4 * spec.dim


def test_links_have_classes() -> None:
    assert link_classes(4, gpus(4, per_host=2))[0].tolist() == [0, 2, 3, 3]
    assert link_classes(2, host(2)).tolist() == link_classes(2).tolist() == [[0, 1], [1, 0]]
    with pytest.raises(InvalidInputError, match="ranks"):
        link_classes(3, gpus(4))


@pytest.mark.parametrize(("bags", "word"), [
    (Bags(np.array([2000]), np.array([1])), "id=2000"),
    (Bags(np.array([-1]), np.array([1])), "id=-1"),
    (Bags(np.array([1, 2]), np.array([1])), "lengths"),
    (Bags(np.array([1]), np.array([2, -1])), "lengths"),
])
def test_bad_batches_are_refused(bags: Bags, word: str) -> None:
    problem, _ = stated(gpus(2))
    plan = random_plan(problem, np.random.default_rng(0))
    with pytest.raises(InvalidInputError, match=word):
        Replay(plan).step([{"f0": bags}, {}])
    with pytest.raises(InvalidInputError, match="one per rank"):
        Replay(plan).step([{}])


def made(name: str, memory_us: list[float], link_us: list[float]) -> Phase:
    seconds = np.zeros((len(TERMS), 2))
    seconds[Term.MEMORY] = np.array(memory_us) * 1e-6
    seconds[Term.LINK_IN] = np.array(link_us) * 1e-6
    return Phase(name, seconds * 1e9, seconds, 1.0, np.zeros(2),
                 np.arange(len(GROUPS)) == 0)


STEP = StepLoad((made("forward", [10, 20], [5, 30]), made("backward", [40, 8], [0, 0]),
                 made("update", [3, 6], [0, 0])), np.array([15.0, 5.0]))


def test_barriers_are_those_of_the_runtime() -> None:
    """There is none between forward and backward, so rank 1 waits less than the phases' sum."""
    timeline = run([STEP, STEP], Schedule(True), 2)
    # Rank 0: 10 + 1 and 40 + 1; rank 1: 30 (its link) + 1 and 8 + 1; then 6 + 1 on rank 1.
    assert timeline.ends_us == pytest.approx([52 + 7, 2 * (52 + 7)])
    waits = [(x.process, x.start_us, x.length_us) for x in timeline.bars
             if x.name == "wait" and x.args["step"] == 0]
    assert waits == [(1, 40, 12), (0, 56, 3)]
    late = run([StepLoad((*STEP.phases, made("refresh", [0, 0], [9, 4])), STEP.ids_us)],
               Schedule(True), 2)
    assert late.ends_us == pytest.approx([52 + 7 + 10])
    pushed = run([STEP], Schedule(True, has_push=True), 2)
    assert pushed.ends_us == pytest.approx([31 + 41 + 7])


def test_phases_last_as_long_as_reads_of_host_memory() -> None:
    phase = made("forward", [10, 20], [5, 30])
    phase.seconds[Term.HOST_MEMORY] = np.array([50, 0]) * 1e-6
    timeline = run([StepLoad((phase,), np.zeros(2))], Schedule(False), 2)
    assert timeline.ends_us == pytest.approx([51])
    assert [x.length_us for x in timeline.bars if LANES[x.thread] == "host_memory"] == [
        pytest.approx(50)]


def test_ids_are_sorted_ahead_during_dense_compute() -> None:
    alone = run([STEP] * 3, Schedule(True, dense_us=10.0), 2)
    ahead = run([STEP] * 3, Schedule(True, dense_us=10.0, in_flight=2), 2)
    # 10 of rank 0's 15 microseconds of sorting find room; no step precedes the first one.
    assert alone.ends_us[-1] - ahead.ends_us[-1] == pytest.approx(20.0)
    # If one step has much to sort, two earlier windows help more than one.
    long = [STEP, STEP, replace(STEP, ids_us=np.array([25.0, 5.0]))]
    two, three = (run(long, Schedule(True, dense_us=20.0, in_flight=k), 2) for k in (2, 3))
    done = [sum(x.length_us for x in t.bars if x.name == "ids ahead" and x.process == 0)
            for t in (two, three)]
    assert done == pytest.approx([15 + 20, 15 + 25])
    assert any(x.name == "ids ahead" and x.thread == LOOKUPS for x in ahead.bars)


def test_inference_overlaps_lookups_with_dense_compute() -> None:
    steps = [StepLoad((made("forward", [10, 10], [0, 0]),), np.zeros(2))] * 4
    one = run(steps, Schedule(False, dense_us=20.0, in_flight=1), 2)
    two = run(steps, Schedule(False, dense_us=20.0, in_flight=2), 2)
    assert one.ends_us == pytest.approx([31, 62, 93, 124])
    assert two.ends_us == pytest.approx([31, 51, 71, 91])


@pytest.mark.parametrize("schedule", [
    Schedule(True), Schedule(True, True, 25.0, 3), Schedule(False, False, 25.0, 2)])
def test_the_trace_is_well_formed(schedule: Schedule, tmp_path) -> None:
    timeline = run([STEP] * 5, schedule, 2)
    timeline.write_trace(tmp_path / "t.json")
    trace = read_trace(tmp_path / "t.json")
    lanes: dict[tuple[int, int], float] = {}
    for e in trace["traceEvents"]:
        if e["ph"] == "X":
            at = (e["pid"], e["tid"])
            # Intervals of a lane do not overlap.
            assert e["dur"] > 0 and e["ts"] >= lanes.get(at, 0.0) - 2e-3
            lanes[at] = e["ts"] + e["dur"]
    assert {pid for pid, _ in lanes} == {0, 1}
    assert ((0, DENSE) in lanes) == (schedule.dense_us > 0)
    assert max(lanes.values()) <= timeline.ends_us[-1] + 2e-3
    named = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert "lookups" in named


def test_schedules_are_checked() -> None:
    for bad in ({"dense_us": -1.0}, {"dense_us": float("nan")}, {"in_flight": 0}):
        with pytest.raises(InvalidInputError, match=next(iter(bad))):
            Schedule(True, **bad)
