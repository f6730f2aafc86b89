"""The flags of ``oper plan``, some of which other commands have as well."""

from __future__ import annotations

import argparse

from oper.messages import MessageBits
from oper.plan import OBJECTIVES, SYNCHRONIZE_BITS
from oper.search.problem.overlap import parse_argument
from oper.search.problem.space import EVERYTHING, check_allow
from oper.support.flags import add_key_rules, number, text_for, whole
from oper.tables import DTYPES, OPTIMIZERS

#: Defaults of ``--batch-size`` and of ``--dense-us``.
DEFAULT_BATCH, NO_DENSE = 2048, "0,0"


def configure_plan(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``oper plan``."""
    parser.add_argument("stats", metavar="STATS", help="statistics written by 'oper analyze'")
    parser.add_argument("-o", "--output", metavar="PLAN", required=True, help="plan file to write")
    parser.add_argument("--objective", choices=OBJECTIVES, default="training",
                        help="workload of the plan (default training)")
    parser.add_argument("--batch-size", type=whole(1), default=DEFAULT_BATCH, metavar="N",
                        help=f"samples per rank and step (default {DEFAULT_BATCH}; with "
                             "--latency-bound, it is chosen)")
    add_overlap(parser)
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    add_machine(parser.add_argument_group("machine"))
    _add_tables(parser.add_argument_group("tables"))
    _add_dynamic(parser.add_argument_group("dynamic tables"))
    _add_search(parser.add_argument_group("search"))
    _add_hosts(parser.add_argument_group("several hosts"))
    _add_inference(parser.add_argument_group("inference"))


def _add_search(group: argparse._ActionsContainer) -> None:
    group.add_argument("--constraints", metavar="FILE",
                       help="JSON: tables, keep_together, keep_apart, memory_bytes, reserve_bytes")
    group.add_argument("--allow", type=text_for(allowed), metavar="NAMES",
                       help="placements and modes that the plan may use, separated by commas: "
                            "replicated, striped, owned, pull, push, columns, host, per_host; or "
                            "everything (all but per_host). Default: those that suit the "
                            "topology, and host memory if rows do not fit without it")
    group.add_argument("--effort", choices=("fast", "thorough"), default="fast",
                       help="effort of the search and of raising the bound (default fast)")
    group.add_argument("--time-budget", type=number(above=True), metavar="S",
                       help="seconds after which the best plan so far is written (default: no "
                            "limit)")
    group.add_argument("--target-gap", type=number(), default=0.01, metavar="X",
                       help="stop when the gap to the bound is at most this (default 0.01)")
    group.add_argument("--seed", type=whole(0), default=0, metavar="N",
                       help="seed of the search (default 0)")
    group.add_argument("--start", metavar="PLAN",
                       help="start from a plan of the same tables and ranks; the new plan is "
                            "never slower")


def _add_hosts(group: argparse._ActionsContainer) -> None:
    add_message_bits(group, "stored in the plan (default 32, exact)")
    group.add_argument("--message-variance", type=number(above=True), metavar="V",
                       help="choose the bits by table, so that the mean squared rounding error, "
                            "relative to the squares of rows read and of gradients, is at most V "
                            "(1.6e-5 usually allows 16 bits everywhere)")
    group.add_argument("--synchronize-every", type=whole(1), metavar="K",
                       help="choose the number of replica groups, each with all tables, that are "
                            "synchronized after K updates; the plan is for the ranks of a group "
                            "(default: one group)")
    group.add_argument("--synchronize-delay", type=whole(0), default=0, metavar="D",
                       help="number of updates made while the rows of a synchronization are sent, "
                            "at most K, and 0 if K is 1 (default 0: training waits)")
    group.add_argument("--synchronize-bits", type=whole(8, 32), default=32,
                       choices=SYNCHRONIZE_BITS,
                       help="bits per number of the rows (if K is 1, gradients) that groups send "
                            "to each other (default 32, exact)")


def _add_inference(group: argparse._ActionsContainer) -> None:
    group.add_argument("--user-features", metavar="NAMES",
                       help="features, separated by commas, that a request names once for all of "
                            "its --candidates; their rows are looked up once")
    group.add_argument("--candidates", type=number(1.0), metavar="N",
                       help="samples per request, which share its user features; state at most 64 "
                            "for 'oper serve', which looks rows up again for every 64 samples")
    group.add_argument("--request-rate", type=number(above=True), metavar="R",
                       help="samples per second, with --latency-bound; chooses the replicas and "
                            "batching that need the least memory")
    group.add_argument("--latency-bound", type=number(above=True), metavar="MS",
                       help="upper limit of the 99th percentile of latency, milliseconds")
    group.add_argument("--dense-us", metavar="FIXED,PER_SAMPLE", default=NO_DENSE,
                       help="dense compute of a batch, microseconds, for --latency-bound")


def add_overlap(parser: argparse._ActionsContainer) -> None:
    """Add ``--overlap``, the dense compute that overlaps with lookups and updates."""
    parser.add_argument("--overlap", action="append", default=[], metavar="PHASE=US",
                        type=text_for(lambda text: parse_argument([text])),
                        help="microseconds of dense compute (one number, or one per rank separated "
                             "by commas) that overlap with forward, backward, update or resolve; "
                             "may be repeated")


def add_message_bits(parser: argparse._ActionsContainer, what: str) -> None:
    """Add ``--message-bits``, the precision of messages between hosts; `what` ends its help."""
    parser.add_argument("--message-bits", metavar="BITS", type=text_for(MessageBits.from_text),
                        help="bits per number in messages between hosts: 32, 16, 8 or 4, or one "
                             "for answers and one for gradients as in 16,8, or by table as in "
                             f"'user=8;item=16,8' (other tables: 32); {what}")


def add_machine(parser: argparse._ActionsContainer, default: str = "") -> None:
    """Add ``--topology`` and ``--world-size``. `default` describes the default topology in the
    help; without it, ``--topology`` is required."""
    parser.add_argument("--topology", metavar="NAME|FILE", required=not default,
                        help="this-host, a preset such as h100-8 or h100-2x8, or a TOML file"
                             + f" ({default})" * bool(default))
    parser.add_argument("--world-size", type=whole(1, 1024), metavar="N",
                        help="number of ranks, for this-host (default "
                             + ("the plan's)" if default else "2)"))


def _add_tables(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--dim", type=whole(1), metavar="D",
                        help="columns of every table (default 64)")
    parser.add_argument("--optimizer", choices=sorted(OPTIMIZERS), metavar="NAME",
                        help="optimizer of every table (default rowwise_adagrad), one of "
                             + ", ".join(sorted(OPTIMIZERS)))
    parser.add_argument("--dtype", choices=DTYPES,
                        help="type of every table's rows (default float32; int8 and int4 for "
                             "inference)")
    parser.add_argument("--tables", metavar="FILE",
                        help="JSON list of tables (name, num_rows, dim, ...); replaces --dim, "
                             "--optimizer and --dtype")


def _add_dynamic(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--dynamic-rows", metavar="ROWS",
                        help="statistics are of raw keys: plan dynamic tables with this number of "
                             "rows, or with numbers by table as in 'C3=4000000;C9=1000' (other "
                             "tables: static)")
    add_key_rules(parser)


def allowed(text: str | None) -> frozenset[str] | None:
    """Parse the value of ``--allow``; None if the flag is not given."""
    if text is None:
        return None
    return EVERYTHING if text == "everything" else check_allow(x.strip() for x in text.split(","))
