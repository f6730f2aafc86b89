"""Processes that are treated as if on several hosts: the same results; connections that end."""

import gc
import os
import signal
import threading
import time
import warnings
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import oper
from oper.errors import OperError, PeerLostError
from oper.plan import Piece, Plan, TablePlan, Tier, uniform_plan
from oper.rows.traffic import SENT
from oper.search.replay.wire import WireReplay
from oper.shmem.group.domains import find_domains
from oper.shmem.group.groups import ProcessGroup
from oper.shmem.group.transport import transport_of
from oper.shmem.tables import ShardedTables
from oper.tables import TableSpec
from tests import random_plans as rp, runtime_support as rs
from tests.shmem.test_traffic import as_bags
from tests.world_support import child_of, fork, run_world, world

CASE = rs.dlrm_case()


def _train(rank: int, world_size: int, case: rs.Case, plan: Plan,
           steps: list[list[rs.Batch]]) -> tuple[list[int], rs.Result]:
    group = ProcessGroup()
    found = find_domains(group)
    return found, rs.train_rank(case, plan, steps, rs.OPTIMIZERS["rowwise_adagrad"], group)


@pytest.mark.parametrize("labels, domains", [
    ("ab", [0, 1]), ("aabb", [0, 0, 1, 1]), ("abbb", [0, 1, 1, 1]), ("abcd", [0, 1, 2, 3])])
def test_processes_equal_one_domain(labels: str, domains: list[int]) -> None:
    steps = rs.make_steps(CASE, len(labels), 6)
    plan = rp.rich_plan(CASE.tables, len(labels), 1, columns=True)
    ranks = run_world(len(labels), _train, CASE, plan, steps, labels=labels)
    assert all(found == domains for found, _ in ranks)
    rs.same_bits(rs.merge_ranks([result for _, result in ranks]),
                 rs.train_virtual(CASE, plan, steps, rs.OPTIMIZERS["rowwise_adagrad"]),
                 replicas=True)


def _exchanged(rank: int, world_size: int) -> list[list[int]]:
    """The bytes received from each sender; s receives 3 r + s bytes of value 16 r + s from r."""
    transport = transport_of(ProcessGroup())
    there = [0 if (rank, s) == (2, 0) else 3 * rank + s for s in range(world_size)]
    back = [0 if (r, rank) == (2, 0) else 3 * r + rank for r in range(world_size)]
    send = torch.cat([torch.full((n,), 16 * rank + s, dtype=torch.uint8)
                      for s, n in enumerate(there)])
    recv = torch.zeros(sum(back), dtype=torch.uint8)
    for _ in range(2):
        transport.exchange(send, there, recv, back)
    return [part.tolist() for part in recv.split(back)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_segment_arrives(world_size: int) -> None:
    for rank, found in enumerate(run_world(world_size, _exchanged)):
        assert found == [[16 * r + rank] * (0 if (r, rank) == (2, 0) else 3 * r + rank)
                         for r in range(world_size)]


def _train_and_move(rank: int, world_size: int, plans: tuple[Plan, Plan],
                    steps: list[list[rs.Batch]]) -> tuple[int, rs.Result]:
    switched: list[int] = []

    def between(tables: ShardedTables, step: int) -> None:
        if step == 1:
            tables.start_migration(plans[1], 3_000_000)
        elif step > 1 and tables.migration is None:
            switched.append(step)

    result = rs.train_rank(CASE, plans[0], steps, rs.OPTIMIZERS["rowwise_adagrad"], ProcessGroup(),
                           between)
    return switched[0], result


@pytest.mark.parametrize("labels", ["ab", "aab"])
def test_a_move_between_hosts_changes_no_bit(labels: str) -> None:
    """Rows and optimizer states move to another plan over gloo while the tables are trained."""
    steps = rs.make_steps(CASE, len(labels), 8)
    plans = rp.mixed_plan(CASE.tables, len(labels), 0), uniform_plan(CASE.tables, len(labels))
    ranks = run_world(len(labels), _train_and_move, plans, steps, labels=labels)
    assert len({step for step, _ in ranks}) == 1 and 2 < ranks[0][0] < 8, ranks[0][0]
    rs.same_bits(rs.merge_ranks([result for _, result in ranks]),
                 rs.train_virtual(CASE, plans[0], steps, rs.OPTIMIZERS["rowwise_adagrad"]))


# Rows of one width, pulled and pushed: then the bytes of messages shrink by one factor.
WIDE = rs.Case(tuple(TableSpec(n, r, 64, (f"f_{n}",), p, optimizer="rowwise_adagrad")
                     for n, r, p in (("pulled", 900, "sum"), ("pushed", 300, "mean"))),
               ("f_pushed", "f_pulled"))


def _train_and_count(rank: int, world_size: int, plan: Plan,
                     steps: list[list[rs.Batch]]) -> tuple[dict[str, list[int]], list[float], Any]:
    """Train; returns bytes by kind and receiver, the losses, and all rows at the end."""
    torch.manual_seed(5)
    tables = rs.open_tables(WIDE, plan, ProcessGroup(), rs.OPTIMIZERS["rowwise_adagrad"])
    tables.sent_bytes(reset=True)
    losses = []
    for batches in steps:
        batch = batches[rank]
        loss = rs.rank_loss(tables.lookup(batch.lookup(WIDE)), batch.target)
        loss.backward()
        losses.append(float(loss))
    sent = tables.sent_bytes()
    rows = {t.name: tables.read(t.name).numpy() for t in WIDE.tables}
    tables.barrier()
    tables.close()
    return sent, losses, rows


@pytest.mark.parametrize("labels", ["ab", "aabb"])
def test_bytes_between_hosts_follow_message_bits(labels: str) -> None:
    """Bytes equal counts and replay; losses are close to exact ones; a second run is equal."""
    size = len(labels)
    steps = rs.make_steps(WIDE, size, 5)
    tiers = {"pulled": "pull", "pushed": "push"}
    plan = Plan(size, tuple(TablePlan(t, (Piece(0, 64, (
        Tier(0, 20, "replicated", tuple(range(size))),
        Tier(20, t.num_rows, "striped", tuple(range(size)), mode=tiers[t.name]))),))
        for t in WIDE.tables))
    exact, eight, again, mixed = (
        run_world(size, _train_and_count, replace(plan, message_bits=bits), steps, labels=labels)
        for bits in (32, 8, 8, (16, 8)))
    domains = [labels.index(x) for x in labels]
    for bits, found in ((32, exact), (8, eight), ((16, 8), mixed)):
        replay = WireReplay(replace(plan, message_bits=bits), domains, training=True)
        total = sum(replay.step([as_bags(WIDE, b) for b in batches]) for batches in steps)
        for k, kind in enumerate(SENT):
            assert np.array_equal(total[k], [sent[kind] for sent, _, _ in found]), kind
    for (a, losses, _), (b, near, rows), (_, same, same_rows) in zip(exact, eight, again,
                                                                     strict=True):
        for kind in ("rows", "partial_sums", "bag_gradients"):
            assert sum(a[kind]) * 72 == sum(b[kind]) * 256 > 0, kind
        num_rows, rest = divmod(sum(a["gradient_rows"]) - sum(b["gradient_rows"]), 256 - 72)
        assert rest == 0 and 256 < sum(a["gradient_rows"]) / num_rows < 260  # and slots
        for kind in ("headers", "row_ids", "ids", "refreshed_rows"):
            assert a[kind] == b[kind], kind
        assert near == pytest.approx(losses, rel=0.01)
        assert near == same
        assert all(np.array_equal(rows[n].view(np.int32), same_rows[n].view(np.int32))
                   for n in rows)


def _shard(rank: int, world_size: int, message_bits: Any, **given: Any) -> tuple[Any, str]:
    """Shard on two hosts with `message_bits` by rank; returns the plan's bits, or the error."""
    bag = torch.nn.EmbeddingBag(500, 16, mode="sum")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there are no statistics
            sharded = oper.shard(bag, optimizer=oper.SGD(lr=0.1), message_bits=message_bits[rank],
                                 **given)
    except oper.InvalidInputError as error:
        return [], str(error)
    sharded(torch.arange(12).reshape(3, 4)).sum().backward()
    tables = sharded.tables
    tables.barrier()
    return tables.plan.message_bits.to_json(), ""


def _shard_within(rank: int, world_size: int) -> list[Any]:
    """The bits of a plan that is made under a generous budget, and of a given plan."""
    given = Plan(2, (TablePlan(TableSpec("weight", 500, 16, ("weight",), "sum", optimizer="sgd"), (
        Piece(0, 16, (Tier(0, 500, "striped", (0, 1)),)),)),), message_bits=16)
    return [_shard(rank, world_size, [None, None], message_variance=1.0, plan=plan)
            for plan in (None, given)]


def test_shard_chooses_bits_within_a_budget() -> None:
    chosen, kept = zip(*run_world(2, _shard_within, labels="ab"), strict=True)
    assert chosen == (({"weight": [32, 4]}, ""),) * 2  # all rows are replicated
    assert kept == (([16, 16], ""),) * 2


def test_shard_refuses_message_bits_that_differ_between_ranks() -> None:
    assert run_world(2, _shard, [8, 8], labels="ab") == [([8, 8], "")] * 2
    assert run_world(2, _shard, [(16, 8), (16, 8)], labels="ab") == [([16, 8], "")] * 2
    assert run_world(2, _shard, [None, None], labels="ab") == [([32, 32], "")] * 2
    refused = run_world(2, _shard, [8, (8, 16)], labels="ab")
    for (_, message), mine in zip(refused, ("8, 8", "8, 16"), strict=True):
        assert f"message_bits on this rank=[{mine}]" in message


# ---- connections close with their tables or their process group, not before ----------------------

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


def _train_bag(model: Any) -> None:
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
        _train_bag(model)
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
            _train_bag(kept[0])
    found.append(_held())
    return found


@pytest.mark.parametrize("how", ["close", "collect"])
def test_closed_tables_leave_no_connection(how: str) -> None:
    for found in run_world(2, _ends, how, labels="ab"):
        # A connection inherited from the parent process may close meanwhile; none may be added.
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
