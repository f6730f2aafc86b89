"""The memory layout of published tables, and access to their rows in logical order.

A buffer is one segment per memory domain, with the rows, and one with a header and the dense
weights.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from oper.plan import Plan
from oper.rows.directory import TableDirectory, TierLayout, directories_of
from oper.shmem.memory.quantise import dequantise
from oper.shmem.placement.layout import ArenaLayout
from oper.shmem.rows import CHUNK_ROWS, LogicalRows
from oper.tables import CODE_BITS

HEADER_BYTES = 1 << 20  # before the dense weights
HEADER = struct.Struct("<8sIQI")  # magic, version, epoch, bytes of the text that follows
_ALIGN = 64


@dataclass(frozen=True, slots=True)
class DenseEntry:
    """A dense weight: its place after the header of the last segment."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        """Size of the weight in bytes."""
        return getattr(torch, self.dtype).itemsize * int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class Write:
    """Rows to be written to one tier of one memory domain.

    Attributes:
        piece: index in `Layout.directories`.
        tier, domain: their tier and memory domain.
        numbers: int64 [n], their row numbers among the domain's rows of the tier.
        rows: [n, columns] as they are stored, or uint8 [n, bytes of a row] of codes; contiguous.
    """

    piece: int
    tier: TierLayout
    domain: int
    numbers: torch.Tensor
    rows: torch.Tensor


# Of each write: a tier's rows [n, width], places int64 [m] among them, what goes there [m, width].
Places = tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]


class Layout:
    """The layout of a buffer: one segment per memory domain, one for dense weights.

    Args:
        plan: the tables, placed on memory domains (its ranks).
        dense: the dense weights.

    Attributes:
        num_bytes: used bytes of one buffer.
    """

    def __init__(self, plan: Plan, dense: Sequence[DenseEntry]) -> None:
        self.plan = plan
        self.dense = list(dense)
        self.specs = {t.table.name: t.table for t in plan.tables}
        self.directories = directories_of(plan, may_mix=True)
        self.pieces: dict[str, list[int]] = {name: [] for name in self.specs}
        for k, d in enumerate(self.directories):
            self.pieces[d.table.name].append(k)
        self.arena = ArenaLayout.build(self.directories, plan.world_size, 0)
        self.has_replicas = any(d.num_replica_rows.any() for d in self.directories)
        # Rows may be read in whole vectors.
        self.segment_bytes = [n + 4096 for n in self.arena.used_bytes]
        self.dense_bytes = HEADER_BYTES + max(
            [e.offset + e.num_bytes for e in self.dense], default=0)
        self.num_bytes = sum(self.arena.memory_bytes(self.directories)["device"]) + sum(
            e.num_bytes for e in self.dense)

    def is_mixed(self, table: str) -> bool:
        """Whether ranges of a table's rows have different types."""
        return self.directories[self.pieces[table][0]].is_mixed

    def types_of(self, table: str, ids: np.ndarray) -> dict[str, np.ndarray]:
        """Split ids by the type of their rows.

        Args:
            table: its name.
            ids: int64 [n].

        Returns:
            By type, ascending indices into `ids`, int64 [m].
        """
        d = self.directories[self.pieces[table][0]]
        if not d.is_mixed:
            return {d.tiers[0].dtype: np.arange(ids.size)}
        found: dict[str, list[np.ndarray]] = {}
        for x, at, _, _ in d.by_tier(d.position_of(ids)):
            found.setdefault(x.dtype, []).append(at)
        return {dtype: np.sort(np.concatenate(parts)) for dtype, parts in found.items()}

    def writes(self, table: str, ids: np.ndarray, rows: torch.Tensor) -> Iterator[Write]:
        """The writes that store rows in all their places.

        Args:
            table: its name.
            ids: int64 [n], valid, each once, of rows of one type (`types_of`).
            rows: [n, dim] of that type, or uint8 [n, bytes of a row] of codes.
        """
        for piece in self.pieces[table]:
            d = self.directories[piece]
            mine = rows if rows.dtype == torch.uint8 else rows[:, d.column:d.column + d.dim]
            for x, domain, at, numbers in _by_owner(d, d.position_of(ids)):
                some = mine if at.numel() == ids.size else mine[at]
                yield Write(piece, x, domain, numbers, some.contiguous())

    def to_text(self) -> str:
        """The layout as text, for the handshake of a publisher."""
        return json.dumps({"plan": self.plan.to_text(), "dense": [
            [e.key, e.dtype, list(e.shape), e.offset] for e in self.dense]})

    @staticmethod
    def from_text(text: str) -> Layout:
        """The layout from the text of `to_text`."""
        value = json.loads(text)
        return Layout(Plan.from_text(value["plan"]), [
            DenseEntry(key, dtype, tuple(shape), offset)
            for key, dtype, shape, offset in value["dense"]])


def _by_owner(d: TableDirectory, positions: np.ndarray
              ) -> Iterator[tuple[TierLayout, int, torch.Tensor, torch.Tensor]]:
    """For every tier and owner with any of the positions (int64 [n]): these; which positions they
    are, and the places of their rows among the owner's rows of the tier (int64 [m] each)."""
    for x, at, owner, number in d.by_tier(positions):
        if x.pattern.size == 1:
            yield x, int(x.pattern[0]), torch.from_numpy(at), torch.from_numpy(number)
            continue
        for rank in np.unique(owner).tolist():
            here = np.flatnonzero(owner == rank)
            yield x, rank, torch.from_numpy(at[here]), torch.from_numpy(number[here])


@dataclass(slots=True)
class _Domain:
    """One memory domain of a host, as the rows' base class wants its ranks."""

    rank: int
    world_size: int
    is_local: bool = True

    def all_gather(self, value: Any) -> list[Any]:
        return [value] * self.world_size


class BufferRows(LogicalRows):
    """The rows of one buffer in logical order, seen from one memory domain.

    Args:
        layout: layout of the buffer.
        addresses: int [D], where each domain's segment is mapped.
        domain: the domain that reads or writes.
    """

    def __init__(self, layout: Layout, addresses: Sequence[int], domain: int) -> None:
        self.layout = layout
        self.specs = layout.specs
        self.directories = layout.directories
        self.pieces = layout.pieces
        self.group = _Domain(domain, layout.plan.world_size)
        self._layout = layout.arena
        self._addresses = list(addresses)
        self._heap = self  # type: ignore[assignment]  # open
        self._exchange = None

    def barrier(self) -> None:
        """Nothing to do: there are no other ranks to wait for."""

    def places(self, writes: Sequence[Write]) -> Places:
        """Addresses for writes in all domains that hold the rows."""
        return ([self._tier(w.piece, w.tier, w.domain) for w in writes],
                [w.numbers for w in writes], [w.rows for w in writes])

    def gather_piece(self, piece: int, ids: np.ndarray, part: str, columns: slice,
                     out: torch.Tensor) -> None:
        """See `LogicalRows.gather_piece`."""
        d = self.directories[piece]
        if not d.is_mixed:
            super().gather_piece(piece, ids, part, columns, out)
            return
        for x, rank, at, numbers in _by_owner(d, d.position_of(ids)):
            rows = self._tier(piece, x, rank)[numbers]
            if x.dtype in CODE_BITS:
                rows = dequantise(rows, x.dtype, d.dim)
            out[at] = rows[:, columns].to(out)

    def _tier(self, piece: int, x: TierLayout, rank: int) -> torch.Tensor:
        """A domain's rows of a tier."""
        begin = int(self._layout.rows[piece, rank] + x.begin[rank])
        return self._segment(self._addresses[rank] + begin, int(x.num_rows[rank]),
                             self.directories[piece].dim, x.dtype)

    def _copy_replicas(self, piece: int, x: TierLayout) -> None:
        d, me = self.directories[piece], self.group.rank
        if x.replica_base[me] < 0:
            return
        begin = int(self._layout.replicas[piece, me] + x.replica_begin[me])
        copy = self._segment(self._addresses[me] + begin, x.tier.stop - x.tier.start, d.dim,
                             x.dtype)
        for first in range(x.tier.start, x.tier.stop, CHUNK_ROWS):
            positions = np.arange(first, min(first + CHUNK_ROWS, x.tier.stop))
            for _, rank, at, numbers in _by_owner(d, positions):
                copy[first - x.tier.start + at] = self._tier(piece, x, rank)[numbers]


def dense_view(address: int, entry: DenseEntry) -> torch.Tensor:
    """A dense weight as a view of the dense segment at `address`."""
    raw = torch.ops.oper.segment_bytes(address + HEADER_BYTES + entry.offset, entry.num_bytes)
    return raw.view(getattr(torch, entry.dtype)).view(entry.shape)


def checksums(layout: Layout, addresses: Sequence[int], dense: int) -> dict[str, int]:
    """CRC-32 of every segment of a buffer, by name."""
    found = {}
    for d, (address, size) in enumerate(zip(addresses, layout.arena.used_bytes, strict=True)):
        found[f"domain {d}"] = zlib.crc32(
            torch.ops.oper.segment_bytes(address, max(1, size)).numpy())
    size = layout.dense_bytes - HEADER_BYTES
    found["dense"] = zlib.crc32(
        torch.ops.oper.segment_bytes(dense + HEADER_BYTES, size).numpy()) if size else 0
    return found


def dense_entries(weights: Mapping[str, torch.Tensor]) -> list[DenseEntry]:
    """Assign places to dense weights."""
    entries, at = [], 0
    for key, value in weights.items():
        entry = DenseEntry(key, str(value.dtype).removeprefix("torch."), tuple(value.shape), at)
        entries.append(entry)
        at = -(-(at + entry.num_bytes) // _ALIGN) * _ALIGN
    return entries
