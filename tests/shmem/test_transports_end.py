"""Connections between hosts close with their tables or their process group, not before."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import oper
from oper.errors import OperError, PeerLostError
from oper.plan import uniform_plan
from oper.shmem.group.groups import ProcessGroup
from oper.shmem.group.transport import transport_of
from tests.world_support import run_world, world

pytestmark = pytest.mark.filterwarnings("ignore:no access statistics")


def _held() -> tuple[int, int]:
    """Numbers of sockets and of monitor threads of this process."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
        except OSError:  # that of listdir itself
            continue
    return found, sum(t.name == "oper-liveness" for t in threading.enumerate())


def _sharded(process_group: Any = None) -> Any:
    torch.manual_seed(0)
    return oper.shard(nn.EmbeddingBag(30, 4, mode="sum"), optimizer=oper.SGD(lr=0.1),
                      process_group=process_group)


def _train(model: Any) -> None:
    model(torch.tensor([[1, 2], [20, 29]])).sum().backward()


def _ends(rank: int, world_size: int, how: str) -> list[tuple[int, int]]:
    group = None
    if how == "subgroup":
        group = dist.new_group(list(range(world_size)))
    dist.barrier(group)
    found = [_held()]
    kept = []  # tables that outlive their group
    for _ in range(3):
        if how == "subgroup":
            group = dist.new_group(list(range(world_size)))
        model = _sharded(group)
        _train(model)
        dist.barrier()
        if how == "close":
            model.tables.close()
        elif how == "subgroup":
            dist.destroy_process_group(group)
            kept.append(model)
        del model
        gc.collect()
        dist.barrier()
        if how != "subgroup":
            found.append(_held())
    if how == "subgroup":  # the next transport closes those of groups that are gone
        transport_of(ProcessGroup())
        with pytest.raises(OperError, match="connections='closed'"):
            _train(kept[0])
    found.append(_held())
    return found


@pytest.mark.parametrize("how", ["close", "collect"])
def test_closed_tables_leave_no_connection(how: str) -> None:
    for found in run_world(2, _ends, how, labels="ab"):
        # One of the process that this is a fork of may be closed meanwhile; none may be added.
        assert all(b <= a for a, b in pairwise(found)) and found[0][1] == 0, found


def test_a_destroyed_subgroup_leaves_no_connection() -> None:
    """Connections close even if tables are still open."""
    for before, after in run_world(2, _ends, "subgroup", labels="ab"):
        # Left: the transport of the whole group, which has two connections to its peer.
        assert after[1] == 1, (before, after)


def _destroyed(rank: int, world_size: int, store: str) -> list[tuple[int, int]]:
    dist.destroy_process_group()
    found, kept = [], []
    for k in range(3):
        dist.init_process_group("gloo", init_method=f"file://{store}{k}", rank=rank,
                                world_size=world_size)
        kept.append(_sharded())
        _train(kept[-1])
        dist.barrier()
        dist.destroy_process_group()
        gc.collect()
        time.sleep(0.2)  # gloo's own sockets
        found.append(_held())
    dist.init_process_group("gloo", init_method=f"file://{store}last", rank=rank,
                            world_size=world_size)
    dist.barrier()  # a rank that ends before another has connected breaks its set-up
    return found


def test_a_destroyed_group_leaves_no_connection(tmp_path: Any) -> None:
    """Tables that were never closed do not keep connections open."""
    for found in run_world(2, _destroyed, str(tmp_path / "store"), labels="ab"):
        assert found[1:] == found[:-1] and found[0][1] == 0, found


def _one_closes(rank: int, world_size: int) -> list[float]:
    """Rank 0 closes its tables, the others keep theirs; then all shard again."""
    first = _sharded()
    _train(first)
    if rank == 0:
        first.tables.close()
    dist.barrier()
    time.sleep(0.3)  # what was said has arrived
    if rank == 1:
        with pytest.raises(PeerLostError, match="rank=0"):
            _train(first)
    dist.barrier()
    second = _sharded()
    _train(second)
    return second.state_dict()["weight"].full_tensor().flatten().tolist()


def test_ranks_that_close_at_different_times_shard_again() -> None:
    first, second = run_world(2, _one_closes, labels="ab")
    assert first == second


def _is_killed(rank: int, world_size: int) -> float:
    """Rank 0 forks a child, which runs on, and is killed; returns how long rank 1 waits for it."""
    model = _sharded()
    _train(model)
    if rank == 0:
        if os.fork() == 0:
            time.sleep(8)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    with pytest.raises(PeerLostError, match="rank=0"):
        _train(model)
    return time.monotonic() - begun


def test_a_killed_rank_is_missed_although_its_child_lives() -> None:
    with world(2, _is_killed, labels="ab") as running:
        assert running.receive(1) < 4


def _child_looks_up(rank: int, world_size: int) -> int:
    """Return the exit status of a forked child that looks up rows of another host."""
    model = _sharded()
    model.tables.migrate(uniform_plan(list(model.tables.specs.values()), world_size, "striped"))
    child = os.fork()
    if child == 0:
        with torch.no_grad(), pytest.raises(OperError, match="forked process cannot exchange"):
            _train(model)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    _train(model)  # the child has sent nothing
    return status


def test_a_forked_child_sends_nothing() -> None:
    assert run_world(2, _child_looks_up, labels="ab") == [0, 0]


def _leaves_early(rank: int, world_size: int) -> bool:
    """Rank 0 leaves after its part of an exchange; rank 2 arrives a second later."""
    transport = transport_of(ProcessGroup())
    to = [[0, 4, 4], [0, 0, 4], [0, 4, 0]]  # bytes from each rank to each; none to rank 0
    there, back = to[rank], [row[rank] for row in to]
    send = torch.full((sum(there),), rank, dtype=torch.uint8)
    recv = torch.full((sum(back),), 9, dtype=torch.uint8)
    if rank == 2:
        time.sleep(1.0)
    transport.exchange(send, there, recv, back)
    if rank == 0:
        transport.close()  # type: ignore[attr-defined]
    dist.barrier()
    return recv.tolist() == [[], [0] * 4 + [2] * 4, [0] * 4 + [1] * 4][rank]


def test_a_rank_may_close_after_its_part_of_an_exchange() -> None:
    """A rank that closes properly does not count as lost while others complete the exchange."""
    assert run_world(3, _leaves_early) == [True] * 3
