"""``oper bench data``: preprocessing, counting, merging, loading, and a live collector."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oper.bench.core import record
from oper.errors import MissingDependencyError


@dataclass(frozen=True, slots=True)
class Case:
    """One case.

    Attributes:
        name: of the case.
        size: rows of the log, ids, day files or steps.
    """

    name: str
    size: int


# Sizes of quick cases and of those for the record.
_SIZES = {"preprocess": (200_000, 21_000_000), "resume": (60_000, 1_000_000),
          "count": (8_000_000, 60_000_000), "count-1e9-rows": (8_000_000, 200_000_000),
          "merge": (24, 24), "collector": (40, 200), "loader": (60_000, 2_600_000),
          "increment": (200_000, 4_000_000), "store": (60_000, 1_000_000),
          "sessions": (8_000, 60_000)}


def configure(parser: argparse.ArgumentParser) -> None:
    """The benchmark's own arguments."""
    parser.add_argument("--folder", metavar="DIR",
                        help="keep generated logs here and use those that are there (default: a "
                             "temporary folder)")


def cases(quick: bool) -> list[Case]:
    """All cases; with `quick` on small data."""
    return [Case(name, small if quick else large) for name, (small, large) in _SIZES.items()]


def run(args: argparse.Namespace, chosen: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Measure the chosen cases."""
    from oper.bench.data import (
        cases as data_cases,
        increment as increment_case,
        loader as loader_case,
        sessions as sessions_case,
        store as store_case,
    )

    with tempfile.TemporaryDirectory(prefix="oper-bench-data-") as temporary:
        folder = Path(args.folder or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for case in chosen:
            clock = record.BusyClock()
            measure = {"loader": loader_case.loader, "increment": increment_case.increment,
                       "sessions": sessions_case.sessions, "store": store_case.store,
                       "count-1e9-rows": data_cases.sketch}.get(
                case.name) or getattr(data_cases, case.name)
            try:
                entry = {"name": case.name, **measure(case.size, folder)}
            except MissingDependencyError as error:  # one case need not keep others from the record
                if len(chosen) == 1:
                    raise
                print(f"left out: {case.name}: {error}", file=sys.stderr)
                continue
            # Worker processes count as others: only cases within this process can tell.
            if case.name in ("count", "merge", "collector"):
                entry["other_busy_cores"] = round(clock.others(lambda x: x), 3)
            yield entry


def report(entries: Sequence[dict[str, Any]]) -> str:
    """The entries for a person."""
    lines = []
    for e in entries:
        shown = ", ".join(f"{k} {v:,.4g}" if isinstance(v, float) else f"{k} {v:,}"
                          for k, v in e.items() if isinstance(v, int | float)
                          and not isinstance(v, bool))
        lines.append(f"{e['name']} ({'verified' if e['verified'] else 'NOT VERIFIED'}): {shown}\n")
    return "".join(lines) + record.noise_note(entries)
