"""Checkpoints of bounded memory, and those that survivors save after a rank has exited."""

import copy
import ctypes
import gc
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import oper
from oper.errors import DeadlineError, InvalidInputError, OperError, PeerLostError
from oper.integration.checkpoint import (
    files as checkpoint_files,
    planners as checkpoint,
    saving,
    table_state,
)
from oper.integration.checkpoint.survivors import Survivors
from oper.integration.torch_modules import module_spec
from oper.plan import Piece, Plan, TablePlan, Tier, uniform_plan
from oper.shmem.counters.progress import Progress
from oper.support.processes import trim_memory
from oper.tables import TableSpec
from tests.checkpoint_support import CHUNK, flat, fused, go_on, run_ranks, sharded, state_of, train
from tests.runtime_support import assert_bitwise
from tests.support import wait_for
from tests.world_support import RankFailedError, report, run_world, world


class _Counting(oper.LoadPlanner):
    """Counts the rows read into memory, by table."""

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        name = read_item.dest_index.fqn
        COMMITTED[name] = COMMITTED.get(name, 0) + tensor.shape[0]
        super().commit_tensor(read_item, tensor)


COMMITTED: dict[str, int] = {}


def _halves(rank: int, world_size: int, folder: str) -> tuple[dict[str, int], torch.Tensor]:
    """Load tables, one in two halves and one striped; return the rows read, and the first table."""
    COMMITTED.clear()
    torch.manual_seed(9)
    module = torch.nn.ModuleDict({n: torch.nn.Embedding(500, 8) for n in ("halves", "stripes")})
    halves, stripes = (module_spec(n, m, "adagrad") for n, m in module.items())
    tiers = tuple(Tier(250 * r, 250 * (r + 1), "owned", (r,)) for r in range(2))
    striped = uniform_plan([stripes], 2, "striped").tables[0]
    plan = Plan(2, (TablePlan(halves, (Piece(0, 8, tiers),)), striped))
    model = oper.shard(module, plan=plan, optimizer=oper.Adagrad(lr=0.1))
    with oper.rows_on_demand(CHUNK):
        state = model.state_dict()
        dcp.load(state, checkpoint_id=folder, planner=_Counting())
        model.load_state_dict(state)
    full = model.state_dict()["halves.weight"]
    return COMMITTED, full.full_tensor() if hasattr(full, "full_tensor") else full


def test_a_rank_reads_only_chunks_with_rows_that_it_owns(tmp_path: Path) -> None:
    plain = torch.nn.ModuleDict({n: torch.nn.Embedding(500, 8) for n in ("halves", "stripes")})
    whole = str(tmp_path / "whole")
    dcp.save(dict(plain.state_dict()), checkpoint_id=whole, no_dist=True)
    want = plain["halves"].weight.detach()
    for read_rows, found in run_world(2, _halves, whole):
        assert_bitwise(found, want, "from one whole tensor")
        assert read_rows == {"halves.weight": 500, "stripes.weight": 500}
    with oper.rows_on_demand(CHUNK):
        dcp.save(oper.shard(plain, optimizer=oper.SGD()).state_dict(), planner=oper.SavePlanner(),
                 checkpoint_id=str(tmp_path / "chunks"), no_dist=True)
    for read_rows, found in run_world(2, _halves, str(tmp_path / "chunks")):
        assert_bitwise(found, want, "from chunks")
        # Sixteen rows to a chunk: the one in the middle belongs to both.
        assert read_rows["stripes.weight"] == 500 and read_rows["halves.weight"] in (256, 260)


def test_rows_on_demand_of_another_model_are_copied() -> None:
    model, other = sharded(1, 0), sharded(1, 101, seed=5)
    with oper.rows_on_demand(CHUNK):
        other.load_state_dict(model.state_dict())
    assert_bitwise(dict(other.state_dict()), dict(model.state_dict()), "copied")
    assert isinstance(model.state_dict()["places.weight"], torch.Tensor)


# ---- memory --------------------------------------------------------------------------------------

ROWS, DIM = 200_000, 64  # 51 MB of rows and 51 MB of state


def _peak(action: Any) -> int:
    """Return the maximum increase of resident memory during `action`, in bytes."""
    def status(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(x.split()[1]) << 10 for x in lines if x.startswith(key))

    gc.collect()
    trim_memory()  # freed memory that the process keeps would be taken again unseen
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    action()
    return status("VmHWM") - before


def _peaks(rank: int, world_size: int, folder: str) -> list[int]:
    # By itself, glibc raises this threshold as blocks are freed, and then keeps those that it frees
    # next: peaks of the same action differed by 25 MB.
    assert ctypes.CDLL(None).mallopt(-3, 128 << 10)  # M_MMAP_THRESHOLD
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(ROWS, DIM))
    oper.shard(model, optimizer=oper.Adagrad(lr=0.1))
    tables = model[0].tables
    for at in range(0, ROWS, 10_000):  # maps every page before anything is measured
        for part in ("rows", "momentum1"):
            tables.read("0", at, at + 10_000, part)
    plain = saving.state_of(model, None)
    checkpoint_files.PIECE_BYTES = 1 << 20
    table_state.CHUNK_BYTES = 4 << 20
    for action in (oper.save_checkpoint, oper.load_checkpoint):  # what first calls alone take
        action(folder + "-first", model)
    found = [
        _peak(lambda: oper.save_checkpoint(folder, model, chunk_bytes=1 << 20)),
        _peak(lambda: oper.load_checkpoint(folder, model)),
        _peak(lambda: dcp.save(model.state_dict(), checkpoint_id=folder + "-model")),
        _peak(lambda: model.load_state_dict(plain["model"]))]
    dcp.save(plain, checkpoint_id=folder + "-plain")
    plain.clear()
    want = tables.read("0", 5, 9), tables.read("0", 5, 9, "momentum1")

    def load() -> None:
        with oper.rows_on_demand():
            state = saving.state_of(model, None)
            dcp.load(state, storage_reader=oper.CheckpointReader(folder + "-plain"),
                     planner=oper.LoadPlanner())
            saving.take_over(state, model, None)

    for action in (lambda: oper.load_checkpoint(folder + "-plain", model), load):
        for part in ("rows", "momentum1"):
            tables.write("0", torch.zeros(ROWS, DIM), part=part)
        tables.flush_replicas()
        found.append(_peak(action))
        for got, rows in zip((tables.read("0", 5, 9), tables.read("0", 5, 9, "momentum1")), want,
                             strict=True):
            assert_bitwise(got, rows, "read in pieces")
    dist.barrier()
    return found


@pytest.mark.filterwarnings("ignore:no access statistics")
def test_peak_memory_is_a_few_chunks(tmp_path: Path) -> None:
    table, chunk, slack = ROWS * DIM * 4, 1 << 20, 4 << 20
    for save, load, plain, plain_load, *pieces in run_world(2, _peaks, str(tmp_path / "c")):
        assert max(save, load) <= 4 * chunk + slack, "in chunks"
        # Stored by torch, a tensor of half the table per rank.
        assert max(pieces) <= 4 * chunk + slack, "in pieces"
        # One logical row range per rank, with what gathering and writing it takes.
        assert plain <= table + slack, "plain save"
        # Chunks of table_state.CHUNK_BYTES, of which the next is received beside the last.
        assert plain_load <= 2 * (4 << 20) + slack, "plain load"
        assert plain > 0.4 * table, "the measurement misses the copies of a plain save"


# ---- crashes -------------------------------------------------------------------------------------


def _saves_again(rank: int, world_size: int, folder: str) -> None:
    """Save, train, and fail in the middle of the second save."""
    model = sharded(world_size, 101)
    train(model, rank, world_size, range(3))
    oper.save_checkpoint(folder, model, fused(model), {"next_step": 3, "sums": torch.arange(3.0)})
    report(flat(state_of(model)))
    train(model, rank, world_size, range(3, 5))
    done = []
    original = checkpoint.SavePlanner.resolve_data

    def resolve(self: Any, item: Any) -> Any:
        done.append(item)
        if rank == 1 and len(done) == 3:
            raise OSError("no space left on device")
        return original(self, item)

    checkpoint.SavePlanner.resolve_data = resolve  # type: ignore[method-assign]
    with pytest.raises(OperError, match="rank 1: no space left"):
        oper.save_checkpoint(folder, model, fused(model), {"next_step": 5}, chunk_bytes=CHUNK)


def test_an_error_while_saving_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    """The error is raised on all ranks. tests/faults/test_faults.py covers a killed rank."""
    folder = str(tmp_path / "c")
    with world(2, _saves_again, folder) as running:
        held = running.receive(0)
        assert_bitwise(running.receive(1), held, "two ranks")
        for rank in range(2):
            running.receive(rank)
    assert (tmp_path / "c.saving").exists()
    assert_bitwise(run_ranks(go_on, 2, 1, range(3, 3), folder), held, "the previous one")
    # And the next save clears up.
    run_ranks(go_on, 1, 1, range(3, 4), folder, folder)
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_a_folder_that_ranks_do_not_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every host has written to a disk of its own, and rank 0 does not see the others' files."""
    model = sharded(1, 1)
    oper.save_checkpoint(tmp_path / "c", model, fused(model), {"which": 1})

    def sum_elsewhere(path: Path) -> tuple[int, int]:
        found = checkpoint_files.sum_of(path)
        path.unlink()
        return found

    with monkeypatch.context() as patch:
        patch.setattr(saving, "sum_of", sum_elsewhere)
        with pytest.raises(InvalidInputError, match=r"__0_0.distcp.*all ranks share"):
            oper.save_checkpoint(tmp_path / "c", model, fused(model), {"which": 2})
    assert oper.load_checkpoint(tmp_path / "c", model, fused(model)) == {"which": 1}


@pytest.mark.parametrize("renamed", [False, True])
def test_a_crash_while_renaming(renamed: bool, tmp_path: Path) -> None:
    """Between the two renames, only the previous checkpoint exists; after them, both do."""
    model = sharded(1, 1)
    folder, before = tmp_path / "c", tmp_path / "c.previous"
    oper.save_checkpoint(folder, model, fused(model), {"which": 1})
    folder.rename(before)
    if not renamed:
        folder.mkdir()  # by someone who missed it
    if renamed:
        oper.save_checkpoint(tmp_path / "new", model, fused(model), {"which": 2})
        (tmp_path / "new").rename(folder)
    assert oper.load_checkpoint(folder, model, fused(model)) == {"which": 2 if renamed else 1}
    oper.save_checkpoint(folder, model, fused(model), {"which": 3})
    assert oper.load_checkpoint(folder, model, fused(model)) == {"which": 3}
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


# ---- what is refused -----------------------------------------------------------------------------


def test_rows_on_demand_need_a_planner(tmp_path: Path) -> None:
    model = sharded(1, 0)
    with oper.rows_on_demand():
        state = model.state_dict()
    with pytest.raises(BaseException, match=r"oper\.SavePlanner"):
        dcp.save(state, checkpoint_id=str(tmp_path / "c"), no_dist=True)
    with pytest.raises(OperError, match="rows_on_demand"):
        copy.deepcopy(state)
    with pytest.raises(InvalidInputError, match="chunk_bytes"), oper.rows_on_demand(0):
        pass


def test_folders_of_others_next_to_a_checkpoint_are_not_removed(tmp_path: Path) -> None:
    model, folder = sharded(1, 0), tmp_path / "c"
    oper.save_checkpoint(folder, model, extra={"which": 1})
    for name in ("c.saving", "c.previous"):
        other = tmp_path / name
        for make in (lambda other: other.mkdir() or (other / "mine.txt").touch(),
                     Path.touch, lambda other: other.symlink_to(tmp_path / "c")):
            make(other)
            before = sorted(tmp_path.rglob("*"))
            with pytest.raises(InvalidInputError, match=rf"{name}'.*choose another folder"):
                oper.save_checkpoint(folder, model, extra={"which": 2})
            assert sorted(tmp_path.rglob("*")) == before
            other.unlink() if other.is_symlink() or other.is_file() else shutil.rmtree(other)
    assert oper.load_checkpoint(folder, model) == {"which": 1}
    # What a save that was killed leaves is removed, at any time.
    for part in (["__0_0.distcp"], ["__0_0.distcp", ".metadata.tmp"], [".metadata"],
                 [".metadata", ".checksums.oper.x1_z.tmp"]):
        (tmp_path / "c.saving").mkdir()
        for name in part:
            (tmp_path / "c.saving" / name).touch()
        oper.save_checkpoint(folder, model, extra={"which": 3})
        assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_other_checkpoints_are_refused_by_name(tmp_path: Path) -> None:
    model = sharded(1, 0)
    with pytest.raises(InvalidInputError, match="complete checkpoint"):
        oper.load_checkpoint(tmp_path, model)
    (tmp_path / "mine.txt").write_text("not a checkpoint")
    with pytest.raises(InvalidInputError, match="it is not a checkpoint"):
        oper.save_checkpoint(tmp_path, model)
    assert (tmp_path / "mine.txt").read_text() == "not a checkpoint"
    small = torch.nn.Sequential(torch.nn.Embedding(5, 8))
    dcp.save({"model": {"0.weight": torch.zeros(6, 8)}}, checkpoint_id=str(tmp_path / "other"),
             no_dist=True)
    oper.shard(small, plan=None, optimizer=oper.SGD())
    before = small.state_dict()["0.weight"]
    with pytest.raises(InvalidInputError, match=r"'0'.*\(6, 8\).*\(5, 8\)"):
        oper.load_checkpoint(tmp_path / "other", small)
    with pytest.raises(OperError, match=r"Missing key.*dense"):
        oper.load_checkpoint(tmp_path / "other", sharded(1, 0))
    larger = torch.nn.Sequential(torch.nn.Embedding(5, 8), torch.nn.Linear(8, 1))
    oper.save_checkpoint(tmp_path / "larger", larger)
    with pytest.raises(InvalidInputError, match=r"the model lacks=\['1.bias', '1.weight'\]"):
        oper.load_checkpoint(tmp_path / "larger", small)
    assert_bitwise(small.state_dict()["0.weight"], before, "unchanged")


@pytest.mark.filterwarnings("ignore:no access statistics")
@pytest.mark.parametrize("value", [np.float32(0.5), np.arange(3), Path("x"), (1, np.int64(2)),
                                   lambda: 1], ids=lambda value: type(value).__name__)
def test_values_that_cannot_be_loaded_are_not_saved(value: Any, tmp_path: Path) -> None:
    """Saving them would replace a good checkpoint by one that cannot be loaded."""
    model = oper.shard(torch.nn.EmbeddingBag(20, 4, mode="sum"), optimizer=oper.SGD(lr=0.1))
    dense = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    good = {"step": 1, "seen": (1, 2.5), "at": torch.Size([3]), "names": {"a"}}
    oper.save_checkpoint(tmp_path / "saved", model, dense, good)
    with pytest.raises(InvalidInputError, match=r"extra\.run\.loss=.*convert it"):
        oper.save_checkpoint(tmp_path / "saved", model, dense, {"run": {"loss": value}})
    with oper.DeltaCheckpoints(tmp_path / "saved", model, dense) as saver:
        saver.load()
        with pytest.raises(InvalidInputError, match=r"a delta checkpoint: extra\.loss="):
            saver.save(2, {"loss": value})
    dense.param_groups[0]["lr"] = value
    with pytest.raises(InvalidInputError, match=r"optimizer\.param_groups\.0\.lr="):
        oper.save_checkpoint(tmp_path / "saved", model, dense)
    dense.param_groups[0]["lr"] = 0.1
    assert oper.load_checkpoint(tmp_path / "saved", model, dense) == good


@pytest.mark.parametrize("value", [{}, {1: 2}, [{"a": {}}]], ids=str)
def test_dicts_that_would_change_are_not_saved(value: Any, tmp_path: Path) -> None:
    model = oper.shard(torch.nn.EmbeddingBag(20, 4, mode="sum"), optimizer=oper.SGD(lr=0.1))
    with pytest.raises(InvalidInputError, match=r"extra\.run.*not empty, with keys of type str"):
        oper.save_checkpoint(tmp_path / "saved", model, None, {"run": value})


# ---- survivors save a consistent step, or nothing ------------------------------------------------

POINTS = {"forward": 2, "outbox": 3, "barrier": 4, "update": 5}  # see csrc/host/faults.h


def _fails(rank: int, world_size: int, folder: str, point: str, occasion: int, fault: int,
           pause_us: int) -> dict[str, Any]:
    """Rank 1 is killed, or pauses, at a point of step 2; return what ranks say and save."""
    model = sharded(world_size, 101)
    survivors = Survivors(model, fused(model))
    for step in range(2):
        train(model, rank, world_size, range(step, step + 1))
        survivors.mark()
    report({"trained": True})
    if rank == 1:
        torch.ops.oper.arm_fault(POINTS[point], occasion, fault, pause_us, -1)
    try:
        train(model, rank, world_size, range(2, 4))
    except (DeadlineError, PeerLostError, RuntimeError) as error:
        try:
            wrote = survivors.save(folder, {"next_step": 2, "sums": torch.arange(3.0)})
        except OperError as refusal:
            return {"refused": str(refusal), "error": str(error)}
        return {"wrote": wrote, "error": str(error)}
    return {"went on": True}


def _check_saved(folder: Path, *worlds: tuple[int, int]) -> None:
    """The checkpoint has the state after two steps, on any number of ranks under any plan."""
    held = run_ranks(go_on, worlds[0][0], 101, range(2))
    for size, plan in worlds:
        assert_bitwise(run_ranks(go_on, size, plan, range(2, 2), str(folder)), held,
                       f"the marked step on {size}")


@pytest.mark.parametrize("world_size, point, occasion", [
    (2, "forward", 1), (2, "barrier", 1), (3, "outbox", 1), (2, "barrier", 8), (2, "update", 1),
    (3, "update", 3)])
def test_survivors_save_one_step_or_nothing(world_size: int, point: str, occasion: int,
                                            tmp_path: Path) -> None:
    folder = tmp_path / "c"
    with world(world_size, _fails, str(folder), point, occasion, int(signal.SIGKILL), 0) as running:
        for rank in range(world_size):
            running.receive(rank)
        with pytest.raises(RankFailedError):
            running.receive(1)
        answers = [running.receive(r) for r in range(world_size) if r != 1]
    wrote = [a.get("wrote") for a in answers]
    if point == "forward":  # no rank can have begun an update
        assert wrote[0] is True, answers
    if point == "update":
        assert all("refused" in a for a in answers), answers
    if True in wrote:
        _check_saved(folder, (world_size, 101), (1, 5))
    else:
        assert not folder.exists() and not list(tmp_path.iterdir())


def test_survivors_save_without_a_stalled_rank(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    with world(2, _fails, str(folder), "outbox", 1, 0, 5_000_000, env={"OPER_DEADLINE_S": "1.5"}
               ) as running:
        for rank in range(2):
            running.receive(rank)
        saved, woken = running.receive(0), running.receive(1)
    assert saved.get("wrote") is True, saved
    assert "rank=1" in saved["error"] and "refused" in woken, (saved, woken)
    _check_saved(folder, (2, 101), (1, 5))


def _alive(rank: int, world_size: int, folder: str) -> str:
    model = sharded(world_size, 101)
    survivors = Survivors(model, fused(model))
    train(model, rank, world_size, range(1))
    with pytest.raises(OperError) as unmarked:
        survivors.save(folder)  # a step that no rank has marked
    survivors.mark()
    with pytest.raises(OperError, match="at least one"):
        survivors.save(folder)
    torch.distributed.barrier()
    return str(unmarked.value)


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
