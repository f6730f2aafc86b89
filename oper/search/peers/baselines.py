"""Peers' planners, re-implemented from their published descriptions and scored by one cost model.

Each takes the problem and returns a plan, or None where its rule finds no placement that fits. None
of them sees more of the problem than its publication says it uses; all are scored by `evaluate`.
Each uses the exchange of its own system: whole tables pool at the owner and push (`push`), caches
of rows are read by their reader (`pull`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from oper.plan import Piece, Plan, Tier
from oper.search.cost.model import evaluate
from oper.search.peers.markov import markov_chain
from oper.search.peers.programs import coverage_milp, extraction_lp, hot_and_cold
from oper.search.problem.statement import IDS, Problem, TableProblem
from oper.search.rounding.placing import plan_of

_SMALL_ROWS = 2000  # tables that hybrid plans keep data-parallel
_ROUNDS = 20  # splitting rounds, as HugeCTR's planner runs at most
_MAX_COLUMN_CUTS = 8
_PROPOSALS = 1500  # of the Markov chain


@dataclass(frozen=True, slots=True)
class Shard:
    """A table, or columns `[start, stop)` of it, to be assigned to an owner."""

    table: int
    start: int
    stop: int


def peers() -> dict[str, Callable[[Problem, int], Plan | None]]:
    """The peers by name; each is called with the problem and a seed."""
    return {
        "random": _random,
        "largest-first-size": _largest_first(lambda t: float(t.spec.num_bytes)),
        "largest-first-dim": _largest_first(lambda t: float(t.spec.dim)),
        "largest-first-lookups": _largest_first(lambda t: t.total[IDS] * t.spec.dim),
        "largest-first-size-lookups": _largest_first(
            lambda t: t.total[IDS] * t.spec.dim * np.log10(10.0 + t.spec.num_rows)),
        "hybrid-small-tables-replicated": _hybrid,
        "row-wise": _row_wise,
        "hugectr-split-and-place": _split_and_place,
        "neuroshard-beam": _beam,
        "recshard-coverage-milp": coverage_milp,
        "ugache-replicate-or-partition": lambda p, _: replicate_or_partition(p),
        "ugache-lp": extraction_lp,
        # FlexShard-like: replicate the rows that take half of each table's accesses.
        "flexshard-top-mass": lambda p, _: _threshold(p, 0.5),
        # FlexFlow's Metropolis search over our space and costs, a short chain of it.
        "flexflow-markov-chain": lambda p, seed: markov_chain(p, seed, _PROPOSALS),
    }


def score_peers(problem: Problem, seed: int = 0,
                others: Mapping[str, Plan | None] | None = None) -> dict[str, float]:
    """Modelled step (us) of every peer whose plan fits.

    Args:
        problem: the problem.
        seed: seed of the peers that choose at random.
        others: plans of peers outside of this package, by name.
    """
    plans = {name: make(problem, seed) for name, make in peers().items()} | dict(others or {})
    out = {}
    for name, plan in plans.items():
        if plan is not None:
            found = evaluate(plan, problem)
            if found.fits:
                out[name] = found.step_us
    return out


# -- whole tables and columns, pushed --------------------------------------------------------------


def _whole(problem: Problem, without: Collection[int] = ()) -> list[Shard]:
    """One shard for every table, except for the tables in `without`."""
    return [Shard(k, 0, t.spec.dim) for k, t in enumerate(problem.tables) if k not in without]


def _small(problem: Problem) -> set[int]:
    return {k for k, t in enumerate(problem.tables) if t.spec.num_rows <= _SMALL_ROWS}


def _random(problem: Problem, seed: int) -> Plan | None:
    rng = np.random.default_rng(seed)
    shards = _whole(problem)
    shards = [shards[k] for k in rng.permutation(len(shards)).tolist()]
    return _pack(problem, shards, rng.uniform(size=len(shards)))


def _largest_first(cost: Callable[[TableProblem], float]
                   ) -> Callable[[Problem, int], Plan | None]:
    """Longest processing time first (Graham 1969): the baselines of DreamShard and NeuroShard."""

    def make(problem: Problem, seed: int) -> Plan | None:
        return _pack(problem, _whole(problem), np.array([cost(t) for t in problem.tables]))

    return make


def _hybrid(problem: Problem, seed: int) -> Plan | None:
    """Small tables data-parallel, the others assigned whole by their lookups (TorchRec's usual
    mix)."""
    small = _small(problem)
    shards = _whole(problem, small)
    cost = np.array([problem.tables[s.table].total[IDS] * s.stop for s in shards])
    return _pack(problem, shards, cost, small)


def _row_wise(problem: Problem, seed: int) -> Plan | None:
    """Row-wise sharding: every table over all ranks, partial sums pushed and reduced."""
    world = problem.machine.world_size
    return _plan(problem, [(Tier(0, t.spec.num_rows, "striped", tuple(range(world)), mode="push"),)
                           for t in problem.tables])


def _shard_costs(problem: Problem, shards: Sequence[Shard]) -> np.ndarray:
    """HugeCTR's published cost of shards: memory term by hotness, exchange term by width."""
    d = problem.topology.domains[0]
    link = d.link_gbps if problem.topology.num_hosts == 1 else d.cross_gbps
    tables = [problem.tables[s.table] for s in shards]
    width = np.array([s.stop - s.start for s in shards])
    return np.asarray(np.array([t.total[IDS] for t in tables]) * width / d.read_gbps
                      + np.array([t.traffic.num_bags for t in tables]) * width / link)


def _split_and_place(problem: Problem, seed: int) -> Plan | None:
    """HugeCTR's planner as EMBark describes it: place, halve the costliest shard, and repeat."""
    small = _small(problem)
    shards = _whole(problem, small)
    best: tuple[float, Plan] | None = None
    for _ in range(_ROUNDS):
        cost = _shard_costs(problem, shards)
        plan = _pack(problem, shards, cost, small)
        if plan is not None:
            peak = _peak(problem, shards)
            if best is None or peak < best[0]:
                best = (peak, plan)
        cut = _wide(problem, shards, cost)
        if not cut:
            break
        shards = _halved(shards, cut[0])
    return None if best is None else best[1]


def _beam(problem: Problem, seed: int) -> Plan | None:
    """NeuroShard's outer beam over column splits, with the shard cost in place of learned nets."""
    beam, seen = [_whole(problem)], []
    for _ in range(_MAX_COLUMN_CUTS):
        seen += beam
        grown = [_halved(shards, n) for shards in beam
                 for n in _wide(problem, shards, _shard_costs(problem, shards))[:10]]
        if not grown:
            break
        grown.sort(key=lambda x: _peak(problem, x))
        beam = grown[:3]
    plans = (_pack(problem, shards, _shard_costs(problem, shards))
             for shards in sorted(seen + beam, key=lambda x: _peak(problem, x)))
    return next((plan for plan in plans if plan is not None), None)


def _wide(problem: Problem, shards: Sequence[Shard], cost: np.ndarray) -> list[int]:
    """Shards that may be halved, the costliest first."""
    return [n for n in np.argsort(-cost).tolist() if shards[n].stop - shards[n].start >= 8
            and problem.tables[shards[n].table].spec.may_be_split]


def _halved(shards: Sequence[Shard], n: int) -> list[Shard]:
    s = shards[n]
    middle = s.start + (s.stop - s.start) // 8 * 4
    middle = middle if middle > s.start else s.start + (s.stop - s.start) // 2
    return [*shards[:n], Shard(s.table, s.start, middle), Shard(s.table, middle, s.stop),
            *shards[n + 1:]]


def _peak(problem: Problem, shards: Sequence[Shard]) -> float:
    """Largest rank load after packing by cost alone."""
    load = [0.0] * problem.machine.world_size
    for value in sorted(_shard_costs(problem, shards).tolist(), reverse=True):
        heapq.heapreplace(load, load[0] + value)
    return max(load)


def _pack(problem: Problem, shards: Sequence[Shard], cost: np.ndarray,
          replicated: frozenset[int] | set[int] = frozenset()) -> Plan | None:
    """Assigns shards, the costliest first, to the least loaded rank with enough memory; other
    tables are replicated."""
    machine = problem.machine
    tiers: list[list[tuple[Shard, int]]] = [[] for _ in problem.tables]
    held = machine.per_domain(np.zeros(machine.world_size))
    for k in replicated:
        copies = machine.per_domain(np.ones(machine.world_size)) if problem.training else 1.0
        held = held + problem.tables[k].spec.num_bytes * copies
    load = np.zeros(machine.world_size)
    for n in np.argsort(-cost, kind="stable").tolist():
        shard = shards[n]
        t = problem.tables[shard.table]
        need = t.spec.num_bytes * (shard.stop - shard.start) / t.spec.dim
        room = held[machine.domain] + need <= machine.capacity_bytes[machine.domain]
        if not room.any():
            return None
        rank = int(np.where(room, load, np.inf).argmin())
        load[rank] += cost[n]
        held[machine.domain[rank]] += need
        tiers[shard.table].append((shard, rank))
    placements = {}
    for k, t in enumerate(problem.tables):
        pieces = [Piece(s.start, s.stop, (
            Tier(0, t.spec.num_rows, "owned", (rank,), mode="push"),))
            for s, rank in sorted(tiers[k], key=lambda x: x[0].start)]
        if k in replicated:
            every = Tier(0, t.spec.num_rows, "replicated", tuple(range(machine.world_size)))
            pieces = [Piece(0, t.spec.dim, (every,))]
        placements[t.spec.name] = tuple(pieces)
    return plan_of(problem, placements)


# -- rows by hotness, pulled -----------------------------------------------------------------------


def replicate_or_partition(problem: Problem) -> Plan | None:
    """UGache's closed form on a symmetric machine: replicate the hottest rows of all tables, down
    to one frequency per byte, until memory is full; partition the rest."""
    return _threshold(problem, None)


def _threshold(problem: Problem, mass: float | None) -> Plan | None:
    """The largest replicated prefix by a common rule whose plan fits."""
    low, high, best = 0.0, 1.0, None
    every = tuple(range(problem.machine.world_size))
    cuts = np.array([np.searchsorted(t.cumulative[IDS], (mass or 1.0) * t.total[IDS] - 1e-9)
                     for t in problem.tables])
    heat = [t.blocks[:, IDS] / (np.diff(t.edges) * t.spec.row_bytes) for t in problem.tables]
    order = np.sort(np.concatenate(heat))[::-1]
    for step in range(12):
        share = 1.0 if step == 0 else (low + high) / 2
        limit = order[min(order.size - 1, int(share * order.size))] if share < 1 else -1.0
        tiers = []
        for t, h, cut in zip(problem.tables, heat, cuts.tolist(), strict=True):
            colder = np.flatnonzero(h < limit)
            block = min(int(colder[0]) if colder.size else h.size, cut)
            tiers.append(hot_and_cold(t, int(t.edges[block]), Tier(0, 0, "replicated", every),
                                      Tier(0, 0, "striped", every)))
        plan = _plan(problem, tiers)
        if evaluate(plan, problem).fits:
            best, low = plan, share
            if share == 1.0:
                break
        else:
            high = share
    return best


def _plan(problem: Problem, tiers: Sequence[tuple[Tier, ...]]) -> Plan:
    return plan_of(problem, {t.spec.name: (Piece(0, t.spec.dim, x),)
                             for t, x in zip(problem.tables, tiers, strict=True)})
