"""Faults of the network between memory domains, simulated by a proxy in user space.

Every rank is its own memory domain, so all rows travel over gloo. A preloaded library redirects its
connections, and those that monitor the peers, to a proxy, which delays data, holds all data back,
or closes all connections.
"""

import contextlib
import json
import os
import random
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from oper.errors import OperError
from oper.shmem.group.groups import ProcessGroup
from oper.shmem.tables import ShardedTables
from tests.faults.injection import (
    DEADLINE_S,
    KILL_LIMIT_S,
    SPECS,
    STOP_LIMIT_S,
    Outcome,
    open_tables,
)
from tests.runtime_support import read_all, run_ranks, short_bags
from tests.support import ROOT
from tests.world_support import leftovers

FAULTS = ("cut", "lost", "delayed")
_STEPS = 12
_DELAY_S = 0.02


class Proxy:
    """Forwards connections. The first two bytes of each are the port to which it is addressed.

    Attributes:
        port: the port on which the proxy listens.
        mode: ``"pass"``, ``"delayed"``, ``"lost"`` (received data is not forwarded) or ``"cut"``.
    """

    def __init__(self) -> None:
        self.mode = "pass"
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
                (port,) = struct.unpack("!H", client.recv(2, socket.MSG_WAITALL))
                server = socket.create_connection(("127.0.0.1", port))
            except OSError:
                return
            for here, there in ((client, server), (server, client)):
                here.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._sockets.append(here)
                thread = threading.Thread(target=self._pump, args=(here, there), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pump(self, here: socket.socket, there: socket.socket) -> None:
        try:
            while data := here.recv(1 << 16):
                if self.mode == "delayed":
                    time.sleep(_DELAY_S)
                while self.mode == "lost":
                    time.sleep(0.01)
                there.sendall(data)
        except OSError:
            pass
        finally:
            for end in (here, there):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """Reset all connections, as if the machine were lost."""
        self.mode = "cut"
        for end in list(self._sockets):
            try:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def close(self) -> None:
        self.cut()
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for thread in self._threads:
            thread.join(5)
        for end in self._sockets:
            end.close()


def build_redirect(folder: Path) -> Path | None:
    """Build the library to preload; return None without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    library = folder / "redirect.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library,
                    Path(__file__).with_name("redirect.c"), "-ldl"], check=True)
    return library


def inject(fault: str, rng: random.Random, library: Path) -> Outcome:
    """Train in two or three memory domains and disturb their network after the first exchange."""
    outcome = Outcome()
    world_size, seed = rng.choice((2, 2, 3)), rng.randrange(4)
    with tempfile.TemporaryDirectory(prefix="oper-fault-") as folder:
        proxy = Proxy()
        ranks = _start(world_size, seed, folder, {
            "LD_PRELOAD": str(library), "FAULT_PROXY_PORT": str(proxy.port)})
        try:
            for rank in ranks:
                _answer(rank)  # it trains
            time.sleep(rng.random() * 0.2)
            since = time.monotonic()
            if fault == "cut":
                proxy.cut()
            else:
                proxy.mode = fault
            answers = [_answer(rank) for rank in ranks]
            if fault == "delayed":
                _check_numbers(answers, world_size, seed, outcome)
            else:
                _check_errors(answers, fault, since, outcome)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
                assert process.stdout is not None
                process.stdout.close()
            proxy.close()
        outcome.leftovers = leftovers([p.pid for p in ranks])
    return outcome


def _start(world_size: int, seed: int, folder: str, env: dict[str, str]
           ) -> list[subprocess.Popen[str]]:
    common = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OPER_DEADLINE_S": str(DEADLINE_S),
              "OPER_SEND_BUFFER_BYTES": str(1 << 22), "OMP_NUM_THREADS": "1",
              "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    return [subprocess.Popen(
        [sys.executable, "-m", "tests.faults.network", str(rank), str(world_size), str(seed),
         str(Path(folder) / "store")],
        env={**common, "OPER_DOMAIN": f"host{rank}", **env}, cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) for rank in range(world_size)]


def _answer(rank: subprocess.Popen[str]) -> dict[str, Any]:
    assert rank.stdout is not None
    alarm = threading.Timer(90, rank.kill)
    alarm.start()
    try:
        line = rank.stdout.readline()
    finally:
        alarm.cancel()
    return json.loads(line) if line else {"kind": "silence", "text": "", "time": 0.0}


def _check_errors(answers: list[dict[str, Any]], fault: str, since: float, outcome: Outcome
                  ) -> None:
    kinds = {"cut": ("PeerLostError",), "lost": ("DeadlineError", "PeerLostError")}[fault]
    for rank, found in enumerate(answers):
        others = [f"rank={r}," for r in range(len(answers)) if r != rank]
        if found["kind"] not in kinds:
            outcome.break_guarantee(f"rank {rank}: {found['kind']!r} {found.get('text')}")
        elif not any(name in found["text"] for name in others):
            outcome.break_guarantee(f"rank {rank} names nobody: {found['text']}")
    outcome.detection_s = max(f.get("time", 0.0) for f in answers) - since
    if outcome.detection_s > (KILL_LIMIT_S if fault == "cut" else STOP_LIMIT_S):
        outcome.break_guarantee(f"noticed after {outcome.detection_s:.2f} s")


def _check_numbers(answers: list[dict[str, Any]], world_size: int, seed: int, outcome: Outcome
                   ) -> None:
    """Compare with virtual ranks."""
    wanted = run_ranks(world_size, lambda group: _train(open_tables(group, seed), seed))
    for rank, found in enumerate(answers):
        if found.get("sum") != wanted[rank]:
            outcome.break_guarantee(f"rank {rank} has other numbers: {found}")


def _train(tables: ShardedTables, seed: int) -> int:
    """Train for a number of steps of some milliseconds; returns a checksum of the rows."""
    rank = tables.group.rank
    for step in range(_STEPS):
        batch = short_bags(SPECS, 100 * seed + 10 * step + rank, 6 + rank)
        tables.lookup(batch).square().sum().backward()
        time.sleep(0.03)
    rows = read_all(tables)
    return zlib.crc32(b"".join(rows[s.name].numpy().tobytes() for s in SPECS))


def _main(rank: int, world_size: int, seed: int, store: str) -> dict[str, Any]:
    """Train, as one rank, until an error occurs or all steps are done."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank,
                            world_size=world_size)
    tables = open_tables(ProcessGroup(), seed)
    print(json.dumps({"kind": "ready"}), flush=True)
    try:
        return {"kind": "", "sum": _train(tables, seed), "time": time.monotonic()}
    except OperError as error:
        return {"kind": type(error).__name__, "text": str(error), "time": time.monotonic()}


if __name__ == "__main__":
    print(json.dumps(_main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])),
          flush=True)
    os._exit(0)  # gloo's threads may wait for peers that will never answer
