"""Sums of squares of rows whose columns are on devices of several memory domains.

The owner of a row's `summing_piece` gets the sums of squares of the row's other pieces, adds them
up in column order, and returns the total, as csrc/host/exchange/squares.cpp does.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from oper.rows.directory import summing_piece
from oper.shmem.exchange.device import DeviceExchange, DeviceRows, Phase
from oper.shmem.memory.device_batch import StepArrays


class _Numbers(NamedTuple):
    """Numbers in the messages to or from the remote ranks, in the order of the messages; n numbers.

    Attributes:
        rank, table: int64 [n], the remote rank, and the number's table in the order of keys.
        slot: int64 [n], of the number's row at the rank that owns it in this table.
        at: int64 [n], of a number that is sent, its address; of one that is received, its index
            among the terms of this rank's totals.
    """

    rank: np.ndarray
    table: np.ndarray
    slot: np.ndarray
    at: np.ndarray

    @classmethod
    def of(cls, parts: list[tuple[np.ndarray | int, ...]]) -> _Numbers:
        every = np.concatenate([np.zeros((4, 0), np.int64),
                                *(np.stack(np.broadcast_arrays(*x)) for x in parts)], axis=1)
        return cls(*every[:, np.lexsort(every[2::-1])])

    def addresses(self, first: np.ndarray) -> np.ndarray:
        """Return the numbers' addresses, int64 [n], if those of a rank and table are contiguous
        from `first` (int64 [W, T]) on."""
        cell = self.rank * first.shape[1] + self.table
        return first[self.rank, self.table] + 4 * (
            np.arange(cell.size) - np.searchsorted(cell, cell))


class _Totals:
    """The rows whose sums of squares this rank adds up; n rows.

    Attributes:
        out: int64 [n], addresses of their totals.
        first: int64 [n + 1], index of each row's first term.
        terms: int64, addresses of the sums of the rows' pieces, in column order.
    """

    def __init__(self) -> None:
        self.out, self.terms = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self.first = np.zeros(1, np.int64)

    def append(self, out: np.ndarray, terms: np.ndarray) -> np.ndarray:
        """Add rows with `terms` int64 [pieces, n]; returns these terms' indices, int64 [pieces, n].
        """
        pieces, n = terms.shape
        at = self.terms.size + np.arange(pieces)[:, None] + pieces * np.arange(n)
        self.first = np.concatenate([self.first, self.terms.size + pieces * np.arange(1, n + 1)])
        self.out = np.concatenate([self.out, out])
        self.terms = np.concatenate([self.terms, terms.T.reshape(-1)])
        return at


def exchange_squares(exchange: DeviceExchange, tables: DeviceRows, step: StepArrays,
                     round_number: int) -> None:
    """Replace this rank's sums of squares by the rows' totals, unless another rank of its memory
    domain has the total. Collective; the ranks of a domain wait for each other before and after.

    Args:
        exchange: the exchange of the tables.
        tables: the tables.
        step: arrays of the current step.
        round_number: number of earlier exchanges of squares in this step.
    """
    own = exchange.squares_at(round_number)
    sent, received, totals = _list(exchange, tables, step, round_number, own)
    counts, theirs = exchange.counts(), exchange.counts()
    for x, n in ((sent, counts), (received, theirs)):
        np.add.at(n[..., 0], (x.rank, x.table), 1)
    announced = exchange.begin(Phase.SQUARES, counts)
    wrong = np.flatnonzero((announced != theirs).any((1, 2)))
    if wrong.size:
        exchange.refuse(int(wrong[0]))
    slots = exchange.to_device(sent.slot.astype(np.int32))
    (arrived,), _shares = exchange.exchange(
        (own[:, exchange.rank], exchange.starts(slots, counts[..., 0])))
    totals.terms[received.at] = received.addresses(arrived)
    exchange.add_up(totals.out, totals.first, totals.terms)
    answers = torch.empty(received.at.size, device=exchange.device)
    row = np.searchsorted(totals.first, received.at, side="right") - 1
    exchange.copy_numbers(answers.data_ptr() + 4 * np.arange(row.size), totals.out[row])
    (arrived,), _answers = exchange.exchange(
        (exchange.starts(answers, theirs[..., 0]), 0), is_reply=True)
    exchange.copy_numbers(sent.at, sent.addresses(arrived))


def _list(exchange: DeviceExchange, tables: DeviceRows, step: StepArrays, round_number: int,
          own: np.ndarray) -> tuple[_Numbers, _Numbers, _Totals]:
    """Return the sums that this rank sends, those that it receives, and the rows that it adds up.
    `own`: see `DeviceExchange.squares_at`."""
    sent: list[tuple[np.ndarray | int, ...]] = []
    received: list[tuple[np.ndarray | int, ...]] = []
    totals = _Totals()
    is_remote = np.isin(np.arange(own.shape[1]), exchange.remote)
    for name, pieces in tables.pieces.items():
        if len(pieces) == 1 or round_number >= tables.rounds_of_squares(name):
            continue
        keys = [exchange.order.index(p) for p in pieces]
        for j, (piece, k) in enumerate(zip(pieces, keys, strict=True)):
            slots = step.merged_slots(exchange.of_key, k, exchange.rank)
            positions = tables.directories[piece].positions_at(exchange.rank, slots)
            places = [tables.directories[p].locate(positions) for p in pieces]
            owner, slot = (np.stack(x) for x in zip(*places, strict=True))
            summing = summing_piece(positions, len(pieces))
            summed_by = owner[summing, np.arange(slots.size)]
            at = own[k, exchange.rank] + 4 * slots
            far = is_remote[summed_by]
            sent.append((summed_by[far], k, slots[far], at[far]))
            mine = summing == j
            owner, slot = owner[:, mine], slot[:, mine]
            index = totals.append(at[mine], own[np.array(keys)[:, None], owner] + 4 * slot)
            for p, key in enumerate(keys):
                far = is_remote[owner[p]]
                received.append((owner[p, far], key, slot[p, far], index[p, far]))
    return _Numbers.of(sent), _Numbers.of(received), totals
