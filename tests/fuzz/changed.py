"""``python -m tests.fuzz.changed``: read every format from many modified valid files.

Each format runs in a process of its own, which this one monitors: it may only raise OperError, and
must neither crash nor hang nor allocate much memory. The number of an execution determines its
input. With ``--json F`` results are stored in F, and a later call continues with other inputs.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import resource
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from oper.bench.core import record
from tests.faults.pauses import Pauses
from tests.fuzz.targets import MEMORY, TARGETS, change, describe, one, place, seeds

_HANG_S, _MEMORY_BYTES = 60.0, 4 << 30


def _run(name: str, files: str, last: int, counts: tuple[Any, Any], pipe: Any) -> None:
    """Run executions up to `last` - 1 in this process, in the folder `files`; report a defect and
    stop."""
    at, accepted = counts
    place(Path(files))
    warnings.simplefilter("ignore")
    if name != "exchange":  # its buffers take pages when they are filled
        resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
    good = seeds(name)
    for number in range(at.value, last):
        at.value = number
        try:
            accepted.value += one(name, input_of(name, good, number))
        except Exception as error:
            pipe.send(describe(error))
            return
    at.value = last


def input_of(name: str, good: list[bytes], number: int) -> bytes:
    """Return the input of an execution."""
    rng = random.Random(f"{name} {number}")
    return change(rng.choice(good), rng)


def run(name: str, runs: int, case: dict[str, Any], pauses: Pauses) -> None:
    """Run a format until it has had `runs` executions in total, and record the result in `case`."""
    context = multiprocessing.get_context("spawn")
    at, accepted = context.Value("q", case["executions"]), context.Value("q", 0)
    began = time.monotonic()
    while at.value < runs:
        here, there = context.Pipe(duplex=False)
        # The files' folder is removed here, since a process that crashes leaves its own behind.
        with tempfile.TemporaryDirectory(prefix="fuzz-", dir=MEMORY) as files:
            process = context.Process(target=_run,
                                      args=(name, files, runs, (at, accepted), there))
            process.start()
            there.close()
            problem = _watch(process, at, pauses)
        with contextlib.suppress(EOFError):
            problem = here.recv() if here.poll() else problem
        if process.exitcode and not problem:
            problem = f"ended with {process.exitcode}"
        here.close()
        if problem:
            case["defects"].append({"number": at.value, "what": problem})
            print(f"{name}, execution {at.value}: {problem}", file=sys.stderr, flush=True)
            at.value += 1
            if len(case["defects"]) >= 20:
                break
    case["executions"] = at.value
    case["accepted"] += accepted.value
    case["seconds"] = round(case["seconds"] + time.monotonic() - began, 1)


def _watch(process: Any, at: Any, pauses: Pauses) -> str:
    """Wait for the end of a process; return the defect if it makes no progress.

    Time during which this program was stopped does not count, nor time during which the process was
    ready to run but got no processor: on a busy machine, a process of low priority may wait a
    minute for its start.
    """
    seen, idle = (at.value, pauses.count), 0.0
    then, used = time.monotonic(), 0.0
    while True:
        process.join(0.5)
        if not process.is_alive():
            return ""
        now = time.monotonic()
        ready, total = _processor(process.pid)
        idle += total - used if ready else now - then
        then, used = now, total
        if (at.value, pauses.count) != seen:
            seen, idle = (at.value, pauses.count), 0.0
        elif idle > _HANG_S:
            process.kill()
            process.join()
            return f"no end within {_HANG_S:.0f} s"


def _processor(pid: int) -> tuple[bool, float]:
    """Return whether the first thread of a process is running or ready, and the processor time of
    all its threads, s."""
    try:
        said = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended meanwhile
        return True, 0.0
    return said[0] == "R", (int(said[11]) + int(said[12])) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.changed", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("formats", nargs="*", metavar="FORMAT",
                        help=f"of {sorted(TARGETS)}; default: all")
    parser.add_argument("--runs", type=int, default=200_000, help="executions of each in all")
    parser.add_argument("--json", type=Path, metavar="F", help="kept there, gone on with")
    args = parser.parse_args()
    load, held = record.load_average(), {}
    if args.json is not None and args.json.exists():
        held = {c["name"]: c for c in json.loads(args.json.read_text())["cases"]}
    names = args.formats or sorted(TARGETS)
    unknown = set(names) - set(TARGETS)
    if unknown:
        parser.error(f"no formats: {sorted(unknown)}")
    with Pauses().watched() as pauses:
        for name in names:
            case = held.setdefault(name, {"name": name, "executions": 0, "accepted": 0,
                                          "defects": [], "seconds": 0.0})
            run(name, args.runs, case, pauses)
            print(f"{name:<16} {case['executions']:>12,} executions, {case['accepted']:>9,} "
                  f"accepted, {len(case['defects'])} defects, {case['seconds']:.0f} s", flush=True)
            if args.json is not None:
                record.write(args.json, record.record(
                    "fuzzing", ["python", "-m", "tests.fuzz.changed", *sys.argv[1:]],
                    list(held.values()), load))
    print(f"{sum(c['executions'] for c in held.values()):,} executions in all")
    return 1 if any(c["defects"] for c in held.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
