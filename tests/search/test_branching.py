"""Bounds of nodes with limits on pushed pieces: below every plan, and close to the best plans."""

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest

from oper.bench.plan import workloads as plan_workloads
from oper.plan import Piece, Plan, Tier
from oper.search.branching.tree import SearchTree, _largest, _load_branchings
from oper.search.cost.load_vector import Row, owned_features
from oper.search.cost.model import CostModel, evaluate
from oper.search.cost.space import PUSH
from oper.search.planner import plan_problem, tighten_bound
from oper.search.pricing.master import solve_node
from oper.search.pricing.node import PUSHES, STILL, Node
from oper.search.problem.space import COLUMN_STEP, EVERYTHING, MIN_COLUMNS
from oper.search.problem.statement import IDS, NUM_FEATURES, ROWS, Problem, make_problem
from oper.search.relaxation.pieces import LoadLimits, column_widths
from oper.search.relaxation.relaxation import Relaxation
from oper.search.relaxation.units import LOCAL
from oper.stats import AccessStats, TableStats
from oper.tables import TableSpec
from oper.topology import Domain, Topology
from tests.search.search_cases import (
    gpus,
    host,
    loaded,
    pushing_plan,
    racked,
    recomputed,
    shared,
    tables_and_stats,
)


def alternating(num_ranks: int, per_host: int) -> Topology:
    """Equal hosts of unequal ranks: every other rank is slower and has less memory."""
    fast, slow = gpus(num_ranks, per_host=per_host), gpus(num_ranks, per_host=per_host,
                                                          slow=num_ranks)
    domains = zip(fast.domains, slow.domains, strict=True)
    return replace(fast, domains=tuple(pair[n % 2] for n, pair in enumerate(domains)))


def linked(topology: Topology, is_slow: Callable[[Domain], int]) -> Topology:
    """The topology with links of half the speed in some domains."""
    return replace(topology, domains=tuple(
        replace(d, link_gbps=d.link_gbps / 2, cross_gbps=d.cross_gbps / 2) if is_slow(d) else d
        for d in topology.domains))


TOPOLOGIES = {"host": host(3), "gpus": gpus(4), "hosts": gpus(6, per_host=3),
             "many": gpus(12, per_host=4), "mixed": alternating(8, 4),
             "unequal": gpus(4, slow=2),
             "links": linked(gpus(8, per_host=2), lambda d: d.host % 2),
             "uneven": linked(gpus(5, per_host=3), lambda d: d.host % 2),
             "domains": linked(gpus(4), lambda d: d.ranks[0] % 2),
             "pairs": linked(gpus(6, per_host=2), lambda d: d.ranks[0] % 2)}
# Links shared by the ranks of a host (ranks or links equal or not), and by racks.
TOPOLOGIES |= {"shared": shared(gpus(6, per_host=3)), "shared-pairs": shared(TOPOLOGIES["pairs"]),
               "shared-uneven": shared(TOPOLOGIES["uneven"]),
               "shared-mixed": shared(TOPOLOGIES["mixed"]),
               "racks": racked(gpus(4, per_host=1), 20.0, 20.0),
               "shared-racks": shared(racked(gpus(8, per_host=2), 60.0, 60.0)),
               "uneven-racks": racked(gpus(5, per_host=1), 30.0, 15.0)}
SHARED = [name for name in TOPOLOGIES if "shared" in name or "racks" in name]


def stated(seed: int, name: str, num_tables: int = 4, costs: dict[str, float] | None = None,
           **more: object) -> Problem:
    """Long bags and large batches, so that pushing pays and uncut tables are too large; `costs`
    replace the topology's costs."""
    specs, stats = tables_and_stats(num_tables, seed, lengths=(4, 20, 50))
    topology = TOPOLOGIES[name]
    topology = replace(topology, costs=replace(topology.costs, **(costs or {})))
    return make_problem(specs, stats, topology, batch_size=4096, allow=EVERYTHING,
                        **more)  # type: ignore[arg-type]


def branched(problem: Problem, max_nodes: int = 24) -> SearchTree:
    tree = SearchTree(solve_node(Node(Relaxation(CostModel(problem)))))
    tree.run(max_nodes)
    return tree


def largest_loads(relaxation: Relaxation, plan: Plan) -> np.ndarray:
    """Largest load of any pushed piece of a plan on its owner; float64 [num_phases, 5]."""
    pieces, world = relaxation.pieces, relaxation.model.machine.world_size
    out = np.zeros(pieces.floor.shape[1:])
    for k, t in enumerate(relaxation.tables):
        for piece in plan.table(t.spec.name).pieces:
            owned = np.zeros((NUM_FEATURES, world))
            for tier in piece.tiers:
                if tier.mode == "push":
                    owned += owned_features(t, tier, world, True)
            for rank in np.flatnonzero(owned[IDS]).tolist():
                number = int(relaxation.classes.of_rank[rank])
                out = np.maximum(out, pieces.load(k, number, piece.stop - piece.start,
                                                  owned[:, rank]))
    return out


@pytest.mark.parametrize("name", ["gpus", "hosts", "host", "unequal", "mixed", "links", "uneven",
                                  "domains", "pairs", *SHARED])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("costly", [False, True])
def test_no_plan_is_below_the_bound_of_its_own_node(seed, name, costly):
    """Of all nodes that contain a plan, the smallest has the largest bound."""
    # Costly: in some phases, readers of pushed rows have more work than owners.
    costs = {"push_ns": 20.0, "id_ns": 1.0, "far_ns": 5.0, "sort_ns": 2.0, "tier_ns": 3.0,
             "push_tier_ns": 4.0, "push_bag_ns": 30.0, "table_us": 5.0} if costly else {}
    many = stated(seed, name, costs=costs)
    relaxation = Relaxation(CostModel(many))
    rng = np.random.default_rng(seed)
    for _ in range(6):
        plan = pushing_plan(many, rng)
        largest = largest_loads(relaxation, plan)
        pushes = np.array([PUSHES if any(x.mode == "push" for p in t.pieces for x in p.tiers)
                           else STILL for t in plan.tables], np.uint8)
        step_us = evaluate(plan, many).step_us
        for least, states in product((0.0, 1.0 - 1e-9), (None, pushes)):
            limits = LoadLimits(largest * least, largest * (1 + 1e-9))
            found = solve_node(Node(relaxation, limits, states))
            assert found.lower_bound_us <= step_us * (1 + 1e-9)


def test_unequal_ranks_of_one_host_have_rows_about_the_owner_of_a_large_piece():
    problem = stated(1, "unequal")
    relaxation = Relaxation(CostModel(problem))
    assert len(relaxation.classes.ranks) == 2
    assert any(x.at[1] == LOCAL for x in relaxation.inequalities)
    first = solve_node(Node(relaxation))
    assert branched(problem).bound.lower_bound_us > first.lower_bound_us * 1.001


# In the cluster, every other host has half the bandwidth.
@pytest.mark.parametrize(("machine", "seed", "num_nodes", "factor"), [
    (plan_workloads.machine(16), 0, 24, 1.05), (plan_workloads.cluster(16, 2), 2, 40, 1.2)])
def test_branching_raises_the_bound_and_certifies_itself(machine, seed, num_nodes, factor):
    problem = loaded(plan_workloads.few_tables(seed), machine)
    first = solve_node(Node(Relaxation(CostModel(problem)))).lower_bound_us
    tree = branched(problem, num_nodes)
    assert tree.solved > 0
    assert tree.bound.lower_bound_us > first * factor
    assert recomputed(tree.bound) >= tree.bound.lower_bound_us * (1 - 1e-9)


def test_more_nodes_never_lower_the_bound_and_few_do_most():
    problem = loaded(plan_workloads.synthetic(30, 0), plan_workloads.machine(64))
    tree = SearchTree(solve_node(Node(Relaxation(CostModel(problem)))))
    found = [tree.bound.lower_bound_us]
    for _ in range(4):
        tree.run(12)
        found.append(tree.bound.lower_bound_us)
        lowest = [b.lower_bound_us for b in tree.lowest(3)]
        assert lowest == sorted(lowest) and lowest[0] == found[-1]
    assert (np.diff(found) >= 0).all()
    assert found[2] - found[0] > 0.5 * (found[-1] - found[0]) > 0


def test_work_is_deterministic():
    """Work is counted in tables priced, not in seconds."""
    problem = loaded(plan_workloads.few_tables(0), plan_workloads.machine(8, True))
    trees = [branched(problem, 12) for _ in range(2)]
    assert trees[0].work == trees[1].work >= trees[0].solved * len(problem.tables) > 0
    assert branched(problem, 30).work > trees[0].work


def test_every_branching_gives_two_smaller_nodes():
    """Otherwise branching might not end, for example with tight limits on forward's ids."""
    nodes = branched(loaded(plan_workloads.few_tables(0), plan_workloads.machine(64)),
                     150).lowest(200)
    assert len(nodes) > 20
    for bound, mixed in product(nodes, (False, True)):
        limits, largest = bound.node.limits, _largest(bound, mixed)
        assert (largest <= limits.most * (1 + 1e-9)).all()
        for cut in _load_branchings(bound, np.inf, mixed):
            low, high = (x.limits for x in cut.children)
            assert low.most[cut.at] == high.least[cut.at]
            assert limits.least[cut.at] < low.most[cut.at] < min(limits.most[cut.at],
                                                              largest[cut.at])
    assert any((_largest(x, True) > _largest(x, False) * 1.01).any() for x in nodes)


def test_phase_times_of_the_relaxed_solution_satisfy_the_rows():
    problem = stated(1, "hosts")
    for bound in branched(problem, 30).lowest(20):
        relaxation, times = bound.relaxation, bound.pool.times
        timed = relaxation.phase_of != -1
        room = relaxation.phase_weight @ times - bound.total()
        assert room[timed].min() >= -1e-6 * bound.relaxed_us
        assert times.sum() + relaxation.fixed_us == pytest.approx(bound.relaxed_us)


def test_tighten_bound_raises_the_bound_of_a_plan():
    problem = loaded(plan_workloads.few_tables(0), plan_workloads.machine(16))
    plan = plan_problem(problem, time_budget_s=0.5)
    plan = replace(plan, lower_bound_us=plan.notes["relaxation_us"])
    first = tighten_bound(plan, problem, max_work=280)
    better = tighten_bound(plan, problem, max_work=14000)
    assert plan.lower_bound_us <= first.lower_bound_us <= better.lower_bound_us <= plan.step_us
    assert better.lower_bound_us > first.lower_bound_us
    assert better.tables == plan.tables and better.notes["bound_method"] == "branching"
    near = tighten_bound(plan, problem, goal_gap=plan.gap + 0.5)
    # The gap is already small enough: nothing is solved.
    assert near.lower_bound_us == pytest.approx(plan.lower_bound_us, rel=1e-12)
    assert tighten_bound(plan, problem, max_work=280).lower_bound_us == first.lower_bound_us


def test_squares_of_all_pieces_but_one_are_charged():
    problem = stated(0, "gpus")
    model = CostModel(problem)
    t = next(x for x in problem.tables if x.spec.optimizer == "rowwise_adagrad" and x.spec.dim > 8)
    rows, dim, num = t.spec.num_rows, t.spec.dim, t.spec.dim // 8
    owner = owned_features(t, Tier(0, rows, "owned", (1,), mode="push"), 4, True)
    once, twice = (model.push_rows(t, w, owner) for w in (dim, 2 * dim))
    cut = model.cut_rows(t, once, twice)
    pieces = tuple(Piece(8 * n, 8 * n + 8, (Tier(0, rows, "owned", (1,), mode="push"),))
                   for n in range(num))
    true = model.load_vector(t, pieces, True).rows
    linear = (once - cut) + num * cut
    assert linear[Row.UPDATE_BYTES, 1] == pytest.approx(
        true[Row.UPDATE_BYTES, 1] - 4 * true[Row.UPDATE_ROWS, 1] / num)
    assert linear[Row.UPDATE_ROWS] == pytest.approx(true[Row.UPDATE_ROWS])
    whole = (once - cut) + cut
    assert whole == pytest.approx(once)


def test_tighter_limits_raise_the_bound():
    problem = stated(3, "hosts")
    relaxation = Relaxation(CostModel(problem))
    shape = relaxation.pieces.floor.shape[1:]
    before, masses = 0.0, []
    for limit in (1e9, 300.0, 100.0, 30.0):
        node = Node(relaxation, LoadLimits(np.zeros(shape), np.full(shape, limit)))
        found = solve_node(node).lower_bound_us
        assert found >= before * (1 - 1e-9)
        before = found
        tables = np.arange(len(problem.tables))
        masses.append(node.fit.chosen(tables, 0, 0 * tables)[1].sum())
    assert (np.diff(masses) <= 0).all() and masses[-1] < masses[0]


@pytest.mark.parametrize("name", ["gpus", "unequal", "hosts"])
def test_no_owner_within_the_limits_has_more_than_the_largest_mass(name):
    """Owners have the rows that load them least in one phase and group, as many as a limit admits.
    The largest mass is never below theirs, and on a single host mostly close to it."""
    relaxation = Relaxation(CostModel(stated(2, name)))
    pieces, shape = relaxation.pieces, relaxation.pieces.floor.shape[1:]
    fit, seen, tight = pieces.fit(LoadLimits(np.zeros(shape), np.full(shape, 2.0))), 0, 0
    for k, (t, at) in enumerate(zip(relaxation.tables, pairwise(pieces.first.tolist()),
                                    strict=True)):
        blocks = t.blocks[t.blocks[:, IDS] > 0]
        for (width, _), found in zip(pieces.widths[k], fit.mass[slice(*at)], strict=True):
            for c, mass in enumerate(found.tolist()):
                each = np.array([pieces.load(k, c, width, x / x[IDS]).ravel() for x in blocks])
                most = []
                for order in np.argsort(each, axis=0, kind="stable").T:
                    ends = np.cumsum(np.pad(blocks[order], [(1, 0), (0, 0)]), axis=0)
                    owned = [a + part * (b - a) for a, b in pairwise(ends)
                             for part in (0.25, 0.5, 0.75, 1.0)]
                    loads = [pieces.load(k, c, width, x).max() for x in owned]
                    held = [x[IDS] / t.total[IDS] for x in owned]
                    most.append(max((m for m, x in zip(held, loads, strict=True) if x <= 2.0),
                                    default=0.0))
                assert max(most) <= mass * (1 + 1e-9)
                # Nor is it above that of an owner whose rows are all of the lightest.
                lightest = np.min([pieces.load(k, c, width, 0.99 * mass * t.total[IDS] / x[IDS] * x)
                                   for x in blocks], axis=0)
                assert mass == 1 or lightest.max() <= 2.0
                seen += 0 < mass < 1
                tight += 0 < mass < 1 and max(most) > 0.7 * mass
    assert seen > 5 and (name == "hosts" or tight > 0.5 * seen)


# Costs of owners of pushed rows.
OWNERS = {"push_ns": 20.0, "id_ns": 1.0, "sort_ns": 2.0, "update_ns": 10.0}


@pytest.mark.parametrize("name", ["gpus", "hosts", "unequal"])
def test_no_owner_of_a_heavy_row_keeps_the_limits(name):
    """Each owner has one of the hottest rows, and random others."""
    relaxation = Relaxation(CostModel(stated(2, name, costs=OWNERS)))
    pieces, rng, seen, kept = relaxation.pieces, np.random.default_rng(2), 0, 0
    classes = range(len(relaxation.classes.ranks))
    for k, t in enumerate(relaxation.tables):
        hottest = t.blocks[0]
        assert hottest[ROWS] == 1 and (pieces.hot[k, 0] == hottest[IDS:]).all()
        most = pieces.load(k, 0, t.spec.dim, hottest) * rng.uniform(0.3, 0.9)
        fit = pieces.fit(LoadLimits(0 * most, np.where(most > 0, most, np.inf)))
        for (first, last), heavy in zip(pieces.widths[k], fit.heavy[slice(
                *pieces.first[k:k + 2])].tolist(), strict=True):
            for width, b, c in product((first, last), range(heavy), classes):
                part = rng.uniform(0, 1, len(t.blocks)) ** rng.choice([1, 20, 400])
                part[b] = 1.0
                load = pieces.load(k, c, width, part @ t.blocks)
                assert (load > np.where(most > 0, most, np.inf)).any()
                seen += 1
            kept += heavy < len(pieces.hot[k])
    assert seen > 20 and kept


def test_a_heavy_row_is_pushed_in_narrower_pieces():
    """Where the bisection of the largest mass ends at 1, as all rows of a table nearly fit."""
    most = 10_000_000
    stats = TableStats.from_counts(2, np.arange(2), np.array([most, 1]),
                                   (np.array([1]), np.array([most + 1])))
    two = make_problem([TableSpec("t", 2, 64, ("f",))],
                       AccessStats(most + 1, {"t": stats}, "", True), gpus(4, per_host=2),
                       batch_size=4096, allow={"owned", "push", "columns"})
    relaxation = Relaxation(CostModel(two))
    of_all = relaxation.pieces.load(0, 0, 64, two.tables[0].total)
    limits, at = np.full(of_all.shape, np.inf), (1, 4)
    for share in np.geomspace(1e-8, 1e-5, 40):
        limits[at] = of_all[at] * (1 - share)
        bound = solve_node(Node(relaxation, LoadLimits(0 * of_all, limits)))
        assert bound.lower_bound_us < 1e6  # a plan with two pieces of 32 columns keeps the limit


@pytest.mark.parametrize("name", ["gpus", "hosts", "unequal"])
@pytest.mark.parametrize("seed", range(4))
def test_owners_within_limits_send_at_least_least_sums(seed, name):
    """Rows are assigned at random to owners whose loads stay within the limits."""
    relaxation = Relaxation(CostModel(stated(seed, name, costs=OWNERS)))
    pieces, rng = relaxation.pieces, np.random.default_rng(seed)
    seen = 0
    for k, t in enumerate(relaxation.tables):
        for j, (width, _) in enumerate(pieces.widths[k][::3]):
            for number in (2, 5):
                # Shares of the blocks that are pushed, and their owners (by hotness).
                part = rng.dirichlet(np.full(number, rng.choice([0.1, 1.0, 10.0])),
                                     len(t.blocks)) * rng.integers(0, 2, len(t.blocks))[:, None]
                owners = part.T @ t.blocks
                owners = owners[owners[:, IDS] > 0]
                loads = [pieces.load(k, 0, width, x) for x in owners]
                if not loads:
                    continue
                largest = np.max(loads, axis=0)
                step = max(np.maximum(x + pieces.floor[0] - pieces.hidden[0], 0).max(axis=-1).sum()
                           for x in loads)
                for limits in (LoadLimits(0 * largest, largest * (1 + 1e-9)),
                               LoadLimits(0 * largest, np.full_like(largest, np.inf),
                                          step * (1 + 1e-9))):
                    fit, kind = pieces.fit(limits), np.array([3 * j])
                    least = fit.least_sums(np.array([k]), 0, kind, owners.sum(axis=0)[None])[0]
                    one = pieces.sum_bytes(np.full(len(owners), k), owners[:, IDS] / t.total[IDS],
                                           np.ones(len(owners)))
                    assert least <= one.sum() * (1 + 1e-6)
                    seen += least > 0.9 * one.sum()
    assert seen > 3


@pytest.mark.parametrize("seed", range(4))
def test_implied_loads_are_lower_bounds(seed):
    relaxation = Relaxation(CostModel(stated(seed, "hosts", costs=OWNERS)))
    pieces, rng = relaxation.pieces, np.random.default_rng(seed)
    for k, t in enumerate(relaxation.tables):
        for width, _ in pieces.widths[k]:
            part = rng.uniform(0, 1, len(t.blocks)) ** rng.choice([1, 20])
            for features in (part @ t.blocks, t.total):  # the latter without own requests
                load = np.maximum(pieces.load(k, 0, width, features).ravel(), 0.0)
                implied = pieces.implied(load)
                assert (implied * load[:, None] <= load * (1 + 1e-9) + 1e-9).all()
                assert (implied >= pieces.implied(0 * load)).all()
    implied = pieces.implied(np.zeros(pieces.density.shape[-2]))
    assert np.count_nonzero(implied) > len(implied)


@pytest.mark.parametrize("ranks", [8, 16])
def test_pieces_add_up_to_the_columns(ranks):
    """The least cost of a table is that of the cheapest pieces that add up to its columns; columns
    that remain next to wide pieces form a narrower piece, with its own id stream and charge."""
    machine = plan_workloads.machine(ranks, False)
    machine = replace(machine, costs=replace(machine.costs, table_us=1.0, tier_ns=1.0,
                                             push_tier_ns=1.0, push_bag_ns=2.0, push_ns=0.5))
    tree = branched(loaded(plan_workloads.few_tables(0), machine), 60)
    relaxation, more = tree.bound.relaxation, 0
    pieces = relaxation.pieces
    columns, cut = pieces.columns, pieces.cut
    for bound in tree.lowest(12):
        node, prices = Node(relaxation, bound.node.limits), bound.prices
        found, fits = node.price(prices).value, node.fit.whole[:, 0]
        for k in (0, 1):
            dim, number = int(columns[k]), 1 if fits[k] else len(pieces.widths[k])
            one, stay, more_stay = still_costs(node, prices, k)

            def pushed(kind, k=k, number=number, prices=prices,
                       limits=bound.node.limits):
                """Table `k` in pieces of one type, as if there were parts of pieces."""
                states = np.zeros(len(relaxation.tables), np.uint8)
                states[k] = PUSHES
                part = Node(relaxation, limits, states)
                if number > 1:
                    mine = slice(pieces.first[k], pieces.first[k + 1])
                    part.fit = copy(part.fit)  # nodes with equal limits share it
                    part.fit.mass = part.fit.mass.copy()
                    part.fit.mass[mine] *= np.arange(number)[:, None] == kind
                pieces.columns, pieces.cut = np.zeros_like(columns), np.zeros_like(cut)
                value = part.price(prices).value[k]
                pieces.columns, pieces.cut = columns, cut
                return value

            by_width = {}
            for width in range(COLUMN_STEP, dim + 1, COLUMN_STEP):
                tiers = stay + dim / width * (relaxation.tiers[k] @ prices)
                by_width[width] = min(one, tiers) + (dim / width - 1) * (
                    relaxation.piece @ prices + more_stay)
            least = by_width[dim]
            for kind, (low, high) in enumerate(pieces.widths[k][:number]):
                cost = pushed(kind)
                least = min(least, cost)
                low = low if number > 1 else MIN_COLUMNS  # as one piece, it fits in any width
                for width in range(low, high + 1, COLUMN_STEP):
                    by_width[width] = min(by_width[width], cost)
            whole = [0.0]
            for end in by_width:
                whole.append(min(whole[(end - w) // COLUMN_STEP] + cost * w / dim
                                 for w, cost in by_width.items() if w <= end))
            assert found[k] == pytest.approx(whole[-1], rel=1e-9)
            more += found[k] > least * (1 + 1e-4)
    assert more >= 1


def still_costs(node: Node, prices: np.ndarray, k: int) -> tuple[float, float, float]:
    """Costs of table `k` without pushing: in one tier; in the cheapest tiers without the charge for
    several; and the least cost of a further column piece."""
    relaxation = node.relaxation
    kinds = [n for n, o in enumerate(relaxation.options) if o.kind != PUSH]
    cost, more = (np.einsum("bf,of->bo", relaxation.tables[k].blocks, x[k] @ prices)[:, kinds]
                  for x in (relaxation.coefficients, relaxation.per_stream))
    return cost.sum(axis=0).min(), cost.min(axis=1).sum(), more.min(axis=1).sum()


def test_widths_cover_the_space():
    problem = stated(0, "gpus", 6)
    for t, ratio in product(problem.tables, (1.0, 1.05, 1.15)):
        dim = t.spec.dim
        intervals = column_widths(t, True, ratio)
        for width in range(MIN_COLUMNS, dim, COLUMN_STEP):
            assert any(a <= width <= b for a, b in intervals)
        assert intervals[0] == (dim, dim)
        assert column_widths(t, False, ratio) == [(dim, dim)]
