"""Which rank owns which rows of a table: the arithmetic of the C++ kernels, in NumPy.

*Position*: index of a row in hotness order. *Owner*: the rank that stores a row; of a replicated
row, its master copy and optimizer state. *Slot*: index of a row in its owner's shard of the table.
*Linear index*: ``owner_begin[owner] + slot``, a permutation of the rows sorted by owner and slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from oper.errors import PlanError
from oper.plan import MEMORIES, Plan, TablePlan, Tier
from oper.tables import CODE_BITS, bytes_of_row

MAX_ROWS = 2**32 - 1  # linear indices and slots are 32-bit numbers
_LINE = 64


def summing_piece(positions: np.ndarray, num_pieces: int) -> np.ndarray:
    """Return for each row the column piece whose owner adds up the row's sums of squares, if ranks
    are in several memory domains.

    It is chosen by a hash, as in csrc/common/directory.h: ``positions % num_pieces`` could follow
    the pattern in which rows are striped over ranks.

    Args:
        positions: int64 [n], the rows' positions in the table.
        num_pieces: number of column pieces.

    Returns:
        int64 [n], indices of pieces.
    """
    mix, half = np.uint64(0x9E3779B97F4A7C15), np.uint64(32)
    mixed = positions.astype(np.uint64) * mix
    mixed = (mixed ^ (mixed >> half)) * mix
    return ((mixed >> half) % np.uint64(num_pieces)).astype(np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class TierLayout:
    """Owners and slots of the rows of one tier.

    The row at position ``p = tier.start + n * P + k`` belongs to rank ``r = pattern[k]`` and has
    slot ``slot_base[r] + n * weight[r] + within[k]``.

    Attributes:
        tier: the tier.
        pattern: int64 [P], the owners of P consecutive positions; repeats.
        within: int64 [P], number of earlier entries of the pattern with the same owner.
        weight: int64 [W], rows of each rank in one repetition of the pattern.
        slot_base: int64 [W], slot of the tier's first row on each rank.
        num_rows: int64 [W], number of rows of the tier that each rank owns.
        replica_base: int64 [W], index of the tier's first row among each rank's replica rows; -1 if
            the rank has no replica.
        dtype, row_bytes: element type and bytes of the tier's rows.
        begin, replica_begin: int64 [W], byte offset of the tier's first row in each rank's array of
            rows, and of its first replica row in the rank's array of replicas.
    """

    tier: Tier
    pattern: np.ndarray
    within: np.ndarray
    weight: np.ndarray
    slot_base: np.ndarray
    num_rows: np.ndarray
    replica_base: np.ndarray
    dtype: str
    row_bytes: int
    begin: np.ndarray
    replica_begin: np.ndarray


class TableDirectory:
    """Maps the rows of one column piece of a table to owners and slots; does not access the rows.

    Args:
        plan: the table's placement.
        world_size: number of ranks W.
        piece: index of the column piece.

    Attributes:
        table: spec of the table, with all its columns.
        column, dim: first column of the piece, and number of its columns.
        tiers: `TierLayout` of each tier, in the order of positions.
        num_slots: int64 [W], rows that each rank owns; rows in host memory have the last slots.
        num_replica_rows: int64 [W], replica rows on each rank, those in host memory last.
        num_host_slots, num_host_replica_rows: int64 [W], how many of them are in host memory.
        bytes, host_bytes: int64 [2, W], bytes of the owned rows and of the replica rows on each
            rank: all of them, and those in host memory.
        is_mixed: whether tiers have different element types; rows are then addressed by tier and
            row number within the tier (`by_tier`), since slots differ in size.
        owner_begin: int64 [W + 1], first linear index of each rank, then the number of rows.

    Raises:
        PlanError: the table has more rows than there are slot numbers, or has quantised rows and
            column pieces.
    """

    def __init__(self, plan: TablePlan, world_size: int, piece: int = 0) -> None:
        self.table = plan.table
        self.world_size = world_size
        self.column = plan.pieces[piece].start
        self.dim = plan.pieces[piece].stop - plan.pieces[piece].start
        if plan.table.dtype in CODE_BITS and len(plan.pieces) > 1:
            raise PlanError(f"cannot place table {self.table.name!r}", "columns",
                            [(p.start, p.stop) for p in plan.pieces],
                            "one piece with all columns, because the codes of a row of "
                            f"{plan.table.dtype} share a scale",
                            "plan without column splits")
        tiers = plan.pieces[piece].tiers
        # If every piece has one tier, hotness does not matter and positions can be ids. All pieces
        # of a table must use the same order, since a row's pieces are matched by position.
        one_tier = all(len(p.tiers) == 1 for p in plan.pieces)
        self.head_ids = np.zeros(0, np.int64) if one_tier else plan.head_ids
        order = np.argsort(self.head_ids, kind="stable")
        self._sorted_head = self.head_ids[order]
        self._sorted_positions = order.astype(np.int64)
        self._head_gaps = self._sorted_head - np.arange(self._sorted_head.size)
        self.is_mixed = any(t.dtype not in ("", plan.table.dtype) for t in tiers)
        slots = np.zeros(world_size, np.int64)
        replicas = np.zeros(world_size, np.int64)
        self.bytes = np.zeros((2, world_size), np.int64)
        layouts: dict[int, TierLayout] = {}
        in_device, in_device_bytes = np.zeros((2, 2, world_size), np.int64)
        for memory in MEMORIES:
            for tier in (t for t in tiers if t.memory == memory):
                layout = self._lay_out(tier, slots, replicas)
                slots = slots + layout.num_rows
                self.bytes[0] = layout.begin + layout.num_rows * layout.row_bytes
                if tier.placement == "replicated":
                    ranks = list(tier.ranks)
                    replicas[ranks] += tier.stop - tier.start
                    self.bytes[1, ranks] = (layout.replica_begin[ranks]
                                            + (tier.stop - tier.start) * layout.row_bytes)
                layouts[tier.start] = layout
            if memory == "device":
                in_device[:], in_device_bytes[:] = (slots, replicas), self.bytes
        self.host_bytes = self.bytes - in_device_bytes
        self.tiers = [layouts[t.start] for t in tiers]
        self.num_slots = slots  # int64 [W]
        self.num_replica_rows = replicas  # int64 [W]
        self.num_host_slots = slots - in_device[0]  # int64 [W]
        self.num_host_replica_rows = replicas - in_device[1]  # int64 [W]
        self.owner_begin = np.concatenate([[0], np.cumsum(slots)])  # int64 [W + 1]
        if plan.table.num_rows > MAX_ROWS:
            raise PlanError(f"table {self.table.name!r} is too large", "rows", plan.table.num_rows,
                            f"<= {MAX_ROWS}", "hash its ids into fewer rows or split it in two")

    def _lay_out(self, tier: Tier, slots: np.ndarray, replicas: np.ndarray) -> TierLayout:
        """Return the layout of a tier that follows `slots` rows and `replicas` replica rows."""
        pattern = np.asarray(tier.pattern(), np.int64)
        within = np.zeros(pattern.size, np.int64)
        for rank in set(pattern.tolist()):
            mine = pattern == rank
            within[mine] = np.arange(int(mine.sum()))
        weight = np.bincount(pattern, minlength=self.world_size)
        repeats, rest = divmod(tier.stop - tier.start, pattern.size)
        num_rows = repeats * weight + np.bincount(pattern[:rest], minlength=self.world_size)
        replica_base = np.full(self.world_size, -1, np.int64)
        if tier.placement == "replicated":
            ranks = list(tier.ranks)
            replica_base[ranks] = replicas[ranks]
        dtype = tier.dtype or self.table.dtype
        # Tiers of different types begin at cache lines; with one type, rows are contiguous.
        align = _LINE if self.is_mixed else 1
        begin, replica_begin = -(-self.bytes // align) * align
        return TierLayout(tier, pattern, within, weight.astype(np.int64), slots.copy(),
                          num_rows.astype(np.int64), replica_base, dtype,
                          bytes_of_row(dtype, self.dim), begin, replica_begin)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the piece, in the table's type."""
        return bytes_of_row(self.table.dtype, self.dim)

    def position_of(self, ids: np.ndarray) -> np.ndarray:
        """Return the positions (int64 [n]) of valid ids (int64 [n])."""
        if not self.head_ids.size:
            return ids
        below = np.searchsorted(self._sorted_head, ids)
        at = np.minimum(below, self._sorted_head.size - 1)
        hot = self._sorted_head[at] == ids
        return np.where(hot, self._sorted_positions[at], self.head_ids.size + ids - below)

    def ids_at(self, positions: np.ndarray) -> np.ndarray:
        """Return the ids (int64 [n]) at valid positions (int64 [n])."""
        num_head = self.head_ids.size
        if not num_head:
            return positions
        ordinal = positions - num_head
        cold = ordinal + np.searchsorted(self._head_gaps, ordinal, side="right")
        hot = self.head_ids[np.minimum(positions, num_head - 1)]
        return np.where(positions < num_head, hot, cold)

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the owners and slots (int64 [n] each) of positions (int64 [n])."""
        owner = np.empty(positions.shape, np.int64)
        slot = np.empty(positions.shape, np.int64)
        for layout, at, who, number in self.by_tier(positions):
            owner[at] = who
            slot[at] = layout.slot_base[who] + number
        return owner, slot

    def by_tier(self, positions: np.ndarray
                ) -> Iterator[tuple[TierLayout, np.ndarray, np.ndarray, np.ndarray]]:
        """Group positions (int64 [n]) by tier.

        Yields:
            For every tier with m > 0 of the positions: its layout; indices of these positions in
                `positions`; their owners; their row numbers among the owner's rows of the tier
                (int64 [m] each). The owners may be a read-only view.
        """
        for layout in self.tiers:
            at = np.flatnonzero((positions >= layout.tier.start) & (positions < layout.tier.stop))
            if at.size:
                repeat, k = _divided(positions[at] - layout.tier.start, layout.pattern.size)
                who = layout.pattern[k]
                number = repeat * layout.weight[who] + layout.within[k]
                yield layout, at, np.broadcast_to(who, at.shape), number

    def positions_at(self, rank: int, slots: np.ndarray) -> np.ndarray:
        """Return the positions (int64 [n]) of the rows in valid slots (int64 [n]) of `rank`."""
        positions = np.empty(slots.shape, np.int64)
        for layout in self.tiers:
            first, count = layout.slot_base[rank], layout.num_rows[rank]
            inside = (slots >= first) & (slots < first + count)
            if not inside.any():
                continue
            mine = np.flatnonzero(layout.pattern == rank)
            at = slots[inside] - first
            repeat, k = _divided(at, mine.size)
            positions[inside] = layout.tier.start + repeat * layout.pattern.size + mine[k]
        return positions

    def head_map(self) -> tuple[np.ndarray, ...]:
        """Return the map from head ids to positions that the kernels read; () without a head.

        Returns:
            int64 [ceil(num_rows / 32)]: bit i % 32 of word i // 32 is set if id i is in the head,
                and the word's upper 32 bits are the number of head ids below 32 * (i // 32).
            int32 [H] (bits of uint32): positions of the head ids, in ascending order of id.
        """
        if not self.head_ids.size:
            return ()
        num_words = -(-self.table.num_rows // 32)
        before = np.searchsorted(self._sorted_head, np.arange(num_words, dtype=np.int64) * 32)
        words = before.astype(np.uint64) << np.uint64(32)
        np.bitwise_or.at(words, self._sorted_head // 32,
                         np.uint64(1) << (self._sorted_head % 32).astype(np.uint64))
        return words.view(np.int64), self._sorted_positions.astype(np.uint32).view(np.int32)

    def head_order(self) -> tuple[np.ndarray, ...]:
        """Return the head ids by position, and in ascending order, int32 [H] each (bits of uint32);
        () without a head."""
        if not self.head_ids.size:
            return ()
        return tuple(ids.astype(np.uint32).view(np.int32)
                     for ids in (self.head_ids, self._sorted_head))


def _divided(values: np.ndarray, by: int) -> tuple[np.ndarray, np.ndarray | int]:
    """Return quotients int64 [n] and remainders int64 [n]. If `by` is 1, the usual case, there is
    no slow division, and the remainder is the number 0."""
    return (values, 0) if by == 1 else np.divmod(values, by)


def directories_of(plan: Plan, may_mix: bool = False) -> list[TableDirectory]:
    """Return the directories of a plan, one per column piece of each table.

    Raises:
        PlanError: a table has rows of several types, and `may_mix` is false.
    """
    found = [TableDirectory(t, plan.world_size, piece)
             for t in plan.tables for piece in range(len(t.pieces))]
    for d in found:
        if d.is_mixed and not may_mix:
            raise PlanError(f"cannot shard table {d.table.name!r}", "(first row, dtype) of tiers",
                            [(x.tier.start, x.dtype) for x in d.tiers], "one dtype",
                            "publish it with oper.publish, which supports several dtypes")
    return found


def nearest_replica(x: TierLayout, rank: int, local: np.ndarray) -> int:
    """Return the rank whose replica of a tier `rank` reads; -1 if it reads the master copies,
    directly or through the exchange.

    Args:
        x: the tier.
        rank: the reader.
        local: bool [W], ranks whose memory `rank` can address.
    """
    if x.replica_base[rank] >= 0:
        return rank
    if x.tier.placement != "replicated" or local[x.pattern].all():
        return -1
    return next((int(r) for r in np.flatnonzero(local) if x.replica_base[r] >= 0), -1)


@dataclass(frozen=True, slots=True)
class NeedsAcross:
    """Which exchanges a plan needs between memory domains.

    Attributes:
        gathers: whether any rank requests rows from other domains, if owners do not pool.
        pulls: whether any rank requests rows of pulled tiers from other domains. If owners pool the
            rows of pushed tiers, no other rows are requested.
        refreshes: whether any replica has its master copy in another domain, which refreshes it.
        shares: whether a rank reads a replica that another rank of its domain holds.
    """

    gathers: bool
    pulls: bool
    refreshes: bool
    shares: bool


def needs_across(directories: Sequence[TableDirectory], domain_of: Sequence[int]) -> NeedsAcross:
    """Return the exchanges between memory domains that a plan needs; `domain_of`: int [W], domain
    of each rank."""
    gathers = pulls = refreshes = shares = False
    domains = np.asarray(domain_of)
    for x in (x for d in directories for x in d.tiers):
        owners = set(domains[x.pattern].tolist())
        holds = x.replica_base >= 0
        for domain in set(domain_of):
            is_remote = owners != {domain}
            mine = holds[domains == domain]
            asks = is_remote and not mine.any()
            gathers |= asks
            pulls |= asks and x.tier.mode != "push"
            refreshes |= is_remote and bool(mine.any())
            shares |= is_remote and bool(mine.any() and not mine.all())
    return NeedsAcross(gathers, pulls, refreshes, shares)
