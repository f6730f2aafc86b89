"""A tally: loads of the ranks, linear in the rows that they own, copy and read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from oper.messages import MessageBits, number_bytes, slot_bits
from oper.plan import Tier
from oper.search.problem.statement import TableProblem
from oper.tables import OPTIMIZERS

GRAD_BYTES = 4  # gradients, outputs and partial sums are float32 whatever the table's dtype
SLOT_BYTES = 4  # number of a row at its owner, in memory and beside a changed row in a message
#: Columns of the rows that the host kernels are compiled for; others take a loop over columns.
KERNEL_WIDTHS = (16, 32, 64, 96, 128)
#: Passes over such a row: pooling; staging and summing; merging, squares, decay and update.
ODD_PASSES = (1, 2, 4)


class Row:
    """Indices of the rows of a tally.

    Some are per owner: what it exchanges with *each* reading rank. Others are a rank's own work and
    the bytes it holds, in device memory and over its link to host memory, and nanoseconds beyond
    the charges per id and per row.

    Rows in host memory are served to ranks of the same host once per id, and sent to ranks of other
    hosts once per distinct row. Answers, returned gradients and requests (ids of pushed rows) are
    the messages to and from a rank of another host.
    """

    SERVED, GRADS, BROADCAST, PUSH_IDS, PARTIALS, HOST_SERVED, HOST_SENT = range(7)
    ANSWERS, RETURNED, REQUESTS = range(7, 10)
    FORWARD_BYTES, FORWARD_IDS, BACKWARD_BYTES, BACKWARD_IDS = range(10, 14)
    UPDATE_BYTES, UPDATE_ROWS, HELD, HOST_FORWARD, HOST_UPDATE, HOST_HELD = range(14, 20)
    FORWARD_NS, BACKWARD_NS, UPDATE_NS = range(20, 23)


NUM_RELATIONAL, NUM_ROWS = 10, 23  # of rows: the first, and all


@dataclass(frozen=True, slots=True, eq=False)
class Tally:
    """Loads of the ranks before they are priced; tallies of tables can be added.

    Attributes:
        rows: float64 [23, W], see the constants above.
        units: float64 [phases, 9, W], units by phase and term of tiers replicated on some of the
            ranks only, whose traffic `rows` cannot express; 0.0 if there are none.
        num_pushed: pushed tiers. A plan with any pays one barrier more.
        num_split: column pieces beyond the first, of tables whose optimizer must add up squared
            gradients over columns. A plan with any pays one barrier more.
    """

    rows: np.ndarray
    units: np.ndarray | float = 0.0
    num_pushed: int = 0
    num_split: int = 0

    def plus(self, other: Tally, sign: int = 1) -> Tally:
        """The sum of this tally and `other` (with `sign=-1`, the difference)."""
        return Tally(self.rows + sign * other.rows, self.units + sign * other.units,
                     self.num_pushed + sign * other.num_pushed,
                     self.num_split + sign * other.num_split)


def row_bytes(t: TableProblem, width: int) -> tuple[float, float, float]:
    """Bytes of one row of a column piece: of its weights, float32 gradient and optimizer state."""
    return (t.spec.row_bytes * width / t.spec.dim, width * GRAD_BYTES,
            OPTIMIZERS[t.spec.optimizer].state_bytes(width))


def owned_features(t: TableProblem, tier: Tier, world_size: int, ordered: bool) -> np.ndarray:
    """Features of the rows of a tier that each rank owns, or holds the master copies of; float64
    [4, W]."""
    pattern = tier.pattern() if tier.weights or tier.placement == "owned" else list(tier.ranks)
    shares = t.shares(tier.start, tier.stop, len(pattern), ordered)
    out = np.zeros((shares.shape[0], world_size))
    if tier.weights:
        np.add.at(out.T, np.array(pattern), shares.T)
    else:
        out[:, pattern] = shares
    return out


class Messages:
    """Bytes of messages between hosts, by their bits per number.

    Ranks of one host read each other's rows and gradients uncompressed. So the cost model keeps two
    sizes of a row that another rank reads: its own, for memory and links within a host, and that of
    the message between hosts.

    Attributes:
        bits: bits per number.
        of_sums, of_bags: bytes that partial sums, and the gradients of their bags, take between
            hosts, relative to `sum_bytes`.
    """

    def __init__(self, bits: MessageBits) -> None:
        self.bits = bits
        self.of_sums, self.of_bags = bits.answers / 32, bits.gradients / 32

    def answer_bytes(self, t: TableProblem, width: int) -> float:
        """Bytes of `width` columns of a pulled row."""
        return self.bits.row_bytes(t.spec, width)

    @staticmethod
    def request_bytes(t: TableProblem) -> float:
        """Bytes of a pushed id: its slot at the owner, and a bit that says where bags begin."""
        return (slot_bits(t.spec.num_rows) + 1) / 8

    def gradient_bytes(self, t: TableProblem, width: int) -> float:
        """Bytes of the gradient of `width` columns of a pulled row, with its slot at the owner."""
        return number_bytes(self.bits.gradients, width) + slot_bits(t.spec.num_rows) / 8

    def sum_bytes(self, width: int) -> float:
        """Bytes of a partial sum, or of its bag's gradient, in float32.

        The header of a quantised row counts as numbers, so that `of_sums` and `of_bags` are exact.
        If only one direction is quantised, the other is charged for the header as well, because the
        bound prices both by one figure.
        """
        return max(number_bytes(b, width) * 32 / b for b in (self.bits.answers,
                                                              self.bits.gradients))
