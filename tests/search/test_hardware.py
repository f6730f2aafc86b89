"""Declared features of topologies: their cost, when plans use them, and valid bounds."""

import json
from dataclasses import replace

import numpy as np
import pytest

from oper.errors import InvalidInputError, PlanInfeasibleError
from oper.plan import Piece, Plan, TablePlan, Tier
from oper.search import EXECUTABLE, evaluate, make_plan, make_problem, summary
from oper.search.cost.model import CostModel
from oper.search.cost.space import PUSH, hosts_are_interchangeable
from oper.search.planner import plan_problem
from oper.search.pricing.node import Node
from oper.search.problem import statement
from oper.search.problem.machine import (
    GROUPS,
    Term,
    first_neighbourhood,
    neighbourhoods,
    rank_classes,
)
from oper.search.problem.overlap import overlap_to_json, parse_overlap
from oper.search.problem.space import EVERYTHING
from oper.search.relaxation.inequalities import APART, SPREAD
from oper.search.relaxation.pieces import LoadLimits
from oper.search.relaxation.relaxation import Relaxation
from oper.search.relaxation.rows import Option
from oper.topology import Topology
from tests.search.search_cases import (
    KINDS,
    gpus,
    host,
    problem,
    racked,
    random_plan,
    shared,
    tables_and_stats,
    with_host_memory,
)
from tests.search.test_bound import COSTS, loads, owned
from tests.search.test_branching import SHARED, TOPOLOGIES, stated

# ---- rows in host memory -------------------------------------------------------------------------

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
    row, distinct = t.spec.row_bytes, t.total[statement.TOUCHED]
    mine = np.array([1, 1, 1, 0, 0, 0]) * t.total[statement.IDS] * row
    mine[1] += 3 * distinct * row  # for the three ranks of the other host
    assert forward.units[Term.HOST_MEMORY] == pytest.approx(mine)
    assert forward.units[Term.CROSS_IN] == pytest.approx([0, 0, 0, *[distinct * row] * 3])
    assert not forward.units[Term.LINK_IN].any()  # gradients take the links, rows do not
    state = t.spec.num_bytes / t.spec.num_rows - row
    assert update.units[Term.HOST_MEMORY] == pytest.approx(
        [0, t.total[statement.TOUCHED_ALL] * 2 * (row + state), 0, 0, 0, 0], rel=1e-6)
    assert found.host_bytes == pytest.approx([t.total[statement.ROWS] * (row + state), 0], rel=1e-6)
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
    assert held["host"][statement.ROWS] >= 0.3 * (held["host"] + held["device"])[statement.ROWS]
    hotness = {m: v[statement.IDS] / v[statement.ROWS] for m, v in held.items()}
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


def test_verbs_plan_and_explain_with_host_memory(stats_file, printed, tmp_path):
    machine = tmp_path / "small.toml"
    need = sum(s.num_rows for s in tables_and_stats(5, 2)[0]) * 256
    machine.write_text(f'name = "small"\nhost_memory_bytes = "1GB"\nhost_gbps = 20\n[[domain]]\n'
                       f'copies = 2\nmemory_bytes = {int(0.2 * need)}\nread_gbps = 1000\n'
                       'link_gbps = 200\n')
    words = [stats_file, "--topology", machine, "--objective", "inference", "-o",
             tmp_path / "a.json"]
    with pytest.raises(PlanInfeasibleError):
        printed("plan", *words, "--allow", "replicated,striped,pull")
    text = printed("plan", *words)
    assert "in host memory" in text and "host 0" in text and "host_memory us" in text
    first = Plan.load(tmp_path / "a.json")
    assert memories(first) == {"device", "host"}
    explain = ("explain", tmp_path / "a.json", "--topology", machine, "--stats", stats_file,
               "--json")
    value = json.loads(printed(*explain))
    assert value["lower_bound_us"] == pytest.approx(first.lower_bound_us)
    assert value["host_bytes"][0] > 0 and value["fits"]
    what = json.loads(printed(*explain, "--what-if", "host-link=x2"))["what_if"]
    assert what["after"]["planned_step_us"] < what["before"]["planned_step_us"]
    printed("plan", *words[:-1], tmp_path / "b.json", "--seed", "5")
    found = json.loads(printed(*explain, "--diff", tmp_path / "b.json"))
    assert "memory" in json.dumps(found)


# ---- links that ranks share ----------------------------------------------------------------------

TWO_EACH = replace(gpus(8, per_host=2), domains=tuple(
    replace(host(2).domains[0], host=h, ranks=(2 * h, 2 * h + 1), cross_gbps=1.0)
    for h in range(4)))


@pytest.mark.parametrize("name", SHARED)
def test_a_rank_waits_for_all_bytes_of_its_links(name: str) -> None:
    """Bytes are each rank's own; seconds are those of the entire link."""
    many = stated(1, name, costs={"wire_ns": 0.5})
    topology, machine = many.topology, many.machine
    rng, loaded = np.random.default_rng(2), 0
    for _ in range(4):
        for phase in evaluate(random_plan(many, rng, KINDS, 2), many).phases:
            for terms, of_rank, gbps in (
                    ((Term.CROSS_IN, Term.CROSS_OUT), machine.host, _host_gbps(topology)),
                    ((Term.RACK_IN, Term.RACK_OUT), machine.rack,
                     [r.uplink_gbps for r in topology.racks])):
                if of_rank is machine.host and not topology.hosts_share_links:
                    continue
                for term in terms:
                    carried = np.bincount(of_rank, phase.units[term])
                    for link, x in enumerate(gbps):
                        loaded += carried[link] > 0
                        assert phase.seconds[term, of_rank == link] == pytest.approx(
                            carried[link] / (x * 1e9), rel=1e-9, abs=1e-18)
                    group = phase.groups[term - 1]
                    local = phase.seconds[:2].sum(axis=0) * phase.has_local[term - 1]
                    assert group == pytest.approx(local + phase.seconds[term], rel=1e-9)
    assert loaded > 8


def _host_gbps(topology: Topology) -> list[float]:
    return [sum(d.cross_gbps * len(d.ranks) for d in topology.domains if d.host == h)
            for h in sorted({d.host for d in topology.domains})]


def test_the_only_sending_rank_has_its_hosts_whole_link() -> None:
    """If all ranks send, each has its share of the link."""
    apart, together = (problem(8, 3, t, allow=EVERYTHING) for t in (TWO_EACH, shared(TWO_EACH)))
    everyone = tuple(range(8))
    for owners, factor in (((0,), 2.0), ((0, 2, 4, 6), 2.0), ((0, 1), 1.0), (everyone, 1.0)):
        plan = owned(apart, [], owners)  # stripes, pulled
        own, one = (evaluate(plan, p).phases[-3].seconds[Term.CROSS_OUT] for p in (apart, together))
        assert own.max() > 0 and own.max() / one.max() == pytest.approx(factor, rel=0.05)
        assert one[0] == one[1]


@pytest.mark.parametrize("topology", [gpus(4, per_host=1), gpus(4), host(3)])
def test_nothing_changes_where_no_link_is_shared(topology: Topology) -> None:
    """No link is shared with one rank per host or a single host, one rack or one rack per host."""
    before = problem(5, 2, topology, allow=EVERYTHING)
    plan = random_plan(before, np.random.default_rng(3), KINDS)
    step = evaluate(plan, before).step_us
    for same in (shared(topology), racked(topology, 1e-3)):
        assert evaluate(plan, problem(5, 2, same, allow=EVERYTHING)).step_us == step


def test_racks_of_one_host_each_are_links_of_hosts() -> None:
    uplinks = [d.cross_gbps for d in gpus(4, per_host=1).domains]
    alike = problem(6, 4, racked(gpus(4, per_host=1), *uplinks), allow=EVERYTHING)
    rng = np.random.default_rng(4)
    for _ in range(6):
        for phase in evaluate(random_plan(alike, rng, KINDS, 2), alike).phases:
            assert phase.units[Term.RACK_IN] == pytest.approx(phase.units[Term.CROSS_IN])
            assert phase.units[Term.RACK_OUT] == pytest.approx(phase.units[Term.CROSS_OUT])
            assert phase.groups[GROUPS.index("rack_in")] == pytest.approx(
                phase.groups[GROUPS.index("cross_in")])


def test_transfers_within_a_rack_use_no_uplink() -> None:
    """Rows of the first rack's ranks are sent to each rank of the second rack once."""
    many = problem(3, 5, racked(gpus(4, per_host=1), 5.0, 5.0), allow=EVERYTHING)
    phase = evaluate(owned(many, [], (0,)), many).phases[-3]
    sent, received = phase.units[Term.CROSS_OUT], phase.units[Term.CROSS_IN]
    assert phase.units[Term.RACK_OUT] == pytest.approx([sent[0] * 2 / 3, 0, 0, 0])
    assert phase.units[Term.RACK_IN] == pytest.approx([0, 0, *received[2:]])
    assert phase.seconds[Term.RACK_OUT] == pytest.approx(
        np.array([1, 1, 0, 0]) * sent[0] * 2 / 3 / 5e9)


def test_hosts_of_unequal_racks_are_distinguished() -> None:
    def sizes(topology: Topology) -> list[int]:
        return [r.size for r in rank_classes(problem(1, 0, topology).machine).ranks]

    assert sizes(racked(gpus(4, per_host=1), 5.0, 5.0)) == [4]
    assert sizes(racked(gpus(4, per_host=1), 5.0, 6.0)) == [2, 2]
    assert sizes(racked(gpus(5, per_host=1), 5.0, 5.0)) == [3, 2]


@pytest.mark.parametrize("name", ["shared", "racks", "shared-racks"])
def test_plans_for_shared_links_are_no_slower_there_than_plans_for_shares(name: str) -> None:
    both = stated(4, name, 3)
    topology = replace(TOPOLOGIES[name], hosts_share_links=False, racks=())
    specs, stats = tables_and_stats(3, 4, lengths=(4, 20, 50))
    apart = make_problem(specs, stats, topology, batch_size=4096, allow=EVERYTHING)
    plan = plan_problem(both, target_gap=0.0)
    assert plan.step_us <= evaluate(plan_problem(apart, target_gap=0.0), both).step_us * 1.01
    assert CostModel(both).machine.shared_terms != ((), ())


@pytest.mark.parametrize("name", ["hosts", "pairs", *SHARED])
def test_every_row_of_the_relaxation_holds_for_plans(name: str) -> None:
    """Uncut pushed tables, placed as in the plan. The bytes of a shared link count once, also in
    rows about the host of the largest piece."""
    rng, close = np.random.default_rng(6), 0.0
    for seed in range(3):
        many = stated(seed, name, 3, COSTS if seed == 0 else None)  # else bytes are most of a step
        model, machine = CostModel(many), many.machine
        load = model.request_phase, GROUPS.index(neighbourhoods(machine)[1])
        relaxation = Relaxation(model, load if hosts_are_interchangeable(model) else None)
        shape = len(many.tables), len(relaxation.options)
        for _ in range(6):
            owners = [0, *rng.integers(machine.world_size, size=2).tolist()]
            plan = owned(many, owners, ())
            each = loads(model, plan)
            is_first = owners[int(each[:, load[0], load[1]].argmax())] in first_neighbourhood(
                machine)
            node = Node(relaxation, LoadLimits(each.max(axis=0), np.full(each.shape[1:], np.inf)))
            amount = np.zeros((*shape, statement.NUM_FEATURES))
            for n, owner in enumerate(owners):
                rank_class = int(relaxation.classes.of_rank[owner])
                amount[n, relaxation.options.index(Option(PUSH, rank_class))] = many.tables[n].total
            asked = node.base + Node(relaxation).resources_at(
                amount, np.arange(shape[0]), np.zeros(shape[0], np.int64)).sum(axis=0)
            phases = evaluate(plan, many).phases
            about = [((phase, GROUPS.index(group)), row, False)
                     for row, (phase, group, _) in enumerate(relaxation.rows.names)]
            about += [(x.at, x.row, x.kind == SPREAD) for x in relaxation.inequalities
                      if x.kind != APART or is_first]
            for (phase, group), row, has_both in about:
                # Of the row's group; for links, of both directions.
                kind = GROUPS[group].split("_")[0]
                groups = [n for n, x in enumerate(GROUPS) if x.startswith(kind)]
                busy = 1e6 * phases[phase].groups[groups if has_both else [group]].max()
                most = relaxation.phase_weight[row, phase] * busy
                assert asked[row] <= most * (1 + 1e-9) + 1e-9, (phase, group, row)
                close = max(close, asked[row] / most if row >= len(relaxation.rows.names) else 0.0)
    assert close > 0.9


# ---- dense compute that overlaps with phases -----------------------------------------------------


def overlapping(topology, overlap=None, objective="training", num_tables=6, **more):
    specs, stats = tables_and_stats(num_tables, 4)
    problem = make_problem(specs, stats, topology, objective=objective, batch_size=256, **more)
    return statement.with_overlap(problem, overlap)


def test_work_beyond_a_ranks_dense_compute_delays_it():
    plan = random_plan(overlapping(gpus(3)), np.random.default_rng(0), KINDS)
    plain = evaluate(plan, overlapping(gpus(3)))
    hidden = {"forward": [3.0, 0.0, 50.0], "update": 4.0}
    found = evaluate(plan, overlapping(gpus(3), hidden))
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
    assert evaluate(plan, overlapping(gpus(3), every)).step_us == pytest.approx(
        sum(p.fixed_us for p in plain.phases))


def test_no_overlap_by_default():
    assert overlapping(host(2)).overlap == {} == overlapping(host(2), {"update": 0}).overlap
    specs, stats = tables_and_stats(6, 4)
    plan = make_plan(specs, stats, host(2), batch_size=256)
    assert "overlap_us" not in plan.notes and "dense" not in summary(plan, overlapping(host(2)))


def test_sorting_ahead_is_a_separate_phase():
    plain, ahead = overlapping(host(1)), overlapping(host(1), {"resolve": 7.0})
    # Gradients of pushed rows are sorted after they arrive, which cannot run ahead.
    plan = random_plan(plain, np.random.default_rng(1), KINDS[:3])
    before, after = evaluate(plan, plain), evaluate(plan, ahead)
    assert [p.name for p in after.phases] == ["resolve", "forward", "backward", "update"]
    ids = sum(t.total[1] for t in plain.tables)
    assert after.phases[0].seconds.sum() == pytest.approx(ids * 5e-9)  # sort_ns of `host`
    assert after.step_us == pytest.approx(before.step_us - min(7.0, ids * 5e-3))
    # Without a cost per sorted id there is nothing to run ahead.
    assert len(evaluate(plan, overlapping(gpus(1), {"resolve": 7.0})).phases) == 3


@pytest.mark.parametrize("overlap", [
    {"update": 100.0}, {"update": [20.0, 200.0, 20.0, 20.0]}, {"backward": 60.0, "resolve": 5.0}])
def test_the_plan_stays_near_the_bound(overlap):
    for topology in (host(4), gpus(4)):
        plan = plan_problem(overlapping(topology, overlap, num_tables=30))
        assert plan.gap <= 0.03, (topology.name, plan.gap)


@pytest.mark.parametrize(("value", "word"), [
    ([3], "overlap"), ({"lunch": 3}, "phase"), ({"update": -1}, "update"),
    ({"update": "4"}, "update"), ({"update": [1, 2, 3]}, "one number or 2"),
    ({"update": float("nan")}, "update"), ({"update": True}, "update"),
    ({"update": None}, "update"),
])
def test_invalid_overlaps_are_named(value, word):
    with pytest.raises(InvalidInputError, match=word):
        overlapping(host(2), value)
    with pytest.raises(InvalidInputError, match="phase"):
        overlapping(host(2), {"update": 3}, "inference")


def test_json_round_trip():
    made = parse_overlap({"update": 3, "forward": [1, 2]}, ("forward", "update"), 2)
    assert overlap_to_json(made) == {"update": 3.0, "forward": [1.0, 2.0]}
    assert parse_overlap(overlap_to_json(made), ("forward", "update"), 2) == made


def test_verbs_store_overlap_in_the_plan(stats_file, printed, tmp_path, capsys):
    out = tmp_path / "plan.json"
    words = ("plan", stats_file, "--topology", "h100-8", "-o", out)
    printed(*words)
    alone = Plan.load(out).step_us
    with pytest.raises(SystemExit):
        printed(*words, "--overlap", "update=fast")
    assert "PHASE=US" in capsys.readouterr().err
    assert "overlapped us" in printed(*words, "--overlap", "update=5", "--overlap", "backward=2")
    plan = Plan.load(out)
    assert plan.notes["overlap_us"] == {"update": 5.0, "backward": 2.0}
    assert plan.step_us < alone
    value = json.loads(printed("explain", out, "--stats", stats_file, "--json"))
    assert value["step_us"] == pytest.approx(plan.step_us)
    assert [p["hidden_us"][0] for p in value["phases"]] == pytest.approx([0.0, 2.0, 5.0])
