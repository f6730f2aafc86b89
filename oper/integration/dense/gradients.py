"""Averaging of dense gradients in memory that all ranks share, instead of by messages."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from oper.integration.checkpoint.saving import tables_of
from oper.shmem.group.groups import ProcessGroup
from oper.shmem.memory.host_heap import HostHeap
from oper.shmem.tables import ShardedTables
from oper.support.processes import when_dropped

_LINE_BYTES = 64


def average_in_shared_memory(model: DistributedDataParallel) -> bool:
    """Average the dense gradients of a sharded model in shared memory from now on. Collective.

    Call it once, before the first backward pass. It registers a communication hook, and
    DistributedDataParallel accepts only one. Averaged gradients are bit-identical on all ranks.
    Each rank allocates about as many bytes as all dense parameters have.

    Args:
        model: a model with sharded tables.

    Returns:
        True on success. False, and DistributedDataParallel continues to exchange messages, if there
        is one rank, ranks do not share memory, tables or parameters are on GPUs, or the process
        groups of `model` and the tables differ.
    """
    found = [t for t in tables_of(model) if isinstance(t, ShardedTables)]
    dense = [p for n, p in model.module.named_parameters()
             if p.requires_grad and n not in model.parameters_to_ignore]
    if not found or not _can_share(model, found[0], dense):
        return False
    average = _SharedAverage(found[0], sum(p.numel() * p.element_size() for p in dense))

    def hook(state: Any, bucket: Any) -> Any:
        gradients: torch.Tensor = bucket.buffer()
        average(gradients)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(gradients)
        return done

    hook.__annotations__ = {}  # DistributedDataParallel refuses annotations that are strings
    model.register_comm_hook(None, hook)
    return True


def _can_share(model: DistributedDataParallel, tables: ShardedTables,
               dense: list[nn.Parameter]) -> bool:
    group, ours = model.process_group, tables.group
    return (isinstance(ours, ProcessGroup) and ours.world_size > 1 and tables.is_one_domain
            and tables.device.type == "cpu" and all(p.device.type == "cpu" for p in dense)
            and dist.get_process_group_ranks(group) == ours.ranks)


class _SharedAverage:
    """Averages a tensor over ranks by reduce-scatter and all-gather in shared memory.

    Every rank's segment has a cell for each rank. Rank r writes part p of its tensor, divided by
    the number of ranks, to cell p of its segment (p != r); sums part r over all ranks into cell r;
    and copies every part p from cell p of rank p. A part is summed by one rank in one order, so the
    results are identical on all ranks.

    Args:
        tables: the sharded tables, for their group and barrier.
        num_bytes: size of the largest tensor to average. Creation is collective.
    """

    def __init__(self, tables: ShardedTables, num_bytes: int) -> None:
        self._tables = tables
        self._rank, self._size = tables.group.rank, tables.group.world_size
        lines = -(-num_bytes // (self._size * _LINE_BYTES)) + 1
        cell, total = lines * _LINE_BYTES, lines * _LINE_BYTES * self._size
        heap = HostHeap(tables.group, [total] * self._size)
        when_dropped(self, heap.close)
        self._cells = [torch.ops.oper.segment_bytes(address, total).split(cell)
                       for address in heap.addresses]

    def __call__(self, data: torch.Tensor) -> None:
        """Replace `data`, one-dimensional with the same size and dtype on all ranks, by its mean.

        Collective; raises the errors of `ShardedTables.barrier`.
        """
        rank, size = self._rank, self._size
        parts = data.tensor_split(size)
        cells = [[cell[:part.nbytes].view(data.dtype) for cell, part in zip(x, parts, strict=True)]
                 for x in self._cells]
        share, (first, *others) = 1.0 / size, [peer for peer in range(size) if peer != rank]
        for peer in (first, *others):
            torch.mul(parts[peer], share, out=cells[rank][peer])
        self._tables.barrier()
        # Cell `rank` can be overwritten: every rank has finished the previous call's copies.
        own = torch.add(cells[first][rank], parts[rank], alpha=share, out=cells[rank][rank])
        for peer in others:
            own.add_(cells[peer][rank])
        self._tables.barrier()
        for owner in range(size):
            parts[owner].copy_(cells[owner][owner])
