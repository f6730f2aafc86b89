"""Sharded tables in device memory: the steps of `ShardedTables`, launched on CUDA streams.

Nothing here waits for the device. An error that a kernel finds (an id out of range, a peer that
does not come) is left in host memory and raised by the next call, or by `synchronize`.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from oper.errors import InvalidInputError, OperError, PlanError, fail
from oper.plan import Plan
from oper.shmem import library
from oper.shmem.batch import Lookup, rows_in_order
from oper.shmem.counters.device import DeviceCounters
from oper.shmem.device_batch import FeatureKeys, Prepared, Workspaces, on_device, raise_found
from oper.shmem.exchange.device import DeviceExchange, FarRows
from oper.shmem.exchange.device_push import PushMessages
from oper.shmem.group.groups import Group
from oper.shmem.group.turns import in_turn
from oper.shmem.memory.device_arenas import DeviceArenas
from oper.shmem.memory.device_heap import DeviceHeap
from oper.shmem.optim.optimizers import Optimizer
from oper.shmem.passes import Backward
from oper.shmem.settings import deadline_s, outbox_bytes
from oper.shmem.tables import ShardedTables
from oper.tables import CODE_BITS, DTYPE_BYTES, OPTIMIZERS
from oper.traffic import SENT, Traffic

# Ids per distinct row from which fetching rows of peers once pays. To be measured between devices:
# a row is then written and read once more in local memory, at ten times the speed of a link.
DUPLICATION = 1.5
_MEASURED_EVERY = 256  # forward passes of read-only tables, which need no plan otherwise
_MOST_STAGING_BYTES = 1 << 30
_DEFAULT_EXCHANGE_BYTES = 256 << 20
_NO_FAR_ROWS = (None, None, 0)
_MOST_IDS = 2**31 - 64  # kernels count in 32 bits and look a group of lanes ahead


class DeviceTables(ShardedTables):
    """`ShardedTables` whose arenas are device memory and whose batches are device tensors.

    Virtual ranks of one process (`ThreadGroup`) meet on the host. Autograd has one thread for all
    backward passes on a device, in which they could not: call `forward(batch, collective=True)` and
    `apply_gradients` on their own threads.

    Rows of peers that a batch reads several times come over the link once (`stage.cu`) where that
    pays: where the last planned batch had `DUPLICATION` ids per distinct row. Numbers stay the
    same bit for bit. `deduplicate` = True or False decides it instead of the measurement (None).

    Between memory domains torch's collectives carry rows and gradients, see `DeviceExchange`.

    Args:
        plan, features, group, optimizers, gradient_scale, is_new: as for `ShardedTables`.
        device: this rank's device.
    """

    _of_the_plan = (*ShardedTables._of_the_plan, "arenas", "_requests", "_partials", "order",
                    "updates_at_once", "_staged_row_bytes", "num_squares", "_staged", "_are_fp32",
                    "_keys", "_counters")
    _exchange: DeviceExchange | None
    lookups_at_once = False  # they share workspaces
    is_watched = False

    def __init__(self, plan: Plan, features: Sequence[tuple[str, str]], group: Group,
                 optimizers: Optimizer | Mapping[str, Optimizer] | None,
                 gradient_scale: float = 1.0, *, device: torch.device | str = "cuda",
                 is_new: bool = True) -> None:
        library.load_device()
        self.device = torch.device(device)
        if self.device == torch.device("cuda"):
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._workspaces = Workspaces(self.device)
        self._recent: Prepared | None = None
        self._kept: Prepared | None = None  # planned in a forward pass, for its backward pass
        self._num_forward = 0
        self.deduplicate: bool | None = None
        self._counters: DeviceCounters | None = None
        super().__init__(plan, features, group, optimizers, gradient_scale, is_new=is_new)

    # ---- memory ----------------------------------------------------------------------------------

    def _open_exchange(self, domain_of: Sequence[int]) -> DeviceExchange:
        return DeviceExchange(self.group, domain_of, self.device)

    @on_device
    def _open_heap(self) -> None:
        codes = sorted({t.dtype for t in self.specs.values()} & set(CODE_BITS))
        if codes:
            raise PlanError(
                fail("cannot shard tables in device memory", "rows of", codes,
                     " or ".join(DTYPE_BYTES), "keep quantised tables in host memory"))
        exchange = outbox_bytes(_DEFAULT_EXCHANGE_BYTES)
        if self.optimizers is None or (
                self.group.world_size == 1 and not self._needs_exchange()):
            exchange = 0
        near = None if self.is_one_domain else list(self.members)
        self.arenas = DeviceArenas(self.directories, self.group, near, self.device, exchange,
                                   self.has_push, self._row_clipped())
        self._layout, self._addresses = self.arenas.layout, self.arenas.addresses
        self._heap = self.arenas.heap  # type: ignore[assignment]

    def rounds_of_squares(self, table: str) -> int:
        """How often the pieces of a row of this table add up squares in a step."""
        if self.optimizers is None:
            return 0
        optimizer = self.optimizers[table]
        return int(OPTIMIZERS[optimizer.name].is_row_wise) + int(optimizer.max_row_norm is not None)

    def _needs_exchange(self) -> bool:
        split = any(d.dim != d.table.dim for d in self.directories)
        return split or any(x.tier.placement == "replicated" for d in self.directories
                            for x in d.tiers)

    @on_device
    def _create_context(self) -> int:
        rank, arenas, as_tensor = self.group.rank, self.arenas, torch.from_numpy
        maps, features = self._maps()
        if self._exchange is not None:
            far = np.array(self._addresses) == 0
            maps = replace(maps, **{  # type: ignore[arg-type]
                name: np.where(far, mirrors, getattr(maps, name))
                for name, mirrors in self._exchange.open(self).items()})
        handle = int(torch.ops.oper.device_context_create(
            *maps.arguments(features, self.device), as_tensor(arenas.pads),
            int(deadline_s() * 1000), self._addresses[rank], self._layout.outbox[rank]))
        self._keys = FeatureKeys([len(self.pieces[table]) for _, table in self.features],
                                 self.device)
        self.order = torch.ops.oper.device_context_order(handle)
        self.updates_at_once = torch.ops.oper.device_context_updates_at_once(handle)
        self._staged_row_bytes = max(-(-d.row_bytes // 16) * 16 for d in self.directories)
        self.num_squares = max((self.rounds_of_squares(d.table.name) for d in self.directories
                                 if d.dim != d.table.dim), default=0)
        self._staged: list[float] = []
        self._are_fp32 = torch.tensor([d.table.dtype == "float32" for d in self.directories])
        self._requests, self._partials = (
            as_tensor(a.copy()).to(self.device) for a in (arenas.requests, arenas.partials))
        if self._exchange is not None:
            self._exchange.attach(handle, self.directories)
        return handle

    def _keep(self) -> None:
        assert self._heap is not None
        self._release = weakref.finalize(
            self, _release, self.handle, self._heap)  # type: ignore[arg-type]
        self._release.atexit = False

    def _segment(self, address: int, rows: int, columns: int, dtype: str) -> torch.Tensor:
        return self.arenas.segment(address, rows, columns, dtype)

    @property
    def num_refreshed(self) -> np.ndarray:
        """As `DeviceExchange.num_refreshed`; [0, 0] within one memory domain."""
        return np.zeros((0, 0), np.int64) if self._exchange is None else (
            self._exchange.num_refreshed)

    # ---- ranks -----------------------------------------------------------------------------------

    def _meet(self) -> None:
        """Order this rank's later kernels after all ranks' earlier ones, without waiting here."""
        if self.group.world_size == 1:
            return
        if not self.group.is_local:
            torch.ops.oper.device_barrier(self.handle, self._requests)
            return
        # Virtual ranks share a device: kernels that spin for each other could block each other, so
        # events order their streams.
        event = None
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        for other in self.group.all_gather(event):
            if other is not None:
                torch.cuda.current_stream(self.device).wait_event(other)

    @in_turn
    @on_device
    def barrier(self) -> None:
        """Wait for all ranks; raises DeadlineError when one does not come."""
        self._meet()
        self.synchronize()
        if self._exchange is not None:
            self._exchange.barrier(self.phase)
        if self.group.is_local:
            self.group.all_gather(None)

    def synchronize(self) -> None:
        """Wait for this rank's kernels and raise what they found."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._raise_found()

    def found_error(self) -> tuple[int, int, int]:
        """Code, rank and detail of what kernels have found so far; code 0: nothing."""
        code, rank, detail = torch.ops.oper.device_context_error(self.handle)
        return code, rank, detail

    def _raise_found(self) -> None:
        if self.found_error()[0]:
            raise_found(self.found_error(), self._recent, self.features, self.specs,
                        self.arenas.outbox_bytes)

    def _raise_unless_told(self) -> None:
        """As `_raise_found`, unless a meeting with other domains follows, which tells them."""
        x = self._exchange
        if x is None or (self.optimizers is None and not x.needs.gathers):
            self._raise_found()

    # ---- batches ---------------------------------------------------------------------------------

    @in_turn
    @on_device
    def resolve(self, batch: Lookup) -> Lookup:
        """As `ShardedTables.resolve`, on the current stream, which may be another than the one that
        trains: what uses the batch waits for it on the device."""
        prepared = self._prepare(self.bounds.repair(batch))
        if self.optimizers is not None:
            prepared.plan()
        if self.device.type == "cuda":
            prepared.ready = torch.cuda.Event()
            prepared.ready.record()
        return replace(prepared.batch, resolved=prepared)  # type: ignore[arg-type]

    def _prepare(self, batch: Lookup) -> Prepared:
        """Bounds and a workspace; nothing is resolved yet."""
        self._checks.check(batch)
        for name, value in (("ids", batch.ids), ("lengths", batch.lengths),
                            ("per-sample weights", batch.weights)):
            if value is not None and value.device != self.device:
                raise InvalidInputError(
                    fail("cannot look up", f"device of {name}", str(value.device),
                         f"the tables' device {self.device}", "move the batch there"))
        self._raise_unless_told()
        if (self._exchange is not None or self._counters is not None) and self._is_captured():
            raise OperError(
                fail("cannot capture a lookup in a graph", "memory domains, counting",
                     (not self.is_one_domain, self._counters is not None),
                     "one domain, nothing counted: both wait for the device",
                     "run such steps outside of graphs"))
        count = batch.lengths.numel()
        bounds = torch.empty(count + 1, dtype=torch.int64, device=self.device)
        scratch = torch.empty(torch.ops.oper.device_bounds_scratch_bytes(count),
                              dtype=torch.uint8, device=self.device)
        torch.ops.oper.device_bounds(self.handle, batch.lengths, batch.ids.numel(), bounds,
                                     scratch)
        return self._with_workspace(batch, bounds)

    def _with_workspace(self, batch: Lookup, bounds: torch.Tensor) -> Prepared:
        key_of, most, _ = self._keys.of(batch.key_of)
        max_pairs = batch.ids.numel() * most
        if batch.ids.numel() >= _MOST_IDS or max_pairs >= 2**32 - 1:
            raise OperError(fail("cannot look up", "ids", batch.ids.numel(), f"< {_MOST_IDS}",
                                 "use smaller batches"))
        stages = self._pays_to_stage()
        by_pair = stages or (self._exchange is not None and self._exchange.needs.gathers)
        need = torch.ops.oper.device_workspace_bytes(
            self.handle, batch.batch_size, max_pairs, batch.weights is not None, by_pair)
        self._recent = Prepared(self.handle, batch, bounds, key_of, stages, by_pair, max_pairs,
                                self._workspaces.take(need))
        return self._recent

    def _pays_to_stage(self) -> bool:
        """Whether rows of peers are fetched once per batch; reads host memory only."""
        if self.group.world_size == 1 or self.deduplicate is not None:
            return self.group.world_size > 1 and bool(self.deduplicate)
        pairs, rows = torch.ops.oper.device_context_duplication(self.handle)
        return pairs > DUPLICATION * rows

    def _near_bytes(self, max_pairs: int) -> int:
        """Room for the rows of peers."""
        _, rows = torch.ops.oper.device_context_duplication(self.handle)
        wanted = min(max_pairs, rows + rows // 4 + 1024) if rows else max_pairs
        return min(wanted * self._staged_row_bytes, _MOST_STAGING_BYTES)

    def _stage(self, prepared: Prepared, skip_pushed: bool, far_only: bool = False
               ) -> tuple[torch.Tensor | None, int, FarRows | None]:
        """Memory for the rows that are fetched, its part for peers' (what finds no room is read
        where it is), and the rows of other memory domains, which are fetched here. Collective
        where there are such."""
        near_bytes, far = 0, None
        if prepared.stages_near and not far_only:
            near_bytes = self._near_bytes(prepared.max_pairs)
        if self._exchange is not None and self._exchange.needs.gathers:
            far = self._exchange.gather(prepared, skip_pushed, near_bytes)
        size = near_bytes + (far.num_bytes if far else 0)
        memory = torch.empty(size, dtype=torch.uint8, device=self.device) if size else None
        return memory, near_bytes, far

    # ---- steps -----------------------------------------------------------------------------------

    @on_device
    def forward(self, batch: Lookup, collective: bool = False
                ) -> tuple[torch.Tensor, torch.Tensor]:
        collective |= self._exchange is not None and self.optimizers is not None
        known = self._known(batch)
        if known is None:
            batch = self.bounds.repair(batch)
        prepared = self._prepare(batch) if known is None else known
        prepared.use_here(self.device)
        rows, columns = ((batch.batch_size, self.output_columns) if batch.pooled
                         else (self._keys.num_rows(prepared.batch), self.directories[0].table.dim))
        out = torch.empty(rows, columns, dtype=torch.float32, device=self.device)
        push = collective and self.has_push and batch.pooled
        if prepared.by_pair or (
                self.group.world_size > 1 and self._num_forward % _MEASURED_EVERY == 0):
            prepared.plan()  # what is staged goes by it; now and then for its duplication
        self._num_forward += 1
        if self._counters is not None:
            self._counters.rows("rows", prepared, push)
        staging, near_bytes, far = self._stage(prepared, push)
        torch.ops.oper.device_forward(
            self.handle, *prepared.arguments(), out, push, staging, near_bytes,
            *(far.arguments() if far else _NO_FAR_ROWS))
        if push:
            self._forward_push(prepared, out)
        if known is None:
            self._keep_for_backward(prepared, collective)
        return out, prepared.bounds

    def _keep_for_backward(self, prepared: Prepared, collective: bool) -> None:
        if collective and prepared.is_planned:
            self._kept = prepared
        else:
            self._workspaces.give(prepared.workspace)

    def _forward_push(self, prepared: Prepared, out: torch.Tensor) -> None:
        """Owners pool what they hold of each bag; adds their sums to `out`."""
        ids, bounds, key_of, weights, batch_size, _, _, max_pairs, _ = prepared.arguments()
        # Not the batch plan's memory, which may hold a batch that was resolved ahead.
        work = self._workspaces.take(prepared.workspace.numel())
        arguments = (ids, bounds, key_of, weights, batch_size, max_pairs, work, out)
        requests, partials, sizes = self._requests, self._partials, (self.arenas.partial_bytes,) * 2
        torch.ops.oper.device_push(self.handle, 0, *arguments, requests, partials, *sizes)
        messages = None
        if self._exchange is not None:
            messages = PushMessages(self._exchange, self, weights is not None)
            messages.exchange_requests()
            requests = torch.from_numpy(messages.requests).to(self.device)
        self._meet()
        torch.ops.oper.device_push(self.handle, 1, *arguments, requests, partials, *sizes)
        if self._counters is not None:
            self._counters.requests(messages.requests if messages else self.arenas.requests)
        if messages is not None:
            messages.exchange_partials()
            partials = torch.from_numpy(messages.partials).to(self.device)
        self._meet()
        torch.ops.oper.device_push(self.handle, 2, *arguments, requests, partials, *sizes)
        self._workspaces.give(work)

    @on_device
    def _update(self, passed: Backward) -> None:
        batch = passed.batch
        self._raise_unless_told()
        known = self._known(batch)
        prepared = self._prepared(batch, passed.offsets)
        self._kept = None
        prepared.plan()
        grad = rows_in_order(passed.grad, batch.pooled)
        if grad.shape[0] == 0:
            grad = grad.new_zeros(1, max(1, grad.shape[1]))
        self._stage_optimizers(passed.frozen)
        scale = self.gradient_scale
        if self._counters is not None and self.updates_at_once:
            self._counters.gradients(prepared)
        torch.ops.oper.device_reduce(self.handle, *prepared.arguments(), grad, scale)
        if not self.updates_at_once:
            self._exchange_gradients(prepared, scale)
        if known is None:
            self._workspaces.give(prepared.workspace)

    def _exchange_gradients(self, prepared: Prepared, scale: float) -> None:
        """From the outboxes to updated rows and replicas."""
        exchange = self._exchange

        def update(step: int) -> None:
            torch.ops.oper.device_update(self.handle, step, prepared.bounds, *prepared.size(),
                                         prepared.workspace, scale)

        if exchange is not None:
            exchange.send_gradients()
        self._meet()
        update(0)
        if self._counters is not None:
            self._counters.gradients(prepared)
        for k in range(self.num_squares):
            update(1 + k)
            if exchange is not None:
                exchange.send_squares(prepared, k)
            self._meet()
        update(3)
        self._meet()
        if exchange is not None:
            exchange.send_refreshes()
        if self._counters is not None:
            self._counters.refreshes()
        update(4)
        if exchange is not None and exchange.needs.shares:
            self._meet()  # neighbours read this rank's replicas

    def _prepared(self, batch: Lookup, offsets: torch.Tensor) -> Prepared:
        """The forward pass's work on a batch, or anew."""
        kept = self._kept
        if kept is None or kept.bounds is not offsets or not kept.fits(self.handle, batch):
            kept = self._known(batch) or self._with_workspace(batch, offsets)
        kept.use_here(self.device)
        return kept

    def _stage_optimizers(self, frozen: frozenset[str]) -> None:
        """Copy the optimizers' arguments to the device when they have changed."""
        arguments = self._arguments.at(self.num_steps + 1, self._skipped, frozen,
                                       self.param_groups, self._table_of)
        # Only rows of 16 bits are rounded by the number of the step.
        arguments[self._are_fp32, -1] = 0.0
        arguments = arguments[self.order].contiguous()
        values = arguments.flatten().tolist()
        if values == self._staged:
            return
        if self._is_captured():
            raise OperError(
                fail("cannot capture an update of the tables in a graph", "optimizers",
                     sorted({o.name for o in (self.optimizers or {}).values()}),
                     "arguments that stay the same: fp32 rows, no Adam or LAMB, a learning rate "
                     "that an earlier step has used", "run such steps outside of graphs"))
        # Pageable memory, which the driver has read when the copy returns: the buffer may go.
        staging = torch.empty(128 * len(self.directories), dtype=torch.uint8)
        torch.ops.oper.device_set_optimizers(self.handle, arguments, staging)
        torch.ops.oper.device_copy_optimizers(self.handle, staging, self._requests)
        self._staged = values

    def _is_captured(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _known(self, batch: Lookup) -> Prepared | None:  # type: ignore[override]
        known: Any = batch.resolved
        fits = isinstance(known, Prepared) and known.fits(self.handle, batch)
        return known if fits else None

    @in_turn
    @on_device
    def weight_gradient(self, grad: torch.Tensor, batch: Lookup, offsets: torch.Tensor
                        ) -> torch.Tensor:
        """As `ShardedTables.weight_gradient`."""
        grad = self._clamp.apply(grad, batch, offsets)
        prepared = self._prepared(batch, offsets)
        if prepared.by_pair:
            prepared.plan()
        if self._counters is not None:
            self._counters.rows("weight_rows", prepared, without_pushed=False)
        staging, _, far = self._stage(prepared, skip_pushed=False, far_only=True)
        out = torch.empty(batch.ids.numel(), dtype=torch.float32, device=self.device)
        torch.ops.oper.device_weight_gradient(
            self.handle, *prepared.arguments(), grad.contiguous(), out, staging,
            *(far.arguments() if far else _NO_FAR_ROWS))
        return out

    # ---- what only the host back end has ---------------------------------------------------------

    def use_huge_pages(self) -> str:
        """Device memory has no page kinds to choose; a barrier, as on the host. Collective."""
        self.barrier()
        return self.page_kind

    def sent_bytes(self, reset: bool = False) -> dict[str, list[int]]:
        """As `ShardedTables.sent_bytes`."""
        if self._exchange is None:
            return {}
        sent = {kind: row.tolist() for kind, row in zip(SENT, self._exchange.sent, strict=True)}
        if reset:
            self._exchange.sent[:] = 0
        return sent

    def start_counting(self) -> None:
        """Count what is read from now on, for `traffic`. Every pass then waits for the device."""
        self._counters = DeviceCounters(self)

    def traffic(self, reset: bool = False) -> Traffic:
        """As `ShardedTables.traffic`, since `start_counting`."""
        if self._counters is None:
            raise OperError(
                fail("cannot tell what was read", "device", str(self.device),
                     "counting to have begun: it makes every pass wait for the device",
                     "call start_counting() first, or replay the batches with "
                     "oper.search.replay.simulate"))
        found = self._counters.traffic
        if reset:
            self.start_counting()
        return found

    def phase_ns(self) -> dict[str, int]:
        """Not measured on devices."""
        raise OperError(
            fail("cannot tell the time of phases", "device", str(self.device),
                 "tables in host memory", "use torch.profiler, which names the kernels"))

    # ---- another plan ----------------------------------------------------------------------------

    def like(self, plan: Plan) -> DeviceTables:
        return DeviceTables(plan, self.features, self.group, self.optimizers, self.gradient_scale,
                            device=self.device, is_new=False)

    def check_room(self) -> None:
        """The arenas are there: device memory is taken at once."""


def _release(handle: int, heap: DeviceHeap) -> None:
    # Kernels in flight still use both.
    if heap.device.type == "cuda":
        torch.cuda.synchronize(heap.device)
    torch.ops.oper.device_context_close(handle)
    heap.close()
