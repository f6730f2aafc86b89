"""Outputs and reduced gradients too large for the caches are written past them: the same bits."""

from __future__ import annotations

import pytest
import torch

from oper.plan import uniform_plan
from oper.shmem.batch import Lookup
from oper.shmem.group.groups import SingleGroup
from oper.shmem.library import load
from oper.shmem.optim.optimizers import SGD
from oper.shmem.tables import ShardedTables
from oper.tables import TableSpec
from tests.runtime_support import bags_of_one
from tests.world_support import run_world

SPECS = [TableSpec("a", 50, 64, ("f",), "sum", optimizer="none"),
         TableSpec("b", 70, 16, ("g",), "mean", optimizer="none"),
         TableSpec("c", 30, 48, ("h",), "sum", optimizer="none")]
BATCH, PART = 1 << 18, 1 << 10  # 128 MiB and 512 KiB of output


def _differences(rank: int, world_size: int) -> int:
    tables = ShardedTables(uniform_plan(SPECS, 1), [("f", "a"), ("g", "b"), ("h", "c")],
                           SingleGroup(), None)
    generator = torch.Generator().manual_seed(0)
    for spec in SPECS:
        tables.write(spec.name, torch.randn(spec.num_rows, spec.dim, generator=generator))
    key_of = torch.arange(3)
    ids = torch.randint(0, 30, (3, BATCH, 2), generator=generator)
    lengths = torch.full((3 * BATCH,), 2)
    large = tables.lookup(Lookup(ids.reshape(-1), lengths, key_of, BATCH))
    row_bytes, cache = large[0].nbytes, torch.ops.oper.last_level_cache_bytes()
    assert PART * row_bytes < cache / 4 < BATCH * row_bytes  # what is written past the caches
    differ = 0
    for at in range(0, BATCH, PART):
        part = ids[:, at:at + PART].reshape(-1)
        small = tables.lookup(Lookup(part, lengths[:3 * PART], key_of, PART))
        differ += int((small.view(torch.int32) != large[at:at + PART].view(torch.int32)).sum())
    return differ


@pytest.mark.parametrize("kernels", ["", "avx2", "generic"])
def test_large_outputs_equal_those_of_small_batches(kernels: str) -> None:
    assert run_world(1, _differences, env={"OPER_CPU_KERNELS": kernels}) == [0]


def _wrong_elements(rank: int, world_size: int, dim: int) -> list[int]:
    """Wrong elements after two steps of one batch; in the second the kernels know that gradients
    will not fit the cache. Small integers make every sum exact."""
    load()
    cache = torch.ops.oper.last_level_cache_bytes()
    num_rows = cache * 5 // 4 // (4 * dim) + 1
    spec = TableSpec("a", num_rows, dim, ("f",), "sum", optimizer="sgd")
    tables = ShardedTables(uniform_plan([spec], 1), [("f", "a")], SingleGroup(), SGD(lr=1.0))
    tables.write("a", torch.zeros(num_rows, dim))
    tables.flush_replicas()
    generator = torch.Generator().manual_seed(0)
    ids = torch.cat([torch.randperm(num_rows, generator=generator),
                     torch.randint(0, num_rows, (num_rows // 2,), generator=generator)])
    gradient = torch.randint(-8, 9, (ids.numel(), dim), generator=generator).float()
    batch = bags_of_one(ids)
    expected = torch.zeros(num_rows, dim).index_add_(0, ids, gradient)
    wrong = []
    for step in (1, 2):
        tables.lookup(batch).backward(gradient)
        found = torch.empty(num_rows, dim)
        tables.gather("a", torch.arange(num_rows).numpy(), "rows", slice(0, dim), found)
        wrong.append(int((found != -step * expected).sum()))
    tables.close()
    return wrong


@pytest.mark.parametrize("dim", [96, 272])
@pytest.mark.parametrize("kernels", ["", "avx2", "generic"])
def test_large_gradients_are_equal_in_every_step(kernels: str, dim: int) -> None:
    assert run_world(1, _wrong_elements, dim, env={"OPER_CPU_KERNELS": kernels}) == [[0, 0]]
