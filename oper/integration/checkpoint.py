"""Checkpoints of bounded memory: planners for ``torch.distributed.checkpoint``, and save and load.

The planners make and take `TableRows` chunk by chunk, so that saving or loading a table needs the
memory of a few chunks. What they write is an ordinary checkpoint of tensors by name, which any
planner reads.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader
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
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from oper.errors import InvalidInputError, OperError, fail
from oper.integration.on_demand import CHUNK_BYTES, TableRows, rows_on_demand

METADATA = ".metadata"  # written last by torch.distributed.checkpoint: marks a complete checkpoint
_PLAIN = "_plain"


class SavePlanner(DefaultSavePlanner):
    """A save planner that makes `TableRows` chunk by chunk while they are written.

    Every other value is saved as torch's default planner does. The ranks of a table write its
    chunks in turn, whoever owns the rows.
    """

    def create_local_plan(self) -> SavePlan:
        rows, others = _split(self.state_dict)
        plan = create_default_local_save_plan(others, self.is_coordinator)
        items = [item for name, value in rows.items() for item in _write_items(name, value)]
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


def _write_items(name: str, value: TableRows) -> list[WriteItem]:
    """This rank's chunks; ranks begin at different chunks, for the sake of small tables."""
    group = value.tables.group
    world_size = 1 if group.is_local else group.world_size
    rank = 0 if group.is_local else group.rank
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


class LoadPlanner(DefaultLoadPlanner):
    """A load planner that writes stored chunks straight into the tables of `TableRows`.

    Every rank reads the tables that it owns rows of and keeps those rows. A stored chunk comes to
    memory as a whole: checkpoints of `SavePlanner` have small ones, others those of their writer.
    ``load_state_dict`` must follow, which makes the rows visible to all ranks. When a load fails,
    the tables hold a mixture: load again.

    Every other value is loaded as torch's default planner does.
    """

    def set_up_planner(self, state_dict: dict[str, Any], metadata: Metadata | None = None,
                       is_coordinator: bool = False) -> None:
        # torch's walk over the values keeps numbers and text, and puts None for what it does not
        # know.
        places = list(_places_of_rows(state_dict))
        for owner, key, value in places:
            owner[key] = _Standing.of(value)
        try:
            super().set_up_planner(state_dict, metadata, is_coordinator)
        finally:
            for owner, key, value in places:
                owner[key] = value
        self.state_dict = {name: value.rows if isinstance(value, _Standing) else value
                           for name, value in self.state_dict.items()}

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        rows, others = _split(self.state_dict)
        plan = create_default_local_load_plan(others, self.metadata, not self.allow_partial_load)
        items = [item for name, value in rows.items()
                 for item in self._read_items(name, value)]
        for tables in {id(v.tables): v.tables for v in rows.values()}.values():
            tables.barrier()  # peers may still be reading
        return LoadPlan([*plan.items, *items])

    def _read_items(self, name: str, value: TableRows) -> list[ReadItem]:
        """One item per stored chunk, if this rank owns any rows of the table."""
        assert self.metadata is not None
        stored = self.metadata.state_dict_metadata.get(name)
        what = f"cannot load table {value.name!r} ({name})"
        if stored is None and self.allow_partial_load:
            return []
        if not isinstance(stored, TensorStorageMetadata):
            found = "missing" if stored is None else type(stored).__name__
            raise InvalidInputError(fail(what, "in the checkpoint", found, "a tensor of that name",
                                         "load a checkpoint of this model"))
        if tuple(stored.size) != tuple(value.shape):
            raise InvalidInputError(
                fail(what, "saved shape", tuple(stored.size), f"{tuple(value.shape)}",
                     "load a checkpoint of this model"))
        if not value.is_held_here():
            return []
        items = []
        for k, chunk in enumerate(stored.chunks):
            if 0 in chunk.sizes:  # of a rank that had no rows of a small table
                continue
            index = MetadataIndex(name, chunk.offsets, k)
            items.append(ReadItem(
                LoadItemType.TENSOR, index, chunk.offsets, index,
                torch.Size([0] * len(chunk.sizes)), chunk.sizes))
        return items

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        value = self.state_dict.get(read_item.dest_index.fqn)
        if isinstance(value, TableRows):
            return torch.empty(read_item.lengths, dtype=value.dtype)
        return super().resolve_tensor(read_item)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        value = self.state_dict.get(read_item.dest_index.fqn)
        if isinstance(value, TableRows):
            value.write(tensor, *read_item.dest_offsets)
        else:
            super().commit_tensor(read_item, tensor)


class _Standing(str):
    """Text that stands for rows on demand."""

    rows: TableRows

    @staticmethod
    def of(rows: TableRows) -> _Standing:
        text = _Standing()
        text.rows = rows
        return text


def _places_of_rows(value: Any) -> Iterator[tuple[Any, Any, TableRows]]:
    """Container, key and value of all rows on demand in nested dicts and lists."""
    items = value.items() if isinstance(value, dict) else (
        enumerate(value) if isinstance(value, list) else ())
    for key, item in items:
        if isinstance(item, TableRows):
            yield value, key, item
        else:
            yield from _places_of_rows(item)


def _split(state_dict: Mapping[str, Any]) -> tuple[dict[str, TableRows], dict[str, Any]]:
    """The values that are rows on demand, and the others."""
    rows = {name: value for name, value in state_dict.items() if isinstance(value, TableRows)}
    return rows, {name: value for name, value in state_dict.items() if name not in rows}


# ---- save and load -------------------------------------------------------------------------------


def save_checkpoint(folder: str | os.PathLike[str], model: nn.Module, optimizer: Any = None,
                    extra: dict[str, Any] | None = None, *, chunk_bytes: int = CHUNK_BYTES) -> None:
    """Save a model with sharded tables, and what belongs to it, in bounded memory. Collective.

    The checkpoint is written beside `folder` and renamed when it is complete: a crash at any moment
    leaves the previous one loadable by `load_checkpoint`. The folder must be on a file system that
    all ranks share.

    Args:
        folder: where; a checkpoint that is there is replaced.
        model: saved as ``model``; under DDP and DistributedModelParallel by the names of the module
            inside.
        optimizer: anything with ``state_dict``, saved as ``optimizer``: a ``fused_optimizer``, a
            ``CombinedOptimizer``. The states of sharded ``nn.Embedding`` and ``nn.EmbeddingBag``
            modules are saved in any case, as ``tables``.
        extra: tensors and picklable values of your own (the step number, a scheduler's state),
            equal on all ranks; saved as ``extra``.
        chunk_bytes: rows are copied and written in chunks of at most this size.

    Raises:
        OperError: a rank could not write; the previous checkpoint is untouched.
    """
    path = Path(folder).absolute()
    aside = path.with_name(path.name + ".saving")
    before = path.with_name(path.name + ".previous")
    _on_rank0(lambda: _make_room(path, aside, before), "cannot save a checkpoint", path)
    with rows_on_demand(chunk_bytes):
        state = _state_of(model, optimizer) | ({"extra": dict(extra)} if extra else {})
        with _one_error("cannot save a checkpoint", path):
            save(state, checkpoint_id=str(aside), planner=SavePlanner(),
                 no_dist=not _distributed())
    _on_rank0(lambda: _put_in_place(path, aside, before), "cannot save a checkpoint", path)


def load_checkpoint(folder: str | os.PathLike[str], model: nn.Module, optimizer: Any = None
                    ) -> dict[str, Any]:
    """Load what `save_checkpoint` wrote, under any plan and on any number of ranks. Collective.

    Args:
        folder: the checkpoint. When a crash has left it incomplete, the previous one is loaded.
        model, optimizer: as for `save_checkpoint`; filled in place.

    Returns:
        ``extra`` as it was saved, {} without.

    Raises:
        InvalidInputError: there is no checkpoint, or one of another model.
        OperError: a rank could not read; the tables then hold a mixture.
    """
    path = _complete(Path(folder).absolute())
    with rows_on_demand():
        state = _state_of(model, optimizer)
        extra = _stored_extra(path)
        if extra:
            state["extra"] = extra
        with _one_error("cannot load a checkpoint", path):
            load(state, checkpoint_id=str(path), planner=LoadPlanner(),
                 no_dist=not _distributed())
        inner = _inner(model)
        inner.load_state_dict(state["model"])
        if optimizer is not None:
            optimizer.load_state_dict(state["optimizer"])
        for name, module in _bare_modules(inner).items():
            module.load_optimizer_state_dict(state["tables"][name])
    return dict(state.get("extra", {}))


def _state_of(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    inner = _inner(model)
    state: dict[str, Any] = {"model": inner.state_dict()}
    if optimizer is not None:
        state["optimizer"] = optimizer.state_dict()
    bare = {name: module.optimizer_state_dict() for name, module in _bare_modules(inner).items()}
    return state | ({"tables": bare} if bare else {})


def _inner(model: nn.Module) -> nn.Module:
    """The module inside a data-parallel wrapper, so that names do not tell of it."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def _bare_modules(model: nn.Module) -> dict[str, Any]:
    """Trained sharded modules that no optimizer of TorchRec's kind stands for, by path."""
    found = {}
    for name, module in model.named_modules():
        if hasattr(module, "optimizer_state_dict") and module.tables.optimizers is not None:
            # Without DistributedModelParallel's wrappers, as in its state_dict.
            path = name.removeprefix("_dmp_wrapped_module.").removeprefix("module.")
            found[path or _PLAIN] = module
    return found


def _stored_extra(path: Path) -> dict[str, Any]:
    """Places for the values of ``extra``, from the checkpoint's own description."""
    metadata = FileSystemReader(str(path)).read_metadata()
    places: dict[str, Any] = {}
    for name, keys in (metadata.planner_data or {}).items():
        if keys[0] != "extra":
            continue
        item = metadata.state_dict_metadata[name]
        value = (torch.empty(item.size, dtype=item.properties.dtype)
                 if isinstance(item, TensorStorageMetadata) else None)
        set_element(places, keys, value)
    return dict(places.get("extra", {}))


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _on_rank0(action: Callable[[], None], what: str, path: Path) -> None:
    """Run `action` on rank 0; all ranks wait for it and learn of its error."""
    problem: list[str | None] = [None]
    if not _distributed() or dist.get_rank() == 0:
        try:
            action()
        except OSError as error:
            problem = [str(error)]
    if _distributed():
        dist.broadcast_object_list(problem)
    if problem[0] is not None:
        raise OperError(fail(what, "folder", str(path), "a folder that can be written",
                             problem[0]))


def _make_room(path: Path, aside: Path, before: Path) -> None:
    if path.exists() and not (path / METADATA).exists() and any(path.iterdir()):
        raise OSError(f"{path} is no checkpoint: choose another folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not (path / METADATA).exists() and (before / METADATA).exists():
        before.rename(path)  # a crash between the two renames below; in place of an empty folder
    for left in (aside, before):
        if left.exists():
            shutil.rmtree(left)


def _put_in_place(path: Path, aside: Path, before: Path) -> None:
    if path.exists():
        path.rename(before)
    aside.rename(path)
    _sync(path.parent)
    if before.exists():
        shutil.rmtree(before)


def _sync(folder: Path) -> None:
    """Make renames in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _complete(path: Path) -> Path:
    for candidate in (path, path.with_name(path.name + ".previous")):
        if (candidate / METADATA).exists():
            return candidate
    raise InvalidInputError(fail("cannot load a checkpoint", "folder", str(path),
                                 f"a complete checkpoint with {METADATA}",
                                 "name the folder that save_checkpoint wrote"))


@contextlib.contextmanager
def _one_error(what: str, path: Path) -> Iterator[None]:
    """The ranks' own errors in one line; an error of ours stays what it is."""
    try:
        with warnings.catch_warnings():
            # One rank without torch.distributed is what no_dist says.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        causes = {rank: cause[0] for rank, cause in sorted(error.failures.items())}
        first = next(iter(causes.values()))
        kind = InvalidInputError if isinstance(first, InvalidInputError) else OperError
        raise kind(fail(what, "folder", str(path), "success on every rank",
                        "; ".join(f"rank {r}: {e}" for r, e in causes.items()))) from error
