"""Replay of real batches through a plan: bytes that ranks of different memory domains send.

`WireReplay` computes in NumPy, from the plan and the ids alone, the bytes that the exchange between
domains sends; the result equals `ShardedTables.sent_bytes`, byte for byte.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import permutations

import numpy as np

from oper.errors import require
from oper.messages import MessageBits, number_bytes, owners_pool, slot_bits
from oper.plan import Piece, Plan
from oper.rows.directory import needs_across, summing_piece
from oper.rows.traffic import ROW_WISE, SENT
from oper.search.cost.columns import SQUARE_BYTES
from oper.search.replay.simulate import (
    Placed,
    RankBatch,
    TableBatch,
    require_batches,
    table_batch,
)
from oper.tables import TableSpec

_KIND = {name: k for k, name in enumerate(SENT)}
_HEAD_NUMBERS, _HEAD_NUMBERS_PER_PIECE = 8, 3  # uint32 numbers in a header
_HEAD_UNIT_BYTES = 1024  # headers are padded to a multiple of this
# Maximum number of ids in a part of a message about keys, and words that describe a part; see
# KeyPart in csrc/host/keys/tables.h.
_PART_IDS, _PART_WORDS = 1 << 16, 6


class _Sizes:
    """Bytes of one row, sum and gradient of a column piece in messages, and bits of a slot."""

    def __init__(self, table: TableSpec, piece: Piece, bits: MessageBits) -> None:
        width = piece.stop - piece.start
        bits = bits.of(table.name)
        self.row = table.row_bytes * width // table.dim
        self.answer = int(bits.row_bytes(table, width))
        self.sum = number_bytes(bits.answers, width)
        self.gradient = number_bytes(bits.gradients, width)
        self.slot_bits = slot_bits(table.num_rows)


def _words(number: np.ndarray, num_bits: int) -> np.ndarray:
    """Bytes of packed arrays with `number` (int64 [W]) entries of `num_bits` bits each, rounded up
    to multiples of 4; int64 [W]."""
    return np.asarray((number * num_bits + 31) // 32 * 4)


class WireReplay:
    """Counts the bytes that ranks send between memory domains under a plan.

    Args:
        plan: the plan; its `message_bits` determine the size of messages.
        domain_of: index of each rank's memory domain.
        training: whether backward and update follow a lookup; default: whether the plan's objective
            is training.
        clipped: names of tables whose rows' gradients are clipped to a norm.
        dynamic: names of dynamic tables. Their ids are rows; row 0 stands for keys without a row.

    Raises:
        InvalidInputError: `domain_of` does not have one entry per rank.
    """

    def __init__(self, plan: Plan, domain_of: Sequence[int], training: bool | None = None, *,
                 clipped: Collection[str] = (), dynamic: Collection[str] = ()) -> None:
        require("cannot replay the exchange", "pass the domains of this plan's ranks", (
            "domain_of", list(domain_of)[:16], len(domain_of) == plan.world_size,
            f"one per rank, {plan.world_size}"))
        self.plan, self.clipped, self.dynamic = plan, clipped, dynamic
        self.training = plan.objective == "training" if training is None else training
        domains = np.asarray(domain_of)
        self.far = domains[:, None] != domains[None, :]
        pools = owners_pool([t.table for t in plan.tables], self.training, np.unique(domains).size)
        self._members = [np.flatnonzero(domains == d).tolist() for d in domains]
        self._placed = [[Placed(t, plan.world_size, k, not pools)
                         for k in range(len(t.pieces))] for t in plan.tables]
        flat = [p for pieces in self._placed for p in pieces]
        self._needs = needs_across([p.directory for p in flat], domain_of)
        self._has_push = any(p.pushes.any() for p in flat)
        head = 4 * (_HEAD_NUMBERS + _HEAD_NUMBERS_PER_PIECE * len(flat))
        self._head_bytes = -(-head // _HEAD_UNIT_BYTES) * _HEAD_UNIT_BYTES

    def step(self, ranks: Sequence[RankBatch]) -> np.ndarray:
        """Bytes of one step on these batches; int64 [13, W, W] by kind (`SENT`), sender, receiver.

        Raises:
            InvalidInputError: there is not one batch per rank, or a batch is invalid.
        """
        world = self.plan.world_size
        require_batches(ranks, world)
        sent = np.zeros((len(SENT), world, world), np.int64)
        rounds, trains_weights = 0, False
        for entry, pieces in zip(self.plan.tables, self._placed, strict=True):
            table = entry.table
            batches = [table_batch(table, b) for b in ranks]
            trains_weights |= any(b.trains_weights for b in batches)
            touched = np.unique(np.concatenate([b.ids for b in batches]))
            for piece, placed in zip(entry.pieces, pieces, strict=True):
                sizes = _Sizes(table, piece, self.plan.message_bits)
                for rank, batch in enumerate(batches):
                    self._count(sent, placed, sizes, rank, batch)
                if self.training:
                    self._refreshes(sent, placed, sizes, touched)
            if self.training and len(pieces) > 1:
                mine = int(table.name in self.clipped) + int(table.optimizer in ROW_WISE)
                rounds = max(rounds, mine)
                sent[_KIND["squares"]] += mine * sent_squares(pieces, touched)
        # If owners pool rows of pushed tiers, rows of pulled tiers are sent in the same exchanges.
        phases = 2 if self._has_push else int(self._needs.gathers)
        if self.training:
            phases += 1 + rounds + self._needs.refreshes
            phases += int(self._needs.gathers and trains_weights)
        sent[_KIND["headers"]] = phases * self._head_bytes
        if self.training and self.dynamic:
            self._keys(sent, ranks)
        return sent * self.far

    def _keys(self, sent: np.ndarray, ranks: Sequence[RankBatch]) -> None:
        """Add the keys that a rank sends to one rank of every other domain, see
        `oper.shmem.keys.across`, and the headers, which all ranks exchange."""
        sent[_KIND["keys"]] = _HEAD_UNIT_BYTES
        features = [f for t in self.plan.tables if t.table.name in self.dynamic
                    for f in t.table.features or (t.table.name,)]
        for rank, batch in enumerate(ranks):
            words = 1
            for ids in (batch[f].ids for f in features if f in batch):
                for at in range(0, ids.size, _PART_IDS):
                    part = ids[at:at + _PART_IDS]
                    words += _PART_WORDS + np.unique(part[part > 0]).size + int((part == 0).sum())
            at = self._members[rank].index(rank)
            for members in {tuple(members) for members in self._members}:
                sent[_KIND["keys"], rank, members[at % len(members)]] += 8 * words

    def _count(self, sent: np.ndarray, placed: Placed, sizes: _Sizes, reader: int,
               batch: TableBatch) -> None:
        """Add the messages between a rank and the owners of the rows that it looks up."""
        world = self.plan.world_size
        tier, owner = placed.resolve(np.unique(batch.ids))
        near = ~self.far[reader][owner]
        for member in self._members[reader]:
            near |= placed.holds[member, tier]
        pulled = ~placed.pushed_by(reader, tier)
        for asked in [~near & pulled] + [~near] * (self.training and batch.trains_weights):
            number = np.bincount(owner[asked], minlength=world)
            sent[_KIND["row_ids"], reader] += _words(number, sizes.slot_bits)
            sent[_KIND["rows"], :, reader] += _words(number, 8 * sizes.answer)
        ids, bags = placed.pooled(batch, reader)
        sent[_KIND["ids"], reader] += _words(ids, sizes.slot_bits) + _words(ids, 1)
        if batch.weighted:
            sent[_KIND["id_weights"], reader] += 4 * ids
        sent[_KIND["partial_sums"], :, reader] += _words(bags, 8 * sizes.sum)
        if self.training:
            number = np.bincount(owner[pulled], minlength=world)
            sent[_KIND["gradient_rows"], reader] += (_words(number, sizes.slot_bits)
                                                     + _words(number, 8 * sizes.gradient))
            # Owners keep ids for the backward pass, in which only gradients of bags are sent.
            sent[_KIND["bag_gradients"], reader] += _words(bags, 8 * sizes.gradient)

    def _refreshes(self, sent: np.ndarray, placed: Placed, sizes: _Sizes, touched: np.ndarray
                   ) -> None:
        tier, owner = placed.resolve(touched)
        for peer in range(self.plan.world_size):
            number = np.bincount(owner[placed.holds[peer, tier]], minlength=self.plan.world_size)
            sent[_KIND["refreshed_rows"], :, peer] += np.where(
                number > 0, 4 * (number + 1) + _words(number, 8 * sizes.row), 0)


def sent_squares(pieces: Sequence[Placed], touched: np.ndarray, one_host: bool = False
                 ) -> np.ndarray:
    """Bytes of one exchange of sums of squares between the owners of a table's column pieces.

    Each owner sends the sum of a row to the owner of the row's `summing_piece`, and gets the total.
    On one host, owners instead read the sums of all other owners.

    Args:
        pieces: the column pieces of one table.
        touched: int64 [n], distinct ids in all ranks' batches.
        one_host: whether all ranks are on one host.

    Returns:
        int64 [W, W], by source and destination, including bytes within a memory domain, which are
        not sent.
    """
    owners = np.array([p.resolve(touched)[1] for p in pieces])
    out = np.zeros((len(pieces[0].holds),) * 2, np.int64)
    if one_host:
        for one, other in permutations(owners, 2):
            np.add.at(out, (one, other), SQUARE_BYTES)
        return out
    summing = summing_piece(pieces[0].directory.position_of(touched), len(pieces))
    summed_by = owners[summing, np.arange(touched.size)]
    for owner in owners:
        np.add.at(out, (owner, summed_by), SQUARE_BYTES)
        np.add.at(out, (summed_by, owner), SQUARE_BYTES)
    return out
