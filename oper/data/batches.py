"""Batches for training from a preprocessed folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from oper.data.folder import Folder, reading
from oper.errors import FileFormatError, InvalidInputError, fail


@dataclass(frozen=True, slots=True, eq=False)
class ArrayBatch:
    """One rank's share of a global batch, `B` samples.

    Attributes:
        labels: float32 [B], 0 or 1.
        dense: float32 [B, D].
        ids: int64 [C, B], one id per sample and sparse column. Flattened it is the `values` of a
            KJT whose keys are the sparse columns and whose lengths are all 1.
    """

    labels: np.ndarray
    dense: np.ndarray
    ids: np.ndarray

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
        if self.folder.multi_hot:
            raise InvalidInputError(
                fail(f"cannot make batches of {os.fspath(path)!r}", "multi-hot columns",
                     list(self.folder.multi_hot), "one id per row and column",
                     "read its Parquet parts, whose list columns are bags, with a loader of your "
                     "own"))
        self.split, self.options = split, options
        self._columns = (self.folder.label, *self.folder.dense, *self.folder.sparse)
        self._groups: list[tuple[Path, int]] = []
        rows = 0
        for part in self.folder.parts(split):
            file = self.folder.open_part(part, self._columns)
            self._groups += [(part, g) for g in range(file.metadata.num_row_groups)]
            rows += file.metadata.num_rows
        if rows != self.folder.rows[split]:
            raise FileFormatError(
                fail(f"cannot read {os.fspath(path)!r}", f"{split} rows", rows,
                     f"{self.folder.rows[split]} as the manifest says", "preprocess again"))
        self.num_rows = rows

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
        size, left = self.options.global_batch_size, self.num_rows
        index = 0
        for labels, dense, ids in self._buffers(number):
            at = 0
            while at < labels.size:
                count = min(size, labels.size - at)
                if index >= start and (count == size or self.options.last == "keep"):
                    yield self._share(labels, dense, ids, slice(at, at + count))
                at += count
                index += 1
            left -= labels.size
        if left:
            raise FileFormatError(
                fail(f"cannot read {str(self.folder.path)!r}", "rows", self.num_rows - left,
                     f"{self.num_rows}", "the folder changed while it was read, open it again"))

    def _share(self, labels: np.ndarray, dense: np.ndarray, ids: np.ndarray,
               rows: slice) -> ArrayBatch:
        """This rank's rows of the global batch `rows` of a buffer."""
        each, more = divmod(rows.stop - rows.start, self.options.world_size)
        rank = self.options.rank
        first = rows.start + rank * each + min(rank, more)
        mine = slice(first, first + each + (rank < more))
        return ArrayBatch(labels[mine].astype(np.float32),
                          np.ascontiguousarray(dense[:, mine].T), ids[:, mine].astype(np.int64))

    def _buffers(self, epoch: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Rows in order of the epoch, in buffers of whole global batches except for the last one.

        Yields labels int8 [n], dense float32 [D, n], ids int32 [C, n].
        """
        options = self.options
        rng = np.random.default_rng((options.seed, epoch))
        groups = self._groups
        if options.shuffle:
            groups = [groups[k] for k in rng.permutation(len(groups))]
        pending: list[tuple[np.ndarray, ...]] = []
        num_pending = 0
        wanted = max(options.buffer_rows, options.global_batch_size)
        for k, group in enumerate(groups):
            pending.append(self._load(*group))
            num_pending += pending[-1][0].size
            is_last = k == len(groups) - 1
            if num_pending < wanted and not is_last:
                continue
            arrays = [np.concatenate(a, axis=-1) for a in zip(*pending, strict=True)]
            if options.shuffle:
                order = rng.permutation(num_pending)
                arrays = [a[..., order] for a in arrays]
            cut = num_pending if is_last else num_pending - num_pending % options.global_batch_size
            labels, dense, ids = (a[..., :cut] for a in arrays)
            pending = [tuple(a[..., cut:] for a in arrays)]
            num_pending -= cut
            yield labels, dense, ids

    def _load(self, part: Path, group: int) -> tuple[np.ndarray, ...]:
        folder = self.folder
        file = folder.open_part(part, self._columns)
        with reading(part):
            table = file.read_row_group(group, columns=list(self._columns))

        def stack(names: tuple[str, ...], dtype: type[np.generic]) -> np.ndarray:
            if not names:
                return np.zeros((0, table.num_rows), dtype)
            return np.stack([table.column(n).to_numpy() for n in names]).astype(dtype, copy=False)

        ids = stack(folder.sparse, np.int32)
        for name, column, rows in zip(folder.sparse, ids, folder.num_rows, strict=True):
            if column.size and not 0 <= column.min() <= column.max() < rows:
                raise FileFormatError(
                    fail(f"cannot read {str(part)!r}", f"ids of {name}",
                         (int(column.min()), int(column.max())), f"0 <= id < num_rows={rows}",
                         "preprocess again"))
        return stack((folder.label,), np.int8)[0], stack(folder.dense, np.float32), ids
