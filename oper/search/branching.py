"""Branching on how large the largest piece is, which limits what else a plan may have.

A box of plans is bounded by the relaxation with pieces that fit the box. In short phases pieces are
small and pay many id streams and partial sums; in long ones the phase itself is dear. The box with
the least bound is cut in two until it is narrow, or the plan that is already known is close enough.

Which of the loads (by phase and group of terms) is cut decides how fast the bound rises. A box is
first cut at several of them in turn, and the one that lifts both halves most is kept (strong
branching, Applegate et al. 1995); its halves are cut at the same load until they are slim.
"""

from __future__ import annotations

import heapq
import time
from dataclasses import replace
from itertools import count

import numpy as np

from oper.search.bound import Bound, solve_relaxation
from oper.search.machine import GROUPS
from oper.search.owner_rows import PUSH
from oper.search.pieces import NUM_PIECE_GROUPS, Box
from oper.search.problem import IDS

_NARROW = 0.0005  # what pieces may exceed their phase by, as a share of the step
_SLIM = 1.04  # largest over least load, from which a box is cut at the same load again
_FAR = 8.0  # a box that begins at 0 is cut as if it began at a part of its end
_STAY = 0.5  # a load is cut again if it is overlooked by this share of the worst one
_CANDIDATES = 3  # loads that are tried, where more than a few boxes may be solved
_FEW = 5
_IDLE = 0.05  # weight of a load whose resource has no price

_Load = tuple[int, int]  # phase and group of terms


class Branching:
    """Boxes of plans, the one with the least bound first.

    Attributes:
        bound: of all plans, from the box that holds the bound down.
        solved: relaxations solved so far.
        is_uncut: whether there was nothing to cut, because no load of a piece was overlooked.
    """

    def __init__(self, bound: Bound) -> None:
        self.bound, self.solved, self.is_uncut = bound, 0, False
        self._order = count()
        self._heap: list[tuple[float, int, Bound, _Load | None]] = []
        relaxation = bound.relaxation
        if relaxation.tables and relaxation.owner_rows and bound.overflow <= 1e-6:
            self._heap = [(bound.lower_bound_us, next(self._order), bound, None)]

    def run(self, max_boxes: int, *, step_us: float = np.inf, goal_us: float = np.inf,
            deadline: float | None = None) -> Bound:
        """Cut boxes until the bound is good enough; returns it.

        Args:
            max_boxes: relaxations to solve, about.
            step_us: a step that is already known; only faster plans are bounded.
            goal_us: stop when the bound has reached this.
            deadline: `time.monotonic()` value at which to stop.
        """
        relaxation = self.bound.relaxation
        limit = step_us - relaxation.fixed_us
        end = self.solved + max_boxes
        num_tried = _CANDIDATES if max_boxes >= _FEW else 1
        while self._heap and self.solved < end and self._heap[0][0] < min(goal_us, step_us):
            if deadline is not None and time.monotonic() > deadline:
                break
            _, _, node, load = self._heap[0]
            cuts = _cuts(node)
            if not cuts:
                self.is_uncut = self.solved == 0
                break
            tried = list(cuts)[:num_tried]
            if (load is not None and load in cuts and cuts[load][2] >= _SLIM
                    and cuts[load][0] >= _STAY * cuts[tried[0]][0]):
                tried = [load]
            found = {x: [self._solve(node, box, limit, deadline) for box in cuts[x][1]]
                     for x in tried}
            best = max(tried, key=lambda x: _merit(node, found[x]))
            heapq.heappop(self._heap)
            for part in found[best]:
                heapq.heappush(self._heap, (part.lower_bound_us, next(self._order), part, best))
        if self._heap:
            self.bound = self._heap[0][2]
            relaxation.set_box(self.bound.box)
        return self.bound

    def _solve(self, node: Bound, box: Box, limit: float, deadline: float | None) -> Bound:
        self.solved += 1
        relaxation = node.relaxation
        relaxation.set_box(replace(box, step=limit))
        found = solve_relaxation(relaxation, deadline=deadline,
                                 pool=node.pool.under(relaxation, node.prices))
        return replace(found, lower_bound_us=max(found.lower_bound_us, node.lower_bound_us))

    def lowest(self, number: int) -> list[Bound]:
        """The bounds of the `number` boxes with the least bounds, least first."""
        return [x[2] for x in heapq.nsmallest(number, self._heap)] or [self.bound]


def _merit(node: Bound, parts: list[Bound]) -> float:
    """What a cut gains: the product of both gains, so that a part which gains nothing spoils it. By
    the relaxed solutions, which bounds that were left early come near in smaller boxes."""
    least = 1e-4 * node.lower_bound_us
    return float(np.prod([max(max(x.relaxed_us, x.lower_bound_us) - node.lower_bound_us, least)
                          for x in parts]))


def _cuts(node: Bound) -> dict[_Load, tuple[float, list[Box], float]]:
    """The two halves of a box at each load that the relaxed solution overlooks, by how much of the
    step it overlooks, largest first; loads whose resource has no price count little. And the ratio
    of the largest piece of the solution to the least of the box."""
    relaxation = node.relaxation
    relaxation.set_box(node.box)
    largest = _largest(node)
    total = node.total()
    times = np.array([max(0.0, total[relaxation.phase_of == p].max())
                      for p in range(largest.shape[0])])
    rooms = np.full(largest.shape, np.inf)
    for row, phase, group in relaxation.owner_rows:
        # The largest piece for which the row leaves room in the phases that the solution found.
        room = (relaxation.phase_weight[row] @ times - total[row] + node.box.least[phase, group])
        rooms[phase, group] = min(rooms[phase, group], room)
    excess = np.where(np.isfinite(rooms), largest - rooms, 0.0) / max(1e-9, node.lower_bound_us)
    weight: np.ndarray = np.full(largest.shape, _IDLE)
    for n, (phase, name, _) in enumerate(relaxation.row_names):
        if GROUPS.index(name) < NUM_PIECE_GROUPS:
            weight[phase, GROUPS.index(name)] += node.prices[n]
    for row, phase, group in relaxation.owner_rows:
        weight[phase, group] += node.prices[row]
    out: dict[_Load, tuple[float, list[Box], float]] = {}
    for flat in np.argsort(-excess * weight, axis=None, kind="stable").tolist():
        at = divmod(flat, excess.shape[1])
        if excess[at] <= _NARROW:
            continue
        low, high = float(node.box.least[at]), float(largest[at])
        begin = max(low, float(rooms[at]), high / _FAR)
        # Both halves are smaller than the box, however narrow it is.
        cut = float(np.clip(np.sqrt(begin * high), low + 0.1 * (high - low),
                            max(high * 0.98, (low + high) / 2)))
        most, least = node.box.most.copy(), node.box.least.copy()
        most[at] = least[at] = cut
        out[at] = (float(excess[at] * weight[at]),
                   [replace(node.box, most=most), replace(node.box, least=least)],
                   high / low if low > 0 else np.inf)
    return out


def _largest(node: Bound) -> np.ndarray:
    """Largest own load of the pieces that the relaxed solution uses; float64 [num_phases, 5]."""
    relaxation, pool = node.relaxation, node.pool
    out = np.zeros(relaxation.pieces.floor.shape[1:])
    for n in np.flatnonzero(pool.weight > 1e-6).tolist():
        k = pool.table[n]
        amount = pool.amount[n]
        for o, option in enumerate(relaxation.options):
            if option.kind == PUSH and amount[o, IDS] > 0:
                types = relaxation.pieces.types[k][option.rank_class]
                j = min(pool.kind[n], types.mass.size - 1)
                mass = min(float(types.mass[j]), amount[o, IDS] / relaxation.tables[k].total[IDS])
                width = relaxation.pieces.widths[k][j][0]
                out = np.maximum(out, relaxation.pieces.load(k, option.rank_class, width, mass))
    return out
