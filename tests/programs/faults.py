"""Faults planted in OPER, each of which the fuzzer has to find within its quick seeds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

FAULTS: dict[str, Callable[[], Any]] = {}


@contextlib.contextmanager
def planted(name: str | None) -> Iterator[None]:
    """A fault of `FAULTS` inside the block; nothing for None."""
    if name is None:
        yield
        return
    with FAULTS[name]():
        yield
