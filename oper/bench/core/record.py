"""Benchmark records: versions, machine, timings; and writing them."""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from oper.bench.core.memory import cpu_seconds
from oper.errors import InvalidInputError
from oper.support import kernel
from oper.support.files import read_json, write_text
from oper.support.versions import versions


def machine() -> dict[str, Any]:
    """Processor, cores, memory (bytes), kernel and the kernel's huge-page settings."""
    model = kernel.pairs("/proc/cpuinfo")
    cpu = model.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in model:
        cpu += f" (family {model['cpu family']} model {model.get('model', '?')})"
    return {
        "cpu": cpu, "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "transparent_huge_pages": kernel.huge_pages("enabled") or "unknown",
        "shared_huge_pages": kernel.huge_pages("shmem_enabled") or "unknown",
    }


def load_average() -> float:
    """Runnable processes, mean of the last minute."""
    return round(os.getloadavg()[0], 2)


class BusyClock:
    """Measures how many cores other programs keep busy during a measurement.

    Args:
        own: function that returns the processor time (s) of the measured program; by default that
            of this process and its descendants.
    """

    def __init__(self, own: Callable[[], float] = lambda: cpu_seconds(os.getpid())) -> None:
        self._begin, self._busy = time.perf_counter(), _busy_seconds()
        self._read, self._own = own, own()

    def others(self, total: Callable[[list[float]], list[float]] = list) -> float:
        """Mean busy cores since the start, less this program's own. Collective.

        Args:
            total: function that sums each of the given numbers over ranks, where there are several.
        """
        own, = total([self._read() - self._own])
        wall = time.perf_counter() - self._begin
        return max(0.0, (_busy_seconds() - self._busy - own) / wall)


def _busy_seconds() -> float:
    """Processor time (s) that the whole machine has spent since boot, all cores together."""
    try:
        line = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0]
    except OSError:
        return 0.0
    ticks = [int(x) for x in line.split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def summary(seconds: np.ndarray) -> dict[str, float]:
    """Median, 10th and 90th percentile and minimum in milliseconds, of float64 [n] seconds."""
    ms = np.asarray(seconds, np.float64) * 1e3
    low, middle, high = np.percentile(ms, [10, 50, 90])
    return {"median_ms": round(float(middle), 4), "p10_ms": round(float(low), 4),
            "p90_ms": round(float(high), 4), "min_ms": round(float(ms.min()), 4), "n": int(ms.size)}


def elapsed(call: Callable[[], Any]) -> float:
    """Seconds that a call takes by the host's clock."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def interleave(runs: Mapping[str, Callable[[int], Any]], align: Callable[[], None], rounds: int,
               per_round: int, lead_in: int = 1,
               before: Mapping[str, Callable[[int], Any]] | None = None,
               seconds: Callable[[Callable[[], Any]], float] | None = None
               ) -> dict[str, np.ndarray]:
    """Time several contenders in one run, in turns.

    In every round each contender makes `lead_in` untimed and then `per_round` timed calls; the
    order of the contenders rotates from round to round. Call k of each contender gets the number k,
    so all of them use the same inputs in the same order.

    Args:
        runs: functions by contender; each takes the number of the call.
        align: brings all ranks to the same point before every call; not timed.
        rounds, per_round, lead_in: see above.
        before: untimed functions by contender, called before each of its calls.
        seconds: function that times a call; by default with the host's clock.

    Returns:
        float64 [rounds * per_round] seconds by contender, of this rank.
    """
    names = list(runs)
    taken: dict[str, list[float]] = {name: [] for name in names}
    calls = dict.fromkeys(names, 0)
    for turn in range(rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            run = runs[name]
            for k in range(lead_in + per_round):
                if before:
                    before[name](calls[name])
                align()
                spent = (seconds or elapsed)(functools.partial(run, calls[name]))
                calls[name] += 1
                if k >= lead_in:
                    taken[name].append(spent)
    return {name: np.array(t) for name, t in taken.items()}


def command_line(args: argparse.Namespace, *words: str) -> list[str]:
    """A command and the flags that are set in its parsed arguments, ``--json`` last."""
    found = list(words)
    for name, value in sorted(vars(args).items(), key=lambda item: item[0] == "json"):
        if name in ("command", "benchmark") or value is None or value is False or value == "":
            continue
        found.append(f"--{name.replace('_', '-')}")
        if value is not True:
            found.append(shlex.quote(str(value)))
    return found


def record(benchmark: str, command: Sequence[str], cases: Sequence[Mapping[str, Any]],
           load_before: float) -> dict[str, Any]:
    """The object that a benchmark writes.

    Args:
        benchmark: its name.
        command: the command line.
        cases: the cases, each with at least a ``name``.
        load_before: load average at its beginning.
    """
    return {
        "benchmark": benchmark, "command": " ".join(command), "versions": versions(),
        "machine": {**machine(), "load_before": load_before, "load_after": load_average()},
        "cases": [dict(c) for c in cases],
    }


def write(path: str | os.PathLike[str], value: Mapping[str, Any]) -> None:
    """Write a record as JSON, atomically."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def resumed(path: str, target: str | None, benchmark: str) -> dict[str, dict[str, Any]]:
    """Entries of an earlier record by name, without failed and skipped ones.

    Args:
        path: the record; ``""`` = none, with no entries. May equal `target`, which then need not
            exist yet.
        target: file that this run writes.
        benchmark: the benchmark that must have written it.

    Raises:
        InvalidInputError: the file is not such a record.
    """
    if not path or (path == target and not Path(path).exists()):
        return {}
    try:
        value = read_json(path, f"cannot read {path!r}")
        found = {e["name"]: e for e in value["cases"] if "failed" not in e and "skipped" not in e}
        if value["benchmark"] != benchmark:
            raise ValueError(f"it is one of {value['benchmark']!r}")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InvalidInputError("cannot resume from a record", "--resume", path,
                                f"a record of oper bench {benchmark}",
                                f"name another file, or leave it out ({error})") from error
    return found


def interface_counters(name: str) -> np.ndarray:
    """Counters of a network interface of this network namespace since it was made.

    Returns:
        float64 [2]: bytes and packets sent, with the headers of all protocols.
    """
    folder = Path(f"/sys/class/net/{name}/statistics")
    return np.array([float((folder / f"tx_{what}").read_text()) for what in ("bytes", "packets")])
