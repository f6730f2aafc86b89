"""Saving and loading of checkpoint folders, atomically and with checksums."""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata

from oper.errors import require
from oper.integration.checkpoint.delta_files import (
    TABLES,
    UPDATES,
    Delta,
    check,
    check_readable,
    find,
    put_rows,
    put_state,
    read_part,
    unpack_state,
)
from oper.integration.checkpoint.files import (
    METADATA,
    CheckpointReader,
    check_files,
    place_of,
    sum_of,
    write_checksums,
)
from oper.integration.checkpoint.folders import Folders, Ranks, complete
from oper.integration.checkpoint.late_states import (
    add_missing,
    missing_states,
    parameters_of,
    placeholder,
    restore_numbers,
)
from oper.integration.checkpoint.on_demand import CHUNK_BYTES, rows_on_demand
from oper.integration.checkpoint.planners import LoadPlanner, SavePlanner
from oper.integration.checkpoint.table_state import (
    MOMENTUM,
    MOMENTUM_SGD,
    check_optimizers,
    optimizer_names,
    tables_with_states,
)
from oper.integration.table_tensor import TableTensor
from oper.rows.remap import Remap, load_remap
from oper.shmem.renumbering import check_renumbering, renumber
from oper.shmem.rows import LogicalRows
from oper.shmem.tables import ShardedTables

_log = logging.getLogger(__name__)
_PLAIN = "_plain"
_OPTIMIZERS = "table_optimizers"  # key of a checkpoint, see `optimizer_names`
_DELTAS = "deltas"  # key of a checkpoint: the step that its deltas continue
_SAVES: Counter[Path] = Counter()  # checkpoints that this process has saved, by folder


def save_checkpoint(folder: str | os.PathLike[str], model: nn.Module, optimizer: Any = None,
                    extra: dict[str, Any] | None = None, *, chunk_bytes: int = CHUNK_BYTES) -> None:
    """Save a model with sharded tables, its optimizer and extra values in bounded memory.

    Collective. The checkpoint is written next to `folder` and renamed when complete: after a crash
    at any time, `load_checkpoint` can load the previous one. The folder must be on a file system
    that all ranks share. The checkpoint contains a CRC-32 of every file. During a save, the folders
    ``FOLDER.saving`` and ``FOLDER.previous`` are used.

    Args:
        folder: the folder to write; an existing checkpoint there is replaced. A symbolic link
            stands for its target.
        model: saved as ``model``; under DDP and DistributedModelParallel with the names of the
            wrapped module.
        optimizer: any object with ``state_dict``, saved as ``optimizer``, such as a
            ``fused_optimizer`` or a ``CombinedOptimizer``. The states of a TorchRec collection's
            tables are saved only if it contains their ``fused_optimizer``; those of sharded
            ``nn.Embedding`` and ``nn.EmbeddingBag`` modules always, as ``tables``.
        extra: tensors and plain values (numbers, strings, lists, dicts), equal on all ranks; saved
            as ``extra``.
        chunk_bytes: maximum size of the chunks in which rows are copied and written.

    Raises:
        InvalidInputError: a value is neither a tensor nor plain, or one of these folders holds
            anything but a checkpoint or its files.
        OperError: a rank could not write.
        PeerLostError, DeadlineError: a rank has exited or did not arrive in time.

    After any of these errors, the previous checkpoint is intact.
    """
    path = place_of(folder)
    synchronize(model)
    save_by(Ranks(tables_of(model), "cannot save a checkpoint", path), path,
            (model, optimizer, extra), chunk_bytes)


def save_by(ranks: Ranks, path: Path, what: tuple[nn.Module, Any, dict[str, Any] | None],
            chunk_bytes: int, step: int | None = None) -> None:
    """Save (model, optimizer, extra) as `save_checkpoint` does, on the given ranks; and `step`, the
    number of the step for `Restored.step`."""
    model, optimizer, extra = what
    folders = Folders(path)
    ranks.step(lambda: folders.make_room() if ranks.first else None)
    with rows_on_demand(chunk_bytes):
        names = {path: optimizer_names(m.tables) for path, m in _trained(_inner(model)).items()}
        state = (state_of(model, optimizer) | ({"extra": dict(extra)} if extra else {})
                 | ({_OPTIMIZERS: names} if any(names.values()) else {})
                 | ({} if step is None else {_DELTAS: {"step": step}}))
        ranks.step(lambda: check_readable("cannot save a checkpoint", state))
        _write(state, folders.saving, ranks)
    ranks.step(lambda: folders.put_in_place() if ranks.first else None)
    _SAVES[path] += 1


def saves_to(path: Path) -> int:
    """Return the number of checkpoints that this process has saved to a folder so far."""
    return _SAVES[path]


def load_checkpoint(folder: str | os.PathLike[str], model: nn.Module, optimizer: Any = None, *,
                    grown: bool = False, remap: str | os.PathLike[str] | None = None
                    ) -> dict[str, Any]:
    """Load a checkpoint of `save_checkpoint` under any plan and number of ranks. Collective.

    The checksums of all files are verified before anything is loaded. Deltas of the checkpoint (see
    `DeltaCheckpoints`) that all ranks have written are loaded as well.

    Args:
        folder: the checkpoint. If a crash has left it incomplete, the previous one is loaded.
        model, optimizer: as for `save_checkpoint`; filled in place.
        grown: allow the model's tables to have more rows than the checkpoint's, as after ``oper
            vocabulary extend``. Additional rows and their optimizer states remain unchanged. The
            ranks must share memory.
        remap: the re-map that ``oper vocabulary extend --reorder`` has written after the
            checkpoint was saved; rows are loaded as with `grown` and then renumbered by it.

    Returns:
        ``extra`` as it was saved; {} if there was none.

    Raises:
        InvalidInputError: there is no checkpoint, or it is of another model: values are missing,
            have another shape, or have no place in `model`.
        FileFormatError: a file is damaged; the tables are unchanged. Or the deltas are intact, but
            do not fit the checkpoint; the tables then contain a mixture of old and new rows.
        OperError: a rank could not read; the tables then contain a mixture of old and new rows.
        PeerLostError, DeadlineError: a rank has exited or did not arrive in time; the tables may
            contain a mixture of old and new rows.
    """
    rows = None if remap is None else load_remap(remap)
    return restore(folder, model, optimizer, grown=grown or rows is not None, remap=rows).extra


@dataclass(frozen=True, slots=True)
class Restored:
    """The result of loading a checkpoint.

    Attributes:
        extra: ``extra`` as it was saved; {} if there was none.
        folder: the loaded checkpoint.
        num_deltas: number of complete deltas loaded after the checkpoint.
        step: step of the last of these deltas; without deltas, that passed to
            `DeltaCheckpoints.save_full`, or in a checkpoint of `save_checkpoint` ``extra["step"]``
            if it is an integer, else 0.
        steps_lost: maps ranks of the saving run to the number of steps by which their rows are
            older than the newest rows; empty if all rows are of the same step.
    """

    extra: dict[str, Any]
    folder: Path
    num_deltas: int
    step: int
    steps_lost: dict[int, int]

    @property
    def is_exact(self) -> bool:
        """Whether all rows are of the same step."""
        return not self.steps_lost


def restore(folder: str | os.PathLike[str], model: nn.Module, optimizer: Any = None,
            newest_rows: bool = False, grown: bool = False, remap: Remap | None = None
            ) -> Restored:
    """Load a checkpoint as `load_checkpoint` does. Collective.

    `newest_rows` is the argument of `DeltaCheckpoints.load`; `remap` is the parsed re-map.
    """
    place = place_of(folder)
    synchronize(model)  # rows may only be written while all replica groups have the same rows
    numbers, tables = remap or {}, tables_of(model)
    for t in tables if numbers else ():
        check_renumbering(t, numbers)
    ranks = Ranks(tables, "cannot load a checkpoint", place)
    with contextlib.ExitStack() as stack:
        path, opened = ranks.open(lambda: complete(place), stack)
        ranks.step(lambda: check_files(opened, ranks.rank, ranks.world_size))
        deltas: list[Delta] = ranks.step(
            lambda: find(opened, place) if ranks.first else [])[0]
        rest = [d for d in deltas if not d.is_complete and d.files and newest_rows]
        deltas = [d for d in deltas if d.is_complete]
        ranks.step(lambda: check([*deltas, *rest], ranks.rank, ranks.world_size))
        with rows_on_demand():
            state = state_of(model, optimizer)
            read: list[dict[str, Any] | None] = []
            ranks.step(lambda: read.append(_newest_state([*deltas, *rest])))
            newest = read[0]
            missing = missing_states(state, newest["paths"] if newest else (), optimizer)
            loaded = _read(state, opened, ranks, (model, optimizer), newest, grown)
            extra = put_state(newest, state, missing) if newest else None
            take_over(state, model, optimizer)
    if deltas or rest:
        held = {id(m.tables): tables_with_states(m, loaded)
                for m in _trained(_inner(model)).values()}
        into = {path: (t, held.get(id(t), set())) for path, t in collections_of(model).items()}
        ranks.step(lambda: _put_rows([*deltas, *rest], into))
        for t in tables:
            if isinstance(t, ShardedTables) and t.keys is not None:
                t.keys.flush()  # after the records of the deltas
            t.flush_replicas()
        ranks.step(lambda: _check_keys(tables))
    for t in tables if numbers else ():
        renumber(t, numbers)
    if extra is None:
        extra = dict(state.get("extra", {}))
    step = deltas[-1].step if deltas else state.get(_DELTAS, {}).get("step", extra.get("step", 0))
    lost = {r: rest[0].step - rest[0].since for r in rest[0].missing} if rest else {}
    if lost:
        _log.warning("the rows of ranks %s are newer than the others: the loaded state is inexact; "
                     "steps lost: %s", sorted(rest[0].files), ", ".join(
                         f"{n} of rank {r}" for r, n in sorted(lost.items())))
    return Restored(extra, path, len(deltas), step if type(step) is int else 0, lost)


def _newest_state(deltas: list[Delta]) -> dict[str, Any] | None:
    """Return the newest delta's values other than rows; None if no delta has any."""
    for delta in reversed(deltas):
        if 0 in delta.files:
            arrays, _ = read_part(delta.files[0][-1])
            return unpack_state(arrays.get("state", np.zeros(0, np.uint8)))
    return None


def _put_rows(deltas: list[Delta], into: dict[str, tuple[LogicalRows, set[str]]]) -> None:
    for delta in deltas:
        for files in delta.files.values():
            for path in files:
                put_rows(*read_part(path), into)


def _check_keys(tables: list[LogicalRows]) -> None:
    for t in tables:
        if isinstance(t, ShardedTables) and t.keys is not None:
            for name in t.keys.tables:
                t.keys.check(name)


def take_over(state: dict[str, Any], model: nn.Module, optimizer: Any) -> None:
    """Load `state`, in the form of `state_of`, into the model and its optimizer. Collective."""
    inner = _inner(model)
    inner.load_state_dict(state["model"])
    if optimizer is not None:
        optimizer.load_state_dict(state["optimizer"])
    for name, module in _bare_modules(inner).items():
        module.load_optimizer_state_dict(state[TABLES][name])
    for name, module in _trained(inner).items():  # last, since optimizer states have steps, too
        if state[UPDATES][name] is not None:
            module.tables.set_updates(state[UPDATES][name])


def state_of(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Return the state to save in a checkpoint, without ``extra``; raises InvalidInputError if
    `optimizer` has no state, or a state that only this rank could load."""
    what = "cannot make a checkpoint's state"
    require(what, "pass several optimizers as one CombinedOptimizer",
            ("optimizer", type(optimizer).__name__, optimizer is None or hasattr(
                optimizer, "state_dict"), "an object with state_dict(), or None"))
    inner = _inner(model)
    flat = {id(p) for module in fsdp1_modules(inner).values() for p in module.parameters()}
    divided = [p for p in parameters_of(optimizer)
               if id(p) in flat and not isinstance(p, TableTensor)]
    require(what, "divide them by fully_shard, or pass an object whose state_dict() calls "
            "FullyShardedDataParallel.optim_state_dict",
            ("parameters of FullyShardedDataParallel in the optimizer", len(divided), not divided,
             "0, since the optimizer has states of a rank's part of them"))
    state: dict[str, Any] = {"model": inner.state_dict()}
    if optimizer is not None:
        state["optimizer"] = optimizer.state_dict()
    bare = {name: module.optimizer_state_dict() for name, module in _bare_modules(inner).items()}
    state |= {TABLES: bare} if bare else {}
    updates = {name: module.tables.updates() for name, module in _trained(inner).items()}
    return state | ({UPDATES: updates} if updates else {})


def _inner(model: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel, so that names have no prefix."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def _bare_modules(model: nn.Module) -> dict[str, Any]:
    """Return sharded torch modules in training, by path; TorchRec's have a ``fused_optimizer``."""
    return {name: module for name, module in _by_path(model).items()
            if hasattr(module, "optimizer_state_dict") and module.tables.optimizers is not None}


def fsdp1_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a model that are FullyShardedDataParallel, whose ranks each hold a part
    of flattened parameters, by name."""
    return {name: module for name, module in model.named_modules()
            if type(module).__name__ == "FullyShardedDataParallel"}


def _trained(model: nn.Module) -> dict[str, Any]:
    """Return the modules with a collection of tables in training, by path."""
    return {name: module for name, module in _by_path(model).items()
            if isinstance(tables := getattr(module, "tables", None), ShardedTables)
            and tables.optimizers is not None}


def _by_path(model: nn.Module) -> dict[str, Any]:
    """Return the modules by the paths under which checkpoints have their states: as in
    ``state_dict``, below DistributedModelParallel and the DistributedDataParallel in it; and
    without a first ``module.``, unless another module has the path without it."""
    named = dict(_inner(getattr(model, "_dmp_wrapped_module", model)).named_modules())
    short = {name: name.removeprefix("module.") for name in named}
    return {(name if x != name and x in named else x) or _PLAIN: named[name]
            for name, x in short.items()}


def synchronize(model: nn.Module) -> None:
    """Synchronize the replica groups of a model's tables now. Collective over all groups.

    First completes a synchronization that is under way (``synchronize_delay``). Afterwards all
    groups have the same rows and optimizer states, see `oper.shard` (``replica_groups``). Does
    nothing without replica groups, or if there was no update since the last synchronization.

    Args:
        model: the result of `oper.shard`, or a model that contains it.
    """
    for tables in tables_of(model):
        if tables.replicas is not None:
            tables.replicas.synchronize()


def tables_of(model: nn.Module) -> list[LogicalRows]:
    """Return the table collections of a model, without duplicates."""
    held = (getattr(m, "tables", None) for m in model.modules())
    return list({id(t): t for t in held if isinstance(t, LogicalRows)}.values())


def collections_of(model: nn.Module) -> dict[str, LogicalRows]:
    """Return the `tables_of` a model by the paths of their modules, see `_by_path`."""
    found: dict[int, tuple[str, LogicalRows]] = {}
    for path, module in _by_path(_inner(model)).items():
        if isinstance(tables := getattr(module, "tables", None), LogicalRows):
            found.setdefault(id(tables), (path, tables))
    return dict(found.values())


def _write(state: dict[str, Any], folder: Path, ranks: Ranks) -> None:
    """Write `state` as ``torch.distributed.checkpoint.save`` does, then the checksums."""
    writer, planner = FileSystemWriter(str(folder)), SavePlanner()
    planner.alone = ranks.world_size == 1

    def local_plan() -> Any:
        writer.set_up_storage_writer(ranks.first)
        planner.set_up_planner(state, writer.storage_meta(), ranks.first)
        return writer.prepare_local_plan(planner.create_local_plan())

    # Every rank computes the global plan, which avoids a broadcast.
    plans, metadata = planner.create_global_plan(ranks.step(local_plan))
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[ranks.rank])

    def write() -> Any:
        done = writer.write_data(plan, planner)
        done.wait()
        results = done.value()
        names = {r.storage_data.relative_path for r in results}
        return results, {name: sum_of(folder / name) for name in names}

    everyone = ranks.step(write)

    def finish() -> None:
        writer.finish(metadata, [results for results, _ in everyone])
        sums = {name: s for _, own in everyone for name, s in own.items()}
        lost = [name for name, (size, _) in sums.items()
                if not (folder / name).exists() or (folder / name).stat().st_size != size]
        require("cannot save a checkpoint", "choose a folder on a file system that all ranks share",
                ("files of other ranks that rank 0 does not find", lost[:8], not lost, "none"))
        write_checksums(folder, sums | {METADATA: sum_of(folder / METADATA)})

    ranks.step(lambda: finish() if ranks.first else None)


def _read(state: dict[str, Any], folder: Path, ranks: Ranks, into: tuple[nn.Module, Any],
          newest: dict[str, Any] | None, grown: bool) -> set[str]:
    """Read into `state` as ``torch.distributed.checkpoint.load`` does, and add the saved ``extra``
    and the saved states of parameters that have no state in the optimizer yet. `into` is (model,
    optimizer). Return the last parts of the names of all values.

    Values of the optimizer that are in `newest`, the state of the newest delta, may be missing in
    the checkpoint: it may have been saved before the optimizer's first step.
    """
    reader, planner = CheckpointReader(str(folder)), LoadPlanner(grown=grown)
    model, optimizer = into
    labels: set[str] = set()
    # A list of plain values, which has several paths in a delta, is one value of a checkpoint.
    planner.optional = frozenset(".".join(map(str, p[:n])) for p in (
        newest["paths"] if newest else ()) if p[0] == "optimizer" for n in range(2, len(p) + 1))

    def local_plan() -> Any:
        metadata = reader.read_metadata()
        add_missing(state, metadata, optimizer)
        extra = _stored_extra(metadata)
        if extra:
            state["extra"] = extra
        if f"{_DELTAS}.step" in metadata.state_dict_metadata:
            state[_DELTAS] = {"step": None}
        # Other programs do not save `UPDATES`, but deltas may add them; None: not changed.
        found, all_updates = dict(state), state.get(UPDATES, {})
        updates = {path: value for path, value in all_updates.items()
                   if f"{UPDATES}.{path}" in metadata.state_dict_metadata}
        all_updates |= dict.fromkeys(all_updates.keys() - updates.keys())
        found.pop(UPDATES, None)
        planner.set_up_planner(found | ({UPDATES: updates} if updates else {}), metadata,
                               ranks.first)
        labels.update(str(keys[-1]) for keys in planner.mappings.values())
        has_old_momenta = True
        for path, module in _trained(_inner(model)).items():
            saved = {keys[2]: keys[3] for keys in (metadata.planner_data or {}).values()
                     if len(keys) == 4 and (keys[0], keys[1]) == (_OPTIMIZERS, path)}
            check_optimizers(module, saved, labels)
            has_old_momenta &= all(t.name in saved for t in module.tables.specs.values()
                                   if t.optimizer == MOMENTUM_SGD)
        _rename_momenta(metadata, planner.mappings, has_old_momenta)
        reader.set_up_storage_reader(metadata, ranks.first)
        plan = planner.create_local_plan()
        _check_complete(metadata, planner.mappings)
        return reader.prepare_local_plan(plan)

    plans = reader.prepare_global_plan(planner.create_global_plan(ranks.step(local_plan)))
    plan = planner.finish_plan(plans[ranks.rank])

    def read() -> None:
        reader.read_data(plan, planner).wait()
        restore_numbers(state)

    ranks.step(read)
    return labels


def _rename_momenta(metadata: Metadata, wanted: Iterable[str], are_known: bool) -> None:
    """Give the momenta of SGD in a checkpoint of an earlier version, ``momentum1``, their present
    name. Raises InvalidInputError unless `are_known`: they could be the sums of Adagrad."""
    stored = metadata.state_dict_metadata
    for name in wanted:
        old = f"{name.removesuffix(MOMENTUM)}momentum1"
        if not name.endswith(f".{MOMENTUM}") or name in stored or old not in stored:
            continue
        require("cannot load a checkpoint", "save it again by the version of OPER that wrote it, "
                "with oper.save_checkpoint", (name, old, are_known, "a checkpoint that states the "
                                              "optimizer of the table, SGD with momentum"))
        stored[name] = stored.pop(old)
        for index in [x for x in metadata.storage_data if x.fqn == old]:
            metadata.storage_data[replace(index, fqn=name)] = metadata.storage_data.pop(index)


def _check_complete(metadata: Metadata, wanted: Container[str]) -> None:
    """Raise InvalidInputError if a checkpoint has values of a model, such as tables, that are not
    `wanted`: torch would leave them out without a word."""
    left = sorted(name.removeprefix("model.") for name in metadata.state_dict_metadata
                  if name.startswith("model.") and name not in wanted)
    require("cannot load a checkpoint", "load it into the model that was saved; to load only a "
            "part, call torch.distributed.checkpoint.load with a state dict of that part",
            ("saved values that the model lacks", left[:8], not left, "none"))


def _stored_extra(metadata: Metadata) -> dict[str, Any]:
    """Return ``extra`` with placeholders to load into, created from the checkpoint's metadata."""
    places: dict[str, Any] = {}
    for name, keys in (metadata.planner_data or {}).items():
        if keys[0] != "extra":
            continue
        set_element(places, keys, placeholder(metadata, name))
    return dict(places.get("extra", {}))
