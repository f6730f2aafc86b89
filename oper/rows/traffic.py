"""Transfers between ranks: their kinds, and their counts in a run or a replay.

Ranks exchange data by reading one another's memory. The reading rank counts a transfer; the *peer*
is the rank whose memory it reads. Counts are exact numbers of units (rows, ids, scalars). Bytes are
counts times the size of a unit: payload only, without headers and cache-line padding.

====================  ========  ===================================================================
kind                  phase     one unit
====================  ========  ===================================================================
rows                  forward   a row read for one id, from the reader's own replica if it has one
ids                   forward   slot and bag of a pushed id, read by its owner, 8 bytes
id_weights            forward   the per-sample weight of a pushed id, 4 bytes
pooled_rows           forward   a row that an owner reads to pool a pushed id
partial_sums          forward   an owner's sum of one bag, and the bag's number
weight_rows           backward  a row read for the gradient of a per-sample weight
gradient_ids          backward  slot and bag of a pushed id, 8 bytes
gradient_id_weights   backward  the per-sample weight of a pushed id, 4 bytes
bag_gradients         backward  the gradient of a pushed id's bag, read by the row's owner
gradient_rows         backward  a rank's summed gradient of one row, and its slot, read by the
                                owner; once more for each exchange of squares
squares               backward  the sum of squared gradients of one row over the columns of a
                                piece, or over all columns, 4 bytes
updated_rows          backward  a row and its optimizer state, read and written by the owner
refreshed_rows        backward  a changed master row, and its slot, copied into a replica
====================  ========  ===================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from oper.errors import InvalidInputError
from oper.rows.directory import summing_piece
from oper.tables import OPTIMIZERS, TableSpec
from oper.topology import Topology

#: Phase of each kind, in the order of the kernels' counters.
KINDS: dict[str, str] = {
    "rows": "forward", "ids": "forward", "id_weights": "forward", "pooled_rows": "forward",
    "partial_sums": "forward", "weight_rows": "backward", "gradient_ids": "backward",
    "gradient_id_weights": "backward", "bag_gradients": "backward", "gradient_rows": "backward",
    "squares": "backward", "updated_rows": "backward", "refreshed_rows": "backward"}
KIND = {name: k for k, name in enumerate(KINDS)}
#: Kinds of data in messages between memory domains, in the order of the kernels' counters, and
#: keys of dynamic tables with the headers of their exchange; see `ShardedTables.sent_bytes`.
SENT = ("headers", "row_ids", "rows", "ids", "id_weights", "partial_sums", "gradient_rows",
        "gradient_ids", "gradient_id_weights", "bag_gradients", "squares", "refreshed_rows",
        "keys")
#: Classes of links, nearest first.
LINKS = ("own rank", "memory domain", "host", "cross host")
#: Optimizers with `OptimizerKind.is_row_wise`: the owners of a row's pieces exchange squares.
ROW_WISE = frozenset(name for name, kind in OPTIMIZERS.items() if kind.is_row_wise)


def unit_bytes(table: TableSpec, dim: int) -> np.ndarray:
    """Return the size in bytes of a unit of each kind, int64 [13], for a piece of `dim` columns."""
    row = table.row_bytes * dim // table.dim
    gradient = 4 * dim
    state = OPTIMIZERS[table.optimizer].state_bytes(dim)
    size = {"rows": row, "ids": 8, "id_weights": 4, "pooled_rows": row,
            "partial_sums": gradient + 4, "weight_rows": row, "gradient_ids": 8,
            "gradient_id_weights": 4, "bag_gradients": gradient, "gradient_rows": gradient + 4,
            "squares": 4, "updated_rows": 2 * (row + state), "refreshed_rows": row + 4}
    return np.array([size[name] for name in KINDS], np.int64)


def squares_read(owners: np.ndarray, piece: int, positions: np.ndarray, rounds: int, uses: int,
                 world_size: int, one_domain: bool) -> np.ndarray:
    """Number of sums of squares that the owners of one column piece read in a step.

    In a single memory domain, every owner adds up the sums of a row's pieces whenever it uses the
    total. Otherwise one owner adds them up, once per exchange, and every owner reads the total.

    Args:
        owners: int64 [P, n], owners of the P pieces of n distinct rows.
        piece: index of the piece.
        positions: int64 [n], the rows' positions.
        rounds: exchanges of squares in a step.
        uses: how often an owner uses a row's total in a step.
        world_size: number of ranks W.
        one_domain: whether all ranks are in one memory domain.

    Returns:
        int64 [W, W], by reader and peer.
    """
    out = np.zeros((world_size, world_size), np.int64)
    if one_domain:
        for other in owners:
            np.add.at(out, (owners[piece], other), uses)
        return out
    summing = summing_piece(positions, len(owners))
    np.add.at(out, (owners[piece], owners[summing, np.arange(positions.size)]), uses)
    added = owners[:, summing == piece]
    for other in added:
        np.add.at(out, (added[piece], other), rounds)
    return out


def link_classes(world_size: int, topology: Topology | None = None) -> np.ndarray:
    """Return the class of the link between ranks: int64 [reader, peer], index into `LINKS`.

    Without a topology all ranks are assumed to share one memory domain.

    Raises:
        InvalidInputError: the topology has another number of ranks.
    """
    if topology is None:
        return np.where(np.eye(world_size, dtype=bool), 0, 1)
    if topology.world_size != world_size:
        raise InvalidInputError("cannot classify links", "ranks of the topology",
                                topology.world_size, f"{world_size}, the number of ranks counted",
                                "pass a topology with this number of ranks")
    domain = np.array(topology.domain_of())
    host = np.array([topology.domains[k].host for k in domain])
    apart = np.where(host[:, None] == host[None, :], 2, 3)
    return np.where(np.eye(world_size, dtype=bool), 0,
                    np.where(domain[:, None] == domain[None, :], 1, apart))


@dataclass(frozen=True, slots=True, eq=False)
class Traffic:
    """Counts of the data that one rank has read.

    Attributes:
        rank: the rank.
        tables: table name of each column piece, [T].
        columns: (first column, last column + 1) of each piece, [T].
        counts: int64 [13, T, W], units by kind (`KINDS`), piece and peer.
        unit_bytes: int64 [13, T], bytes of a unit by kind and piece.
        num_forward, num_backward: number of forward and backward passes counted.
    """

    rank: int
    tables: tuple[str, ...]
    columns: tuple[tuple[int, int], ...]
    counts: np.ndarray
    unit_bytes: np.ndarray
    num_forward: int = 0
    num_backward: int = 0

    @staticmethod
    def empty(rank: int, world_size: int, pieces: Sequence[tuple[TableSpec, int, int]]) -> Traffic:
        """Return counts of 0; `pieces`: (table, first column, last column + 1) of each piece."""
        size = np.stack([unit_bytes(t, stop - start) for t, start, stop in pieces], axis=1)
        return Traffic(rank, tuple(t.name for t, _, _ in pieces),
                       tuple((a, b) for _, a, b in pieces),
                       np.zeros((*size.shape, world_size), np.int64), size)

    @property
    def num_bytes(self) -> np.ndarray:
        """int64 [13, T, W], bytes by kind, piece and peer."""
        return self.counts * self.unit_bytes[:, :, None]

    def plus(self, other: Traffic) -> Traffic:
        """Return the sum of the counts of two runs of the same rank and pieces."""
        return replace(self, counts=self.counts + other.counts,
                       num_forward=self.num_forward + other.num_forward,
                       num_backward=self.num_backward + other.num_backward)

    def by_link(self, topology: Topology | None = None) -> dict[str, dict[str, int]]:
        """Return bytes by phase (``"forward"``, ``"backward"``) and class of link (`LINKS`)."""
        link = link_classes(self.counts.shape[2], topology)[self.rank]
        size = self.num_bytes.sum(axis=1)
        found: dict[str, dict[str, int]] = {p: dict.fromkeys(LINKS, 0)
                                            for p in ("forward", "backward")}
        for k, phase in enumerate(KINDS.values()):
            for c, name in enumerate(LINKS):
                found[phase][name] += int(size[k, link == c].sum())
        return found

    def to_json(self, topology: Topology | None = None) -> dict[str, Any]:
        """Return passes, bytes by phase and link, and bytes by kind and peer, JSON-serializable."""
        size = self.num_bytes.sum(axis=1)
        return {"rank": self.rank, "num_forward": self.num_forward,
                "num_backward": self.num_backward, "bytes": self.by_link(topology),
                "bytes_by_peer": {name: size[k].tolist() for k, name in enumerate(KINDS)
                                  if size[k].any()}}
