"""A worker process: one model, connections that the supervisor hands over, and one thread that
reads requests, scores them and answers."""

from __future__ import annotations

import array
import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from oper.serve import metrics
from oper.serve.app import App
from oper.serve.batching import Batcher, PendingRequest
from oper.serve.connection import Connection
from oper.serve.options import ServeOptions
from oper.serve.requests import Predictor
from oper.serve.signals import OURS

# What goes over the control socket: a connection with CONNECTION (to the worker), READY (from it).
# The end of the stream tells the worker to drain: the supervisor is stopping it, or has gone.
CONNECTION, READY = b"c", b"r"
_HANDOVERS = 64  # connections taken at once
_TICK_S = 0.1
_REPORT_TICKS, _EXPIRE_TICKS = 5, 10
_GRACE_S = 5.0  # beyond the drain time, before the process ends without more ado


@dataclass(frozen=True, slots=True)
class WorkerJob:
    """A worker's arguments.

    Attributes:
        opener: makes the predictor.
        options: options of the server.
        numbers, place: what all workers count, shared memory, and where this one does; see
            `oper.serve.metrics`.
        counts: what the supervisor counts, shared memory; see `oper.serve.server.Counts`.
        closed: connections that this worker has closed so far; shared with the supervisor.
        most: connections that it should have at most, as the supervisor says. It lets the others
            go with their next answer.
    """

    opener: Callable[[], Predictor]
    options: ServeOptions
    numbers: Any
    place: int
    counts: Any
    closed: Any
    most: Any


def run_worker(control: socket.socket, job: WorkerJob) -> None:
    """Run a worker process until the supervisor closes its end of `control`."""
    os.setsid()
    for number in OURS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, OURS)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    import torch

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # every connection is a file
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    torch.set_num_threads(job.options.threads)
    predictor = job.opener()
    worker = _Worker(control, job, predictor)
    # What lives by now lives for ever: looking at it again and again costs milliseconds.
    gc.collect()
    gc.freeze()
    asyncio.run(worker.serve())
    worker.report()
    close = getattr(predictor, "close", None)
    if close is not None:
        close()


class _Worker:
    """Everything on one event loop.

    All sockets that are ready are read, then one batch of what they brought is scored, then the
    sockets are read again: batches come of what arrives while the model works, and between socket
    and score no thread waits for another.
    """

    def __init__(self, control: socket.socket, job: WorkerJob, predictor: Predictor) -> None:
        self.options, self.connections = job.options, set[Connection]()
        self._control, self._job, self._predictor = control, job, predictor
        self._counted = metrics.WorkerMetrics(job.numbers, job.place)
        self._batcher = Batcher(predictor, job.options.batching, self._counted.observe_batch)
        self._app = App(predictor.signature, self._submit, self._counted, job.options.max_bytes,
                        lambda: metrics.page(job.numbers, job.counts))
        self.handle, self.abandoned = self._app.handle, self._app.abandoned
        self._taken = 0  # connections so far
        self._leaving = 0  # connections whose last answer is on its way
        self._arriving: set[asyncio.Task[None]] = set()
        self._drains = False
        self._next: asyncio.Handle | None = None  # turn
        self._spins_until = 0.0

    async def serve(self) -> None:
        """Serve until the supervisor closes the control socket and requests are answered."""
        self._loop = asyncio.get_running_loop()
        self._control.setblocking(False)
        self._loop.add_reader(self._control.fileno(), self._take)
        self._control.send(READY)
        ticks, until = 0, float("inf")
        while not (self._drains and not self.connections) and time.monotonic() < until:
            await asyncio.sleep(_TICK_S)
            ticks += 1
            self._leaving = 0
            self._job.closed.value = self._taken - len(self.connections) - len(self._arriving)
            if ticks % _REPORT_TICKS == 0:
                self.report()
            if ticks % _EXPIRE_TICKS == 0:
                for connection in list(self.connections):
                    connection.expire(time.monotonic())
            if self._drains and not self._arriving:
                until = min(until, time.monotonic() + self.options.drain_s)
                # Sockets have been read in this turn of the loop, before its timers: whoever has
                # sent a request until now gets his answer.
                for connection in list(self.connections):
                    if connection.is_idle:
                        connection.close()

    def report(self) -> None:
        """Bring the gauges up to date."""
        self._counted.set_gauges(self._batcher.queued, self._app.in_flight, self._predictor.epoch)
        self._counted.observe_rows(self._predictor.rows_read())

    # ---- batches ---------------------------------------------------------------------------------

    def _submit(self, pending: PendingRequest) -> None:
        self._batcher.submit(pending)
        self._plan()

    def _plan(self) -> None:
        """Have the next batch scored when it is due, after the sockets that are ready now."""
        due_s = self._batcher.due_s()
        if self._next is not None:
            self._next.cancel()
            self._next = None
        if due_s is not None:
            self._next = (self._loop.call_soon(self._turn) if due_s <= 0
                          else self._loop.call_later(due_s, self._turn))

    def _turn(self) -> None:
        self._next = None
        self._batcher.turn()
        if self._batcher.queued:
            # The loop looks at its sockets before it calls, and calls what was planned first.
            self._next = self._loop.call_soon(self._plan)
        elif self.options.spin_us:
            is_spinning = self._spins_until > 0
            self._spins_until = time.monotonic() + self.options.spin_us / 1e6
            if not is_spinning:
                self._loop.call_soon(self._spin)

    def _spin(self) -> None:
        """Keep the loop from sleeping for a while."""
        if time.monotonic() < self._spins_until:
            self._loop.call_soon(self._spin)
        else:
            self._spins_until = 0.0

    # ---- connections -----------------------------------------------------------------------------

    def _take(self) -> None:
        """Take what the supervisor has sent."""
        try:
            data, files = _receive(self._control)
        except BlockingIOError:
            return
        except ConnectionError:
            data, files = b"", []
        # Where this process has no room for descriptors they are lost, and the client sees its
        # connection closed.
        self._taken += data.count(CONNECTION)
        for number in files:
            task = self._loop.create_task(self._adopt(socket.socket(fileno=number)))
            self._arriving.add(task)
            task.add_done_callback(self._arriving.discard)
        if not data:
            self._loop.remove_reader(self._control.fileno())
            self._drains = True
            # A model that never returns must not keep the process for ever.
            timer = threading.Timer(self.options.drain_s + _GRACE_S, os._exit, (1,))
            timer.daemon = True
            timer.start()

    async def _adopt(self, connection: socket.socket) -> None:
        """Serve a connection."""
        self._evict_idle()
        connection.setblocking(False)
        try:
            await self._loop.connect_accepted_socket(lambda: Connection(self), connection)
        except OSError:
            connection.close()  # the client has gone already

    def _evict_idle(self) -> None:
        """Beyond the connections that there may be, those without a request go whose last one is
        longest ago, as in nginx: idle clients, however many, keep no new client out."""
        too_many = len(self.connections) + len(self._arriving) - self.options.max_connections
        if too_many <= 0:
            return
        held = [c for c in self.connections if not c.is_closing]
        too_many -= len(self.connections) - len(held)
        idle = sorted((c for c in held if c.is_idle), key=lambda c: c.last_used)
        for connection in idle[:max(0, too_many)]:
            connection.close()

    def should_close(self) -> bool:
        """Whether the connection is to be closed after the answer that is being written."""
        if self._drains:
            return True
        if len(self.connections) - self._leaving <= self._job.most.value:
            return False
        self._leaving += 1
        return True


def _receive(control: socket.socket) -> tuple[bytes, list[int]]:
    """Bytes and descriptors that wait; no bytes when the stream has ended."""
    files = array.array("i")
    data, extra, _, _ = control.recvmsg(_HANDOVERS, socket.CMSG_SPACE(
        _HANDOVERS * files.itemsize), socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in extra:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            files.frombytes(content[:len(content) - len(content) % files.itemsize])
    return data, list(files)
