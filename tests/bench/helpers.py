"""What runs in processes that tests of benchmarks start."""

from __future__ import annotations

import os
from typing import Any

from oper.bench.core.child import obey
from oper.bench.core.launch import Progress
from oper.bench.tables.lookup_case import LookupCase, run_case
from oper.bench.tables.scale_case import ScaleCase, run_scale_case
from oper.bench.tables.update_case import UpdateCase, run_update_case


def fail(case: str, progress: Progress) -> dict[str, Any]:
    """A worker function that says what it was given."""
    raise ValueError(case)


def measure(case: Any, progress: Progress) -> dict[str, Any]:
    """A worker function of all cases of lookups."""
    run = {LookupCase: run_case, UpdateCase: run_update_case, ScaleCase: run_scale_case}
    return run[type(case)](case, progress)


def doubles(pipe: Any) -> None:
    """A helper process with one useful command."""
    commands = {"double": lambda x: 2 * x, "end": lambda: os._exit(3)}
    while obey(pipe, commands):
        pass
