"""A Markov-chain search over the entire space, a baseline for the relaxation-guided search.

FlexFlow (Jia, Zaharia, Aiken 2019) searches its SOAP space with the Metropolis-Hastings algorithm:
a proposal gives one operator another configuration, drawn at random. It is accepted if it lowers
the simulated cost, else with probability `exp(beta (old - new))`. Here an operator is a table; its
configuration consists of column pieces, tiers, placements, ranks and exchange modes; the simulator
is the cost model. The chain uses neither a bound nor the bottleneck.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np

from oper.plan import Piece, Plan, Tier
from oper.search.cost.model import CostModel, Evaluation
from oper.search.cost.space import fixed_load_vectors, table_load_vector
from oper.search.problem.pins import impose
from oper.search.problem.space import MIN_COLUMNS
from oper.search.problem.statement import Problem, TableProblem
from oper.search.rounding.placing import Placement, plan_of

_BETA = 50.0  # beta times the initial cost: an increase by 2 % of it is accepted with chance 1 / e
_OVERFLOW = 1e3  # a memory overflow x multiplies the cost by 1 + 1e3 x
_MAX_TIERS = 3
_MAX_PIECES = 4


def markov_chain(problem: Problem, seed: int, num_proposals: int) -> Plan | None:
    """Return the best plan that the chain visits, or None if no visited plan fits.

    Args:
        problem: the problem; `keep_together` and `keep_apart` are ignored.
        seed: seed of the chain; equal seeds give equal plans.
        num_proposals: number of proposals.
    """
    rng, tables = np.random.default_rng(seed), problem.free_tables
    model = CostModel(problem)
    total, _ = fixed_load_vectors(model)
    pieces = [_start(problem, t) for t in tables]
    load_vectors = [table_load_vector(model, t, x) for t, x in zip(tables, pieces, strict=True)]
    for vector in load_vectors:
        total = total.plus(vector)
    found = model.evaluation(total)
    best, least, cost = (list(pieces), found), _cost(found), _cost(found)
    beta = _BETA / max(cost, 1e-30)
    for _ in range(num_proposals if tables else 0):
        k = int(rng.integers(len(tables)))
        proposed = _proposal(problem, tables[k], rng)
        vector = table_load_vector(model, tables[k], proposed)
        after = total.plus(load_vectors[k], -1).plus(vector)
        found = model.evaluation(after)
        new = _cost(found)
        if new <= cost or rng.random() < np.exp(beta * (cost - new)):
            pieces[k], load_vectors[k], total, cost = proposed, vector, after, new
            if cost < least:
                best, least = (list(pieces), found), cost
    if not best[1].fits:
        return None
    plan = plan_of(problem, {t.spec.name: p for t, p in zip(tables, best[0], strict=True)})
    return replace(plan, step_us=best[1].step_us, notes={"constants": problem.topology.source})


def _cost(found: Evaluation) -> float:
    """The modelled step time in microseconds, with a penalty if memory overflows."""
    over = float(np.maximum(found.memory_used - 1.0, 0.0).sum())
    return found.step_us * (1.0 + _OVERFLOW * over)


def _start(problem: Problem, t: TableProblem) -> Placement:
    """The initial configuration: rows striped over the table's possible owners; if not allowed,
    owned by the first of them, else replicated. (FlexFlow starts from data parallelism.)"""
    places, owners = problem.placements_of(t.spec.name), problem.owners_of(t.spec.name)
    mode = "pull" if "pull" in problem.modes_of(t.spec.name) else "push"
    memory = min(problem.memories_of(t.spec.name))  # "device" < "host"
    if "striped" in places:
        tier = Tier(0, t.spec.num_rows, "striped", tuple(owners), mode=mode, memory=memory)
    elif "owned" in places:
        tier = Tier(0, t.spec.num_rows, "owned", (owners[0],), mode=mode, memory=memory)
    else:
        tier = Tier(0, t.spec.num_rows, "replicated", tuple(owners))
    return impose(problem.held(t.spec.name), (Piece(0, t.spec.dim, (tier,)),))


def _proposal(problem: Problem, t: TableProblem, rng: np.random.Generator) -> Placement:
    """A random configuration of one table."""
    parts = 1
    if problem.may_split(t) and t.spec.dim >= 2 * MIN_COLUMNS and rng.random() < 0.25:
        parts = int(rng.integers(2, min(_MAX_PIECES, t.spec.dim // MIN_COLUMNS) + 1))
    columns = [round(t.spec.dim * k / parts / 4) * 4 for k in range(parts)] + [t.spec.dim]
    pieces = tuple(Piece(a, b, _tiers(problem, t, rng)) for a, b in pairwise(columns))
    return impose(problem.held(t.spec.name), pieces)


def _tiers(problem: Problem, t: TableProblem, rng: np.random.Generator) -> tuple[Tier, ...]:
    inner = t.edges[1:-1]
    count = min(int(rng.integers(1, _MAX_TIERS + 1)) - 1, inner.size)
    cuts = np.sort(rng.choice(inner, count, replace=False)).tolist()
    return tuple(_tier(problem, t, rng, a, b)
                 for a, b in pairwise([0, *map(int, cuts), t.spec.num_rows]))


def _tier(problem: Problem, t: TableProblem, rng: np.random.Generator, start: int,
          stop: int) -> Tier:
    owners = problem.owners_of(t.spec.name)
    place = str(rng.choice(sorted(problem.placements_of(t.spec.name))))
    if place == "replicated":
        return Tier(start, stop, place, tuple(range(problem.machine.world_size)))
    memory = str(rng.choice(sorted(problem.memories_of(t.spec.name))))
    modes = problem.modes_of(t.spec.name) & ({"pull"} if memory == "host" else {"pull", "push"})
    if not modes:
        memory, modes = "device", problem.modes_of(t.spec.name)
    mode = str(rng.choice(sorted(modes)))
    if place == "owned":
        return Tier(start, stop, place, (int(rng.choice(owners)),), mode=mode, memory=memory)
    size = len(owners) if rng.random() < 0.5 else int(rng.integers(1, len(owners) + 1))
    return Tier(start, stop, place, tuple(int(r) for r in rng.permutation(owners)[:size]),
                mode=mode, memory=memory)
