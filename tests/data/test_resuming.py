"""The output is the same for any number of workers and any interruption."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from oper.data import PreprocessOptions, load_recipe, preprocess
from oper.data.generic import Choice, generic_recipe
from oper.data.preprocessing import job, run as preprocessing
from oper.data.reading.detect import plan_units
from oper.data.reading.estimate import needs
from oper.data.vocabulary.building import build, build_hashed, hash_values
from oper.data.vocabulary.merging import RunMerger
from oper.errors import FileFormatError, InvalidInputError
from oper.support.locks import exclusive
from tests import forked
from tests.data.loader_support import digest, interrupted, made
from tests.support import counts_by, wait_for
from tests.world_support import open_descriptors

KAGGLE = load_recipe("criteo-kaggle")
SMALL = PreprocessOptions(unit_bytes=20_000, row_group_rows=64, part_rows=128)


@pytest.fixture
def log(log: Path) -> str:
    return str(log)


def test_output_does_not_depend_on_workers(tmp_path: Path, log: str) -> None:
    manifest = preprocess(KAGGLE, [log], tmp_path / "one", SMALL)
    assert len(list((tmp_path / "one" / "train").iterdir())) > 10
    preprocess(KAGGLE, [log], tmp_path / "three", replace(SMALL, num_workers=3))
    assert digest(tmp_path / "one") == digest(tmp_path / "three")
    assert sum(manifest["rows"].values()) == 1500
    # Units of another size give the same ids and the same rows in the same order.
    preprocess(KAGGLE, [log], tmp_path / "whole")
    assert pq.read_table(tmp_path / "one" / "train").equals(
        pq.read_table(tmp_path / "whole" / "train"))
    assert not list(tmp_path.glob(".*.work"))


# Kills itself when it is about to open, rename or remove the n-th file in the work folder. With
# workers, it begins its first task when one of them has done a task; prints if one has.
KILLED = """
import glob, multiprocessing, os, signal, sys, time
from oper.data import *
from oper.data.preprocessing import run as preprocessing
left, run = int(sys.argv[4]), preprocessing.Job.run
def late(job):
    tasks = lambda: len(glob.glob(f"{job.work}/tasks/*.done"))
    before = tasks()
    shared = lambda: job.target.exists() or tasks() > before
    while multiprocessing.active_children() and not shared():
        time.sleep(0.01)
    print("shared" if shared() else "alone", flush=True)
    run(job)
preprocessing.Job.run = late
def hook(event, args):
    global left
    if event in ("open", "os.rename", "os.remove", "os.mkdir") and ".work" in str(args[0]):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
preprocess(load_recipe("criteo-kaggle"), [sys.argv[1]], sys.argv[2], PreprocessOptions(
    unit_bytes=20_000, row_group_rows=64, part_rows=128, num_workers=int(sys.argv[3])))
"""


def test_killed_runs_resume_where_they_stopped(tmp_path: Path, log: str) -> None:
    preprocess(KAGGLE, [log], tmp_path / "undisturbed", SMALL)
    rng = random.Random(1)
    kills = 0
    for workers, runs, printed in (("1", 7, "alone\n"), ("2", 4, "shared\n")):
        target, said = tmp_path / f"out{workers}", set()
        for _ in range(runs):  # the last run is not killed; `oper bench data` kills ten times
            done = forked.run("-c", KILLED, log, str(target), workers, str(rng.randint(1, 80)))
            said.add(done.stdout)
            kills += done.returncode == -signal.SIGKILL
            if target.exists():
                break
        assert printed in said <= {printed, ""}  # nothing if it was killed before its tasks
        if not target.exists():
            preprocess(KAGGLE, [log], target, replace(SMALL, num_workers=int(workers)))
        assert digest(target) == digest(tmp_path / "undisturbed")
    assert kills >= 8


# Kills itself at the given event while it removes the work folder of the finished output.
KILLED_AT_END = """
import os, signal, sys
from oper.data import *
def hook(event, args):
    if event == sys.argv[3] and ".out.work" in str(args[0]) and os.path.exists(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
preprocess(load_recipe("criteo-kaggle"), [sys.argv[1]], sys.argv[2], PreprocessOptions(
    unit_bytes=20_000, row_group_rows=64, part_rows=128))
"""


@pytest.mark.parametrize("event", ["os.rename", "shutil.rmtree"])
def test_later_runs_remove_what_a_killed_one_left_beside_its_output(
    tmp_path: Path, log: str, event: str
) -> None:
    target = tmp_path / "out"

    def left() -> set[str]:
        return {p.name for p in tmp_path.glob(".out.*")}

    def kill() -> None:
        done = forked.run("-c", KILLED_AT_END, log, str(target), event)
        assert done.returncode == -signal.SIGKILL and target.exists()
        assert ".out.lock" in left() and len(left()) == 2

    kill()
    whole, before = digest(target), left()
    with ThreadPoolExecutor() as pool:
        # A process that holds the lock may be removing the folder: then it is not touched.
        with exclusive(tmp_path / ".out.lock"):
            again = pool.submit(preprocess, KAGGLE, [log], target, SMALL)
            time.sleep(0.2)
            assert left() == before
        again.result()
    assert not left() and digest(target) == whole
    shutil.rmtree(target)
    kill()
    with pytest.raises(InvalidInputError, match="--force"):  # of another job, which changes nothing
        preprocess(KAGGLE, [log], target, replace(SMALL, max_rows=100))
    preprocess(KAGGLE, [log], target, replace(SMALL, force=True))
    assert not left() and digest(target) == whole
    shutil.rmtree(target)
    kill()
    shutil.rmtree(target)
    preprocess(KAGGLE, [log], target, SMALL)
    assert not left() and digest(target) == whole


# Reads one unit, then waits for the file `go`.
HELD = """
import pathlib, sys, time
from oper.data import *
from oper.data.preprocessing import run as preprocessing
folder, read = pathlib.Path(sys.argv[2]).parent, preprocessing.Job._read
def held(job, k):
    read(job, k)
    (folder / "began").touch()
    while not (folder / "go").exists():
        time.sleep(0.01)
preprocessing.Job._read = held
preprocess(load_recipe("criteo-kaggle"), [sys.argv[1]], sys.argv[2], PreprocessOptions(
    unit_bytes=20_000, row_group_rows=64, part_rows=128))
"""


@pytest.mark.parametrize("killed", [False, True])
def test_another_job_is_refused_while_a_run_is_active(tmp_path: Path, log: str, killed: bool
                                                      ) -> None:
    other = replace(SMALL, min_count=5)
    preprocess(KAGGLE, [log], tmp_path / "undisturbed", other if killed else SMALL)
    target = tmp_path / "job" / "out"
    target.parent.mkdir()
    run = forked.Forked([sys.executable, "-c", HELD, log, str(target)])
    try:
        wait_for((target.parent / "began").exists)
        for force in (False, True):
            with pytest.raises(InvalidInputError) as error:
                preprocess(KAGGLE, [log], target, replace(other, force=force))
            assert f"process {run.pid} " in str(error.value), "the run at work is named"
            assert str(target) in str(error.value) and "interrupted" not in str(error.value)
        if killed:
            run.kill()
            run.wait(60)
            with pytest.raises(InvalidInputError, match="interrupted"):
                preprocess(KAGGLE, [log], target, other)
            preprocess(KAGGLE, [log], target, replace(other, force=True))
        else:
            (target.parent / "go").touch()
            assert run.wait(120) == 0
    finally:
        run.kill()
        run.wait(60)
    assert digest(target) == digest(tmp_path / "undisturbed")
    assert {p.name for p in target.parent.iterdir()} == {"out", "began"} | (
        set() if killed else {"go"})


def test_many_jobs_that_begin_together_never_mix(tmp_path: Path, log: str) -> None:
    """One job writes the output; the other jobs are refused."""
    program = ("import sys; from oper.data import *; preprocess(load_recipe('criteo-kaggle'), "
               "[sys.argv[1]], sys.argv[2], PreprocessOptions(unit_bytes=20_000, "
               "row_group_rows=64, part_rows=128, min_count=int(sys.argv[3]), force=True))")
    runs = {k: forked.Forked(
        [sys.executable, "-c", program, log, str(tmp_path / "out"), str(k)],
        stderr=subprocess.PIPE, text=True) for k in (2, 3, 4, 5)}
    errors = {k: run.communicate(timeout=300)[1] for k, run in runs.items()}
    done = [k for k, run in runs.items() if run.returncode == 0]
    assert done, errors
    assert all("other inputs or settings" in errors[k] for k in runs if k not in done), errors
    found = json.loads((tmp_path / "out" / "manifest.json").read_text())["min_count"]
    assert found in done
    preprocess(KAGGLE, [log], tmp_path / "alone", replace(SMALL, min_count=found))
    assert digest(tmp_path / "out") == digest(tmp_path / "alone")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "alone", "log.txt", "log.txt.about.json", "out"]


def test_a_resumed_run_reads_no_unit_twice(tmp_path: Path, log: str) -> None:
    with interrupted("_read", 5) as read:
        preprocess(KAGGLE, [log], tmp_path / "out", SMALL)
    with pytest.raises(InvalidInputError, match="--force"):
        preprocess(KAGGLE, [log], tmp_path / "out", replace(SMALL, min_count=9))
    assert read == [(k,) for k in range(5)]
    with mock.patch.object(preprocessing.Job, "_read", autospec=True,
                           side_effect=preprocessing.Job._read) as again:
        preprocess(KAGGLE, [log], tmp_path / "out", SMALL)
    units = [call.args[1] for call in again.call_args_list]
    assert units == list(range(5, 5 + len(units))) and units


def test_work_of_another_release_or_damaged_work_is_begun_anew(tmp_path: Path, log: str) -> None:
    preprocess(KAGGLE, [log], tmp_path / "whole", SMALL)
    work = tmp_path / ".out.work"

    def interrupt() -> Path:
        """Interrupt a run that has read all units; returns a file of its rows."""
        with interrupted("_write"):
            preprocess(KAGGLE, [log], tmp_path / "out", SMALL)
        return min((work / "stage").glob("*.rows"))

    rows = interrupt()
    about = json.loads((work / "job.json").read_text())
    (work / "job.json").write_text(json.dumps({**about, "version": None}))
    rows.write_bytes(b"\x93NUMPY\x02\0")
    preprocess(KAGGLE, [log], tmp_path / "out", SMALL)
    assert digest(tmp_path / "out") == digest(tmp_path / "whole")
    # As after a crash of the machine: files are empty, zeroed or cut.
    for damage in (lambda data: b"", lambda data: bytes(len(data)),
                   lambda data: data[:len(data) // 2]):
        shutil.rmtree(tmp_path / "out")
        rows = interrupt()
        rows.write_bytes(damage(rows.read_bytes()))
        with pytest.raises(FileFormatError, match=r"\.rows.*it starts from scratch"):
            preprocess(KAGGLE, [log], tmp_path / "out", SMALL)
        assert not work.exists()
        preprocess(KAGGLE, [log], tmp_path / "out", SMALL)
        assert digest(tmp_path / "out") == digest(tmp_path / "whole")


@pytest.mark.parametrize("text", ["", "null", "[1]", "\0\0"])
def test_work_with_a_damaged_description_needs_force(tmp_path: Path, log: str, text: str) -> None:
    work = tmp_path / ".out.work"
    work.mkdir()
    (work / "job.json").write_text(text)
    with pytest.raises(InvalidInputError, match="--force"):
        preprocess(KAGGLE, [log], tmp_path / "out", SMALL)
    assert work.exists()
    preprocess(KAGGLE, [log], tmp_path / "out", replace(SMALL, force=True))
    assert (tmp_path / "out").exists() and not work.exists()


def test_work_files_are_removed_as_units_are_written_and_large_logs_bypass_the_page_cache(
    tmp_path: Path, log: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from oper.data.reading import pagecache

    options = replace(SMALL, unit_bytes=80_000)
    preprocess(KAGGLE, [log], tmp_path / "whole", options)
    passed: dict[str, list[tuple[int, int]]] = {}

    def advise(file: int, start: int, count: int, _: int) -> None:
        passed.setdefault(os.readlink(f"/proc/self/fd/{file}"), []).append((start, count))

    monkeypatch.setattr(job, "is_large", lambda _: True)
    monkeypatch.setattr(pagecache, "_STEP", 1000)
    monkeypatch.setattr(os, "posix_fadvise", advise)
    with interrupted("_write", 2) as written:
        preprocess(KAGGLE, [log], tmp_path / "out", options)
    left = {int(p.name[:6]) for p in (tmp_path / ".out.work" / "stage").glob("*-*")}
    units = len(list((tmp_path / ".out.work" / "stage").glob("??????.json")))
    assert left == set(range(units)) - {k for k, _ in written} and len(written) == 2 < units
    preprocess(KAGGLE, [log], tmp_path / "out", options)
    assert digest(tmp_path / "out") == digest(tmp_path / "whole")
    # Pages were dropped of each unit, up to the end of the log, and of all written files.
    size = os.path.getsize(log)
    assert len({start for start, _ in passed[log]}) == units
    assert max(start + count for start, count in passed[log]) > size - 1000
    parts = [p for p in passed if p.endswith(".parquet")]
    assert len(parts) == len(list((tmp_path / "out").glob("*/part-*.parquet")))
    assert not [name for name in open_descriptors() if name.startswith(str(tmp_path))]


def test_only_logs_beyond_a_share_of_the_memory_are_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from oper.data.reading import pagecache

    path = tmp_path / "log"
    path.write_bytes(b"x" * 5000)
    for pages, large in ((8 * 5000, False), (8 * 5000 - 1, True)):
        monkeypatch.setattr(os, "sysconf", lambda name, n=pages: 1 if "SIZE" in name else n)
        assert pagecache.is_large([str(path)]) == large
    monkeypatch.delattr(os, "posix_fadvise")
    dropper = pagecache.PageDropper(path)
    dropper.advance(1 << 30)
    dropper.close()


def test_under_torchrun_and_as_an_array_job(tmp_path: Path, log: str) -> None:
    pytest.importorskip("torch.distributed.run")
    preprocess(KAGGLE, [log], tmp_path / "one")
    words = ["oper", "preprocess", "criteo-kaggle", log, "-o"]
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "-m", *words, str(tmp_path / "two")], check=True, capture_output=True, timeout=300)
    assert digest(tmp_path / "one") == digest(tmp_path / "two")
    # The tasks of a Slurm array may start at any time: here the second after the first has ended.
    for task in "01":
        done = forked.run("-m", *words, str(tmp_path / "three"), env={"SLURM_ARRAY_TASK_ID": task})
        assert done.returncode == 0 and ("already exists" in done.stderr) == (task == "1")
    assert digest(tmp_path / "one") == digest(tmp_path / "three")


def test_workers_on_a_ray_cluster_share_the_work(
    tmp_path: Path, log: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray")
    # Workers must find the modules of this process.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(p for p in sys.path if p))
    ray.init(num_cpus=2, log_to_driver=False, include_dashboard=False, configure_logging=False)
    try:
        preprocess(KAGGLE, [log], tmp_path / "one", SMALL)
        # This process takes no units until the workers have begun.
        original, work = preprocessing.Job.run, tmp_path / ".ray.work" / "tasks"

        def late(job: Any) -> None:
            deadline = time.monotonic() + 200
            while len(list(work.glob("read-*.done"))) < 3 and time.monotonic() < deadline:
                if (tmp_path / "ray").exists():
                    return
                time.sleep(0.02)
            original(job)

        monkeypatch.setattr(preprocessing.Job, "run", late)
        started = time.monotonic()
        preprocess(KAGGLE, [log], tmp_path / "ray", replace(SMALL, num_ray_workers=2))
        assert time.monotonic() - started < 200, "the cluster's workers did begin"
    finally:
        ray.shutdown()
    assert digest(tmp_path / "one") == digest(tmp_path / "ray")


def test_disk_estimate_refuses_before_work(
    tmp_path: Path, log: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    need = needs(KAGGLE, plan_units(KAGGLE, [log], None, 1 << 28))
    assert need.rows == pytest.approx(1500, rel=0.05)
    usage = type("usage", (), {"free": need.disk_bytes - 1})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(InvalidInputError, match="free bytes"):
        preprocess(KAGGLE, [log], tmp_path / "out")
    assert [p.name for p in tmp_path.glob(".out*")] == []
    preprocess(KAGGLE, [log], tmp_path / "out", PreprocessOptions(check_disk=False))


def size_of(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


@pytest.mark.parametrize("kind", ["csv", "parquet", "bags"])
def test_disk_estimate_counts_every_id_of_a_bag(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    bags = [rng.integers(0, 50_000, 40).tolist() for _ in range(3000)]
    path = tmp_path / f"log.{kind}"
    if kind == "parquet":
        pq.write_table(pa.table({"tags": bags}), path, row_group_size=1000)
        recipe = generic_recipe("parquet", Choice(["tags"]))
    elif kind == "csv":
        path.write_text("tags\n" + "".join("|".join(map(str, b)) + "\n" for b in bags))
        recipe = generic_recipe("csv", Choice(["tags:|"]))
    else:
        path.write_text("".join(" ".join(map(str, [len(b), *b])) + "\n" for b in bags))
        recipe = load_recipe("citeulike")
    work: list[int] = []
    count = preprocessing.Job._count
    monkeypatch.setattr(preprocessing.Job, "_count", lambda job, *a: (
        work.append(size_of(job.work)), count(job, *a)))
    preprocess(recipe, [str(path)], tmp_path / "out", PreprocessOptions(valid="0"))
    need = needs(recipe, plan_units(recipe, [str(path)], None, 1 << 28))
    rows = size_of(tmp_path / "out" / "train")
    assert rows < need.output_bytes < 1.4 * rows
    assert 0.8 * work[0] < need.work_bytes < 2 * work[0]


def test_memory_estimate_counts_distinct_strings(tmp_path: Path) -> None:
    """The peak is measured in a process of its own, in which nothing else is imported."""
    rng = np.random.default_rng(0)
    path = tmp_path / "log.csv"
    path.write_text("user,page\n" + "".join(
        f"{a:032x},{b:032x}\n" for a, b in rng.integers(0, 1 << 62, (400_000, 2)).tolist()))
    recipe = generic_recipe("csv", Choice(["user", "page"]))
    need = needs(recipe, plan_units(recipe, [str(path)], None, 1 << 28))
    program = ("import sys; from oper.bench.core.memory import peak_rss_mb; from oper.cli import "
               "main; main(['preprocess', 'csv', sys.argv[1], '-o', sys.argv[2], '--sparse', "
               "'user,page', '--min-count', '1']); print('peak', peak_rss_mb())")
    done = subprocess.run([sys.executable, "-c", program, str(path), str(tmp_path / "out")],
                          capture_output=True, text=True, check=True)
    peak = 1e6 * float(done.stdout.split("peak ")[1])
    assert 0.95 * peak < need.memory_bytes < 1.6 * peak


def test_a_full_disk_is_named_with_its_path(tmp_path: Path, log: str) -> None:
    """The file size is limited in each phase; without the limit, the same command resumes."""
    program = ("import resource, signal, sys; from oper.data import *; "
               "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); n = int(sys.argv[3]); "
               "resource.setrlimit(resource.RLIMIT_FSIZE, (n, n)); "
               "preprocess(load_recipe('criteo-kaggle'), [sys.argv[1]], sys.argv[2])")
    kinds = set()
    for limit in (10_000, 40_000, 120_000):
        out = tmp_path / f"out{limit}"
        done = forked.run("-c", program, log, str(out), str(limit))
        message = done.stderr.splitlines()[-1]
        assert "File too large" in message and str(tmp_path / f".out{limit}.work") in message
        kinds.add(message.split("Error: ")[0])
        assert not out.exists()
        preprocess(KAGGLE, [log], out)
    assert kinds == {"oper.errors.InvalidInput"}


@pytest.mark.parametrize("text", [False, True])
def test_vocabularies_in_little_memory(
    tmp_path: Path, text: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from oper.data.vocabulary import merging

    monkeypatch.setattr(merging, "_SLICE", 500)
    rng = np.random.default_rng(0)
    raw = rng.zipf(1.3, (60, 400)) % 5000
    values = raw.astype("S") if text else raw.astype(np.uint32)
    found = []
    for memory in (1 << 30, 20_000):
        folder = tmp_path / f"{memory}"
        folder.mkdir()
        merger = RunMerger(folder, memory)
        for part in values:
            merger.add(*np.unique(part, return_counts=True))
        assert bool(list(folder.glob("*.run"))) == (memory == 20_000)
        vocabulary = build(folder, merger, 37, 3, 900)
        found.append((vocabulary.facts, vocabulary.lookup(np.unique(values)).tolist()))
    assert found[0] == found[1]
    facts, ids = found[0]
    counts = counts_by(*np.unique(values, return_counts=True))
    order = sorted([(-37, -1, None)] + [(-c, k, v) for k, (v, c) in enumerate(counts.items())])
    kept = [v for c, _, v in order if -c >= 3][:899]
    expected = {v: k + 1 for k, v in enumerate(kept)}
    assert ids == [expected[None]] + [expected.get(v, 0) for v in np.unique(values).tolist()]
    assert facts.num_rows == len(kept) + 1 and facts.num_distinct == len(order)
    assert facts.num_once == sum(c == 1 for c in counts.values())
    assert facts.num_rare_accesses == sum(c for v, c in counts.items() if v not in expected)


def test_hashing_counts_collisions(tmp_path: Path, log: str) -> None:
    merger = RunMerger(tmp_path)
    values = np.arange(1, 2001, dtype=np.uint32)
    merger.add(values, np.ones(2000, np.int64))
    facts = build_hashed(tmp_path, merger, 5, 1000).facts
    ids = hash_values(values, 1000)
    assert ids.min() >= 1 and ids.max() <= 999
    assert facts.num_collisions == 2000 - np.unique(ids).size > 1000
    # 999 rows hold 2000 random values: expect 999 (1 - exp(-2000/999)) of them taken.
    assert np.unique(ids).size == pytest.approx(999 * (1 - np.exp(-2000 / 999)), rel=0.05)
    texts = np.array([b"a", b"abcdefgh", b"abcdefghi", b"b"])
    assert hash_values(texts, 10**6).tolist() == hash_values(texts.astype("S40"), 10**6).tolist()
    assert np.unique(hash_values(texts, 10**6)).size == 4
    manifest = preprocess(KAGGLE, [log], tmp_path / "out", PreprocessOptions(hash_rows=100))
    assert manifest["ids_in_hotness_order"] is False
    assert {t["num_rows"] for t in manifest["tables"].values()} == {100}
    assert manifest["tables"]["C26"]["num_collisions"] > 0
    # The text 17 and the integer 17 have different hashes, so these rows must not be mixed.
    made_as = [made(tmp_path, "id\n17\n4\n", Choice([name]), f"as-{k}", hash_rows=100)["numbering"]
               for k, name in enumerate(("id", "id:int", "id:int"))]
    assert made_as[0] != made_as[1] == made_as[2]
