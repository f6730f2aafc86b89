"""Bounds of bags, computed by lookups while they pool, compared with sums of all lengths."""

from __future__ import annotations

import pytest
import torch

from oper.errors import InvalidInputError
from oper.plan import uniform_plan
from oper.shmem.batch import Lookup, SharedBags
from oper.shmem.group.groups import SingleGroup
from oper.shmem.tables import ShardedTables
from oper.tables import TableSpec
from tests.world_support import run_world

SPECS = [TableSpec("a", 40, 16, ("f",), "sum", optimizer="none"),
         TableSpec("b", 30, 5, ("g",), "sum", optimizer="none"),
         TableSpec("c", 20, 64, ("h",), "mean", optimizer="none")]
FEATURES = [("f", "a"), ("g", "b"), ("h", "c")]
# Around whole blocks of 1024 bags and whole lines of eight bounds.
SIZES = (1, 7, 8, 1023, 1024, 1025, 2048, 3000, 4096)
KEYS = ((0, 1, 2), (2, 0, 1), (1, 1, 0), (3, 1, 0))  # of each feature: shared and unused ones, too


def _tables() -> ShardedTables:
    tables = ShardedTables(uniform_plan(SPECS, 1), FEATURES, SingleGroup(), None)
    generator = torch.Generator().manual_seed(0)
    for spec in SPECS:
        whole = torch.randint(-9, 10, (spec.num_rows, spec.dim), generator=generator)
        tables.write(spec.name, whole.float())
    return tables


def _wrong(rank: int, world_size: int) -> list[str]:
    """Cases whose bounds or pooled rows differ from torch's; integers make sums exact."""
    tables, wrong = _tables(), []
    generator = torch.Generator().manual_seed(1)
    for size in SIZES:
        for keys in KEYS:
            for dtype in (torch.int32, torch.int64):
                num_keys = max(keys) + 1
                lengths = torch.randint(0, 5, (num_keys * size,), generator=generator, dtype=dtype)
                ids = torch.randint(0, 20, (int(lengths.sum()),), generator=generator)
                out, bounds = tables.forward(Lookup(ids, lengths, torch.tensor(keys), size))
                expected = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
                pooled = []
                for key, spec in zip(keys, SPECS, strict=True):
                    starts = expected[key * size:(key + 1) * size + 1]
                    pooled.append(torch.nn.functional.embedding_bag(
                        ids[starts[0]:starts[-1]], tables.read(spec.name), starts - starts[0],
                        mode=spec.pooling, include_last_offset=True))
                if not (torch.equal(bounds, expected) and torch.equal(out, torch.cat(pooled, 1))):
                    wrong.append(f"{size} samples, keys {keys}, {dtype}")
    return wrong


@pytest.mark.parametrize("kernels", ["", "avx2", "generic"])
def test_bag_bounds_and_pooled_rows_equal_torch(kernels: str) -> None:
    assert run_world(1, _wrong, env={"OPER_CPU_KERNELS": kernels}) == [[]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("bad", [{5000: -1, 5001: 3}, {4096: 2}, {4096: 0}, {12287: 9}])
def test_lengths_that_do_not_fit_are_refused(dtype: torch.dtype, bad: dict[int, int]) -> None:
    tables, size = _tables(), 4096
    lengths = torch.ones(3 * size, dtype=dtype)
    ids = torch.zeros(3 * size, dtype=torch.int64)
    for place, length in bad.items():
        lengths[place] = length
    with pytest.raises(InvalidInputError, match="length"):
        tables.lookup(Lookup(ids, lengths, torch.arange(3), size))


def test_an_invalid_id_after_many_bags_is_found() -> None:
    tables, size = _tables(), 4096
    ids = torch.zeros(3 * size, dtype=torch.int64)
    ids[2 * size + 3001] = 20
    with pytest.raises(InvalidInputError, match=r"(?s)h.*20"):
        tables.lookup(Lookup(ids, torch.ones(3 * size, dtype=torch.int32), torch.arange(3), size))


@pytest.mark.parametrize("size", [8, 1025, 3000])
def test_padding_changes_no_bag(size: int) -> None:
    tables, dims = _tables(), [spec.dim for spec in SPECS]
    bags = torch.tensor([size // 3, size, 1])
    lengths = torch.cat([torch.nn.functional.pad(torch.randint(0, 5, (n,)), (0, size - n))
                         for n in bags.tolist()])
    ids = torch.randint(0, 20, (int(lengths.sum()),))
    keys = torch.tensor([1, 0, 2])
    samples = torch.stack([torch.arange(size) % bags[key] for key in keys])
    full, bounds = tables.forward(Lookup(ids, lengths, keys, size))
    some, others = tables.forward(Lookup(ids, lengths, keys, size,
                                         shared=SharedBags(bags, samples)))
    assert some.shape == full.shape and torch.equal(others, bounds)
    for rows, a, b in zip(samples, full.split(dims, 1), some.split(dims, 1), strict=True):
        assert torch.equal(a[rows], b)
