"""Outputs too large for the caches are written past them: the same bits."""

from __future__ import annotations

import pytest
import torch

from oper.plan import uniform_plan
from oper.shmem.batch import Lookup
from oper.shmem.group import SingleGroup
from oper.shmem.runtime import ShardedTables
from oper.tables import TableSpec
from tests.world_support import run_world

SPECS = [TableSpec("a", 50, 64, ("f",), "sum", optimizer="none"),
         TableSpec("b", 70, 16, ("g",), "mean", optimizer="none"),
         TableSpec("c", 30, 48, ("h",), "sum", optimizer="none")]
BATCH = 1 << 18  # 128 MiB of output


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
    differ = 0
    for at in range(0, BATCH, 1 << 14):
        part = ids[:, at:at + (1 << 14)].reshape(-1)
        small = tables.lookup(Lookup(part, lengths[:3 << 14], key_of, 1 << 14))
        differ += int((small.view(torch.int32) != large[at:at + (1 << 14)].view(torch.int32)).sum())
    return differ


@pytest.mark.parametrize("kernels", ["", "avx2", "generic"])
def test_large_outputs_are_those_of_small_batches(kernels: str) -> None:
    assert run_world(1, _differences, env={"OPER_CPU_KERNELS": kernels}) == [0]
