"""A run in a store, followed by a local copy: complete files, one checkpoint at a time."""

from __future__ import annotations

import logging
import os
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oper.data.reading import store as stores
from oper.errors import InvalidInputError
from oper.integration.checkpoint.delta_files import base_of, folder_of
from oper.integration.checkpoint.files import CHECKSUMS, check_files
from oper.integration.checkpoint.follow import Follower
from oper.train.mirror import RunMirror
from oper.train.resume import CHECKPOINT, STATE
from oper.train.trained import find_weights
from tests.integration.test_deltas import saved_run
from tests.support import wait_for

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


def test_a_run_arrives_whatever_the_order(place: Store, runs: list[Path]) -> None:
    """The next run replaces it in the same places; its deltas can be followed."""
    mirror = RunMirror(place.url)
    try:
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
    finally:
        mirror.close()
    assert not mirror.folder.exists()


def test_a_thread_follows_and_says_what_is_wrong_once(
        runs: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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
        (tmp_path / "run").write_text("no folder any more")
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
    mirror = RunMirror(place.url)
    try:
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


def test_a_store_that_fails_in_its_own_way(runs: list[Path], tmp_path: Path,
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
