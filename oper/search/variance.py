"""Bits of messages by table and direction, chosen under a budget of rounding variance.

The budget is a mean relative squared error. Let n_td be how many numbers of table t a step of the
plan is expected to send between hosts in direction d (answers, gradients), and N how many numbers
all ranks' distinct rows and their gradients contain, whether sent or not:

    sum over t, d of  n_td v(bits_td, width)  <=  budget N

v limits the expected squared error of rounding a row, relative to the row's squared norm, for every
row of finite numbers (`relative_variance`). Rows that stay within a host are not rounded, so the
variance depends on the placement as well as on the bits.

For a given placement, loads are linear in the choice of bits. The fastest choice within the budget
is a mixed-integer program, the one of Wan et al., "Adaptive Message Quantization and
Parallelization for Distributed Full-graph GNN Training" (MLSys 2023), with the cost model's loads:

    minimise    sum over phases p of tau_p
    subject to  base_i + sum of saved_i,tdb x_tdb <= tau_p          for each load i of p
                sum over b of x_tdb <= 1,  the budget,  x binary    (no b: 32 bits)

The planner alternates between choosing bits and placing rows, starting once from exact messages and
once from the fewest bits. The plan's bound holds for plans with its bits, as if the user had given
them. In addition, no plan whose column pieces have at least 8 columns is faster than the bound for
the fewest bits, whatever its bits, because messages with more bits are never shorter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import highspy
import numpy as np

from oper.errors import OperError, require
from oper.messages import EXACT, MessageBits, bits_of, number_bytes
from oper.plan import Plan
from oper.search.certificate.carried import proof_of, with_bound
from oper.search.cost.load_vector import GRAD_BYTES, Messages
from oper.search.cost.model import CostModel, evaluate, is_ordered
from oper.search.problem.machine import Term, by_group
from oper.search.problem.statement import TOUCHED, Problem, TableProblem

_ROUNDS = 2  # alternations of bits and placement from each start
MOST_PLANS = 2 * (1 + _ROUNDS)  # upper limit of the plans that `plan_within` makes
_MOST_NODES = 2000  # limit of the solver's branch-and-bound nodes
_SLACK = 1e-9  # relative rounding error within which the budget is satisfied


def relative_variance(bits: int, width: int) -> float:
    """Upper limit of the expected squared error of rounding a row of `width` finite numbers for a
    message, relative to the sum of their squares.

    * 16 bits: a number is off by at most 2^-8 of itself (8 significant bits, to nearest).
    * 8 or 4 bits: with a step s = (max - min) / (2^bits - 1), the squared error of a number is at
      most s^2 / 4 if rounded to nearest, and s^2 u (1 - u) <= s^2 / 4 in expectation if rounded up
      with probability u. (max - min)^2 is at most twice the sum of squares.
    """
    if bits == 32 or number_bytes(bits, width) == 4 * width:
        return 0.0
    return 2.0**-16 if bits == 16 else width / (2 * (2**bits - 1) ** 2)


class _Variance(Messages):
    """Variance in place of bytes: a message's numbers, weighted by their relative variance."""

    def answer_bytes(self, t: TableProblem, width: int) -> float:
        bits = self.bits.of(t.spec.name).answers if t.spec.dtype == "float32" else 32
        return width * relative_variance(bits, width)

    def gradient_bytes(self, t: TableProblem, width: int) -> float:
        return width * relative_variance(self.bits.of(t.spec.name).gradients, width)

    def sum_rows(self, t: TableProblem, width: int) -> np.ndarray:
        bits = self.bits.of(t.spec.name)
        return np.array([width * GRAD_BYTES, *(
            width * relative_variance(x, width) for x in (bits.answers, bits.gradients))])


def _saved(plan: Plan, model: CostModel, t: TableProblem, bits: MessageBits,
           kind: Callable[[MessageBits], Messages] = Messages) -> np.ndarray:
    """Units by phase, term and rank of a table with `bits` minus those with exact messages, whose
    sizes are given by `kind`; float64 [P, 9, W]. Changes the messages of `model`."""
    entry, found = plan.table(t.spec.name), []
    for x in (bits, EXACT):
        model.messages = kind(x)
        found.append(model.load_vector(t, entry.pieces, is_ordered(t, entry)))
    return model.units(found[0].plus(found[1], -1))


def _variance(plan: Plan, model: CostModel, t: TableProblem, bits: MessageBits) -> float:
    """Contribution of one table to `rounding_variance`. Changes the messages of `model`."""
    problem = model.problem
    sent = _saved(plan, model, t, bits, _Variance)[:, Term.CROSS_OUT].sum()
    read = sum(float(x.total[TOUCHED]) * x.spec.dim for x in problem.tables)
    read *= problem.machine.world_size * (1 + problem.training)
    return float(sent) / max(read, 1e-300)


def rounding_variance(plan: Plan, problem: Problem) -> float:
    """Upper limit of the mean relative squared error of a step's rows and gradients under the
    plan's message bits, as in the module's docstring."""
    model = CostModel(problem)
    return sum(_variance(plan, model, t, plan.message_bits.of(t.spec.name))
               for t in problem.tables if plan.message_bits.of(t.spec.name) != EXACT)


def fewest_bits(problem: Problem) -> MessageBits:
    """The bits with the shortest messages of uncut rows: 4 (8 for an odd number of columns), or 16
    for few columns."""
    def fewest(dim: int) -> int:
        return min(bits_of(dim), key=lambda bits: number_bytes(bits, dim))

    return MessageBits.parse({t.spec.name: fewest(t.spec.dim) for t in problem.tables})


def choose_bits(plan: Plan, problem: Problem, budget: float) -> MessageBits:
    """Choose the bits of every table and direction that make a placement fastest within a budget.

    The step time is within about 0.1 % of the least, unless the solver reaches its limit of nodes;
    without any solution by then, messages stay exact.

    Args:
        plan: the placement; its bits are ignored.
        problem: the problem; its bits are ignored.
        budget: upper limit of `rounding_variance`.
    """
    problem = replace(problem, message_bits=EXACT)
    model = CostModel(problem)
    phases = evaluate(replace(plan, message_bits=EXACT), problem).phases
    base = 1e6 * np.stack([by_group(p.seconds, p.has_local) - p.hidden for p in phases])
    choices, loads, variances = [], [], []
    for t in problem.tables:
        for direction in range(1 + problem.training):  # answers, gradients
            for fewer in bits_of(t.spec.dim)[1:]:
                bits = MessageBits(32, fewer) if direction else MessageBits(fewer, 32)
                saved = model.group_us(_saved(plan, model, t, bits))
                if saved.min() < 0:
                    choices.append((t.spec.name, direction, fewer))
                    loads.append(saved)
                    variances.append(_variance(plan, model, t, bits))
    if not choices:
        return EXACT
    taken = _solve(base, np.stack(loads), np.array(variances) / budget,
                   np.unique([f"{y} {x}" for x, y, _ in choices], return_inverse=True)[1])
    found = {t.spec.name: [32, 32] for t in problem.tables}
    for (name, direction, fewer), is_taken in zip(choices, taken, strict=True):
        if is_taken:
            found[name][direction] = fewer
    return MessageBits.parse(found)


def _solve(base: np.ndarray, loads: np.ndarray, variances: np.ndarray, of: np.ndarray
           ) -> np.ndarray:
    """Solve the mixed-integer program.

    Args:
        base: float64 [P, 8, W], microseconds by phase, group of terms and rank with exact messages.
        loads: float64 [N, P, 8, W], change of `base` by each choice, <= 0.
        variances: float64 [N], of each choice, relative to the budget.
        of: int64 [N], table and direction of each choice.

    Returns:
        bool [N], the choices taken.
    """
    number, num_phases, inf = len(loads), len(base), highspy.kHighsInf
    rows, limits = [], []  # loads + base <= time of the phase
    for p in range(num_phases):
        each = np.concatenate([loads[:, p].reshape(number, -1).T, base[p].reshape(-1, 1)], axis=1)
        # Loads that are always below another one of the phase determine nothing.
        least = each[:, -1] + each[:, :-1].sum(axis=1)
        for load in np.unique(each[each[:, -1] > max(0.0, least.max())], axis=0):
            rows.append(np.concatenate([load[:-1], -np.eye(num_phases)[p]]))
            limits.append(-load[-1])
    none = np.zeros(num_phases)
    rows += [np.concatenate([of == k, none]) for k in range(of.max() + 1)]
    limits += [1.0] * (of.max() + 1)
    rows.append(np.concatenate([variances, none]))
    limits.append(1.0 - 1e-6)  # the solver's feasibility tolerance
    # Of equally fast choices, the most precise.
    scale = max(float(np.maximum(base, 0.0).max(axis=(1, 2)).sum()), 1e-12)
    cost = np.concatenate([1e-5 * variances, np.full(num_phases, 1 / scale)])
    least_us = np.maximum((base + loads.sum(axis=0)).max(axis=(1, 2)), 0.0)
    highs = highspy.Highs()
    for name, value in (("output_flag", False), ("threads", 1), ("random_seed", 0),
                        ("mip_rel_gap", 1e-3), ("mip_max_nodes", _MOST_NODES)):
        if highs.setOptionValue(name, value) != highspy.HighsStatus.kOk:
            raise OperError("the solver refuses an option", name, value, "accepted",
                            "install the release of highspy that this package requires")
    for k in range(number):
        highs.addCol(float(cost[k]), 0.0, 1.0, 0, np.zeros(0, np.int32), np.zeros(0))
        highs.changeColIntegrality(k, highspy.HighsVarType.kInteger)
    for k in range(num_phases):
        highs.addCol(float(cost[number + k]), float(least_us[k]), inf, 0, np.zeros(0, np.int32),
                     np.zeros(0))
    for row, limit in zip(rows, limits, strict=True):
        at = np.flatnonzero(row).astype(np.int32)
        highs.addRow(-inf, float(limit), at.size, at, np.asarray(row[at], float))
    highs.run()
    values = np.array(highs.getSolution().col_value)[:number]
    taken = values > 0.5
    # Without a solution within the nodes, messages stay exact.
    if values.size < number or variances[taken].sum() > 1 + _SLACK:
        return np.zeros(number, bool)
    return np.asarray(taken)


def plan_within(problem: Problem, budget: float,
                make: Callable[[Problem, Plan | None], Plan]) -> Plan:
    """Place the rows of a problem and choose the bits of messages within a budget.

    Args:
        problem: the problem; its bits are ignored.
        budget: upper limit of `rounding_variance`, > 0.
        make: returns a plan with a bound for (problem with its bits, plan to start from or None).

    Returns:
        The plan. Its notes have under ``"message_variance"`` the budget, the variance used, and
        `any_bits_us`, the bound for plans with any bits and pieces of at least 8 columns.

    Raises:
        InvalidInputError: the budget is not a positive number.
        PlanInfeasibleError: no plan fits.
    """
    is_right = isinstance(budget, int | float) and 0 < budget < np.inf
    require("cannot choose the bits of messages", "pass for example 1e-5",
            ("message_variance", budget, is_right, "a number > 0"))
    made: dict[MessageBits, Plan] = {}

    def planned(bits: MessageBits, start: Plan | None = None) -> Plan:
        if bits not in made:
            made[bits] = make(replace(problem, message_bits=bits), start)
        return made[bits]

    fewest = fewest_bits(problem)
    best: Plan | None = None
    for start in (EXACT, fewest):
        plan = planned(start)
        for _ in range(_ROUNDS):
            bits = choose_bits(plan, problem, budget)
            plan = replace(plan, message_bits=bits, lower_bound_us=0.0, step_us=evaluate(
                replace(plan, message_bits=bits), replace(problem, message_bits=bits)).step_us)
            if best is None or plan.step_us < best.step_us:
                best = plan
            if bits in made:
                break
            plan = planned(bits, plan)
    assert best is not None
    proved = planned(best.message_bits, best)
    # Planning may have allowed the features of `Problem.fallback`.
    stated = replace(problem, message_bits=best.message_bits,
                     allow=frozenset(proved.notes["allow"]))
    if proved.step_us <= best.step_us and (
            rounding_variance(proved, stated) <= budget * (1 + _SLACK)):
        best = proved
    else:  # keep the earlier placement: the new one exceeds the budget or is slower
        best = with_bound(replace(proved, tables=best.tables, step_us=best.step_us), stated,
                          min(proved.lower_bound_us, best.step_us), proof_of(proved))
    return replace(best, notes={**best.notes, "message_variance": {
        "budget": budget, "used": rounding_variance(best, stated),
        "any_bits_us": min(made[fewest].lower_bound_us, best.step_us)}})
