"""`Loader`: TorchRec batches from a preprocessed folder; each rank reads its own row groups."""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from oper.data.folder import Folder
from oper.data.loading.groups import RowGroups
from oper.data.loading.kjt import Assembly
from oper.data.loading.windows import EpochOrder, WindowReader
from oper.errors import InvalidInputError, require, require_fields
from oper.ranges import Count, one_of, rules_of, within

_STATE_KIND, _STATE_VERSION = "oper-loader", 1
_MOST = (1 << 31) - 1  # largest number of samples or ranks


@dataclass(frozen=True, slots=True)
class LoaderOptions:
    """How a rank's batches are made.

    Attributes:
        batch_size: samples per rank and batch.
        window: number of rows that are shuffled together, rounded down to a multiple of the batch
            size (at least one batch). Row groups are shuffled too. 0 = the folder's order.
        seed: seed of the shuffle, combined with the epoch.
        drop_last: leave out incomplete last batches (see `Loader`).
        share: how data is divided among ranks. ``"rows"``: each rank reads different row groups.
            ``"batches"``: every rank reads all rows and takes its part of each global batch, so
            global batches do not depend on the number of ranks.
        rank, world_size: this rank and the number of ranks; None = those of `torch.distributed` if
            it is initialized when the loader is created, else rank 0 of 1.
        prefetch: number of groups of `interleave` windows to read ahead, each on its own thread;
            0 = none.
        pin_memory: make batches in page-locked memory; None = if a CUDA device is available.
            Ignored in worker processes of a DataLoader: pass ``pin_memory=True`` to it instead.
        weights: by sparse column, the name of the Parquet column with its per-sample weights, one
            number per id. Sparse columns without an entry get weights of 1.
        interleave: number of consecutive windows whose batches alternate. If it is a multiple of a
            DataLoader's `num_workers`, each worker reads only some of the windows, not all.
        group_by: name of a sparse column with one id per row, such as a session or user: within a
            window, rows with equal ids are adjacent and in the folder's order. "" = none.
        deduplicate: sparse columns whose equal bags in a batch are stored once, with
            ``inverse_indices`` and a variable batch size per feature in the KeyedJaggedTensor.
    """

    batch_size: Annotated[int, within(1, _MOST)]
    window: Annotated[int, within(0, _MOST)] = 1 << 17
    seed: Annotated[int, within(0, (1 << 64) - 1)] = 0
    drop_last: bool = False
    share: Annotated[str, one_of("rows", "batches")] = "rows"
    rank: Count | None = None
    world_size: Annotated[int, within(1, _MOST)] | None = None
    prefetch: Annotated[int, within(0, 64)] = 1
    pin_memory: bool | None = None
    weights: Mapping[str, str] = field(default_factory=dict)
    interleave: Annotated[int, within(1, 1024)] = 1
    group_by: str = ""
    deduplicate: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        what = "cannot make a loader"
        require(what, "set both", ("rank, world_size", (self.rank, self.world_size),
                                    (self.rank is None) == (self.world_size is None),
                                    "both or none"))
        require_fields(self, what, "change this field of LoaderOptions", *rules_of(self),
                       ("rank", self.rank is None or self.rank < (self.world_size or 0),
                        "below world_size"),
                       ("group_by", not self.group_by or bool(self.window),
                        "a window > 0, within which rows are grouped"))


class Loader(IterableDataset):  # type: ignore[type-arg]
    """Iterable dataset with the batches of one rank, from a split of a preprocessed folder.

    One iteration yields the batches of one epoch, TorchRec ``Batch`` objects of B samples:

    - ``dense_features`` float32 [B, D];
    - ``sparse_features``, a KeyedJaggedTensor with one key per sparse column, values int64 and
      lengths int32;
    - ``labels`` float32 [B].

    **Shares.** The row groups of an epoch, in random order if there is a window, form one sequence
    of rows. Each rank takes a contiguous part of it; parts differ by at most one row. So every row
    occurs once per epoch, and a rank reads only the row groups of its part, the first and the last
    of which it may share with its neighbours. With ``share="batches"`` the sequence is cut into
    global batches of ``batch_size * world_size`` rows instead, and each rank takes its part of
    every global batch: runs on different numbers of ranks use the same samples in the same steps.

    **Number of batches.** Every rank yields ``len(loader)`` batches. The last one may be incomplete
    (or empty, on a rank without rows left). With `drop_last`, all ranks leave out an incomplete
    last batch: ``num_dropped`` rows per epoch, different ones in each epoch if there is a window.

    **Order.** The rows of a batch and their order depend only on the folder, `share`, seed, epoch,
    rank, world size, batch size, window, `interleave` and `group_by`.

    **Workers.** ``DataLoader(loader, batch_size=None, num_workers=N)`` gives the same batches in
    the same order for every N: each worker makes 1/N of them. Batches are then sent between
    processes, which costs more than the threads of `prefetch`; and unless `interleave` is a
    multiple of N, each worker has to decompress every window of the rank.

    **Epochs.** `set_epoch` chooses the epoch of the next iteration, as in
    ``DistributedSampler``, including that of persistent workers.

    **Resuming.** `state_dict` is a small JSON-serializable object, the same on all ranks.
    """

    def __init__(self, path: str | os.PathLike[str], split: str, options: LoaderOptions) -> None:
        """Open a split; rows are read only when iterating.

        Args:
            path: a folder that ``oper preprocess`` wrote.
            split: ``"train"``, ``"valid"`` or ``"test"``.
            options: how batches are made.

        Raises:
            FileFormatError: the folder or its files are damaged or incomplete.
            InvalidInputError: `path` is a URL, there is no such split, or an option names an
                unsuitable column.
        """
        self.folder, self.split, self.options = Folder.open(path, allow_raw=True), split, options
        self.rank, self.world_size = ranks() if options.rank is None else (
            options.rank, options.world_size or 1)
        self._assembly = Assembly(self.folder, options.weights, options.deduplicate)
        self._check_group()
        self._groups = RowGroups(self.folder, split, self._assembly.columns,
                                 self._assembly.bags)
        # In shared memory, so that set_epoch() takes effect in persistent workers.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        self._resume: tuple[int, int, list[int] | None] = (0, 0, None)  # epoch, batch, worker
        self._next = 0  # number of the batch after the last one returned
        self._iteration = 0  # number of the current iterator; earlier ones do not change `_next`

    def _check_group(self) -> None:
        name = self.options.group_by
        single = [n for n in self.folder.sparse if n not in self.folder.multi_hot]
        require("cannot make a loader", "name such a column, or leave group_by empty",
                ("group_by", name, name in ("", *single),
                 f"a sparse column with one id per row, one of {single}"))

    @property
    def num_rows(self) -> int:
        """Number of rows of the split, over all ranks."""
        return self._groups.num_rows

    @property
    def num_dropped(self) -> int:
        """Number of rows that an epoch leaves out, over all ranks; 0 without `drop_last`."""
        kept = len(self) * self.options.batch_size * self.world_size
        return self.num_rows - kept if self.options.drop_last else 0

    def __len__(self) -> int:
        """Number of batches per epoch, the same on all ranks."""
        size = self.options.batch_size
        if self.options.drop_last:
            return self.num_rows // self.world_size // size
        return -(-self.num_rows // (self.world_size * size))

    @property
    def epoch(self) -> int:
        """The epoch of the current or the next iteration."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch (int >= 0) of the next iteration, which determines the order of rows.

        After `load_state_dict`, choosing the state's own epoch keeps the loaded position.
        """
        require("cannot set the epoch", "count epochs from 0",
                ("epoch", epoch, type(epoch) is int and 0 <= epoch < 1 << 62, "int in [0, 2^62)"))
        if epoch != self.epoch:
            self._iteration += 1
            self._next, self._resume = 0, (epoch, 0, None)
        self._epoch.fill_(epoch)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the epoch; after `load_state_dict`, once from the loaded position."""
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        epoch, first, saved_by = self._resume
        if epoch != self.epoch:
            first, saved_by = 0, None
        self._resume = (self.epoch, 0, None)
        if saved_by is None:
            first += worker
        elif saved_by != [worker, workers]:
            raise InvalidInputError("cannot resume", "worker, workers", [worker, workers],
                                    f"{saved_by}, the worker that saved the state",
                                    "use the same num_workers, or a state of the main process")
        self._iteration += 1
        self._next = min(first, len(self))
        return self._batches(range(first, len(self), workers), self.epoch, self._iteration)

    def _batches(self, wanted: range, epoch: int, iteration: int) -> Iterator[Any]:
        """Yield the batches of an epoch with the indices `wanted`."""
        options = self.options
        by_rows = options.share == "rows"
        order = EpochOrder(
            self._groups.rows, options.batch_size * (1 if by_rows else self.world_size),
            options.window, (options.seed, epoch),
            (self.rank, self.world_size) if by_rows else (0, 1), options.interleave)
        reader = WindowReader(self._groups, order, options.group_by,
                              (options.prefetch + 1) * options.interleave)
        pin = self._pins()

        def make(numbers: list[int]) -> list[Any]:
            places = [order.place(k) for k in numbers]
            found: dict[tuple[int, int], Any] = {}
            for window in sorted({w for w, _ in places}):
                rows = reader.read(window)
                if not by_rows:
                    rows = rows.of_rank(options.batch_size, self.rank, self.world_size)
                inside = [p for p in places if p[0] == window]
                found.update(zip(inside, self._assembly.batches(
                    rows, options.batch_size, [k for _, k in inside], pin), strict=True))
            return [found.pop(p) for p in places]

        number = iter(wanted)
        together = (list(numbers) for _, numbers in itertools.groupby(
            wanted, lambda k: order.place(k)[0] // options.interleave))
        for batches in _prefetched(make, together, options.prefetch):
            while batches:  # popped, so that returned batches can be freed
                if iteration == self._iteration:
                    self._next = min(next(number) + wanted.step, len(self))
                yield batches.pop(0)

    def _pins(self) -> bool:
        if get_worker_info() is not None:  # a forked process must not touch the device
            return False
        wish = self.options.pin_memory
        return torch.cuda.is_available() if wish is None else wish

    def state_dict(self, num_batches: int | None = None) -> dict[str, Any]:
        """Return the position of this loader as a JSON-serializable dict, valid for every rank.

        Args:
            num_batches: number of batches of the epoch used so far. None = the number that this
                object has returned; batches read ahead do not count. Pass it if a DataLoader with
                workers iterates copies of this object; StatefulDataLoader does not need it.
        """
        info = get_worker_info()
        if num_batches is None:
            num_batches = self._next
        require("cannot save the loader's state", "count within the epoch",
                ("num_batches", num_batches, type(num_batches) is int
                 and 0 <= num_batches <= len(self), f"an integer in 0..{len(self)}"))
        return {**self._identity(), "epoch": self.epoch, "batch": num_batches,
                "worker": [info.id, info.num_workers] if info else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration start at the position that `state_dict` recorded.

        Raises:
            InvalidInputError: `state` is not a loader's state, or its loader had another folder,
                split, world size, seed or other option that affects batches; this loader is then
                unchanged.
        """
        what = "cannot load the loader's state"
        expected = self._identity()
        keys = {*expected, "epoch", "batch", "worker"}
        if not isinstance(state, Mapping) or set(state) != keys:
            shown = sorted(map(str, state)) if isinstance(state, Mapping) else state
            raise InvalidInputError(what, "keys", shown, f"{sorted(keys)}",
                                    "pass what state_dict() returned")
        for name, value in expected.items():
            if state[name] != value or type(state[name]) is not type(value):
                raise InvalidInputError(
                    what, name, state[name], f"{value!r} as in this loader", _REMEDIES.get(
                        name, "create the loader with the same options, or start an epoch with "
                        "set_epoch()"))
        epoch, batch, worker = state["epoch"], state["batch"], state["worker"]
        pair = list(worker) if isinstance(worker, list | tuple) else []
        require(what, "pass what state_dict() returned",
                *((name, value, type(value) is int and 0 <= value <= most,
                   f"an integer in 0..{most}") for name, value, most in (
                       ("epoch", epoch, (1 << 62) - 1), ("batch", batch, len(self)))),
                ("worker", worker, worker is None or [type(x) for x in pair] == [int, int],
                 "None, or a worker's index and the number of workers"))
        self._iteration += 1
        self._epoch.fill_(epoch)
        self._next, self._resume = batch, (epoch, batch, None if worker is None else pair)

    def _identity(self) -> dict[str, Any]:
        """Return everything that determines the batches, except for rank, epoch and position."""
        options, world_size = self.options, self.world_size
        whole = options.share == "batches"  # the number of ranks is then free
        return {"kind": _STATE_KIND, "version": _STATE_VERSION, "split": self.split,
                "folder": self._groups.digest, "share": options.share,
                "world_size": None if whole else world_size,
                "batch_size": options.batch_size * (world_size if whole else 1),
                "window": options.window, "seed": options.seed,
                "drop_last": options.drop_last, "interleave": options.interleave,
                "group_by": options.group_by,
                "weights": dict(options.weights), "deduplicate": list(options.deduplicate),
                # Another release of NumPy may draw other numbers from the same seed.
                "shuffle": np.random.default_rng(options.seed).permutation(8).tolist()}


_REMEDIES = {
    "folder": "the folder is a different one or was written again: start an epoch with set_epoch()",
    "world_size": "start as many ranks as before, or start an epoch with set_epoch()",
    "shuffle": "this release of NumPy shuffles differently: use the earlier one, or start an "
               "epoch with set_epoch()",
}


def ranks() -> tuple[int, int]:
    """Return rank and world size in the default process group; (0, 1) if there is none."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def _prefetched(make: Callable[[list[int]], list[Any]], together: Iterable[list[int]],
                prefetch: int) -> Iterator[list[Any]]:
    """Map `make` over groups of batch numbers, running `prefetch` groups ahead on threads."""
    if not prefetch:
        yield from map(make, together)
        return
    pool = ThreadPoolExecutor(prefetch, "oper-loader")
    try:
        pending: deque[Future[list[Any]]] = deque()
        for numbers in together:
            pending.append(pool.submit(make, numbers))
            if len(pending) > prefetch:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
