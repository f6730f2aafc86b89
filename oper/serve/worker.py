"""A worker process: one model, one batcher, connections that the supervisor hands over."""

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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from oper.errors import MissingDependencyError, fail
from oper.serve import metrics
from oper.serve.batching import Batcher
from oper.serve.connection import Limits, bounded
from oper.serve.options import ServeOptions
from oper.serve.requests import Predictor
from oper.serve.signals import OURS

# What goes over the control socket: a connection with CONNECTION (to the worker), READY (from it).
# The end of the stream tells the worker to drain: the supervisor is stopping it, or has gone.
CONNECTION, READY = b"c", b"r"
_HANDOVERS = 64  # connections taken at once
_REPORT_TICKS, _EXPIRE_TICKS = 5, 10  # of uvicorn, 0.1 s each
_GRACE_S = 5.0  # beyond the drain time, before the process ends without more ado


@dataclass(frozen=True, slots=True)
class WorkerJob:
    """What a worker is told.

    Attributes:
        opener: makes the predictor.
        options: of the server.
        folder: of the metrics files.
        counts: what the supervisor counts, shared memory; see `oper.serve.server.Counts`.
        closed: connections that this worker has closed so far; shared with the supervisor.
        most: connections that it should have at most, as the supervisor says. It lets the others
            go with their next answer.
    """

    opener: Callable[[], Predictor]
    options: ServeOptions
    folder: str
    counts: Any
    closed: Any
    most: Any


def run_worker(control: socket.socket, job: WorkerJob) -> None:
    """What a worker process does, until the supervisor closes its end of `control`."""
    os.setsid()
    for number in OURS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, OURS)
    metrics.use_folder(job.folder)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    import torch

    from oper.serve.app import App

    _allow_descriptors()
    torch.set_num_threads(job.options.threads)
    predictor = job.opener()
    counted = metrics.WorkerMetrics()
    batcher = Batcher(predictor, job.options.batching, counted.observe_batch)
    app = App(predictor.signature, batcher, counted, job.options.max_bytes, job.options.read_s,
              lambda: metrics.page(job.folder, job.counts))

    def report() -> None:
        counted.queued.set(batcher.queued)
        counted.observe_rows(predictor.rows_read())
        counted.epoch.set(predictor.epoch)

    # What lives by now lives for ever: looking at it again and again costs milliseconds.
    gc.collect()
    gc.freeze()
    _make_server(app, control, job, report).run(sockets=[])
    batcher.close()
    report()
    close = getattr(predictor, "close", None)
    if close is not None:
        close()


def _make_server(app: Any, control: socket.socket, job: WorkerJob, report: Callable[[], None]
                 ) -> Any:
    """A uvicorn server without listeners, which takes connections from `control`."""
    try:
        import uvicorn
    except ImportError as error:
        raise MissingDependencyError(fail("cannot serve", "import", str(error), "uvicorn",
                                          "install oper[serve]")) from error

    class Server(uvicorn.Server):  # type: ignore[misc]
        """See above."""

        taken = 0
        leaving = 0  # connections whose last answer is on its way
        adopting: ClassVar[set[Any]] = set()  # tasks
        arriving: ClassVar[set[Any]] = set()  # connections that are not counted as such yet

        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets=[])
            options = job.options
            self.protocol = bounded(self.config.http_protocol_class, Limits(
                options.max_bytes, options.read_s, options.keep_alive_s))
            control.setblocking(False)
            asyncio.get_running_loop().add_reader(control.fileno(), self.take)
            control.send(READY)

        def take(self) -> None:
            """Take what the supervisor has sent."""
            try:
                data, files, closed = _receive(control)
            except BlockingIOError:
                return
            except ConnectionError:
                data, files, closed = b"", [], True
            loop = asyncio.get_running_loop()
            # Where this process has no room for descriptors they are lost, and the client sees its
            # connection closed.
            self.taken += data.count(CONNECTION)
            for number in files:
                task = loop.create_task(self.adopt(socket.socket(fileno=number)))
                self.adopting.add(task)  # the loop itself does not keep it
                task.add_done_callback(self.adopting.discard)
            if closed or not data:
                loop.remove_reader(control.fileno())
                self.should_exit = True
                _end_after(job.options.drain_s + _GRACE_S)

        async def adopt(self, connection: socket.socket) -> None:
            """Serve a connection."""
            protocol = self.protocol(config=self.config, server_state=self.server_state,
                                     app_state=self.lifespan.state)
            self.arriving.add(protocol)
            self.make_room()
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: protocol, connection)
            except OSError:
                connection.close()  # the client has gone already
            finally:
                self.arriving.discard(protocol)
            self.make_room()  # among those that came at once

        def make_room(self) -> None:
            """Beyond the connections that there may be, those without a request go whose last one
            is longest ago, as in nginx: idle clients, however many, keep nobody out."""
            most, connections = job.options.max_connections, self.server_state.connections
            # A connection that has just been made is among both for a moment.
            arriving = len(self.arriving - connections)
            if len(connections) + arriving <= most:
                return
            held = [c for c in connections if not c.transport.is_closing()]
            too_many = len(held) + arriving - most
            if too_many > 0:
                waiting = sorted((c for c in held if c.in_head), key=lambda c: c.idle_since)
                for connection in waiting[:too_many]:
                    connection.transport.close()

        def lets_go(self) -> bool:
            """Whether the connection of the request in hand is to end with its answer."""
            if len(self.server_state.connections) - self.leaving <= job.most.value:
                return False
            self.leaving += 1
            return True

        async def on_tick(self, counter: int) -> bool:
            self.leaving = 0
            job.closed.value = self.taken - len(self.server_state.connections)
            if counter % _REPORT_TICKS == 0:
                report()
            if counter % _EXPIRE_TICKS == 0:
                now = asyncio.get_running_loop().time()
                for connection in list(self.server_state.connections):
                    connection.expire(now)
            return await super().on_tick(counter)

    server = Server(uvicorn.Config(
        app, interface="asgi3", lifespan="off", ws="none", log_config=None, access_log=False,
        server_header=False, date_header=False, timeout_keep_alive=job.options.keep_alive_s,
        # Those that go for others are still counted for a moment.
        limit_concurrency=job.options.max_connections + 3 * _HANDOVERS,
        timeout_graceful_shutdown=int(job.options.drain_s) + 1))
    app.lets_go = server.lets_go
    return server


def _receive(control: socket.socket) -> tuple[bytes, list[int], bool]:
    """Bytes and descriptors that wait, and whether the stream has ended."""
    files = array.array("i")
    data, extra, _, _ = control.recvmsg(_HANDOVERS, socket.CMSG_SPACE(
        _HANDOVERS * files.itemsize), socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in extra:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            files.frombytes(content[:len(content) - len(content) % files.itemsize])
    return data, list(files), not data


def _allow_descriptors() -> None:
    """As many open files as the system lets this process have: connections are files."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _end_after(seconds: float) -> None:
    """A model that never returns must not keep the process for ever."""
    timer = threading.Timer(seconds, os._exit, (1,))
    timer.daemon = True
    timer.start()
