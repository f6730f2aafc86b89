"""What may relieve a rank: move, swap, cut by rows or columns, re-deal, or re-tier a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from oper.plan import Piece, Tier
from oper.search.bound.options import PUSH
from oper.search.bound.pieces import MIN_COLUMNS
from oper.search.heuristic.copies import spread_copies
from oper.search.heuristic.placing import Placement, Placer, tier_rows
from oper.search.heuristic.recipes import MAX_TIERS, RecipeBook
from oper.search.heuristic.state import Change, State
from oper.search.problem.pins import impose
from oper.search.problem.statement import TableProblem

_MOVES = 120  # moves looked at before the best of them is taken
_TABLES = 16  # tables of the slowest rank that are looked at
_TARGETS = 6  # ranks that may take over
_SWAPS = 4  # tiers of each target that are looked at in exchange
Place = tuple[int, int, int]  # table, piece, tier
#: A change, or what builds it if it is among those looked at.
Move = Change | Callable[[], Change]


class Moves:
    """Moves of one state.

    Attributes:
        price: float64 [20, W], what a unit of each tally row costs its owner, microseconds.
    """

    def __init__(self, state: State, book: RecipeBook, placer: Placer,
                 rng: np.random.Generator) -> None:
        self.state, self.book, self.placer, self.rng = state, book, placer, rng
        price = self.price = placer.prices.price
        self.world = state.model.machine.world_size
        self.load = (state.total.rows * price).sum(axis=0)
        self.owned: dict[int, list[Place]] = {}
        for k, pieces in enumerate(state.pieces):
            for i, piece in enumerate(pieces):
                for n, tier in enumerate(piece.tiers):
                    if tier.placement == "owned":
                        self.owned.setdefault(tier.ranks[0], []).append((k, i, n))

    def all(self) -> list[Change]:
        """Moves that may relieve the rank that loses most, in a fixed order for a seed."""
        rank, order = self._target()
        low = [int(r) for r in order[:_TARGETS] if r != rank]
        stake = np.array([t.rows[:, rank] @ self.price[:, rank] for t in self.state.tallies])
        moves: list[Move] = []
        for k in np.argsort(-stake, kind="stable")[:_TABLES].tolist():
            for i, piece in enumerate(self.state.pieces[k]):
                for n, tier in enumerate(piece.tiers):
                    place = (k, i, n)
                    if tier.placement == "owned" and tier.ranks[0] == rank:
                        moves += self._owner(place, rank, low)
                        moves += self._cut_rows(place, rank, low)
                    elif tier.placement != "owned" and rank in tier.ranks and len(tier.ranks) > 1:
                        moves += self._deal(place, rank, low)
                moves += self._cut_columns((k, i, 0), rank, low)
            moves += self._recipes(k)
        if len(moves) > _MOVES:
            chosen = self.rng.choice(len(moves), _MOVES, replace=False)
            moves = [moves[int(n)] for n in np.sort(chosen)]
        held = self.state.model.problem.constraints.tables
        made = [m if isinstance(m, dict) else m() for m in moves]
        return [{k: impose(held.get(self.state.tables[k].spec.name), x) for k, x in m.items()}
                for m in made] if held else made

    def _target(self) -> tuple[int, np.ndarray]:
        """The rank to relieve, and all ranks from the least loaded on."""
        evaluation = self.state.evaluation
        machine = self.state.model.machine
        if not evaluation.fits:
            over = evaluation.memory_used()
            domains = evaluation.domain_bytes.size
            level = np.maximum(over[machine.domain], over[domains:][machine.host])
            return int(level.argmax()), np.argsort(level, kind="stable")
        losses = [p.groups.max() - p.groups.max(axis=0).mean() for p in evaluation.phases]
        level = evaluation.phases[int(np.argmax(losses))].groups.max(axis=0)
        return int(level.argmax()), np.argsort(level, kind="stable")

    def _owners(self, k: int) -> set[int]:
        held = self.state.model.problem.constraints.tables.get(self.state.tables[k].spec.name)
        return set(range(self.world)) if held is None or held.ranks is None else set(held.ranks)

    def _owner(self, place: Place, rank: int, low: list[int]) -> Iterator[Change]:
        """Give the tier to another rank, alone or in exchange for one of that rank's tiers."""
        k = place[0]
        for other in (r for r in low if r in self._owners(k)):
            mine = self._with_ranks(place, (other,))
            yield {k: mine}
            theirs = [p for p in self.owned.get(other, ()) if p[0] != k
                      and rank in self._owners(p[0])]
            for n in self.rng.permutation(len(theirs))[:_SWAPS].tolist():
                yield {k: mine, theirs[n][0]: self._with_ranks(theirs[n], (rank,))}

    def _deal(self, place: Place, rank: int, low: list[int]) -> Iterator[Change]:
        """Deal a stripe differently: give or exchange a rank's slot, or turn the stripe."""
        tier = self._tier(place)
        ranks = list(tier.ranks)
        for other in low:
            swapped = list(ranks)
            a = ranks.index(rank)
            swapped[a] = other
            if other in ranks:
                swapped[ranks.index(other)] = rank
            elif tier.placement == "replicated" or other not in self._owners(place[0]):
                continue
            yield {place[0]: self._with_ranks(place, tuple(swapped))}
        turn = int(self.rng.integers(1, len(ranks)))
        yield {place[0]: self._with_ranks(place, tuple(ranks[turn:] + ranks[:turn]))}

    def _cut_rows(self, place: Place, rank: int, low: list[int]) -> Iterator[Change]:
        """Cut an owned tier by rows and give the colder or the hotter part to another rank."""
        k, i, _ = place
        tier, t = self._tier(place), self.state.tables[k]
        if len(self.state.pieces[k][i].tiers) >= 2 * MAX_TIERS or tier.stop - tier.start < 2:
            return
        cuts = np.unique(np.concatenate([
            np.linspace(tier.start + 1, tier.stop - 1, 17),
            tier.start + np.geomspace(1, tier.stop - tier.start - 1, 17)]).astype(np.int64))
        below, whole = self._below(t, tier, cuts, rank, self._width(place))
        for other in (r for r in low[:3] if r in self._owners(k)):
            # A fifth, a half, or what would level the two ranks: by what the owner pays.
            level = float(np.clip((self.load[rank] - self.load[other]) / 2 / whole, 0.02, 0.98))
            for share in sorted({0.2, 0.5, level}):
                hot = int(cuts[np.abs(below - share).argmin()])
                cold = int(cuts[np.abs(1.0 - below - share).argmin()])
                yield {k: self._cut(place, hot, (other, rank))}
                yield {k: self._cut(place, cold, (rank, other))}

    def _below(self, t: TableProblem, tier: Tier, cuts: np.ndarray, rank: int,
               width: int) -> tuple[np.ndarray, float]:
        """Share of the tier's load below each cut (float64 [num_cuts]), and the load (us)."""
        model = self.state.model
        unit = np.zeros((4, 4, self.world))
        unit[np.arange(4), np.arange(4), rank] = 1.0
        weight = model.tier_rows(t, width, tier, unit)[..., rank] @ self.price[:, rank]
        ends = t.prefix(np.array([tier.start, *cuts, tier.stop], float))
        load = weight @ (ends - ends[:, :1])
        owner = np.zeros((4, self.world))
        owner[:, rank] = ends[:, -1] - ends[:, 0]
        whole = float(tier_rows(model, t, tier, owner, width)[:, rank] @ self.price[:, rank])
        return load[1:-1] / max(float(load[-1]), 1e-30), max(whole, 1e-30)

    def _cut_columns(self, place: Place, rank: int, low: list[int]) -> Iterator[Change]:
        """Halve a piece by columns; what the rank owns of the second half goes elsewhere."""
        k, i, _ = place
        piece = self.state.pieces[k][i]
        width = piece.stop - piece.start
        mine = [t for t in piece.tiers if t.placement == "owned" and t.ranks[0] == rank]
        may = self.state.model.problem.may_split(self.state.tables[k])
        if not may or not mine or width < 2 * MIN_COLUMNS:
            return
        middle = piece.start + round(width / 8) * 4
        for other in (r for r in low[:3] if r in self._owners(k)):
            moved = tuple(replace(t, ranks=(other,)) if t in mine else t for t in piece.tiers)
            pieces = list(self.state.pieces[k])
            pieces[i:i + 1] = [replace(piece, stop=middle), Piece(middle, piece.stop, moved)]
            yield {k: tuple(pieces)}

    def _recipes(self, k: int) -> Iterator[Move]:
        """Other tiers for the table: recipes that suit the class means best, and one-tier ones."""
        book = self.book
        if len(book.recipes[k]) < 2:
            return
        rest = book.total - book.resources[k][book.pick[k]]
        near = np.argsort(book.scores(rest + book.resources[k]), kind="stable")[:3].tolist()
        near += [n for n, r in enumerate(book.recipes[k]) if len(r.stops) == 1 and n not in near]
        for n in near:
            recipe = book.recipes[k][n]
            pushed = any(book.relaxation.options[o].kind == PUSH for o in recipe.options)
            for share in (0.0, 2.0, 8.0) if pushed else (0.0,):
                yield partial(self._recipe, k, n, share)

    def _recipe(self, k: int, n: int, fineness: float) -> Change:
        """Table `k` by its recipe `n`, pushes cut above 1 / `fineness` of the mean load."""
        placer = self.placer
        rest = self.state.total.rows - self.state.tallies[k].rows
        placer.load = (rest * self.price).sum(axis=0)
        placer.filled = np.einsum("qw,qdw->dw", rest, placer.prices.shares)
        placer.held = self.state.evaluation.domain_bytes.copy()
        placer.grain = placer.load.mean() / fineness if fineness else np.inf
        made = placer.place_one(k, self.book.recipes[k][n])
        return {k: spread_copies(self.state.model, self.state.tables[k:k + 1], [made])[0]}

    def _tier(self, place: Place) -> Tier:
        k, i, n = place
        return self.state.pieces[k][i].tiers[n]

    def _width(self, place: Place) -> int:
        piece = self.state.pieces[place[0]][place[1]]
        return piece.stop - piece.start

    def _with_tiers(self, place: Place, tiers: list[Tier]) -> Placement:
        k, i, _ = place
        pieces = list(self.state.pieces[k])
        pieces[i] = replace(pieces[i], tiers=tuple(tiers))
        return tuple(pieces)

    def _with_ranks(self, place: Place, ranks: tuple[int, ...]) -> Placement:
        tiers = list(self.state.pieces[place[0]][place[1]].tiers)
        tiers[place[2]] = replace(tiers[place[2]], ranks=ranks)
        return self._with_tiers(place, tiers)

    def _cut(self, place: Place, position: int, ranks: tuple[int, int]) -> Placement:
        tiers = list(self.state.pieces[place[0]][place[1]].tiers)
        tier = tiers[place[2]]
        tiers[place[2]:place[2] + 1] = [replace(tier, stop=position, ranks=(ranks[0],)),
                                        replace(tier, start=position, ranks=(ranks[1],))]
        return self._with_tiers(place, tiers)
