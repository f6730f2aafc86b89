"""Worker functions for tests: what is measured is wrong, or what it is compared with."""

from typing import Any
from unittest import mock

import numpy as np
import torch

from oper.bench.core.launch import Progress
from oper.bench.dynamic import case as dynamic_case
from oper.bench.dynamic.case import DynamicCase
from oper.bench.dynamic.checks import State
from oper.bench.tables import train_case


def run_case(case: train_case.TrainCase, progress: Progress) -> dict[str, Any]:
    """`train_case.run_case`; with row 3 of the first table off by one in the case ``broken``."""
    build = train_case.build_oper
    if case.name != "broken":
        return train_case.run_case(case, progress)

    def build_wrong(*args: Any, **kwargs: Any) -> Any:
        side, reference = build(*args, **kwargs)
        assert side.tables is not None
        row = side.tables.read("t0", 3, 4)
        side.tables.barrier()
        side.tables.write("t0", row + torch.ones_like(row), 3)
        side.tables.publish()
        return side, reference

    with mock.patch.object(train_case, "build_oper", build_wrong):
        return train_case.run_case(case, progress)


def run_dynamic_case(case: DynamicCase, progress: Progress) -> dict[str, Any]:
    """The case of dynamic tables, whose records are read as those of other rows."""
    rows_of = State.rows_of

    def wrong_rows_of(state: State, keys: np.ndarray) -> torch.Tensor:
        return (rows_of(state, keys) + 1) % state.rows.shape[0]

    with mock.patch.object(State, "rows_of", wrong_rows_of):
        return dynamic_case.run_case(case, progress)
