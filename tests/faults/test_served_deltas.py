"""Faults while a training run is served step by step: no score is of two steps, and all heals."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from oper.errors import OperError
from oper.integration.checkpoint.delta_files import base_of, folder_of
from oper.serve import Client
from oper.serve.client import ServerError
from oper.train.resume import CHECKPOINT
from tests.faults.delta_run import DIE_AT, REQUEST, step_of, train
from tests.serve_support import value_of
from tests.support import ROOT, wait_for
from tests.world_support import world

pytestmark = pytest.mark.filterwarnings("ignore:no access statistics")


class Served:
    """``oper serve`` in a process, and a client that asks it all the time.

    Attributes:
        steps: of the answers, in order.
        refused: errors.
        torn: answers that are of no single step.
    """

    def __init__(self, run: Path, **env: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as place:
            self._port = place.getsockname()[1]
        self._run = run
        self.steps: list[int] = []
        self.refused: list[str] = []
        self.torn = 0
        self.lines: queue.Queue[str] = queue.Queue()
        self.client = Client(f"127.0.0.1:{self._port}", timeout_s=180, model="run")
        self._stop = threading.Event()
        self.start(**env)
        self._asking = threading.Thread(target=self._ask)
        self._asking.start()

    def start(self, **env: str) -> None:
        """Start it, again if need be."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "oper", "serve", "tests.faults.delta_run:make", "--follow",
             str(self._run), "--port", str(self._port), "--json", "--workers", "1"], cwd=ROOT,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "OPER_TEST_RUN": str(self._run), **env})
        threading.Thread(target=self._read, args=(self.process,), daemon=True).start()
        assert self.process.stdout is not None
        self.workers: list[int] = json.loads(self.process.stdout.readline())["workers"]

    def _read(self, process: subprocess.Popen[str]) -> None:
        for line in process.stderr or ():
            self.lines.put(line)

    def _ask(self) -> None:
        while not self._stop.is_set():
            try:
                step = step_of(self.client.score_request(REQUEST)[0])
            except (ServerError, OperError) as error:
                self.refused.append(str(error))
                time.sleep(0.05)
                continue
            self.torn += step < 0
            self.steps.append(step)

    def says(self, words: str) -> str:
        """The next line of the log with these words."""
        while words not in (line := self.lines.get(timeout=60)):
            pass
        return line

    def serves(self, step: int) -> bool:
        """Whether the last answer is of that step."""
        return self.steps[-1:] == [step]

    def close(self) -> None:
        self._stop.set()
        self._asking.join()
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def serving(run: Path, **env: str) -> Iterator[Served]:
    served = Served(run, **env)
    try:
        yield served
        assert served.steps and not served.torn
    finally:
        served.close()


def trained(folder: Path, steps: int, full_every: int) -> None:
    """Let a run go on until it has so many steps."""
    with world(1, train, str(folder), steps, full_every) as running:
        assert [running.receive(0), running.receive(0)][1] == steps


# Instead of the second delta: which comes, under which number, whether damaged; what is said.
FAULTS = {
    "dropped": ((2, 2, False), "000001 is missing, 000002 is there"),
    "duplicated": ((0, 1, False), "ranks, number, step"),
    "reordered": ((2, 1, False), "ranks, number, step"),
    "damaged": ((1, 1, True), "CRC-32"),
}


def test_broken_chains_are_refused_while_requests_flow(tmp_path: Path) -> None:
    """Each chain breaks after its first delta; the whole weights of the next one heal it."""
    source, run, moved = tmp_path / "source", tmp_path / "run", tmp_path / "moved"
    chains = []
    for k in range(len(FAULTS) + 1):  # of a whole checkpoint and three deltas each
        trained(source, 4 * k + 3, 4)
        chains.append(tmp_path / f"chain{k}")
        shutil.copytree(source, chains[-1])

    def whole(k: int) -> None:
        for name in (CHECKPOINT, f"{CHECKPOINT}.deltas"):
            shutil.rmtree(run / name, ignore_errors=True)
        shutil.copytree(chains[k] / CHECKPOINT, moved)
        run.mkdir(exist_ok=True)
        moved.rename(run / CHECKPOINT)

    def put(k: int, number: int, name: int, harm: bool = False) -> None:
        """Delta `number` of chain `k`, perhaps under another name or damaged."""
        base = base_of(chains[k] / CHECKPOINT)
        shutil.copytree(folder_of(chains[k] / CHECKPOINT) / base / f"{number:06d}", moved)
        if harm:
            part = next(moved.iterdir())
            data = bytearray(part.read_bytes())
            data[len(data) // 2] ^= 1
            part.write_bytes(data)
        there = folder_of(run / CHECKPOINT) / base
        there.mkdir(parents=True, exist_ok=True)
        moved.rename(there / f"{name:06d}")

    whole(0)
    with serving(run) as served:
        for k, (fault, words) in enumerate(FAULTS.values()):
            if k:
                whole(k)
            wait_for(lambda k=k: served.serves(4 * k))
            put(k, 0, 0)
            wait_for(lambda k=k: served.serves(4 * k + 1))
            put(k, *fault)
            assert words in served.says("the old weights go on until there is a whole checkpoint")
            put(k, 1, 3)  # whatever comes now
            time.sleep(0.5)
            assert served.serves(4 * k + 1)
            assert value_of(served.client.metrics(), "oper_failed_publications_total") == k + 1
        whole(len(FAULTS))
        for number in range(3):
            put(len(FAULTS), number, number)
        wait_for(lambda: served.serves(4 * len(FAULTS) + 3))
        assert not served.refused
        assert served.steps == sorted(served.steps)
        assert set(served.steps) >= {4 * k + j for k in range(len(FAULTS)) for j in (0, 1)}


def test_a_killed_trainer_leaves_the_server_on_whole_steps(tmp_path: Path) -> None:
    """It is killed in the middle of whatever it saves; what it goes on with is served, too."""
    rng, kills, steps = random.Random(3), 4, 400
    trained(tmp_path, 2, 1000)
    with serving(tmp_path) as served:
        wait_for(lambda: served.serves(2))
        for kill in range(kills + 1):
            with world(1, train, str(tmp_path), steps, 30) as running:
                assert running.receive(0) >= 2
                if kill < kills:
                    time.sleep(0.3 + rng.random())
                    running.processes[0].kill()
                    running.processes[0].join()
                else:
                    assert running.receive(0) == steps
        wait_for(lambda: served.serves(steps))
        assert not served.refused and len(set(served.steps)) > 10
        assert served.steps == sorted(served.steps)


def test_a_killed_server_and_worker_come_back_to_the_newest_step(tmp_path: Path) -> None:
    """The supervisor is killed between two tables of a delta: what is half copied is not read."""
    trained(tmp_path, 3, 1000)
    with serving(tmp_path, **{DIE_AT: "7"}) as served:  # two tables by delta: in the fourth
        wait_for(lambda: served.serves(3))
        with world(1, train, str(tmp_path), 900, 1000) as running:
            served.process.wait(60)
            assert served.process.returncode == -signal.SIGKILL
            assert max(served.steps) == 3
            served.start()
            count = len(served.steps)
            wait_for(lambda: len(served.steps) > count and served.steps[-1] > 3)
            os.kill(served.workers[0], signal.SIGKILL)
            assert [running.receive(0), running.receive(0)] == [3, 900]
        wait_for(lambda: served.serves(900))
        served.says("starting another one")
        assert all("cannot be read" in text for text in served.refused)
