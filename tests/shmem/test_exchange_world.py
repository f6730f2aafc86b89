"""Processes on one host, and processes that are treated as if on several: the same results as
virtual ranks; connections that end."""

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import oper
from oper.errors import OperError, PeerLostError
from oper.plan import Plan, uniform_plan
from oper.shmem.group.domains import find_domains
from oper.shmem.group.groups import ProcessGroup
from oper.shmem.group.transport import transport_of
from oper.shmem.tables import ShardedTables
from oper.tables import TableSpec
from tests import random_plans as rp, runtime_support as rs
from tests.world_support import child_of, fork, open_descriptors, run_world, world


def _train(rank: int, world_size: int, case: rs.Case, plan: Plan, steps: list[list[rs.Batch]],
           optimizer: str, then: Plan | None) -> tuple[list[int], int, rs.Result]:
    """Train, and move to the plan `then` from step 1 on; returns the domains of all ranks, the step
    after which this rank has moved, and the result."""
    torch.manual_seed(5)  # of rounded messages
    group, switched = ProcessGroup(), []

    def between(tables: ShardedTables, step: int) -> None:
        if step == 1 and then is not None:
            tables.start_migration(then, 3_000_000)
        elif tables.migration is None:
            switched.append(step)

    result = rs.train_rank(case, plan, steps, rs.ALL_OPTIMIZERS[optimizer], group, between)
    return find_domains(group), switched[1], result


def check(labels: str, plan: Callable[[rs.Case], Plan], optimizer: str = "rowwise_adagrad",
          num_steps: int = 6, then: Callable[[rs.Case], Plan] = lambda case: None) -> int:
    """Check that processes give bitwise the results of virtual ranks, which stay at their plan;
    returns the step after which all processes have moved to the plan `then`."""
    case = rs.dlrm_case(optimizer)
    steps, chosen = rs.make_steps(case, len(labels), num_steps), plan(case)
    domains = [sorted(set(labels)).index(label) for label in labels]
    found, switched, results = zip(*run_world(len(labels), _train, case, chosen, steps, optimizer,
                                              then(case), labels=labels), strict=True)
    assert all(one == domains for one in found) and len(set(switched)) == 1
    torch.manual_seed(5)
    # Several domains give the bits of one, except by rounded messages.
    rounds = chosen.message_bits.to_json() != [32, 32]
    rs.same_bits(rs.merge_ranks(list(results)), rs.train_virtual(
        case, chosen, steps, rs.ALL_OPTIMIZERS[optimizer], domains=domains if rounds else None),
        replicas=then(case) is None)
    return switched[0]


def rich(world_size: int, bits: int = 32) -> Callable[[rs.Case], Plan]:
    return lambda case: replace(rp.rich_plan(case.tables, world_size, 1, columns=True),
                                message_bits=bits)


@pytest.mark.parametrize("labels, plan, optimizer", [
    ("aa", lambda case: rp.mixed_plan(case.tables, 2, 0), "lamb"),
    ("aaaa", lambda case: rp.mixed_plan(case.tables, 4, 1), "rowwise_adagrad"),
    ("ab", rich(2), "rowwise_adagrad"), ("aabb", rich(4, bits=8), "rowwise_adagrad"),
    ("abbb", rich(4), "rowwise_adagrad"), ("abcd", rich(4), "rowwise_adagrad")],
    ids=lambda x: x if isinstance(x, str) else "")
def test_processes_equal_virtual_ranks(labels: str, plan: Callable[[rs.Case], Plan],
                                       optimizer: str) -> None:
    check(labels, plan, optimizer)


def test_a_move_between_hosts_changes_no_bit() -> None:
    """Rows and optimizer states move within a host and between hosts while tables are trained."""
    assert 2 < check("aab", lambda case: rp.mixed_plan(case.tables, 3, 0), num_steps=8,
                     then=lambda case: uniform_plan(case.tables, 3)) < 8


def _bits(message_bits: Any, **given: Any) -> Any:
    """Shard and train with `message_bits`; returns those of the plan."""
    model = oper.shard(nn.EmbeddingBag(500, 16, mode="sum"), optimizer=oper.SGD(lr=0.1),
                       message_bits=message_bits, **given)
    model(torch.arange(12).reshape(3, 4)).sum().backward()
    model.tables.barrier()
    return model.tables.plan.message_bits.to_json()


def _shard(rank: int, world_size: int) -> list[Any]:
    given = replace(uniform_plan([TableSpec("weight", 500, 16, ("weight",), "sum",
                                            optimizer="sgd")], 2, "striped"), message_bits=16)
    found = [_bits(8), _bits((16, 8)), _bits(None), _bits(None, message_variance=1.0),
             _bits(None, message_variance=1.0, plan=given)]
    with pytest.raises(oper.InvalidInputError,
                       match=rf"message_bits on this rank=\[{'8, 16' if rank else '8, 8'}\]"):
        _bits((8, 16) if rank else 8)
    return found


def test_shard_chooses_message_bits() -> None:
    """As given, or within a budget, if no plan is given; ranks must agree on them."""
    assert run_world(2, _shard, labels="ab") == [
        [[8, 8], [16, 8], [32, 32], {"weight": [32, 4]}, [16, 16]]] * 2  # all rows are replicated


# ---- connections close with their tables or their process group, not before ----------------------

pytestmark = pytest.mark.filterwarnings("ignore:no access statistics")


def _held() -> tuple[int, int]:
    """Numbers of sockets and of monitor threads of this process."""
    sockets = sum(name.startswith("socket:") for name in open_descriptors())
    return sockets, sum(t.name == "oper-liveness" for t in threading.enumerate())


def _sharded(process_group: Any = None) -> Any:
    torch.manual_seed(0)
    return oper.shard(nn.EmbeddingBag(30, 4, mode="sum"), optimizer=oper.SGD(lr=0.1),
                      process_group=process_group)


def _train_bag(model: Any) -> None:
    model(torch.tensor([[1, 2], [20, 29]])).sum().backward()


def _ends(rank: int, world_size: int, how: str) -> list[tuple[int, int]]:
    """Shard and train three times; the tables end with a call of close, or unreferenced."""
    dist.barrier()
    found = [_held()]
    for _ in range(3):
        model = _sharded()
        _train_bag(model)
        dist.barrier()
        if how == "close":
            model.tables.close()
        del model
        gc.collect()
        dist.barrier()
        found.append(_held())
    return found


@pytest.mark.parametrize("how", ["close", "collect"])
def test_closed_tables_leave_no_connection(how: str) -> None:
    for found in run_world(2, _ends, how, labels="ab"):
        # A connection inherited from the parent process may close meanwhile; none may be added.
        assert all(b <= a for a, b in pairwise(found)) and found[0][1] == 0, found


def _subgroups_end(rank: int, world_size: int) -> int:
    """Monitor threads that are left when three subgroups have ended before their tables."""
    kept = []
    for _ in range(3):
        group = dist.new_group(list(range(world_size)))
        kept.append(_sharded(group))
        _train_bag(kept[-1])
        dist.barrier()
        dist.destroy_process_group(group)
        dist.barrier()
    transport_of(ProcessGroup())  # the next transport closes those of groups that are gone
    with pytest.raises(OperError, match="connections='closed'"):
        _train_bag(kept[0])
    return _held()[1]


def test_a_destroyed_subgroup_leaves_no_connection() -> None:
    """Connections close even if tables are still open. Left: the transport of the whole group."""
    assert run_world(2, _subgroups_end, labels="ab") == [1, 1]


def _destroyed(rank: int, world_size: int, store: str) -> list[tuple[int, int]]:
    dist.destroy_process_group()
    found, kept = [], []
    for k in range(3):
        dist.init_process_group("gloo", init_method=f"file://{store}{k}", rank=rank,
                                world_size=world_size)
        kept.append(_sharded())
        _train_bag(kept[-1])
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
    _train_bag(first)
    if rank == 0:
        first.tables.close()
    dist.barrier()
    time.sleep(0.3)  # the announcement of rank 0 has arrived
    if rank == 1:
        with pytest.raises(PeerLostError, match="rank=0"):
            _train_bag(first)
    dist.barrier()
    second = _sharded()
    _train_bag(second)
    return second.state_dict()["weight"].full_tensor().flatten().tolist()


def test_ranks_that_close_at_different_times_shard_again() -> None:
    first, second = run_world(2, _one_closes, labels="ab")
    assert first == second


def _is_killed(rank: int, world_size: int) -> float:
    """Rank 0 forks a child, which runs on, and is killed; returns how long rank 1 waits for it."""
    model = _sharded()
    _train_bag(model)
    if rank == 0:
        if fork() == 0:
            time.sleep(8)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    with pytest.raises(PeerLostError, match="rank=0"):
        _train_bag(model)
    return time.monotonic() - begun


def test_a_killed_rank_is_detected_although_its_child_lives() -> None:
    with world(2, _is_killed, labels="ab") as running:
        assert running.receive(1) < 4


def _child_looks_up(rank: int, world_size: int) -> int:
    """Return the exit status of a forked child that looks up rows of another host."""
    model = _sharded()
    model.tables.migrate(uniform_plan(list(model.tables.specs.values()), world_size, "striped"))

    def look_up() -> None:
        with torch.no_grad(), pytest.raises(OperError, match="forked process cannot exchange"):
            _train_bag(model)

    status = child_of(look_up)
    _train_bag(model)  # the child has sent nothing
    return status


def test_a_forked_child_sends_nothing() -> None:
    assert run_world(2, _child_looks_up, labels="ab") == [0, 0]


def _looks_up_after_a_failure(rank: int, world_size: int) -> None:
    """Rank 1 refuses a batch in one collection; the ranks then look up in another one."""
    model = oper.shard(nn.ModuleDict({name: nn.EmbeddingBag(30, 4, mode="sum") for name in "ab"}),
                       optimizer=oper.SGD(lr=0.1))
    for module in model.values():
        module.tables.migrate(uniform_plan(list(module.tables.specs.values()), world_size,
                                           "striped"))
    with pytest.raises(OperError, match="id=71" if rank else "rank=1"):
        _train_bag(lambda ids: model["a"](ids + 70 * rank))
    if rank == 0:  # the exchange of the other rank's next lookup has begun
        time.sleep(0.2)
    for ids in (torch.tensor([[1, 2]]),) * 3 + (torch.zeros(1, 0, dtype=torch.int64),):
        with pytest.raises(PeerLostError, match="rank=1"):
            model["b"](ids)


def test_every_lookup_after_a_failure_names_the_rank_that_failed() -> None:
    run_world(2, _looks_up_after_a_failure, labels="ab")


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
