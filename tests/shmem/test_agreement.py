"""Ranks that construct other tables or make other calls: all get an error that names one."""

import contextlib
import re
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import oper
from oper.errors import DeadlineError, DesyncError, InvalidInputError, OperError, PeerLostError
from oper.plan import Plan, uniform_plan
from oper.shmem.group.desync import CollectivePhase, Verdict, out_of_step
from oper.shmem.group.groups import SingleGroup, ThreadGroup
from oper.shmem.group.status import Status
from oper.shmem.optim.optimizers import SGD
from oper.shmem.tables import ShardedTables
from oper.tables import TableSpec
from tests.faults.pauses import timed
from tests.runtime_support import bags_of_one, read_all, run_ranks
from tests.support import pushed
from tests.world_support import report, run_world, world

# ---- ranks that construct other tables than rank 0 -----------------------------------------------

TABLES = [TableSpec(name, 30, 4, (name,), "sum", "float32", "sgd") for name in ("first", "second")]
FEATURES = [(t.name, t.name) for t in TABLES]
SAME = uniform_plan(TABLES, 2, "striped")
LARGER = [TABLES[0], replace(TABLES[1], num_rows=60)]
HEADS = (SAME.tables[0], replace(SAME.tables[1], head_ids=np.array([3, 1])))
DIFFERENT: dict[str, tuple[dict[str, Any], str]] = {
    "order of tables": ({"plan": uniform_plan(TABLES[::-1], 2, "striped")}, "table 0 .*second"),
    "rows": ({"plan": uniform_plan(LARGER, 2, "striped")}, "table 1 .*num_rows=60"),
    "placement": ({"plan": uniform_plan(TABLES, 2, "owned")}, "placement of table 0 .*owned"),
    "hottest rows": ({"plan": replace(SAME, tables=HEADS)}, "hottest ids of table 1 .*second"),
    "one table more": ({"plan": uniform_plan([*TABLES, replace(TABLES[0], name="third")], 2,
                                             "striped")}, "table 2 .*third"),
    "message bits": ({"plan": replace(SAME, message_bits=16)}, "message_bits .*16"),
    "order of features": ({"features": FEATURES[::-1]}, "feature 0 .*second"),
    "learning rate": ({"optimizers": SGD(lr=0.2)}, "optimizer 0 .*0.2"),
    "scale": ({"gradient_scale": 1.0}, "gradient_scale .*1.0")}


def _arguments(rank: int, name: str) -> dict[str, Any]:
    same = {"plan": SAME, "features": FEATURES, "optimizers": SGD(lr=0.1), "gradient_scale": 0.5}
    return same | (DIFFERENT[name][0] if rank else {})


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_that_differ_are_refused_on_all_ranks(name: str) -> None:
    def body(group: ThreadGroup) -> str:
        with pytest.raises(InvalidInputError, match=r"ranks \[1\] construct other") as caught:
            ShardedTables(group=group, **_arguments(group.rank, name))
        return str(caught.value)

    messages = run_ranks(2, body)
    wanted = DIFFERENT[name][1]
    assert re.search(wanted, messages[1]) and wanted.partition(" .*")[0] in messages[0]


def test_a_move_to_different_plans_is_refused_and_the_old_plan_stays() -> None:
    def body(group: ThreadGroup) -> None:
        tables = ShardedTables(SAME, FEATURES, group, SGD(lr=0.1))
        with pytest.raises(InvalidInputError, match="placement of table 0"):
            tables.migrate(uniform_plan(TABLES, 2, "owned" if group.rank else "replicated"))
        assert tables.plan is SAME and tables.migration is None

    run_ranks(2, body)


def _set_lr(tables: ShardedTables, lr: Any) -> None:
    tables.param_groups[0]["lr"] = lr


def _freeze(tables: ShardedTables, *names: str) -> None:
    tables.frozen = frozenset(names)


def _enter_no_sync(tables: ShardedTables) -> None:
    with tables.no_sync():
        pass


_BATCH = bags_of_one(torch.arange(4), 2)


def _train(tables: ShardedTables) -> None:
    tables.lookup(_BATCH).sum().backward()


def _rows(tables: ShardedTables) -> torch.Tensor:
    return torch.cat([*read_all(tables).values()])


@pytest.mark.parametrize(("change", "wanted"), [
    ((_set_lr, 0.2), "'lr': {'first, second': 0.2}"),
    ((_freeze, "second"), "'frozen': ['second']"),
    ((_freeze, "first", "second"), "'frozen': ['first', 'second']"),
    ((_enter_no_sync,), "'no_sync': True")],
    ids=["rate", "frozen", "all frozen", "no_sync"])
@pytest.mark.parametrize("domains", [None, [0, 0, 1]], ids=["one domain", "two domains"])
@pytest.mark.parametrize("pushes", [False, True], ids=["pulled", "pushed"])
def test_no_rank_updates_with_other_settings(domains: list[int] | None, pushes: bool, change: Any,
                                             wanted: str) -> None:
    plan = uniform_plan(TABLES, 3, "striped")
    plan = pushed(plan) if pushes else plan

    def body(group: ThreadGroup) -> str:
        tables = ShardedTables(plan, FEATURES, group, SGD(lr=0.1))
        _train(tables)
        before = None if domains else _rows(tables)
        if group.rank == 2:
            change[0](tables, *change[1:])
        with pytest.raises(InvalidInputError, match="rank 2 has other settings") as caught:
            _train(tables)
        if before is not None:  # with several domains, training ends here
            assert torch.equal(_rows(tables), before)
            tables.frozen = frozenset()
            _set_lr(tables, 0.2)
            _train(tables)
            assert not torch.equal(_rows(tables), before)
        else:
            with pytest.raises(PeerLostError, match="this rank has aborted this exchange"):
                _train(tables)
        return str(caught.value)

    messages = run_ranks(3, body, domains=domains)
    assert wanted in messages[2] and wanted not in messages[0]


def test_gradients_that_one_rank_cannot_add_up_end_the_update_of_all() -> None:
    """Rank 1 freezes a table between two passes of an update."""
    def body(group: ThreadGroup) -> str:
        tables = ShardedTables(SAME, FEATURES, group, SGD(lr=0.1))
        before = _rows(tables)
        with tables.no_sync():
            _train(tables)
        if group.rank:
            _freeze(tables, "second")
        with pytest.raises(OperError) as caught:
            _train(tables)
        assert torch.equal(_rows(tables), before)
        _freeze(tables)
        _train(tables)
        return str(caught.value)

    messages = run_ranks(2, body, timeout_s=30)
    assert "refused its batch" in messages[0] and "cannot add up gradients" in messages[1]


@pytest.mark.parametrize("accumulates", [False, True])
def test_a_batch_with_other_settings_trains_no_collection_of_the_model(accumulates: bool) -> None:
    """Only rank 1 has entered no_sync, with or without a pass. The next batch trains both."""
    def body(group: ThreadGroup) -> None:
        both = [ShardedTables(SAME, FEATURES, group, SGD(lr=0.1)) for _ in range(2)]
        both[0].family.update(both)
        both[1].family = both[0].family

        def train() -> None:
            sum(t.lookup(_BATCH).sum() for t in both).backward()

        before = _rows(both[0])
        if group.rank:
            with both[0].no_sync(), both[1].no_sync():
                if accumulates:
                    train()
        with pytest.raises(InvalidInputError, match="other settings"):
            train()
        assert all(torch.equal(_rows(t), before) for t in both)
        train()
        alone = ShardedTables(SAME, FEATURES, group, SGD(lr=0.1))
        _train(alone)
        assert all(torch.equal(_rows(t), _rows(alone)) for t in both)

    run_ranks(2, body)


def test_lookups_are_local_once_all_ranks_have_frozen_all_tables() -> None:
    def body(group: ThreadGroup) -> None:
        tables = ShardedTables(pushed(SAME), FEATURES, group, SGD(lr=0.1))
        before = _rows(tables)
        _freeze(tables, "first", "second")
        _train(tables)
        if group.rank:
            assert not tables.lookup(_BATCH).requires_grad
        _freeze(tables)
        assert torch.equal(_rows(tables), before)
        _train(tables)
        assert not torch.equal(_rows(tables), before)

    run_ranks(2, body)


def test_tables_follow_the_group_to_which_they_are_moved() -> None:
    tables = ShardedTables(uniform_plan(TABLES, 1, "striped"), FEATURES, SingleGroup(),
                           {"first": SGD(lr=0.1), "second": SGD(lr=0.2)})
    _train(tables)
    before = tables.read("first")
    slow, fast = tables.param_groups
    slow["tables"], fast["tables"] = [], ["first", "second"]
    _train(tables)
    assert torch.equal(tables.read("first")[:2], before[:2] - 0.2)
    slow["tables"].append("second")
    with pytest.raises(InvalidInputError, match=r"\['first', 'second'\], each in one group"):
        _train(tables)
    fast["tables"].remove("second")
    _train(tables)
    fast["lr"] = 10**400
    with pytest.raises(InvalidInputError, match=r"lr of tables \['first'\]"):
        _train(tables)


@pytest.mark.parametrize("spoiled, words", [
    *((lambda groups, added=added: [*groups, added], "each in one group") for added in (
        {"lr": 0.1}, {"lr": 0.1, "params": []}, {"lr": 0.1, "tables": None},
        {"lr": 0.1, "tables": [1]}, {"lr": 0.1, "tables": ["first"]})),
    *((lambda groups, lr=lr: [groups[0] | {"lr": lr}], r"lr of tables \['first', 'second'\]")
      for lr in (float("nan"), -0.1, float("inf"), None, torch.ones(2))),
    (lambda groups: [groups[0] | {"weight_decay": 0.5}], "weight_decay of table 'first'")])
def test_invalid_groups_of_parameters_are_an_error_on_all_ranks(spoiled: Any, words: str) -> None:
    def body(group: ThreadGroup) -> None:
        tables = ShardedTables(SAME, FEATURES, group, SGD(lr=0.1))
        before, groups = _rows(tables), [*tables.param_groups]
        if group.rank:
            tables.param_groups[:] = spoiled(groups)
        with pytest.raises(InvalidInputError if group.rank else PeerLostError,
                           match=words if group.rank else "peer"):
            _train(tables)
        assert torch.equal(_rows(tables), before)
        tables.param_groups[:] = groups
        _set_lr(tables, torch.tensor(0.2))
        _train(tables)

    run_ranks(2, body)


# ---- ranks that make different calls -------------------------------------------------------------

DEADLINE_S = 2.0
ENV = {"OPER_DEADLINE_S": str(DEADLINE_S)}
Found = dict[str, Any]
_HELD: list[nn.Module] = []


class Model(nn.Module):
    """A model with two collections."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.EmbeddingBag(60, 4, mode="sum")
        self.items = nn.EmbeddingBag(40, 8, mode="sum")


def _plan(world_size: int) -> Plan:
    return uniform_plan([TableSpec("users", 60, 4, ("users",), "sum", optimizer="sgd"),
                         TableSpec("items", 40, 8, ("items",), "sum", optimizer="sgd")],
                        world_size, "striped")


def _open(world_size: int, mode: str = "pull") -> Model:
    plan = _plan(world_size)
    model = oper.shard(Model(), plan=pushed(plan) if mode == "push" else plan,
                       optimizer=oper.SGD(lr=0.1))
    for name in ("users", "items"):  # warm, and all together
        _step(model, name)
    return model


def _step(model: Model, name: str) -> None:
    getattr(model, name)(torch.arange(20).reshape(5, 4)).sum().backward()


def _outcome(call: Any) -> Found:
    """The error that `call` raises, and the seconds until it was raised."""
    begin, found = time.monotonic(), {"kind": "", "text": "", "rank": None}
    try:
        call()
    except OperError as error:
        found = {"kind": type(error).__name__, "text": str(error),
                 "rank": getattr(error, "rank", None)}
    return found | {"time": time.monotonic() - begin}


def _when_all_know(found: Found) -> Found:
    """Keep this process alive until all ranks have raised their errors."""
    store, ranks = dist.distributed_c10d._get_default_store(), range(dist.get_world_size())
    store.set(f"knows {dist.get_rank()}", "")
    store.wait([f"knows {rank}" for rank in ranks])
    return found


def _check(found: list[Found], kind: type[OperError], rank: int, phase: str) -> None:
    """Check that all ranks name the same late rank and the phase in which others wait for it."""
    for who, one in enumerate(found):
        assert one["kind"] == kind.__name__, (who, one)
        assert one["rank"] == rank and f"rank={rank}," in one["text"], (who, one)
        assert f"the {phase}" in one["text"], (who, one)
        assert ("this rank" in one["text"]) == (who == rank), (who, one)


# ---- a rank skips a step -------------------------------------------------------------------------


def _skip(rank: int, world_size: int, mode: str, alone: bool) -> Found:
    """Rank 1 skips a step and returns after the other ranks have given up; if `alone`, after their
    processes have exited."""
    model = _open(world_size, mode)
    report("open")
    _HELD.append(model)  # a process that ends, not one that closes its tables before

    def go_on() -> None:
        for _ in range(3):
            _step(model, "users")
            _step(model, "items")

    if rank == 1:
        _step(model, "users")
        time.sleep(2.5 * DEADLINE_S)
    found = _outcome(go_on)
    assert _outcome(go_on)["kind"], "a broken exchange stays broken"
    return found if alone else _when_all_know(found)


# Domain of each rank, mode, and whether the others end; one after another, they would mostly wait.
SKIPS = {"two": [("aa", "pull", False), ("aa", "pull", True), ("aa", "push", False),
                 ("ab", "pull", False), ("aba", "pull", False)],
         "three": [("aaa", "pull", False), ("aab", "pull", False)]}


@pytest.mark.parametrize("worlds", SKIPS)
@timed
def test_a_rank_that_skips_a_step(worlds: str) -> None:
    with contextlib.ExitStack() as stack:
        running = []
        for labels, mode, alone in SKIPS[worlds]:
            running.append(stack.enter_context(world(
                len(labels), _skip, mode, alone, labels=labels, env=ENV)))
            for rank in range(len(labels)):
                assert running[-1].receive(rank) == "open"
        for (labels, mode, _), one in zip(SKIPS[worlds], running, strict=True):
            found = [one.receive(rank) for rank in range(len(labels))]
            is_pulled = mode == "pull" and len(set(labels)) == 1
            phase = "gradient exchange" if is_pulled else "forward lookup"
            _check(found, DeadlineError, 1, f"{phase} of collection 'items' (tables items)")
            assert "OPER_DEADLINE_S=2" in found[0]["text"]
            if is_pulled:
                assert found[0]["time"] < 2.4 * DEADLINE_S, "it waited for rank 1 to come back"


# ---- another order or phase ----------------------------------------------------------------------


def _differ(rank: int, world_size: int, what: str) -> Found:
    """Make a call that is another one on rank 1."""
    model = _open(world_size)
    tables: ShardedTables = model.users.tables
    names = ("items", "users") if rank == 1 else ("users", "items")

    def call() -> None:
        if what == "backward passes":
            outs = {name: getattr(model, name)(torch.arange(20).reshape(5, 4)).sum()
                    for name in ("users", "items")}
            for name in names:
                outs[name].backward()
        elif what == "steps":
            for name in names:
                _step(model, name)
        elif what == "state" and rank == 1:
            model.state_dict()
            tables.barrier()
        elif what == "closing" and rank == 1:
            tables.close()
        elif what == "migration" and rank == 0:
            tables.start_migration(Plan(world_size, _plan(world_size).tables[:1]))
        else:
            _step(model, "users")

    return _when_all_know(_outcome(call))


@pytest.mark.parametrize(("what", "labels", "deadline_s", "kind", "phase", "seen"), [
    *(("backward passes", labels, DEADLINE_S, DeadlineError, "gradient exchange",
       "it waits in the gradient exchange of collection 'items'") for labels in ("aa", "aaa")),
    *(("steps", labels, 60, DesyncError, "forward lookup", "") for labels in ("ab", "abc")),
    *(("state", labels, 60, DesyncError, "gradient exchange", "") for labels in ("aa", "aaa")),
    ("state", "ab", 3, DesyncError, "forward lookup", ""),
    ("state", "abb", 3, DeadlineError, "forward lookup", ""),  # it waits for its neighbour first
    ("migration", "aa", 60, DesyncError, "migration", "it was last seen in the gradient exchange")])
@timed
def test_a_rank_that_makes_another_call_is_named(
        what: str, labels: str, deadline_s: float, kind: type[OperError], phase: str, seen: str
        ) -> None:
    """Between ranks of different phases, nobody waits until the deadline."""
    found = run_world(len(labels), _differ, what, labels=labels,
                      env={"OPER_DEADLINE_S": str(deadline_s)})
    _check(found, kind, 1, f"{phase} of collection 'users' (tables users)")
    assert seen in found[0]["text"]
    assert deadline_s < 60 or all(one["time"] < 30 for one in found)


@timed
def test_a_rank_that_has_closed_its_tables_is_named() -> None:
    waited, _ = run_world(2, _differ, "closing", env={"OPER_DEADLINE_S": "60"})
    assert waited["kind"] == PeerLostError.__name__ and waited["rank"] == 1
    assert "has closed its tables" in waited["text"]
    assert "gradient exchange of collection 'users'" in waited["text"] and waited["time"] < 30


# ---- the verdict ---------------------------------------------------------------------------------


def test_the_rank_that_differs_from_most_is_named() -> None:
    a, b, c = CollectivePhase(1, 3), CollectivePhase(2, 3), CollectivePhase(1, 7)
    assert out_of_step(Status.PEER_LATE, [a, b], 0) == Verdict(Status.PEER_LATE, 1, a)
    assert out_of_step(Status.PEER_LATE, [a, b, b], 0) == Verdict(Status.PEER_LATE, 0, b)
    assert out_of_step(Status.PEER_LATE, [a, b, c], 0) == Verdict(Status.PEER_LATE, 1, a)
    assert out_of_step(Status.PEER_LATE, [a, b, c], 0, [5, 5, 4]) == Verdict(Status.PEER_LATE, 2, a)
    assert out_of_step(Status.PEER_LATE, [a, a], 1) == Verdict(Status.PEER_LATE, 1, a)
