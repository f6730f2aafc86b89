"""Sources of weights for inference: a model, a ``state_dict``, a checkpoint or a file."""

from __future__ import annotations

import contextlib
import os
import pickle
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from oper.errors import FileFormatError, InvalidInputError
from oper.integration.checkpoint.files import (
    METADATA,
    CheckpointReader,
    check_files,
    load_archive,
    open_folder,
    path_of,
)
from oper.integration.checkpoint.on_demand import TableRows, is_divided, rows_on_demand
from oper.shmem.memory.quantise import dequantise
from oper.shmem.rows import CHUNK_ROWS
from oper.tables import CODE_BITS, TableSpec

Source = nn.Module | Mapping[str, Any] | str | os.PathLike[str]


def extra_value(folder: Path, key: str) -> Any:
    """Return the plain value stored under `key` in a checkpoint's ``extra``; None if there is none
    or the checkpoint cannot be read."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    state: dict[str, Any] = {"extra": {key: None}}
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.suppress(
            OSError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError,
            CheckpointException))  # a BaseException
        number = open_folder(folder)
        stack.callback(os.close, number)
        reader = CheckpointReader(path_of(number))
        if f"extra.{key}" in reader.read_metadata().state_dict_metadata:
            load(state, storage_reader=reader, no_dist=True)
    return state["extra"][key]


class Weights:
    """Named weights, read on request.

    Args:
        source: a model (unsharded, quantised by TorchRec, or sharded by `oper.shard` among ranks
            that share memory), a ``state_dict`` (possibly nested in other dicts), a folder written
            by ``torch.distributed.checkpoint`` under any plan, or a file of ``torch.save``.
        keys: required names. If the source has all of them with a common prefix, such as
            ``model.``, the prefix is detected; of several, ``model.`` is chosen.

    Raises:
        InvalidInputError: a name is missing, the source has several models none of which is called
            ``model``, or `source` has another type.
        FileFormatError: the source is not a checkpoint, or is damaged.
    """

    def __init__(self, source: Source, keys: Iterable[str]) -> None:
        self._folder: Path | None = None
        if isinstance(source, nn.Module):
            with rows_on_demand():
                self._values = dict(source.state_dict())
        elif isinstance(source, Mapping):
            self._values = dict(_flat(source))
        elif not isinstance(source, str | os.PathLike):
            raise InvalidInputError("cannot read weights", "type of their source",
                                    type(source).__name__,
                                    "a model, a state_dict, or the path of a folder or file",
                                    "pass for example model.state_dict(), or a checkpoint's folder")
        else:
            self._values = self._open(Path(source))
        self._prefix = _common_prefix(self._values, list(keys))

    def _open(self, path: Path) -> dict[str, Any]:
        what = f"cannot read weights from {str(path)!r}"
        if path.exists() and not path.is_dir():
            return dict(_flat(load_archive(path, what)))
        try:
            # The folder itself, or a folder that contains exactly one checkpoint.
            found = sorted(path.rglob(METADATA))
            if len(found) != 1:
                raise FileFormatError(what, "checkpoints", len(found), "one in this folder",
                                      "name the folder of one checkpoint")
            self._folder = self._hold(found[0].parent)
            try:
                check_files(self._folder)
                return dict(CheckpointReader(self._folder).read_metadata().state_dict_metadata)
            except FileFormatError as error:
                raise FileFormatError(
                    str(error).replace(str(self._folder), str(found[0].parent))) from None
        except FileFormatError:
            raise
        except (OSError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise FileFormatError(what, "content", f"{type(error).__name__} {error}",
                                  "a checkpoint folder or a file of torch.save",
                                  "regenerate it") from None

    def _hold(self, folder: Path) -> Path:
        """Return a path that continues to refer to this folder after a rename, see `path_of`."""
        number = open_folder(folder)
        weakref.finalize(self, os.close, number)
        return path_of(number)

    def value(self, key: str) -> Any:
        """Return a weight: a tensor, `TableRows`, or another value of the ``state_dict``.

        Raises FileFormatError if a training run has removed the checkpoint since it was opened.
        """
        value = self._values[self._prefix + key]
        if self._folder is None:
            return getattr(value, "elem", value)  # TorchRec's packed 4-bit tensors
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict_loader import load

        if not hasattr(value, "size"):
            raise InvalidInputError(f"cannot read {key!r}", "value", type(value).__name__,
                                    "a tensor", "save the model's state_dict")
        out = torch.empty(value.size, dtype=value.properties.dtype)
        name = self._prefix + key
        try:
            load({name: out}, storage_reader=CheckpointReader(self._folder), no_dist=True)
        except CheckpointException as error:  # a BaseException
            raise FileFormatError(f"cannot read {name!r}", "files of the checkpoint",
                                  "missing or damaged", "as when it was opened",
                                  "read the newest checkpoint, which may have replaced it"
                                  ) from error
        return out

    def tensor(self, key: str) -> torch.Tensor:
        """Return a dense weight, detached and on the CPU.

        Raises:
            InvalidInputError: it is not a tensor, or is on the meta device.
        """
        value = self.value(key)
        if not isinstance(value, torch.Tensor) or value.is_meta:
            raise InvalidInputError(
                f"cannot read {key!r}", "value",
                "meta tensor" if isinstance(value, torch.Tensor) else type(value).__name__,
                "a tensor with values", "materialise the model, or pass weights=")
        return value.detach().cpu()

    def rows(self, key: str, held: TableSpec, wanted: TableSpec
             ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield chunks of a table's rows: first id, and floats [n, dim] or packed uint8 rows.

        Args:
            key: name of the table's weight.
            held: the table as stored in the source; its dtype decides how uint8 rows, as in
                TorchRec's quantised modules, are decoded.
            wanted: the table as the caller stores it; rows already packed in its dtype are not
                decoded.

        Raises:
            InvalidInputError: the source lacks rows, or has only this rank's.
        """
        value = self.value(key)
        if isinstance(value, TableRows):
            for begin, end in value.chunks():
                yield begin, value.read(begin, end)
            return
        if is_divided(value):
            raise InvalidInputError(f"cannot publish {key!r}", "value", type(value).__name__,
                                    "a tensor with all rows in this process",
                                    "save a checkpoint and publish its folder")
        if not isinstance(value, torch.Tensor) or value.is_meta or value.dim() != 2:
            raise InvalidInputError(f"cannot publish {key!r}", "value", _kind(value),
                                    f"rows [{wanted.num_rows}, {wanted.dim}] with values",
                                    "materialise the model, or pass weights=")
        for begin in range(0, value.shape[0], CHUNK_ROWS):
            part = value[begin:begin + CHUNK_ROWS].detach().cpu()
            yield begin, _unpacked(part, held, wanted)


def _unpacked(rows: torch.Tensor, held: TableSpec, wanted: TableSpec) -> torch.Tensor:
    if rows.dtype != torch.uint8 or (held.dtype == wanted.dtype and held.dtype in CODE_BITS):
        return rows
    if rows.shape[1] < held.row_bytes:
        return rows  # the caller reports the wrong width
    if held.dtype in CODE_BITS:
        return dequantise(rows, held.dtype, held.dim)
    return rows[:, :held.row_bytes].contiguous().view(getattr(torch, held.dtype))


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{'meta ' if value.is_meta else ''}tensor {tuple(value.shape)}"
    return type(value).__name__


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the items of nested dicts, with keys joined by dots."""
    if not isinstance(values, Mapping):
        raise InvalidInputError("cannot read weights", "type", type(values).__name__,
                                "a state_dict", "pass model.state_dict()")
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _common_prefix(values: Mapping[str, Any], keys: list[str]) -> str:
    if not keys:
        return ""
    candidates = [k.removesuffix(keys[0]) for k in values if k == keys[0] or k.endswith(
        f".{keys[0]}")]
    complete = [p for p in candidates if all(f"{p}{k}" in values for k in keys)]
    # Part of another model, such as a copy within it, does not count.
    whole = [p for p in complete if not any(p != q and p.startswith(q) for q in complete)]
    if len(whole) > 1:  # `oper.save_checkpoint` and many programs call the model so
        whole = [p for p in whole if p.startswith("model.")] or whole
    if len(whole) > 1:
        raise InvalidInputError("cannot choose between the weights of several models", "prefixes",
                                sorted(whole)[:8], "one prefix, or 'model.' among them",
                                "pass the state_dict of one of these models")
    if whole:
        return whole[0]
    best = min(sorted(candidates, key=len), default="",
               key=lambda prefix: sum(f"{prefix}{k}" not in values for k in keys))
    lacking = [k for k in keys if f"{best}{k}" not in values]
    raise InvalidInputError("weights of another model", "missing", lacking[:8],
                            f"all of its {len(keys)} weights; there are {list(values)[:4]}...",
                            "pass weights of the published model")
