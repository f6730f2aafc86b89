"""Logs and outputs in stores, pipes, compressed files and partitioned folders."""

import bz2
import gzip
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from oper.data import PreprocessOptions, load_recipe, preprocess
from oper.data.generic import Choice, generic_recipe
from oper.data.reading import store
from oper.data.reading.lines import expand_inputs
from oper.errors import FileFormatError, InvalidInputError
from tests import forked
from tests.data.gcs_server import gcs_server
from tests.data.loader_support import decoded, parquet_bytes, train_log

fsspec = pytest.importorskip("fsspec")
CRITEO = load_recipe("criteo-kaggle")


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary folder in which outputs for stores are made."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)  # forget the folder that it has determined
    return folder


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """A log and its local output."""
    preprocess(CRITEO, [train_log(tmp_path, 300)], tmp_path / "out")
    return tmp_path


def stored_parquet_bytes(out: str) -> dict[str, bytes]:
    """`parquet_bytes` of the folder ``out`` in a store."""
    back = {}
    for url in store.files_below(out):
        if ".parquet" in url:
            with store.open_input(url) as file:
                back[url.partition("?")[0].partition("/out/")[2]] = file.read()
    return back


def zstd(data: bytes) -> bytes:
    middle = len(data) // 3  # of several frames, as tools that append write them
    return b"".join(pa.compress(part, "zstd", asbytes=True) for part in (
        data[:middle], data[middle:]))


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, zstd])
def test_packed_logs(local: Path, pack: Any) -> None:
    packed = local / "packed"
    packed.write_bytes(pack((local / "train.txt").read_bytes()))
    preprocess(CRITEO, [str(packed)], local / "again")
    assert parquet_bytes(local / "again") == parquet_bytes(local / "out")
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(FileFormatError, match="a complete file"):
        preprocess(CRITEO, [str(packed)], local / "cut")


@pytest.mark.parametrize("through", ["named pipe", "-", "/dev/stdin"])
def test_pipes(local: Path, through: str) -> None:
    words = ["-m", "oper", "preprocess", "criteo-kaggle", "-o", str(local / "piped")]
    data = (local / "train.txt").read_bytes()
    if through == "named pipe":
        os.mkfifo(local / "pipe")
        writer = threading.Thread(target=(local / "pipe").write_bytes, args=(data,))
        writer.start()
        done = forked.run(*words, str(local / "pipe"))
        writer.join()
    else:
        done = forked.run(*words, through, text=False, input=data)
    assert done.returncode == 0, done.stderr
    assert parquet_bytes(local / "piped") == parquet_bytes(local / "out")
    assert not [p for p in local.iterdir() if "pipe-" in p.name]


def test_a_bucket_is_read_and_written(local: Path, bucket: str) -> None:
    store.upload(local, bucket.format("logs"), [])
    for out in ("out", "out/"):  # the second time it is there already
        manifest = preprocess(CRITEO, [bucket.format("logs/train.txt")], bucket.format(out))
    assert "endpoint" not in str(manifest["inputs"])
    assert stored_parquet_bytes(bucket.format("out")) == parquet_bytes(local / "out")
    with pytest.raises(InvalidInputError, match="--force"):
        preprocess(CRITEO, [bucket.format("logs/train.txt")], bucket.format("out"),
                   PreprocessOptions(min_count=1))
    preprocess(CRITEO, [bucket.format("logs/*.txt")], bucket.format("out"),
               PreprocessOptions(min_count=1, force=True, num_workers=2))
    preprocess(CRITEO, [str(local / "train.txt")], local / "one", PreprocessOptions(min_count=1))
    with store.open_input(bucket.format("out/vocabulary/C1.parquet")) as file:
        assert file.read() == (local / "one" / "vocabulary" / "C1.parquet").read_bytes()
    with pytest.raises(InvalidInputError, match="something else"):
        preprocess(CRITEO, [str(local / "train.txt")], bucket.format("logs"))
    for name in ("logs/none.txt", "none/*.txt"):
        with pytest.raises(InvalidInputError, match="check the path"):
            preprocess(CRITEO, [bucket.format(name)], local / "x")


def test_files_in_a_store_are_checked_before_work(local: Path, monkeypatch: pytest.MonkeyPatch
                                                  ) -> None:
    log, out = str(local / "train.txt"), f"file://{local}/stored"
    first = preprocess(CRITEO, [log], out)
    assert parquet_bytes(local / "stored") == parquet_bytes(local / "out")
    with monkeypatch.context() as patch:
        patch.setattr("oper.data.preprocessing.run.Job.opened", None)
        assert preprocess(CRITEO, [log], out) == first
        with pytest.raises(InvalidInputError, match="--force"):
            preprocess(CRITEO, [log], out, PreprocessOptions(min_count=1))
        (local / "stored" / "manifest.json").write_text("[1, 2]")
        with pytest.raises(InvalidInputError, match="something else"):
            preprocess(CRITEO, [log], out)


def test_an_interrupted_upload_is_repeated(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, out, upload = str(local / "train.txt"), f"file://{local}/stored", store.upload

    def cut(folder: Path, url: str, last: Any) -> None:
        (folder / "manifest.json").rename(local / "kept")
        upload(folder, url, last=[])
        (local / "kept").rename(folder / "manifest.json")
        raise InvalidInputError("cannot use a store", "URL", url, "a store", "check the network")

    monkeypatch.setattr(store, "upload", cut)
    with pytest.raises(InvalidInputError, match="check the network"):
        preprocess(CRITEO, [log], out)
    monkeypatch.setattr(store, "upload", upload)
    with pytest.raises(InvalidInputError, match="something else"):
        preprocess(CRITEO, [log], out, PreprocessOptions(min_count=1))  # another job
    preprocess(CRITEO, [log], out)
    assert parquet_bytes(local / "stored") == parquet_bytes(local / "out")


def test_runs_with_one_target_do_not_touch_each_others_files(local: Path, scratch: Path,
                                                             monkeypatch: pytest.MonkeyPatch
                                                             ) -> None:
    """A second run, of the same or another job, starts while the first one uploads its files."""
    log, out = str(local / "train.txt"), f"file://{local}/stored"
    upload, results = store.upload, []

    def held(folder: Path, url: str, last: Any) -> None:
        monkeypatch.setattr(store, "upload", upload)
        others = [threading.Thread(target=lambda options=options: results.append(run(options)))
                  for options in (PreprocessOptions(), PreprocessOptions(force=True),
                                  PreprocessOptions(min_count=1))]
        for other in others:
            other.start()
        for other in others:
            other.join(1)  # let them reach the lock, or end
        upload(folder, url, last)
        running.extend(others)

    def run(options: PreprocessOptions) -> Any:
        try:
            return preprocess(CRITEO, [log], out, options)["job"]
        except InvalidInputError as error:
            return str(error)

    running: list[threading.Thread] = []
    monkeypatch.setattr(store, "upload", held)
    job = preprocess(CRITEO, [log], out)["job"]
    for other in running:
        other.join()
    assert sorted(t == job for t in results) == [False, True, True], results
    assert "--force" in next(t for t in results if t != job)
    assert parquet_bytes(local / "stored") == parquet_bytes(local / "out")
    assert not [p for p in scratch.rglob("*") if p.is_file()]


def test_a_store_that_does_not_answer_fails_soon() -> None:
    def limit(url: str) -> float:
        options = store.filesystem(url)[0].__reduce__()[1][0]
        return float(options["retry_time_limit"].total_seconds())

    assert limit("gs://anonymous@bucket/log.csv") == 30
    assert limit("gs://anonymous@bucket/log.csv?scheme=http") == 30
    assert limit("gs://anonymous@bucket/log.csv?retry_limit_seconds=7") == 7


def test_google_cloud_storage(local: Path) -> None:
    with gcs_server() as url:
        store.upload(local, url.format("raw"), [])
        preprocess(CRITEO, [url.format("raw/train.txt")], url.format("out"))
        assert stored_parquet_bytes(url.format("out")) == parquet_bytes(local / "out")
        with pytest.raises(InvalidInputError, match="check the path"):
            preprocess(CRITEO, [url.format("raw/none.txt")], local / "x")


def test_stores_of_fsspec(local: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/logs/train.txt", (local / "train.txt").read_bytes())
    for hidden in ("_SUCCESS", ".train.txt.crc"):
        memory.pipe(f"/logs/{hidden}", b"")
    assert len(expand_inputs(["memory://logs/*t*"])) == len(expand_inputs(["memory://logs"])) == 1
    preprocess(CRITEO, ["memory://logs"], local / "again")
    assert parquet_bytes(local / "again") == parquet_bytes(local / "out")
    with pytest.raises(InvalidInputError, match="cannot open a store"):
        preprocess(CRITEO, ["nowhere://logs/train.txt"], local / "x")


@pytest.fixture
def partitions(tmp_path: Path) -> Path:
    """Clicks partitioned by country and day, as Spark writes them."""
    table = pa.table({
        "user": [f"u{k % 7}" for k in range(60)], "price": [float(k % 10) for k in range(60)],
        "country": ["de", "fr", "it"] * 20, "day": ["2", "10"] * 30, "unused": ["x"] * 60})
    for country in ("de", "fr", "it"):
        for day in ("2", "10"):
            folder = tmp_path / "clicks" / f"day={day}" / f"country={country}"
            folder.mkdir(parents=True)
            keep = [a == country and b == day for a, b in zip(
                table["country"].to_pylist(), table["day"].to_pylist(), strict=True)]
            pq.write_table(table.filter(pa.array(keep)).drop_columns(["country", "day"]),
                           folder / "part-0.parquet", row_group_size=4)
            (folder / "_SUCCESS").touch()
    return tmp_path


def test_partitioned_folders_and_filters(partitions: Path) -> None:
    files = expand_inputs([str(partitions / "clicks")])
    days = [f.split("day=")[1].split("/")[0] for f in files]
    assert days == ["2"] * 3 + ["10"] * 3  # in the order of numbers
    choice = Choice(["user", "country"], dense=["price"],
                    filter=["country != it", "price >= 3", "price<9", "day == 10"])
    preprocess(generic_recipe("parquet", choice), [str(partitions / "clicks")], partitions / "out",
               PreprocessOptions(valid="0", min_count=1))
    read = decoded(partitions / "out")
    expected = sorted((f"u{k % 7}", ("de", "fr", "it")[k % 3], float(k % 10)) for k in range(60)
                      if k % 3 != 2 and 3 <= k % 10 < 9 and k % 2)
    assert sorted(zip(read["user"], read["country"], read["price"], strict=True)) == expected


@pytest.mark.parametrize("filter, match", [
    ("nothing == 3", "cannot filter"), ("price == dear", "cannot filter"),
    ("price", "COLUMN OP VALUE")])
def test_invalid_filters_are_refused(partitions: Path, filter: str, match: str) -> None:
    with pytest.raises(InvalidInputError, match=match):
        preprocess(generic_recipe("parquet", Choice(["user"], filter=[filter])),
                   [str(partitions / "clicks")], partitions / "out")
