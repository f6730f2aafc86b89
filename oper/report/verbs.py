"""``oper explain`` with an HTML page, and ``oper report``: pages of statistics, plans, records
and training runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from oper.errors import UsageError
from oper.search import plan_flags, verbs
from oper.support.files import check_target, write_text
from oper.support.flags import number


def configure_explain(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``oper explain``, including that of its HTML page."""
    verbs.configure_explain(parser)
    parser.add_argument("--html", metavar="FILE", help="also write an HTML page (one file) with "
                                                       "plots")


def run_explain(args: argparse.Namespace) -> int:
    """Print the modelled cost of a plan, and write its HTML page if requested; returns the exit
    code."""
    if args.html is not None:
        check_target(args.html)
    plan, problem = verbs.explain(args)
    if args.html is not None:
        from oper.report.plan_page import page

        write_text(args.html, page(plan, problem))
        print(f"wrote {args.html}", file=sys.stderr)
    return 0


def configure_report(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    for kind, about in (("stats", "access statistics"), ("bench", "a benchmark record (JSON)"),
                        ("run", "a training run (its folder)")):
        page = f"a page about {about}"
        sub = kinds.add_parser(kind, help=page, description=f"Make {page}")
        sub.add_argument("file", metavar="FOLDER" if kind == "run" else "FILE", help=about)
        sub.add_argument("--html", metavar="OUT", required=True, help="file to write")
    page = "a page about the change of accesses since a plan was made, and what a new plan gains"
    sub = kinds.add_parser("drift", help=page, description=f"Make {page}")
    sub.add_argument("old", metavar="OLD", help="statistics that the plan was made from")
    sub.add_argument("later", nargs="+", metavar="NEW", help="later statistics, in time order")
    sub.add_argument("--plan", metavar="PLAN",
                     help="the plan in use: also model when a new plan pays off")
    plan_flags.add_machine(sub, "with --plan")
    sub.add_argument("--copy-gbps", type=number(above=True), default=1.0, metavar="GBPS",
                     help="with --plan: GB/s at which a rank copies rows to a new plan "
                          "(default 1)")
    sub.add_argument("--html", metavar="OUT", required=True, help="file to write")
    page = "a page about a plan, and print what 'oper explain' prints"
    sub = kinds.add_parser("plan", help=page, description=f"Make {page}")
    verbs.configure_explain(sub)
    sub.add_argument("--html", metavar="OUT", required=True, help="file to write")


def run_report(args: argparse.Namespace) -> int:
    """Write one self-contained HTML page; returns the exit code."""
    from oper.report import bench_page, run_page, stats_page
    from oper.stats import AccessStats

    if args.kind == "plan":
        return run_explain(args)
    check_target(args.html)
    if args.kind == "drift":
        text = _drift_page(args)
    elif args.kind == "stats":
        text = stats_page.stats_page(AccessStats.load(args.file))
    elif args.kind == "run":
        text = run_page.run_page(run_page.load_metrics(args.file), args.file)
    else:
        text = bench_page.bench_page(bench_page.load_record(args.file))
    write_text(args.html, text)
    print(f"wrote {args.html}")
    return 0


def _drift_page(args: argparse.Namespace) -> str:
    from oper.plan import Plan
    from oper.report.drift_page import drift_page, drifts, verdict
    from oper.stats import AccessStats

    if (args.plan is None) != (args.topology is None):
        raise UsageError("cannot evaluate a plan", "--plan, --topology",
                         (args.plan, args.topology), "both or neither", "pass both")
    planned = None
    if args.plan is not None:
        plan = Plan.load(args.plan)
        planned = plan, verbs.machine_of(plan, args.topology, args.world_size)
    old = AccessStats.load(args.old)
    later = [(Path(p).stem, AccessStats.load(p)) for p in args.later]
    found = drifts(old, later, planned, args.copy_gbps)
    for each in found:
        print(verdict(each))
    return drift_page(old, found, planned)
