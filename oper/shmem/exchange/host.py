"""The exchange between memory domains for tables in host memory.

Within a domain ranks read each other's memory. Data from ranks of other domains is received into
*shadow receive buffers*, which have the headers of the senders' send buffers, see
csrc/host/exchange/exchange.h. The kernels read both in the same way and order, so results are
bitwise those of a single domain. The operators call back into this module to send and receive
bytes.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn, TypeVar

import numpy as np
import torch

from oper.errors import DeadlineError, DesyncError, OperError, PeerLostError
from oper.messages import MessageBits
from oper.rows.directory import TableDirectory, needs_across
from oper.rows.traffic import SENT
from oper.shmem.group.desync import (
    KEYS,
    STATE_ACCESS,
    CollectivePhase,
    Verdict,
    out_of_step,
    raise_verdict,
)
from oper.shmem.group.groups import Group
from oper.shmem.group.status import PEER_FAILURES, Status
from oper.shmem.group.transport import transport_of

_TRANSPORT = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p,
                              ctypes.c_void_p, ctypes.c_void_p)
_SIZE = struct.Struct("<q")
# As in csrc/common/exchange.h: every phase begins with headers of equal size, by which ranks detect
# that they are at different phases. Fields: phase, sequence number, status code, failed rank, two
# fields that only the kernels use, collection, checksum of an update's settings.
_HEAD = struct.Struct("<8I")
_HEAD_BYTES = 1024

_PARTS = ("rows", "momentum1", "momentum2")  # that ranks fetch; messages have their numbers
_Content = TypeVar("_Content")
# Request to one rank: part, piece, slots, and columns of the shard (bytes of quantised rows).
Wanted = tuple[str, int, torch.Tensor, slice]


class Exchange:
    """Exchange of one collection's tables with ranks of other memory domains.

    Args:
        group: all ranks. Creation is collective.
        domain_of: index of each rank's domain, by rank.
        collection: number of the tables in their group's `Register`.
        bits: bits per number in messages, by table; the same on all ranks.

    Attributes:
        domains: ranks of each domain, ascending; domains in the order of their first ranks.
        members: ranks of this rank's domain, ascending.
        bits: bits per number in messages, by table.
        gathers: whether ranks wait for each other in lookups, to read rows of other domains.
    """

    gathers = True
    _operators = "context"  # prefix of the names of the operators

    def __init__(self, group: Group, domain_of: Sequence[int], collection: int,
                 bits: MessageBits) -> None:
        self.collection, self.bits = collection, bits
        self._group = group
        self._domain_of = list(domain_of)
        self.domains = [[r for r, x in enumerate(domain_of) if x == domain]
                        for domain in dict.fromkeys(domain_of)]
        (self.members,) = (x for x in self.domains if group.rank in x)
        self._transport = transport_of(group)
        self._release = self._transport.hold(self)
        self._error: BaseException | None = None
        self._handle = 0
        self._sent_keys = [0] * group.world_size  # bytes, by receiver
        self.callback = _TRANSPORT(self._move)

    # ---- setup -----------------------------------------------------------------------------------

    def attach(self, handle: int, directories: Sequence[TableDirectory]) -> None:
        """Register this exchange with the kernel context `handle` of a plan."""
        self._handle = handle
        needs = needs_across(directories, self._domain_of)
        self.gathers = needs.gathers
        rank = self._group.rank
        targets = [
            [t, reader, int(x.slot_base[rank]), int(x.slot_base[rank] + x.num_rows[rank])]
            for t, d in enumerate(directories) for x in d.tiers if x.num_rows[rank]
            for reader in np.flatnonzero(x.replica_base >= 0).tolist()
            if reader not in self.members]
        address = ctypes.cast(self.callback, ctypes.c_void_p).value
        torch.ops.oper.context_set_exchange(
            handle, self.members,
            torch.tensor(sorted(targets), dtype=torch.int64).reshape(-1, 4),  # slots ascend
            needs.gathers, needs.pulls, needs.refreshes, needs.shares,
            self._bits_of(directories), self.collection, address)

    def _bits_of(self, directories: Sequence[TableDirectory]) -> list[int]:
        """Bits of answers and of gradients of every directory's table, [2 T]."""
        of = [self.bits.of(d.table.name) for d in directories]
        return [bits for x in of for bits in (x.answers, x.gradients)]

    def close(self) -> None:
        """Release the transport, whose connections close when no collection uses them."""
        self._release()

    # ---- bytes -----------------------------------------------------------------------------------

    def _move(self, what: int, send: int, send_bytes: int, recv: int, recv_bytes: int) -> int:
        """Callback of the operators: exchange bytes; an error is stored and raised by `check`."""
        try:
            self._transport.at = CollectivePhase(self.collection, what)
            there, back = (np.ctypeslib.as_array((ctypes.c_int64 * self._group.world_size)
                                                 .from_address(a)).tolist()
                           for a in (send_bytes, recv_bytes))
            self._transport.exchange(_bytes_at(send, sum(there)), there,
                                     _bytes_at(recv, sum(back)), back)
        except BaseException as error:
            self._error = error
            return 1
        return 0

    def check(self, code: int, detail: int) -> tuple[int, int]:
        """Raise the error of a status code that an operator returned with `detail`, if it means
        that a peer or the transport failed; return other codes and their detail unchanged."""
        at = self._transport.at
        if self._error is not None:
            error, self._error = self._error, None
            self._abort_after(error)
            raise error
        if code == Status.TRANSPORT_FAILED:  # in an earlier exchange, which has raised the error
            code, detail = Status.PEER_ABORTED, self._group.rank
        if code == Status.OTHER_PHASE:
            self._raise_elsewhere(detail)
        if code == Status.IMPOSSIBLE_MESSAGE:
            self._transport.abort(Verdict(Status.PEER_ABORTED, detail, at))
            raise OperError(
                "a rank of another memory domain has sent invalid data",
                "rank", detail, "counts and slots that fit this rank's plan",
                "start all ranks with the same version, model and plan")
        if code == Status.NO_MEMORY_FOR_MESSAGE:
            self._transport.abort(Verdict(Status.PEER_ABORTED, detail, at))
            raise OperError("there is not enough memory for the data of a rank of another memory "
                            "domain", "rank", detail,
                            "enough memory for the rows and gradients of its batch",
                            "use smaller batches; if they are small, check that rank's log")
        if code == Status.OTHER_SETTINGS:  # the caller raises the error, as all ranks do
            self._transport.abort(Verdict(Status.PEER_ABORTED, detail, at))
        if code in PEER_FAILURES:
            verdict = self._transport.attribute(Verdict(code, detail, at))
            self._transport.abort(verdict)
            raise_verdict(verdict, self._group)
        return code, detail

    def _raise_elsewhere(self, rank: int) -> NoReturn:
        """Raise the error for a header from `rank` that has another phase or collection."""
        phases, sequence = self._last_phases()
        if len(set(phases)) > 1:
            raise_verdict(out_of_step(Status.OTHER_PHASE, phases, rank), self._group)
        if len(set(sequence)) > 1:
            behind = min(range(len(sequence)), key=lambda r: (sequence[r], r))
            raise_verdict(Verdict(Status.OTHER_PHASE, behind, phases[0]), self._group)
        raise OperError("the exchange header of a rank contradicts this rank's", "rank", rank,
                        "the same call on the same tables, with the same message_bits",
                        "shard with the same message_bits and make the same lookups and updates on "
                        "all ranks; with several memory domains lookups without gradients are "
                        "collective, too")

    def _last_phases(self) -> tuple[list[CollectivePhase], list[int]]:
        """Return the phase and the sequence number of each rank's last header."""
        flat = self._query("last_phases")
        return [CollectivePhase(flat[k + 2], flat[k + 1])
                for k in range(0, len(flat), 3)], flat[::3]

    def sent_bytes(self, reset: bool) -> dict[str, list[int]]:
        sent, size = [*self._query("sent_bytes", reset), *self._sent_keys], self._group.world_size
        if reset:
            self._sent_keys = [0] * size
        return {kind: sent[k * size:(k + 1) * size] for k, kind in enumerate(SENT)}

    def _query(self, what: str, *arguments: bool) -> list[int]:
        return getattr(torch.ops.oper, f"{self._operators}_{what}")(self._handle, *arguments)

    def barrier(self, phase: int = STATE_ACCESS) -> None:
        """Wait for all ranks of all domains."""
        self._exchange_heads(phase, [b""] * self._group.world_size)

    def _exchange_heads(self, phase: int, bodies: list[bytes]) -> list[bytes]:
        """Send ``bodies[r]`` to every rank r after a header; returns the bodies received from each
        rank, padded with zeros. Collective.

        Raises:
            DesyncError: a rank is in another phase.
            PeerLostError: a rank has reported an error.
        """
        mine = CollectivePhase(self.collection, phase)
        head = _HEAD.pack(phase, 0, 0, 0, 0, 0, self.collection, 0)
        sent = b"".join((head + body).ljust(_HEAD_BYTES, b"\0") for body in bodies)
        received = torch.empty(len(sent), dtype=torch.uint8)
        each = [_HEAD_BYTES] * len(bodies)
        self._guarded(torch.frombuffer(bytearray(sent), dtype=torch.uint8), each, received, each,
                      phase)
        data = received.numpy().tobytes()
        heads = [_HEAD.unpack_from(data, at) for at in range(0, len(data), _HEAD_BYTES)]
        for rank, (_, _, code, *_) in enumerate(heads):
            if code:
                verdict = Verdict(Status.PEER_ABORTED, rank, mine)
                self._transport.abort(verdict)
                raise_verdict(verdict, self._group)
        phases = [CollectivePhase(h[6], h[0]) for h in heads]
        if any(at != mine for at in phases):
            raise_verdict(out_of_step(Status.OTHER_PHASE, phases, self._group.rank), self._group)
        return [data[at + _HEAD.size:at + _HEAD_BYTES]
                for at in range(0, len(data), _HEAD_BYTES)]

    def _guarded(self, send: torch.Tensor, send_bytes: list[int], recv: torch.Tensor,
                 recv_bytes: list[int], phase: int | None = None) -> None:
        """Perform `Transport.exchange` and notify the peers of errors, which name `phase`, by
        default the phase of the previous exchange."""
        if phase is not None:
            self._transport.at = CollectivePhase(self.collection, phase)
        try:
            self._transport.exchange(send, send_bytes, recv, recv_bytes)
        except Exception as error:
            self._abort_after(error)
            raise

    def _abort_after(self, error: BaseException) -> None:
        """Notify the peers of an error of this rank, unless the transport has done so."""
        if not isinstance(error, (PeerLostError, DeadlineError, DesyncError)):
            self._transport.abort(
                Verdict(Status.PEER_ABORTED, self._group.rank, self._transport.at))

    def send(self, messages: Mapping[int, torch.Tensor],
             read: Callable[[torch.Tensor], _Content | None], phase: int) -> list[_Content]:
        """Send a message to some ranks. Collective; a rank may send none.

        Args:
            messages: by rank, int64 [n], n > 0.
            read: returns the content of a message, or None if it is invalid.
            phase: phase of the exchange, for errors.

        Returns:
            What `read` returns for the messages from other ranks, in the order of the ranks.

        Raises:
            OperError: a message is invalid.
            DesyncError, PeerLostError, DeadlineError: a rank is in another phase, lost or late.
        """
        found = []
        for rank, words in self._swap(messages, phase).items():
            content = read(words)
            if content is None:
                self.check(Status.IMPOSSIBLE_MESSAGE, rank)
            else:
                found.append(content)
        return found

    def _swap(self, messages: Mapping[int, torch.Tensor], phase: int) -> dict[int, torch.Tensor]:
        """Send messages as `send` does; return those received, int64 [n], by rank, ascending."""
        there = [8 * messages[r].numel() if r in messages else 0
                 for r in range(self._group.world_size)]
        back = [_SIZE.unpack_from(body)[0]
                for body in self._exchange_heads(phase, [_SIZE.pack(n) for n in there])]
        for rank, n in enumerate(back):
            if n < 0 or n % 8:
                self.check(Status.IMPOSSIBLE_MESSAGE, rank)
        if phase == KEYS:
            self._sent_keys = [before + (_HEAD_BYTES + n if r not in self.members else 0)
                               for r, (before, n) in enumerate(zip(self._sent_keys, there,
                                                                   strict=True))]
        received = torch.empty(sum(back) // 8, dtype=torch.int64)
        self._guarded(torch.cat([torch.empty(0, dtype=torch.int64),
                                 *(messages[r] for r in sorted(messages))]).view(torch.uint8),
                      there, received.view(torch.uint8), back)
        parts = received.split([n // 8 for n in back])
        return {rank: words for rank, words in enumerate(parts) if words.numel()}

    def fetch(self, wanted: Mapping[int, Wanted], serve: Callable[[str, int], torch.Tensor],
              phase: int = STATE_ACCESS) -> dict[int, torch.Tensor]:
        """Fetch rows from other ranks' shards. Collective; a rank may request no rows.

        Args:
            wanted: by rank: part, piece, slots (int64 [n]) and columns.
            serve: ``serve(part, piece)`` returns this rank's shard, ``[slots, columns]``.
            phase: phase of the exchange, for errors.

        Returns:
            By rank, the requested rows, ``[n, columns]`` in the stored dtype.

        Raises:
            OperError: a rank requests rows that this rank does not have.
            DesyncError, PeerLostError, DeadlineError: a rank is in another phase, lost or late.
        """
        asked = self._swap({r: torch.cat([torch.tensor(
            [_PARTS.index(part), piece, columns.start, columns.stop]), slots])
            for r, (part, piece, slots, columns) in wanted.items()}, phase)
        nothing, size = torch.empty(0, dtype=torch.uint8), self._group.world_size
        answers = [_served(serve, asked[r]) if r in asked else nothing for r in range(size)]
        sizes = [0] * size
        shapes = {r: (slots.numel(), columns.stop - columns.start, serve(part, piece).dtype)
                  for r, (part, piece, slots, columns) in sorted(wanted.items())}
        for r, (n, width, dtype) in shapes.items():
            sizes[r] = n * width * dtype.itemsize
        rows = torch.empty(sum(sizes), dtype=torch.uint8)
        self._guarded(torch.cat(answers), [a.numel() for a in answers], rows, sizes)
        parts = rows.split(sizes)
        return {r: parts[r].clone().view(dtype).reshape(n, width)
                for r, (n, width, dtype) in shapes.items()}


def _served(serve: Callable[[str, int], torch.Tensor], request: torch.Tensor) -> torch.Tensor:
    """Return the rows that another rank requests, as bytes. `request`: index in `_PARTS`, piece,
    first and last column + 1, slots; int64 [4 + n]."""
    try:
        part, piece, first, last = request[:4].tolist()
        slots = request[4:]
        rows = serve(_PARTS[part], piece)
        if min(part, piece) < 0 or not 0 <= first < last <= rows.shape[1]:
            raise IndexError(f"part {part}, column shard {piece}, columns {first}..{last}")
        if not 0 <= int(slots.min()) <= int(slots.max()) < rows.shape[0]:
            raise IndexError(f"slots {int(slots.min())}..{int(slots.max())} of a column shard "
                             f"with {rows.shape[0]} rows here")
    except (IndexError, RuntimeError, ValueError) as error:
        raise OperError(
            "a rank of another memory domain requests rows that do not exist", "request", error,
            "a table part, column shard and slots that this rank's plan has",
            "start all ranks with the same version, model and plan") from error
    wanted = rows[slots.to(rows.device)][:, first:last].reshape(-1).cpu()
    return wanted.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _bytes_at(address: int, num_bytes: int) -> torch.Tensor:
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)
