"""The cost model compared with sums written by hand, single units, and counts of random batches."""

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from oper.errors import PlanError
from oper.plan import Piece, Plan, TablePlan, Tier, uniform_plan
from oper.search import evaluate, make_problem
from oper.search.certificate.leaf import Checker
from oper.search.cost.load_vector import KERNEL_WIDTHS
from oper.search.cost.model import CostModel
from oper.search.cost.space import PUSH, REPLICATED, SHARD, row_makers
from oper.search.problem.machine import GROUPS, Term
from oper.search.problem.space import EVERYTHING
from oper.search.problem.statement import IDS, NUM_FEATURES, ROWS, TOUCHED, TOUCHED_ALL
from oper.search.relaxation.relaxation import Relaxation
from oper.search.relaxation.units import ANY, LOCAL, WHOLE
from oper.stats import AccessStats, TableStats
from oper.tables import TableSpec
from oper.topology import Costs
from tests.search.search_cases import gpus, host, problem, random_plan
from tests.search.test_branching import TOPOLOGIES, stated


def flat(topology, objective="training", num_rows=64, dim=16, length=1, batch=32):
    """One table of equally hot rows, so that features are proportional to rows."""
    stats = TableStats.from_counts(num_rows, np.arange(num_rows), np.full(num_rows, 1000),
                                   (np.array([length]), np.array([num_rows * 1000 // length])))
    return make_problem(
        [TableSpec("t", num_rows, dim, ("f",))],
        AccessStats(num_rows * 1000 // length, {"t": stats}, "", True), topology,
        objective=objective, batch_size=batch, allow=EVERYTHING)


SLOT, REQUEST = 4, 4 + 1 / 8  # bytes of a row's number; of a pushed id, and a bit where bags begin
FAR_SLOT, FAR_REQUEST = 6 / 8, 7 / 8  # the same between hosts, of 64 rows


def plan_of(stated, *tiers, pieces=None):
    t = stated.tables[0].spec
    columns = pieces or (Piece(0, t.dim, tiers),)
    return Plan(stated.machine.world_size, (TablePlan(t, columns),), stated.objective)


def test_striped_pull_moves_unique_rows_both_ways():
    stated = flat(gpus(4, per_host=2))
    t = stated.tables[0]
    w, u = 64, t.total[TOUCHED]
    _, forward, _, update = evaluate(plan_of(stated, Tier(0, 64, "striped", (0, 1, 2, 3))),
                                  stated).phases
    # Each rank owns a quarter; one peer shares its host, two do not.
    assert forward.units[Term.LINK_IN] == pytest.approx(np.full(4, u * w / 4))
    assert forward.units[Term.CROSS_IN] == pytest.approx(np.full(4, u * w / 2))
    assert forward.units[Term.LINK_OUT].sum() == pytest.approx(forward.units[Term.LINK_IN].sum())
    assert update.units[Term.LINK_IN] == pytest.approx(np.full(4, u * (w + SLOT) / 4))
    assert update.units[Term.CROSS_OUT] == pytest.approx(np.full(4, u * (w + FAR_SLOT) / 2))


def test_cost_of_replicas():
    """(W-1) w [u(B) + u(WB)] per step over all ranks, and nothing in the forward phase."""
    stated = flat(gpus(4))
    t = stated.tables[0]
    forward, _, update = evaluate(plan_of(stated, Tier(0, 64, "replicated", (0, 1, 2, 3))),
                                  stated).phases
    assert forward.units[2:].sum() == 0
    wanted = 3 * (64 + SLOT) * (t.total[TOUCHED] + t.total[TOUCHED_ALL])
    assert update.units[Term.LINK_IN].sum() == pytest.approx(wanted)
    assert update.units[Term.LINK_OUT].sum() == pytest.approx(wanted)


def test_changed_rows_follow_all_gradients():
    """With unequal links, the time of each exchange is that of its slowest rank."""
    tier, alike = Tier(0, 64, "replicated", (0, 1, 2, 3)), gpus(4, per_host=1)
    slow = replace(alike, domains=tuple(
        replace(d, cross_gbps=25.0 / (1 + r)) for r, d in enumerate(alike.domains)))
    one, two = (evaluate(plan_of(flat(x), tier), flat(x)) for x in (alike, slow))
    assert [p.name for p in one.phases] == ["request", "forward", "backward", "update"]
    assert [p.name for p in two.phases][4:] == ["refresh"]
    update, refresh = two.phases[3:]
    both = update.units + refresh.units
    assert both == pytest.approx(one.phases[3].units)
    total = flat(slow).tables[0].total
    wanted = total[TOUCHED_ALL] * (64 + SLOT) * np.full(4, 3 / 4)  # from three other masters
    assert refresh.units[Term.CROSS_IN] == pytest.approx(wanted)
    assert refresh.units[Term.CROSS_OUT] == pytest.approx(wanted)
    assert refresh.time_us == pytest.approx(wanted[3] * 4 / 25e3) and not refresh.fixed_us
    assert sum(p.fixed_us for p in one.phases) == sum(p.fixed_us for p in two.phases)


def test_replication_never_saves_bytes_in_training_but_does_in_inference():
    for objective, fewer in (("training", False), ("inference", True)):
        stated = flat(gpus(4), objective)
        total = [sum(p.units[2:].sum() for p in evaluate(plan_of(stated, tier), stated).phases)
                 for tier in (Tier(0, 64, "replicated", (0, 1, 2, 3)),
                              Tier(0, 64, "striped", (0, 1, 2, 3)))]
        assert (total[0] < total[1]) == fewer


def test_no_link_bytes_inside_a_memory_domain():
    stated = flat(host(4))
    rng = np.random.default_rng(0)
    for _ in range(10):
        plan = random_plan(stated, rng, ("replicated", "striped", "owned", "owned-push"))
        assert all(p.units[2:].sum() == 0 for p in evaluate(plan, stated).phases)


def test_reading_costs_memory_once_and_cache_afterwards():
    stated = flat(host(2), "inference", length=8)
    t = stated.tables[0]
    forward = evaluate(plan_of(stated, Tier(0, 64, "striped", (0, 1))), stated).phases[0]
    ids, distinct = t.total[IDS], t.total[TOUCHED]
    outputs = t.traffic.num_bags * 64
    # The 4 kB working set fits the cache, which is three times as fast as memory.
    assert forward.units[Term.MEMORY] == pytest.approx(
        np.full(2, (distinct + (ids - distinct) / 3) * 64 + outputs))
    assert forward.units[Term.COMPUTE] == pytest.approx(np.full(2, ids * 3.0))
    assert forward.time_us == pytest.approx(
        30 + 1e6 * (forward.units[Term.MEMORY, 0] / 20e9 + ids * 3e-9))


@pytest.mark.parametrize(("per_host", "link_in", "comes_on_top"), [(2, Term.LINK_IN, False),
                                                                  (1, Term.CROSS_IN, True)])
def test_exchange_between_hosts_adds_to_own_work(per_host, link_in, comes_on_top):
    """Reads within a host overlap with own work; nothing is exchanged in backward."""
    stated = flat(gpus(2, per_host=per_host), batch=4096)
    found = evaluate(plan_of(stated, Tier(0, 64, "striped", (0, 1))), stated)
    for phase in found.phases[-3:]:  # no rows are pushed
        own, link = phase.seconds[[Term.MEMORY, Term.COMPUTE]].sum(axis=0), phase.seconds[link_in]
        assert own.min() > 0 and link.all() == (phase.name != "backward")
        least = own + link if comes_on_top else np.maximum(own, link)
        assert (phase.time_us - phase.fixed_us) / 1e6 == pytest.approx(least.max())


def test_owners_do_the_update():
    stated = flat(host(2))
    t = stated.tables[0]
    update = evaluate(plan_of(stated, Tier(0, 64, "owned", (1,))), stated).phases[2]
    assert update.units[Term.COMPUTE] == pytest.approx([0, t.total[TOUCHED_ALL] * 12.0])
    merged = 2 * t.total[TOUCHED] * (64 + SLOT)
    assert update.units[Term.MEMORY] == pytest.approx(
        [0, t.total[TOUCHED_ALL] * 2 * (64 + 4) + merged])
    assert update.slowest_rank == 1 and update.binding == "local"


def test_memory_counts_every_copy():
    stated = flat(host(2))
    base = evaluate(plan_of(stated, Tier(0, 64, "striped", (0, 1))), stated).domain_bytes[0]
    double = evaluate(plan_of(stated, Tier(0, 64, "replicated", (0, 1))), stated).domain_bytes[0]
    assert double - base == pytest.approx(2 * 64 * 64)  # a copy per rank besides the masters
    serve = flat(host(2), "inference")
    one = evaluate(plan_of(serve, Tier(0, 64, "replicated", (0, 1))), serve)
    assert one.domain_bytes == pytest.approx([64 * 64])  # one copy per domain, no state


def test_push_sends_ids_and_one_partial_sum_per_bag_and_owner():
    stated = flat(gpus(4), length=4)
    t = stated.tables[0]
    forward, _, update = evaluate(
        plan_of(stated, Tier(0, 64, "owned", (2,), mode="push")), stated).phases
    bags = t.traffic.num_bags
    assert forward.units[Term.LINK_IN, 0] == pytest.approx(bags * 64)
    assert forward.units[Term.LINK_OUT, 2] == pytest.approx(3 * bags * 64)
    assert forward.units[Term.LINK_IN, 2] == pytest.approx(3 * t.total[IDS] * REQUEST)
    assert update.units[Term.LINK_IN, 2] == pytest.approx(3 * bags * 64)
    striped = evaluate(plan_of(stated, Tier(0, 64, "striped", (0, 1, 2, 3), mode="push")),
                       stated).phases[0]
    each = t.traffic.bags_touching(0.25)
    assert striped.units[Term.LINK_IN, 0] == pytest.approx(
        3 * each * 64 + 3 * t.total[IDS] / 4 * REQUEST)
    assert 4 * each > bags  # splitting by rows multiplies partial sums


def test_two_pushed_tiers_of_one_owner_share_their_partial_sums():
    stated = flat(gpus(4), length=4)
    whole = evaluate(plan_of(stated, Tier(0, 64, "owned", (2,), mode="push")), stated)
    halves = evaluate(plan_of(stated, Tier(0, 32, "owned", (2,), mode="push"),
                              Tier(32, 64, "owned", (2,), mode="push")), stated)
    assert halves.step_us == pytest.approx(whole.step_us)


def test_columns_split_bytes_but_not_ids():
    stated = flat(gpus(4), length=4)
    tier = Tier(0, 64, "owned", (0,), mode="push")
    other = Tier(0, 64, "owned", (1,), mode="push")
    split = evaluate(plan_of(stated, pieces=(Piece(0, 8, (tier,)), Piece(8, 16, (other,)))), stated)
    whole = evaluate(plan_of(stated, tier), stated)
    ids = stated.tables[0].total[IDS]
    assert split.phases[0].units[Term.LINK_IN, :2] == pytest.approx(
        [3 * ids * REQUEST + stated.tables[0].traffic.num_bags * 32] * 2)
    assert split.phases[0].units[Term.LINK_IN, 3] == pytest.approx(
        whole.phases[0].units[Term.LINK_IN, 3])


@pytest.mark.parametrize("per_host, barriers", [(4, 1.0), (2, 1.5)])
def test_adding_up_squares_costs_a_barrier_and_between_hosts_another_exchange(per_host, barriers):
    stated = flat(gpus(4, per_host=per_host))
    pieces = tuple(Piece(8 * k, 8 * k + 8, (Tier(0, 64, "owned", (k,), mode="push"),))
                   for k in range(2))
    split, whole = (
        {p.name: p.fixed_us for p in evaluate(plan_of(stated, pieces=x), stated).phases}["update"]
        for x in (pieces, (replace(pieces[0], stop=16),)))
    assert split == pytest.approx(whole + barriers * stated.topology.costs.phase_us)


@pytest.mark.parametrize("per_host", [1, 2])
def test_owners_answer_after_all_requests(per_host):
    """Between hosts, requests arrive before answers are sent; within a host both are concurrent."""
    stated = flat(gpus(2, per_host=per_host), length=8, batch=4096)
    found = evaluate(plan_of(stated, Tier(0, 64, "owned", (1,), mode="push")), stated)
    t, phases = stated.tables[0], {p.name: p for p in found.phases}
    asked = t.total[IDS] * (REQUEST if per_host == 2 else FAR_REQUEST)
    if per_host == 2:
        assert "request" not in phases
        assert phases["forward"].units[Term.LINK_IN, 1] == pytest.approx(asked)
        return
    request, forward = phases["request"], phases["forward"]
    assert request.units[Term.CROSS_IN] == pytest.approx([0, asked])
    assert request.units[Term.CROSS_OUT] == pytest.approx([asked, 0])
    assert request.time_us - request.fixed_us == pytest.approx(asked / 25e9 * 1e6)
    assert forward.units[Term.CROSS_IN] == pytest.approx(forward.units[Term.CROSS_OUT][::-1])
    assert forward.units[Term.CROSS_OUT, 1] > 0 and forward.units[Term.CROSS_IN, 1] == 0
    assert found.step_us == pytest.approx(sum(p.time_us for p in found.phases))


def test_replicas_on_one_rank_per_host_serve_their_host():
    stated = flat(gpus(4, per_host=2), "inference")
    forward = evaluate(plan_of(stated, Tier(0, 64, "replicated", (0, 2))), stated).phases[-1]
    u = stated.tables[0].total[TOUCHED] * 64
    assert forward.units[Term.LINK_IN] == pytest.approx([0, u, 0, u])
    assert forward.units[Term.LINK_OUT] == pytest.approx([u, 0, u, 0])
    assert forward.units[Term.CROSS_IN].sum() == 0
    alone = evaluate(plan_of(stated, Tier(0, 64, "replicated", (0,))), stated).phases[-1]
    assert alone.units[Term.CROSS_IN] == pytest.approx([0, 0, u, u])
    owned = evaluate(plan_of(stated, Tier(0, 64, "owned", (0,))), stated).phases[-1]
    assert alone.units == pytest.approx(owned.units)


@pytest.mark.parametrize("topology", [gpus(6, per_host=3), host(3), gpus(4, slow=2)],
                         ids=["hosts", "host", "unequal"])
def test_bytes_sent_equal_bytes_received(topology):
    rng = np.random.default_rng(5)
    for objective in ("training", "inference"):
        stated = problem(3, 1, topology, objective, allow=EVERYTHING)
        for _ in range(5):
            plan = random_plan(stated, rng, ("replicated", "striped", "owned", "striped-push"), 2)
            for phase in evaluate(plan, stated).phases:
                total = phase.units.sum(axis=1)
                assert total[Term.LINK_IN] == pytest.approx(total[Term.LINK_OUT])
                assert total[Term.CROSS_IN] == pytest.approx(total[Term.CROSS_OUT])
                assert (phase.units >= 0).all()


def test_cutting_a_tier_in_two_changes_nothing():
    stated = problem(2, 3, gpus(4))
    whole = uniform_plan([t.spec for t in stated.tables], 4, "owned")
    cut = []
    for entry in whole.tables:
        tier, middle = entry.tiers[0], entry.table.num_rows // 2 or 1
        tiers = (tier,) if entry.table.num_rows == 1 else (
            Tier(0, middle, "owned", tier.ranks), Tier(middle, tier.stop, "owned", tier.ranks))
        cut.append(TablePlan(entry.table, (Piece(0, entry.table.dim, tiers),)))
    assert evaluate(Plan(4, tuple(cut)), stated).step_us == pytest.approx(
        evaluate(whole, stated).step_us)


def test_rows_are_counted_once_and_held():
    stated = problem(3, 4, gpus(4))
    plan = random_plan(stated, np.random.default_rng(1), ("striped", "owned"))
    need = sum(t.spec.num_bytes for t in stated.tables)
    buffers = 4 * sum(min(t.traffic.num_ids, t.spec.num_rows) * t.spec.dim * 4
                      for t in stated.tables)
    found = evaluate(plan, stated)
    assert found.held_bytes.sum() == pytest.approx(need + buffers)
    assert sum(t.total[ROWS] for t in stated.tables) == sum(t.spec.num_rows for t in stated.tables)


def test_plans_of_another_world_or_memory_are_refused():
    stated = flat(gpus(4))
    with pytest.raises(PlanError, match="world_size"):
        evaluate(uniform_plan([stated.tables[0].spec], 2), stated)
    with pytest.raises(PlanError, match="host"):
        evaluate(plan_of(stated, Tier(0, 64, "owned", (0,), memory="host")), stated)


def test_widths_with_kernels_are_those_of_the_host_kernels() -> None:
    source = (Path(__file__).parents[2] / "csrc/host/kernels/rows.inl").read_text()
    body = source[source.index("auto with_row_width"):]
    cases = re.findall(r"case (\d+): return body", body[:body.index("default")])
    assert tuple(16 * int(n) for n in cases) == KERNEL_WIDTHS


def compute(costs: Costs, dim: int, tier: Tier) -> list[np.ndarray]:
    """Nanoseconds by phase and rank of one table under `costs`; 64 ids per rank."""
    stated = flat(replace(host(2), costs=costs), dim=dim, length=2)
    return [p.units[Term.COMPUTE] for p in evaluate(plan_of(stated, tier), stated).phases]


def test_widths_without_a_kernel_cost_by_pass_and_vector() -> None:
    """56 columns are 4 vectors: 4 ns more per id forward, 8 per id backward, 16 per touched row."""
    owned, odd = Tier(0, 64, "owned", (0,)), Costs(phase_us=0.0, odd_ns=1.0)
    assert not np.any(compute(odd, 64, owned))
    forward, backward, update = compute(odd, 56, owned)
    assert forward == pytest.approx([4 * 64] * 2) and backward == pytest.approx([8 * 64] * 2)
    touched = flat(host(2), dim=56, length=2).tables[0].total[TOUCHED_ALL]
    assert update == pytest.approx([16 * touched, 0.0])


def test_only_the_owner_of_an_entire_pushed_table_sends_no_requests() -> None:
    asks = Costs(phase_us=0.0, push_ns=1.0)
    forward, backward, _ = compute(asks, 16, Tier(0, 64, "owned", (0,), mode="push"))
    assert forward == pytest.approx([0.0, 64.0]) and backward == pytest.approx([0.0, 64.0])
    forward, backward, _ = compute(asks, 16, Tier(0, 64, "striped", (0, 1), mode="push"))
    assert forward == pytest.approx([64.0] * 2) and backward == pytest.approx([64.0] * 2)


# ---- loads of a unit of a table's rows -----------------------------------------------------------

COSTS = {"push_ns": 20.0, "id_ns": 1.0, "far_ns": 5.0, "sort_ns": 2.0, "update_ns": 10.0,
         "run_ns": 3.0, "refresh_ns": 4.0, "wire_ns": 0.3, "odd_ns": 2.0, "warm_share": 0.4}


@pytest.mark.parametrize("name", sorted(TOPOLOGIES))
@pytest.mark.parametrize("kind", [REPLICATED, SHARD, PUSH])
def test_unit_loads_equal_the_cost_model(name, kind):
    relaxation = Relaxation(CostModel(stated(3, name, costs=COSTS)))
    model, units = relaxation.model, relaxation.units
    for by_rank in (False, True):
        found = [units.loads(units.of(kind)[n], by_rank) for n in (WHOLE, ANY)]
        _compare(relaxation, kind, found, (lambda x: x) if by_rank else model.machine.on_links)


def _compare(relaxation: Relaxation, kind: str, found: list[np.ndarray],
             on_links: Callable[[np.ndarray], np.ndarray]) -> None:
    model, units = relaxation.model, relaxation.units
    world, each = model.machine.world_size, np.arange(NUM_FEATURES)
    for c, ranks in enumerate(relaxation.classes.ranks):
        owner = np.zeros((NUM_FEATURES, NUM_FEATURES, world))
        owner[each, each, ranks[0]] = 1.0
        for k, t in enumerate(relaxation.tables):
            once, twice = (model.loads(row_makers(model)[kind](t, w, owner))
                           for w in (t.spec.dim, 2 * t.spec.dim))
            for mine, own in zip(found, (once, 2 * once - twice), strict=True):
                loads = on_links(own)
                assert mine[c, k] == pytest.approx(loads[..., units.seen[c]], rel=1e-9, abs=1e-9)
                # Other ranks have no other load.
                assert mine[c, k].min(axis=-1) == pytest.approx(loads.min(axis=-1), abs=1e-9)
                assert mine[c, k].max(axis=-1) == pytest.approx(loads.max(axis=-1), abs=1e-9)
                local = model.group_us(own)[..., LOCAL, :].min(axis=-1)
                seen = units.group_us(mine)[c, k, ..., LOCAL, :].min(axis=-1)
                assert seen == pytest.approx(local, rel=1e-9, abs=1e-9)


def test_rows_about_links_include_the_own_work_of_sending_ranks():
    """If hosts exchange messages, more own work of all ranks raises such a row further."""
    rows = {}
    for name in ("hosts", "gpus"):
        relaxation = Relaxation(CostModel(stated(1, name, costs={"id_ns": 1.0})))
        far = [x for x in relaxation.inequalities if x.kind == "spread"]
        assert far and all(x.spared > 0 for x in far)
        rows[name] = relaxation.unit[0, relaxation.model.every_pass[0], [x.row for x in far]]
        every = relaxation.every[relaxation.model.every_pass[0], [x.row for x in far]]
        forward = [x.at[0] == relaxation.model.phases.index("forward") for x in far]
        waits = name == "hosts"  # on one host, ranks read each other's memory while they work
        assert every == pytest.approx([waits * f * (1 + x.spared) * 1e-3
                                       for f, x in zip(forward, far, strict=True)])


def test_all_far_loads_of_the_distinguished_host_have_a_row():
    problem = stated(1, "hosts")
    load = 0, GROUPS.index("cross_in")
    relaxation = Relaxation(CostModel(problem), load)
    apart = [x for x in relaxation.inequalities if x.kind == "apart"]
    # Owners receive requests, and send none for their own rows.
    assert {x.at for x in apart} == {load} | {(p, GROUPS.index(g)) for p in (1, 3)
                                              for g in ("cross_in", "cross_out")}
    assert {x.load for x in apart} == {load}


@pytest.mark.parametrize("name", ["gpus", "hosts", "unequal"])
def test_checker_loads_equal_the_relaxation_for_all_widths(name):
    problem = stated(2, name, costs=COSTS)
    relaxation = Relaxation(CostModel(problem))
    costs = Checker(relaxation.model, None).costs
    least = np.zeros(costs.partial.shape[2:])
    implied = costs.implied(least).reshape(least.size, least.size)
    assert np.count_nonzero(implied) > least.size
    for n in np.flatnonzero(costs.width >= 8).tolist():
        blocks = costs.tables[costs.of[n]].blocks
        load = np.einsum("bf,cfpg->bcpg", blocks[:, IDS:], costs.unit[n])
        load = np.maximum(load, 0.0).reshape(-1, least.size)
        assert (implied * load[:, :, None] <= load[:, None] * (1 + 1e-9) + 1e-9).all()


# ---- expected counts and random batches ----------------------------------------------------------

WORLD, BATCH, NUM_ROWS, DIM, DRAWS = 3, 24, 40, 8, 3000
LENGTHS = {"even": ([4], [1.0]), "rare and long": ([0, 1, 60], [0.9, 0.05, 0.05]),
           "often empty": ([0, 2], [0.8, 0.2])}


def case(kind, hot=1.3, rows=NUM_ROWS, per_host=8):
    lengths, share = LENGTHS[kind]
    weight = np.arange(1, rows + 1, dtype=float) ** -hot
    counts = np.rint(weight / weight.sum() * 1e9).astype(np.int64)
    bags = np.rint(np.array(share) * 1e9 / np.dot(lengths, share)).astype(np.int64)
    stats = TableStats.from_counts(rows, np.arange(rows), counts, (np.array(lengths), bags))
    stated = make_problem([TableSpec("t", rows, DIM, ("f",))],
                          AccessStats(int(bags.sum()), {"t": stats}, "drawn", True),
                          gpus(WORLD, per_host=per_host), batch_size=BATCH)
    return stated, counts / counts.sum(), np.array(lengths), np.array(share)


def batches(kind, probability, lengths, share, seed=0):
    """DRAWS steps: ids looked up by (step, rank, bag, row); int64 [DRAWS, W, B, R] counts."""
    rng = np.random.default_rng(seed)
    size = rng.choice(lengths, (DRAWS, WORLD, BATCH), p=share)
    return rng.multinomial(size, probability)


def close(mean, samples):
    """Whether `mean` is within 5 standard errors of the sampled mean (or too small to be seen)."""
    error = 5 * samples.std() / np.sqrt(samples.size) + 1e-4 * abs(mean) + 1e-9
    assert abs(samples.mean() - mean) <= error, (mean, samples.mean(), error)


@pytest.mark.parametrize("kind", LENGTHS)
def test_features_are_the_means_of_drawn_batches(kind):
    stated, *law = case(kind)
    table, drawn = stated.tables[0], batches(kind, *law)
    for start, stop in ((0, 1), (1, 6), (6, 40), (0, 40)):
        part = drawn[..., start:stop]
        found = table.features(start, stop, True)
        close(found[IDS], part[:, 0].sum(axis=(1, 2)))
        close(found[TOUCHED], (part[:, 0].sum(axis=1) > 0).sum(axis=-1))
        close(found[TOUCHED_ALL], (part.sum(axis=(1, 2)) > 0).sum(axis=-1))
        mass = table.features(start, stop, True)[IDS] / table.total[IDS]
        close(float(table.traffic.bags_touching(mass)), (part[:, 0].sum(axis=-1) > 0).sum(axis=-1))


@pytest.mark.parametrize("kind", LENGTHS)
def test_bytes_on_every_link_are_the_means_of_drawn_batches(kind):
    """Replicated, striped and pulled, owned and pushed rows: counted id by id."""
    stated, *law = case(kind)
    tiers = (Tier(0, 4, "replicated", (0, 1, 2)), Tier(4, 20, "striped", (1, 2)),
             Tier(20, 40, "owned", (2,), mode="push"))
    plan = Plan(WORLD, (TablePlan(stated.tables[0].spec, (Piece(0, DIM, tiers),)),),
                batch_size=BATCH)
    found = evaluate(plan, stated)
    drawn = batches(kind, *law, seed=1)
    row, grad, slot = DIM * 4, DIM * 4, 4
    own = np.full((3, NUM_ROWS), -1)  # owner by (tier, row)
    own[0, :4] = np.arange(4) % 3  # master copies
    own[1, 4:20] = np.where(np.arange(16) % 2 == 0, 1, 2)
    own[2, 20:] = 2
    touched = drawn.sum(axis=2) > 0  # [DRAWS, W, R]
    arrive = {name: np.zeros((DRAWS, WORLD)) for name in ("forward", "backward", "update")}
    leave = {name: np.zeros((DRAWS, WORLD)) for name in arrive}

    def send(phase, source, target, amount):
        if source != target:
            leave[phase][:, source] += amount
            arrive[phase][:, target] += amount

    for reader in range(WORLD):
        for owner in range(WORLD):
            pulled = touched[:, reader][:, own[1] == owner].sum(axis=-1)
            send("forward", owner, reader, pulled * row)
            send("update", reader, owner, pulled * (grad + slot))
            masters = touched[:, reader][:, own[0] == owner].sum(axis=-1)
            send("update", reader, owner, masters * (grad + slot))
            every = touched.any(axis=1)[:, own[0] == owner].sum(axis=-1)
            send("update", owner, reader, every * (row + slot))
            pushed = drawn[:, reader][:, :, own[2] == owner]
            asked = pushed.sum(axis=(1, 2)) * (slot + 1 / 8)  # and a bit for where bags begin
            send("forward", reader, owner, asked)
            sums = (pushed.sum(axis=-1) > 0).sum(axis=-1) * grad
            send("forward", owner, reader, sums)
            send("update", reader, owner, sums)  # the owner reduces them
    for phase in found.phases:
        for rank in range(WORLD):
            close(phase.units[Term.LINK_IN, rank], arrive[phase.name][:, rank])
            close(phase.units[Term.LINK_OUT, rank], leave[phase.name][:, rank])
        assert not phase.units[Term.CROSS_IN].any()


@pytest.mark.parametrize("per_host", [1, 3])
def test_sums_of_squares_between_owners_of_columns_are_the_means_of_drawn_batches(per_host):
    """The owners of a touched row's pieces send 4 bytes to the owner of one of them, any with equal
    probability, and get 4 bytes back. On one host, each reads 4 bytes from all others."""
    stated, *law = case("even", per_host=per_host)
    stripe, rest = Tier(0, 16, "striped", (1, 2)), Tier(16, 40, "owned", (0,))
    pushed = replace(stripe, ranks=(2, 1, 0), mode="push")
    pieces = (Piece(0, 2, (Tier(0, 40, "owned", (0,)),)), Piece(2, 4, (stripe, rest)),
              Piece(4, 8, (pushed, replace(rest, ranks=(2,)))))
    owner = np.zeros((3, NUM_ROWS), int)
    owner[1, :16], owner[2, :16] = np.resize((1, 2), 16), np.resize((2, 1, 0), 16)
    owner[2, 16:] = 2

    def links(optimizer):
        spec = replace(stated.tables[0].spec, optimizer=optimizer)
        known = replace(stated, tables=(replace(stated.tables[0], spec=spec),))
        plan = Plan(WORLD, (TablePlan(spec, pieces),), batch_size=BATCH)
        update = {p.name: p for p in evaluate(plan, known).phases}["update"]
        return update.units[[Term.LINK_OUT, Term.LINK_IN, Term.CROSS_OUT, Term.CROSS_IN]]

    found = links("rowwise_adagrad") - links("sgd")
    used, unused = (found[2:], found[:2]) if per_host == 1 else (found[:2], found[2:])
    assert not unused.any()
    touched = batches("even", *law, seed=2).sum(axis=(1, 2)) > 0  # [DRAWS, R]
    for rank in range(WORLD):
        sent, received = np.zeros((2, DRAWS))
        for row in range(NUM_ROWS):
            for summing, other in itertools.permutations(owner[:, row], 2):
                if summing == other or rank not in (summing, other):
                    continue
                if per_host == 1:
                    sent += 4 / 3 * touched[:, row]
                    received += 4 / 3 * touched[:, row]
                else:
                    sent += 4 * (rank == other) * touched[:, row]
                    received += 4 * (rank == summing) * touched[:, row]
        close(used[0, rank], sent)
        close(used[1, rank], received)
