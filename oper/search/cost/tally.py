"""A tally: what tables ask of the ranks, linear in the rows that these own, copy and read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from oper.messages import MessageBits, number_bytes
from oper.plan import Tier
from oper.search.problem.statement import TableProblem
from oper.tables import OPTIMIZERS

GRAD_BYTES = 4  # gradients, outputs and partial sums are float32 whatever the table's dtype
SLOT_BYTES = 4  # number of a row at its owner, which goes with its gradient and its new value
#: Columns of the rows that the host kernels are compiled for; others take a loop over columns.
KERNEL_WIDTHS = (16, 32, 64, 96, 128)
#: Passes over such a row: pooling; staging and summing; merging, squares, decay and update.
ODD_PASSES = (1, 2, 4)


class Row:
    """Rows of a tally: what an owner exchanges with *each* reading rank; what a rank does by
    itself, and the bytes it holds; the same over its link to host memory; and nanoseconds beyond
    what its ids and rows cost.

    Rows in host memory are served to ranks of the host (once per id), and sent to those of others
    (distinct rows). Answers, and what is returned, are rows and gradients as messages to and from a
    rank of another host.
    """

    SERVED, GRADS, BROADCAST, PUSH_IDS, PARTIALS, HOST_SERVED, HOST_SENT = range(7)
    ANSWERS, RETURNED = 7, 8
    FORWARD_BYTES, FORWARD_IDS, BACKWARD_BYTES, BACKWARD_IDS = range(9, 13)
    UPDATE_BYTES, UPDATE_ROWS, HELD, HOST_FORWARD, HOST_UPDATE, HOST_HELD = range(13, 19)
    FORWARD_NS, BACKWARD_NS, UPDATE_NS = range(19, 22)


NUM_RELATIONAL, NUM_ROWS = 9, 22  # of rows: the first, and all


@dataclass(frozen=True, slots=True, eq=False)
class Tally:
    """What tables ask of the ranks; adds up over tables.

    Attributes:
        rows: float64 [22, W], see the constants above.
        units: float64 [phases, 9, W], units by phase and term of copies on some of the ranks, to
            and from which ranks send otherwise than rows say; 0.0 where there are none.
        num_pushed: pushed tiers. A plan with any pays one barrier more.
        num_split: column pieces beyond the first, of tables whose optimizer must add up squared
            gradients over columns. A plan with any pays one barrier more.
    """

    rows: np.ndarray
    units: np.ndarray | float = 0.0
    num_pushed: int = 0
    num_split: int = 0

    def plus(self, other: Tally, sign: int = 1) -> Tally:
        """This tally with `other` added (or taken away, `sign=-1`)."""
        return Tally(self.rows + sign * other.rows, self.units + sign * other.units,
                     self.num_pushed + sign * other.num_pushed,
                     self.num_split + sign * other.num_split)


def row_bytes(t: TableProblem, width: int) -> tuple[float, float, float]:
    """Bytes of one row of a piece: weights, float32 gradient, optimizer state."""
    return (t.spec.row_bytes * width / t.spec.dim, width * GRAD_BYTES,
            OPTIMIZERS[t.spec.optimizer].state_bytes(width))


def owned_features(t: TableProblem, tier: Tier, world_size: int, ordered: bool) -> np.ndarray:
    """Features that each rank owns (or holds the master copy) of a tier; float64 [4, W]."""
    pattern = tier.pattern() if tier.weights or tier.placement == "owned" else list(tier.ranks)
    shares = t.shares(tier.start, tier.stop, len(pattern), ordered)
    out = np.zeros((shares.shape[0], world_size))
    if tier.weights:
        np.add.at(out.T, np.array(pattern), shares.T)
    else:
        out[:, pattern] = shares
    return out


class Messages:
    """Bytes of what hosts send each other, by the bits that its numbers have.

    Ranks of one host read each other's rows and gradients as they are. So the cost model keeps two
    figures of a row that is read elsewhere: its own bytes, which memory and links within a host
    carry, and those of the message that crosses hosts.

    Attributes:
        bits: of their numbers.
        of_sums, of_bags: bytes that partial sums, and the gradients of their bags, take between
            hosts, over those that `sum_bytes` says.
    """

    def __init__(self, bits: MessageBits) -> None:
        self.bits = bits
        self.of_sums, self.of_bags = bits.answers / 32, bits.gradients / 32

    def answer_bytes(self, t: TableProblem, width: int) -> float:
        """Bytes of `width` columns of a pulled row."""
        return self.bits.row_bytes(t.spec, width)

    def gradient_bytes(self, width: int) -> float:
        """Bytes of the gradient of such a row, and of the slot number that it has at its owner."""
        return number_bytes(self.bits.gradients, width) + SLOT_BYTES

    def sum_bytes(self, width: int) -> float:
        """Bytes of a partial sum, or of its bag's gradient, in float32.

        What begins a row of codes counts as numbers, so that the shares `of_sums` and `of_bags` of
        this are exact. Where one direction has codes and the other has none, the other is charged
        for it as well: a bound prices both by one figure.
        """
        return max(number_bytes(b, width) * 32 / b for b in (self.bits.answers,
                                                              self.bits.gradients))
