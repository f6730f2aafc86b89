"""Delta checkpoints: the rows that training has changed since the previous checkpoint or delta.

The owner of a row marks it when updating it, and every record of a dynamic table's directory has
the number of its last update; a key that lost its row becomes an empty record. The training loop
waits only while the changed rows, their optimizer states and the records are copied to buffers; a
thread writes these to disk. Each delta continues the previous one. A checkpoint and its deltas
restore the latest step whose delta all ranks have written.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from oper.errors import InvalidInputError, OperError, require
from oper.integration.checkpoint.delta_files import (
    KEY_BYTES,
    base_of,
    check_readable,
    copy_state,
    folder_of,
    keys_to_numpy,
    leaves,
    pack_state,
    remove_deltas,
    rows_to_numpy,
    write_part,
)
from oper.integration.checkpoint.files import place_of
from oper.integration.checkpoint.folders import Ranks
from oper.integration.checkpoint.on_demand import CHUNK_BYTES, is_divided, rows_never
from oper.integration.checkpoint.saving import (
    Restored,
    collections_of,
    fsdp1_modules,
    restore,
    save_by,
    saves_to,
    state_of,
    synchronize,
    tables_of,
)
from oper.integration.checkpoint.table_state import all_ranks
from oper.rows.directory import TableDirectory
from oper.shmem.counters.changes import ChangedKeys, ChangedRows
from oper.shmem.tables import ShardedTables
from oper.support.files import read_json, write_text

MEMORY_BYTES = 256 << 20
_TIMES = "times-to-live.json"  # in the folder of a chain
# Niceness of the writing thread: on a fully loaded machine it runs only while ranks wait for each
# other. When a rank waits for this thread, it sleeps, so that the thread gets its processor.
_NICE = 19
_WHAT = "cannot save a delta checkpoint"


class DeltaCheckpoints:
    """Saves full checkpoints in a folder, and deltas in a second folder next to it.

    Args:
        folder, model, optimizer: as for `oper.save_checkpoint`. All values other than table rows
            are saved with rank 0's values.
        memory_bytes: memory per rank for copies of rows that are still to be written. Saving a
            larger delta waits for the disk.

    Attributes:
        part_bytes: approximate size of a file of rows, in bytes.
        written_bytes: bytes of deltas that this rank has written so far.
        paths: paths of the collections of tables in the model.

    Raises:
        InvalidInputError: the model has no sharded tables in training, or has tables that are
            read-only; other parameters are divided among the ranks, as by FullyShardedDataParallel
            or ``fully_shard``; `memory_bytes` is below 1; or steps of tables in device memory have
            been captured in a CUDA graph before.
    """

    def __init__(self, folder: str | os.PathLike[str], model: nn.Module, optimizer: Any = None, *,
                 memory_bytes: int = MEMORY_BYTES) -> None:
        self._place = place_of(folder)
        self._model, self._optimizer = model, optimizer
        held = collections_of(model)
        found = [t for t in held.values() if isinstance(t, ShardedTables)]
        self.paths = [*held]
        if not found or len(found) < len(held) or memory_bytes < 1:
            raise InvalidInputError(
                _WHAT, "sharded tables that are trained, memory_bytes", (len(found), memory_bytes),
                "at least one collection, at least a byte", "save full checkpoints")
        _refuse_parts(name for name, x in (*model.named_parameters(), *model.named_buffers())
                     if _is_part(x))
        _refuse_parts(name or "the model" for name in fsdp1_modules(model))
        self._changed: list[ChangedRows] = [
            ChangedRows(t) if t.replicas is None else t.replicas.changed_rows() for t in found]
        self.part_bytes = max(1, min(32 << 20, memory_bytes // 5))
        # Parts to write. One more is being filled and one written, so five buffers are in use.
        self._queue: queue.Queue[Any] = queue.Queue(3)
        self._free: list[torch.Tensor] = []  # buffers of parts that have been written
        self._thread: threading.Thread | None = None
        self._problem: BaseException | None = None
        self._folder: Path | None = None  # for deltas; None = the next save is a full checkpoint
        self._number = self._since = self._saves = 0
        self._attempt = ""  # see `delta_files`
        self.written_bytes = 0

    # ---- saving ----------------------------------------------------------------------------------

    def save_full(self, step: int, extra: dict[str, Any] | None = None) -> None:
        """Save a full checkpoint as `oper.save_checkpoint` does, and remove earlier deltas.
        Collective.

        Args:
            step, extra: as for `save`.
        """
        step = _checked(step)
        self._end_chain()
        synchronize(self._model)
        save_by(self._ranks("cannot save a checkpoint"), self._place,
                (self._model, self._optimizer, extra), CHUNK_BYTES, step)
        self._begin(0, step)

    def _ranks(self, what: str) -> Ranks:
        return Ranks(tables_of(self._model), what, self._place)

    def _begin(self, number: int, step: int) -> None:
        """Continue the current checkpoint with delta `number`, relative to the current rows."""
        self._since, self._saves = step, saves_to(self._place)
        ranks = self._ranks(_WHAT)
        times = self._times_to_live()

        def clear() -> tuple[str, str]:
            base = base_of(self._place)
            remove_deltas(self._place, base)
            kept = folder_of(self._place) / base
            # The last delta first: to a server that follows the run, a gap would break the chain.
            for path in sorted(kept.iterdir(), reverse=True) if kept.is_dir() else ():
                if path.is_dir() and (not path.name.isdigit() or int(path.name) >= number):
                    shutil.rmtree(path)
            kept.mkdir(parents=True, exist_ok=True)
            if times:
                write_text(kept / _TIMES, json.dumps(times))
            return base, secrets.token_hex(8)

        # Other hosts may still see the folder that rank 0 has just replaced.
        base, self._attempt = ranks.step(lambda: clear() if ranks.first else ("", ""))[0]
        self._folder, self._number = folder_of(self._place) / base, number
        for changed in self._changed:
            changed.restart()

    def _times_to_live(self) -> list[dict[str, int | None]]:
        """Return the times to live of keys, by collection with dynamic tables and table."""
        return [{name: rule.time_to_live for name, rule in c.tables.keys.rules.items()}
                for c in self._changed if c.tables.keys is not None]

    def _has_same_times(self) -> bool:
        """Whether the chain of deltas on disk was saved with the present times to live. Deltas list
        only the keys that have expired since the last delta. If times to live changed within a
        chain, its readers would miss keys that are valid again, and keys that expire at once.
        Those of a checkpoint that was saved without deltas are unknown."""
        path = folder_of(self._place) / base_of(self._place) / _TIMES
        times: Any = self._times_to_live()
        return read_json(path, _WHAT) == times if path.exists() else not times

    def save(self, step: int, extra: dict[str, Any] | None = None) -> None:
        """Save the changes since the last delta or full checkpoint, in the background.

        Call it on all ranks after the same step; ranks do not wait for each other. If there is no
        full checkpoint yet, or rows were changed other than by training, or another
        `DeltaCheckpoints` of the model has saved since, or `oper.save_checkpoint` to this folder, a
        full checkpoint is saved instead, which is collective. With replica groups the call is
        collective, too: it first synchronizes the groups (`oper.synchronize`), so that the delta
        has the rows that all groups have after this step.

        Args:
            step: number of the step, >= 0, chosen by the caller.
            extra: as for `oper.save_checkpoint`.

        Raises:
            InvalidInputError: `step` is not an integer >= 0, or a value in `extra` could not be
                loaded again; nothing is saved.
            OperError: this rank could not write an earlier delta. Other ranks do not get this
                error; `save` raises it again until all ranks have called `save_full`.
        """
        step = _checked(step)
        # On all ranks, which save the same values, and before `take` clears the marks.
        check_readable(_WHAT, {"extra": dict(extra or {})})
        synchronize(self._model)  # first, since the other ranks of replica groups wait for this one
        self._raise_problem()
        is_chain = self._folder is not None and saves_to(self._place) == self._saves
        taken = [c.take() for c in self._changed] if is_chain else [None]
        if any(slots is None for slots in taken):
            self.save_full(step, extra)
            return
        # `take` has cleared the marks, so if copying fails, the next save must be a full one.
        folder, self._folder = self._folder, None
        assert folder is not None
        ranks = all_ranks(self._changed[0].tables)
        parts = _Parts(self, folder / f"{self._number:06d}", {
            "number": self._number, "step": step, "since": self._since,
            "attempt": self._attempt, "rank": ranks.rank, "world_size": ranks.world_size})
        for k, (changed, slots) in enumerate(zip(self._changed, taken, strict=True)):
            replicas = changed.tables.replicas
            for piece, mine in (slots or {}).items():
                parts.add(k, changed, piece, mine if replicas is None else replicas.share(mine))
            for keys in changed.take_keys():  # all groups have equal directories
                if replicas is None or replicas.groups.counterparts.rank == 0:
                    parts.add_keys(k, keys)
        parts.end(extra)
        self._folder, self._number, self._since = folder, self._number + 1, step

    def dense_state(self, extra: dict[str, Any] | None) -> dict[str, Any]:
        """Return a copy of everything that a delta saves besides rows of tables."""
        with rows_never():
            state = state_of(self._model, self._optimizer)
            check_readable(_WHAT, state)
            _refuse_parts(".".join(map(str, path)) for path, x in leaves(state) if _is_part(x))
            return copy_state(state, dict(extra or {}))

    def take_memory(self) -> torch.Tensor:
        """Return a buffer for a part, uint8 [part_bytes], reusing that of a written part."""
        return self._free.pop() if self._free else torch.empty(self.part_bytes, dtype=torch.uint8)

    def put(self, memory: torch.Tensor, part: Callable[[], tuple[Any, ...]]) -> None:
        """Queue a part for the writing thread; blocks while three others are queued.

        Args:
            memory: the buffer from `take_memory` with the part's rows.
            part: called in the writing thread; returns the arguments of `write_part`.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, name="oper-deltas", daemon=True)
            self._thread.start()
        self._queue.put((memory, part))

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # not all systems support thread priorities
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while (found := self._queue.get()) is not None:
            memory, part = found
            try:
                if self._problem is None:  # deltas after a missing one could not be loaded
                    self.written_bytes += write_part(*part())
            except BaseException as error:
                self._problem = error
            finally:
                self._free.append(memory)
                self._queue.task_done()
        self._queue.task_done()

    def wait(self) -> None:
        """Wait until all deltas have been written, or one could not be; `save` then raises."""
        self._queue.join()

    def _end_chain(self) -> None:
        """Wait for all deltas, and forget an error of writing them. Until `_begin`, the next save
        is a full one, since a delta may be missing in the chain."""
        self.wait()
        self._folder, self._problem = None, None

    def _raise_problem(self) -> None:
        if self._problem is not None:
            raise OperError(
                _WHAT, "folder", str(self._folder), "a folder that can be written",
                f"{self._problem}; other ranks do not get this error: let the run end and continue "
                "from the last complete delta, or free some space and make all ranks save a full "
                "checkpoint (save_full) after the same step") from self._problem

    def flush(self) -> None:
        """Wait until all deltas have been written; raises OperError if one could not be written."""
        self._queue.join()
        self._raise_problem()

    def close(self) -> None:
        """Write all queued parts and stop the thread; raises OperError if a write has failed."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
        self._free.clear()
        for changed in self._changed:
            changed.stop()
        self._raise_problem()

    # ---- loading ---------------------------------------------------------------------------------

    def load(self, newest_rows: bool = False) -> Restored:
        """Load the checkpoint and its deltas; `save` then continues this chain. Collective.

        If the times to live of keys have changed, the next `save` saves a full checkpoint instead,
        so that readers of the checkpoints have the same keys as training.

        Args:
            newest_rows: also load rows from a delta that only some ranks have written. The result
                may then mix steps, see `Restored.is_exact`.

        Raises:
            The errors of `oper.load_checkpoint`.
            InvalidInputError: `newest_rows` with dynamic tables, whose keys and rows may belong to
                different ranks, so that a key could get another one's row.
        """
        dynamic = next((c.tables.keys for c in self._changed if c.tables.keys is not None), None)
        if newest_rows and dynamic is not None:
            dynamic.refuse("cannot load rows of several steps", "load without newest_rows")
        self._end_chain()
        found = restore(self._place, self._model, self._optimizer, newest_rows)
        ranks = self._ranks(_WHAT)
        if found.folder == self._place and found.is_exact and ranks.step(
                lambda: self._has_same_times() if ranks.first else True)[0]:
            self._begin(found.num_deltas, found.step)
        return found

    def __enter__(self) -> DeltaCheckpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with contextlib.suppress(OperError) if kind else contextlib.nullcontext():
            self.close()


def _is_part(value: Any) -> bool:
    """Whether a value is one of which every rank holds a part."""
    return is_divided(value) or type(value).__name__ == "ShardedTensor"


def _refuse_parts(names: Iterable[str]) -> None:
    """Raise InvalidInputError if there are `names` of values of which every rank holds a part."""
    found = [*names]
    require(_WHAT, "save full checkpoints (oper.save_checkpoint), or keep these values whole on "
            "every rank", ("values of which every rank holds a part", found[:8], not found,
                           "none but tables, since a delta has the values of rank 0"))


def _checked(step: Any) -> int:
    """Return the number of a step, which may be an integer of NumPy, as an int."""
    if isinstance(step, bool) or not isinstance(step, int | np.integer) or step < 0:
        raise InvalidInputError(_WHAT, "step", step, "an integer >= 0",
                                "pass the number of the training step")
    return int(step)


class _Parts:
    """Copies one delta's rows to parts of bounded size and queues them for writing. Here, only
    values that the next step may overwrite are copied; the writing thread computes ids and
    serialises the state."""

    def __init__(self, owner: DeltaCheckpoints, folder: Path, where: dict[str, Any]) -> None:
        self._owner, self._folder = owner, folder
        self._where = {**where, "part": 0, "time_us": int(time.time() * 1e6)}
        self._arrays: dict[str, np.ndarray] = {}
        # By array of ids: the directory, the rank that owns the rows, and their slots.
        self._slots: dict[str, tuple[TableDirectory, int, np.ndarray]] = {}
        self._state: dict[str, Any] | None = None
        self._items: list[list[Any]] = []
        self._bytes = 0
        self._memory = owner.take_memory()
        self._used = 0  # bytes of `_memory`

    def _room(self, count: int, view: torch.Tensor) -> torch.Tensor:
        """Return memory for `count` rows like those of `view` [n, width]."""
        begin = -(-self._used // 64) * 64
        end = begin + count * view.shape[1] * view.element_size()
        if end > self._memory.numel():  # a row larger than a part, or no space due to alignment
            return torch.empty(count, view.shape[1], dtype=view.dtype)
        self._used = end
        return self._memory[begin:end].view(view.dtype).view(count, view.shape[1])

    def _divided(self, size: int, row_bytes: int) -> Iterator[slice]:
        """Divide `size` rows or records among this part and later ones; queues every part that is
        full once the caller has added its share."""
        done = 0
        while done < size:
            count = max(1, (self._owner.part_bytes - self._bytes) // row_bytes)
            some = slice(done, min(size, done + count))
            yield some
            self._bytes += (some.stop - done) * row_bytes
            done = some.stop
            if self._bytes >= self._owner.part_bytes:
                self._put(False)

    def add(self, collection: int, changed: ChangedRows, piece: int, slots: np.ndarray) -> None:
        """Copy rows and optimizer states in slots, uint32 [n], of directory `piece` on this rank.

        `collection` is the index of the collection, with which rows are stored.
        """
        tables = changed.tables
        d = tables.directories[piece]
        views = tables.views(piece)
        row_bytes = 4 + sum(v.shape[1] * v.element_size() for v in views.values())
        for some in (slots[share] for share in self._divided(slots.size, row_bytes)):
            k = len(self._items)
            self._items.append([collection, d.table.name, int(d.column), list(views)])
            self._slots[f"{k}.ids"] = d, tables.group.rank, some
            for part, view in views.items():
                room = self._room(some.size, view)
                changed.copy(part, piece, some, room)
                self._arrays[f"{k}.{part}"] = rows_to_numpy(room)

    def add_keys(self, collection: int, changed: ChangedKeys) -> None:
        """Add changes of a directory, which are copies already."""
        for some in self._divided(changed.numbers.numel(), KEY_BYTES):
            k = len(self._items)
            self._items.append([collection, changed.table, 0, [changed.part]])
            found = keys_to_numpy(changed.numbers[some],
                                  None if changed.records is None else changed.records[some])
            self._arrays |= {f"{k}.{name}": values for name, values in found.items()}

    def end(self, extra: dict[str, Any] | None) -> None:
        """Queue the last part, which on rank 0 also contains all values other than rows."""
        if self._where["rank"] == 0:
            self._state = self._owner.dense_state(extra)
        self._put(True)

    def _put(self, last: bool) -> None:
        self._owner.put(self._memory, partial(
            _finished, self._folder, dict(self._where), self._arrays,
            {"items": self._items, "last": last, "collections": self._owner.paths},
            (self._slots, self._state)))
        self._arrays, self._slots, self._items, self._bytes = {}, {}, [], 0
        self._where["part"] += 1
        if not last:
            self._memory, self._used = self._owner.take_memory(), 0


def _finished(folder: Path, where: dict[str, Any], arrays: dict[str, np.ndarray],
              meta: dict[str, Any], rest: tuple[dict[str, Any], dict[str, Any] | None]
              ) -> tuple[Any, ...]:
    """Add ids and the serialised state to a part; return the arguments of `write_part`."""
    slots, state = rest
    for name, (d, owner, some) in slots.items():
        arrays[name] = d.ids_at(d.positions_at(owner, some.astype(np.int64))).astype(np.uint32)
    if state is not None:
        arrays["state"] = pack_state(state)
    return folder, where, arrays, meta
