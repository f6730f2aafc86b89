"""``oper serve``: score requests until SIGTERM."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from oper.errors import FileFormatError, InvalidInputError, UsageError
from oper.serve.requests import check_model, check_name
from oper.support.flags import number, text_for, whole

_ROW_DTYPES = ("float32", "float16", "int8", "int4")
_OF_FOLDERS = ("name", "row_dtype", "error_budget", "stats", "keep_spare")
_LIMITS: tuple[tuple[str, Callable[[str], Any], Any, str | None, str], ...] = (
    ("port", whole(0, 65535), 8500, None, "port to listen on; 0 = any free port"),
    ("workers", whole(1), 2, "N", "scoring processes"),
    ("threads", whole(1), 1, "N", "threads of each worker"),
    ("max-batch", whole(1), 1024, "SAMPLES", "maximum samples per scored batch"),
    ("max-wait-ms", number(), 0, "MS",
     "longest time that a request waits for others while the model is idle, milliseconds"),
    ("max-queued", whole(1), 16_384, "SAMPLES",
     "maximum samples that wait in a worker; further requests get status 503"),
    ("max-bytes", whole(1), 8 << 20, "N", "maximum size of a request, bytes"),
    ("spin-us", number(), 0, "US",
     "time for which an idle worker polls for requests before it sleeps, microseconds"),
    ("drain-s", number(), 30, "S", "seconds for requests in flight after SIGTERM"))


def configure_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="output folder of 'oper train', or "
                        "MODULE:FUNCTION that returns a predictor (see docs/how-to/serve.md)")
    parser.add_argument("--name", type=text_for(check_name),
                        help="name of the model in URLs, for a folder (default dlrm)")
    parser.add_argument("--host", default="127.0.0.1",
                        help="address to listen on (default 127.0.0.1)")
    for name, kind, default, metavar, about in _LIMITS:
        parser.add_argument(f"--{name}", type=kind, default=default, metavar=metavar,
                            help=f"{about} (default {default})")
    parser.add_argument("--row-dtype", choices=_ROW_DTYPES,
                        help="type of the tables' rows (default: as trained)")
    parser.add_argument("--error-budget", type=number(above=True), metavar="X",
                        help="instead of --row-dtype: store rows as float16, int8 or int4, "
                             "hotter rows in wider types, in as few bytes as possible; the "
                             "expected squared error of rows read, relative to their squares, is "
                             "at most X (1e-4: an error of 1 %% root mean square)")
    parser.add_argument("--stats", metavar="FILE",
                        help="access statistics of 'oper analyze', for --error-budget")
    parser.add_argument("--keep-spare", action="store_true",
                        help="keep the second buffer, for new weights, between publications")
    parser.add_argument("--trace", metavar="FILE", default="",
                        help="file to which the server writes a timeline of requests, batches and "
                             "publications on SIGUSR1, for ui.perfetto.dev")
    parser.add_argument("--trace-s", type=number(above=True), metavar="S",
                        help="length of the timeline in seconds (default 5)")
    parser.add_argument("--watch", action="store_true", help="publish newer weights of the "
                        "folder as they appear; only the changed rows if the run saves deltas "
                        "(delta_every)")
    parser.add_argument("--follow", metavar="DIR_OR_URL", help="like --watch, for another folder "
                        "to which the run's files are copied, or one in a store, such as "
                        "s3://bucket/run")
    parser.add_argument("--json", action="store_true", help="print the address as JSON")
    parser.epilog = ("SIGTERM or Ctrl-C: finish the requests in flight and exit with 0. SIGHUP: "
                     "publish the folder's weights again. SIGUSR1: record --trace.")


def run_serve(args: argparse.Namespace) -> int:
    """Run ``oper serve``; return the exit code, or raise OperError."""
    from oper.serve.signals import Signals

    if args.trace_s is not None and not args.trace:
        raise UsageError(f"cannot serve {args.model}", "--trace-s", args.trace_s,
                         "no value without --trace", "add --trace FILE")
    with Signals() as signals:  # before the imports, which take seconds
        from oper.integration.checkpoint.follow import Follower
        from oper.serve.options import BatchOptions, ServeOptions
        from oper.serve.server import Server
        from oper.support.processes import raise_file_limit

        raise_file_limit()  # all files of a delta, at least one of each rank, are open at once
        options = ServeOptions(
            args.host, args.port, args.workers, args.threads,
            BatchOptions(args.max_batch, args.max_wait_ms, args.max_queued), args.max_bytes,
            drain_s=args.drain_s, spin_us=args.spin_us, trace=args.trace, trace_s=args.trace_s)
        with contextlib.ExitStack() as stack:
            folder, run = args.follow or args.model, None
            if args.follow:
                from oper.data.reading.store import is_url
                from oper.train.mirror import RunMirror

                if is_url(args.follow):
                    folder = str(stack.enter_context(RunMirror(args.follow)).folder)
            if args.watch or args.follow:
                from oper.train.trained import find_weights

                run = Follower(partial(find_weights, folder), in_service=not args.follow)
            model = _model(args)
            if args.follow:
                _read_from(model, folder)
            server = Server(model, options)
            stack.callback(server.stop)
            server.start(signals)
            where = {"address": server.address, "model": server.model.signature.name,
                     "pid": os.getpid(), "workers": server.worker_pids}
            print(json.dumps(where) if args.json else
                  f"serving {where['model']} at http://{server.address} with {args.workers} "
                  f"worker{'' if args.workers == 1 else 's'}", flush=True)

            server.serve_until_signalled(
                None if run is None else lambda: server.follow(run), signals)
    return 0


def _read_from(model: Any, folder: str) -> None:
    """Make a model read its next weights from another folder."""
    from oper.serve.model import PublishedModel
    from oper.train.trained import read_weights

    if not isinstance(model, PublishedModel) or not os.path.isdir(folder):
        raise InvalidInputError("cannot follow a training run", "model, folder",
                                (type(model).__name__, folder),
                                "a PublishedModel and an existing folder",
                                "make the folder, or serve what oper train wrote")
    read = model.read_folder or read_weights
    model.reads_again(lambda: read(folder))


def _row_dtype(args: argparse.Namespace) -> Any:
    """Return one row dtype, `TieredRows` for dtypes by hotness, or None for the model's dtypes."""
    from oper.serve.options import TieredRows
    from oper.stats import AccessStats

    if (args.error_budget is None) != (args.stats is None) or (args.stats and args.row_dtype):
        raise UsageError("cannot choose row dtypes", "--error-budget, --stats, --row-dtype",
                         (args.error_budget, args.stats, args.row_dtype),
                         "--error-budget with --stats, or --row-dtype alone",
                         "pass a budget and statistics, or one type for all rows")
    return args.row_dtype if args.stats is None else TieredRows(
        AccessStats.load(args.stats), args.error_budget)


def _model(args: argparse.Namespace) -> Any:
    module, colon, function = args.model.partition(":")
    if not colon or os.path.exists(args.model):
        if not os.path.isdir(args.model):
            raise InvalidInputError("cannot serve", "model", args.model,
                                    "a folder that oper train wrote, or MODULE:FUNCTION",
                                    "check the path")
        from oper.serve.model import load_model
        from oper.train.trained import find_weights

        with contextlib.suppress(FileFormatError):  # load_model raises it, after other errors
            print(f"loading {find_weights(args.model)}", file=sys.stderr, flush=True)
        return load_model(args.model, args.name or "dlrm", _row_dtype(args), args.keep_spare)
    given = [f"--{name.replace('_', '-')}" for name in _OF_FOLDERS if getattr(args, name)]
    if given:
        raise UsageError(f"cannot serve {args.model}", "options", given,
                         "none of these, which apply to the model of a folder",
                         f"set them in {function}")
    sys.path.insert(0, os.getcwd())
    try:
        make = getattr(importlib.import_module(module), function)
        if not callable(make):
            raise TypeError(f"{function} is of type {type(make).__name__}, not a function")
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise InvalidInputError("cannot serve", "model", args.model,
                                f"a folder, or MODULE:FUNCTION that can be imported ({error})",
                                "correct the name, or install the module") from error
    model = make()
    check_model(model, f"cannot serve what {args.model} returns")
    return model
