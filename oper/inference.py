"""`publish()` and `attach()`: one copy of a model per host, served by any number of workers.

A publisher process puts tables and dense weights into shared memory; workers attach by name. The
publisher can replace all weights atomically while workers serve. See docs/how-to/inference.md.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from oper.errors import InvalidInputError, PlanInfeasibleError, differing_names
from oper.integration.checkpoint.weights import Source, Weights
from oper.integration.fused_interaction import FusedDLRM, fuse as fused
from oper.integration.targets import (
    Target,
    describe,
    find_targets,
    name_tables,
    replacement,
    sharded_targets,
    typed,
)
from oper.plan import Plan, uniform_plan
from oper.shmem.counters.phases import Span
from oper.shmem.memory.numa import find_nodes
from oper.shmem.optim.optimizers import check_supported
from oper.shmem.publication.changes import ChangedElements, Changes
from oper.shmem.publication.publisher import Prepared, Publisher
from oper.shmem.publication.reader import PublishedTables, Reader
from oper.stats import AccessStats
from oper.tables import TableSpec
from oper.topology import Topology

_BATCH = 2048  # batch size for which plans on several NUMA nodes are made
_EPOCHS = 2  # copies of all weights in memory while new ones are published


class Publication(Publisher):
    """A published model, as returned by `publish`.

    Args:
        name, dense, keep_spare, checksum: see `Publisher`.
        plan: placement and element types of the published rows.
        keys: ``state_dict`` key of each table, by table name.
        held: the tables by name, with the model's own element types.

    Attributes:
        name: the name by which workers attach.
    """

    def __init__(self, name: str, plan: Plan, dense: Mapping[str, torch.Tensor],
                 keys: Mapping[str, str], held: Mapping[str, TableSpec], keep_spare: bool,
                 checksum: bool) -> None:
        super().__init__(name, plan, dense, keep_spare, checksum)
        self._keys = dict(keys)
        self._held = dict(held)

    def publish(self, weights: Source, timeout_s: float = 60.0) -> int:
        """Replace all weights, of tables and dense layers, atomically for every worker.

        A worker's call that is under way finishes with the old weights; a call that starts later
        uses the new ones. No call mixes them.

        Args:
            weights: a model, its ``state_dict``, the folder of a ``torch.distributed`` checkpoint
                made under any plan, or a ``torch.save`` file; with the published model's names and
                shapes.
            timeout_s: seconds to wait for workers that still read the epoch before the current one.

        Returns:
            The new epoch.

        Raises:
            InvalidInputError, FileFormatError: weights do not fit; the old weights stay in use.
            DeadlineError: a worker, identified by its process id, does not finish; the old weights
                stay in use.
        """
        layout = self.layout
        dense = [e.key for e in layout.dense]
        source = Weights(weights, [*self._keys.values(), *dense])
        wanted = {name: replace(spec, dtype="float32") if layout.is_mixed(name) else spec
                  for name, spec in layout.specs.items()}
        return self.publish_rows(
            lambda name: source.rows(self._keys[name], self._held[name], wanted[name]),
            {key: source.tensor(key) for key in dense}, timeout_s)

    def apply(self, rows: Changes, dense: Mapping[str, torch.Tensor] | None = None,
              timeout_s: float = 1.0, elements: ChangedElements | None = None) -> int:
        """Change some rows, and optionally the dense weights, in place and atomically.

        The cost is proportional to the number of changed rows; the tables are not copied. Workers'
        calls that begin during the change wait until it is done. The result is bitwise that of
        `publish` with all weights.

        Args:
            rows: by table name, distinct ids int64 [n] and their new rows, floats [n, dim].
            dense: new dense weights by ``state_dict`` key, with any common prefix; all or none.
            timeout_s: seconds to wait for workers' calls that are under way.
            elements: single elements of dense integer weights to change, for example of a map from
                keys to rows: by ``state_dict`` key, pairs (indices, int64 [n]; new values, [n]).
                The weight's memory is taken as a flat array of the values' dtype, which the
                indices refer to. A weight named here may be missing from `dense`.

        Returns:
            The new epoch, two above the last one.

        Raises:
            InvalidInputError: a change does not fit, or a row is not finite (the message names it);
                the old weights stay in use.
            DeadlineError: a worker does not finish; the old weights stay in use.
        """
        return self.commit(self.prepare(rows, dense, elements), timeout_s)

    def prepare(self, rows: Changes, dense: Mapping[str, torch.Tensor] | None = None,
                elements: ChangedElements | None = None) -> Prepared:
        """Check and convert changes for `commit` while workers serve; the first step of `apply`."""
        if dense:
            keys = [e.key for e in self.layout.dense if e.key not in (elements or {})]
            source = Weights(dense, keys)
            dense = {key: source.tensor(key) for key in keys}
        return self.prepare_rows(rows, dense or {}, elements)

    @property
    def plan(self) -> Plan:
        """Placement and element types of the published rows."""
        return self.layout.plan

    def __enter__(self) -> Publication:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def publish(model: nn.Module, name: str, *, weights: Source | None = None,
            row_dtype: str | Mapping[str, str] | None = None,
            stats: AccessStats | None = None, plan: Plan | None = None,
            keep_spare: bool = False, checksum: bool = True,
            error_budget: float | None = None) -> Publication:
    """Copy a model's weights into memory that all worker processes of this host share.

    Args:
        model: the model, or a collection itself: unsharded, quantised by TorchRec's
            ``quantize_inference_model`` (its rows are published unchanged), or sharded by
            `oper.shard`. It is not modified, and may be deleted afterwards.
        name: name for `attach`, 1 to 64 characters of ``A-Z a-z 0-9 . _ -``, not used by another
            running publisher of this user.
        weights: initial weights, see `Publication.publish`; by default the model's own. If given,
            the model may be on the meta device.
        row_dtype: ``"float32"``, ``"float16"``, ``"bfloat16"``, ``"int8"`` or ``"int4"`` (FBGEMM's
            row-wise quantisation), one for all tables or by table name; by default the model's.
        stats: access statistics, used on hosts with several NUMA nodes: the hottest rows get a copy
            on every node, as memory permits, and the other rows are placed by bandwidth. A host
            with one node has one copy of every row.
        plan: a placement with the NUMA nodes as ranks, used instead of one made from `stats`.
        keep_spare: keep the second buffer allocated between publications. Workers then have no page
            faults after a publication, but the tables permanently take twice their memory.
        checksum: write checksums that ``Reader.verify`` compares; costs a pass over the rows.
        error_budget: choose float16, int8 or int4 for every row, wider types for hotter rows
            according to `stats`; replaces `row_dtype` and `plan`. The choice minimizes bytes while
            the expected squared error of looked-up values is at most this fraction of their
            expected square: 1e-4 is a root mean square error of 1 %. It is made once, from the
            initial weights, at the cost of one more pass over them; see ``Publication.plan``.

    Returns:
        The publication, whose first epoch is complete.

    Raises:
        InvalidInputError: the model has nothing to publish, or weights or arguments do not fit.
        PlanError: a table has more than 1024 columns, or `plan` does not fit the tables.
        OperError: there is not enough memory, or a running publisher has the name.

    Example:
        >>> import torch, oper
        >>> bag = torch.nn.EmbeddingBag(100, 8, mode="sum")
        >>> publication = oper.publish(bag, "example-publish")
        >>> served = oper.attach(torch.nn.EmbeddingBag(100, 8, mode="sum"), "example-publish")
        >>> served(torch.tensor([[1, 2]])).shape
        torch.Size([1, 8])
        >>> served.close(); publication.close()
    """
    if not isinstance(stats, AccessStats | None):
        raise InvalidInputError("cannot publish a model", "stats", stats, "AccessStats, or None",
                                "pass AccessStats.load(file)")
    targets = sharded_targets(model)
    if not targets:
        targets = _named_targets(model)
    keys = {n: key for t in targets for n, key in t.keys().items()}
    held = {s.name: s for t in targets for s in t.specs}
    check_supported(list(held.values()), None, "publish")
    # On the meta device the model still has names and shapes.
    dense = _dense_of(model, targets)
    if error_budget is None:
        placed = _placed(typed(list(held.values()), row_dtype), stats, plan)
    elif stats is None or row_dtype is not None or plan is not None:
        raise InvalidInputError("cannot choose row dtypes", "stats, row_dtype, plan",
                                (stats, row_dtype, plan),
                                "stats, None, None: error_budget replaces the others",
                                "pass only stats with error_budget, or leave error_budget out")
    else:
        source = Weights(model if weights is None else weights, [*keys.values(), *dense])
        placed = _by_hotness(source, keys, held, stats, error_budget)
    publication = Publication(name, placed, dense, keys, held, keep_spare, checksum)
    try:
        publication.publish(model if weights is None else weights)
    except BaseException:
        publication.close()
        raise
    return publication


class ServedModel(nn.Module):
    """A model that runs on published weights, as returned by `attach`.

    Called like the original model, also from several threads. Every call reads tables and dense
    weights of one epoch. Calls are not collective; a call waits for another process only while
    `Publication.apply` changes rows.
    """

    def __init__(self, reader: Reader, parts: tuple[nn.Module, nn.Module],
                 tables: list[PublishedTables]) -> None:
        super().__init__()
        self._reader = reader
        self._parts = parts  # one per buffer; in a tuple, so that they are not submodules
        self._tables = tables

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, without gradients."""
        with self._reader.pinned() as epoch, torch.inference_mode():
            return self._parts[epoch & 1](*args, **kwargs)

    @property
    def shares_bags(self) -> bool:
        """Whether calls accept samples with shared bags; see `FusedDLRM.forward`."""
        part = self._parts[0]
        return isinstance(part, FusedDLRM) and part.shares_bags

    @property
    def epoch(self) -> int:
        """The most recently published epoch."""
        return self._reader.epoch

    def pinned(self) -> contextlib.AbstractContextManager[int]:
        """Use one epoch for all calls of this thread inside a ``with`` block, which gets the epoch.
        Publishers may have to wait for the end of the block."""
        return self._reader.pinned()

    @property
    def publisher_alive(self) -> bool:
        """Whether the publisher process is running; after its exit the last weights stay in use."""
        return self._reader.publisher_alive

    def rows_read(self) -> dict[str, int]:
        """Return the rows read since `attach`: ``"local"`` from this process's NUMA node,
        ``"remote"`` from others."""
        local = remote = 0
        for tables in self._tables:
            traffic = tables.traffic()
            by_domain = traffic.counts.sum(axis=(0, 1))
            local += int(by_domain[traffic.rank])
            remote += int(by_domain.sum() - by_domain[traffic.rank])
        return {"local": local, "remote": remote}

    def trace_lookups(self, most: int) -> None:
        """Start recording begin and end of up to `most` lookups, for `take_lookups`; 0 = stop."""
        for tables in self._tables:
            tables.trace_phases(most)

    def take_lookups(self) -> list[Span]:
        """Return the lookups recorded since the last call, by the kernels' clock."""
        return [span for tables in self._tables for span in tables.take_spans()[0]]

    def memory_bytes(self) -> int:
        """Return the size in bytes of one epoch's weights, shared by all workers of the host."""
        return self._reader.layout.num_bytes

    def verify(self) -> int:
        """Compare the weights with their checksums; see `Reader.verify`."""
        return self._reader.verify()

    def close(self) -> None:
        """Detach. The model and references to its weights must not be used afterwards."""
        self._reader.close()


def attach(model: nn.Module, name: str, *, timeout_s: float = 10.0, fuse: bool = False
           ) -> ServedModel:
    """Run a model on the weights that a publisher on this host shares.

    Workers may start, exit or crash at any time without affecting other workers.

    Args:
        model: a model of the published architecture. Only its structure is used, so it may be on
            the meta device, except that buffers outside its ``state_dict`` need values. It must
            not be used afterwards.
        name: name of the publication.
        timeout_s: seconds to wait for a publisher of that name.
        fuse: run lookup and dot interaction of TorchRec's ``DLRM`` as one operator. Outputs then
            equal the model's up to rounding in the dot products. No effect on other models.

    Returns:
        The model to call, in eval mode.

    Raises:
        OperError: there is no such publication.
        InvalidInputError: the model differs from the published one in names, sizes or pooling.
    """
    targets = _named_targets(model)
    dense = _dense_of(model, targets)
    reader = Reader(name, timeout_s)
    try:
        _check_same(reader, targets, dense)
        return _served(reader, model, targets, fuse).eval()
    except BaseException:
        reader.close()
        raise


def _served(reader: Reader, model: nn.Module, targets: list[Target], fuse: bool) -> ServedModel:
    """Build an instance of the model for each of the publication's two buffers."""
    all_tables: list[PublishedTables] = []

    def module(target: Target, buffer: int) -> nn.Module:
        features = [(f, spec.name) for spec in target.specs for f in spec.features]
        tables = PublishedTables(reader, buffer, features)
        all_tables.append(tables)
        return replacement(target, tables).eval()

    if targets[0].path == "":
        parts = (module(targets[0], 0), module(targets[0], 1))
        return ServedModel(reader, parts, all_tables)
    for target in targets:
        _put(model, target.path, nn.Identity())
    for owner, values, key in _dense_places(model):
        empty = torch.empty_like(values[key], device="meta")
        values[key] = (nn.Parameter(empty, requires_grad=False)
                       if values is owner._parameters else empty)
    copies = (model, copy.deepcopy(model))
    for buffer, part in enumerate(copies):
        part.load_state_dict(reader.dense(buffer), assign=True)
        for target in targets:
            _put(part, target.path, module(target, buffer))
        part.eval()
    return ServedModel(reader, (fused(copies[0]), fused(copies[1])) if fuse else copies, all_tables)


def _put(model: nn.Module, path: str, child: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, child)


def _named_targets(model: nn.Module) -> list[Target]:
    targets = find_targets(model, None)
    for target in targets:
        describe(target, "inference", None)
    name_tables(targets, model)
    return targets


def _placed(tables: list[TableSpec], stats: AccessStats | None, plan: Plan | None) -> Plan:
    num_domains = len(find_nodes()) if plan is None else plan.world_size
    if plan is not None:
        plan.check_for(tables, num_domains)
        return replace(plan, tables=tuple(replace(plan.table(t.name), table=t) for t in tables))
    if num_domains == 1:
        return uniform_plan(tables, 1, "owned", objective="inference")
    from oper.search import make_plan

    # Nodes are domains of one host, since workers read every row in place. They divide its memory.
    # Links as slow as a network's make the planner copy hot rows as far as memory permits.
    apart = Topology.of_domains(range(num_domains))
    nodes = replace(apart, name=f"nodes-{num_domains}", domains=tuple(replace(
        d, host=0, link_gbps=d.cross_gbps,
        memory_bytes=max(1, d.memory_bytes // (_EPOCHS * num_domains))) for d in apart.domains))
    try:
        return make_plan(tables, stats, nodes, objective="inference", batch_size=_BATCH)
    except PlanInfeasibleError:  # there is no memory for copies
        return uniform_plan(tables, num_domains, objective="inference")


def _by_hotness(source: Weights, keys: dict[str, str], held: dict[str, TableSpec],
                stats: AccessStats, error_budget: float) -> Plan:
    """Return a placement whose element types respect an error budget, see `publish`."""
    from oper.integration.row_errors import by_precision, types_by_hotness

    chosen = types_by_hotness(source, keys, held, stats, error_budget)
    tables = [replace(s, dtype=chosen.dtypes[name][-1][1]) for name, s in held.items()]
    return by_precision(_placed(tables, stats, None), chosen, stats)


def _dense_of(model: nn.Module, targets: list[Target]) -> dict[str, torch.Tensor]:
    """Return all weights except the tables, by ``state_dict`` key."""
    inside = [f"{t.path}." for t in targets]
    if any(t.path == "" for t in targets):
        return {}
    from oper.integration.checkpoint.on_demand import rows_on_demand

    with rows_on_demand():
        values = model.state_dict()
    found = {}
    for key, value in values.items():
        if key.startswith(tuple(inside)):
            continue
        if not isinstance(value, torch.Tensor):
            raise InvalidInputError("cannot publish a model", f"type of state_dict[{key!r}]",
                                    type(value).__name__, "a tensor",
                                    "remove the module with this extra state from the model")
        found[key] = value.detach()
    return found


def _dense_places(model: nn.Module) -> Iterator[tuple[nn.Module, Any, str]]:
    """Yield (module, its dict of parameters or buffers, key) for every parameter and persistent
    buffer of a model."""
    for owner in model.modules():
        for key, value in owner._parameters.items():
            if value is not None:
                yield owner, owner._parameters, key
        for key, buffer in owner._buffers.items():
            if buffer is not None and key not in owner._non_persistent_buffers_set:
                yield owner, owner._buffers, key


def _check_same(reader: Reader, targets: list[Target], dense: Mapping[str, torch.Tensor]) -> None:
    what = f"publication {reader.name!r} is of another model"
    mine = {s.name: s for t in targets for s in t.specs}
    theirs = reader.layout.specs
    if set(mine) != set(theirs):
        raise InvalidInputError(what, "tables",
                                differing_names("only in the model", mine,
                                                "only published", theirs),
                                "the same tables", "attach a model built like the published one")
    for table, spec in mine.items():
        for field in ("num_rows", "dim", "pooling"):
            if getattr(spec, field) != getattr(theirs[table], field):
                raise InvalidInputError(what, f"{field} of table {table!r}", getattr(spec, field),
                                        f"{getattr(theirs[table], field)}",
                                        "attach a model built like the published one")
    entries = {e.key: e.shape for e in reader.layout.dense}
    shapes = {key: tuple(value.shape) for key, value in dense.items()}
    if entries != shapes:
        different = sorted(k for k in {*entries, *shapes} if entries.get(k) != shapes.get(k))
        raise InvalidInputError(what, "weights", {k: shapes.get(k) for k in different[:4]},
                                f"{ {k: entries.get(k) for k in different[:4]} }",
                                "attach a model built like the published one")
