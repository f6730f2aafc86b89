"""A node of the branch-and-bound tree: a subset of the plans, and the pricing problems of its
tables.

A node is immutable. It has limits on the loads of large pieces, and states of tables (whether each
pushes rows).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isqrt

import numpy as np

from oper.search import native
from oper.search.cost.space import PUSH
from oper.search.problem.space import COLUMN_STEP
from oper.search.problem.statement import IDS
from oper.search.relaxation.inequalities import Inequality
from oper.search.relaxation.pieces import Fit, LoadLimits
from oper.search.relaxation.relaxation import Relaxation

#: State of a table in a node: undecided, pushes no rows, pushes some rows.
FREE, STILL, PUSHES = 0, 1, 2
#: Modes of a piece: one tier, or several, without pushed rows; all rows pushed, or some.
ONE_TIER, TIERS, ALL_PUSHED, TIERS_PUSHED = 0, 1, 2, 3
_WHOLE = 1 - 1e-9  # mass of an owner that holds an entire piece
_CLOSE, _CLOSE_SEVERAL = 5e-5, 3e-4  # relative tolerance of pricing: one class, several classes


@dataclass(frozen=True, slots=True, eq=False)
class PieceChoice:
    """The column pieces of a configuration that have the same placement.

    Attributes:
        share: share of the table's columns that these pieces have in total.
        streams: columns of the table divided by the columns of one piece, if no rows are pushed;
            otherwise `kind` determines this quotient.
        kind: type (width) of pushed pieces, an index among the table's types.
        mode: ONE_TIER, TIERS, ALL_PUSHED or TIERS_PUSHED.
        choice: int64 [num_blocks of the table], option of each block.
        amount: float64 [M, 4], for each option the features (`oper.search.problem.statement`) of
            the rows that have it.
    """

    share: float
    streams: float
    kind: int
    mode: int
    choice: np.ndarray
    amount: np.ndarray

    @property
    def key(self) -> tuple[float, float, int, int, bytes]:
        """A key that identifies this choice."""
        return self.share, self.streams, self.kind, self.mode, self.choice.tobytes()


Configuration = tuple[PieceChoice, ...]


def pushes_rows(found: Configuration) -> bool:
    """Whether a configuration pushes any rows."""
    return any(p.mode >= ALL_PUSHED for p in found)


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """The solutions of all tables' pricing problems.

    Attributes:
        configurations: by table, the cheapest configuration; None if a known one costs no more.
        resources: float64 [T, R], consumption of the resource rows; 0 for None.
        value: float64 [T], a lower bound of each table's cost over all configurations at the given
            prices; infinite if the node has no configuration of it.
    """

    configurations: list[Configuration | None]
    resources: np.ndarray
    value: np.ndarray


class Node:
    """A subset of the plans of a relaxation.

    Args:
        relaxation: the relaxation.
        limits: limits on the loads of large pieces; None = no limits.
        pushes: uint8 [T], FREE, STILL or PUSHES; None = all FREE.

    Attributes:
        base: float64 [R], consumption of the resource rows by every plan of the node.
    """

    def __init__(self, relaxation: Relaxation, limits: LoadLimits | None = None,
                 pushes: np.ndarray | None = None) -> None:
        self.relaxation = relaxation
        none = np.zeros(relaxation.pieces.floor.shape[1:])
        self.limits = LoadLimits(none, none + np.inf) if limits is None else limits
        self.pushes = (np.zeros(len(relaxation.tables), np.uint8) if pushes is None else pushes)
        self.base = relaxation.base.copy()
        least = self.limits.least.ravel()
        for _ in range(2):  # a limit on one load implies limits on others, and these further ones
            implied = relaxation.pieces.implied(least)
            least = np.maximum(least, (implied * least[:, None]).max(axis=0))
        #: float64 [P, 5], least load that the largest piece puts on its owner; and float64
        #: [P, 5, P, 5], ratios of its loads, see `Pieces.implied`.
        self.least = least.reshape(self.limits.least.shape)
        self.implied = implied.reshape(2 * self.least.shape)
        for x in relaxation.inequalities:
            self.base[x.row] += self.share(x) * self.least[x.load]

    def share(self, x: Inequality) -> float:
        """Lower bound of the piece's load in the row of inequality `x`, per microsecond of the load
        by which that piece is the largest."""
        return 1.0 if x.at == x.load else float(self.implied[(*x.load, *x.at)])

    @cached_property
    def fit(self) -> Fit:
        """The pieces that the node allows; computed on first use, since many nodes are not solved.
        """
        return self.relaxation.pieces.fit(self.limits)

    @cached_property
    def _types(self) -> dict[str, np.ndarray]:
        r = self.relaxation
        return self.fit.types(np.array([r.options[o].rank_class for o in np.flatnonzero(r.pushes)],
                                       np.int64))

    # -- pricing problems -------------------------------------------------------------------------

    def price(self, prices: np.ndarray, known: np.ndarray | None = None) -> Columns:
        """Solve the pricing problem of every table at `prices` (float64 [R], >= 0).

        If `known` (float64 [T]) is given, only configurations that cost less are searched for.

        Each piece takes the cheapest placement per column. The widths of the pieces must add up to
        the table's columns, so the best pieces are a shortest path over widths.

        Within a piece, blocks are independent except for the charge for several tiers and for
        partial sums. The cost of partial sums depends on the pushed mass, the lookups that pushed
        blocks receive; it is concave between consecutive numbers of full owners.

        With one class of owners, the best set of pushed blocks is therefore a prefix of the blocks
        ordered by the cost of pushing per unit of mass (a tangent of a concave function separates
        over blocks, and its minimum over fractional sets lies at a vertex), or it has a mass at
        which all owners are full. All of these sets are tried.

        With several classes, two lower bounds are computed. One replaces all classes by a class
        with the largest capacity and the lowest price. The other takes the exact partial sums of
        one class, and for the other classes bounds that are linear in the blocks, for any mass or
        for each of several ranges of it.

        Bounds on partial sums that are linear in the blocks (`Fit.least_sums`) are used as well. A
        type of piece whose first blocks are `Fit.heavy` does not push them.
        """
        r = self.relaxation
        value = r.coefficients @ prices  # [T, M, 4]
        cost = r.by_option(np.einsum("bf,bof->bo", r.features, value[r.table_of]))
        cost = np.where(r.allowed[r.table_of], cost, np.inf)
        still = np.where(r.pushes, np.inf, cost)
        stay = still.argmin(axis=1)
        more = r.by_option(np.einsum("bf,bof->bo", r.features,
                                     (r.per_stream @ prices)[r.table_of]))
        stay_more = np.where(np.isfinite(still), more, np.inf).min(axis=1)
        one, one_stay = self._one_tier(still)
        piece = self._call(prices, {
            "go": cost[:, r.pushes].T, "more": more[:, r.pushes].T,
            "stay": still.min(axis=1), "one": one,
            "stay_more": np.where(np.isfinite(stay_more), stay_more, 0.0),
            "known": np.full(one.size, np.inf) if known is None else known})
        options = np.flatnonzero(r.pushes)
        parts: list[list[PieceChoice]] = [[] for _ in r.tables]
        for slot in range(int(piece["num_parts"].max(initial=0))):
            chosen, mode = piece["chosen"][slot], piece["mode"][:, slot]
            choice = np.where((mode == ONE_TIER)[r.table_of], one_stay, stay)
            pushed = chosen > 0
            choice[pushed] = options[chosen[pushed] - 1]
            wanted = piece["num_parts"] > slot
            amount = r.amounts(choice, wanted)
            for k in np.flatnonzero(wanted).tolist():
                parts[k].append(PieceChoice(
                    float(piece["share"][k, slot]), float(piece["streams"][k, slot]),
                    int(piece["kind"][k, slot]), int(mode[k]),
                    choice[r.starts[k]:r.starts[k + 1]].copy(), amount[k]))
        found: list[Configuration | None] = [tuple(p) or None for p in parts]
        resources = np.zeros((len(parts), r.num_rows))
        at = [k for k, x in enumerate(found) if x is not None]
        resources[at] = self.resources(np.array(at, np.int64), [x for x in found if x is not None])
        return Columns(found, resources, piece["value"])

    def _one_tier(self, still: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Cost of each table in a single tier without pushed rows, float64 [T], and the option of
        each block then, int64 [num_blocks]. A stripe over several classes is a single tier, and so
        are replicas with masters in several classes."""
        r = self.relaxation
        best = np.full(len(r.tables), np.inf)
        choice = np.zeros(len(r.table_of), np.int64)
        for kind in sorted({o.kind for o in r.options if o.kind != PUSH}):
            of_kind = [n for n, o in enumerate(r.options) if o.kind == kind]
            least = still[:, of_kind]
            total = np.add.reduceat(least.min(axis=1), r.starts[:-1])
            better = total < best
            best = np.where(better, total, best)
            at = better[r.table_of]
            choice[at] = np.array(of_kind)[least.argmin(axis=1)[at]]
        return best, choice

    def _call(self, prices: np.ndarray, costs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Solve the pricing problems in C++, given the costs of blocks; see `OperPricing`."""
        r, pieces = self.relaxation, self.relaxation.pieces
        options = np.flatnonzero(r.pushes)
        classes = [r.options[o].rank_class for o in options.tolist()]
        num_parts = 2 * isqrt(2 * int(pieces.columns.max(initial=0)) // COLUMN_STEP) + 4
        if not pieces.columns.any():
            num_parts = 1
        shape, blocks = (len(r.tables), num_parts), len(r.table_of)
        given = {
            **costs, "starts": r.starts, "features": r.features[:, IDS:].T,
            "ids": r.features[:, IDS], "total_ids": r.total_ids,
            "price": r.of_sums[:, classes] @ prices,
            "own": np.outer(r.asks, r.own[options] @ prices),
            "tiers": r.tiers @ prices, "tiers_pushed": r.tiers_pushed @ prices,
            # If a dim is not a multiple of `COLUMN_STEP`, unpushed pieces next to pushed ones are
            # not priced; such a table is treated as undecided, which is a valid relaxation.
            "pushes": np.where(pieces.columns > 0, self.pushes, np.where(
                (self.pushes == PUSHES) & pieces.cut, FREE, self.pushes)).astype(np.uint8),
            "columns": pieces.columns, **self._types}
        out = {"value": np.zeros(shape[0]), "num_parts": np.zeros(shape[0], np.int64),
               "kind": np.zeros(shape, np.int64), "mode": np.zeros(shape, np.int64),
               "share": np.zeros(shape), "streams": np.zeros(shape),
               "chosen": np.zeros((num_parts, blocks), np.int64)}
        arrays = given | {f"out_{n}": x for n, x in out.items()}
        native.call("oper_price", native.Pricing, arrays, num_tables=shape[0],
                    num_options=options.size, num_blocks=blocks, step=COLUMN_STEP,
                    max_parts=num_parts, piece=float(r.piece @ prices),
                    close=_CLOSE if r.has_equal_ranks else _CLOSE_SEVERAL, sums=pieces.native_sums)
        return out

    # -- consumption of configurations ------------------------------------------------------------

    def resources(self, tables: np.ndarray, found: Sequence[Configuration]) -> np.ndarray:
        """Consumption of the resource rows by configurations of the tables `tables` (int64 [N]);
        float64 [N, R]."""
        r = self.relaxation
        out = np.zeros((len(found), r.num_rows))
        if not found:
            return out
        of, table, kind, mode, amount = _pieces_of(tables, found)
        pushed = mode >= ALL_PUSHED
        # Of the classes of owners, the one with the least quotient bounds the others.
        streams = np.where(pushed, self.fit.streams[self.fit.place(table, kind)].min(axis=1),
                           [p.streams for x in found for p in x])[:, None]
        asked = self.resources_at(amount, table, kind, streams) + (streams - 1.0) * r.piece
        asked += streams * (np.where((mode == TIERS)[:, None], r.tiers[table], 0.0)
                            + np.where((mode == TIERS_PUSHED)[:, None], r.tiers_pushed[table], 0.0))
        options = np.flatnonzero(r.pushes)
        for o in options if pushed.any() else ():
            each, mass = self.fit.chosen(table, r.options[o].rank_class, kind)
            # The owner of an entire table sends no requests to itself.
            asks = r.asks[table] & ((mode == TIERS_PUSHED) | ((mode == ALL_PUSHED)
                                                              & (mass < _WHOLE)))
            asked += (asks * each * amount[:, o, IDS])[:, None] * r.own[o]
        np.add.at(out, of, np.array([p.share for x in found for p in x])[:, None] * asked)
        return out

    def holds(self, tables: np.ndarray, found: Sequence[Configuration]) -> np.ndarray:
        """Which configurations of the tables `tables` (int64 [N]) the node allows; bool [N].

        Their pieces must be within the limits and push no row that is too heavy for them, and the
        table must push rows, or none, if the node requires this.
        """
        r, number = self.relaxation, len(found)
        of, table, kind, mode, amount = _pieces_of(tables, found)
        pushed = mode >= ALL_PUSHED
        some = np.bincount(of, pushed, number) > 0
        knows = self.pushes[tables]
        out = (knows == FREE) | (some == (knows == PUSHES))
        for o in np.flatnonzero(r.pushes).tolist():
            fits = self.fit.chosen(table, r.options[o].rank_class, kind)[1] > 0
            out &= np.bincount(of, pushed & (amount[:, o, IDS] > 0) & ~fits, number) == 0
        heavy = self.fit.heavy[self.fit.place(table, kind)]
        choices = [p.choice for x in found for p in x]
        for n in np.flatnonzero(pushed & (heavy > 0)).tolist():
            out[of[n]] &= not r.pushes[choices[n][:heavy[n]]].any()
        return np.asarray(out)

    def kinds(self, amount: np.ndarray, tables: np.ndarray, prices: np.ndarray) -> np.ndarray:
        """The cheapest type of pushed pieces for each placement.

        Args:
            amount: float64 [N, M, 4], row features by option, see `PieceChoice`.
            tables: int64 [N], the table of each placement.
            prices: float64 [R].

        Returns:
            int64 [N], indices among the table's types.
        """
        r, pieces, fit = self.relaxation, self.relaxation.pieces, self.fit
        out, least = np.zeros(len(tables), np.int64), np.full(len(tables), np.inf)
        options = np.flatnonzero(r.pushes & (amount[..., IDS] > 0).any(axis=0)).tolist()
        number = int(np.diff(pieces.first)[tables].max(initial=0)) if options else 0
        owned = {o: np.flatnonzero(amount[:, o, IDS] > 0) for o in options}
        price = r.of_sums @ prices
        stream = {o: (amount[n, o] * (r.per_stream[:, o] @ prices)[tables[n]]).sum(axis=1)
                  for o, n in owned.items()}
        for j in range(number):
            cost = np.zeros(len(tables))
            for o, n in owned.items():
                at = tables[n], r.options[o].rank_class, np.full(n.size, j)
                streams, mass = fit.chosen(*at)
                share = amount[n, o, IDS] / r.total_ids[tables[n]]
                sums = np.maximum(pieces.sum_bytes(tables[n], share, np.maximum(mass, 1e-9)),
                                  fit.least_sums(*at, amount[n, o]))
                each = sums * price[at[:2]] + (streams - 1.0) * stream[o]
                cost[n] += np.where(mass > 0, each, np.inf)
            better = cost < least
            out[better], least[better] = j, cost[better]
        return out

    def resources_at(self, amount: np.ndarray, tables: np.ndarray, kind: np.ndarray,
                     others: np.ndarray | float = 1.0) -> np.ndarray:
        """Return what rows consume of each resource, without fixed charges, if owners are full.

        Args:
            amount: float64 [N, M, 4], row features by option, see `PieceChoice`.
            tables: int64 [N], the table of each entry.
            kind: int64 [N], type of its pushed pieces.
            others: float64 [N, 1], columns of the table divided by those of one piece, for rows
                that are not pushed.

        Returns:
            float64 [N, R].
        """
        r = self.relaxation
        out, streams = r.unpushed(amount, tables), np.ones((len(tables), len(r.options))) * others
        for o in np.flatnonzero(r.pushes).tolist():
            n = np.flatnonzero(amount[:, o, IDS] > 0)
            at = tables[n], r.options[o].rank_class, kind[n]
            streams[n, o], mass = self.fit.chosen(*at)
            size = np.maximum(
                r.pieces.sum_bytes(at[0], amount[n, o, IDS] / r.total_ids[at[0]],
                                   np.maximum(mass, 1e-9)),
                self.fit.least_sums(*at, amount[n, o]))
            out[n] += size[:, None] * r.of_sums[at[:2]]
        n = np.flatnonzero((streams > 1.0).any(axis=1))
        out[n] += np.einsum("no,nof,nofr->nr", streams[n] - 1.0, amount[n], r.per_stream[tables[n]])
        return out

    def bound_at(self, prices: np.ndarray, value: np.ndarray) -> float:
        """The lower bound in microseconds that `prices` (float64 [R]) certify, given lower bounds
        `value` (float64 [T]) of the tables' costs at these prices.

        The bound holds for the plans of the node if prices are >= 0 and their weighted sum over the
        rows of each phase is at most 1: a step is then at least the priced sum of its rows.
        """
        memory = self.relaxation.phase_of == -1
        total = value.sum() + float(prices @ self.base) - float(prices[memory].sum())
        return float(total) + self.relaxation.fixed_us


def _pieces_of(tables: np.ndarray, found: Sequence[Configuration]
               ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The pieces of configurations of some tables (int64 [N]): index of their configuration,
    table, kind and mode (int64 [L] each), and amount (float64 [L, M, 4])."""
    of = np.repeat(np.arange(len(found)), [len(x) for x in found])
    pieces = [p for x in found for p in x]
    return (of, tables[of], np.array([p.kind for p in pieces]), np.array([p.mode for p in pieces]),
            np.stack([p.amount for p in pieces]))
