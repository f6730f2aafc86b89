"""Directories of dynamic tables as ``state_dict`` entries beside the rows, and back.

``keys`` int64 [num_embeddings - 1, 3] has the key, the count and the clock of the row ``slot + 1``;
``candidates`` int64 [n, 3] the same of keys that are counted without a row (only with
``admit_after``); ``clock`` int64 [] the updates of the table so far. A record without a key has the
clock -1. They fit every plan and number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from oper.errors import InvalidInputError, fail
from oper.integration.checkpoint.table_state import chunks_of, distributed, shard_range
from oper.shmem.keys.directories import MOST_UPDATES, RECORDS, Keys
from oper.shmem.tables import ShardedTables

_CHUNK_RECORDS = 1 << 20


def key_names(tables: ShardedTables, name: str) -> list[str]:
    """Names of a table's entries; empty unless it is dynamic."""
    keys = tables.keys
    return [] if keys is None or name not in keys.tables else [*keys.parts(name), "clock"]


def key_entries(tables: ShardedTables, name: str) -> dict[str, Any]:
    """Entries of a table's directory; no rank may be in an update.

    Returns:
        One rank: copies. Several ranks: ``DTensor`` s as those of rows, but for the clock.
    """
    keys = tables.keys
    if keys is None or name not in keys.tables:
        return {}
    size = 1 if tables.group.is_local else tables.group.world_size
    found: dict[str, Any] = {}
    for part in keys.parts(name):
        num_records = keys.num_records(name, RECORDS[part])
        begin, end = shard_range(num_records, size, tables.group.rank if size > 1 else 0)
        found[part] = distributed(tables, keys.read(name, part, begin, end), num_records)
    return found | {"clock": torch.tensor(keys.clock(name))}


def load_key_entries(tables: ShardedTables, name: str, state_dict: Mapping[str, Any], prefix: str,
                     missing_keys: list[str], error_msgs: list[str]) -> None:
    """Put back what `key_entries` gave, of any plan and number of ranks. Collective.

    Arguments as for ``nn.Module._load_from_state_dict``. A directory is loaded as a whole or, with
    an error, not at all.
    """
    wanted = key_names(tables, name)
    keys = tables.keys
    if keys is None or not wanted:
        return
    absent = [f"{prefix}{part}" for part in wanted if f"{prefix}{part}" not in state_dict]
    missing_keys += absent
    if absent:
        if f"{prefix}weight" in state_dict:  # not only where the load is strict
            error_msgs.append(fail(
                f"cannot load dynamic table {name!r}", "missing entries", absent,
                "rows together with their keys", "load all entries of the table"))
        return
    try:
        _check(keys, name, {part: state_dict[f"{prefix}{part}"] for part in wanted})
        for checks in (True, False):  # all of it is checked before any is written
            for part in keys.parts(name):
                for begin, records in chunks_of(state_dict[f"{prefix}{part}"]):
                    for at in range(0, records.shape[0], _CHUNK_RECORDS):
                        keys.write(name, part, begin + at, records[at:at + _CHUNK_RECORDS], checks)
        keys.set_clock(name, int(state_dict[f"{prefix}clock"]))
    except InvalidInputError as error:
        error_msgs.append(str(error))
    tables.barrier()


def _check(keys: Keys, name: str, state: Mapping[str, Any]) -> None:
    """Raise InvalidInputError for entries of another shape, or an invalid clock."""
    for part in keys.parts(name):
        shape = (keys.num_records(name, RECORDS[part]), 3)
        if tuple(state[part].shape) != shape or state[part].dtype != torch.int64:
            raise InvalidInputError(f"cannot load the {part} of dynamic table {name!r}",
                                    "dtype, shape", (state[part].dtype, tuple(state[part].shape)),
                                    f"{(torch.int64, shape)}",
                                    "load a checkpoint of a table with as many rows")
    if not 0 <= int(state["clock"]) <= MOST_UPDATES:
        raise InvalidInputError(f"cannot load dynamic table {name!r}", "clock", int(state["clock"]),
                                f"a number in [0, {MOST_UPDATES}]",
                                "load a checkpoint of this model")
