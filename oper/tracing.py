"""`trace()`: write a timeline of the phases of training steps on all ranks to a file."""

from __future__ import annotations

import itertools
import os
import socket
import warnings
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from oper.errors import InvalidInputError, fail
from oper.sharding import tables_of
from oper.shmem.counters.phases import PHASES, Span
from oper.shmem.group.clocks import Clock, compare_clocks
from oper.support.files import check_local
from oper.support.trace_events import Bar, trace_of, write_trace

if TYPE_CHECKING:
    from torch import nn

    from oper.shmem.tables import ShardedTables

_SPANS_OF_A_STEP = 1 << 16  # maximum number recorded per step, collection and rank
_SPANS = 1 << 20  # maximum number recorded over all steps, per collection and rank

Steps = tuple[int, int]


def trace(model: nn.Module, path: str | os.PathLike[str], steps: Steps | None = None, *,
          done: int = 0) -> Trace:
    """Record the phases of training steps on all ranks in a trace file for ui.perfetto.dev.

    A context manager around part of the training loop. The trace has one process per memory domain
    (host), one thread per thread of a rank, and one bar per phase and step: ``forward``,
    ``reduce`` (a rank sums its gradients by row), ``wait for gradients`` (of all ranks),
    ``update``, ``wait for updates`` (of all ranks), and ``refresh`` (of replicas). Nested bars show
    ``barrier`` and ``exchange`` (between hosts, with the bytes sent); ``resolve`` bars show ids
    resolved in advance of their lookup. Gaps are other work, such as dense computation.
    Times are on rank 0's clock; ``clock_uncertainty_us`` in the file bounds the error of other
    hosts' times. Leaving the block is collective; if an error leaves it, no file is written.

    Args:
        model: the result of `shard` for training, or a model that contains it.
        path: the trace file, written by rank 0; an existing file is replaced atomically.
        steps: numbers of the first and last step to record; by default all steps in the block. A
            step of a collection ends with its update.
        done: number of the last step before the block, so that the block's first is `done` + 1.

    Raises:
        InvalidInputError: the model has no sharded tables, is not trained, is in replica groups,
            or is being traced; `path` is a folder; or `steps` is not a range after `done`.
        OperError: the tables are in device memory.
        OSError: the file cannot be written; raised on all ranks.

    Example:
        >>> import torch, oper
        >>> bag = oper.shard(torch.nn.EmbeddingBag(9, 4, mode="sum"), optimizer=oper.SGD(lr=0.1))
        >>> with oper.trace(bag, "trace.json"):
        ...     bag(torch.tensor([[1, 2]])).sum().backward()
    """
    what = "cannot trace training steps"
    check_local(path)
    if os.path.isdir(path):
        raise InvalidInputError(what, "path", os.fspath(path), "a file, not a folder",
                                "name a file in this folder")
    if steps is not None and not (
            isinstance(steps, Sequence) and len(steps) == 2
            and all(isinstance(x, int) for x in steps) and done < steps[0] <= steps[1]):
        raise InvalidInputError(what, "steps", steps,
                                f"two integers (first, last), {done} < first <= last",
                                "number the steps of the block from `done` + 1 on")
    tables = tables_of(model, what)
    for t in tables:
        t.check_clock()
        if t.optimizers is None:
            raise InvalidInputError(what, "objective", "inference", "training",
                                    "trace a model that is trained")
        if t.replicas is not None:  # each group would write the file
            t.replicas.refuse(what, "trace a model without replica groups")
    if len({(t.group.rank, t.group.world_size) for t in tables}) > 1:
        raise InvalidInputError(what, "world sizes of the tables' process groups",
                                [t.group.world_size for t in tables],
                                "one process group for all tables",
                                "trace the parts of the model separately")
    return Trace(tables, path, steps, done)


class Trace:
    """The context manager that `trace` returns.

    Attributes:
        is_written: whether the trace file has been written.
    """

    def __init__(self, tables: Sequence[ShardedTables], path: str | os.PathLike[str],
                 steps: Steps | None, done: int) -> None:
        self.is_written = False
        self._path, self._steps = path, steps
        self._tables = tables[0]  # its group makes the collective calls of the trace
        self._recorders = [_Recorder(t, steps, done) for t in tables]
        self._is_over = False

    def __enter__(self) -> Trace:
        if self._is_over:
            raise InvalidInputError("cannot trace training steps", "trace", "already finished",
                                    "one block per trace", "call oper.trace again")
        try:
            for recorder in self._recorders:
                recorder.start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        if kind is None:
            self.write()
        else:
            self._stop()

    def _stop(self) -> None:
        self._is_over = True
        for recorder in self._recorders:
            recorder.stop()

    def write(self) -> None:
        """Stop recording and write the file before the end of the block. Collective; must be called
        between two steps.

        Warns if not all requested steps were recorded; if none was, no file is written.
        """
        if self._is_over:
            return
        self._stop()
        tables = self._tables
        parts: list[_Part] = tables.all_gather(_Part(
            socket.gethostname(), min(tables.members), [r.tables.name for r in self._recorders],
            [r.spans for r in self._recorders], sum(r.lost for r in self._recorders)))
        clocks = compare_clocks(tables.group)
        found = sorted({step for part in parts for step, _, _ in part.all()})
        error: OSError | None = None
        if found and tables.group.rank == 0:
            try:
                write_trace(self._path, _joined(parts, clocks, found))
            except OSError as caught:
                error = caught
        error = tables.all_gather(error)[0]
        if error is not None:
            raise error
        self.is_written = bool(found)
        if tables.group.rank == 0:
            self._warn(found, sum(part.lost for part in parts))

    def _warn(self, found: Sequence[int], lost: int) -> None:
        """Warn about steps and spans that are missing from the file."""
        name = f"the trace {os.fspath(self._path)!r}"
        if not found or (self._steps is not None and found[-1] != self._steps[1]):
            has = f"has steps {found[0]} to {found[-1]} only" if found else "was not written"
            warnings.warn(fail(f"{name} {has}", "steps", self._steps,
                               "steps of the block, which ended after step "
                               f"{max(r.step for r in self._recorders)}",
                               "trace earlier steps, or run more steps in the block"), stacklevel=4)
        if lost:
            warnings.warn(fail(f"{name} has gaps", "bars left out", lost,
                               f"at most {_SPANS:,} bars per collection and rank, and "
                               f"{_SPANS_OF_A_STEP:,} per step", "trace fewer steps"),
                          stacklevel=4)


class _Recorder:
    """Records the spans of one collection on this rank.

    Attributes:
        tables: the collection.
        step: number of the last finished step.
        spans: (step, span) in the order of recording.
        lost: number of spans dropped because a limit was reached.
    """

    def __init__(self, tables: ShardedTables, steps: Steps | None, done: int) -> None:
        self.tables, self.step = tables, done
        self.spans: list[tuple[int, Span]] = []
        self.lost = 0
        self._steps = steps
        self._is_on = False

    def start(self) -> None:
        if any(isinstance(getattr(f, "__self__", None), _Recorder) for f in self.tables.on_update):
            raise InvalidInputError("cannot trace training steps", "tables",
                                    list(self.tables.specs)[:8], "tables without another trace",
                                    "end the other trace first")
        with self.tables.turns.lock:  # waits for a step of another thread
            self.tables.on_update.append(self._after_update)
            self._switch()

    def stop(self) -> None:
        with self.tables.turns.lock:
            if self._after_update in self.tables.on_update:
                self.tables.on_update.remove(self._after_update)
            if self._is_on and self.tables.page_kind != "closed":
                self.tables.trace_phases(0)
            self._is_on = False

    def _switch(self) -> None:
        """Start or stop recording, depending on the number of the next step."""
        wanted = self._steps is None or self._steps[0] <= self.step + 1 <= self._steps[1]
        if wanted != self._is_on:
            self.tables.trace_phases(_SPANS_OF_A_STEP if wanted else 0)
            self._is_on = wanted

    def _after_update(self) -> None:
        self.step += 1
        if self._is_on:
            spans, lost = self.tables.take_spans()
            kept = spans[:_SPANS - len(self.spans)]
            self.spans += [(self.step, span) for span in kept]
            self.lost += lost + len(spans) - len(kept)
        self._switch()


class _Part(NamedTuple):
    """The recording of one rank.

    Attributes:
        host: name of the rank's host.
        domain: lowest rank of its memory domain.
        collections: names of the collections.
        spans: (step, span) lists, one per collection.
        lost: number of spans dropped because a limit was reached.
    """

    host: str
    domain: int
    collections: list[str]
    spans: list[list[tuple[int, Span]]]
    lost: int

    def all(self) -> Iterator[tuple[int, Span, str]]:
        """Yield (step, span, name of the collection) for all spans."""
        for name, spans in zip(self.collections, self.spans, strict=True):
            for step, span in spans:
                yield step, span, name

    def threads(self) -> list[int]:
        """Return the system's thread ids, the training thread's first."""
        spans = list(itertools.chain.from_iterable(self.spans))
        return list(dict.fromkeys([*(s.thread for _, s in spans if s.name == "reduce"),
                                   *(s.thread for _, s in spans)]))


def _joined(parts: Sequence[_Part], clocks: Sequence[Clock], steps: Sequence[int]
            ) -> dict[str, Any]:
    """Combine the recordings of all ranks into one trace.

    Args:
        parts: recordings by rank.
        clocks: clocks by rank.
        steps: the recorded steps, ascending.
    """
    domains = list(dict.fromkeys(part.domain for part in parts))
    processes: dict[int, str] = {}
    for number, domain in enumerate(domains):
        ranks = ", ".join(str(r) for r, part in enumerate(parts) if part.domain == domain)
        processes[number] = f"{parts[domain].host}: ranks {ranks}"
    width = max(len(part.threads()) for part in parts)
    threads: dict[tuple[int, int], str] = {}
    bars: list[Bar] = []
    start_ns = min(s.begin_ns - clock.ahead_ns
                   for part, clock in zip(parts, clocks, strict=True) for _, s, _ in part.all())
    for rank, part in enumerate(parts):
        process = domains.index(part.domain)
        number_of = {thread: rank * width + k for k, thread in enumerate(part.threads())}
        for k, (thread, number) in enumerate(number_of.items()):
            threads[process, number] = f"rank {rank}" + (f", thread {thread}" if k else "")
        for step, span, collection in part.all():
            args: dict[str, Any] = {"step": step}
            if span.sent_bytes:
                args["sent_bytes"] = span.sent_bytes
            if len(part.collections) > 1:
                args["collection"] = collection
            bars.append(Bar(process, number_of[span.thread], span.name,
                            "phase" if span.name in PHASES else "detail",
                            (span.begin_ns - clocks[rank].ahead_ns - start_ns) / 1e3,
                            (span.end_ns - span.begin_ns) / 1e3, args))
    return trace_of(bars, processes, threads, {
        "steps": [steps[0], steps[-1]], "ranks": len(parts),
        "lost_spans": sum(part.lost for part in parts),
        "clock_ahead_us": [clock.ahead_ns / 1e3 for clock in clocks],
        "clock_uncertainty_us": [clock.uncertainty_ns / 1e3 for clock in clocks]})
