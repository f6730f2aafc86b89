"""Load vectors: what a plan costs each rank, in quantities that add up over tables.

A load vector has 23 quantities (`Row`) per rank: bytes, ids, rows and nanoseconds. The load vector
of a plan is the sum of those of its tables.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from oper.messages import MessageBits, number_bytes, slot_bits
from oper.plan import Tier
from oper.search.problem.statement import TOUCHED, Problem, TableProblem
from oper.tables import OPTIMIZERS

GRAD_BYTES = 4  # gradients, outputs and partial sums are float32 whatever the table's dtype
#: Bytes per key of a dynamic table in a message: the key, or the place and count of one with a row.
_KEY_BYTES = 8
SLOT_BYTES = 4  # a row's slot at its owner, in memory and with a changed row in a message
#: Widths (columns) for which the host kernels are compiled; rows of other widths are processed by a
#: general loop.
KERNEL_WIDTHS = (16, 32, 64, 96, 128)
#: Passes of that loop over a row: in forward (pool), in backward (stage, sum) and in update (merge,
#: squares, decay, update).
GENERAL_LOOP_PASSES = (1, 2, 4)


class Row:
    """Indices of the quantities in a load vector, the rows of `LoadVector.rows`.

    The first ten are bytes that an owner exchanges with *each* reading rank: pulled rows served,
    gradients, changed rows, pushed ids, partial sums; rows in host memory, served per id to ranks
    of the same host and sent per distinct row to others; and the messages that between hosts
    replace SERVED and PARTIALS (answers), GRADS and the gradients of bags (returned), and PUSH_IDS
    (requests). The other rows are a rank's own work and memory: bytes, ids and rows by phase, bytes
    held in device memory, bytes read, updated and held in host memory, and further nanoseconds by
    phase.
    """

    SERVED, GRADS, BROADCAST, PUSH_IDS, PARTIALS, HOST_SERVED, HOST_SENT = range(7)
    ANSWERS, RETURNED, REQUESTS = range(7, 10)
    FORWARD_BYTES, FORWARD_IDS, BACKWARD_BYTES, BACKWARD_IDS = range(10, 14)
    UPDATE_BYTES, UPDATE_ROWS, HELD, HOST_FORWARD, HOST_UPDATE, HOST_HELD = range(14, 20)
    FORWARD_NS, BACKWARD_NS, UPDATE_NS = range(20, 23)


NUM_RELATIONAL, NUM_ROWS = 10, 23  # rows exchanged with other ranks, which come first; all rows
#: Rows with bytes of partial sums: in float32, and in the messages that replace them between hosts.
SUM_ROWS = [Row.PARTIALS, Row.ANSWERS, Row.RETURNED]


@dataclass(frozen=True, slots=True, eq=False)
class LoadVector:
    """The load of each rank, by quantity; load vectors of tables can be added.

    Attributes:
        rows: float64 [23, W], a row per quantity (`Row`), a column per rank.
        units: float64 [phases, 9, W], units by phase and term of what `rows` cannot express: the
            traffic of tiers that are replicated on only some ranks, and the sums of squares that
            owners of a row's columns send each other; 0.0 if there are none.
        num_pushed: number of pushed tiers. A plan with any pays an additional barrier.
        num_split: number of column pieces beyond the first, of tables whose optimizer must add up
            squared gradients over columns. A plan with any pays an additional barrier.
    """

    rows: np.ndarray
    units: np.ndarray | float = 0.0
    num_pushed: int = 0
    num_split: int = 0

    def plus(self, other: LoadVector, sign: int = 1) -> LoadVector:
        """The sum of this load vector and `other` (with `sign=-1`, the difference)."""
        return LoadVector(self.rows + sign * other.rows, self.units + sign * other.units,
                          self.num_pushed + sign * other.num_pushed,
                          self.num_split + sign * other.num_split)


def row_bytes(t: TableProblem, width: int) -> tuple[float, float, float]:
    """Bytes of one row of a column piece: (weights, float32 gradient, optimizer state)."""
    return (t.spec.row_bytes * width / t.spec.dim, width * GRAD_BYTES,
            OPTIMIZERS[t.spec.optimizer].state_bytes(width))


def owned_features(t: TableProblem, tier: Tier, world_size: int, ordered: bool) -> np.ndarray:
    """Features of the rows of a tier that each rank owns, or whose master copies it has; float64
    [4, W]. `ordered` states whether positions are those in the hotness order; else they are ids."""
    pattern = tier.pattern() if tier.weights or tier.placement == "owned" else list(tier.ranks)
    shares = t.shares(tier.start, tier.stop, len(pattern), ordered)
    out = np.zeros((shares.shape[0], world_size))
    if tier.weights:
        np.add.at(out.T, np.array(pattern), shares.T)
    else:
        out[:, pattern] = shares
    return out


class Messages:
    """Sizes of messages between hosts, given the bits per number.

    Ranks of one host read each other's rows and gradients uncompressed. So the cost model has two
    sizes of a row that another rank reads: one for memory and links within a host, and one for
    messages between hosts.

    Args:
        bits: bits per number, by table.
    """

    def __init__(self, bits: MessageBits) -> None:
        self.bits = bits

    def answer_bytes(self, t: TableProblem, width: int) -> float:
        """Bytes of `width` columns of a pulled row in the message that answers a lookup."""
        return self.bits.row_bytes(t.spec, width)

    @staticmethod
    def request_bytes(t: TableProblem) -> float:
        """Bytes of a pushed id in a request: its slot at the owner, and a bit that marks bags."""
        return (slot_bits(t.spec.num_rows) + 1) / 8

    def gradient_bytes(self, t: TableProblem, width: int) -> float:
        """Bytes of the gradient of `width` columns of a pulled row, with its slot at the owner."""
        return (number_bytes(self.bits.of(t.spec.name).gradients, width)
                + slot_bits(t.spec.num_rows) / 8)

    def sum_rows(self, t: TableProblem, width: int) -> np.ndarray:
        """Bytes of `width` columns of a partial sum, and of the gradient of its bag: in float32,
        in an answer, and in the message that returns the gradient; float64 [3], for `SUM_ROWS`."""
        bits = self.bits.of(t.spec.name)
        return np.array([width * GRAD_BYTES, number_bytes(bits.answers, width),
                         number_bytes(bits.gradients, width)], float)

    def per_byte(self, t: TableProblem) -> np.ndarray:
        """`sum_rows` per float32 byte of a partial sum of all columns; float64 [3]. A quantised
        sum has a header, so a narrower piece sends no less per byte."""
        found = self.sum_rows(t, t.spec.dim)
        return np.asarray(found / found[0])


def key_rows(t: TableProblem, problem: Problem, counts: np.ndarray | None = None) -> np.ndarray:
    """Return the load vector of a dynamic table's directory, float64 [23, W]; 0 for other tables.

    Every rank finds the rows of its ids. For an update, it passes on its distinct keys and its ids
    without a row to the ranks of its memory domain, which divide the buckets among them, and to one
    rank of every other domain. So every domain counts and inserts the keys of all ranks.

    Args:
        problem: the problem that it belongs to.
        counts: float64 [3, W], by rank the ids of its batch, its distinct keys that have a row,
            and its ids without a row; default: the expected numbers.
    """
    machine, costs = problem.machine, problem.topology.costs
    out = np.zeros((NUM_ROWS, machine.world_size))
    if t.default_share is None:
        return out
    if counts is None:
        num_ids = t.traffic.num_ids
        counts = np.repeat([[num_ids], [t.total[TOUCHED]], [t.default_share * num_ids]],
                           machine.world_size, axis=1)
    ids, known, missed = counts
    out[Row.FORWARD_NS] = ids * costs.key_ns
    if problem.training:
        out[Row.UPDATE_NS] = (known * costs.key_count_ns
                              + missed * costs.key_insert_ns).sum() / machine.num_domain
        # Bytes to each rank of this host, which reads its part of the keys; and, on average, to
        # each rank of another host, one of which receives them all.
        out[[Row.GRADS, Row.RETURNED]] = _KEY_BYTES * (known + missed) / machine.num_domain
    return out
