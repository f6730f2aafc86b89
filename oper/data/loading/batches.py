"""Batches for training from a preprocessed folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from oper.data.folder import Folder
from oper.data.loading.groups import Column, GroupReader, RowGroups, joined
from oper.errors import InvalidInputError, fail


@dataclass(frozen=True, slots=True, eq=False)
class ArrayBatch:
    """One rank's share of a global batch, `B` samples.

    Attributes:
        labels: float32 [B], 0 or 1.
        dense: float32 [B, D].
        ids: of a folder without multi-hot columns int64 [C, B], one id per sample and sparse
            column; else int64 [L], the ids of all bags, column by column. Flattened it is the
            `values` of a KJT whose keys are the sparse columns.
        lengths: int32 [C, B], ids of each bag, the `lengths` of that KJT; None = 1 everywhere.
    """

    labels: np.ndarray
    dense: np.ndarray
    ids: np.ndarray
    lengths: np.ndarray | None = None

    @property
    def num_samples(self) -> int:
        """Samples `B`."""
        return int(self.labels.size)


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """How a split is cut into batches.

    Attributes:
        global_batch_size: samples of all ranks together; the ranks' shares are contiguous and as
            equal as possible, the first ranks taking one more where it does not divide.
        rank, world_size: which share to return.
        shuffle: row groups in random order, and rows in random order within a buffer of
            `buffer_rows`; otherwise the order of time.
        seed: order of the shuffle, together with the epoch.
        last: what becomes of an incomplete last global batch: ``"drop"``, or ``"keep"`` (smaller
            shares, possibly none on the last ranks: every rank still sees equally many batches).
        buffer_rows: rows held in memory, at least one row group and one global batch.
    """

    global_batch_size: int
    rank: int = 0
    world_size: int = 1
    shuffle: bool = False
    seed: int = 0
    last: str = "keep"
    buffer_rows: int = 1 << 18

    def __post_init__(self) -> None:
        checks: tuple[tuple[str, bool, str], ...] = (
            ("global_batch_size", self.global_batch_size >= 1, ">= 1"),
            ("world_size", self.world_size >= 1, ">= 1"),
            ("rank", 0 <= self.rank < self.world_size, f"0..{self.world_size - 1}"),
            ("seed", self.seed >= 0, ">= 0"),
            ("last", self.last in ("drop", "keep"), "drop or keep"),
            ("buffer_rows", self.buffer_rows >= 1, ">= 1"),
        )
        for name, ok, expected in checks:
            if not ok:
                raise InvalidInputError(
                    fail("cannot make batches", name, getattr(self, name), expected, "correct it"))


class Batches:
    """The batches of one split of a preprocessed folder.

    The sequence of global batches follows from seed, epoch and global batch size alone, so that
    runs with different world sizes see the same samples in the same steps. To that end every rank
    reads all rows of the split, about a million per second and core, and returns its own.
    """

    def __init__(self, path: str | os.PathLike[str], split: str, options: BatchOptions) -> None:
        """Open the split; raises FileFormatError or InvalidInputError when it cannot be read."""
        self.folder = Folder.open(path)
        self.split, self.options = split, options
        folder = self.folder
        self._groups = RowGroups(folder, split, (folder.label, *folder.dense, *folder.sparse),
                                 frozenset(folder.multi_hot))
        self.num_rows = self._groups.num_rows

    def __len__(self) -> int:
        """Global batches of an epoch."""
        full, rest = divmod(self.num_rows, self.options.global_batch_size)
        return full + (rest > 0 and self.options.last == "keep")

    def __iter__(self) -> Iterator[ArrayBatch]:
        """The batches of epoch 0."""
        return self.epoch(0)

    def epoch(self, number: int, start: int = 0) -> Iterator[ArrayBatch]:
        """This rank's share of the global batches of one epoch.

        Args:
            number: the epoch; with `shuffle` each has an order of its own.
            start: global batches to skip, e.g. when training resumes.
        """
        size = self.options.global_batch_size
        index = 0
        for buffer in self._buffers(number):
            at = 0
            while at < buffer.num_rows:
                count = min(size, buffer.num_rows - at)
                if index >= start and (count == size or self.options.last == "keep"):
                    yield self._share(buffer, slice(at, at + count))
                at += count
                index += 1

    def _share(self, buffer: _Rows, rows: slice) -> ArrayBatch:
        """This rank's rows of the global batch `rows` of a buffer."""
        each, more = divmod(rows.stop - rows.start, self.options.world_size)
        rank = self.options.rank
        first = rows.start + rank * each + min(rank, more)
        mine = slice(first, first + each + (rank < more))
        labels, dense = buffer.labels[mine].astype(np.float32), buffer.dense[:, mine].T
        if not self.folder.multi_hot:
            ids = buffer.ids[:, mine].astype(np.int64)
            return ArrayBatch(labels, np.ascontiguousarray(dense), ids)
        values, lengths = [], np.ones((len(self.folder.sparse), labels.size), np.int32)
        single = iter(buffer.ids)
        for k, name in enumerate(self.folder.sparse):
            if name in buffer.bags:
                bags = buffer.bags[name].part(mine.start, mine.stop)
                values.append(bags.values)
                lengths[k] = bags.lengths
            else:
                values.append(next(single)[mine])
        return ArrayBatch(labels, np.ascontiguousarray(dense),
                          np.concatenate(values).astype(np.int64), lengths)

    def _buffers(self, epoch: int) -> Iterator[_Rows]:
        """Rows in order of the epoch, in whole global batches but for the last buffer."""
        options = self.options
        rng = np.random.default_rng((options.seed, epoch))
        groups = np.arange(self._groups.rows.size)
        if options.shuffle:
            groups = rng.permutation(groups.size)
        reader = GroupReader(self._groups)
        pending: list[_Rows] = []
        num_pending = 0
        wanted = max(options.buffer_rows, options.global_batch_size)
        for k, group in enumerate(groups):
            pending.append(self._load(reader, int(group)))
            num_pending += pending[-1].num_rows
            is_last = k == len(groups) - 1
            if num_pending < wanted and not is_last:
                continue
            rows = _joined(pending)
            if options.shuffle:
                rows = rows.take(rng.permutation(num_pending))
            cut = num_pending if is_last else num_pending - num_pending % options.global_batch_size
            pending = [rows.part(cut, num_pending)]
            num_pending -= cut
            yield rows.part(0, cut)

    def _load(self, reader: GroupReader, group: int) -> _Rows:
        folder, found = self.folder, reader.read(group)

        def stack(names: Sequence[str], dtype: type[np.generic]) -> np.ndarray:
            if not names:
                return np.zeros((0, found[folder.label].values.size), dtype)
            return np.stack([found[n].values for n in names]).astype(dtype, copy=False)

        single = [n for n in folder.sparse if n not in folder.multi_hot]
        widest = max((found[n].values.dtype for n in single), default=np.dtype(np.int32))
        return _Rows(stack([folder.label], np.int8)[0], stack(folder.dense, np.float32),
                     stack(single, widest.type), {n: found[n] for n in folder.multi_hot})


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """n rows: labels int8 [n], dense float32 [D, n], columns of one id each [C, n], bags."""

    labels: np.ndarray
    dense: np.ndarray
    ids: np.ndarray
    bags: dict[str, Column]

    @property
    def num_rows(self) -> int:
        return int(self.labels.size)

    def part(self, start: int, stop: int) -> _Rows:
        """Rows from `start` to before `stop`, without a copy of the ids."""
        return _Rows(self.labels[start:stop], self.dense[:, start:stop], self.ids[:, start:stop],
                     {n: b.part(start, stop) for n, b in self.bags.items()})

    def take(self, order: np.ndarray) -> _Rows:
        """The rows in another order."""
        return _Rows(self.labels[order], self.dense[:, order], self.ids[:, order],
                     {n: b.take(order) for n, b in self.bags.items()})


def _joined(parts: Sequence[_Rows]) -> _Rows:
    if len(parts) == 1:
        return parts[0]
    return _Rows(np.concatenate([p.labels for p in parts]),
                 np.concatenate([p.dense for p in parts], axis=1),
                 np.concatenate([p.ids for p in parts], axis=1),
                 {n: joined([p.bags[n] for p in parts]) for n in parts[0].bags})
