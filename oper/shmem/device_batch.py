"""A batch on the device: what its id-only work has made of it, and the memory that this takes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from oper.directory import TableDirectory, TierLayout
from oper.errors import OperError, fail
from oper.shmem.batch import FailedBatch, Lookup, raise_status
from oper.tables import TableSpec

_UINT32 = 0xFFFFFFFF


def on_device(method: Callable[..., Any]) -> Callable[..., Any]:
    """Runs a method with its object's `device` current: kernels are launched there."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.device.type != "cuda":
            return method(self, *args, **kwargs)
        with torch.cuda.device(self.device):
            return method(self, *args, **kwargs)

    return run


class FeatureKeys:
    """Which key carries each feature, as the kernels take it.

    Args:
        num_pieces: column pieces of the table of each feature.
        device: where they run.
    """

    def __init__(self, num_pieces: Sequence[int], device: torch.device) -> None:
        self._num_pieces = list(num_pieces)
        self._device = device
        self._known: dict[tuple[int, ...], tuple[torch.Tensor, int, bool]] = {}

    def of(self, key_of: torch.Tensor) -> tuple[torch.Tensor, int, bool]:
        """`key_of`, int64 [F], on the device as int32 [F]; the most pieces that share a key; and
        whether every key has one feature."""
        keys = tuple(key_of.tolist())
        if keys not in self._known:
            uses: dict[int, int] = {}
            for key, count in zip(keys, self._num_pieces, strict=True):
                uses[key] = uses.get(key, 0) + count
            self._known[keys] = (torch.tensor(keys, dtype=torch.int32, device=self._device),
                                 max(uses.values(), default=1),
                                 sorted(keys) == list(range(len(keys))))
        return self._known[keys]

    def num_rows(self, batch: Lookup) -> int:
        """Output rows of an unpooled batch; waits for the device when only it knows."""
        _, _, is_whole = self.of(batch.key_of)
        num_keys = batch.lengths.numel() // max(1, batch.batch_size)
        if not num_keys or (is_whole and num_keys == len(self._num_pieces)):
            return batch.ids.numel()
        sums = batch.lengths.view(num_keys, -1).sum(1).cpu()
        return int(sums[batch.key_of].sum())


@dataclass(slots=True, eq=False)
class Prepared:
    """A batch on the device and what its id-only work made of it.

    Attributes:
        handle: of the tables that it was made for.
        batch: the batch, on the device.
        bounds: int64 [num_keys * B + 1], bounds of its bags.
        key_of: int32 [F], on the device.
        stages_near: whether rows of peers in this memory domain are to be staged, each once.
        by_pair: whether rows are staged at all.
        max_pairs: bound on the ids of all features together.
        workspace: uint8, device memory of the batch plan.
        is_planned: whether ids are resolved and sorted for the backward pass.
        ready: event after which the above may be used on other streams, or None: this stream.
        versions: of ids and weights when this was made (`Lookup.versions`).
    """

    handle: int
    batch: Lookup
    bounds: torch.Tensor
    key_of: torch.Tensor
    stages_near: bool
    by_pair: bool
    max_pairs: int
    workspace: torch.Tensor
    is_planned: bool = False
    ready: Any = None
    versions: tuple[int, int] = (-1, -1)

    def __post_init__(self) -> None:
        self.versions = self.batch.versions()

    def fits(self, handle: int, batch: Lookup) -> bool:
        """Whether this is the work on `batch`, as it is now, for the tables of `handle`."""
        return (handle == self.handle and batch.ids is self.batch.ids
                and batch.weights is self.batch.weights and self.versions == batch.versions())

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

    def plan(self) -> None:
        """Resolve and sort the ids, unless that is done."""
        if not self.is_planned:
            torch.ops.oper.device_plan(self.handle, *self.arguments())
            self.is_planned = True

    def size(self) -> tuple[int, int, bool, bool]:
        """What the workspace's layout depends on."""
        return (self.batch.batch_size, self.max_pairs, self.batch.weights is not None,
                self.by_pair)

    def runs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys of the distinct rows of a planned batch, ascending, int64 [R], and where the pairs
        of each begin, int64 [R + 1]. Waits for the device."""
        wide, keys_at, begin_at, count_at, *_ = torch.ops.oper.device_plan_parts(
            self.handle, *self.size())
        count = int(self.workspace[count_at:count_at + 8].view(torch.int64))
        begin = unsigned(self.workspace[begin_at:begin_at + 4 * (count + 1)])
        width = 8 if wide else 4
        keys = self.workspace[keys_at:keys_at + width * self.max_pairs]
        if wide:
            return keys.view(torch.int64)[begin[:-1]], begin
        return keys.view(torch.int32)[begin[:-1]].to(torch.int64) & _UINT32, begin


    def lists(self, world_size: int, num_tables: int) -> np.ndarray:
        """Where each table's entries begin in what each rank has left for this one, int64
        [W, T + 1], tables in the order of keys; within an update. Waits for the device."""
        *_, begin_at, _ = torch.ops.oper.device_plan_parts(self.handle, *self.size())
        end = begin_at + 8 * world_size * (num_tables + 1)
        found: np.ndarray = self.workspace[begin_at:end].view(torch.int64).cpu().numpy()
        return found.reshape(world_size, -1)

    def merged_slots(self, directories: Sequence[TableDirectory], table: int, rank: int
                     ) -> np.ndarray:
        """Slots of a table on `rank`, this one, that any rank has a gradient of, ascending;
        `directories` in the order of keys. Within an update; waits for the device."""
        wide, *_, capacity, _, keys_at = torch.ops.oper.device_plan_parts(
            self.handle, *self.size())
        d = directories[table]
        begin = self.lists(d.world_size, len(directories))
        keys = self.workspace[keys_at:keys_at + (8 if wide else 4) * d.world_size * capacity]
        keys = keys.view(torch.int64 if wide else torch.int32)
        every = torch.cat([keys[r * capacity + begin[r, table]:r * capacity + begin[r, table + 1]]
                           for r in range(d.world_size)])
        every = torch.unique(every if wide else every.to(torch.int64) & _UINT32)
        first = sum(x.table.num_rows for x in directories[:table]) + int(d.owner_begin[rank])
        found: np.ndarray = (every - first).cpu().numpy()
        return found


class KeyRange(NamedTuple):
    """Keys of the rows of one tier at one owner: they follow each other.

    Attributes:
        table: in the order of keys.
        tier: the tier.
        owner: its rank.
        begin, end: the keys.
        base: key of the owner's first row of the table.
    """

    table: int
    tier: TierLayout
    owner: int
    begin: int
    end: int
    base: int


def key_ranges(directories: Sequence[TableDirectory]) -> Iterator[KeyRange]:
    """All rows of the directories, which are in the order of keys."""
    first = 0
    for k, d in enumerate(directories):
        for x in d.tiers:
            for owner in x.num_rows.nonzero()[0].tolist():
                base = first + int(d.owner_begin[owner])
                begin = base + int(x.slot_base[owner])
                yield KeyRange(k, x, owner, begin, begin + int(x.num_rows[owner]), base)
        first += d.table.num_rows


def raise_found(found: tuple[int, int, int], recent: Prepared | None,
                features: Sequence[tuple[str, str]], specs: Mapping[str, TableSpec],
                outbox_bytes: int) -> NoReturn:
    """Raise what kernels have found: code, rank and detail; `recent`: the last batch."""
    code, rank, detail = found
    failed = None
    if recent is not None:
        b, bounds = recent.batch, recent.bounds
        on_host = Lookup(b.ids.cpu(), b.lengths.cpu(), b.key_of, b.batch_size, None, b.pooled)
        failed = FailedBatch(on_host, bounds.cpu(), features, specs)
    if code in (4, 5) and (failed is None or not _explains(failed, code, detail)):
        raise OperError(
            fail("an earlier batch was refused", "position of its id", detail,
                 "ids within the tables and lengths that add up to them",
                 "call synchronize() after each batch to find it"))
    if code == 8:
        raise OperError(
            fail("rows of another memory domain are not where they should be", "rank, detail",
                 (rank, detail), "the same plan and the same calls on all ranks",
                 "a lookup without gradients is collective across memory domains as well"))
    raise_status(code, rank if code in (1, 2) else detail, outbox_bytes, failed)


def _explains(failed: FailedBatch, code: int, detail: int) -> bool:
    """Whether the last batch is the one that the kernels complained of."""
    batch = failed.batch
    if code == 5:
        return bool((batch.lengths < 0).any()) or int(batch.lengths.sum()) != batch.ids.numel()
    if not 0 <= detail < batch.ids.numel():
        return False
    rows = [failed.specs[table].num_rows for _, table in failed.features]
    return not 0 <= int(batch.ids[detail]) < min(rows)


def unsigned(memory: torch.Tensor) -> torch.Tensor:
    """Bytes that hold uint32 numbers, as int64."""
    return memory.view(torch.int32).to(torch.int64) & _UINT32


class Workspaces:
    """Device memory of batch plans, kept for the next batches on the same stream."""

    _MOST = 3

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spare: dict[int, list[torch.Tensor]] = {}  # by stream

    def take(self, num_bytes: int) -> torch.Tensor:
        """At least so many bytes."""
        if self._is_captured():  # the graph's own, which nobody else may use or free
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        spares = self._spare.setdefault(self._stream(), [])
        for k, spare in enumerate(spares):
            if spare.numel() >= num_bytes:
                return spares.pop(k)
        spares.clear()
        return torch.empty(num_bytes + num_bytes // 4, dtype=torch.uint8, device=self._device)

    def give(self, workspace: torch.Tensor) -> None:
        """Later work on it is ordered behind this batch by the stream, which is why streams do not
        share them."""
        if self._is_captured():
            return
        spares = self._spare.setdefault(self._stream(), [])
        if len(spares) < self._MOST:
            spares.append(workspace)

    def _stream(self) -> int:
        if self._device.type != "cuda":
            return 0
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def _is_captured(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
