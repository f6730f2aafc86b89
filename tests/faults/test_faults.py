"""A short form of ``python -m tests.faults``; guarantees name tests; attacks."""

import os
import pickle
import random
import re
import socket
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import oper
from oper.errors import FileFormatError, OperError
from oper.integration.checkpoint.files import CHECKSUMS, METADATA
from oper.plan import Plan, uniform_plan
from oper.shmem.group.groups import ProcessGroup
from oper.shmem.memory.host_heap import exchange_over_sockets
from oper.shmem.publication.handshake import socket_name
from oper.shmem.publication.publisher import Publisher
from oper.shmem.publication.reader import Reader
from oper.tables import TableSpec
from tests.faults import files, injection, memory, network
from tests.faults.injection import Injection, Outcome, small_model
from tests.faults.pauses import timed
from tests.runtime_support import short_bags
from tests.support import ROOT
from tests.world_support import leftovers, received, report, world


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
    tables = injection.open_tables(ProcessGroup(), 0)
    while True:
        tables.lookup(short_bags(injection.SPECS, rank, 6)).sum().backward()
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


def test_leftovers_are_detected() -> None:
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


def test_violated_guarantees_are_detected(tmp_path: Path) -> None:
    """A fault that never happens, and a survivor whose error names no peer."""
    outcome = injection.inject(Injection("kill", "update", 2, 0, 10**6, 0))
    assert not outcome.kept and any("never happened" in what for what in outcome.broken)


@pytest.mark.parametrize("fault", ["cut", "lost"])
@timed
def test_connections_between_domains(fault: str, tmp_path: Path) -> None:
    library = network.build_redirect(tmp_path)
    if library is None:
        pytest.skip("no C compiler for the library that redirects connections")
    check(network.inject(fault, random.Random(1), library))


@pytest.mark.parametrize("what", files.WRITES)
def test_the_disk_is_full(what: str, tmp_path: Path) -> None:
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
def test_a_file_is_damaged_or_replaced(kind: str, how: str, samples: dict[str, files.Sample],
                                       tmp_path: Path) -> None:
    rng = random.Random(f"{kind} {how}")
    for _ in range(8):  # many more in `python -m tests.faults`
        check(files.damaged_file(samples[kind], how, rng, tmp_path))


# ---- guarantees name tests -----------------------------------------------------------------------

_NAMED = re.compile(r"`([^`]+)`")


def _guarantees() -> list[tuple[str, list[str]]]:
    """Return the guarantees, each with the names of its tests."""
    page = (ROOT / "docs" / "explanation" / "reliability.md").read_text()
    table = page.split("## Guarantees", 1)[1].split("\n## ", 1)[0]
    rows = [line.strip("|").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return [(row[0].strip(), _NAMED.findall(row[-1])) for row in rows[1:]]


def test_every_guarantee_names_existing_tests() -> None:
    guarantees = _guarantees()
    assert len(guarantees) > 15
    for guarantee, names in guarantees:
        file = "tests/faults/test_faults.py"  # of names without a file before them
        assert names, guarantee
        for name in names:
            if name.startswith("["):  # another case of the test before it
                continue
            if ".py" in name:
                file, _, name = name.partition("::")
            test, text = name.partition("[")[0], (ROOT / file).read_text()
            assert f"def {test}(" in text if test else "def test_" in text, (
                f"{guarantee}: no test {name!r} in {file}")


# ---- attacks -------------------------------------------------------------------------------------


class _Trap:
    """Executes code when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._mark),)


@pytest.mark.filterwarnings("ignore:no access statistics")
def test_a_hostile_pickle_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, folder, mark = small_model(1, 0), tmp_path / "c", tmp_path / "ran"
    oper.save_checkpoint(folder, model, extra={"step": 1})
    (folder / CHECKSUMS).unlink()  # who can write files can write checksums, too
    (folder / METADATA).write_bytes(pickle.dumps(_Trap(mark)))
    with pytest.raises(FileFormatError, match="mkdir"):
        oper.load_checkpoint(folder, model)
    assert not mark.exists()
    with pytest.raises(OperError, match="_Trap"):
        oper.save_checkpoint(tmp_path / "d", model, extra={"step": _Trap(mark)})
    monkeypatch.setattr("oper.integration.checkpoint.saving.check_readable",
                        lambda what, state: None)
    oper.save_checkpoint(tmp_path / "d", model, extra={"step": _Trap(mark)})
    with pytest.raises(OperError, match=r"[Ww]eights"):
        oper.load_checkpoint(tmp_path / "d", model)
    assert not mark.exists()


_INTRUDER = textwrap.dedent("""
    import os, socket, sys
    if sys.argv[1] != "same":
        os.setgroups([]); os.setgid(65534); os.setuid(65534)
    got = []
    for line in open("/proc/net/unix"):
        name = line.split()[-1]
        if not name.startswith("@oper-" + sys.argv[2] + "-"):
            continue
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
            s.settimeout(3)
            try:
                s.connect("\\0" + name[1:])
                data, fds, _, _ = socket.recv_fds(s, 4, 3)
                got.append((data, len(fds)))
            except OSError as error:
                got.append((str(error), 0))
    try:
        os.listdir(f"/proc/{sys.argv[2]}/fd")
        got.append(("descriptors listed", 1))
    except OSError:
        pass
    print(len(got), sum(n for _, n in got))
""")


def _waits_with_open_sockets(rank: int, world_size: int) -> str:
    """Rank 1 waits for the test, so that rank 0's private socket stays open until then."""
    from oper.shmem.memory import host_heap as heap

    group = ProcessGroup()
    if rank == 1:
        original = heap._exchange_descriptors

        def late(*args: Any) -> Any:
            report("open")
            received()
            return original(*args)

        heap._exchange_descriptors = late
    fd = os.memfd_create("oper-test")
    _, found = exchange_over_sockets(group, [fd])
    return f"{sum(len(fds) for fds in found.values())}"


@pytest.mark.parametrize("who", ["same", "other"])
def test_another_user_cannot_attach(who: str) -> None:
    """Neither other users nor processes that the job has not named are given any memory."""
    if who == "other" and os.getuid() != 0:
        pytest.skip("only root can become another user")
    with world(2, _waits_with_open_sockets) as running:
        assert running.receive(1) == "open"
        done = subprocess.run(
            [sys.executable, "-c", _INTRUDER, who, str(running.pids[0])], text=True,
            capture_output=True, timeout=30, check=True)
        running.send(1, None)
        tried, descriptors = done.stdout.split()
        assert int(tried) >= 1, "the socket was not found: the test tests nothing"
        if who == "other":
            assert int(descriptors) == 0
        else:  # it may list the descriptors of its own user's process, but is sent none
            assert int(descriptors) <= 1
        assert [running.receive(r) for r in (0, 1)] == ["1", "1"], "the job itself goes on"


_AS_NOBODY = textwrap.dedent("""
    import os, socket, sys
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
    s = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    s.settimeout(20)
    if sys.argv[1] == "reads":
        s.connect("\\0" + sys.argv[2])
        try:
            data, fds, _, _ = socket.recv_fds(s, 1 << 16, 64)
        except ConnectionError:
            data, fds = b"", []
        print(len(data), len(fds))
    else:
        s.bind("\\0" + sys.argv[2])
        s.listen()
        print("there", flush=True)
        sys.stdin.readline()
""")


def _as_nobody(what: str, name: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", _AS_NOBODY, what, socket_name(name)[1:]],
                            text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _publication() -> tuple[str, Plan]:
    table = TableSpec("a", 100, 4, ("f",), "sum", "float32", "none")
    return f"hostile-{os.getpid()}", uniform_plan([table], 1, "owned")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_cannot_read_a_publication() -> None:
    name, plan = _publication()
    publisher = Publisher(name, plan, {})
    try:
        publisher.publish_rows(lambda table: [(0, torch.ones(100, 4))], {})
        with _as_nobody("reads", name) as stranger:
            assert stranger.communicate(timeout=30)[0].split() == ["0", "0"]
        assert stranger.returncode == 0 and publisher.readers() == []
        reader = Reader(name)  # processes of the same user are accepted
        assert publisher.readers() == [os.getpid()]
        reader.close()
    finally:
        publisher.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_publication_of_another_user_is_not_read() -> None:
    """A process of another user that has taken the name of this user's publication is not trusted.
    """
    name, plan = _publication()
    with _as_nobody("publishes", name) as stranger:
        assert stranger.stdout is not None and stranger.stdout.readline() == "there\n"
        with pytest.raises(OperError, match="another user has taken this name"):
            Reader(name, timeout_s=1.0)
        with pytest.raises(OperError, match=name):
            Publisher(name, plan, {})
        stranger.communicate("\n", timeout=30)
