"""Random planning problems of every kind, and random plans that satisfy them."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from itertools import pairwise

import numpy as np
from hypothesis import HealthCheck, Phase, settings, strategies as st

from oper.messages import MessageBits
from oper.plan import Piece, Plan, TablePlan, Tier
from oper.search.cost.model import evaluate
from oper.search.cost.space import outside_space
from oper.search.peers.baselines import peers
from oper.search.peers.markov import markov_chain
from oper.search.problem.constraints import violations
from oper.search.problem.machine import neighbourhoods
from oper.search.problem.pins import impose
from oper.search.problem.space import (
    ACROSS_HOSTS,
    COLUMN_STEP,
    EVERYTHING,
    EXECUTABLE,
    MIN_COLUMNS,
)
from oper.search.problem.statement import Problem, make_problem, with_overlap
from oper.search.rounding.placing import table_plan
from oper.tables import TableSpec
from oper.topology import Costs, Rack, Topology
from tests.search.search_cases import (
    KINDS,
    examples,
    gpus,
    host,
    random_plan,
    random_tier,
    tables_and_stats,
    with_host_memory,
)
from tests.support import map_tiers

QUICK = settings(max_examples=examples(60), deadline=None, phases=[Phase.explicit, Phase.generate],
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
