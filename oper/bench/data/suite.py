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
        kind: which function of `oper.bench.data.cases` measures it; `loader`,
            `increment`, `sessions` and `store` have modules of their own.
        size: rows of the log, ids, day files or steps.
    """

    name: str
    kind: str
    size: int


def configure(parser: argparse.ArgumentParser) -> None:
    """The benchmark's own arguments."""
    parser.add_argument("--folder", metavar="DIR",
                        help="keep generated logs here and use those that are there (default: a "
                             "temporary folder)")


def cases(quick: bool) -> list[Case]:
    """All cases; with `quick` on small data."""
    if quick:
        return [Case("preprocess", "preprocess", 200_000), Case("resume", "resume", 60_000),
                Case("count", "count", 8_000_000), Case("count-1e9-rows", "sketch", 8_000_000),
                Case("merge", "merge", 24), Case("collector", "collector", 40),
                Case("loader", "loader", 60_000), Case("increment", "increment", 200_000),
                Case("store", "store", 60_000), Case("sessions", "sessions", 8_000)]
    return [Case("preprocess", "preprocess", 21_000_000), Case("resume", "resume", 1_000_000),
            Case("count", "count", 60_000_000), Case("count-1e9-rows", "sketch", 200_000_000),
            Case("merge", "merge", 24), Case("collector", "collector", 200),
            Case("loader", "loader", 2_600_000), Case("increment", "increment", 4_000_000),
            Case("store", "store", 1_000_000), Case("sessions", "sessions", 60_000)]


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
            module = {"loader": loader_case, "increment": increment_case,
                      "sessions": sessions_case, "store": store_case}.get(case.kind, data_cases)
            try:
                entry = {"name": case.name, **getattr(module, case.kind)(case.size, folder)}
            except MissingDependencyError as error:  # one case need not keep others from the record
                if len(chosen) == 1:
                    raise
                print(f"left out: {case.name}: {error}", file=sys.stderr)
                continue
            # Worker processes count as others: only cases within this process can tell.
            if case.kind in ("count", "merge", "collector"):
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
