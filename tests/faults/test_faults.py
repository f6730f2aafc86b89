"""A short form of ``python -m tests.faults``: every kind of fault, each in one phase."""

from __future__ import annotations

import os
import random
import socket
import tempfile
from pathlib import Path

import pytest

from tests.faults import files, injection, memory, network
from tests.faults.injection import Injection, Outcome
from tests.faults.pauses import timed
from tests.world_support import leftovers, report, world


def check(outcome: Outcome) -> None:
    assert outcome.kept, outcome.broken
    assert outcome.leftovers == []


@timed
def check_rank(fault: str, phase: str) -> None:
    check(injection.inject(Injection.draw(fault, phase, random.Random(phase))))


@pytest.mark.parametrize("phase", injection.PHASES)
def test_a_rank_is_killed(phase: str) -> None:
    check_rank("kill", phase)


@pytest.mark.parametrize("phase", ["outbox", "update", "checkpoint write", "migration"])
def test_a_rank_stalls(phase: str) -> None:
    check_rank("stop", phase)


@pytest.mark.parametrize("fault, labels, victim", [
    ("kill", "ab", 0), ("kill", "aabb", 2), ("kill", "abcd", 3), ("stop", "aabb", 1)])
@timed
def test_ranks_that_share_no_memory(fault: str, labels: str, victim: int) -> None:
    check(injection.inject(Injection(fault, "update", len(labels), victim, 1, 0, labels)))


def _train_for_ever(rank: int, world_size: int) -> None:
    tables = injection.open_tables(world_size, 0)
    while True:
        tables.lookup(injection.batch_of(rank, 6)).sum().backward()
        report(None)


def test_all_ranks_are_killed() -> None:
    with world(2, _train_for_ever) as running:
        for rank in range(2):
            running.receive(rank)
        for process in running.processes:
            process.kill()
        for process in running.processes:
            process.join(10)
        assert leftovers(running.pids) == []


def test_leftovers_can_be_seen() -> None:
    """Tests the check itself: it must find a process, a name and a socket."""
    name = Path("/dev/shm") / f"test-{os.getpid()}"  # not a name that concurrent tests look for
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0oper-{os.getpid()}-test")
        name.touch()
        try:
            text = " ".join(leftovers([os.getpid()]))
        finally:
            name.unlink()
    assert "process" in text and "socket" in text and "/dev/shm" in text


@pytest.mark.parametrize("phase", ["forward", "barrier", "replica broadcast"])
def test_a_rank_is_slow(phase: str) -> None:
    check_rank("slow", phase)


@pytest.mark.parametrize("phase", ["update", "checkpoint write"])
def test_a_rank_is_killed_for_memory(phase: str) -> None:
    if not memory.can_limit():
        pytest.skip("no rights to make a control group that limits memory")
    check(injection.inject(Injection.draw("memory limit", phase, random.Random(phase))))


@pytest.mark.parametrize("version", [1, 2])
def test_limits_of_memory_by_both_versions_of_control_groups(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Limits are written where the system has its mounts, even with version 2 next to version 1."""
    both, old = tmp_path / "unified", tmp_path / "memory"
    for place in (both, old / "job"):
        place.mkdir(parents=True)
    controllers = "cpu memory pids" if version == 2 else "cpu"
    (both / "cgroup.subtree_control").write_text(controllers + "\n")
    (tmp_path / "mounts").write_text(
        f"tmpfs / tmpfs rw 0 0\ncgroup2 {both} cgroup2 rw 0 0\n"
        + (f"cgroup {old} cgroup rw,memory 0 0\n" if version == 1 else ""))
    (tmp_path / "cgroup").write_text("4:memory:/job\n0::/\n" if version == 1 else "0::/job\n")
    monkeypatch.setattr(memory, "PROC", tmp_path)
    memory.limit_this_process(64 << 20)
    (group,) = (both if version == 2 else old / "job").glob(f"oper-test-{os.getpid()}-*")
    said = {path.name: path.read_text() for path in group.iterdir()}
    limit = str(64 << 20)
    assert said == {"cgroup.procs": str(os.getpid())} | (
        {"memory.max": limit, "memory.swap.max": "0"} if version == 2 else
        {"memory.limit_in_bytes": limit, "memory.memsw.limit_in_bytes": limit})


def test_the_judge_sees_what_is_wrong(tmp_path: Path) -> None:
    """A fault that never happens, and a survivor whose error names no peer."""
    never = Injection("kill", "update", 2, 0, 10**6, 0)
    outcome = injection.inject(never)
    assert not outcome.kept and any("never happened" in what for what in outcome.broken)


@pytest.mark.parametrize("fault", ["cut", "lost"])
@timed
def test_connections_between_domains(fault: str, tmp_path: Path) -> None:
    library = network.build_redirect(tmp_path)
    if library is None:
        pytest.skip("no C compiler for the library that redirects connections")
    check(network.inject(fault, random.Random(1), library))


@pytest.mark.parametrize("what", files.WRITES)
def test_there_is_no_room(what: str, tmp_path: Path) -> None:
    check(files.full_disk(what, random.Random(1), tmp_path, False))


@pytest.mark.parametrize("what", files.WRITES)
def test_a_folder_cannot_be_written(what: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    with tempfile.TemporaryDirectory() as place:  # pytest's folders are closed to other users
        check(files.read_only_folder(what, random.Random(1), Path(place)))


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, files.Sample]:
    return files.make_samples(tmp_path_factory.mktemp("samples"))


@pytest.mark.parametrize("kind", files.KINDS)
@pytest.mark.parametrize("how", files.DAMAGES)
def test_a_file_is_not_what_it_was(kind: str, how: str, samples: dict[str, files.Sample],
                                   tmp_path: Path) -> None:
    rng = random.Random(f"{kind} {how}")
    for _ in range(20):
        check(files.damaged_file(samples[kind], how, rng, tmp_path))
