"""`publish()` and `attach()`: one copy of a model's tables per host, read by any number of workers.

A publisher process puts tables and dense weights into shared memory; workers attach to it by name.
New weights replace the old ones atomically while requests flow. See docs/how-to/inference.md.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from oper.errors import InvalidInputError
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
from oper.shmem.memory.numa import find_nodes
from oper.shmem.publication.changes import Changes
from oper.shmem.publication.publisher import Prepared, Publisher
from oper.shmem.publication.reader import PublishedTables, Reader
from oper.stats import AccessStats
from oper.tables import TableSpec
from oper.topology import Topology

_BATCH = 2048  # that plans for several memory domains are made for


class Publication(Publisher):
    """A published model: what `publish` returns.

    Args:
        name, dense, keep_spare, checksum: as for `Publisher`.
        plan: placement and types of the rows.
        keys: ``state_dict`` key of each table, by name.
        held: the model's tables, by name.

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
        """Replace all weights, tables and dense ones, at once for every worker.

        Calls under way finish with the old weights, those that begin afterwards use the new ones,
        and none uses both.

        Args:
            weights: a model, its ``state_dict``, the folder of a ``torch.distributed`` checkpoint
                made under any plan, or a file of ``torch.save``. Same names and shapes as before.
            timeout_s: how long to wait for workers that still read the epoch before the last.

        Returns:
            The new epoch.

        Raises:
            InvalidInputError, FileFormatError: weights do not fit; the old ones stay in use.
            DeadlineError: a worker, named by its process id, does not finish; the old ones stay in
                use.
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
              timeout_s: float = 1.0) -> int:
        """Change some rows, and dense weights, in place and at once for every worker.

        The cost is proportional to the rows changed, without a second copy of the tables. Calls
        that begin during the copy wait until it is done. The result equals that of a `publish` of
        all weights, bit for bit.

        Args:
            rows: by table name, ids int64 [n], each once, and floats [n, dim].
            dense: by ``state_dict`` key, with any common prefix; all of them or none.
            timeout_s: how long to wait for calls that are under way.

        Returns:
            The new epoch, two above the last.

        Raises:
            InvalidInputError: a change does not fit, or a row, which is named, is not finite.
            DeadlineError: a worker does not finish. The old weights stay in both cases.
        """
        return self.commit(self.prepare(rows, dense), timeout_s)

    def prepare(self, rows: Changes, dense: Mapping[str, torch.Tensor] | None = None) -> Prepared:
        """The first part of `apply`: check and convert the changes, without making any call wait.
        """
        if dense:
            entries = self.layout.dense
            source = Weights(dense, [e.key for e in entries])
            dense = {e.key: source.tensor(e.key) for e in entries}
        return self.prepare_rows(rows, dense or {})

    @property
    def plan(self) -> Plan:
        """Placement and types of the rows."""
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
    """Put a model's weights where all worker processes of this host read them.

    Args:
        model: the model, or a collection itself: unsharded, quantised by TorchRec's
            ``quantize_inference_model`` (its rows are used as they are), or sharded by
            `oper.shard`. It is not changed and need not be kept.
        name: 1 to 64 of ``A-Z a-z 0-9 . _ -``, for `attach`; only one running publisher of a user
            may have it.
        weights: first weights, as for `Publication.publish`; by default the model's own. With
            weights given, the model may be on the meta device.
        row_dtype: ``"float32"``, ``"float16"``, ``"int8"`` or ``"int4"`` (FBGEMM's row-wise
            quantisation) for all tables or by table name; by default as in the model.
        stats: access statistics, for hosts of several NUMA nodes: the hottest rows get a copy on
            every node, as far as memory goes, and the rest is assigned by bandwidth. A host of one
            node holds one copy of everything.
        plan: a placement on the NUMA nodes (its ranks), instead of one made from `stats`.
        keep_spare: keep the buffer that is not in use. A publication then costs workers no page
            faults, but the tables cost twice their memory all the time instead of while weights are
            being published.
        checksum: write checksums that ``Reader.verify`` compares; they cost a pass over the rows.
        error_budget: instead of `row_dtype`, store every row as float16, int8 or int4: the hotter
            by `stats`, the wider. The chosen types take the fewest bytes that keep the expected
            squared error of the numbers that lookups read below this share of their squares; 1e-4
            is a root mean square error of 1 %. The types are chosen from these rows and kept for
            later ones. Costs one more pass over the weights; ``Publication.plan`` holds the choice.

    Raises:
        InvalidInputError: there is nothing to publish, or weights cannot be published (see the
            message).
        OperError: memory does not suffice, or a running publisher has the name.

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
    # A model on the meta device tells names and shapes all the same.
    dense = _dense_of(model, targets)
    if error_budget is None:
        placed = _placed(typed(list(held.values()), row_dtype), stats, plan)
    elif stats is None or row_dtype is not None or plan is not None:
        raise InvalidInputError("cannot choose types of rows", "stats, row_dtype, plan",
                                (stats, row_dtype, plan), "statistics, without row_dtype and plan",
                                "pass statistics, or leave error_budget out")
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
    """A model that runs on published weights: what `attach` returns.

    It is called like the model. Every call uses one epoch of tables and dense weights, and several
    threads may call it. Nothing is collective, and no call waits for another process.
    """

    def __init__(self, reader: Reader, parts: tuple[nn.Module, nn.Module],
                 tables: list[PublishedTables]) -> None:
        super().__init__()
        self._reader = reader
        self._parts = parts  # one per buffer; a tuple, since they are no submodules to be moved
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
        """The last epoch that was published."""
        return self._reader.epoch

    @contextlib.contextmanager
    def pinned(self) -> Iterator[int]:
        """Keep this thread on one epoch inside the block; yields its number. Publishers wait for
        the end of the block."""
        with self._reader.pinned() as epoch:
            yield epoch

    @property
    def publisher_alive(self) -> bool:
        """Whether the publisher still runs; without it the last weights stay in use."""
        return self._reader.publisher_alive

    def rows_read(self) -> dict[str, int]:
        """Rows read since `attach`, from this process's memory domain and from others."""
        local = remote = 0
        for tables in self._tables:
            traffic = tables.traffic()
            by_domain = traffic.counts.sum(axis=(0, 1))
            local += int(by_domain[traffic.rank])
            remote += int(by_domain.sum() - by_domain[traffic.rank])
        return {"local": local, "remote": remote}

    def memory_bytes(self) -> int:
        """Bytes of one epoch's weights, which all workers of the host share."""
        return self._reader.layout.num_bytes

    def verify(self) -> int:
        """Compare the weights with their checksums; see `Reader.verify`."""
        return self._reader.verify()

    def close(self) -> None:
        """Detach. The model, and weights taken from it, must not be used afterwards."""
        self._reader.close()


def attach(model: nn.Module, name: str, *, timeout_s: float = 10.0, fuse: bool = False
           ) -> ServedModel:
    """Run a model on the weights that a publisher of this host shares.

    Workers may start and end at any time, also by a crash, without effect on others.

    Args:
        model: a model of the published architecture. Only its structure is used, so it may be on
            the meta device; it must not be used afterwards. Buffers that are not in its
            ``state_dict`` must have values.
        name: name of the publication.
        timeout_s: how long to wait for a publisher of that name.
        fuse: run lookup and dot interaction of TorchRec's ``DLRM`` as one operator. Outputs then
            equal the model's up to rounding in the dot products. Other models are not changed.

    Raises:
        OperError: there is no such publication.
        InvalidInputError: the model is not the published one.
    """
    targets = _named_targets(model)
    dense = _dense_of(model, targets)
    reader = Reader(name, timeout_s)
    try:
        _check_same(reader, targets, dense)
        built = _Parts(reader, model, targets, fuse)
    except BaseException:
        reader.close()
        raise
    served = ServedModel(reader, built.parts, built.tables)
    served.eval()
    return served


class _Parts:
    """The model twice, on the weights of either buffer."""

    def __init__(self, reader: Reader, model: nn.Module, targets: list[Target], fuse: bool
                 ) -> None:
        self.tables: list[PublishedTables] = []
        if targets[0].path == "":
            made = [self._module(reader, targets[0], buffer) for buffer in range(2)]
            self.parts = (made[0], made[1])
            return
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
                _put(part, target.path, self._module(reader, target, buffer))
            part.eval()
        self.parts = (fused(copies[0]), fused(copies[1])) if fuse else copies

    def _module(self, reader: Reader, target: Target, buffer: int) -> nn.Module:
        features = [(f, spec.name) for spec in target.specs for f in spec.features]
        tables = PublishedTables(reader, buffer, features)
        self.tables.append(tables)
        return replacement(target, tables).eval()


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

    return make_plan(tables, stats, Topology.of_domains(list(range(num_domains))),
                     objective="inference", batch_size=_BATCH)


def _by_hotness(source: Weights, keys: dict[str, str], held: dict[str, TableSpec],
                stats: AccessStats, error_budget: float) -> Plan:
    """A placement with types of rows within an error budget."""
    from oper.integration.row_errors import by_precision, types_by_hotness

    chosen = types_by_hotness(source, keys, held, stats, error_budget)
    tables = [replace(s, dtype=chosen.dtypes[name][-1][1]) for name, s in held.items()]
    return by_precision(_placed(tables, stats, None), chosen, stats)


def _dense_of(model: nn.Module, targets: list[Target]) -> dict[str, torch.Tensor]:
    """All weights except the tables, by ``state_dict`` key."""
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
            raise InvalidInputError("cannot publish a model", key, type(value).__name__,
                                    "tensors in its state_dict",
                                    "keep such modules outside of the model")
        found[key] = value.detach()
    return found


def _dense_places(model: nn.Module) -> Iterator[tuple[nn.Module, Any, str]]:
    """Owner, its dict and name of every parameter and persistent buffer of a model."""
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
        raise InvalidInputError(what, "tables", sorted(set(mine) ^ set(theirs))[:8],
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
