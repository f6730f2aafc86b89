"""Batches for training from a preprocessed folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from oper.data.folder import Folder, reading
from oper.errors import FileFormatError, InvalidInputError, fail


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
        for buffer in self._buffers(number):
            at = 0
            while at < buffer.num_rows:
                count = min(size, buffer.num_rows - at)
                if index >= start and (count == size or self.options.last == "keep"):
                    yield self._share(buffer, slice(at, at + count))
                at += count
                index += 1
            left -= buffer.num_rows
        if left:
            raise FileFormatError(
                fail(f"cannot read {str(self.folder.path)!r}", "rows", self.num_rows - left,
                     f"{self.num_rows}", "the folder changed while it was read, open it again"))

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
                bags = buffer.bags[name]
                values.append(bags.ids[bags.ends[mine.start]:bags.ends[mine.stop]])
                lengths[k] = np.diff(bags.ends[mine.start:mine.stop + 1])
            else:
                values.append(next(single)[mine])
        return ArrayBatch(labels, np.ascontiguousarray(dense),
                          np.concatenate(values).astype(np.int64), lengths)

    def _buffers(self, epoch: int) -> Iterator[_Rows]:
        """Rows in order of the epoch, in whole global batches but for the last buffer."""
        options = self.options
        rng = np.random.default_rng((options.seed, epoch))
        groups = self._groups
        if options.shuffle:
            groups = [groups[k] for k in rng.permutation(len(groups))]
        pending: list[_Rows] = []
        num_pending = 0
        wanted = max(options.buffer_rows, options.global_batch_size)
        for k, group in enumerate(groups):
            pending.append(self._load(*group))
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

    def _load(self, part: Path, group: int) -> _Rows:
        folder = self.folder
        file = folder.open_part(part, self._columns)
        with reading(part):
            table = file.read_row_group(group, columns=list(self._columns))

        def stack(names: Sequence[str], dtype: type[np.generic]) -> np.ndarray:
            if not names:
                return np.zeros((0, table.num_rows), dtype)
            for name in names:
                kind = table.schema.field(name).type
                if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
                    raise FileFormatError(fail(f"cannot read {str(part)!r}", name, str(kind),
                                               "one number per row", "preprocess again"))
            return np.stack([table.column(n).to_numpy() for n in names]).astype(dtype, copy=False)

        single = [n for n in folder.sparse if n not in folder.multi_hot]
        ids = stack(single, np.int32)
        bags = {n: _bags(part, n, table.column(n).combine_chunks()) for n in folder.multi_hot}
        found = {**dict(zip(single, ids, strict=True)), **{n: b.ids for n, b in bags.items()}}
        for name, rows in zip(folder.sparse, folder.num_rows, strict=True):
            column = found[name]
            if column.size and not 0 <= column.min() <= column.max() < rows:
                raise FileFormatError(
                    fail(f"cannot read {str(part)!r}", f"ids of {name}",
                         (int(column.min()), int(column.max())), f"0 <= id < num_rows={rows}",
                         "preprocess again"))
        return _Rows(stack([folder.label], np.int8)[0], stack(folder.dense, np.float32), ids, bags)


@dataclass(frozen=True, slots=True, eq=False)
class _Bags:
    """A column's ids int32 [L], and where each of the n bags ends, int64 [n + 1] (the first 0)."""

    ids: np.ndarray
    ends: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """n rows: labels int8 [n], dense float32 [D, n], columns of one id each int32 [C, n], bags."""

    labels: np.ndarray
    dense: np.ndarray
    ids: np.ndarray
    bags: dict[str, _Bags]

    @property
    def num_rows(self) -> int:
        return int(self.labels.size)

    def part(self, start: int, stop: int) -> _Rows:
        """Rows from `start` to before `stop`, without a copy of the ids."""
        bags = {}
        for name, b in self.bags.items():
            first, last = b.ends[start], b.ends[stop]
            bags[name] = _Bags(b.ids[first:last], b.ends[start:stop + 1] - first)
        return _Rows(self.labels[start:stop], self.dense[:, start:stop], self.ids[:, start:stop],
                     bags)

    def take(self, order: np.ndarray) -> _Rows:
        """The rows in another order."""
        bags = {}
        for name, b in self.bags.items():
            lengths = np.diff(b.ends)[order]
            ends = np.concatenate([[0], np.cumsum(lengths)])
            at = np.arange(ends[-1]) + np.repeat(b.ends[order] - ends[:-1], lengths)
            bags[name] = _Bags(b.ids[at], ends)
        return _Rows(self.labels[order], self.dense[:, order], self.ids[:, order], bags)


def _joined(parts: Sequence[_Rows]) -> _Rows:
    if len(parts) == 1:
        return parts[0]
    bags = {}
    for name in parts[0].bags:
        same = [p.bags[name] for p in parts]
        starts = np.cumsum([0, *(b.ids.size for b in same)])
        ends = [b.ends[1:] + start for b, start in zip(same, starts, strict=False)]
        bags[name] = _Bags(np.concatenate([b.ids for b in same]), np.concatenate([[0], *ends]))
    return _Rows(np.concatenate([p.labels for p in parts]),
                 np.concatenate([p.dense for p in parts], axis=1),
                 np.concatenate([p.ids for p in parts], axis=1), bags)


def _bags(part: Path, name: str, column: pa.Array) -> _Bags:
    if not pa.types.is_list(column.type) or column.null_count:
        raise FileFormatError(
            fail(f"cannot read {str(part)!r}", name, str(column.type), "lists without nulls",
                 "preprocess again"))
    ends = np.asarray(column.offsets.to_numpy(), np.int64)
    ids = column.values.to_numpy(zero_copy_only=False)[ends[0]:ends[-1]]
    return _Bags(ids, ends - ends[0])
