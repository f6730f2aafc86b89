"""Streams of the emulated device, which replace those of `torch.cuda`.

Each rank launches on a stream of its own, which does its work when somebody waits for it: the host,
or another stream at an event. torch's operators on the host take no part in streams, so that tables
wait for theirs at the end of a lookup.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from oper.shmem.batch import Lookup
from oper.shmem.device.tables import DeviceTables
from tests.cuda import emulated


class Stream:
    """Stands in for `torch.cuda.Stream`; `number` refers to an existing stream."""

    created: ClassVar[list[int]] = []

    def __init__(self, device: object = None, number: int | None = None) -> None:
        if number is None:
            number = torch.ops.oper_emulated.stream_create()
            self.created.append(number)
        self.number = number

    def wait_event(self, event: Event) -> None:
        torch.ops.oper_emulated.stream_wait(self.number, *event.place)

    def synchronize(self) -> None:
        torch.ops.oper_emulated.stream_finish(self.number)


class Event:
    """As `torch.cuda.Event`."""

    place = (0, 0)

    def record(self, stream: Stream) -> None:
        self.place = (stream.number, torch.ops.oper_emulated.stream_given(stream.number))


def current_stream(device: object = None) -> Stream:
    return Stream(number=torch.ops.oper_emulated.stream_current())


@contextmanager
def stream(chosen: Stream) -> Iterator[None]:
    before = current_stream()
    torch.ops.oper_emulated.stream_use(chosen.number)
    try:
        yield
    finally:
        torch.ops.oper_emulated.stream_use(before.number)


def synchronize(device: object = None) -> None:
    for number in list(Stream.created):
        torch.ops.oper_emulated.stream_finish(number)


def is_current_stream_capturing() -> bool:
    captured: bool = torch.ops.oper_emulated.stream_is_captured(current_stream().number)
    return captured


class Graph:
    """The work of a stream within a ``with`` block, as `torch.cuda.CUDAGraph`; nothing in the block
    may be what CUDA does not allow in one."""

    def __init__(self, captured: Stream) -> None:
        self._stream = captured

    def __enter__(self) -> Graph:
        torch.ops.oper_emulated.stream_capture(self._stream.number, True)
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        forbidden = torch.ops.oper_emulated.stream_capture(self._stream.number, False)
        assert kind is not None or not forbidden, f"{forbidden} calls that CUDA does not allow"

    def replay(self) -> None:
        torch.ops.oper_emulated.stream_replay(self._stream.number)


class _Operators:
    """The emulated operators; their arguments are kept alive until all streams are idle."""

    def __init__(self, operators: Any, given: list[object]) -> None:
        self._operators, self._given = operators, given

    def __getattr__(self, name: str) -> _Operators:
        return _Operators(getattr(self._operators, name), self._given)

    def __call__(self, *args: Any) -> Any:
        found = self._operators(*args)
        self._given.append((args, found))
        return found


class StreamedTables(DeviceTables):
    """Tables of one rank whose work waits on its stream.

    Attributes:
        ahead: None, or ids are copied on this rank's stream and resolved on a thread and a stream
            of their own, which does it "early", before this rank's stream begins, or "late".
    """

    ahead: str | None = None

    def lookup(self, batch: Lookup, has_rows: bool = False) -> torch.Tensor:
        mine = current_stream()
        if self.ahead is not None:
            ids = torch.zeros_like(batch.ids)
            torch.ops.oper_emulated.stream_copy(mine.number, ids, batch.ids)
            batch = self._resolved(replace(batch, ids=ids))
        out: torch.Tensor = super().lookup(batch, has_rows)
        mine.synchronize()
        return out

    def _resolved(self, batch: Lookup) -> Lookup:
        run = self.to_resolve(batch)

        def work() -> Lookup:
            found = run()
            if self.ahead == "early":
                self._resolving_stream.synchronize()  # type: ignore[union-attr]
            return found

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(work).result()


@contextmanager
def in_use(patch: pytest.MonkeyPatch, ahead: str | None) -> Iterator[list[object]]:
    """Make `runtime_support` open these tables, with one stream per rank; the list keeps the
    arguments and results of operators alive."""
    import sys

    given: list[object] = []
    operators = _Operators(emulated.load(), given)
    patch.setattr("oper.shmem.library.load_device", lambda: operators)
    patch.setattr("oper.shmem.library.streams_of", lambda device: sys.modules[__name__])
    patch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    patch.setattr(StreamedTables, "ahead", ahead)

    def open_tables(*args: Any, **kwargs: Any) -> StreamedTables:
        torch.ops.oper_emulated.stream_use(Stream().number)  # of this rank's thread
        return StreamedTables(*args, device="cpu", **kwargs)

    patch.setattr("tests.runtime_support.ShardedTables", open_tables)
    try:
        yield given
    finally:
        synchronize()
        torch.ops.oper_emulated.stream_release_memory()
        torch.ops.oper_emulated.stream_use(0)  # a single rank has run in this thread
        Stream.created.clear()
