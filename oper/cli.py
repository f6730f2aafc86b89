"""The ``oper`` command line: imports and runs the module of the given subcommand.

A subcommand's module has two functions, ``configure_<name>(parser)`` and ``run_<name>(args) ->
int``. Results go to stdout, everything else to stderr. Exit codes: 0 ok, 1 failure, 2 usage,
3 infeasible plan, 130 interrupted.
"""

from __future__ import annotations

import argparse
import codecs
import importlib
import io
import logging
import os
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from oper import __version__
from oper.errors import OperError, PlanInfeasibleError, UsageError
from oper.support.flags import Parser

COMMANDS: dict[str, tuple[str, str]] = {  # name: module, one line of help
    "preprocess": ("oper.data.verbs", "turn click logs into training data with ids by hotness"),
    "vocabulary": ("oper.data.verbs", "extend a finished vocabulary by the new values of a day"),
    "sequences": ("oper.data.verbs", "turn a log's events into one row per user, in time order"),
    "analyze": ("oper.data.verbs", "count how often each row is looked up (access statistics)"),
    "generate": ("oper.data.verbs", "generate the access statistics of a synthetic workload"),
    "plan": ("oper.search.verbs", "place every row, with a lower bound on any plan's step time"),
    "verify": ("oper.search.verbs", "check the proof of a plan's lower bound independently"),
    "explain": ("oper.report.verbs",
                "show a plan's loads, its bottleneck and the effect of changes"),
    "simulate": ("oper.report.simulation", "replay batches through a plan: bytes, times, timeline"),
    "report": ("oper.report.verbs", "make an HTML page of statistics, a plan, a record or a run"),
    "train": ("oper.train.verbs", "train a DLRM or a recommender from a configuration file"),
    "serve": ("oper.serve.verbs", "score requests over HTTP; workers share one set of tables"),
    "demo": ("oper.bench.demo.demo",
             "count, plan and train on a click log, compared with TorchRec"),
    "bench": ("oper.bench.verbs", "compare with other systems and with the machine's limits"),
    "calibrate": ("oper.bench.calibrate.calibrate",
                  "measure the cost model's constants on this machine"),
    "doctor": ("oper.report.doctor",
               "check the installation and the machine"),
}


def build_parser(command: str | None) -> argparse.ArgumentParser:
    """Return the command-line parser; only the subcommand `command` is imported and gets its
    arguments."""
    parser = Parser(
        prog="oper",
        description="Place the rows of embedding tables by how often they are looked up; train and "
                    "serve models with them.",
        epilog="The usual order is preprocess, analyze, plan, train, serve. 'oper COMMAND --help' "
               "explains a command. Exit codes: 0 ok, 1 failure, 2 usage, "
               "3 no plan fits the machine, 130 interrupted. OPER_DEBUG=1 prints tracebacks.")
    parser.add_argument("--version", action="version", version=f"oper {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, help_line) in COMMANDS.items():
        about = help_line[:1].upper() + help_line[1:]
        sub = commands.add_parser(name, help=help_line, description=about)
        if name == command:
            getattr(importlib.import_module(module), f"configure_{name}")(sub)
    return parser


_plain_format = warnings.formatwarning


def _format_warning(message: Warning | str, category: type[Warning], filename: str, lineno: int,
                    line: str | None = None) -> str:
    """Format warnings raised in this package without source position, others as Python does."""
    if (category in (UserWarning, DeprecationWarning)
            and Path(filename).is_relative_to(Path(__file__).parent)):
        return f"oper: {message}\n"
    return _plain_format(message, category, filename, lineno, line)


def _open_streams() -> None:
    """Prepare stdout and stderr so that printing cannot fail.

    Characters that stdout's encoding lacks (LANG=C) are escaped; bytes of file names that could not
    be decoded are written unchanged. A closed stderr is replaced by /dev/null.

    Raises:
        OperError: stdout is closed, so no result could be printed.
    """
    def spell(error: UnicodeError) -> tuple[str | bytes, int]:
        assert isinstance(error, UnicodeEncodeError)
        text = error.object[error.start:error.end]
        return b"".join(bytes([ord(c) - 0xDC00]) if "\udc80" <= c <= "\udcff"
                        else c.encode("ascii", "backslashreplace") for c in text), error.end

    codecs.register_error("oper-spell", spell)
    if sys.stderr is None:  # closed: print(file=None) would write to stdout instead
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (for all that follows)
    if sys.stdout is None:
        raise OperError("cannot print results", "stdout", "closed", "an open stream",
                        "leave it open, or send it to a file or to /dev/null")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="oper-spell")


def _readable(text: str) -> str:
    """Replace surrogates, to which Python decodes bytes of file names that are not UTF-8, by
    ``\\xff`` escapes, including surrogates that `repr` has escaped already."""
    return re.sub(r"\\udc([89a-f][0-9a-f])", r"\\x\1",
                  text.encode("utf-8", "backslashreplace").decode())


def _described(error: Exception) -> str:
    """The message of an error; of an operating system's error its path, reason and remedy instead
    of its number."""
    if (not isinstance(error, OSError) or not isinstance(error.filename, (str, bytes))
            or not error.strerror):
        return _readable(str(error))
    remedy = ("check its permissions" if isinstance(error, PermissionError) else
              "check the path" if isinstance(error, (FileNotFoundError, IsADirectoryError,
                                                     NotADirectoryError)) else "")
    return _readable(f"cannot use {os.fsdecode(error.filename)!r}: {error.strerror}"
                     + f"; {remedy}" * bool(remedy))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code. As usual with argparse, its usage errors raise
    SystemExit(2), ``--help`` and ``--version`` SystemExit(0)."""
    words = list(sys.argv[1:] if argv is None else argv)
    command = next((w for w in words if not w.startswith("-")), None)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(message)s")
    logging.getLogger("oper").setLevel(logging.INFO)
    # Users of the command line do not need the source position of a warning.
    warnings.formatwarning = _format_warning
    warnings.filterwarnings("default", category=DeprecationWarning, module=r"oper\.")
    try:
        _open_streams()
        args = build_parser(command).parse_args(words)
        if args.command != "doctor":  # `doctor` itself reports everything that is wrong
            from oper.support.environment import check_environment

            check_environment(f"cannot run oper {args.command}")
        module = importlib.import_module(COMMANDS[args.command][0])
        code = int(getattr(module, f"run_{args.command}")(args))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("oper: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of stdout has exited; avoid a second error when Python flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (OperError, OSError) as error:
        if os.environ.get("OPER_DEBUG") == "1":
            raise
        print(f"oper: {_described(error)}", file=sys.stderr)
        kinds = {PlanInfeasibleError: 3, UsageError: 2}
        return next((code for kind, code in kinds.items() if isinstance(error, kind)), 1)
