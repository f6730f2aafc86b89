"""``oper bench``: run one of the benchmarks and write its record."""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import inspect
import sys
from typing import Any

from oper.bench.core import record
from oper.bench.core.launch import measured
from oper.bench.core.report import report
from oper.errors import UsageError
from oper.support.files import check_target
from oper.support.flags import Parser

# A benchmark is a module with ``cases`` (a function whose parameters are names of flags) and
# ``FIGURES`` (the tables of its report, see `report`). Optional are ``NOTE`` (text printed below
# the tables), ``configure(parser)`` (adds flags), ``run(args, cases)`` (replaces `measured`),
# ``totals(entries)`` (further items of the record) and ``remarks(entries)`` (text printed last).
BENCHMARKS: dict[str, tuple[str, str]] = {  # name: module, one line of help
    "train": ("oper.bench.tables.train",
              "training steps in two processes, compared with TorchRec's plans"),
    "lookup": ("oper.bench.tables.lookup",
               "lookups and updates, compared with torch, fbgemm and bare gathers"),
    "serve": ("oper.bench.serve.suite",
              "inference under MLPerf LoadGen, compared with TorchRec and torch"),
    "data": ("oper.bench.data.suite",
             "preprocessing, counting, merging and the collector's overhead"),
    "simulator": ("oper.bench.quality.simulator",
                  "policies learned from logs of a simulated shop"),
    "off-policy": ("oper.bench.quality.off_policy",
                   "off-policy estimates, on simulated logs with known values"),
    "graphs": ("oper.bench.quality.graphs",
               "concept graphs fitted to simulated users, compared with the true ones"),
    "recommenders": ("oper.bench.quality.recommenders",
                     "recommenders on real logs: full ranking with confidence intervals"),
    "cluster": ("oper.bench.cluster.grid", "plans on emulated hosts with rate-limited links, "
                                           "compared with other planners'"),
    "plan": ("oper.bench.plan.suite",
             "the planner on modelled machines: gaps, times, other planners"),
}


class _LazyParser(Parser):
    """Adds a benchmark's own arguments when it parses, since the benchmark's module loads slowly.
    ``place`` is the module's name."""

    place = ""

    def complete(self) -> None:
        module: Any = importlib.import_module(self.place)
        if hasattr(module, "configure"):
            module.configure(self)

    def parse_known_args(  # type: ignore[override]
            self, args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:
        self.complete()
        return super().parse_known_args(args, namespace)


def configure_bench(parser: argparse.ArgumentParser) -> None:
    subs = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True,
                                 parser_class=_LazyParser)
    for name, (place, help_line) in BENCHMARKS.items():
        sub = subs.add_parser(name, help=help_line, description=f"Benchmark: {help_line}")
        record.add_flags(sub)
        sub.add_argument("--only", "--cases", metavar="GLOB",
                         help="only cases whose name matches, e.g. 'ebc-*'")
        sub.add_argument("--quick", action="store_true",
                         help="run the main cases only, with few repetitions")
        sub.add_argument("--resume", metavar="RECORD", default="",
                         help="an earlier record: keep its cases and do not run them again, "
                              "whatever the other flags are; may be the file of --record, even "
                              "if it does not exist yet")
        sub.place = place


def run_bench(args: argparse.Namespace) -> int:
    """Run one benchmark; returns 1 if a case fails or its results are wrong, otherwise 0. Raises
    UsageError if no case matches ``--only``."""
    record.settle_flags(args)
    module: Any = importlib.import_module(BENCHMARKS[args.benchmark][0])
    every = module.cases(**{flag: getattr(args, flag)
                            for flag in inspect.signature(module.cases).parameters})
    chosen = [c for c in every if fnmatch.fnmatch(c.name, args.only or "*")]
    if not chosen:
        raise UsageError(f"nothing to run in bench {args.benchmark}", "--only", args.only,
                         f"a pattern for {', '.join(c.name for c in every[:12])}"
                         + f" or {len(every) - 12} more" * (len(every) > 12),
                         "change the pattern, or leave --only out to run all cases")
    known = record.resumed(args.resume, args.record, args.benchmark)
    if hasattr(module, "check_resumed"):
        module.check_resumed(known, chosen)
    left = [c for c in chosen if c.name not in known]
    if args.record:
        check_target(args.record)
    load = load_before = record.load_average()
    # Resumed entries come first, so that an interrupted run does not lose any of them.
    entries: list[dict[str, Any]] = list(known.values())

    def write() -> tuple[dict[str, Any], dict[str, Any]]:
        """Make the record and write it if requested; returns it and its totals."""
        totals: dict[str, Any] = module.totals(entries) if hasattr(module, "totals") else {}
        made = record.record(
            args.benchmark, record.command_line(args, "oper", "bench", args.benchmark), entries,
            load_before) | totals
        if args.record:
            record.write(args.record, made)
        return made, totals

    made, totals = write() if known else ({}, {})
    found = module.run(args, left) if hasattr(module, "run") else measured(left)
    for entry in found if left else ():
        entries.append({**entry, "load_before": load, "load_after": record.load_average()})
        load = entries[-1]["load_after"]
        print(f"{len(entries)}/{len(known) + len(left)} {entry['name']} done", file=sys.stderr,
              flush=True)
        made, totals = write()  # after every case, so that an interrupted run keeps finished cases
    if args.json:
        print(record.as_json(made))
    else:
        shown = [*entries, {"name": "all", **totals}] if totals else entries
        print(report(shown, module.FIGURES) + getattr(module, "NOTE", ""), end="")
        if hasattr(module, "remarks"):
            print(module.remarks(entries), end="")
        if args.record:
            print(f"record: {args.record}")
    return 0 if all(e.get("verified", True) for e in entries) else 1

