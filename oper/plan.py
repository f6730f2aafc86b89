"""A plan: which ranks store every row of every table and how remote rows are exchanged.

A table's rows are sorted by hotness, most accessed first; a row's *position* is its index in that
order. A plan splits a table into column pieces, and the rows of each piece into tiers, which are
ranges ``[start, stop)`` of positions. A tier has one placement:

* ``replicated``: every rank in `ranks` has a copy of all rows; the master rows and the optimizer
  state are striped over the same ranks.
* ``striped``: each row is stored on one rank in `ranks`, assigned round-robin or in proportion to
  `weights`.
* ``owned``: one rank stores all rows.

A plan file is JSON, may be edited by hand, and is validated when read. If a table's ids are not in
hotness order already, the end of the file holds its order, compressed.
"""

from __future__ import annotations

import base64
import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from oper.errors import FileFormatError, PlanError, differing_names, require
from oper.messages import EXACT, MessageBits
from oper.ranges import Amount, Count, Positive, one_of, rules_of
from oper.support.files import parse_json, write_text
from oper.support.settings import Reader
from oper.tables import CODE_BITS, DTYPES, TableSpec, check_unique

PLAN_KIND = "oper-plan"
PLAN_VERSION = 1
PLACEMENTS = ("replicated", "striped", "owned")
MODES = ("pull", "push")
MEMORIES = ("device", "host")
SYNCHRONIZE_BITS = (32, 16, 8)
OBJECTIVES = ("training", "inference")
EXPECTED_OBJECTIVE = " or ".join(map(repr, OBJECTIVES))  # in messages
MAX_PATTERN = 4096  # largest sum of a stripe's weights, after which its sequence of ranks repeats
_EMPTY = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Tier:
    """Rows `[start, stop)` of the hotness order with one placement.

    Attributes:
        start, stop: first position, and the last one + 1.
        placement: ``"replicated"``, ``"striped"`` or ``"owned"``.
        ranks: the ranks that store the rows; a stripe assigns rows to them in this order.
        weights: rows per rank in one round of a stripe; empty = one each. Within a round, the
            n-th row (n = 0..w-1) of a rank with weight w is sorted by n / w among the rows of all
            ranks; ties are in the order of `ranks`.
        mode: ``"pull"`` (the reader fetches rows) or ``"push"`` (the owner sends sums of rows).
        memory: ``"device"``, or ``"host"`` for the slower memory of the owner's host.
        dtype: element type of the rows; empty = the table's. A quantised, read-only table may store
            hot rows in a wider type than cold ones. The cost model uses the table's type.
    """

    start: int
    stop: int
    placement: str
    ranks: tuple[int, ...]
    weights: tuple[int, ...] = ()
    mode: str = "pull"
    memory: str = "device"
    dtype: str = ""

    def pattern(self) -> list[int]:
        """The owners in one round of the tier: `pattern[k % len(pattern)]` owns position
        `start + k`."""
        if self.placement == "owned":
            return [self.ranks[0]]
        if not self.weights:
            return list(self.ranks)
        return list(_spread(self.ranks, self.weights))

    def notation(self) -> str:
        """The placement in OneFlow's split / broadcast / partial notation (Yuan et al. 2021).

        ``"S"``: rows are split over `ranks` and pulled; ``"B"``: every rank in `ranks` has all
        rows; ``"P"``: rows are split, and readers receive partial sums.
        """
        if self.placement == "replicated":
            return "B"
        return "P" if self.mode == "push" else "S"


@lru_cache(maxsize=4096)  # many tables have tiers with the same ranks and weights
def _spread(ranks: tuple[int, ...], weights: tuple[int, ...]) -> tuple[int, ...]:
    """The owners in one round of a weighted stripe, see `Tier.weights`. Every rank gets one row
    before any rank gets two, so even a rank of small weight may own the hottest row."""
    share_before = np.concatenate([np.arange(n) / n for n in weights])  # n / w of `Tier.weights`
    order = share_before.argsort(kind="stable")
    return tuple(np.repeat(ranks, weights)[order].tolist())


@dataclass(frozen=True, slots=True)
class Piece:
    """Columns `[start, stop)` of a table and the tiers of its rows."""

    start: int
    stop: int
    tiers: tuple[Tier, ...]


@dataclass(frozen=True, slots=True, eq=False)
class TablePlan:
    """Placement of one table.

    Attributes:
        table: the table's name, size, element type and optimizer.
        pieces: column pieces, in order; one piece = no column split.
        head_ids: int64 [H], the ids at positions 0..H-1. All other ids follow in ascending order.
            Empty = every id equals its position: ids are already in hotness order, or the
            placement does not depend on the order.
    """

    table: TableSpec
    pieces: tuple[Piece, ...]
    head_ids: np.ndarray = field(default_factory=lambda: _EMPTY)

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The tiers of the only column piece; raises PlanError if the table has several pieces."""
        if len(self.pieces) != 1:
            raise PlanError(f"table {self.table.name!r} is split by columns, so that it has "
                            "several lists of tiers", "number of column pieces", len(self.pieces),
                            "1", "read the tiers of each of TablePlan.pieces")
        return self.pieces[0].tiers


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A validated placement of all tables.

    Attributes:
        world_size: number of ranks that the plan is for.
        tables: one entry per table, in the order of the model's collection.
        objective: ``"training"`` or ``"inference"``.
        batch_size: samples per rank and step that the plan was made for (0 = unknown; `step_us` is
            then unknown too).
        topology: name of the topology that the plan was made for.
        step_us: modelled time of one step in microseconds (0 = unknown).
        lower_bound_us: certified lower bound on the modelled time of a step under any plan, in
            microseconds (0 = unknown); not above `step_us`.
        notes: further information from the planner; values are JSON-serializable.
        message_bits: bits per number in messages between memory domains; the constructor takes any
            value that `MessageBits.parse` accepts, and drops tables that are not in the plan.
        replica_groups: number of groups, of `world_size` ranks each, that execute the plan, see
            `oper.shard`; `step_us` and `lower_bound_us` do not include their synchronization.
        synchronize_every: number of updates between two synchronizations of the groups.
        synchronize_delay: number of updates made while the rows of a synchronization are sent.
        synchronize_bits: bits per number of rows or gradients sent to other groups: 32, 16 or 8.
    """

    world_size: Positive
    tables: tuple[TablePlan, ...]
    objective: Annotated[str, one_of(*OBJECTIVES)] = "training"
    batch_size: Count = 0
    topology: str = ""
    step_us: Amount = 0.0
    lower_bound_us: Amount = 0.0
    notes: dict[str, Any] = field(default_factory=dict)
    message_bits: MessageBits = EXACT
    replica_groups: Positive = 1
    synchronize_every: Positive = 1
    synchronize_delay: Count = 0
    synchronize_bits: int = 32
    _by_name: dict[str, TablePlan] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        for name, is_right, expected in rules_of(self):
            if not is_right:
                raise PlanError("invalid plan", name, getattr(self, name), expected,
                                "correct it, or leave it out if it may be unknown")
        check_synchronization("invalid plan", self.replica_groups, self.synchronize_every,
                              self.synchronize_delay, self.synchronize_bits)
        if self.lower_bound_us > self.step_us * (1 + 1e-9):
            raise PlanError(
                "invalid plan", "lower_bound_us", self.lower_bound_us,
                f"<= step_us={self.step_us}: no lower bound exceeds the step time of this plan",
                "set it to 0 (unknown), or plan again")
        if self.step_us and not self.batch_size:
            raise PlanError(
                "invalid plan", "batch_size", self.batch_size,
                f">= 1, the samples per rank for which step_us={self.step_us} was modelled",
                "state it, or set step_us and lower_bound_us to 0 (unknown)")
        check_unique(t.table for t in self.tables)
        object.__setattr__(self, "_by_name", {t.table.name: t for t in self.tables})
        object.__setattr__(self, "message_bits", MessageBits.parse(self.message_bits).only(
            {t.table.name for t in self.tables}))
        self.message_bits.check_for(t.table for t in self.tables)
        for table in self.tables:
            _check_table(table, self.world_size)

    @property
    def gap(self) -> float:
        """Relative optimality gap, ``step_us / lower_bound_us - 1``; NaN without a lower bound."""
        if self.lower_bound_us <= 0:
            return float("nan")
        return self.step_us / self.lower_bound_us - 1.0

    def table(self, name: str) -> TablePlan:
        """Return the entry of table `name`; raises PlanError if the plan has no such table."""
        if (entry := self._by_name.get(name)) is not None:
            return entry
        raise PlanError("the plan lacks a table", "table", name,
                        f"one of {[t.table.name for t in self.tables][:8]}",
                        "make a plan for this model")

    def check_for(self, tables: Sequence[TableSpec], world_size: int) -> None:
        """Raise PlanError unless the plan is for these tables and this world size.

        Names, numbers of rows, dims and dtypes must be equal. Optimizers must be equal as well if
        the plan has a modelled time, which depends on their state, and the tables are trained.
        """
        if self.world_size != world_size:
            raise PlanError("the plan is for another number of ranks", "plan.world_size",
                            self.world_size, f"{world_size}", "make a plan for this number")
        planned, names = {t.table.name: t.table for t in self.tables}, {t.name for t in tables}
        if set(planned) != names:
            raise PlanError("the plan is for other tables", "tables",
                            differing_names("missing from the plan", names,
                                            "only in the plan", planned),
                            "exactly the model's tables", "make a plan for this model")
        for t in tables:
            have = planned[t.name]
            for name in ("num_rows", "dim", "dtype"):
                if getattr(have, name) != getattr(t, name):
                    raise PlanError(f"the plan is for another table {t.name!r}", name,
                                    getattr(have, name), f"{getattr(t, name)}",
                                    "make a plan for this model")
            if self.step_us and t.optimizer not in ("none", have.optimizer):
                raise PlanError(
                    f"the plan is for another optimizer of table {t.name!r}", "optimizer",
                    have.optimizer, f"{t.optimizer!r}, which trains the table",
                    f"plan again with --optimizer {t.optimizer}, or pass the plan's optimizer")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as a JSON file, atomically."""
        write_text(path, self.to_text())

    def to_text(self) -> str:
        """Return the text of the plan file; equal plans give equal text."""
        tables, orders = [], {}
        for t in self.tables:
            tables.append({
                "table": t.table.to_json(),
                "pieces": [{"columns": [p.start, p.stop],
                            "tiers": [tier_to_json(x) for x in p.tiers]} for p in t.pieces]})
            if t.head_ids.size:
                orders[t.table.name] = _pack_ids(t.head_ids)
        head = {
            "kind": PLAN_KIND, "version": PLAN_VERSION, "world_size": self.world_size,
            "objective": self.objective, "batch_size": self.batch_size, "topology": self.topology,
            "step_us": self.step_us, "lower_bound_us": self.lower_bound_us, "notes": self.notes}
        if self.message_bits != EXACT:
            head["message_bits"] = self.message_bits.to_json()
        if self.replica_groups > 1:
            head |= {name: getattr(self, name) for name in (
                "replica_groups", "synchronize_every", "synchronize_delay", "synchronize_bits")}
        lines = [f"  {json.dumps(k)}: {json.dumps(v, sort_keys=True)}" for k, v in head.items()]
        body = ",\n".join("    " + json.dumps(t) for t in tables)
        lines.append(f'  "tables": [\n{body}\n  ]')
        packed = ",\n".join(f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in orders.items())
        lines.append(f'  "orders": {{\n{packed}\n  }}' if orders else '  "orders": {}')
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Read and validate a plan file.

        Raises:
            FileFormatError: the file is not a plan file, or is damaged.
            PlanError, InvalidInputError: a field has an invalid value or contradicts another field.
            OSError: the file cannot be read.
        """
        return Plan.from_text(Path(path).read_bytes(), f"cannot read {os.fspath(path)!r} as a plan")

    @staticmethod
    def from_text(text: str | bytes, what: str = "cannot read a plan") -> Plan:
        """Parse the text of a plan file; raises the errors of `load`, whose messages start with
        `what`."""
        value = parse_json(text, what)
        try:
            kind, version = value["kind"], value["version"]
        except (TypeError, KeyError) as error:
            raise FileFormatError(
                f"{what}: {type(error).__name__} {error}, expected a JSON plan file; the file is "
                "truncated, damaged or of another kind, regenerate it") from None
        if kind != PLAN_KIND or type(version) is not int or version != PLAN_VERSION:
            raise FileFormatError(what, "kind, version", (kind, version),
                                  f"{(PLAN_KIND, PLAN_VERSION)}", "pass a plan of this release")
        file = Reader(lambda name, value, expected: FileFormatError(
            what, name, value, expected, "correct it, or plan again")
                      ).build(_File, value)
        orders = dict(file.orders)
        tables = []
        for entry in file.tables:
            spec = TableSpec.from_json(entry.table)
            pieces = tuple(Piece(*piece.columns, tuple(x.tier() for x in piece.tiers))
                           for piece in entry.pieces)
            packed = orders.pop(spec.name, None)
            tables.append(TablePlan(
                spec, pieces, _EMPTY if packed is None else _unpack_ids(what, spec, packed)))
        if orders:
            raise PlanError(what, "orders of unknown tables", sorted(orders),
                            "hotness orders of the plan's tables only",
                            "give each order the name of its table")
        bits = MessageBits.parse(file.message_bits)
        bits.check_for(t.table for t in tables)
        return Plan(file.world_size, tuple(tables), file.objective, file.batch_size, file.topology,
                    file.step_us, file.lower_bound_us, file.notes, bits, file.replica_groups,
                    file.synchronize_every, file.synchronize_delay, file.synchronize_bits)


def check_synchronization(what: str, count: int, every: int, delay: Any, bits: Any) -> None:
    """Raise InvalidInputError, with a message that begins with `what`, unless `delay` and `bits`
    are allowed for `count` replica groups synchronized after `every` updates; see `oper.shard`."""
    most = every if every > 1 else 0  # with 1, gradients are added up before the update
    allowed = SYNCHRONIZE_BITS if count > 1 else (32,)
    require(what, "pass other numbers, or leave them out", (
        "synchronize_delay", delay, type(delay) is int and 0 <= delay <= most,
        f"an integer from 0 to {most}, with synchronize_every={every}"), (
        "synchronize_bits", bits, type(bits) is int and bits in allowed,
        f"one of {allowed}, with replica_groups={count}"))


def tier_to_json(tier: Tier) -> dict[str, Any]:
    """Return a tier as the JSON object that plan files contain."""
    value: dict[str, Any] = {"rows": [tier.start, tier.stop], "place": tier.placement,
                             "ranks": list(tier.ranks), "mode": tier.mode, "sbp": tier.notation()}
    if tier.weights:
        value["weights"] = list(tier.weights)
    if tier.memory != "device":
        value["memory"] = tier.memory
    if tier.dtype:
        value["dtype"] = tier.dtype
    return value


@dataclass(frozen=True, slots=True)
class TierEntry:
    """A tier of a plan file: `tier_to_json`'s keys and values."""

    rows: tuple[int, int]
    place: str
    ranks: tuple[int, ...]
    mode: str = "pull"
    weights: tuple[int, ...] = ()
    memory: str = "device"
    dtype: str = ""
    sbp: str | None = None

    def tier(self) -> Tier:
        """Return the tier; raises PlanError if `sbp` (`Tier.notation`), which is redundant, differs
        from the placement and mode."""
        tier = Tier(*self.rows, self.place, self.ranks, self.weights, self.mode, self.memory,
                    self.dtype)
        known = tier.placement in PLACEMENTS and tier.mode in MODES  # `check_tiers` refuses others
        if self.sbp is not None and known and self.sbp != tier.notation():
            raise PlanError("invalid tier", "sbp", self.sbp,
                            f"{tier.notation()!r} (placement {tier.placement}, mode {tier.mode})",
                            "leave sbp out: it follows from placement and mode")
        return tier


@dataclass(frozen=True, slots=True)
class _PieceEntry:
    columns: tuple[int, int]
    tiers: tuple[TierEntry, ...]


@dataclass(frozen=True, slots=True)
class _TableEntry:
    table: dict[str, Any]
    pieces: tuple[_PieceEntry, ...]


@dataclass(frozen=True, slots=True)
class _Order:
    """The first ids of a table's hotness order, compressed."""

    num_ids: int
    crc32: int
    zlib_base64: str


@dataclass(frozen=True, slots=True)
class _File:
    """The keys of a plan file."""

    kind: str
    version: int
    world_size: int
    objective: str
    batch_size: int
    topology: str
    step_us: float
    lower_bound_us: float
    notes: dict[str, Any]
    tables: tuple[_TableEntry, ...]
    orders: dict[str, _Order]
    message_bits: Any = EXACT
    replica_groups: int = 1
    synchronize_every: int = 1
    synchronize_delay: int = 0
    synchronize_bits: int = 32


def _pack_ids(ids: np.ndarray) -> dict[str, Any]:
    raw = np.ascontiguousarray(ids, "<i8").tobytes()
    return {"num_ids": int(ids.size), "crc32": zlib.crc32(raw),
            "zlib_base64": base64.b64encode(zlib.compress(raw, 6)).decode()}


def _unpack_ids(what: str, spec: TableSpec, order: _Order) -> np.ndarray:
    name, count = f"orders[{spec.name!r}]", order.num_ids
    if not 0 <= count <= spec.num_rows:
        raise FileFormatError(what, f"{name}.num_ids", count, f"0..{spec.num_rows}",
                              "regenerate it")
    try:
        packed = base64.b64decode(order.zlib_base64, validate=True)
        raw = zlib.decompressobj().decompress(packed, count * 8 + 1)
    except (ValueError, zlib.error) as error:
        raise FileFormatError(what, name, str(error), "packed ids", "regenerate it") from None
    if len(raw) != count * 8 or zlib.crc32(raw) != order.crc32:
        raise FileFormatError(what, f"{name}.crc32", zlib.crc32(raw), f"{order.crc32}",
                              "the file is damaged, regenerate it")
    return np.frombuffer(raw, "<i8").astype(np.int64)


def _check_table(entry: TablePlan, world_size: int) -> None:
    spec = entry.table
    what = f"invalid plan of table {spec.name!r}"
    ids = entry.head_ids
    if ids.ndim != 1 or ids.dtype != np.int64 or (ids.size and (
            ids.min() < 0 or ids.max() >= spec.num_rows or np.unique(ids).size != ids.size)):
        raise PlanError(what, "head_ids", ids, f"int64, distinct, in 0..{spec.num_rows - 1}",
                        "plan again from the statistics")
    _check_cover(what, "columns", entry.pieces, spec.dim, "list every column once, in order")
    for piece in entry.pieces:
        check_tiers(what, piece.tiers, spec.num_rows, world_size)
        _check_dtypes(what, spec, piece.tiers)
    if len(entry.pieces) > 1 and not spec.may_be_split:
        raise PlanError(what, "columns", [(p.start, p.stop) for p in entry.pieces],
                        "one piece with all columns, because "
                        f"{spec.optimizer} needs the norms of whole rows",
                        "plan again for this optimizer, or split the table by rows")


def _check_cover(what: str, name: str, parts: Sequence[Piece | Tier], size: int, todo: str
                 ) -> None:
    ends = [0, *(part.stop for part in parts)]
    if ends[-1] != size or any(part.start != at or part.stop <= at
                               for part, at in zip(parts, ends, strict=False)):
        raise PlanError(what, name, [(part.start, part.stop) for part in parts],
                        f"ranges that cover 0..{size} in order", todo)


def _check_dtypes(what: str, spec: TableSpec, tiers: tuple[Tier, ...]) -> None:
    """Raise PlanError if a tier's own `dtype` is unknown or not allowed in its table."""
    for tier in tiers:
        if not tier.dtype:
            continue
        if tier.dtype not in DTYPES or (tier.dtype == "int4" and spec.dim % 2):
            raise PlanError(what, "dtype of a tier", tier.dtype,
                            f"one of {DTYPES}, int4 only for an even number of columns",
                            "choose another, or leave it out")
        if spec.dtype not in CODE_BITS:
            raise PlanError(what, "dtype of a tier", tier.dtype,
                            f"no dtype, because the table's is {spec.dtype}; only tables of "
                            f"{tuple(CODE_BITS)} may have tiers of another dtype",
                            "leave it out, or quantise the table to the dtype of its coldest rows")


def check_tiers(what: str, tiers: tuple[Tier, ...], num_rows: int, world_size: int) -> None:
    """Raise PlanError, beginning with `what`, unless tiers cover all rows in order on valid ranks.
    """
    _check_cover(what, "rows", tiers, num_rows, "list every row once, hottest first")
    for tier in tiers:
        for name, allowed in (("placement", PLACEMENTS), ("mode", MODES), ("memory", MEMORIES)):
            if getattr(tier, name) not in allowed:
                raise PlanError(what, f"{name} of a tier", getattr(tier, name),
                                f"one of {allowed}", f"correct the tier's {name}")
        if (not tier.ranks or len(set(tier.ranks)) != len(tier.ranks)
                or min(tier.ranks) < 0 or max(tier.ranks) >= world_size):
            raise PlanError(what, "ranks", tier.ranks, f"distinct ranks in 0..{world_size - 1}",
                            "list ranks of the plan, each once")
        if tier.placement == "owned" and len(tier.ranks) != 1:
            raise PlanError(what, "ranks", tier.ranks, "one rank for an owned tier",
                            "name one rank, or stripe the tier")
        if tier.placement == "replicated" and tier.mode != "pull":
            raise PlanError(what, "mode", tier.mode, "pull for a replicated tier",
                            "write mode pull, or make the tier striped or owned")
        if tier.weights and (tier.placement != "striped" or len(tier.weights) != len(tier.ranks)
                             or min(tier.weights) < 1 or sum(tier.weights) > MAX_PATTERN):
            raise PlanError(what, "weights", tier.weights,
                            f"one integer >= 1 per rank of a striped tier, sum <= {MAX_PATTERN}",
                            "list one weight per rank, or leave weights out")


def uniform_plan(tables: Sequence[TableSpec], world_size: int, placement: str = "striped",
                 **plan_fields: Any) -> Plan:
    """Return a plan with the same placement for every table, made without statistics.

    Args:
        tables: the tables.
        world_size: number of ranks.
        placement: ``"replicated"``, ``"striped"``, or ``"owned"``: tables in descending order of
            bytes, each on the rank with the fewest bytes so far.
        plan_fields: other fields of `Plan`.

    Table k lists its ranks from rank k % world_size on, so that rank 0 does not own the hottest row
    of every table.
    """
    load = [0] * world_size
    owner = {}
    for t in sorted(tables, key=lambda t: (-t.num_bytes, t.name)):
        owner[t.name] = min(range(world_size), key=lambda r: (load[r], r))
        load[owner[t.name]] += t.num_bytes
    entries = []
    for k, t in enumerate(tables):
        rotated = tuple((r + k) % world_size for r in range(world_size))
        ranks = (owner[t.name],) if placement == "owned" else rotated
        tier = Tier(0, t.num_rows, placement, ranks)
        entries.append(TablePlan(t, (Piece(0, t.dim, (tier,)),)))
    return Plan(world_size, tuple(entries), **plan_fields)
