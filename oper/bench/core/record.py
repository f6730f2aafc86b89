"""Benchmark records: interleaved timing, machine description, reading and writing."""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import platform
import shlex
import time
import warnings
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
    """This machine's processor, usable cores, memory (bytes), kernel and huge-page settings."""
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
    """The load average of the last minute."""
    return round(os.getloadavg()[0], 2)


class BusyClock:
    """Measures how many cores programs other than this process and its descendants keep busy, from
    its construction on."""

    def __init__(self) -> None:
        self._begin, self._busy = time.perf_counter(), _busy_seconds()
        self._own = cpu_seconds(os.getpid())

    def others(self, total: Callable[[list[float]], list[float]] = list) -> float:
        """Mean number of cores that other programs have kept busy since construction.

        Args:
            total: function that sums each number of a list over ranks. With several ranks, pass
                `planning.total` on all of them; the call is then collective.
        """
        own, = total([cpu_seconds(os.getpid()) - self._own])
        wall = time.perf_counter() - self._begin
        return max(0.0, (_busy_seconds() - self._busy - own) / wall)


def _busy_seconds() -> float:
    """Processor time (s) used since boot, summed over all cores; 0 without ``/proc/stat``."""
    ticks = [int(x) for x in kernel.read("/proc/stat").partition("\n")[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK") if ticks else 0.0


def summary(seconds: np.ndarray) -> dict[str, float]:
    """Median, 10th and 90th percentile and minimum (ms) of float64 [n] seconds, and n."""
    least, low, middle, high = (1e3 * np.percentile(seconds, [0, 10, 50, 90])).tolist()
    return {"median_ms": middle, "p10_ms": low, "p90_ms": high, "min_ms": least, "n": seconds.size}


def elapsed(call: Callable[[], Any]) -> float:
    """Wall time (s) of a call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def interleave(runs: Mapping[str, Callable[[int], Any]], align: Callable[[], None], rounds: int,
               per_round: int, lead_in: int = 1,
               before: Mapping[str, Callable[[int], Any]] | None = None,
               measure: Callable[[Callable[[], Any]], float] | None = None
               ) -> dict[str, np.ndarray]:
    """Time several contenders in alternation on this rank.

    In every round each contender makes `lead_in` untimed and then `per_round` timed calls; the
    order of the contenders rotates from round to round. Each contender's k-th call, timed or not,
    gets the argument k, so all contenders use the same inputs in the same order.

    Args:
        runs: by contender, the function to time; it takes the index of the call.
        align: function that synchronizes all ranks; called before every call and not timed.
        rounds, per_round, lead_in: see above.
        before: by contender, a function called before `align`, with the same argument; not timed.
        measure: function that runs a call and returns its measurement; by default `elapsed`.

    Returns:
        float64 [rounds * per_round] measurements by contender, by default seconds.
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
                spent = (measure or elapsed)(functools.partial(run, calls[name]))
                calls[name] += 1
                if k >= lead_in:
                    taken[name].append(spent)
    return {name: np.array(t) for name, t in taken.items()}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add ``--record``, the file to write the record to, and ``--json``; see `settle_flags`."""
    parser.add_argument("--record", metavar="F", help="also write the record (JSON) to this file")
    parser.add_argument("--json", nargs="?", const=True, metavar="F",
                        help="print the record as JSON instead of a report (with F, deprecated: "
                             "the same as --record F)")


def settle_flags(args: argparse.Namespace) -> None:
    """Replace ``--json F``, as in version 0.1, by ``--record F``, with a DeprecationWarning."""
    if isinstance(args.json, str):
        warnings.warn(f"--json {args.json}: use --record {args.json} instead; version 0.3 will not "
                      "accept a file for --json", DeprecationWarning, stacklevel=2)
        args.record, args.json = args.record or args.json, None


def command_line(args: argparse.Namespace, *words: str) -> list[str]:
    """Words of a command line: `words`, then the options that `args` sets, ``--record`` last."""
    found = list(words)
    for name, value in sorted(vars(args).items(), key=lambda item: item[0] == "record"):
        if name in ("command", "benchmark") or value is None or value is False or value == "":
            continue
        found.append(f"--{name.replace('_', '-')}")
        if value is not True:
            found.append(shlex.quote(str(value)))
    return found


def rounded(value: Any) -> Any:
    """A case's figures as recorded: floats to six significant digits, NumPy's arrays and numbers
    as Python's."""
    if isinstance(value, Mapping):
        return {name: rounded(x) for name, x in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [rounded(x) for x in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def record(benchmark: str, command: Sequence[str], cases: Sequence[Mapping[str, Any]],
           load_before: float) -> dict[str, Any]:
    """The JSON object that a benchmark writes to its record file.

    Args:
        benchmark: name of the benchmark.
        command: words of the command line.
        cases: entries of the cases, each with at least a ``name``.
        load_before: load average when the benchmark started.
    """
    return {
        "benchmark": benchmark, "command": " ".join(command), "versions": versions(),
        "machine": {**machine(), "load_before": load_before, "load_after": load_average()},
        "cases": [dict(c) for c in cases],
    }


def write(path: str | os.PathLike[str], value: Mapping[str, Any]) -> None:
    """Write a record as JSON, atomically."""
    write_text(path, as_json(value, indent=1) + "\n")


def as_json(value: Mapping[str, Any], indent: int | None = None) -> str:
    """A record as JSON text, in which numbers that are not finite are null: JSON has none."""
    def finite(part: Any) -> Any:
        if isinstance(part, Mapping):
            return {name: finite(x) for name, x in part.items()}
        if isinstance(part, list | tuple):
            return [finite(x) for x in part]
        return part if not isinstance(part, float) or math.isfinite(part) else None

    return json.dumps(finite(value), indent=indent)


def resumed(path: str, target: str | None, benchmark: str) -> dict[str, dict[str, Any]]:
    """Entries of an earlier record by case name, without failed and skipped cases.

    If the record was made on another machine or with other versions of the software, its entries
    get the keys ``machine`` and ``versions`` with those of the record.

    Args:
        path: file of the earlier record; ``""`` = no record, which gives no entries. A missing file
            also gives none if it is `target`.
        target: file that this run writes.
        benchmark: name of the benchmark that must have written the record.

    Raises:
        InvalidInputError: the file cannot be read or is not a record of `benchmark`.
    """
    if not path or (path == target and not Path(path).exists()):
        return {}
    try:
        value = read_json(path, f"cannot read {path!r}")
        found = {e["name"]: e for e in value["cases"] if "failed" not in e and "skipped" not in e}
        if value["benchmark"] != benchmark:
            raise ValueError(f"this is a record of {value['benchmark']!r}")
        for about, mine in (("machine", machine()), ("versions", versions())):
            theirs = {k: v for k, v in value[about].items() if not k.startswith("load_")}
            for entry in found.values() if theirs != mine else ():
                entry.setdefault(about, theirs)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InvalidInputError("cannot resume from a record", "--resume", path,
                                f"a record of oper bench {benchmark}",
                                f"give another file, or omit --resume ({error})") from error
    return found


def interface_counters(name: str) -> np.ndarray:
    """Bytes and packets that a network interface has sent since its creation, float64 [2]. The
    interface is looked up in this process's network namespace; bytes include all headers."""
    folder = Path(f"/sys/class/net/{name}/statistics")
    return np.array([float((folder / f"tx_{what}").read_text()) for what in ("bytes", "packets")])
