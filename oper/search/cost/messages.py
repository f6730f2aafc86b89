"""Bytes of what hosts send each other, by the bits that its numbers have.

Ranks of one host read each other's rows and gradients as they are. So the cost model keeps two
figures of a row that is read elsewhere: its own bytes, which memory and links within a host carry,
and those of the message that crosses hosts.
"""

from __future__ import annotations

from oper.messages import MessageBits, number_bytes
from oper.search.cost.tally import SLOT_BYTES
from oper.search.problem.statement import TableProblem


class Messages:
    """Sizes of messages.

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
