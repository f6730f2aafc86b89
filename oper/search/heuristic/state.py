"""A placement of all free tables, kept with its tally so that a change costs one table's tally."""

from __future__ import annotations

import numpy as np

from oper.search.cost.model import CostModel, Evaluation
from oper.search.cost.tally import Tally
from oper.search.heuristic.placing import Placement, table_tally
from oper.search.problem.statement import TableProblem

_OVERFLOW = 1e3  # a placement that misses memory by x is charged as 1 + 1e3 x of its step
_SPREAD = 1e-2  # weight of the ranks' root mean square load, which breaks ties of the maximum
Change = dict[int, Placement]
#: Score, tally of everything, tallies of the changed tables, evaluation.
Attempt = tuple[float, Tally, dict[int, Tally], Evaluation]


class State:
    """A placement of all free tables, its tally and its score.

    Attributes:
        pieces: per table.
        tallies: per table.
        total: everything together, what all plans pay and pinned tables included.
    """

    def __init__(self, model: CostModel, tables: tuple[TableProblem, ...], base: Tally,
                 pieces: list[Placement]) -> None:
        self.model, self.tables = model, tables
        self.pieces = list(pieces)
        self.tallies = [table_tally(model, t, x) for t, x in zip(tables, pieces, strict=True)]
        self.total = base
        for tally in self.tallies:
            self.total = self.total.plus(tally)
        self.evaluation = model.evaluation(self.total)
        self.score = score_of(self.evaluation)

    def attempt(self, change: Change) -> Attempt:
        """Score, tally and evaluation after `change`, without making it."""
        total, new = self.total, {}
        for k, pieces in change.items():
            new[k] = table_tally(self.model, self.tables[k], pieces)
            total = total.plus(self.tallies[k], -1).plus(new[k])
        evaluation = self.model.evaluation(total)
        return score_of(evaluation), total, new, evaluation

    def apply(self, change: Change, result: Attempt) -> None:
        """Make `change`, whose attempt gave `result`."""
        self.score, self.total, new, self.evaluation = result
        for k, pieces in change.items():
            self.pieces[k], self.tallies[k] = pieces, new[k]

    def copy(self) -> State:
        """A state that can be changed without changing this one."""
        other = State.__new__(State)
        other.model, other.tables = self.model, self.tables
        other.pieces, other.tallies = list(self.pieces), list(self.tallies)
        other.total, other.evaluation, other.score = self.total, self.evaluation, self.score
        return other


def score_of(evaluation: Evaluation) -> float:
    """Step (us), dearer when memory overflows; the spread of rank loads breaks ties."""
    over = float(np.maximum(evaluation.memory_used() - 1.0, 0.0).sum())
    spread = sum(float(np.sqrt(np.square(p.groups.max(axis=0)).mean())) for p in evaluation.phases)
    return (evaluation.step_us + _SPREAD * spread * 1e6) * (1.0 + _OVERFLOW * over)
