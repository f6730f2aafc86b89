"""Serve the deltas of a training run under load.

One process trains and saves a delta (the changed rows) after each step, the server publishes each
delta, and a client sends requests at a fixed rate. This alternates with the same training of a
second model, whose deltas are not served. Then smaller deltas are served as fast as they are made.
At the end, all weights are published several times. After the run, every response is compared with
the scores of its epoch, computed by applying the same deltas without load.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from oper.bench.core.child import Child, obey
from oper.bench.core.launch import Progress
from oper.bench.core.memory import peak_rss_mb, reset_peak
from oper.bench.serve import loadgen
from oper.bench.serve.client import LoadClient, Seen, same
from oper.bench.serve.host import Host, Publication, client_of
from oper.bench.serve.models import ServeWork, build
from oper.integration.checkpoint.follow import Follower
from oper.serve.model import AttachedModel

_LATE_S = 30.0  # time limit until the last deltas are in service
_SMALL_S = 0.02  # about the time (s) of one of the smaller deltas
_RATE = 0.02  # learning rate; a step changes a row by about 10 %
_PERCENTILES = (50, 90, 99)
_NICE = 10  # niceness of the training process, which shares the cores


@dataclass(frozen=True, slots=True)
class DeltaCase:
    """Deltas of a training run, served under load.

    Attributes:
        name: the case's name in the record.
        served: the model to train and serve.
        workers: worker processes of the server.
        rate: requests per second.
        deltas: number of deltas to serve; at least rounds * steps.
        every_s: time (s) between the starts of two steps of a round.
        changed: share of each table's rows that a step changes.
        rounds: number of rounds under load. A reported percentile is the median over rounds of the
            rounds' percentiles, which a single stall of the machine does not affect.
        steps: steps of a round whose deltas are not served, and as many whose deltas are served.
        small: after the rounds, the remaining deltas change a share `small * changed` of the rows.
        wholes: number of publications of all weights, for comparison.
        apart: whether the server gets the last core alone, and training and client the rest.
    """

    name: str
    served: ServeWork = field(default_factory=ServeWork)
    workers: int = 2
    rate: float = 330.0
    deltas: int = 1000
    every_s: float = 0.1
    changed: float = 0.01
    rounds: int = 10
    steps: int = 22
    small: float = 0.1
    wholes: int = 3
    apart: bool = False

    @property
    def num_timed(self) -> int:
        """Number of deltas that are served in all rounds together."""
        return self.rounds * self.steps

    def measure(self, progress: Progress) -> dict[str, Any]:
        """Train, serve and compare; returns the record's entry."""
        with tempfile.TemporaryDirectory(prefix="oper-bench-deltas-") as name:
            progress("starting a training process and the server")
            run = str(Path(name) / "run")
            every = sorted(os.sched_getaffinity(0))
            servers, others = every, every
            if self.apart and len(every) > 1:
                servers, others = every[-1:], every[:-1]
            with _on(others):
                trainer = Child(_train, (self, run), "the training process of the benchmark")
            with contextlib.closing(trainer):
                trainer.wait()
                with _on(servers):
                    host = Host(self.served, self.workers, run=run)
                with _on(others), client_of(host, self.name, self.served) as client:
                    entry = _measure(_Live(self, Path(name), trainer, host, client), progress)
        return {**entry, "case": asdict(self), "niceness": os.nice(0),
                "cores": f"training and client: {others}, server: {servers}"}


@dataclass(slots=True)
class _Phase:
    """Requests of one phase, and the growth of the server's memory during it."""

    seen: Seen
    growth_bytes: float  # peak resident memory of the supervisor process, minus that before


@dataclass(slots=True)
class _Live:
    """The processes of a running case."""

    case: DeltaCase
    folder: Path
    trainer: Child
    host: Host
    client: LoadClient

    def train(self, is_served: bool) -> tuple[_Phase, int]:
        """Train a round's steps under load; returns the phase and the total bytes of its deltas."""
        case = self.case
        self.trainer.send("run", is_served, case.steps, case.every_s, case.changed)
        phase = self.load(case.steps * case.every_s)
        return phase, int(self.trainer.wait())

    def until_served(self, deltas: int) -> None:
        """Wait until the server has published `deltas` deltas, at most `_LATE_S` seconds."""
        _wait(lambda: len(self.host.ask("followed")) >= deltas)

    def load(self, seconds: float, meanwhile: Callable[[], Any] = lambda: None) -> _Phase:
        """Send requests for `seconds` while `meanwhile` runs."""
        reset_peak(self.host.pid)
        before = peak_rss_mb(self.host.pid)
        self.client.start(loadgen.Settings(
            "Server", self.case.rate, seconds, num_samples=self.case.served.num_queries))
        meanwhile()
        seen = self.client.finish(seconds)
        return _Phase(seen, (peak_rss_mb(self.host.pid) - before) * 1e6)


@contextlib.contextmanager
def _on(cores: list[int]) -> Iterator[None]:
    """Restrict this process, and processes started in the block, to `cores`."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _measure(live: _Live, progress: Progress) -> dict[str, Any]:
    case, host, trainer = live.case, live.host, live.trainer
    whole_bytes = trainer.ask("full")
    published = host.ask("counts")["publications"]
    host.ask("follow")
    _wait(lambda: host.ask("counts")["publications"] > published)
    first = 2  # epoch of the weights that the deltas continue
    still: list[_Phase] = []
    during: list[_Phase] = []
    delta_bytes = 0
    for k in range(case.rounds):
        progress(f"{case.rate:.0f} requests/s, {case.steps} steps without and {case.steps} with "
                 f"served deltas, round {k + 1} of {case.rounds}")
        still.append(live.train(is_served=False)[0])
        phase, written = live.train(is_served=True)
        during.append(phase)
        delta_bytes += written
        live.until_served((k + 1) * case.steps)
    more = case.deltas - case.num_timed
    progress(f"{case.rate:.0f} requests/s, {more} smaller deltas")
    trainer.send("run", True, more, 0.0, case.small * case.changed)

    def finish() -> None:
        trainer.wait()
        live.until_served(case.deltas)

    rest = live.load(max(case.steps * case.every_s, more * _SMALL_S), finish)
    made, failed = host.ask("stop_following"), host.ask("counts")["failed_publications"]
    served_sums = _sums(host.ask("publication"))
    whole = str(live.folder / "whole")
    trainer.ask("save", whole)
    progress(f"{case.rate:.0f} requests/s, {case.wholes} publications of all weights")
    swaps: list[float] = []

    def swap() -> None:
        for _ in range(case.wholes):
            begin, end = host.ask("publish", whole)
            swaps.append(end - begin)

    beside = live.load(2 * case.steps * case.every_s, swap)
    memory = host.ask("memory")
    answers = [answer for phase in (*still, *during, rest) for answer in phase.seen.unchecked]
    progress(f"comparing {len(answers)} answers")
    with contextlib.closing(_Check(case, live.folder)) as check:
        torn = check.torn(made, first, answers)
        is_equal = check.sums() == served_sums == check.whole(whole)
    phases = {"quiet": still, "deltas": during, "wholes": [beside]}
    by_round = {name: np.array([np.percentile(p.seen.latency_ms, _PERCENTILES) for p in found])
                for name, found in phases.items()}  # [rounds, percentiles]
    latency = {name: dict(zip((f"p{q}" for q in _PERCENTILES), np.median(found, axis=0),
                              strict=True)) for name, found in by_round.items()}
    quiet_p99 = latency["quiet"]["p99"]
    held = memory["tables"] + memory["dense"]
    errors = sum(p.seen.failed for p in (*still, *during, rest, beside)) + failed + (
        case.deltas - len(made))
    timed = made[:case.num_timed] or [Publication(0, math.inf, math.inf)]
    seconds = {"delta": [m.seconds for m in timed], "whole": swaps}
    lag = [m.lag_s for m in timed]
    return {
        "bytes_share": delta_bytes / case.num_timed / whole_bytes,
        "time_share": np.median(seconds["delta"]) / np.median(seconds["whole"]),
        "peak_ratio": 1 + max(p.growth_bytes for p in during) / held,
        "whole_peak_ratio": 1 + beside.growth_bytes / held,
        "lag_p99_s": np.percentile(lag, 99), "lag_p50_s": np.median(lag),
        "p99_ratio": latency["deltas"]["p99"] / quiet_p99,
        "whole_p99_ratio": latency["wholes"]["p99"] / quiet_p99,
        "torn": torn, "errors": errors, "bit_equal": is_equal,
        "verified": not torn and not errors and is_equal and check.moved > 0,
        "deltas": len(made),
        "epochs_seen": int(np.unique(np.concatenate([p.seen.epoch for p in (*during, rest)])).size),
        "latency_ms": latency,
        "p99_ms_by_round": {name: found[:, _PERCENTILES.index(99)]
                            for name, found in by_round.items()},
        "requests": {name: sum(p.seen.latency_ms.size for p in found)
                     for name, found in phases.items()},
        "publication_ms": {name: 1e3 * np.median(found) for name, found in seconds.items()},
        "delta_bytes": delta_bytes // case.num_timed, "whole_bytes": whole_bytes,
        "least_change_of_scores": check.moved, "server_memory_bytes": memory,
        "client_cores": np.mean([p.seen.cores for p in during])}


def _wait(is_done: Callable[[], bool]) -> None:
    until = time.monotonic() + _LATE_S
    while not is_done() and time.monotonic() < until:
        time.sleep(0.05)


class _Check:
    """Applies the deltas of a run again, to a publication without load.

    Attributes:
        moved: the minimum over deltas of the largest change of a score of query 0, set by `torn`.
    """

    def __init__(self, case: DeltaCase, folder: Path) -> None:
        import oper

        self._case, self._run = case, folder / "run"
        self._publication = oper.publish(build(case.served, "meta"), f"bench-check-{os.getpid()}",
                                         weights=self._run, row_dtype=case.served.row_dtype)
        self._model = AttachedModel(functools.partial(build, case.served), self._publication.name,
                                    case.served.signature)
        self.moved = 0.0

    def torn(self, made: list[Publication], first: int,
             seen: list[tuple[int, int, np.ndarray]]) -> int:
        """Number of responses whose scores differ from those of their epoch.

        Args:
            made: the deltas that were served, in order.
            first: epoch of the weights before the first delta.
            seen: `Seen.unchecked` of all runs.
        """
        answers: dict[int, list[tuple[int, np.ndarray]]] = {}
        for index, epoch, scores in seen:
            answers.setdefault(epoch, []).append((index, scores))
        torn = self._differing(answers.pop(first, ()))
        before, moved = self._score(0), []
        follower = Follower(lambda: self._run)
        changes = follower.changes()
        for k, publication in enumerate(made, 1):
            change = next(changes)
            if change.step != publication.step:
                break
            self._publication.apply(change.rows, change.dense)
            follower.applied(change)
            torn += self._differing(answers.pop(first + 2 * k, ()))
            now = self._score(0)
            moved.append(float(np.abs(now - before).max()))
            before = now
        self.moved = min(moved, default=0.0)
        return torn + sum(map(len, answers.values()))  # the rest name an epoch that did not exist

    def _differing(self, answers: Iterable[tuple[int, np.ndarray]]) -> int:
        expected: dict[int, np.ndarray] = {}  # by query, since queries occur several times
        differing = 0
        for index, scores in answers:
            if index not in expected:
                expected[index] = self._score(index)
            differing += not same(scores, expected[index])
        return differing

    def _score(self, index: int) -> np.ndarray:
        return self._model.predict(self._case.served.query(index))[0]

    def sums(self) -> dict[str, int]:
        """Checksums of the current weights, by segment."""
        return _sums(self._publication.name)

    def whole(self, checkpoint: str) -> dict[str, int]:
        """Publish all weights of a checkpoint and return their checksums."""
        self._publication.publish(checkpoint)
        return self.sums()

    def close(self) -> None:
        """Close the model and free the publication."""
        self._model.close()
        self._publication.close()


def _sums(name: str) -> dict[str, int]:
    """Checksums of all segments of a publication, as its readers see them."""
    from oper.shmem.publication.reader import Reader

    with contextlib.closing(Reader(name)) as reader:
        return reader.sums()


# ---- in the training process ---------------------------------------------------------------------


class _Run:
    """A model in training that saves a delta after each step."""

    def __init__(self, case: DeltaCase, place: str) -> None:
        import oper
        from oper.integration.checkpoint.deltas import DeltaCheckpoints

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about missing statistics: one rank needs none
            self.model: Any = oper.shard(build(case.served, "cpu"),
                                         optimizer=oper.RowWiseAdagrad(lr=_RATE))
        self._case, self._place, self._step = case, Path(place), 0
        self._saver = DeltaCheckpoints(place, self.model)

    def full(self) -> int:
        """Save all weights; returns the size (bytes) of the folder."""
        self._saver.save_full(self._step)
        return sum(p.stat().st_size for p in self._place.iterdir())

    def run(self, steps: int, every_s: float, changed: float) -> int:
        """Train; every `every_s` seconds, a step starts that changes a share `changed` of all rows.
        Returns the total bytes of the deltas."""
        self._saver.flush()
        before, begin = self._saver.written_bytes, time.monotonic()
        for k in range(steps):
            time.sleep(max(0.0, begin + k * every_s - time.monotonic()))
            self._step += 1
            _step(self.model, self._case.served, changed, self._step)
            self._saver.save(self._step)
        self._saver.flush()
        return self._saver.written_bytes - before

    def close(self) -> None:
        """Stop the writing thread."""
        self._saver.close()


def _train(control: Any, case: DeltaCase, place: str) -> None:
    """Training process: execute commands until the parent closes `control`."""
    import torch

    import oper

    os.nice(_NICE)
    torch.set_num_threads(1)
    with (contextlib.closing(_Run(case, place)) as served,
          contextlib.closing(_Run(case, place + "-unread")) as unread):
        served.full()
        unread.full()
        control.send(True)
        while obey(control, {
                "full": served.full,
                "run": lambda is_served, *how: (served if is_served else unread).run(*how),
                "save": functools.partial(oper.save_checkpoint, model=served.model)}):
            pass


def _step(model: Any, served: ServeWork, changed: float, step: int) -> None:
    """Change a share of all rows by a backward pass with update, and the last bias."""
    import torch
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    work = served.work
    counts = [max(1, round(changed * n)) for n in work.num_rows]
    ids = [torch.arange(count) * (n // count) + step % (n // count)
           for n, count in zip(work.num_rows, counts, strict=True)]
    kjt = KeyedJaggedTensor(list(work.features), torch.cat(ids), lengths=torch.tensor(counts))
    pooled = model.sparse_arch(kjt)
    direction = torch.randn(pooled.shape, generator=torch.Generator().manual_seed(step))
    (pooled * direction).sum().backward()
    with torch.no_grad():
        last = [p for name, p in model.named_parameters() if name.endswith("bias")][-1]
        last += 0.02 * (-1) ** step
