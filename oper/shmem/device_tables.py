"""Sharded tables in device memory: the steps of `ShardedTables`, launched on CUDA streams.

Nothing here waits for the device. An error that a kernel finds (an id out of range, a peer that
does not come) is left in host memory and raised by the next call, or by `synchronize`.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from oper.errors import InvalidInputError, OperError, PlanError, fail
from oper.plan import Plan
from oper.shmem import library
from oper.shmem.arena import ROW_TYPES, ArenaLayout, KernelMaps
from oper.shmem.batch import FailedBatch, Lookup, raise_status, rows_in_order
from oper.shmem.by_feature import Backward
from oper.shmem.device_heap import PART_BYTES, DeviceHeap
from oper.shmem.group import DEADLINE_ENV, Group
from oper.shmem.optimizers import STATE_PARTS, Optimizer
from oper.shmem.runtime import ShardedTables
from oper.tables import CODE_BITS, DTYPE_BYTES
from oper.traffic import Traffic

OUTBOX_ENV = "OPER_OUTBOX_BYTES"
# Ids per distinct row from which fetching rows of peers once pays. To be measured between devices:
# a row is then written and read once more in local memory, at ten times the speed of a link.
DUPLICATION = 1.5
_MEASURED_EVERY = 256  # forward passes of read-only tables, which need no plan otherwise
_MOST_STAGING_BYTES = 1 << 30
_DEFAULT_EXCHANGE_BYTES = 256 << 20


def _on_device(method: Callable[..., Any]) -> Callable[..., Any]:
    """Runs a method of `DeviceTables` with its device current: kernels are launched there."""

    @functools.wraps(method)
    def run(self: DeviceTables, *args: Any, **kwargs: Any) -> Any:
        if self.device.type != "cuda":
            return method(self, *args, **kwargs)
        with torch.cuda.device(self.device):
            return method(self, *args, **kwargs)

    return run


def _up(num_bytes: int, unit: int = 256) -> int:
    return -(-num_bytes // unit) * unit


@dataclass(slots=True, eq=False)
class Prepared:
    """A batch on the device and what its id-only work made of it.

    Attributes:
        handle: of the tables that it was made for.
        batch: the batch, on the device.
        bounds: int64 [num_keys * B + 1], bounds of its bags.
        key_of: int32 [F], on the device.
        by_pair: whether rows of peers are to be staged, each once.
        max_pairs: bound on the ids of all features together.
        workspace: uint8, device memory of the batch plan.
        is_planned: whether ids are resolved and sorted for the backward pass.
        ready: event after which the above may be used on other streams, or None: this stream.
    """

    handle: int
    batch: Lookup
    bounds: torch.Tensor
    key_of: torch.Tensor
    by_pair: bool
    max_pairs: int
    workspace: torch.Tensor
    is_planned: bool = False
    ready: Any = None

    def fits(self, handle: int, batch: Lookup) -> bool:
        """Whether this is the work on `batch` for the tables of `handle`."""
        return handle == self.handle and batch.ids is self.batch.ids and (
            batch.weights is self.batch.weights)

    def use_here(self, device: torch.device) -> None:
        """Order the current stream's later kernels behind what made this on another stream."""
        if self.ready is None:
            return
        stream = torch.cuda.current_stream(device)
        stream.wait_event(self.ready)
        for used in (self.bounds, self.workspace, self.batch.ids, self.batch.weights):
            if used is not None:  # its memory must not be used anew while kernels here read it
                used.record_stream(stream)

    def arguments(self) -> tuple[Any, ...]:
        """What the operators on a batch take first."""
        b = self.batch
        return (b.ids, self.bounds, self.key_of, b.weights, b.batch_size, b.pooled, self.by_pair,
                self.max_pairs, self.workspace)


class DeviceTables(ShardedTables):
    """`ShardedTables` whose arenas are device memory and whose batches are device tensors.

    Virtual ranks of one process (`ThreadGroup`) meet on the host. Autograd has one thread for all
    backward passes on a device, in which they could not: call `forward(batch, collective=True)` and
    `apply_gradients` on their own threads.

    Rows of peers that a batch reads several times come over the link once (`stage.cu`) where that
    pays: where the last planned batch had `DUPLICATION` ids per distinct row. Numbers stay the
    same bit for bit. `deduplicate` = True or False decides it instead of the measurement (None).

    Args:
        plan, features, group, optimizers, gradient_scale: as for `ShardedTables`.
        device: this rank's device.
    """

    def __init__(self, plan: Plan, features: Sequence[tuple[str, str]], group: Group,
                 optimizers: Optimizer | Mapping[str, Optimizer] | None,
                 gradient_scale: float = 1.0, *, device: torch.device | str = "cuda") -> None:
        library.load_device()
        self.device = torch.device(device)
        if self.device == torch.device("cuda"):
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._key_tensors: dict[tuple[int, ...], tuple[torch.Tensor, int, bool]] = {}
        self._spare: dict[int, list[torch.Tensor]] = {}  # workspaces by stream
        self._recent: Prepared | None = None
        self._kept: Prepared | None = None  # planned in a forward pass, for its backward pass
        self._num_forward = 0
        self.deduplicate: bool | None = None
        super().__init__(plan, features, group, optimizers, gradient_scale)

    # ---- memory ----------------------------------------------------------------------------------

    @_on_device
    def _open_heap(self) -> list[int]:
        if self._exchange is not None:
            raise PlanError(
                fail("cannot shard tables in device memory", "memory domains",
                     "more than one", "ranks of one host", "start all ranks on one host"))
        codes = sorted({t.dtype for t in self.specs.values()} & set(CODE_BITS))
        if codes:
            raise PlanError(
                fail("cannot shard tables in device memory", "rows of", codes,
                     " or ".join(DTYPE_BYTES), "keep quantised tables in host memory"))
        W = self.group.world_size
        exchange = int(os.environ.get(OUTBOX_ENV, _DEFAULT_EXCHANGE_BYTES))
        if self.optimizers is None or (W == 1 and not self._needs_exchange()):
            exchange = 64 << 10
        self._layout = ArenaLayout.build(self.directories, W, exchange, self._row_clipped(),
                                         PART_BYTES)
        # Behind the outbox: barrier words, and for push mode requests and partial sums.
        end = _up(max(self._layout.num_bytes))
        self._pad_offset = end
        self._request_offset = _up(end + 4 * W)
        self._push_bytes = exchange // 256 * 256 if self.has_push else 0
        self._partial_offset = self._request_offset + self._push_bytes
        total = self._partial_offset + self._push_bytes
        self._heap = DeviceHeap(  # type: ignore[assignment]
            self.group, [total] * W, self.device, self._layout.host_ranges)
        self._addresses = self._heap.addresses  # type: ignore[union-attr]
        return list(range(W))

    def _rounds(self, table: str) -> int:
        """How often the pieces of a row of this table add up squares in a step."""
        if self.optimizers is None:
            return 0
        optimizer = self.optimizers[table]
        row_wise = any(per_row for _, per_row in STATE_PARTS[optimizer.name])
        return int(row_wise) + int(optimizer.max_row_norm is not None)

    def _needs_exchange(self) -> bool:
        split = any(d.dim != d.table.dim for d in self.directories)
        return split or any(x.tier.placement == "replicated" for d in self.directories
                            for x in d.tiers)

    @_on_device
    def _create_context(self, near: list[int]) -> int:
        heap, group = self._heap, self.group
        assert heap is not None
        maps = KernelMaps.build(self.directories, self._layout, heap.addresses, group.rank)
        outboxes = [a + o for a, o in zip(heap.addresses, self._layout.outbox, strict=True)]
        pads = [a + self._pad_offset for a in heap.addresses]
        as_tensor = torch.from_numpy
        handle = int(torch.ops.oper.device_context_create(
            group.rank, group.world_size, as_tensor(maps.tables), as_tensor(maps.owner_begin),
            as_tensor(maps.tiers), as_tensor(maps.maps.reshape(-1)),
            self._feature_rows(), as_tensor(maps.refreshes),
            as_tensor(maps.touched), as_tensor(maps.squares),
            torch.tensor(outboxes, dtype=torch.int64), self._layout.outbox_bytes,
            [as_tensor(h).to(self.device) for h in maps.heads],
            torch.tensor(pads, dtype=torch.int64),
            int(float(os.environ.get(DEADLINE_ENV, "300")) * 1000),
            heap.addresses[group.rank], self._layout.outbox[group.rank]))
        self._order = torch.ops.oper.device_context_order(handle)
        self._updates_at_once = torch.ops.oper.device_context_updates_at_once(handle)
        self._staged_row_bytes = max(_up(d.row_bytes, 16) for d in self.directories)
        self._rounds_of_squares = max(
            (self._rounds(d.table.name) for d in self.directories if d.dim != d.table.dim),
            default=0)
        self._staged: list[float] = []
        self._are_fp32 = torch.tensor([d.table.dtype == "float32" for d in self.directories])
        addresses = np.array(heap.addresses, np.int64)
        self._requests = torch.from_numpy(addresses + self._request_offset).to(self.device)
        self._partials = torch.from_numpy(addresses + self._partial_offset).to(self.device)
        return handle

    def _keep(self) -> None:
        assert self._heap is not None
        self._release = weakref.finalize(
            self, _release, self._handle, self._heap)  # type: ignore[arg-type]
        self._release.atexit = False

    def _segment(self, address: int, rows: int, columns: int, dtype: str) -> torch.Tensor:
        index = self.device.index if self.device.type == "cuda" else -1
        view: torch.Tensor = torch.ops.oper.device_view(
            address, rows, columns, ROW_TYPES.index(dtype), index)
        return view

    # ---- ranks -----------------------------------------------------------------------------------

    def _meet(self) -> None:
        """Order this rank's later kernels after all ranks' earlier ones, without waiting here."""
        if self.group.world_size == 1:
            return
        if not self.group.is_local:
            torch.ops.oper.device_barrier(self._handle, self._requests)
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

    @_on_device
    def barrier(self) -> None:
        """Wait for all ranks; raises DeadlineError when one does not come."""
        self._meet()
        self.synchronize()
        if self.group.is_local:
            self.group.all_gather(None)

    def synchronize(self) -> None:
        """Wait for this rank's kernels and raise what they found."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._raise_found()

    def _raise_found(self) -> None:
        code, rank, detail = torch.ops.oper.device_context_error(self._handle)
        if not code:
            return
        failed = None
        if self._recent is not None:
            b, bounds = self._recent.batch, self._recent.bounds
            on_host = Lookup(b.ids.cpu(), b.lengths.cpu(), b.key_of, b.batch_size, None, b.pooled)
            failed = FailedBatch(on_host, bounds.cpu(), self.features, self.specs)
        if code in (4, 5) and (failed is None or not self._explains(failed, code, detail)):
            raise OperError(
                fail("an earlier batch was refused", "position of its id", detail,
                     "ids within the tables and lengths that add up to them",
                     "call synchronize() after each batch to find it"))
        raise_status(code, rank if code in (1, 2) else detail, self._layout.outbox_bytes, failed)

    def _explains(self, failed: FailedBatch, code: int, detail: int) -> bool:
        """Whether the last batch is the one that the kernels complained of."""
        batch = failed.batch
        if code == 5:
            return bool((batch.lengths < 0).any()) or int(batch.lengths.sum()) != batch.ids.numel()
        if not 0 <= detail < batch.ids.numel():
            return False
        rows = [self.specs[table].num_rows for _, table in self.features]
        return not 0 <= int(batch.ids[detail]) < min(rows)

    # ---- batches ---------------------------------------------------------------------------------

    @_on_device
    def resolve(self, batch: Lookup) -> Lookup:
        """As `ShardedTables.resolve`, on the current stream, which may be another than the one that
        trains: what uses the batch waits for it on the device."""
        prepared = self._prepare(self.bounds.repair(batch))
        if self.optimizers is not None:
            self._plan(prepared)
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
        self._raise_found()
        count = batch.lengths.numel()
        bounds = torch.empty(count + 1, dtype=torch.int64, device=self.device)
        scratch = torch.empty(torch.ops.oper.device_bounds_scratch_bytes(count),
                              dtype=torch.uint8, device=self.device)
        torch.ops.oper.device_bounds(self._handle, batch.lengths, batch.ids.numel(), bounds,
                                     scratch)
        return self._with_workspace(batch, bounds)

    def _with_workspace(self, batch: Lookup, bounds: torch.Tensor) -> Prepared:
        key_of, most, _ = self._keys(batch.key_of)
        max_pairs = batch.ids.numel() * most
        if batch.ids.numel() >= 2**31 or max_pairs >= 2**32 - 1:
            raise OperError(fail("cannot look up", "ids", batch.ids.numel(), "< 2^31",
                                 "use smaller batches"))
        by_pair = self._pays_to_stage()
        need = torch.ops.oper.device_workspace_bytes(
            self._handle, batch.batch_size, max_pairs, batch.weights is not None, by_pair)
        self._recent = Prepared(self._handle, batch, bounds, key_of, by_pair, max_pairs,
                                self._take_workspace(need))
        return self._recent

    def _pays_to_stage(self) -> bool:
        """Whether rows of peers are fetched once per batch; reads host memory only."""
        if self.group.world_size == 1 or self.deduplicate is not None:
            return self.group.world_size > 1 and bool(self.deduplicate)
        pairs, rows = torch.ops.oper.device_context_duplication(self._handle)
        return pairs > DUPLICATION * rows

    def _staging(self, max_pairs: int) -> torch.Tensor:
        """Room for the rows of peers; what finds none is read where it is."""
        _, rows = torch.ops.oper.device_context_duplication(self._handle)
        wanted = min(max_pairs, rows + rows // 4 + 1024) if rows else max_pairs
        return torch.empty(min(wanted * self._staged_row_bytes, _MOST_STAGING_BYTES),
                           dtype=torch.uint8, device=self.device)

    def _plan(self, prepared: Prepared) -> None:
        if not prepared.is_planned:
            torch.ops.oper.device_plan(self._handle, *prepared.arguments())
            prepared.is_planned = True

    def _keys(self, key_of: torch.Tensor) -> tuple[torch.Tensor, int, bool]:
        """`key_of` on the device, the most features that share a key, and whether every key has
        one feature."""
        known = tuple(key_of.tolist())
        if known not in self._key_tensors:
            pieces = [len(self.pieces[table]) for _, table in self.features]
            uses: dict[int, int] = {}
            for key, count in zip(known, pieces, strict=True):
                uses[key] = uses.get(key, 0) + count
            whole = sorted(known) == list(range(len(known)))
            self._key_tensors[known] = (
                torch.tensor(known, dtype=torch.int32, device=self.device),
                max(uses.values(), default=1), whole)
        return self._key_tensors[known]

    def _take_workspace(self, num_bytes: int) -> torch.Tensor:
        spares = self._spare.setdefault(self._stream(), [])
        for k, spare in enumerate(spares):
            if spare.numel() >= num_bytes:
                return spares.pop(k)
        spares.clear()
        return torch.empty(num_bytes + num_bytes // 4, dtype=torch.uint8, device=self.device)

    def _give_workspace(self, workspace: torch.Tensor) -> None:
        # Later work on it is ordered behind this batch by the stream, which is why streams do not
        # share them.
        spares = self._spare.setdefault(self._stream(), [])
        if len(spares) < 3:
            spares.append(workspace)

    def _stream(self) -> int:
        if self.device.type != "cuda":
            return 0
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def _num_rows(self, prepared: Prepared) -> int:
        """Output rows of an unpooled batch; waits for the device when only it knows."""
        batch = prepared.batch
        _, _, whole = self._keys(batch.key_of)
        num_keys = batch.lengths.numel() // max(1, batch.batch_size)
        if whole and num_keys == len(self.features):
            return batch.ids.numel()
        sums = batch.lengths.view(num_keys, -1).sum(1).cpu()
        return int(sums[batch.key_of].sum())

    # ---- steps -----------------------------------------------------------------------------------

    @_on_device
    def forward(self, batch: Lookup, collective: bool = False
                ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `ShardedTables.forward`."""
        known = self._known(batch)
        if known is None:
            batch = self.bounds.repair(batch)
        prepared = self._prepare(batch) if known is None else known
        prepared.use_here(self.device)
        rows, columns = ((batch.batch_size, self.output_columns) if batch.pooled
                         else (self._num_rows(prepared), self.directories[0].table.dim))
        out = torch.empty(rows, columns, dtype=torch.float32, device=self.device)
        push = collective and self.has_push and batch.pooled
        staging = None
        if prepared.by_pair:
            self._plan(prepared)
            staging = self._staging(prepared.max_pairs)
        elif self.group.world_size > 1 and self._num_forward % _MEASURED_EVERY == 0:
            self._plan(prepared)  # for its duplication
        self._num_forward += 1
        torch.ops.oper.device_forward(self._handle, *prepared.arguments(), out, push, staging)
        if push:
            self._forward_push(prepared, out)
        if known is None:
            self._keep_for_backward(prepared, collective)
        return out, prepared.bounds

    def _keep_for_backward(self, prepared: Prepared, collective: bool) -> None:
        if collective and prepared.is_planned:
            self._kept = prepared
        else:
            self._give_workspace(prepared.workspace)

    def _forward_push(self, prepared: Prepared, out: torch.Tensor) -> None:
        """Owners pool what they hold of each bag; adds their sums to `out`."""
        ids, bounds, key_of, weights, batch_size, _, _, max_pairs, _ = prepared.arguments()
        # Not the batch plan's memory, which may hold a batch that was resolved ahead.
        work = self._take_workspace(prepared.workspace.numel())
        arguments = (ids, bounds, key_of, weights, batch_size, max_pairs, work, out,
                     self._requests, self._partials, self._push_bytes, self._push_bytes)
        torch.ops.oper.device_push(self._handle, 0, *arguments)
        self._meet()
        torch.ops.oper.device_push(self._handle, 1, *arguments)
        self._meet()
        torch.ops.oper.device_push(self._handle, 2, *arguments)
        self._give_workspace(work)

    @_on_device
    def _update(self, passed: Backward) -> None:
        batch = passed.batch
        self._raise_found()
        known = self._known(batch)
        kept, self._kept = self._kept, None
        if kept is not None and kept.bounds is passed.offsets and kept.fits(self._handle, batch):
            prepared = kept
        else:
            prepared = known or self._with_workspace(batch, passed.offsets)
        prepared.use_here(self.device)
        self._plan(prepared)
        grad = rows_in_order(passed.grad, batch.pooled)
        if grad.shape[0] == 0:
            grad = grad.new_zeros(1, max(1, grad.shape[1]))
        self._stage_optimizers()
        scale = self.gradient_scale
        torch.ops.oper.device_reduce(self._handle, *prepared.arguments(), grad, scale)
        if not self._updates_at_once:
            arguments = (prepared.bounds, batch.batch_size, prepared.max_pairs,
                         batch.weights is not None, prepared.by_pair, prepared.workspace, scale)
            self._meet()
            torch.ops.oper.device_update(self._handle, 0, *arguments)
            for k in range(self._rounds_of_squares):
                torch.ops.oper.device_update(self._handle, 1 + k, *arguments)
                self._meet()
            torch.ops.oper.device_update(self._handle, 3, *arguments)
            self._meet()
            torch.ops.oper.device_update(self._handle, 4, *arguments)
        if known is None:
            self._give_workspace(prepared.workspace)

    def _stage_optimizers(self) -> None:
        """Copy the optimizers' arguments to the device when they have changed."""
        arguments = self._optimizer_arguments(self.num_steps + 1)
        # Only rows of 16 bits are rounded by the number of the step.
        arguments[self._are_fp32, -1] = 0.0
        arguments = arguments[self._order].contiguous()
        values = arguments.flatten().tolist()
        if values == self._staged:
            return
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise OperError(
                fail("cannot capture an update of the tables in a graph", "optimizers",
                     sorted({o.name for o in (self.optimizers or {}).values()}),
                     "arguments that stay the same: fp32 rows, no Adam, a learning rate that an "
                     "earlier step has used", "run such steps outside of graphs"))
        # Pageable memory, which the driver has read when the copy returns: the buffer may go.
        staging = torch.empty(128 * len(self.directories), dtype=torch.uint8)
        torch.ops.oper.device_set_optimizers(self._handle, arguments, staging)
        torch.ops.oper.device_copy_optimizers(self._handle, staging, self._requests)
        self._staged = values

    def _known(self, batch: Lookup) -> Prepared | None:  # type: ignore[override]
        known: Any = batch.resolved
        fits = isinstance(known, Prepared) and known.fits(self._handle, batch)
        return known if fits else None

    @_on_device
    def weight_gradient(self, grad: torch.Tensor, batch: Lookup, offsets: torch.Tensor
                        ) -> torch.Tensor:
        """As `ShardedTables.weight_gradient`."""
        grad = self._clamp.apply(grad, batch, offsets)
        key_of, _, _ = self._keys(batch.key_of)
        out = torch.empty(batch.ids.numel(), dtype=torch.float32, device=self.device)
        torch.ops.oper.device_weight_gradient(
            self._handle, batch.ids, offsets, key_of, batch.batch_size, grad.contiguous(), out)
        return out

    # ---- what only the host back end has ---------------------------------------------------------

    def use_huge_pages(self) -> str:
        """Device memory has no page kinds to choose; a barrier, as on the host. Collective."""
        self.barrier()
        return self.page_kind

    def sent_bytes(self, reset: bool = False) -> dict[str, list[int]]:
        """Nothing: there are no other memory domains."""
        return {}

    def traffic(self, reset: bool = False) -> Traffic:
        """Not counted on devices, whose kernels would have to write the counts."""
        raise OperError(
            fail("cannot count rows read", "device", str(self.device), "tables in host memory",
                 "replay the batches with oper.search.simulate, whose counts are exact"))

    def phase_ns(self) -> dict[str, int]:
        """Not measured on devices."""
        raise OperError(
            fail("cannot tell the time of phases", "device", str(self.device),
                 "tables in host memory", "use torch.profiler, which names the kernels"))

    def start_migration(self, plan: Plan, bytes_per_step: int | None = None) -> None:
        """Not on devices."""
        raise PlanError(
            fail("cannot move tables in device memory to another plan", "device",
                 str(self.device), "tables in host memory",
                 "save a checkpoint and shard again with the new plan"))


def _release(handle: int, heap: DeviceHeap) -> None:
    # Kernels in flight still use both.
    if heap.device.type == "cuda":
        torch.cuda.synchronize(heap.device)
    torch.ops.oper.device_context_close(handle)
    heap.close()
