"""From candidates to ranks: deal stripes and pick owners so that no rank carries all the heads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from oper.plan import Piece, TablePlan, Tier
from oper.search.bound.options import COPIES, HOST, PUSH, REPLICATED, SHARD
from oper.search.bound.relaxation import Relaxation
from oper.search.cost.model import CostModel, Evaluation
from oper.search.cost.tally import HELD, NUM_ROWS, PARTIALS, Tally, owned_features
from oper.search.heuristic.annealing import Part, Shard, dealt_options
from oper.search.heuristic.candidates import Candidate
from oper.search.problem.machine import GROUPS, copy_sets
from oper.search.problem.statement import IDS, TableProblem

Placement = tuple[Piece, ...]
_GOLDEN = 0.6180339887498949


@dataclass(frozen=True, slots=True)
class _Job:
    """A tier whose ranks are still to be named.

    Attributes:
        imbalance: how uneven its load is, microseconds.
        cost: float64 [m], load by slot of its rank set, microseconds.
        held: float64 [m], bytes of accelerator memory by slot.
        place: table, piece and tier number.
        tier: the tier with every rank it may use.
    """

    imbalance: float
    cost: np.ndarray
    held: np.ndarray
    place: tuple[int, int, int]
    tier: Tier


class Placer:
    """Names the ranks of configurations, one tier at a time, the most uneven first.

    Attributes:
        load: float64 [W], what the tiers placed so far cost their owners (weighted us).
        held: float64 [num_domains], memory taken so far.
    """

    def __init__(self, relaxation: Relaxation, total: np.ndarray) -> None:
        self.relaxation, self.dealt = relaxation, dealt_options(relaxation)
        self.model: CostModel = relaxation.model
        self.world = self.model.machine.world_size
        self.price = _owner_prices(relaxation, total)
        self.load = np.zeros(self.world)
        self.held = self.model.machine.per_domain(relaxation.base_tally.rows[HELD])

    def place(self, parts: list[list[Part]], units: tuple[int, ...]) -> list[Placement]:
        """Pieces and tiers of every table whose dealt columns are already on ranks.

        Args:
            parts: by table.
            units: parts of pulled rows that each rank owns.
        """
        jobs: list[_Job] = []
        placed: dict[tuple[int, int, int], Tier] = {}
        pieces = [_pieces(every) for every in parts]
        for k, cuts in enumerate(pieces):
            for i, (width, candidate, shard) in enumerate(cuts):
                start = 0
                tiers = zip(candidate.stops, candidate.options, strict=True)
                for n, (stop, option) in enumerate(tiers):
                    if shard is not None and self.dealt[k, option]:
                        tier: Tier | None = self._dealt(k, start, stop, option, *shard[1:])
                    else:
                        tier = self._uneven(k, start, stop, option, np.array(units))
                    if tier is not None:
                        placed[k, i, n] = tier
                        self._book(k, tier, width)
                    else:
                        tier = self._template(k, start, stop, option)
                        jobs.append(self._job(k, tier, width, (k, i, n), len(candidate.stops) > 1))
                    start = stop
        # Indivisible work first, then uneven stripes; even stripes fill what remains anyway.
        for job in sorted(jobs, key=lambda job: (-job.imbalance, job.place)):
            placed[job.place] = self._settle(job)
        out = []
        for k, cuts in enumerate(pieces):
            edges = np.cumsum([0, *(width for width, _, _ in cuts)]).tolist()
            out.append(tuple(Piece(a, b, tuple(placed[k, i, n] for n in range(len(cut[1].stops))))
                             for i, (cut, (a, b)) in enumerate(zip(cuts, pairwise(edges),
                                                                   strict=True))))
        return out

    def _template(self, k: int, start: int, stop: int, option: int) -> Tier:
        """The tier with every rank it may use."""
        chosen = self.relaxation.options[option]
        placements = self.model.problem.placements_of(self.relaxation.tables[k].spec.name)
        if chosen.kind == REPLICATED:
            return Tier(start, stop, "replicated", tuple(range(self.world)))
        if chosen.kind == COPIES:  # dealt over the ranks of hosts by `spread_copies`
            return Tier(start, stop, "replicated", copy_sets(self.model.machine)[0])
        ranks = tuple(int(r) for r in self.relaxation.classes.ranks[chosen.rank_class])
        owned = "striped" not in placements or (len(ranks) == 1 and "owned" in placements)
        return Tier(start, stop, "owned" if owned else "striped", ranks, mode=_mode(chosen.kind),
                    memory="host" if chosen.kind == HOST else "device")

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
        cost = (rows * self.price[:, ranks]).sum(axis=0)
        imbalance = float(cost.max() if slots == 1 else cost.max() - cost.min())
        return _Job(imbalance, cost, rows[HELD], place, tier)

    def _settle(self, job: _Job) -> Tier:
        """Choose the ranks of one tier, and add its load and memory to theirs."""
        tier, ranks = job.tier, np.array(job.tier.ranks)
        machine = self.model.machine
        if tier.placement == "owned":  # the least loaded rank that has room
            after = self.held[machine.domain[ranks]] + job.held[0]
            lack = np.maximum(after - machine.capacity_bytes[machine.domain[ranks]], 0.0)
            ranks = ranks[np.lexsort((ranks, self.load[ranks], lack))[:1]]
        elif len(ranks) > 1:
            slots = (np.arange(len(ranks))[None, :] - np.arange(len(ranks))[:, None]) % len(ranks)
            after = self.load[ranks][None, :] + job.cost[slots]  # [turn, rank]
            turn = int(np.lexsort((np.square(after).sum(axis=1), after.max(axis=1)))[0])
            # Turning by k gives slot s to the rank k places further on.
            ranks = np.roll(ranks, -turn)
        self.load[ranks] += job.cost[:len(ranks)]
        held = np.zeros(self.world)
        held[ranks[:job.held.size]] = job.held
        self.held += machine.per_domain(held)
        return replace(tier, ranks=tuple(ranks.tolist()))

    def _uneven(self, k: int, start: int, stop: int, option: int, units: np.ndarray
                ) -> Tier | None:
        """A pulled tier dealt in the parts that ranks own, or None where these are alike."""
        chosen = self.relaxation.options[option]
        if chosen.kind != SHARD:
            return None
        ranks = self.relaxation.classes.ranks[chosen.rank_class]
        units = units[ranks] // max(1, int(np.gcd.reduce(units[ranks])))
        placements = self.model.problem.placements_of(self.relaxation.tables[k].spec.name)
        if (units == units[0]).all() or "striped" not in placements:
            return None
        if stop - start < 2 * units.sum():
            # Systematic sampling, begun elsewhere for every table, so that roundings cancel.
            ends = np.cumsum(units) / units.sum() * max(1, (stop - start) // 2)
            units = np.diff(np.floor(ends + k * _GOLDEN % 1.0), prepend=0).astype(np.int64)
        has = units > 0
        weights = tuple(units[has].tolist()) if has.sum() > 1 else ()
        return self._dealt(k, start, stop, option, tuple(ranks[has].tolist()), weights)

    def _dealt(self, k: int, start: int, stop: int, option: int, ranks: tuple[int, ...],
               weights: tuple[int, ...]) -> Tier:
        placements = self.model.problem.placements_of(self.relaxation.tables[k].spec.name)
        owned = len(ranks) == 1 and "owned" in placements
        return Tier(start, stop, "owned" if owned else "striped", ranks, weights,
                    _mode(self.relaxation.options[option].kind))

    def _book(self, k: int, tier: Tier, width: int) -> None:
        """Book the load and memory of a tier whose ranks are settled."""
        t = self.relaxation.tables[k]
        rows = tier_rows(self.model, t, tier, owned_features(t, tier, self.world, True), width)
        self.load += (rows * self.price).sum(axis=0)
        self.held += self.model.machine.per_domain(rows[HELD])


def _mode(kind: str) -> str:
    return "push" if kind == PUSH else "pull"


def _pieces(parts: list[Part]) -> list[tuple[int, Candidate, Shard | None]]:
    """Column pieces of a table: width, configuration, and who owns what is dealt, if anything."""
    return [(part.width if shard is None else shard[0], part.candidate, shard)
            for part in parts for shard in part.shards or (None,)]


def tier_rows(model: CostModel, t: TableProblem, tier: Tier, owner: np.ndarray,
              width: int) -> np.ndarray:
    """Tally rows of one tier of a piece of `width` columns, partial sums included."""
    if tier.placement == "replicated" and len(tier.ranks) < model.machine.world_size:
        return model.subset_rows(t, width, tier, owner)[0]
    rows = model.tier_rows(t, width, tier, owner)
    if tier.mode == "push":
        rows[PARTIALS] += model.partial_bytes(t, width, owner[IDS])
    return rows


def _owner_prices(relaxation: Relaxation, total: np.ndarray) -> np.ndarray:
    """What a unit of each tally row costs the rank that owns it; float64 [22, W], microseconds,
    groups of terms weighted by how close their class mean comes to the peak of the phase, so that
    rows are balanced by what binds."""
    model, classes = relaxation.model, relaxation.classes.ranks
    phases = len(model.phases)
    weight = np.zeros((phases, len(GROUPS), len(classes)))
    # A phase that hides wholly behind dense compute binds nobody.
    peaks = np.array([max(0.0, total[relaxation.phase_of == p].max()) for p in range(phases)])
    for k, (phase, group, rank_class) in enumerate(relaxation.rows.names):
        weight[phase, GROUPS.index(group), rank_class] = (
            max(0.0, total[k]) / max(peaks[phase], 1e-30)) ** 4
    price = np.zeros((NUM_ROWS, model.machine.world_size))
    for rank_class, ranks in enumerate(classes):
        unit = np.zeros((NUM_ROWS, NUM_ROWS, model.machine.world_size))
        unit[np.arange(NUM_ROWS), np.arange(NUM_ROWS), int(ranks[0])] = 1.0
        own = model.group_us(model.loads(unit))[..., int(ranks[0])]
        price[:, ranks] = np.einsum("qpg,pg->q", own, weight[:, :, rank_class])[:, None]
    return price


def is_cut(pieces: Placement) -> bool:
    """Whether any piece has several tiers, so that the table carries its hotness order."""
    return any(len(p.tiers) > 1 for p in pieces)


def table_tally(model: CostModel, t: TableProblem, pieces: Placement) -> Tally:
    """Tally of a table that carries its hotness order when it is cut by rows."""
    return model.tally(t, pieces, t.ids_are_positions or is_cut(pieces))


def tallied(relaxation: Relaxation, placements: list[Placement]) -> Tally:
    """Tally of placements of all tables of the relaxation, with what all plans pay."""
    total = relaxation.base_tally
    for t, pieces in zip(relaxation.tables, placements, strict=True):
        total = total.plus(table_tally(relaxation.model, t, pieces))
    return total


def evaluated(relaxation: Relaxation, placements: list[Placement]) -> Evaluation:
    """What placements of all tables of the relaxation cost, with what all plans pay."""
    return relaxation.model.evaluation(tallied(relaxation, placements))


def table_plan(t: TableProblem, pieces: Placement) -> TablePlan:
    """The plan entry of a table, with the hotness order only where tiers need it."""
    head = t.head_ids[:0]
    if is_cut(pieces) and not t.ids_are_positions:
        head = t.head_ids[:max(p.tiers[-1].start for p in pieces)]
    return TablePlan(t.spec, pieces, head)
