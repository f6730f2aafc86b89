"""The publishing side of read-only tables: two buffers, an epoch, a thread that accepts readers.

Segments are anonymous memory files, which the kernel frees when publisher and readers have exited,
even after SIGKILL. Readers get read-only descriptors over a connection that stays open as long as
the reader lives; when it closes, the publisher frees the reader's slot.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from oper.errors import DeadlineError, InvalidInputError, OperError
from oper.plan import Plan
from oper.shmem.group.domains import peer_credentials
from oper.shmem.library import load
from oper.shmem.memory import numa
from oper.shmem.memory.segments import page_kind
from oper.shmem.migration import check_memory
from oper.shmem.publication.buffers import (
    HEADER,
    HEADER_BYTES,
    BufferRows,
    DenseEntry,
    Layout,
    Places,
    Write,
    checksums,
    dense_entries,
    dense_view,
)
from oper.shmem.publication.changes import (
    ChangedElements,
    Changes,
    changed_entries,
    check_dense,
    checked_elements,
    packed_rows,
    stored_rows,
)
from oper.shmem.publication.handshake import HANDSHAKE, MAGIC, check_name, socket_name
from oper.shmem.publication.reader import VERSION
from oper.shmem.publication.state import State
from oper.shmem.rows import CHUNK_ROWS
from oper.support.processes import in_child

Rows = Iterable[tuple[int, torch.Tensor]]
_WAIT_S = 5e-5  # interval at which pins of readers are polled
_QUIET_S = 0.005  # how long to wait until no reader has a pin, before new lookups are blocked
_TICK_S = 0.05  # interval at which to try to free a buffer that readers may still use
_ONLY = torch.zeros(1, dtype=torch.int64)  # row number of a dense weight, treated as one row
_SEND_S = 10.0  # timeout for sending the handshake to a reader


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """Checked changes of rows, of dense weights as one row each, and of elements of dense weights,
    in their stored form."""

    writes: list[Write]
    dense: list[tuple[DenseEntry, torch.Tensor]]
    elements: list[tuple[DenseEntry, torch.Tensor, torch.Tensor]]

    def places(self, view: BufferRows, dense_at: int) -> Places:
        """Return the arguments of ``place_rows`` that write these changes to a buffer.

        Args:
            view: the rows of the buffer.
            dense_at: address of the buffer's dense weights.
        """
        to, places, rows = view.places(self.writes)
        for entry, value in self.dense:
            to.append(dense_view(dense_at, entry).view(value.shape))
            places.append(_ONLY)
            rows.append(value)
        for entry, at, values in self.elements:
            to.append(dense_view(dense_at, entry).view(-1).view(values.dtype)[:, None])
            places.append(at)
            rows.append(values[:, None])
        return to, places, rows


class Publisher:
    """Tables and dense weights of a model, in memory that readers of this host share.

    Args:
        name: name by which readers attach (`oper.shmem.publication.handshake.check_name`).
        plan: the tables, placed on memory domains: one rank per NUMA node, in order.
        dense: dense weights by key, whose shapes and dtypes all later weights must have.
        keep_spare: keep the memory of the unused buffer for the next publication.
        checksum: write checksums that `Reader.verify` compares.

    Attributes:
        page_kind: page size of the tables: ``"4KiB"`` or ``"2MiB"`` (or a mix in per cent).

    Raises:
        OperError: there is not enough memory, or another publisher of this user has the name.
    """

    def __init__(self, name: str, plan: Plan, dense: Mapping[str, torch.Tensor],
                 keep_spare: bool = False, checksum: bool = True) -> None:
        load()
        self.name = check_name(name)
        self.layout = Layout(plan, dense_entries(dense))
        self._keep_spare = keep_spare
        self._checksum = checksum
        self._stopping = threading.Event()
        nodes = numa.find_nodes()
        listener = _listen(name)
        try:
            self._state = State(self.layout, nodes[:plan.world_size])
        except BaseException:
            listener.close()
            raise
        self.page_kind = "4KiB"
        self._acceptor = _Acceptor(listener, self._state)
        self._release = weakref.finalize(self, _close, self._acceptor, self._state)

    @property
    def epoch(self) -> int:
        """Number of the current weights, 0 = none yet.

        Increases by 1 when all weights are replaced, and by 2 when rows are changed in place.
        """
        self._check_open()
        return self._state.epoch

    def readers(self) -> list[int]:
        """Return the process ids of the attached readers, ascending."""
        return sorted(self._state.pids.values())

    def memory_bytes(self) -> dict[str, int]:
        """Return bytes of ``"tables"`` and ``"dense"`` weights per epoch, and of memory that the
        ``"spare"`` buffer uses now."""
        self._check_open()
        dense = sum(e.num_bytes for e in self.layout.dense)
        spare = self._state.buffers[(self.epoch + 1) & 1].held_bytes()
        return {"tables": self.layout.num_bytes - dense, "dense": dense, "spare": spare}

    def publish_rows(self, rows: Callable[[str], Rows], dense: Mapping[str, torch.Tensor],
                     timeout_s: float = 60.0) -> int:
        """Write all weights to the unused buffer, and make it the one that readers use.

        Args:
            rows: ``rows(name)`` yields (first id, rows) of a table in any order and must cover it;
                rows are floats [n, dim], or uint8 [n, bytes of a row] for quantised tables with a
                single element type.
            dense: dense weights by key, with the shapes and dtypes given at creation.
            timeout_s: seconds to wait for readers that still pin an epoch in the unused buffer.

        Returns:
            The new epoch.

        Raises:
            InvalidInputError: weights do not fit; readers continue with the old epoch.
            DeadlineError: a reader does not unpin the buffer; readers continue with the old epoch.
        """
        self._check_open()
        state = self._state
        with state.lock:
            epoch = state.epoch + 1
            spare = epoch & 1
            self._wait(spare, timeout_s)
            state.is_spare_pending = False
            try:
                self._write(epoch, rows, dense)
            except BaseException:
                if not self._keep_spare:
                    state.buffers[spare].give_back()
                raise
            torch.ops.oper.publication_set_epoch(state.control, epoch)
            state.is_spare_pending = not self._keep_spare and epoch > 1
        self._acceptor.listen()
        state.try_to_give_back()
        return epoch

    def prepare_rows(self, rows: Changes, dense: Mapping[str, torch.Tensor],
                     elements: ChangedElements | None = None) -> Prepared:
        """Check and convert changes for `commit`, and load the rows that they replace into caches.

        Readers wait during `commit`, so all slow work is done here, where the caller may run at low
        priority.

        Args:
            rows: by table name, distinct ids int64 [n] and their rows as for `publish_rows`.
            dense: dense weights that change, by key.
            elements: single elements of dense integer weights to change, by key: pairs of distinct
                indices, int64 [n], and new values, [n]; an index counts values of that dtype from
                the weight's first byte.

        Raises:
            InvalidInputError: a change does not fit.
        """
        self._check_open()
        layout = self.layout
        writes = [write for name, found in rows.items()
                  for ids, stored in packed_rows(layout, name, *found)
                  for write in layout.writes(name, ids, stored)]
        with self._state.lock:  # the buffer must not be freed meanwhile
            views, dense_at = self._views(self._state.epoch)
            entries = changed_entries(layout, dense, partial(dense_view, dense_at))
            prepared = Prepared(writes, [(e, _as_row(dense[e.key])) for e in entries],
                                checked_elements(layout, elements or {}))
            if self._state.epoch:
                torch.ops.oper.fetch_rows(*prepared.places(views[0], dense_at)[:2])
        return prepared

    def _views(self, epoch: int) -> tuple[list[BufferRows], int]:
        """Return the rows in an epoch's buffer as seen from each memory domain, and the address of
        its dense weights."""
        *segments, dense_at = self._state.buffers[epoch & 1].addresses
        return [BufferRows(self.layout, segments, d)
                for d in range(self.layout.plan.world_size)], dense_at

    def commit(self, prepared: Prepared, timeout_s: float = 1.0) -> int:
        """Change rows and weights of the last epoch in place, atomically for every reader.

        Waits until no reader has pinned the epoch; readers that then want to pin it wait until the
        rows are copied. The tables are not copied. The new epoch has no checksums.

        Args:
            prepared: the result of `prepare_rows`.
            timeout_s: seconds to wait for readers that have pinned the epoch.

        Returns:
            The new epoch, the last one + 2, since it is in the same buffer.

        Raises:
            InvalidInputError: nothing has been published yet.
            OperError: an earlier change has failed half-way.
            DeadlineError: a reader does not unpin the epoch; readers continue with the old weights.
        """
        self._check_open()
        state, layout = self._state, self.layout
        with state.lock:
            epoch = state.epoch
            if not epoch:
                raise InvalidInputError("cannot change published rows", "epoch", 0, ">= 1",
                                        "publish all weights first")
            if torch.ops.oper.publication_epoch(state.control) < 0:
                raise OperError("cannot change published rows", f"last change, of epoch {epoch}",
                                "failed half-way", "complete weights", "publish all weights")
            views, dense_at = self._views(epoch)
            to, places, rows = prepared.places(views[0], dense_at)
            header = self._header(epoch + 2, {})
            self._keep_out(epoch, timeout_s)
            # If this fails, readers cannot pin an epoch until all weights are published again.
            torch.ops.oper.place_rows(to, places, rows)
            if layout.has_replicas:
                for view in views:
                    view.flush_replicas()
            _write_header(dense_at, header)
            torch.ops.oper.publication_set_epoch(state.control, epoch + 2)
        return epoch + 2

    def _keep_out(self, epoch: int, timeout_s: float) -> None:
        """Prevent readers from pinning `epoch`, and wait until no reader has pinned it.

        Tries to do so at a moment when it is not pinned, so that new lookups need not wait for
        lookups under way.
        """
        state = self._state
        until = time.monotonic() + _QUIET_S
        while state.busy(epoch & 1) and time.monotonic() < until:
            time.sleep(_WAIT_S)
        torch.ops.oper.publication_set_epoch(state.control, -epoch)
        try:
            self._wait(epoch & 1, timeout_s)
        except BaseException:
            torch.ops.oper.publication_set_epoch(state.control, epoch)
            raise

    def _wait(self, buffer: int, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while busy := self._state.busy(buffer):
            is_stopping = self._stopping.is_set()
            if is_stopping or time.monotonic() > deadline:
                raise DeadlineError("a reader does not leave the buffer that is to be overwritten",
                                    "processes", busy, "the end of their lookups " + (
                                        "before the publisher stops" if is_stopping
                                        else f"within {timeout_s:g} s"),
                                    "check whether these processes are stopped, or end them")
            time.sleep(_WAIT_S)

    def _write(self, epoch: int, rows: Callable[[str], Rows],
               dense: Mapping[str, torch.Tensor]) -> None:
        layout, target = self.layout, self._state.buffers[epoch & 1]
        if not target.is_filled:
            check_memory([layout.num_bytes], "another copy of the tables",
                         "free memory, or publish rows of a narrower type")
        target.is_filled = True
        views, dense_at = self._views(epoch)
        for name, spec in layout.specs.items():
            covered = 0
            for begin, values in rows(name):
                if begin < 0 or begin + values.shape[0] > spec.num_rows:
                    raise InvalidInputError(f"cannot publish table {name!r}", "rows",
                                            (begin, begin + values.shape[0]),
                                            f"within 0..{spec.num_rows}", "pass this table's rows")
                for at in range(0, values.shape[0], CHUNK_ROWS):
                    chunk = values[at:at + CHUNK_ROWS]
                    ids = np.arange(begin + at, begin + at + chunk.shape[0])
                    for some, stored in stored_rows(f"cannot publish table {name!r}", layout, name,
                                                    ids, chunk):
                        for write in layout.writes(name, some, stored):
                            torch.ops.oper.place_rows(*views[0].places([write]))
                covered += values.shape[0]
            if covered != spec.num_rows:
                raise InvalidInputError(f"cannot publish table {name!r}", "number of rows", covered,
                                        f"{spec.num_rows}", "pass all rows of this table once")
        for view in views:
            view.flush_replicas()  # replicas
        for entry in layout.dense:
            check_dense(entry, dense)
            dense_view(dense_at, entry).copy_(dense[entry.key].detach())
        done = want = 0
        segments = target.addresses[:-1]
        for address, size in zip(segments, layout.arena.used_bytes, strict=True):
            want += size
            done += int(torch.ops.oper.collapse_segment(address, size))
        self.page_kind = page_kind(done, want)
        _write_header(dense_at, self._header(epoch, checksums(
            layout, segments, dense_at) if self._checksum else {}))

    def _header(self, epoch: int, sums: dict[str, int]) -> torch.Tensor:
        """Return a buffer's header with its epoch and checksums, uint8 [n]."""
        text = json.dumps({"bytes": self.layout.num_bytes, "crc32": sums}).encode()
        head = HEADER.pack(MAGIC, VERSION, epoch, len(text)) + text
        assert len(head) <= HEADER_BYTES
        return torch.frombuffer(bytearray(head), dtype=torch.uint8)

    def _check_open(self) -> None:
        if not self._state.buffers:
            raise OperError("the publication was closed", "name", self.name, "an open one",
                            "publish again")

    def stop_waiting(self) -> None:
        """Make a publication that waits for readers, and every later one that would wait, raise
        DeadlineError at once; for a process that is to exit."""
        self._stopping.set()

    def close(self) -> None:
        """Stop accepting readers and release the tables; attached readers keep the last epoch."""
        self._release()


def _write_header(dense_at: int, header: torch.Tensor) -> None:
    torch.ops.oper.segment_bytes(dense_at, header.numel()).copy_(header)


class _Acceptor(threading.Thread):
    """Thread that gives attaching readers a slot and descriptors, and frees the slots of readers
    that exit."""

    def __init__(self, listener: socket.socket, state: State) -> None:
        super().__init__(name="oper-publication", daemon=True)
        self._listener = listener
        self._state = state
        self._owner = os.getpid()
        self._free = list(range(int(torch.ops.oper.publication_slots())))[::-1]
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._slots: dict[socket.socket, int] = {}
        # Copies of the sockets in a forked child would keep the name and the readers' connections
        # open after this process has exited.
        in_child(self, _Acceptor.forget)

    def listen(self) -> None:
        """Accept readers; called after the first publication."""
        if self.ident is None:
            self._listener.listen(128)
            self.start()
        else:
            self._wake.send(b"r")  # try to free the spare buffer

    def close(self) -> None:
        """Stop the thread and close the connections to all readers."""
        if self.ident is not None and self._owner == os.getpid():
            self._wake.send(b"q")
            self.join()
        self.forget()

    def forget(self) -> None:
        """Close the sockets in this process."""
        for connection in [self._listener, self._wake, self._woken, *self._slots]:
            connection.close()
        self._selector.close()

    def run(self) -> None:
        while True:
            tick = _TICK_S if self._state.is_spare_pending else None
            for key, _ in self._selector.select(tick):
                if key.fileobj is self._woken:
                    if b"q" in self._woken.recv(4096):
                        return
                elif key.fileobj is self._listener:
                    self._accept()
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._disconnect(key.fileobj)
            self._state.try_to_give_back()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        try:
            pid, uid = peer_credentials(connection)
            connection.settimeout(_SEND_S)
            if uid != os.getuid():
                connection.close()
                return
            if not self._free:
                _send(connection, {"error": f"{len(self._slots)} readers are attached"}, [])
                connection.close()
                return
            slot = self._free.pop()
            torch.ops.oper.publication_clear(self._state.control, slot)
            self._slots[connection] = slot
            self._state.pids[slot] = pid
            self._selector.register(connection, selectors.EVENT_READ)
            self._send_handshake(connection, slot)
        except OSError:  # the reader has exited already
            if connection in self._slots:
                self._disconnect(connection)
            else:
                connection.close()

    def _send_handshake(self, connection: socket.socket, slot: int) -> None:
        state = self._state
        fds = [state.control_fd]
        try:
            # Reopened read-only, so that readers cannot map the segments writable.
            for buffer in state.buffers:
                fds += [os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
                        for fd in buffer.fds]
            _send(connection, {"slot": slot, "nodes": [n.processors for n in state.nodes],
                              "layout": state.layout.to_text()}, fds)
        finally:
            for fd in fds[1:]:
                os.close(fd)

    def _disconnect(self, connection: socket.socket) -> None:
        """Free the slot of a reader that has closed its connection or died."""
        slot = self._slots.pop(connection)
        self._selector.unregister(connection)
        connection.close()
        torch.ops.oper.publication_clear(self._state.control, slot)
        self._state.pids.pop(slot, None)
        self._free.append(slot)


def _close(acceptor: _Acceptor, state: State) -> None:
    acceptor.close()
    state.close()


def _listen(name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(socket_name(name))
    except OSError as error:
        listener.close()
        raise OperError("cannot publish tables", "name", name,
                        "a name that no running publisher has",
                        f"choose another name, or end that publisher ({error})") from error
    return listener


def _send(connection: socket.socket, value: Mapping[str, Any], fds: list[int]) -> None:
    text = json.dumps(value).encode()
    head = HANDSHAKE.pack(MAGIC, len(text))
    if fds:
        socket.send_fds(connection, [head], fds)
    else:
        connection.sendall(head)
    connection.sendall(text)


def _as_row(value: torch.Tensor) -> torch.Tensor:
    """Return a dense weight as one contiguous row [1, n]."""
    return value.detach().cpu().resolve_conj().resolve_neg().contiguous().view(1, value.numel())
