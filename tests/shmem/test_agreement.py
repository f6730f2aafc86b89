"""Ranks that construct other tables than rank 0 get an error; none reads or writes other rows."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from oper.errors import InvalidInputError, PeerLostError
from oper.plan import uniform_plan
from oper.shmem.group.agreement import errors_of_all
from oper.shmem.group.groups import ThreadGroup
from oper.shmem.optim.optimizers import SGD
from oper.shmem.tables import ShardedTables
from oper.tables import TableSpec
from tests.runtime_support import bags_of_one, read_all, run_ranks
from tests.support import pushed

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
        tables.close()

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
            with pytest.raises(PeerLostError, match="this rank has given up this exchange"):
                _train(tables)
        return str(caught.value)

    messages = run_ranks(3, body, domains=domains)
    assert wanted in messages[2] and wanted not in messages[0]


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
    def body(group: ThreadGroup) -> None:
        optimizers = {"first": SGD(lr=0.1), "second": SGD(lr=0.2)}
        tables = ShardedTables(uniform_plan(TABLES, 1, "striped"), FEATURES, group, optimizers)
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

    run_ranks(1, body)


@pytest.mark.parametrize("added", [
    {"lr": 0.1}, {"lr": 0.1, "params": []}, {"lr": 0.1, "tables": None},
    {"lr": 0.1, "tables": [1]}, {"lr": 0.1, "tables": ["first"]}], ids=str)
def test_a_group_that_is_not_the_tables_own_is_an_error_on_all_ranks(added: Any) -> None:
    def body(group: ThreadGroup) -> None:
        tables = ShardedTables(SAME, FEATURES, group, SGD(lr=0.1))
        before = _rows(tables)
        if group.rank:
            tables.param_groups.append(added)
        with pytest.raises(InvalidInputError if group.rank else PeerLostError,
                           match="each in one group" if group.rank else "peer"):
            _train(tables)
        assert torch.equal(_rows(tables), before)
        del tables.param_groups[1:]
        _train(tables)

    run_ranks(2, body)


@pytest.mark.parametrize("lr", [float("nan"), -0.1, float("inf"), None, torch.ones(2)])
def test_an_invalid_learning_rate_is_an_error_on_all_ranks(lr: Any) -> None:
    def body(group: ThreadGroup) -> None:
        tables = ShardedTables(SAME, FEATURES, group, SGD(lr=0.1))
        before = _rows(tables)
        if group.rank:
            _set_lr(tables, lr)
        with pytest.raises(InvalidInputError if group.rank else PeerLostError,
                           match=r"lr of tables \['first', 'second'\]" if group.rank else "peer"):
            _train(tables)
        _set_lr(tables, torch.tensor(0.2))
        assert torch.equal(_rows(tables), before)
        _train(tables)

    run_ranks(2, body)


@pytest.mark.parametrize("lr", [None, 10**400, torch.ones(2)], ids=["none", "huge", "tensor"])
def test_an_invalid_learning_rate_is_that_of_its_own_group(lr: Any) -> None:
    def body(group: ThreadGroup) -> None:
        optimizers = {"first": SGD(lr=0.1), "second": SGD(lr=0.2)}
        tables = ShardedTables(uniform_plan(TABLES, 1, "striped"), FEATURES, group, optimizers)
        tables.param_groups[1]["lr"] = lr
        with pytest.raises(InvalidInputError, match=r"lr of tables \['second'\]"):
            _train(tables)

    run_ranks(1, body)


def test_entries_that_only_one_rank_lacks_are_named() -> None:
    def body(group: ThreadGroup) -> list[str]:
        return errors_of_all(group, [f"t{k}" for k in range(20 + group.rank)], [])

    for (text,) in run_ranks(2, body):
        assert "missing only on rank 0 or 1=([], ['t20'])" in text
