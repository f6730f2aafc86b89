"""What runs in processes that tests of benchmarks start."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from oper.bench.core.child import obey
from oper.bench.core.launch import Progress


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
