"""The relaxation of a planning problem: resource rows, and their consumption by tables.

Loads are averaged over classes of equal ranks (see `oper.search.relaxation.rows`). Tables interact
only through these resource rows, so that at given prices of the rows each table has its own
cheapest configuration, independent of other tables. A *configuration* cuts a table by columns into
pieces, and gives every block of rows of a piece an *option*: replicated on all ranks or on one rank
of each host, owned within a class (striped or not: the mean is the same), pulled (from device or
host memory) or pushed. A piece of width w of a table of D columns consumes w / D times

    sum over blocks of features @ (coefficients + (s - 1) per_stream)
    + (s - 1) piece                                     one more piece
    + s tiers, or s tiers_pushed if rows are pushed     unless all rows are in one tier
    + s own ids                                         pushed, unless one rank owns the whole piece
    + partial sums of pushed rows                       concave in the mass of one owner

with s = D / w, the number of id streams; the other names are attributes of `Relaxation`, and `ids`
are the pushed ids. These are all charges of the cost model (`CostModel.whole_table`) except
messages with sums of squares (`expected_squares`), without which the bound is lower but valid.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from oper.plan import Piece
from oper.search.cost.load_vector import NUM_ROWS, SUM_ROWS, LoadVector, Row
from oper.search.cost.model import CostModel
from oper.search.cost.space import (
    COPIES,
    HOST,
    PUSH,
    REPLICATED,
    SHARD,
    copy_load_vectors,
    fixed_load_vectors,
    free_blocks,
    has_copies,
    may_hold,
    most_masters,
    table_load_vector,
)
from oper.search.problem.machine import first_neighbourhood
from oper.search.problem.statement import IDS, NUM_FEATURES, ROWS
from oper.search.relaxation.inequalities import Load, OwnerInequalities
from oper.search.relaxation.pieces import Pieces
from oper.search.relaxation.rows import Option, ResourceRows
from oper.search.relaxation.units import ANY, ANY_SQUARES, WHOLE, UnitRows


class Relaxation:
    """Resource rows and block costs of a problem; immutable.

    Args:
        model: the cost model.
        distinguished: None, or a load (phase, group of terms). Hosts (on a single host: memory
            domains) must be interchangeable; then the owner of the piece with the largest such load
            is on the first one, without loss of generality. The ranks of that host become classes
            of their own, so that the relaxation represents the rows that this host owns.

    Attributes:
        tables: the T free tables (pinned tables are part of `base`).
        options: the M options.
        allowed: bool [T, M], whether a table may use an option.
        features: float64 [num_blocks, 4], the features (`oper.search.problem.statement`) of the
            rows of each block of all tables; `table_of` int64 [num_blocks], the block's table;
            `starts` int64 [T + 1], each table's first block.
        coefficients: float64 [T, M, 4, R], consumption per unit of each feature, by option, with
            one column piece.
        per_stream: float64 [T, M, 4, R], what every further column piece adds to `coefficients`.
        piece: float64 [R], fixed consumption of every further column piece of a table.
        tiers, tiers_pushed: float64 [T, R], consumption of a piece for having several tiers, if
            none, or some, of them are pushed.
        own: float64 [M, R], consumption of an id that a rank pushes to itself, for the tables
            `asks` (bool [T]) only.
        units: unit loads of the tables' rows on the ranks.
        pieces: pushed pieces.
        inequalities: the rows about the owner of the largest piece.
        distinguished: the argument of this name.
        unit: float64 [C, 23, R], consumption by a unit of each load-vector row, spread over a
            class.
        base: float64 [R], consumption by every plan.
        pinned: float64 [R], the part of `base` for pinned rows of free tables.
        phase_of: int64 [R], phase of each row; -1 for memory, -2 for rows that may exceed a phase.
        phase_weight: float64 [R, P]; a row is at most the sum over phases of weight x length.
        fixed_us: fixed cost of a step, microseconds.
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
        #: Whether all ranks are interchangeable, except for a distinguished host.
        self.has_equal_ranks = len(self.classes.ranks) == (1 if distinguished is None else 2)
        self.units = UnitRows(model, self.classes, self.tables)
        # One rank may hold all rows of a table if some are pinned to it, whatever the limits.
        self.asks = np.array([all(x.mode == "pull" or x.placement == "replicated"
                                  for x in self.problem.held(t.spec.name).pinned)
                              for t in self.tables], bool)
        # Pinned pushed rows may be those of the largest piece.
        may = np.zeros((len(self.tables), len(self.classes.ranks)), bool) | ~self.asks[:, None]
        for o in np.flatnonzero(self.pushes).tolist():
            may[:, self.options[o].rank_class] |= self.allowed[:, o]
        self.pieces = Pieces(self.units, self.base_load_vector.rows, self.asks, may)
        self._add_inequalities(
            OwnerInequalities(self.rows, self.pieces, self.options, distinguished))
        #: float64 [T, C, R], consumption by a byte of a table's partial sums.
        self.of_sums = np.einsum("tq,cqr->tcr", self.pieces.per_byte, self.unit[:, SUM_ROWS])
        self._build_charges()
        blocks = [t.blocks.shape[0] for t in self.tables]
        self.total_ids = np.array([t.total[IDS] for t in self.tables])
        self.starts = np.concatenate([[0], np.cumsum(blocks)]).astype(np.int64)
        self.table_of = np.repeat(np.arange(len(self.tables)), blocks)
        self.features = np.concatenate([np.zeros((0, NUM_FEATURES)), *(
            free_blocks(self.problem, t) for t in self.tables)])
        #: float64 [num_blocks, M], share of each block whose masters are in the option's class; the
        #: other masters are distributed over all ranks.
        self.own_share = np.ones((len(self.features), len(self.options)))
        sizes = self.units.sizes
        most = np.array([most_masters(self.problem, t, sizes) for t in self.tables]).reshape(
            -1, sizes.size)
        for o in np.flatnonzero(self.plain != np.arange(len(self.options))).tolist():
            self.own_share[:, o] = np.minimum(1.0, most[self.table_of, self.options[o].rank_class]
                                              / np.maximum(self.features[:, ROWS], 1e-9))

        tables = self.tables  # a function that refers to `self` would keep it in a reference cycle

        # Plans that a search compares differ in few tables.
        @lru_cache(2 * len(tables))
        def load_vector_of(k: int, pieces: tuple[Piece, ...]) -> LoadVector:
            return table_load_vector(model, tables[k], pieces)

        #: Load vector of a placement of a table, given by its index; the last ones are kept.
        self.load_vector_of = load_vector_of

    # -- building ---------------------------------------------------------------------------------

    def _build_options(self, distinguished: Load | None) -> None:
        self.options = []
        every_class = range(len(self.classes.ranks))
        if "replicated" in self.problem.allow:
            self.options.append(Option(REPLICATED, -1))
            if len(every_class) > 1:
                # Round-robin assignment may put the masters of a few hot rows in one class.
                self.options += [Option(REPLICATED, c) for c in every_class]
        if distinguished is None and has_copies(self.model):
            self.options.append(Option(COPIES, -1))
        kinds = [(SHARD, "pull"), (PUSH, "push")] + [(HOST, "pull")] * self.rows.uses_host
        for kind, mode in kinds:
            if mode in self.problem.allow:
                self.options += [Option(kind, c) for c in every_class]
        #: int64 [M], the option without a class for masters: masters distributed over all ranks.
        self.plain = np.where([o.kind == REPLICATED for o in self.options], 0,
                              np.arange(len(self.options)))
        first = [int(self.classes.ranks[o.rank_class][0]) for o in self.options]
        allowed = [may_hold(self.problem, t.spec.name, o.kind, r) for t in self.tables
                   for o, r in zip(self.options, first, strict=True)]
        self.allowed = np.array(allowed, bool).reshape(len(self.tables), len(self.options))
        #: bool [M], whether the option pushes rows.
        self.pushes = np.array([o.kind == PUSH for o in self.options], bool)

    def _build_base(self) -> None:
        model = self.model
        self.base_load_vector, pinned = fixed_load_vectors(model)
        #: `base_load_vector` plus the pinned rows of free tables.
        self.fixed_load_vector = self.base_load_vector.plus(pinned)
        self.pinned = self.rows.of_load_vector(pinned)
        self.base: np.ndarray = self.rows.of_load_vector(self.base_load_vector)
        for k, (phase, _, rank_class) in enumerate(self.rows.names):
            # The mean of max(0, load - hidden) is at least mean load - mean hidden.
            self.base[k] -= 1e6 * model.hidden[phase, self.classes.ranks[rank_class]].mean()
        self.fixed_us = sum(model.fixed_us(self.fixed_load_vector))

    def _block_costs(self, owners: OwnerInequalities) -> np.ndarray:
        """Return `coefficients` and `per_stream`; the rows of inequalities about the owner of the
        largest piece follow the resource rows."""
        rows, units, number = self.rows, self.units, self.rows.phase_of.size
        out = np.zeros((2, len(self.tables), len(self.options), NUM_FEATURES,
                        number + owners.phase_of.size))
        for kind in {o.kind for o in self.options} - {COPIES}:
            of = units.of(kind)
            # All owners of a class have equal loads, and so have all its readers.
            asked = [np.concatenate([units.mean(of[mean], rows.unit),
                                     units.by_tables(of[alone], owners.asked)], axis=-1)
                     for mean, alone in ((WHOLE, WHOLE), (ANY_SQUARES, ANY))]  # [C, T, 4, R]
            for o, option in enumerate(self.options):
                if option.kind == kind:
                    out[:, :, o] = [units.by_owner(x, option.rank_class) for x in asked]
        for o, option in enumerate(self.options):
            if option.kind == COPIES:  # inequalities about owners get 0, a valid lower bound
                for k, t in enumerate(self.tables):
                    out[0, k, o, :, :number] = [rows.of_load_vector(x)
                                                for x in copy_load_vectors(self.model, t)]
        return out

    def _add_inequalities(self, owners: OwnerInequalities) -> None:
        """Append the inequalities about the owner of the largest piece to the resource rows."""
        rows = self.rows
        self.unit = np.concatenate([rows.unit, owners.unit], axis=-1)
        self.inequalities = owners.inequalities
        self.coefficients, self.per_stream = self._block_costs(owners)
        self.pinned = np.concatenate([self.pinned, np.zeros(len(owners.base))])
        self.base = np.concatenate([self.base, owners.base]) + self.pinned
        self.phase_of = np.concatenate([rows.phase_of, owners.phase_of])
        weight = np.zeros((rows.phase_of.size, len(self.model.phases)))
        timed = np.arange(len(rows.names))
        weight[timed, rows.phase_of[timed]] = 1.0
        self.phase_weight = np.concatenate([weight, owners.weight])
        every = np.broadcast_to(np.eye(NUM_ROWS)[:, :, None],
                                (NUM_ROWS, NUM_ROWS, self.model.machine.world_size))
        #: float64 [23, R], consumption by a unit of each load-vector row on every rank.
        self.every = np.concatenate([rows.of_load_vector(LoadVector(every)), owners.every], axis=-1)

    def _build_charges(self) -> None:
        model, costs = self.model, self.model.costs
        passes = self.every[list(model.passes)].sum(axis=0)
        self.piece = costs.table_us * 1e3 * self.every[list(model.every_pass)].sum(axis=0)
        ids = np.array([t.total[IDS] for t in self.tables])[:, None]
        bags = np.array([t.num_bags for t in self.tables])[:, None]
        pull, push = model.tiers_ns(False), model.tiers_ns(True)
        # In a plan, all pieces of a table pay the same charge. A piece that pushes nothing may lie
        # next to pieces, or pinned rows, that are pushed, so it is charged the smaller of the two.
        still = np.array([
            min(pull, push) if self.problem.may_split(t) or self.problem.held(t.spec.name).pinned
            else pull for t in self.tables])[:, None]
        self.tiers = ids * still * passes
        self.tiers_pushed = (ids * push * passes
                             + bags * costs.push_bag_ns * self.every[Row.FORWARD_NS])
        own = np.zeros((len(self.options), self.phase_of.size))
        # Inequalities about the owner of the largest piece get 0: it may push none of these ids.
        timed = self.rows.phase_of.size
        for o in np.flatnonzero(self.pushes):
            mine = self.rows.unit[self.options[o].rank_class]
            own[o, :timed] = costs.push_ns * mine[list(model.passes)].sum(axis=0)
        self.own = own

    # -- using ------------------------------------------------------------------------------------

    @property
    def num_rows(self) -> int:
        """Number of resource rows R."""
        return self.phase_of.size

    def amounts(self, choice: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        """Row features by option of entire tables whose blocks are placed by `choice`.

        Args:
            choice: int64 [num_blocks], option of each block.
            wanted: bool [T], the tables to include.

        Returns:
            float64 [T, M, 4], 0 for other tables.
        """
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
        """Cost of each block under each option (float64 [num_blocks, M]), given the cost with all
        masters in the option's class (same shape)."""
        return self.own_share * asked + (1.0 - self.own_share) * asked[:, self.plain]

    def project_prices(self, prices: np.ndarray) -> np.ndarray:
        """Make prices certify a bound: clip them to >= 0, and scale those of each phase so that
        their weighted sum is at most 1."""
        out = np.maximum(prices, 0.0)
        for weight in self.phase_weight.T:
            out[weight > 0] /= max(1.0, float(out @ weight))
        return out

    def unpushed(self, amount: np.ndarray, tables: np.ndarray) -> np.ndarray:
        """Consumption of the resource rows by tables that are one column piece, without partial
        sums and fixed charges.

        Args:
            amount: float64 [N, M, 4], row features by option, see `PieceChoice`.
            tables: int64 [N], the table of each entry.

        Returns:
            float64 [N, R].
        """
        return np.asarray(np.einsum("nof,nofr->nr", amount, self.coefficients[tables]))
