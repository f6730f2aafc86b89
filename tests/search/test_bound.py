"""Lower bounds: below every plan, equal to a plain formulation, certified by their prices."""

from collections.abc import Callable
from functools import partial
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from oper.bench.plan import workloads as plan_workloads
from oper.messages import slot_bits
from oper.plan import Piece, Plan, TablePlan, Tier
from oper.search import evaluate, native, verify_plan
from oper.search.branching import subspaces as subspaces_module
from oper.search.branching.proof import part_to_json
from oper.search.branching.subspaces import _host_loads, subspaces
from oper.search.branching.tree import SearchTree
from oper.search.certificate.leaf import Checker
from oper.search.certificate.loads import Probe
from oper.search.certificate.prices import Leaf, UnitPrices
from oper.search.certificate.tables import TableCosts
from oper.search.cost.model import CostModel
from oper.search.cost.space import PUSH, SHARD, hosts_are_interchangeable
from oper.search.planner import plan_problem, tighten_bound
from oper.search.pricing.master import Bound, lower_bound, solve_node
from oper.search.pricing.node import (
    ALL_PUSHED,
    FREE,
    ONE_TIER,
    PUSHES,
    STILL,
    TIERS,
    TIERS_PUSHED,
    Node,
    PieceChoice,
)
from oper.search.problem.machine import GROUPS, TERMS, first_neighbourhood, neighbourhoods
from oper.search.problem.space import EVERYTHING, EXECUTABLE
from oper.search.problem.statement import (
    NUM_FEATURES,
    TOUCHED,
    Problem,
    make_problem,
    with_overlap,
)
from oper.search.relaxation.inequalities import APART, READER, SPREAD
from oper.search.relaxation.pieces import LoadLimits, Pieces
from oper.search.relaxation.relaxation import Relaxation
from oper.search.relaxation.rows import Option
from oper.search.relaxation.units import LOCAL
from tests.search.oracle import relaxed_by_cvxpy
from tests.search.search_cases import (
    gpus,
    host,
    loaded,
    problem,
    recomputed,
    tables_and_stats,
    with_host_memory,
)
from tests.search.test_branching import stated

TOPOLOGIES = {"host": host(3), "gpus": gpus(4), "hosts": gpus(6, per_host=3),
              "unequal": gpus(4, slow=2), "one": host(1)}


@pytest.mark.parametrize("name", sorted(TOPOLOGIES))
@pytest.mark.parametrize(("objective", "in_host"), [
    ("training", False), ("inference", False), ("inference", True)])
def test_bound_equals_the_cvxpy_formulation(name, objective, in_host):
    topology = with_host_memory(TOPOLOGIES[name]) if in_host else TOPOLOGIES[name]
    stated = problem(4, 7, topology, objective, allow=EXECUTABLE | ({"host"} if in_host else set()))
    relaxation = Relaxation(CostModel(stated))
    found = solve_node(Node(relaxation), tolerance=1e-7)
    assert found.lower_bound_us == pytest.approx(relaxed_by_cvxpy(relaxation), rel=1e-6)
    assert found.relaxed_us == pytest.approx(found.lower_bound_us, rel=1e-6)


@pytest.mark.parametrize("name", ["gpus", "unequal"])
def test_with_push_the_bound_is_at_least_the_chord_relaxation(name):
    stated = problem(4, 8, TOPOLOGIES[name], allow=EVERYTHING)
    relaxation = Relaxation(CostModel(stated))
    found = solve_node(Node(relaxation), tolerance=1e-7)
    assert found.relaxed_us >= relaxed_by_cvxpy(relaxation) * (1 - 1e-6)
    assert found.relaxed_us >= found.lower_bound_us * (1 - 1e-9)


def test_scarce_memory_binds_the_bound():
    roomy = problem(5, 11, gpus(4), "inference")
    need = sum(t.spec.num_rows * t.spec.row_bytes for t in roomy.tables)
    tight = problem(5, 11, gpus(4, memory_bytes=need * 0.3), "inference")
    relaxation = Relaxation(CostModel(tight))
    found = solve_node(Node(relaxation), tolerance=1e-7)
    assert found.overflow == pytest.approx(0, abs=1e-9)
    assert found.lower_bound_us > lower_bound(roomy).lower_bound_us * 1.001
    assert found.lower_bound_us == pytest.approx(relaxed_by_cvxpy(relaxation), rel=1e-6)


def test_prices_alone_give_the_bound_and_errors_only_weaken_it():
    stated = problem(5, 3, gpus(4), "inference")
    found = lower_bound(stated)
    assert recomputed(found) == pytest.approx(found.lower_bound_us, rel=1e-6)
    rng = np.random.default_rng(0)
    for _ in range(20):
        prices = found.relaxation.project_prices(
            found.prices * rng.uniform(0, 3, found.prices.size))
        value = found.node.price(prices).value
        # Any prices give a lower bound of the relaxation.
        assert found.node.bound_at(prices, value) <= found.relaxed_us * (1 + 1e-9)


@pytest.mark.parametrize("topology", [gpus(4), gpus(4, slow=2)])
def test_pricing_returns_only_cheaper_configurations(topology):
    """The least cost is the same whether the configuration is known or generated, and is the priced
    sum of the configuration's column, for every mode."""
    relaxation = Relaxation(CostModel(problem(12, 5, topology, allow=EVERYTHING)))
    node, rng = Node(relaxation), np.random.default_rng(3)
    for _ in range(10):
        prices = relaxation.project_prices(rng.uniform(0, 1, relaxation.num_rows))
        columns = node.price(prices)
        least = columns.resources @ prices
        assert None not in columns.configurations
        assert least == pytest.approx(columns.value, rel=1e-9)
        known = node.price(prices, least * (1 - 1e-6))
        assert not any(known.configurations) and not known.resources.any()
        assert (known.value <= least * (1 + 1e-9)).all()
        assert known.value == pytest.approx(columns.value, rel=1e-3)
        dear = node.price(prices, least * 1.01)
        assert None not in dear.configurations
        assert dear.resources @ prices == pytest.approx(least, rel=1e-3)


# ---- pieces whose owners are of several classes --------------------------------------------------

GRID, ENDS = np.geomspace(1e-7, 1.0, 4800), np.array([0, 1 / 64, 1 / 16, 1 / 4, 1 / 2, 1])


def a_byte(share: np.ndarray) -> np.ndarray:
    """Bytes of an owner who sends one byte, however much it holds."""
    return np.minimum(1e6 * share, 1.0)


def least(share: np.ndarray, go: np.ndarray, mass: np.ndarray, price: np.ndarray | None = None,
          sums: Callable[[np.ndarray], np.ndarray] = a_byte) -> float:
    """Bound of a pushed piece; blocks have shares [B] of the lookups and cost go [B, C], owners of
    a class hold at most mass [C] and pay price [C] (default: 1) for each of their sums(share)."""
    costs = object.__new__(TableCosts)
    costs.blocks = np.stack([share] * 4, axis=-1)[None]
    costs.total, costs.bags, costs.asks = np.ones(1), np.ones(1), np.zeros(1, bool)
    costs.share, costs.of, costs.grid = np.ones(1), np.zeros(1, np.int64), GRID
    costs.sums, costs.at_ends = sums(GRID)[None], sums(ENDS)[None]
    costs.model = SimpleNamespace(tiers_ns=lambda _: 0.0)  # type: ignore[assignment]
    most = np.minimum(1.0, np.maximum(mass, 1e-9))
    line = share[:, None] * np.where(mass > 0, sums(most) / most, 0.0)
    paid = np.ones(mass.size) if price is None else price
    asked = UnitPrices({}, paid[None], np.zeros(()), 0.0, 0.0, 0.0)
    return float(costs._pushed(np.zeros(1, np.int64), asked, go[None],
                               np.full((1, share.size), np.inf), mass[None],
                               np.zeros((1, share.size), bool),
                               [line[None], line[None].copy()])[0])


SHARE, GO = np.array([0.6, 0.4]), np.array([[0.0, 1e4], [1e4, 0.0]])


def test_owners_who_hold_less_never_cost_less() -> None:
    """The search bounds several widths by the capacity of the narrowest: from nine owners on, the
    bound of a wider piece must not fall below that."""
    found = [least(SHARE, GO, np.array([1.0, x])) for x in np.linspace(0.13, 0.06, 71)]
    assert abs(found[0] - 5) < 1e-6 and np.diff(found).min() > -1e-6


def test_classes_that_may_own_nothing_do_not_weaken_the_bound() -> None:
    for at in range(3):
        go, mass = np.insert(GO, at, np.inf, axis=1), np.insert([1.0, 0.3], at, 0.0)
        assert abs(least(SHARE, go, mass) - least(SHARE, GO, np.array([1.0, 0.3]))) < 1e-9
    assert abs(least(SHARE, GO, np.array([1.0, 0.3])) - 3) < 1e-6


@given(st.integers(0, 10**6), st.integers(2, 4), st.sampled_from([1, 4, 50, 1000]))
def test_no_assignment_to_classes_costs_less_than_the_checkers_bound(seed, num_classes, length):
    """All assignments of five blocks to classes of owners, who send the sums of bags of `length`
    ids. Some blocks have no lookups, and some classes hold the piece in one owner."""
    rng, num_blocks = np.random.default_rng(seed), 5
    share = rng.dirichlet(np.full(num_blocks, rng.choice([0.2, 1.0])))
    share[rng.random(num_blocks) < 0.1] = 0.0
    go = rng.uniform(0, 1, (num_blocks, num_classes)) * 10 ** rng.uniform(-2, 1, num_classes)
    if rng.random() < 0.5:
        go *= share[:, None]
    mass = np.where(rng.random(num_classes) < 0.5, 1.0, rng.uniform(0.02, 1.0, num_classes))
    price = 10 ** rng.uniform(-1, 1, num_classes)

    def sums(q: np.ndarray) -> np.ndarray:
        return -np.expm1(length * np.log1p(-np.minimum(q, 1 - 1e-12)))

    every = np.array(list(product(range(num_classes), repeat=num_blocks)))
    owned = every[:, :, None] == np.arange(num_classes)
    held = np.einsum("nbc,b->nc", owned, share)
    full = np.floor(held / mass)
    cost = np.einsum("nbc,bc->n", owned, go) + (
        full * sums(mass) + sums(held - full * mass)) @ price
    assert least(share, go, mass, price, sums) <= cost.min() * (1 + 1e-9)


# ---- tables that need several owners, whose number is whole --------------------------------------


@pytest.fixture(scope="module")
def pieces() -> Pieces:
    specs, stats = tables_and_stats(4, 3, lengths=(4, 20, 50))
    return Relaxation(CostModel(make_problem(specs, stats, gpus(4), batch_size=4096,
                                             allow=EVERYTHING))).pieces


@given(st.integers(0, 10**6), st.floats(0.02, 1.0), st.floats(1e-4, 1.0))
def test_no_owners_of_a_share_send_less(pieces, seed, owner, share):
    rng = np.random.default_rng(seed)
    for k in range(4):
        left, parts = share, []
        while left > 1e-12:
            parts.append(min(left, owner * rng.choice([1.0, rng.uniform(0.05, 1.0)])))
            left -= parts[-1]
        of = np.full(len(parts), k)
        sent = pieces.sum_bytes(of, np.array(parts), np.full(len(parts), owner)).sum()
        least = pieces.sum_bytes(np.array([k]), np.array([share]), np.array([owner]))[0]
        assert least <= sent * (1 + 1e-8)
        # And no fewer bytes than with fractional owners.
        full = pieces.sum_bytes(np.array([k]), np.array([min(share, owner)]), np.array([owner]))[0]
        assert least >= full * max(1.0, share / owner) * (1 - 1e-8)


def test_sums_of_full_owners_and_a_partial_one(pieces):
    def sums(share: float, owner: float) -> float:
        return float(pieces.sum_bytes(np.array([0]), np.array([share]), np.array([owner]))[0])

    assert sums(0.6, 0.3) == pytest.approx(2 * sums(0.3, 1.0))
    assert sums(0.7, 0.3) == pytest.approx(2 * sums(0.3, 1.0) + sums(0.1, 1.0))
    assert sums(0.7, 0.3) > sums(0.3, 1.0) * 0.7 / 0.3 * 1.01


@pytest.mark.parametrize(("num_options", "long_bags"), [(1, False), (2, False), (2, True),
                                                        (3, False)])
@pytest.mark.parametrize("must", [False, True])
def test_no_set_of_blocks_costs_less_than_the_least(num_options, long_bags, must):
    """All sets of six blocks and classes, for many tables, compared with the library's bound. With
    long bags an owner of few rows sends nearly as many sums as one of all; classes where sums are
    cheap are expensive otherwise."""
    num_tables, n, num_points = (300 if num_options > 1 else 6000), 6, 200
    rng = np.random.default_rng(num_options)
    grid = np.geomspace(1e-6, 1.0, num_points)
    power = rng.uniform(*((0.02, 0.1) if long_bags else (0.15, 1.0)), num_tables)
    sums = grid ** power[:, None] * 10.0 ** rng.uniform(-1, 0.5, (num_tables, 1))
    blocks = num_tables * n
    ids = rng.dirichlet(np.full(n, 0.7), num_tables)
    go = rng.uniform(0, 1, (num_options, blocks)) * ids.ravel()
    stay = np.full(blocks, np.inf) if must else ids.ravel() * rng.uniform(0, 3, blocks)
    mass = (np.ones if long_bags else partial(rng.uniform, 0.05, 0.7))(num_tables * num_options)
    price = rng.uniform(0.5, 1.0, num_options) * np.linspace(0.8, 1.25, num_tables)[:, None]
    # One tier costs more than the cheapest tiers by about the charge for several tiers.
    one = stay.reshape(num_tables, n).sum(axis=1) * rng.uniform(1.0, 1.3, num_tables)
    tiers, tiers_pushed = rng.uniform(0, 0.3, (2, num_tables))
    own = rng.uniform(0, 0.1, num_options)
    features = rng.uniform(0, 1, (3, blocks)) * ids.ravel()
    least_sums = rng.uniform(0, 2.0, (num_tables * num_options, 3)) * sums[:, -1].repeat(
        num_options)[:, None]
    if long_bags:
        go, least_sums, own = go * np.array([[0.1], [1.0]]), 0.0 * least_sums, 0.0 * own
        price[:, 0] = 1.15 * price[:, 1]
    states = rng.integers(0, 3, num_tables).astype(np.uint8)
    if must:
        states[states == STILL] = FREE
    heavy = rng.integers(0, 1 if must else 3, num_tables * num_options)
    arrays = {"starts": np.arange(num_tables + 1) * n, "stay": stay, "go": go, "heavy": heavy,
              "stay_more": np.zeros(blocks),
              "more": np.zeros_like(go), "ids": ids.ravel(),
              "features": features, "least_sums": least_sums, "total_ids": np.ones(num_tables),
              "price": price, "first": np.arange(num_tables * num_options + 1),
              "streams": np.ones(mass.size), "mass": mass, "narrowest": np.full(mass.size, 8.0),
              "columns": np.zeros(num_tables, np.int64), "known": np.full(num_tables, np.inf),
              "one": one, "tiers": tiers, "tiers_pushed": tiers_pushed,
              "own": np.tile(own, (num_tables, 1)),
              "pushes": states}
    out = {"value": np.zeros(num_tables), "num_parts": np.zeros(num_tables, np.int64),
           "kind": np.zeros(num_tables, np.int64), "mode": np.zeros(num_tables, np.int64),
           "share": np.zeros(num_tables), "streams": np.zeros(num_tables),
           "chosen": np.zeros(blocks, np.int64)}
    arrays |= {f"out_{n}": x for n, x in out.items()}
    native.call("oper_price", native.Pricing, arrays, num_tables=num_tables,
                num_options=num_options, num_blocks=blocks, step=8, max_parts=1, close=1e-9,
                piece=0.0,
                sums=native.Sums(num_points, grid[0], grid[1] / grid[0], sums.ctypes.data))

    def cost(k, classes):
        """float64 [N], of blocks in `classes` [N, n], 0 where they stay."""
        def sent(share):
            return np.where(share > 0, np.interp(share, np.append(0.0, grid),
                                                 np.append(0.0, sums[k])), 0.0)

        at = slice(k * n, (k + 1) * n)
        out = np.where(classes == 0, stay[at], 0.0).sum(axis=1)
        every, none = (classes > 0).all(axis=1), (classes == 0).all(axis=1)
        out += np.where(every, 0.0, np.where(none, tiers[k], tiers_pushed[k]))
        out[none] = np.minimum(out[none], one[k])
        for m in range(num_options):
            pushed, full = classes == m + 1, mass[k * num_options + m]
            share = pushed @ ids[k]
            owners = np.floor(share / full)
            out += pushed @ go[m, at]
            out += share * own[m]  # no owner holds all ids of a table
            by_mass = owners * sent(full) + sent(np.maximum(0, share - owners * full))
            out += price[k, m] * np.maximum(by_mass, pushed @ (
                features[:, at].T @ least_sums[k * num_options + m]))
        outside = {FREE: none & False, STILL: ~none, PUSHES: none}
        first = heavy.reshape(-1, num_options)[k].min()  # blocks that may not be pushed
        out[outside[states[k]] | (classes[:, :first] > 0).any(axis=1)] = np.inf
        return out

    every = np.array(list(product(range(must, num_options + 1), repeat=n)))
    least = np.array([cost(k, every).min() for k in range(num_tables)])
    chosen = out["chosen"].reshape(num_tables, n)
    mine = np.array([cost(k, chosen[k:k + 1])[0] for k in range(num_tables)])
    assert (out["value"] <= least * (1 + 1e-7)).all()
    assert (mine >= least * (1 - 1e-9)).all()
    if not must:  # an arbitrarily small part of a block may be pushed, for the charge alone
        part = stay.reshape(num_tables, n).sum(axis=1) + tiers_pushed
        least = np.where(states != STILL, np.minimum(least, part), least)
        assert (out["value"] <= least * (1 + 1e-7)).all()
    ratio = out["value"] / least
    assert np.median(ratio) > 0.98 and np.quantile(ratio, 0.01) > (0.95 if long_bags else 0.87)
    assert np.median(mine / least) < 1.01
    assert ((chosen > 0).any(axis=1) & ((chosen == 0).any(axis=1) | must)).sum() > 30


# ---- rows about the owner of the largest piece ---------------------------------------------------

COSTS = {"push_ns": 20.0, "id_ns": 1.0, "far_ns": 5.0, "sort_ns": 2.0, "update_ns": 10.0,
         "run_ns": 3.0, "wire_ns": 0.3, "warm_share": 0.4}


def owned(problem: Problem, owners: list[int], others: tuple[int, ...]) -> Plan:
    """Uncut pushed tables with one owner each; other tables are pulled from the ranks `others`."""
    world, entries = problem.machine.world_size, []
    for n, t in enumerate(problem.tables):
        tier = (Tier(0, t.spec.num_rows, "owned", (owners[n],), mode="push") if n < len(owners)
                else Tier(0, t.spec.num_rows, "striped", others))
        entries.append(TablePlan(t.spec, (Piece(0, t.spec.dim, (tier,)),)))
    return Plan(world, tuple(entries), problem.objective, problem.batch_size)


def loads(model: CostModel, plan: Plan) -> np.ndarray:
    """Load of each pushed table on its owner; of own time, the excess over any rank; [N, P, 5]."""
    out = []
    for t, entry in zip(model.problem.tables, plan.tables, strict=True):
        if entry.tiers[0].mode == "pull":
            continue
        vector = model.load_vector(t, entry.pieces, t.ids_are_positions)
        us = model.group_us(model.units(vector))[:, :5]
        least = us[:, LOCAL].min(axis=-1)[:, None] * model.has_local[:, :5]
        out.append(us[..., entry.tiers[0].ranks[0]] - least)
    return np.array(out)


@pytest.mark.parametrize(("name", "objective"), [
    ("gpus", "training"), ("hosts", "training"), ("pairs", "training"), ("unequal", "training"),
    ("hosts", "inference"), ("pairs", "inference"), ("shared", "training"),
    ("shared", "inference"), ("shared-pairs", "training"), ("racks", "training"),
    ("shared-racks", "training"), ("shared-uneven", "training")])
def test_each_row_is_a_bound_that_some_plan_nearly_attains(name, objective):
    close: dict[str, float] = {}
    rng = np.random.default_rng(1)
    for num_tables, pushed in ((1, 1), (3, 3), (3, 2), *[(2, 1)] * 6):
        held = {f"t{k}": {"replicate": False, "modes": ["push" if k < pushed else "pull"]}
                for k in range(num_tables)}
        problem = with_overlap(stated(int(rng.integers(99)), name, num_tables, COSTS,
                                      objective=objective, constraints={"tables": held}),
                               {"forward": 2.0 * (num_tables == 3)})
        model, world = CostModel(problem), problem.machine.world_size
        of_rank, link = neighbourhoods(problem.machine)
        apart = model.request_phase, GROUPS.index(link)
        relaxation = Relaxation(model, apart if hosts_are_interchangeable(model) else None)
        checker = Checker(model, relaxation.distinguished)
        for n in range(3 if pushed == 1 else 6):  # owners of several pushed tables are random
            owners = [0, *rng.integers(world, size=pushed - 1).tolist()]
            far = np.flatnonzero(of_rank != of_rank[owners[0]]).tolist()
            others = (owners[0],), tuple(far), tuple(range(world))
            plan = owned(problem, owners, others[n % 3])
            each, phases = loads(model, plan), evaluate(plan, problem).phases
            largest = int(each[:, apart[0], apart[1]].argmax())
            is_first = plan.tables[largest].tiers[0].ranks[0] in first_neighbourhood(
                problem.machine)
            least, most = each.max(axis=0), np.full(each.shape[1:], np.inf)
            node = Node(relaxation, LoadLimits(least, most))
            for x in relaxation.inequalities:
                if x.kind == APART and not is_first:
                    continue
                prices = np.zeros(relaxation.num_rows)
                prices[x.row] = 1.0 / relaxation.phase_weight[x.row, x.at[0]]
                mine = node.bound_at(prices, node.price(prices).value) - relaxation.fixed_us
                leaf = Leaf(least, most, np.inf, np.zeros(num_tables, np.uint8),
                                  np.zeros_like(checker.visible), 0.0,
                                  ((x.kind, *x.at, float(prices[x.row])),))
                found = checker.bound(leaf, 0.0)
                # The load is the larger direction of the row's links.
                link = [g.split("_")[0] == GROUPS[x.at[1]].split("_")[0] for g in GROUPS]
                busy = 1e6 * float(phases[x.at[0]].groups[link].max())
                assert max(mine, found) <= busy * (1 + 1e-9), x
                close[x.kind] = max(close.get(x.kind, 0.0), min(mine, found) / busy)
    assert READER in close and SPREAD in close
    assert (APART in close) == (name not in ("unequal", "shared-uneven"))
    assert min(close.values()) > 0.7 and close[READER] > 0.99, close


def test_owners_that_pool_in_inference_are_bounded_as_well(monkeypatch):
    problem = stated(2, "hosts", objective="inference")
    assert Relaxation(CostModel(problem)).inequalities
    plan = tighten_bound(plan_problem(problem, target_gap=0.0), problem, max_work=2000)
    assert verify_plan(plan, problem).certified
    monkeypatch.setattr("oper.search.relaxation.inequalities.OwnerInequalities._rows",
                        lambda *_: iter(()))
    without = tighten_bound(plan_problem(problem, target_gap=0.0), problem, max_work=2000)
    assert plan.lower_bound_us >= without.lower_bound_us * (1 - 1e-9)


@pytest.mark.parametrize("objective", ["training", "inference"])
@pytest.mark.parametrize("name", ["hosts", "pairs"])
def test_pulled_rows_count_with_their_bytes_in_rows_about_links(name: str, objective: str) -> None:
    """`(1 + k) R + s E` of rows with one owner: its bytes are summed by hand, from the numbers and
    sizes of the rows that a rank of another host reads, and of their gradients."""
    problem = stated(3, name, 2, None, objective=objective, constraints={
        "tables": {"t0": {"modes": ["push"]}, "t1": {"modes": ["pull"]}}})
    model, machine = CostModel(problem), problem.machine
    of_rank, _ = neighbourhoods(machine)
    distinguished = model.request_phase, GROUPS.index("cross_in")
    relaxation, probe = Relaxation(model, distinguished), Probe(model, True)
    t = problem.tables[1]
    bits = {"answer": 32 * t.spec.dim, "gradient": 32 * t.spec.dim + slot_bits(t.spec.num_rows)}
    found = set()
    for rank_class, owner in enumerate(probe.first.tolist()):
        tiers = (Tier(0, t.spec.num_rows, "owned", (owner,)),)
        own_us = model.group_us(model.units(model.load_vector(
            t, (Piece(0, t.spec.dim, tiers),), t.ids_are_positions)))[:, LOCAL].min(axis=-1)
        option = relaxation.options.index(Option(SHARD, rank_class))
        probed = probe.table(t, SHARD)
        for x in relaxation.inequalities:
            if x.kind == READER:
                continue
            phase, group = x.at
            sent = {("forward", "cross_in"): "answer", ("update", "cross_out"): "gradient"}.get(
                (model.phases[phase], GROUPS[group]))
            # Ranks of the first host do not read rows of their own host over these links.
            is_read = sent and (x.kind == SPREAD or of_rank[owner] != of_rank[0])
            seconds = machine.seconds_per_unit[TERMS.index(GROUPS[group])].min()
            link_us = 1e6 * seconds * t.total[TOUCHED] * bits[sent] / 8 if is_read else 0.0
            own = (1 + x.spared) * own_us[phase] * model.has_local[phase, group]
            mine = t.total @ relaxation.coefficients[1, option, :, x.row]
            assert mine == pytest.approx(own + link_us, rel=1e-9), x
            checked = (probed.far if x.kind == SPREAD else probed.apart)[0, rank_class]
            assert t.total @ checked[:, phase, group] == pytest.approx(link_us, rel=1e-9), x
            found |= {(x.kind, sent)} if is_read else set()
    assert found == {(kind, sent) for kind in (SPREAD, APART)
                     for sent in (bits if objective == "training" else ["answer"])}


# ---- a distinguished host: several classes of ranks ----------------------------------------------

REQUESTS = 0, GROUPS.index("cross_in")


def apart(problem: Problem, load: tuple[int, int] = REQUESTS, max_nodes: int = 24) -> Bound:
    tree = SearchTree(solve_node(Node(Relaxation(CostModel(problem), load))))
    return tree.run(max_nodes)


@pytest.mark.parametrize("topology", [gpus(4, slow=2), gpus(4, per_host=2)])
@pytest.mark.parametrize("seed", range(3))
def test_prices_of_several_classes_are_below_every_set_and_close_to_the_best(seed, topology):
    """In tables of few blocks, every set of pushed blocks and classes of owners is tried."""
    small = problem(12, seed, topology, allow=frozenset({"striped", "pull", "push", "columns"}))
    relaxation = Relaxation(CostModel(small), REQUESTS if topology.domains[-1].host else None)
    assert relaxation.pushes.sum() == 2
    node = Node(relaxation)
    rng, tried = np.random.default_rng(seed), 0
    for _ in range(4):
        prices = relaxation.project_prices(rng.uniform(0, 1, relaxation.num_rows) ** 3)
        columns = node.price(prices)
        assert (columns.resources @ prices >= columns.value * (1 - 1e-9)).all()
        for k, t in enumerate(relaxation.tables):
            if t.blocks.shape[0] > 6:
                continue
            tried += 1
            best = _cheapest(node, k, prices)
            assert columns.value[k] <= best * (1 + 1e-9)
            assert columns.value[k] >= best * (1 - 0.05)
    assert tried


def _cheapest(node: Node, k: int, prices: np.ndarray) -> float:
    relaxation = node.relaxation
    blocks = relaxation.tables[k].blocks
    found = []
    for choice in product(range(len(relaxation.options)), repeat=len(blocks)):
        amount = np.zeros((len(relaxation.options), NUM_FEATURES))
        for b, o in enumerate(choice):
            amount[o] += blocks[b]
        kinds = {relaxation.options[o].kind for o in choice}
        pushed = PUSH in kinds
        mode = (ALL_PUSHED if len(kinds) == 1 else TIERS_PUSHED) if pushed else (
            ONE_TIER if len(kinds) == 1 else TIERS)
        number = (len(relaxation.pieces.widths[k]) if pushed and not node.fit.whole[k].all()
                  else 1)
        found += [(PieceChoice(1.0, 1.0, j, mode, np.array(choice), amount),)
                  for j in range(number)]
    return float((node.resources(np.full(len(found), k), found) @ prices).min())


def test_the_bound_is_above_the_plain_one_where_pieces_are_large_and_certifies_itself():
    few, many = (loaded(plan_workloads.few_tables(0), plan_workloads.machine(n)) for n in (16, 64))
    model = CostModel(many)
    least, most = np.zeros((len(model.phases), 5)), np.full((len(model.phases), 5), np.inf)
    least[REQUESTS] = 150.0
    large, apart_ = (solve_node(Node(Relaxation(model, load), LoadLimits(least, most)))
                     for load in (None, REQUESTS))
    assert apart_.lower_bound_us > large.lower_bound_us * 1.003
    found = apart(many, max_nodes=20)
    assert recomputed(found) >= found.lower_bound_us * (1 - 1e-9)
    plan = plan_problem(few, target_gap=0.04)  # a tenth of the time of the default gap
    assert plan.gap < 0.05
    assert tighten_bound(plan, few, max_work=1400).lower_bound_us >= plan.lower_bound_us


def test_once_the_first_tree_is_done_the_most_promising_is_continued(monkeypatch):
    few = loaded(plan_workloads.few_tables(0), plan_workloads.machine(16))
    part = subspaces(few, None)[0]
    (first,) = part.trees
    far = 1e12
    for _ in range(3):  # as long as there is something to branch on, the first tree is continued
        part.branch(far, far, None)
        assert part.trees == [first]
    first.is_done = True
    while not all(x.work for x in part.trees) or len(part.trees) == 1:
        part.branch(far, far, None)
    first.is_done = False
    phases = [x.bound.relaxation.distinguished for x in part.trees]
    assert phases == [None, (0, REQUESTS[1]), (1, REQUESTS[1]), (3, REQUESTS[1])]
    monkeypatch.setattr(subspaces_module, "_LEAST_SHARE", 0.0)
    for tree in part.trees:
        for x in part.trees:  # bounds before any work; that of one tree has risen most
            x._history = [(0, x.bound.lower_bound_us - 1e9 * (x is tree))]
        solved = [x.solved for x in part.trees]
        part.branch(far, far, None)
        assert [x for x, n in zip(part.trees, solved, strict=True) if x.solved > n] == [tree]
    tree, again = part.trees[1], subspaces(few, None)[0]  # the proof serves for equal problems
    value = part_to_json(tree, part.plans, tree.bound.lower_bound_us)
    again.grow_as({"parts": [value]}, far, 1.0)
    assert again.trees[1].bound.lower_bound_us == pytest.approx(tree.bound.lower_bound_us, rel=1e-5)


def test_a_host_is_distinguished_if_hosts_are_equal():
    many = stated(2, "mixed")
    relaxation = Relaxation(CostModel(many))
    assert len(relaxation.classes.ranks) == 2
    loads = _host_loads(relaxation)
    assert relaxation.model.request_phase in {phase for phase, _ in loads}
    assert {group for _, group in loads} == {GROUPS.index("cross_in")}


def test_no_host_is_distinguished_if_hosts_differ():
    """A pinned table makes hosts differ."""
    held = {"tables": {"t0": {"ranks": [0, 1]}}}
    assert hosts_are_interchangeable(CostModel(stated(1, "hosts")))
    assert not hosts_are_interchangeable(CostModel(stated(1, "hosts", constraints=held)))
