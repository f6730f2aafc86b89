"""A worker process: one thread accepts connections, reads requests, scores them and answers."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable

from oper.serve.app import App
from oper.serve.connection import Connection
from oper.serve.metrics import Shared
from oper.serve.options import ServeOptions
from oper.serve.requests import Predictor
from oper.serve.signals import OURS
from oper.support.processes import raise_file_limit

log = logging.getLogger("oper.serve")
# Messages on the control socket: READY from the worker; ACCEPT to it, once it may accept
# connections. At the end of the stream, the worker drains: the supervisor is stopping it, or has
# exited.
READY, ACCEPT = b"r", b"a"
_TICK_S = 0.1
_REPORT_TICKS, _EXPIRE_TICKS = 5, 10
_GRACE_S = 5.0  # after the drain time, the process is killed
_YIELD_S = 0.25  # how long a connection waits for workers with fewer connections, if these are busy
_STEP_S = 0.002  # first of the growing pauses until it checks whether these have accepted it
_BUSY_S = 1.0  # if they did not: for how long it accepts further connections without waiting
_SILENT_S = 60.0  # how long a repeated error is not logged again
_MOST_ACCEPTED = 64  # connections accepted before the next batch is scored


def run_worker(control: socket.socket, listener: socket.socket, opener: Callable[[], Predictor],
               options: ServeOptions, shared: Shared, place: int) -> None:
    """Run a worker process until the supervisor closes its end of `control`.

    Args:
        control: the socket to the supervisor.
        listener: the socket from which all workers accept connections.
        opener: creates the predictor.
        options: options of the server.
        shared: the memory that all workers share with the supervisor.
        place: index of this worker in `shared`.
    """
    os.setsid()
    for number in OURS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, OURS)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    import torch

    raise_file_limit()  # every connection needs a file descriptor
    torch.set_num_threads(options.threads)
    predictor = opener()
    worker = _Worker(control, listener, options, shared, place, predictor)
    # Objects that exist now live as long as the process: exempt them from garbage collection, which
    # would take milliseconds each time.
    gc.collect()
    gc.freeze()
    worker.serve()
    worker.report()
    close = getattr(predictor, "close", None)
    if close is not None:
        close()


class _Worker:
    """Serves all connections of a worker on one thread. It alternates between reading all ready
    sockets and scoring one batch. Requests that arrive during scoring form the next batch, and no
    hand-over between threads is needed."""

    def __init__(self, control: socket.socket, listener: socket.socket, options: ServeOptions,
                 shared: Shared, place: int, predictor: Predictor) -> None:
        self._control, self._listener, self._options = control, listener, options
        self._app = App(predictor, options, shared, place, self._should_close, self._is_full)
        self._connections = set[Connection]()
        self._selector = selectors.DefaultSelector()
        # Open connections of all workers; -1 = the worker accepts none.
        self._counts, self._place = shared.workers()["connections"], place
        self._most = float("inf")  # connections beyond it are closed after their next answer
        self._leaving = 0  # connections that close after the answer being written
        self._others_busy_until = 0.0
        self._waiting_since = 0.0  # since when the next connection waits to be accepted
        self._accepts_at = float("inf")  # when to try to accept it again
        self._says_at = 0.0  # when an error of accepting connections is logged again
        self._ends_at = float("inf")  # set while the worker drains
        self._spins_until = 0.0

    def serve(self) -> None:
        """Serve until the supervisor closes the control socket and requests are answered."""
        self._control.setblocking(False)
        self._listener.setblocking(False)
        self._selector.register(self._control, selectors.EVENT_READ, self._obey)
        self.report()
        self._control.send(READY)
        ticks, next_tick, batcher = 0, 0.0, self._app.batcher
        while time.monotonic() < self._ends_at and (self._connections or not self._drains):
            now = time.monotonic()
            wait_s = 0.0 if now < self._spins_until else min(
                next_tick - now, self._accepts_at - now, batcher.due_s())
            for key, events in self._selector.select(max(0.0, wait_s)):
                key.data(events)
            now = time.monotonic()
            if now >= self._accepts_at:
                self._accept()
            # After reading the sockets, so that connections with a request that has arrived are not
            # idle here.
            if now >= next_tick:
                ticks, next_tick = ticks + 1, now + _TICK_S
                self._tick(ticks)
            if batcher.due_s() <= 0:
                batcher.turn()
                self._spins_until = time.monotonic() + self._options.spin_us / 1e6

    def _tick(self, ticks: int) -> None:
        """Do what is due every `_TICK_S` seconds."""
        self._level()
        if ticks % _REPORT_TICKS == 0:
            self.report()
        if ticks % _EXPIRE_TICKS == 0:
            for connection in list(self._connections):
                connection.expire(time.monotonic())
        if self._drains:
            for connection in [c for c in self._connections if c.is_idle]:
                connection.close()

    def report(self) -> None:
        """Update the gauges and the counts of rows and keys read."""
        self._app.counted.report(self._app.batcher.queued, self._app.in_flight)

    @property
    def _drains(self) -> bool:
        return self._ends_at < float("inf")

    def _obey(self, _: int) -> None:
        """Begin to accept connections, or begin draining at the end of the stream."""
        try:
            data = self._control.recv(len(ACCEPT))
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if data:
            self._counts[self._place] = 0
            self._selector.register(self._listener, selectors.EVENT_READ, self._arrive)
            return
        for source in (self._control, self._listener):
            with contextlib.suppress(KeyError):
                self._selector.unregister(source)
        self._listener.close()
        self._accepts_at = float("inf")
        self._counts[self._place] = -1
        self._ends_at = time.monotonic() + self._options.drain_s
        # Exit even if the model never returns.
        signal.setitimer(signal.ITIMER_REAL, self._options.drain_s + _GRACE_S)

    # ---- connections -----------------------------------------------------------------------------

    def _arrive(self, _: int) -> None:
        if self._drains:
            return
        self._selector.unregister(self._listener)
        self._waiting_since = time.monotonic()
        self._accept()

    def _accept(self) -> None:
        """Accept waiting connections, or leave them to workers with fewer and look again after a
        pause as long as they have waited."""
        self._accepts_at = float("inf")
        for _ in range(_MOST_ACCEPTED):
            now, mine, counts = time.monotonic(), self._count(), self._counts
            yields = now > self._others_busy_until and bool(
                ((counts >= 0) & (counts < mine)).any())
            waited_s = now - self._waiting_since
            if yields and waited_s < _YIELD_S:
                self._accepts_at = now + max(_STEP_S, waited_s)
                return
            try:
                accepted, _ = self._listener.accept()
            except ConnectionError:
                continue  # the client has gone already
            except BlockingIOError:
                break  # other workers have the others
            except OSError as error:
                if error.errno == errno.EINVAL:  # the server is stopping
                    return
                if now >= self._says_at:
                    log.error("cannot accept a connection: %s", error)
                    self._says_at = now + _SILENT_S
                # A file descriptor may become free.
                self._accepts_at = now + (0.0 if self._evict_idle(1) else _TICK_S)
                return
            if yields:
                self._others_busy_until = now + _BUSY_S
            self._evict_idle(len(self._connections) + 1 - self._options.max_connections)
            connection = Connection(accepted, self._app, self._selector,
                                    self._connections.discard)
            self._connections.add(connection)
            connection.is_extra = len(self._connections) > self._options.max_connections
            connection.on_ready(selectors.EVENT_READ)
        self._count()
        self._selector.register(self._listener, selectors.EVENT_READ, self._arrive)

    def _evict_idle(self, count: int) -> bool:
        """Close up to `count` idle connections, the least recently used first; return whether there
        were any. As in nginx, idle clients cannot keep out new ones."""
        idle = sorted((c for c in self._connections if c.is_idle),
                      key=lambda c: c.since)[:count] if count > 0 else []
        for connection in idle:
            connection.close()
        return bool(idle)

    def _is_full(self) -> bool:
        """Whether there are too many connections, none of which is idle."""
        excess = len(self._connections) - self._options.max_connections
        self._evict_idle(excess)
        return excess > 0 and len(self._connections) > self._options.max_connections

    def _count(self) -> int:
        """Publish and return the number of open connections."""
        if self._counts[self._place] >= 0:
            self._counts[self._place] = len(self._connections)
        return len(self._connections)

    def _level(self) -> None:
        """Close excess connections if this worker has far more than an equal share. When a worker
        exits, its clients connect to other workers. As connections are long-lived, the new worker
        would otherwise get few requests."""
        mine, counts = self._count(), self._counts[self._counts >= 0]
        share = -(-int(counts.sum()) // max(1, counts.size))
        self._most = share if mine > share + max(1, share // 8) else float("inf")
        self._leaving = 0

    def _should_close(self) -> bool:
        """Whether to close the connection after the answer that is being given."""
        if self._drains:
            return True
        if len(self._connections) - self._leaving <= self._most:
            return False
        self._leaving += 1
        return True
