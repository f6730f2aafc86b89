"""A run in a store, followed through a local copy: whole files, one checkpoint at a time."""

from __future__ import annotations

import logging
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oper.errors import InvalidInputError, MissingDependencyError
from oper.integration.checkpoint.delta_files import base_of, folder_of
from oper.integration.checkpoint.files import CHECKSUMS, check_files
from oper.integration.checkpoint.follow import Follower
from oper.train.mirror import RunMirror
from oper.train.resume import CHECKPOINT
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
        from pyarrow import fs

        from oper.bench.data.store import s3_server
        from oper.data.reading.store import filesystem

        try:
            with s3_server() as bucket:
                url = bucket.format("run")
                found, path, _ = filesystem(url)
                assert isinstance(found, fs.S3FileSystem)
                arrow: Any = pytest.importorskip("fsspec.implementations.arrow")
                yield Store(url, path, arrow.ArrowFSWrapper(found))
        except MissingDependencyError as error:
            pytest.skip(str(error))


def upload(store: Store, run: Path, mirror: RunMirror, seed: int) -> None:
    """Upload a run file by file, in any order, and look after each."""
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
    """And the next one replaces it, in the same places; its deltas can be followed."""
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
        if place.url.startswith("s3:"):  # whose times are whole seconds
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


def test_a_store_that_cannot_be_opened() -> None:
    with pytest.raises(InvalidInputError, match="cannot open a store"):
        RunMirror("nothing://here/run")
