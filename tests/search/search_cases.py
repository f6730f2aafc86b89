"""Small and random problems, and random plans for the tests of the search."""

from dataclasses import fields, replace
from functools import partial
from itertools import pairwise

import numpy as np
from hypothesis import HealthCheck, Phase, settings, strategies as st

from oper.bench.plan.workloads import Workload
from oper.messages import MessageBits
from oper.plan import Piece, Plan, TablePlan, Tier
from oper.search.branching.subspaces import fit, subspaces, tighten
from oper.search.cost.model import evaluate
from oper.search.cost.space import outside_space
from oper.search.peers.baselines import peers
from oper.search.peers.markov import markov_chain
from oper.search.pricing.master import Bound
from oper.search.problem.constraints import violations
from oper.search.problem.machine import neighbourhoods
from oper.search.problem.pins import impose
from oper.search.problem.space import ACROSS_HOSTS, COLUMN_STEP, EVERYTHING, EXECUTABLE, MIN_COLUMNS
from oper.search.problem.statement import Problem, make_problem, with_overlap
from oper.search.rounding.placing import table_plan
from oper.stats import AccessStats, TableStats
from oper.tables import TableSpec
from oper.topology import Costs, Domain, Rack, Topology
from tests.support import map_tiers

# All kinds of tiers, for `random_plan`.
KINDS = ("replicated", "striped", "owned", "striped-push", "owned-push")


def examples(few: int) -> int:
    """Number of examples of a property: `few`, or the profile's number if it draws new ones."""
    return few if settings.default.derandomize else settings.default.max_examples


def counted(num_rows: int, exponent: float, rng: np.random.Generator, num_ids: int = 200_000,
            length: int = 1, in_order: bool = True) -> TableStats:
    """Exact statistics of power-law ids, hot rows first or scattered."""
    weight = np.arange(1, num_rows + 1, dtype=float) ** -exponent
    counts = np.rint(weight / weight.sum() * num_ids * length).astype(np.int64)
    ids = np.arange(num_rows) if in_order else rng.permutation(num_rows)
    return TableStats.from_counts(num_rows, ids, counts,
                                  (np.array([length]), np.array([num_ids])))


def tables_and_stats(num_tables: int, seed: int, *, in_order: bool = True, min_rows: int = 3,
                     max_rows: int = 20_000,
                     lengths: tuple[int, ...] = (1, 4, 20)) -> tuple[list[TableSpec], AccessStats]:
    """Random tables with statistics."""
    rng = np.random.default_rng(seed)
    specs, stats = [], {}
    for k in range(num_tables):
        rows = int(np.exp(rng.uniform(np.log(min_rows), np.log(max_rows))))
        specs.append(TableSpec(f"t{k}", rows, int(rng.choice([8, 16, 64])), (f"f{k}",),
                               optimizer=str(rng.choice(["sgd", "rowwise_adagrad", "adagrad"]))))
        stats[f"t{k}"] = counted(rows, float(rng.uniform(0.5, 1.3)), rng,
                                 length=int(rng.choice(lengths)), in_order=in_order)
    return specs, AccessStats(200_000, stats, "generated", in_order)


def gpus(num_ranks: int, *, per_host: int = 8, memory_bytes: float = 80e9,
         slow: int = 0) -> Topology:
    """One rank per domain; the last `slow` ranks have half the memory and 0.6 of the bandwidth."""
    domains = tuple(
        Domain((r,), r // per_host, int(memory_bytes * (0.5 if r >= num_ranks - slow else 1.0)),
               2000.0 * (0.6 if r >= num_ranks - slow else 1.0), 5000.0, 40 << 20, 250.0, 25.0)
        for r in range(num_ranks))
    return Topology("gpus", domains, Costs(phase_us=2.0, id_ns=0.01, update_ns=0.02))


def host(num_ranks: int, memory_bytes: float = 8e9) -> Topology:
    """One memory domain with constants that do not depend on the machine that runs the test."""
    domain = Domain(tuple(range(num_ranks)), 0, int(memory_bytes), 40.0, 120.0, 32 << 20, 40.0,
                    40.0)
    return Topology("host", (domain,), Costs(30.0, 3.0, 5.0, 6.0, 12.0))


def problem(num_tables: int, seed: int, topology: Topology, objective: str = "training",
            **more: object) -> Problem:
    """A random problem on `topology`; batch of 256 samples per rank."""
    specs, stats = tables_and_stats(num_tables, seed, in_order=bool(more.pop("in_order", True)))
    more.setdefault("allow", EXECUTABLE)
    return make_problem(specs, stats, topology, objective=objective, batch_size=256,
                        **more)  # type: ignore[arg-type]


def loaded(work: Workload, topology: Topology, **more: object) -> Problem:
    """The problem of a benchmark's workload on `topology`, in the largest space."""
    return make_problem(work.tables, work.stats, topology, **{  # type: ignore[arg-type]
        "batch_size": work.batch_size, "allow": EVERYTHING} | more)


def shared(topology: Topology) -> Topology:
    """The topology with one link per host, shared by its ranks."""
    return replace(topology, hosts_share_links=True)


def racked(topology: Topology, *uplinks: float) -> Topology:
    """The topology with its hosts in as many racks as uplinks; the first racks may be larger."""
    hosts = sorted({d.host for d in topology.domains})
    size = -(-len(hosts) // len(uplinks))
    return replace(topology, racks=tuple(Rack(tuple(hosts[k * size:(k + 1) * size]), gbps)
                                         for k, gbps in enumerate(uplinks)))


def with_host_memory(topology: Topology, memory_bytes: float = 1e12,
                     gbps: float = 20.0) -> Topology:
    """The topology with host memory for rows."""
    return replace(topology, host_memory_bytes=int(memory_bytes), host_gbps=gbps)


def random_tier(start: int, stop: int, kind: str, world: int, rng: np.random.Generator) -> Tier:
    """A tier with random ranks: ``replicated`` on all, ``striped`` or ``owned``, pull or push."""
    placement, _, mode = kind.partition("-")
    if placement == "replicated":
        return Tier(start, stop, "replicated", tuple(range(world)))
    size = 1 if placement == "owned" else int(rng.integers(1, world + 1))
    ranks = tuple(int(r) for r in rng.permutation(world)[:size])
    weights = ()
    if placement == "striped" and rng.random() < 0.3:
        weights = tuple(int(w) for w in rng.integers(1, 5, size))
    return Tier(start, stop, placement, ranks, weights, mode or "pull")


def random_plan(stated: Problem, rng: np.random.Generator,
                kinds: tuple[str, ...] = ("replicated", "striped", "owned"),
                max_pieces: int = 1, in_host: tuple[str, ...] = ()) -> Plan:
    """Any valid plan with tiers of `kinds`, boundaries anywhere, up to `max_pieces` columns; one
    in three tiers of the kinds `in_host` is in host memory."""
    world = stated.machine.world_size
    entries = []
    for t in stated.tables:
        parts = int(rng.integers(1, max_pieces + 1))
        columns = _cuts(t.spec.dim, parts if t.spec.may_be_split else 1, rng)
        pieces = []
        for a, b in pairwise(columns):
            rows = _cuts(t.spec.num_rows, int(rng.integers(1, 5)), rng)
            tiers = []
            for x, y in pairwise(rows):
                kind = str(rng.choice(kinds))
                tier = random_tier(x, y, kind, world, rng)
                if kind in in_host and rng.random() < 1 / 3:
                    tier = replace(tier, memory="host")
                tiers.append(tier)
            pieces.append(Piece(a, b, tuple(tiers)))
        several = any(len(p.tiers) > 1 for p in pieces)
        head = t.head_ids if several and not t.ids_are_positions else t.head_ids[:0]
        entries.append(TablePlan(t.spec, tuple(pieces), head))
    return Plan(world, tuple(entries), stated.objective, stated.batch_size)


def _cuts(size: int, parts: int, rng: np.random.Generator) -> list[int]:
    inner = rng.integers(1, size, parts - 1) if size > 1 else np.zeros(0, np.int64)
    return sorted({0, size, *(int(x) for x in inner)})


def recomputed(bound: Bound) -> float:
    """A bound (us), recomputed from its prices alone."""
    prices = bound.relaxation.project_prices(bound.prices)
    return bound.node.bound_at(prices, bound.node.price(prices).value)


def space_bound(stated: Problem, max_work: int = 0) -> float:
    """Lower bound (us) of all plans of the space, without the cutoff of a known step; 0 where
    memory fits none.

    Args:
        stated: the problem.
        max_work: tables to price while branching, about.
    """
    parts = subspaces(stated, None)
    if not fit(parts):
        return 0.0
    found = [x for x in parts if not x.bound.is_infeasible]
    if max_work:
        far = 1e18  # a finite step, so that hosts are distinguished
        tighten(found, max_work, far, far, None)
    return min(x.lower_bound_us for x in found)


# ---- random problems of every kind ---------------------------------------------------------------

QUICK = settings(max_examples=examples(30), deadline=None, phases=[Phase.explicit, Phase.generate],
                 suppress_health_check=[HealthCheck.too_slow])
SPACES = (None, EXECUTABLE, EVERYTHING, ACROSS_HOSTS, EXECUTABLE | {"per_host"},
          EXECUTABLE | {"host"}, frozenset({"owned", "push", "columns"}),
          frozenset({"replicated", "owned", "push"}))
SPEEDS = st.sampled_from([0.05, 0.3, 1.0, 1.7])
# A Markov chain takes longer than all others together: here it is a short one.
OTHERS = {**peers(), "flexflow-markov-chain": partial(markov_chain, num_proposals=100)}


# ---- machines ------------------------------------------------------------------------------------


@st.composite
def costs(draw: st.DrawFn) -> Costs:
    """Constants of the test machines, measured ones of pushed rows, or any."""
    kind = draw(st.sampled_from(["gpus", "host", "pushed", "any"]))
    found = host(1).costs if kind == "host" else gpus(1).costs
    if kind == "pushed":
        found = replace(found, push_ns=10.0, id_ns=2.0, tier_ns=1.0, push_tier_ns=8.0,
                        push_bag_ns=60.0, wire_ns=draw(st.sampled_from([0.0, 0.5])), table_us=1.0)
    if kind == "any":
        found = replace(found, warm_share=draw(st.sampled_from([0.0, 0.8])), **{
            f.name: draw(st.sampled_from([0.0, 1.0, 10.0])) for f in fields(Costs)
            if f.name not in ("phase_us", "warm_share")})
    return found


@st.composite
def machines(draw: st.DrawFn) -> Topology:
    """Hosts of one to three ranks, alike or not, in racks or not, or memory domains of a single
    host; links of each rank's own, or shared by the ranks of a host."""
    alike, single = draw(st.booleans()), draw(st.integers(0, 3)) == 0
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    sizes = [sizes[0]] * len(sizes) if alike else sizes
    world, number, domains = sum(sizes), 0, []
    for h, size in enumerate(sizes):
        ranks = tuple(range(number, number + size))
        number += size
        if h == 0 or not alike:
            like = replace(gpus(1).domains[0], link_gbps=40.0 * draw(SPEEDS),
                           cross_gbps=10.0 * draw(SPEEDS), read_gbps=2000.0 * draw(SPEEDS))
            one_each = draw(st.booleans()) and not single
        parts = [(r,) for r in ranks] if one_each else [ranks]
        domains += [replace(like, host=0 if single else h, ranks=part) for part in parts]
    if draw(st.booleans()):  # slower ranks, which have less memory
        slow = draw(st.integers(0, len(domains) - 1))
        domains[slow] = replace(domains[slow], memory_bytes=domains[slow].memory_bytes // 2,
                                read_gbps=0.6 * domains[slow].read_gbps)
    racks = ()
    if draw(st.booleans()) and not single and len(sizes) > 1:
        cut = draw(st.integers(1, len(sizes) - 1))
        racks = tuple(Rack(tuple(hosts), 10.0 * draw(SPEEDS))
                      for hosts in (range(cut), range(cut, len(sizes))))
    return replace(gpus(world), domains=tuple(domains), costs=draw(costs()),
                   hosts_share_links=draw(st.booleans()), racks=racks)


# ---- problems ------------------------------------------------------------------------------------


@st.composite
def constraints(draw: st.DrawFn, specs: list[TableSpec], topology: Topology) -> dict[str, object]:
    """Pins anywhere, ranks of owners, reserved memory, tables together or apart."""
    ranks = st.lists(st.integers(0, topology.world_size - 1), min_size=1, unique=True)
    tables: dict[str, object] = {}
    for s in specs:
        kind = draw(st.sampled_from(["free", "free", "ranks", "owned", "rows", "tiers", "copies"]))
        if kind == "ranks":
            tables[s.name] = {"ranks": draw(ranks)}
        elif kind == "owned":
            tables[s.name] = {"placements": ["owned"]}
        elif kind == "copies":
            tables[s.name] = {"replicate": [[0, max(1, s.num_rows // 2)]]}
        elif kind != "free":
            start = 0 if kind == "tiers" else draw(st.integers(0, s.num_rows - 1))
            stop = s.num_rows if kind == "tiers" else draw(st.integers(start + 1, s.num_rows))
            some = draw(ranks)
            place = "owned" if len(some) == 1 else draw(st.sampled_from(["striped", "replicated"]))
            tier: dict[str, object] = {"rows": [start, stop], "place": place, "ranks": some}
            if place == "striped" and stop - start < len(some):
                tier.update(place="owned", ranks=some[:1])
            if place != "replicated" and draw(st.booleans()):
                tier["mode"] = "push"
            if topology.host_memory_bytes and draw(st.booleans()):
                tier["memory"] = "host"
            tables[s.name] = {"tiers" if kind == "tiers" else "pinned": [tier]}
    found: dict[str, object] = {
        "tables": tables, "reserve_bytes": draw(st.sampled_from([0, 100_000]))}
    group = draw(st.lists(st.sampled_from(specs), max_size=3, unique_by=lambda s: s.name))
    if len(group) > 1:
        label = draw(st.sampled_from(["keep_together", "keep_apart"]))
        found[label] = [[s.name for s in group]]
    return found


@st.composite
def problems(draw: st.DrawFn, is_free: bool = False) -> Problem:
    """Problems of every kind, with too little to ample memory; `is_free`: of ample memory, without
    constraints."""
    topology = draw(machines())
    world = topology.world_size
    specs, stats = tables_and_stats(
        draw(st.integers(1, 5)), draw(st.integers(0, 999)), in_order=draw(st.booleans()),
        max_rows=draw(st.sampled_from([2000, 20_000])),
        lengths=draw(st.sampled_from([(1, 4, 20), (4, 20, 50)])))  # long bags: pushing pays
    if draw(st.booleans()):  # its rows are updated whole
        specs[0] = replace(specs[0], optimizer="lamb")
    held = None
    if not is_free:
        need = sum(s.num_bytes for s in specs) / world
        memory = draw(st.sampled_from([0.7, 1.3, 3.0, 1000.0])) * need + 2e6 * draw(st.booleans())
        topology = replace(topology, domains=tuple(replace(
            d, memory_bytes=int(memory * len(d.ranks) * d.memory_bytes / 80e9))
            for d in topology.domains))
        if draw(st.integers(0, 2)) == 0:
            topology = with_host_memory(topology, 2 * memory)
        held = draw(st.one_of(st.none(), constraints(specs, topology)))
    problem = make_problem(
        specs, stats, topology, allow=draw(st.sampled_from(SPACES[:4] if held else SPACES)),
        batch_size=draw(st.sampled_from([1, 64, 300, 1500, 4096])), constraints=held,
        objective=draw(st.sampled_from(["training", "training", "inference"])))
    phases = ("resolve", "forward", "backward", "update") if problem.training else ("forward",)
    one = st.floats(0, 300)
    overlap = draw(st.dictionaries(st.sampled_from(phases), st.one_of(
        one, st.lists(one, min_size=world, max_size=world))))
    one_bits = st.sampled_from([(32, 32), (8, 8), (4, 4), (16, 16), (16, 8), (32, 8), (4, 32)])
    bits = MessageBits.parse(draw(st.one_of(
        one_bits, st.fixed_dictionaries({s.name: one_bits for s in specs}))))
    return replace(with_overlap(problem, overlap).with_fallback(), message_bits=bits)


# ---- plans ---------------------------------------------------------------------------------------


def pushing_plan(problem: Problem, rng: np.random.Generator) -> Plan:
    """A random plan with column pieces, e.g. each with a pulled head and a pushed tail."""
    world, entries = problem.machine.world_size, []
    for t in problem.tables:
        dim = t.spec.dim
        most = dim // MIN_COLUMNS if t.spec.may_be_split else 1
        parts = int(rng.integers(1, max(2, most + 1)))
        inner = rng.choice(np.arange(MIN_COLUMNS, dim - MIN_COLUMNS + 1, COLUMN_STEP), parts - 1,
                           replace=False) if parts > 1 else []
        edges = [0]
        for x in sorted({int(x) for x in inner}):
            if x - edges[-1] >= MIN_COLUMNS:
                edges.append(x)
        pieces = []
        for a, b in pairwise([*edges, dim]):
            cuts = sorted({0, t.spec.num_rows, int(rng.integers(1, t.spec.num_rows))})
            kinds = rng.choice(["replicated", "striped", "owned-push", "striped-push"],
                               len(cuts) - 1)
            pieces.append(Piece(a, b, tuple(
                random_tier(x, y, str(k), world, rng)
                for (x, y), k in zip(pairwise(cuts), kinds, strict=True))))
        entries.append(TablePlan(t.spec, tuple(pieces)))
    return Plan(world, tuple(entries), problem.objective, problem.batch_size)


def lopsided_plan(problem: Problem, rng: np.random.Generator) -> Plan:
    """One host owns the pushed rows, and more or fewer of the pulled rows than other hosts."""
    machine, entries = problem.machine, []
    world = machine.world_size
    of_rank, _ = neighbourhoods(machine)
    full = np.flatnonzero(of_rank == rng.integers(of_rank.max() + 1))
    weights = np.where(np.isin(np.arange(world), full), rng.integers(1, 6), rng.integers(1, 6))
    for t in problem.tables:
        rows = t.spec.num_rows
        edge, colder = sorted(rng.integers(1, rows, 2).tolist()) if rows > 2 else (0, 0)
        hot = [Tier(0, edge, "replicated", tuple(range(world)))] if edge else []
        if colder > edge:
            hot.append(Tier(edge, colder, "striped", tuple(range(world)),
                            tuple(int(w) for w in weights), "pull"))
        start, pieces = max(edge, colder), []
        step = t.spec.dim if t.spec.dim < 16 or not t.spec.may_be_split else int(
            rng.choice([8, 16, t.spec.dim]))
        for a in range(0, t.spec.dim, step):
            pieces.append(Piece(a, a + step, (*hot, Tier(
                start, rows, "owned", (int(rng.choice(full)),), mode="push"))))
        entries.append(TablePlan(t.spec, tuple(pieces)))
    return Plan(world, tuple(entries), problem.objective, problem.batch_size)


def copied_plan(problem: Problem, rng: np.random.Generator) -> Plan:
    """Copies on any rank of every host, chosen by tier; some are on all ranks."""
    of_rank = problem.machine.host

    def moved(x: Tier) -> Tier:
        if x.placement != "replicated" or rng.random() < 0.2:
            return x
        return replace(x, ranks=tuple(int(rng.choice(np.flatnonzero(of_rank == h)))
                                      for h in range(int(of_rank.max()) + 1)))

    return map_tiers(random_plan(problem, rng, ("replicated", "replicated", "striped", "owned")),
                     moved)


def _held_to(plan: Plan, problem: Problem) -> Plan:
    """The plan changed to satisfy pins and ranks of owners."""
    entries = []
    for t, entry in zip(problem.tables, plan.tables, strict=True):
        held, pieces = problem.held(t.spec.name), entry.pieces
        if held.tiers is not None:
            pieces = (Piece(0, t.spec.dim, held.tiers),)
        elif held.ranks is not None:
            pieces = tuple(replace(p, tiers=tuple(replace(
                x, placement="owned", ranks=held.ranks[:1], weights=()) for x in p.tiers))
                for p in pieces)
        entries.append(table_plan(t, impose(held, pieces)))
    return replace(plan, tables=tuple(entries))


def steps_in_space(plans: list[Plan], problem: Problem) -> list[float]:
    """Steps (us) of the plans that fit, satisfy the constraints and lie in the space."""
    steps = []
    for plan in plans:
        price = evaluate(plan, problem)
        if price.fits and not violations(plan, problem.constraints) and not outside_space(
                plan, problem):
            steps.append(price.step_us)
    return steps


def placed_steps(problem: Problem, seed: int) -> list[float]:
    """Steps (us) of those plans that fit, among random plans of the space and some peers' plans,
    changed to satisfy the constraints."""
    rng = np.random.default_rng(seed)
    kinds = tuple(k for k in KINDS if {k.partition("-")[0]} | (
        {k.partition("-")[2] or "pull"} - {"pull"}) <= problem.allow)
    in_host = ("striped", "owned") if problem.topology.host_memory_bytes else ()
    plans = [random_plan(problem, rng, kinds, 3 if "columns" in problem.allow else 1, in_host)
             for _ in range(8)]
    if problem.allow >= {"push", "columns"}:
        plans += [make(problem, rng) for _ in range(6) for make in (pushing_plan, lopsided_plan)]
    if "per_host" in problem.allow:
        plans += [copied_plan(problem, rng) for _ in range(5)]
    found = [p(problem, seed % 97) for p in OTHERS.values()] if seed % 4 == 0 else []
    plans += [x for x in found if x is not None]
    return steps_in_space([_held_to(x, problem) for x in plans], problem)
