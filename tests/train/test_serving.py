"""Runs that are served or copied while they train."""

import json
import logging
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oper.data import Folder
from oper.data.reading import store as stores
from oper.errors import InvalidInputError
from oper.integration.checkpoint.delta_files import base_of, folder_of
from oper.integration.checkpoint.files import CHECKSUMS, check_files
from oper.integration.checkpoint.follow import Follower
from oper.serve import Client, Request
from oper.serve.model import load_model
from oper.train.mirror import RunMirror
from oper.train.model import build_dlrm, load_state
from oper.train.resume import CHECKPOINT, CONFIG, STATE
from oper.train.tasks import click_batches
from oper.train.trained import find_weights
from tests.integration.test_deltas import saved_run
from tests.serve_support import value_of
from tests.support import announced, serving, wait_for
from tests.train.conftest import Prepared
from tests.train.test_train import config, run_ranks, words

# ---- scores over HTTP ----------------------------------------------------------------------------

SERVER = ("--json", "--workers", "1")


def validation_batch(prepared: Prepared, run: Path) -> tuple[Request, np.ndarray]:
    """Return a validation batch and the trained model's scores for it."""
    trained = config(prepared, run)
    folder = Folder.open(trained.data)
    model = build_dlrm(folder.tables(trained.model.dim), len(folder.dense), trained.model, seed=9)
    model.load_state_dict(load_state(run / STATE), strict=True)
    batch = next(iter(click_batches(trained, "valid")))
    with torch.no_grad():
        _, (_, logits, _) = model.eval()(batch)
    sparse = batch.sparse_features
    assert list(sparse.keys()) == [f for t in folder.tables(8) for f in t.features]
    lengths = sparse.lengths().view(len(sparse.keys()), -1)
    return (Request(batch.dense_features.numpy(), lengths.numpy().astype(np.int32),
                    sparse.values().numpy().astype(np.int64)),
            torch.sigmoid(logits.reshape(-1)).numpy())


def test_two_ranks_train_and_the_server_has_the_same_scores(prepared: Prepared, tmp_path: Path
                                                            ) -> None:
    """The server first uses a checkpoint, as during training, then detects the final state."""
    run = tmp_path / "run"
    run_ranks(words(prepared, run, stats=prepared.stats, batch_size=128, max_steps=20,
                    checkpoint_every=20))
    request, expected = validation_batch(prepared, run)
    assert expected.std() > 1e-3
    os.rename(run / STATE, tmp_path / STATE)
    assert find_weights(run).name == CHECKPOINT
    with serving(run, *SERVER, "--watch") as server:
        client = Client(announced(server)["address"], timeout_s=30)
        scores, first = client.score_request(request)
        assert np.abs(scores - expected).max() < 1e-6
        os.utime(tmp_path / STATE)
        os.rename(tmp_path / STATE, run / STATE)
        wait_for(lambda: client.score_request(request)[1] == first + 1)
        assert np.abs(client.score_request(request)[0] - expected).max() < 1e-6
        # The next checkpoint is damaged: it is refused, and the old weights remain in use.
        data = next(p for p in (run / CHECKPOINT).iterdir() if p.suffix == ".distcp")
        data.write_bytes(data.read_bytes()[:-8])
        os.utime(run / CHECKPOINT / ".metadata")
        wait_for(lambda: "oper_failed_publications_total 1" in client.metrics())
        assert client.score_request(request)[1] == first + 1
        server.send_signal(signal.SIGTERM)
        _, log = server.communicate(timeout=120)
        assert server.returncode == 0
        assert f"loading {run / CHECKPOINT}" in log
        assert f"cannot read the checkpoint {str(run / CHECKPOINT)!r}" in log


def test_a_server_follows_the_steps_of_a_run(prepared: Prepared, tmp_path: Path) -> None:
    """Every delta copied to a store is served, with its lag; a damaged one is refused."""
    run, copy = tmp_path / "run", tmp_path / "copy"
    run_ranks(words(prepared, run, stats=prepared.stats, batch_size=128, max_steps=9,
                    checkpoint_every=5, delta_every=1))
    request, expected = validation_batch(prepared, run)
    chain = next((run / f"{CHECKPOINT}.deltas").iterdir())
    deltas = sorted(chain.iterdir())
    assert [d.name for d in deltas] == [f"{k:06d}" for k in range(4)]  # of steps 6 to 9
    os.rename(run / STATE, tmp_path / STATE)
    there = copy / f"{CHECKPOINT}.deltas" / chain.name
    copy.mkdir()
    with serving(run, *SERVER, "--follow", copy.as_uri()) as server:
        client = Client(announced(server)["address"], timeout_s=30)
        assert client.score_request(request)[1] == 1
        shutil.copytree(run / CHECKPOINT, copy / CHECKPOINT)
        wait_for(lambda: client.score_request(request)[1] == 2)
        before = client.score_request(request)[0]
        for k, delta in enumerate(deltas[:3]):
            shutil.copytree(delta, tmp_path / "delta")
            there.mkdir(parents=True, exist_ok=True)
            os.rename(tmp_path / "delta", there / delta.name)
            wait_for(lambda epoch=4 + 2 * k: client.score_request(request)[1] == epoch)
            scores = client.score_request(request)[0]
            assert np.abs(scores - before).max() > 0
            before = scores
        wait_for(lambda: value_of(client.metrics(), "oper_weights_lag_seconds") > 0)
        shutil.copytree(deltas[3], tmp_path / "delta")
        part = next((tmp_path / "delta").iterdir())
        part.write_bytes(part.read_bytes()[:-9])
        os.rename(tmp_path / "delta", there / deltas[3].name)
        assert server.stderr is not None
        lines = iter(server.stderr.readline, "")
        assert "the old weights remain in use until the next full checkpoint" in next(
            line for line in lines if deltas[3].name in line)
        assert client.score_request(request)[1] == 8
        os.utime(tmp_path / STATE)
        os.rename(tmp_path / STATE, copy / STATE)
        wait_for(lambda: client.score_request(request)[1] == 9)
        assert np.abs(client.score_request(request)[0] - expected).max() < 1e-6
        # The last delta leads to the weights with which the run ends.
        shutil.rmtree(there / deltas[3].name)
        shutil.copytree(deltas[3], there / deltas[3].name)
        os.unlink(copy / STATE)
        wait_for(lambda: client.score_request(request)[1] == 10 + 2 * 4)
        assert np.abs(client.score_request(request)[0] - expected).max() < 1e-6
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=120)
        assert server.returncode == 0


def test_the_newest_weights_are_served(tmp_path: Path) -> None:
    from oper.errors import FileFormatError

    with pytest.raises(FileFormatError, match="first checkpoint"):
        find_weights(tmp_path)
    previous = tmp_path / f"{CHECKPOINT}.previous"
    for k, path in enumerate((previous / ".metadata", tmp_path / CHECKPOINT / ".metadata",
                              tmp_path / STATE)):
        path.parent.mkdir(exist_ok=True)
        path.write_text(str(k))
        os.utime(path, (k, k))
        assert find_weights(tmp_path) == (path if path.name == STATE else path.parent)
    os.utime(tmp_path / CHECKPOINT / ".metadata", (9, 9))
    assert find_weights(tmp_path) == tmp_path / CHECKPOINT
    os.utime(tmp_path / STATE, (10, 10))
    assert find_weights(tmp_path) == tmp_path / STATE
    # The run continues the deltas of its checkpoint.
    delta = folder_of(tmp_path / CHECKPOINT) / base_of(tmp_path / CHECKPOINT) / "000000"
    delta.mkdir(parents=True)
    assert find_weights(tmp_path) == tmp_path / STATE
    (delta / "rank-00000-00000.npz").touch()
    assert find_weights(tmp_path) == tmp_path / CHECKPOINT


def test_weights_whose_rows_are_numbered_differently_are_refused(prepared: Prepared, tmp_path: Path
                                                                 ) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    run_ranks(words(prepared, run, stats=prepared.stats, batch_size=128, max_steps=1,
                    checkpoint_every=1), 1)
    shutil.copytree(run, other)
    about = json.loads((other / CONFIG).read_text())
    numbering = about["model"]["numbering"]
    assert numbering == Folder.open(prepared.folder).manifest["numbering"]
    about["model"]["numbering"] = "another"
    (other / CONFIG).write_text(json.dumps(about))
    for served in (STATE, CHECKPOINT):
        if served == CHECKPOINT:
            os.unlink(run / STATE)
        with closing(load_model(run)) as model:
            model.reads_again(lambda model=model: model.read_folder(other))
            with pytest.raises(InvalidInputError,
                               match=f"numbering.*='another', expected {numbering}"):
                model.publish()
    os.unlink(other / STATE)  # its checkpoint has the numbering of the data
    with closing(load_model(other)) as model:
        model.reads_again(lambda: model.read_folder(run))
        assert model.publish() == 2


# ---- local copies of runs in a store -------------------------------------------------------------

fsspec: Any = pytest.importorskip("fsspec")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs with a checkpoint and two deltas each."""
    found = []
    for plan in (3, 4):
        found.append(tmp_path_factory.mktemp("run"))
        saved_run(0, 1, plan, str(found[-1] / CHECKPOINT), 4)
    return found


def names_in(run: Path) -> list[str]:
    return sorted(str(p.relative_to(run)) for p in run.rglob("*") if p.is_file())


class Store:
    """A folder in a store, to which files are uploaded."""

    def __init__(self, url: str, place: str, files: Any) -> None:
        self.url, self._place, self._files = url, place, files

    def put(self, name: str, data: bytes) -> None:
        self._files.pipe(f"{self._place}/{name}", data)

    def remove(self, name: str) -> None:
        self._files.rm(f"{self._place}/{name}")


@pytest.fixture(params=["memory", "file", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "memory":
        files = fsspec.filesystem("memory")
        yield Store(f"memory://{tmp_path.name}", tmp_path.name, files)
        files.rm(f"/{tmp_path.name}", recursive=True)
    elif request.param == "file":
        yield Store((tmp_path / "store").as_uri(), str(tmp_path / "store"),
                    fsspec.filesystem("file", auto_mkdir=True))
    else:
        from fsspec.implementations.arrow import ArrowFSWrapper
        from pyarrow import fs

        url = request.getfixturevalue("bucket").format(tmp_path.name)
        found, path, _ = stores.filesystem(url)
        assert isinstance(found, fs.S3FileSystem)
        yield Store(url, path, ArrowFSWrapper(found))


def upload(store: Store, run: Path, mirror: RunMirror, seed: int) -> None:
    """Upload a run file by file, in random order, and update the mirror after each file."""
    names = names_in(run)
    random.Random(seed).shuffle(names)
    for name in names:
        store.put(name, (run / name).read_bytes())
        mirror.update()
        if (mirror.folder / CHECKPOINT).exists():
            check_files(mirror.folder / CHECKPOINT)


def assert_equal(mirror: RunMirror, run: Path) -> None:
    assert names_in(mirror.folder) == names_in(run)
    for name in names_in(run):
        assert (mirror.folder / name).read_bytes() == (run / name).read_bytes(), name


def test_files_of_a_run_may_arrive_in_any_order(place: Store, runs: list[Path]) -> None:
    """The next run replaces it in the same places; its deltas can be followed."""
    with closing(RunMirror(place.url)) as mirror:
        assert names_in(mirror.folder) == []
        upload(place, runs[0], mirror, 1)
        assert_equal(mirror, runs[0])
        follower = Follower(lambda: mirror.folder / CHECKPOINT)
        for change in follower.changes():
            assert dict(change.rows)
            follower.applied(change)
        assert change.step == 4 and not follower.has_whole()
        upload(place, runs[1], mirror, 2)
        for name in names_in(runs[0]):
            if name not in names_in(runs[1]):
                place.remove(name)
        mirror.update()
        assert_equal(mirror, runs[1])
        assert follower.has_whole() and [c.step for c in follower.changes()] == [3]
        # A damaged checkpoint stays away, and is served when it has been repaired.
        held = (mirror.folder / CHECKPOINT).stat().st_ino
        for name in names_in(runs[0]):
            data = bytearray((runs[0] / name).read_bytes())
            if name.endswith(".distcp"):
                data[len(data) // 2] ^= 1
            place.put(name, bytes(data))
        mirror.update()
        mirror.update()
        if place.url.startswith("s3:"):  # whose times have whole seconds only
            time.sleep(1.1)
        assert (mirror.folder / CHECKPOINT).stat().st_ino == held
        upload(place, runs[0], mirror, 3)
        assert base_of(mirror.folder / CHECKPOINT) == base_of(runs[0] / CHECKPOINT)
    assert not mirror.folder.exists()


def test_a_file_that_another_one_of_its_size_replaces(place: Store) -> None:
    for content in (b"old", b"new"):
        place.put(STATE, content)
        if content == b"old":
            mirror = RunMirror(place.url)
            if place.url.startswith("s3:"):  # whose times have whole seconds only
                time.sleep(1.1)
    mirror.update()
    assert (mirror.folder / STATE).read_bytes() == b"new"
    mirror.close()


def test_the_last_state_of_a_run_that_has_ended_is_served(runs: list[Path], tmp_path: Path) -> None:
    """Not its last delta, which the mirror copies after the state."""
    shutil.copytree(runs[0], tmp_path / "run")
    (tmp_path / "run" / STATE).touch()
    with closing(RunMirror((tmp_path / "run").as_uri())) as mirror:
        assert len(names_in(mirror.folder)) == len(names_in(tmp_path / "run"))
        assert find_weights(mirror.folder) == mirror.folder / STATE


def test_a_thread_follows_and_reports_an_error_once(runs: list[Path], tmp_path: Path,
                                                    caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(runs[0], tmp_path / "run")
    sums = tmp_path / "run" / CHECKPOINT / CHECKSUMS
    good = next(p for p in sums.parent.iterdir() if p.suffix == ".distcp")
    data = good.read_bytes()
    good.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with caplog.at_level(logging.WARNING), RunMirror((tmp_path / "run").as_uri()) as mirror:
        assert not (mirror.folder / CHECKPOINT).exists()
        assert caplog.text.count("is not served yet") == 1 and good.name in caplog.text
        good.write_bytes(data)
        wait_for(lambda: (mirror.folder / CHECKPOINT).exists()
                 and folder_of(mirror.folder / CHECKPOINT).exists())
        shutil.rmtree(tmp_path / "run")
        (tmp_path / "run").write_text("a file instead of the folder")
        wait_for(lambda: "cannot use a store" in caplog.text)
        assert (mirror.folder / CHECKPOINT).exists()
        folder = mirror.folder
    assert caplog.text.count("cannot use a store") == 1 and not folder.exists()


def test_a_delta_that_is_late(place: Store, runs: list[Path]) -> None:
    """Files of later deltas may arrive before a delta; the chain continues when it has arrived."""
    names = names_in(runs[0])
    late = [n for n in names if n.startswith(f"{CHECKPOINT}.deltas/") and "/000000/" in n]
    for name in sorted(set(names) - set(late)):
        place.put(name, (runs[0] / name).read_bytes())
    with closing(RunMirror(place.url)) as mirror:
        follower = Follower(lambda: mirror.folder / CHECKPOINT)
        assert "missing delta='000000', expected all deltas up to 000001" in mirror.update()
        assert not list(follower.changes())
        for name in late:
            place.put(name, (runs[0] / name).read_bytes())
        assert mirror.update() == ""
        steps = []
        for change in follower.changes():
            follower.applied(change)
            steps.append(change.step)
        assert len(steps) == 2


def test_parts_of_a_delta_that_a_resumed_run_has_removed(place: Store, runs: list[Path]) -> None:
    """They do not complete the delta that the run writes instead."""
    names = names_in(runs[0])
    part = next(n for n in names if "/000001/" in n)
    old = part.replace("rank-00000", "rank-00001")
    for name in names:
        if name != part:
            place.put(name, (runs[0] / name).read_bytes())
    place.put(old, b"of two ranks")
    mirror = RunMirror(place.url)
    try:
        assert (mirror.folder / old).exists()
        place.remove(old)
        place.put(part, (runs[0] / part).read_bytes())
        mirror.update()
        assert_equal(mirror, runs[0])
    finally:
        mirror.close()


def test_a_file_that_is_removed_meanwhile(runs: list[Path], tmp_path: Path,
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, a run replaces a checkpoint while a server starts."""
    shutil.copytree(runs[0], tmp_path / "run")
    opens, opened = stores.open_input, []

    def remove_first(url: str) -> Any:
        opened.append(url)
        if ".deltas/" in url:
            shutil.rmtree(tmp_path / "run" / f"{CHECKPOINT}.deltas", ignore_errors=True)
        return opens(url)

    monkeypatch.setattr(stores, "open_input", remove_first)
    mirror = RunMirror((tmp_path / "run").as_uri())
    assert ".deltas/" in opened[-1] and (mirror.folder / CHECKPOINT).exists()
    assert mirror.update() == ""
    mirror.close()


def test_errors_of_any_class_from_a_store_are_logged(runs: list[Path], tmp_path: Path,
                                                     monkeypatch: pytest.MonkeyPatch,
                                                     caplog: pytest.LogCaptureFixture) -> None:
    """After an error of any class, the next update finds new files."""
    lists, fails = stores.listing, [True, True]

    def list_or_fail(url: str) -> Any:
        if fails and (tmp_path / "run").exists():
            fails.pop()
            raise RuntimeError("no route")
        return lists(url)

    monkeypatch.setattr(stores, "listing", list_or_fail)
    with caplog.at_level(logging.WARNING), RunMirror((tmp_path / "run").as_uri()) as mirror:
        shutil.copytree(runs[0], tmp_path / "run")
        wait_for(lambda: (mirror.folder / CHECKPOINT).exists())
    assert caplog.text.count("no route") == 1


def test_older_weights_do_not_return_while_a_checkpoint_is_replaced(
        runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / STATE).write_bytes(b"older")
    os.utime(tmp_path / "run" / STATE, (1, 1))
    shutil.copytree(runs[0] / CHECKPOINT, tmp_path / "run" / CHECKPOINT)
    mirror = RunMirror((tmp_path / "run").as_uri())
    follower = Follower(lambda: find_weights(mirror.folder))
    shutil.rmtree(tmp_path / "run" / CHECKPOINT)
    shutil.copytree(runs[1] / CHECKPOINT, tmp_path / "run" / CHECKPOINT)
    rename, seen = Path.rename, []

    def look_after(path: Path, to: Path) -> Path:
        found = rename(path, to)
        seen.append((path.name, follower.has_whole()))
        return found

    monkeypatch.setattr(Path, "rename", look_after)
    mirror.update()
    assert seen == [(CHECKPOINT, False), (f"{CHECKPOINT}.incoming", True)]
    mirror.close()


def test_a_store_that_cannot_be_opened() -> None:
    with pytest.raises(InvalidInputError, match="cannot open a store"):
        RunMirror("nothing://here/run")
