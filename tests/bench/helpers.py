"""Benchmarks as tests run them, and what runs in processes that these start."""

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
    """A case that fails where it has a name."""

    name: str
    world_size: ClassVar[int] = 1
    threads_per_rank: ClassVar[int] = 1

    def measure(self, progress: Progress) -> dict[str, Any]:
        """Raises ValueError."""
        if self.name:
            raise ValueError(self.name)
        return {"verified": True}


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
    from tests.support import run_here

    out = folder / "record.json"
    done = run_here("bench", *words, "--json", str(out), env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())["cases"], done.stdout
