"""Branch and bound over the load of the largest piece, and over which tables push rows.

Limits on the load of the largest piece raise the bound of both children: below the limit, pieces
are small and pay many id streams and partial sums; above it, the piece lengthens its phase. A table
that the relaxed solution pushes in part pays only a part of the fixed charges for pushing; in the
two children it pays all of them, or none. The node with the least bound is branched on until the
bound is close enough to the step time of the known plan.

Which load (a phase and a group of terms) or table is branched on decides how fast the bound rises.
Several candidates are solved for a few rounds, and the one with the largest product of gains is
kept (strong branching, Applegate et al. 1995). A node is solved only to a tolerance that depends on
the gap to the known plan, because branching closes the rest sooner than further rounds would.
"""

from __future__ import annotations

import heapq
import time
from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import count

import numpy as np

from oper.search.pricing.master import MAX_ROUNDS, Bound, Pool, solve_node
from oper.search.pricing.node import FREE, PUSHES, STILL, Node, pushes_rows
from oper.search.problem.machine import GROUPS
from oper.search.problem.statement import IDS
from oper.search.relaxation.inequalities import Load
from oper.search.relaxation.pieces import NUM_PIECE_GROUPS

_NARROW = 0.0005  # share of the bound; loads underestimated by less are not branched on
_FAR = 8.0  # a load is branched on as if its lower limit were at least 1 / _FAR of the largest load
_CANDIDATES = 3  # loads, and tables, that are tried in strong branching
_PRICED = 1500  # limits the candidates: one round of all of them prices at most this many tables
_ROUND = 20  # cost of a round besides pricing, in tables priced: measured with 4 to 100 tables
_TRIED = 2  # rounds of column generation after which candidates are compared
_IN_PART = 1e-3  # least share pushed, and least share not pushed, of a table to branch on
_CLOSE = 0.05  # tolerance of a node, relative to the gap that is left
_CLOSEST, _LOOSEST = 1e-4, 0.01  # limits of that tolerance, relative to the step time
_IDLE = 0.05  # least price of a resource when the costs of tables are compared
#: Added to the price of a load's resource when branchings at loads are compared. Of several
#: resources that take equally long, often only one has a price, although a large piece lengthens
#: the phase by its load of any of them.
_UNPRICED = 0.35


@dataclass(frozen=True, slots=True, eq=False)
class Branching:
    """A way to branch on a node.

    Attributes:
        at: the load (phase, group), or the index of the table, that is branched on.
        score: estimate of how much the relaxed solution underestimates the cost there, relative to
            the node's bound.
        children: two nodes that together contain all plans of the node.
    """

    at: Load | int
    score: float
    children: tuple[Node, Node]


@dataclass(slots=True, eq=False)
class TreeNode:
    """A node of the tree.

    Attributes:
        bound: solution of the node's relaxation, with the lower bound of its plans. Its pool of
            configurations is emptied once the node is branched on.
        is_close: whether it was solved to the tightest tolerance.
        branching: how it was branched on; None for a leaf.
        children: its two children; empty for a leaf.
    """

    bound: Bound
    is_close: bool = False
    branching: Branching | None = None
    children: tuple[TreeNode, ...] = ()


class SearchTree:
    """A best-first branch-and-bound tree: the node with the least bound is branched on first.

    Attributes:
        root: the root node.
        bound: bound of all plans, the least bound of a leaf.
        solved: number of relaxations solved so far.
        work: cost of these: rounds x (tables x classes of owners + a constant), about the number
            of tables priced. Deterministic, so that equal seeds give equal plans; one unit takes
            about 0.07 ms of a 2026 CPU core.
        is_done: whether there is nothing to branch on at the node with the least bound: its
            solution underestimates no load, and pushes every table wholly or not at all.
    """

    def __init__(self, bound: Bound) -> None:
        self.bound, self.solved, self.work, self.is_done = bound, 0, 0, False
        self.root = TreeNode(bound, is_close=True)
        self._order = count()
        self._goal_us = np.inf
        self._history = [(0, bound.lower_bound_us)]  # work and bound after each call of `run`
        self._heap: list[tuple[float, int, TreeNode]] = []
        relaxation = bound.relaxation
        if relaxation.tables and bound.overflow <= 1e-6:
            self._heap = [(bound.lower_bound_us, next(self._order), self.root)]

    def adopt(self, root: TreeNode) -> None:
        """Continue from another tree of the same relaxation, whose leaves have all been bounded."""
        self.root, nodes, self._heap = root, [root], []
        while nodes:
            node = nodes.pop()
            nodes += node.children
            if not node.children:
                self._heap.append((node.bound.lower_bound_us, next(self._order), node))
        heapq.heapify(self._heap)
        self.bound = self._heap[0][2].bound
        self._history = [(self.work, self.bound.lower_bound_us)]

    def run(self, max_nodes: int, *, step_us: float = np.inf, goal_us: float = np.inf,
            deadline: float | None = None) -> Bound:
        """Branch until the bound reaches `goal_us` or a limit is exceeded; returns the bound.

        Args:
            max_nodes: approximate number of relaxations to solve.
            step_us: cutoff, the step time of a known plan: only faster plans are bounded.
            goal_us: stop when the bound has reached this.
            deadline: `time.monotonic()` value at which to stop.
        """
        limit = step_us - self.bound.relaxation.fixed_us
        self._goal_us = min(goal_us, step_us)
        end = self.solved + max_nodes
        while self._heap and self.solved < end and self._heap[0][0] < self._goal_us:
            if deadline is not None and time.monotonic() > deadline:
                break
            parent = self._heap[0][2]
            node = parent.bound
            loads, tables = _load_branchings(node, limit), _table_branchings(node, limit)
            if not loads and not tables and not parent.is_close:
                # Solved more tightly, it may underestimate a load or table, or have a higher bound.
                parent.bound, parent.is_close = self._again(node, deadline, True), True
                heapq.heapreplace(self._heap, (parent.bound.lower_bound_us, next(self._order),
                                               parent))
                continue
            if len(loads) < _CANDIDATES:
                known = {x.at for x in loads}
                loads += [x for x in _load_branchings(node, limit, mixed=True) if x.at not in known]
            if not loads and not tables:
                self.is_done = True
                break
            tried = loads[:_CANDIDATES] + tables[:_CANDIDATES]
            most = max(1, _PRICED // len(node.node.pushes))
            if len(tried) > most:
                tried = sorted(tried, key=lambda x: -x.score)[:most]
            # Candidates are compared after a few rounds; the best one's children are solved fully.
            rounds = _TRIED if len(tried) > 1 else MAX_ROUNDS
            begun = [[self._solve(part, node.pool.under(part, node.prices), deadline, rounds)
                      for part in x.children] for x in tried]
            best = max(range(len(tried)), key=lambda n: _gain(node, begun[n]))
            self.solved += 2 * len(tried)
            heapq.heappop(self._heap)
            parent.branching = tried[best]
            parent.children = tuple(TreeNode(self._finished(node, x, rounds, deadline))
                                    for x in begun[best])
            parent.bound = replace(node, pool=Pool())  # the proof needs only its prices
            for part in parent.children:
                heapq.heappush(self._heap, (part.bound.lower_bound_us, next(self._order), part))
        if self._heap:
            self.bound = self._heap[0][2].bound
        self._history.append((self.work, self.bound.lower_bound_us))
        return self.bound

    @property
    def rise_us(self) -> float:
        """By how much the bound has risen since half of the work so far, microseconds."""
        half = bisect_right(self._history, (self.work // 2, np.inf))
        return self.bound.lower_bound_us - self._history[half - 1][1]

    def _solve(self, part: Node, pool: Pool, deadline: float | None,
               rounds: int = MAX_ROUNDS, closest: bool = False) -> Bound:
        gap = self._goal_us / max(self.bound.lower_bound_us, 1e-9) - 1.0
        tolerance = _CLOSEST if closest else min(max(_CLOSEST, _CLOSE * gap), _LOOSEST)
        found = solve_node(part, tolerance, rounds, deadline, pool, self._goal_us)
        priced = len(part.pushes) * max(1, int(part.relaxation.pushes.sum()))
        self.work += max(1, found.num_rounds) * (priced + _ROUND)
        return found

    def _finished(self, parent: Bound, begun: Bound, rounds: int, deadline: float | None) -> Bound:
        """The bound of a child, solved further if it stopped after `rounds` rounds, and no less
        than its parent's bound."""
        if begun.num_rounds == rounds:
            begun = self._again(begun, deadline)
        return replace(begun, lower_bound_us=max(begun.lower_bound_us, parent.lower_bound_us))

    def _again(self, begun: Bound, deadline: float | None, closest: bool = False) -> Bound:
        """Solve a node further; returns the larger of its old and its new bound."""
        found = self._solve(begun.node, begun.pool, deadline, closest=closest)
        return max(begun, found, key=lambda x: x.lower_bound_us)

    def lowest(self, number: int) -> list[Bound]:
        """The bounds of the `number` nodes with the least bounds, in ascending order."""
        return [x[2].bound for x in heapq.nsmallest(number, self._heap)
                if np.isfinite(x[0])] or [self.bound]


def _gain(node: Bound, parts: list[Bound]) -> float:
    """Score of a branching: the product of both children's gains, which is small if either child
    gains nothing. Gains are measured by the child's relaxed solution, because after few rounds the
    bound may still be far below it."""
    least = 1e-4 * node.lower_bound_us
    most = 10 * node.lower_bound_us  # gain of a child without plans, whose bound is infinite
    return float(np.prod([np.clip(max(x.relaxed_us, x.lower_bound_us) - node.lower_bound_us, least,
                                  most) for x in parts]))


def _table_branchings(node: Bound, limit: float) -> list[Branching]:
    """Branchings at tables that the relaxed solution pushes in part, by descending score: the
    table's cost times the smaller of its shares pushed and not pushed. `limit` is the cutoff
    without fixed costs, microseconds."""
    pool, relaxation, pushes = node.pool, node.relaxation, node.node.pushes
    at = np.flatnonzero(pool.weight > 1e-9)
    tables = np.array(pool.table, np.int64)[at]
    pushed = np.array([pushes_rows(pool.configuration[n]) for n in at], bool)
    part = np.bincount(tables[pushed], pool.weight[at[pushed]], len(relaxation.tables))
    lesser = np.minimum(part, 1.0 - part)
    cost = np.zeros(part.size)
    prices = np.maximum(node.prices, _IDLE * (relaxation.phase_of >= 0))
    np.maximum.at(cost, tables, np.array([pool.resources[n] for n in at]) @ prices
                  if at.size else np.zeros(0))
    score = np.where((lesser > _IN_PART) & (pushes == FREE), lesser * cost, 0.0)
    out = []
    for k in np.argsort(-score, kind="stable")[:_CANDIDATES].tolist():
        if score[k] > 0:
            parts = []
            for state in (STILL, PUSHES):
                known = pushes.copy()
                known[k] = state
                parts.append(Node(relaxation, replace(node.node.limits, step=limit), known))
            out.append(Branching(k, float(score[k]) / node.lower_bound_us, (parts[0], parts[1])))
    return out


def _load_branchings(node: Bound, limit: float, mixed: bool = False) -> list[Branching]:
    """Branchings at loads that the relaxed solution underestimates, by descending score: the
    underestimated time, weighted by the price of the resource plus `_UNPRICED`. `limit` is the
    cutoff without fixed costs, microseconds; for `mixed` see `_largest`."""
    relaxation, limits = node.relaxation, node.node.limits
    if not node.pool.weight.any():  # the node was bounded by given prices, without a solution
        return []
    largest, admitted = _largest(node, mixed), _admitted(node)
    excess = np.where(np.isfinite(admitted), largest - admitted, 0.0) / max(
        1e-9, node.lower_bound_us)
    weight: np.ndarray = np.full(largest.shape, _UNPRICED)
    for n, (phase, name, _) in enumerate(relaxation.rows.names):
        if GROUPS.index(name) < NUM_PIECE_GROUPS:
            weight[phase, GROUPS.index(name)] += node.prices[n]
    for x in relaxation.inequalities:
        weight[x.load] += node.node.share(x) * node.prices[x.row]
    out = []
    for flat in np.argsort(-excess * weight, axis=None, kind="stable").tolist():
        at = divmod(flat, excess.shape[1])
        low, high = float(limits.least[at]), float(largest[at])
        if excess[at] <= _NARROW or high <= low:  # small, or no piece is within the limits
            continue
        begin = max(low, float(admitted[at]), high / _FAR)
        # Keep a margin to the node's limits, so that both children are truly smaller.
        cut = float(np.clip(np.sqrt(begin * high), low + 0.1 * (high - low),
                            max(high * 0.98, (low + high) / 2)))
        most, least = limits.most.copy(), limits.least.copy()
        most[at] = least[at] = cut
        out.append(Branching(at, float(excess[at] * weight[at]), (
            Node(relaxation, replace(limits, most=most, step=limit), node.node.pushes),
            Node(relaxation, replace(limits, least=least, step=limit), node.node.pushes))))
    return out


def _admitted(node: Bound) -> np.ndarray:
    """Largest load of a piece on its owner that the owner inequalities admit at the phase times of
    the relaxed solution, by phase and group, microseconds; float64 [num_phases, 5], infinite where
    there is no inequality."""
    relaxation, total = node.relaxation, node.total()
    out = np.full(node.node.least.shape, np.inf)
    for x in relaxation.inequalities:
        share = node.node.share(x)
        if share > 0:
            unused = relaxation.phase_weight[x.row] @ node.pool.times - total[x.row]
            out[x.load] = min(out[x.load], node.node.least[x.load] + unused / share)
    return out


def _largest(node: Bound, mixed: bool) -> np.ndarray:
    """Largest load of any piece of the relaxed solution on its owner, by phase and group,
    microseconds; float64 [num_phases, 5].

    A node's limits determine how much of a piece one owner may hold, assuming that it has the rows
    that load it least per lookup. The same amount of all rows of the piece in proportion may load
    it beyond the limits. Its loads are then scaled down together until all are within the limits,
    as if the owner had rows that load it less; or, if `mixed`, each load is only capped at its own
    limit, because not every owner can have the rows that load it least.
    """
    relaxation, pool = node.relaxation, node.pool
    out = np.zeros(relaxation.pieces.floor.shape[1:])
    for n in np.flatnonzero(pool.weight > 1e-6).tolist():
        k = pool.table[n]
        for piece in pool.configuration[n]:
            for o in np.flatnonzero(relaxation.pushes & (piece.amount[:, IDS] > 0)).tolist():
                rank_class = relaxation.options[o].rank_class
                fit, widths = node.node.fit, relaxation.pieces.widths[k]
                j = 0 if fit.whole[k, rank_class] else min(piece.kind, len(widths) - 1)
                _, mass = fit.chosen(np.array([k]), rank_class, np.array([j]))
                ids = piece.amount[o, IDS] / relaxation.tables[k].total[IDS]
                owned = piece.amount[o] * min(1.0, float(mass[0]) / ids)
                width = widths[j][0]
                rows = [owned]
                if piece.choice[0] == o:  # the hottest row has one owner
                    rows.append(np.array([1.0, *relaxation.pieces.hot[k, 0]]))
                for part in rows:
                    load = relaxation.pieces.load(k, rank_class, width, part)
                    if mixed:
                        load = np.minimum(load, node.node.limits.most)
                    over = float((load / np.maximum(node.node.limits.most, 1e-9)).max())
                    out = np.maximum(out, load / max(1.0, over))
    return out
