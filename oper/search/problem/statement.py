"""The planning problem: tables as curves over hotness, a machine, an objective, a plan space.

Rows are aggregated. A table is cut into blocks of rows of about equal hotness: the hottest rows are
blocks of their own, and further blocks grow by about a third each. A block is described by four
numbers, its *features*, which are sums over its rows r:

===========  ====================================================================
ROWS         rows
IDS          expected ids per rank and batch, `B L p_r`
TOUCHED      expected distinct rows in one rank's batch, `u_r(B)`
TOUCHED_ALL  expected distinct rows in all ranks' batches, `u_r(WB)`
===========  ====================================================================

`u_r(n) = 1 - E[(1 - p_r)^L]^n` for n bags of independent ids, over the distribution of the bag
length L. The mean of L alone, `1 - (1 - p_r)^(n E[L])`, would overestimate the distinct rows of
tables with a few long bags. If statistics contain measured numbers of distinct rows (presence), `n`
is replaced by the number of independent bags that touches as many rows.

Samples may share the bags of some features, such as those of a user in requests that rank
candidates (`AccessStats.samples_per_bag`). Each shared bag counts once per batch; outputs have a
row per sample. Shared bags are assumed to be independent, since they belong to different requests.
"""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from oper.errors import InvalidInputError, require
from oper.messages import EXACT, MessageBits, owners_pool
from oper.plan import EXPECTED_OBJECTIVE, OBJECTIVES
from oper.search.problem.constraints import (
    Constraints,
    TableConstraint,
    check_rows,
    parse_constraints,
)
from oper.search.problem.machine import Machine, make_machine
from oper.search.problem.overlap import Overlap, parse_overlap
from oper.search.problem.space import EXECUTABLE, check_allow, executed_space, used_by
from oper.stats import AccessStats, TableStats, table_stats_for
from oper.support.counts import count_levels
from oper.support.numeric import falling_root
from oper.tables import CODE_BITS, TableSpec, check_unique
from oper.topology import Topology

ROWS, IDS, TOUCHED, TOUCHED_ALL = range(4)
NUM_FEATURES = 4
MAX_BLOCKS = 60
_MOST_LENGTHS = 256  # bag lengths; more are grouped, since each costs time at 1e5 shares of a table
_MOST_KNOWN = 8  # cached results of `TableProblem.shares` per table
_NUM_EXPLICIT = 1 << 16  # hot rows represented by id, for plans that carry no hotness order


@dataclass(frozen=True, slots=True, eq=False)
class Traffic:
    """Ids and bags of one rank's batch in a table.

    Attributes:
        num_ids: expected ids per rank and batch, over all features of the table.
        num_bags: expected bags per rank and batch.
        lengths: float64 [P], bag lengths.
        length_share: float64 [P], share of the bags that have each length.
        samples_per_bag: mean number of samples that share a bag.
    """

    num_ids: float
    num_bags: float
    lengths: np.ndarray
    length_share: np.ndarray
    samples_per_bag: float = 1.0

    def bags_touching(self, mass: np.ndarray | float) -> np.ndarray:
        """Expected bags with an id among rows that receive the share `mass` of the lookups:
        `num_bags E[1 - (1 - mass)^L]`."""
        miss = np.power(1.0 - np.clip(np.asarray(mass)[..., None], 0.0, 1.0), self.lengths)
        return self.num_bags * ((1.0 - miss) @ self.length_share)


@dataclass(frozen=True, eq=False)
class TableProblem:
    """One table of a planning problem.

    Attributes:
        spec: the table.
        traffic: ids and bags per rank and batch.
        edges: int64 [K+1], positions where blocks begin, ending with `num_rows`.
        cumulative: float64 [4, K+1], the features of positions `[0, edges[k])`.
        ids_are_positions: whether ids are in hotness order, so that a plan needs no `head_ids`.
        head_ids: int64 [H], ids at the first positions (empty if `ids_are_positions`).
        explicit_ids: int64 [E], ascending; the hottest rows by id, for plans that do not order ids.
        explicit: float64 [4, E], the features of each row in `explicit_ids`.
        default_share: of a dynamic table, share of the lookups whose key has no row; None = static.
    """

    spec: TableSpec
    traffic: Traffic
    edges: np.ndarray
    cumulative: np.ndarray
    ids_are_positions: bool
    head_ids: np.ndarray
    explicit_ids: np.ndarray
    explicit: np.ndarray
    default_share: float | None = None

    @property
    def num_bags(self) -> float:
        """Expected bags per rank and batch. Each id of an unpooled table counts as a bag."""
        return self.traffic.num_ids if self.spec.pooling == "none" else self.traffic.num_bags

    @property
    def num_outputs(self) -> float:
        """Rows of output per rank and batch."""
        return self.num_bags * self.traffic.samples_per_bag

    @cached_property
    def blocks(self) -> np.ndarray:
        """float64 [K, 4], the features of each block."""
        return np.diff(self.cumulative, axis=1).T

    @cached_property
    def total(self) -> np.ndarray:
        """float64 [4], the features of the entire table."""
        return self.cumulative[:, -1]

    @cached_property
    def _rest(self) -> np.ndarray:
        num_rest = max(1, self.spec.num_rows - self.explicit_ids.size)
        return np.maximum(self.total - self.explicit.sum(axis=1), 0.0) / num_rest

    def prefix(self, position: np.ndarray | float) -> np.ndarray:
        """Features of the `position` hottest rows, linear inside a block; float64 [4, ...]."""
        return np.stack([np.interp(position, self.edges, c) for c in self.cumulative])

    def features(self, start: int, stop: int, ordered: bool) -> np.ndarray:
        """Sum of the features, see above, of the rows at positions `[start, stop)`; float64 [4].

        `ordered` states whether positions are those in the hotness order; else they are ids.
        """
        return self.shares(start, stop, 1, ordered)[:, 0]

    def shares(self, start: int, stop: int, period: int, ordered: bool) -> np.ndarray:
        """For each k < period, features of the positions `start + k + j * period` below `stop`, j =
        0, 1, ...; float64 [4, period], read-only. Arguments as for `features`."""
        key = (start, stop, period, ordered)
        if key not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[key] = self._shares(start, stop, period, ordered)
            self._known[key].flags.writeable = False
        return self._known[key]

    @cached_property
    def _known(self) -> dict[tuple[int, int, int, bool], np.ndarray]:
        """Cached results of `shares`, because a placement is evaluated several times."""
        return {}

    def _shares(self, start: int, stop: int, period: int, ordered: bool) -> np.ndarray:
        turn = np.arange(period)
        if ordered:
            inside = self.edges[(self.edges > start) & (self.edges < stop)]
            cuts = np.concatenate([[start], inside, [stop]])
            density = np.diff(self.prefix(cuts), axis=1) / np.diff(cuts)
            # For every cut x and slot k: positions below x that belong to k.
            below = -((turn[None, :] - (cuts[:, None] - start)) // period)
            return density @ np.diff(np.maximum(below, 0), axis=0)
        first, last = np.searchsorted(self.explicit_ids, [start, stop])
        slot = (self.explicit_ids[first:last] - start) % period
        hot = np.stack([np.bincount(slot, row, minlength=period)
                        for row in self.explicit[:, first:last]])
        num_rows = np.maximum(-((turn - (stop - start)) // period), 0)
        num_rest = num_rows - np.bincount(slot, minlength=period)
        return hot + self._rest[:, None] * num_rest


@dataclass(frozen=True, eq=False)
class Problem:
    """A planning problem: tables, machine, objective, and the plan space.

    Attributes:
        tables: one entry per table, in the order given.
        machine: the topology as arrays.
        objective: ``"training"`` or ``"inference"``.
        batch_size: samples per rank and step.
        allow: features that a plan may use, see `oper.search.problem.space.FEATURES`.
        constraints: constraints on the plan.
        overlap: dense compute that overlaps with phases, microseconds by phase and rank.
        fallback: features that a plan may also use if no plan fits otherwise.
        message_bits: bits per number in messages between hosts, by table; the same in every plan.
    """

    tables: tuple[TableProblem, ...]
    machine: Machine
    objective: str
    batch_size: int
    allow: frozenset[str] = EXECUTABLE
    constraints: Constraints = field(default_factory=Constraints)
    overlap: Overlap = field(default_factory=dict)
    fallback: frozenset[str] = frozenset()
    message_bits: MessageBits = EXACT

    @property
    def topology(self) -> Topology:
        """The topology of `machine`."""
        return self.machine.topology

    @property
    def training(self) -> bool:
        """Whether the objective is training, which adds backward and update phases."""
        return self.objective == "training"

    def table(self, name: str) -> TableProblem:
        """The entry of table `name`; raises InvalidInputError if there is none."""
        if (found := self._by_name.get(name)) is not None:
            return found
        raise InvalidInputError("the problem has no such table", "table", name,
                                f"one of {[t.spec.name for t in self.tables][:8]}",
                                "make the problem from this model's tables")

    @cached_property
    def _by_name(self) -> dict[str, TableProblem]:
        return {t.spec.name: t for t in self.tables}

    def held(self, name: str) -> TableConstraint:
        """The constraints on table `name`."""
        return self.constraints.tables.get(name, TableConstraint())

    @property
    def free_tables(self) -> tuple[TableProblem, ...]:
        """The tables that the planner places: those without a complete list of pinned tiers."""
        return tuple(t for t in self.tables if self.held(t.spec.name).tiers is None)

    def with_fallback(self) -> Problem:
        """The problem with `fallback` added to the features that plans may use."""
        return replace(self, allow=self.allow | self.fallback, fallback=frozenset())

    def may_split(self, t: TableProblem) -> bool:
        """Whether a plan may split table `t` by columns."""
        return "columns" in self.allow and t.spec.may_be_split

    def placements_of(self, name: str) -> frozenset[str]:
        """Placements that table `name` may use."""
        held = self.held(name)
        chosen = self.allow & {"replicated", "striped", "owned"}
        if held.placements is not None:
            chosen &= held.placements
        if held.ranks is not None and len(set(held.ranks)) < self.machine.world_size:
            chosen -= {"replicated"}
        if self.machine.world_size == 1 and len(chosen) > 1 and "pull" in self.modes_of(name):
            # Pulling is the same, but for an update that copies the changed rows to the same rank.
            chosen -= {"replicated"}
        # Replicas are in device memory.
        return chosen if "device" in self.memories_of(name) else chosen - {"replicated"}

    def modes_of(self, name: str) -> frozenset[str]:
        """Exchange modes that table `name` may use."""
        chosen, modes = self.allow & {"pull", "push"}, self.held(name).modes
        return chosen if modes is None else chosen & modes

    def owners_of(self, name: str) -> list[int]:
        """Ranks that may own rows of table `name`, ascending."""
        ranks = self.held(name).ranks
        return list(range(self.machine.world_size)) if ranks is None else sorted(set(ranks))

    def memories_of(self, name: str) -> frozenset[str]:
        """Memories that may hold rows of table `name`; rows in host memory are only pulled."""
        chosen = {"device"} | (self.allow & {"host"} if self.topology.host_memory_bytes else set())
        memories = self.held(name).memories
        return frozenset(chosen if memories is None else chosen & memories)


def make_problem(
    tables: Iterable[TableSpec],
    stats: AccessStats | None,
    topology: Topology,
    *,
    objective: str = "training",
    batch_size: int,
    allow: Iterable[str] | None = None,
    constraints: Constraints | Mapping[str, Any] | None = None,
) -> Problem:
    """Make the planning problem of a model on a machine.

    Args:
        tables: the tables, in the order of the collection.
        stats: access statistics; None = assume equally hot rows, and warn once.
        topology: the machine.
        objective: ``"training"`` or ``"inference"``.
        batch_size: samples per rank and step.
        allow: features that a plan may use, from `oper.search.problem.space.FEATURES`. Default:
            those that the runtimes execute well on this topology (`executed_space`), and host
            memory if the rows do not fit without it.
        constraints: see `oper.search.problem.constraints`.

    Raises:
        InvalidInputError: an argument is out of range, or the statistics are for other tables.
    """
    specs = check_unique(tables)
    _check_arguments(stats, topology, objective, batch_size)
    batch_size = int(batch_size)  # not a number of NumPy, which JSON cannot represent
    if stats is None:
        warnings.warn("no access statistics: the plan is based on table sizes alone and assumes "
                      "that all rows of a table are equally hot", stacklevel=2)
    world_size = topology.world_size
    held = parse_constraints(constraints, (t.name for t in specs), world_size)
    if stats is not None:
        _check_shared(specs, stats.samples_per_bag)
    entries = tuple(make_table(t, stats, batch_size, world_size) for t in specs)
    chosen = executed_space(topology) if allow is None else check_allow(allow)
    fallback = {"host"} if allow is None and topology.host_memory_bytes else set()
    if "pull" in chosen and not owners_pool(specs, objective == "training", topology.num_hosts):
        chosen -= {"push"}  # ranks of one memory do not wait for owners to pool rows
        if allow is None:
            chosen -= {"columns"}  # column splits only pay by distributing partial sums
    chosen |= {f for c in held.tables.values() for x in c.pinned for f in used_by(x, world_size)}
    if any(t.dtype in CODE_BITS for t in specs):
        chosen -= {"columns"}  # the codes of a row share a scale
    if not any(t.may_be_split for t in specs):
        chosen -= {"columns"}
    machine = make_machine(topology, held.reserve_bytes, held.memory_bytes)
    problem = Problem(entries, machine, objective, batch_size, chosen, held,
                      fallback=frozenset(fallback))
    for t in specs:
        mine = problem.held(t.name)
        check_rows(t.name, mine, t.num_rows, world_size)
        lacks_memory = "host" in (mine.memories or ()) and not topology.host_memory_bytes
        require(f"no placement is allowed for table {t.name!r}",
                "state host_memory_bytes in the topology, or allow device memory" if lacks_memory
                else "remove the constraint or extend `allow`",
                ("constraint", Constraints({t.name: mine}).to_json().get("tables"),
                 mine.tiers is not None or _may_place(problem, t.name),
                 f"a placement, a mode and a memory of {sorted(problem.allow)}"))
    return problem


def _may_place(problem: Problem, name: str) -> bool:
    """Whether table `name` has any allowed placement, including those of `fallback`."""
    problem = problem.with_fallback()
    places, modes = problem.placements_of(name), problem.modes_of(name)
    memories = problem.memories_of(name)
    if "device" in memories and places and modes:
        return True
    return "host" in memories and "pull" in modes and bool(places - {"replicated"})


def with_overlap(problem: Problem, overlap: Mapping[str, Any] | None) -> Problem:
    """Return the problem with declared dense compute.

    Args:
        problem: the problem.
        overlap: see `oper.search.problem.overlap.parse_overlap`; None = no overlap.

    Raises:
        InvalidInputError: an unknown phase, or a value that is not a finite number >= 0.
    """
    phases = ("forward", "backward", "update") if problem.training else ("forward",)
    return replace(problem, overlap=parse_overlap(overlap, phases, problem.machine.world_size))


def _check_arguments(stats: Any, topology: Any, objective: str, batch_size: Any) -> None:
    what = "cannot state the planning problem"
    require(what, "read a file with AccessStats.load, or pass None if there are none",
            ("stats", stats, stats is None or isinstance(stats, AccessStats),
             "an oper.AccessStats"))
    require(what, "make one with Topology.from_toml, or by name with oper.search.topology_preset",
            ("topology", topology, isinstance(topology, Topology), "an oper.Topology"))
    require(what, "state the objective, training or inference",
            ("objective", objective, objective in OBJECTIVES, EXPECTED_OBJECTIVE))
    is_right = isinstance(batch_size, numbers.Integral) and 1 <= int(batch_size) < 2**31
    require(what, "pass the samples per rank and step",
            ("batch_size", batch_size, is_right, "an integer >= 1 and < 2^31"))


def _check_shared(specs: Sequence[TableSpec], shared: Mapping[str, float]) -> None:
    """Raise InvalidInputError if samples cannot share bags of the features in `shared`."""
    pooled = [f for t in specs if t.pooling != "none" for f in t.features]
    wrong = sorted(shared.keys() - set(pooled))
    require("cannot state the planning problem", "leave other features out of samples_per_bag",
            ("features in samples_per_bag", wrong, not wrong,
             f"only pooled features of the tables, {pooled[:8]}"))


def make_table(spec: TableSpec, stats: AccessStats | None, batch_size: int,
               world_size: int) -> TableProblem:
    """Describe one table by the features of its blocks.

    Args:
        spec: the table.
        stats: access statistics; None, or no accesses to the table = equally hot rows.
        batch_size: samples per rank and step.
        world_size: number of ranks.

    Raises:
        InvalidInputError: the statistics are for another number of rows.
    """
    found = None if stats is None else table_stats_for(stats, spec.name, spec.num_rows)
    num_features = max(1, len(spec.features))
    head, in_order, num_blocks, num_touched = np.zeros(0, np.int64), True, 8, spec.num_rows
    shared = {} if stats is None else stats.samples_per_bag
    # Bags looked up / bags of all samples, if every sample has the same number of bags of each
    # feature. A batch looks up at least one bag of a feature, even if more samples share that bag
    # than the batch has.
    parts = sum(1 / min(shared.get(f, 1.0), batch_size) for f in spec.features)
    share = parts / num_features or 1.0
    if stats is None or found is None or found.num_accesses == 0:
        num_bags = batch_size * num_features * share
        traffic = Traffic(num_bags, num_bags, np.ones(1), np.ones(1), 1 / share)
        curve = _curve([spec.num_rows], np.full(1, 1 / spec.num_rows), batch_size, world_size,
                       traffic, (1.0, 1.0))
    else:
        in_order, num_blocks = stats.ids_in_hotness_order, MAX_BLOCKS
        rows, probability = _hotness_classes(found, in_order)
        traffic = _traffic(found, stats.num_samples, num_features, batch_size, share)
        log_miss = _log_miss(probability, traffic.lengths, traffic.length_share)
        factors = (1.0, 1.0) if share < 1 else _presence_factors(
            found, rows, log_miss, traffic.num_bags / batch_size,
            (batch_size, batch_size * world_size))
        curve = _curve(rows, probability, batch_size, world_size, traffic, factors)
        num_touched = found.num_touched_rows
        if not in_order:
            head = found.head_ids
            if head.size < spec.num_rows:
                # The hotness of single rows outside the head is unknown: they get their mean.
                curve = curve[:, (curve[ROWS] <= head.size) | (curve[ROWS] == spec.num_rows)]
                num_touched = head.size
    edges = np.unique(np.array(
        [0, *_geometric(num_touched, num_blocks), num_touched, spec.num_rows], np.int64))
    cumulative = np.stack([np.interp(edges, curve[ROWS], c) for c in curve])
    explicit = head[:_NUM_EXPLICIT]
    order = np.argsort(explicit)
    position = np.arange(explicit.size + 1)
    # Each explicit row has the mean features of its block.
    each = np.diff(np.stack([np.interp(position, edges, c) for c in cumulative]), axis=1)
    return TableProblem(spec, traffic, edges, cumulative, in_order, head, explicit[order],
                        each[:, order], None if found is None else found.default_share)


def _geometric(num_rows: int, num_blocks: int) -> Sequence[int]:
    """Block edges in `(0, num_rows)`: single rows first, then at a constant ratio."""
    single = min(8, num_rows)
    edges = list(range(1, single + 1))
    if num_rows > single:
        edges += np.geomspace(single, num_rows, num_blocks - single).astype(np.int64).tolist()
    return edges


def _hotness_classes(stats: TableStats, in_order: bool) -> tuple[np.ndarray, np.ndarray]:
    """Classes of rows with equal access counts, hottest first: number of rows (int64 [K]) and
    probability `p_r` of an access to each row (float64 [K]).

    Rows never seen share the Good-Turing mass of unseen ids (Good 1953), but each gets no more than
    the coldest row that was seen. Unless ids are `in_order`, rows of the head precede all others.
    """
    counts, rows = stats.count_histogram()
    if not in_order and (stats.tail_values.max(initial=0) > stats.head_counts).any():
        counts, rows = count_levels(stats.head_counts, stats.tail_values, stats.tail_num_rows)
    total = float(stats.num_accesses)
    coldest = float(counts[counts > 0].min())
    unseen = float(rows[counts == 0].sum())
    mass = min(stats.unseen_mass, 0.9, unseen * coldest / (total + unseen * coldest))
    probability = counts / total * (1.0 - mass)
    probability[counts == 0] = mass / max(unseen, 1.0)
    if in_order and stats.head_ids.size:
        # Id 0 represents unseen and rare ids, and is at position 0 whatever its count.
        at = np.flatnonzero(stats.head_ids == 0)
        count = stats.head_counts[at[0]] if at.size else counts[-1]
        k = int(np.flatnonzero(counts == count)[0])
        rows[k] -= 1
        rows = np.concatenate([[1], rows])
        probability = np.concatenate([[probability[k]], probability])
    keep = rows > 0
    return rows[keep], probability[keep]


def _traffic(stats: TableStats, num_samples: int, num_features: int, batch_size: int,
             share: float) -> Traffic:
    if stats.num_bags > 0:
        per_sample = stats.num_bags / num_samples if num_samples > 0 else float(num_features)
        lengths, parts = stats.length_values.astype(float), stats.length_counts / stats.num_bags
    else:  # published counts without bags: one id per bag
        per_sample = stats.num_accesses / num_samples if num_samples > 0 else float(num_features)
        lengths, parts = np.ones(1), np.ones(1)
    if lengths.size > _MOST_LENGTHS:  # those within 5 % of each other are replaced by their mean
        level = np.floor(np.log(np.maximum(lengths, 0.5)) / np.log(1.05))
        _, group = np.unique(level, return_inverse=True)
        total = np.bincount(group, parts).astype(float)
        lengths, parts = np.bincount(group, parts * lengths) / np.maximum(total, 1e-300), total
    num_bags = batch_size * per_sample * share
    return Traffic(num_bags * float(lengths @ parts), num_bags, lengths, parts, 1 / share)


def _log_miss(probability: np.ndarray, lengths: np.ndarray, share: np.ndarray) -> np.ndarray:
    """`ln E[(1 - p)^L]`, the log probability that a bag misses a row; float64 [K]."""
    # p is limited below 1, because log1p(-1) is infinite.
    once = np.log1p(-np.minimum(probability, 1.0 - 1e-12))
    missed = np.zeros_like(once)
    for length, part in zip(lengths.tolist(), share.tolist(), strict=True):
        missed += part * np.expm1(length * once)
    return np.log1p(np.maximum(missed, -1.0 + 2.0**-53))  # the same for rows that no bag misses


def _touched(rows: np.ndarray, log_miss: np.ndarray, num_bags: float) -> np.ndarray:
    """Expected distinct rows of each class in `num_bags` bags; float64 [K]."""
    return rows * -np.expm1(num_bags * log_miss)


def _curve(rows: Sequence[int] | np.ndarray, probability: np.ndarray, batch_size: int,
           world_size: int, traffic: Traffic, factors: tuple[float, float]) -> np.ndarray:
    """Cumulative features at the ends of hotness classes; float64 [4, K+1]."""
    rows = np.asarray(rows, float)
    mass = rows * probability
    ids = traffic.num_ids * mass / mass.sum()
    log_miss = _log_miss(probability, traffic.lengths, traffic.length_share)
    one = _touched(rows, log_miss, traffic.num_bags * factors[0])
    every = _touched(rows, log_miss, traffic.num_bags * world_size * factors[1])
    one = np.minimum(one, ids)  # distinct rows never exceed ids
    every = np.clip(every, one, world_size * one)
    each = np.stack([rows, ids, one, every])
    return np.concatenate([np.zeros((NUM_FEATURES, 1)), np.cumsum(each, axis=1)], axis=1)


def _presence_factors(stats: TableStats, rows: np.ndarray, log_miss: np.ndarray,
                      bags_per_sample: float, wanted: tuple[int, int]) -> tuple[float, float]:
    """For each number of samples in `wanted`, the factor by which to multiply it so that this many
    independent samples touch as many distinct rows as the real ones; 1.0 if presence was not
    measured.

    At each measured number of samples n, the factor is found by bisection; between these numbers it
    is interpolated in log n, and beyond them it is constant.
    """
    use = (stats.presence_windows > 0) & (stats.presence_rows > 0) & (stats.presence_samples > 0)
    if not use.any():
        return 1.0, 1.0

    def ratio(n: int, distinct: float) -> float:
        return falling_root(lambda x: distinct - _touched(
            rows, log_miss, n * bags_per_sample * np.exp(x)).sum(), np.log(1e-3), np.log(8.0), 40)

    ratios = [ratio(n, distinct) for n, distinct in zip(
        stats.presence_samples[use], stats.presence_rows[use], strict=True)]
    samples = stats.presence_samples[use].astype(float)
    order = np.argsort(samples)
    at = np.interp(np.log(wanted), np.log(samples[order]), np.array(ratios)[order])
    return float(np.exp(at[0])), float(np.exp(at[1]))
