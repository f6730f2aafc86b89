"""The files of delta checkpoints: the rows that each rank has changed since the previous delta.

The deltas of a checkpoint ``F`` are in ``F.deltas/BASE/NUMBER/rank-R-PART.npz``. ``BASE``
identifies F by the checksum of its file of checksums, so that deltas of different checkpoints are
not mixed up. Deltas and parts are numbered from 0. The metadata of a rank's last part mark it as
the last, and a delta is complete when the last parts of all ranks exist, so that ranks need not
wait for each other. ``attempt`` in the metadata of a part identifies the run, or the continuation
of a run, that wrote it: a run that continues after a crash writes an incomplete delta again, and a
part of the first try may remain in a copy of the folder. Every array of a file has a CRC-32, see
`oper.support.files`.

An item of a part is [collection, table, first column, parts], where ``collections`` in the metadata
has the collections' paths in the model. ``rows`` and optimizer states have
their rows' numbers in ``ids``. Records of a dynamic table's directory (``keys``, ``candidates``)
and ``expired`` slots are in the form of `keys_to_numpy`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import re
import shutil
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.utils._pytree import tree_map

from oper.errors import FileFormatError, InvalidInputError
from oper.integration.checkpoint.files import CHECKSUMS, METADATA, as_format_error, sum_of
from oper.integration.checkpoint.on_demand import TableRows
from oper.shmem.counters.changes import EXPIRED
from oper.shmem.keys.directories import RECORDS
from oper.shmem.optim.optimizers import STATE_PARTS
from oper.shmem.rows import LogicalRows
from oper.shmem.tables import ShardedTables
from oper.support.files import ArrayFile, read_arrays, write_arrays

KIND, VERSION = "oper-delta", 1
_NAME = re.compile(r"rank-(\d+)-(\d+)\.npz")
_BASE = re.compile(r"[0-9a-f]{8}-\d+")
_AS_STORED = {torch.bfloat16: torch.int16}  # NumPy has no such numbers
_NO_CLOCK = (1 << 32) - 1  # clock of an empty record
KEY_BYTES = 20  # size of a record in a file
# In the state of a model, by path of a collection that is trained: the optimizer states of torch's
# modules, and the numbers that random rounding continues from.
TABLES, UPDATES = "tables", "updates"
_PLAIN_TYPES = (int, float, bool, str, bytes, type(None))


@dataclass(slots=True, eq=False)
class Delta:
    """One delta, possibly incomplete.

    Attributes:
        number: position in the chain, from 0.
        step: number of the training step that it contains, as passed to `DeltaCheckpoints.save`;
            -1 = unknown.
        since: number of the step that it continues; -1 = unknown.
        world_size: number of ranks that write it; 0 = unknown.
        attempt: identifies the run that wrote it; "" in files of earlier versions.
        files: maps ranks that have written all parts to these parts in order.
    """

    number: int
    step: int = -1
    since: int = -1
    world_size: int = 0
    attempt: str = ""
    files: dict[int, list[Path]] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether all ranks have written all of their parts."""
        return self.world_size > 0 and len(self.files) == self.world_size

    @property
    def missing(self) -> list[int]:
        """Ranks that have not written all of their parts."""
        return [r for r in range(self.world_size) if r not in self.files]


def base_of(checkpoint: Path) -> str:
    """Identify a checkpoint by CRC-32 and size of its file of checksums, or else of metadata.

    Servers ask several times a second, so the file is read again only if it has been replaced.
    """
    path = checkpoint / (CHECKSUMS if (checkpoint / CHECKSUMS).exists() else METADATA)
    about = path.stat()
    # Not the time of modification, which copies of a run have from their store.
    return _base_of(path, about.st_dev, about.st_ino, about.st_size, about.st_ctime_ns)


@functools.lru_cache(maxsize=64)
def _base_of(path: Path, *_: int) -> str:
    size, crc = sum_of(path)
    return f"{crc:08x}-{size}"


def folder_of(checkpoint: Path) -> Path:
    """Return the folder of a checkpoint's deltas."""
    return checkpoint.with_name(checkpoint.name + ".deltas")


def remove_deltas(checkpoint: Path, but: str = "") -> None:
    """Remove the deltas of the checkpoints that were saved to a folder, except those of base `but`.

    Other files in the folder of deltas are left.
    """
    folder = folder_of(checkpoint)
    for path in folder.iterdir() if folder.is_dir() else ():
        if _BASE.fullmatch(path.name) and path.name != but:
            shutil.rmtree(path)
    with contextlib.suppress(OSError):  # it is not empty, or a link
        folder.rmdir()


def write_part(folder: Path, where: dict[str, Any], arrays: dict[str, np.ndarray],
               meta: dict[str, Any]) -> int:
    """Write one part atomically and return its size in bytes."""
    path = folder / f"rank-{where['rank']:05d}-{where['part']:05d}.npz"
    write_arrays(path, KIND, VERSION, arrays, {**meta, **where}, uncached=True)
    return path.stat().st_size


def read_part(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return a part's arrays and metadata; raises FileFormatError for a damaged or other file."""
    arrays, meta = read_arrays(path, KIND, VERSION)
    return arrays, _checked(path, meta)


def open_part(path: Path) -> ArrayFile:
    """Open a part to read its arrays one by one; raises the errors of `read_part`."""
    file = ArrayFile(path, KIND, VERSION)
    _checked(path, file.meta)
    return file


def _checked(path: Path, meta: dict[str, Any]) -> dict[str, Any]:
    """Return `meta` if it describes the part at `path`, else raise FileFormatError."""
    numbers = [meta.get(k) for k in ("number", "step", "since", "rank", "world_size", "part")]
    if not (all(type(n) is int and n >= 0 for n in numbers) and meta["rank"] < meta["world_size"]
            and isinstance(meta.get("items"), list) and type(meta.get("last")) is bool
            and type(meta.get("attempt", "")) is str and type(meta.get("time_us", 0)) is int
            and path.name == f"rank-{meta['rank']:05d}-{meta['part']:05d}.npz"):
        stated = {k: value for k, value in meta.items() if k not in ("items", "collections")}
        raise FileFormatError(f"cannot read {path.name!r} of delta {path.parent.name}",
                              "description", stated, "a part of a delta checkpoint",
                              f"remove the folder of deltas, {str(path.parents[1])!r}")
    return meta


def find(checkpoint: Path, place: Path) -> list[Delta]:
    """Return the deltas of a checkpoint in order: complete ones, then at most one incomplete one.

    Args:
        checkpoint: the folder to load: `place`, or after a crash the previous checkpoint's.
        place: the folder to which checkpoints are saved; the folder of deltas is next to it.
    """
    found: list[Delta] = []
    folder = folder_of(place) / base_of(checkpoint)
    while (folder / f"{len(found):06d}").is_dir():
        found.append(look(folder / f"{len(found):06d}", len(found)))
        if not found[-1].is_complete:
            break
    return found


def look(folder: Path, number: int) -> Delta:
    """Return delta `number` with the parts that exist in `folder`, from the parts' metadata.

    Only parts of one attempt belong together. If there are parts of several, the delta is that of
    the attempt that wrote the newest part, unless another one is complete.

    Raises:
        FileFormatError: the metadata of a part are damaged or contradict another part's.
    """
    parts: dict[str, dict[int, dict[int, tuple[Path, dict[str, Any]]]]] = {}
    for path in folder.iterdir():
        match = _NAME.fullmatch(path.name)
        if match:
            with open_part(path) as part:
                meta = part.meta
            of_rank = parts.setdefault(meta.get("attempt", ""), {}).setdefault(int(match[1]), {})
            of_rank[int(match[2])] = path, meta
    found = [(_assembled(folder, Delta(number, attempt=attempt), ranks), max(
        meta.get("time_us", 0) for of_rank in ranks.values() for _, meta in of_rank.values()))
        for attempt, ranks in parts.items()]
    return max(found, key=lambda x: (x[0].is_complete, x[1]), default=(Delta(number), 0))[0]


def _assembled(folder: Path, delta: Delta, parts: dict[int, dict[int, tuple[Path, dict[str, Any]]]]
               ) -> Delta:
    """Add the parts of ranks that have written all of them to `delta`; raises FileFormatError if
    their metadata contradict each other. `parts`: path and metadata by rank and number."""
    for rank, of_rank in sorted(parts.items()):
        last = max(of_rank)
        meta = of_rank[last][1]
        if not meta["last"] or len(of_rank) <= last:
            continue
        if delta.world_size not in (0, meta["world_size"]) or meta["number"] != delta.number or (
                delta.step not in (-1, meta["step"])):
            raise FileFormatError(f"cannot read the deltas in {str(folder)!r}",
                                  "ranks, number, step",
                                  (meta["world_size"], meta["number"], meta["step"]),
                                  f"{(delta.world_size, delta.number, delta.step)} in all files",
                                  "remove the folder of deltas")
        delta.world_size, delta.step, delta.since = (
            meta["world_size"], meta["step"], meta["since"])
        delta.files[rank] = [of_rank[k][0] for k in range(last + 1)]
    return delta


def check(deltas: list[Delta], first: int, every: int) -> None:
    """Verify files `first`, ``first + every``, ... of deltas; raises FileFormatError if one is
    damaged."""
    files = [p for d in deltas for paths in d.files.values() for p in paths]
    for path in files[first::every]:
        read_part(path)


# ---- contents of the files -----------------------------------------------------------------------


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield (path, value) of all values in nested dicts and lists, except `TableRows`. An empty
    list is a value."""
    items = value.items() if isinstance(value, dict) else (
        enumerate(value) if isinstance(value, list) and value else None)
    if items is not None:
        for key, item in items:
            yield from leaves(item, (*path, key))
    elif not isinstance(value, TableRows):
        yield path, value


def check_readable(what: str, state: dict[str, Any]) -> None:
    """Raise InvalidInputError, starting with `what`, for a value that could not be loaded again.

    Loading unpickles only tensors and plain values. Objects of other classes, such as NumPy numbers
    or paths, could be saved, but the checkpoint could not be loaded.
    """
    _check_dicts(what, ("extra",), state.get("extra"))
    for path, value in leaves(state):
        if isinstance(value, torch.Tensor) or _is_plain(value):
            continue
        data = io.BytesIO()
        try:
            torch.save(value, data)
            data.seek(0)
            torch.load(data, weights_only=True)
        except Exception:  # torch and pickle raise various classes
            raise InvalidInputError(
                what, ".".join(map(str, path)), value, f"a tensor or a plain value, and not "
                f"{type(value).__module__}.{type(value).__qualname__}, which a load refuses",
                "convert it, for instance by float()") from None


def _check_dicts(what: str, path: tuple[str, ...], value: Any) -> None:
    """Raise InvalidInputError for a dict within ``extra`` that a load could not restore.

    A full checkpoint stores each value under its path as text. Empty dicts have no values, and the
    type of a key is lost.
    """
    is_dict = isinstance(value, dict)
    if is_dict and ((not value and len(path) > 1) or any(type(key) is not str for key in value)):
        raise InvalidInputError(what, ".".join(path), value,
                                "dicts that are not empty, with keys of type str",
                                "convert the keys, and leave empty dicts out")
    items = value.items() if is_dict else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        _check_dicts(what, (*path, str(key)), item)


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN_TYPES or (type(value) is tuple and all(map(_is_plain, value)))


def copy_state(state: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """Copy the values of a state, except `TableRows`, for `pack_state`.

    Returns:
        ``paths`` and ``values`` as `leaves` yields them, and ``extra``.
    """
    found = list(leaves(state))
    return {"paths": [list(p) for p, _ in found], "values": [_copied(v) for _, v in found],
            "extra": _copied(extra)}


def _copied(value: Any) -> Any:
    """Return a deep copy of nested dicts and lists, with tensors detached and in host memory: the
    writing thread does not know the stream on which a GPU computes them."""
    return tree_map(lambda x: x.detach().to("cpu", copy=True) if isinstance(x, torch.Tensor)
                    else copy.deepcopy(x), value)


def pack_state(copied: dict[str, Any]) -> np.ndarray:
    """Serialise the result of `copy_state`; uint8 [n]."""
    data = io.BytesIO()
    torch.save(copied, data)
    return np.frombuffer(data.getbuffer(), np.uint8)


def load_packed(packed: np.ndarray) -> Any:
    """Return what `pack_state` has serialised, with its tensors in host memory: the GPU of the run
    that saved may not exist here. Raises any of the errors of ``torch.load``."""
    return torch.load(io.BytesIO(packed.tobytes()), map_location="cpu", weights_only=True)


def unpack_state(packed: np.ndarray) -> dict[str, Any]:
    """Undo `pack_state`; raises FileFormatError if the packed state is damaged."""
    with as_format_error("cannot read a delta checkpoint", "state", "values of a model",
                         "remove the folder of deltas"):
        found = load_packed(packed)
        return {name: found[name] for name in ("paths", "values", "extra")}


def put_state(found: dict[str, Any], state: dict[str, Any], missing: Sequence[Sequence[Any]]
              ) -> dict[str, Any]:
    """Replace the values in `state` by those of an unpacked state; return its ``extra``.

    Args:
        found: the result of `unpack_state`.
        state: the state of the model and its optimizer.
        missing: paths of values that are added if `state` does not have them.

    Raises:
        FileFormatError: the unpacked state is of another model.
    """
    may_add = {tuple(path) for path in missing}
    with as_format_error("cannot read a delta checkpoint", "state", "values of this model",
                         "load it into the model that wrote it"):
        for path, value in zip(found["paths"], found["values"], strict=True):
            # No optimizer is loaded, or the collection is not trained here.
            if (path[0] == "optimizer" and "optimizer" not in state) or (
                    path[0] in (TABLES, UPDATES) and path[1] not in state.get(path[0], {})):
                continue
            if tuple(path) in may_add:
                set_element(state, tuple(path), value)
            at: Any = state
            for key in path[:-1]:
                at = at[key]
            key = path[-1]
            if isinstance(at, list):
                del at[key:]  # the list may grow or shrink; its values follow in order
                at.append(value)
                continue
            if key not in at:
                raise KeyError(key)
            at[key] = value
    return dict(found["extra"])


def rows_to_numpy(rows: torch.Tensor) -> np.ndarray:
    """Return rows as a NumPy array; bfloat16, which NumPy lacks, becomes int16 of the same bits."""
    return rows.view(_AS_STORED.get(rows.dtype, rows.dtype)).numpy()


def keys_to_numpy(numbers: torch.Tensor, records: torch.Tensor | None) -> dict[str, np.ndarray]:
    """Return records of a directory, or only their numbers, in the form in which files hold them.

    Args:
        numbers: int64 [n].
        records: int64 [n, 3]: key, count, clock, -1 = empty record; None = none.

    Returns:
        ``slots`` uint32 [n], ``keys`` int64 [n], ``seen`` uint32 [n, 2]: count and clock, 2^32 - 1
        = empty record.
    """
    found = {"slots": numbers.numpy().astype(np.uint32)}
    if records is not None:
        # The clock -1 becomes 2^32 - 1.
        found |= {"keys": records[:, 0].numpy().copy(),
                  "seen": records[:, 1:].numpy().astype(np.uint32)}
    return found


def keys_of_part(arrays: Mapping[str, np.ndarray], k: int, num_records: int
                 ) -> tuple[torch.Tensor, torch.Tensor]:
    """Undo `keys_to_numpy` for item `k` of a part; raises KeyError or ValueError unless it has
    records of a directory with `num_records` records."""
    slots, keys, seen = (arrays[f"{k}.{name}"] for name in ("slots", "keys", "seen"))
    n = slots.size
    if [x.dtype.str for x in (slots, keys, seen)] != ["<u4", "<i8", "<u4"] or (
            keys.shape != (n,) or seen.shape != (n, 2) or (n and int(slots.max()) >= num_records)):
        raise ValueError(f"slots {slots.dtype} {slots.shape}, keys {keys.dtype} {keys.shape} and "
                         f"counts {seen.dtype} {seen.shape} do not describe changed records of a "
                         f"directory with {num_records} records")
    seen = seen.astype(np.int64)
    seen[seen[:, 1] == _NO_CLOCK, 1] = -1
    return (torch.from_numpy(slots.astype(np.int64)),
            torch.from_numpy(np.concatenate([keys[:, None], seen], axis=1)))


def put_rows(arrays: dict[str, np.ndarray], meta: dict[str, Any],
             into: Mapping[str, tuple[LogicalRows, Container[str]]]) -> None:
    """Write the rows, optimizer states and records of keys of a part that this rank owns.

    Args:
        arrays, meta: the part, as `read_part` returns it.
        into: by path, a model's collections of tables, and the tables whose states are written. In
            parts of earlier versions, which have no paths, collections are in this order.

    Raises:
        FileFormatError: the part does not fit the tables.
    """
    paths = meta.get("collections", [*into])
    for k, item in enumerate(meta["items"]):
        with as_format_error("cannot load a delta checkpoint", "rows", "rows of this model",
                             "load it into the model that wrote it"):
            collection, table, column, parts = item
            target, with_states = into[paths[collection]]
            if parts == [EXPIRED]:  # for servers: the directory itself knows when keys expire
                continue
            if parts[0] in RECORDS:
                _put_keys(arrays, k, table, parts[0], target)
                continue
            ids = arrays[f"{k}.ids"].astype(np.int64)
            num_rows = target.specs[table].num_rows
            held = {"rows"} | ({part for part, _ in STATE_PARTS[target.specs[table].optimizer]}
                               if table in with_states else set())
            pairs = [(part, torch.from_numpy(arrays[f"{k}.{part}"])) for part in parts
                     if part in held]
            if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < num_rows:
                raise ValueError(f"ids up to {int(ids.max())} of {num_rows} rows")
            for part, values in pairs:
                want = target.dtype(table, part)
                shape, width = target.shape(table, part), values[0].numel() if ids.size else 0
                if values.dtype != _AS_STORED.get(want, want) or values.shape[0] != ids.size or (
                        width > (1 if len(shape) == 1 else shape[1] - column)):
                    raise ValueError(f"values of {values.dtype} {tuple(values.shape)} from column "
                                     f"{column} on do not fit {want} {tuple(shape)}")
                values = values.view(want) if want in _AS_STORED else values
                target.scatter(table, ids, values, part, 0 if len(shape) == 1 else column)


def _put_keys(arrays: dict[str, np.ndarray], k: int, table: str, part: str, target: LogicalRows
              ) -> None:
    """Write the records of item `k` of a part to the directory of a dynamic table."""
    keys = target.keys if isinstance(target, ShardedTables) else None
    if keys is None or table not in keys.tables:
        raise ValueError(f"keys of {table!r}, which is not a dynamic table here")
    keys.write(table, part, *keys_of_part(arrays, k, keys.num_records(table, RECORDS[part])))
