"""Other systems' planners, re-implemented from their publications and scored by one cost model.

Each takes the problem and returns a plan, or None if its method finds no placement that fits. None
uses more of the problem than its publication states; all are scored by `evaluate`. Each uses the
exchange of the system it is from: assigned tables and columns are pooled at their owner (`push`);
rows of caches are read by their reader (`pull`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from oper.plan import Piece, Plan, Tier
from oper.search.cost.model import evaluate
from oper.search.peers.markov import markov_chain
from oper.search.peers.programs import (
    coverage_milp,
    extraction_lp,
    hot_and_cold,
    plan_of_tiers,
)
from oper.search.problem.statement import IDS, Problem, TableProblem
from oper.search.rounding.placing import plan_of

_SMALL_ROWS = 2000  # rows up to which hybrid plans replicate a table (data parallelism)
_ROUNDS = 20  # upper limit of splitting rounds, as in HugeCTR's planner
_MAX_COLUMN_CUTS = 8
_PROPOSALS = 1500  # proposals of the Markov chain


@dataclass(frozen=True, slots=True)
class Shard:
    """A table, or columns `[start, stop)` of it, to be assigned to an owner."""

    table: int
    start: int
    stop: int


def peers() -> dict[str, Callable[[Problem, int], Plan | None]]:
    """The peers by name, as functions of the problem and a seed."""
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
        # FlexShard-like: replicate the hottest rows that receive half of each table's lookups.
        "flexshard-top-mass": lambda p, _: _threshold(p, 0.5),
        # FlexFlow's Metropolis search over OPER's space and costs, with a short chain.
        "flexflow-markov-chain": lambda p, seed: markov_chain(p, seed, _PROPOSALS),
    }


def score_peers(problem: Problem, seed: int = 0,
                others: Mapping[str, Plan | None] | None = None) -> dict[str, float]:
    """Modelled step time (us) by planner (`peers` and `others`), of the plans that fit.

    Args:
        problem: the problem.
        seed: seed of the planners that use random numbers.
        others: plans of further planners by name, None where one found no plan.
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
    """Longest processing time first (Graham 1969), as in the baselines of DreamShard and
    NeuroShard."""

    def make(problem: Problem, seed: int) -> Plan | None:
        return _pack(problem, _whole(problem), np.array([cost(t) for t in problem.tables]))

    return make


def _hybrid(problem: Problem, seed: int) -> Plan | None:
    """Replicate small tables (data parallelism) and assign each other table to one rank by its
    lookups; TorchRec's usual mix."""
    small = _small(problem)
    shards = _whole(problem, small)
    cost = np.array([problem.tables[s.table].total[IDS] * s.stop for s in shards])
    return _pack(problem, shards, cost, small)


def _row_wise(problem: Problem, seed: int) -> Plan | None:
    """Row-wise sharding: stripe every table over all ranks; owners push partial sums."""
    every = tuple(range(problem.machine.world_size))
    return plan_of_tiers(problem, ((Tier(0, t.spec.num_rows, "striped", every, mode="push"),)
                                   for t in problem.tables))


def _shard_costs(problem: Problem, shards: Sequence[Shard]) -> np.ndarray:
    """HugeCTR's published shard cost: lookups x width / memory bandwidth + bags x width / link
    bandwidth."""
    d = problem.topology.domains[0]
    link = d.link_gbps if problem.topology.num_hosts == 1 else d.cross_gbps
    tables = [problem.tables[s.table] for s in shards]
    width = np.array([s.stop - s.start for s in shards])
    return np.asarray(np.array([t.total[IDS] for t in tables]) * width / d.read_gbps
                      + np.array([t.traffic.num_bags for t in tables]) * width / link)


def _split_and_place(problem: Problem, seed: int) -> Plan | None:
    """HugeCTR's planner as EMBark describes it: place all shards, halve the costliest, repeat."""
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
    """NeuroShard's outer beam search over column splits, with `_shard_costs` instead of its
    learned cost model."""
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
    """Indices of the shards that may be halved, the costliest first."""
    return [n for n in np.argsort(-cost).tolist() if shards[n].stop - shards[n].start >= 8
            and problem.tables[shards[n].table].spec.may_be_split]


def _halved(shards: Sequence[Shard], n: int) -> list[Shard]:
    s = shards[n]
    middle = s.start + (s.stop - s.start) // 8 * 4
    middle = middle if middle > s.start else s.start + (s.stop - s.start) // 2
    return [*shards[:n], Shard(s.table, s.start, middle), Shard(s.table, middle, s.stop),
            *shards[n + 1:]]


def _peak(problem: Problem, shards: Sequence[Shard]) -> float:
    """Largest rank load after packing by cost, ignoring memory."""
    load = [0.0] * problem.machine.world_size
    for value in sorted(_shard_costs(problem, shards).tolist(), reverse=True):
        heapq.heapreplace(load, load[0] + value)
    return max(load)


def _pack(problem: Problem, shards: Sequence[Shard], cost: np.ndarray,
          replicated: frozenset[int] | set[int] = frozenset()) -> Plan | None:
    """Assign shards, the costliest first, to the least loaded rank with enough memory, and
    replicate the tables `replicated`; None if a shard does not fit."""
    machine = problem.machine
    tiers: list[list[tuple[Shard, int]]] = [[] for _ in problem.tables]
    held = machine.per_domain(np.zeros(machine.world_size))
    for k in replicated:
        copies = machine.per_domain(np.ones(machine.world_size)) if problem.training else 1.0
        held = held + problem.tables[k].spec.bytes_for(problem.training) * copies
    load = np.zeros(machine.world_size)
    for n in np.argsort(-cost, kind="stable").tolist():
        shard = shards[n]
        t = problem.tables[shard.table]
        need = t.spec.bytes_for(problem.training) * (shard.stop - shard.start) / t.spec.dim
        fits = held[machine.domain] + need <= machine.capacity_bytes[machine.domain]
        if not fits.any():
            return None
        rank = int(np.where(fits, load, np.inf).argmin())
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
    """UGache's closed form for a symmetric machine: replicate the rows of all tables in descending
    order of lookups per byte until memory is full, and partition the rest."""
    return _threshold(problem, None)


def _threshold(problem: Problem, mass: float | None) -> Plan | None:
    """Replicate rows above a threshold of lookups per byte, at most the share `mass` of each
    table's lookups, and stripe the rest; the lowest threshold whose plan fits."""
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
        plan = plan_of_tiers(problem, tiers)
        if evaluate(plan, problem).fits:
            best, low = plan, share
            if share == 1.0:
                break
        else:
            high = share
    return best
