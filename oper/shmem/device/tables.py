"""Sharded tables in device memory: the passes of `ShardedTables`, launched on CUDA streams.

Lookups and updates within one memory domain do not wait for the device. Errors that kernels find
(an id out of range, a late peer) are stored in host memory and raised later: by the next call or,
with several ranks, at the end of a backward pass or by `synchronize`. No rank updates its rows with
a refused batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch

from oper.errors import OperError, PlanError
from oper.plan import Plan
from oper.rows.traffic import Traffic
from oper.shmem import library
from oper.shmem.batch import Lookup, ResolvedIds
from oper.shmem.counters.device import DeviceCounters
from oper.shmem.device.steps import KEYS_SHARE, DeviceSteps, raise_found, raise_stopped
from oper.shmem.exchange.device import DeviceExchange
from oper.shmem.group.groups import Group
from oper.shmem.group.status import Status
from oper.shmem.group.turns import in_turn
from oper.shmem.keys.on_device import DeviceKeys
from oper.shmem.keys.rules import DynamicTable
from oper.shmem.memory.device_arenas import DeviceArenas
from oper.shmem.memory.device_heap import release
from oper.shmem.optim.optimizers import Optimizer
from oper.shmem.passes import Backward
from oper.shmem.placement.send_buffer import reserved_bytes
from oper.shmem.settings import SEND_BUFFER_ENV, deadline_s, send_buffer_bytes
from oper.shmem.tables import ShardedTables
from oper.support.processes import when_dropped
from oper.tables import CODE_BITS, DTYPE_BYTES, OPTIMIZERS

# Default size of the send buffer: a share of the device's memory, and the minimum.
_EXCHANGE_SHARE, _LEAST_EXCHANGE_BYTES = 1 / 32, 256 << 20
# Rows of a rank, which updates number with 32 bits (ReceiveLists in csrc/device/device.h).
_MOST_OWNED = 1 << 32


class DeviceTables(ShardedTables):
    """`ShardedTables` whose arenas are device memory and whose batches are device tensors.

    Virtual ranks of one process (`ThreadGroup`) synchronize on the host. Autograd runs all backward
    passes of a device on one thread, on which virtual ranks cannot wait for each other; with them,
    call `forward(batch, collective=True)` and `apply_all` on the threads of the ranks instead.

    Rows of peers that a batch reads several times are sent over the link once (`stage.cu`) if the
    last measured batch had more than 1.5 ids per distinct row; `deduplicate` overrides this. The
    results are bitwise the same.

    Between memory domains torch's collectives carry rows and gradients, see `DeviceExchange`.

    Args:
        plan, features, group, optimizers, gradient_scale, is_new: see `ShardedTables`.
        device: this rank's device.

    Raises:
        PlanError: a table is quantised, or the plan does not fit; see also `ShardedTables`.
    """

    _plan_attributes = (*ShardedTables._plan_attributes, "arenas", "order", "updates_at_once",
                    "num_squares", "_list_bytes", "_steps")
    _exchange: DeviceExchange | None
    on_device = True
    shares_bags = False
    takes_parts = False
    is_watched = False
    _deduplicate: bool | None = None
    most_staging_bytes = 1 << 30  # limit on the memory for de-duplicated rows of peers

    def __init__(self, plan: Plan, features: Sequence[tuple[str, str]], group: Group,
                 optimizers: Optimizer | Mapping[str, Optimizer] | None,
                 gradient_scale: float = 1.0, *, device: torch.device | str = "cuda",
                 is_new: bool = True) -> None:
        self.operators = library.load_device()
        self._resolving_stream: torch.cuda.Stream | None = None  # stream of `to_resolve`
        self.device = torch.device(device)
        if self.device == torch.device("cuda"):
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.streams = library.streams_of(self.device)
        super().__init__(plan, features, group, optimizers, gradient_scale, is_new=is_new)

    # ---- memory ----------------------------------------------------------------------------------

    def _open_exchange(self, domain_of: Sequence[int]) -> DeviceExchange:
        return DeviceExchange(self, domain_of, self.collection, self.plan.message_bits)

    def _open_heap(self) -> None:
        codes = sorted({t.dtype for t in self.specs.values()} & set(CODE_BITS))
        if codes:
            raise PlanError("cannot shard tables in device memory", "dtypes of tables", codes,
                            " or ".join(DTYPE_BYTES), "keep quantised tables in host memory")
        exchange = 0
        if self._uses_send_buffers and (self.group.world_size > 1 or self._needs_exchange()):
            owned = int(np.sum([d.num_slots for d in self.directories], axis=0).max())
            if owned > _MOST_OWNED:
                raise PlanError("cannot train tables in device memory", "rows that a rank owns",
                                owned, f"<= {_MOST_OWNED}",
                                "use more ranks or tables with fewer, wider rows")
            least = min(self.group.all_gather(self._exchange_bytes()))
            exchange = reserved_bytes(self.directories, True, least)
        members = None if self.is_one_domain else list(self.members)
        self.arenas = DeviceArenas(self.directories, self.group, members, self.device, exchange,
                                   self.has_push, self._row_clipped())
        self._layout, self._addresses = self.arenas.layout, self.arenas.addresses
        self._heap = self.arenas.heap  # type: ignore[assignment]

    def open_keys(self, rules: Mapping[str, DynamicTable]) -> None:
        least = min(self.group.all_gather(send_buffer_bytes(self._exchange_bytes())))
        self.keys = DeviceKeys(self, rules, least // KEYS_SHARE)

    def _exchange_bytes(self) -> int:
        """Return the limit on a send buffer, in bytes, if ``OPER_SEND_BUFFER_BYTES`` is not set."""
        memory = 0
        if self.device.type == "cuda":
            memory = torch.cuda.get_device_properties(self.device).total_memory
        return max(_LEAST_EXCHANGE_BYTES, int(memory * _EXCHANGE_SHARE))

    def rounds_of_squares(self, table: str) -> int:
        """Return how often owners of a row's column pieces exchange sums of squares in a step: once
        for a row-wise state, and once for clipping by norm."""
        if self.optimizers is None:
            return 0
        optimizer = self.optimizers[table]
        return int(OPTIMIZERS[optimizer.name].is_row_wise) + int(optimizer.max_row_norm is not None)

    def _needs_exchange(self) -> bool:
        split = any(d.dim != d.table.dim for d in self.directories)
        return split or any(x.tier.placement == "replicated" for d in self.directories
                            for x in d.tiers)

    def _create_context(self) -> int:
        rank, arenas = self.group.rank, self.arenas
        handle = int(torch.ops.oper.device_context_create(
            *self._context_arguments(), torch.from_numpy(arenas.pads),
            int(deadline_s() * 1000), self._addresses[rank], self._layout.send_buffer[rank],
            self.members, torch.empty(0, device=self.device)))
        self.order = torch.ops.oper.device_context_order(handle)
        self.updates_at_once = torch.ops.oper.device_context_updates_at_once(handle)
        self._list_bytes = self._make_lists(handle)
        self.num_squares = max((self.rounds_of_squares(d.table.name) for d in self.directories
                                 if d.dim != d.table.dim), default=0)
        if self._exchange is not None:
            self._exchange.attach(handle, self.directories)
        self._steps = DeviceSteps(self, self._exchange)
        self._steps.attach(handle)
        self._set_pull(handle)
        return handle

    def _make_lists(self, handle: int) -> list[int]:
        """Allocate the lists of the gradients that this rank receives; returns the size of each
        rank's lists in bytes. Collective."""
        num_bytes, problem = 0, ""
        if self.optimizers is not None:
            try:
                num_bytes = torch.ops.oper.device_context_make_lists(handle)
            except RuntimeError as error:
                problem = str(error).splitlines()[0]
        everyone = self.group.all_gather((num_bytes, problem))
        problems = [(rank, found) for rank, (_, found) in enumerate(everyone) if found]
        if problems:
            torch.ops.oper.device_context_close(handle)
            raise OperError("cannot train tables in device memory", "rank, error", problems[0],
                            "memory for the lists of received gradients, 4 bytes per row that a "
                            "rank owns and 8 per gradient",
                            f"use more ranks, or a smaller {SEND_BUFFER_ENV}")
        return [size for size, _ in everyone]

    def memory_bytes(self) -> dict[str, list[int]]:
        """See `ShardedTables.memory_bytes`; includes the lists of the gradients that a rank
        receives, which take 4 bytes per row that it owns and 8 bytes per gradient."""
        found = super().memory_bytes()
        found["device"] = [a + b for a, b in zip(found["device"], self._list_bytes, strict=True)]
        return found

    def _set_pull(self, handle: int) -> None:
        choice = -1 if self._deduplicate is None else int(self._deduplicate)
        torch.ops.oper.device_context_set_pull(handle, choice, self.most_staging_bytes)

    @property
    def deduplicate(self) -> bool | None:
        """Whether rows of peers are fetched once per batch; None = if the last measured batch had
        more than 1.5 ids per distinct row."""
        return self._deduplicate

    @deduplicate.setter
    def deduplicate(self, choice: bool | None) -> None:
        self._deduplicate = choice
        self._set_pull(self.handle)

    def _release_when_dropped(self) -> None:
        assert self._heap is not None
        self._release = when_dropped(
            self, release, self._heap, partial(torch.ops.oper.device_context_close, self.handle))

    def _segment(self, address: int, rows: int, columns: int, dtype: str) -> torch.Tensor:
        return self.arenas.segment(address, rows, columns, dtype)

    @property
    def num_refreshed(self) -> np.ndarray:
        """See `DeviceExchange.num_refreshed`; shape [0, 0] with one memory domain."""
        return np.zeros((0, 0), np.int64) if self._exchange is None else (
            self._exchange.num_refreshed)

    # ---- ranks -----------------------------------------------------------------------------------

    @in_turn
    def barrier(self) -> None:
        """Wait for all ranks and for the device; raises DeadlineError if a rank does not arrive."""
        if self.group.is_local:
            self._steps.barrier()
            self._wait()
            self.group.all_gather(None)  # before an error that only this rank has found
        else:
            torch.ops.oper.device_barrier(self.handle)
        self.synchronize()
        if self._exchange is not None:
            self._exchange.barrier(self.phase)

    def synchronize(self) -> None:
        """Wait for this rank's kernels and raise the error that they found, if any."""
        self._wait()
        if self.found_error()[0]:
            self._raise_found()

    def _wait(self) -> None:
        if self.streams is not None:
            self.streams.synchronize(self.device)

    def found_error(self) -> tuple[int, int, int]:
        """Return status code, rank and detail of the first error that kernels have found; code 0 =
        no error."""
        return torch.ops.oper.device_context_error(self.handle)

    def _raise_found(self) -> None:
        """Raise the error that kernels found, and reset it so that later batches are processed."""
        found = self.found_error()
        torch.ops.oper.device_context_forget_error(self.handle)
        raise_found(found, self.features, self.specs, self.arenas.send_buffer_bytes)

    def _raise(self, code: int, detail: int, batch: Lookup, offsets: torch.Tensor) -> None:
        if code == Status.BAD_BATCH:
            super()._raise(code, detail, batch, offsets)
        self._steps.raise_kept()
        raise_stopped(code, detail, sorted({o.name for o in (self.optimizers or {}).values()}))
        self._raise_found()

    # ---- batches ---------------------------------------------------------------------------------

    def to_resolve(self, batch: Lookup) -> Callable[[], Lookup]:
        """See `ShardedTables.to_resolve`; runs on a separate stream, after the work of the current
        stream. The lookup of the batch waits for it on the device."""
        streams = self.streams
        if streams is None:
            return super().to_resolve(batch)
        there = streams.Event()
        there.record(streams.current_stream(self.device))

        def run() -> Lookup:
            # One stream for all batches, since the allocator caches memory per stream.
            stream = self._resolving_stream = self._resolving_stream or streams.Stream(self.device)
            stream.wait_event(there)
            with streams.stream(stream):
                for used in (batch.ids, batch.lengths, batch.weights):
                    if used is not None:  # keep its memory allocated while kernels read it
                        used.record_stream(stream)
                return self.resolve(batch)

        return run

    def _known(self, batch: Lookup) -> ResolvedIds | None:
        known = super()._known(batch)
        # Resolved ids contain the sorted weights, so weights must not have changed either.
        if known is None or known.versions != batch.versions() or (
                known.batch.weights is not batch.weights):
            return None
        if self.streams is not None:
            stream = self.streams.current_stream(self.device)
            for used in (batch.ids, batch.weights):
                if used is not None:
                    used.record_stream(stream)
        return known

    # ---- refused batches -------------------------------------------------------------------------

    def step(self, passed: Backward, updates: bool = True) -> None:
        """See `ShardedTables`. With several ranks, errors of this batch or an earlier one that
        kernels have found by now are raised after the step, for which the others need this rank.
        """
        super().step(passed, updates)
        if self._refuses_alone and self.found_error()[0]:
            self._raise_found()

    def _tell_refused(self, collective: bool, trains: bool) -> None:
        if not collective or not self._refuses_alone:
            return
        batch = self._refused_pass().batch
        if self.has_push and batch.pooled:
            self.forward(batch, collective=True)
        if not self.held.holders:
            self.refuse()

    def refuse(self) -> None:
        """See `ShardedTables`. Between memory domains it does nothing: the other ranks wait until
        their deadline."""
        if not self._refuses_alone:
            return
        groups = self.param_groups
        # Not used; this rank may refuse because of invalid ones.
        self.param_groups = [{"lr": 0.0, "tables": tuple(self.optimizers or ())}]
        try:
            super().step(self._refused_pass())
        finally:
            self.param_groups = groups

    @property
    def _refuses_alone(self) -> bool:
        """Whether several ranks train in one memory domain, which do not wait for each other's
        errors."""
        return self.group.world_size > 1 and self._exchange is None

    def _refused_pass(self) -> Backward:
        """Return the backward pass of an empty batch that kernels treat as a refused batch."""
        pooled = next(iter(self.specs.values())).pooling != "none"
        nothing = torch.empty(0, dtype=torch.int64, device=self.device)
        key_of = torch.zeros(len(self.features), dtype=torch.int64)
        batch = Lookup(nothing, nothing, key_of, 0, None, pooled)
        # The bound 1 is `kRefusedBound` in csrc/device/device.h.
        return Backward((torch.empty(0, self.output_columns, device=self.device),), batch,
                        torch.ones(1, dtype=torch.int64, device=self.device), self.frozen)

    # ---- differences from the host back end ------------------------------------------------------

    def use_huge_pages(self) -> str:
        """Only wait at a barrier, since device memory has no page kinds. Collective."""
        self.barrier()
        return self.page_kind

    def start_counting(self) -> None:
        """Start to count transfers for `traffic`. From now on every pass waits for the device."""
        self._steps.counters = DeviceCounters(self)
        self._steps.attach(self.handle)

    def traffic(self, reset: bool = False) -> Traffic:
        """See `ShardedTables.traffic`; counts since `start_counting`."""
        if self._steps.counters is None:
            raise OperError("cannot report what was read", "counting", "off",
                            "counting that was started; it makes every pass wait for the device",
                            "call start_counting() first, or replay the batches with "
                            "oper.search.replay.simulate")
        found = self._steps.counters.traffic
        if reset:
            self.start_counting()
        return found

    # ---- another plan ----------------------------------------------------------------------------

    def like(self, plan: Plan) -> DeviceTables:
        other = DeviceTables(plan, self.features, self.group, self.optimizers, self.gradient_scale,
                             device=self.device, is_new=False)
        other.deduplicate = self.deduplicate
        return other

    def check_memory(self) -> None:
        """Do nothing: device memory has been allocated when the arenas were created."""
