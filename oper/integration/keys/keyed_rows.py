"""Conversion of dynamic tables to and from other representations of rows by raw key.

`KeyedRows` is a sorted list of keys with their rows. It converts between ``state_dict`` entries of
dynamic tables of any capacity, TorchRec's managed-collision modules (import only), and static
tables behind a `KeyMap` (export only).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from oper.errors import InvalidInputError
from oper.integration.checkpoint.on_demand import is_divided
from oper.shmem.keys.directories import MOST_UPDATES
from oper.shmem.keys.places import num_candidates, slots_of_keys
from oper.shmem.keys.rules import DynamicTable

_MOST_COUNTED = (1 << 32) - 1  # counts have 32 bits
_NO_KEY = torch.iinfo(torch.int64).max  # marks unused entries of TorchRec's maps


@dataclass(frozen=True, eq=False, slots=True)
class KeyedRows:
    """Keys and their rows.

    Attributes:
        keys: int64 [n], strictly ascending.
        rows: floating-point [n, dim].
        default_row: floating-point [dim], the row of all other keys.
        counts: int64 [n], number of occurrences of each key so far, in [0, 2^32).
        clocks: int64 [n], number of the last update with each key, in [0, `clock`].
        clock: number of updates so far.

    Raises:
        InvalidInputError: an attribute has another shape or dtype, keys are not strictly ascending,
            or numbers are out of range.
    """

    keys: torch.Tensor
    rows: torch.Tensor
    default_row: torch.Tensor
    counts: torch.Tensor
    clocks: torch.Tensor
    clock: int

    def __post_init__(self) -> None:
        n = self.keys.numel()
        dim = self.default_row.numel()
        wanted = {"keys": (n,), "rows": (n, dim), "default_row": (dim,), "counts": (n,),
                  "clocks": (n,)}
        for name, shape in wanted.items():
            value = getattr(self, name)
            is_float = name in ("rows", "default_row")
            if tuple(value.shape) != shape or value.is_floating_point() != is_float or (
                    not is_float and value.dtype != torch.int64):
                raise _bad(name, (value.dtype, tuple(value.shape)),
                           f"{'floats' if is_float else 'int64'} {list(shape)}")
        if not bool((self.keys[1:] > self.keys[:-1]).all()):
            raise _bad("keys", "unsorted or repeated keys", "strictly ascending keys")
        if not isinstance(self.clock, int) or not 0 <= self.clock <= MOST_UPDATES:
            raise _bad("clock", self.clock, f"an integer in [0, {MOST_UPDATES}]")
        for name, most in (("counts", _MOST_COUNTED), ("clocks", self.clock)):
            value = getattr(self, name)
            if n and not 0 <= int(value.min()) <= int(value.max()) <= most:
                raise _bad(name, [int(value.min()), int(value.max())], f"numbers in [0, {most}]")

    # ---- import ----------------------------------------------------------------------------------

    @classmethod
    def of_entries(cls, entries: Mapping[str, Any], prefix: str = "",
                   time_to_live: int | None = None) -> KeyedRows:
        """Read the keys and rows of a dynamic table. Collective if entries are DTensors.

        Args:
            entries: a ``state_dict`` with the table's ``weight``, ``keys`` and ``clock``.
            prefix: prefix of these names, including the dot.
            time_to_live: `time_to_live` of the table's `oper.DynamicTable`; expired keys are left
                out. None = keys do not expire.

        Raises:
            InvalidInputError: an entry is missing or has another shape.
        """
        weight, records, clock = (_whole(entries, f"{prefix}{n}")
                                  for n in ("weight", "keys", "clock"))
        if records.dim() != 2 or tuple(records.shape) != (weight.shape[0] - 1, 3):
            raise _bad(f"{prefix}keys", tuple(records.shape), f"[{weight.shape[0] - 1}, 3]")
        oldest = 0 if time_to_live is None else max(0, int(clock) - time_to_live)
        held = (records[:, 2] >= oldest).nonzero()[:, 0]
        held = held[records[held, 0].argsort()]
        keys, counts, clocks = records[held].T.contiguous()
        return cls(keys, weight[held + 1], weight[0].clone(), counts, clocks, int(clock))

    @classmethod
    def of_managed_collision(cls, state: Mapping[str, Any], table: str) -> KeyedRows:
        """Read the keys and rows of a table behind TorchRec's ``MCHManagedCollisionModule``.

        The table must not be sharded by rows. If the module has an ``input_hash_func``, its keys
        are hashes: apply the same function to ids before looking them up in a dynamic table.

        Args:
            state: the ``state_dict`` of a ``ManagedCollisionEmbedding(Bag)Collection``, or of a
                model that contains one.
            table: name of the table.

        Raises:
            InvalidInputError: an entry is missing or ambiguous, or the map does not cover all rows.
        """
        of_map = f"_managed_collision_modules.{table}._mch_"
        raw, mapping = (_whole(state, _ending(state, of_map + name))
                        for name in ("sorted_raw_ids", "remapped_ids_mapping"))
        weight = _whole(state, _ending(state, f"embedding_bags.{table}.weight",
                                       f"embeddings.{table}.weight"))
        size = raw.numel()
        if weight.shape[0] != size or not torch.equal(mapping.sort().values, torch.arange(size)):
            raise _bad(f"rows, map size of {table!r}", (weight.shape[0], size),
                       "equal numbers, and a map that contains every row once")
        held = (raw != _NO_KEY).nonzero()[:, 0]
        held = held[raw[held].argsort()]
        found: dict[str, torch.Tensor] = {}
        for name, most in (("counts", _MOST_COUNTED), ("last_access_iter", MOST_UPDATES)):
            places = [k for k in state if f".{k}".endswith(f".{of_map}{name}")]
            value = _whole(state, places[0])[held] if places else torch.zeros_like(held)
            found[name] = value.clamp(0, most)
        clocks = found["last_access_iter"]
        # TorchRec maps unknown ids to the last row.
        return cls(raw[held], weight[mapping[held]], weight[size - 1].clone(), found["counts"],
                   clocks, int(clocks.max()) if clocks.numel() else 0)

    # ---- export ----------------------------------------------------------------------------------

    def entries(self, num_embeddings: int, rule: DynamicTable, prefix: str = "",
                drop: bool = False) -> dict[str, torch.Tensor]:
        """Return ``state_dict`` entries of a dynamic table, without optimizer state.

        Args:
            num_embeddings: number of rows of the table, including the default row.
            rule: the table's `oper.DynamicTable`.
            prefix: prefix of the entries' names, including the dot.
            drop: if a bucket has more keys than rows, drop those with the lowest counts instead of
                raising an error.

        Returns:
            ``weight`` [num_embeddings, dim], ``keys`` int64 [num_embeddings - 1, 3] (key, count,
            clock; clock -1 = unused), ``clock`` int64 [], and if the rule admits keys after more
            than one occurrence, empty ``candidates``.

        Raises:
            InvalidInputError: a bucket has more keys than rows, and `drop` is not set.
        """
        num_slots = num_embeddings - 1
        slots = slots_of_keys(self.keys.numpy(), self.counts.numpy(), num_slots, rule.seed)
        fits = slots >= 0
        if not fits.all() and not drop:
            raise InvalidInputError(
                "cannot put keys into a dynamic table", "keys that exceed their buckets",
                int((~fits).sum()), f"0 of {slots.size} in a table of {num_slots} rows for keys",
                "use a larger table, or pass drop=True to drop those with the lowest counts")
        held, at = torch.from_numpy(np.flatnonzero(fits)), torch.from_numpy(slots[fits])
        records = _empty_records(num_slots)
        records[at] = torch.stack([x[held] for x in (self.keys, self.counts, self.clocks)], 1)
        weight = self.rows.new_zeros(num_embeddings, self.default_row.numel())
        weight[0], weight[at + 1] = self.default_row, self.rows[held]
        found = {"weight": weight, "keys": records, "clock": torch.tensor(self.clock)}
        if rule.admit_after > 1:
            found["candidates"] = _empty_records(num_candidates(num_slots))
        return {f"{prefix}{name}": value for name, value in found.items()}

    def static(self, num_embeddings: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the contents of a static table with `num_embeddings` rows and of its `KeyMap`.

        Returns:
            The map's ``keys``, int64 [num_embeddings - 1], and the table's ``weight``,
            [num_embeddings, dim]: the default row, then the keys' rows in ascending order of keys.
            Unused entries of ``keys`` repeat the last key; unused rows are the default row.

        Raises:
            InvalidInputError: there are more than ``num_embeddings - 1`` keys.
        """
        n, num_places = self.keys.numel(), num_embeddings - 1
        if n > num_places or num_places < 1:
            raise InvalidInputError("cannot make a static table", "num_embeddings", num_embeddings,
                                    f">= {max(n, 1) + 1}, for {n} keys and a default row",
                                    "pass a larger num_embeddings")
        last = self.keys[-1:] if n else self.keys.new_zeros(1)
        weight = self.default_row.repeat(num_embeddings, 1)
        weight[1:n + 1] = self.rows
        return torch.cat([self.keys, last.expand(num_places - n)]), weight


class KeyMap(nn.Module):
    """Maps raw keys to row numbers of a static table, and unknown keys to row 0.

    It is a plain torch module that can be published, served, exported and moved to a device
    together with the ``nn.EmbeddingBag`` that follows it. Its only state is the buffer ``keys``,
    int64 [num_keys], ascending; `KeyedRows.static` creates its contents.

    Args:
        num_keys: number of keys, one less than the table's rows; at least 1.

    Raises:
        InvalidInputError: `num_keys` is below 1; on loading, keys are not ascending; on a call,
            ids are not integers.

    Example:
        >>> import torch, oper
        >>> to_rows = oper.KeyMap(3)
        >>> to_rows.keys.copy_(torch.tensor([-7, 5, 1 << 62]))
        tensor([                 -7,                   5, 4611686018427387904])
        >>> to_rows(torch.tensor([[5, 6], [1 << 62, -7]]))
        tensor([[2, 0],
                [3, 1]])
    """

    keys: torch.Tensor

    def __init__(self, num_keys: int) -> None:
        super().__init__()
        if num_keys < 1:
            raise InvalidInputError("cannot map keys to rows", "num_keys", num_keys, ">= 1",
                                    "use a table of two rows or more")
        self.register_buffer("keys", torch.zeros(num_keys, dtype=torch.int64))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the row numbers of integer keys `ids`, int64 of the same shape."""
        if ids.is_floating_point():
            raise InvalidInputError("cannot map keys to rows", "dtype", ids.dtype, "integers",
                                    "pass integer keys, since floats cannot represent large ones")
        ids = ids.long()
        at = torch.searchsorted(self.keys, ids).clamp(max=self.keys.numel() - 1)
        return torch.where(self.keys[at] == ids, at + 1, 0)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        keys = state_dict.get(f"{prefix}keys")
        if keys is not None and not keys.is_meta and not bool((keys[1:] >= keys[:-1]).all()):
            raise _bad(f"{prefix}keys", "unsorted keys",
                       "ascending keys, as KeyedRows.static returns them")
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _empty_records(n: int) -> torch.Tensor:
    records = torch.zeros(n, 3, dtype=torch.int64)
    records[:, 2] = -1
    return records


def _ending(state: Mapping[str, Any], *ends: str) -> str:
    """Return the only name in `state` that ends with one of `ends`."""
    found = [k for k in state if any(f".{k}".endswith(f".{e}") for e in ends)]
    if len(found) != 1:
        raise _bad("entries", found[:4], f"exactly one that ends with {' or '.join(ends)}")
    return found[0]


def _whole(entries: Mapping[str, Any], name: str) -> torch.Tensor:
    """Return an entry, possibly a DTensor, as a plain tensor in host memory."""
    if name not in entries:
        raise _bad("entries", list(entries)[:4], f"one named {name!r}")
    value = entries[name]
    if is_divided(value):
        value = value.full_tensor()
    if not isinstance(value, torch.Tensor):
        raise _bad(name, type(value).__name__, "a tensor")
    return value.detach().cpu()


def _bad(name: str, value: object, expected: str) -> InvalidInputError:
    return InvalidInputError("cannot convert rows by key", name, value, expected,
                             "pass the unmodified state of a table of this kind")
