"""De-duplicated pull: rows of neighbours are read once per batch, where that pays.

Between memory domains pulled rows always travel once. Within a domain of host memory ranks read
each other's rows as fast as their own and caches keep what repeats, so that a copy is work without
a gain; where neighbours' memory is dearer (another socket), it pays from some number of ids per
distinct row. That number is measured while the tables are used and weighed with `PullCosts`. Bits
are the same.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from oper.errors import InvalidInputError, fail

if TYPE_CHECKING:
    from oper.shmem.runtime import ShardedTables


@dataclass(frozen=True, slots=True)
class PullCosts:
    """What weighs against each other, in nanoseconds.

    Attributes:
        extra_per_byte: per byte of a neighbour's row beyond what an own row costs. 0 (ranks of one
            memory): de-duplication never pays, and duplication is not even counted.
        per_id: numbering an id of a neighbour's row.
        per_copied_byte: copying a distinct row.
    """

    extra_per_byte: float = 0.0
    per_id: float = 4.0
    per_copied_byte: float = 0.05

    def __post_init__(self) -> None:
        for name, value in zip(("extra_per_byte", "per_id", "per_copied_byte"), astuple(self),
                               strict=True):
            if not 0 <= value < float("inf"):
                raise InvalidInputError(fail("invalid costs of pulled rows", name, value,
                                             "a number >= 0", "correct it"))


class Duplication(NamedTuple):
    """Of one column piece of a table, as last counted.

    Attributes:
        table: its name.
        num_ids: ids of a batch whose rows neighbours hold.
        num_rows: distinct rows among them.
        is_deduplicated: whether they are copied once per batch.
    """

    table: str
    num_ids: int
    num_rows: int
    is_deduplicated: bool


def choose_pull(tables: ShardedTables, choice: bool | PullCosts) -> None:
    """How `tables` read rows of neighbours from the next batch on. Not collective.

    Args:
        tables: the tables of one rank.
        choice: True: every table copies them once per batch; False (the default of all tables):
            they are read where they are, once per id; costs: table by table, by the duplication of
            every 256th forward pass.
    """
    costs = choice if isinstance(choice, PullCosts) else PullCosts()
    number = int(choice) if isinstance(choice, bool) else 2 if costs.extra_per_byte > 0 else 0
    tables.pull = choice
    torch.ops.oper.context_set_pull(
        tables._handle, number, torch.tensor(astuple(costs), dtype=torch.float64))


def duplication(tables: ShardedTables) -> list[Duplication]:
    """What was counted last, by directory; empty where nothing is counted."""
    flat = torch.ops.oper.context_duplication(tables._handle)
    n = len(flat) // 3
    names = [d.table.name for d in tables.directories]
    return [Duplication(names[k], flat[k], flat[n + k], bool(flat[2 * n + k])) for k in range(n)]
