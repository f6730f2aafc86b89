"""What a planner may use: placements and exchange modes, and what a user pins table by table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from oper.errors import InvalidInputError, fail
from oper.plan import PLACEMENTS, Tier, tier_from_json

FEATURES = frozenset({*PLACEMENTS, "pull", "push", "columns"})
#: The default of `make_plan`. The host runtime executes pushed tiers and column pieces as well, but
#: among ranks that share a memory they never pay.
EXECUTABLE = frozenset({"replicated", "striped", "owned", "pull"})
#: The whole space that the search knows.
EVERYTHING = FEATURES


@dataclass(frozen=True, slots=True)
class TableConstraint:
    """What one table is held to; None = whatever the plan's space allows.

    Attributes:
        placements: allowed placements.
        modes: allowed exchange modes.
        ranks: ranks that may own rows of the table. A table held to some of the ranks is not
            replicated, because a replicated tier has a copy on every rank.
        tiers: the whole tier list, pinned; the planner then only accounts for the table.
    """

    placements: frozenset[str] | None = None
    modes: frozenset[str] | None = None
    ranks: tuple[int, ...] | None = None
    tiers: tuple[Tier, ...] | None = None


@dataclass(frozen=True, slots=True)
class Constraints:
    """What a plan is held to beside the topology.

    Attributes:
        tables: by table name.
        reserve_bytes: memory per rank kept free for dense parameters and activations.
    """

    tables: Mapping[str, TableConstraint] = field(default_factory=dict)
    reserve_bytes: int = 0


def check_allow(allow: Iterable[str]) -> frozenset[str]:
    """`allow` as a set; raises InvalidInputError unless a placement and a mode are in it."""
    chosen = frozenset(allow)
    known = chosen <= FEATURES
    if not known or not chosen & set(PLACEMENTS) or not chosen & {"pull", "push"}:
        raise InvalidInputError(
            fail("invalid search space", "allow", sorted(chosen),
                 f"some of {sorted(FEATURES)} with at least one placement and one exchange mode",
                 "name what the plan may use"))
    return chosen


def parse_constraints(value: Constraints | Mapping[str, Any] | None, names: Iterable[str],
                      world_size: int) -> Constraints:
    """Constraints from the dataclass, or from a mapping of table name to a mapping of fields.

    Args:
        value: ``{"table": {"placements": [...], "modes": [...], "ranks": [...], "tiers": [...]}}``;
            the key ``"reserve_bytes"`` holds the memory per rank to keep free.
        names: the tables that exist.
        world_size: number of ranks.

    Raises:
        InvalidInputError: an unknown table, field, placement, mode or rank.
    """
    if value is None:
        return Constraints()
    if not isinstance(value, Constraints | Mapping):
        raise InvalidInputError(fail("invalid constraints", "constraints", value,
                                     "a mapping of table name to constraint", "correct it"))
    if not isinstance(value, Constraints):
        reserve = value.get("reserve_bytes", 0)
        if isinstance(reserve, bool) or not isinstance(reserve, int):
            raise InvalidInputError(fail("invalid constraints", "reserve_bytes", reserve,
                                         "an integer >= 0", "correct it"))
        tables = {k: v if isinstance(v, TableConstraint) else _from_mapping(k, v)
                  for k, v in value.items() if k != "reserve_bytes"}
        value = Constraints(tables, reserve)
    known = set(names)
    for name, held in value.tables.items():
        what = f"invalid constraint of table {name!r}"
        if name not in known:
            raise InvalidInputError(fail(what, "table", name, f"one of {sorted(known)[:8]}",
                                         "name a table of the model"))
        for label, chosen, allowed in (("placements", held.placements, set(PLACEMENTS)),
                                       ("modes", held.modes, {"pull", "push"}),
                                       ("ranks", held.ranks, set(range(world_size)))):
            if chosen is not None and (not chosen or not set(chosen) <= allowed):
                raise InvalidInputError(fail(what, label, sorted(chosen),
                                             f"some of {sorted(allowed)[:16]}", "correct it"))
    if value.reserve_bytes < 0:
        raise InvalidInputError(fail("invalid constraints", "reserve_bytes", value.reserve_bytes,
                                     ">= 0", "correct it"))
    return value


def _from_mapping(name: str, value: Any) -> TableConstraint:
    known = {f.name for f in fields(TableConstraint)}
    if not isinstance(value, Mapping) or set(value) - known:
        raise InvalidInputError(fail(f"invalid constraint of table {name!r}", "fields", value,
                                     f"some of {sorted(known)}", "correct it"))
    try:
        placements, modes, ranks = (None if value.get(k) is None else list(value[k])
                                    for k in ("placements", "modes", "ranks"))
        if not all(isinstance(x, str) for x in (placements or []) + (modes or [])):
            raise TypeError("placements and modes are lists of text")
        tiers = value.get("tiers")
        return TableConstraint(
            None if placements is None else frozenset(placements),
            None if modes is None else frozenset(modes),
            None if ranks is None else tuple(int(r) for r in ranks),
            None if tiers is None else tuple(t if isinstance(t, Tier) else tier_from_json(t)
                                             for t in tiers))
    except (TypeError, ValueError, KeyError) as error:
        raise InvalidInputError(fail(f"invalid constraint of table {name!r}", "fields", value,
                                     "lists, and tiers as in a plan file", str(error))) from None
