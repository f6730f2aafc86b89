"""Dynamic tables in deltas and on several hosts: every bit is that of one host's run."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import oper
from oper.errors import FileFormatError
from oper.integration.checkpoint.delta_files import find, read_part
from oper.integration.checkpoint.deltas import DeltaCheckpoints
from oper.plan import Piece, Plan, TablePlan, Tier, uniform_plan
from oper.shmem.keys.across import Seen, pack, unpack
from oper.support.files import write_arrays
from tests.integration.test_dynamic_tables import (
    DIM,
    ROWS,
    RULES,
    STEPS,
    bag,
    keys_of,
    records,
    shard,
    step_of,
)
from tests.runtime_support import assert_bitwise
from tests.world_support import caught, run_world

FULL = 3  # step after which the full checkpoint is saved


def state_of(model: Any) -> list[torch.Tensor]:
    """Rows, optimizer states, records of keys and candidates, clock: all that resuming needs."""
    return [model.tables.read("weight"), model.tables.read("weight", part="momentum1"),
            records(model), torch.tensor([model.tables.keys.clock("weight")])]


def saved_run(rank: int, world_size: int, folder: str, rule: int, every: int, steps: int
              ) -> list[torch.Tensor]:
    """A full checkpoint after step `FULL`, and a delta after each `every` further steps."""
    model = shard(bag(), RULES[rule])
    with DeltaCheckpoints(folder, model, memory_bytes=4000) as saver:
        for step in range(1, steps + 1):
            step_of(model, step, rank, world_size)
            if step == FULL:
                saver.save_full(step, {"step": step})
            elif step > FULL and (step - FULL) % every == 0:
                saver.save(step, {"step": step})
        saver.flush()
    return state_of(model)


def loaded(rank: int, world_size: int, folder: str, rule: int, steps: range) -> list[torch.Tensor]:
    """The state after loading, and after further steps with a delta each."""
    model = shard(bag(), RULES[rule])
    with DeltaCheckpoints(folder, model) as saver:
        found = saver.load()
        assert found.is_exact and found.step == steps.start - 1, found
        for step in steps:
            step_of(model, step, rank, world_size)
            saver.save(step, {"step": step})
        saver.flush()
    return state_of(model)



@pytest.mark.parametrize("world_size, rule, every", [(1, 1, 3), (2, 0, 1)])
def test_a_chain_restores_the_run(world_size: int, rule: int, every: int, tmp_path: Path) -> None:
    """The state is restored on the same ranks, on another number of ranks, and after more steps."""
    folder = str(tmp_path / "c")
    (held, *_) = run_world(world_size, saved_run, folder, rule, every, STEPS)
    chain = find(tmp_path / "c", tmp_path / "c")
    assert len(chain) == (STEPS - FULL) // every
    parts = [read_part(p) for d in chain for files in d.files.values() for p in files]
    kinds = {item[3][0] for _, meta in parts for item in meta["items"]}
    assert kinds == {"rows", "keys"} | ({"candidates"} if RULES[rule].admit_after > 1 else set())
    for other in (world_size, 3 - world_size):
        (found, *_) = run_world(other, loaded, folder, rule, range(STEPS + 1, STEPS + 1))
        assert_bitwise(found, held, f"on {other}")
    (went_on, *_) = run_world(world_size, loaded, folder, rule, range(STEPS + 1, STEPS + 4))
    (again, *_) = run_world(world_size, loaded, folder, rule, range(STEPS + 4, STEPS + 4))
    (through, *_) = run_world(world_size, saved_run, str(tmp_path / "d"), rule, every, STEPS + 3)
    assert_bitwise(again, went_on, "again")
    assert_bitwise(went_on, through, "as without a break")


def one_key(model: Any, *keys: int) -> None:
    model(torch.tensor([keys])).sum().backward()


def test_deltas_delete_lost_keys(tmp_path: Path) -> None:
    """A key that another one replaces, one that outlives its time to live, and a counted key that
    gets a row."""
    model = shard(bag(3), oper.DynamicTable(time_to_live=2))
    with DeltaCheckpoints(tmp_path / "c", model) as saver:
        one_key(model, 1, 2)
        saver.save_full(0)
        for step in range(1, 4):
            one_key(model, 2, 2)  # for key 1, the time is over after the third update
            saver.save(step)
        one_key(model, 3, 2)  # gets the row of key 1
        saver.save(4)
        saver.flush()
        found = [dict(zip([item[3][0] for item in meta["items"]], range(9), strict=False)) | {
            "arrays": arrays} for d in find(tmp_path / "c", tmp_path / "c")
            for arrays, meta in [read_part(d.files[0][0])]]
        expired = [f["arrays"][f"{f['expired']}.slots"].tolist() if "expired" in f else []
                   for f in found]
        keys = [f["arrays"][f"{f['keys']}.keys"].tolist() for f in found]
        (slot,) = expired[2]
        assert expired == [[], [], [slot], []] and keys[:3] == [[2]] * 3
        assert sorted(keys[3]) == [2, 3]
        want = state_of(model)
        saver.load()
        assert_bitwise(state_of(model), want, "loaded")


def test_a_chain_ends_when_the_time_to_live_changes(tmp_path: Path) -> None:
    """Readers of the chain have dropped the expired key 1. It returns with a full checkpoint."""
    def saved(rule: oper.DynamicTable, num: int) -> int:
        model = shard(bag(3), rule)
        with DeltaCheckpoints(tmp_path / "c", model) as saver:
            saver.load()
            one_key(model, 2)
            saver.save(num, {"step": num})
        return len(find(tmp_path / "c", tmp_path / "c"))

    model = shard(bag(3), oper.DynamicTable(time_to_live=1))
    with DeltaCheckpoints(tmp_path / "c", model) as saver:
        one_key(model, 1, 2)
        saver.save_full(0)
        one_key(model, 2)
        one_key(model, 2)
        saver.save(1, {"step": 1})
    assert [saved(oper.DynamicTable(time_to_live=t), k) for k, t in enumerate((1, 9, 9, None), 2)
            ] == [2, 0, 1, 0]
    oper.save_checkpoint(tmp_path / "c", model)  # which does not state the time to live
    assert [saved(oper.DynamicTable(time_to_live=1), k) for k in (6, 7)] == [0, 1]


def test_deltas_free_slots(tmp_path: Path) -> None:
    """A key evicted after `time_to_live` that returns is counted anew before it gets a row."""
    model = shard(bag(5), oper.DynamicTable(admit_after=2, time_to_live=2))
    with DeltaCheckpoints(tmp_path / "c", model) as saver:
        one_key(model, 1, 1, 2, 2)
        saver.save_full(0)
        for _ in range(3):
            one_key(model, 2)
        saver.save(1)
        one_key(model, 1)
        saver.save(2)
        saver.flush()
        *_, last = find(tmp_path / "c", tmp_path / "c")
        arrays, meta = read_part(last.files[0][0])
        of = {item[3][0]: k for k, item in enumerate(meta["items"])}
        assert arrays[f"{of['keys']}.seen"][:, 1].tolist() == [2**32 - 1]
        assert arrays[f"{of['candidates']}.keys"].tolist() == [1]
        want = state_of(model)
        saver.load()
        assert_bitwise(state_of(model), want, "loaded")


def test_deltas_have_new_rows_that_no_update_touched(tmp_path: Path) -> None:
    """A new key's row is initialised after its first update, which does not touch the row."""
    model = shard(bag(20), oper.DynamicTable(init_bound=0.5))
    with DeltaCheckpoints(tmp_path / "c", model) as saver:
        saver.save_full(0)
        one_key(model, 7)
        saver.save(1)
        saver.flush()
        want = state_of(model)
        one_key(model, 7)
        saver.load()
        assert_bitwise(state_of(model), want, "loaded")
        assert saver.written_bytes < 10_000


@pytest.mark.parametrize("harm", ["bucket", "number", "width", "static", "twice", "clock"])
def test_keys_that_do_not_fit_are_refused(harm: str, tmp_path: Path) -> None:
    """Intact files whose records cannot belong to the table."""
    folder = tmp_path / "c"
    model = shard(bag(301), oper.DynamicTable())
    with DeltaCheckpoints(folder, model) as saver:
        one_key(model, 1 << 40)
        saver.save_full(0)
        one_key(model, *range(40))
        saver.save(1)
        saver.flush()
    held = torch.where(model.state_dict()["keys"][:, 0] == 1 << 40)[0]
    path = find(folder, folder)[0].files[0][0]
    arrays, meta = read_part(path)
    (k,) = (k for k, item in enumerate(meta["items"]) if item[3] == ["keys"])
    if harm == "bucket":
        arrays[f"{k}.keys"] = arrays[f"{k}.keys"][::-1].copy()
    elif harm == "number":
        arrays[f"{k}.slots"][-1] = 300
    elif harm == "width":
        arrays[f"{k}.seen"] = arrays[f"{k}.seen"][:, :1].copy()
    elif harm == "twice":  # a key of the checkpoint, which the delta does not list
        slots = arrays[f"{k}.slots"]
        arrays[f"{k}.keys"][np.abs(slots.astype(int) - int(held)).argmin()] = 1 << 40
    elif harm == "clock":
        arrays[f"{k}.seen"][0, 1] = 3
    else:
        meta["items"][k][1] = "other"
    meta = {name: value for name, value in meta.items() if name not in ("kind", "version")}
    write_arrays(path, "oper-delta", 1, arrays, meta)
    pattern = "do not fit its checkpoint" if harm in ("twice", "clock") else (
        "cannot load a delta checkpoint")
    with pytest.raises(FileFormatError, match=pattern), DeltaCheckpoints(folder, model) as saver:
        saver.load()


def test_deltas_of_keys_are_small(tmp_path: Path) -> None:
    """One key in a hundred, with its count and clock, at most three hundredths of the bytes."""
    num_rows = 20_000
    torch.manual_seed(0)
    model = shard(torch.nn.EmbeddingBag(num_rows, 64, mode="sum"), oper.DynamicTable())
    keys = torch.from_numpy(np.random.default_rng(0).integers(-2**62, 2**62, 10_000))
    model(keys.view(-1, 10)).sum().backward()
    with DeltaCheckpoints(tmp_path / "c", model) as saver:
        saver.save_full(0)
        full = sum(p.stat().st_size for p in (tmp_path / "c").iterdir())
        model(keys[:num_rows // 100].view(-1, 10)).sum().backward()
        saver.save(1)
        saver.flush()
        assert 0.008 < saver.written_bytes / full < 0.02


# ---- several hosts -------------------------------------------------------------------------------


def plan_of(world_size: int, placement: str) -> Plan:
    (spec,) = (t.table for t in shard(bag()).tables.plan.tables)
    if placement != "mixed":
        return uniform_plan([spec], world_size, placement)
    ranks = tuple(range(world_size))
    tiers = (Tier(0, 10, "owned", ranks[-1:]), Tier(10, 20, "striped", ranks, mode="push"),
             Tier(20, ROWS, "replicated", ranks))
    return Plan(world_size, (TablePlan(spec, (
        Piece(0, 3, tiers), Piece(3, DIM, (Tier(0, ROWS, "striped", ranks),)))),))


def _train(rank: int, world_size: int, rule: int, placement: str) -> Any:
    model = shard(bag(), RULES[rule], plan=plan_of(world_size, placement))
    outputs = [step_of(model, step, rank, world_size) for step in range(STEPS)]
    with torch.no_grad():
        seen = model(keys_of(STEPS))
    tables = model.tables
    counts = tables.keys.counts("weight")
    return [torch.stack(outputs), records(model), tables.read("weight"),
            tables.read("weight", part="momentum1"), torch.tensor([tables.keys.clock("weight")]),
            torch.tensor([getattr(counts, name) for name in counts.__slots__]), seen]


@pytest.mark.parametrize("labels, rule, placement", [
    ("abb", 0, "mixed"), ("aabb", 1, "replicated")])
def test_hosts_change_no_bit(labels: str, rule: int, placement: str) -> None:
    """Outputs, keys, counts, clocks, rows, states and statistics are bitwise those of one host;
    without gradients, owners pool for other hosts only."""
    one = run_world(len(labels), _train, rule, placement)
    assert int(one[0][5][0]) == ROWS - 1 and int(one[0][5][4]) > 0  # rows, admitted
    several = run_world(len(labels), _train, rule, placement, labels=labels)
    for rank, (found, wanted) in enumerate(zip(several, one, strict=True)):
        assert torch.allclose(found.pop(), wanted.pop(), rtol=1e-6, atol=1e-6)
        assert_bitwise(found, wanted, f"rank {rank}")


def test_deltas_of_several_hosts_are_those_of_one(tmp_path: Path) -> None:
    """A chain saved on several hosts continues on one host, and vice versa, bit for bit."""
    (held, *_) = run_world(2, saved_run, str(tmp_path / "one"), 0, 1, STEPS)
    (far, *_) = run_world(2, saved_run, str(tmp_path / "two"), 0, 1, STEPS, labels="ab")
    assert_bitwise(far, held, "saved")
    sizes = [sorted(p.stat().st_size for p in tmp_path.glob(f"{n}.deltas/**/*.npz"))
             for n in ("one", "two")]
    assert sizes[1] == sizes[0], "keys are saved once"
    more = range(STEPS + 1, STEPS + 3)
    (one, *_) = run_world(2, loaded, str(tmp_path / "two"), 0, more)
    (two, *_) = run_world(2, loaded, str(tmp_path / "one"), 0, more, labels="ab")
    assert_bitwise(two, one, "went on")


def _refuse(rank: int, world_size: int, harm: str) -> list[str]:
    model = shard(bag(3), oper.DynamicTable(), gradient_guard="stop")
    model(torch.tensor([[1, 2]])).sum().backward()
    late = model(torch.tensor([[2]]))
    model(torch.tensor([[3, 4]])).sum().backward()  # takes both rows
    before = model.tables.keys.clock("weight")
    with caught() as errors:
        if harm == "late":
            (late if rank == 0 else model(torch.tensor([[3]]))).sum().backward()
        else:
            (model(torch.tensor([[3]])).sum() * (float("nan") if rank == 0 else 1.0)).backward()
    assert model.tables.keys.clock("weight") == before
    return errors


@pytest.mark.parametrize("harm, message", [("late", "have lost their rows"), ("guard", "gradient")])
def test_a_refused_update_raises_on_all_hosts(harm: str, message: str) -> None:
    """A rank refuses before or after the exchange of keys; errors of the others name it."""
    (refused,), *others = run_world(3, _refuse, harm, labels="abb")
    assert message in refused
    for (said,) in others:
        assert said.startswith("PeerLostError") and "rank=0" in said, said


def seen(parts: list[list[int]], counts: list[int], missed: list[int]) -> Seen:
    return torch.tensor(counts), torch.tensor(missed, dtype=torch.int64), torch.tensor(parts)


def test_messages_contain_seen_keys() -> None:
    first = seen([[0, 0, 4, 1, 2, 0], [1, 4, 6, 2, 0, 0]], [10, 11, -1, -1, -1, -1], [7, 8, 9])
    second = seen([[1, 0, 3, 0, 1, 1]], [12, -1, -1], [])
    found = unpack(pack([first, second]), torch.tensor([64, 64]))
    assert found is not None
    assert found[0].tolist() == [10, 11, 12] and found[1].tolist() == [7, 8, 9]
    assert found[2].tolist() == [[0, 0, 2, 1, 2, 0], [1, 2, 2, 2, 0, 0], [1, 2, 3, 0, 1, 1]]
    empty = unpack(pack([]), torch.tensor([64]))
    assert empty is not None and [x.numel() for x in empty] == [0, 0, 0]


@pytest.mark.parametrize("at, value", [
    (0, 2), (0, -1), (0, 1 << 60), (1, 1), (1, -1), (2, 1), (4, 3), (4, -1), (5, 1 << 40), (5, -2),
    (7, 64), (8, 0xFFFFFFFF)])
def test_invalid_messages_are_refused(at: int, value: int) -> None:
    words = pack([seen([[0, 0, 4, 1, 2, 0]], [10, 11], [7])])
    assert unpack(words, torch.tensor([64])) is not None
    words[at] = value
    assert unpack(words, torch.tensor([64])) is None
