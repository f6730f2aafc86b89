"""``state_dict`` entries for the key directories of dynamic tables.

``keys``, int64 [num_embeddings - 1, 3]: key, count and clock of row ``k + 1`` in record k.
``candidates``, int64 [n, 3]: the same for keys that have no row yet (only with ``admit_after``).
``clock``, int64 []: number of updates of the table so far. The clock of an unused record is -1.
The entries do not depend on the plan or the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from oper.errors import InvalidInputError, fail, require
from oper.integration.checkpoint.on_demand import TableRows, check_rank, may_copy_rows
from oper.integration.checkpoint.table_state import (
    all_ranks,
    chunks_of,
    count_of,
    distributed,
    not_plain,
    noting,
    range_here,
    rank0_values,
)
from oper.shmem.group.agreement import errors_of_all
from oper.shmem.keys.directories import CHUNK_RECORDS, MOST_UPDATES, RECORDS, Keys
from oper.shmem.tables import ShardedTables
from oper.tables import KEY_BUCKET_ROWS


def key_names(tables: ShardedTables, name: str) -> list[str]:
    """Return the names of a table's directory entries; empty unless the table is dynamic."""
    keys = tables.keys
    return [] if keys is None or name not in keys.tables else [*keys.parts(name), "clock"]


def key_entries(tables: ShardedTables, name: str) -> dict[str, Any]:
    """Return the entries of a table's directory; no rank may be in an update.

    Returns:
        With one rank, copies. With several, ``DTensor`` objects sharded like the rows, except for
        ``clock``, a plain tensor. In a `rows_never` block, only ``clock``.
    """
    keys = tables.keys
    if keys is None or name not in keys.tables:
        return {}
    found: dict[str, Any] = {}
    for part in keys.parts(name) if may_copy_rows() else ():
        num_records = keys.num_records(name, RECORDS[part])
        records = keys.read(name, part, *range_here(tables, num_records))
        found[part] = distributed(tables, records, num_records)
    return found | {"clock": torch.tensor(keys.clock(name))}


def load_key_entries(tables: ShardedTables, name: str, state_dict: Mapping[str, Any], prefix: str,
                     missing_keys: list[str], error_msgs: list[str]) -> None:
    """Load the result of `key_entries`, saved under any plan and number of ranks. Collective.

    The arguments are those of ``nn.Module._load_from_state_dict``. If an entry is missing or
    invalid on a rank, an error is appended to `error_msgs` on all ranks and nothing is loaded.
    """
    wanted = key_names(tables, name)
    keys = tables.keys
    if keys is None or not wanted:
        return
    entries = [f"{prefix}{part}" for part in wanted]
    absent = [key for key in entries if key not in state_dict]
    missing_keys += absent
    errors = []
    weight = f"{prefix}weight"
    lacks = [key for key in (weight, *entries) if key not in state_dict]
    if lacks and len(lacks) <= len(entries):  # an error even if the load is not strict
        errors.append(fail(
            f"cannot load dynamic table {name!r}", "missing entries", lacks,
            "rows together with their keys", "load all entries of the table"))
    with noting(errors):
        if not absent:
            for key in entries:
                check_rank(f"cannot load {key!r}", state_dict[key], tables.group.rank)
            _check(keys, name, {part: state_dict[f"{prefix}{part}"] for part in wanted})
        if not lacks:  # refused rows would remain those of other keys
            TableRows(tables, name).check(state_dict[weight])
    errors = errors_of_all(all_ranks(tables), [
        *absent, *not_plain(state_dict, [weight, *entries])], errors)
    if absent and not errors:
        return
    values: dict[str, Any] = {}
    clock = 0
    if not errors:
        values = {part: rank0_values(tables, state_dict[f"{prefix}{part}"])
                  for part in keys.parts(name)}
        clock = tables.group.all_gather(int(state_dict[f"{prefix}clock"]))[0]
    for checks in (True, False):  # check all records before writing any
        if errors:
            break
        with noting(errors):
            for part in keys.parts(name):
                for first, some in _chunks(values[part]):
                    keys.write(name, part, torch.arange(first, first + some.shape[0]), some, checks)
                    if not checks:
                        continue
                    require(f"cannot load the {part} of dynamic table {name!r}",
                            "load a checkpoint of this model",
                            ("newest clock of a key", latest := int(some[:, 2].max()),
                             latest <= clock, f"at most {clock}, the table's clock"))
        errors = errors_of_all(all_ranks(tables), [], errors)
    if not errors:
        keys.set_clock(name, clock)
    error_msgs += errors
    tables.barrier()
    if tables.replicas is not None:
        tables.replicas.check_keys(name)


def _chunks(value: Any) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (number of the first record, records) for the chunks of an entry; collective.

    `Keys.write` compares only the keys of one call. Each chunk therefore begins with the last
    records of the one before, so that every bucket is in one chunk as a whole.
    """
    before = torch.empty(0, 3, dtype=torch.int64)
    for begin, records in chunks_of(value):
        for at in range(0, records.shape[0], CHUNK_RECORDS):
            some = torch.cat([before, records[at:at + CHUNK_RECORDS]])
            yield begin + at - before.shape[0], some
            before = some[-KEY_BUCKET_ROWS:]


def _check(keys: Keys, name: str, state: Mapping[str, Any]) -> None:
    """Raise InvalidInputError for entries of another shape, or an invalid clock."""
    for part in keys.parts(name):
        # Sparse tensors also have these shapes.
        wanted = torch.int64, (keys.num_records(name, RECORDS[part]), 3), torch.strided
        found = (getattr(state[part], "dtype", None), tuple(getattr(state[part], "shape", ())),
                 getattr(state[part], "layout", None))
        if found != wanted:
            raise InvalidInputError(f"cannot load the {part} of dynamic table {name!r}",
                                    "dtype, shape, layout", found, f"{wanted}",
                                    "load a checkpoint of a table with as many rows")
    if not 0 <= count_of(state["clock"]) <= MOST_UPDATES:
        raise InvalidInputError(f"cannot load dynamic table {name!r}", "clock", state["clock"],
                                f"a number in [0, {MOST_UPDATES}]",
                                "load a checkpoint of this model")
