"""``state_dict`` values that read rows from the tables in logical order on request."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from oper.errors import InvalidInputError, OperError
from oper.shmem.tables import ShardedTables

CHUNK_BYTES = 64 << 20
_ROWS_AT_ONCE = 1 << 16  # rows whose owners are located in one call
# The size of chunks of `TableRows`, 0 = ``state_dict()`` has tensors; and whether it may copy rows.
_MODE: contextvars.ContextVar[tuple[int, bool]] = contextvars.ContextVar("mode", default=(0, True))


class TableRows:
    """A handle to a table, or to a part of its optimizer state, in logical order.

    Inside `rows_on_demand`, ``state_dict`` has handles instead of tensors: `oper.SavePlanner`,
    `oper.LoadPlanner`, or `read` and `write`, copy rows from or to the tables a chunk at a time.

    Args:
        tables: the collection that holds the table.
        name: table name.
        part: ``"rows"`` or a part of the optimizer state.
        chunk_bytes: maximum size of a chunk, which has at least one row.

    Attributes:
        shape: global shape, [num_rows, dim], or [num_rows] for a state with one number per row.
        dtype: dtype of the values.
        chunk_rows: rows per chunk.
        source: the value that `load_state_dict` has accepted for loading, or None.
        version: tensor whose version counter every update of the rows must increment, by which
            autograd notices the update; None if `oper.integration.table_tensor` has arranged this,
            or if it is not needed.
        views: the views of a weight that are in use, by their ``id``; None for other handles.
    """

    def __init__(self, tables: ShardedTables, name: str, part: str = "rows",
                 chunk_bytes: int = CHUNK_BYTES) -> None:
        self.tables = tables
        self.name = name
        self.part = part
        self.source: Any = None
        self.version: Any = None
        self.views: Any = None
        self.shape = torch.Size(tables.shape(name, part))
        self.dtype = tables.dtype(name, part)
        row_bytes = self.dtype.itemsize * self.shape[1:].numel()
        self.chunk_rows = max(1, chunk_bytes // row_bytes)

    def size(self) -> torch.Size:
        """Return the global shape, like ``torch.Tensor.size``."""
        return self.shape

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Return a copy of rows `[begin, end)`."""
        return self.tables.read(self.name, begin, end, self.part)

    def write(self, values: torch.Tensor, begin: int, column: int = 0) -> None:
        """Write `values` to rows from `begin` and columns from `column`.

        Call ``tables.flush_replicas()`` after the last write.
        """
        self.tables.write(self.name, values, begin, self.part, column)

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Yield ranges `[begin, end)` of at most `chunk_rows` rows that cover the table."""
        for at in range(0, self.shape[0], self.chunk_rows):
            yield at, min(self.shape[0], at + self.chunk_rows)

    def is_held_here(self, begin: int, end: int, columns: range) -> bool:
        """Whether this rank owns any part of rows `[begin, end)` in the given columns."""
        tables, rank = self.tables, self.tables.group.rank
        for k in tables.pieces[self.name]:
            directory, mine = tables.directories[k], tables.columns(self.part, k)
            overlaps = mine.start < columns.stop and columns.start < mine.stop
            if not overlaps or not directory.num_slots[rank]:
                continue
            for at in range(begin, end, _ROWS_AT_ONCE):
                ids = np.arange(at, min(end, at + _ROWS_AT_ONCE))
                if (directory.locate(directory.position_of(ids))[0] == rank).any():
                    return True
        return False

    def is_same(self, other: TableRows) -> bool:
        """Whether both refer to the same part of the same table."""
        return (self.tables is other.tables and self.name == other.name
                and self.part == other.part)

    def load_state_dict(self, value: Any) -> None:
        """Check a value and retain it for ``load_entry``, which writes it to the table.

        TorchRec's optimizers call this method to fill their state. Writing is deferred so that an
        invalid state changes nothing.
        """
        self.check(value)
        self.source = value

    def check(self, value: Any) -> None:
        """Raise InvalidInputError unless `value` can be written here."""
        what = f"cannot load table {self.name!r}"
        if type(value).__name__ == "ShardedTensor":
            raise InvalidInputError(
                what, "value", "ShardedTensor", "a DTensor or a whole tensor",
                "save and load with torch.distributed.checkpoint, which reshards")
        check_rank(what, value, self.tables.group.rank)
        # A nested tensor has no shape.
        found = () if getattr(value, "is_nested", False) else tuple(getattr(value, "shape", ()))
        if not isinstance(value, torch.Tensor | TableRows) or found != self.shape:
            raise InvalidInputError(what, "type, shape", (type(value).__name__, found),
                                    f"a tensor of shape {tuple(self.shape)}",
                                    "load a state_dict of this model")
        if isinstance(value, torch.Tensor) and (
                value.is_meta or value.layout != torch.strided or value.is_complex()
                or value.is_quantized):
            raise InvalidInputError(what, "device, layout, dtype",
                                    (value.device.type, value.layout, value.dtype),
                                    "a dense tensor of real numbers", "convert it")

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__reduce_ex__(4)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise OperError("rows on demand cannot be copied or pickled", "table", self.name,
                        "a planner that fetches them",
                        "save with planner=oper.SavePlanner(), or call state_dict() outside of "
                        "rows_on_demand()")

    def __repr__(self) -> str:
        return f"TableRows({self.name!r}, {self.part!r}, {tuple(self.shape)}, {self.dtype})"


def is_divided(value: Any) -> bool:
    """Whether a value is a ``DTensor``, of which every rank holds a part."""
    # Without the import of torch.distributed.tensor, which programs of one process do not need.
    return hasattr(value, "full_tensor")


def note_rank(value: Any, rank: int) -> None:
    """Note in a ``DTensor`` that it contains this rank's part; ``torch.save`` keeps the note."""
    value._local_tensor.oper_rank = rank


def check_rank(what: str, value: Any, rank: int) -> None:
    """Raise InvalidInputError, which begins with `what`, if a ``DTensor`` contains another rank's
    part. After ``torch.save`` on one rank and ``torch.load`` on all, every rank has that part."""
    saved = getattr(getattr(value, "_local_tensor", None), "oper_rank", rank)
    if saved != rank:
        raise InvalidInputError(
            what, "rank whose rows the state_dict contains", saved, f"{rank}, this rank",
            "save with oper.save_checkpoint or torch.distributed.checkpoint, or save and load a "
            "file on each rank, since the state_dict of a rank contains only a part of the rows")


@contextlib.contextmanager
def _in_mode(chunk_bytes: int, may_copy: bool) -> Iterator[None]:
    token = _MODE.set((chunk_bytes, may_copy))
    try:
        yield
    finally:
        _MODE.reset(token)


def rows_never() -> contextlib.AbstractContextManager[None]:
    """Inside the block, ``state_dict()`` copies no rows, even if ranks do not share memory.

    It contains `TableRows`, whose rows must not be read, and no keys of dynamic tables. Applies to
    this thread.
    """
    return _in_mode(CHUNK_BYTES, False)


def may_copy_rows() -> bool:
    """Whether ``state_dict()`` may copy rows, that is, whether this is not inside `rows_never`."""
    return _MODE.get()[1]


def chunk_bytes_of(tables: ShardedTables) -> int:
    """Return the chunk size of the `TableRows` that ``state_dict()`` of `tables` currently contains
    instead of tensors; 0 if it contains tensors."""
    chunk_bytes, may_copy = _MODE.get()
    return chunk_bytes if tables.is_one_domain or not may_copy else 0


def rows_on_demand(chunk_bytes: int = CHUNK_BYTES) -> contextlib.AbstractContextManager[None]:
    """Inside the block, ``state_dict()`` of sharded modules and their optimizers copies no rows.

    If all ranks share memory, tables and optimizer states are `TableRows`, for
    ``torch.distributed.checkpoint`` with `oper.SavePlanner` and `oper.LoadPlanner`; otherwise they
    are DTensors. Applies to this thread.

    Args:
        chunk_bytes: maximum size of the chunks in which rows are saved.

    Raises:
        InvalidInputError: `chunk_bytes` is not positive.
    """
    if chunk_bytes < 1:
        raise InvalidInputError("cannot save rows on demand", "chunk_bytes", chunk_bytes, ">= 1",
                                "pass for example 64 << 20")
    return _in_mode(chunk_bytes, may_copy_rows())
