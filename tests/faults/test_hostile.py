"""Attacks: pickles that execute code, and users who try to access the memory of a job."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import oper
from oper.errors import FileFormatError, OperError
from oper.integration.checkpoint.files import CHECKSUMS, METADATA
from oper.plan import Plan, uniform_plan
from oper.shmem.memory.host_heap import exchange_over_sockets
from oper.shmem.publication.handshake import socket_name
from oper.shmem.publication.publisher import Publisher
from oper.shmem.publication.reader import Reader
from oper.tables import TableSpec
from tests.faults.injection import small_model
from tests.world_support import report, world


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
    """Start rank 1 late, so that rank 0's private socket stays open for a while."""
    import time

    from oper.shmem.group.groups import ProcessGroup
    from oper.shmem.memory import host_heap as heap

    group = ProcessGroup()
    if rank == 1:
        original = heap._exchange_descriptors

        def late(*args: Any) -> Any:
            report("open")
            time.sleep(4)
            return original(*args)

        heap._exchange_descriptors = late
    fd = os.memfd_create("oper-test")
    _, received = exchange_over_sockets(group, [fd])
    return f"{sum(len(fds) for fds in received.values())}"


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
def test_another_user_cannot_read_what_is_published() -> None:
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
def test_what_another_user_publishes_is_not_read() -> None:
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
