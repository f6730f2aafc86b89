"""``oper explain`` with its page; ``oper report``: pages of statistics, plans and records."""

from __future__ import annotations

import argparse
import sys

from oper.errors import InvalidInputError, fail
from oper.search import verbs


def configure_explain(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``oper explain``."""
    verbs.configure_explain(parser)
    parser.add_argument("--html", metavar="FILE", help="also write one page with plots, complete "
                                                       "in itself")


def run_explain(args: argparse.Namespace) -> int:
    """Print what a plan costs; write the page when asked for."""
    code = verbs.run_explain(args)
    if args.html is not None:
        from oper.report.plan_page import write_page

        write_page(args.html, *verbs.explained(args))
        print(f"wrote {args.html}", file=sys.stderr)
    return code


def configure_report(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``oper report``."""
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    for kind, about in (("stats", "access statistics"), ("bench", "a benchmark record (JSON)")):
        sub = kinds.add_parser(kind, help=f"a page about {about}")
        sub.add_argument("file", metavar="FILE", help=about)
        sub.add_argument("--html", metavar="OUT", required=True, help="file to write")
    configure_explain(kinds.add_parser("plan", help="a page about a plan, as explain --html"))


def run_report(args: argparse.Namespace) -> int:
    """Write one page that opens offline."""
    from oper.files import write_text
    from oper.report import stats_page
    from oper.stats import AccessStats

    if args.kind == "plan":
        if args.html is None:
            raise InvalidInputError(fail("cannot write a page", "--html", None, "a file to write",
                                         "name one"))
        return run_explain(args)
    text = (stats_page.stats_page(AccessStats.load(args.file)) if args.kind == "stats"
            else stats_page.bench_page(stats_page.load_record(args.file)))
    write_text(args.html, text)
    print(f"wrote {args.html}")
    return 0
