"""Large gzip files, read in parts."""

import fcntl
import gzip
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oper.data import PreprocessOptions, load_recipe, preprocess
from oper.data.reading import cuts
from oper.data.reading.lines import Unit, line_of, read_blocks, units_of_text
from oper.data.recipe import Layout
from oper.errors import FileFormatError
from tests import forked
from tests.data.loader_support import digest, parquet_bytes
from tests.data.test_resuming import KILLED

pytest.importorskip("rapidgzip")
KAGGLE = load_recipe("criteo-kaggle")
SMALL = PreprocessOptions(unit_bytes=20_000, row_group_rows=64, part_rows=128)


LINES = Layout("lines", ())


@pytest.fixture(scope="module")
def large(tmp_path_factory: Any) -> tuple[Path, bytes]:
    """A gzip file with several seek points, and its decompressed text."""
    rng = np.random.default_rng(0)
    text = b"".join(b"%d\t%x\n" % (k, x) for k, x in enumerate(rng.integers(0, 2**60, 1_000_000)))
    path = tmp_path_factory.mktemp("cuts") / "log.gz"
    path.write_bytes(gzip.compress(text, 1))
    return path, text


def test_parts_hold_every_line_once(large: tuple[Path, bytes]) -> None:
    path, text = large
    spans = units_of_text(str(path), LINES, path.stat().st_size - 1)
    assert len(spans) > 1 and spans[0].start == 0 and spans[-1].stop == len(text)
    index = cuts._index(str(path))
    assert 0 < index.stat().st_size < len(text) / 200  # 32 KiB per 4 MiB, compressed
    many = [Unit(str(path), "lines", a, b) for a, b in zip(
        range(0, len(text), 3_000_001), [*range(3_000_001, len(text), 3_000_001), len(text)],
        strict=True)]
    for parts in (spans, many, many[::-1]):
        found = [b"".join(b.data for b in read_blocks(s, LINES)) for s in parts]
        assert b"".join(found[::-1] if parts[0].start else found) == text
    for span in (spans[-1], many[3]):
        first = next(iter(read_blocks(span, LINES))).data.split(b"\t")[0]
        assert line_of(span, LINES, 5) == int(first) + 6
    before = index.stat().st_mtime_ns
    assert units_of_text(str(path), LINES, path.stat().st_size - 1) == spans
    assert index.stat().st_mtime_ns == before, "it was not written again"


def test_a_damaged_part_is_named(large: tuple[Path, bytes], tmp_path: Path) -> None:
    data = large[0].read_bytes()
    path = tmp_path / "log.gz"
    path.write_bytes(data)
    span = units_of_text(str(path), LINES, len(data) - 1)[-1]
    cuts._index(str(path)).write_bytes(b"nonsense" * 9)
    with pytest.raises(FileFormatError, match=r"log\.gz.*gzidx"):
        list(read_blocks(span, LINES))


def packed(log: Path, name: str = "log.gz") -> str:
    path = log.parent / name
    path.write_bytes(gzip.compress(log.read_bytes()))
    return str(path)


def test_the_same_bytes_as_of_plain_text(tmp_path: Path, log: Path) -> None:
    preprocess(KAGGLE, [str(log)], tmp_path / "plain", SMALL)
    preprocess(KAGGLE, [packed(log)], tmp_path / "gz", replace(SMALL, num_workers=2))
    found = parquet_bytes(tmp_path / "gz")
    assert found == parquet_bytes(tmp_path / "plain") and len(found) > 30
    # The index next to the log is not read as a part of a folder of logs.
    log.unlink()
    (tmp_path / "logs").mkdir()
    for path in [*tmp_path.glob("log.gz"), *tmp_path.glob(".log.gz.*")]:
        path.rename(tmp_path / "logs" / path.name)
    preprocess(KAGGLE, [str(tmp_path / "logs")], tmp_path / "again", SMALL)
    assert parquet_bytes(tmp_path / "again") == found
    assert len(list((tmp_path / "logs").iterdir())) == 2


def test_a_killed_run_keeps_the_parts_that_it_has_read(tmp_path: Path, log: Path) -> None:
    name = packed(log)
    preprocess(KAGGLE, [name], tmp_path / "undisturbed", SMALL)
    rng = random.Random(3)
    kept = []
    for workers in ("1", "2"):
        target = tmp_path / f"out{workers}"
        done = forked.run("-c", KILLED, name, str(target), workers, str(rng.randint(30, 60)))
        assert done.returncode == -signal.SIGKILL
        kept.append(len(list((tmp_path / f".out{workers}.work" / "stage").glob("*.json"))))
        preprocess(KAGGLE, [name], target, SMALL)
        assert digest(target) == digest(tmp_path / "undisturbed")
    assert min(kept) > 1


def test_processes_that_begin_together_make_one_pass(tmp_path: Path, log: Path, monkeypatch: Any
                                                     ) -> None:
    name, made = packed(log), []
    write = cuts._write
    monkeypatch.setattr(cuts, "_write", lambda *a: made.append(a) or write(*a))
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(cuts.make, [name] * 4))
    assert len(made) == 1
    assert {p.name for p in tmp_path.glob(".*")} == {cuts._index(name).name}


@pytest.mark.parametrize("why", ["no library", "no room", "members", "cut short", "footer", "bits"])
def test_files_that_are_not_cut(tmp_path: Path, log: Path, monkeypatch: Any, why: str) -> None:
    data, path = log.read_bytes(), tmp_path / "day.gz"
    whole = gzip.compress(data)
    path.write_bytes({
        "members": gzip.compress(data[:9]) + gzip.compress(data[9:]), "cut short": whole[:-30],
        "footer": whole[:-3], "bits": whole[:900] + b"\0\0" + whole[902:]}.get(why, whole))
    if why == "no library":
        monkeypatch.setattr(cuts.importlib.util, "find_spec", lambda name: None)
    elif why == "no room":
        def refuse(*_: Any) -> None:
            raise OSError("no room")
        monkeypatch.setattr(fcntl, "flock", refuse)
    before = set(tmp_path.iterdir())
    assert units_of_text(str(path), LINES, 20_000) == [Unit(str(path), "lines")]
    assert set(tmp_path.iterdir()) == before or why == "no room"
    if why in ("cut short", "footer", "bits"):
        with pytest.raises(FileFormatError, match="a complete file"):
            preprocess(KAGGLE, [str(path)], tmp_path / "out", SMALL)
    else:
        found = b"".join(b.data for b in read_blocks(Unit(str(path)), LINES))
        assert found == data
