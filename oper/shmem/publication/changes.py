"""Checks and conversion of changes to published tables, done before readers have to wait."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch

from oper.errors import InvalidInputError
from oper.shmem.memory.quantise import as_rows
from oper.shmem.publication.buffers import DenseEntry, Layout

Changes = Mapping[str, tuple[np.ndarray, torch.Tensor]]  # ids and rows by table name
# By key of a dense weight: pairs of indices int64 [n] and values [n]. An index counts values of
# that dtype from the weight's first byte.
ChangedElements = Mapping[str, list[tuple[torch.Tensor, torch.Tensor]]]
Stored = list[tuple[np.ndarray, torch.Tensor]]  # for each element type: ids, rows in stored form


def packed_rows(layout: Layout, name: str, ids: np.ndarray, values: torch.Tensor
                ) -> Stored:
    """Check changed rows of a table and convert them to stored form; raises InvalidInputError."""
    what = f"cannot change rows of table {name!r}"
    spec = layout.specs.get(name)
    if spec is None:
        raise InvalidInputError(what, "table", name, f"one of {list(layout.specs)}",
                                "publish weights of the same model")
    if not isinstance(ids, np.ndarray) or ids.dtype.kind not in "iu" or (
            ids.shape != (values.shape[0],)) or (ids.size and not (
            int(ids.min()) >= 0 and int(ids.max()) < spec.num_rows)):
        raise InvalidInputError(what, "ids", ids if not isinstance(ids, np.ndarray) else
                                (ids.dtype.name, ids.shape, ids.ravel()[:4].tolist()),
                                f"a NumPy array, int64 [{values.shape[0]}] in [0, {spec.num_rows})",
                                "pass the ids of the rows as such an array")
    if not (ids[1:] > ids[:-1]).all() and np.unique(ids).size < ids.size:
        distinct, counts = np.unique(ids, return_counts=True)
        raise InvalidInputError(what, "repeated ids", distinct[counts > 1][:4].tolist(),
                                "distinct ids", "pass only the last row of each id")
    return stored_rows(what, layout, name, ids, values)


def stored_rows(what: str, layout: Layout, name: str, ids: np.ndarray, values: torch.Tensor
                ) -> Stored:
    """Convert rows of a table (floats [n, dim], or codes of its type) to their stored form.

    Raises:
        InvalidInputError: a row is not finite, or not after conversion; or quantised rows are given
            for a table with several element types. The message begins with `what`.
    """
    spec = layout.specs[name]
    if values.dtype == torch.uint8 and layout.is_mixed(name):
        raise InvalidInputError(what, "dtype of rows", values.dtype,
                                "a float dtype, since the table has several element types",
                                "pass the rows before quantisation")
    _check_finite(what, values, ids)
    found = []
    for dtype, at in layout.types_of(name, ids).items():
        mine, some = (ids, values) if at.size == ids.size else (
            ids[at], values[torch.from_numpy(at)])
        rows = as_rows(some.detach(), spec if dtype == spec.dtype else replace(spec, dtype=dtype))
        if rows.dtype != values.dtype and rows.dtype.is_floating_point:  # codes are finite
            _check_finite(what, rows, mine)
        found.append((mine, rows))
    return found


def _is_finite(values: torch.Tensor) -> bool:
    # The sum is the cheapest test; a sum of finite numbers may overflow, so check again.
    if values.dtype.is_floating_point and math.isfinite(values.sum(dtype=torch.float32)):
        return True
    return bool(torch.isfinite(values).all())


def _check_finite(what: str, rows: torch.Tensor, ids: np.ndarray) -> None:
    if not _is_finite(rows):
        bad = ~torch.isfinite(rows).all(dim=1)
        raise InvalidInputError(what, f"row {int(ids[int(bad.nonzero()[0])])}", "inf or nan",
                                f"finite numbers that {rows.dtype} holds",
                                "publish weights from before training diverged")


def changed_entries(layout: Layout, dense: Mapping[str, torch.Tensor],
                    published: Callable[[DenseEntry], torch.Tensor]) -> list[DenseEntry]:
    """Return the layout's entries for the new weights in `dense`, by key.

    Args:
        layout: the layout.
        dense: the new weights.
        published: returns the published weight of an entry.

    Raises:
        InvalidInputError: a key is unknown, or a weight has another shape or type than its entry,
            or it is not finite and differs from the published one, which may be a mask.
    """
    what = "cannot change published weights"
    entries = [e for e in layout.dense if e.key in dense]
    unknown = sorted(set(dense) - {e.key for e in entries})
    if unknown:
        raise InvalidInputError(what, "unknown keys", unknown[:8],
                                "keys of the published dense weights",
                                "publish weights of the same model")
    for entry in entries:
        check_dense(entry, dense)
        value = dense[entry.key]
        if not _is_finite(value) and not torch.equal(value.cpu(), published(entry)):
            raise InvalidInputError(what, entry.key, "inf or nan", "finite numbers",
                                    "publish weights from before training diverged")
    return entries


def checked_elements(layout: Layout, elements: ChangedElements
                     ) -> list[tuple[DenseEntry, torch.Tensor, torch.Tensor]]:
    """Return the weights, places and values of elements that change.

    Raises:
        InvalidInputError: there is no such weight or place, or the weight has floats, which would
            have to be checked for NaN.
    """
    entries = {e.key: e for e in layout.dense}
    found = []
    for key, parts in elements.items():
        entry = entries.get(key)
        for places, values in parts:
            most = 0 if entry is None else entry.num_bytes // values.element_size()
            if entry is None or getattr(torch, entry.dtype).is_floating_point or (
                    places.shape != values.shape or places.dtype != torch.int64) or (
                    places.numel() and not 0 <= int(places.min()) <= int(places.max()) < most):
                raise InvalidInputError(
                    "cannot change elements of published weights", "key, places, values",
                    (key, tuple(places.shape), tuple(values.shape)),
                    f"a weight of integers, and a place in [0, {most}) for each value",
                    "publish weights of the same model")
            found.append((entry, places.contiguous(), values.contiguous()))
    return found


def check_dense(entry: DenseEntry, dense: Mapping[str, torch.Tensor]) -> None:
    """Raise InvalidInputError unless a dense weight has the right shape and type and no NaN.

    Infinite numbers are allowed, since a mask may hold them.
    """
    value = dense.get(entry.key)
    found = None if value is None else (str(value.dtype).removeprefix("torch."),
                                        tuple(value.shape))
    if value is None or found != (entry.dtype, entry.shape):
        raise InvalidInputError("cannot publish dense weights", f"dtype and shape of {entry.key}",
                                found, f"{(entry.dtype, entry.shape)}",
                                "publish weights of the same model")
    if bool(value.isnan().any()):
        raise InvalidInputError("cannot publish dense weights", entry.key, "nan", "no NaN",
                                "publish weights from before training diverged")
