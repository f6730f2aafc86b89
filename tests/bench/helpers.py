"""What runs in processes that tests of benchmarks start."""

from __future__ import annotations

import os
from typing import Any

from oper.bench.core.child import obey
from oper.bench.core.launch import Progress


def fail(case: str, progress: Progress) -> dict[str, Any]:
    """A worker function that says what it was given."""
    raise ValueError(case)


def doubles(pipe: Any) -> None:
    """A helper process with one useful command."""
    commands = {"double": lambda x: 2 * x, "end": lambda: os._exit(3)}
    while obey(pipe, commands):
        pass
