"""Sums of squares of the gradients of rows whose columns are owned by devices of several memory
domains.

Each owner of a column piece sends its sum to the owner of the row's `summing_piece`. That one adds
up the sums of all pieces, in column order, and returns the total, as in
csrc/host/exchange/squares.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from oper.rows.directory import summing_piece
from oper.shmem.exchange.device import DeviceExchange, DeviceRows, Phase
from oper.shmem.memory.device_batch import StepArrays


class _Sums(NamedTuple):
    """Sums that this rank sends to remote ranks, or that it receives; n sums, in the order of the
    messages: by rank, table and slot.

    Attributes:
        rank: int64 [n], the remote rank.
        table: int64 [n], the column piece, by its index in the order of keys.
        slot: int64 [n], the row's slot at the sender.
        term: int64 [n], index of a received sum in `_Totals.terms`; unused in sums that are sent.
    """

    rank: np.ndarray
    table: np.ndarray
    slot: np.ndarray
    term: np.ndarray

    @classmethod
    def of(cls, parts: list[tuple[np.ndarray | int, ...]]) -> _Sums:
        """Concatenate and sort `parts`, tuples of the attributes; a number holds for a whole part.
        """
        every = np.concatenate([np.zeros((4, 0), np.int64),
                                *(np.stack(np.broadcast_arrays(*x)) for x in parts)], axis=1)
        return cls(*every[:, np.lexsort(every[2::-1])])  # lexsort's last key is the first criterion

    def addresses(self, first: np.ndarray) -> np.ndarray:
        """Return the sums' addresses, int64 [n], if those of one rank and table are contiguous,
        beginning at `first`, int64 [W, T]."""
        cell = self.rank * first.shape[1] + self.table
        return first[self.rank, self.table] + 4 * (
            np.arange(cell.size) - np.searchsorted(cell, cell))


class _Totals:
    """The rows whose sums of squares this rank adds up; n rows.

    Attributes:
        out: int64 [n], addresses of their totals.
        first: int64 [n + 1], index of each row's first term.
        terms: int64, addresses of the sums of a row's pieces, in column order, row after row.
    """

    def __init__(self) -> None:
        self.out, self.terms = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self.first = np.zeros(1, np.int64)

    def append(self, out: np.ndarray, terms: np.ndarray) -> np.ndarray:
        """Append rows with totals at the addresses `out`, int64 [n], and `terms`, int64 [pieces,
        n]; return the indices of these terms, int64 [pieces, n]."""
        pieces, n = terms.shape
        index = self.terms.size + np.arange(pieces)[:, None] + pieces * np.arange(n)
        self.first = np.concatenate([self.first, self.terms.size + pieces * np.arange(1, n + 1)])
        self.out = np.concatenate([self.out, out])
        self.terms = np.concatenate([self.terms, terms.T.reshape(-1)])
        return index


class PieceRows(NamedTuple):
    """The n rows of one column piece for which any rank has a gradient, at this rank.

    Attributes:
        table: the name of the table.
        piece: index of the piece among those of the table.
        keys: int64 [pieces], for each piece of the table its index in the order of keys, see
            `oper.shmem.exchange.device`.
        slots: int64 [n], the rows' slots.
        owners, owner_slots: int64 [pieces, n], rank that owns each piece of a row, and slot there.
        summing: int64 [n], index of the piece whose owner adds up the row's sums.
    """

    table: str
    piece: int
    keys: np.ndarray
    slots: np.ndarray
    owners: np.ndarray
    owner_slots: np.ndarray
    summing: np.ndarray


def list_rows(exchange: DeviceExchange, tables: DeviceRows, step: StepArrays) -> list[PieceRows]:
    """Return the rows of this step that exchange sums of squares; all rounds of the exchange have
    the same."""
    found = []
    for name, pieces in tables.pieces.items():
        if len(pieces) == 1 or tables.rounds_of_squares(name) == 0:
            continue
        keys = np.array([exchange.order.index(p) for p in pieces])
        for j, piece in enumerate(pieces):
            slots = step.merged_slots(exchange.of_key, int(keys[j]), exchange.rank)
            positions = tables.directories[piece].positions_at(exchange.rank, slots)
            places = [tables.directories[p].locate(positions) for p in pieces]
            owners, owner_slots = (np.stack(x) for x in zip(*places, strict=True))
            found.append(PieceRows(name, j, keys, slots, owners, owner_slots,
                                   summing_piece(positions, len(pieces))))
    return found


def exchange_squares(exchange: DeviceExchange, tables: DeviceRows, rows: Sequence[PieceRows],
                     round_number: int) -> None:
    """Replace sums of squares by the rows' totals: at the owners that add them up, and at owners in
    other memory domains than these. Collective; the caller synchronizes the ranks of each domain
    before and after.

    Args:
        exchange: the exchange of the tables.
        tables: the tables.
        rows: the result of `list_rows` in this step.
        round_number: number of earlier exchanges of squares in this step.
    """
    own = exchange.squares_at(round_number)
    sent, received, totals = _list(
        exchange, own, [x for x in rows if round_number < tables.rounds_of_squares(x.table)])
    counts, expected = exchange.counts(), exchange.counts()
    np.add.at(counts[..., 0], (sent.rank, sent.table), 1)
    np.add.at(expected[..., 0], (received.rank, received.table), 1)
    announced = exchange.begin(Phase.SQUARES, counts)
    wrong = np.flatnonzero((announced != expected).any((1, 2)))
    if wrong.size:
        exchange.refuse(int(wrong[0]))
    # `_sums` and `_totals` own the memory of what arrives: kernels that read it are launched below.
    slots = exchange.to_device(sent.slot.astype(np.int32))
    (arrived,), _sums = exchange.exchange(
        (own[:, exchange.rank], exchange.starts(slots, counts[..., 0])))
    totals.terms[received.term] = received.addresses(arrived)
    exchange.add_up(totals.out, totals.first, totals.terms)
    replies = torch.empty(received.term.size, device=exchange.device)
    row = np.searchsorted(totals.first, received.term, side="right") - 1
    exchange.copy_numbers(replies.data_ptr() + 4 * np.arange(row.size), totals.out[row])
    (arrived,), _totals = exchange.exchange(
        (exchange.starts(replies, expected[..., 0]), 0), is_reply=True)
    exchange.copy_numbers(own[sent.table, exchange.rank] + 4 * sent.slot, sent.addresses(arrived))


def _list(exchange: DeviceExchange, own: np.ndarray, rows: Sequence[PieceRows]
          ) -> tuple[_Sums, _Sums, _Totals]:
    """Return the sums that this rank sends, those that it receives, and the rows that it adds up.
    `own`: see `DeviceExchange.squares_at`."""
    sent: list[tuple[np.ndarray | int, ...]] = []
    received: list[tuple[np.ndarray | int, ...]] = []
    totals = _Totals()
    is_remote = np.isin(np.arange(own.shape[1]), exchange.remote)
    for x in rows:
        key = int(x.keys[x.piece])
        summed_by = x.owners[x.summing, np.arange(x.slots.size)]
        far = is_remote[summed_by]
        sent.append((summed_by[far], key, x.slots[far], 0))
        mine = x.summing == x.piece
        owners, owner_slots = x.owners[:, mine], x.owner_slots[:, mine]
        # Terms of remote owners have no valid address until their sums have been received.
        terms = totals.append(own[key, exchange.rank] + 4 * x.slots[mine],
                              own[x.keys[:, None], owners] + 4 * owner_slots)
        for other, owner, slot, term in zip(x.keys, owners, owner_slots, terms, strict=True):
            far = is_remote[owner]
            received.append((owner[far], other, slot[far], term[far]))
    return _Sums.of(sent), _Sums.of(received), totals
