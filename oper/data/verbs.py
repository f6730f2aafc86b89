"""The verbs ``oper preprocess`` and ``oper analyze``."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any


def configure_preprocess(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``oper preprocess``."""
    parser.add_argument("recipe", help="a data set that comes with OPER, or a recipe file (.toml)")
    parser.add_argument("inputs", nargs="+", metavar="INPUT",
                        help="log files, plain or gzip, in order of time; a quoted pattern is "
                             "expanded in the order of its numbers")
    parser.add_argument("-o", "--output", "--out", required=True, metavar="DIR",
                        help="folder to write")
    parser.add_argument("--min-count", type=int, metavar="N",
                        help="values seen fewer than N times in the training part share row 0 "
                             "(default: the recipe's)")
    parser.add_argument("--max-rows", type=int, metavar="N",
                        help="at most N rows per table; the hottest values keep their own")
    parser.add_argument("--valid", metavar="SHARE",
                        help="share of the rows, at the end, for validation, e.g. 1/7 or 0.1 "
                             "(default: the recipe's)")
    parser.add_argument("--max-bad", type=int, default=0, metavar="N",
                        help="leave out up to N malformed rows (default 0)")
    parser.add_argument("--force", action="store_true", help="replace an earlier output")
    parser.add_argument("--json", action="store_true", help="print the manifest as JSON")


def run_preprocess(args: argparse.Namespace) -> int:
    """Run ``oper preprocess``; raises OperError."""
    from oper.data.preprocessing import PreprocessOptions, preprocess
    from oper.data.recipe import load_recipe

    options = PreprocessOptions(
        min_count=args.min_count, valid=args.valid, max_bad=args.max_bad, max_rows=args.max_rows,
        force=args.force, show_progress=sys.stderr.isatty())
    manifest = preprocess(load_recipe(args.recipe), args.inputs, args.output, options)
    for line in manifest["bad_rows"]["first"]:
        print(f"left out: {line}", file=sys.stderr)
    if args.json:
        print(json.dumps(manifest))
    else:
        _print_manifest(manifest, args.output)
    return 0


def _print_manifest(manifest: dict[str, Any], output: str) -> None:
    rows, tables = manifest["rows"], manifest["tables"]
    if manifest["synthetic"]:
        print("synthetic log")
    print(f"rows: {rows['train']:,} train, {rows['valid']:,} valid, "
          f"{manifest['bad_rows']['count']:,} malformed")
    print(f"tables: {len(tables)} with {sum(t['num_rows'] for t in tables.values()):,} rows "
          f"(values seen fewer than {manifest['min_count']} times share row 0)")
    print(f"written: {output}")


def configure_analyze(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``oper analyze``."""
    parser.add_argument("folder", metavar="DIR", help="folder that 'oper preprocess' wrote")
    parser.add_argument("-o", "--output", "--out", required=True, metavar="STATS",
                        help="file to write")
    parser.add_argument("--memory", default="2GiB", metavar="SIZE",
                        help="memory for counters; tables beyond it are counted by sorting, more "
                             "slowly (default 2GiB)")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def run_analyze(args: argparse.Namespace) -> int:
    """Run ``oper analyze``; raises OperError."""
    from oper.analysis import CountOptions, describe
    from oper.data.analyze import analyze_folder
    from oper.topology import parse_bytes

    options = CountOptions(dense_budget_bytes=parse_bytes(args.memory))
    stats = analyze_folder(args.folder, options=options, show_progress=sys.stderr.isatty())
    stats.save(args.output)
    summary = {**describe(stats), "output": args.output}
    if args.json:
        print(json.dumps(summary))
    else:
        _print_summary(summary)
    return 0


_HEADINGS = ("table", "rows", "touched", "hottest", "top 1%", "top 10%", "90% in rows", "drift")


def _print_summary(summary: dict[str, Any]) -> None:
    print(f"{summary['source']}: {summary['num_samples']:,} samples, "
          f"{summary['num_accesses']:,} accesses")
    lines = [_HEADINGS]
    for name, t in summary["tables"].items():
        drift = "-" if t["drift"] is None else f"{t['drift']:.3f}"
        lines.append((name, f"{t['num_rows']:,}", f"{t['num_touched_rows']:,}",
                      f"{t['hottest']:.3f}", f"{t['top_1pct']:.3f}", f"{t['top_10pct']:.3f}",
                      f"{t['rows_for_90pct']:,}", drift))
    widths = [max(len(line[k]) for line in lines) for k in range(len(_HEADINGS))]
    for line in lines:
        first = line[0].ljust(widths[0])
        print("  ".join([first, *(w.rjust(n) for w, n in zip(line[1:], widths[1:], strict=True))]))
    print(f"written: {summary['output']}")
