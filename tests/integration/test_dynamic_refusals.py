"""Dynamic tables: what would be silently wrong is refused, and on all ranks alike."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import oper
from oper.errors import InvalidInputError
from oper.shmem.keys import row_seed
from tests.integration.test_dynamic_tables import ROWS, bag, keys_of, shard, step_of
from tests.key_oracle import first_row
from tests.world_support import run_world

ONE_ROW = oper.DynamicTable(init_bound=0.5)


def _train(model: Any, *keys: int) -> None:
    model(torch.tensor([list(keys)])).sum().backward()


def _late_on_rank_0(rank: int, world_size: int) -> tuple[list[str], int, torch.Tensor]:
    """Rank 0's gradient is for a row that has gone to another key."""
    model = shard(bag(2), ONE_ROW)
    _train(model, 1)
    late = model(torch.tensor([[1]]))
    _train(model, 2)
    told = []
    try:
        (late if rank == 0 else model(torch.tensor([[2]]))).sum().backward()
    except oper.OperError as error:
        told.append(str(error))
    _train(model, 2)
    return told, model.tables.num_steps, model.tables.read("weight")


def test_a_batch_that_one_rank_refuses_is_left_out_by_all() -> None:
    (mine, steps, rows), (theirs, their_steps, their_rows) = run_world(2, _late_on_rank_0)
    assert "lost their rows" in mine[0] and "rank" in theirs[0]
    assert steps == their_steps == 3
    assert torch.equal(rows, their_rows)


def test_a_key_keeps_the_row_that_its_lookup_has_read() -> None:
    """Seen again after exactly its time to live: the gradient counts, nothing is drawn anew."""
    model = shard(bag(3), oper.DynamicTable(time_to_live=1, init_bound=0.5),
                  optimizer=oper.SGD(lr=1.0))
    for key in (7, 8):
        _train(model, key)
    before = model(torch.tensor([[7]])).detach().clone()
    _train(model, 7)
    assert torch.equal(model(torch.tensor([[7]])), before - 1)
    assert model.tables.keys.counts("weight").expired == 0


def test_lookups_wait_for_an_update() -> None:
    """Between its keys and its rows a lookup would read the row of another key."""
    model = shard(bag())
    found: list[torch.Tensor] = []

    def look_up() -> None:
        with torch.no_grad():
            found.append(model(torch.tensor([[1]])))

    thread = threading.Thread(target=look_up)
    with model.tables.turns.lock:
        thread.start()
        thread.join(0.3)
        assert thread.is_alive() and not found
    thread.join(30)
    assert found


def test_tables_of_one_rule_begin_unlike() -> None:
    model = shard(nn.ModuleDict({"user": bag(), "item": bag()}), oper.DynamicTable(init_bound=0.5))
    key = torch.tensor([[7]])
    (model["user"](key).sum() + model["item"](key).sum()).backward()
    user, item = (model[name](key)[0].detach() for name in ("user", "item"))
    assert not torch.equal(user, item)
    names = [spec.name for name in ("user", "item") for spec in model[name].tables.specs.values()]
    for row, name in zip((user, item), names, strict=True):
        assert torch.equal(row, torch.from_numpy(first_row(7, row_seed(name, 0), row.numel(), 0.5)))


def test_a_checkpoint_with_keys_needs_a_table_with_keys(tmp_path: Path) -> None:
    model = shard(bag())
    step_of(model, 0)
    oper.save_checkpoint(tmp_path / "saved", model)
    plain = oper.shard(bag(), optimizer=oper.RowWiseAdagrad(lr=0.1))
    before = plain.weight.detach().clone()
    with pytest.raises(InvalidInputError, match="rows of a dynamic table: entries that the model"):
        oper.load_checkpoint(tmp_path / "saved", plain)
    at_once = shard(bag(), oper.DynamicTable(init_bound=0.5, seed=9))
    with pytest.raises(InvalidInputError, match="candidates"):
        oper.load_checkpoint(tmp_path / "saved", at_once)
    assert torch.equal(plain.weight, before)


def test_rows_are_loaded_with_their_keys_or_not_at_all() -> None:
    model, other = shard(bag()), shard(bag())
    for step in range(3):
        step_of(model, step)
    state, before = model.state_dict(), {k: v.clone() for k, v in other.state_dict().items()}
    spoiled = state["candidates"].clone()
    spoiled[0] = torch.tensor([1, 0, 1])
    for wrong, strict in (({"weight": state["weight"]}, False),
                          ({**state, "candidates": spoiled}, True)):
        with pytest.raises((InvalidInputError, RuntimeError), match="dynamic table"):
            other.load_state_dict(wrong, strict=strict)
        after = other.state_dict()
        assert all(torch.equal(after[name], value) for name, value in before.items())
    other.load_state_dict(state)
    assert torch.equal(other(keys_of(0)), model(keys_of(0)))


def test_statistics_of_keys_say_nothing_of_rows() -> None:
    counted = oper.stats.AccessStats(4, {"weight": oper.stats.TableStats(
        ROWS, head_ids=[1], head_counts=[9], tail_values=[0], tail_num_rows=[ROWS - 1],
        length_values=[9], length_counts=[1])})
    plans = [shard(bag(), stats=stats).tables.plan.tables for stats in (counted, None)]
    assert [p.pieces for p in plans[0]] == [p.pieces for p in plans[1]]


def test_bounds_are_numbers_of_rows() -> None:
    with pytest.raises(InvalidInputError, match="init_bound"):
        oper.DynamicTable(init_bound=1e39)
