"""The relaxation of a planning problem, and what its tables cost at given prices.

Loads are averaged over classes of equal ranks (see `oper.search.bound.rows`), and tables meet only
in these resource rows, so that at given prices of the rows each table finds its cheapest
configuration by itself. A *configuration* cuts a table by columns into pieces, and gives every
block of rows of a piece an *option*: replicated on all ranks or on one of each host, owned within a
class (striped or not: the mean is the same), pulled (from device or host memory) or pushed. What a
piece of width w of a table of D columns asks is w / D times

    sum over blocks of features @ (coefficients + (s - 1) per_stream)
    + (s - 1) piece                                     one more piece
    + s tiers, or s tiers_pushed where rows are pushed  unless all rows are in one tier
    + s own ids                                         pushed, unless one rank owns the whole piece
    + partial sums of what is pushed                    concave in the mass of one owner

with s = D / w: every charge of the cost model is in it (`oper.search.cost.model.whole_table`).
"""

from __future__ import annotations

from functools import reduce

import numpy as np

from oper.plan import Piece, Tier
from oper.search.bound.inequalities import Load, OwnerRows, first_neighbourhood
from oper.search.bound.options import COPIES, HOST, PUSH, REPLICATED, SHARD, Option
from oper.search.bound.pieces import Pieces
from oper.search.bound.rows import ResourceRows
from oper.search.bound.units import ANY_SQUARES, WHOLE, UnitRows
from oper.search.cost.model import CostModel
from oper.search.cost.space import has_copies
from oper.search.cost.tally import FORWARD_NS, HELD, HOST_HELD, NUM_ROWS, PARTIALS, Tally
from oper.search.problem.machine import copy_sets
from oper.search.problem.space import MAX_REPLICATED
from oper.search.problem.statement import IDS, NUM_FEATURES, ROWS, TableProblem


class Relaxation:
    """Resource rows and block costs of a problem; nothing of it changes.

    Args:
        model: the cost model.
        distinguished: a load, by phase and group of terms. Among interchangeable hosts (domains, on
            a single host) the one that owns the piece with the largest such load is the first,
            without loss of generality; its ranks are then classes of their own, so that the
            relaxation sees what that host owns.

    Attributes:
        tables: the tables that are free to choose (pinned ones are part of `base`).
        options: the options.
        allowed: bool [T, M].
        features: float64 [num_blocks, 4]; `table_of` int64 [num_blocks]; `starts` int64 [T + 1].
        coefficients: float64 [T, M, 4, R], for tables whose pushed rows are one piece.
        per_stream: float64 [T, M, 4, R], what every further column piece adds.
        piece: float64 [R], what every further column piece of a table asks.
        tiers, tiers_pushed: float64 [T, R], what a piece of several tiers asks, none of them or
            some of them pushed.
        own: float64 [M, R], what an id that a rank pushes to itself asks; of the tables `asks`
            (bool [T]) alone.
        units: what units of the tables' rows ask of ranks.
        pieces: pushed pieces.
        inequalities: the rows about the owner of a large piece.
        distinguished: the load by whose largest piece a host is distinguished.
        unit: float64 [C, 22, R], what a unit of each tally row, spread over a class, asks.
        base: float64 [R], what every plan asks.
        pinned: float64 [R], what rows that are pinned ask; part of `base`, and of no configuration.
        phase_of: int64 [R], phase of each row, -1 for memory, -2 for rows that may exceed theirs.
        phase_weight: float64 [R, P], a row is at most the weighted sum of the phases' times.
        fixed_us: fixed cost of a step.
    """

    def __init__(self, model: CostModel, distinguished: Load | None = None) -> None:
        self.model, self.distinguished = model, distinguished
        self.problem = model.problem
        self.tables = self.problem.free_tables
        self.rows = ResourceRows(model, [] if distinguished is None else
                                 [first_neighbourhood(model.machine)])
        self.classes = self.rows.classes
        self._build_options(distinguished)
        self._build_base()
        #: Whether all ranks are interchangeable, but for a distinguished host.
        self.alike = len(self.classes.ranks) == (1 if distinguished is None else 2)
        self.units = UnitRows(model, self.classes, self.tables)
        # Who has a table's pinned pushed rows may have all of them, whatever pieces of others fit.
        self.asks = np.array([all(x.mode == "pull" or x.placement == "replicated"
                                  for x in self.problem.pinned_of(t.spec.name))
                              for t in self.tables], bool)
        # Pinned pushed rows may be those of the largest piece.
        may = np.zeros((len(self.tables), len(self.classes.ranks)), bool) | ~self.asks[:, None]
        for o in np.flatnonzero(self.pushes).tolist():
            may[:, self.options[o].rank_class] |= self.allowed[:, o]
        self.pieces = Pieces(self.units, self.base_tally.rows, self.asks, may)
        self._add_inequalities(OwnerRows(self.rows, self.pieces, self.options, distinguished))
        self._build_charges()
        sizes = [t.blocks.shape[0] for t in self.tables]
        self.total_ids = np.array([t.total[IDS] for t in self.tables])
        self.starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self.table_of = np.repeat(np.arange(len(self.tables)), sizes)
        self.features = (np.concatenate([self._free_blocks(t) for t in self.tables]) if self.tables
                         else np.zeros((0, NUM_FEATURES)))
        #: float64 [num_blocks, M], share of each block that is placed as the option says; the
        #: masters of the rest are dealt over all ranks.
        self.own_share = np.ones((len(self.features), len(self.options)))
        for o in np.flatnonzero(self.plain != np.arange(len(self.options))).tolist():
            most = np.array([self._most_masters(t, self.options[o].rank_class)
                             for t in self.tables])
            self.own_share[:, o] = np.minimum(1.0, most[self.table_of]
                                              / np.maximum(self.features[:, ROWS], 1e-9))

    # -- building ---------------------------------------------------------------------------------

    def _build_options(self, distinguished: Load | None) -> None:
        self.options = []
        every_class = range(len(self.classes.ranks))
        if "replicated" in self.problem.allow:
            self.options.append(Option(REPLICATED, -1))
            if len(every_class) > 1:
                # Master copies are dealt row by row: a few hot rows may all lie in one class.
                self.options += [Option(REPLICATED, c) for c in every_class]
        if distinguished is None and has_copies(self.model):
            self.options.append(Option(COPIES, -1))
        kinds = [(SHARD, "pull"), (PUSH, "push")] + [(HOST, "pull")] * self.rows.uses_host
        for kind, mode in kinds:
            if mode in self.problem.allow:
                self.options += [Option(kind, c) for c in every_class]
        #: int64 [M], the option that stands for each in a candidate: masters dealt over all ranks.
        self.plain = np.where([o.kind == REPLICATED for o in self.options], 0,
                              np.arange(len(self.options)))
        allowed = [self._may(t, o) for t in self.tables for o in self.options]
        self.allowed = np.array(allowed, bool).reshape(len(self.tables), len(self.options))
        #: bool [M], which of them push.
        self.pushes = np.array([o.kind == PUSH for o in self.options], bool)

    def _most_masters(self, t: TableProblem, rank_class: int) -> float:
        """Rows of a block whose masters may lie where they cost least, if that is in `rank_class`.

        Masters are dealt in turn: of W rows of a tier in a row each rank has one. Rows of a block
        differ in nothing, so that only what is left of a turn, by tier, may lie in some classes and
        not in others: in all but the smallest of the others.
        """
        tiers = MAX_REPLICATED + len(self.problem.pinned_of(t.spec.name))
        sizes = [r.size for r in self.classes.ranks]
        rest = sum(sizes) - min(sizes[:rank_class] + sizes[rank_class + 1:])
        return float(rest * tiers) if t.ids_are_positions else np.inf

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
        none = Tally(np.zeros((NUM_ROWS, model.machine.world_size)), {})
        pinned = reduce(Tally.plus, map(self._pinned_tally, self.tables), none)
        #: The same with rows that are pinned in tables that are free to choose for others.
        self.fixed_tally = total.plus(pinned)
        self.pinned = self.rows.of_tally(pinned)
        self.base: np.ndarray = self.rows.of_tally(total)
        for k, (phase, _, rank_class) in enumerate(self.rows.names):
            # A mean of excesses never exceeds the largest, nor falls below the excess of the mean.
            self.base[k] -= 1e6 * model.hidden[phase, self.classes.ranks[rank_class]].mean()
        self.fixed_us = sum(model.fixed_us(self.fixed_tally))

    def _pinned_tally(self, t: TableProblem) -> Tally:
        """What the pinned rows of a table cost in any plan, in one column piece at least."""
        pinned = self.problem.pinned_of(t.spec.name)
        whole = len(pinned) == 1 and pinned[0].stop - pinned[0].start == t.spec.num_rows
        # Partial sums are concave in what an owner holds: with other pushed rows beside them,
        # those of pinned rows may cost nothing more.
        alone = whole or "push" not in self.problem.modes_of(t.spec.name)
        return self.model.piece_tally(t, Piece(0, t.spec.dim, pinned),
                                      t.ids_are_positions or not whole, alone)

    def _free_blocks(self, t: TableProblem) -> np.ndarray:
        """Features of each block without its pinned rows; float64 [K, 4]."""
        out = t.blocks.copy()
        for tier in self.problem.pinned_of(t.spec.name):
            out -= np.diff(t.prefix(np.clip(t.edges, tier.start, tier.stop)), axis=1).T
        return np.maximum(out, 0.0)

    def _block_costs(self) -> np.ndarray:
        """`coefficients` and `per_stream` without the rows about owners."""
        rows, tables = self.rows, self.tables
        out = np.zeros((2, len(tables), len(self.options), NUM_FEATURES, rows.phase_of.size))
        # Owners are symmetric within a class by construction, readers by definition.
        asked = {kind: [self.units.mean(x, rows.unit)
                        for x in self.units.of(kind)[[WHOLE, ANY_SQUARES]]]
                 for kind in {o.kind for o in self.options} - {COPIES}}
        for o, option in enumerate(self.options):
            if option.kind == COPIES:
                out[0, :, o] = [self._copies(t) for t in tables]
            for n, x in enumerate(asked.get(option.kind, ())):
                out[n, :, o] = self.units.by_owner(x, option.rank_class)
        return out

    def _copies(self, t: TableProblem) -> np.ndarray:
        """What a unit of each feature asks that is copied to one rank of every host, whichever that
        is, as ranks are all alike; float64 [4, R].

        Between hosts a changed row travels once per host then, and once per rank where it is
        replicated on all ranks; in exchange ranks without the copy read it from a neighbour.
        """
        model, ranks, out = self.model, copy_sets(self.model.machine)[0], []
        tier = Tier(0, t.spec.num_rows, "replicated", ranks)
        for masters in np.eye(NUM_FEATURES):
            owner = np.outer(masters, np.isin(np.arange(model.machine.world_size), ranks))
            rows, need, send = model.subset_rows(t, t.spec.dim, tier, owner / len(ranks))
            out.append(self.rows.of_tally(Tally(rows, {ranks: (need, send)})))
        return np.stack(out)

    def _add_inequalities(self, owners: OwnerRows) -> None:
        """Put the rows about owners behind the others."""
        rows = self.rows
        self.unit = np.concatenate([rows.unit, owners.unit], axis=-1)
        self.inequalities = owners.inequalities
        self.coefficients, self.per_stream = np.concatenate(
            [self._block_costs(), owners.coefficients()], axis=-1)
        self.pinned = np.concatenate([self.pinned, np.zeros(len(owners.base))])
        self.base = np.concatenate([self.base, owners.base]) + self.pinned
        self.phase_of = np.concatenate([rows.phase_of, owners.phase_of])
        weight = np.zeros((rows.phase_of.size, len(self.model.phases)))
        timed = np.arange(len(rows.names))
        weight[timed, rows.phase_of[timed]] = 1.0
        self.phase_weight = np.concatenate([weight, owners.weight])
        every = np.broadcast_to(np.eye(NUM_ROWS)[:, :, None],
                                (NUM_ROWS, NUM_ROWS, self.model.machine.world_size))
        #: float64 [22, R], what a unit of each tally row on every rank asks.
        self.every = np.concatenate([rows.of_rows(every), owners.every], axis=-1)

    def _build_charges(self) -> None:
        model, costs = self.model, self.model.costs
        passes = self.every[list(model.passes)].sum(axis=0)
        self.piece = costs.table_us * 1e3 * self.every[list(model.every_pass)].sum(axis=0)
        ids = np.array([t.total[IDS] for t in self.tables])[:, None]
        bags = np.array([t.traffic.num_bags for t in self.tables])[:, None]
        pull, push = model.tiers_ns(False), model.tiers_ns(True)
        # Pieces of a table pay the same, and what pushes nothing may lie beside pieces, or pinned
        # rows, that are pushed.
        still = np.array([
            min(pull, push) if self.problem.may_split(t) or self.problem.pinned_of(t.spec.name)
            else pull for t in self.tables])[:, None]
        self.tiers = ids * still * passes
        self.tiers_pushed = (ids * push * passes
                             + bags * costs.push_bag_ns * self.every[FORWARD_NS])
        own = np.zeros((len(self.options), self.phase_of.size))
        timed = self.rows.phase_of.size  # the owner of a large piece may have none of these ids
        for o in np.flatnonzero(self.pushes):
            mine = self.rows.unit[self.options[o].rank_class]
            own[o, :timed] = costs.push_ns * mine[list(model.passes)].sum(axis=0)
        self.own = own

    # -- using ------------------------------------------------------------------------------------

    @property
    def is_symmetric(self) -> bool:
        """Whether ranks of one class may be swapped: dense compute beside them and what is pinned
        to them are alike, too. A distinguished host needs that, class means do not."""
        total = self.fixed_tally
        load = np.concatenate([*self.model.units(total), self.model.hidden,
                               total.rows[[HELD, HOST_HELD]]])
        return all(np.allclose(load[:, r], load[:, r[:1]], rtol=1e-9, atol=0)
                   for r in self.classes.ranks)

    @property
    def num_rows(self) -> int:
        """Number of resource rows R."""
        return self.phase_of.size

    def amounts(self, choice: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        """Features by option of some whole tables (bool [T]) whose blocks are placed by `choice`
        (int64 [num_blocks]); float64 [T, M, 4], 0 for other tables."""
        shape = (len(self.tables), len(self.options), NUM_FEATURES)
        out = np.zeros((shape[0] * shape[1], NUM_FEATURES))
        b = np.flatnonzero(wanted[self.table_of])
        choice, own = choice[b], self.own_share[b, choice[b]]
        for option, share in ((choice, own), (self.plain[choice], 1.0 - own)):
            if share.any():
                at = self.table_of[b] * len(self.options) + option
                out += np.stack([np.bincount(at, f * share, minlength=len(out))
                                 for f in self.features[b].T], axis=-1)
        return out.reshape(shape)

    def by_option(self, asked: np.ndarray) -> np.ndarray:
        """What blocks ask in each option, given what they would if all of it was placed so; float64
        [num_blocks, M]."""
        return self.own_share * asked + (1.0 - self.own_share) * asked[:, self.plain]

    def project_prices(self, prices: np.ndarray) -> np.ndarray:
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

    def resources_of(self, amount: np.ndarray, tables: np.ndarray, streams: np.ndarray,
                     owner: np.ndarray, least_sums: np.ndarray | float = 0.0) -> np.ndarray:
        """What features placed by option ask of the resource rows, charges apart.

        Args:
            amount: float64 [N, M, 4].
            tables: int64 [N], the table of each entry.
            streams: float64 [N, M], columns of the table over those of one piece.
            owner: float64 [N, M], mass that one owner holds at most, of the table's mass 1.
            least_sums: float64 [N, M], bytes of partial sums at least.

        Returns:
            float64 [N, R].
        """
        out = np.einsum("nof,nofr->nr", amount, self.coefficients[tables])
        least_sums = np.broadcast_to(least_sums, streams.shape)
        for o in np.flatnonzero(self.pushes):
            n = np.flatnonzero(amount[:, o, IDS] > 0)
            share = amount[n, o, IDS] / self.total_ids[tables[n]]
            size = np.maximum(self.pieces.sum_bytes(tables[n], share, owner[n, o]),
                              least_sums[n, o])
            out[n] += size[:, None] * self.unit[self.options[o].rank_class, PARTIALS]
        n = np.flatnonzero((streams > 1.0).any(axis=1))
        out[n] += np.einsum("no,nof,nofr->nr", streams[n] - 1.0, amount[n],
                            self.per_stream[tables[n]])
        return out
