"""``oper explain`` with its page."""

from __future__ import annotations

import argparse
import sys

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
