"""The relaxation: classes of equal ranks, resource rows, and what each block costs in each option.

Loads are averaged over each class of interchangeable ranks. A mean never exceeds a maximum, and the
mean over a class depends on a plan only through how much each class owns, so whatever holds for the
averaged loads of all placements holds for every plan. Resource rows are

* one per (phase, class, group of terms that run beside each other), in microseconds; the phase time
  is at least each of its rows;
* one per class of memory domains, memory over capacity, at most 1, and the same per class of hosts
  where rows may lie in host memory.

An *option* is a way to place a block: replicated on all ranks or on one of each host, owned within
a class (striped or not: the mean is the same), pulled (from device or host memory) or pushed. Apart
from partial sums of pushed rows, costs are linear in the features of a block, so that it costs
`features @ coefficients[table, option]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import numpy as np

from oper.plan import Piece
from oper.search import native
from oper.search.copies import CopyRows, copy_sets
from oper.search.cost import CostModel
from oper.search.machine import GROUPS, RankClasses, by_group, rank_classes
from oper.search.owner_rows import (
    COPIES,
    HOST,
    PUSH,
    REPLICATED,
    SHARD,
    Load,
    add_owner_rows,
    first_neighbourhood,
    row_makers,
)
from oper.search.pieces import COLUMN_STEP, Box, Pieces
from oper.search.problem import IDS, NUM_FEATURES, TableProblem
from oper.search.tally import HELD, HOST_HELD, NUM_ROWS, PARTIALS, Tally

_MAX_HIDDEN_SETS = 4


@dataclass(frozen=True, slots=True)
class Option:
    """A way to place a block: `kind`, and the rank class that owns it, or has the master copies
    (-1: all ranks)."""

    kind: str
    rank_class: int


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """One whole-table configuration per table.

    Attributes:
        choice: int64 [num_blocks], option of each block.
        kind: int64 [T], type of each table's pushed pieces, an index of `Pieces.types`.
        amount: float64 [T, O, 4], features by option.
        resources: float64 [T, R], what each table then asks of the resource rows.
        value: float64 [T], a lower bound of each table's cost over all configurations at the prices
            that produced these.
        cheaper: bool [T], whether the configuration is cheaper than those that were known; where it
            is not, it is none that serves, and `resources` are 0.
    """

    choice: np.ndarray
    kind: np.ndarray
    amount: np.ndarray
    resources: np.ndarray
    value: np.ndarray
    cheaper: np.ndarray


def has_copies(model: CostModel) -> bool:
    """Whether the relaxation knows replicas on one rank of every host: they are allowed, and all
    ranks are alike (else the least of every choice bounds nothing)."""
    alike = len(_classes(model).ranks) == 1
    return "per_host" in model.problem.allow and alike and bool(copy_sets(model.machine))


def _classes(model: CostModel, more: list[list[int]] | None = None) -> RankClasses:
    """Ranks that machine and constraints do not tell apart, nor the sets of ranks `more`."""
    held = model.problem.constraints.tables.values()
    sets = [*(c.ranks for c in held if c.ranks is not None),
            *(tier.ranks for c in held for tier in c.tiers or ())]
    return rank_classes(model.machine, [*sets, *_equally_hidden(model.hidden), *(more or [])])


def _equally_hidden(hidden: np.ndarray) -> list[list[int]]:
    """Ranks with equal dense compute beside every phase, where there are a few such sets; with
    many, means over unequal ranks bound more loosely but keep the relaxation small."""
    sets: dict[tuple[float, ...], list[int]] = {}
    for rank, column in enumerate(hidden.T.tolist()):
        sets.setdefault(tuple(column), []).append(rank)
    return list(sets.values()) if len(sets) <= _MAX_HIDDEN_SETS else []


class Relaxation:
    """Resource rows and block costs of a problem.

    Args:
        model: the cost model.
        apart: a load, by phase and group of terms. Among interchangeable hosts (domains, on a
            single host) the one that owns the piece with the largest such load is the first,
            without loss of generality; its ranks are then classes of their own, so that the
            relaxation sees what that host owns.

    Attributes:
        tables: the tables that are free to choose (pinned ones are part of `base`).
        options: the options.
        allowed: bool [T, O].
        features: float64 [num_blocks, 4]; `table_of` int64 [num_blocks]; `starts` int64 [T + 1].
        coefficients: float64 [T, O, 4, R], for tables whose pushed rows are one piece.
        per_stream: float64 [T, O, 4, R], what every further id stream adds.
        pieces: which pushed pieces may be used.
        owner_rows: row, phase and group of the rows about the owner of a large piece.
        base: float64 [R], what every plan asks.
        phase_of: int64 [R], phase of each row, -1 for memory, -2 for rows of several phases.
        phase_weight: float64 [R, P], a row is at most the weighted sum of the phases' times.
        fixed_us: fixed cost of a step.
    """

    def __init__(self, model: CostModel, apart: Load | None = None) -> None:
        self.model = model
        self.problem = model.problem
        held = self.problem.constraints.tables
        pinned = {n: c.tiers for n, c in held.items() if c.tiers is not None}
        self.tables = tuple(t for t in self.problem.tables if t.spec.name not in pinned)
        self.classes = _classes(model, [] if apart is None else
                                [first_neighbourhood(model.machine)])
        self.apart = apart
        self._build_options()
        self._build_rows()
        self._build_base()
        self._build_coefficients()
        #: Whether all ranks are interchangeable, but for a host apart.
        self.alike = len(self.classes.ranks) == (1 if apart is None else 2)
        # Across hosts links bind, and boxes cut at the own time of unequal ranks gain little.
        several = len(set(model.machine.host.tolist())) > 1
        self.pieces = Pieces(model, self.tables, self.classes, self.base_tally.rows,
                             model.training and model.machine.world_size > 1
                             and (self.alike or not several))
        self.phase_weight = self._phase_weights()
        self.owner_rows = add_owner_rows(self)
        #: float64 [R], what rows that are pinned ask; part of `base`, and of no configuration.
        self.pinned = self._pinned_rows()
        self.base += self.pinned
        self._plain_base = self.base.copy()
        sizes = [t.blocks.shape[0] for t in self.tables]
        self.total_ids = np.array([t.total[IDS] for t in self.tables])
        self.starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self.table_of = np.repeat(np.arange(len(self.tables)), sizes)
        self.features = (np.concatenate([self._free_blocks(t) for t in self.tables]) if self.tables
                         else np.zeros((0, NUM_FEATURES)))

    # -- building ---------------------------------------------------------------------------------

    def _build_options(self) -> None:
        self.options = []
        if "replicated" in self.problem.allow:
            self.options.append(Option(REPLICATED, -1))
            if len(self.classes.ranks) > 1:
                # Master copies are dealt row by row: a few hot rows may all lie in one class.
                self.options += [Option(REPLICATED, c) for c in range(len(self.classes.ranks))]
        if self.apart is None and has_copies(self.model):
            self.options.append(Option(COPIES, -1))
        #: Whether rows may lie in host memory, or pinned ones do.
        self.uses_host = self._uses_host()
        kinds = [(SHARD, "pull"), (PUSH, "push")] + [(HOST, "pull")] * self.uses_host
        for kind, mode in kinds:
            if mode in self.problem.allow:
                self.options += [Option(kind, c) for c in range(len(self.classes.ranks))]
        #: int64 [O], the option that stands for each in a recipe: masters dealt over all ranks.
        self.plain = np.where([o.kind == REPLICATED for o in self.options], 0,
                              np.arange(len(self.options)))
        allowed = [self._may(t, o) for t in self.tables for o in self.options]
        self.allowed = np.array(allowed, bool).reshape(len(self.tables), len(self.options))

    def _may(self, t: TableProblem, option: Option) -> bool:
        name = t.spec.name
        placements = self.problem.placements_of(name)
        if option.kind in (REPLICATED, COPIES):
            return "replicated" in placements
        held = self.problem.constraints.tables.get(name)
        first = int(self.classes.ranks[option.rank_class][0])
        if held is not None and held.ranks is not None and first not in held.ranks:
            return False
        if option.kind == HOST and "host" not in self.problem.memories_of(name):
            return False
        if option.kind != HOST and "device" not in self.problem.memories_of(name):
            return False
        mode = "push" if option.kind == PUSH else "pull"
        return bool(placements & {"striped", "owned"}) and mode in self.problem.modes_of(name)

    def _build_rows(self) -> None:
        """Which (phase, class, group) each row stands for, without those that are always zero."""
        model, num_classes = self.model, len(self.classes.ranks)
        spread = np.stack([self.spread(c) for c in range(num_classes)])  # [C, W]
        unit = np.zeros((num_classes, NUM_ROWS, NUM_ROWS, spread.shape[1]))
        for q in range(NUM_ROWS):
            unit[:, q, q] = spread
        loads = model.loads(unit) * model.machine.seconds_per_unit * 1e6
        time = self._class_means(loads)  # [C, 20, phases, groups, classes]
        if not self.uses_host:
            time[..., GROUPS.index("host_memory"), :] = 0.0
        keep = np.argwhere(time.max(axis=(0, 1)) > 0)
        self.row_names = [(int(p), GROUPS[g], int(c)) for p, g, c in keep]
        num_memories = self.classes.num_domain_classes + (
            self.classes.num_host_classes if self.uses_host else 0)
        self.phase_of = np.concatenate([keep[:, 0], np.full(num_memories, -1)])
        # What one unit of a tally row, spread over a class, asks of each resource row.
        self.unit = np.zeros((num_classes, NUM_ROWS, self.phase_of.size))
        self.unit[:, :, :len(keep)] = time[:, :, keep[:, 0], keep[:, 1], keep[:, 2]]
        rows = np.zeros((num_classes, 2, NUM_ROWS, spread.shape[1]))
        rows[:, 0, HELD] = rows[:, 1, HOST_HELD] = spread
        share = self._memory_share(rows)
        self.unit[:, HELD, len(keep):] = share[:, 0]
        self.unit[:, HOST_HELD, len(keep):] = share[:, 1]

    def _uses_host(self) -> bool:
        tiers = [tier for c in self.problem.constraints.tables.values() for tier in c.tiers or ()]
        return bool(self.model.machine.host_capacity_bytes.any() and (
            "host" in self.problem.allow or any(x.memory == "host" for x in tiers)))

    def spread(self, rank_class: int) -> np.ndarray:
        member = (self.classes.of_rank == rank_class).astype(float)
        return member / member.sum()

    def _class_means(self, loads: np.ndarray) -> np.ndarray:
        """[..., 7, W] -> [..., 6, C]: groups of terms, mean over each class."""
        groups = by_group(loads)
        return np.stack([groups[..., r].mean(axis=-1) for r in self.classes.ranks], axis=-1)

    def _memory_share(self, rows: np.ndarray) -> np.ndarray:
        """Tally rows [..., 20, W] -> [..., domain classes, then host classes where hosts hold
        rows]: share of the class's capacity."""
        machine, classes = self.model.machine, self.classes
        groups = [(rows[..., HELD, :], classes.of_domain, machine.domain, machine.capacity_bytes)]
        if self.uses_host:
            groups.append((rows[..., HOST_HELD, :], classes.of_host, machine.host,
                           machine.host_capacity_bytes))
        out = []
        for held, class_of, of_rank, capacity_bytes in groups:
            # A machine whose reserve exceeds its memory has no capacity; any need then overflows.
            capacity = np.maximum(np.bincount(class_of, capacity_bytes), 1e-3)
            out += [held[..., class_of[of_rank] == k].sum(axis=-1) / capacity[k]
                    for k in range(capacity.size)]
        return np.stack(out, axis=-1)

    def rows_of(self, tally_rows: np.ndarray) -> np.ndarray:
        """What tally rows (float64 [..., 20, W]) ask of the resource rows; float64 [..., R]."""
        out = self.rows_of_units(self.model.loads(tally_rows))
        out[..., self.first_memory_row:] = self._memory_share(tally_rows)
        return out

    def rows_of_units(self, units: np.ndarray) -> np.ndarray:
        """What units (float64 [..., phases, 7, W]) ask of the timed resource rows; [..., R]."""
        time = self._class_means(units * self.model.machine.seconds_per_unit * 1e6)
        out = np.zeros((*units.shape[:-3], self.phase_of.size))
        for k, (phase, group, rank_class) in enumerate(self.row_names):
            out[..., k] = time[..., phase, GROUPS.index(group), rank_class]
        return out

    def _build_base(self) -> None:
        model = self.model
        total = model.base()
        for t in self.problem.tables:
            held = self.problem.constraints.tables.get(t.spec.name)
            if held is not None and held.tiers is not None:
                piece = Piece(0, t.spec.dim, held.tiers)
                ordered = t.ids_are_positions or len(held.tiers) > 1
                total = total.plus(model.tally(t, (piece,), ordered))
        self.base_tally = total
        #: The same with rows that are pinned in tables that are free to choose for others.
        self.fixed_tally = reduce(Tally.plus, map(self._pinned_tally, self.tables), total)
        self.base = self.rows_of_tally(total)
        for k, (phase, _, rank_class) in enumerate(self.row_names):
            # A mean of excesses never exceeds the largest, nor falls below the excess of the mean.
            self.base[k] -= 1e6 * model.hidden[phase, self.classes.ranks[rank_class]].mean()
        self.fixed_us = sum(model.fixed_us(self.fixed_tally))

    def rows_of_tally(self, tally: Tally) -> np.ndarray:
        """What a tally asks of the resource rows, partial replicas included; float64 [R]."""
        out = self.rows_of_units(self.model.units(tally))
        out[self.first_memory_row:] = self._memory_share(tally.rows)
        return out

    def _pinned_tally(self, t: TableProblem) -> Tally:
        """What the pinned rows of a table cost in any plan, in one column piece at least."""
        pinned = self.problem.pinned_of(t.spec.name)
        whole = len(pinned) == 1 and pinned[0].stop - pinned[0].start == t.spec.num_rows
        # Partial sums are concave in what an owner holds: with other pushed rows beside them,
        # those of pinned rows may cost nothing more.
        alone = whole or "push" not in self.problem.modes_of(t.spec.name)
        return self.model.piece_tally(t, Piece(0, t.spec.dim, pinned),
                                      t.ids_are_positions or not whole, alone)

    def _pinned_rows(self) -> np.ndarray:
        none = Tally(np.zeros((NUM_ROWS, self.model.machine.world_size)), {})
        return self.rows_of_tally(reduce(Tally.plus, map(self._pinned_tally, self.tables), none))

    def _free_blocks(self, t: TableProblem) -> np.ndarray:
        """Features of each block without its pinned rows; float64 [K, 4]."""
        out = t.blocks.copy()
        for tier in self.problem.pinned_of(t.spec.name):
            out -= np.diff(t.prefix(np.clip(t.edges, tier.start, tier.stop)), axis=1).T
        return np.maximum(out, 0.0)

    @property
    def is_symmetric(self) -> bool:
        """Whether ranks of one class may be swapped: dense compute beside them and what is pinned
        to them are alike, too. A distinguished host needs that, class means do not."""
        total = self.fixed_tally
        load = np.concatenate([*self.model.units(total), self.model.hidden,
                               total.rows[[HELD, HOST_HELD]]])
        return all(np.allclose(load[:, r], load[:, r[:1]], rtol=1e-9, atol=0)
                   for r in self.classes.ranks)

    def _build_coefficients(self) -> None:
        model, world = self.model, self.model.machine.world_size
        shape = (len(self.tables), len(self.options), NUM_FEATURES, self.phase_of.size)
        self.coefficients, self.per_stream = np.zeros(shape), np.zeros(shape)
        make = row_makers(model)
        for o, option in enumerate(self.options):
            if option.kind == COPIES:
                copies = CopyRows(self)
                for k, t in enumerate(self.tables):
                    self.coefficients[k, o] = copies.coefficients(self, t)
                continue
            spread = (np.full(world, 1 / world) if option.rank_class < 0
                      else self.spread(option.rank_class))
            owner = np.eye(NUM_FEATURES)[:, :, None] * spread  # one unit of one feature at a time
            for k, t in enumerate(self.tables):
                once = make[option.kind](t, t.spec.dim, owner)
                self.coefficients[k, o] = self.mean(once)
                if option.kind == PUSH:
                    # What a piece pays whatever its width is.
                    twice = model.push_rows(t, 2 * t.spec.dim, owner)
                    self.per_stream[k, o] = self.mean(model.cut_rows(t, once, twice))

    def mean(self, rows: np.ndarray) -> np.ndarray:
        """Tally rows (float64 [4, 20, W]) on the resource rows; float64 [4, R]."""
        # Owners are symmetric within a class by construction, readers by definition.
        return np.asarray(np.einsum("fqc,cqr->fr", self.by_class(rows), self.unit))

    def by_class(self, rows: np.ndarray) -> np.ndarray:
        """[..., W] -> [..., C]: sums over each class."""
        return np.stack([rows[..., r].sum(axis=-1) for r in self.classes.ranks], axis=-1)

    def _phase_weights(self) -> np.ndarray:
        out = np.zeros((self.phase_of.size, len(self.model.phases)))
        timed = np.flatnonzero(self.phase_of >= 0)
        out[timed, self.phase_of[timed]] = 1.0
        return out

    def set_box(self, box: Box) -> None:
        """Bound the plans of `box` only."""
        self.pieces.set_box(box)
        self.base = self._plain_base.copy()
        for row, phase, group in self.owner_rows:
            self.base[row] += box.least[phase, group]

    # -- using ------------------------------------------------------------------------------------

    @property
    def first_memory_row(self) -> int:
        """The first of the rows of domain classes, which those of host classes follow."""
        return int(np.flatnonzero(self.phase_of == -1)[0])

    @property
    def num_rows(self) -> int:
        """Number of resource rows R."""
        return self.phase_of.size

    def cheapest(self, prices: np.ndarray, known: np.ndarray | None = None) -> Columns:
        """Each table's cheapest configuration at `prices` (float64 [R], per row, >= 0).

        Where `known` (float64 [T]) says what the cheapest known one costs, only cheaper ones are
        looked for.

        Blocks choose for themselves, except that the partial sums of a table's pushed blocks are
        concave in their mass between one number of full owners and the next. With one class of
        owners, for every type of pieces the best set of pushed blocks is then a prefix of the
        blocks ordered by what pushing costs per unit of mass (each tangent of a concave function
        separates over blocks, and its minimum over fractional sets lies at a vertex), so all
        prefixes of all types are tried, and the masses at which owners are full. With several, sets
        are divided by their mass until a bound of their cost meets that of a real one, or there
        are many.
        """
        value = self.coefficients @ prices  # [T, O, 4]
        cost = np.einsum("bf,bof->bo", self.features, value[self.table_of])
        cost = np.where(self.allowed[self.table_of], cost, np.inf)
        push = np.array([o.kind == PUSH for o in self.options], bool)
        choice = cost.argmin(axis=1)
        kind = np.zeros(len(self.tables), np.int64)
        cheaper = np.ones(len(self.tables), np.uint8)
        if push.any():
            known = np.full(kind.size, np.inf) if known is None else known
            best = self._choose_pushed(cost, push, prices, choice,
                                       {"kind": kind, "cheaper": cheaper, "known": known})
        else:
            best = np.add.reduceat(cost.min(axis=1), self.starts[:-1])
        amount = self.amounts(choice)
        rows, at = np.zeros((kind.size, self.num_rows)), np.flatnonzero(cheaper)
        rows[at] = self.resources_at(amount[at], at, kind[at])
        return Columns(choice, kind, amount, rows, best, cheaper.astype(bool))

    def _choose_pushed(self, cost: np.ndarray, push: np.ndarray, prices: np.ndarray,
                       choice: np.ndarray, found: dict[str, np.ndarray]) -> np.ndarray:
        """Fill in `choice` and the arrays of `found`, see `OperPricing`; returns each table's least
        cost, float64 [T]."""
        options = np.flatnonzero(push)
        classes = [self.options[o].rank_class for o in options.tolist()]
        other = np.where(push, np.inf, cost)
        choice[:] = other.argmin(axis=1)
        stream = self.per_stream[:, options] @ prices  # [T, M, 4]
        types = [self.pieces.types[k][c] for k in range(len(self.tables)) for c in classes]
        sizes = [x.mass.size for x in types]
        chosen = np.zeros(len(choice), np.int64)
        value = np.zeros(len(self.tables))
        arrays = {
            "starts": self.starts, "stay": other.min(axis=1), "go": cost[:, options].T,
            "more": np.einsum("bf,bmf->mb", self.features, stream[self.table_of]),
            "ids": self.features[:, IDS], "total_ids": self.total_ids,
            "price": self.unit[classes, PARTIALS] @ prices,
            "first": np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
            "streams": np.concatenate([x.streams for x in types]),
            "mass": np.concatenate([x.mass for x in types]),
            "narrowest": np.concatenate([x.narrow for x in types]),
            "columns": self.pieces.columns}
        arrays = {n: np.ascontiguousarray(x) for n, x in arrays.items()}
        arrays |= {"value": value, "chosen": chosen, **found}
        native.call("oper_price", native.Pricing, arrays, num_tables=len(self.tables),
                    num_options=options.size, num_blocks=len(self.table_of), step=COLUMN_STEP,
                    close=5e-5 if self.alike else 3e-4,  # where ranks differ, less closely
                    sums=self.pieces.native_sums)
        pushed = chosen > 0
        choice[pushed] = options[chosen[pushed] - 1]
        return value

    def amounts(self, choice: np.ndarray) -> np.ndarray:
        """Features by option of whole-table configurations (int64 [num_blocks]); [T, O, 4]."""
        shape = (len(self.tables), len(self.options), NUM_FEATURES)
        at = self.table_of * len(self.options) + choice
        return np.stack([np.bincount(at, f, minlength=shape[0] * shape[1])
                         for f in self.features.T], axis=-1).reshape(shape)

    def fitting(self, amount: np.ndarray, tables: np.ndarray, kind: np.ndarray) -> np.ndarray:
        """Whether the pieces of configurations (see `resources_at`) fit the limit; bool [N]."""
        out = np.ones(len(tables), bool)
        for o, option in enumerate(self.options):
            if option.kind == PUSH:
                _, mass = self.pieces.chosen(tables, option.rank_class, kind)
                out &= (mass > 0) | (amount[:, o, IDS] <= 0)
        return out

    def kinds(self, amount: np.ndarray, k: int, prices: np.ndarray) -> np.ndarray:
        """The type of pieces that is cheapest for each placement of table `k`.

        Args:
            amount: float64 [N, O, 4].
            k: the table.
            prices: float64 [R].

        Returns:
            int64 [N].
        """
        t, out = self.tables[k], np.zeros(len(amount), np.int64)
        if self.pieces.is_whole(k):
            return out
        for o, option in enumerate(self.options):
            x = self.pieces.types[k][option.rank_class]
            for n in np.flatnonzero(amount[:, o, IDS] > 0) if option.kind == PUSH else ():
                share = np.full(x.mass.size, amount[n, o, IDS] / t.total[IDS])
                sums = self.pieces.sum_bytes(np.full(x.mass.size, k), share,
                                             np.maximum(x.mass, 1e-9))
                cost = sums * (self.unit[option.rank_class, PARTIALS] @ prices) + (
                    x.streams - 1.0) * (amount[n, o] @ (self.per_stream[k, o] @ prices))
                out[n] = int(np.where(x.mass > 0, cost, np.inf).argmin())
        return out

    def resources_at(self, amount: np.ndarray, tables: np.ndarray,
                     kind: np.ndarray) -> np.ndarray:
        """As `resources_of`, pieces of the types `kind` (int64 [N]), full owners."""
        streams, owner = np.ones((2, len(tables), len(self.options)))
        for o, option in enumerate(self.options):
            if option.kind == PUSH:
                n = amount[:, o, IDS] > 0
                streams[n, o], mass = self.pieces.chosen(tables[n], option.rank_class, kind[n])
                owner[n, o] = np.maximum(mass, 1e-9)
        return self.resources_of(amount, tables, streams, owner)

    def resources_of(self, amount: np.ndarray, tables: np.ndarray, streams: np.ndarray,
                     owner: np.ndarray) -> np.ndarray:
        """What features placed by option ask of the resource rows.

        Args:
            amount: float64 [N, O, 4].
            tables: int64 [N], the table of each entry.
            streams: float64 [N, O], id streams of its pushed rows (column pieces).
            owner: float64 [N, O], mass that one owner holds at most, of the table's mass 1.

        Returns:
            float64 [N, R].
        """
        out = np.einsum("nof,nofr->nr", amount, self.coefficients[tables])
        for o, option in enumerate(self.options):
            if option.kind == PUSH:
                n = np.flatnonzero(amount[:, o, IDS] > 0)
                share = amount[n, o, IDS] / self.total_ids[tables[n]]
                size = self.pieces.sum_bytes(tables[n], share, owner[n, o])
                out[n] += size[:, None] * self.unit[option.rank_class, PARTIALS]
                n = n[streams[n, o] > 1.0]
                more = np.einsum("nf,nfr->nr", amount[n, o], self.per_stream[tables[n], o])
                out[n] += (streams[n, o] - 1.0)[:, None] * more
        return out

    def bound_at(self, prices: np.ndarray, value: np.ndarray) -> float:
        """The lower bound (microseconds) that prices and each table's least cost at them certify.

        Any prices >= 0 whose weighted sum over the rows of a phase is at most 1 are a certificate
        for the plans of the pieces' box: the step is at least the priced sum of its rows, and no
        configuration costs less than `value`.
        """
        total = value.sum() + float(prices @ self.base) - float(prices[self.phase_of == -1].sum())
        return float(total) + self.fixed_us

    def normalised(self, prices: np.ndarray) -> np.ndarray:
        """`prices` made a certificate: non-negative, at most 1 in weighted sum by phase."""
        out = np.maximum(prices, 0.0)
        for weight in self.phase_weight.T:
            out[weight > 0] /= max(1.0, float(out @ weight))
        return out

    def step_us(self, total: np.ndarray) -> float:
        """Modelled step when the resource rows hold `total` (float64 [R], base included)."""
        return self.fixed_us + sum(
            max(0.0, float(total[self.phase_of == p].max()))
            for p in range(int(self.phase_of.max()) + 1))
