"""Read-only tables that any number of processes of a host map: how they are read.

A publisher (`oper.shmem.publication.publisher`) writes all tables and dense weights of a model into
one of two buffers and then increments the epoch; epoch e lies in buffer e % 2. A reader counts
itself in before it reads and out afterwards (csrc/bindings/publication.cpp), so everything it reads
in between is of one epoch, and the publisher overwrites a buffer only when no reader is counted
there. A reader never waits, except while rows are copied for a change in place.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from oper.errors import FileFormatError, InvalidInputError, OperError
from oper.rows.traffic import Traffic
from oper.shmem.batch import (
    FailedBatch,
    Lookup,
    raise_status,
    refuse_weight_gradient,
)
from oper.shmem.by_feature import BoundsCheck
from oper.shmem.counters.measured import kernel_traffic
from oper.shmem.group.domains import peer_credentials
from oper.shmem.library import load
from oper.shmem.memory.numa import near_domain
from oper.shmem.memory.segments import map_segment, no_segment
from oper.shmem.optim.arguments import feature_rows
from oper.shmem.placement.layout import context_arguments
from oper.shmem.publication.buffers import HEADER, BufferRows, Layout, checksums, dense_view
from oper.shmem.publication.handshake import MAGIC, check_name, connect, receive_handshake

VERSION = 1
SEGMENT_NAME = "oper-tables"
_CHANGE_S, _PAUSE_S = 30.0, 5e-5  # to wait for rows that are changed in place, and between looks


class PublishedTables(BufferRows):
    """The tables of one collection in one buffer; look them up within a `Reader.pinned` block.

    Args:
        reader: the attached reader.
        buffer: 0 or 1.
        features: (feature name, table name) in output order.
    """

    param_groups: list[dict[str, Any]] = []  # noqa: RUF012  # nothing is trained
    optimizers = None
    shares_bags = True
    takes_parts = False

    def __init__(self, reader: Reader, buffer: int, features: Sequence[tuple[str, str]]) -> None:
        super().__init__(reader.layout, reader.addresses[buffer], reader.domain)
        self.features = list(features)
        self._reader = reader
        self._buffer = buffer
        self.bounds = BoundsCheck("fatal", self.features, self.specs)
        self._row_dim = self.specs[self.features[0][1]].dim
        outputs, _ = feature_rows(self.features, self.specs, self.directories, self.pieces)
        self.handle = int(torch.ops.oper.context_create(*context_arguments(
            self.directories, self._layout, self._addresses, self.group.rank, outputs)))
        self._release = weakref.finalize(self, torch.ops.oper.context_close, self.handle)
        self._release.atexit = False

    @property
    def epoch(self) -> int:
        """The epoch that this thread reads; valid within a `Reader.pinned` block."""
        return self._reader.check_pinned(self._buffer)

    def lookup(self, batch: Lookup) -> torch.Tensor:
        """Embeddings: pooled, float32 [B, sum of the features' dims], or unpooled, float32 [N, D].

        Raises:
            InvalidInputError: an id is out of range, or lengths do not add up to the ids.
            OperError: called outside of a `Reader.pinned` block of this buffer's epoch.
        """
        batch = self._checked(batch)
        out: torch.Tensor
        shared = batch.shared
        out, offsets, code, detail = torch.ops.oper.lookup_forward(
            self.handle, batch.ids, batch.lengths, batch.weights, batch.key_of, batch.batch_size,
            batch.pooled, False, None, None, shared and shared.bags, shared and shared.samples)
        self._check_status(code, detail, batch, offsets)
        return out

    def lookup_interaction(self, batch: Lookup, dense: torch.Tensor) -> torch.Tensor:
        """DLRM's dot interaction of pooled embeddings and a dense row, without storing the
        embeddings.

        Args:
            batch: pooled; all tables have the same dim D.
            dense: float32 [B, D], contiguous.

        Returns:
            float32 [B, D + F * (F + 1) / 2]: the dense row, then the dot products of the pairs
            (i, j), i < j, of the rows dense, feature 0, feature 1, ...: (0, 1), (0, 2), ...,
            (1, 2), ... The products of a sample do not depend on the rest of the batch.

        Raises:
            InvalidInputError, OperError: as `lookup`.

        Source: Naumov et al., "Deep Learning Recommendation Model for Personalization and
        Recommendation Systems" (2019), section 2.1.
        """
        batch, dense = self._checked_interaction(batch, dense)
        out: torch.Tensor
        out, offsets, code, detail = torch.ops.oper.lookup_interaction(
            self.handle, batch.ids, batch.lengths, batch.weights, batch.key_of, dense)
        self._check_status(code, detail, batch, offsets)
        return out

    def lookup_shared_interaction(
            self, batch: Lookup, dense: torch.Tensor, first: torch.Tensor,
            shared_keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`lookup_interaction` of samples with shared features, such as candidates that share a
        user's.

        The products are equal bit for bit; those that all samples of a user share are returned
        once.

        Args:
            batch, dense: as for `lookup_interaction`.
            first: int64 [B]; the first sample of each sample's user; a user's samples are
                consecutive, and the shared features of the first are looked up for all.
            shared_keys: bool [num_keys], which keys of the batch are shared; their bags in a user's
                other samples are not read and may be empty.

        Returns:
            The pairs of the S shared features, float32 [U, S * (S - 1) / 2] for U users; float32
            [B, D + C * S + C * (C - 1) / 2]: the dense row, the products of each of the sample's C
            own rows (dense, then its features) with the S shared ones, and the pairs of its own
            rows; each sample's user, int64 [B]. See `shared_pairs`.

        Raises:
            InvalidInputError, OperError: as `lookup`.
        """
        batch, dense = self._checked_interaction(batch, dense)
        users: torch.Tensor
        users, samples, user_of, offsets, code, detail = torch.ops.oper.lookup_shared_interaction(
            self.handle, batch.ids, batch.lengths, batch.weights, batch.key_of, dense, first,
            shared_keys)
        self._check_status(code, detail, batch, offsets)
        return users, samples, user_of

    def _checked_interaction(self, batch: Lookup, dense: torch.Tensor
                             ) -> tuple[Lookup, torch.Tensor]:
        batch = self._checked(batch)
        if batch.shared is not None:
            raise InvalidInputError("cannot take the interaction", "samples that share bags",
                                    tuple(batch.shared.samples.shape), "a bag for each sample",
                                    "name shared bags by `lookup_shared_interaction`")
        want = (batch.batch_size, self._row_dim)
        if not batch.pooled or tuple(dense.shape) != want or dense.dtype != torch.float32:
            raise InvalidInputError("cannot take the interaction", "dense",
                                    (dense.dtype, tuple(dense.shape)),
                                    f"float32 {want}, beside a pooled batch", "correct the model")
        return batch, dense.contiguous()

    def _check_status(self, code: int, detail: int, batch: Lookup, offsets: torch.Tensor) -> None:
        if code:
            raise_status(code, detail, 0, FailedBatch(batch, offsets, self.features, self.specs,
                                                     self.device))

    def _checked(self, batch: Lookup) -> Lookup:
        """The batch with its invalid ids replaced, if `BoundsCheck` says so."""
        self._reader.check_pinned(self._buffer)
        refuse_weight_gradient(batch)
        return self.bounds.repair(batch, self.device)

    def resolve(self, batch: Lookup) -> Lookup:
        """The batch, unchanged: its epoch is chosen at its lookup."""
        return batch

    def publish(self) -> None:
        """Nothing to do, since the publisher writes the rows."""
        raise OperError("cannot write published tables", "tables", list(self.specs)[:8],
                        "tables of a trainer", "publish new weights from the trainer")

    def traffic(self, reset: bool = False) -> Traffic:
        """Rows read since the start or the last reset, by table and memory domain."""
        return kernel_traffic(self, self.handle, reset)


def shared_pairs(dim: int, is_shared: Sequence[bool]) -> tuple[list[int], list[int]]:
    """Map columns of `lookup_interaction` to the results of `lookup_shared_interaction`.

    Args:
        dim: dimension of the rows.
        is_shared: whether each feature is shared.

    Returns:
        Columns of the former that make up the result per user, and the result per sample, in order.
    """
    num_rows = len(is_shared) + 1
    rows = list(enumerate([False, *is_shared]))
    shared, own = ([i for i, x in rows if x == wanted] for wanted in (True, False))

    def column(i: int, j: int) -> int:
        return dim + i * (2 * num_rows - i - 1) // 2 + (j - i - 1)

    pairs = [(min(i, j), max(i, j)) for i in own for j in shared]
    return ([column(i, j) for i, j in itertools.combinations(shared, 2)],
            [*range(dim), *(column(i, j) for i, j in pairs),
             *(column(i, j) for i, j in itertools.combinations(own, 2))])


_READERS: weakref.WeakSet[Reader] = weakref.WeakSet()


class Reader:
    """A process's view of a publication.

    Args:
        name: name of the publication.
        timeout_s: how long to wait for a publisher of that name.
        domain: memory domain that rows are read from first; by default that of this process's
            processors.

    Attributes:
        name, domain: as given.
        layout: layout of the published tables.
        addresses: int [2][D], the domains' segments of both buffers, mapped read-only.
        publisher_pid: process id of the publisher.

    Raises:
        OperError: there is no publisher of that name and user, or it cannot take another reader.
    """

    def __init__(self, name: str, timeout_s: float = 10.0, domain: int | None = None) -> None:
        load()
        self.name = check_name(name)
        self._mapped: list[tuple[int, int]] = []
        self._pins = threading.local()
        self._owner = os.getpid()
        self._connection = connect(self.name, timeout_s)
        self.publisher_pid, _ = peer_credentials(self._connection)
        fds: list[int] = []
        try:
            text, fds = receive_handshake(self._connection)
            told = json.loads(text)
            if "error" in told:
                raise OperError(f"cannot attach to publication {name!r}", "reason", told["error"],
                                "a free place", "stop a reader")
            self.layout = Layout.from_text(told["layout"])
            self._slot = int(told["slot"])
            self.domain = near_domain(told["nodes"]) if domain is None else domain
            self._map(fds)
            self._connection.setblocking(False)  # from here on it only tells who lives
        except (ValueError, KeyError, TypeError) as error:
            self.close()
            raise FileFormatError(f"cannot attach to publication {name!r}", "handshake",
                                  f"{type(error).__name__} {error}", f"one of version {VERSION}",
                                  "run one version of this package on a host") from None
        except BaseException:
            self.close()
            raise
        finally:
            for fd in fds:
                os.close(fd)
        _READERS.add(self)
        self._release = weakref.finalize(self, _release, self._mapped, self._connection)
        self._release.atexit = False  # other threads may still read

    def _map(self, fds: list[int]) -> None:
        sizes = [*self.layout.segment_bytes, self.layout.dense_bytes]
        if len(fds) != 1 + 2 * len(sizes):
            raise ValueError(f"{len(fds)} descriptors")

        def mapped(fd: int, num_bytes: int, writable: bool) -> int:
            try:
                address = map_segment(fd, num_bytes, writable)
            except OSError as error:
                raise no_segment("cannot map published tables", num_bytes, error) from error
            self._mapped.append((address, num_bytes))
            return address

        self._control = mapped(fds[0], int(torch.ops.oper.publication_control_bytes()), True)
        self.addresses: list[list[int]] = []
        self._dense: list[int] = []
        for buffer in range(2):
            mine = fds[1 + buffer * len(sizes):1 + (buffer + 1) * len(sizes)]
            at = [mapped(fd, size, False) for fd, size in zip(mine, sizes, strict=True)]
            self.addresses.append(at[:-1])
            self._dense.append(at[-1])
        with self.pinned() as epoch:
            magic, version, written, _ = self._header(epoch & 1)
        if (magic, version, written) != (MAGIC, VERSION, epoch):
            raise ValueError(f"header {magic!r} {version} {written}")

    # ---- epochs ----------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The last epoch that was published."""
        self._check_open()
        return abs(int(torch.ops.oper.publication_epoch(self._control)))

    @contextlib.contextmanager
    def pinned(self) -> Iterator[int]:
        """A block in which this thread reads one epoch, whose number it yields; may be nested."""
        epoch = getattr(self._pins, "epoch", None)
        if epoch is not None:
            yield epoch
            return
        self._check_open()
        epoch = self._pin()
        self._pins.epoch = epoch
        try:
            yield epoch
        finally:
            self._pins.epoch = None
            if self._mapped:
                torch.ops.oper.publication_unpin(self._control, self._slot, epoch)

    def _pin(self) -> int:
        """Count this process in; waits while the publisher changes rows in place."""
        until = time.monotonic() + _CHANGE_S
        is_alive = True
        while True:
            epoch = int(torch.ops.oper.publication_pin(self._control, self._slot))
            if epoch >= 0:
                return epoch
            if not is_alive or time.monotonic() > until:
                raise OperError(
                    f"publication {self.name!r} cannot be read", "publisher",
                    f"process {self.publisher_pid}, {'stuck' if is_alive else 'ended'} while it "
                    f"changed rows of epoch {-epoch}", "a whole epoch", "publish all weights again")
            is_alive = self.publisher_alive
            time.sleep(_PAUSE_S)

    def check_pinned(self, buffer: int) -> int:
        """The epoch that this thread reads; raises OperError unless it lies in that buffer."""
        epoch = getattr(self._pins, "epoch", None)
        if epoch is None or epoch & 1 != buffer:
            raise OperError("lookup outside of its epoch", "epoch", epoch,
                            "a call of the served model, or of its parts within served.pinned()",
                            "call the model that oper.attach returned")
        return int(epoch)

    def _check_open(self) -> None:
        if not self._mapped or self._owner != os.getpid():
            raise OperError(f"publication {self.name!r} is not open here", "process", os.getpid(),
                            f"process {self._owner}, before close()",
                            "attach again in a process that was forked")

    @property
    def publisher_alive(self) -> bool:
        """Whether the publisher still runs; without it the last epoch stays readable."""
        try:
            return self._connection.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    # ---- what lies beside the tables -------------------------------------------------------------

    def _header(self, buffer: int) -> tuple[bytes, int, int, int]:
        raw = torch.ops.oper.segment_bytes(self._dense[buffer], HEADER.size)
        magic, version, epoch, num_bytes = HEADER.unpack(raw.numpy().tobytes())
        return magic, version, epoch, num_bytes

    def dense(self, buffer: int) -> dict[str, torch.Tensor]:
        """The dense weights, as views of a buffer; never write to them."""
        return {e.key: dense_view(self._dense[buffer], e) for e in self.layout.dense}

    def verify(self) -> int:
        """Compare the current epoch with its checksums; returns the epoch.

        Raises:
            FileFormatError: a segment differs, or the publisher wrote no checksums.
        """
        with self.pinned() as epoch:
            buffer = epoch & 1
            size = self._header(buffer)[3]
            raw = torch.ops.oper.segment_bytes(self._dense[buffer], HEADER.size + size)
            told = json.loads(raw.numpy()[HEADER.size:].tobytes())
            if not told["crc32"]:
                raise FileFormatError(f"publication {self.name!r} cannot be verified", "checksums",
                                      "none", "those of a whole publication that writes them",
                                      "publish all weights")
            found = self.sums()
            bad = [k for k, crc in found.items() if told["crc32"].get(k) != crc]
        if bad:
            raise FileFormatError(f"publication {self.name!r} is damaged", "parts", bad[:8],
                                  "the checksums that the publisher wrote", "publish again")
        return epoch

    def sums(self) -> dict[str, int]:
        """CRC-32 of every segment of the current epoch, by name."""
        with self.pinned() as epoch:
            return checksums(self.layout, self.addresses[epoch & 1], self._dense[epoch & 1])

    def close(self) -> None:
        """Detach; views of the buffers must not be used afterwards."""
        mapped, self._mapped = self._mapped, []
        if hasattr(self, "_release"):
            self._release.detach()
        _release(mapped, self._connection)


def _release(mapped: list[tuple[int, int]], connection: socket.socket) -> None:
    for address, size in mapped:
        torch.ops.oper.unmap_segment(address, size)
    connection.close()


def _forget_in_child() -> None:
    """A forked child is no reader: its parent's place is given up when the parent ends."""
    for reader in _READERS:
        reader._connection.close()


os.register_at_fork(after_in_child=_forget_in_child)
