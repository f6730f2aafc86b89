"""Python callbacks within steps on a device: barriers, exchanges between domains, counting.

An operator performs an entire forward or backward pass (csrc/bindings/device/steps.cpp). It calls
back into Python only if ranks are threads of this process, there are several memory domains, or
reads are counted.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch

from oper.errors import InvalidInputError, OperError
from oper.shmem.batch import raise_status
from oper.shmem.counters.device import DeviceCounters
from oper.shmem.exchange.device import DeviceExchange, DeviceRows
from oper.shmem.exchange.device_push import PushMessages
from oper.shmem.exchange.device_squares import PieceRows, exchange_squares, list_rows
from oper.shmem.group.status import Status
from oper.shmem.memory.device_batch import StepArrays
from oper.shmem.settings import SEND_BUFFER_ENV
from oper.tables import TableSpec

_HOOK = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
# Status codes in addition to `Status`, numbered as in csrc/bindings/device/tables.h.
_NOT_IN_GRAPHS, _NEW_ARGUMENTS = 22, 23
_MOST_IDS = 2**31 - 64
# Why a step would wait for the device, by detail of _NOT_IN_GRAPHS: the parts of the message.
_WAITS = (
    ("tables", "several memory domains, or transfers are counted",
     "one memory domain without counting, since both wait for the device",
     "run such steps outside of graphs"),
    ("output rows of an unpooled lookup", "known to the device only",
     "as many as ids: every key of the batch has exactly one feature",
     "run such lookups outside of graphs, or leave keys without features out of the batch"),
    ("keys of the batch", "new: no earlier lookup had them in this order",
     "keys in the order of an earlier lookup, which copies that order to the device",
     "look up a batch with these keys before the capture"))
# The keys of a batch may take 1 / KEYS_SHARE of the send buffer's size. Owners, who receive the
# keys of all W ranks, briefly need W times as much.
KEYS_SHARE = 64


class Point(enum.IntEnum):
    """Points of a pass at which operators call back; csrc/bindings/device/tables.h numbers them."""

    BARRIER, ROWS, PULLED_ROWS, WEIGHT_ROWS, REQUESTS, PARTIALS, GRADIENTS, COLLECTED, SQUARES, \
        UPDATED = range(10)


class DeviceSteps:
    """The callbacks of one rank's tables.

    Args:
        tables: the tables.
        exchange: the tables' exchange between memory domains; None with a single domain.

    Attributes:
        counters: counters of transfers; None = transfers are not counted.
    """

    def __init__(self, tables: DeviceRows, exchange: DeviceExchange | None) -> None:
        self._tables = tables
        self._exchange = exchange
        self.counters: DeviceCounters | None = None
        self._messages: PushMessages | None = None
        self._squares: list[PieceRows] = []  # the rows of the current step
        self._error: BaseException | None = None
        self._function = _HOOK(self._call)

    def attach(self, handle: int) -> None:
        """Register the callbacks with the operators of this handle."""
        self._handle = handle
        tables, x = self._tables, self._exchange
        in_hook = tables.group.is_local and tables.group.world_size > 1
        calls = in_hook or x is not None or self.counters is not None
        address = ctypes.cast(self._function, ctypes.c_void_p).value if calls else 0
        gathers = x is not None and x.needs.gathers
        torch.ops.oper.device_context_set_points(
            handle, address, in_hook, x is not None,
            x is not None and (tables.optimizers is not None or gathers), gathers,
            x is not None and x.needs.shares, self.counters is not None, tables.num_squares)
        self._set_push(None)

    def _set_push(self, messages: PushMessages | None) -> None:
        arenas = self._tables.arenas
        torch.ops.oper.device_context_set_push(self._handle, *(
            torch.from_numpy(a).to(self._tables.device) for a in (
                (messages or arenas).requests, (messages or arenas).partials)),
            arenas.partial_bytes)

    def _call(self, point: int, value: int) -> int:
        try:
            self._at(Point(point), value)
        except BaseException as error:
            self._error = error
            return 1
        return 0

    def _at(self, point: Point, value: int) -> None:
        if point == Point.BARRIER:
            self.barrier()
        elif point in (Point.ROWS, Point.PULLED_ROWS, Point.WEIGHT_ROWS):
            self._rows(point, value)
        elif point in (Point.REQUESTS, Point.PARTIALS):
            self._push(point)
        else:
            self._backward(point, value)

    def _rows(self, point: Point, first_byte: int) -> None:
        without_pushed = point == Point.PULLED_ROWS
        if self.counters is not None:
            kind = "weight_rows" if point == Point.WEIGHT_ROWS else "rows"
            self.counters.rows(kind, StepArrays(self._handle), without_pushed)
        if self._exchange is not None and self._exchange.needs.gathers:
            self._exchange.gather(StepArrays(self._handle), without_pushed, first_byte)

    def _push(self, point: Point) -> None:
        if point == Point.REQUESTS:
            if self._exchange is not None:
                self._messages = PushMessages(self._exchange, self._tables)
                self._messages.exchange_requests()
                self._set_push(self._messages)
            return
        if self.counters is not None:
            self.counters.requests((self._messages or self._tables.arenas).requests)
        if self._messages is not None:
            self._messages.exchange_partials()
            self._set_push(self._messages)

    def _backward(self, point: Point, value: int) -> None:
        x, counters = self._exchange, self.counters
        if point == Point.GRADIENTS and x is not None:
            x.send_gradients()
        elif point == Point.COLLECTED and counters is not None:
            counters.gradients(StepArrays(self._handle))
        elif point == Point.SQUARES and x is not None:
            if value == 0:
                self._squares = list_rows(x, self._tables, StepArrays(self._handle))
            exchange_squares(x, self._tables, self._squares, value)
        elif point == Point.UPDATED:
            if x is not None:
                x.send_refreshes()
            if counters is not None:
                counters.refreshes()

    def barrier(self) -> None:
        """Make this rank's stream wait for the earlier kernels of all virtual ranks; the host does
        not wait for the device.

        Virtual ranks share a device, on which kernels that spin for each other might never run at
        the same time, so CUDA events order their streams.
        """
        device, streams, event = self._tables.device, self._tables.streams, None
        if streams is not None:
            event = streams.Event()
            event.record(streams.current_stream(device))
        for other in self._tables.group.all_gather(event):
            if streams is not None:
                streams.current_stream(device).wait_event(other)

    def raise_kept(self) -> None:
        """Raise the exception that a callback of the last pass has raised, if any."""
        error, self._error = self._error, None
        if error is not None:
            raise error


def raise_stopped(code: int, detail: int, optimizers: Sequence[str]) -> None:
    """Raise the error for a status code by which an operator stopped; returns for other codes."""
    if code == _NOT_IN_GRAPHS:
        raise OperError("cannot capture a lookup in a graph", *_WAITS[detail])
    if code == _NEW_ARGUMENTS:
        raise OperError(
            "cannot capture an update of the tables in a graph", "optimizers", optimizers,
            "constant arguments: fp32 rows, no Adam or LAMB, a learning rate that an earlier step "
            "has used", "run such steps outside of graphs")
    if code == Status.TOO_MANY_IDS:
        raise OperError("cannot look up", "number of ids", detail,
                        f"< {_MOST_IDS}, and < 2^32 when each id is counted once per column piece "
                        "of its table",
                        "use smaller batches")
    if code == Status.IDS_WITHOUT_BAGS:
        raise InvalidInputError("the lengths of a batch do not match its ids", "number of ids",
                                detail, "0, since the batch has no lengths",
                                "pass one length per key and sample, or no ids")


def raise_found(found: tuple[int, int, int], features: Sequence[tuple[str, str]],
                specs: Mapping[str, TableSpec], send_buffer_bytes: int) -> NoReturn:
    """Raise an error that kernels have found, possibly in an earlier batch than the last one.

    `found`: status code, rank and detail, see ErrorWord in csrc/device/device.h.
    """
    code, rank, detail = found
    if code == Status.ID_OUT_OF_RANGE:
        feature, table = features[rank]
        raise InvalidInputError(f"lookup of feature {feature!r} in table {table!r}", "id", detail,
                                f"0 <= id < {specs[table].num_rows}",
                                "map ids to rows first, or enlarge the table; no rank has updated "
                                "rows with that batch")
    if code == Status.BAD_LENGTHS:
        raise InvalidInputError("the lengths of a batch do not match its ids",
                                "a negative length, or the sum of all lengths", detail,
                                "lengths >= 0 whose sum is the number of ids",
                                "pass the lengths of the bags that contain these ids, not offsets; "
                                "no rank has updated rows with that batch")
    if code == Status.TOO_MANY_KEYS:
        raise OperError("the distinct keys of a batch do not fit their part of the send buffer",
                        "keys", detail,
                        f"12 bytes for each, in all at most 1/{KEYS_SHARE} of {SEND_BUFFER_ENV}",
                        f"raise {SEND_BUFFER_ENV} or use a smaller batch; no rank has updated rows "
                        "with that batch")
    if code == Status.REFUSED_BEFORE:
        raise InvalidInputError("cannot train on a batch", "batch", "refused in its lookup",
                                "a batch whose lookup found no error",
                                "see the error that was raised for it or for an earlier batch; no "
                                "rank has updated rows with this one")
    if code == Status.OTHER_PHASE:
        raise OperError("a row number from another memory domain is invalid, or a row of another "
                        "domain was not fetched", "this rank, number of the row or id",
                        (rank, detail), "the same plan and the same calls on all ranks",
                        "make the same calls on all ranks; with several memory domains lookups "
                        "without gradients are collective, too")
    names_rank = code in (Status.PEER_LATE, Status.OTHER_SETTINGS, Status.PEER_REFUSED_BATCH)
    raise_status(code, rank if names_rank else detail, send_buffer_bytes)
