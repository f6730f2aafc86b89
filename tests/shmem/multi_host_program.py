"""A program for torchrun on every host: shards, trains and saves; rank 0 writes the results."""

import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn

import oper
from oper.shmem.group.domains import find_domains
from oper.shmem.group.groups import ProcessGroup

ROWS, DIM, STEPS, LR = 500, 12, 3, 0.5


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, offsets of the bags, and a target."""
    g = torch.Generator().manual_seed(100 * step + rank)
    lengths = torch.randint(0, 5, (6 + rank,), generator=g)
    ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=g)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)[:-1]])
    return ids, offsets, torch.randn(6 + rank, DIM, generator=g)


def table() -> nn.EmbeddingBag:
    torch.manual_seed(7)
    return nn.EmbeddingBag(ROWS, DIM, mode="sum")


def main(path: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    warnings.simplefilter("ignore")
    model = oper.shard(table(), optimizer=oper.SGD(lr=LR))
    for step in range(STEPS):
        ids, offsets, target = batch(step, rank)
        loss = ((model(ids, offsets) - target) ** 2).mean()
        loss.backward()
    with torch.no_grad():
        all_rows = model(torch.arange(ROWS), torch.arange(ROWS))
    entry = model.state_dict()["weight"].full_tensor()
    sent = sum(map(sum, model.tables.sent_bytes().values()))
    seen = [None] * dist.get_world_size()
    dist.all_gather_object(seen, (find_domains(ProcessGroup()), all_rows, entry, sent))
    if rank == 0:
        torch.save(seen, path)
    dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1])
