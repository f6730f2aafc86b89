"""Conversion of sharded tables to and from ``state_dict`` entries; loading of initial weights."""

from __future__ import annotations

import contextlib
import math
import threading
import warnings
import weakref
import zlib
from collections.abc import (
    Callable,
    Container,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from typing import Any, NoReturn

import torch

from oper.errors import InvalidInputError, fail, require
from oper.integration.checkpoint.on_demand import (
    CHUNK_BYTES,
    TableRows,
    chunk_bytes_of,
    is_divided,
    note_rank,
)
from oper.shmem.group.agreement import errors_of_all
from oper.shmem.group.groups import Group
from oper.shmem.optim.optimizers import STATE_PARTS
from oper.shmem.rows import CHUNK_ROWS
from oper.shmem.tables import ShardedTables
from oper.support.processes import when_dropped
from oper.tables import OPTIMIZERS

_GENERATOR = threading.Lock()
InitFn = Callable[[torch.Tensor], Any]
# TorchRec's names of the parts of an optimizer's state.
_STATE_NAMES = {"momentum1": "momentum1", "momentum2": "exp_avg_sq"}
# The part of SGD with momentum, which TorchRec lacks, has torch's name instead: under the same name
# and in the same shape, it could be loaded as Adagrad's sums of squares.
MOMENTUM_SGD = "momentum_sgd"
MOMENTUM = "momentum_buffer"


def table_entry(tables: ShardedTables, name: str, part: str = "rows") -> Any:
    """Return a table, or a part of its optimizer state, as a ``state_dict`` value.

    Returns:
        With one rank, a copy with the global shape, in logical order and the dtype of `part`. With
        several ranks, a ``DTensor`` of that shape with ``Shard(0)``, which
        ``torch.distributed.checkpoint`` can save and reshard. Inside `rows_on_demand`, if all ranks
        share memory, `TableRows`, which contain no rows.
    """
    if tables.replicas is not None:
        tables.replicas.check_synchronized(f"cannot read the state of table {name!r}")
    chunk_bytes = chunk_bytes_of(tables)
    if chunk_bytes:
        return TableRows(tables, name, part, chunk_bytes)
    num_rows = tables.specs[name].num_rows
    begin, end = range_here(tables, num_rows)
    return distributed(tables, tables.read(name, begin, end, part), num_rows)


def distributed(tables: ShardedTables, local: torch.Tensor, num_rows: int) -> Any:
    """Return a ``DTensor`` of `num_rows` rows in which `local` is this rank's range.

    With a single rank, return `local`.
    """
    if tables.group.world_size == 1 or tables.group.is_local:
        return local
    from torch.distributed.tensor import DTensor, Shard

    shape = torch.Size((num_rows, *local.shape[1:]))
    found = DTensor.from_local(
        local, _mesh(tables), [Shard(0)], run_check=False, shape=shape,
        stride=tuple(torch.empty(shape, device="meta").stride()))
    note_rank(found, tables.group.rank)
    return found


def _mesh(tables: ShardedTables) -> Any:
    """Return the one-dimensional device mesh over the group, created at the first call."""
    from torch.distributed.device_mesh import DeviceMesh

    mesh = getattr(tables, "_device_mesh", None)
    if mesh is None:
        group: Any = tables.group
        mesh = DeviceMesh.from_group(group.handle, "cpu")
        tables._device_mesh = mesh  # type: ignore[attr-defined]
    return mesh


#: By id, the values of ``state_dict()`` that are in use, see `watched`.
_WATCHED: dict[int, weakref.finalize[Any, Any]] = {}


def watched(value: Any, key: str) -> Any:
    """Return a value of ``state_dict()``; warns when a program drops it that has changed it in
    place, unless `load_entry` has written it to a table.

    In-place changes reach an unsharded module, on which some programs rely: exponential moving
    averages, and loading by ``torch.distributed.checkpoint`` without ``load_state_dict``.
    """
    given = [value, getattr(value, "_local_tensor", value)]  # the latter of a DTensor
    if all(isinstance(x, torch.Tensor) and not x.is_inference() for x in given):
        aliases = [x.detach() for x in given]  # with the version counters of `given`
        _WATCHED[id(value)] = when_dropped(value, _check_unchanged, id(value), aliases,
                                           [x._version for x in aliases], key)
    return value


def _check_unchanged(number: int, aliases: list[torch.Tensor], versions: list[int], key: str
                     ) -> None:
    _WATCHED.pop(number, None)
    if [x._version for x in aliases] != versions:
        warnings.warn(
            f"a value of state_dict() was changed in place: {key!r}; it is a copy of a sharded "
            "table, which has not changed: write to the parameter, or call load_state_dict with "
            "the value", stacklevel=3)


def load_entry(tables: ShardedTables, name: str, value: Any, part: str = "rows") -> None:
    """Write a ``state_dict`` value to a table; call ``tables.flush_replicas()`` after the last one.

    A ``DTensor`` is broadcast to all ranks in chunks, so that no rank holds all rows at once.

    Args:
        tables: the collection that holds the table.
        name: table name.
        value: a plain tensor of the global shape (if ranks disagree, rank 0's is written), a
            ``DTensor`` of that shape, or `TableRows`. `TableRows` of the same table are not copied.
        part: ``"rows"`` or a part of the optimizer state.

    Raises:
        InvalidInputError: the value has another shape or is not a dense real tensor.
    """
    mine = TableRows(tables, name, part)
    if isinstance(value, TableRows) and value.source is not None:
        value = value.source
    mine.check(value)
    if id(value) in _WATCHED:
        _WATCHED.pop(id(value)).detach()
    if isinstance(value, TableRows) and value.is_same(mine):
        return
    value = rank0_values(tables, value)
    for begin, rows in chunks_of(value):
        mine.write(rows, begin)


def chunks_of(value: Any) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (first row, values) of consecutive chunks of a ``state_dict`` value, on every rank.

    Collective if the value is a ``DTensor``.
    """
    if isinstance(value, TableRows):
        for begin, end in value.chunks():
            yield begin, value.read(begin, end)
        return
    if not is_divided(value):
        yield 0, value
        return
    from torch.distributed.tensor import Shard

    local = value.to_local()
    mesh = value.device_mesh
    if mesh.ndim != 1 or value.placements != (Shard(0),) or type(local) is not torch.Tensor:
        yield 0, value.full_tensor()
        return
    import torch.distributed as dist

    group = mesh.get_group()
    row_bytes = max(1, local.dtype.itemsize * value.shape[1:].numel())
    chunk_rows = max(1, CHUNK_BYTES // row_bytes)
    for source in range(mesh.size()):
        first, last = shard_range(value.shape[0], mesh.size(), source)
        for begin in range(first, last, chunk_rows):
            rows = min(last, begin + chunk_rows) - begin
            if source == mesh.get_local_rank():
                chunk = local.detach()[begin - first:begin - first + rows].contiguous()
            else:
                chunk = local.new_empty(rows, *value.shape[1:])
            # As bytes, since gloo does not support all dtypes.
            dist.broadcast(chunk.view(torch.uint8), dist.get_global_rank(group, source), group)
            yield begin, chunk


def shard_range(num_rows: int, world_size: int, rank: int) -> tuple[int, int]:
    """Return the rows `[begin, end)` of a rank under ``Shard(0)``, which splits as `torch.chunk`.

    The last ranges may be shorter or empty.
    """
    size = -(-num_rows // world_size)
    return min(num_rows, rank * size), min(num_rows, (rank + 1) * size)


def range_here(tables: ShardedTables, num_rows: int) -> tuple[int, int]:
    """Return the rows `[begin, end)` of which this rank's ``state_dict`` has values."""
    group = tables.group
    return (0, num_rows) if group.is_local else shard_range(num_rows, group.world_size, group.rank)


def warn_of_conversions(tables: ShardedTables, state_dict: Mapping[str, Any], prefix: str,
                        names: Mapping[str, str]) -> None:
    """Warn of values that ``load_state_dict(assign=True)`` converts to the table's dtype.

    The arguments are those of `load_tables`.
    """
    for name, table in names.items():
        value = state_dict.get(f"{prefix}{name}")
        if isinstance(value, torch.Tensor) and value.dtype != tables.dtype(table):
            warnings.warn(f"{prefix}{name} of {value.dtype} is converted: a sharded table keeps "
                          f"its dtype {tables.dtype(table)}, with assign=True as well",
                          stacklevel=3)


@contextlib.contextmanager
def noting(errors: list[str]) -> Iterator[None]:
    """Append the message of an InvalidInputError that the block raises to `errors`."""
    try:
        yield
    except InvalidInputError as error:
        errors.append(str(error))


def not_plain(state_dict: Mapping[str, Any], wanted: Iterable[str]) -> list[str]:
    """Return the entries of `wanted` that are DTensors, as texts for `errors_of_all`. Loading a
    DTensor is collective, so an entry must be one on all ranks or on none."""
    return [f"{key} as a plain tensor" for key in wanted
            if is_divided(state_dict.get(key))]


def all_ranks(tables: ShardedTables) -> Group:
    """Return the ranks of all replica groups, which load the same values."""
    return tables.group if tables.replicas is None else tables.replicas.groups.whole


def load_tables(tables: ShardedTables, state_dict: Mapping[str, Any], prefix: str,
                names: Mapping[str, str], missing_keys: list[str], unexpected_keys: list[str],
                error_msgs: list[str]) -> None:
    """Implement ``nn.Module._load_from_state_dict`` for a module whose parameters are tables.

    Collective. If an entry is invalid on any rank, or only some ranks lack it, all ranks get the
    error and no rank loads any entry, in all replica groups.

    Args:
        tables: the collection that holds the tables.
        state_dict, prefix, missing_keys, unexpected_keys, error_msgs: as torch passes them.
        names: maps parameter names, without prefix, to table names.
    """
    tables.barrier()  # peers may still be reading
    found = {n: state_dict[f"{prefix}{n}"] for n in names if f"{prefix}{n}" in state_dict}
    wanted = [f"{prefix}{name}" for name in names]
    missing = [key for key in wanted if key not in state_dict]
    missing_keys += missing
    errors: list[str] = []
    for name, value in found.items():
        with noting(errors):
            TableRows(tables, names[name]).check(value)
    errors = errors_of_all(all_ranks(tables), [*missing, *not_plain(state_dict, wanted)], errors)
    error_msgs += errors
    for name, value in found.items() if not errors else ():
        load_entry(tables, names[name], value)
    unexpected_keys.extend(k for k in state_dict if k.startswith(prefix) and k not in wanted)
    tables.flush_replicas()


def _parts_of(tables: ShardedTables, name: str, label: str) -> dict[str, str]:
    """Map the keys of a table's optimizer state, without its number of steps, to its parts."""
    kind = tables.specs[name].optimizer
    return {f"{label}.{MOMENTUM if kind == MOMENTUM_SGD else _STATE_NAMES[part]}": part
            for part, _ in STATE_PARTS[kind]}


def optimizer_entries(tables: ShardedTables, name: str, label: str) -> dict[str, Any]:
    """Return a table's optimizer state, ``{"<label>.momentum1": ...}``, under TorchRec's names
    where it has the state.

    Values are as `table_entry` returns them, with rows in logical order under any plan. Optimizers
    with bias correction add ``<label>.step``, a float32 scalar.
    """
    entries = {key: table_entry(tables, name, part)
               for key, part in _parts_of(tables, name, label).items()}
    if OPTIMIZERS[tables.specs[name].optimizer].counts_steps:
        entries[f"{label}.step"] = torch.tensor(tables.table_steps(name), dtype=torch.float32)
    return entries


def check_optimizer_entries(tables: ShardedTables, labels: Mapping[str, str], state: Any) -> None:
    """Raise InvalidInputError on all ranks if `load_optimizer_entries` cannot load ``state`` on any
    rank. Collective.

    Args:
        tables: the collection that holds the tables.
        labels: the tables' names by the label of their entries.
        state: by label, the entries; or another object, which a program has passed.
    """
    errors: list[str] = []
    distributed_entries: list[str] = []
    for label, name in labels.items():
        what = f"cannot load the optimizer state of table {name!r}"
        entries = state.get(label) if isinstance(state, Mapping) else None
        found = entries if isinstance(entries, Mapping) else {}
        kind = tables.specs[name].optimizer
        parts = _parts_of(tables, name, label)
        wanted = {*parts} | ({f"{label}.step"} if OPTIMIZERS[kind].counts_steps else set())
        if not isinstance(entries, Mapping) or found.keys() != wanted:
            errors.append(fail(what, "entries", sorted(found, key=str),
                               f"{sorted(wanted)}, those of {kind!r}",
                               "pass the state of a table that has this optimizer"))
            continue
        for key, part in parts.items():
            with noting(errors):
                TableRows(tables, name, part).check(found[key])
                if part == OPTIMIZERS[kind].squares:
                    _check_squares(what, key, found[key])
        with noting(errors):
            check_steps(what, found.get(f"{label}.step", 0))
        distributed_entries += not_plain(found, parts)
    refuse_states(errors_of_all(all_ranks(tables), distributed_entries, errors))


def _check_squares(what: str, key: str, value: Any) -> None:
    """Raise InvalidInputError, which begins with `what`, if sums or averages of squares in the
    entry `key`, on this rank, are negative. ``momentum1`` may have the momenta of LarsSGD, of which
    an update would take the square root."""
    here = value.to_local() if is_divided(value) else value
    negative = here[here < 0] if isinstance(here, torch.Tensor) else torch.empty(0)
    if negative.numel():
        raise InvalidInputError(what, f"least number of {key!r}", float(negative.min()),
                                ">= 0, since these are sums or averages of squares",
                                "pass the state of a table that has this optimizer")


def refuse_states(errors: Sequence[str]) -> None:
    """Raise InvalidInputError if a rank has `errors` that keep all ranks from loading the states of
    optimizers."""
    require("cannot load the states of the tables' optimizers",
            "pass the state of a model with these tables, the same one on all ranks",
            ("errors", list(errors[:8]), not errors, "none on any rank"))


def check_steps(what: str, steps: Any) -> int:
    """Return a saved number of updates as an int; raises InvalidInputError, which begins with
    `what`, if it is not an integer >= 0."""
    number = count_of(steps)
    require(what, "pass a state that optimizer_state_dict or state_dict has returned", (
        "step", steps, number >= 0, "an integer >= 0"))
    return number


def count_of(value: Any) -> int:
    """Return a saved number of updates as an int; -1 if it is not an integer >= 0."""
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):  # the latter: a tensor of several numbers
        return -1
    return int(number) if number >= 0 and number.is_integer() else -1


def load_optimizer_entries(tables: ShardedTables, name: str, label: str,
                           entries: Mapping[str, Any]) -> None:
    """Write the entries of `optimizer_entries`; call ``tables.flush_replicas()`` after all tables.
    """
    for key, part in _parts_of(tables, name, label).items():
        load_entry(tables, name, entries[key], part)
    if f"{label}.step" in entries:
        steps = tables.group.all_gather(int(entries[f"{label}.step"]))
        tables.set_table_steps(name, steps[0])


def optimizer_names(tables: ShardedTables) -> dict[str, dict[str, bool]]:
    """Return the optimizer of every table with a state, ``{"<table>": {"<optimizer>": True}}``.

    Checkpoints have the optimizer in a key instead of a value, so that `check_optimizers` can read
    it from their metadata before anything is loaded.
    """
    return {t.name: {t.optimizer: True} for t in tables.specs.values() if STATE_PARTS[t.optimizer]}


def tables_with_states(module: Any, wanted: Container[Any]) -> set[str]:
    """Return the tables of a sharded module whose optimizer states are loaded.

    Args:
        module: the module. The states of a TorchRec collection are loaded only with its
            ``fused_optimizer``, those of other modules always.
        wanted: names of the values to load, among them those of `optimizer_entries`.
    """
    tables: ShardedTables = module.tables
    names: Mapping[str, str] | None = getattr(module, "_names", None)
    return {name for label, name in (names or {"weight": module._name}).items()
            if any(key in wanted for key in _parts_of(tables, name, label))}


def check_optimizers(module: Any, saved: Mapping[str, str], wanted: Container[Any]) -> None:
    """Raise InvalidInputError if states to load would get another meaning in a sharded module.

    ``momentum1`` has first moments for the variants of Adam and LAMB, sums of squares for Adagrad,
    and other sums of gradients for LarsSGD, perhaps in the same shape. The variants of Adam and
    LAMB, which have second moments as well, can take over each other's states.

    Args:
        saved: by table, the optimizer of the run that saved.
        module, wanted: as for `tables_with_states`.
    """
    loaded, specs = tables_with_states(module, wanted), module.tables.specs
    for name, before in saved.items():
        spec = specs.get(name)
        if (spec is None or name not in loaded or before == spec.optimizer
                or not STATE_PARTS[spec.optimizer]):
            continue
        both = [len(STATE_PARTS.get(x, ())) for x in (before, spec.optimizer)]
        if both != [2, 2]:
            raise InvalidInputError(
                f"cannot load the optimizer state of table {name!r}", "saved optimizer", before,
                f"{spec.optimizer!r}, the optimizer of the table",
                "shard with the optimizer of the run that saved")


class Entries(dict[str, torch.Tensor]):
    """Optimizer state of one table, ``{"<table>.momentum1": ...}``. Unlike plain dicts, instances
    support weak references."""


def refuse_state(table: str) -> NoReturn:
    """Raise InvalidInputError: the optimizer state of a table cannot be replaced or removed."""
    raise InvalidInputError(
        "cannot replace the optimizer state of a table", "table", table,
        "a parameter that is not a table", "call load_state_dict of the optimizer, with zeros to "
        "begin again")


class States(MutableMapping[torch.Tensor, Any]):
    """Mapping from parameters to their optimizer states; those of tables are read when needed.

    Args:
        tables: table names by weight.
        show: returns the state of a table.
        others: states of other parameters, the only ones that can be set. TorchRec's
            `WarmupOptimizer` adds a parameter with its step count to the optimizer that it wraps.
    """

    def __init__(self, tables: Mapping[torch.Tensor, str], show: Callable[[str], Entries],
                 others: dict[torch.Tensor, Any]) -> None:
        self._of = tables
        self._show = show
        self._others = others

    def __getitem__(self, parameter: torch.Tensor) -> Any:
        if parameter in self._of:
            return self._show(self._of[parameter])
        return self._others[parameter]

    def __setitem__(self, parameter: torch.Tensor, state: Any) -> None:
        self._check(parameter)
        self._others[parameter] = state

    def __delitem__(self, parameter: torch.Tensor) -> None:
        self._check(parameter)
        del self._others[parameter]

    def _check(self, parameter: torch.Tensor) -> None:
        if parameter in self._of:
            refuse_state(self._of[parameter])

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._of or parameter in self._others

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter((*self._of, *self._others))

    def __len__(self) -> int:
        return len(self._of) + len(self._others)


def load_weights(tables: ShardedTables, weights: Iterable[tuple[str, torch.Tensor, InitFn | None]]
                 ) -> None:
    """Fill new tables with initial weights. Collective.

    Args:
        tables: the collection that holds the tables.
        weights: (table name, unsharded weight [num_rows, dim], init function; None = uniform within
            +-sqrt(1 / num_rows)). For a weight on the meta device, the init function fills the
            table in chunks of logical rows; the seed of a chunk depends on rank 0's torch seed, the
            table name and the chunk's index, so that the values do not depend on the plan. Other
            weights are copied; if ranks disagree, rank 0's are used, as in DDP.
    """
    # Rank 0's seed for all ranks, so that torch.manual_seed determines the values.
    seed = tables.group.all_gather(torch.initial_seed())[0]
    for name, weight, init_fn in weights:
        if weight.is_meta:
            _initialise(tables, name, init_fn, seed)
            continue
        load_entry(tables, name, weight)
    tables.flush_replicas()


def rank0_values(tables: ShardedTables, values: Any) -> Any:
    """Return rank 0's `values` if they are plain tensors and ranks disagree, as in DDP, else
    `values`. Collective."""
    if (tables.group.world_size == 1 or tables.group.is_local
            or not isinstance(values, torch.Tensor) or is_divided(values)):
        return values
    data = values.detach().contiguous().cpu()
    sums = tables.group.all_gather(zlib.crc32(data.view(torch.uint8).numpy().data.cast("B")))
    if len(set(sums)) > 1:
        import torch.distributed as dist

        data = data.clone()
        group: Any = tables.group
        # As bytes, since gloo does not support all dtypes.
        dist.broadcast(data.view(torch.uint8), group.ranks[0], group=group.handle)
    return data


def _initialise(tables: ShardedTables, name: str, init_fn: InitFn | None, seed: int) -> None:
    spec = tables.specs[name]
    bound = math.sqrt(1.0 / spec.num_rows)  # TorchRec's default range
    for chunk, begin in enumerate(range(0, spec.num_rows, CHUNK_ROWS)):
        rows = min(CHUNK_ROWS, spec.num_rows - begin)
        key = zlib.crc32(f"{name}/{chunk}".encode())
        # Virtual ranks are threads that share the process-wide generator.
        with _GENERATOR, torch.random.fork_rng(devices=[]):
            torch.manual_seed((seed * 1000003 + key) % (1 << 63))
            values = torch.empty(rows, spec.dim, dtype=torch.float32)
            if init_fn is None:
                values.uniform_(-bound, bound)
            else:
                init_fn(values)
        tables.write(name, values, begin)
