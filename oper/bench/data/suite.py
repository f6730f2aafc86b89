"""``oper bench data``: preprocessing, counting, merging, loading, and a live collector."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oper.bench.core import record
from oper.bench.data import cases as data_cases
from oper.bench.data.increment import increment
from oper.bench.data.loader import loader
from oper.bench.data.sessions import sessions
from oper.bench.data.store import store
from oper.errors import MissingDependencyError

# Kinds of cases: what measures them, sizes of quick ones and of those for the record (rows of the
# log, ids, day files or steps).
_KINDS: dict[str, tuple[Callable[[int, Path], dict[str, Any]], int, int]] = {
    "preprocess": (data_cases.preprocess, 200_000, 21_000_000),
    "resume": (data_cases.resume, 60_000, 1_000_000),
    "count": (data_cases.count, 8_000_000, 60_000_000),
    "count-1e9-rows": (data_cases.sketch, 8_000_000, 200_000_000),
    "merge": (data_cases.merge, 24, 24), "collector": (data_cases.collector, 40, 200),
    "loader": (loader, 60_000, 2_600_000), "increment": (increment, 200_000, 4_000_000),
    "store": (store, 60_000, 1_000_000), "sessions": (sessions, 8_000, 60_000)}
FIGURES: tuple[tuple[str, ...], ...] = ()  # every case has its own: all of them are shown
NOTE = "cases in processes of their own cannot tell how busy other programs were\n"


@dataclass(frozen=True, slots=True)
class Case:
    """One case.

    Attributes:
        name: a key of `_KINDS`.
        size: size of its input, see `_KINDS`.
    """

    name: str
    size: int


def configure(parser: argparse.ArgumentParser) -> None:
    """The benchmark's own arguments."""
    parser.add_argument("--folder", metavar="DIR",
                        help="keep generated logs here and use those that are there (default: a "
                             "temporary folder)")


def cases(quick: bool) -> list[Case]:
    """All cases; with `quick` on small data."""
    return [Case(name, small if quick else large) for name, (_, small, large) in _KINDS.items()]


def run(args: argparse.Namespace, chosen: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Measure the chosen cases."""
    with tempfile.TemporaryDirectory(prefix="oper-bench-data-") as temporary:
        folder = Path(args.folder or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for case in chosen:
            clock = record.BusyClock()
            try:
                entry = {"name": case.name, **_KINDS[case.name][0](case.size, folder)}
            except MissingDependencyError as error:  # one case need not keep others from the record
                if len(chosen) == 1:
                    raise
                print(f"left out: {case.name}: {error}", file=sys.stderr)
                continue
            # Worker processes count as others: only cases within this process can tell.
            if case.name in ("count", "merge", "collector"):
                entry["other_busy_cores"] = round(clock.others(lambda x: x), 3)
            yield entry
