"""Ways to place a block of rows, as the relaxation tells them apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from oper.search.cost.model import CostModel
from oper.search.problem.statement import TableProblem

REPLICATED, SHARD, PUSH = "replicated", "shard", "push"
HOST = "host"  # a shard in host memory
COPIES = "copies"  # on one rank of every host


@dataclass(frozen=True, slots=True)
class Option:
    """A way to place a block: `kind`, and the rank class that owns it, or has the master copies
    (-1: all ranks)."""

    kind: str
    rank_class: int


def row_makers(model: CostModel) -> dict[str, Callable[[TableProblem, int, np.ndarray],
                                                       np.ndarray]]:
    """What makes tally rows of a table's rows, by the kind of what holds them."""
    return {REPLICATED: model.replica_rows, SHARD: model.shard_rows, PUSH: model.push_rows,
            HOST: model.host_rows}
