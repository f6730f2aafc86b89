"""What others may try: pickles that run something, users who want at a job's memory."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import oper
from oper.errors import FileFormatError, OperError
from oper.integration.checkpoint_files import CHECKSUMS, METADATA
from oper.shmem.group import ThreadGroup
from oper.shmem.heap import exchange_over_sockets
from tests.faults.injection import small_model
from tests.world_support import report, world

NOBODY = 65534


class _Trap:
    """Runs something when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._mark),)


@pytest.mark.filterwarnings("ignore:no access statistics")
def test_a_hostile_pickle_is_refused(tmp_path: Path) -> None:
    model, folder, mark = small_model(1, 0), tmp_path / "c", tmp_path / "ran"
    oper.save_checkpoint(folder, model, extra={"step": 1})
    (folder / CHECKSUMS).unlink()  # whoever writes the files writes the sums, too
    (folder / METADATA).write_bytes(pickle.dumps(_Trap(mark)))
    with pytest.raises(FileFormatError, match="mkdir"):
        oper.load_checkpoint(folder, model)
    assert not mark.exists()
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
    """Rank 1 comes late, so that rank 0's private socket stays open for a while."""
    import time

    from oper.shmem import heap
    from oper.shmem.group import ProcessGroup

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
    """A stranger is given nothing, be it another user or a process that the job has not named."""
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


def test_a_stranger_does_not_stop_the_watch() -> None:
    """Bytes of somebody else at the port of a rank's watch are dropped, and ranks still meet."""
    from oper.shmem.watch import Watch

    watch = Watch.__new__(Watch)
    watch._peers = {}
    watch._group = ThreadGroup.create(2)[0]
    for greeting in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(40), b"\0" * 40):
        here, there = socket.socketpair()
        with there:
            there.sendall(greeting)
            there.shutdown(socket.SHUT_WR)
            watch._welcome(here, b"t" * 32)
        assert watch._peers == {}
        assert here.fileno() == -1, "its connection is closed"
