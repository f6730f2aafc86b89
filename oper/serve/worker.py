"""A worker process: one thread accepts connections, reads requests, scores them and answers."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable

from oper.serve.app import App
from oper.serve.connection import Connection
from oper.serve.metrics import Shared
from oper.serve.options import ServeOptions
from oper.serve.requests import Predictor
from oper.serve.signals import OURS

log = logging.getLogger("oper.serve")
# Messages on the control socket: READY from the worker; ACCEPT to it, once it may accept
# connections. At the end of the stream, the worker drains: the supervisor is stopping it, or has
# exited.
READY, ACCEPT = b"r", b"a"
_TICK_S = 0.1
_REPORT_TICKS, _EXPIRE_TICKS = 5, 10
_GRACE_S = 5.0  # after the drain time, the process is forced to exit
_YIELD_S = 0.25  # how long a connection waits for workers with fewer connections, if these are busy
_STEP_S = 0.002  # first of the growing pauses after which it checks whether these have accepted it
_BUSY_S = 1.0  # how long further connections do not wait after that
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

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # every connection needs a file descriptor
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    torch.set_num_threads(options.threads)
    predictor = opener()
    worker = _Worker(control, listener, options, shared, place, predictor)
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

    def __init__(self, control: socket.socket, listener: socket.socket, options: ServeOptions,
                 shared: Shared, place: int, predictor: Predictor) -> None:
        self.options, self.connections = options, set[Connection]()
        self._control, self._listener = control, listener
        self._app = App(predictor, options, shared, place, self._plan)
        self._batcher = self._app.batcher
        self.handle, self.abandoned = self._app.handle, self._app.abandoned
        # Open connections of all workers; -1 = the worker accepts none.
        self._counts, self._place = shared.workers()["connections"], place
        self._most = float("inf")  # connections beyond it are closed after their next answer
        self._leaving = 0  # connections that close after the answer being written
        self._others_busy_until = 0.0
        self._arriving: dict[Connection, asyncio.Task[None]] = {}
        self._drains = False
        self._next: asyncio.Handle | None = None  # scheduled call of `_turn` or `_plan`
        self._spins_until = 0.0

    async def serve(self) -> None:
        """Serve until the supervisor closes the control socket and requests are answered."""
        self._loop = asyncio.get_running_loop()
        self._control.setblocking(False)
        self._listener.setblocking(False)
        self._loop.add_reader(self._control.fileno(), self._obey)
        self.report()
        self._control.send(READY)
        ticks, until = 0, float("inf")
        while not (self._drains and not self.connections) and time.monotonic() < until:
            await asyncio.sleep(_TICK_S)
            ticks += 1
            self._level()
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
        self._app.counted.report(self._batcher.queued, self._app.in_flight)

    def _obey(self) -> None:
        """Begin to accept connections, or begin draining at the end of the stream."""
        try:
            data = self._control.recv(len(ACCEPT))
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if data:
            self._counts[self._place] = 0
            self._watch()
            return
        self._loop.remove_reader(self._control.fileno())
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        self._drains = True
        self._counts[self._place] = -1
        # Exit even if the model never returns.
        timer = threading.Timer(self.options.drain_s + _GRACE_S, os._exit, (1,))
        timer.daemon = True
        timer.start()

    # ---- batches ---------------------------------------------------------------------------------

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

    def _watch(self) -> None:
        if not self._drains:
            self._loop.add_reader(self._listener.fileno(), self._arrive)

    def _arrive(self) -> None:
        self._loop.remove_reader(self._listener.fileno())
        self._accept(time.monotonic())

    def _accept(self, since: float, step_s: float = _STEP_S) -> None:
        """Accept connections that have waited since a time, or leave them to workers with fewer and
        look again after `step_s`."""
        pause_s = 0.0
        for _ in range(_MOST_ACCEPTED):
            if self._drains:
                return
            now, mine, counts = time.monotonic(), self._count(), self._counts
            yields = now > self._others_busy_until and bool(
                ((counts >= 0) & (counts < mine)).any())
            if yields and now < since + _YIELD_S:
                self._loop.call_later(step_s, self._accept, since, 2 * step_s)
                return
            try:
                connection, _ = self._listener.accept()
            except ConnectionError:
                continue  # the client has gone already
            except BlockingIOError:
                break  # other workers have the others
            except OSError as error:
                if error.errno == errno.EINVAL:  # the server is stopping
                    return
                log.error("cannot accept a connection: %s", error)
                pause_s = _TICK_S  # a file descriptor may become free
                break
            if yields:
                self._others_busy_until = now + _BUSY_S
            self._evict_idle()
            arriving = Connection(self)
            self._arriving[arriving] = self._loop.create_task(self._adopt(arriving, connection))
        self._count()
        self._loop.call_later(pause_s, self._watch)

    async def _adopt(self, arriving: Connection, connection: socket.socket) -> None:
        connection.setblocking(False)
        try:
            await self._loop.connect_accepted_socket(lambda: arriving, connection)
        except OSError:
            connection.close()  # the client has gone already
        finally:
            del self._arriving[arriving]

    def _evict_idle(self) -> None:
        """Close the least recently used idle connections in excess of `max_connections`. As in
        nginx, idle clients cannot keep out new ones."""
        too_many = self._count() + 1 - self.options.max_connections
        if too_many <= 0:
            return
        held = [c for c in self.connections if not c.is_closing]
        too_many -= len(self.connections) - len(held)
        idle = sorted((c for c in held if c.is_idle), key=lambda c: c.last_used)
        for connection in idle[:max(0, too_many)]:
            connection.close()

    def _count(self) -> int:
        """Publish and return the number of open connections."""
        count = len(self.connections) + sum(c not in self.connections for c in self._arriving)
        if self._counts[self._place] >= 0:
            self._counts[self._place] = count
        return count

    def _level(self) -> None:
        """Close excess connections if this worker has far more than an equal share. When a worker
        exits, its clients connect to other workers. As connections are long-lived, the new worker
        would otherwise get few requests."""
        mine, counts = self._count(), self._counts[self._counts >= 0]
        share = -(-int(counts.sum()) // max(1, counts.size))
        self._most = share if mine > share + max(1, share // 8) else float("inf")
        self._leaving = 0

    def should_close(self) -> bool:
        """Whether to close the connection after the answer that is being written."""
        if self._drains:
            return True
        if len(self.connections) - self._leaving <= self._most:
            return False
        self._leaving += 1
        return True
