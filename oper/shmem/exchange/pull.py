"""De-duplicated pull: rows of other ranks of the domain are read once per batch if that is faster.

Between memory domains every pulled row is sent once per batch. Within a domain of host memory,
ranks usually read each other's rows as fast as their own, and caches hold repeated rows, so copying
distinct rows first gains nothing. If the memory of other ranks is slower (another socket), copying
is faster above some number of ids per distinct row. The kernels count that number and decide by
`PullCosts`, which `measured_costs` measures on the machine. `oper.shard` enables this automatically
if ranks of a domain run on different NUMA nodes (`choose_automatically`). Results are bitwise the
same. A *neighbour* is another rank of the same memory domain.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace

import numpy as np
import torch

from oper.errors import require_fields
from oper.ranges import Amount, rules_of
from oper.shmem.batch import Lookup
from oper.shmem.memory.numa import find_nodes, local_domain
from oper.shmem.protocol import Tables


@dataclass(frozen=True, slots=True)
class PullCosts:
    """Costs of reading neighbours' rows in place and de-duplicated, in nanoseconds.

    Attributes:
        extra_per_byte: additional cost per byte of reading a neighbour's row instead of an own row.
            With 0, rows are always read in place, and ids per distinct row are not counted.
        per_id: cost of de-duplication per id of a neighbour's row.
        per_copied_byte: cost per byte of copying a distinct row.
    """

    extra_per_byte: Amount = 0.0
    per_id: Amount = 4.0
    per_copied_byte: Amount = 0.05

    def __post_init__(self) -> None:
        require_fields(self, "invalid costs of pulled rows", "correct it", *rules_of(self))


def choose_pull(tables: Tables, choice: bool | PullCosts) -> None:
    """Set how `tables` read rows of neighbours from the next batch on. Not collective.

    Args:
        tables: the tables of one rank.
        choice: True: every table copies each of them once per batch; False (the default): they are
            read in place, once per id; `PullCosts`: decided table by table from these costs and the
            ids per distinct row, which are counted in every 256th forward pass.
    """
    costs = choice if isinstance(choice, PullCosts) else PullCosts()
    number = int(choice) if isinstance(choice, bool) else 2 if costs.extra_per_byte > 0 else 0
    tables.pull = choice
    torch.ops.oper.context_set_pull(
        tables.handle, number, torch.tensor(astuple(costs), dtype=torch.float64))


def choose_automatically(tables: Tables) -> None:
    """Choose how neighbours' rows are read, for `oper.shard`. Collective over the group.

    If all ranks of each domain run on one NUMA node, rows are read in place and nothing is
    measured. Otherwise the ranks of each domain that spans nodes measure `PullCosts` and use the
    mean over these ranks. Each rank then decides, from these costs and from the ids per distinct
    row in its own batches, whether to read rows in place or to copy them once per batch.
    """
    node = local_domain([n.processors for n in find_nodes()])
    nodes = tables.group.all_gather(node)
    spread = len({nodes[r] for r in tables.members}) > 1
    if not any(tables.group.all_gather(spread)):
        return
    found = measured_costs(tables) if spread else PullCosts()
    tables.barrier()  # no rank updates while others still read
    tables.traffic(reset=True)
    every = [astuple(c) for c in tables.group.all_gather(found)]
    if spread:
        of_domain = [every[r] for r in tables.members]
        choose_pull(tables, PullCosts(*np.mean(of_domain, axis=0).tolist()))


def measured_costs(tables: Tables, num_rows: int = 16_384, repeats: int = 7) -> PullCosts:
    """Measure `PullCosts` for this rank on this machine.

    Compares reads of own rows with reads of a neighbour's rows in one column piece. The piece and
    the neighbour are chosen such that both ranks own many of its rows: the smaller of the two
    numbers is maximised. Without such a neighbour, returns the defaults. Then, with a single memory
    domain, times lookups with and without de-duplication; with several, `per_id` keeps its default.
    Not collective; no rank may be in an update.

    Args:
        tables: the tables of one rank.
        num_rows: number of rows read per repetition; should exceed the caches.
        repeats: number of repetitions; the result is their median.
    """
    rank = tables.group.rank
    size, piece, peer = max(((min(int(d.num_slots[rank]), int(d.num_slots[r])), k, r)
                             for k, d in enumerate(tables.directories)
                             for r in tables.members if r != rank), default=(0, 0, rank))
    if size == 0:
        return PullCosts()
    own, theirs = (tables.view("rows", piece, r) for r in (rank, peer))
    row_bytes = own.element_size() * own.shape[1]
    slots = torch.randint(0, size, (num_rows,), generator=torch.Generator().manual_seed(0))
    rows, copies = (own.new_empty(num_rows, own.shape[1]) for _ in range(2))
    read_own, read_theirs, copied = _medians(repeats, [
        lambda: torch.index_select(own, 0, slots, out=rows),
        lambda: torch.index_select(theirs, 0, slots, out=rows),
        lambda: copies.copy_(rows)])
    per_byte = 1e9 / (num_rows * row_bytes)
    costs = PullCosts(extra_per_byte=max(0.0, read_theirs - read_own) * per_byte,
                      per_copied_byte=copied * per_byte)
    if not tables.is_one_domain:
        return costs
    few = _ids_of(tables, piece, peer, slots % min(size, 64))
    before, taken = tables.pull, []
    for choice in (False, True):
        choose_pull(tables, choice)
        taken += _medians(repeats, [lambda: tables.forward(few)])
    choose_pull(tables, before)
    direct, once = taken
    return replace(costs, per_id=max(0.0, once - direct) * 1e9 / num_rows)


def _ids_of(tables: Tables, piece: int, owner: int, slots: torch.Tensor) -> Lookup:
    """A lookup of rows in a rank's shard, with one id per bag and no ids for other features."""
    directory = tables.directories[piece]
    ids = directory.ids_at(directory.positions_at(owner, slots.numpy()))
    feature = next(f for f, (_, t) in enumerate(tables.features) if t == directory.table.name)
    lengths = torch.zeros(len(tables.features), slots.numel(), dtype=torch.int64)
    lengths[feature] = 1
    pooled = directory.table.pooling != "none"
    return Lookup(torch.from_numpy(ids), lengths.reshape(-1), torch.arange(len(tables.features)),
                  slots.numel(), pooled=pooled)


def _medians(repeats: int, calls: Sequence[Callable[[], object]]) -> list[float]:
    """Return the median seconds of each call; the calls are timed alternately."""
    seconds = np.zeros((len(calls), repeats))
    for n in range(-1, repeats):  # one round to warm up
        for k, call in enumerate(calls):
            begin = time.perf_counter()
            call()
            if n >= 0:
                seconds[k, n] = time.perf_counter() - begin
    return np.median(seconds, axis=1).tolist()
