"""`oper.shard` with replica groups in a real world: models, checkpoints, and what goes wrong."""

import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import oper
from oper.integration.checkpoint import deltas
from oper.plan import Plan, uniform_plan
from oper.shmem.group import agreement
from oper.stats import AccessStats
from oper.tables import TableSpec
from oper.topology import Topology
from tests.integration import test_dynamic_tables as keyed
from tests.runtime_support import whole
from tests.world_support import caught, received, report, run_world, world

ROWS, DIM, LR = 300, 8, 0.5


def table(seed: int = 7) -> nn.EmbeddingBag:
    torch.manual_seed(seed)
    return nn.EmbeddingBag(ROWS, DIM, mode="sum")


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(100 * step + rank)
    ids = torch.randint(0, ROWS, (6 + rank, 3), generator=g)
    return ids, torch.randn(6 + rank, DIM, generator=g)


def grouped(seed: int, every: int = 1, delay: int = 0) -> Any:
    """Shard the table in two groups."""
    return oper.shard(table(seed), optimizer=oper.SGD(lr=LR), replica_groups=2,
                      synchronize_every=every, synchronize_delay=delay, batch_size=8)


def train(model: Any, rank: int, *steps: int) -> None:
    for step in steps:
        ids, target = batch(step, rank)
        ((model(ids) - target) ** 2).mean().backward()


def reference(steps: int, world_size: int) -> torch.Tensor:
    """Train as one table, which begins with the rows of rank 0."""
    model = table(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(steps):
        losses = [((model(ids) - target) ** 2).mean()
                  for ids, target in (batch(step, r) for r in range(world_size))]
        optimizer.zero_grad()
        (sum(losses) / world_size).backward()
        optimizer.step()
    return model.weight.detach()


def train_and_save(rank: int, world_size: int, every: int, delay: int, folder: str) -> Any:
    model = grouped(rank, every, delay)
    start = model.weight.detach().clone()
    train(model, rank, 0, 1, 2)
    if every > 1:
        with pytest.raises(oper.OperError, match="updates since the last synchronization"):
            model.state_dict()
    oper.save_checkpoint(folder, model)
    saved = whole(model.state_dict())["weight"]
    train(model, rank, 3, 4)
    oper.synchronize(model)
    other = grouped(rank, every, delay)
    oper.load_checkpoint(folder, other)
    assert torch.equal(whole(other.state_dict())["weight"], saved)
    train(other, rank, 3, 4)
    oper.synchronize(other)
    assert torch.equal(whole(other.state_dict())["weight"], whole(model.state_dict())["weight"])
    return start, saved, other.weight.detach().clone()


@pytest.mark.parametrize(("every", "delay", "labels"), [
    (1, 0, ""), (1, 0, "aabb"), (2, 0, "abcd"), (3, 2, "aabb")])
def test_models_are_trained_and_saved(every: int, delay: int, labels: str, tmp_path: Path) -> None:
    seen = run_world(4, train_and_save, every, delay, str(tmp_path / "saved"), labels=labels)
    for mine in seen[1:]:
        for x, y in zip(mine, seen[0], strict=True):
            assert torch.equal(x, y)
    start, saved, rows = seen[0]
    assert torch.equal(start, table(0).weight)
    if every == 1:
        assert torch.allclose(rows, reference(5, 4), rtol=1e-5, atol=1e-6)
        return
    # One rank loads the groups' checkpoint.
    alone = oper.shard(table(1), optimizer=oper.SGD(lr=LR))
    oper.load_checkpoint(tmp_path / "saved", alone)
    assert torch.equal(alone.weight.detach().clone(), saved) and not torch.equal(saved, rows)


def train_keys(rank: int, world_size: int, groups: int, folder: str, steps: range) -> Any:
    """Train on keys and save deltas, after loading those that exist; returns what a run needs to
    continue."""
    model = keyed.shard(keyed.bag(), replica_groups=groups)
    with deltas.DeltaCheckpoints(folder, model) as saver:
        if steps.start:
            assert saver.load().step == steps.start
        for step in steps:
            keyed.step_of(model, step, rank, world_size)
            saver.save(step + 1)
    tables = model.tables
    return (keyed.records(model), torch.tensor(tables.keys.clock("weight")),
            tables.read("weight"), tables.read("weight", part="momentum1"))


def delta_bytes(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.with_name(f"{folder.name}.deltas").rglob("*.npz"))


@pytest.fixture(scope="module")
def one_group(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, int]:
    """What a rank of one group returns, and the bytes of its deltas."""
    folder = tmp_path_factory.mktemp("groups") / "one"
    found = run_world(4, train_keys, 1, str(folder), range(keyed.STEPS))
    return found[0], delta_bytes(folder)


@pytest.mark.parametrize("labels", ["", "aabb", "abcd"])
def test_groups_have_the_keys_of_one_group(labels: str, one_group: tuple[Any, int], tmp_path: Path
                                           ) -> None:
    """Keys, counts and clocks are those of one group, rows up to the order of additions; groups are
    bitwise equal, and so is a run that continues from their checkpoint."""
    def run(name: str, steps: range) -> Any:
        return run_world(4, train_keys, 2, str(tmp_path / name), steps, labels=labels)

    wanted, size = one_group
    found = run("two", range(keyed.STEPS))
    run("broken", range(5))
    found += run("broken", range(5, keyed.STEPS))
    for mine in found:
        for k, (x, y, z) in enumerate(zip(mine, found[0], wanted, strict=True)):
            assert torch.equal(x, y)
            assert torch.allclose(x, z, rtol=1e-4, atol=1e-5) if k > 1 else torch.equal(x, z)
    assert delta_bytes(tmp_path / "two") < 1.2 * size, "keys are saved once"


def refuse_keys(rank: int, world_size: int, harm: str) -> Any:
    """Rank 0 refuses a batch before or after groups exchange keys; all continue with the next."""
    model = keyed.shard(keyed.bag(3), oper.DynamicTable(), replica_groups=2, gradient_guard="stop")
    model(torch.tensor([[1, 2]])).sum().backward()
    late = model(torch.tensor([[2]]))
    model(torch.tensor([[3, 4]])).sum().backward()  # takes both rows
    keys = [[3.5]] if harm == "type" and rank == 0 else [[3]]
    with caught() as errors:
        out = late if harm == "late" and rank == 0 else model(torch.tensor(keys))
        (out.sum() * (float("nan") if harm == "guard" and rank == 0 else 1.0)).backward()
    assert model.tables.keys.clock("weight") == 2
    model(torch.tensor([[5 + rank % 2, 4]])).sum().backward()
    found = errors, keyed.records(model)[:2].tolist(), model.weight.detach().clone()
    dist.barrier()  # all have read the records
    if rank >= 2:  # only one group loads a key
        model.tables.keys.write("weight", "keys", torch.tensor([0]), torch.tensor([[9, 1, 1]]))
    with pytest.raises(oper.InvalidInputError, match="keys of dynamic tables='different'"):
        model.tables.flush_replicas()
    return found


def refuse_often(rank: int, world_size: int) -> list[Any]:
    return [refuse_keys(rank, world_size, harm) for harm in ("late", "guard", "type")]


def test_all_groups_skip_keys_that_a_rank_refuses() -> None:
    for ranks in zip(*run_world(4, refuse_often), strict=True):
        for refused, records, rows in ranks:
            assert refused and records == ranks[0][1] and torch.equal(rows, ranks[0][2])
            assert {key for key, *_ in records} < {4, 5, 6} and {c for *_, c in records} == {3}


def shard_often(rank: int, world_size: int) -> None:
    held = []
    for step in range(4):
        model = grouped(7)
        train(model, rank, step)
        dist.barrier()
        model.tables.close()
        held.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    # New groups would add 10 descriptors and 6 threads per call; threads of closed tables may
    # still be ending.
    (files, threads), (before, threads_before) = held[3], held[1]
    assert files < before + 10 and threads < threads_before + 6, held


def test_process_groups_are_created_once() -> None:
    run_world(4, shard_often)


def refuse(rank: int, world_size: int) -> None:
    def shard(match: str, **options: Any) -> None:
        with pytest.raises(oper.OperError, match=match):
            oper.shard(table(), optimizer=oper.SGD(), **options)

    shard("replica_groups=3, expected a divisor of 4", replica_groups=3)
    shard("replica_groups=0", replica_groups=0)
    shard("synchronize_every=0", replica_groups=2, synchronize_every=0)
    shard("synchronize_every=4, expected 1 without", synchronize_every=4)
    shard("synchronize_delay=1, expected an integer from 0 to 0", replica_groups=2,
          synchronize_delay=1)
    shard("synchronize_delay=3, expected an integer from 0 to 2", replica_groups=2,
          synchronize_every=2, synchronize_delay=3)
    shard("synchronize_bits=4, expected one of", replica_groups=2, synchronize_bits=4)
    shard("synchronize_bits=8, expected one of", synchronize_bits=8)
    shard("pass other arguments", replica_groups=1 + rank % 2)
    shard("memory domains of the ranks, by group", replica_groups=2)  # "aabc": 1 and 2 hosts
    shard("objective, managed", replica_groups=4, objective="inference")
    shard("synchronize_every=2, expected 1", replica_groups=4, synchronize_every=2,
          dynamic=oper.DynamicTable())
    spec = TableSpec("weight", ROWS, DIM, ("weight",), "sum", optimizer="sgd")
    plan: Plan = uniform_plan([spec], 4)
    shard("another number of ranks", replica_groups=4, plan=plan)
    plan = replace(uniform_plan([spec], 1), replica_groups=4)
    shard("construct other tables than rank 0", plan=replace(plan, tables=(
        replace(plan.tables[0], head_ids=np.arange(rank + 1)[::-1].copy()),)))
    model = oper.shard(table(), optimizer=oper.SGD(), plan=replace(plan, synchronize_every=3))
    with pytest.raises(oper.InvalidInputError, match="None in replica groups"):
        oper.migrate(model, plan, 1 << 20)
    oper.migrate(model, plan)
    with pytest.raises(oper.InvalidInputError, match="replica groups=4"):
        oper.Replanner(model, AccessStats(1, {}, "none"), Topology.this_host(4))


def test_impossible_groups_are_refused() -> None:
    run_world(4, refuse, labels="aabc")


def start_again(rank: int, world_size: int, store: str) -> None:
    """An invalid state on one rank; then new process groups while rows of the old model are sent.
    """
    old = grouped(7, 2, 2)
    before = old.weight.detach().clone()
    with pytest.raises(RuntimeError, match="cannot load table 'weight'"):
        old.load_state_dict({"weight": torch.zeros(ROWS + rank, DIM)})
    assert torch.equal(old.weight.detach().clone(), before)
    go_on = threading.Event()
    if rank:  # the other rank waits for its rows
        old.tables.replicas.groups.background.thread.submit(go_on.wait)
    train(old, rank, 0, 1)
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank,
                            world_size=world_size)
    new = grouped(7, 2, 2)
    go_on.set()
    train(new, rank, *range(4))
    # The second, if the exchange has ended with an error before.
    words = "'closed', expected an existing process group|lost the counterpart"
    with pytest.raises(oper.OperError, match=words):
        oper.synchronize(old)
    old.tables.close()
    oper.synchronize(new)
    rows = new.weight.detach().clone()
    assert not torch.equal(rows, before)
    assert all(torch.equal(rows, x) for x in new.tables.replicas.groups.whole.all_gather(rows))


def test_process_groups_that_end_while_rows_are_sent(tmp_path: Path) -> None:
    run_world(2, start_again, str(tmp_path / "store"), env={"OPER_DEADLINE_S": "20"})


def test_a_rank_that_cannot_write_a_delta_is_synchronized_first(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks wait for it."""
    model = oper.shard(table(), optimizer=oper.SGD(lr=LR), batch_size=8)
    with oper.DeltaCheckpoints(tmp_path / "run", model) as saver:
        saver.save(0)
        saver._problem = OSError("no space left")
        synchronized: list[Any] = []
        monkeypatch.setattr(deltas, "synchronize", synchronized.append)
        with pytest.raises(oper.OperError, match="no space left"):
            saver.save(1)
        assert synchronized == [model]
        saver._problem = None


def test_a_late_group_is_synchronized_before_another_call_of_shard(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """The other groups are still in an update, and cannot compare the call's arguments."""
    model = nn.ModuleDict({"a": table(), "b": table()})
    oper.shard(model, modules=["a"], optimizer=oper.SGD(lr=LR))
    calls: list[str] = []
    compare = agreement.check_same_arguments
    replicas = SimpleNamespace(is_late=True, last_update=0, close=lambda: None, synchronize=list)

    def catch_up() -> None:
        replicas.is_late = False
        calls.append("catch up")

    def compared(*arguments: Any) -> None:
        calls.append("compare")
        compare(*arguments)

    replicas.catch_up = catch_up
    model["a"].tables.replicas = replicas
    monkeypatch.setattr(agreement, "check_same_arguments", compared)
    oper.shard(model, modules=["b"], optimizer=oper.SGD(lr=LR))
    assert calls[:2] == ["catch up", "compare"]


def lose(rank: int, world_size: int, every: int, delay: int) -> str:
    model = grouped(7, every, delay)
    train(model, rank, 0)
    report("ready")
    if rank == 3:
        received()
    with pytest.raises(oper.PeerLostError) as lost:
        train(model, rank, *range(1, 1000))
    return str(lost.value)


@pytest.mark.parametrize(("every", "delay"), [(1, 0), (2, 2)])
def test_a_dead_rank_ends_all_groups(every: int, delay: int) -> None:
    with world(4, lose, every, delay, labels="aabb", env={"OPER_DEADLINE_S": "20"}) as running:
        for rank in range(4):
            assert running.receive(rank) == "ready"
        os.kill(running.pids[3], signal.SIGKILL)
        assert "rank=3" in running.receive(1)  # its counterpart
        assert "peer" in running.receive(2)
        assert running.receive(0)
