"""Helpers to run benchmarks in tests, and cases and child processes that go wrong."""

import json
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow
import torch

from oper.bench.core.child import obey
from oper.bench.core.launch import Progress, measured
from oper.bench.core.report import report
from oper.bench.dynamic.case import DynamicCase, State
from oper.bench.tables import train
from oper.bench.tables.train import TrainCase


def doubles(pipe: Any) -> None:
    """A child process with a single command."""
    commands = {"double": lambda x: 2 * x, "end": lambda: os._exit(3)}
    while obey(pipe, commands):
        pass


def dies(pipe: Any) -> None:
    """A child process that reports that it is ready and exits."""
    pipe.send(None)


def verified(*cases: Any, figures: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Measure cases; their entries must be verified, and `report` must show their names."""
    entries = list(measured(cases))
    for entry in entries:
        assert entry["verified"] is True, entry
        assert entry["name"] in report([entry], figures)
    return entries


def bench(folder: Path, *words: str, **env: str) -> tuple[list[dict[str, Any]], str]:
    """Run ``oper bench``; returns the entries of its record (written to the folder) and stdout."""
    from tests.support import run_here

    out = folder / "record.json"
    done = run_here("bench", *words, "--record", str(out), env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())["cases"], done.stdout


@dataclass(frozen=True, slots=True)
class BrokenTrainCase(TrainCase):
    """A case in which 1 is added to row 3 of OPER's first table."""

    def measure(self, progress: Progress) -> dict[str, Any]:
        """As `TrainCase.measure`."""
        build = train.build_oper

        def build_wrong(*args: Any, **kwargs: Any) -> Any:
            side = build(*args, **kwargs)
            assert side.tables is not None
            row = side.tables.read("t0", 3, 4)
            side.tables.barrier()
            side.tables.write("t0", row + torch.ones_like(row), 3)
            side.tables.flush_replicas()
            return side

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


class Threads:
    """A case that warns, prints, and reports the threads of its process."""

    name = "threads"

    def measure(self, tell: Progress) -> dict[str, object]:
        warnings.warn("a warning", stacklevel=1)
        logging.getLogger("torch").warning("a warning")
        print("own words", file=sys.stderr)
        return {"arrow": [pyarrow.cpu_count(), pyarrow.io_thread_count()],
                "torch_log": os.environ["TORCH_CPP_LOG_LEVEL"]}


class Failing:
    """A case that prints and fails."""

    name = "failing"

    def measure(self, tell: Progress) -> dict[str, object]:
        print("last words", file=sys.stderr)
        raise ValueError("a number is wrong")
