"""Cost of the directories of dynamic tables, which is the same for every plan."""

from __future__ import annotations

import numpy as np

from oper.search.cost.tally import NUM_ROWS, Row
from oper.search.problem.statement import TOUCHED, Problem, TableProblem

_KEY_BYTES = 8  # of a key in a message; of a key with a row, its place and count


def key_rows(t: TableProblem, problem: Problem, counts: np.ndarray | None = None) -> np.ndarray:
    """Return the tally of a dynamic table's directory, float64 [23, W]; 0 for other tables.

    Every rank finds the rows of its ids. For an update, it passes on its distinct keys and its ids
    without a row to the ranks of its memory domain, which divide the buckets among them, and to one
    rank of every other domain. So every domain counts and inserts the keys of all ranks.

    Args:
        t: the table.
        problem: the problem that it belongs to.
        counts: float64 [3, W], by rank the ids of its batch, its distinct keys that have a row,
            and its ids without a row; default: the expected numbers.
    """
    machine, costs = problem.machine, problem.topology.costs
    out = np.zeros((NUM_ROWS, machine.world_size))
    if t.default_share is None:
        return out
    if counts is None:
        num_ids = t.traffic.num_ids
        counts = np.repeat([[num_ids], [t.total[TOUCHED]], [t.default_share * num_ids]],
                           machine.world_size, axis=1)
    ids, known, missed = counts
    out[Row.FORWARD_NS] = ids * costs.key_ns
    if problem.training:
        out[Row.UPDATE_NS] = (known * costs.key_count_ns
                              + missed * costs.key_insert_ns).sum() / machine.num_near
        # Bytes to each rank of this host, which reads its part of the keys; and, on average, to
        # each rank of another host, of which one receives them all.
        out[[Row.GRADS, Row.RETURNED]] = _KEY_BYTES * (known + missed) / machine.num_near
    return out
