"""Slow, readable formulations of the planner's problems, against which the fast ones are tested."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import cvxpy as cp
import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from oper.plan import Piece, Tier
from oper.search.cost.load_vector import LoadVector, Row
from oper.search.cost.model import CostModel
from oper.search.cost.space import PUSH, table_load_vector
from oper.search.problem.machine import GROUPS
from oper.search.problem.statement import IDS, TableProblem
from oper.search.relaxation.relaxation import Relaxation
from oper.search.rounding.placing import Placement


def relaxed_by_cvxpy(relaxation: Relaxation) -> float:
    """The relaxation over blocks as one linear program, stated in cvxpy; microseconds.

    Every block divides itself over the options. Partial sums of pushed blocks enter by their chord,
    which lies below them, so that this optimum never exceeds the column-generation one, and equals
    it where nothing may be pushed.
    """
    num_phases = int(relaxation.phase_of.max()) + 1
    num_blocks, num_options = relaxation.features.shape[0], len(relaxation.options)
    share = cp.Variable((num_blocks, num_options), nonneg=True)
    phase_time = cp.Variable(num_phases, nonneg=True)
    cost = np.einsum("bf,bofr->bor", relaxation.features,
                     relaxation.coefficients[relaxation.table_of])
    cost = np.stack([relaxation.by_option(x) for x in np.moveaxis(cost, -1, 0)], axis=-1)
    cost += _chords(relaxation)
    load = [relaxation.base[r] + cp.sum(cp.multiply(cost[:, :, r], share))
            for r in range(relaxation.num_rows)]
    constraints = [cp.sum(share, axis=1) == 1,
                   share <= relaxation.allowed[relaxation.table_of].astype(float)]
    for row, phase in enumerate(relaxation.phase_of.tolist()):
        constraints.append(load[row] <= (1.0 if phase < 0 else phase_time[phase]))
    problem = cp.Problem(cp.Minimize(cp.sum(phase_time) + relaxation.fixed_us), constraints)
    problem.solve(solver=cp.HIGHS)
    assert problem.status == cp.OPTIMAL
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
                                      relaxation.of_sums[k, option.rank_class])
    return out


def some_placements(t: TableProblem, world: int, seed: int, count: int = 40) -> list[Placement]:
    """Placements of one table drawn from many: whole or in two column pieces, in one tier or two,
    of all kinds and owners."""
    rows, dim = t.spec.num_rows, t.spec.dim
    everyone = tuple(range(world))
    every = [Tier(0, rows, "replicated", everyone), Tier(0, rows, "striped", everyone),
             Tier(0, rows, "striped", everyone, (3, *(1,) * (world - 1)))]
    if world > 2:
        every.append(Tier(0, rows, "replicated", everyone[:-1]))
    for mode in ("pull", "push"):
        every += [Tier(0, rows, "owned", (r,), mode=mode) for r in everyone]
        every += [Tier(0, rows, "striped", pair, mode=mode)
                  for pair in combinations(everyone, 2)]
    out = [(Piece(0, dim, (tier,)),) for tier in every]
    edges = [e for e in t.edges[1:-1].tolist() if e][::8]
    for cut in edges:
        hot = Tier(0, cut, "replicated", everyone)
        out += [(Piece(0, dim, (hot, replace(tier, start=cut))),) for tier in every[1:]]
    if dim >= 16:
        owned = [tier for tier in every if tier.placement == "owned"]
        out += [(Piece(0, dim // 2, (a,)), Piece(dim // 2, dim, (b,)))
                for a in owned for b in owned if a.ranks != b.ranks]
    return [out[i] for i in np.random.default_rng(seed).permutation(len(out))[:count]]


def best_of_candidates(relaxation: Relaxation, candidates: Sequence[Sequence[Placement]]
                       ) -> tuple[float, list[int]]:
    """The best plan that gives each table one of its candidates, by mixed-integer programming.

    Everything about a plan adds up over its tables but for two barriers, which whoever pushes, or
    splits columns under a row-wise optimizer, pays once: a binary variable each.

    Args:
        relaxation: names the problem's free tables.
        candidates: per table, the placements to choose from.

    Returns:
        The step (us) and the candidate chosen for each table.
    """
    model = relaxation.model
    pairs = [(k, c) for k, placements in enumerate(candidates) for c in range(len(placements))]
    load_vectors = [table_load_vector(model, relaxation.tables[k], candidates[k][c])
                    for k, c in pairs]
    num_phases, size = len(model.phases), len(pairs)
    base_time, base_held = _rank_rows(model, relaxation.base_load_vector)
    hidden = np.repeat(model.hidden[:, None] * 1e6, len(GROUPS), axis=1)
    base_time = base_time - hidden.reshape(num_phases, -1)
    columns = [_rank_rows(model, x) for x in load_vectors]
    time = np.stack([c[0] for c in columns], axis=-1)  # [phases, groups * W, N]
    held = np.stack([c[1] for c in columns], axis=-1)  # [domains + hosts, N]
    capacity = np.maximum(np.concatenate([model.machine.capacity_bytes,
                                          model.machine.host_capacity_bytes]), 1.0)
    # Variables: a choice per pair, a time per phase, the two barriers.
    width = size + num_phases + 2
    constraints = []
    for phase in range(num_phases):
        rows = np.zeros((time.shape[1], width))
        rows[:, :size], rows[:, size + phase] = time[phase], -1.0
        constraints.append(LinearConstraint(rows, -np.inf, -base_time[phase]))
    rows = np.zeros((held.shape[0], width))
    rows[:, :size] = held / capacity[:, None]
    constraints.append(LinearConstraint(rows, -np.inf, 1.0 - base_held / capacity))
    one = np.zeros((len(candidates), width))
    one[[k for k, _ in pairs], range(size)] = 1.0
    constraints.append(LinearConstraint(one, 1.0, 1.0))
    base = relaxation.base_load_vector
    for n, pays in enumerate(([x.num_pushed > 0 for x in load_vectors],
                              [x.num_split > 0 for x in load_vectors])):
        rows = np.zeros((sum(pays), width))
        rows[range(sum(pays)), np.flatnonzero(pays)] = 1.0
        rows[:, size + num_phases + n] = -1.0
        if rows.size:
            constraints.append(LinearConstraint(rows, -np.inf, 0.0))
    barrier = np.array([model.push_us * (not base.num_pushed),
                        model.costs.phase_us * (not base.num_split)])
    cost = np.concatenate([np.zeros(size), np.ones(num_phases), barrier])
    upper = np.concatenate([np.ones(size), np.full(num_phases, np.inf), np.ones(2)])
    integrality = np.concatenate([np.ones(size), np.zeros(num_phases), np.ones(2)])
    found = milp(cost, constraints=constraints, bounds=Bounds(0.0, upper), integrality=integrality,
                 options={"mip_rel_gap": 0.0})
    assert found.x is not None, "no choice of candidates fits"
    picks = {k: c for (k, c), x in zip(pairs, found.x, strict=False) if x > 0.5}
    return float(found.fun) + relaxation.fixed_us, [picks[k] for k in range(len(candidates))]


def _rank_rows(model: CostModel, vector: LoadVector) -> tuple[np.ndarray, np.ndarray]:
    """Microseconds per phase of all groups and ranks [P, 5 W], and bytes per domain and host."""
    groups = model.group_us(model.units(vector))
    held = np.concatenate([model.machine.per_domain(vector.rows[Row.HELD]),
                           model.machine.per_host(vector.rows[Row.HOST_HELD])])
    return groups.reshape(groups.shape[0], -1), held
