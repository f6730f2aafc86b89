"""A training step allocates no new memory after the first steps; sizes that vary do not add up."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from oper.plan import uniform_plan
from oper.shmem.batch import Lookup
from oper.shmem.group.groups import ProcessGroup
from oper.shmem.library import load
from oper.shmem.optim.optimizers import RowWiseAdagrad
from oper.shmem.tables import ShardedTables
from oper.tables import TableSpec
from tests.random_plans import mixed_plan
from tests.world_support import run_world

SPECS = tuple(TableSpec(f"t{k}", rows, 64, (f"f{k}",), "sum", optimizer="rowwise_adagrad")
              for k, rows in enumerate((300, 40_000, 60_000)))
BATCH, POOLING = 4096, 4  # outputs of 3 MiB, send buffers of as much
STEPS, WINDOWS = 10, 3


def _resident_bytes() -> int:
    """Resident private and shared bytes of this process."""
    rss = next(line for line in Path("/proc/self/smaps_rollup").read_text().splitlines()
               if line.startswith("Rss:"))
    return int(rss.split()[1]) << 10


def _mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


def _page_faults() -> int:
    return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[7])


def _growth(rank: int, world_size: int, mixed: bool, ahead: bool) -> dict[str, int]:
    plan = mixed_plan(SPECS, world_size, 1) if mixed else uniform_plan(SPECS, world_size)
    tables = ShardedTables(plan, [(f"f{k}", t.name) for k, t in enumerate(SPECS)],
                           ProcessGroup(), RowWiseAdagrad(lr=0.01), 1.0 / world_size)
    for spec in SPECS:
        tables.write(spec.name, torch.zeros(spec.num_rows, spec.dim))
    tables.flush_replicas()
    generator = torch.Generator().manual_seed(rank)
    gradient = torch.randn(BATCH, tables.output_columns, generator=generator)
    lengths = torch.full((len(SPECS) * BATCH,), POOLING)
    # The same few batches again and again: what grows then is not the batches' doing.
    batches = [Lookup(torch.cat([torch.randint(0, s.num_rows, (BATCH * POOLING,),
                                               generator=generator) for s in SPECS]),
                      lengths, torch.arange(len(SPECS)), BATCH) for _ in range(3)]

    def train(steps: int) -> None:
        for k in range(steps):
            batch = batches[k % len(batches)]
            tables.lookup(tables.resolve(batch) if ahead else batch).backward(gradient)

    def growth(measure: Callable[[], int]) -> int:
        """The minimum growth over several windows, since a leak appears in each of them."""
        found = []
        for _ in range(WINDOWS):
            before = measure()
            train(STEPS)
            found.append(measure() - before)
        return min(found)

    train(6)
    found = {"resident": growth(_resident_bytes), "mappings": growth(_mappings),
             "faults": growth(_page_faults)}
    tables.barrier()
    tables.close()
    return found


@pytest.mark.parametrize("labels, mixed, ahead", [
    ("aa", False, False), ("aa", True, True), ("ab", True, False)])
def test_a_step_allocates_no_new_memory(labels: str, mixed: bool, ahead: bool) -> None:
    environment = {"OPER_SEND_BUFFER_BYTES": "64e6", "OMP_NUM_THREADS": "1"}
    for found in run_world(2, _growth, mixed, ahead, env=environment, labels=labels):
        assert found["resident"] < 1 << 18, found
        assert found["mappings"] <= 0, found
        # Outputs and offsets that are mapped anew take 3 to 5 faults a step even as huge pages.
        assert found["faults"] < 2 * STEPS, found


def _growth_by_sizes(rank: int, world_size: int) -> int:
    load()
    before = _resident_bytes()
    for huge_pages in range(1, 25):  # one block at a time, of 2 MiB to 48 MiB, 600 MiB in total
        torch.ops.oper.pad_lengths(torch.empty(0, dtype=torch.int64), [0], huge_pages << 18)
    return _resident_bytes() - before


def test_blocks_of_all_sizes_are_not_kept() -> None:
    assert max(run_world(1, _growth_by_sizes)) < 400 << 20
