"""Small problems and random plans for the tests of the search."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
from hypothesis import settings

from oper.plan import Piece, Plan, TablePlan, Tier
from oper.search.branching.subspaces import fit, subspaces, tighten
from oper.search.pricing.master import Bound
from oper.search.problem.space import EXECUTABLE
from oper.search.problem.statement import Problem, make_problem
from oper.stats import AccessStats, TableStats
from oper.tables import TableSpec
from oper.topology import Costs, Domain, Rack, Topology

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
