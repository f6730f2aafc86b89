"""Messages between memory domains: those of a peer in a training step, recorded and replayed.

Virtual rank 0 trains one step with rank 1, which is in another domain, and everything that rank 1
sends is recorded. Then the step is repeated with other bytes in place of these messages, each time
with a new context of the kernels, since an exchange that has failed stays failed.
"""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from oper.errors import PeerLostError
from oper.plan import Piece, Plan, TablePlan, Tier
from oper.shmem.batch import Lookup
from oper.shmem.group.desync import CollectivePhase, Verdict
from oper.shmem.group.groups import ThreadGroup
from oper.shmem.optim.optimizers import RowWiseAdagrad
from oper.shmem.tables import ShardedTables
from oper.tables import TableSpec
from tests.runtime_support import run_ranks, short_bags

# Pulled, pushed and replicated rows; columns in two pieces, whose owners exchange sums of squares.
_SPECS = tuple(TableSpec(n, r, d, (f"f_{n}",), "sum", optimizer="rowwise_adagrad")
               for n, r, d in (("pulled", 40, 4), ("pushed", 30, 8), ("split", 20, 8)))


def _plan() -> Plan:
    def tiers(rows: int, first: int, mode: str) -> tuple[Tier, ...]:
        return (Tier(0, 5, "replicated", (0, 1)),
                Tier(5, rows - 4, "striped", (first, 1 - first), (), mode),
                Tier(rows - 4, rows, "owned", (first,)))

    pieces = [(Piece(0, 4, tiers(40, 1, "pull")),), (Piece(0, 8, tiers(30, 0, "push")),),
              (Piece(0, 4, tiers(20, 0, "pull")), Piece(4, 8, tiers(20, 1, "push")))]
    return Plan(2, tuple(TablePlan(t, p) for t, p in zip(_SPECS, pieces, strict=True)))


def _batch(rank: int) -> Lookup:
    batch = short_bags(_SPECS, rank, 4)
    weights = torch.rand(batch.ids.numel(), generator=torch.Generator().manual_seed(rank))
    return replace(batch, weights=weights)


class _Recorder:
    """Passes messages to `inner` and records those of rank 1."""

    at = CollectivePhase(0, 0)

    def __init__(self, inner: Any) -> None:
        self._inner, self.kept = inner, b""

    def exchange(self, send: torch.Tensor, there: list[int], recv: torch.Tensor, back: list[int]
                 ) -> None:
        self._inner.exchange(send, there, recv, back)
        self.kept += recv[back[0]:].numpy().tobytes()


class _Player:
    """Returns `data` as the messages of rank 1. At the end of the data, rank 1 appears to be lost.
    """

    at = CollectivePhase(0, 0)

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def exchange(self, send: torch.Tensor, there: list[int], recv: torch.Tensor, back: list[int]
                 ) -> None:
        recv[:back[0]] = send[:there[0]]
        part = self._data[self._at:self._at + back[1]]
        if len(part) < back[1]:
            raise PeerLostError("rank 1 has ended")
        self._at += back[1]
        if part:
            recv[back[0]:] = torch.frombuffer(bytearray(part), dtype=torch.uint8)

    def attribute(self, verdict: Verdict) -> Verdict:
        return verdict

    def abort(self, verdict: Verdict) -> None:
        pass


class Peer:
    """The tables of rank 0, and what rank 1 has sent in a step.

    Attributes:
        recorded: all messages, concatenated.
    """

    def __init__(self) -> None:
        self.recorded = b""
        torch.set_num_threads(1)
        run_ranks(2, self._record, domains=(0, 1))

    def _record(self, group: ThreadGroup) -> None:
        tables = ShardedTables(_plan(), [(f"f_{s.name}", s.name) for s in _SPECS], group,
                               RowWiseAdagrad(lr=0.1))
        for s in _SPECS:
            tables.write(s.name, torch.rand(s.num_rows, s.dim,
                                            generator=torch.Generator().manual_seed(1)))
        tables.flush_replicas()
        exchange = tables._exchange
        assert exchange is not None
        tables.handle = tables._create_context()  # its exchanges count from 0
        recorder = _Recorder(exchange._transport)
        exchange._transport = recorder  # type: ignore[assignment]
        tables.lookup(_batch(group.rank)).square().sum().backward()
        if group.rank == 0:
            self._tables, self.recorded = tables, recorder.kept
            self._built = tables._context_arguments()

    @contextlib.contextmanager
    def _fresh(self) -> Iterator[ShardedTables]:
        """Yield the tables with a context that has not exchanged anything yet."""
        tables, exchange = self._tables, self._tables._exchange
        assert exchange is not None
        before = tables.handle
        with mock.patch.object(ShardedTables, "_context_arguments", lambda _: self._built):
            tables.handle = tables._create_context()
        torch.ops.oper.context_close(before)
        yield tables

    def step(self, data: bytes) -> None:
        """Train a step with `data` as rank 1's messages; raises OperError if they are refused."""
        with self._fresh() as tables:
            exchange = tables._exchange
            assert exchange is not None
            exchange._transport = _Player(data)  # type: ignore[assignment]
            tables.lookup(_batch(0)).square().sum().backward()


@functools.cache
def peer() -> Peer:
    """Return the instance of this process."""
    return Peer()
