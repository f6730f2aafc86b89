"""Configurations of tables as tier boundaries, and the search over them by class means.

A candidate states where the tiers of a table end and which option each tier takes
(`oper.search.relaxation.rows.Option`), but not yet on which ranks. Its consumption of the resource
rows (means over classes) is exact, so that candidates can be chosen for all tables before ranks
are assigned: from the relaxed solution, then by coordinate descent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby, pairwise, product
from operator import itemgetter

import numpy as np

from oper.search.cost.load_vector import row_bytes
from oper.search.cost.space import COPIES, HOST, PUSH, REPLICATED, SHARD
from oper.search.pricing.master import Bound
from oper.search.problem.space import MAX_REPLICATED
from oper.search.problem.statement import NUM_FEATURES, ROWS, TableProblem

_POOL = 24  # configurations of the relaxed solution's pool that are considered per table
_SWEEPS, _REFINEMENTS = 8, 4  # limits of the rounds of `descend` and `refine`
_ROUNDING = 1e-5  # upper limit of the share of a memory left free for uneven stripes
_HIDDEN = 2e-6  # share of a memory by which candidates whose score counts as equal may overflow
_OVERFLOW = 1e3  # a memory overflow x multiplies the score by 1 + 1e3 x


@dataclass(frozen=True, slots=True)
class Candidate:
    """Tiers of one table: tier k ends at position `stops[k]` and is placed by `options[k]`."""

    stops: tuple[int, ...]
    options: tuple[int, ...]

    def option_at(self, position: int) -> int:
        """The option of the tier that contains `position`."""
        return self.options[int(np.searchsorted(self.stops, position, side="right"))]


def _merged(tiers: Iterable[tuple[int, int]]) -> Candidate:
    """The candidate with the given tiers (end, option), equal adjacent options merged."""
    last = [list(alike)[-1] for _, alike in groupby(tiers, itemgetter(1))]
    return Candidate(*map(tuple, zip(*last, strict=True)))


def join(first: Candidate, second: Candidate, position: int) -> Candidate:
    """The candidate that equals `first` below `position` and `second` from there on."""
    before = [(min(stop, position), option) for (start, stop), option in zip(
        pairwise((0, *first.stops)), first.options, strict=True) if start < position]
    behind = [(stop, option) for stop, option in zip(second.stops, second.options, strict=True)
              if stop > position]
    return _merged([*before, *behind])


class CandidatePool:
    """Candidates of every table with their consumption, and coordinate descent over them.

    Attributes:
        relaxation: the relaxation.
        candidates: the candidates of each table.
        resources: float64 [N, R] for each table, consumption of the resource rows.
        amounts: float64 [N, O, 4] for each table, row features by option (`Relaxation`).
        pick: int64 [T], index of the chosen candidate.
        total: float64 [R], consumption of the chosen candidates and of the node's base.
        full: share of each memory that candidates may fill; 1 minus a margin for uneven stripes and
            `reserve`.
    """

    def __init__(self, bound: Bound, reserve: float = 0.0) -> None:
        self.relaxation, self.node, self.prices = bound.relaxation, bound.node, bound.prices
        num_tables = len(self.relaxation.tables)
        self.candidates: list[list[Candidate]] = [[] for _ in range(num_tables)]
        self.resources: list[np.ndarray] = [np.zeros((0, self.relaxation.num_rows))] * num_tables
        none = np.zeros((0, len(self.relaxation.options), NUM_FEATURES))
        self.amounts: list[np.ndarray] = [none] * num_tables
        self.pick = np.zeros(num_tables, np.int64)
        weight = self.relaxation.phase_weight
        #: By phase, the indices of the rows that bound it, and their weights.
        self._phases = [(rows, weight[rows, p]) for p in range(weight.shape[1])
                        for rows in [np.flatnonzero(weight[:, p])]]
        self.full = 1.0 - self._rounding() - reserve
        self._from_pool(bound)
        self.total = self.node.base - self.relaxation.pinned + sum(
            (r[p] for r, p in zip(self.resources, self.pick, strict=True)),
            np.zeros(self.relaxation.num_rows))

    def _rounding(self) -> float:
        """The share of a rank's memory to leave free. Relaxed solutions fill memories completely,
        but stripes may give a rank one extra row of each table, and a score that counts as equal
        may contain a small overflow."""
        machine = self.relaxation.model.machine
        memory = (machine.capacity_bytes[machine.domain] / machine.num_domain).min()
        rows = sum(row + state for t in self.relaxation.tables
                   for row, _, state in [row_bytes(t, t.spec.dim)])
        return float(min(_ROUNDING, rows / max(memory, 1.0))) + _HIDDEN

    def _from_pool(self, bound: Bound) -> None:
        """Add the candidates of the relaxed solution, and pick the nearest one of each table."""
        r, known = self.relaxation, self._known(bound)
        self.add({k: [*(x for _, x in of), *(Candidate((r.tables[k].spec.num_rows,), (int(o),))
                                             for o in np.unique(r.plain[r.allowed[k]]))]
                  for k, of in enumerate(known)})
        mixed = [[(weight, x) for weight, x in of if weight > 1e-6] for of in known]
        # Parts that differ only in the class of the master copies are one candidate.
        several = {k: of for k, of in enumerate(mixed)
                   if len(of) > 1 and len(self.candidates[k]) > 1}
        self.add({k: crossings(self.candidates[k][0], self.candidates[k][1], 12)
                  for k in several})
        self._add_mixtures(several)

    def _known(self, bound: Bound) -> list[list[tuple[float, Candidate]]]:
        """For each table, the tiers of the widest piece of configurations of the pool, with their
        weights in the relaxed solution: those with the largest weights, then the cheapest."""
        pool, r = bound.pool, self.relaxation
        priced = np.array(pool.resources) @ bound.prices if pool.resources else np.zeros(0)
        found: list[list[tuple[float, Candidate]]] = [[] for _ in r.tables]
        for n in np.lexsort((priced, -pool.weight)).tolist():
            of, edges = found[pool.table[n]], r.tables[pool.table[n]].edges
            if len(of) < _POOL:
                widest = max(pool.configuration[n], key=lambda p: p.share)
                tiers = zip(edges[1:].tolist(), r.plain[widest.choice].tolist(), strict=True)
                of.append((float(pool.weight[n]), _merged(tiers)))
        return found

    def _add_mixtures(self, parts: Mapping[int, list[tuple[float, Candidate]]]) -> None:
        """Add and pick, for each table, the candidate whose consumption is closest to the relaxed
        solution's mixture, given as weights and candidates. If two candidates of the mixture differ
        only in rows of equal hotness, it is equal."""
        before = {k: len(self.candidates[k]) for k in parts}
        self.add({k: _mixed(of) for k, of in parts.items()})
        for k, of in parts.items():
            at = [self.candidates[k].index(_simplified(self.relaxation.tables[k], x))
                  for _, x in of]
            weight = np.array([x for x, _ in of])
            wanted = weight @ self.resources[k][at] / weight.sum()
            new = self.resources[k][before[k]:]
            if len(new):
                self.pick[k] = before[k] + int(np.abs(new - wanted).sum(axis=1).argmin())

    def add(self, found: Mapping[int, Iterable[Candidate]]) -> None:
        """Add candidates of some tables, reduced to `MAX_REPLICATED` tiers."""
        tables = self.relaxation.tables
        new: dict[int, list[Candidate]] = {}
        for k, candidates in found.items():
            known = set(self.candidates[k])
            some = dict.fromkeys(_simplified(tables[k], x) for x in candidates)
            if fresh := [x for x in some if x not in known]:
                new[k] = fresh
        if not new:
            return
        of = np.repeat(list(new), [len(x) for x in new.values()])
        amount = np.concatenate([self._amount(tables[k], x) for k, x in new.items()])
        rows = self.node.resources_at(amount, of, self.node.kinds(amount, of, self.prices))
        r, every = self.relaxation, [x for fresh in new.values() for x in fresh]
        pushes = np.array([r.pushes[list(x.options)].any() for x in every], bool)[:, None]
        several = np.array([len(x.stops) > 1 for x in every], bool)[:, None]
        rows += several * np.where(pushes, r.tiers_pushed[of], r.tiers[of])
        begin = 0
        for k, fresh in new.items():
            at = slice(begin, begin + len(fresh))
            begin = at.stop
            self.candidates[k] = self.candidates[k] + fresh
            self.resources[k] = np.concatenate([self.resources[k], rows[at]])
            self.amounts[k] = np.concatenate([self.amounts[k], amount[at]])

    def add_thresholds(self, count: int) -> None:
        """Add candidates that replicate the hottest rows, pull the next, and push the rest.

        Boundaries lie on a grid that gives about `count` candidates over all tables.
        """
        options = self.relaxation.options
        kinds = {kind: [o for o, x in enumerate(options)
                        if x.kind == kind and self.relaxation.plain[o] == o]
                 for kind in (REPLICATED, SHARD, PUSH)}
        kinds[REPLICATED] += [o for o, x in enumerate(options) if x.kind == COPIES]
        chains = list(product(*(k or [-1] for k in kinds.values())))
        per_table = count / max(1, len(self.candidates)) / len(chains)
        every: dict[int, list[Candidate]] = {}
        for k, t in enumerate(self.relaxation.tables):
            grid = np.linspace(0, t.edges.size - 1, max(3, round(np.sqrt(2 * per_table))))
            end, cold = self._in_host(k)
            edges = sorted({min(int(t.edges[n]), end) for n in np.rint(grid).astype(np.int64)})
            found = []
            for chain, low, high in product(chains, edges, edges):
                stops = (low, high, end, t.spec.num_rows)
                begins = (0, low, high, end)
                tiers = [(s, o) for p, s, o in zip(begins, stops, (*chain, cold), strict=True)
                         if s > p]
                if low <= high and all(o >= 0 and self.relaxation.allowed[k, o] for _, o in tiers):
                    found.append(Candidate(tuple(s for s, _ in tiers), tuple(o for _, o in tiers)))
            every[k] = found
        self.add(every)

    def _in_host(self, k: int) -> tuple[int, int]:
        """The first row of table `k` that its chosen candidate holds in host memory, and the option
        of these rows; if there are none, the end of the table and its last option."""
        candidate = self.candidates[k][self.pick[k]]
        last = candidate.options[-1]
        if self.relaxation.options[last].kind != HOST:
            return candidate.stops[-1], last
        return (candidate.stops[-2] if len(candidate.stops) > 1 else 0), last

    def _amount(self, t: TableProblem, candidates: list[Candidate]) -> np.ndarray:
        """Features of the rows that each candidate of table `t` gives each option; float64 [N, O,
        4]."""
        tiers = max(len(r.stops) for r in candidates)
        ends = np.zeros((len(candidates), tiers + 1))
        options = np.zeros((len(candidates), tiers), np.int64)
        for n, r in enumerate(candidates):  # padded with empty tiers
            ends[n, 1:] = r.stops + (r.stops[-1],) * (tiers - len(r.stops))
            options[n, :len(r.stops)] = r.options
        out = np.zeros((len(candidates), len(self.relaxation.options), NUM_FEATURES))
        features = np.diff(t.prefix(ends), axis=2)  # [4, N, tiers]
        np.add.at(out, (np.arange(len(candidates))[:, None], options), np.moveaxis(features, 0, 2))
        return out

    def scores(self, totals: np.ndarray) -> np.ndarray:
        """Step (us) at total consumptions (float64 [N, R]), with a penalty for memory overflow."""
        times = np.stack([np.maximum((totals[:, rows] / weight).max(axis=1), 0.0)
                          for rows, weight in self._phases], axis=1)
        step = self.relaxation.fixed_us + times.sum(axis=1)
        over = np.maximum(totals[:, self.relaxation.phase_of == -1] - self.full, 0.0).sum(axis=1)
        # The mean of the rows breaks ties among candidates with equal phase times.
        return step * (1.0 + _OVERFLOW * over) + 1e-7 * totals.mean(axis=1)

    @property
    def score(self) -> float:
        """Score of the chosen candidates."""
        return float(self.scores(self.total[None])[0])

    def choose(self, k: int) -> bool:
        """Pick the best candidate of table `k` given all other tables' choices; returns whether the
        score decreased."""
        totals = self._totals(k)
        scores = self.scores(totals)
        best = int(scores.argmin())
        if scores[best] >= scores[self.pick[k]] - 1e-12 * abs(scores[best]):
            return False
        self.pick[k], self.total = best, totals[best]
        return True

    def _totals(self, k: int) -> np.ndarray:
        """Total consumption with each candidate of table `k`; float64 [N, R]."""
        return np.asarray(self.total - self.resources[k][self.pick[k]] + self.resources[k])

    def descend(self, rng: np.random.Generator, target: float) -> None:
        """Coordinate descent over tables, until a sweep improves nothing, the score is at most
        `target` microseconds, or the limit of sweeps is reached."""
        for _ in range(_SWEEPS):
            if self.score <= target:
                return
            if not sum([self.choose(int(k)) for k in rng.permutation(len(self.candidates))]):
                return

    def refine(self, rng: np.random.Generator, target: float) -> None:
        """Coordinate descent over tier boundaries between those of good candidates, on a grid that
        gets finer each round, until the score is at most `target` microseconds or hardly falls."""
        for _ in range(_REFINEMENTS):
            before = self.score
            if before <= target:
                return
            # Only the tables whose candidates differ most in their consumption are refined.
            spread = np.array([np.ptp(r, axis=0).sum() for r in self.resources])
            for k in np.argsort(-spread)[:64].tolist():
                current = self.candidates[k][self.pick[k]]
                near = np.argsort(self.scores(self._totals(k)))[:4]
                self.add({k: [c for n in near.tolist() if n != self.pick[k]
                              for c in crossings(current, self.candidates[k][n], 6)]})
                self.choose(k)
            self.descend(rng, target)
            if self.score > before * (1 - 1e-5):
                return

    def simplify(self, limit: float) -> None:
        """Pick candidates with fewer tiers where the score stays at most `limit` microseconds.

        Ties are common, and every tier costs the runtime a branch.
        """
        limit = max(limit, self.score * (1 + 1e-6))
        for k, candidates in enumerate(self.candidates):
            size = np.array([len(r.stops) for r in candidates])
            totals = self._totals(k)
            scores = self.scores(totals)
            order = np.lexsort((scores, size))
            best = int(order[scores[order] <= limit][0])
            if size[best] < size[self.pick[k]]:
                self.pick[k], self.total = best, totals[best]

    def chosen(self) -> list[Candidate]:
        """The chosen candidate of each table."""
        return [r[p] for r, p in zip(self.candidates, self.pick, strict=True)]


def _mixed(parts: list[tuple[float, Candidate]]) -> list[Candidate]:
    """Return up to four mixtures of candidates of one table: rows that the candidates place
    differently are divided among them in the shares of their weights. The mixtures differ in which
    candidate gets the hotter of these rows, see `at_share`."""
    (rest, first), *others = parts
    mixed = [first]
    for weight, candidate in others:
        rest += weight
        part = weight / rest
        mixed = [m for first in mixed[:2] for m in (at_share(first, candidate, 1 - part),
                                                    at_share(candidate, first, part))]
    return mixed


def at_share(first: Candidate, second: Candidate, share: float) -> Candidate:
    """The candidate that equals `first` for the hottest `share` of the rows in which both differ,
    and `second` for the others."""
    differ = _differing(first, second)
    left = share * sum(b - a for a, b in differ)
    for a, b in differ:
        if left <= b - a:
            return join(first, second, a + round(left))
        left -= b - a
    return first


def _differing(first: Candidate, second: Candidate) -> list[tuple[int, int]]:
    """Ranges of rows that two candidates place differently."""
    cuts = sorted({0, *first.stops, *second.stops})
    return [(a, b) for a, b in pairwise(cuts) if first.option_at(a) != second.option_at(a)]


def crossings(first: Candidate, second: Candidate, count: int) -> list[Candidate]:
    """Candidates that change from one of the two to the other at one position, for about `count`
    evenly and `count` geometrically spaced positions."""
    differ = _differing(first, second)
    if not differ:
        return []
    low, high = differ[0][0], differ[-1][1]
    even = np.linspace(low, high, count + 2)[1:-1]
    geometric = np.geomspace(low + 1, high + 1, count + 2)[1:-1] - 1
    positions = sorted({int(p) for p in (*even, *geometric) if low < int(p) < high})
    return ([join(first, second, p) for p in positions]
            + [join(second, first, p) for p in positions])


def _simplified(t: TableProblem, candidate: Candidate) -> Candidate:
    """`candidate` with at most MAX_REPLICATED tiers: the smallest tiers join a neighbour."""
    while len(candidate.stops) > MAX_REPLICATED:
        rows = np.diff(t.prefix(np.array([0, *candidate.stops], float))[ROWS])
        k, options = int(rows.argmin()), list(candidate.options)
        options[k] = options[k - 1] if k else options[1]
        candidate = _merged(zip(candidate.stops, options, strict=True))
    return candidate
