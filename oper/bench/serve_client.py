"""The client of the serving benchmark: LoadGen in a process of its own, over HTTP."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from oper.bench import loadgen
from oper.bench.launch import die_with_parent
from oper.bench.memory import cpu_seconds
from oper.bench.serve_models import ServeWork
from oper.errors import OperError, fail

TOLERANCE = 1e-5  # of a score: requests are batched differently from time to time
_ANSWER_S = 60.0  # beyond the length of a run


@dataclass(slots=True)
class Seen:
    """What one run has shown.

    Attributes:
        result: LoadGen's.
        begin, end: of each request, float64 [N] on the clock of `time.monotonic`.
        epoch: of the weights that scored it, int64 [N]; 0 = failed.
        wrong: requests whose scores are not those of their epoch.
        failed: requests without scores.
        retries: requests sent again.
        messages: of some failures.
    """

    result: loadgen.Result
    begin: np.ndarray
    end: np.ndarray
    epoch: np.ndarray
    wrong: int
    failed: int
    retries: int
    messages: list[str]

    @property
    def latency_ms(self) -> np.ndarray:
        """From LoadGen's issue to the scores, float64 [N]."""
        return (self.end - self.begin) * 1e3


class LoadClient:
    """Sends LoadGen's queries to a running server, from another process.

    Args:
        address: of the server.
        served: what it scores.
        threads: requests in flight at most.
    """

    def __init__(self, address: str, served: ServeWork, threads: int = 32) -> None:
        import multiprocessing

        context = multiprocessing.get_context("spawn")
        self._control, theirs = context.Pipe()
        self._process = context.Process(target=_client, daemon=True, args=(
            theirs, address, served.to_json(), threads))
        self._process.start()
        theirs.close()
        self._wait(_ANSWER_S)

    def cpu_seconds(self) -> float:
        """Processor time (s) so far."""
        return cpu_seconds(self._process.pid or 0)

    def learn(self) -> np.ndarray:
        """Ask for all queries one by one and keep the scores as those of the present weights.

        Sets alternate: odd and even epochs have their own.

        Returns:
            float32 [num_queries, candidates].
        """
        self._control.send(("learn",))
        scores: np.ndarray = self._wait(10 * _ANSWER_S)
        return scores

    def start(self, settings: loadgen.Settings) -> None:
        """Begin a run."""
        self._control.send(("run", settings))

    def finish(self, seconds: float) -> Seen:
        """What the run has shown; it may take so long."""
        seen: Seen = self._wait(seconds + 5 * _ANSWER_S)
        return seen

    def run(self, settings: loadgen.Settings) -> Seen:
        """A whole run."""
        self.start(settings)
        return self.finish(settings.min_duration_s)

    def _wait(self, seconds: float) -> Any:
        try:
            if self._control.poll(seconds):
                answer = self._control.recv()
                if isinstance(answer, Exception):
                    raise answer
                return answer
        except EOFError:
            pass
        raise OperError(fail("the client of the benchmark has failed", "waited (s)", seconds,
                             "an answer", "see its log above"))

    def close(self) -> None:
        """End the process."""
        self._control.close()
        self._process.join(5)
        self._process.kill()
        self._process.join()


class _Sender:
    """Threads that send queries and check what comes back."""

    def __init__(self, address: str, served: ServeWork, threads: int) -> None:
        from oper.serve.client import Client
        from oper.serve.wire import encode_request

        self._client = Client(address, timeout_s=10.0)
        self._messages = [encode_request(r) for r in served.library()]
        self._expected: dict[int, np.ndarray] = {}  # by epoch modulo 2
        self._todo: queue.SimpleQueue[tuple[int, int, float]] = queue.SimpleQueue()
        self._seen: list[tuple[float, float, int]] = []
        self._wrong = 0
        self._failures: list[str] = []
        for _ in range(threads):
            threading.Thread(target=self._work, daemon=True).start()

    def learn(self) -> np.ndarray:
        found = [self._client.infer(*message) for message in self._messages]
        epochs = {epoch for _, epoch in found}
        if len(epochs) != 1:
            raise OperError(fail("cannot learn the scores", "epochs", sorted(epochs), "one",
                                 "publish nothing meanwhile"))
        scores = np.stack([s for s, _ in found])
        self._expected[epochs.pop() % 2] = scores
        return scores

    def run(self, settings: loadgen.Settings) -> Seen:
        self._seen, self._failures, self._wrong = [], [], 0
        before = self._client.counts.retries
        result = loadgen.run(settings, self._issue)
        seen = np.array(self._seen).reshape(-1, 3)
        return Seen(result, seen[:, 0], seen[:, 1], seen[:, 2].astype(np.int64), self._wrong,
                    len(self._failures), self._client.counts.retries - before,
                    self._failures[:5])

    def _issue(self, pairs: list[tuple[int, int]]) -> None:
        now = time.monotonic()
        for number, index in pairs:
            self._todo.put((number, index, now))

    def _work(self) -> None:
        while True:
            number, index, begin = self._todo.get()
            epoch = 0
            try:
                scores, epoch = self._client.infer(*self._messages[index])
            except Exception as error:
                self._failures.append(f"{type(error).__name__}: {error}")
            loadgen.complete([number])
            self._seen.append((begin, time.monotonic(), epoch))
            if epoch and np.abs(scores - self._expected[epoch % 2][index]).max() > TOLERANCE:
                self._wrong += 1


def _client(control: Any, address: str, value: dict[str, Any], threads: int) -> None:
    die_with_parent()
    sender = _Sender(address, ServeWork.from_json(value), threads)
    control.send(True)
    while True:
        try:
            command, *words = control.recv()
        except EOFError:
            return
        try:
            control.send(sender.learn() if command == "learn" else sender.run(words[0]))
        except Exception as error:
            control.send(error if isinstance(error, OperError) else OperError(repr(error)))
