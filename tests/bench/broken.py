"""Cases for tests with wrong results, or with a wrong reference."""

from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch

from oper.bench.core.launch import Progress
from oper.bench.dynamic.case import DynamicCase, State
from oper.bench.tables import train
from oper.bench.tables.train import TrainCase


@dataclass(frozen=True, slots=True)
class BrokenTrainCase(TrainCase):
    """A case in which 1 is added to row 3 of OPER's first table."""

    def measure(self, progress: Progress) -> dict[str, Any]:
        """As `TrainCase.measure`."""
        build = train.build_oper

        def build_wrong(*args: Any, **kwargs: Any) -> Any:
            side, reference = build(*args, **kwargs)
            assert side.tables is not None
            row = side.tables.read("t0", 3, 4)
            side.tables.barrier()
            side.tables.write("t0", row + torch.ones_like(row), 3)
            side.tables.flush_replicas()
            return side, reference

        with mock.patch.object(train, "build_oper", build_wrong):
            return TrainCase.measure(self, progress)


@dataclass(frozen=True, slots=True)
class BrokenDynamicCase(DynamicCase):
    """A case that reads the wrong rows for the keys of dynamic tables."""

    def measure(self, progress: Progress) -> dict[str, Any]:
        """As `DynamicCase.measure`."""
        rows_of = State.rows_of

        def wrong_rows_of(state: State, keys: np.ndarray) -> torch.Tensor:
            return (rows_of(state, keys) + 1) % state.rows.shape[0]

        with mock.patch.object(State, "rows_of", wrong_rows_of):
            return DynamicCase.measure(self, progress)
