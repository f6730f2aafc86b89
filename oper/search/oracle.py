"""Slow, readable statements of the same problems, to hold the fast ones against in tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from oper.errors import InvalidInputError, MissingDependencyError, OperError, fail
from oper.plan import Piece, Tier
from oper.search.cost import HELD, PARTIALS, CostModel, Tally
from oper.search.machine import GROUPS
from oper.search.owner_rows import PUSH
from oper.search.placing import table_tally
from oper.search.problem import IDS, TableProblem
from oper.search.relax import Relaxation


def relaxed_by_cvxpy(relaxation: Relaxation) -> float:
    """The relaxation over blocks as one linear program, stated in cvxpy; microseconds.

    Every block divides itself over the options. Partial sums of pushed blocks enter by their chord,
    which lies below them, so that this optimum never exceeds the column-generation one, and equals
    it where nothing may be pushed.

    Raises:
        MissingDependencyError: cvxpy is not installed.
        OperError: the solver found no optimum.
    """
    try:
        import cvxpy as cp
    except ImportError:
        raise MissingDependencyError(fail("the readable statement needs cvxpy", "module", "cvxpy",
                                          "installed", "pip install 'oper[plan]'")) from None
    num_phases = int(relaxation.phase_of.max()) + 1
    num_blocks, num_options = relaxation.features.shape[0], len(relaxation.options)
    share = cp.Variable((num_blocks, num_options), nonneg=True)
    phase_time = cp.Variable(num_phases, nonneg=True)
    cost = np.einsum("bf,bofr->bor", relaxation.features,
                     relaxation.coefficients[relaxation.table_of])
    cost += _chords(relaxation)
    load = [relaxation.base[r] + cp.sum(cp.multiply(cost[:, :, r], share))
            for r in range(relaxation.num_rows)]
    constraints = [cp.sum(share, axis=1) == 1,
                   share <= relaxation.allowed[relaxation.table_of].astype(float)]
    for row, phase in enumerate(relaxation.phase_of.tolist()):
        constraints.append(load[row] <= (1.0 if phase < 0 else phase_time[phase]))
    problem = cp.Problem(cp.Minimize(cp.sum(phase_time) + relaxation.fixed_us), constraints)
    problem.solve(solver=cp.HIGHS)
    if problem.status != cp.OPTIMAL:
        raise OperError(fail("the relaxation has no optimum", "status", problem.status, "optimal",
                             "check that the tables fit"))
    return float(problem.value)


def _chords(relaxation: Relaxation) -> np.ndarray:
    """Partial sums by their chord: bytes of the whole table's times each block's share of mass."""
    out = np.zeros((relaxation.features.shape[0], len(relaxation.options), relaxation.num_rows))
    for o, option in enumerate(relaxation.options):
        if option.kind == PUSH:
            for k, t in enumerate(relaxation.tables):
                at = slice(relaxation.starts[k], relaxation.starts[k + 1])
                ids = relaxation.features[at, IDS]
                whole = relaxation.model.partial_bytes(t, t.spec.dim, ids.sum())
                out[at, o] = np.outer(ids / max(ids.sum(), 1e-300) * whole,
                                      relaxation.unit[option.rank_class, PARTIALS])
    return out


def best_of_candidates(
    relaxation: Relaxation, candidates: Sequence[Sequence[tuple[Tier, ...]]]
) -> tuple[float, list[int]]:
    """The best plan that gives each table one of its candidates, by mixed-integer programming.

    Args:
        relaxation: names the problem's free tables.
        candidates: per table, the tier lists to choose from (pulled or replicated on all ranks, so
            that tallies add up).

    Returns:
        The step (us) and the candidate chosen for each table.

    Raises:
        InvalidInputError: a candidate is pushed or replicated on some of the ranks.
        OperError: no choice fits.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    model = relaxation.model
    pairs = [(k, c) for k, tiers in enumerate(candidates) for c in range(len(tiers))]
    tallies = [_tally(model, relaxation.tables[k], candidates[k][c]) for k, c in pairs]
    if any(x.num_pushed or x.partial_replicas for x in tallies):
        raise InvalidInputError(fail("cannot solve exactly", "candidates",
                                     "pushed or partly replicated",
                                     "pulled or replicated on all ranks", "leave them out"))
    num_phases = len(model.phases)
    base_time, base_held = _rank_rows(model, relaxation.base_tally)
    hidden = np.repeat(model.hidden[:, None] * 1e6, len(GROUPS), axis=1)
    base_time = base_time - hidden.reshape(num_phases, -1)
    columns = [_rank_rows(model, x) for x in tallies]
    time = np.stack([c[0] for c in columns], axis=-1)  # [phases, groups * W, N]
    held = np.stack([c[1] for c in columns], axis=-1)  # [num_domains, N]
    capacity = np.maximum(model.machine.capacity_bytes, 1.0)
    constraints = []
    for phase in range(num_phases):
        minus = np.zeros((time.shape[1], num_phases))
        minus[:, phase] = -1.0
        constraints.append(LinearConstraint(np.hstack([time[phase], minus]), -np.inf,
                                            -base_time[phase]))
    none = np.zeros((held.shape[0], num_phases))
    constraints.append(LinearConstraint(np.hstack([held / capacity[:, None], none]), -np.inf,
                                        1.0 - base_held / capacity))
    one = np.zeros((len(candidates), len(pairs) + num_phases))
    one[[k for k, _ in pairs], range(len(pairs))] = 1.0
    constraints.append(LinearConstraint(one, 1.0, 1.0))
    cost = np.concatenate([np.zeros(len(pairs)), np.ones(num_phases)])
    upper = np.concatenate([np.ones(len(pairs)), np.full(num_phases, np.inf)])
    integrality = np.concatenate([np.ones(len(pairs)), np.zeros(num_phases)])
    found = milp(cost, constraints=constraints, bounds=Bounds(0.0, upper), integrality=integrality,
                 options={"mip_rel_gap": 0.0})
    if found.x is None:
        raise OperError(fail("no choice of candidates fits", "status", found.status, "a solution",
                             "allow more memory"))
    picks = {k: c for (k, c), x in zip(pairs, found.x, strict=False) if x > 0.5}
    return float(found.fun) + relaxation.fixed_us, [picks[k] for k in range(len(candidates))]


def _tally(model: CostModel, t: TableProblem, tiers: tuple[Tier, ...]) -> Tally:
    return table_tally(model, t, (Piece(0, t.spec.dim, tiers),))


def _rank_rows(model: CostModel, tally: Tally) -> tuple[np.ndarray, np.ndarray]:
    """Microseconds per phase of all groups and ranks [P, 5 W], and bytes per domain."""
    seconds = model.units(tally) * model.machine.seconds_per_unit * 1e6
    groups = np.concatenate([seconds[:, :2].sum(axis=1, keepdims=True), seconds[:, 2:]], axis=1)
    return groups.reshape(groups.shape[0], -1), model.machine.per_domain(tally.rows[HELD])
