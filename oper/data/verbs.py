"""Subcommands ``oper preprocess``, ``vocabulary``, ``sequences``, ``analyze``, ``generate``."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict, astuple, fields
from typing import TYPE_CHECKING, Any

from oper.errors import InvalidInputError, UsageError, require
from oper.rows.capacity import DynamicRows
from oper.support.files import check_target
from oper.support.flags import KEY_RULES, add_key_rules, name_values, names, number, whole
from oper.support.text import aligned

if TYPE_CHECKING:
    from oper.data.preprocessing.options import PreprocessOptions
    from oper.data.recipe import Recipe
    from oper.stats import AccessStats


def configure_preprocess(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE",
                        help="a public data set such as criteo-kaggle (folders of datasets/), "
                             "a recipe file (.toml), or csv or parquet for your own files")
    parser.add_argument("inputs", nargs="+", metavar="INPUT",
                        help="log files, plain or compressed (gzip, zstd, bzip2), or folders of "
                             "them, in time order; also s3://, gs:// and other stores; a quoted "
                             "pattern is expanded in numerical order; - reads standard input")
    parser.add_argument("-o", "--output", "--out", metavar="DIR",
                        help="folder to write, local or in a store; after an interruption, the "
                             "same command continues from the work folder .DIR.work next to DIR")
    parser.add_argument("--min-count", type=whole(1), metavar="N",
                        help="values seen fewer than N times in the training part share row 0 "
                             "(default: the recipe's)")
    parser.add_argument("--max-rows", type=whole(2), metavar="N",
                        help="at most N rows per table; rarer values share row 0")
    parser.add_argument("--hash", type=whole(2), metavar="N", dest="hash_rows",
                        help="hash values into tables of N rows instead, and count collisions")
    parser.add_argument("--vocabulary", metavar="DIR",
                        help="apply the vocabulary of an earlier output or of 'oper vocabulary "
                             "extend': its values get the same ids; other values share row 0 "
                             "and are counted")
    parser.add_argument("--raw-ids", action="store_true",
                        help="make no vocabulary; ids become 64-bit keys for the dynamic tables "
                             "of 'oper train': integers unchanged, strings hashed (ids of CSV "
                             "files are strings except A:int and similar)")
    for part in ("valid", "test"):
        parser.add_argument(f"--{part}", metavar="SHARE",
                            help=f"share of the rows, at the end, for the {part} part, e.g. 1/7 or "
                                 "0.1 (default: the recipe's)")
    parser.add_argument("--max-bad", type=whole(0), default=0, metavar="N",
                        help="leave out up to N malformed rows (default 0)")
    parser.add_argument("--layout", metavar="NAME",
                        help="the recipe's layout that the files have, if several fit")
    parser.add_argument("--workers", type=whole(1), default=1, metavar="N",
                        help="processes on this machine (default 1); processes with the same "
                             "command on other machines (torchrun, array jobs) share the work")
    parser.add_argument("--ray", type=whole(1), metavar="N",
                        help="also N workers on a Ray cluster that shares this file system")
    parser.add_argument("--compression", choices=("none", "zstd"), default="none",
                        help="compression of the Parquet files: none (the default, fastest to "
                             "read) or zstd (about a third of the size)")
    parser.add_argument("--dry-run", action="store_true",
                        help="write nothing; print how the first 10,000 rows are read (columns, "
                             "types, split, problems) and the estimated disk, memory and time; "
                             "for csv and parquet without --sparse, print the files' columns")
    parser.add_argument("--no-disk-check", action="store_true",
                        help="start even if the disk is estimated to be too small")
    parser.add_argument("--force", action="store_true",
                        help="replace an earlier output, or the unfinished work of a run with "
                             "other settings, unless that run is still active")
    parser.add_argument("--json", action="store_true", help="print the manifest as JSON")
    own = parser.add_argument_group("your own files (recipes csv and parquet)")
    own.add_argument("--sparse", type=names, default=[], metavar="A,B",
                     help="id columns; in CSV files they are strings, except A:int, A:uint64, "
                          "A:hex32, A:integral (ids written 17850.0) and A:bins=18/30 (binned "
                          "numbers); A:| splits fields like 3|17|4")
    own.add_argument("--label", metavar="NAME",
                     help="column of 0 and 1, or of values for --threshold or --among; A:number "
                          "and A:log1p keep numbers as labels, for graded rewards")
    own.add_argument("--threshold", type=number(-math.inf), metavar="X",
                     help="the label is 1 for numbers >= X")
    own.add_argument("--among", type=names, default=[], metavar="A,B",
                     help="the label is 1 for these strings")
    own.add_argument("--dense", type=names, default=[], metavar="A,B",
                     help="numeric columns; A:log1p = log(1 + max(A, 0))")
    own.add_argument("--cross", action="append", metavar="A*B=N", default=[],
                     help="add an id column: combined values of A and B, hashed into N rows")
    own.add_argument("--join", metavar="FILE",
                     help="a side table (CSV with a header, or Parquet), for example of items")
    own.add_argument("--join-on", metavar="A[=B]", default="",
                     help="id column that selects a row of FILE, where it is called B")
    for kind in ("sparse", "dense"):
        own.add_argument(f"--join-{kind}", type=names, default=[], metavar="A,B",
                         help=f"columns of FILE to add, written like those of --{kind}")
    own.add_argument("--encoding", choices=("utf-8", "latin-1"), default="utf-8",
                     help="encoding of CSV files (default utf-8)")
    own.add_argument("--time", metavar="NAME", help="time column to split by")
    own.add_argument("--time-format", default="unix", metavar="F",
                     choices=("unix", "unix_ms", "iso", "iso_zone"),
                     help="unix (seconds, the default), unix_ms, iso or iso_zone")
    own.add_argument("--filter", action="append", metavar="C", default=[],
                     help="keep only rows that meet a condition, e.g. 'country == de'; may be "
                          "repeated: rows must meet all")
    own.add_argument("--separator", default=",", metavar="C",
                     help=r"field separator of CSV files (default ,); TAB is '\t'")


def run_preprocess(args: argparse.Namespace) -> int:
    from oper.data import PreprocessOptions, preprocess

    if args.dry_run == (args.output is not None):
        raise UsageError("cannot preprocess", "-o, --dry-run", (args.output, args.dry_run),
                         "one of them", "name a folder to write, or make a dry run")

    options = PreprocessOptions(
        min_count=args.min_count, valid=args.valid, test=args.test, max_bad=args.max_bad,
        max_rows=args.max_rows, hash_rows=args.hash_rows,
        vocabulary=args.vocabulary, raw_ids=args.raw_ids, layout=args.layout, force=args.force,
        num_workers=args.workers, num_ray_workers=args.ray or 0,
        compression=args.compression, check_disk=not args.no_disk_check,
        show_progress=sys.stderr.isatty())
    if args.dry_run:
        return _dry_run(args, options)
    manifest = preprocess(_recipe(args), args.inputs, args.output, options)
    for line in manifest["bad_rows"]["first"]:
        print(f"left out: {line}", file=sys.stderr)
    if args.json:
        print(json.dumps(manifest))
    else:
        _print_manifest(manifest, args.output)
    return 0


def _dry_run(args: argparse.Namespace, options: PreprocessOptions) -> int:
    from oper.data.generic import GENERIC, file_layout
    from oper.data.preprocessing.trial import describe_columns, dry_run
    from oper.data.reading.estimate import Needs
    from oper.data.reading.lines import expand_inputs

    if args.recipe in GENERIC and not args.sparse:
        path = expand_inputs(args.inputs)[0]
        facts = describe_columns(path, file_layout(args.recipe, _separator(args.separator),
                                                   args.encoding))
        found: dict[str, Any] = {"columns": [{"name": n, **fact} for n, fact in facts.items()]}
    else:
        found = dry_run(_recipe(args), args.inputs, options)
    if args.json:
        print(json.dumps(found))
        return 0
    _print_columns(found)
    if "plan" not in found:
        print("name the id columns with --sparse, a label with --label, numbers with --dense")
        return 0
    rows = found["rows"]
    print(f"layout {found['layout']}; of the first rows {rows['train']:,} train, "
          f"{rows['valid']:,} valid, {rows['test']:,} test, {found['bad_rows']['count']:,} "
          f"malformed; split by {found['split']['by']}")
    print(f"whole log: {Needs(**found['plan']).text()}")
    return 0


_MISSING = {"type": "", "missing": None, "distinct": None, "example": ""}


def _print_columns(found: dict[str, Any]) -> None:
    """Print the table of columns of a dry run."""
    lines = [("column", "kind", "read as", "looks like", "missing", "distinct", "table rows",
              "example")]
    for c in found["columns"]:
        look = {**_MISSING, **c}
        table = found.get("tables", {}).get(c["name"], {})
        read = " ".join(x for x in (c.get("parse", ""), c.get("transform", "none")) if x != "none")
        lines.append((c["name"], c.get("kind", ""), read, look["type"],
                      "" if look["missing"] is None else f"{look['missing']:.1%}",
                      "" if look["distinct"] is None else f"{look['distinct']:,}",
                      _rows_of(table), look["example"]))
    keep = [k for k in range(len(lines[0])) if any(line[k] for line in lines[1:])]
    print("\n".join(aligned([[line[k] for k in keep] for line in lines], left=range(len(keep)))))


def _rows_of(table: dict[str, Any]) -> str:
    """Format the rows of a column's table; empty if the column has no table."""
    return f"{table['num_rows']:,}" if "num_rows" in table else "raw" if table else ""


def _recipe(args: argparse.Namespace) -> Recipe:
    from oper.data.generic import GENERIC, Choice, check_generic_inputs, generic_recipe
    from oper.data.recipe import load_recipe

    own = {f.name: getattr(args, f.name) for f in fields(Choice)}
    if args.recipe not in GENERIC:
        given = [f"--{n.replace('_', '-')}" for n, value in own.items()
                 if value not in (None, [], getattr(Choice(()), n))]
        require("cannot preprocess", f"leave them out: recipe {args.recipe!r} names its columns",
                ("options", given, not given, f"only with {' or '.join(GENERIC)}"))
        return load_recipe(args.recipe)
    check_generic_inputs(args.recipe, args.inputs)
    return generic_recipe(args.recipe, Choice(**{**own, "separator": _separator(args.separator)}))


def _separator(text: str) -> str:
    separator = "\t" if text in ("\\t", "tab") else text
    if len(separator) != 1 or not separator.isascii():
        raise InvalidInputError("cannot read csv files", "--separator", text, "one ASCII character",
                                r"write TAB as --separator '\t'; for others use a recipe file")
    return separator


def _print_manifest(manifest: dict[str, Any], output: str) -> None:
    rows, tables = manifest["rows"], manifest["tables"]
    if manifest["synthetic"]:
        print("synthetic log")
    test = f"{rows['test']:,} test, " if rows["test"] else ""
    print(f"rows: {rows['train']:,} train, {rows['valid']:,} valid, {test}"
          f"{manifest['bad_rows']['count']:,} malformed")
    if manifest.get("raw_ids"):
        hashed = sum(t["hashed_texts"] for t in tables.values())
        print(f"raw ids: {len(tables)} columns, {hashed} of them hashes of strings")
    else:
        _print_tables(manifest)
    if manifest["problems"]:
        print(f"problems: {len(manifest['problems'])}, see the warnings above and in "
              f"{output}/manifest.json")
    print(f"written: {output}")


def _print_tables(manifest: dict[str, Any]) -> None:
    """Print the tables' total rows, and how many values of each column the vocabulary lacks."""
    tables = manifest["tables"]
    how = ("unseen values share row 0" if manifest["min_count"] == 1 else
           f"values seen fewer than {manifest['min_count']} times share row 0")
    if "vocabulary" in manifest:
        how = f"vocabulary of {manifest['vocabulary']['path']}"
    elif manifest["hash_rows"] is not None:
        collisions = sum(t["num_collisions"] for t in tables.values())
        how = f"hashed, {collisions:,} values share a row with another one"
    num_rows = sum(t["num_rows"] for t in tables.values())
    print(f"tables: {len(tables)} with {num_rows:,} rows ({how})")
    for name, unseen in manifest.get("unseen", {}).items():
        if unseen["values"]:
            print(f"unseen in {name}: {unseen['values']:,} values, {unseen['accesses']:,} lookups "
                  f"of the training part ({unseen['share']:.2%})")


def configure_vocabulary(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("extend",),
                        help="extend: append rows for new values of further days; old values "
                             "keep their row numbers")
    parser.add_argument("vocabulary", metavar="DIR",
                        help="folder that 'oper preprocess' or 'oper vocabulary extend' wrote")
    parser.add_argument("folders", nargs="+", metavar="DAY",
                        help="folders that 'oper preprocess --vocabulary DIR' wrote")
    parser.add_argument("-o", "--output", "--out", required=True, metavar="NEW",
                        help="folder to write, for 'oper preprocess --vocabulary NEW'")
    parser.add_argument("--min-count", type=whole(1), metavar="N",
                        help="values seen fewer than N times over all days get no row (default: "
                             "that of DIR)")
    parser.add_argument("--max-rows", type=whole(2), metavar="N", help="at most N rows per table")
    parser.add_argument("--reorder", action="store_true",
                        help="renumber all rows in frequency order, and write each row's new "
                             "number (NEW/remap) for 'oper train' and oper.load_checkpoint")
    parser.add_argument("--json", action="store_true", help="print the manifest as JSON")


def run_vocabulary(args: argparse.Namespace) -> int:
    from oper.data.vocabulary.finished import extend

    manifest = extend(args.vocabulary, args.folders, args.output, args.min_count, args.max_rows,
                      args.reorder)
    if args.json:
        print(json.dumps(manifest))
        return 0
    for name, more in manifest["new_rows"].items():
        if more:
            print(f"{name}: {more:,} new rows, {manifest['tables'][name]['num_rows']:,} in all")
    print(f"tables: {len(manifest['tables'])}, {sum(manifest['new_rows'].values()):,} new rows")
    print(f"written: {args.output}")
    return 0


def configure_sequences(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="folder that 'oper preprocess' wrote")
    parser.add_argument("--by", required=True, metavar="NAME",
                        help="column of users or sessions: each gets one row in every part "
                             "that has its events, with lists of the other columns' ids in time "
                             "order; rare, unseen and missing users are left out")
    parser.add_argument("-o", "--output", "--out", required=True, metavar="NEW",
                        help="folder to write")
    parser.add_argument("--columns", type=names, metavar="A,B",
                        help="other columns to keep, with one id per row (default: all)")
    parser.add_argument("--max-length", type=whole(1), metavar="N",
                        help="keep the N latest events of each user")
    parser.add_argument("--min-length", type=whole(1), default=1, metavar="N",
                        help="leave out users with fewer than N events in a part (default 1)")
    parser.add_argument("--compression", choices=("none", "zstd"), default="none",
                        help="compression of the Parquet files (default none)")
    parser.add_argument("--json", action="store_true", help="print the manifest as JSON")


def run_sequences(args: argparse.Namespace) -> int:
    from oper.data.preprocessing.sequences import write_sequences

    manifest = write_sequences(
        args.folder, args.output, args.by, columns=args.columns or None,
        max_length=args.max_length, min_length=args.min_length, compression=args.compression)
    for problem in manifest["problems"]:
        print(f"warning: {problem}", file=sys.stderr)
    if args.json:
        print(json.dumps(manifest))
        return 0
    for split, (kept, events) in manifest["sequences"]["events"].items():
        if events:
            print(f"{split}: {manifest['rows'][split]:,} sequences with {kept:,} of {events:,} "
                  "events")
    print(f"written: {args.output}")
    return 0


def configure_analyze(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR",
                        help="folder that 'oper preprocess' wrote; with --counts a CSV file (plain "
                             "or gzip) with columns field, value, count; with --merge statistics "
                             "files")
    parser.add_argument("more", nargs="*", metavar="STATS",
                        help="with --merge: more statistics files")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--counts", action="store_true", help="read published value counts")
    kind.add_argument("--merge", action="store_true",
                      help="merge statistics files (of days, parts or workers), in time order")
    parser.add_argument("--grown", action="store_true",
                        help="with --merge: later files may have more rows per table, as after "
                             "'oper vocabulary extend'")
    parser.add_argument("--remap", metavar="DIR",
                        help="with --merge: renumber rows as 'oper vocabulary extend --reorder "
                             "-o DIR' did; implies --grown")
    parser.add_argument("--samples", type=whole(1), metavar="N",
                        help="with --counts: number of rows of the counted log (default: the "
                             "largest total count of a field)")
    parser.add_argument("--cut", type=whole(1), metavar="N",
                        help="with --counts: the file lacks values seen fewer than N times, "
                             "whose rows are modelled (default: its smallest count)")
    parser.add_argument("--rows", metavar="FIELD=N,...",
                        help="with --counts: known numbers of distinct values")
    parser.add_argument("-o", "--output", "--out", required=True, metavar="STATS",
                        help="file to write")
    parser.add_argument("--memory", default="2GiB", metavar="SIZE",
                        help="memory for dense counters; tables beyond it are counted by "
                             "sorting, more slowly (default 2GiB)")
    parser.add_argument("--table-memory", default="256MiB", metavar="SIZE",
                        help="memory for each such table's counts, and for the keys of each column "
                             "of raw ids; beyond it, counts of heavy hitters have a bounded error "
                             "and the tail is estimated (default 256MiB)")
    parser.add_argument("--capacity", type=whole(2), metavar="N",
                        help="for raw ids: also forecast each column in a dynamic table of N "
                             "rows: rows in use, lookups of the default row, inserts, evictions "
                             "and expirations (modelled)")
    add_key_rules(parser)
    parser.add_argument("--update-samples", type=whole(1), metavar="N",
                        help="samples of all ranks in an update, for --half-life and "
                             "--time-to-live")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def run_analyze(args: argparse.Namespace) -> int:
    check_target(args.output)
    rule = {name: getattr(args, name) for name in KEY_RULES if getattr(args, name) is not None}
    if rule and not args.capacity:
        raise UsageError("cannot analyze", "options", [f"--{n.replace('_', '-')}" for n in rule],
                         "none of these without --capacity", "add --capacity N")
    has_times = bool({"half_life", "time_to_live"} & rule.keys())
    if has_times and args.update_samples is None:
        raise UsageError("cannot analyze", "--update-samples", None,
                         "a number with --half-life or --time-to-live, which are in updates",
                         "add --update-samples N, the batch size of all ranks together")
    if args.update_samples is not None and not has_times:
        raise UsageError("cannot analyze", "--update-samples", args.update_samples,
                         "no value without --half-life or --time-to-live", "leave it out")
    return _save(_stats(args), args, args.capacity and DynamicRows(args.capacity, **rule))


def _save(stats: AccessStats, args: argparse.Namespace, dynamic: DynamicRows | None = None) -> int:
    from oper.analysis import describe, forecast

    stats.save(args.output)
    summary = {**describe(stats), "output": args.output}
    if dynamic:
        for name, table in stats.tables.items():
            lookups = (args.update_samples or 1) * table.num_accesses / max(1, stats.num_samples)
            summary["tables"][name]["forecast"] = asdict(
                forecast(table, *astuple(dynamic.per_update(lookups))))
            if table.head_counts[table.head_ids == 0].any():
                print(f"warning: --capacity counts row 0 of {name!r}, which rare and unseen values "
                      "share, as one key: preprocess with --raw-ids to count them", file=sys.stderr)
    if args.json:
        print(json.dumps(summary))
    else:
        _print_summary(summary)
    return 0


def _stats(args: argparse.Namespace) -> AccessStats:
    from oper.analysis import (
        CountOptions,
        ValueCountOptions,
        merge_stats,
        renumber_stats,
        stats_from_value_counts,
    )
    from oper.data.analyze import analyze_folder
    from oper.rows.remap import load_remap
    from oper.stats import AccessStats
    from oper.topology import parse_bytes

    if args.more and not args.merge:
        raise UsageError("cannot analyze", "arguments", args.more, "one folder or file",
                         "pass --merge to merge statistics files")
    for name in ("grown", "remap"):
        if getattr(args, name) and not args.merge:
            raise UsageError("cannot analyze", f"--{name}", getattr(args, name),
                             "only together with --merge", "leave it out, or add --merge")
    if args.merge:
        files = [args.folder, *args.more]
        twice = sorted({f for f in files if files.count(f) > 1})
        if twice:
            raise UsageError("cannot merge statistics", "files", twice, "each of them once",
                             "name the files of different parts")
        remap = load_remap(args.remap) if args.remap else None
        merged = merge_stats((AccessStats.load(p) for p in files),
                             args.grown or remap is not None)
        return merged if remap is None else renumber_stats(merged, remap)
    if args.counts:
        return stats_from_value_counts(args.folder, ValueCountOptions(
            args.samples, args.cut, _row_numbers(args.rows)))
    options = CountOptions(dense_budget_bytes=parse_bytes(args.memory),
                           sparse_budget_bytes=parse_bytes(args.table_memory))
    return analyze_folder(args.folder, options=options, show_progress=sys.stderr.isatty())


def _row_numbers(text: str | None) -> dict[str, int] | None:
    pairs = name_values(text or "", ",")
    if pairs is None or not all(x.isdecimal() and len(x) < 20 for x in pairs.values()):
        raise UsageError("cannot analyze", "--rows", text, "FIELD=N,FIELD=N, each field once",
                         "write each field once with its number of rows")
    return {name: int(number) for name, number in pairs.items()} or None


_HEADINGS = ("table", "rows", "touched", "hottest", "top 1%", "top 10%", "90% in rows", "drift")
_FORECAST = ("table", "keys", "rows in use", "default row", "inserts", "evictions", "expired",
             "next is new")


def _print_summary(summary: dict[str, Any]) -> None:
    print(f"{summary['source']}: {summary['num_samples']:,} samples, "
          f"{summary['num_accesses']:,} accesses")
    lines = [_HEADINGS]
    for name, t in summary["tables"].items():
        drift = "-" if t["drift"] is None else f"{t['drift']:.3f}"
        lines.append((name, f"{t['num_rows']:,}", f"{t['num_touched_rows']:,}",
                      f"{t['hottest']:.3f}", f"{t['top_1pct']:.3f}", f"{t['top_10pct']:.3f}",
                      f"{t['rows_for_90pct']:,}", drift))
    print("\n".join(aligned(lines)))
    foreseen = [list(_FORECAST)]
    for name, t in summary["tables"].items():
        if "forecast" in t:
            f = t["forecast"]
            foreseen.append([name, f"{f['keys']:,}", f"{f['occupied']:,.0f} of {f['rows']:,}",
                             *(f"{f[n]:.2%}" for n in ("default_share", "inserts_per_lookup",
                                                       "evictions_per_lookup",
                                                       "expirations_per_lookup", "unseen_mass"))])
    if len(foreseen) > 1:
        print("as dynamic tables (modelled; % of the lookups):")
        print("\n".join(aligned(foreseen)))
    print(f"written: {summary['output']}")


def configure_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("workload", metavar="WORKLOAD",
                        help="criteo-1tb, mlperf-dlrm-v2, meta-2021, deeprecsys-rm1, "
                             "deeprecsys-rm2 or deeprecsys-rm3; a specification (.toml); or a "
                             "statistics file")
    parser.add_argument("-o", "--output", "--out", required=True, metavar="STATS",
                        help="file for the statistics of the lookups")
    parser.add_argument("--samples", type=whole(1), default=100_000, metavar="N",
                        help="samples to draw (default 100000)")
    parser.add_argument("--lookups", metavar="DIR",
                        help="also write the lookups, as Parquet with one list column per table; "
                             "without labels or manifest, so not for 'oper train' or "
                             "'oper analyze'")
    parser.add_argument("--seed", type=whole(0), default=1, metavar="N",
                        help="seed of the draws (default 1)")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def run_generate(args: argparse.Namespace) -> int:
    from oper.data.generate.generator import load_workload
    from oper.data.generate.lookups import count_workload

    check_target(args.output)
    workload = load_workload(args.workload, args.seed)
    return _save(count_workload(workload, args.samples, args.lookups, sys.stderr.isatty()), args)
