"""Benchmarks as tests run them, and what runs in processes that these start."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oper.bench.core.child import obey
from oper.bench.core.launch import Progress
from tests.support import run_here


@dataclass(frozen=True, slots=True)
class Failing:
    """A case that says its name."""

    name: str

    def measure(self, progress: Progress) -> dict[str, Any]:
        """Raises ValueError."""
        raise ValueError(self.name)


def doubles(pipe: Any) -> None:
    """A helper process with one useful command."""
    commands = {"double": lambda x: 2 * x, "end": lambda: os._exit(3)}
    while obey(pipe, commands):
        pass


def dies(pipe: Any) -> None:
    """One that says that it is ready, and is gone."""
    pipe.send(None)


def bench(folder: Path, *words: str, **env: str) -> tuple[list[dict[str, Any]], str]:
    """The entries of the record of ``oper bench``, which stays in the folder, and what was printed.
    """
    out = folder / "record.json"
    done = run_here("bench", *words, "--json", str(out), env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())["cases"], done.stdout
