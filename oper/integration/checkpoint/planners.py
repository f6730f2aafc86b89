"""Planners for ``torch.distributed.checkpoint`` that save and load tables in bounded memory.

The planners read and write `TableRows` chunk by chunk, so that saving or loading a table needs
memory for only a few chunks. Saved checkpoints are ordinary ones that any planner can load.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from oper.errors import InvalidInputError
from oper.integration.checkpoint.on_demand import TableRows
from oper.integration.checkpoint.row_states import StateOfPieces
from oper.shmem.keys.directories import RECORDS


class SavePlanner(DefaultSavePlanner):
    """A save planner that reads the rows of `TableRows` chunk by chunk while it writes them.

    torch's default planner saves all other values. Chunks of a table are assigned to ranks
    round-robin, regardless of which ranks own the rows.

    Attributes:
        alone: whether this rank writes all chunks.
    """

    alone = False

    def create_local_plan(self) -> SavePlan:
        rows, others = _split(self.state_dict)
        plan = create_default_local_save_plan(others, self.is_coordinator)
        items = [item for name, value in rows.items()
                 for item in _write_items(name, value, self.alone)]
        mappings = self.mappings if self.flatten_state_dict else None
        self.plan = SavePlan([*plan.items, *items], planner_data=mappings)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        value = self.state_dict.get(write_item.index.fqn)
        if not isinstance(value, TableRows):
            return super().resolve_data(write_item)
        assert write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        return value.read(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0])


def _write_items(name: str, value: TableRows, alone: bool) -> list[WriteItem]:
    """Return the write items of this rank's chunks. The first chunk's rank depends on the name, so
    that small tables are spread over the ranks."""
    group = value.tables.group
    alone |= group.is_local
    world_size, rank = (1, 0) if alone else (group.world_size, group.rank)
    properties = TensorProperties(dtype=value.dtype)
    zeros = (0,) * (len(value.shape) - 1)
    items = []
    for turn, (begin, end) in enumerate(value.chunks(), zlib.crc32(name.encode())):
        if turn % world_size == rank:
            offsets = torch.Size((begin, *zeros))
            sizes = torch.Size((end - begin, *value.shape[1:]))
            items.append(WriteItem(
                MetadataIndex(name, offsets), WriteItemType.SHARD,
                tensor_data=TensorWriteData(ChunkStorageMetadata(offsets, sizes), properties,
                                            value.shape)))
    return items


def _check_keys(rows: Iterable[str], wanted: Container[str], stored: Container[str]) -> None:
    """Raise InvalidInputError if the checkpoint has keys for a table that the model has without."""
    for name in rows:
        prefix = name.removesuffix("weight")
        left = [f"{prefix}{part}" for part in (*RECORDS, "clock")
                if f"{prefix}{part}" in stored and f"{prefix}{part}" not in wanted]
        if left and prefix != name:
            raise InvalidInputError(f"cannot load {name!r}, rows of a dynamic table",
                                    "entries that the model lacks", left,
                                    "a table with the same keys",
                                    "shard it with the argument `dynamic` of the run that saved")


def _check_states(rows: Iterable[str], wanted: Container[str], stored: Container[str]) -> None:
    """Raise InvalidInputError if the checkpoint has second moments for a table whose optimizer has
    none: ``momentum1`` then has first moments, as of Adam, instead of sums of squares."""
    for name in rows:
        other = name.removesuffix("momentum1") + "exp_avg_sq"
        if name.endswith(".momentum1") and other in stored and other not in wanted:
            raise InvalidInputError(f"cannot load {name!r}", "saved second moments", other,
                                    "none, since the table's optimizer has none",
                                    "shard with the optimizer of the run that saved")


def _is_wanted(rows: TableRows, offsets: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether this rank owns any part of a range of rows or of rows and columns."""
    begin, first = (*offsets, 0)[:2]
    num_rows, width = (*sizes, 1)[:2]
    return rows.is_held_here(begin, begin + num_rows, range(first, first + width))


class LoadPlanner(DefaultLoadPlanner):
    """A load planner that writes stored chunks directly to the tables of `TableRows`.

    Every rank reads the stored chunks that contain its rows and writes those rows. torch's readers
    read a stored chunk into memory at once, which is small in checkpoints of `SavePlanner`. For
    large chunks of other writers, use `CheckpointReader`, as `oper.load_checkpoint` does: it reads
    chunks piece by piece. Call ``load_state_dict`` afterwards to make the rows visible to all
    ranks. If a load fails, the tables contain a mixture of old and new rows.

    Values named in `optional` may be missing in the checkpoint, and are then left as they are.

    With `grown`, a table may have more rows than the checkpoint, as after ``oper vocabulary
    extend``: its first rows and their optimizer states are loaded, and the others stay unchanged.

    Other values are loaded as by torch's default planner, with two differences: only tensors and
    plain values are unpickled, and row-wise optimizer states are converted between OPER's form and
    TorchRec's column-wise sharding, see `oper.integration.checkpoint.row_states`.
    """

    optional: frozenset[str] = frozenset()
    _pieces: dict[str, StateOfPieces]

    def __init__(self, *args: Any, grown: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._grown = grown

    def set_up_planner(self, state_dict: dict[str, Any], metadata: Metadata | None = None,
                       is_coordinator: bool = False) -> None:
        # torch's traversal of the values replaces objects of unknown types by None but keeps
        # strings, so that TableRows are wrapped in a subclass of str in the meantime.
        places = list(_places_of_rows(state_dict))
        for owner, key, value in places:
            owner[key] = _RowsAsText.of(value)
        try:
            super().set_up_planner(state_dict, metadata, is_coordinator)
        finally:
            for owner, key, value in places:
                owner[key] = value
        self.state_dict = {name: value.rows if isinstance(value, _RowsAsText) else value
                           for name, value in self.state_dict.items()}

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        stored = self.metadata.state_dict_metadata
        self._pieces = {}
        for name, value in self.state_dict.items():
            found = stored.get(name)
            if isinstance(found, TensorStorageMetadata) and StateOfPieces.fits(value, found):
                self._pieces[name] = StateOfPieces(name, value, found, self.metadata)
        rows, others = _split({n: v for n, v in self.state_dict.items() if n not in self._pieces})
        _check_keys(rows, self.state_dict, stored)
        _check_states(rows, self.state_dict, stored)
        others |= {name: state.buffer for name, state in self._pieces.items()}
        others = {n: v for n, v in others.items() if n in stored or n not in self.optional}
        plan = create_default_local_load_plan(others, self.metadata, not self.allow_partial_load)
        for item in plan.items:
            if item.dest_index.fqn in self._pieces:
                self._pieces[item.dest_index.fqn].num_left += 1
        items = [item for name, value in rows.items()
                 for item in self._read_items(name, value)]
        for tables in {id(v.tables): v.tables for v in rows.values()}.values():
            tables.barrier()  # peers may still be reading
        return LoadPlan([*plan.items, *items])

    def _read_items(self, name: str, value: TableRows) -> list[ReadItem]:
        """Return a read item for every stored chunk that contains rows of this rank."""
        assert self.metadata is not None
        stored = self.metadata.state_dict_metadata.get(name)
        what = f"cannot load table {value.name!r} ({name})"
        if stored is None and self.allow_partial_load:
            return []
        if not isinstance(stored, TensorStorageMetadata):
            found = "missing" if stored is None else type(stored).__name__
            raise InvalidInputError(what, "in the checkpoint", found, "a tensor of that name",
                                    "load a checkpoint of this model")
        saved, here = tuple(stored.size), tuple(value.shape)
        if saved != here and not (self._grown and saved[1:] == here[1:] and saved[0] < here[0]):
            raise InvalidInputError(
                what, "saved shape", saved, f"{here}" + ", or fewer rows" * self._grown,
                "load a checkpoint of this model"
                + ", or one whose tables have grown with grown=True" * (not self._grown))
        items = []
        for k, chunk in enumerate(stored.chunks):
            # Ranks without rows of a small table have stored empty chunks.
            if 0 in chunk.sizes or not _is_wanted(value, chunk.offsets, chunk.sizes):
                continue
            index = MetadataIndex(name, chunk.offsets, k)
            items.append(ReadItem(
                LoadItemType.TENSOR, index, chunk.offsets, index,
                torch.Size([0] * len(chunk.sizes)), chunk.sizes))
        return items

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        loaded = torch.load(value, map_location="cpu", weights_only=True)
        name = read_item.dest_index.fqn
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], loaded)
        else:
            self.state_dict[name] = loaded

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        name = read_item.dest_index.fqn
        value = self.state_dict.get(name)
        if isinstance(value, TableRows) and name not in self._pieces:
            return torch.empty(read_item.lengths, dtype=value.dtype)
        return super().resolve_tensor(read_item)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        state = self._pieces.get(index.fqn)
        return state.buffer if state is not None else super().lookup_tensor(index)

    def takes_pieces(self, read_item: ReadItem) -> bool:
        """Whether the reader may pass the item to `commit_piece`, a range of rows at a time."""
        name = read_item.dest_index.fqn
        return isinstance(self.state_dict.get(name), TableRows) and name not in self._pieces

    def wants_piece(self, read_item: ReadItem, begin: int, num_rows: int) -> bool:
        """Whether this rank owns any of rows `[begin, begin + num_rows)` of a stored chunk."""
        first, *column = read_item.dest_offsets
        return _is_wanted(self.state_dict[read_item.dest_index.fqn], (first + begin, *column),
                          (num_rows, *read_item.lengths[1:]))

    def commit_piece(self, read_item: ReadItem, begin: int, values: torch.Tensor) -> None:
        """Write `values`, the rows of a stored chunk from its row `begin` on, to the table."""
        rows = self.state_dict[read_item.dest_index.fqn]
        assert isinstance(rows, TableRows)
        first, *column = read_item.dest_offsets
        rows.write(values.to(rows.dtype), first + begin, *column)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        value = self.state_dict.get(read_item.dest_index.fqn)
        state = self._pieces.get(read_item.dest_index.fqn)
        if state is not None:
            super().commit_tensor(read_item, tensor)
            state.num_left -= 1
            if state.num_left == 0:
                state.finish()
        elif isinstance(value, TableRows):
            value.write(tensor, *read_item.dest_offsets)
        else:
            super().commit_tensor(read_item, tensor)


class _RowsAsText(str):
    """Wraps `TableRows` in a string, see `LoadPlanner.set_up_planner`."""

    rows: TableRows

    @staticmethod
    def of(rows: TableRows) -> _RowsAsText:
        text = _RowsAsText()
        text.rows = rows
        return text


def _places_of_rows(value: Any) -> Iterator[tuple[Any, Any, TableRows]]:
    """Yield (container, key, value) of all `TableRows` in nested dicts and lists."""
    items = value.items() if isinstance(value, dict) else (
        enumerate(value) if isinstance(value, list) else ())
    for key, item in items:
        if isinstance(item, TableRows):
            yield value, key, item
        else:
            yield from _places_of_rows(item)


def _split(state_dict: Mapping[str, Any]) -> tuple[dict[str, TableRows], dict[str, Any]]:
    """Return the `TableRows` in a state, and its other values."""
    rows = {name: value for name, value in state_dict.items() if isinstance(value, TableRows)}
    return rows, {name: value for name, value in state_dict.items() if name not in rows}
