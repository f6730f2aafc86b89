"""Tests that need a GPU: processes that share it, CUDA graphs, streams, rows in host memory."""

import os
import signal
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from oper.errors import DeadlineError, InvalidInputError
from oper.plan import Plan, uniform_plan
from oper.shmem.batch import Lookup
from oper.shmem.group.groups import ProcessGroup, SingleGroup
from oper.shmem.optim.optimizers import SGD
from oper.tables import TableSpec
from tests import random_plans as rp, runtime_support as rs
from tests.cuda.emulated import device_tables, has_gpu, moved
from tests.support import map_tiers
from tests.world_support import report, run_world, world

pytestmark = pytest.mark.skipif(not has_gpu(), reason="needs a GPU")

OPTIMIZER = rs.OPTIMIZERS["rowwise_adagrad"]
# Several processes on one device; torch refuses it otherwise.
SHARED_DEVICE = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
                 "OPER_SEND_BUFFER_BYTES": str(4 << 20)}


def _train(rank: int, world_size: int, case: rs.Case, plan: Plan, steps: int) -> Any:
    rs.ShardedTables = device_tables  # type: ignore[misc]
    return rs.train_rank(case, plan, rs.make_steps(case, world_size, steps), OPTIMIZER,
                         ProcessGroup())


@pytest.mark.parametrize("heap", ["symmetric", "virtual"])
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("kind", ["mixed", "rich"])
def test_processes_give_the_hosts_bits(kind: str, world_size: int, heap: str) -> None:
    case = rs.dlrm_case("rowwise_adagrad")
    make = rp.mixed_plan if kind == "mixed" else (
        lambda *a: _on_device_only(rp.rich_plan(*a, True)))
    plan = make(case.tables, world_size, 3)
    host = rs.train_virtual(case, plan, rs.make_steps(case, world_size, 3), OPTIMIZER)
    found = run_world(world_size, _train, case, plan, 3,
                      env=SHARED_DEVICE | {"OPER_DEVICE_HEAP": heap})
    rs.assert_bitwise(vars(host), vars(rs.merge_ranks(found)), f"{kind}, {world_size} processes")


def _on_device_only(plan: Plan) -> Plan:
    return map_tiers(plan, lambda x: replace(x, memory="device"))


def _lookup_until_it_breaks(rank: int, world_size: int, case: rs.Case, plan: Plan) -> float:
    rs.ShardedTables = device_tables  # type: ignore[misc]
    tables = rs.open_tables(case, plan, ProcessGroup(), SGD(lr=0.1))
    (batches,) = rs.make_steps(case, world_size, 1)
    for step in range(10**6):
        out = tables.lookup(batches[rank].lookup(case))
        if step == 3:
            report(time.monotonic())
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        try:
            out.sum().backward()
            tables.synchronize()  # type: ignore[attr-defined]
        except DeadlineError as error:
            assert "rank=1" in str(error), error
            return time.monotonic()
    raise AssertionError("the missing rank was not missed")


@pytest.mark.parametrize("heap", ["symmetric", "virtual"])
def test_a_killed_rank_is_an_error(heap: str) -> None:
    case = rs.dlrm_case("sgd")
    plan = uniform_plan(case.tables, 2, "striped")
    env = SHARED_DEVICE | {"OPER_DEVICE_HEAP": heap, "OPER_DEADLINE_S": "2"}
    with world(2, _lookup_until_it_breaks, case, plan, env=env) as running:
        killed = running.receive(1)
        running.receive(0)
        assert running.receive(0) - killed < 10


@pytest.mark.parametrize("world_size", [1, 8])
def test_twenty_runs_have_the_same_bits(emulation: pytest.MonkeyPatch, world_size: int) -> None:
    case = rs.dlrm_case("rowwise_adagrad", base_batch=64)
    emulation.setattr(rs, "ShardedTables", device_tables)
    plan = rp.mixed_plan(case.tables, world_size, 1)
    steps = rs.make_steps(case, world_size, 2)
    first = vars(rs.train_virtual(case, plan, steps, OPTIMIZER))
    for run in range(19):
        with emulation.context() as patch:
            if run % 3:
                patch.setenv("OPER_DEVICE_THREADS", str(256 << run % 7))
            again = vars(rs.train_virtual(case, plan, steps, OPTIMIZER))
            rs.assert_bitwise(first, again, f"run {run}")


def test_rows_in_host_memory(emulation: pytest.MonkeyPatch) -> None:
    case = rs.dlrm_case("rowwise_adagrad")
    case = replace(case, tables=tuple(
        replace(t, num_rows=t.num_rows * 40) if t.name == "large" else t for t in case.tables))
    plan = rp.rich_plan(case.tables, 2, 4, False)
    steps = rs.make_steps(case, 2, 2)
    host = rs.train_virtual(case, plan, steps, OPTIMIZER)
    free = torch.cuda.mem_get_info()[0]
    emulation.setattr(rs, "ShardedTables", device_tables)
    in_host = []

    def note(tables: Any, step: int) -> None:
        in_host.append(sum(tables._heap._host_ranges[0][1::2])
                       - sum(tables._heap._host_ranges[0][::2]))
        assert free - torch.cuda.mem_get_info()[0] >= 0

    device = rs.train_virtual(case, plan, steps, OPTIMIZER, between=note)
    assert in_host[0] > 0, "no whole part of an arena is in host memory"
    rs.assert_bitwise(vars(host), vars(device), "host memory")


def test_rows_beyond_four_gigabytes(emulation: pytest.MonkeyPatch) -> None:
    emulation.setattr(rs, "ShardedTables", device_tables)
    case = rs.Case((TableSpec("t", 40_000_000, 32, ("a",), "sum", "float32", "sgd"),), ("a",))
    tables = device_tables(uniform_plan(case.tables, 1), case.features, SingleGroup(), SGD(lr=1.0))
    ids = torch.tensor([0, 1, 33_554_431, 33_554_432, 39_999_999])
    batch = rs.bags_of_one(ids)
    wanted = torch.arange(5 * 32, dtype=torch.float32).view(5, 32)
    tables.lookup(batch).backward(-wanted)
    with torch.no_grad():
        assert torch.equal(tables.lookup(batch), wanted)
    tables.close()


@pytest.mark.parametrize("ahead", [False, True])
def test_steps_in_a_graph(emulation: pytest.MonkeyPatch, ahead: bool) -> None:
    case = rs.dlrm_case("rowwise_adagrad")
    plan = uniform_plan(case.tables, 1)
    (batch,), = rs.make_steps(case, 1, 1)
    host = rs.open_tables(case, plan, SingleGroup(), OPTIMIZER)
    emulation.setattr(rs, "ShardedTables", device_tables)
    tables: Any = rs.open_tables(case, plan, SingleGroup(), OPTIMIZER)
    on_device = moved(batch.lookup(case), tables.device)
    gradient = torch.ones(batch.size, case.columns, device="cuda")
    opened = tables._tables
    given = opened.resolve(on_device) if ahead else on_device

    def step() -> torch.Tensor:
        out: torch.Tensor = opened.lookup(given)
        out.backward(gradient)
        return out.detach()

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = step()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    for k in range(5):
        expected = host.lookup(batch.lookup(case))
        if k == 4:
            assert torch.equal(out.cpu(), expected.detach())
        expected.backward(gradient.cpu())
    for name in host.specs:
        assert torch.equal(host.read(name), tables.read(name)), name
    host.close()
    tables.close()


def test_batches_resolved_on_another_stream(emulation: pytest.MonkeyPatch) -> None:
    case = rs.dlrm_case("rowwise_adagrad", base_batch=500)
    plan = uniform_plan(case.tables, 1)
    steps = rs.make_steps(case, 1, 12)
    host = rs.train_virtual(case, plan, steps, OPTIMIZER)
    emulation.setattr(rs, "ShardedTables", device_tables)
    tables: Any = rs.open_tables(case, plan, SingleGroup(), OPTIMIZER)
    side = torch.cuda.Stream()
    outputs, ahead = [], None
    for k in range(len(steps)):
        (batch,) = steps[k]
        if ahead is None:
            ahead = moved(batch.lookup(case), tables.device)
        now, ahead = ahead, None
        if k + 1 < len(steps):
            with torch.cuda.stream(side):
                ahead = tables.resolve(steps[k + 1][0].lookup(case))
        out = tables._tables.lookup(now)
        rs.rank_loss(out, batch.target.cuda()).backward()
        outputs.append(out.detach())
    tables.barrier()
    for k, out in enumerate(outputs):
        torch.testing.assert_close(out.cpu(), host.outputs[k][0], rtol=1e-5, atol=1e-5)
    for name, weight in host.weights.items():
        torch.testing.assert_close(tables.read(name), weight, rtol=1e-5, atol=1e-5)
    tables.close()


def _has_context_on_the_first_gpu(rank: int, world_size: int) -> bool:
    from oper.shmem.device.tables import DeviceTables

    case = rs.Case((TableSpec("t", 9, 4, ("a",), "sum", "float32", "sgd"),), ("a",))
    tables = DeviceTables(uniform_plan(case.tables, 1), case.features, SingleGroup(), SGD(lr=1.0),
                          device="cuda:1")
    ids = torch.arange(9, device=tables.device)
    batch = Lookup(ids, torch.ones_like(ids), case.key_of, 9)
    tables.lookup(tables.resolve(batch)).sum().backward()
    tables.synchronize()
    del batch
    tables.close()
    found: bool = torch._C._cuda_hasPrimaryContext(0)
    return found


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tables_take_no_memory_of_another_gpu() -> None:
    assert run_world(1, _has_context_on_the_first_gpu) == [False]


def test_a_batch_in_host_memory_is_refused() -> None:
    case = rs.Case((TableSpec("t", 9, 4, ("a",), "sum"),), ("a",))
    tables = device_tables(uniform_plan(case.tables, 1), case.features, SingleGroup(), None)
    with pytest.raises(InvalidInputError, match="device of ids"):
        tables._tables.lookup(Lookup(torch.tensor([1]), torch.tensor([1]), case.key_of, 1))
    tables.close()


def test_torch_modules_on_the_device() -> None:
    import oper

    torch.manual_seed(0)
    for make, call in [
            (lambda: torch.nn.EmbeddingBag(50, 8, mode="mean", padding_idx=3),
             lambda m, x: m(x)),
            (lambda: torch.nn.EmbeddingBag(50, 8, mode="sum"),
             lambda m, x: m(x.reshape(-1), torch.arange(0, x.numel(), 5, device=x.device))),
            (lambda: torch.nn.Embedding(50, 8, padding_idx=0), lambda m, x: m(x))]:
        plain = make().cuda()
        expected = call(plain, ids := torch.randint(0, 50, (6, 5), device="cuda"))
        kind = getattr(plain, "mode", "none")
        spec = TableSpec("weight", 50, 8, ("weight",), kind, "float32", "sgd")
        sharded: Any = oper.shard(plain, plan=uniform_plan((spec,), 1), optimizer=oper.SGD(lr=0.1))
        found = call(sharded, ids)
        torch.testing.assert_close(found, expected)
        found.sum().backward()
        sharded.tables.synchronize()
        state = sharded.state_dict()
        assert set(state) == {"weight"}


def _pipeline(rank: int, world_size: int, pipelined: bool) -> list[float]:
    """Losses of TorchRec's pipeline, whose copies of batches come late."""
    import torchrec
    import torchrec.distributed as trec
    from torchrec.datasets.utils import Batch
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

    import oper

    class Late(Batch):
        """A batch whose copy is delayed on its stream for longer than the rest of a step takes."""

        def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
            torch.cuda._sleep(100_000_000)
            return super().to(device, non_blocking)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = torchrec.EmbeddingBagCollection(device=torch.device("cuda"), tables=[
                torchrec.EmbeddingBagConfig(name="t", embedding_dim=16, num_embeddings=1000,
                                            feature_names=["a"])])
            self.dense = torch.nn.Linear(16, 1, device="cuda")

        def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
            loss = self.dense(self.bags(batch.sparse_features).values()).square().mean()
            return loss, loss.detach()

    def late(seed: int) -> Late:
        g = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, 1000, (4 * 64,), generator=g).pin_memory()
        features = torchrec.KeyedJaggedTensor(["a"], ids, lengths=torch.full((64,), 4).pin_memory())
        return Late(torch.zeros(64, 1).pin_memory(), features, torch.zeros(64).pin_memory())

    torch.manual_seed(0)
    device = torch.device("cuda", 0)
    model = oper.shard(Model(), optimizer=oper.SGD(lr=0.5), batch_size=64)
    wrapped = DistributedModelParallel(model, device=device, sharders=[],
                                       plan=trec.types.ShardingPlan({}))
    dense = torch.optim.SGD(model.dense.parameters(), lr=0.1)
    batches = [late(k) for k in range(6)]
    losses = []
    if pipelined:
        pipeline = TrainPipelineSparseDist(wrapped, dense, device, execute_all_batches=True)
        iterator = iter(batches)
        losses = [pipeline.progress(iterator) for _ in batches]
    for batch in () if pipelined else batches:
        dense.zero_grad()
        loss, value = wrapped(batch.to(device))
        loss.backward()
        dense.step()
        losses.append(value)
    return [float(x) for x in losses]


def test_torchrecs_pipeline_waits_for_late_copies() -> None:
    pytest.importorskip("torchrec")
    (late,), (plain,) = (run_world(1, _pipeline, p, env=SHARED_DEVICE) for p in (True, False))
    assert late == pytest.approx(plain, rel=1e-5) and len(set(late)) > 1
