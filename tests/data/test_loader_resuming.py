"""Loaders in worker processes, exact resuming, and the same global batches for any ranks."""

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from oper.data import Loader, LoaderOptions, PreprocessOptions, preprocess
from oper.data.generic import Choice, generic_recipe
from oper.data.loading.windows import WindowReader
from oper.errors import InvalidInputError
from tests.data.loader_support import everything, write_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    return write_folder(tmp_path_factory.mktemp("loader"))


@pytest.mark.parametrize("workers, persistent", [(1, False), (3, False), (2, True)])
def test_any_number_of_worker_processes(folder: Path, workers: int, persistent: bool) -> None:
    options = LoaderOptions(32, 96, seed=2, rank=1, world_size=2)
    plain, loader = (Loader(folder, "train", options) for _ in range(2))
    data = DataLoader(loader, batch_size=None, num_workers=workers, persistent_workers=persistent)
    assert len(data) == len(plain)
    for epoch in (0, 5):
        for x in (plain, loader):
            x.set_epoch(epoch)
        assert [everything(b) for b in data] == [everything(b) for b in plain]


def test_workers_read_separate_windows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker reads only its windows if `interleave` is a multiple of the number of workers."""
    read: list[int] = []
    genuine = WindowReader.read
    monkeypatch.setattr(WindowReader, "read",
                        lambda self, window: (read.append(window), genuine(self, window))[1])
    for interleave, workers in ((1, 2), (2, 2), (4, 2), (3, 3)):
        loader = Loader(folder, "train", LoaderOptions(16, 32, interleave=interleave, prefetch=0))
        whole = [everything(b) for b in loader]
        shares: list[list[bytes]] = []
        seen: list[int] = []
        for worker in range(workers):
            read.clear()
            shares.append([everything(b) for b in loader._batches(
                range(worker, len(loader), workers), 0, -1)])
            seen += read
        assert [shares[k % workers][k // workers] for k in range(len(whole))] == whole
        # There are 15 full windows and a short one; all workers read the windows that are not
        # interleaved.
        turns = 15 // interleave * interleave
        again = sorted(w for w in seen if w < turns)
        assert again == sorted(range(turns)) if interleave > 1 else len(again) == 2 * turns


def test_workers_that_are_spawned(folder: Path) -> None:
    loader = Loader(folder, "train", LoaderOptions(128))
    data = DataLoader(loader, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    assert [everything(b) for b in data] == [everything(b) for b in loader]
    again = pickle.loads(pickle.dumps(loader))
    assert [everything(b) for b in again] == [everything(b) for b in loader]


@pytest.mark.parametrize("workers, done", [(0, 0), (0, 8), (1, 5), (3, 1), (3, 7)])
def test_resuming_with_other_workers(folder: Path, workers: int, done: int) -> None:
    options = LoaderOptions(32, 64, rank=0, world_size=2, seed=9)
    loader = Loader(folder, "train", options)
    loader.set_epoch(3)
    whole = [everything(b) for b in loader]
    state = json.loads(json.dumps(loader.state_dict(done)))
    other = Loader(folder, "train", options)
    other.load_state_dict(state)
    assert other.epoch == 3 and other.state_dict() == state
    other.set_epoch(3)  # as a loop over epochs does; the position is kept
    data = DataLoader(other, batch_size=None, num_workers=workers)
    assert [everything(b) for b in data] == whole[done:]
    other.set_epoch(4)
    loader.set_epoch(4)
    assert [everything(b) for b in data] == [everything(b) for b in loader]


def test_a_state_counts_returned_batches_only(folder: Path) -> None:
    loader = Loader(folder, "train", LoaderOptions(32, 64, prefetch=3))
    whole = [everything(b) for b in loader]
    assert loader.state_dict()["batch"] == len(whole)
    assert len([1 for _ in loader]) == len(whole), "an epoch that ended begins anew"
    iterator = iter(loader)
    assert loader.state_dict()["batch"] == 0
    for k in range(5):
        next(iterator)
        assert loader.state_dict()["batch"] == k + 1
    state = loader.state_dict()
    assert len(json.dumps(state)) < 1000
    for rank_options in ({}, {"prefetch": 0}):
        other = Loader(folder, "train", LoaderOptions(32, 64, **rank_options))
        other.load_state_dict(state)
        assert [everything(b) for b in other] == whole[5:]
        assert [everything(b) for b in other] == whole, "the place is used once"
    fresh = iter(loader)
    next(fresh)
    next(iterator)
    assert loader.state_dict()["batch"] == 1, "only the iterator begun last counts"


class _Worker(Loader):
    """Saves the loader's state in the worker, as StatefulDataLoader does."""

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield batch, self.state_dict()


def test_states_of_workers(folder: Path) -> None:
    options = LoaderOptions(32, 64)
    whole = [everything(b) for b in Loader(folder, "train", options)]
    data = DataLoader(_Worker(folder, "train", options), batch_size=None, num_workers=3)
    given = list(data)
    assert [everything(b) for b, _ in given] == whole
    states = [s for _, s in given]
    assert [s["worker"] for s in states[:4]] == [[0, 3], [1, 3], [2, 3], [0, 3]]
    assert [s["batch"] for s in states[:4]] == [3, 4, 5, 6]
    assert {s["batch"] for s in states[-3:]} == {len(whole)}
    alone = Loader(folder, "train", options)
    alone.load_state_dict(states[1])
    with pytest.raises(InvalidInputError, match="num_workers"):
        iter(alone)


class _Resumed(Loader):
    """Loads a state in the worker, as StatefulDataLoader does."""

    states: tuple[dict[str, Any], ...] = ()

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        self.load_state_dict(self.states[info.id])
        return super().__iter__()


def test_workers_resume_from_their_states(folder: Path) -> None:
    options = LoaderOptions(32, 64)
    given = list(DataLoader(_Worker(folder, "train", options), batch_size=None, num_workers=2))
    resumed = _Resumed(folder, "train", options)
    resumed.states = (given[4][1], given[5][1])
    found = [everything(b) for b in DataLoader(resumed, batch_size=None, num_workers=2)]
    assert found == [everything(b) for b, _ in given[6:]]


def test_stateful_data_loader(folder: Path) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    options = LoaderOptions(32, 64)
    whole = [everything(b) for b in Loader(folder, "train", options)]
    for workers in (0, 2):
        data = stateful(Loader(folder, "train", options), batch_size=None, num_workers=workers)
        iterator = iter(data)
        for _ in range(5):
            next(iterator)
        state = data.state_dict()
        again = stateful(Loader(folder, "train", options), batch_size=None, num_workers=workers)
        again.load_state_dict(state)
        assert [everything(b) for b in again] == whole[5:]


def test_a_state_of_other_options_is_refused(folder: Path, tmp_path: Path) -> None:
    options = {"batch_size": 32, "window": 64, "seed": 1, "rank": 0, "world_size": 2}
    loader = Loader(folder, "train", LoaderOptions(**options))
    state = loader.state_dict(3)
    for change, word in (({"batch_size": 16}, "batch_size"), ({"window": 96}, "window"),
                         ({"seed": 2}, "seed"), ({"world_size": 4}, "world_size"),
                         ({"drop_last": True}, "drop_last"), ({"group_by": "user"}, "group_by"),
                         ({"interleave": 2}, "interleave"),
                         ({"weights": {"item": "price"}}, "weights"),
                         ({"deduplicate": ("user",)}, "deduplicate")):
        other = Loader(folder, "train", LoaderOptions(**{**options, **change}))
        with pytest.raises(InvalidInputError, match=word):
            other.load_state_dict(state)
        assert other.state_dict()["batch"] == 0
    Loader(folder, "train", LoaderOptions(**{**options, "rank": 1})).load_state_dict(state)
    with pytest.raises(InvalidInputError, match="split"):
        Loader(folder, "valid", LoaderOptions(**options)).load_state_dict(state)
    again = write_folder(tmp_path)
    with pytest.raises(InvalidInputError, match="folder"):
        Loader(again, "train", LoaderOptions(**options)).load_state_dict(state)
    wrong: list[Any] = [None, [], {}, {**state, "more": 1}, {**state, "batch": -1},
                        {**state, "batch": 10**6}, {**state, "batch": 1.0}, {**state, "epoch": "0"},
                        {**state, "worker": [1]}, {**state, "worker": "ab"},
                        {**state, "version": 2}, {**state, "drop_last": 0},
                        {**state, "shuffle": state["shuffle"][::-1]}]
    for value in wrong:
        with pytest.raises(InvalidInputError, match="cannot load the loader's state"):
            loader.load_state_dict(value)
    for count in (-1, 10**6, 1.5):
        with pytest.raises(InvalidInputError, match="num_batches"):
            loader.state_dict(count)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="epoch"):
        loader.set_epoch(-1)


# ---- the same global batches for every number of ranks -------------------------------------------

ROWS = 611


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log with row numbers in its dense column, single ids and bags."""
    path = tmp_path_factory.mktemp("shares")
    with (path / "log.csv").open("w") as file:
        file.write("y,n,a,b\n")
        for k in range(ROWS):
            bag = "|".join(f"b{j % 13}" for j in range(k, k + k % 4))
            file.write(f"{k % 2},{k},a{k % 29},{bag}\n")
    preprocess(generic_recipe("csv", Choice(["a", "b:|"], "y", ["n"])), [str(path / "log.csv")],
               path / "out", PreprocessOptions(valid="0", row_group_rows=70, min_count=1))
    return path / "out"


def epoch(numbered: Path, rank: int, world_size: int, number: int, **options: Any) -> list[Any]:
    loader = Loader(numbered, "train", LoaderOptions(
        60 // world_size, rank=rank, world_size=world_size, share="batches", **options))
    loader.set_epoch(number)
    return list(loader)


@pytest.mark.parametrize("options", [{"window": 130}, {"window": 0}, {"window": 1, "seed": 4},
                                     {"window": 130, "drop_last": True}])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_same_global_batches(numbered: Path, options: dict[str, Any], world_size: int) -> None:
    one = epoch(numbered, 0, 1, 2, **options)
    ranks = [epoch(numbered, r, world_size, 2, **options) for r in range(world_size)]
    assert {len(r) for r in ranks} == {len(one)}
    for whole, *parts in zip(one, *ranks, strict=True):
        sizes = [p.labels.numel() for p in parts]
        assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
        for name in ("labels", "dense_features"):
            assert torch.equal(torch.cat([getattr(p, name) for p in parts]), getattr(whole, name))
        for key in ("a", "b"):
            for what in ("values", "lengths"):
                joined = torch.cat([getattr(p.sparse_features[key], what)() for p in parts])
                assert torch.equal(joined, getattr(whole.sparse_features[key], what)())
    seen = [int(n) for b in one for n in b.dense_features[:, 0]]
    kept = ROWS // 60 * 60 if options.get("drop_last") else ROWS
    assert len(seen) == len(set(seen)) == kept
    assert (seen == list(range(ROWS))) == (options["window"] == 0)


def test_a_state_of_another_number_of_ranks(numbered: Path) -> None:
    whole = epoch(numbered, 0, 1, 3)
    loader = Loader(numbered, "train", LoaderOptions(60, rank=0, world_size=1, share="batches"))
    loader.set_epoch(3)
    state = loader.state_dict(4)
    for rank in range(2):
        other = Loader(numbered, "train", LoaderOptions(30, rank=rank, world_size=2,
                                                        share="batches"))
        other.load_state_dict(state)
        rest = [b.labels for b in other]
        parts = [b.labels.tensor_split(2)[rank] for b in whole[4:]]
        assert all(map(torch.equal, rest, parts)) and len(rest) == len(whole) - 4
    with pytest.raises(InvalidInputError, match="share"):
        Loader(numbered, "train", LoaderOptions(60, rank=0, world_size=1)).load_state_dict(state)
    with pytest.raises(InvalidInputError, match=r"one of .*rows.*batches"):
        LoaderOptions(60, share="all")
