"""Faults while the steps of a run are served: no score mixes two steps, and serving recovers."""

import contextlib
import os
import queue
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from oper.errors import OperError
from oper.integration.checkpoint.delta_files import base_of, folder_of
from oper.serve import Client
from oper.serve.client import ServerError
from oper.support.processes import free_port
from oper.train.resume import CHECKPOINT
from tests.faults.delta_run import DIE_AT, REQUEST, save_chains, step_of, train
from tests.support import announced, serving, wait_for
from tests.world_support import world

pytestmark = pytest.mark.filterwarnings("ignore:no access statistics")


class Served:
    """``oper serve`` in a process, and a client that sends requests continuously.

    Attributes:
        steps: steps of the answers, in order.
        refused: errors.
        torn: answers that mix several steps.
    """

    def __init__(self, run: Path, **env: str) -> None:
        self._run, self._port, self._servers = run, free_port(), contextlib.ExitStack()
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
        """Start the server, or start it again."""
        self.process = self._servers.enter_context(serving(
            "tests.faults.delta_run:make", "--follow", str(self._run), "--port", str(self._port),
            "--json", "--workers", "1", env={"OPER_TEST_RUN": str(self._run), **env}))
        threading.Thread(target=self._read, args=(self.process,), daemon=True).start()
        self.workers: list[int] = announced(self.process)["workers"]

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
        """Return the next line of the log that contains `words`."""
        while words not in (line := self.lines.get(timeout=60)):
            pass
        return line

    def serves(self, step: int) -> bool:
        """Whether the last answer is of step `step`."""
        return self.steps[-1:] == [step]

    def close(self) -> None:
        self._stop.set()
        self._asking.join()
        self.process.send_signal(signal.SIGTERM)
        with self._servers, contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(60)


@contextlib.contextmanager
def following(run: Path, **env: str) -> Iterator[Served]:
    served = Served(run, **env)
    try:
        yield served
        assert served.steps and not served.torn
    finally:
        served.close()


def trained(folder: Path, steps: int, full_every: int) -> None:
    """Continue a run up to step `steps`."""
    with world(1, train, str(folder), steps, full_every) as running:
        assert [running.receive(0), running.receive(0)][1] == steps


def test_a_killed_trainer_leaves_the_server_on_whole_steps(tmp_path: Path) -> None:
    """The run is killed while it saves; the steps after it has resumed are served, too."""
    rng, kills, steps = random.Random(3), 2, 120
    trained(tmp_path, 2, 1000)
    with following(tmp_path) as served:
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


def test_a_killed_server_and_worker_return_to_the_newest_step(tmp_path: Path) -> None:
    """The supervisor is killed between two tables of a delta: the partial delta is not read."""
    trained(tmp_path, 3, 1000)
    # A delta copies two tables and a weight: in the fourth.
    with following(tmp_path, **{DIE_AT: "10"}) as served:
        wait_for(lambda: served.serves(3))
        with world(1, train, str(tmp_path), 160, 1000) as running:
            served.process.wait(60)
            assert served.process.returncode == -signal.SIGKILL
            assert max(served.steps) == 3
            served.start()
            count = len(served.steps)
            wait_for(lambda: len(served.steps) > count and served.steps[-1] > 3)
            os.kill(served.workers[0], signal.SIGKILL)
            assert [running.receive(0), running.receive(0)] == [3, 160]
        wait_for(lambda: served.serves(160))
        served.says("starting another one")
        assert all("cannot be read" in text for text in served.refused)


DELTAS = 3  # of a chain
# Faults after the first delta of a chain: the source of each further delta, by number, and the text
# with which the server refuses the first wrong one.
HARMS: dict[str, tuple[dict[int, int], str]] = {
    "dropped": ({2: 2}, "000001 is missing, 000002 exists"),
    "doubled": ({0: 1, 1: 2}, "ranks, number, step"),
    "reordered": ({2: 1, 1: 2}, "ranks, number, step"),
    "damaged": ({1: 1, 2: 2}, "CRC-32"),
}


def copy(source: Path, to: Path, damaged: bool = False) -> None:
    """Copy a folder and rename it when it is complete; with `damaged`, flip one bit."""
    aside = to.with_name("aside")
    shutil.copytree(source, aside)
    if damaged:
        part = next(aside.glob("*.npz"))
        data = bytearray(part.read_bytes())
        data[data.rindex(b"\x93NUMPY") + 128] ^= 4  # the first number of the last array
        part.write_bytes(data)
    if to.exists():
        to.rename(to.with_name("old"))
    aside.rename(to)
    shutil.rmtree(to.with_name("old"), ignore_errors=True)


def test_dropped_doubled_reordered_and_damaged_deltas(tmp_path: Path) -> None:
    """Each such delta is refused by name, no delta after it is served, and serving continues with
    the next checkpoint."""
    save_chains(tmp_path, len(HARMS) + 1, DELTAS)
    served_run = tmp_path / "served"
    served_run.mkdir()
    copy(tmp_path / "0" / CHECKPOINT, served_run / CHECKPOINT)
    with following(served_run) as served:
        for k, harm in enumerate([*HARMS, "none"]):
            moves, words = HARMS.get(harm, ({1: 1, 2: 2}, ""))
            if k:  # the first one is there: a copy of it would begin its chain again
                copy(tmp_path / str(k) / CHECKPOINT, served_run / CHECKPOINT)
            base = base_of(served_run / CHECKPOINT)
            chain = folder_of(tmp_path / str(k) / CHECKPOINT) / base
            target = folder_of(served_run / CHECKPOINT) / base
            target.mkdir(parents=True)
            copy(chain / "000000", target / "000000")
            wait_for(lambda step=k * DELTAS + 1: served.serves(step))
            for source, number in moves.items():
                copy(chain / f"{source:06d}", target / f"{number:06d}",
                     damaged=harm == "damaged" and number == 1)
            if words:
                assert "until the next full checkpoint" in served.says(words)
                time.sleep(0.2)
                assert served.serves(k * DELTAS + 1), harm
        wait_for(lambda: served.serves((len(HARMS) + 1) * DELTAS))
        assert f"oper_failed_publications_total {len(HARMS)}" in served.client.metrics()
        assert not served.refused and served.steps == sorted(served.steps)
