"""Delta checkpoints: contents, resuming, crashes, damage, cost."""

import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import oper
from oper.errors import FileFormatError, InvalidInputError, OperError
from oper.integration.checkpoint import delta_files, deltas as module, saving
from oper.integration.checkpoint.delta_files import (
    base_of,
    find,
    folder_of,
    look,
    pack_state,
    read_part,
    unpack_state,
    write_part,
)
from oper.integration.checkpoint.deltas import DeltaCheckpoints
from oper.integration.checkpoint.files import write_checksums
from oper.integration.checkpoint.follow import Follower
from oper.integration.checkpoint.saving import Restored
from oper.train.trained import find_weights
from tests.checkpoint_support import flat, fused, run_ranks, sharded, state_of, train
from tests.integration.module_support import collection, kjt, shard
from tests.runtime_support import assert_bitwise


def saved_run(rank: int, world_size: int, plan: int, folder: str, steps: int,
              cut: int | None = None) -> dict[str, torch.Tensor]:
    """A full checkpoint after step 1, a delta after each further step; state after the last.

    With `cut`, rank `cut` writes nothing of the last delta.
    """
    model = sharded(world_size, plan)
    with DeltaCheckpoints(folder, model, fused(model), memory_bytes=20_000) as saver:
        for step in range(steps):
            train(model, rank, world_size, range(step, step + 1))
            if step == 1:
                saver.save_full(step + 1, {"step": step + 1})
            elif step > 1 and (step + 1 < steps or rank != cut):
                saver.save(step + 1, {"step": step + 1, "sum": torch.arange(3.0)})
        saver.flush()
    return flat(state_of(model))


def loaded(rank: int, world_size: int, plan: int, folder: str, steps: range
           ) -> dict[str, torch.Tensor]:
    """Return the state after loading and continuing, with deltas, from `steps.start`."""
    model = sharded(world_size, plan, seed=9)
    with DeltaCheckpoints(folder, model, fused(model)) as saver:
        found = saver.load()
        assert found.is_exact and found.step == found.extra["step"] == steps.start, found
        for step in steps:
            train(model, rank, world_size, range(step, step + 1))
            saver.save(step + 1, {"step": step + 1})
        saver.flush()
    return flat(state_of(model))


def test_two_savers_of_a_model_lose_no_rows(tmp_path: Path) -> None:
    """A model marks its changed rows for one saver only. A saver whose marks another one has taken,
    or that was closed, saves a full checkpoint."""
    model = sharded(1, 3)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "a").symlink_to(tmp_path / "elsewhere")  # savers write to the target
    savers = [DeltaCheckpoints(tmp_path / name, model, fused(model)) for name in "ab"]
    for step in range(5):
        train(model, 0, 1, range(step, step + 1))
        for saver in (savers[0], savers[step % 2]):
            saver.save(step)
    for saver in savers:
        saver.close()
    train(model, 0, 1, range(5, 6))
    for name, saver in zip("ab", savers, strict=True):
        saver.save(5)
        saver.close()
        other = sharded(1, 3, seed=9)
        oper.load_checkpoint(tmp_path / name, other, fused(other))
        assert_bitwise(flat(state_of(other)), flat(state_of(model)), name)
    assert {p.name for p in tmp_path.iterdir()} == {
        "a", "b", "b.deltas", "elsewhere", "elsewhere.deltas"}
    with pytest.raises(InvalidInputError, match="cannot use a URL"):
        oper.save_checkpoint("s3://bucket/c", model)
    with pytest.raises(InvalidInputError, match="a name without a zero byte"):
        oper.save_checkpoint(str(tmp_path / "c\0"), model)
    for save in (oper.save_checkpoint, lambda path, *of: DeltaCheckpoints(path, *of).save(0)):
        with pytest.raises(InvalidInputError, match="optimizer='list'"):
            save(tmp_path / "c", model, [fused(model)])
    assert not list(tmp_path.glob("c*"))


@pytest.mark.parametrize("step", [-1, 1.5, "1", None])
def test_steps_that_could_not_be_loaded_are_refused(step: Any, tmp_path: Path) -> None:
    model = sharded(1, 3)
    with DeltaCheckpoints(tmp_path / "c", model) as saver:
        saver.save_full(np.int64(0))
        for save in (saver.save, saver.save_full):
            with pytest.raises(InvalidInputError, match=r"step=.*an integer >= 0"):
                save(step)
        saver.save(np.int64(2))
    assert oper.load_checkpoint(tmp_path / "c", sharded(1, 3, seed=9)) == {}
    assert find(tmp_path / "c", tmp_path / "c")[0].step == 2


@pytest.mark.parametrize("world_size, plan", [(1, 3), (2, 101), (2, 5)])
def test_a_checkpoint_and_its_deltas_restore_the_run(world_size: int, plan: int, tmp_path: Path
                                                     ) -> None:
    """The state is bit-identical, under other plans and world sizes, and after further steps."""
    folder = str(tmp_path / "c")
    held = run_ranks(saved_run, world_size, plan, folder, 5)
    chain = find(tmp_path / "c", tmp_path / "c")
    assert [(d.step, d.since, d.is_complete) for d in chain] == [(3, 2, True), (4, 3, True),
                                                                 (5, 4, True)]
    assert_bitwise(run_ranks(loaded, world_size, plan, folder, range(5, 5)), held, "loaded")
    other = (2, 102) if world_size == 1 else (1, 5)
    assert_bitwise(run_ranks(loaded, *other, folder, range(5, 5)), held, "elsewhere")
    if plan == 101:
        went_on = run_ranks(loaded, world_size, plan, folder, range(5, 7))
        chain = find(tmp_path / "c", tmp_path / "c")
        assert len(chain) == 5 and chain[2].attempt != chain[3].attempt == chain[4].attempt != ""
        assert_bitwise(run_ranks(loaded, world_size, plan, folder, range(7, 7)), went_on, "again")
        assert_bitwise(went_on, run_ranks(saved_run, world_size, plan, str(tmp_path / "d"), 7),
                       "as without a break")


def test_a_delta_that_one_rank_did_not_write_is_ignored(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    after = run_ranks(saved_run, 2, 101, str(folder), 5, 1)  # rank 1 wrote nothing of the last
    assert [d.is_complete for d in find(folder, folder)] == [True, True, False]
    before = run_ranks(saved_run, 2, 101, str(tmp_path / "d"), 4)
    found = run_ranks(_newest, 2, 101, str(folder))
    rows = [k for k in found if k.startswith("/model") and "dense" not in k]
    newer = older = 0
    for name in rows:  # every row is of one step or the other, in parts where columns are split
        old, new = (found[name] == x[name] for x in (before, after))
        assert (old | new).all(), name
        newer, older = newer + int((~old).sum()), older + int((~new).sum())
    assert newer and older
    assert_bitwise(run_ranks(loaded, 2, 101, str(folder), range(4, 4)), before, "one step back")
    assert len(find(folder, folder)) == 2  # the incomplete folder is gone


def test_parts_of_two_attempts_are_no_delta(tmp_path: Path) -> None:
    """A copy of the run may still have parts of the delta that a crash has left incomplete."""
    def put(rank: int, attempt: str, part: int = 0, last: bool = True) -> None:
        write_part(tmp_path, {
            "number": 0, "step": 1, "since": 0, "attempt": attempt, "rank": rank, "world_size": 2,
            "part": part, "time_us": ord(attempt)}, {}, {"items": [], "last": last})

    put(1, "a", last=False)
    put(1, "a", part=1)
    put(0, "b")
    found = look(tmp_path, 0)
    assert (found.missing, found.attempt) == ([1], "b")
    put(1, "b")
    assert {r: len(files) for r, files in look(tmp_path, 0).files.items()} == {0: 1, 1: 1}


def _newest(rank: int, world_size: int, plan: int, folder: str) -> dict[str, torch.Tensor]:
    model = sharded(world_size, plan, seed=9)
    with DeltaCheckpoints(folder, model, fused(model)) as saver:
        found = saver.load(newest_rows=True)
        assert (found.is_exact, found.steps_lost, found.step) == (False, {1: 1}, 4)
    return flat(state_of(model))


# ---- damage --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chain") / "c"
    saved_run(0, 1, 3, str(folder), 4)
    return folder


def _load(folder: Path) -> Restored:
    model = sharded(1, 3, seed=9)
    with DeltaCheckpoints(folder, model, fused(model)) as saver:
        return saver.load()


@pytest.mark.parametrize("harm", ["flip", "cut", "foreign", "renamed"])
def test_a_damaged_delta_is_reported(chain: Path, tmp_path: Path, harm: str) -> None:
    shutil.copytree(chain.parent, tmp_path / "x")
    files = sorted((tmp_path / "x").rglob("rank-*.npz"))
    victim = files[len(files) // 2]
    data = bytearray(victim.read_bytes())
    if harm == "flip":
        data[data.rindex(b"\x93NUMPY") + 128] ^= 4  # the first number of the last array
    elif harm == "cut":
        del data[-40:]
    elif harm == "foreign":
        data[:] = b"PK" + bytes(100)
    if harm == "renamed":
        victim.rename(victim.with_name("rank-00007-00000.npz"))
        victim = victim.with_name("rank-00007-00000.npz")
        with pytest.raises(FileFormatError, match="rank-00007"):
            read_part(victim)
        return
    victim.write_bytes(data)
    with pytest.raises(FileFormatError, match=r"rank-|delta"):
        _load(tmp_path / "x" / "c")


def test_deltas_of_another_checkpoint_are_ignored(chain: Path, tmp_path: Path) -> None:
    """A crash right after a new full checkpoint leaves the deltas of the one before."""
    shutil.copytree(chain.parent, tmp_path / "x")
    folder = tmp_path / "x" / "c"
    model = sharded(1, 3, seed=4)
    oper.save_checkpoint(folder, model, fused(model), {"step": 77})
    found = _load(folder)
    assert (found.num_deltas, found.step) == (0, 77)
    assert len(list((tmp_path / "x" / "c.deltas").iterdir())) == 1  # of the new one


def test_other_files_among_the_deltas_are_left(chain: Path, tmp_path: Path) -> None:
    shutil.copytree(chain.parent, tmp_path / "x")
    folder = tmp_path / "x" / "c.deltas"
    (folder / "mine").mkdir()
    (folder / "notes.txt").touch()
    before = {p.name for p in folder.iterdir()}
    model = sharded(1, 3)
    with DeltaCheckpoints(tmp_path / "x" / "c", model, fused(model)) as saver:
        saver.save_full(5)
    after = {p.name for p in folder.iterdir()}
    assert before & after == {"mine", "notes.txt"} and len(after) == 3


def test_a_server_sees_no_gap_while_a_resumed_run_removes_deltas(
        chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a crash before all ranks have written several deltas."""
    shutil.copytree(chain.parent, tmp_path / "x")
    folder = tmp_path / "x" / "c"
    follower = Follower(lambda: folder)
    for change in follower.changes():
        follower.applied(change)
    place = folder_of(folder) / base_of(folder)
    for number in (4, 2, 6, 3, 5):  # so that no file system lists them in descending order
        (place / f"{number:06d}").mkdir()
    removed, rmtree = [], shutil.rmtree

    def remove(path: Path) -> None:
        rmtree(path)
        removed.append(path.name)
        assert not list(follower.changes())

    monkeypatch.setattr(shutil, "rmtree", remove)
    assert _load(folder).num_deltas == 2 and len(removed) == 5


def test_the_previous_checkpoint_keeps_its_deltas(chain: Path, tmp_path: Path) -> None:
    """A crash between the two renames of a full checkpoint leaves only `c.previous`."""
    shutil.copytree(chain.parent, tmp_path / "x")
    folder = tmp_path / "x" / "c"
    folder.rename(folder.with_name("c.previous"))
    assert _load(folder).num_deltas == 2


# ---- errors and cost -----------------------------------------------------------------------------


def bag(num_rows: int, dim: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    table = nn.EmbeddingBag(num_rows, dim, mode="sum", dtype=dtype)
    return shard(table, optimizer=oper.RowWiseAdagrad(lr=0.1))


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the present values of a model."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def touch(model: nn.Module, ids: np.ndarray) -> None:
    model(torch.from_numpy(ids), torch.arange(ids.size)).float().square().sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_delta_of_one_percent_of_rows_is_small(dtype: torch.dtype, tmp_path: Path) -> None:
    num_rows = 100_000
    model = bag(num_rows, 32, dtype)
    with DeltaCheckpoints(tmp_path / "c", model, memory_bytes=200_000) as saver:
        saver.save_full(0)
        for step in range(4):  # of all steps together one in a hundred
            touch(model, np.random.default_rng(step).permutation(num_rows)[:num_rows // 400])
        saver.save(4)
        saver.flush()
        want = values_of(model)
        full = sum(p.stat().st_size for p in (tmp_path / "c").iterdir())
        (delta,) = find(tmp_path / "c", tmp_path / "c")
        size = sum(p.stat().st_size for files in delta.files.values() for p in files)
        assert size == saver.written_bytes
        assert size <= (0.02 if dtype == torch.float32 else 0.03) * full
        assert len(delta.files[0]) > 1  # of bounded size each
        for files in delta.files.values():
            assert all(sum(a.nbytes for a in read_part(p)[0].values()) <= 45_000 for p in files)
        touch(model, np.arange(num_rows))
        saver.load()
        assert_bitwise(dict(model.state_dict()), want, "loaded")


def test_written_rows_cause_a_full_checkpoint(tmp_path: Path) -> None:
    model = bag(1000, 4)
    with DeltaCheckpoints(tmp_path / "c", model) as saver:
        saver.save(1, {"step": 1})  # the first one is whole
        touch(model, np.arange(10))
        saver.save(2, {"step": 2})
        model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})
        saver.save(3, {"step": 3})
        saver.flush()
        want = values_of(model)
        found = saver.load()
        assert (found.num_deltas, found.step) == (0, 3)
        assert_bitwise(dict(model.state_dict()), want, "whole")


def _divided(rank: int, world_size: int, folder: str) -> dict[str, torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = oper.shard(nn.Sequential(nn.EmbeddingBag(20, 4), nn.Linear(4, 4)),
                       optimizer=oper.SGD(lr=0.1))
    with DeltaCheckpoints(folder, model) as saver:
        saver.save_full(0)
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
        with pytest.raises(InvalidInputError, match=r"rank holds a part=\['1.weight'"):
            DeltaCheckpoints(folder, model)
        if rank == 0:
            with pytest.raises(InvalidInputError, match=r"rank holds a part=\['model.1.weight'"):
                saver.save(1)
    return {}


def test_dense_layers_that_are_divided_among_ranks_are_refused(tmp_path: Path) -> None:
    """A delta would give all ranks the part of rank 0."""
    run_ranks(_divided, 2, str(tmp_path / "c"))


def test_tables_that_a_model_has_in_another_order(tmp_path: Path) -> None:
    """Tables that were sharded one by one have the same name."""
    model, other = (nn.ModuleDict({name: bag(20, 4) for name in names}) for names in ("ab", "ba"))
    with DeltaCheckpoints(tmp_path / "c", model) as saver:
        saver.save_full(0)
        touch(model["a"], np.arange(3))
        touch(model["b"], np.arange(5))
        saver.save(1)
    oper.load_checkpoint(tmp_path / "c", other)
    for name in "ab":
        assert torch.equal(other[name].weight, model[name].weight), name


def test_the_step_of_a_full_checkpoint_is_loaded(tmp_path: Path) -> None:
    model = bag(1000, 4)
    with DeltaCheckpoints(tmp_path / "c", model) as saver:
        saver.save_full(7)
        assert saver.load().step == 7
        touch(model, np.arange(10))
        saver.save(8)
        saver.flush()
        (delta,) = find(tmp_path / "c", tmp_path / "c")
        assert delta.since == 7
        assert saver.load().step == 8


def test_a_checkpoint_that_is_replaced_meanwhile_is_not_mixed_with_the_next(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process loads what a training run saves, which replaces checkpoint and deltas."""
    model, other = bag(1000, 4), bag(1000, 4)
    with DeltaCheckpoints(tmp_path / "c", model) as saver:
        saver.save_full(0)
        touch(model, np.arange(10))
        saver.save(1)
        saver.flush()
        checks = saving.check
        monkeypatch.setattr(saving, "check", lambda *of: (
            checks(*of), oper.save_checkpoint(tmp_path / "c", bag(1000, 4))))
        with pytest.raises(OperError, match=rf"cannot read.*{tmp_path / 'c'}'"):
            oper.load_checkpoint(tmp_path / "c", other)


def test_a_server_reads_the_checksums_of_a_checkpoint_once(
        chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(chain, tmp_path / "checkpoint")
    sums, read = delta_files.sum_of, []
    monkeypatch.setattr(delta_files, "sum_of", lambda path: (read.append(path), sums(path))[1])
    follower = Follower(lambda: find_weights(tmp_path))
    for _ in range(3):
        assert not follower.has_whole() and not list(follower.changes())
    assert len(read) == 1
    base = base_of(tmp_path / "checkpoint")
    shutil.copytree(chain, tmp_path / "next")
    shutil.rmtree(tmp_path / "checkpoint")
    write_checksums(tmp_path / "next", {"a": (1, 2)})
    (tmp_path / "next").rename(tmp_path / "checkpoint")
    assert base_of(tmp_path / "checkpoint") != base


def test_a_delta_of_a_model_on_a_gpu_is_loaded_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda _: "cuda:0")
        packed = pack_state({"paths": [["model", "w"]], "values": [torch.ones(2)], "extra": {}})
    assert b"cuda:0" in packed.tobytes()
    assert torch.equal(unpack_state(packed)["values"][0], torch.ones(2))


def test_no_delta_continues_a_checkpoint_that_another_has_replaced(tmp_path: Path) -> None:
    """A load would ignore it, since it belongs to the checkpoint that has gone."""
    model = bag(1000, 4)
    with DeltaCheckpoints(tmp_path / "c", model) as saver:
        saver.save_full(0)
        touch(model, np.arange(10))
        saver.save(1, {"step": 1})
        oper.save_checkpoint(tmp_path / "elsewhere", model)
        saver.save(2, {"step": 2})
        saver.flush()
        assert len(find(tmp_path / "c", tmp_path / "c")) == 2
        oper.save_checkpoint(tmp_path / "c", model)
        touch(model, np.arange(20))
        want = values_of(model)
        saver.save(3, {"step": 3})
        found = saver.load()
        assert (found.num_deltas, found.step) == (0, 3)
        assert_bitwise(dict(model.state_dict()), want, "loaded")


def test_a_failed_delta_is_reported_and_a_full_checkpoint_recovers(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    model = bag(1000, 4)
    with DeltaCheckpoints(tmp_path / "c", model) as saver:
        saver.save_full(0)
        touch(model, np.arange(10))
        with monkeypatch.context() as patch:
            patch.setattr(module, "write_part", no_room)
            saver.save(1)
            with pytest.raises(OperError, match="No space left"):
                saver.flush()
        touch(model, np.arange(20))
        saver.wait()
        with pytest.raises(OperError, match=r"other ranks do not get.*full checkpoint"):
            saver.save(2)
        with monkeypatch.context() as patch:
            patch.setattr(module, "save_by", no_room)
            with pytest.raises(OSError, match="No space left"):  # still
                saver.save_full(2, {"step": 2})
        saver.save(2, {"step": 2})  # no delta, which would follow a missing one
        saver.flush()
        assert not find(tmp_path / "c", tmp_path / "c") and saver.load().step == 2
        touch(model, np.arange(5))
        saver.save(3)
        saver.flush()
        want = values_of(model)
        assert saver.load().step == 3
        assert_bitwise(dict(model.state_dict()), want, "loaded")


def test_values_that_could_not_be_loaded_cost_no_delta(tmp_path: Path) -> None:
    """They are refused before marks are cleared, so the next delta has all changes."""
    model = bag(1000, 4)
    with DeltaCheckpoints(tmp_path / "c", model) as saver:
        saver.save_full(0)
        touch(model, np.arange(10))
        with pytest.raises(InvalidInputError, match=r"extra\.loss.*convert it"):
            saver.save(1, {"loss": np.float32(0.5)})
        saver.save(1, {"loss": 0.5})
        saver.flush()
        want = values_of(model)
        found = saver.load()
        assert (found.num_deltas, found.step, found.extra) == (1, 1, {"loss": 0.5})
        assert_bitwise(dict(model.state_dict()), want, "loaded")


def test_training_continues_while_a_delta_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                     ) -> None:
    """A delta has the rows at the time of the call of `save`, even if the disk is slow."""
    model, go = bag(1000, 4), threading.Event()
    write = module.write_part
    monkeypatch.setattr(module, "write_part", lambda *part: go.wait(120) and write(*part))
    with DeltaCheckpoints(tmp_path / "c", model) as saver:
        saver.save_full(0)
        touch(model, np.arange(500))
        want = values_of(model)
        saver.save(1)
        touch(model, np.arange(100, 900))
        assert not list(tmp_path.rglob("rank*")), "it was waited for"
        go.set()
        saver.flush()
        assert saver.load().step == 1
        assert_bitwise(dict(model.state_dict()), want, "as it was")


def test_deltas_are_loaded_into_tables_that_are_not_trained(tmp_path: Path) -> None:
    batch = kjt(torch.tensor([1, 2]))
    model, reader = (oper.shard(collection(), **options) for options in (
        {"optimizer": oper.SGD(lr=0.1)}, {"objective": "inference"}))
    with DeltaCheckpoints(tmp_path / "c", model) as saver:
        saver.save_full(0)
        model(batch).values().sum().backward()
        saver.save(1, {"step": 1})
    assert oper.load_checkpoint(tmp_path / "c", reader) == {"step": 1}
    assert torch.equal(reader(batch).values(), model(batch).values())


def test_models_without_such_tables_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="sharded tables"):
        DeltaCheckpoints(tmp_path / "c", nn.Linear(2, 2))
    reader = oper.shard(nn.EmbeddingBag(10, 4, mode="sum"), objective="inference")
    with pytest.raises(InvalidInputError, match=r"sharded tables|trained"):
        DeltaCheckpoints(tmp_path / "c", reader)
