"""Constraints that a user puts on a plan: pinned tables and rows, tables kept together or apart,
and limits on memory.

As JSON (``oper plan --constraints FILE``); every key is optional, and sizes are bytes or text such
as ``"2GB"``::

    {"tables": {"user": {"ranks": [0, 1]},
                "item": {"tiers": [{"rows": [0, 5000], "place": "owned", "ranks": [0]}]},
                "*":    {"replicate": false, "modes": ["pull"]}},
     "keep_together": [["user", "item"]],
     "keep_apart": [["ads", "shops"]],
     "memory_bytes": "40GB",
     "reserve_bytes": ["2GB", "2GB"]}
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import combinations
from typing import Annotated, Any

from oper.errors import InvalidInputError, PlanError, require
from oper.plan import (
    MEMORIES,
    MODES,
    PLACEMENTS,
    Plan,
    Tier,
    TierEntry,
    check_tiers,
    tier_to_json,
)
from oper.ranges import Parsed
from oper.support.settings import Reader
from oper.topology import Bytes

EVERY_TABLE = "*"  # constrains all tables without their own entry
_WRONG = "invalid constraints"
_TABLES = Parsed(lambda x: dict(**x), "a section of tables by name")  # each read as an `_Entry`


@dataclass(frozen=True, slots=True)
class TableConstraint:
    """Constraints on one table; None = not constrained.

    Attributes:
        placements: allowed placements.
        modes: allowed exchange modes.
        ranks: ranks that may own rows of the table. A table restricted to some of the ranks is not
            replicated, because a replicated tier has a copy on every rank.
        tiers: the complete list of tiers, pinned; the planner then only accounts for the table.
        memories: allowed memories, ``"device"`` and ``"host"``.
        pinned: tiers of some rows, in order; the planner places the other rows.
        unreplicated: positions [start, stop) of rows that are not replicated.
    """

    placements: frozenset[str] | None = None
    modes: frozenset[str] | None = None
    ranks: tuple[int, ...] | None = None
    tiers: tuple[Tier, ...] | None = None
    memories: frozenset[str] | None = None
    pinned: tuple[Tier, ...] = ()
    unreplicated: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        for f in fields(self):  # lists and tuples of names are accepted, too
            value = getattr(self, f.name)
            if isinstance(value, list | set | tuple):
                of_names = f.name in ("placements", "modes", "memories")
                object.__setattr__(self, f.name, (frozenset if of_names else tuple)(value))


@dataclass(frozen=True, slots=True)
class Constraints:
    """Constraints on a plan, in addition to the topology.

    Attributes:
        tables: constraints by table name.
        keep_together: groups of tables; each table of a group has rows on the same ranks.
        keep_apart: groups of tables; no rank holds rows of two tables of a group.
        memory_bytes: limit of the memory for tables and their buffers per rank: one number for all
            ranks, one number per rank, or None. For a memory domain the limits of its ranks add up.
        reserve_bytes: memory left free for dense parameters and activations and, on several GPUs,
            for chains of gradients (docs/how-to/gpu.md#memory): one number for every rank, or one
            per rank.
    """

    tables: Annotated[Mapping[str, TableConstraint], _TABLES] = field(default_factory=dict)
    keep_together: tuple[tuple[str, ...], ...] = ()
    keep_apart: tuple[tuple[str, ...], ...] = ()
    memory_bytes: Bytes | tuple[Bytes, ...] | None = None
    reserve_bytes: Bytes | tuple[Bytes, ...] = 0

    def to_json(self) -> dict[str, Any]:
        """The constraints as values that JSON can represent and `parse_constraints` reads; defaults
        are left out."""
        tables = {name: _table_json(c) for name, c in self.tables.items()}
        value: dict[str, Any] = {"tables": {k: v for k, v in tables.items() if v}}
        for name in ("keep_together", "keep_apart"):
            value[name] = [list(group) for group in getattr(self, name)]
        for name in ("memory_bytes", "reserve_bytes"):
            size = getattr(self, name)
            value[name] = list(size) if isinstance(size, tuple) else size
        return {k: v for k, v in value.items() if v not in ({}, [], None, 0)}


def _table_json(held: TableConstraint) -> dict[str, Any]:
    forms: dict[str, Callable[[Any], list[Any]]] = {
        **dict.fromkeys(("placements", "modes", "memories"), sorted), "ranks": list,
        **dict.fromkeys(("tiers", "pinned"), lambda tiers: [tier_to_json(x) for x in tiers]),
        "unreplicated": lambda ranges: [list(r) for r in ranges]}
    return {"replicate" if name == "unreplicated" else name: form(value)
            for name, form in forms.items() if (value := getattr(held, name)) not in (None, ())}


# -- reading ---------------------------------------------------------------------------------------


def parse_constraints(value: Constraints | Mapping[str, Any] | None, names: Iterable[str],
                      world_size: int) -> Constraints:
    """Return checked constraints, from a `Constraints` object or a mapping in the JSON form.

    Args:
        value: the constraints; None = no constraints.
        names: the names of all tables.
        world_size: number of ranks.

    Raises:
        InvalidInputError: an unknown key, table, field, placement, mode or rank, a value of a wrong
            type, or a pair of tables that are to be kept both together and apart.
    """
    if value is None:
        return Constraints()
    if isinstance(value, Constraints):  # its fields may have lists, or sizes as text
        value = {f.name: x for f in fields(value) if (x := getattr(value, f.name)) is not None}
    value = _from_mapping(value)
    known = list(names)
    for name, held in value.tables.items():
        _check_table(name, held, known, world_size)
    every = value.tables.get(EVERY_TABLE)
    if every is not None:
        tables = {k: v for k, v in value.tables.items() if k != EVERY_TABLE}
        value = replace(value, tables={n: tables.get(n, every) for n in known})
    _check_groups(value, known)
    for label in ("memory_bytes", "reserve_bytes"):
        size = getattr(value, label)
        each = size if isinstance(size, tuple) else (size or 0,) * world_size
        require(_WRONG, "pass one number for all ranks, or one per rank",
                (label, size, len(each) == world_size and min(each) >= 0,
                 f">= 0, one number or one for each of {world_size} ranks"))
    return value


def noted_constraints(plan: Plan) -> Constraints | None:
    """Return the constraints in a plan's notes, as far as they are about tables of the plan; None
    if it was made without any. A plan of some of a model's tables has the notes of all of them.

    Raises:
        InvalidInputError: the notes are malformed.
    """
    if "constraints" not in plan.notes:
        return None
    held, names = _from_mapping(plan.notes["constraints"]), {t.table.name for t in plan.tables}

    def known(groups: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, ...], ...]:
        kept = (tuple(name for name in group if name in names) for group in groups)
        return tuple(group for group in kept if len(group) > 1)

    tables = {k: c for k, c in held.tables.items() if k in names or k == EVERY_TABLE}
    return replace(held, tables=tables, keep_together=known(held.keep_together),
                   keep_apart=known(held.keep_apart))


@dataclass(frozen=True, slots=True)
class _Entry:
    """Constraints on one table in JSON, see `TableConstraint`."""

    placements: tuple[str, ...] | None = None
    modes: tuple[str, ...] | None = None
    memories: tuple[str, ...] | None = None
    ranks: tuple[int, ...] | None = None
    tiers: tuple[TierEntry, ...] | None = None
    pinned: tuple[TierEntry, ...] = ()
    replicate: bool | tuple[tuple[int, int], ...] = True

    def constraint(self) -> TableConstraint:
        placements = self.placements
        if self.replicate is False:
            allowed = PLACEMENTS if placements is None else placements
            placements = tuple(p for p in allowed if p != "replicated")
        chosen = {"placements": placements, "modes": self.modes, "memories": self.memories}
        return TableConstraint(
            **{k: frozenset(v) for k, v in chosen.items() if v is not None}, ranks=self.ranks,
            tiers=None if self.tiers is None else tuple(x.tier() for x in self.tiers),
            pinned=tuple(sorted((x.tier() for x in self.pinned), key=lambda t: t.start)),
            unreplicated=() if isinstance(self.replicate, bool) else tuple(sorted(self.replicate)))


def _from_mapping(value: Any) -> Constraints:
    reader = Reader(lambda name, value, expected: InvalidInputError(
        _WRONG, name, value, expected, "correct the constraints"))
    found = reader.build(Constraints, value)
    return replace(found, tables={
        name: held if isinstance(held, TableConstraint) else
        reader.build(_Entry, held, f"tables.{name}.").constraint()
        for name, held in found.tables.items()})


def _check_table(name: str, held: TableConstraint, known: Sequence[str], world_size: int) -> None:
    what = f"invalid constraint of table {name!r}"
    require(what, "name a table of the model",
            ("table", name, name in known or name == EVERY_TABLE, f"one of {sorted(known)[:8]}"))
    for label, allowed in (("placements", PLACEMENTS), ("modes", MODES), ("memories", MEMORIES),
                           ("ranks", range(world_size))):
        chosen = getattr(held, label)
        require(what, "name at least one, all from this list",
                (label, chosen and sorted(chosen), chosen is None or (
                    bool(chosen) and set(chosen) <= set(allowed)),
                 f"some of {sorted(allowed)[:16]}"))


def check_rows(name: str, held: TableConstraint, num_rows: int, world_size: int) -> None:
    """Raise InvalidInputError if constraints on rows of a table are invalid or contradict other
    constraints on it."""
    what = f"invalid constraint of table {name!r}"
    require(what, "remove 'tiers', or 'pinned' and 'replicate'", (
        "tiers, pinned, replicate", "both given",
        held.tiers is None or not (held.pinned or held.unreplicated),
        "either all tiers, or constraints on some rows"))
    require(what, "allow another placement, or remove 'replicate'", (
        "placements", ["replicated"],
        not (held.unreplicated and held.placements == frozenset({"replicated"})),
        "striped or owned as well, for the rows that are not replicated"))
    for label, ranges in (("pinned", [(x.start, x.stop) for x in held.pinned]),
                          ("replicate", list(held.unreplicated))):
        ends = [n for r in ranges for n in r]
        is_right = ends == sorted(ends) and all(a < b for a, b in ranges) and (
            not ends or 0 <= ends[0] <= ends[-1] <= num_rows)
        require(what, "order the ranges, and keep them inside the table", (
            label, ranges, is_right, f"row ranges within 0..{num_rows} that do not overlap"))
    complete = [] if held.tiers is None else [held.tiers]
    for x in held.pinned:
        # To check it like a tier of a plan, pad it with other tiers to a complete table.
        rest = [Tier(a, b, "owned", (0,)) for a, b in ((0, x.start), (x.stop, num_rows)) if a < b]
        complete.append(tuple(sorted([*rest, x], key=lambda t: t.start)))
    try:
        for tiers in complete:
            check_tiers(what, tiers, num_rows, world_size)
    except PlanError as error:
        raise InvalidInputError(str(error)) from None
    for x in (*(held.tiers or ()), *held.pinned):
        wrong = _beyond(held, [x]) + [("replicate", ["replicated"], "no replicas")] * _breaks(
            held, x)
        require(what, "change the pin or the other constraint", *(
            (f"pinned rows {x.start}:{x.stop}, {label}", used, False, allowed)
            for label, used, allowed in wrong))


def _beyond(held: TableConstraint, tiers: Iterable[Tier]) -> list[tuple[str, list[Any], str]]:
    """Features of tiers that a constraint does not allow: (kind of feature, forbidden values used,
    text of the allowed values)."""
    every = list(tiers)
    used: dict[str, set[Any]] = {
        "placements": {x.placement for x in every}, "memories": {x.memory for x in every},
        "modes": {x.mode for x in every if x.placement != "replicated"},
        "ranks": {r for x in every for r in x.ranks}}
    return [(label, sorted(values - set(allowed)), f"some of {sorted(allowed)}")
            for label, values in used.items() if (allowed := getattr(held, label)) is not None
            and values - set(allowed)]


def _breaks(held: TableConstraint, tier: Tier) -> bool:
    """Whether a tier replicates rows that must not be replicated."""
    return tier.placement == "replicated" and any(
        a < tier.stop and tier.start < b for a, b in held.unreplicated)


def _check_groups(value: Constraints, known: Sequence[str]) -> None:
    for label, groups in (("keep_together", value.keep_together), ("keep_apart", value.keep_apart)):
        for group in groups:
            require(_WRONG, "name two or more different tables of the problem",
                    (label, group, 2 <= len(group) == len(set(group) & set(known)),
                     f"two or more of {sorted(known)[:8]}"))
    root = units(value)
    require(_WRONG, "remove the pair from one of the two", *(
        ("keep_together, keep_apart", pair, root[pair[0]] != root[pair[1]], "one of the two")
        for group in value.keep_apart for pair in combinations(group, 2)))


def units(value: Constraints) -> dict[str, str]:
    """Map each table in a group to a representative, the same for tables kept together."""
    root = {name: name for group in (*value.keep_together, *value.keep_apart) for name in group}
    for first, *rest in value.keep_together:
        for name in rest:
            old, new = root[name], root[first]
            root.update({k: new for k, v in root.items() if v == old})
    return root


def without(held: Constraints) -> Iterator[tuple[str, Constraints]]:
    """For each part that restricts memory or placement, yield its name and the other constraints.
    """
    if held.memory_bytes is not None:
        yield "memory_bytes", replace(held, memory_bytes=None)
    if held.reserve_bytes:
        yield "reserve_bytes", replace(held, reserve_bytes=0)
    for name, c in held.tables.items():
        if c != TableConstraint():
            rest = {k: v for k, v in held.tables.items() if k != name}
            yield f"the constraint of table {name!r}", replace(held, tables=rest)


# -- checking a plan -------------------------------------------------------------------------------


def violations(plan: Plan, held: Constraints) -> list[str]:
    """One line for each constraint of `held` that a plan violates; memory is checked by
    `evaluate`."""
    out = []
    for name, c in held.tables.items():
        entry = plan.table(name)
        tiers = [tier for piece in entry.pieces for tier in piece.tiers]
        if c.tiers is not None:
            if len(entry.pieces) > 1 or tuple(tiers) != c.tiers:
                out.append(f"table {name!r} has other tiers than the pinned ones")
            continue
        for piece in entry.pieces:
            out += [f"table {name!r} has other tiers than the one pinned on rows {x.start}:{x.stop}"
                    for x in c.pinned if x not in piece.tiers]
            out += [f"table {name!r} replicates rows {x.start}:{x.stop}, some of which must not be"
                    for x in piece.tiers if _breaks(c, x)]
        out += [f"table {name!r} uses {label} {used}, but may use {allowed}"
                for label, used, allowed in _beyond(c, tiers)]
    return out + group_violations(plan, held)


def group_violations(plan: Plan, held: Constraints) -> list[str]:
    """One line for each group whose tables violate `keep_together` or `keep_apart`."""
    names = units(held)
    on = {name: frozenset(r for piece in plan.table(name).pieces for tier in piece.tiers
                          for r in tier.ranks) for name in names}
    out = [f"keep_together {list(group)}: not on the same ranks" for group in held.keep_together
           if len({on[name] for name in group}) > 1]
    for group in held.keep_apart:
        shared = [(a, b) for a, b in combinations(group, 2) if on[a] & on[b]]
        if shared:
            out.append(f"keep_apart {list(group)}: {list(shared[0])} share ranks")
    return out


def check_constraints(plan: Plan, held: Constraints) -> None:
    """Raise PlanError if the plan violates a constraint."""
    broken = violations(plan, held)
    if broken:
        raise PlanError("the plan violates its constraints", "violated", broken[:4], "none",
                        "plan again, or remove constraints")
