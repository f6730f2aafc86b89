"""``oper bench data``: preprocess, count, merge and load logs; overhead of a live collector."""

from __future__ import annotations

import argparse
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from oper.bench.core.launch import Progress, Task
from oper.bench.data import cases as data_cases
from oper.bench.data.increment import increment
from oper.bench.data.loader import loader
from oper.bench.data.sessions import sessions
from oper.bench.data.store import store

# By case: the function that measures it, and the size of its input (rows of the log, ids, day files
# or steps) with --quick and for the record.
_KINDS: dict[str, tuple[Callable[[int, Path], dict[str, Any]], int, int]] = {
    "preprocess": (data_cases.preprocess, 200_000, 21_000_000),
    "resume": (data_cases.resume, 60_000, 1_000_000),
    "count": (data_cases.count, 8_000_000, 60_000_000),
    "count-1e9-rows": (data_cases.sketch, 8_000_000, 200_000_000),
    "merge": (data_cases.merge, 24, 24), "collector": (data_cases.collector, 40, 200),
    "loader": (loader, 60_000, 2_600_000), "increment": (increment, 200_000, 4_000_000),
    "store": (store, 60_000, 1_000_000), "sessions": (sessions, 8_000, 60_000)}
FIGURES: tuple[tuple[str, ...], ...] = ()  # no tables: cases have different figures


def measure(progress: Progress, name: str, size: int, shared: str | None) -> dict[str, Any]:
    """Measure a case; returns the record's entry.

    Args:
        progress: not used.
        name: a key of `_KINDS`.
        size: size of the input, see `_KINDS`.
        shared: folder for generated logs; None = a temporary folder shared by all cases.
    """
    folder = Path(shared or _temporary().name)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=folder) as own:
        return _KINDS[name][0](size, Path(own))


@functools.cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="oper-bench-data-")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", metavar="DIR",
                        help="save generated logs in this folder, and reuse logs in it (default: "
                             "a temporary folder)")


def cases(quick: bool, folder: str | None = None) -> list[Task]:
    """All cases; on small data if `quick`."""
    return [Task(name, measure, (name, small if quick else large, folder))
            for name, (_, small, large) in _KINDS.items()]
