"""Measures cases one after another, here or in worker processes."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from oper.bench.core.launch import Progress, run_workers


def measured(cases: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Entries of the record, each as soon as it is there.

    Args:
        cases: each has a ``name`` and ``measure(progress)``, which gives its figures. Neighbours of
            one class that have a ``world_size`` are measured by as many worker processes with
            ``threads_per_rank`` threads each, the others in this process.
    """
    for (_, world_size), group in itertools.groupby(
            cases, lambda c: (type(c), getattr(c, "world_size", 0))):
        together = list(group)
        figures = run_workers(together, world_size, together[0].threads_per_rank) if (
            world_size) else (case.measure(teller(case.name)) for case in together)
        for case, found in zip(together, figures, strict=True):
            yield {"name": case.name, **found}


def teller(name: str) -> Progress:
    """Tells on stderr what a case is doing, the same text once."""
    @functools.lru_cache(maxsize=1)
    def tell(text: str) -> None:
        print(f"  {name}: {text}", file=sys.stderr, flush=True)

    return tell
