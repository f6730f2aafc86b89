"""Readers of published tables, which any number of processes of a host map.

A publisher (`oper.shmem.publication.publisher`) writes all tables and dense weights of a model into
one of two buffers and then increments the epoch; epoch e is in buffer e % 2. A reader pins the
current epoch before it reads and unpins it afterwards (csrc/bindings/publication.cpp), so all its
reads in between are of one epoch. The publisher overwrites a buffer only when no reader has pinned
it. A reader waits only while the publisher changes rows in place.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from oper.errors import FileFormatError, InvalidInputError, OperError, require
from oper.rows.traffic import Traffic
from oper.shmem.batch import (
    Lookup,
    raise_status,
    recorder,
    refuse_recording,
    refuse_tangent,
    refuse_weight_gradient,
)
from oper.shmem.by_feature import BoundsCheck
from oper.shmem.counters.measured import kernel_traffic, spans_of
from oper.shmem.counters.phases import Span
from oper.shmem.group.domains import peer_credentials
from oper.shmem.library import load
from oper.shmem.memory.numa import local_domain
from oper.shmem.memory.segments import map_segment, no_segment
from oper.shmem.optim.arguments import feature_rows
from oper.shmem.placement.layout import context_arguments
from oper.shmem.publication.buffers import HEADER, BufferRows, Layout, checksums, dense_view
from oper.shmem.publication.handshake import MAGIC, check_name, connect, receive_handshake
from oper.support.processes import in_child, when_dropped

VERSION = 1
SEGMENT_NAME = "oper-tables"
_CHANGE_S, _PAUSE_S = 30.0, 5e-5  # longest wait for a change in place, and the polling interval


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
        self._dims = {self.specs[table].dim for _, table in self.features}
        outputs, _ = feature_rows(self.features, self.specs, self.directories, self.pieces)
        self.handle = int(torch.ops.oper.context_create(*context_arguments(
            self.directories, self._layout, self._addresses, self.group.rank, outputs)))
        when_dropped(self, torch.ops.oper.context_close, self.handle)

    @property
    def epoch(self) -> int:
        """The epoch that this thread has pinned; raises OperError outside of `Reader.pinned`."""
        return self._reader.check_pinned(self._buffer)

    def lookup(self, batch: Lookup) -> torch.Tensor:
        """Look up a batch.

        Returns:
            Pooled: float32 [B, sum of the features' dims]; unpooled: float32 [N, D].

        Raises:
            InvalidInputError: an id is out of range (see `BoundsCheck`), or lengths do not add up
                to the number of ids.
            OperError: the thread has not pinned an epoch of this buffer (`Reader.pinned`).
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
        """Return DLRM's dot interaction of pooled embeddings and a dense row; embeddings are not
        stored.

        Args:
            batch: a pooled batch; all tables must have the same dim D.
            dense: float32 [B, D], one row per sample.

        Returns:
            float32 [B, D + F * (F + 1) / 2] for F features: the dense row, then the dot products of
            the pairs (i, j), i < j, in the order (0, 1), (0, 2), ..., (1, 2), ..., of the F + 1
            rows dense, feature 0, feature 1, ... The result of a sample does not depend on other
            samples.

        Raises:
            InvalidInputError, OperError: as `lookup`, or `dense` has a wrong shape or dtype.

        Source: Naumov et al., "Deep Learning Recommendation Model for Personalization and
        Recommendation Systems" (2019), section 2.1.
        """
        return self._interaction(batch, dense, None, None)[1]

    def lookup_shared_interaction(
            self, batch: Lookup, dense: torch.Tensor, first: torch.Tensor,
            shared_keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Perform `lookup_interaction` for samples, several of which share the features of a user.

        The products are bitwise those of `lookup_interaction`; products between shared features are
        computed and returned once per user.

        Args:
            batch, dense: as for `lookup_interaction`.
            first: int64 [B], index of the first sample of each sample's user. Samples of a user
                must be consecutive; the shared features of the first sample are used for all.
            shared_keys: bool [num_keys], whether each key of the batch is shared; bags of shared
                keys in a user's other samples are not read and may be empty.

        Returns:
            For U users, S shared features and C own rows of a sample (dense, then its other
            features): the products of pairs of shared features, float32 [U, S * (S - 1) / 2];
            float32 [B, D + C * S + C * (C - 1) / 2] with the dense row, the products of own and
            shared rows, and the products of pairs of own rows; and each sample's user, int64 [B].
            `shared_pairs` maps these columns to those of `lookup_interaction`.

        Raises:
            InvalidInputError, OperError: as `lookup_interaction`.
        """
        return self._interaction(batch, dense, first, shared_keys)

    def _interaction(self, batch: Lookup, dense: torch.Tensor, first: torch.Tensor | None,
                     shared_keys: torch.Tensor | None
                     ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        batch = self._checked(batch)
        if batch.shared is not None:
            raise InvalidInputError("cannot compute the interaction", "shape of inverse_indices",
                                    tuple(batch.shared.samples.shape), "None, a bag per sample",
                                    "use `lookup_shared_interaction` for shared bags")
        require("cannot compute the interaction", "look up the tables instead",
                ("dims of the tables", sorted(self._dims), len(self._dims) == 1, "one dim"))
        want = (batch.batch_size, *self._dims)
        if not batch.pooled or tuple(dense.shape) != want or dense.dtype != torch.float32:
            raise InvalidInputError("cannot compute the interaction", "dense, pooled",
                                    (dense.dtype, tuple(dense.shape), batch.pooled),
                                    f"float32 {want}, True", "pass one dense row per sample of a "
                                    "pooled batch, as wide as the tables")
        users, samples, user_of, offsets, code, detail = torch.ops.oper.lookup_interaction(
            self.handle, batch.ids, batch.lengths, batch.weights, batch.key_of,
            dense.contiguous(), first, shared_keys)
        self._check_status(code, detail, batch, offsets)
        return users, samples, user_of

    def _check_status(self, code: int, detail: int, batch: Lookup, offsets: torch.Tensor) -> None:
        if code:
            raise_status(code, detail, 0, batch, offsets, self)

    def _checked(self, batch: Lookup) -> Lookup:
        """Check the pinned epoch; returns the batch after `BoundsCheck.repair`."""
        self._reader.check_pinned(self._buffer)
        if recorder() is not None:
            refuse_recording()
        refuse_weight_gradient(batch)
        if batch.weights is not None:
            refuse_tangent(batch.weights)
        return self.bounds.repair(batch, self.device)

    def resolve(self, batch: Lookup) -> Lookup:
        """Return the batch unchanged, since its epoch is not known before its lookup."""
        return batch

    def flush_replicas(self) -> None:
        """Raise OperError, since only the publisher may write rows."""
        raise OperError("cannot write published tables", "tables", list(self.specs)[:8],
                        "tables that are not read-only", "publish new weights with the publisher")

    def traffic(self, reset: bool = False) -> Traffic:
        """Return the counts of rows read since the start or the last reset; peers are domains."""
        return kernel_traffic(self, self.handle, reset)

    def trace_phases(self, most: int) -> None:
        """Start recording begin and end of up to `most` lookups, for `take_spans`; 0 = stop."""
        torch.ops.oper.context_trace(self.handle, most)

    def take_spans(self) -> tuple[list[Span], int]:
        """Return the lookups recorded since the last call, and the number of those lost because the
        buffer was full."""
        return spans_of(self.handle)


def shared_pairs(dim: int, is_shared: Sequence[bool]) -> tuple[list[int], list[int]]:
    """Map the results of `lookup_shared_interaction` to columns of `lookup_interaction`.

    Args:
        dim: number of columns D of the rows.
        is_shared: whether each feature is shared.

    Returns:
        The column of `lookup_interaction` for each column of the result per user, and for each
        column of the result per sample.
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


class Reader:
    """A process's connection to a publication, with its buffers mapped.

    Args:
        name: name of the publication.
        timeout_s: seconds to wait for a publisher of that name.
        domain: memory domain (NUMA node of the plan) from whose replicas to read; by default the
            domain of this process's processors.

    Attributes:
        name, domain: the arguments.
        layout: layout of the published tables.
        addresses: int [2][D], addresses of the domains' segments of both buffers, read-only.
        publisher_pid: process id of the publisher.

    Raises:
        OperError: this user has no publisher of that name, or it cannot accept another reader.
        FileFormatError: the publisher runs another version of this package.
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
            header = json.loads(text)
            if "error" in header:
                raise OperError(f"cannot attach to publication {name!r}", "reason", header["error"],
                                "fewer attached readers", "stop a reader")
            self.layout = Layout.from_text(header["layout"])
            self._slot = int(header["slot"])
            self.domain = local_domain(header["nodes"]) if domain is None else domain
            self._map(fds)
            self._connection.setblocking(False)  # from now on only its closing is significant
        except (ValueError, KeyError, TypeError) as error:
            self.close()
            raise FileFormatError(f"cannot attach to publication {name!r}", "handshake",
                                  f"{type(error).__name__} {error}",
                                  f"a publisher with protocol version {VERSION}",
                                  "run the same version of this package in all processes") from None
        except BaseException:
            self.close()
            raise
        finally:
            for fd in fds:
                os.close(fd)
        in_child(self._connection, socket.socket.close)  # so that it ends with the parent
        # Not at exit, as other threads may still read.
        self._release = when_dropped(self, _release, self._mapped, self._connection)

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
            raise ValueError(f"header with magic number {magic!r}, version {version} and epoch "
                             f"{written}, expected {MAGIC!r}, {VERSION} and {epoch}")

    # ---- epochs ----------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The most recently published epoch."""
        self._check_open()
        return abs(int(torch.ops.oper.publication_epoch(self._control)))

    @contextlib.contextmanager
    def pinned(self) -> Iterator[int]:
        """Pin the current epoch for this thread inside the block; yields the epoch. Nested blocks
        use the epoch of the outer one."""
        self._check_open()
        epoch = getattr(self._pins, "epoch", None)
        if epoch is not None:
            yield epoch
            return
        epoch = self._pin()
        self._pins.epoch = epoch
        try:
            yield epoch
        finally:
            self._pins.epoch = None
            if self._mapped and self._owner == os.getpid():  # a child forked inside has no pin
                torch.ops.oper.publication_unpin(self._control, self._slot, epoch)

    def _pin(self) -> int:
        """Pin the current epoch; waits while the publisher changes rows in place."""
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
                    f"changed rows of epoch {-epoch}", "a complete change of rows",
                    "publish all weights again")
            is_alive = self.publisher_alive
            time.sleep(_PAUSE_S)

    def check_pinned(self, buffer: int) -> int:
        """Return this thread's pinned epoch; raises OperError unless it is in that buffer."""
        epoch = getattr(self._pins, "epoch", None)
        if epoch is None or epoch & 1 != buffer:
            raise OperError("lookup outside of its epoch", "pinned epoch", epoch,
                            f"an epoch in buffer {buffer}, pinned by a call of the served model or "
                            "by served.pinned()", "call the model that oper.attach returned")
        return int(epoch)

    def _check_open(self) -> None:
        if not self._mapped or self._owner != os.getpid():
            raise OperError(f"publication {self.name!r} is not open here", "process", os.getpid(),
                            f"process {self._owner}, before close()",
                            "attach again, also in a forked process")

    @property
    def publisher_alive(self) -> bool:
        """Whether the publisher process is running; the last epoch stays readable after its exit.
        """
        try:
            return self._connection.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    # ---- dense weights and checksums -------------------------------------------------------------

    def _header(self, buffer: int) -> tuple[bytes, int, int, int]:
        raw = torch.ops.oper.segment_bytes(self._dense[buffer], HEADER.size)
        return HEADER.unpack(raw.numpy().tobytes())

    def dense(self, buffer: int) -> dict[str, torch.Tensor]:
        """Return the dense weights by key, as views of a buffer that must not be written to."""
        return {e.key: dense_view(self._dense[buffer], e) for e in self.layout.dense}

    def verify(self) -> int:
        """Compare the current epoch with its checksums; returns the epoch.

        Raises:
            FileFormatError: a segment differs, or the epoch has no checksums, because the publisher
                does not write them or has changed rows in place.
        """
        with self.pinned() as epoch:
            buffer = epoch & 1
            size = self._header(buffer)[3]
            raw = torch.ops.oper.segment_bytes(self._dense[buffer], HEADER.size + size)
            header = json.loads(raw.numpy()[HEADER.size:].tobytes())
            if not header["crc32"]:
                raise FileFormatError(f"publication {self.name!r} cannot be verified", "checksums",
                                      "none", "a publication of all weights, with checksum=True",
                                      "publish all weights")
            found = self.sums()
            bad = [k for k, crc in found.items() if header["crc32"].get(k) != crc]
        if bad:
            raise FileFormatError(f"publication {self.name!r} is damaged", "parts", bad[:8],
                                  "the checksums that the publisher wrote", "publish again")
        return epoch

    def sums(self) -> dict[str, int]:
        """Compute the CRC-32 of every segment of the current epoch, by name."""
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
