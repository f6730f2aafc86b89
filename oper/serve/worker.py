"""A worker process: one thread reads requests from connections, scores them and answers.

The supervisor accepts the connections and passes them to the workers.
"""

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

from oper.serve.app import App
from oper.serve.batching import Batcher, PendingRequest
from oper.serve.connection import Connection
from oper.serve.metrics import Shared, WorkerMetrics
from oper.serve.options import ServeOptions
from oper.serve.requests import Predictor
from oper.serve.signals import OURS

# Messages on the control socket: CONNECTION, with a file descriptor, to the worker; READY from it.
# At the end of the stream, the worker drains: the supervisor is stopping it, or has exited.
CONNECTION, READY = b"c", b"r"
_HANDOVERS = 64  # maximum connections received in one call
_TICK_S = 0.1
_REPORT_TICKS, _EXPIRE_TICKS = 5, 10
_GRACE_S = 5.0  # after the drain time, the process is forced to exit


@dataclass(frozen=True, slots=True)
class WorkerJob:
    """A worker's arguments.

    Attributes:
        opener: creates the predictor.
        options: options of the server.
        shared: the memory that all workers share with the supervisor.
        place: index of this worker in `shared`.
        closed: number of connections that this worker has closed, shared with the supervisor.
        most: connections that the worker should have at most, set by the supervisor. The worker
            closes excess connections after their next answer.
    """

    opener: Callable[[], Predictor]
    options: ServeOptions
    shared: Shared
    place: int
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
    with contextlib.suppress(OSError, ValueError):  # every connection needs a file descriptor
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    torch.set_num_threads(job.options.threads)
    predictor = job.opener()
    worker = _Worker(control, job, predictor)
    # Objects that exist now live as long as the process: exempt them from garbage collection, which
    # would take milliseconds each time.
    gc.collect()
    gc.freeze()
    asyncio.run(worker.serve())
    worker.report()
    close = getattr(predictor, "close", None)
    if close is not None:
        close()


class _Worker:
    """Serves all connections of a worker on one event loop. The loop alternates between reading all
    ready sockets and scoring one batch. Requests that arrive during scoring form the next batch,
    and no hand-over between threads is needed."""

    def __init__(self, control: socket.socket, job: WorkerJob, predictor: Predictor) -> None:
        self.options, self.connections = job.options, set[Connection]()
        self._control, self._job, self._predictor = control, job, predictor
        self._counted = WorkerMetrics(job.shared, job.place, predictor)
        self._batcher = Batcher(predictor, job.options.batching, self._counted.observe_batch)
        self._app = App(predictor.signature, self._submit, self._counted, job.options.max_bytes,
                        job.shared.page)
        self.handle, self.abandoned = self._app.handle, self._app.abandoned
        self._taken = 0  # connections received so far
        self._leaving = 0  # connections that close after the answer being written
        self._arriving: set[asyncio.Task[None]] = set()
        self._drains = False
        self._next: asyncio.Handle | None = None  # scheduled call of `_turn` or `_plan`
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
                # The loop reads sockets before it runs timers, so connections with a request that
                # has arrived are not idle here.
                for connection in list(self.connections):
                    if connection.is_idle:
                        connection.close()

    def report(self) -> None:
        """Update the gauges and the counts of rows and keys read."""
        self._counted.report(self._batcher.queued, self._app.in_flight)

    # ---- batches ---------------------------------------------------------------------------------

    def _submit(self, pending: PendingRequest) -> None:
        self._batcher.submit(pending)
        self._plan()

    def _plan(self) -> None:
        """Schedule scoring of the next batch for when it is due, after reading ready sockets."""
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
            # Ready sockets are read before the loop runs `_plan`.
            self._next = self._loop.call_soon(self._plan)
        elif self.options.spin_us:
            is_spinning = self._spins_until > 0
            self._spins_until = time.monotonic() + self.options.spin_us / 1e6
            if not is_spinning:
                self._loop.call_soon(self._spin)

    def _spin(self) -> None:
        """Keep the event loop polling until `_spins_until`."""
        if time.monotonic() < self._spins_until:
            self._loop.call_soon(self._spin)
        else:
            self._spins_until = 0.0

    # ---- connections -----------------------------------------------------------------------------

    def _take(self) -> None:
        """Receive connections from the supervisor, or begin draining at the end of the stream."""
        try:
            data, files = _receive(self._control)
        except BlockingIOError:
            return
        except ConnectionError:
            data, files = b"", []
        # If this process has reached its limit of descriptors, the kernel drops further ones, and
        # their clients see closed connections.
        self._taken += data.count(CONNECTION)
        for number in files:
            task = self._loop.create_task(self._adopt(socket.socket(fileno=number)))
            self._arriving.add(task)
            task.add_done_callback(self._arriving.discard)
        if not data:
            self._loop.remove_reader(self._control.fileno())
            self._drains = True
            # Exit even if the model never returns.
            timer = threading.Timer(self.options.drain_s + _GRACE_S, os._exit, (1,))
            timer.daemon = True
            timer.start()

    async def _adopt(self, connection: socket.socket) -> None:
        self._evict_idle()
        connection.setblocking(False)
        try:
            await self._loop.connect_accepted_socket(lambda: Connection(self), connection)
        except OSError:
            connection.close()  # the client has gone already

    def _evict_idle(self) -> None:
        """Close the least recently used idle connections in excess of `max_connections`. As in
        nginx, idle clients cannot keep out new ones."""
        too_many = len(self.connections) + len(self._arriving) - self.options.max_connections
        if too_many <= 0:
            return
        held = [c for c in self.connections if not c.is_closing]
        too_many -= len(self.connections) - len(held)
        idle = sorted((c for c in held if c.is_idle), key=lambda c: c.last_used)
        for connection in idle[:max(0, too_many)]:
            connection.close()

    def should_close(self) -> bool:
        """Whether to close the connection after the answer that is being written."""
        if self._drains:
            return True
        if len(self.connections) - self._leaving <= self._job.most.value:
            return False
        self._leaving += 1
        return True


def _receive(control: socket.socket) -> tuple[bytes, list[int]]:
    """Receive bytes and file descriptors; the bytes are empty at the end of the stream."""
    files = array.array("i")
    data, extra, _, _ = control.recvmsg(_HANDOVERS, socket.CMSG_SPACE(
        _HANDOVERS * files.itemsize), socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in extra:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            files.frombytes(content[:len(content) - len(content) % files.itemsize])
    return data, list(files)
