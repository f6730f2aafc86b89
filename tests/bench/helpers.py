"""Helpers to run benchmarks in tests, and functions for the child processes of tests."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from oper.bench.core.child import obey
from oper.bench.core.launch import Progress


@dataclass(frozen=True, slots=True)
class Failing:
    """A case whose measurement raises ValueError."""

    name: str
    world_size: ClassVar[int] = 1
    threads_per_rank: ClassVar[int] = 1

    def measure(self, progress: Progress) -> dict[str, Any]:
        """Raises ValueError."""
        if self.name:
            raise ValueError(self.name)
        return {"verified": True}


def doubles(pipe: Any) -> None:
    """A child process with a single command."""
    commands = {"double": lambda x: 2 * x, "end": lambda: os._exit(3)}
    while obey(pipe, commands):
        pass


def dies(pipe: Any) -> None:
    """A child process that reports that it is ready and exits."""
    pipe.send(None)


def bench(folder: Path, *words: str, **env: str) -> tuple[list[dict[str, Any]], str]:
    """Run ``oper bench``; returns the entries of its record (written to the folder) and stdout."""
    from tests.support import run_here

    out = folder / "record.json"
    done = run_here("bench", *words, "--json", str(out), env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())["cases"], done.stdout
