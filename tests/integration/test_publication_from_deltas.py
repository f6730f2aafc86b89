"""Publications that follow deltas equal publications of full checkpoints."""

import itertools
import os
import shutil
import threading
import types
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import oper
from oper.errors import FileFormatError, InvalidInputError
from oper.integration.checkpoint import weights
from oper.integration.checkpoint.delta_files import base_of, find, folder_of
from oper.integration.checkpoint.deltas import DeltaCheckpoints
from oper.integration.checkpoint.follow import Change, Follower
from oper.serve import Server
from oper.serve.signals import Signals
from oper.shmem.publication.reader import Reader
from oper.support.files import read_arrays, write_arrays
from tests.checkpoint_support import Model, flat, fused, run_ranks, sharded, state_of, train
from tests.runtime_support import assert_bitwise
from tests.serve_support import Sums, bits_of

pytest.importorskip("torchrec")

STEPS = range(2, 7)  # of deltas
_names = itertools.count()


def trained(rank: int, world_size: int, plan: int, folder: str, last: int = STEPS[-1],
            every: int = 1, groups: int = 1, **options: Any) -> dict[str, torch.Tensor]:
    """A whole checkpoint of step 1 in ``folder/run``, a delta after each `every` further steps, and
    whole checkpoints of the same steps in ``folder/STEP``; returns the last state."""
    model = sharded(world_size // groups, plan, replica_groups=groups, **options)
    optimizer = fused(model)
    with DeltaCheckpoints(f"{folder}/run", model, optimizer, memory_bytes=20_000) as saver:
        for step in range(1, last + 1):
            train(model, rank, world_size, range(step, step + 1))
            if (step - 1) % every == 0:
                (saver.save if step > 1 else saver.save_full)(step)
                oper.save_checkpoint(f"{folder}/{step}", model, optimizer)
        saver.flush()
    return flat(state_of(model))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("follow")
    run_ranks(trained, 1, 3, str(folder))
    return folder


@pytest.fixture
def run(runs: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    for name in ("run", "run.deltas"):
        shutil.copytree(runs / name, tmp_path / name)
    return tmp_path / "run"


@pytest.fixture
def publish() -> Iterator[Callable[..., oper.Publication]]:
    held = []

    def make(weights: Any, row_dtype: str | None = None) -> oper.Publication:
        held.append(oper.publish(Model(), f"follow-{os.getpid()}-{next(_names)}", weights=weights,
                                 row_dtype=row_dtype))
        return held[-1]

    yield make
    for publication in held:
        publication.close()


@pytest.mark.parametrize(("world_size", "plan", "row_dtype"), [
    (1, 3, "int8"), (2, 101, None), (2, 105, "float16"), (2, 101, "int4")])
def test_every_step_equals_a_full_publication(world_size: int, plan: int, row_dtype: str | None,
                                              tmp_path: Path,
                                              publish: Callable[..., oper.Publication]) -> None:
    """Tables by rows and columns, trained by one rank and by two; all bits."""
    run_ranks(trained, world_size, plan, str(tmp_path))
    run = tmp_path / "run"
    follower = Follower(lambda: run)
    assert not follower.has_whole()
    served = publish(run, row_dtype)
    before = served.memory_bytes()
    steps, seen = [], [bits_of(served.name)]
    for change in follower.changes():
        epoch = served.apply(change.rows, change.dense)
        follower.applied(change)
        steps.append(change.step)
        assert epoch == 1 + 2 * len(steps) == served.epoch
        assert sum(ids.size for ids, _ in change.rows.values()) > 0
        seen.append(bits_of(served.name))
        whole = publish(tmp_path / str(change.step), row_dtype)
        assert seen[-1] == bits_of(whole.name), change.step
        assert seen[-1] != seen[-2]
    assert steps == list(STEPS)
    assert served.memory_bytes() == before  # no second copy
    assert not list(follower.changes())
    # A whole publication after changes, and changes after that, in the other buffer.
    assert served.publish(tmp_path / "4") == epoch + 1
    follower = Follower(lambda: run)
    for change in follower.changes():
        if change.step > 4:
            served.apply(change.rows, change.dense)
        follower.applied(change)
    assert bits_of(served.name) == seen[-1]


TABLES = {"ta": "/model/bags.embedding_bags.ta.weight",
          "tc": "/model/bags.embedding_bags.tc.weight",
          "ts": "/model/items.embeddings.ts.weight", "places": "/model/places.weight"}


def trained_in_groups(rank: int, world_size: int, plan: int, folder: str, every: int, delay: int,
                      bits: int) -> dict[str, torch.Tensor]:
    """Seven steps of two replica groups, with a delta after every second one."""
    return trained(rank, world_size, plan, folder, 7, 2, 2, synchronize_every=every,
                   synchronize_delay=delay, synchronize_bits=bits)


def loaded(rank: int, world_size: int, folder: str) -> dict[str, torch.Tensor]:
    model = sharded(world_size, 3, seed=9)
    oper.load_checkpoint(folder, model, fused(model))
    return flat(state_of(model))


@pytest.mark.parametrize(("plan", "every", "delay", "bits"), [
    (101, 1, 0, 32), (105, 3, 2, 8)])
def test_a_delta_of_groups_has_the_rows_of_its_step(plan: int, every: int, delay: int, bits: int,
                                                    tmp_path: Path) -> None:
    """Covers deltas between synchronizations, while rows are being sent, and of rounded rows."""
    last = run_ranks(trained_in_groups, 4, plan, str(tmp_path), every, delay, bits)
    chain = find(tmp_path / "run", tmp_path / "run")
    assert [(d.step, d.since, d.world_size, d.is_complete) for d in chain] == [
        (3, 1, 4, True), (5, 3, 4, True), (7, 5, 4, True)]
    assert_bitwise(run_ranks(loaded, 1, str(tmp_path / "run")), last, "all deltas")
    state = run_ranks(loaded, 1, str(tmp_path / "1"))
    follower = Follower(lambda: tmp_path / "run")
    for change in follower.changes():
        whole = run_ranks(loaded, 1, str(tmp_path / str(change.step)))
        for name, key in TABLES.items():
            ids, rows = change.rows[name]
            at = torch.from_numpy(ids)
            assert 0 < at.numel() == at.unique().numel()
            assert (state[key][at] != rows).any(dim=1).float().mean() > 0.9  # few did not change
            state[key][at] = rows
            assert torch.equal(state[key], whole[key]), (change.step, name)
        follower.applied(change)
    assert change.step == 7


def number(run: Path, k: int) -> Path:
    return folder_of(run) / base_of(run) / f"{k:06d}"


def follow(follower: Follower) -> list[int]:
    steps: list[int] = []
    take(follower, steps)
    return steps


def take(follower: Follower, steps: list[int]) -> None:
    """Apply all available deltas and record their steps."""
    for change in follower.changes():
        assert dict(change.rows)
        follower.applied(change)
        steps.append(change.step)


def cut(path: Path) -> None:
    part = next(path.glob("*.npz"))
    with zipfile.ZipFile(part) as archive:  # a bit of its longest array
        content = archive.read(max(archive.infolist(), key=lambda member: member.file_size))
    data = bytearray(part.read_bytes())
    data[data.index(content) + len(content) - 1] ^= 1
    part.write_bytes(data)


@pytest.mark.parametrize(("harm", "words", "taken"), [
    (lambda run: shutil.rmtree(number(run, 2)), "000002 is missing, 000003 exists", [2, 3]),
    (lambda run: cut(number(run, 1)), "CRC-32|damaged|checksum", [2]),
    (lambda run: (shutil.rmtree(number(run, 3)), shutil.copytree(number(run, 2), number(run, 3))),
     "ranks, number, step", [2, 3, 4]),
    (lambda run: (number(run, 1).rename(run.parent / "x"), number(run, 2).rename(number(run, 1)),
                  (run.parent / "x").rename(number(run, 2))), "ranks, number, step", [2])],
    ids=["missing", "damaged", "doubled", "out of order"])
def test_a_broken_chain_is_refused_until_the_next_full_checkpoint(
        harm: Callable[[Path], object], words: str, taken: list[int], run: Path, runs: Path
        ) -> None:
    follower = Follower(lambda: run)
    harm(run)
    steps: list[int] = []
    with pytest.raises(FileFormatError, match=words):
        take(follower, steps)
    assert steps == taken
    assert follow(follower) == [] and not follower.has_whole()  # said once
    shutil.rmtree(run)
    shutil.rmtree(folder_of(run))
    assert not follower.has_whole()
    shutil.copytree(runs / "run.deltas", folder_of(run))
    shutil.copytree(runs / "run", run)
    assert follower.has_whole() and not follower.has_whole()
    assert follow(follower) == list(STEPS)


def test_deltas_are_applied_as_they_arrive(run: Path) -> None:
    later = [number(run, k) for k in range(2, 5)]
    for path in later:
        path.rename(run.parent / path.name)
    follower = Follower(lambda: run)
    assert follow(follower) == [2, 3] and follow(follower) == []
    for k, path in enumerate(later):
        (run.parent / path.name).rename(path)
        assert follow(follower) == [4 + k]


def test_deltas_removed_with_their_checkpoint_break_no_chain(run: Path, runs: Path) -> None:
    """As by a run that saves the next checkpoint while a server reads deltas of this one."""
    follower = Follower(lambda: run)
    changes, removed = follower.changes(), number(run, 1)
    follower.applied(next(changes))
    shutil.rmtree(run)
    shutil.copytree(runs / "3", run)
    shutil.rmtree(removed)  # before the delta after it
    assert not list(changes) and follower.has_whole()


def test_a_delta_of_other_steps_is_refused(run: Path) -> None:
    """Its number is right, but it continues another step than the one in service."""
    follower = Follower(lambda: run)
    changes = follower.changes()
    follower.applied(replace(next(changes), step=1))
    with pytest.raises(FileFormatError, match="continues step=2, expected 1"):
        next(changes)


@pytest.mark.parametrize("count", [200, 1000])
def test_many_changes_equal_full_publications(count: int, publish: Callable[..., oper.Publication]
                                              ) -> None:
    """Deltas with rows of some tables, or none, and dense weights; epochs are bit-identical."""
    state = {key: value.clone() for key, value in Model().state_dict().items()}
    served, whole = publish(state, "int8"), publish(state, "int8")
    readers = [Reader(served.name), Reader(whole.name)]
    tables = {key.split(".")[-2]: key for key in state if not key.startswith("dense")}
    rng = np.random.default_rng(0)
    for k in range(1, count + 1):
        rows = {}
        for table, key in tables.items():
            size = state[key].shape[0]
            ids = rng.permutation(size)[:rng.integers(0, min(9, size) + 1)]
            found = torch.from_numpy(rng.standard_normal((ids.size, 8), np.float32))
            state[key][ids] = found
            rows[table] = ids, found
        state["dense.bias"] += 1
        served.apply(rows, {key: v for key, v in state.items() if key.startswith("dense")})
        whole.publish(state)
        first, second = (reader.sums() for reader in readers)
        assert first == second, k
    assert [reader.epoch for reader in readers] == [2 * count + 1, count + 1]
    for reader in readers:
        reader.close()


def test_deltas_follow_weights_that_a_signal_publishes_again(
        run: Path, runs: Path, publish: Callable[..., oper.Publication],
        monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them: later deltas alone would leave out the changes of the earlier ones."""
    pytest.importorskip("httptools")
    served, last = publish(run), number(run, 4)
    last.rename(run.parent / last.name)
    server, signals, follower = Server(Sums()), Signals(), Follower(lambda: run)
    steps: list[int] = []

    def switch(change: Change | None = None) -> int:
        steps.append(0 if change is None else change.step)
        return served.publish(run) if change is None else served.apply(change.rows, change.dense)

    def every() -> None:
        server.follow(follower)
        if steps == [2, 3, 4, 5]:
            (run.parent / last.name).rename(last)
            signals.reload = True
        signals.stop = steps[-1] == STEPS[-1]

    monkeypatch.setattr(server, "publish", switch)
    counts: Any = types.SimpleNamespace(failed_publications=0)
    server._counts, server._thread = counts, threading.Thread(target=server._stop.wait)
    server._thread.start()
    server.serve_until_signalled(every, signals)
    assert steps == [2, 3, 4, 5, 0, *STEPS]
    assert bits_of(served.name) == bits_of(publish(runs / str(STEPS[-1])).name)


def test_damaged_rows_change_nothing(run: Path, publish: Callable[..., oper.Publication]) -> None:
    """Rows are read at publication, one table at a time."""
    served = publish(run)
    before = bits_of(served.name)
    part = max(number(run, 0).glob("*.npz"))
    with zipfile.ZipFile(part) as archive:
        end = max(i.header_offset + i.file_size for i in archive.infolist()
                  if i.filename.endswith(".rows.npy"))  # the end of its rows
    data = bytearray(part.read_bytes())
    data[end - 8] ^= 1
    part.write_bytes(data)
    follower = Follower(lambda: run)
    change = next(follower.changes())
    with pytest.raises(FileFormatError, match=r"delta 000000: rows of table '.*CRC-32"):
        served.apply(change.rows, change.dense)
    assert bits_of(served.name) == before and served.epoch == 1
    assert not list(follower.changes())  # said once


@pytest.mark.parametrize("harm", [
    lambda arrays, meta: arrays.update(state=np.arange(99, dtype=np.uint8)),
    lambda arrays, meta: arrays.update(state=arrays["state"][:0]),
    lambda arrays, meta: arrays.update({"0.ids": np.array(3)}),
    lambda arrays, meta: arrays.update({"0.ids": np.tile(arrays["0.ids"], 2)}),
    lambda arrays, meta: arrays.update({"0.rows": arrays["0.rows"].astype(np.int16)}),
    lambda arrays, meta: arrays.update({"0.rows": arrays["0.rows"].astype(np.float64)}),
    lambda arrays, meta: meta.update(time_us="x"),
    lambda arrays, meta: meta["items"][0].__setitem__(3, [])])
def test_intact_files_with_other_contents_are_refused(
    harm: Callable[..., None], run: Path, publish: Callable[..., oper.Publication]
) -> None:
    served = publish(run)
    before = bits_of(served.name)
    for part in number(run, 0).glob("*.npz"):
        arrays, meta = read_arrays(part, "oper-delta", 1)
        if "state" in arrays and "0.ids" in arrays:
            harm(arrays, meta)
            write_arrays(part, "oper-delta", 1, arrays, meta)
    follower = Follower(lambda: run)
    with pytest.raises(FileFormatError, match="delta 000000"):
        change = next(follower.changes())
        served.apply(change.rows, change.dense)
    assert bits_of(served.name) == before and not list(follower.changes())


def test_a_checkpoint_that_is_removed_while_it_is_read_changes_nothing(
    run: Path, publish: Callable[..., oper.Publication], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training run may replace a checkpoint while a server reads it."""
    served = publish(run)
    before, opened = bits_of(served.name), weights._common_prefix
    monkeypatch.setattr(weights, "_common_prefix", lambda *given: (
        shutil.rmtree(run), opened(*given))[1])
    with pytest.raises(FileFormatError, match="newest checkpoint, which may have replaced it"):
        served.publish(run)
    assert bits_of(served.name) == before and served.epoch == 1


def test_deltas_that_do_not_fit_change_nothing(runs: Path, publish: Callable[..., oper.Publication]
                                               ) -> None:
    served = publish(runs / "run", "int8")
    before = bits_of(served.name)
    change = next(Follower(lambda: runs / "run").changes())
    ids, rows = change.rows["tc"]
    broken = rows.clone()
    broken[1, 3] = float("nan")

    def refused(words: str, found: dict[str, tuple[np.ndarray, torch.Tensor]],
                dense: dict[str, torch.Tensor] | None = None) -> None:
        with pytest.raises(InvalidInputError, match=words):
            served.apply({**change.rows, **found}, dense)

    refused(f"rows of table 'tc': row {ids[1]}='inf or nan'", {"tc": (ids, broken)})
    refused("rows of table 'tx'", {"tx": (ids, rows)})
    refused("rows of table 'tc': ids", {"tc": (ids + 500, rows)})
    refused("rows of table 'tc': ids", {"tc": (ids[:1], rows)})
    refused("rows of table 'tc'.*12, 4", {"tc": (ids, rows[:, :4])})
    refused("dense.bias", {}, {**change.dense, "dense.bias": torch.tensor([float("inf")])})
    refused("dense.bias", {}, {**change.dense, "dense.bias": torch.zeros(2)})
    assert bits_of(served.name) == before and served.epoch == 1
    assert isinstance(change, Change) and change.time_s > 1e9
