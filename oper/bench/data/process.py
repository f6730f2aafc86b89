"""Functions in processes of their own with one thread, and what they took.

A function takes and returns what JSON can hold. It is a module's own: the process finds it by name.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from oper.bench.core.memory import peak_rss_mb
from oper.errors import OperError, fail


def start(function: Callable[..., Any], *arguments: Any, **options: Any) -> subprocess.Popen[str]:
    """A process that calls a function and prints what it took, see `finished`.

    Args:
        function, arguments: what it calls.
        options: more arguments of `subprocess.Popen`.
    """
    words = [sys.executable, "-m", __name__, function.__module__, function.__name__,
             json.dumps(arguments)]
    return subprocess.Popen(words, text=True, **{"stdout": subprocess.PIPE, **options}, env={
        **os.environ, "OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1"})


def finished(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What the function took and gave.

    Returns:
        ``seconds`` and processor time ``cpu`` (s), peak memory of the process ``rss_mb`` (10^6
        bytes), and what the function returned, ``value``.

    Raises:
        OperError: the process has failed; its error stands on stderr.
    """
    text, _ = process.communicate()
    if process.returncode:
        raise OperError(fail("a measured process has failed", "exit code", process.returncode, "0",
                             "see its error above"))
    found: dict[str, Any] = json.loads(text)
    return found


def call(function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    """`finished` of a process that is started now."""
    return finished(start(function, *arguments))


def main() -> None:
    """What the process does."""
    import pyarrow as pa

    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    module, name, arguments = sys.argv[1:]
    function = getattr(importlib.import_module(module), name)
    begin, cpu = time.perf_counter(), time.process_time()
    value = function(*json.loads(arguments))
    print(json.dumps({"seconds": time.perf_counter() - begin, "cpu": time.process_time() - cpu,
                      "rss_mb": peak_rss_mb(), "value": value}))


if __name__ == "__main__":
    main()
