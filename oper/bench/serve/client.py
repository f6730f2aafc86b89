"""The client of the serving benchmark: LoadGen in a separate process sends queries over HTTP.

LoadGen (C++) issues queries on a fixed schedule, so that a slow server does not delay arrivals.
`oper.serve.Client` sends them from a pool of threads; scores are compared after the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from oper.bench.core.child import Child, obey
from oper.bench.serve import loadgen
from oper.bench.serve.models import ServeWork
from oper.errors import OperError
from oper.serve.client import Client

TOLERANCE = 1e-5  # absolute error of a score, since requests are batched differently
_THREADS = 64  # limit of the queries in flight
_ANSWER_S = 60.0  # time limit of a command, in addition to the length of a run
_PATIENCE_S = 10.0  # time limit of a query, including retries


@dataclass(slots=True)
class Seen:
    """The result of one run.

    Attributes:
        result: LoadGen's result.
        begin, end: times of issue and completion of each request, float64 [N], seconds on the clock
            of `time.monotonic`.
        epoch: epoch of the weights that scored each request, int64 [N]; 0 = failed.
        wrong: number of requests whose scores differ from the expected ones of their epoch.
        failed: number of requests without scores.
        retries: number of times that a request was sent again.
        messages: up to 5 messages of failed requests.
        cores: mean number of cores that the client kept busy, including LoadGen.
        unchecked: query index, epoch and scores float32 [candidates] of each response, if no
            expected scores are known.
    """

    result: loadgen.Result
    begin: np.ndarray
    end: np.ndarray
    epoch: np.ndarray
    wrong: int
    failed: int
    retries: int
    messages: list[str]
    cores: float = 0.0
    unchecked: list[tuple[int, int, np.ndarray]] = field(default_factory=list)

    @property
    def latency_ms(self) -> np.ndarray:
        """Time (ms) from LoadGen's issue to the complete response, float64 [N]."""
        return (self.end - self.begin) * 1e3


class LoadClient(Child):
    """Sends LoadGen's queries to a running server, from another process.

    Args:
        address: address of the server, ``HOST:PORT``.
        served: the model and its queries.
        once: whether a query has its user features once instead of once per candidate.

    Attributes:
        seen: results of all runs so far.
    """

    def __init__(self, address: str, served: ServeWork, once: bool = False) -> None:
        super().__init__(_client, (address, served, once), "the client of the benchmark")
        self.seen: list[Seen] = []
        self.wait(_ANSWER_S)

    def learn(self) -> np.ndarray:
        """Send all queries one by one and store their scores as the expected ones.

        They are the expected scores of all epochs with the current epoch's parity, since two sets
        of weights alternate.

        Returns:
            Scores float32 [num_queries, candidates].
        """
        scores: np.ndarray = self.ask("learn", seconds=10 * _ANSWER_S)
        return scores

    def start(self, settings: loadgen.Settings) -> None:
        """Start a run; returns when LoadGen issues its first query."""
        self.ask("run", settings)

    def finish(self, seconds: float) -> Seen:
        """Wait for the started run, whose length is about `seconds`, and return its result."""
        self.seen.append(self.wait(seconds + 5 * _ANSWER_S))
        return self.seen[-1]

    def run(self, settings: loadgen.Settings) -> loadgen.Result:
        """Run LoadGen once; returns its result."""
        self.start(settings)
        return self.finish(settings.min_duration_s).result


class _Sender:
    """Sends queries; arguments as for `LoadClient`."""

    def __init__(self, address: str, served: ServeWork, once: bool = False) -> None:
        queries = map(served.query, range(served.num_queries))
        self._requests = list(queries) if once else [query.expanded() for query in queries]
        self._features = served.signature.features if once else None
        self._client = Client(address, _PATIENCE_S, served.signature.name)
        self._threads = ThreadPoolExecutor(_THREADS)
        self._expected: dict[int, np.ndarray] = {}  # by epoch modulo 2

    def _score(self, index: int) -> tuple[np.ndarray, int]:
        return self._client.score_request(self._requests[index], self._features)

    def learn(self) -> np.ndarray:
        scores, epochs = zip(*map(self._score, range(len(self._requests))), strict=True)
        if len(set(epochs)) != 1:
            raise OperError("cannot learn the scores", "epochs", sorted(set(epochs)), "one",
                            "do not publish while the scores are being learned")
        self._expected[epochs[0] % 2] = np.stack(scores)
        return self._expected[epochs[0] % 2]

    def run(self, settings: loadgen.Settings, on_start: Callable[[], None] = lambda: None) -> Seen:
        begin, busy = time.perf_counter(), time.process_time()
        retries, waiting = self._client.counts.retries, [on_start]
        # Times of issue and completion, query index, epoch (0 = failed), scores.
        answers: list[tuple[float, float, int, int, np.ndarray]] = []
        failures: list[str] = []

        def send(number: int, index: int, issued: float) -> None:
            scores, epoch = np.zeros(0, np.float32), 0
            try:
                scores, epoch = self._score(index)
            except OperError as error:
                failures.append(str(error))
            answers.append((issued, time.monotonic(), index, epoch, scores))
            loadgen.complete([number])

        def issue(pairs: list[tuple[int, int]]) -> None:
            if waiting:
                waiting.pop()()
            now = time.monotonic()
            for number, index in pairs:
                self._threads.submit(send, number, index, now)

        result = loadgen.run(settings, issue)
        cores = (time.process_time() - busy) / (time.perf_counter() - begin)
        times = np.array([answer[:2] for answer in answers]).reshape(-1, 2)
        scored = [answer[2:] for answer in answers if answer[3]]
        wrong = sum(not same(scores, self._expected[epoch % 2][index])
                    for index, epoch, scores in scored) if self._expected else 0
        return Seen(result, times[:, 0], times[:, 1], np.array([a[3] for a in answers], np.int64),
                    wrong, len(failures), self._client.counts.retries - retries, failures[:5],
                    cores, [] if self._expected else scored)


def same(scores: np.ndarray, expected: np.ndarray) -> bool:
    """Whether all scores equal the expected ones within `TOLERANCE`."""
    return bool(np.abs(scores - expected).max() <= TOLERANCE)


def _client(control: Any, address: str, served: ServeWork, once: bool) -> None:
    sender = _Sender(address, served, once)
    control.send(True)
    run = partial(sender.run, on_start=partial(control.send, None))
    while obey(control, {"learn": sender.learn, "run": run}):
        pass
