"""Worker processes that score LoadGen's queries without a network.

All processes have the queries in memory, and messages only contain their indices. A worker batches
waiting queries, as the server's workers do, and reports the finished ones. This is equal for all
contenders.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import select
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from oper.bench.core.child import Child, obey
from oper.bench.core.memory import pss_bytes, unfiled_pss_bytes
from oper.bench.serve import loadgen
from oper.bench.serve.models import (
    ServeWork,
    build,
    give_back_memory,
    make_predictor,
    warm_up,
)
from oper.errors import OperError
from oper.serve.batching import Batcher, PendingRequest
from oper.serve.options import BatchOptions, publish_options
from oper.serve.wire import decode_request, encode_request, encode_scores

TABLES = "/memfd:oper-tables"  # prefix of the mappings of published tables
_PAIRS = 512  # limit of the queries per message


@dataclass(slots=True)
class _Worker:
    process: Child
    outstanding: set[int] = field(default_factory=set)  # LoadGen's ids of the queries in work


class Pool:
    """Worker processes of one kind of contender.

    Args:
        kind: a kind of predictor, see `oper.bench.serve.models.make_predictor`.
        served: the model and its queries.
        batching: batching options of each worker.
        count: number of workers to start.
        publication: name of an existing publication to score with; ``""`` = the pool publishes the
            weights. With an existing publication, workers also decode each query from an HTTP
            message and encode its response, in memory.
    """

    def __init__(self, kind: str, served: ServeWork, batching: BatchOptions, count: int,
                 publication: str = "") -> None:
        self.kind, self._served, self._batching = kind, served, batching
        self._workers: list[_Worker] = []
        self._publisher: Child | None = None
        self._name = publication or f"bench-{os.getpid()}-{id(self) & 0xffffff:x}"
        self._as_messages = bool(publication)
        if kind == "oper" and not publication:
            self._publisher = self._start(_publish, (served, self._name))
            self._publisher.wait()
        self.grow(count)

    def grow(self, count: int) -> None:
        """Start workers until at least `count` are ready to score."""
        new = range(len(self._workers), count)
        for _ in new:
            self._workers.append(_Worker(self._start(_work, (
                self.kind, self._served, self._name, self._batching, self._as_messages))))
        for k in new:
            self._workers[k].process.wait()

    def _start(self, function: Any, arguments: tuple[Any, ...]) -> Child:
        return Child(function, arguments, f"a process of the serving benchmark ({self.kind})")

    def configure(self, count: int, threads: int, max_samples: int, variant: str) -> None:
        """Set threads, samples per batch and variant (see `VARIANTS`) of the first `count`
        workers."""
        for worker in self._workers[:count]:
            worker.process.ask("configure", threads, max_samples, variant)

    def scores(self, numbers: range) -> np.ndarray:
        """Scores float32 [queries, candidates] of the queries with indices `numbers`."""
        shares = [numbers[k::len(self._workers)] for k in range(len(self._workers))]
        for worker, share in zip(self._workers, shares, strict=True):
            worker.process.send("scores", share)
        found: list[np.ndarray] = [worker.process.wait(None) for worker in self._workers]
        return np.concatenate(found)[np.argsort(np.concatenate(shares), kind="stable")]

    def published(self) -> dict[str, Any]:
        """Figures of the tables that this pool publishes: ``tables`` (bytes of one epoch),
        ``row_error``, ``page_kind`` and ``share_of_rows`` (by dtype)."""
        assert self._publisher is not None
        return dict(self._publisher.ask("published"))

    def memory(self, count: int) -> dict[str, Any]:
        """PSS (bytes) that loading the model adds to each of the first `count` workers; for OPER
        also what publishing adds to the publisher, and each process's share of the tables. What
        these processes, of which OPER has one more, hold without a model is not included."""
        own = [w.process.ask("memory") for w in self._workers[:count]]
        found: dict[str, Any] = {"own_pss_bytes_per_worker": own, "total_pss_bytes": sum(own)}
        if self._publisher is not None:
            pids = [w.process.pid for w in self._workers[:count]]
            found["tables_pss_bytes_per_worker"] = [pss_bytes(pid, TABLES) for pid in pids]
            found["tables_pss_bytes_of_publisher"] = pss_bytes(self._publisher.pid, TABLES)
            found["own_pss_bytes_of_publisher"] = self._publisher.ask("memory")
            found["total_pss_bytes"] += (sum(found["tables_pss_bytes_per_worker"])
                                         + found["tables_pss_bytes_of_publisher"]
                                         + found["own_pss_bytes_of_publisher"])
        return found

    def cpu_seconds(self) -> float:
        """Processor time (s) of all processes so far."""
        return sum(child.cpu_seconds() for child in self._children())

    def run(self, count: int, settings: loadgen.Settings) -> loadgen.Result:
        """Run LoadGen; a query goes to the least loaded of the first `count` workers. Raises
        OperError if a worker fails."""
        used = self._workers[:count]
        stop, lock = threading.Event(), threading.Lock()
        lost: list[int] = []
        receiver = threading.Thread(target=_receive, args=(used, stop, lost, lock))
        receiver.start()

        def issue(pairs: list[tuple[int, int]]) -> None:
            size = min(_PAIRS, max(1, len(pairs) // (8 * len(used))))
            for k in range(0, len(pairs), size):
                part = pairs[k:k + size]
                numbers = [number for number, _ in part]
                with lock:
                    if lost:  # the run has failed, and ends when all queries are answered
                        loadgen.complete(numbers)
                        continue
                    worker = min(used, key=lambda w: len(w.outstanding))
                    worker.outstanding.update(numbers)
                # Without the lock, since this waits for the worker, which waits for `_receive`.
                with contextlib.suppress(ConnectionError):  # `_receive` answers these
                    worker.process.send("score", part)

        try:
            result = loadgen.run(settings, issue)
        finally:
            stop.set()
            receiver.join()
        if lost:
            raise OperError("a worker failed during the run", "contender", self.kind,
                            "a running worker", "see its log above")
        return result

    def _children(self) -> list[Child]:
        return [*(w.process for w in self._workers), *filter(None, [self._publisher])]

    def close(self) -> None:
        """Close all processes."""
        for child in self._children():
            child.close()
        self._workers.clear()


def _receive(workers: list[_Worker], stop: threading.Event, lost: list[int],
             lock: threading.Lock) -> None:
    """Report completed queries to LoadGen, and those of a worker that has exited, until `stop`."""
    poll = select.poll()
    by_number = {w.process.pipe.fileno(): w for w in workers}
    for number in by_number:
        poll.register(number, select.POLLIN)
    while not stop.is_set():
        for number, _ in poll.poll(50):
            worker = by_number[number]
            try:
                done: int = worker.process.pipe.recv()
            except (EOFError, ConnectionError):
                with lock:
                    lost.append(worker.process.pid)
                poll.unregister(number)
                loadgen.complete(list(worker.outstanding))
                continue
            worker.outstanding.discard(done)
            loadgen.complete([done])


# ---- in the processes ----------------------------------------------------------------------------


def _publish(control: Any, served: ServeWork, name: str) -> None:
    """Publisher process: publish OPER's tables until the parent closes `control`."""
    import oper

    before = _memory_without_model(served)
    publication = oper.publish(build(served, "cpu"), name, **publish_options(served.rows()))
    added = _own_memory() - before
    control.send(True)
    while obey(control, {"published": lambda: _published(publication), "memory": lambda: added}):
        pass
    publication.close()


def _memory_without_model(served: ServeWork) -> int:
    """`_own_memory` of this process after it has imported what the model needs."""
    build(served, "meta")
    return _own_memory()


def _own_memory() -> int:
    """Memory (PSS, bytes) of this process without published tables, after freed memory has been
    returned to the system."""
    give_back_memory()
    return unfiled_pss_bytes(os.getpid()) - pss_bytes(os.getpid(), TABLES)


def _published(publication: Any) -> dict[str, Any]:
    rows: Counter[str] = Counter()
    for table in publication.plan.tables:
        for tier in table.tiers:
            rows[tier.dtype or table.table.dtype] += tier.stop - tier.start
    return {"tables": publication.memory_bytes()["tables"],
            "row_error": publication.plan.notes.get("row_error", 0.0),
            "page_kind": publication.page_kind,
            "share_of_rows": {d: n / rows.total() for d, n in rows.items()}}


def _work(control: Any, kind: str, served: ServeWork, name: str, batching: BatchOptions,
          as_messages: bool) -> None:
    """Worker process: score queries and execute commands until the parent closes `control`."""
    import torch

    torch.set_num_threads(1)
    library = [served.query(k) for k in range(served.num_queries)]
    before = _memory_without_model(served)
    predictor = make_predictor(kind, served, name)
    loaded = _own_memory() - before
    warm_up(predictor, library[:8])
    batcher = Batcher(predictor, batching)
    # The HTTP messages to decode; empty = queries are used as they are in memory.
    messages = [encode_request(r) for r in library] if as_messages else []

    def done(number: int, pending: PendingRequest) -> None:
        if pending.error is not None:  # a failed query must not count as a fast one
            traceback.print_exception(pending.error)
            os._exit(1)
        assert pending.result is not None
        if messages:
            encode_scores(*pending.result, served.signature.name)
        control.send(number)

    def submit(number: int, index: int) -> None:
        request = decode_request(*messages[index], served.signature) if messages else library[index]
        batcher.submit(PendingRequest(request, functools.partial(done, number)))

    gc.collect()
    gc.freeze()  # as the server's workers do
    control.send(True)

    def configure(threads: int, max_samples: int, variant: str) -> bool:
        torch.set_num_threads(threads)
        predictor.variant = variant
        batcher.options = replace(batching, max_samples=max_samples)
        return True

    commands: dict[str, Callable[..., Any]] = {
        "configure": configure, "memory": lambda: loaded,
        "scores": lambda numbers: np.stack(
            [predictor.predict(served.query(k))[0] for k in numbers])}
    arrived = select.poll()
    arrived.register(control, select.POLLIN)
    with contextlib.suppress(EOFError, ConnectionError):  # the parent has closed the pipe
        while True:
            # Like the server's workers, score batches of the queries that have arrived.
            while arrived.poll(0 if batcher.queued else None):
                command, *words = control.recv()
                if command != "score":
                    control.send(commands[command](*words))
                    continue
                for number, index in words[0]:
                    submit(number, index)
            batcher.turn()

