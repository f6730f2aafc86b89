"""Rows by raw key, without a directory: into dynamic tables, out of them, and to servers.

A dynamic table's ``state_dict`` entries have a place for every row. Here keys are a sorted list, as
other programs have them: TorchRec's managed-collision modules, a static table with its vocabulary,
a table of another capacity.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from oper.errors import InvalidInputError
from oper.shmem.keys.directories import MOST_UPDATES
from oper.shmem.keys.places import num_candidates, slots_of_keys
from oper.shmem.keys.rules import DynamicTable

_MOST_COUNTED = (1 << 32) - 1  # counts have 32 bits
_NO_KEY = torch.iinfo(torch.int64).max  # in TorchRec's maps


@dataclass(frozen=True, eq=False, slots=True)
class KeyedRows:
    """Keys and their rows.

    Attributes:
        keys: int64 [n], ascending, each once.
        rows: floats [n, dim].
        default_row: floats [dim], that of all other keys.
        counts: int64 [n], how often each key has been seen, in [0, 2^32).
        clocks: int64 [n], the update that saw it last, in [0, `clock`].
        clock: updates so far.

    Raises:
        InvalidInputError: other shapes, keys that are not ascending, or numbers out of range.
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
            raise _bad("keys", "not ascending", "ascending keys, each once")
        if not isinstance(self.clock, int) or not 0 <= self.clock <= MOST_UPDATES:
            raise _bad("clock", self.clock, f"an integer in [0, {MOST_UPDATES}]")
        for name, most in (("counts", _MOST_COUNTED), ("clocks", self.clock)):
            value = getattr(self, name)
            if n and not 0 <= int(value.min()) <= int(value.max()) <= most:
                raise _bad(name, [int(value.min()), int(value.max())], f"numbers in [0, {most}]")

    # ---- from elsewhere --------------------------------------------------------------------------

    @classmethod
    def of_entries(cls, entries: Mapping[str, Any], prefix: str = "",
                   time_to_live: int | None = None) -> KeyedRows:
        """Keys and rows of a dynamic table. Collective if the entries are split over ranks.

        Args:
            entries: a ``state_dict`` with the table's ``weight``, ``keys`` and ``clock``.
            prefix: prefix of these names, with its dot.
            time_to_live: that of the table's `oper.DynamicTable`; expired keys are left out.
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
        """Keys and rows of a table behind TorchRec's ``MCHManagedCollisionModule``, not sharded by
        rows.

        A module with an ``input_hash_func`` holds hashes in the place of ids: a dynamic table must
        then be given the same hashes.

        Args:
            state: the ``state_dict`` of a ``ManagedCollisionEmbedding(Bag)Collection``, or of a
                model that contains one.
            table: name of the table.
        """
        of_map = f"_managed_collision_modules.{table}._mch_"
        raw, mapping = (_whole(state, _ending(state, of_map + name))
                        for name in ("sorted_raw_ids", "remapped_ids_mapping"))
        weight = _whole(state, _ending(state, f"embedding_bags.{table}.weight",
                                       f"embeddings.{table}.weight"))
        size = raw.numel()
        if weight.shape[0] != size or not torch.equal(mapping.sort().values, torch.arange(size)):
            raise _bad(f"rows of {table!r}", (weight.shape[0], size), "one map of all rows of it")
        held = (raw != _NO_KEY).nonzero()[:, 0]
        held = held[raw[held].argsort()]
        found: dict[str, torch.Tensor] = {}
        for name, most in (("counts", _MOST_COUNTED), ("last_access_iter", MOST_UPDATES)):
            places = [k for k in state if f".{k}".endswith(f".{of_map}{name}")]
            value = _whole(state, places[0])[held] if places else torch.zeros_like(held)
            found[name] = value.clamp(0, most)
        clocks = found["last_access_iter"]
        # A miss reads the last row.
        return cls(raw[held], weight[mapping[held]], weight[size - 1].clone(), found["counts"],
                   clocks, int(clocks.max()) if clocks.numel() else 0)

    # ---- to elsewhere ----------------------------------------------------------------------------

    def entries(self, num_embeddings: int, rule: DynamicTable, prefix: str = "",
                drop: bool = False) -> dict[str, torch.Tensor]:
        """``state_dict`` entries of a dynamic table, in which optimizer states are reset.

        Args:
            num_embeddings: rows of the table, with the default row.
            rule: its rule.
            prefix: prefix of their names, with its dot.
            drop: leave out keys that find no place in their bucket, those with the lowest counts;
                otherwise they are an error.

        Raises:
            InvalidInputError: keys find no place.
        """
        num_slots = num_embeddings - 1
        slots = slots_of_keys(self.keys.numpy(), self.counts.numpy(), num_slots, rule.seed)
        fits = slots >= 0
        if not fits.all() and not drop:
            raise InvalidInputError(
                "cannot put keys into a dynamic table", "keys without a place", int((~fits).sum()),
                f"none of {slots.size} in buckets of {num_slots} rows",
                "use a larger table, or pass drop=True to leave out those with the lowest counts")
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
        """The contents of a static table of a fixed size and of the `KeyMap` in front of it.

        Returns:
            The map's ``keys``, int64 [num_embeddings - 1], and the table's ``weight``,
            [num_embeddings, dim]: the default row, then those of the keys in ascending order.
            Unused places repeat the last key; unused rows hold the default row.

        Raises:
            InvalidInputError: there are more keys.
        """
        n, num_places = self.keys.numel(), num_embeddings - 1
        if n > num_places or num_places < 1:
            raise InvalidInputError("cannot make a static table", "num_embeddings", num_embeddings,
                                    f">= {max(n, 1) + 1}, for {n} keys and a default row",
                                    "use more rows")
        last = self.keys[-1:] if n else self.keys.new_zeros(1)
        weight = self.default_row.repeat(num_embeddings, 1)
        weight[1:n + 1] = self.rows
        return torch.cat([self.keys, last.expand(num_places - n)]), weight


class KeyMap(nn.Module):
    """Row numbers of raw keys in a static table; 0 for keys that it does not know.

    A plain torch module: in front of an ``nn.EmbeddingBag`` it can be published, served, exported
    and moved to a device like any other. Its state is ``keys``, ascending, which `KeyedRows.static`
    makes.

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
        """Rows, int64, of keys int64 or int32 of any shape."""
        if ids.is_floating_point():
            raise InvalidInputError("cannot map keys to rows", "dtype", ids.dtype, "integers",
                                    "convert the keys: large ones are not exact in floats")
        ids = ids.long()
        at = torch.searchsorted(self.keys, ids).clamp(max=self.keys.numel() - 1)
        return torch.where(self.keys[at] == ids, at + 1, 0)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        keys = state_dict.get(f"{prefix}keys")
        if keys is not None and not keys.is_meta and not bool((keys[1:] >= keys[:-1]).all()):
            raise _bad(f"{prefix}keys", "not ascending", "ascending keys, as KeyedRows.static has")
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _empty_records(n: int) -> torch.Tensor:
    records = torch.zeros(n, 3, dtype=torch.int64)
    records[:, 2] = -1
    return records


def _ending(state: Mapping[str, Any], *ends: str) -> str:
    """The only name in `state` that ends with one of these."""
    found = [k for k in state if any(f".{k}".endswith(f".{e}") for e in ends)]
    if len(found) != 1:
        raise _bad("entries", found[:4], f"one that ends with {' or '.join(ends)}")
    return found[0]


def _whole(entries: Mapping[str, Any], name: str) -> torch.Tensor:
    """A plain tensor in host memory of an entry that may be split over ranks."""
    if name not in entries:
        raise _bad("entries", list(entries)[:4], f"one named {name!r}")
    value = entries[name]
    if getattr(value, "full_tensor", None) is not None:
        value = value.full_tensor()
    if not isinstance(value, torch.Tensor):
        raise _bad(name, type(value).__name__, "a tensor")
    return value.detach().cpu()


def _bad(name: str, value: object, expected: str) -> InvalidInputError:
    return InvalidInputError("cannot take rows by key", name, value, expected,
                             "correct the keys, or take the state of another table")
