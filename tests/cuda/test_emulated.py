"""The device back end's kernels, on a GPU or emulated, are bitwise equal to the host back end."""

import functools
import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from oper.errors import DeadlineError, InvalidInputError
from oper.plan import uniform_plan
from oper.shmem.batch import Lookup
from oper.shmem.group.groups import SingleGroup, ThreadGroup
from oper.shmem.optim.optimizers import SGD
from oper.shmem.tables import ShardedTables
from oper.tables import TableSpec
from tests import random_plans as rp, runtime_support as rs
from tests.cuda.emulated import both, device_tables, has_gpu, on_devices
from tests.references import EVERY

without_gpu = pytest.mark.skipif(has_gpu(), reason=(
    "kernels of one process that wait for each other could block each other on a GPU; "
    "test_on_gpu.py has processes"))


def assert_same(host: rs.Result, device: rs.Result) -> None:
    rs.assert_bitwise(vars(host), vars(device), "result")


# Of eight ranks: rows that several ranks have gradients of are summed in the order of ranks.
@pytest.mark.parametrize("world_size, plan", [*itertools.product((1, 2, 4), (
    "striped", "replicated", "owned", "mixed0", "mixed1", "mixed2")), (8, "mixed1")])
def test_training_gives_the_hosts_bits(emulation: pytest.MonkeyPatch, world_size: int, plan: str
                                       ) -> None:
    case = rs.dlrm_case("rowwise_adagrad")
    assert_same(*both(emulation, case, rp.plans_for(case.tables, world_size)[plan],
                      rs.OPTIMIZERS["rowwise_adagrad"]))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "partial_rowwise_adam", "lars_sgd",
                                       "partial_rowwise_lamb"])
def test_push_and_column_pieces(emulation: pytest.MonkeyPatch, optimizer: str, columns: bool,
                                seed: int) -> None:
    case = rs.dlrm_case(optimizer, weighted=seed == 1)
    world_size = (2, 3, 1)[seed]
    assert_same(*both(emulation, case, rp.rich_plan(case.tables, world_size, seed, columns),
                      rs.ALL_OPTIMIZERS[optimizer], 2))


CHOSEN = {"sgd": EVERY["sgd"], **rs.OTHER_OPTIMIZERS, "l2": EVERY["rowwise_adagrad_l2"],
          "decoupled": EVERY["rowwise_adagrad_decoupled"]}


@pytest.mark.parametrize("optimizer", CHOSEN)
@pytest.mark.parametrize("world_size", [1, 2])
def test_optimizers(emulation: pytest.MonkeyPatch, world_size: int, optimizer: str) -> None:
    case = rs.dlrm_case(CHOSEN[optimizer].name, weighted=True, id_dtype=torch.int32,
                        length_dtype=torch.int32)
    assert_same(*both(emulation, case, rp.plans_for(case.tables, world_size)["mixed1"],
                      CHOSEN[optimizer]))


def test_scaled_gradients(emulation: pytest.MonkeyPatch) -> None:
    """On one rank, a row's sum is scaled when it is complete, while sums of other rows continue."""
    emulation.setattr(rs, "open_tables",
                      functools.partial(rs.open_tables, gradient_scale=0.5))
    case = rs.dlrm_case("rowwise_adagrad")
    assert_same(*both(emulation, case, uniform_plan(case.tables, 1),
                      rs.OPTIMIZERS["rowwise_adagrad"]))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_rows_of_16_bits(emulation: pytest.MonkeyPatch, world_size: int, dtype: str) -> None:
    plain = rs.dlrm_case("rowwise_adagrad")
    case = replace(plain, tables=tuple(replace(t, dtype=dtype) for t in plain.tables))
    assert_same(*both(emulation, case, rp.plans_for(case.tables, world_size)["mixed0"],
                      rs.OPTIMIZERS["rowwise_adagrad"]))


class _Staging:
    """Tables that fetch rows of peers once and count the passes in which they did."""

    def __init__(self, patch: pytest.MonkeyPatch, choice: bool | None = True,
                 room: int | None = None) -> None:
        from oper.shmem.device.tables import DeviceTables

        self.found: list[int] = []  # by rank
        close = DeviceTables.close

        def note(tables: DeviceTables) -> None:
            self.found.append(torch.ops.oper.device_context_duplication(tables.handle)[2])
            close(tables)

        patch.setattr(DeviceTables, "close", note)
        patch.setattr(DeviceTables, "_deduplicate", choice)
        if room is not None:
            patch.setattr(DeviceTables, "most_staging_bytes", room)

    @property
    def used(self) -> int:
        """By all ranks together."""
        return sum(self.found)


@pytest.mark.parametrize("world_size, plan, weighted, dtype, room", [
    *itertools.product((2, 3), ["mixed1"], (False, True), ["float32"], (None, 48 * 16, 0)),
    *itertools.product([2], ["rich0", "rich1"], [False], ["float32", "float16"], [None])])
def test_rows_fetched_once_give_the_hosts_bits(
        emulation: pytest.MonkeyPatch, world_size: int, plan: str, weighted: bool, dtype: str,
        room: int | None) -> None:
    plain = rs.dlrm_case("rowwise_adagrad", weighted=weighted)
    case = replace(plain, tables=tuple(replace(t, dtype=dtype) for t in plain.tables))
    chosen = (rp.plans_for(case.tables, world_size)[plan] if plan == "mixed1"
              else rp.rich_plan(case.tables, world_size, int(plan[-1]), True))
    staging = _Staging(emulation, room=room)
    assert_same(*both(emulation, case, chosen, rs.OPTIMIZERS["rowwise_adagrad"]))
    assert staging.used


def test_memory_has_the_lists_of_received_gradients(on_device: None) -> None:
    case = rs.Case((TableSpec("t", 400, 8, ("a",), "sum"),), ("a",))

    def body(group: ThreadGroup, optimizer: Any) -> list[int]:
        tables = rs.open_tables(case, uniform_plan(case.tables, 2, "striped"), group, optimizer)
        found = tables.memory_bytes()["device"]
        tables.close()
        return found

    plain, trained = (rs.run_ranks(2, lambda group, o=o: body(group, o))
                      for o in (None, rs.OPTIMIZERS["sgd"]))
    assert plain == [[200 * 32] * 2] * 2
    assert trained == [trained[0]] * 2 and min(trained[0]) >= 200 * (32 + 4 + 2 * 8)


def test_repeated_rows_are_fetched_once(emulation: pytest.MonkeyPatch) -> None:
    staging = _Staging(emulation, None)
    case = rs.Case((TableSpec("t", 400, 8, ("a",), "sum", "float32", "sgd"),), ("a",))
    for num_distinct, expected in [(400, 0), (40, 2 * 3)]:
        staging.found.clear()
        steps = []
        for k in range(4):
            batches = []
            for rank in range(2):
                g = torch.Generator().manual_seed(10 * k + rank)
                ids = torch.randperm(400, generator=g)[:160] % num_distinct
                batches.append(rs.Batch(torch.full((40,), 4), ids, None, torch.zeros(40, 8)))
            steps.append(batches)
        plan = uniform_plan(case.tables, 2, "striped")
        host = rs.train_virtual(case, plan, steps, SGD(lr=0.1))
        with on_devices(emulation):
            assert_same(host, rs.train_virtual(case, plan, steps, SGD(lr=0.1)))
        assert staging.used == expected  # the first step measures


@pytest.mark.parametrize("dims", [
    *((dim, 8) for dim in (1, 2, 3, 4, 6, 16, 20, 31, 32, 48, 100, 128, 130, 256, 384, 512, 1000,
                           1024)),
    (501, 20, 32)])  # narrow rows whose kernel also sees the widths of other tables
def test_dims(emulation: pytest.MonkeyPatch, dims: tuple[int, ...]) -> None:
    tables = tuple(TableSpec(f"t{d}", 50 if d == dims[0] else 9, d, (f"f{d}",),
                             "sum" if d == dims[0] else "mean", "float32", "rowwise_adagrad")
                   for d in dims)
    case = rs.Case(tables, tuple(t.features[0] for t in tables), base_batch=9)
    assert_same(*both(emulation, case, rp.plans_for(tables, 2)["striped"],
                      rs.OPTIMIZERS["rowwise_adagrad"], 2))


def test_as_many_ids_as_allowed(on_device: None) -> None:
    """Kernels number ids with 32 bits. Groups of lanes that work in step take as many turns as the
    one with the longest bag; that of the last bag must not pass the end."""
    case = rs.Case((TableSpec("t", 8, 16, ("a", "b"), "sum"),), ("a", "b"))
    tables: Any = rs.open_tables(case, uniform_plan(case.tables, 1), SingleGroup(),
                                 rs.OPTIMIZERS["sgd"])
    count, lengths = 2**31 - 65, torch.tensor([0, 0, 300, 5])
    lengths[0] = count - 305  # of a key without features
    ids = torch.from_numpy(np.zeros(count, np.int32))  # no memory until it is read
    ids[-305:] = torch.arange(305, dtype=torch.int32) % 8
    # Only a batch that is resolved ahead does without memory for the ids of other keys.
    batch = tables.resolve(Lookup(ids, lengths, torch.tensor([1, 1]), 2))
    out, _ = tables.forward(batch)
    rows = tables.read("t")[ids[-305:].long()]
    expected = torch.stack([rows[:300].sum(0), rows[300:].sum(0)]).repeat(1, 2)
    torch.testing.assert_close(out, expected)
    tables.close()


def _run_of(tables: ShardedTables, batch: Lookup) -> list[torch.Tensor]:
    """Run two training steps on a batch; returns the outputs and the rows."""
    outputs = []
    for k in range(2):
        out = tables.lookup(batch)
        g = torch.Generator().manual_seed(k)
        out.backward(torch.randn(out.shape, generator=g))
        outputs.append(out.detach())
    tables.barrier()
    rows = [tables.read(name) for name in tables.specs]
    tables.close()
    return outputs + rows


def test_long_runs_are_summed_in_fixed_chunks(emulation: pytest.MonkeyPatch) -> None:
    """Nearly all ids are one row, so that its run is cut into chunks."""
    case = rs.Case((TableSpec("t", 3, 20, ("a",), "sum", "float32", "sgd"),), ("a",))
    rng = np.random.default_rng(0)
    ids = (rng.random(3000) < 0.1).astype(np.int64) * rng.integers(0, 3, 3000)
    batch = Lookup(torch.from_numpy(ids), torch.full((500,), 6), case.key_of, 500)
    plan = uniform_plan(case.tables, 1, "striped")
    host = _run_of(rs.open_tables(case, plan, SingleGroup(), SGD(lr=0.01)), batch)
    emulation.setattr(rs, "ShardedTables", device_tables)
    results = []
    for seed, threads in [(1, 256), (2, 1024), (3, 4096)]:
        emulation.setenv("OPER_EMULATION_SEED", str(seed))
        emulation.setenv("OPER_DEVICE_THREADS", str(threads))
        with ThreadPoolExecutor(1) as pool:  # has a new emulated device, which reads these
            results.append(pool.submit(lambda: _run_of(
                rs.open_tables(case, plan, SingleGroup(), SGD(lr=0.01)), batch)).result())
    rs.assert_bitwise(results[0], results[1], "other grid")
    rs.assert_bitwise(results[0], results[2], "other grid")
    for a, b in zip(host, results[0], strict=True):
        # Sums of 2,700 gradients of size one, associated in another way.
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
def test_long_runs_of_one_chunk_give_the_hosts_bits(
        emulation: pytest.MonkeyPatch, optimizer: str) -> None:
    """25 runs of 120 gradients in each of two classes of rows."""
    tables = tuple(TableSpec(n, 30, dim, (n,), "mean", "float32", optimizer)
                   for n, dim in (("a", 20), ("b", 9)))
    case = rs.Case(tables, ("a", "b"))
    ids = torch.arange(2 * 3000) * 7 % 25
    lengths = torch.tensor([6, 0, 12, 2] * 300)
    batch = Lookup(ids, lengths, case.key_of, 600)
    plan, chosen = uniform_plan(tables, 1, "striped"), rs.OPTIMIZERS[optimizer]
    host = _run_of(rs.open_tables(case, plan, SingleGroup(), chosen), batch)
    with on_devices(emulation):
        device = _run_of(rs.open_tables(case, plan, SingleGroup(), chosen), batch)
    rs.assert_bitwise(host, device, "outputs and rows")


@pytest.mark.parametrize("columns", [False, True])
def test_unpooled(emulation: pytest.MonkeyPatch, columns: bool) -> None:
    tables = (TableSpec("t", 400, 24, ("a", "b"), "none"), TableSpec("u", 30, 24, ("c",), "none"))
    case = rs.Case(tables, ("b", "a", "c"))
    assert_same(*both(emulation, case, rp.rich_plan(tables, 1, 5, columns),
                      rs.OPTIMIZERS["rowwise_adagrad"], 2))


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("batch_size", [0, 3])
def test_batches_without_ids(on_device: None, pooled: bool, batch_size: int) -> None:
    case = rs.Case((TableSpec("t", 5, 4, ("a",), "sum" if pooled else "none"),), ("a",))
    tables = rs.open_tables(case, uniform_plan(case.tables, 1, "striped"), SingleGroup(),
                            rs.OPTIMIZERS["sgd"])
    none = torch.zeros(0, dtype=torch.int64)
    batch = Lookup(none, torch.zeros(batch_size, dtype=torch.int64), case.key_of, batch_size, None,
                   pooled)
    for found in (batch, tables.resolve(batch)):
        with torch.no_grad():
            assert tables.lookup(found).shape == (batch_size if pooled else 0, 4)
        tables.lookup(found).sum().backward()
    ids = torch.tensor([1])
    with torch.no_grad(), pytest.raises(InvalidInputError, match="number of lengths=1"):
        tables.lookup(replace(batch, ids=ids, lengths=ids, batch_size=2))
    tables.synchronize()  # type: ignore[attr-defined]
    tables.close()


@pytest.mark.parametrize("replaces", [False, True])
def test_a_resolved_batch_gives_the_same_bits(on_device: None, replaces: bool) -> None:
    """It is resolved again if its weights were replaced after they were sorted."""
    case = rs.dlrm_case("rowwise_adagrad", weighted=True)
    plan = rp.plans_for(case.tables, 1)["mixed0"]
    batch = rs.make_steps(case, 1, 1)[0][0].lookup(case)
    assert batch.weights is not None
    other = replace(batch, weights=batch.weights * 2) if replaces else batch
    plain, ahead = (rs.open_tables(case, plan, SingleGroup(), rs.OPTIMIZERS["rowwise_adagrad"])
                    for _ in range(2))
    resolved = replace(other, resolved=ahead.resolve(batch).resolved)
    rs.assert_bitwise(_run_of(plain, other), _run_of(ahead, resolved), "resolved ahead")


@without_gpu
def test_a_barrier_waits_for_all_and_names_who_is_missing(
        emulation: pytest.MonkeyPatch, on_device: None) -> None:
    emulation.setenv("OPER_DEADLINE_S", "1")
    case = rs.Case((TableSpec("t", 50, 4, ("a",), "sum", "float32", "sgd"),), ("a",))

    def body(group: ThreadGroup) -> None:
        tables = rs.open_tables(case, uniform_plan(case.tables, 2, "striped"), group, SGD(lr=1.0))
        for _ in range(50):
            torch.ops.oper.device_barrier(tables.handle)
        assert torch.ops.oper.device_context_error(tables.handle)[0] == 0
        group.all_gather(None)
        if group.rank == 1:
            torch.ops.oper.device_barrier(tables.handle)
            with pytest.raises(DeadlineError, match="rank=0"):
                tables.synchronize()  # type: ignore[attr-defined]
        group.all_gather(None)
        tables.close()

    rs.run_ranks(2, body)
