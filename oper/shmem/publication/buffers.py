"""The memory layout of published tables, and access to their rows by id.

A buffer consists of one segment per memory domain with the domain's rows, and one segment with a
header and the dense weights.
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
from oper.shmem.group.turns import Turns
from oper.shmem.memory.quantise import dequantise
from oper.shmem.placement.layout import ArenaLayout
from oper.shmem.rows import CHUNK_ROWS, LogicalRows
from oper.tables import CODE_BITS

HEADER_BYTES = 1 << 20  # before the dense weights
HEADER = struct.Struct("<8sIQI")  # magic, version, epoch, bytes of the text that follows
_ALIGN = 64


@dataclass(frozen=True, slots=True)
class DenseEntry:
    """A dense weight: key, dtype, shape, and its offset after the header, in bytes."""

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
        tier, domain: tier and memory domain of the rows.
        numbers: int64 [n], row numbers among the domain's rows of the tier.
        rows: the rows in stored form, contiguous: [n, columns], or uint8 [n, bytes of a row] if
            quantised.
    """

    piece: int
    tier: TierLayout
    domain: int
    numbers: torch.Tensor
    rows: torch.Tensor


# For each write: destination [n, width], its row numbers int64 [m], and the new rows [m, width].
Places = tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]


class Layout:
    """The layout of a buffer: one segment per memory domain, one for dense weights.

    Args:
        plan: the tables; the plan's ranks are memory domains.
        dense: the dense weights.

    Attributes:
        segment_bytes: int [D], size of each domain's segment.
        dense_bytes: size of the segment of dense weights.
        num_bytes: bytes of tables and dense weights in one buffer.
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
        # Padding, since kernels may read full vectors beyond the last row.
        self.segment_bytes = [n + 4096 for n in self.arena.used_bytes]
        self.dense_bytes = HEADER_BYTES + max(
            [e.offset + e.num_bytes for e in self.dense], default=0)
        self.num_bytes = sum(map(sum, self.arena.memory_bytes(self.directories).values())) + sum(
            e.num_bytes for e in self.dense)

    def is_mixed(self, table: str) -> bool:
        """Return whether the tiers of a table have different element types."""
        return self.directories[self.pieces[table][0]].is_mixed

    def types_of(self, table: str, ids: np.ndarray) -> dict[str, np.ndarray]:
        """Group ids (int64 [n]) of a table by the element type of their rows.

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
        """Yield the writes that store rows in all their pieces, tiers and domains.

        Args:
            table: name of the table.
            ids: int64 [n], valid and distinct, of rows of one element type (`types_of`).
            rows: the rows in stored form, [n, dim], or uint8 [n, bytes of a row] if quantised.
        """
        for piece in self.pieces[table]:
            d = self.directories[piece]
            mine = rows if rows.dtype == torch.uint8 else rows[:, d.column:d.column + d.dim]
            for x, domain, at, numbers in _by_owner(d, d.position_of(ids)):
                some = mine if at.numel() == ids.size else mine[at]
                yield Write(piece, x, domain, numbers, some.contiguous())

    def to_text(self) -> str:
        """Return the layout as text, for the publisher's handshake."""
        return json.dumps({"plan": self.plan.to_text(), "dense": [
            [e.key, e.dtype, list(e.shape), e.offset] for e in self.dense]})

    @staticmethod
    def from_text(text: str) -> Layout:
        """Parse the output of `to_text`."""
        value = json.loads(text)
        return Layout(Plan.from_text(value["plan"]), [
            DenseEntry(key, dtype, tuple(shape), offset)
            for key, dtype, shape, offset in value["dense"]])


def _by_owner(d: TableDirectory, positions: np.ndarray
              ) -> Iterator[tuple[TierLayout, int, torch.Tensor, torch.Tensor]]:
    """Group positions (int64 [n]) by tier and owner: yields the tier, the owner, indices into
    `positions`, and row numbers among the owner's rows of the tier (int64 [m] each)."""
    for x, at, owner, number in d.by_tier(positions):
        if x.pattern.size == 1:
            yield x, int(x.pattern[0]), torch.from_numpy(at), torch.from_numpy(number)
            continue
        for rank in np.unique(owner).tolist():
            here = np.flatnonzero(owner == rank)
            yield x, rank, torch.from_numpy(at[here]), torch.from_numpy(number[here])


@dataclass(slots=True)
class _Domain:
    """A `Group` in which memory domains take the role of ranks, for `LogicalRows`."""

    rank: int
    world_size: int
    is_local: bool = True

    def all_gather(self, value: Any) -> list[Any]:
        return [value] * self.world_size


class BufferRows(LogicalRows):
    """Access to the rows of one buffer by id, from one memory domain.

    Args:
        layout: layout of the buffer.
        addresses: int [D], addresses at which the domains' segments are mapped.
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
        self.turns = Turns(1)

    def barrier(self) -> None:
        """Do nothing, since there are no other ranks to wait for."""

    def places(self, writes: Sequence[Write]) -> Places:
        """Return the destinations, row numbers and rows of `writes`, for ``place_rows``."""
        return ([self._tier(w.piece, w.tier, w.domain) for w in writes],
                [w.numbers for w in writes], [w.rows for w in writes])

    def gather_piece(self, piece: int, ids: np.ndarray, part: str, columns: slice,
                     out: torch.Tensor) -> None:
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
        """Return a view of a domain's rows of a tier."""
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
    """Return a dense weight as a view of the dense segment at `address`."""
    raw = torch.ops.oper.segment_bytes(address + HEADER_BYTES + entry.offset, entry.num_bytes)
    return raw.view(getattr(torch, entry.dtype)).view(entry.shape)


def checksums(layout: Layout, addresses: Sequence[int], dense: int) -> dict[str, int]:
    """Compute the CRC-32 of every segment of a buffer, by name (``"domain 0"``, ..., ``"dense"``).
    """
    found = {}
    for d, (address, size) in enumerate(zip(addresses, layout.arena.used_bytes, strict=True)):
        found[f"domain {d}"] = zlib.crc32(
            torch.ops.oper.segment_bytes(address, max(1, size)).numpy())
    size = layout.dense_bytes - HEADER_BYTES
    found["dense"] = zlib.crc32(
        torch.ops.oper.segment_bytes(dense + HEADER_BYTES, size).numpy()) if size else 0
    return found


def dense_entries(weights: Mapping[str, torch.Tensor]) -> list[DenseEntry]:
    """Assign offsets to dense weights, given by key."""
    entries, at = [], 0
    for key, value in weights.items():
        entry = DenseEntry(key, str(value.dtype).removeprefix("torch."), tuple(value.shape), at)
        entries.append(entry)
        at = -(-(at + entry.num_bytes) // _ALIGN) * _ALIGN
    return entries
