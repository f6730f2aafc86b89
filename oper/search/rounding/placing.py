"""Placements from candidates: the tiers of a table, and the ranks that own them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import pairwise

import numpy as np

from oper.plan import Piece, Plan, TablePlan, Tier
from oper.search.cost.load_vector import LoadVector
from oper.search.cost.model import Evaluation
from oper.search.cost.space import COPIES, HOST, PUSH, REPLICATED, SHARD, is_cut
from oper.search.problem.machine import copy_sets
from oper.search.problem.statement import Problem, TableProblem
from oper.search.relaxation.relaxation import Relaxation
from oper.search.rounding.annealing import Part, Shard, single_owner_options
from oper.search.rounding.candidates import Candidate

Placement = tuple[Piece, ...]
_GOLDEN = 0.6180339887498949


class Placer:
    """Assigns ranks to the tiers of candidates; `order_ranks` chooses their order in a tier."""

    def __init__(self, relaxation: Relaxation) -> None:
        self.relaxation, self.single_owner = relaxation, single_owner_options(relaxation)
        self.problem, self.world = relaxation.problem, relaxation.model.machine.world_size

    def place(self, parts: list[list[Part]], units: tuple[int, ...]) -> list[Placement]:
        """Placements of all tables, given the result of annealing.

        Args:
            parts: the parts of each table, see `annealing.Part`.
            units: number of units of pulled rows that each rank owns.
        """
        out = []
        for k, every in enumerate(parts):
            pieces = _pieces(every)
            edges = np.cumsum([0, *(width for width, _, _ in pieces)]).tolist()
            out.append(tuple(Piece(a, b, self._tiers(k, candidate, shard, np.array(units)))
                             for (a, b), (_, candidate, shard) in zip(pairwise(edges), pieces,
                                                                     strict=True)))
        return out

    def _tiers(self, k: int, candidate: Candidate, shard: Shard | None, units: np.ndarray
               ) -> tuple[Tier, ...]:
        """The tiers of one column piece."""
        tiers: list[Tier] = []
        start = 0
        for stop, option in zip(candidate.stops, candidate.options, strict=True):
            if shard is not None and self.single_owner[k, option]:
                tier = self._owned(k, start, stop, option, *shard[1:])
            else:
                tier = self._spread(k, start, stop, option, units)
            tiers.append(tier)
            start = stop
        return tuple(tiers)

    def _spread(self, k: int, start: int, stop: int, option: int, units: np.ndarray) -> Tier:
        """A tier with an option, on all ranks that the option allows; pulled rows are striped in
        proportion to the units that ranks own."""
        chosen = self.relaxation.options[option]
        if chosen.kind == REPLICATED:
            return Tier(start, stop, "replicated", _rotated(range(self.world), k))
        if chosen.kind == COPIES:  # `spread_copies` distributes them over the ranks of hosts
            return Tier(start, stop, "replicated", copy_sets(self.problem.machine)[0])
        ranks = self.relaxation.classes.ranks[chosen.rank_class]
        units = units[ranks] // max(1, int(np.gcd.reduce(units[ranks])))
        placements = self.problem.placements_of(self.relaxation.tables[k].spec.name)
        if chosen.kind != SHARD or (units == units[0]).all() or "striped" not in placements:
            return self._owned(k, start, stop, option, _rotated(ranks.tolist(), k))
        if stop - start < 2 * units.sum():
            # Systematic sampling with an offset per table, so that rounding errors cancel.
            ends = np.cumsum(units) / units.sum() * max(1, (stop - start) // 2)
            units = np.diff(np.floor(ends + k * _GOLDEN % 1.0), prepend=0).astype(np.int64)
        has = units > 0
        weights = tuple(units[has].tolist()) if has.sum() > 1 else ()
        return self._owned(k, start, stop, option, tuple(ranks[has].tolist()), weights)

    def _owned(self, k: int, start: int, stop: int, option: int, ranks: tuple[int, ...],
               weights: tuple[int, ...] = ()) -> Tier:
        """A tier on the given owners; with placement "owned" if it may not be striped."""
        placements = self.problem.placements_of(self.relaxation.tables[k].spec.name)
        owned = "striped" not in placements or (len(ranks) == 1 and "owned" in placements)
        kind = self.relaxation.options[option].kind
        return Tier(start, stop, "owned" if owned else "striped", ranks, weights,
                    "push" if kind == PUSH else "pull", "host" if kind == HOST else "device")


def _rotated(ranks: Sequence[int], k: int) -> tuple[int, ...]:
    """The ranks of a stripe of table `k`, rotated so that the first ranks of tables are spread."""
    first = int(k * _GOLDEN % 1.0 * len(ranks))
    return (*ranks[first:], *ranks[:first])


def _pieces(parts: list[Part]) -> list[tuple[int, Candidate, Shard | None]]:
    """Column pieces of a table: width, candidate, and the shard with its owners (None if no rows
    are assigned to single owners)."""
    return [(part.width if shard is None else shard[0], part.candidate, shard)
            for part in parts for shard in part.shards or (None,)]


def plan_load_vector(relaxation: Relaxation, placements: list[Placement]) -> LoadVector:
    """Load vector of a plan with the given placements of the relaxation's tables."""
    of_tables = (relaxation.load_vector_of(k, pieces) for k, pieces in enumerate(placements))
    return reduce(LoadVector.plus, of_tables, relaxation.base_load_vector)


def evaluated(relaxation: Relaxation, placements: list[Placement]) -> Evaluation:
    """Evaluation of a plan with the given placements of the relaxation's tables."""
    return relaxation.model.evaluation(plan_load_vector(relaxation, placements))


def table_plan(t: TableProblem, pieces: Placement) -> TablePlan:
    """The plan entry of a table; it has a hotness order only if tiers need it."""
    head = t.head_ids[:0]
    if is_cut(pieces) and not t.ids_are_positions:
        head = t.head_ids[:max(p.tiers[-1].start for p in pieces)]
    return TablePlan(t.spec, pieces, head)


def plan_of(problem: Problem, placements: Mapping[str, Placement]) -> Plan:
    """A plan with placements by table name; tables without one are placed as constraints pin them.
    """
    entries = []
    for t in problem.tables:
        pinned = (Piece(0, t.spec.dim, problem.held(t.spec.name).tiers or ()),)
        entries.append(table_plan(t, placements.get(t.spec.name, pinned)))
    return Plan(problem.machine.world_size, tuple(entries), problem.objective, problem.batch_size,
                problem.topology.name)
