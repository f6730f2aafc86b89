"""A worker function for tests: one weight of OPER's side is wrong in the case named ``broken``."""

from typing import Any
from unittest import mock

import torch

from oper.bench.core.launch import Progress
from oper.bench.tables import train_case


def run_case(case: train_case.TrainCase, progress: Progress) -> dict[str, Any]:
    """`train_case.run_case`, of ``broken`` with row 3 of the first table off by one."""
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
