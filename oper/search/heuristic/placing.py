"""From recipes to ranks: deal stripes and pick owners so that no rank carries all the heads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from oper.plan import Piece, TablePlan, Tier
from oper.search.bound.options import COPIES, HOST, PUSH, REPLICATED, SHARD
from oper.search.bound.pieces import MIN_COLUMNS
from oper.search.bound.relaxation import Relaxation
from oper.search.cost.model import ID_BYTES, CostModel
from oper.search.cost.tally import HELD, NUM_ROWS, PARTIALS, Tally, owned_features, row_bytes
from oper.search.heuristic.annealing import Part, Shard
from oper.search.heuristic.recipes import Recipe
from oper.search.problem.machine import COMPUTE, GROUPS, MEMORY, copy_sets
from oper.search.problem.statement import IDS, TableProblem

Placement = tuple[Piece, ...]
_GOLDEN = 0.6180339887498949
_POWER = 6.0  # how strongly the fullest resource counts when a tier looks for its owner


@dataclass(frozen=True, slots=True)
class _Job:
    """A tier whose ranks are still to be named.

    Attributes:
        lump: how uneven its load is, microseconds.
        cost: float64 [m], load by slot of its rank set.
        parts: float64 [D, m], the same by resource, as shares of the phase peaks.
        held: float64 [m], bytes of accelerator memory by slot.
        place: table, piece and tier number.
        width: columns of the piece.
        tier: the tier with every rank it may use.
    """

    lump: float
    cost: np.ndarray
    parts: np.ndarray
    held: np.ndarray
    place: tuple[int, int, int]
    width: int
    tier: Tier


@dataclass(frozen=True, slots=True)
class _Cut:
    """Columns of a table with their recipe; `shard` says who owns what is pushed, once known."""

    start: int
    stop: int
    recipe: Recipe
    shard: Shard | None = None

    @property
    def width(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class _Table:
    """A table of the relaxation by number, and how its columns are cut."""

    number: int
    cuts: list[_Cut]


class Placer:
    """Names the ranks of recipes, one tier at a time, the heaviest first.

    Attributes:
        load: float64 [W], what the tiers placed so far cost their owners (weighted us).
        filled: float64 [D, W], the same by resource, as shares of the phase peaks.
        held: float64 [num_domains], memory taken so far.
        grain: load (us) above which a pushed tier is cut over several owners.
        units: int64 [W], parts of pulled rows that each rank owns.
    """

    def __init__(self, relaxation: Relaxation, total: np.ndarray) -> None:
        self.relaxation = relaxation
        self.model: CostModel = relaxation.model
        self.world = self.model.machine.world_size
        self.prices = OwnerPrices(relaxation, total)
        self.load = np.zeros(self.world)
        self.filled = np.zeros((self.prices.shares.shape[1], self.world))
        self.held = self.model.machine.per_domain(relaxation.base_tally.rows[HELD])
        self.grain = np.inf
        self.units = np.ones(self.world, np.int64)

    def place(self, recipes: list[Recipe], fineness: float = 1.0) -> list[Placement]:
        """Pieces and tiers of every table of the relaxation.

        Args:
            recipes: one per table.
            fineness: pushed tiers are cut above `1 / fineness` of a rank's share of all pushes.
        """
        self.grain = self._grain(recipes) / fineness
        return self._assign([_Table(k, [_Cut(a, b, r) for a, b in pairwise(self._columns(k, r))])
                             for k, r in enumerate(recipes)])

    def lay(self, parts: list[list[Part]], units: tuple[int, ...]) -> list[Placement]:
        """Pieces and tiers of every table whose pushed columns are already on ranks.

        Args:
            parts: by table.
            units: parts of pulled rows that each rank owns.
        """
        self.units = np.array(units)
        tables = []
        for k, every in enumerate(parts):
            cuts, start = [], 0
            for part in every:
                for shard in part.shards or (None,):
                    stop = start + (part.width if shard is None else shard[0])
                    cuts.append(_Cut(start, stop, part.recipe, shard))
                    start = stop
            tables.append(_Table(k, cuts))
        return self._assign(tables)

    def place_one(self, k: int, recipe: Recipe, parts: int = 1) -> Placement:
        """Pieces and tiers of table `k` beside what is already placed, in `parts` column pieces."""
        columns = _even_columns(self.relaxation.tables[k].spec.dim, parts)
        return self._assign([_Table(k, [_Cut(a, b, recipe) for a, b in pairwise(columns)])])[0]

    def _assign(self, tables: list[_Table]) -> list[Placement]:
        jobs: list[_Job] = []
        placed: dict[tuple[int, int, int], Tier] = {}
        for row, table in enumerate(tables):
            k = table.number
            for piece, cut in enumerate(table.cuts):
                start = 0
                for n, (stop, option) in enumerate(zip(cut.recipe.stops, cut.recipe.options,
                                                       strict=True)):
                    if cut.shard is not None and self.relaxation.options[option].kind == PUSH:
                        tier: Tier | None = self._pushed(k, start, stop, cut.shard)
                    else:
                        tier = self._uneven(k, start, stop, option)
                    if tier is not None:
                        placed[row, piece, n] = tier
                        self._book(k, tier, cut.width)
                    else:
                        tier = self._template(k, start, stop, option, cut.width)
                        jobs.append(self._job(k, tier, cut.width, (row, piece, n),
                                              len(cut.recipe.stops) > 1))
                    start = stop
        # Indivisible work first, then lumpy stripes; even stripes fill what remains anyway.
        for job in sorted(jobs, key=lambda job: (-job.lump, job.place)):
            placed[job.place] = self._settle(tables[job.place[0]].number, job)
        return [tuple(Piece(x.start, x.stop, tuple(placed[row, piece, n]
                                                   for n in range(len(x.recipe.stops))))
                      for piece, x in enumerate(table.cuts)) for row, table in enumerate(tables)]

    def _grain(self, recipes: list[Recipe]) -> float:
        """What a rank carries on average of all that is pushed."""
        total = 0.0
        for k, recipe in enumerate(recipes):
            start = 0
            for stop, option in zip(recipe.stops, recipe.options, strict=True):
                if self.relaxation.options[option].kind == PUSH:
                    total += self._whole(k, start, stop, option)
                start = stop
        return total / self.world if total > 0 else np.inf

    def _whole(self, k: int, start: int, stop: int, option: int, width: int = 0) -> float:
        """Load (us) of a tier on one owner."""
        t = self.relaxation.tables[k]
        ranks = self.relaxation.classes.ranks[self.relaxation.options[option].rank_class]
        tier = Tier(start, stop, "owned", (int(ranks[0]),), mode="push")
        return float(self._job(k, tier, width or t.spec.dim, (0, 0, 0), True).cost[0])

    def _columns(self, k: int, recipe: Recipe) -> list[int]:
        """Column edges: pushed tiers above the grain are cut where that is cheaper than by rows."""
        t = self.relaxation.tables[k]
        heavy, start = 0.0, 0
        for stop, option in zip(recipe.stops, recipe.options, strict=True):
            if self.relaxation.options[option].kind == PUSH:
                heavy = max(heavy, self._whole(k, start, stop, option))
            start = stop
        if not self.model.problem.may_split(t) or heavy <= self.grain:
            return [0, t.spec.dim]
        parts = int(np.ceil(heavy / self.grain))
        ids, bags = t.total[IDS], t.traffic.num_bags
        more_sums = float(parts * t.traffic.bags_touching(1.0 / parts) - bags) * t.spec.dim * 4
        return _even_columns(t.spec.dim, parts if (parts - 1) * ids * ID_BYTES < more_sums else 1)

    def _template(self, k: int, start: int, stop: int, option: int, width: int) -> Tier:
        """The tier with every rank it may use (a pushed stripe: as many as it needs)."""
        chosen = self.relaxation.options[option]
        name = self.relaxation.tables[k].spec.name
        placements = self.model.problem.placements_of(name)
        if chosen.kind == REPLICATED:
            return Tier(start, stop, "replicated", tuple(range(self.world)))
        if chosen.kind == COPIES:  # dealt over the ranks of hosts by `spread_copies`
            return Tier(start, stop, "replicated", copy_sets(self.model.machine)[0])
        ranks = tuple(int(r) for r in self.relaxation.classes.ranks[chosen.rank_class])
        memory = "host" if chosen.kind == HOST else "device"
        if "striped" not in placements or (len(ranks) == 1 and "owned" in placements):
            return Tier(start, stop, "owned", ranks, mode=_mode(chosen.kind), memory=memory)
        if chosen.kind == PUSH and "owned" in placements:
            # Stripes of a pushed tier multiply its partial sums: as few owners as the grain wants.
            if self._whole(k, start, stop, option, width) <= self.grain:
                return Tier(start, stop, "owned", ranks, mode="push")
            parts = int(np.ceil(self._whole(k, start, stop, option, width) / self.grain))
            free = sorted(ranks, key=lambda r: (self.load[r], r))
            ranks = tuple(sorted(free[:max(2, min(parts, len(ranks)))]))
        return Tier(start, stop, "striped", ranks, mode=_mode(chosen.kind), memory=memory)

    def _job(self, k: int, tier: Tier, width: int, place: tuple[int, int, int],
             several: bool) -> _Job:
        t = self.relaxation.tables[k]
        slots = 1 if tier.placement == "owned" else len(tier.ranks)
        shares = t.shares(tier.start, tier.stop, slots, t.ids_are_positions or several)
        # All ranks of a set are of one class (or the set is everybody), so any rank's price serves.
        ranks = list(tier.ranks[:slots])
        owner = np.zeros((4, self.world))
        owner[:, ranks] = shares
        rows = tier_rows(self.model, t, tier, owner, width)[:, ranks]
        cost = (rows * self.prices.price[:, ranks]).sum(axis=0)
        parts = np.einsum("qm,qdm->dm", rows, self.prices.shares[:, :, ranks])
        partial = tier.mode == "push" and slots < self.world
        lump = float(cost.max() if slots == 1 or partial else cost.max() - cost.min())
        return _Job(lump, cost, parts, rows[HELD], place, width, tier)

    def _settle(self, k: int, job: _Job) -> Tier:
        """Name the ranks of one tier and book its load and memory."""
        tier, ranks = job.tier, np.array(job.tier.ranks)
        machine, t = self.model.machine, self.relaxation.tables[k]
        if tier.placement == "owned" or (tier.mode == "push" and len(ranks) < self.world):
            every = ranks
            if tier.placement != "owned":  # the emptiest ranks of the class, now that it is time
                number = self.relaxation.classes.of_rank[ranks[0]]
                every = self.relaxation.classes.ranks[number]
            need = (tier.stop - tier.start) * _held_row_bytes(self.model, t, job.width)
            domain = machine.domain[every]
            room = machine.capacity_bytes[domain] - self.held[domain]
            spare = np.inf if tier.memory == "host" else room - need / job.cost.size
            # Vector packing: the rank whose scarcest resources the tier fills least.
            before = self.filled[:, every]
            after = before + job.parts.max(axis=1, keepdims=True)
            harm = self.prices.weight @ (after ** _POWER - before ** _POWER)
            order = np.lexsort((every, harm, np.maximum(-spare, 0.0) * np.ones(every.size)))
            ranks = every[order[:job.cost.size]]
        elif len(ranks) > 1:
            slots = (np.arange(len(ranks))[None, :] - np.arange(len(ranks))[:, None]) % len(ranks)
            after = self.load[ranks][None, :] + job.cost[slots]  # [turn, rank]
            turn = int(np.lexsort((np.square(after).sum(axis=1), after.max(axis=1)))[0])
            # Turning by k gives slot s to the rank k places further on.
            ranks = np.roll(ranks, -turn)
        placed = replace(tier, ranks=tuple(ranks.tolist()))
        self.load[ranks] += job.cost[:len(ranks)]
        self.filled[:, ranks] += job.parts[:, :len(ranks)]
        held = np.zeros(self.world)
        held[ranks[:job.held.size]] = job.held
        self.held += machine.per_domain(held)
        return placed

    def _uneven(self, k: int, start: int, stop: int, option: int) -> Tier | None:
        """A pulled tier dealt in the parts that ranks own, or None where these are alike."""
        chosen = self.relaxation.options[option]
        if chosen.kind != SHARD:
            return None
        ranks = self.relaxation.classes.ranks[chosen.rank_class]
        units = self.units[ranks] // max(1, int(np.gcd.reduce(self.units[ranks])))
        placements = self.model.problem.placements_of(self.relaxation.tables[k].spec.name)
        if (units <= 1).all() or "striped" not in placements:
            return None
        if stop - start < 2 * units.sum():
            # Systematic sampling, begun elsewhere for every table, so that roundings cancel.
            ends = np.cumsum(units) / units.sum() * max(1, (stop - start) // 2)
            units = np.diff(np.floor(ends + k * _GOLDEN % 1.0), prepend=0).astype(np.int64)
        has = units > 0
        if has.sum() == 1:
            return None
        return Tier(start, stop, "striped", tuple(ranks[has].tolist()),
                    tuple(units[has].tolist()), "pull")

    def _pushed(self, k: int, start: int, stop: int, shard: Shard) -> Tier:
        _, ranks, weights = shard
        placements = self.model.problem.placements_of(self.relaxation.tables[k].spec.name)
        owned = len(ranks) == 1 and "owned" in placements
        return Tier(start, stop, "owned" if owned else "striped", ranks, weights, "push")

    def _book(self, k: int, tier: Tier, width: int) -> None:
        """Book the load and memory of a tier whose ranks are settled."""
        t = self.relaxation.tables[k]
        rows = tier_rows(self.model, t, tier, owned_features(t, tier, self.world, True), width)
        self.load += (rows * self.prices.price).sum(axis=0)
        self.filled += np.einsum("qw,qdw->dw", rows, self.prices.shares)
        self.held += self.model.machine.per_domain(rows[HELD])


def _mode(kind: str) -> str:
    return "push" if kind == PUSH else "pull"


def _even_columns(dim: int, parts: int) -> list[int]:
    """Edges of at most `parts` column pieces, multiples of 4 columns, none below MIN_COLUMNS."""
    parts = max(1, min(parts, dim // MIN_COLUMNS))
    inner = [round(dim * k / parts / 4) * 4 for k in range(1, parts)]
    return [0, *inner, dim]


def _held_row_bytes(model: CostModel, t: TableProblem, width: int) -> float:
    row, _, state = row_bytes(t, width)
    return row + (state if model.training else 0)


def tier_rows(model: CostModel, t: TableProblem, tier: Tier, owner: np.ndarray,
              width: int) -> np.ndarray:
    """Tally rows of one tier of a piece of `width` columns, partial sums included."""
    if tier.placement == "replicated" and len(tier.ranks) < model.machine.world_size:
        return model.subset_rows(t, width, tier, owner)[0]
    rows = model.tier_rows(t, width, tier, owner)
    if tier.mode == "push":
        rows[PARTIALS] += model.partial_bytes(t, width, owner[IDS])
    return rows


class OwnerPrices:
    """What a unit of each tally row costs the rank that owns it.

    Attributes:
        price: float64 [20, W], microseconds, groups of terms weighted by how close their class
            mean comes to the peak of the phase, so that rows are balanced by what binds.
        shares: float64 [20, D, W], the same for each resource d = (phase, group), unweighted, as a
            share of the phase's peak.
        weight: float64 [D], the phase's peak in microseconds.
    """

    def __init__(self, relaxation: Relaxation, total: np.ndarray) -> None:
        model, classes = relaxation.model, relaxation.classes.ranks
        world, phases = model.machine.world_size, len(model.phases)
        near = np.zeros((phases, len(GROUPS), len(classes)))
        # A phase that hides wholly behind dense compute binds nobody.
        peaks = np.array([max(0.0, total[relaxation.phase_of == p].max()) for p in range(phases)])
        for k, (phase, group, rank_class) in enumerate(relaxation.rows.names):
            near[phase, GROUPS.index(group), rank_class] = (
                max(0.0, total[k]) / max(peaks[phase], 1e-30)) ** 4
        self.price = np.zeros((NUM_ROWS, world))
        self.shares = np.zeros((NUM_ROWS, phases * len(GROUPS), world))
        self.weight = np.repeat(peaks, len(GROUPS))
        for rank_class, ranks in enumerate(classes):
            rank = int(ranks[0])
            unit = np.zeros((NUM_ROWS, NUM_ROWS, world))
            unit[np.arange(NUM_ROWS), np.arange(NUM_ROWS), rank] = 1.0
            own = (model.loads(unit) * model.machine.seconds_per_unit * 1e6)[..., rank]
            groups = np.concatenate([own[..., MEMORY:MEMORY + 1] + own[..., COMPUTE:COMPUTE + 1],
                                     own[..., 2:]], axis=-1)
            self.price[:, ranks] = np.einsum("qpg,pg->q", groups, near[:, :, rank_class])[:, None]
            share = groups / np.where(peaks > 0, peaks, np.inf)[:, None]
            share = share.reshape(NUM_ROWS, -1)
            self.shares[:, :, ranks] = share[:, :, None]


def is_cut(pieces: Placement) -> bool:
    """Whether any piece has several tiers, so that the table carries its hotness order."""
    return any(len(p.tiers) > 1 for p in pieces)


def table_tally(model: CostModel, t: TableProblem, pieces: Placement) -> Tally:
    """Tally of a table that carries its hotness order when it is cut by rows."""
    return model.tally(t, pieces, t.ids_are_positions or is_cut(pieces))


def table_plan(t: TableProblem, pieces: Placement) -> TablePlan:
    """The plan entry of a table, with the hotness order only where tiers need it."""
    head = t.head_ids[:0]
    if is_cut(pieces) and not t.ids_are_positions:
        head = t.head_ids[:max(p.tiers[-1].start for p in pieces)]
    return TablePlan(t.spec, pieces, head)
