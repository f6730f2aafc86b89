"""The checker of a plan's bound, which reads the proof in the plan file.

A proof has parts, each for some kinds of plans (`oper.search.problem.space.PLANS`), and each part
has a tree. An inner node divides its plans in two: by whether the largest load that a pushed piece
puts on its owner is below a value, or by whether a table pushes rows. A leaf has prices, from which
a lower bound of its plans follows. So no plan is faster than the smaller of two values: the least
bound of all leaves, and the cutoff, a known step (leaves bound only plans below the cutoff).

The checker uses nothing of the search or of its relaxation. That the branchings cover all plans
follows from their form, and the bound of every leaf is recomputed from the problem statement and
the cost model (`oper.search.certificate.leaf`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from oper.plan import Plan
from oper.search.certificate.carried import ROUNDING, as_bounded, not_certified, proof_of
from oper.search.certificate.leaf import Checker
from oper.search.certificate.loads import PIECE_GROUPS
from oper.search.certificate.prices import (
    APART,
    FREE,
    OWNER_INEQUALITIES,
    PUSHES,
    SPREAD,
    STILL as PUSHES_NOTHING,
    Leaf,
)
from oper.search.cost.model import CostModel, evaluate
from oper.search.cost.space import hosts_are_interchangeable, may_rest, restricted, splits_pay
from oper.search.problem.machine import GROUPS, neighbourhoods
from oper.search.problem.space import PLANS, STILL, WITH_COLUMNS, WITH_ROWS
from oper.search.problem.statement import Problem


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of checking a plan's bound.

    Attributes:
        certified: whether the bound stored in the plan holds.
        why: the reason if it does not hold, else "".
        step_us: the plan's modelled step time, evaluated again.
        bound_us: the least bound of all leaves; NaN if it was not computed.
        cutoff_us: step time of a known plan, if leaves bound only faster plans; else infinite.
        num_leaves: number of leaves of all trees.
    """

    certified: bool
    why: str
    step_us: float
    bound_us: float = math.nan
    cutoff_us: float = math.inf
    num_leaves: int = 0

    @property
    def lower_bound_us(self) -> float:
        """min(bound_us, cutoff_us): no plan of the space is faster. NaN if nothing was proved."""
        return min(self.bound_us, self.cutoff_us)

    @property
    def gap(self) -> float:
        """(step time - bound) / bound, from the values computed here; NaN if not certified."""
        if not self.certified:
            return math.nan
        return max(0.0, self.step_us / self.lower_bound_us - 1.0)


class _ProofError(Exception):
    """The proof does not show the plan's bound; the message is the reason."""


def verify_plan(plan: Plan, problem: Problem) -> Verdict:
    """Check the proof in a plan and return the verdict.

    Args:
        plan: a plan, as made or as read from its file.
        problem: the problem that the plan is for, with the same tables, statistics, machine, batch
            size, space, constraints, overlap and message bits (`oper.search.make_problem`).

    Returns:
        The verdict. It is negative, with the reason in `why`, if the plan was edited, if the proof
        is incomplete or for another problem, or if the plan is outside the space of the bound.

    Raises:
        PlanError: the plan is for other tables or another number of ranks.
    """
    problem = as_bounded(plan, problem)
    step_us, proof = evaluate(plan, problem).step_us, proof_of(plan)
    why = not_certified(plan, problem)
    if not why and "parts" not in proof:
        why = "the plan stores no proof: plan again with this release"
    if not why and not math.isclose(plan.step_us, step_us, rel_tol=ROUNDING):
        why = (f"the file states a step of {plan.step_us:.6g} us, but its placement takes "
               f"{step_us:.6g} us")
    if why:
        return Verdict(False, why, step_us)
    try:
        checked = Proof(problem, proof)
        bounds = [bound for part in proof["parts"] for bound in checked.part(part)]
        checked.check_all_plans()
    except _ProofError as hole:
        return Verdict(False, str(hole), step_us)
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        return Verdict(False, f"the proof cannot be read: {type(error).__name__}: {error}", step_us)
    out = Verdict(True, "", step_us, min(bounds, default=math.inf), checked.cutoff_us, len(bounds))
    lower_us = out.lower_bound_us
    if not lower_us >= plan.lower_bound_us * (1 - ROUNDING):
        why = (f"the file states a bound of {plan.lower_bound_us:.6g} us, but its prices prove "
               f"only {lower_us:.6g} us")
    elif lower_us > step_us * (1 + ROUNDING):
        why = (f"the bound of {lower_us:.6g} us is above the step of {step_us:.6g} us: an error of "
               "the planner or of this checker, please report it")
    return replace(out, certified=not why, why=why)


class Proof:
    """A proof that is being checked.

    Args:
        problem: the problem that the proof is for.
        value: the proof, as in the plan file.

    Attributes:
        covered: the kinds of plans (`PLANS`) whose bounds were checked so far.
        cutoff_us: the cutoff of the proof, microseconds; infinite if it has none.
    """

    def __init__(self, problem: Problem, value: dict[str, Any]) -> None:
        self.problem, self.model = problem, CostModel(problem)
        self.covered: set[str] = set()
        cutoff_us = value["cutoff_us"]
        self.cutoff_us = math.inf if cutoff_us is None else float(cutoff_us)
        if math.isnan(self.cutoff_us):  # every comparison with NaN is false, whatever its direction
            raise _ProofError("the cutoff of the proof is not a number")

    def part(self, value: dict[str, Any]) -> Iterator[float]:
        """Yield the recomputed bound of each leaf of a part, microseconds."""
        plans = {str(x) for x in value["plans"]}
        if not plans or not plans <= set(PLANS):
            raise _ProofError(f"a part of the proof is for the kinds of plans {sorted(plans)}, but "
                              f"the kinds are {list(PLANS)}: plan again with this release")
        if STILL in plans and len(plans) > 1 and "per_host" in self.problem.allow:
            raise _ProofError("one part of the proof is for plans that push nothing and plans "
                              "that push, but with copies per host these need separate parts")
        apart = None if value["apart"] is None else self._apart(value["apart"])
        checker = Checker(CostModel(restricted(self.problem, plans)), apart)
        self.covered |= plans
        base, names = checker.base, [t.spec.name for t in checker.tables]
        rows = self.model.push_us * (not base.num_pushed)
        cut = self.model.split_us * (splits_pay(self.problem) and not base.num_split)
        barriers = {STILL: 0.0, WITH_ROWS: rows, WITH_COLUMNS: rows + cut}
        fixed_us = sum(self.model.fixed_us(base)) + (
            min(barriers[x] for x in plans) * bool(names))
        shape = len(self.model.phases), PIECE_GROUPS
        root = Leaf(np.zeros(shape), np.full(shape, np.inf), self.cutoff_us - fixed_us,
                    np.zeros(len(names), np.uint8), np.zeros_like(checker.visible))
        for below, leaf in self._leaves(value["tree"], root, names):
            yield checker.bound(self._priced(below, leaf, checker, value["rows"]), fixed_us)

    def check_all_plans(self) -> None:
        """Raise `_ProofError` unless the parts contain all plans of the space."""
        allow = self.problem.allow
        may_push = {WITH_ROWS: "push" in allow, WITH_COLUMNS: {"push", "columns"} <= allow}
        needed = {x for x, may in may_push.items() if may}
        if all(may_rest(self.problem, t.spec.name) for t in self.problem.free_tables):
            needed.add(STILL)
        if needed - self.covered:
            raise _ProofError("no part of the proof bounds plans with "
                            f"{sorted(needed - self.covered)}")

    def _load(self, value: Sequence[str]) -> tuple[int, int]:
        phase, group = value
        return self.model.phases.index(phase), GROUPS.index(group)

    def _apart(self, value: Sequence[str]) -> tuple[int, int]:
        """The load (phase, group) whose largest piece determines the distinguished host (on a
        single host: memory domain). Raises unless hosts are interchangeable, which allows the
        first one to be taken without loss of generality."""
        load = self._load(value)
        if (GROUPS[load[1]] != neighbourhoods(self.problem.machine)[1]
                or not hosts_are_interchangeable(self.model)):
            raise _ProofError("the proof assumes interchangeable hosts, and they are not")
        return load

    def _leaves(self, value: dict[str, Any], at: Leaf, names: list[str]
                ) -> Iterator[tuple[dict[str, float], Leaf]]:
        """Yield prices and limits of the leaves below a tree node whose limits are `at`."""
        if "prices" in value:
            yield value["prices"], at
            return
        first, second = value["parts"]  # the two children, which together contain all plans
        if "table" in value:
            k = names.index(value["table"])
            if at.pushes[k] != FREE:
                raise _ProofError(f"a path of the proof's tree branches on table "
                                  f"{value['table']!r} twice")
            halves = [replace(at, pushes=_with(at.pushes, k, x)) for x in (PUSHES_NOTHING, PUSHES)]
        else:
            load, cut = self._load(value["load"]), float(value["at_us"])
            if not cut >= 0:
                raise _ProofError(f"a node of the proof's tree is branched on at a load of {cut} "
                                  "us, not at a number >= 0")
            halves = [replace(at, most=_with(at.most, load, min(at.most[load], cut))),
                      replace(at, least=_with(at.least, load, max(at.least[load], cut)))]
        for half, below in zip(halves, (first, second), strict=True):
            yield from self._leaves(below, half, names)

    def _priced(self, prices: dict[str, float], at: Leaf, checker: Checker, rows: list[list[Any]]
                ) -> Leaf:
        """Return the leaf `at` with its prices, which are given by row number.

        `rows` describes the rows, see `oper.search.branching.proof.part_to_json`.
        """
        m, classes, weights = self.problem.machine, checker.classes, at.weights.copy()
        memories = {"memory": (-2, m.domain, classes.of_domain, m.capacity_bytes),
                    "host memory": (-1, m.host, classes.of_host, m.host_capacity_bytes)}
        memory_us, owner = 0.0, []
        for number, given in prices.items():
            price, (kind, *what) = float(given), rows[int(number)]
            if not 0 <= price < math.inf:
                raise _ProofError(f"price {number} of the proof is {price}, not a number >= 0")
            if kind == "load":
                (p, g), ranks = self._load(what[:2]), classes.ranks[_number(what[2])]
                weights[p * len(GROUPS) + g, _number(what[2])] += price / len(ranks)
            elif kind in memories:
                row, of_rank, of, size = memories[kind]
                here = of == _number(what[0])
                weights[row, here[of_rank[checker.probe.first]]] += price / max(
                    float(size[here].sum()), 1e-3)
                memory_us += price
            elif kind in OWNER_INEQUALITIES:
                owner.append((kind, *self._about(kind, what, checker), price))
            else:
                raise _ProofError(
                    f"price {number} of the proof is for a constraint of kind {kind!r}, but the "
                    f"kinds are {['load', *memories, *OWNER_INEQUALITIES]}: plan again with this "
                    "release")
        return replace(at, weights=weights, memory_us=memory_us, owner=tuple(owner))

    def _about(self, kind: str, what: Sequence[str], checker: Checker) -> tuple[int, int]:
        """The load (phase, group) of an inequality about the owner of the largest piece; raises
        `_ProofError` if the problem has no such inequality."""
        m, load = self.problem.machine, self._load(what)
        _, link = neighbourhoods(m)
        slow = m.domain.any() and what[1].split("_")[0] == link.split("_")[0]
        if m.world_size == 1 or (kind in (SPREAD, APART) and not slow) or (
                kind == APART and checker.apart is None):
            raise _ProofError(f"the proof has a row of kind {kind!r} for the load {list(what)}, "
                              "which this problem does not have")
        return load


def _number(value: Any) -> int:
    """The index of a class of ranks, memories or hosts; raises `_ProofError` if negative."""
    if int(value) < 0:
        raise _ProofError(f"the proof has a negative class index: {value}")
    return int(value)


def _with(values: np.ndarray, at: int | tuple[int, int], value: float) -> np.ndarray:
    out = values.copy()
    out[at] = value
    return out
