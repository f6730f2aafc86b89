"""`shard()`: the only place where analysis, search, shmem and integration meet."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from oper.errors import InvalidInputError, fail
from oper.plan import Plan
from oper.stats import AccessStats
from oper.tables import TableSpec
from oper.topology import Topology

if TYPE_CHECKING:
    import torch
    from torch import nn

    from oper.shmem.group import Group
    from oper.shmem.optimizers import Optimizer

_DEFAULT_BATCH = 4096


@dataclass(slots=True)
class _Target:
    """A module to be replaced: its path, its tables and how to read and rebuild it."""

    path: str
    module: Any
    is_collection: bool
    optimizer: Optimizer | None = None
    specs: list[TableSpec] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)  # own name -> name in the plan


def shard(
    module: nn.Module,
    stats: AccessStats | str | os.PathLike[str] | None = None,
    *,
    plan: Plan | str | os.PathLike[str] | None = None,
    topology: Topology | str | os.PathLike[str] | None = None,
    modules: Sequence[str] | None = None,
    objective: str = "training",
    batch_size: int | None = None,
    optimizer: Optimizer | None = None,
    process_group: torch.distributed.ProcessGroup | None = None,
) -> nn.Module:
    """Shard the embedding tables of a model by their access statistics.

    Replaces every ``EmbeddingBagCollection`` and ``nn.EmbeddingBag`` in place by a module with the
    same call, the same output order and the same ``state_dict`` names and shapes; the tables keep
    their weights. The rest of the program stays as it was. Collective over `process_group`.

    Args:
        module: the model, or a collection itself.
        stats: access statistics or their file (`oper.collect`, ``oper analyze``). Without them the
            plan is made from table sizes, with one warning.
        plan: a plan or plan file to execute instead of making one.
        topology: the machine or its TOML file; by default this host and the group's ranks.
        modules: paths of the modules to shard; all by default.
        objective: ``"training"`` or ``"inference"`` (read-only tables).
        batch_size: samples per rank and step that the plan is made for.
        optimizer: applied in the backward pass, for tables without an
            ``apply_optimizer_in_backward`` tag.
        process_group: the ranks; the default group, or one rank without ``torch.distributed``.

    Returns:
        The model (a new module when `module` itself is a collection).

    Raises:
        InvalidInputError: nothing to shard, no optimizer, or a module with refused options.
        PlanError: the plan does not fit the model or the world.

    Example:
        >>> import torch, oper
        >>> bag = torch.nn.EmbeddingBag(100, 8, mode="sum")
        >>> stats = oper.collect([{"": (torch.tensor([1, 2, 2]), torch.tensor([2, 1]))}], bag)
        >>> sharded = oper.shard(bag, stats, optimizer=oper.SGD(lr=0.1))
        >>> sharded(torch.tensor([[1, 2]])).shape
        torch.Size([1, 8])
    """
    from oper.shmem.group import default_group

    group = default_group(process_group)
    targets = _find_targets(module, modules)
    for target in targets:
        _describe(target, objective, optimizer)
    _name_tables(targets)
    tables = [s for t in targets for s in t.specs]
    made = _the_plan(tables, stats, plan, topology, objective, batch_size, group)
    made.check_for(tables, group.world_size)
    for target in targets:
        new = _build(target, made, objective, group)
        if target.path == "":
            return new
        parent, _, child = target.path.rpartition(".")
        setattr(module.get_submodule(parent), child, new)
    return module


def _find_targets(module: nn.Module, wanted: Sequence[str] | None) -> list[_Target]:
    from torch import nn

    # A model can only contain TorchRec modules when torchrec has been imported.
    torchrec = sys.modules.get("torchrec.modules.embedding_modules")
    bags = getattr(torchrec, "EmbeddingBagCollection", ()) if torchrec else ()
    unpooled = (nn.Embedding, *([torchrec.EmbeddingCollection] if torchrec else []))
    targets, skipped, inside = [], [], ""
    for path, child in module.named_modules():
        if inside and path.startswith(inside):
            continue
        if wanted is not None and path not in wanted:
            continue
        if type(child) is bags or type(child) is nn.EmbeddingBag:
            inside = f"{path}." if path else "\0"
            targets.append(_Target(path, child, type(child) is bags))
            if path == "":
                break
        elif type(child) in unpooled and not inside.startswith(path):
            skipped.append(path)
    missing = set(wanted or ()) - {t.path for t in targets}
    if missing or not targets:
        raise InvalidInputError(
            fail("nothing to shard", "modules", sorted(missing) or type(module).__name__,
                 "paths of EmbeddingBagCollection or nn.EmbeddingBag modules",
                 "name pooled embedding modules of this model"))
    if skipped:
        warnings.warn(f"left unsharded, since they are not pooled: {skipped[:5]}", stacklevel=3)
    _refuse_shared_parameters(module, targets)
    return targets


def _refuse_shared_parameters(module: nn.Module, targets: list[_Target]) -> None:
    owner: dict[int, str] = {}
    paths = {t.path for t in targets}
    for path, child in module.named_modules(remove_duplicate=False):
        for name, parameter in child.named_parameters(recurse=False):
            here = f"{path}.{name}".strip(".")
            first = owner.setdefault(id(parameter), here)
            ours = any(p in ("", x) or x.startswith(f"{p}.") for x in (first, here) for p in paths)
            if first != here and ours:
                raise InvalidInputError(
                    fail("cannot shard a parameter shared between modules", "parameters",
                         (first, here), "each table in one module", "untie them"))


def _describe(target: _Target, objective: str, default: Optimizer | None) -> None:
    """Fill in tables and optimizer."""
    parameters = dict(target.module.named_parameters())
    found: list[Optimizer | None] = []
    for parameter in parameters.values():
        tagged = None
        if hasattr(parameter, "_optimizer_classes"):
            from oper.integration.torchrec_modules import tagged_optimizer

            tagged = tagged_optimizer(parameter)
        found.append(tagged or default)
    if objective == "training":
        if None in found:
            where = target.path or "the model"
            raise InvalidInputError(
                fail("cannot shard for training", f"optimizer of {where}", None,
                     "one for every table",
                     "pass optimizer=oper.RowWiseAdagrad(lr=...), or tag the tables with "
                     "torchrec.optim.apply_optimizer_in_backward before sharding"))
        if any(o != found[0] for o in found):
            raise InvalidInputError(
                fail("cannot shard for training", f"optimizers of {target.path or 'the model'}",
                     sorted({str(o) for o in found}), "one optimizer per collection",
                     "tag all of its tables alike"))
        target.optimizer = found[0]
    name = target.optimizer.name if target.optimizer else "none"
    if target.is_collection:
        from oper.integration.torchrec_modules import table_specs

        target.specs = table_specs(target.module, name)
    else:
        from oper.integration.torch_modules import bag_spec

        target.specs = [bag_spec(target.path or "weight", target.module, name)]


def _name_tables(targets: list[_Target]) -> None:
    """Plan-wide names: a table's own, prefixed by its module's path where two collide."""
    count: dict[str, int] = {}
    for spec in (s for t in targets for s in t.specs):
        count[spec.name] = count.get(spec.name, 0) + 1
    for target in targets:
        for spec in target.specs:
            full = spec.name if count[spec.name] == 1 else f"{target.path}.{spec.name}"
            target.names[spec.name] = full
        target.specs = [replace(s, name=target.names[s.name]) for s in target.specs]


def _the_plan(tables: list[TableSpec], stats: Any, plan: Any, topology: Any, objective: str,
              batch_size: int | None, group: Group) -> Plan:
    """The plan to execute, the same on all ranks: rank 0 makes it."""
    if isinstance(plan, Plan):
        return plan
    if plan is not None:
        return Plan.load(plan)
    made: Plan | Exception | None = None
    if group.rank == 0:
        try:
            made = _make(tables, stats, topology, objective, batch_size, group.world_size)
        except Exception as error:
            made = error
    made = group.all_gather(made)[0]
    if isinstance(made, Exception):
        raise made
    assert isinstance(made, Plan)
    return made


def _make(tables: list[TableSpec], stats: Any, topology: Any, objective: str,
          batch_size: int | None, world_size: int) -> Plan:
    from oper.search import make_plan

    if stats is not None and not isinstance(stats, AccessStats):
        stats = AccessStats.load(stats)
    if topology is None:
        topology = Topology.this_host(world_size)
    elif not isinstance(topology, Topology):
        topology = Topology.from_toml(topology)
    return make_plan(tables, stats, topology, objective=objective,
                     batch_size=batch_size or _DEFAULT_BATCH)


def _build(target: _Target, plan: Plan, objective: str, group: Group) -> nn.Module:
    from oper.integration.table_state import load_weights
    from oper.shmem.runtime import ShardedTables

    # Own specs: a plan file need not know pooling or optimizer of the model that it is used for.
    own = {s.name: s for s in target.specs}
    entries = tuple(replace(plan.table(name), table=spec) for name, spec in own.items())
    features = [(f, s.name) for s in target.specs for f in s.features]
    tables = ShardedTables(replace(plan, tables=entries), features, group,
                           target.optimizer if objective == "training" else None,
                           _gradient_scale(target, group))
    if target.is_collection:
        from oper.integration.torchrec_modules import ShardedEmbeddingBags

        configs = {c.name: c for c in target.module.embedding_bag_configs()}
        load_weights(tables, (
            (target.names[n], bag.weight, configs[n].init_fn)
            for n, bag in target.module.embedding_bags.items()))
        tables.use_huge_pages()
        return ShardedEmbeddingBags(target.module, tables, target.names)
    from oper.integration.torch_modules import ShardedEmbeddingBag

    load_weights(tables, [(target.specs[0].name, target.module.weight, None)])
    tables.use_huge_pages()
    return ShardedEmbeddingBag(target.module, tables, target.specs[0].name)


def _gradient_scale(target: _Target, group: Group) -> float:
    """1 / W, as DDP averages; TorchRec users may have switched its division off."""
    if target.is_collection:
        from torchrec.distributed.comm_ops import get_gradient_division

        if not get_gradient_division():
            return 1.0
    return 1.0 / group.world_size
