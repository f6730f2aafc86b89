"""Helpers for the tests of several packages: small plans, hypothesis strategies, real data."""

import gc
import io
import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import strategies as st

from oper import cli
from oper.plan import Piece, Plan, TablePlan, Tier
from oper.stats import AccessStats, TableStats, TimeBucket
from oper.tables import TableSpec

ROOT = Path(__file__).resolve().parent.parent


def read_trace(path: Path) -> dict[str, Any]:
    """Read a trace in the Trace Event format of Perfetto and Chrome, and check its format."""
    def refuse(number: str) -> float:
        raise ValueError(f"{number} is not JSON")

    found: dict[str, Any] = json.loads(path.read_text(), parse_constant=refuse)
    assert found["displayTimeUnit"] in ("ms", "ns")
    named = set()
    for event in found["traceEvents"]:
        assert isinstance(event["name"], str) and event["ph"] in ("X", "M"), event
        assert type(event["pid"]) is int and type(event["tid"]) is int, event
        if event["ph"] == "X":  # complete: times in microseconds
            assert event["ts"] >= 0 and event["dur"] >= 0, event
            assert isinstance(event["cat"], str) and isinstance(event["args"], dict), event
            assert (event["pid"], event["tid"]) in named, event
        elif event["name"] == "thread_name":
            named.add((event["pid"], event["tid"]))
    return found


def real_data(name: str) -> Path:
    """Return the path of a file or folder of real data; skip the test if it is missing."""
    folder = os.environ.get("OPER_DATA")
    if not folder:
        pytest.skip(f"{name}: OPER_DATA is not set")
    path = Path(folder) / name
    if not path.exists():
        pytest.skip(f"{name}: not in OPER_DATA={folder}")
    return path


def run_oper(*words: str, env: dict[str, str] | None = None, cwd: Path = ROOT
             ) -> subprocess.CompletedProcess[str]:
    """Run ``python -m oper`` with these arguments."""
    return subprocess.run([sys.executable, "-m", "oper", *words], cwd=cwd, capture_output=True,
                          text=True, check=False, timeout=300, env={**os.environ, **(env or {})})


def run_here(*words: object, env: dict[str, str] | None = None
             ) -> subprocess.CompletedProcess[str]:
    """Run like `run_oper`, but in this process, which saves an import of torch."""
    arguments = [str(w) for w in words]
    with (mock.patch.dict(os.environ, env or {}), mock.patch.object(logging.root, "handlers", []),
          redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err):
        try:
            code = cli.main(arguments)
        except SystemExit as end:
            code = int(str(end.code))
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


@contextmanager
def serving(model: object, *flags: str, folder: Path = ROOT, env: dict[str, str] | None = None,
            **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Run ``oper serve`` on a free port in a separate process, which ends with the block.

    Args:
        model: a folder, or a function of this project or of a module in `folder`.
        flags: further arguments of the command.
        folder: working folder.
        env: additional environment variables.
        options: further arguments of `subprocess.Popen`; if there are any, a new interpreter is
            started.
    """
    from tests.forked import Forked

    process = (subprocess.Popen if options else Forked)(
        [sys.executable, "-m", "oper", "serve", str(model), "--port", "0", *flags], cwd=folder,
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)]), **(env or {})})
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def announced(server: subprocess.Popen[str]) -> dict[str, Any]:
    """Return what ``oper serve --json`` prints when it is ready: its address and its workers."""
    assert server.stdout is not None
    found: dict[str, Any] = json.loads(server.stdout.readline())
    return found


def run_command(*words: object) -> int:
    """Run a command in this process and return its result; raises errors, which `cli.main` would
    print."""
    command = str(words[0])
    args = cli.build_parser(command).parse_args([str(w) for w in words])
    run: int = getattr(import_module(cli.COMMANDS[command][0]), f"run_{command}")(args)
    return run


def damage_record(path: Path, start: bytes) -> None:
    """Flip one bit in every fourth byte of a sequence of numbers in a file that begins with
    `start`.

    ``torch.load`` still accepts the archive without an error.
    """
    data = bytearray(path.read_bytes())
    begin = data.index(start)
    for k in range(begin, begin + len(start), 4):
        data[k] ^= 1
    path.write_bytes(data)


def map_tiers(plan: Plan, change: Callable[[Tier], Tier]) -> Plan:
    """Return the plan with ``change(tier)`` in place of each tier."""
    return replace(plan, tables=tuple(replace(t, pieces=tuple(
        replace(p, tiers=tuple(map(change, p.tiers))) for p in t.pieces)) for t in plan.tables))


def pushed(plan: Plan) -> Plan:
    """Return the plan with all rows pooled by their owners."""
    return map_tiers(plan, lambda tier: replace(tier, mode="push"))


def pulled(plan: Plan) -> Plan:
    """Return the plan with all rows gathered by their readers."""
    return map_tiers(plan, lambda tier: replace(tier, mode="pull"))


def mixed_plan() -> Plan:
    """Make a plan for two ranks and two tables with all placements, a weighted stripe, a column
    split and a head order."""
    hot = TableSpec("hot", 10, 8, ("a", "b"))
    wide = TableSpec("wide", 6, 4, ("c",), pooling="mean")
    return Plan(2, (
        TablePlan(hot, (Piece(0, 8, (
            Tier(0, 2, "replicated", (0, 1)),
            Tier(2, 6, "striped", (1, 0), (3, 1)),
            Tier(6, 10, "owned", (1,), mode="push"))),), np.array([7, 3, 9], np.int64)),
        TablePlan(wide, (
            Piece(0, 2, (Tier(0, 6, "owned", (0,), memory="host"),)),
            Piece(2, 4, (Tier(0, 6, "striped", (0, 1)),)))),
    ), batch_size=64, topology="test", step_us=12.5, lower_bound_us=10.0, notes={"seed": 3})


@st.composite
def table_stats(draw: st.DrawFn, num_rows: int = 40) -> TableStats:
    """Draw exact statistics of one table with `num_rows` rows."""
    def counts(keys: st.SearchStrategy[int], max_size: int) -> tuple[np.ndarray, np.ndarray]:
        pairs = draw(st.dictionaries(keys, st.integers(1, 1 << 40), max_size=max_size))
        ordered = sorted(pairs.items())
        return (np.array([k for k, _ in ordered], np.int64),
                np.array([v for _, v in ordered], np.int64))

    ids = st.integers(0, num_rows - 1)
    samples = np.array(sorted(draw(st.sets(st.sampled_from([1, 8, 64, 512])))), np.int64)
    rows = np.array([draw(st.floats(0, num_rows)) for _ in samples])
    windows = np.array([draw(st.integers(1, 1000)) for _ in samples], np.int64)
    labels = sorted(draw(st.sets(st.sampled_from(["day-0", "day-1", "day-2"]))))
    buckets = tuple(TimeBucket(label, *counts(ids, 5)) for label in labels)
    return TableStats.from_counts(num_rows, *counts(ids, num_rows),
                                  counts(st.integers(0, 30), 6), (samples, rows, windows), buckets)


@st.composite
def access_stats(draw: st.DrawFn) -> AccessStats:
    """Draw exact statistics of two tables."""
    return AccessStats(draw(st.integers(0, 1 << 40)),
                       {"a": draw(table_stats(40)), "b": draw(table_stats(7))},
                       draw(st.sampled_from(["", "log", "day 1"])), draw(st.booleans()))


def counts_by(ids: np.ndarray, counts: np.ndarray) -> dict[int, int]:
    """Return counts by id, to be compared with a `Counter`."""
    return dict(zip(ids.tolist(), counts.tolist(), strict=True))


def check_page(page: str) -> None:
    """Check that an HTML page is self-contained: nothing is fetched, no script runs."""
    fetched = r"\b(?:src|srcset|poster|action|data)=[\"']|href=[\"'](?!#)|url\((?!['\"]?#)"
    assert not re.search(rf"<script|<link|@import|://|{fetched}", page)
    assert page.count("<html") == 1 and "prefers-color-scheme: dark" in page


def wait_for(condition: Any, seconds: float = 180) -> None:
    """Wait until `condition` holds; fail after a time that suffices on any machine."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)


def frames_of(run: Callable[[], Any]) -> tuple[Any, list[tuple[str, str]]]:
    """Call `run`; return its result, and (file, function) of each call of this project in it.

    Calls on the threads of autograd are included, those of finalizers are not, since the garbage
    collector may run them at any time.
    """
    seen: list[tuple[str, str]] = []
    package = str(Path(cli.__file__).parent)

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(package):
            seen.append((code.co_filename, code.co_qualname))

    gc.collect()
    gc.disable()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        found = run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        gc.enable()
    return found, seen
