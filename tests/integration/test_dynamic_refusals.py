"""Dynamic tables: operations with silently wrong results raise the same error on all ranks."""

import itertools
import resource
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import oper
from oper.errors import InvalidInputError
from oper.integration.checkpoint import key_state
from oper.plan import Piece, Plan, TablePlan, Tier
from oper.shmem.keys.directories import row_seed
from tests.integration.test_dynamic_tables import DIM, ROWS, bag, keys_of, shard, step_of
from tests.references import first_row
from tests.world_support import caught, run_world

ONE_ROW = oper.DynamicTable(init_bound=0.5)


def _train(model: Any, *keys: int) -> None:
    model(torch.tensor([list(keys)])).sum().backward()


def _late_on_rank_0(rank: int, world_size: int) -> tuple[list[str], int, torch.Tensor]:
    """Rank 0's gradient is for a row that has been given to another key."""
    model = shard(bag(2), ONE_ROW)
    _train(model, 1)
    late = model(torch.tensor([[1]]))
    _train(model, 2)
    with caught() as messages:
        (late if rank == 0 else model(torch.tensor([[2]]))).sum().backward()
    _train(model, 2)
    return messages, model.tables.num_steps, model.tables.read("weight")


def test_a_batch_that_one_rank_refuses_is_skipped_by_all() -> None:
    (mine, steps, rows), (theirs, their_steps, their_rows) = run_world(2, _late_on_rank_0)
    assert "lost their rows" in mine[0] and "rank" in theirs[0]
    assert steps == their_steps == 3
    assert torch.equal(rows, their_rows)


def test_a_key_keeps_the_row_that_its_lookup_has_read() -> None:
    """A key seen again after exactly its time to live keeps its row and gets its gradient."""
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


def test_tables_with_equal_settings_have_different_new_rows() -> None:
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


def test_rows_are_loaded_with_their_keys_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_state, "CHUNK_RECORDS", 2)
    model, other = shard(bag()), shard(bag())
    for step in range(3):
        step_of(model, step)
    state, before = model.state_dict(), {k: v.clone() for k, v in other.state_dict().items()}
    spoiled = state["candidates"].clone()
    spoiled[0] = torch.tensor([1, 0, 1])
    twice = state["keys"].clone()
    twice[-1] = twice[torch.where(twice[:, 2] >= 0)[0][0]]  # in another chunk
    for wrong, strict in (({"weight": state["weight"]}, False),
                          ({**state, "candidates": spoiled}, True),
                          ({**state, "keys": twice}, True)):
        with pytest.raises((InvalidInputError, RuntimeError), match="dynamic table"):
            other.load_state_dict(wrong, strict=strict)
        after = other.state_dict()
        assert all(torch.equal(after[name], value) for name, value in before.items())
    other.load_state_dict(state)
    assert torch.equal(other(keys_of(0)), model(keys_of(0)))


def test_plans_from_key_statistics_have_no_hot_rows() -> None:
    """Hot keys may have any row: a plan states only the default row and the numbers of rows by
    hotness."""
    counted = oper.stats.AccessStats(100, {"weight": oper.stats.TableStats(
        9, head_ids=[7], head_counts=[500], tail_values=[0, 1], tail_num_rows=[2, 6],
        length_values=[5], length_counts=[100])})
    (entry,) = shard(bag(), oper.DynamicTable(), stats=counted).tables.plan.tables
    assert entry.table.num_rows == ROWS and set(entry.head_ids.tolist()) <= {0}


def _no_memory(rank: int, world_size: int) -> int:
    """The rows fit in memory, but the directory does not."""
    module, keys = nn.EmbeddingBag(1_000_001, 4, mode="sum"), torch.tensor([[5, 6], [5, -7]])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (36 << 20, before[1]))
    with pytest.raises(oper.OperError, match="RLIMIT_FSIZE"):
        shard(module, oper.DynamicTable())
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    model = shard(module, oper.DynamicTable())
    model(keys).sum().backward()
    return model.tables.keys.counts("weight").occupied


@pytest.mark.parametrize("world_size", [1, 2])
def test_no_memory_for_the_directory(world_size: int) -> None:
    """All ranks raise the error, and the module is unchanged."""
    found = run_world(world_size, _no_memory, env={"OPER_SEND_BUFFER_BYTES": "65536"})
    assert found == [3] * world_size


def _one_row(rank: int, world_size: int) -> tuple[list[int], list[int]]:
    """A table with one row: a key per rank, then the same key on both, then many new keys."""
    model = shard(bag(2), ONE_ROW)
    _train(model, 10 + rank)
    _train(model, *[99] * 500)
    _train(model, *range(1000 + 500 * rank, 1500 + 500 * rank))
    (record,) = model.tables.keys.read("weight", "keys", 0, 1).tolist()
    c = model.tables.keys.counts("weight")
    return record, [c.occupied, c.admitted, c.evicted, c.refused]


def test_a_table_of_one_row_on_many_ranks() -> None:
    for world_size in (1, 2):
        found = run_world(world_size, _one_row)
        assert all(x == found[0] for x in found)
        (key, count, clock), (occupied, admitted, evicted, refused) = found[0]
        assert 1000 <= key < 2000 and (count, clock, occupied) == (1, 3, 1)
        # In the first update a key of another rank gets no row, in the last 500 a rank want one.
        assert [admitted, evicted] == [3, 2] and refused == world_size * 501 - 2


def test_a_key_that_lost_and_regained_its_row() -> None:
    """A key lost its row and got the same row again: the gradient is for the earlier assignment."""
    model = shard(bag(2), ONE_ROW)
    _train(model, 1)
    late = model(torch.tensor([[1]]))
    _train(model, 2)
    _train(model, 1)
    before = model.weight.detach().clone()
    with pytest.raises(InvalidInputError, match=r"have lost their rows since the lookup=\[1\]"):
        late.sum().backward()
    assert torch.equal(model.weight.detach(), before)
    _train(model, 1)


def test_an_expired_key_has_lost_its_row() -> None:
    """A key seen again after its time to live has no row until it is admitted again."""
    model = shard(bag(3), oper.DynamicTable(time_to_live=1, admit_after=2))
    _train(model, 7, 7)
    keys = torch.tensor([[8, 7]])
    late = model(keys)
    for key in (8, 8, 7):
        _train(model, key)
    keys.fill_(5)  # so the error can only name the row
    with pytest.raises(InvalidInputError, match=r"rows that keys have lost .*=\[1\]"):
        late.sum().backward()


def test_gradients_of_lookups_before_a_load_are_refused() -> None:
    model = shard(bag(3), oper.DynamicTable())
    _train(model, 1)
    state = model.state_dict()
    late = model(torch.tensor([[1]]))
    model.load_state_dict(state)
    with pytest.raises(InvalidInputError, match="loaded since the lookup"):
        late.sum().backward()
    _train(model, 1)


def test_backward_passes_of_earlier_lookups() -> None:
    """Backward passes of earlier lookups are allowed while their rows belong to the same keys."""
    model = shard(bag(4), oper.DynamicTable())
    _train(model, 1, 2)
    waiting = [model(torch.tensor([[1]])) for _ in range(5)]
    for out in waiting:
        _train(model, 2)
        out.sum().backward()
    assert model.tables.keys.clock("weight") == 11
    assert model.state_dict()["keys"][:, 1].tolist() == [6, 6, 0]
    del waiting, out
    for key in (3, 3):  # the third row, for which no key waits afterwards
        _train(model, key)
    assert not model.tables.keys._history._updates


def test_the_row_history_is_recorded_only_if_needed() -> None:
    """Steps with one lookup each do not pay for the record of which rows have other keys."""
    model = shard(bag(4), oper.DynamicTable())
    history = model.tables.keys._history
    read, reads = history._last, []
    history._last = lambda: reads.append(history.num_updates) or read()
    for key in range(5):
        _train(model, key)
    late = model(torch.tensor([[4]]))
    _train(model, 4, 5)
    assert not reads
    _train(model, 4)
    late.sum().backward()
    assert reads == [6, 7]


def test_tables_with_equal_settings_admit_different_keys() -> None:
    rule = oper.DynamicTable(admit_probability=0.5)
    model = shard(nn.ModuleDict({"user": bag(200), "item": bag(200)}), rule)
    keys = torch.arange(60)[None]
    (model["user"](keys).sum() + model["item"](keys).sum()).backward()
    admitted = []
    for module in (model["user"], model["item"]):
        records = module.state_dict()["keys"]
        admitted.append(set(records[records[:, 2] >= 0, 0].tolist()))
        assert 10 < len(admitted[-1]) < 50
    assert admitted[0] != admitted[1]


def _begin(rank: int, world_size: int, dtype: str) -> Any:
    """New keys replace others under a plan with column shards, owners and replicas."""
    make = nn.EmbeddingBag(ROWS, DIM, mode="sum", dtype=getattr(torch, dtype))
    (spec,) = (t.table for t in shard(make).tables.plan.tables)
    ranks = tuple(range(world_size))
    narrow = (Tier(0, 10, "owned", ranks[-1:]), Tier(10, ROWS, "replicated", ranks))
    plan = Plan(world_size, (TablePlan(spec, (
        Piece(0, 3, narrow), Piece(3, DIM, (Tier(0, ROWS, "striped", ranks),)))),))
    model = shard(make, ONE_ROW, plan=plan,
                  optimizer=oper.RowWiseAdagrad(lr=0.1, initial_accumulator_value=0.25))
    for first in (0, 0, 500):
        _train(model, *range(first, first + ROWS - 1))
    records = model.state_dict()["keys"]
    records = records.full_tensor() if hasattr(records, "full_tensor") else records
    with torch.no_grad():  # through replicas
        seen = model(torch.arange(500, 500 + ROWS - 1)[:, None])
    tables = model.tables
    return records, tables.read("weight"), tables.read("weight", part="momentum1"), seen


def _begin_each(rank: int, world_size: int) -> list[Any]:
    return [_begin(rank, world_size, x) for x in ("float32", "float16", "bfloat16")]


@pytest.mark.parametrize("world_size", [1, 2])
def test_new_rows_are_initialised_under_any_plan(world_size: int) -> None:
    for records, rows, state, seen in itertools.chain(*run_world(world_size, _begin_each)):
        assert records[:, 2].tolist() == [3] * (ROWS - 1)
        for slot, key in enumerate(records[:, 0].tolist()):
            want = torch.from_numpy(first_row(key, row_seed("weight", 0), DIM, 0.5)).to(rows.dtype)
            assert torch.equal(rows[slot + 1], want), key
            assert torch.equal(seen[key - 500], want.float()), key
        assert state[1:].tolist() == [0.25] * (ROWS - 1) and state[0] > 0.25
