"""From recipes to ranks: deal stripes and pick owners so that no rank carries all the heads."""

from __future__ import annotations

import numpy as np

from oper.plan import Piece, TablePlan, Tier
from oper.search.cost import (
    HELD,
    NUM_ROWS,
    PARTIALS,
    CostModel,
    Tally,
    owned_features,
)
from oper.search.machine import COMPUTE, GROUPS, MEMORY
from oper.search.problem import IDS, TableProblem
from oper.search.recipes import Recipe
from oper.search.relax import PUSH, REPLICATED, Relaxation


class Placer:
    """Names the ranks of recipes, one tier at a time, the heaviest first.

    Attributes:
        load: float64 [W], what the tiers placed so far cost their owners (weighted seconds).
        held: float64 [num_domains], memory taken so far.
    """

    def __init__(self, relaxation: Relaxation, total: np.ndarray) -> None:
        self.relaxation = relaxation
        self.model: CostModel = relaxation.model
        self.world = self.model.machine.world_size
        self.owner_price = owner_prices(relaxation, total)
        self.load = np.zeros(self.world)
        self.held = self.model.machine.per_domain(relaxation.base_tally.rows[HELD])

    def place(self, recipes: list[Recipe]) -> list[tuple[Tier, ...]]:
        """Tiers of every table of the relaxation."""
        jobs = []
        for k, recipe in enumerate(recipes):
            start = 0
            for n, (stop, option) in enumerate(zip(recipe.stops, recipe.options, strict=True)):
                tier = self._template(k, start, stop, option)
                jobs.append((*self._weigh(k, tier, len(recipe.stops) > 1), k, n, tier))
                start = stop
        tiers: list[list[Tier | None]] = [[None] * len(r.stops) for r in recipes]
        # Indivisible work first, then lumpy stripes; even stripes fill what remains anyway.
        jobs.sort(key=lambda job: (-job[0], job[2], job[3]))
        for _, vector, k, n, tier in jobs:
            tiers[k][n] = self._settle(k, vector, tier)
        return [tuple(t for t in row if t is not None) for row in tiers]

    def place_one(self, k: int, recipe: Recipe) -> tuple[Tier, ...]:
        """Tiers of table `k` beside what is already placed."""
        tiers, start = [], 0
        for stop, option in zip(recipe.stops, recipe.options, strict=True):
            tier = self._template(k, start, stop, option)
            tiers.append(self._settle(k, self._weigh(k, tier, len(recipe.stops) > 1)[1], tier))
            start = stop
        return tuple(tiers)

    def _template(self, k: int, start: int, stop: int, option: int) -> Tier:
        """The tier with every rank it may use."""
        chosen = self.relaxation.options[option]
        name = self.relaxation.tables[k].spec.name
        placements = self.model.problem.placements_of(name)
        if chosen.kind == REPLICATED:
            return Tier(start, stop, "replicated", tuple(range(self.world)))
        ranks = tuple(int(r) for r in self.relaxation.classes.ranks[chosen.rank_class])
        mode = "push" if chosen.kind == PUSH else "pull"
        # Stripes of a pushed tier multiply its partial sums; an owner sends one per bag.
        whole = "striped" not in placements or (mode == "push" and "owned" in placements)
        if whole or (len(ranks) == 1 and "owned" in placements):
            return Tier(start, stop, "owned", ranks, mode=mode)
        return Tier(start, stop, "striped", ranks, mode=mode)

    def _weigh(self, k: int, tier: Tier, several: bool) -> tuple[float, np.ndarray]:
        """How lumpy the tier is, and its cost by slot of its rank set; (float, float64 [m])."""
        t = self.relaxation.tables[k]
        slots = 1 if tier.placement == "owned" else len(tier.ranks)
        shares = t.shares(tier.start, tier.stop, slots, t.ids_are_positions or several)
        # All ranks of a set are of one class (or the set is everybody), so any rank's price serves.
        ranks = list(tier.ranks[:slots])
        owner = np.zeros((4, self.world))
        owner[:, ranks] = shares
        rows = tier_rows(self.model, t, tier, owner)
        cost = (rows * self.owner_price).sum(axis=0)[ranks]
        return float(cost.max() - cost.min() if slots > 1 else cost.max()), cost

    def _settle(self, k: int, cost: np.ndarray, tier: Tier) -> Tier:
        ranks = np.array(tier.ranks)
        machine = self.model.machine
        t = self.relaxation.tables[k]
        if tier.placement == "owned":
            need = (tier.stop - tier.start) * _held_row_bytes(self.model, t)
            domain = machine.domain[ranks]
            spare = machine.capacity_bytes[domain] - self.held[domain] - need
            order = np.lexsort((ranks, self.load[ranks], np.where(spare >= 0, 0.0, -spare)))
            ranks = ranks[order[:1]]
        elif len(ranks) > 1:
            slots = (np.arange(len(ranks))[None, :] - np.arange(len(ranks))[:, None]) % len(ranks)
            after = self.load[ranks][None, :] + cost[slots]  # [turn, rank]
            turn = int(np.lexsort((np.square(after).sum(axis=1), after.max(axis=1)))[0])
            # Turning by k gives slot s to the rank k places further on.
            ranks = np.roll(ranks, -turn)
        placed = Tier(tier.start, tier.stop, tier.placement, tuple(ranks.tolist()), mode=tier.mode)
        self.load[ranks] += cost[:len(ranks)]
        owner = owned_features(t, placed, self.world, True)
        self.held += machine.per_domain(tier_rows(self.model, t, placed, owner)[HELD])
        return placed


def _held_row_bytes(model: CostModel, t: TableProblem) -> float:
    return t.spec.row_bytes + (t.spec.state_bytes if model.training else 0)


def tier_rows(model: CostModel, t: TableProblem, tier: Tier, owner: np.ndarray) -> np.ndarray:
    """Tally rows of one tier of a table without column split, partial sums included."""
    if tier.placement == "replicated":
        return model.replica_rows(t, t.spec.dim, owner)
    if tier.mode == "pull":
        return model.shard_rows(t, t.spec.dim, owner)
    rows = model.push_rows(t, t.spec.dim, owner)
    rows[PARTIALS] += model.partial_bytes(t, t.spec.dim, owner[IDS])
    return rows


def owner_prices(relaxation: Relaxation, total: np.ndarray) -> np.ndarray:
    """What a unit of each tally row costs the rank that owns it; float64 [12, W], microseconds.

    A group of terms counts by how close its class mean comes to the peak of its phase, so that rows
    are balanced by what binds.
    """
    model = relaxation.model
    world = model.machine.world_size
    out = np.zeros((NUM_ROWS, world))
    weight = np.zeros((len(model.phases), len(GROUPS), len(relaxation.classes.ranks)))
    for k, (phase, group, rank_class) in enumerate(relaxation.row_names):
        peak = total[relaxation.phase_of == phase].max()
        weight[phase, GROUPS.index(group), rank_class] = (total[k] / max(peak, 1e-30)) ** 4
    for rank_class, ranks in enumerate(relaxation.classes.ranks):
        rank = int(ranks[0])
        unit = np.zeros((NUM_ROWS, NUM_ROWS, world))
        unit[np.arange(NUM_ROWS), np.arange(NUM_ROWS), rank] = 1.0
        load = model.loads(unit) * model.machine.seconds_per_unit * 1e6
        own = load[..., rank]
        groups = np.concatenate([own[..., MEMORY:MEMORY + 1] + own[..., COMPUTE:COMPUTE + 1],
                                 own[..., 2:]], axis=-1)
        out[:, ranks] = np.einsum("qpg,pg->q", groups, weight[:, :, rank_class])[:, None]
    return out


def table_tally(model: CostModel, t: TableProblem, tiers: tuple[Tier, ...]) -> Tally:
    """Tally of a table that carries its hotness order when it has several tiers."""
    return model.tally(t, (Piece(0, t.spec.dim, tiers),), t.ids_are_positions or len(tiers) > 1)


def table_plan(t: TableProblem, tiers: tuple[Tier, ...]) -> TablePlan:
    """The plan entry of a table, with the hotness order only where tiers need it."""
    head = t.head_ids[:0]
    if len(tiers) > 1 and not t.ids_are_positions:
        head = t.head_ids[:tiers[-1].start]
    return TablePlan(t.spec, (Piece(0, t.spec.dim, tiers),), head)

