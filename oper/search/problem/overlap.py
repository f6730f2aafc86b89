"""Dense compute that overlaps with phases; declared by the user, never assumed.

A phase that overlaps with `x` microseconds of dense compute on a rank delays that rank only by the
time beyond `x`. The phase ends when every rank has finished both, so only the excess of a rank's
load over its dense time counts. Contention for memory and links is not modelled: declare less than
the dense time if both need the same memory bandwidth.

Phases that can overlap in a training step of `oper.shard`'s modules:

* ``update``: reduction and update of rows, and refresh of replicas unless it is a separate phase
  (`oper.search.cost.evaluation`), which is never hidden, overlap with the part of the dense
  backward and optimizer that remains once the gradients of the tables are known;
* ``backward`` and ``forward``: overlap with layers that do not depend on the tables' outputs;
* ``resolve``: sorting of a rank's own ids, which needs only the next batch's ids and may run ahead
  during any other work. Declaring it moves this work from ``backward`` to a separate phase.
  (Gradients of pushed rows are sorted by their owner in ``update``, with or without it.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from oper.errors import require

RESOLVE = "resolve"
#: Microseconds of dense compute on each rank, by phase.
Overlap = dict[str, tuple[float, ...]]


def parse_overlap(value: Mapping[str, Any] | None, phases: Sequence[str],
                  world_size: int) -> Overlap:
    """Check and expand declared dense compute, by phase.

    Args:
        value: ``{phase: microseconds}``, with one number for all ranks or a list of one per rank.
        phases: phases of the objective; ``resolve`` is also allowed if there are several.
        world_size: number of ranks.

    Raises:
        InvalidInputError: an unknown phase, or a value that is not a finite number >= 0.
    """
    known = [RESOLVE, *phases] if len(phases) > 1 else list(phases)
    what = "invalid overlap with dense compute"
    value = {} if value is None else value
    require(what, "pass a mapping such as {'update': 400}",
            ("overlap", value, isinstance(value, Mapping), "a mapping from phases to microseconds"))
    out: Overlap = {}
    for name, given in value.items():
        require(what, "name a phase of the objective",
                ("phase", name, name in known, f"one of {known}"))
        each = list(given) if isinstance(given, list | tuple) else [given] * world_size
        numbers = all(isinstance(x, int | float) and not isinstance(x, bool)
                      and math.isfinite(x) and x >= 0 for x in each)
        require(what, "pass one number for all ranks, or one per rank",
                (name, given, numbers and len(each) == world_size,
                 f"microseconds >= 0, one number or {world_size}"))
        if any(each):
            out[name] = tuple(float(x) for x in each)
    return out


def overlap_to_json(overlap: Overlap) -> dict[str, Any]:
    """The overlap as values that JSON can represent and `parse_overlap` reads."""
    return {k: v[0] if len(set(v)) == 1 else list(v) for k, v in overlap.items()}


def parse_argument(words: Sequence[str]) -> dict[str, Any] | None:
    """Parse command-line words ``PHASE=US`` or ``PHASE=US,US,...`` (one value per rank); None if
    there are none."""
    out: dict[str, Any] = {}
    for word in words:
        name, _, text = word.partition("=")
        try:
            each = [float(x) for x in text.split(",")]
        except ValueError:
            each = []
        require("invalid overlap with dense compute",
                "write --overlap once per phase, e.g. --overlap update=400",
                ("overlap", word, bool(each) and name not in out,
                 "PHASE=US or PHASE=US,US,... once per phase"))
        out[name] = each if len(each) > 1 else each[0]
    return out or None
