"""After a rank has exited, the surviving ranks save a consistent step, or nothing."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import oper
from oper.errors import DeadlineError, InvalidInputError, OperError, PeerLostError
from oper.integration.checkpoint.survivors import Survivors
from oper.plan import uniform_plan
from oper.shmem.counters.progress import Progress
from oper.tables import TableSpec
from tests.checkpoint_support import flat, fused, run_ranks, sharded, state_of, train
from tests.runtime_support import assert_bitwise
from tests.support import wait_for
from tests.world_support import RankFailedError, report, run_world, world

POINTS = {"forward": 2, "outbox": 3, "barrier": 4, "update": 5}  # see csrc/host/faults.h


def _dies(rank: int, world_size: int, plan: int, folder: str, point: str, occasion: int
          ) -> dict[str, Any]:
    """Kill rank 1 at a point of step 2; return the outputs of the other ranks."""
    model = sharded(world_size, plan)
    survivors = Survivors(model, fused(model))
    for step in range(2):
        train(model, rank, world_size, range(step, step + 1))
        survivors.mark()
    report({"trained": True})
    if rank == 1:
        torch.ops.oper.arm_fault(POINTS[point], occasion, int(signal.SIGKILL), 0, -1)
    try:
        train(model, rank, world_size, range(2, 4))
    except (PeerLostError, RuntimeError) as error:
        try:
            wrote = survivors.save(folder, {"step": 2})
        except OperError as refusal:
            return {"refused": str(refusal), "after": str(error)}
        return {"wrote": wrote}
    return {"went on": True}


def _loaded(rank: int, world_size: int, plan: int, folder: str) -> dict[str, torch.Tensor]:
    model = sharded(world_size, plan, seed=9)
    assert oper.load_checkpoint(folder, model, fused(model))["step"] == 2
    return flat(state_of(model))


def _two_steps(rank: int, world_size: int, plan: int) -> dict[str, torch.Tensor]:
    model = sharded(world_size, plan)
    train(model, rank, world_size, range(2))
    return flat(state_of(model))


def _answers(world_size: int, folder: Path, point: str, occasion: int) -> list[dict[str, Any]]:
    with world(world_size, _dies, 101, str(folder), point, occasion) as running:
        for rank in range(world_size):
            running.receive(rank)
        with pytest.raises(RankFailedError):
            running.receive(1)
        return [running.receive(r) for r in range(world_size) if r != 1]


@pytest.mark.parametrize("world_size, point, occasion", [
    (2, "forward", 1), (2, "barrier", 1), (3, "outbox", 1), (2, "barrier", 8), (2, "update", 1),
    (3, "update", 3)])
def test_survivors_save_one_step_or_nothing(world_size: int, point: str, occasion: int,
                                            tmp_path: Path) -> None:
    folder = tmp_path / "c"
    answers = _answers(world_size, folder, point, occasion)
    wrote = [a.get("wrote") for a in answers]
    if point == "forward":  # nobody can have begun an update
        assert wrote[0] is True, answers
    if point == "update":
        assert all("refused" in a for a in answers), answers
    if True in wrote:
        held = run_ranks(_two_steps, world_size, 101)
        assert_bitwise(run_ranks(_loaded, world_size, 101, str(folder)), held, "the marked step")
        assert_bitwise(run_ranks(_loaded, 1, 5, str(folder)), held, "on one rank")
    else:
        assert not folder.exists() and not list(tmp_path.iterdir())


def _stalls(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Rank 1 sleeps past the deadline in step 2; return the outputs of both ranks."""
    model = sharded(world_size, 101)
    survivors = Survivors(model, fused(model))
    train(model, rank, world_size, range(2))
    survivors.mark()
    report({"trained": True})
    if rank == 1:
        torch.ops.oper.arm_fault(POINTS["outbox"], 1, 0, 5_000_000, -1)
    with pytest.raises((DeadlineError, PeerLostError)) as caught:
        train(model, rank, world_size, range(2, 3))
    try:
        return {"error": str(caught.value), "wrote": survivors.save(folder, {"step": 2})}
    except OperError as refusal:
        return {"error": str(caught.value), "refused": str(refusal)}


def test_survivors_save_without_a_stalled_rank(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    with world(2, _stalls, str(folder), env={"OPER_DEADLINE_S": "1.5"}) as running:
        for rank in range(2):
            running.receive(rank)
        saved, woken = running.receive(0), running.receive(1)
    assert saved.get("wrote") is True, saved
    assert "rank=1" in saved["error"] and "refused" in woken, (saved, woken)
    held = run_ranks(_two_steps, 2, 101)
    assert_bitwise(run_ranks(_loaded, 1, 5, str(folder)), held, "the marked step")


def _alive(rank: int, world_size: int, folder: str) -> str:
    model = sharded(world_size, 101)
    survivors = Survivors(model, fused(model))
    train(model, rank, world_size, range(1))
    try:
        survivors.save(folder)  # a step that nobody has marked
    except OperError as error:
        unmarked = str(error)
    survivors.mark()
    with pytest.raises(OperError, match="at least one"):
        survivors.save(folder)
    torch.distributed.barrier()
    return unmarked


def test_nothing_is_saved_while_all_ranks_are_alive(tmp_path: Path) -> None:
    for text in run_world(2, _alive, str(tmp_path / "c")):
        assert "0 updates begun and ended on all ranks" in text
        assert re.search(r"by rank=\[\(\d+, 1, 1\), \(\d+, 1, 1\)\]", text), text
    assert os.listdir(tmp_path) == []


def _refuses(rank: int, world_size: int, folder: str) -> bool:
    """Rank 1 refuses a batch under a plan without pushed rows, and ends."""
    torch.manual_seed(0)
    model = oper.shard(nn.EmbeddingBag(10, 4, mode="sum"), optimizer=oper.SGD(lr=0.1),
                       plan=uniform_plan([TableSpec("weight", 10, 4, ("weight",),
                                                    optimizer="sgd")], world_size))
    survivors = Survivors(model)
    model(torch.tensor([[rank]])).sum().backward()
    survivors.mark()
    if rank == 1:
        with pytest.raises(InvalidInputError, match="id=10"):
            model(torch.tensor([[10]]))
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError, match="refused its batch"):
        model(torch.tensor([[2]])).sum().backward()
    wait_for(lambda: bool(Progress(model.tables).missing()))
    return survivors.save(folder, {"step": 1})


def test_survivors_save_after_a_refused_batch(tmp_path: Path) -> None:
    with world(2, _refuses, str(tmp_path / "c")) as running:
        assert running.receive(0) is True
