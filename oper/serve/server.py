"""The supervisor: it starts, replaces and drains workers, and publishes weights."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from typing import Any, Protocol, Self

from oper.errors import (
    DeadlineError,
    InvalidInputError,
    MissingDependencyError,
    OperError,
    require,
)
from oper.integration.checkpoint.follow import Change, Follower
from oper.serve.metrics import SUPERVISOR, Shared
from oper.serve.options import ServeOptions
from oper.serve.requests import Predictor, Signature, check_model
from oper.serve.signals import OURS, Signals
from oper.serve.tracing import Tracer
from oper.serve.worker import ACCEPT, READY, run_worker
from oper.support.processes import allocator_settings, trim_memory

log = logging.getLogger("oper.serve")
_BACKLOG = 1024
_POLL_S = 0.2
FOLLOW_S = 0.05  # interval of checks for signals and for new weights of a training run
_WRITE_S = 60.0  # longest wait of a stopping server until a trace has been written
_NICE = 10  # niceness of the thread that prepares weights, so that requests come first
_MAX_WAIT_S = 30.0  # maximum pause before restarting a worker that exits while starting


class Source(Protocol):
    """The supervisor's interface to a model whose weights all workers share."""

    signature: Signature

    def opener(self) -> Callable[[], Predictor]:
        """Return a picklable function that creates a worker's predictor."""
        ...

    def prepare(self, weights: Any = None) -> Callable[[], int]:
        """Read and validate new weights while requests are served.

        The returned function makes all workers switch to them together and returns their epoch. If
        the model has a method ``stop_waiting``, a stopping server calls it, after which `prepare`
        must not wait for workers any more.
        """
        ...

    def close(self) -> None:
        """Free the tables."""
        ...


@dataclass(slots=True, eq=False)
class _Worker:
    process: Any
    control: socket.socket
    started: float
    place: int
    ready: bool = False

    def accept(self) -> None:
        """Make the worker accept connections."""
        with contextlib.suppress(OSError):  # it has exited
            self.control.send(ACCEPT)


class Server:
    """A scoring server.

    Each connection belongs to one worker, the one with the fewest when it was opened. If a worker
    exits, its unanswered requests fail and a new worker replaces it; connections of other workers
    are not affected. Worker processes are started by ``spawn``: a script that creates a `Server`
    needs the usual ``if __name__ == "__main__"``.

    Args:
        model: a `Source` such as `oper.serve.PublishedModel`, or any picklable `Predictor` (its CPU
            tensors are moved to shared memory, so that all workers share them).
        options: options of the server; None = the defaults.

    Raises:
        InvalidInputError: `model` is neither a `Source` nor a `Predictor`.
        MissingDependencyError: the package httptools is not installed.

    Example:
        >>> from oper.serve import Client, Server, load_model
        >>> with Server(load_model("runs/dlrm")) as server:  # doctest: +SKIP
        ...     scores = Client(server.address).score(dense, {"C1": ids})
    """

    def __init__(self, model: Source | Predictor, options: ServeOptions | None = None) -> None:
        if importlib.util.find_spec("httptools") is None:
            raise MissingDependencyError("cannot serve", "package", "httptools", "installed",
                                         "install oper[serve]")
        check_model(model)
        self.options = options or ServeOptions()
        self.model = model
        self._listener: socket.socket | None = None
        self._workers: list[_Worker] = []
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._started = threading.Event()  # the workers accept connections, or have ended
        self._error: Exception | None = None
        self._signals: Signals | None = None  # of the process, if it serves until one stops it
        self._publishing = threading.Lock()
        self._failures = 0  # consecutive failed starts of a worker
        self._run: Follower | None = None  # the training run whose weights are in service
        self._delay = ""  # why newer weights could not be published yet
        self._follows_at = 0.0  # when `follow` tries again after that

    @property
    def address(self) -> str:
        """``host:port``; raises InvalidInputError before the start."""
        if self._listener is None:
            raise InvalidInputError("the server has no address", "state", "not started", "started",
                                    "call start()")
        host, port = self._listener.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers that are ready."""
        return [w.process.pid for w in list(self._workers) if w.ready]

    @property
    def counts(self) -> dict[str, int]:
        """The supervisor's counters by name. ``weights_lag_us`` is the time in microseconds from
        the training step of the last published delta to its use; 0 for full weights. Raises
        InvalidInputError before the start."""
        self._check_started("the server has no counts")
        return {name: int(getattr(self._counts, name)) for _, name, _ in SUPERVISOR}

    def start(self, signals: Signals | None = None) -> Self:
        """Start the workers and listen; return when all workers are ready.

        Args:
            signals: records signals from this call on, instead of raising KeyboardInterrupt; a stop
                signal aborts the start.

        Raises:
            InvalidInputError: the server has been started before.
            OperError: a worker could not start, or the port is in use.
            DeadlineError: the workers are not ready after `ServeOptions.start_s` seconds.
            KeyboardInterrupt: `signals` recorded a stop signal; the workers have exited.
        """
        import torch.multiprocessing as processes

        if self._thread is not None:
            raise InvalidInputError("cannot start the server", "state", "started", "not started",
                                    "make another Server")
        self._context = processes.get_context("spawn")
        self._shared = Shared(self._context, self.options.workers,
                              self.model.signature.key_features)
        self._counts, self._tracer = self._shared.counts, Tracer(self._shared)
        self._listener = self._bind()
        self._thread = threading.Thread(target=self._supervise, name="oper-serve")
        if signals is not None:
            signals.interrupts = False
        self._signals = signals
        try:
            self._thread.start()
            while not self._started.wait(FOLLOW_S):
                if signals is not None and signals.stop:
                    raise KeyboardInterrupt
        except BaseException:
            self.stop()
            raise
        if self._error is not None:
            self.stop()
            raise self._error
        return self

    def publish(self, weights: Any = None) -> int:
        """Make all workers use new weights while requests are served; return their epoch.

        `weights` is the argument of `Source.prepare`. A separate thread prepares the weights at low
        priority; switching to them runs at this thread's priority, and requests may wait for it.
        Concurrent calls publish one after another.

        Raises:
            InvalidInputError: the model is not a `Source`, the server has not been started, or the
                weights are invalid.
            DeadlineError: workers still read older weights, after a minute or when the server
                stops.
        """
        prepare = getattr(self.model, "prepare", None)
        if prepare is None:
            raise InvalidInputError("cannot publish new weights", "model",
                                    type(self.model).__name__, "one with prepare()",
                                    "serve a PublishedModel")
        self._check_started("cannot publish new weights")
        with self._publishing, futures.ThreadPoolExecutor(1, "oper-publish", _be_nice) as thread:
            begin = time.monotonic()
            try:
                future = thread.submit(prepare, weights)
                while not futures.wait([future], FOLLOW_S).done:
                    self._stop_waiting()
                prepared = [future.result()]
                del future  # so that the weights are freed as soon as they are in use
                switch = time.monotonic()
                epoch = int(prepared.pop()())
            except Exception:
                self._counts.failed_publications += 1
                raise
            finally:
                thread.submit(trim_memory)  # temporary memory of the preparation
            self._tracer.add_publication(begin, switch, epoch)
            self._counts.publications += 1
            made = getattr(weights, "time_s", 0.0)
            self._counts.weights_lag_us = int((time.time() - made) * 1e6) if made else 0
        return epoch

    def _check_started(self, what: str) -> None:
        require(what, "call start()", ("state", "not started", self._thread is not None, "started"))

    def _stop_waiting(self) -> None:
        """If the server is to stop, end a wait of a publication for workers."""
        if self._stop.is_set() or (self._signals is not None and self._signals.stop):
            getattr(self.model, "stop_waiting", lambda: None)()

    def trace(self, path: str | os.PathLike[str], seconds: float = 5.0) -> int:
        """Record what all workers do for some seconds in a trace file for ui.perfetto.dev.

        Each worker is a process of the trace. One line has its batches and their lookups; others
        have requests with their stages, on separate lines if they overlap. The supervisor's process
        has the publications. Requests without scores are left out.

        Args:
            path: the file; an existing one is replaced atomically.
            seconds: how long to record, up to 600; ends earlier if the server stops, or after
                100 000 records, of requests, batches and lookups.

        Returns:
            The number of requests in the trace.

        Raises:
            InvalidInputError: the server is not running or is being traced, or an argument is out
                of range.
            OSError: the file cannot be written.
        """
        if self._thread is None or self._stop.is_set():
            raise InvalidInputError("cannot trace the server", "state", "stopped"
                                    if self._thread else "not started", "running",
                                    "call it between start() and stop()")
        return self._tracer.record(path, seconds, self._stop.is_set)

    def _try_trace(self) -> None:
        """Record the trace that the options name, and log the outcome."""
        options = self.options
        try:
            if not options.trace:
                log.error("no trace: the server was started without a file for traces")
                return
            log.info("tracing for %g s", options.traced_s)
            log.info("wrote %d requests to %s", self.trace(options.trace, options.traced_s),
                     options.trace)
        except (OperError, OSError) as error:
            log.error("no trace: %s", error)

    def stop(self) -> None:
        """Refuse new connections, finish requests in flight and stop the workers. Idempotent."""
        self._stop.set()
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def serve_until_signalled(self, every: Callable[[], Any] | None = None,
                              signals: Signals | None = None) -> None:
        """Serve until SIGTERM or SIGINT, then drain. SIGHUP publishes the model's weights again, or
        those of the run that `follow` was called with, and SIGUSR1 records a trace
        (`ServeOptions.trace`).

        Args:
            every: called every `FOLLOW_S` seconds, e.g. to look for new weights.
            signals: signals recorded since before the start; None = record them from now on.
        """
        with contextlib.ExitStack() as stack:
            noted = signals or stack.enter_context(Signals())
            noted.interrupts = False
            self._signals = noted
            traces: list[threading.Thread] = []
            while not noted.stop and self._thread is not None and self._thread.is_alive():
                time.sleep(FOLLOW_S)
                if noted.reload:
                    noted.reload = False
                    if self._run is None:
                        self.try_publish()
                    else:  # its deltas must follow the checkpoint again, from the first one on
                        self._run.again()
                if noted.trace:
                    noted.trace = False
                    traces = [t for t in traces if t.is_alive()]
                    traces.append(threading.Thread(target=self._try_trace, name="oper-trace",
                                                   daemon=True))
                    traces[-1].start()
                if every is not None:
                    every()
            log.info("draining: finishing requests in flight")
            self.stop()
            for thread in traces:
                thread.join(_WRITE_S)
        if self._error is not None:
            raise self._error

    def try_publish(self) -> None:
        """Publish the model's weights again; log a failure, after which the old weights remain in
        use."""
        try:
            self._publish()
        except Exception as error:
            _log_kept(logging.ERROR, "", error)

    def _publish(self, change: Change | None = None) -> None:
        """Publish and log a change of a training run, or the model's weights again."""
        epoch = self.publish(change)
        if change is None:
            log.info("published epoch %d", epoch)
        else:
            log.info("serving step %d", change.step)

    def follow(self, run: Follower) -> None:
        """Publish the checkpoint or deltas that a training run has saved since the last call. On
        SIGHUP, `serve_until_signalled` publishes the run's last checkpoint and its deltas again.

        Errors are logged, and the current weights remain in use: until the next full checkpoint if
        weights are invalid. If the system cannot read them now, or readers do not leave the buffers
        in time, a later call tries again, after a pause as long as the attempt.
        """
        self._run, begin = run, time.monotonic()
        if begin < self._follows_at:
            return
        failed, what, is_whole = self._counts.failed_publications, "", False
        try:
            if is_whole := run.has_whole():
                self._publish()
            else:
                for change in run.changes():
                    what = f"step {change.step} is refused: "
                    self._publish(change)
                    run.applied(change)
                    what = ""
                    del change  # frees it before the next one is read
            self._delay = ""
        except (DeadlineError, OSError, MemoryError) as error:
            if is_whole:
                run.again()
            now = time.monotonic()
            self._follows_at = now + (now - begin)
            text = str(error) or type(error).__name__
            is_new, self._delay = text != self._delay, text
            self._counts.failed_publications = failed + is_new
            if is_new:
                _log_kept(logging.WARNING, " for now", error)
        except Exception as error:
            run.refuse(str(error) or type(error).__name__)
            self._counts.failed_publications = failed + 1  # counts unreadable weights, too
            _log_kept(logging.ERROR, "" if is_whole else " until the next full checkpoint",
                      error, what)

    # ---- the supervising thread ------------------------------------------------------------------

    def _bind(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self.options.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((self.options.host, self.options.port))
        except OSError as error:
            listener.close()
            raise self._cannot_listen(error) from error
        return listener

    def _cannot_listen(self, error: OSError) -> OperError:
        return OperError("cannot listen", "address", f"{self.options.host}:{self.options.port}",
                         f"a free one ({error.strerror})", "choose another host or port")

    def _supervise(self) -> None:
        try:
            self._start_workers()
            self._started.set()
            while not self._stop.is_set():
                for worker in self._wait():
                    worker.accept()
                for worker in list(self._workers):
                    if not worker.process.is_alive():
                        self._replace(worker)
        except Exception as error:
            self._error = error
        finally:
            self._drain()
            self._started.set()

    def _start_workers(self) -> None:
        """Start the workers; once all are ready, let them accept connections."""
        assert self._listener is not None
        for place in range(self.options.workers):
            self._start_worker(place)
        until = time.monotonic() + self.options.start_s
        while not all(w.ready for w in self._workers) and not self._stop.is_set():
            if time.monotonic() > until:
                raise DeadlineError("cannot start all workers", "start_s", self.options.start_s,
                                    "seconds in which all workers become ready",
                                    "increase start_s")
            self._wait()
            for process in (w.process for w in self._workers):
                if not process.is_alive():
                    raise OperError("a worker could not start", "exit code", process.exitcode,
                                    "0", "see its log above")
        try:
            self._listener.listen(_BACKLOG)
        except OSError as error:  # two servers can bind a port, but only one can listen on it
            raise self._cannot_listen(error) from error
        for worker in self._workers:
            worker.accept()

    def _start_worker(self, place: int) -> None:
        assert self._listener is not None
        ours, theirs = socket.socketpair()
        opener = (self.model.opener() if hasattr(self.model, "opener")
                  else partial(_itself, self.model))
        process = self._context.Process(
            target=run_worker, daemon=True, name="oper-worker",
            args=(theirs, self._listener, opener, self.options, self._shared, place))
        # The worker inherits blocked signals, so none kills it before it ignores them. Start the
        # resource tracker first, since starting it unblocks these signals.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        try:
            with theirs, allocator_settings():
                resource_tracker.ensure_running()
                signal.pthread_sigmask(signal.SIG_BLOCK, OURS)
                process.start()
        except OSError:
            ours.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        ours.setblocking(False)
        self._workers.append(_Worker(process, ours, time.monotonic(), place))

    def _wait(self) -> list[_Worker]:
        """Wait up to `_POLL_S` seconds for events of workers; return those that became ready."""
        starting = [w for w in self._workers if not w.ready]
        wait([*(w.process.sentinel for w in self._workers), *(w.control for w in starting)],
             _POLL_S)
        for worker in starting:
            with contextlib.suppress(BlockingIOError, ConnectionError):
                worker.ready = worker.control.recv(1) == READY
        self._counts.workers = sum(w.ready for w in self._workers)
        return [w for w in starting if w.ready]

    def _replace(self, worker: _Worker) -> None:
        """Replace a worker that has exited, after a pause if it exited before it was ready."""
        self._shared.workers()[worker.place]["connections"] = -1
        if worker.ready:
            log.warning("worker %d exited (exit code %s); starting another one",
                        worker.process.pid, worker.process.exitcode)
            self._counts.worker_restarts += 1
            self._failures = 0
        elif time.monotonic() - worker.started < min(2.0 ** self._failures, _MAX_WAIT_S):
            time.sleep(_POLL_S)  # the sentinel of the exited worker keeps `wait` from waiting
            return
        else:
            self._failures += 1
            log.error("trying again to start a worker (exit code of the last one: %s)",
                      worker.process.exitcode)
        try:
            self._start_worker(worker.place)
        except OSError as error:  # there is no memory or file descriptor left for it
            log.error("cannot start a worker now: %s", error)
            worker.ready, worker.started = False, time.monotonic()
            return
        self._workers.remove(worker)
        worker.control.close()
        worker.process.join()

    def _drain(self) -> None:
        """Stop listening, let the workers drain, and kill those that exceed `drain_s`."""
        assert self._listener is not None
        with contextlib.suppress(OSError):  # it does not listen yet
            self._listener.shutdown(socket.SHUT_RDWR)  # for the workers as well
        self._listener.close()
        for worker in self._workers:
            worker.control.close()
        until = time.monotonic() + self.options.drain_s + 2
        for worker in self._workers:
            # A worker that is not ready has no requests to finish.
            if not worker.ready:
                worker.process.kill()
            worker.process.join(max(0.0, until - time.monotonic()))
            if worker.process.is_alive():
                log.error("worker %d did not finish within %s s", worker.process.pid,
                          self.options.drain_s)
                worker.process.kill()
            worker.process.join()
        self._workers.clear()
        self._counts.workers = 0
        close = getattr(self.model, "close", None)
        if close is not None:
            with self._publishing:  # another thread may still write weights
                close()


def _log_kept(level: int, how_long: str, reason: Exception, what: str = "") -> None:
    """Log why new weights are not used, after `what`; with a traceback unless it says what to do.
    """
    is_known = isinstance(reason, OperError | OSError)
    log.log(level, "the old weights remain in use%s: %s%s", how_long, what,
            reason if is_known else f"{type(reason).__name__}: {reason}",
            exc_info=None if is_known else reason)


def _itself(predictor: Predictor) -> Predictor:
    return predictor


def _be_nice() -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
