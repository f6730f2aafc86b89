"""Find, describe and replace the modules of a model that have embedding tables."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from oper.errors import InvalidInputError
from oper.tables import TableSpec, plan_names

if TYPE_CHECKING:
    import torch
    from torch import nn

    from oper.plan import Plan
    from oper.shmem.group.groups import Group
    from oper.shmem.optim.optimizers import Optimizer
    from oper.shmem.replica_groups.groups import ReplicaGroups
    from oper.shmem.tables import ShardedTables


@dataclass(slots=True)
class Target:
    """A module with tables that a sharded module replaces, or has replaced.

    Attributes:
        path: path of the module in the model.
        module: the module.
        is_collection: whether it is a collection of TorchRec; otherwise it is an
            ``nn.EmbeddingBag`` or ``nn.Embedding``.
        optimizers: for training, optimizers of the tables by their names in the module.
        specs: the tables, in the order of the module's outputs.
        names: maps the tables' names in the module to their names in plans.
        is_quantised: whether TorchRec has quantised the collection for inference.
        kind: the embedding class that `module` is an instance of.
    """

    path: str
    module: Any
    is_collection: bool
    optimizers: dict[str, Optimizer] = field(default_factory=dict)
    specs: list[TableSpec] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    is_quantised: bool = False
    kind: type | None = None

    def keys(self) -> dict[str, str]:
        """Map every table's name in the plan to its ``state_dict`` key."""
        dot = f"{self.path}." if self.path else ""
        if not self.is_collection:
            return {self.specs[0].name: f"{dot}weight"}
        kind = "embeddings" if self.specs[0].pooling == "none" else "embedding_bags"
        return {name: f"{dot}{kind}.{own}.weight" for own, name in self.names.items()}


def all_targets(module: nn.Module) -> list[Target]:
    """Return every unsharded module with tables."""
    from torch import nn

    from oper.integration.table_module import TableModule

    # A model can only contain TorchRec modules when torchrec has been imported.
    torchrec = sys.modules.get("torchrec.modules.embedding_modules")
    collections: tuple[type, ...] = ()
    if torchrec is not None:
        collections = (torchrec.EmbeddingBagCollection, torchrec.EmbeddingCollection)
    quantised: tuple[type, ...] = ()
    for_inference = sys.modules.get("torchrec.quant.embedding_modules")
    if for_inference is not None:
        quantised = (for_inference.EmbeddingBagCollection, for_inference.EmbeddingCollection)
        collections = (*collections, *quantised)
    targets: list[Target] = []
    for path, child in module.named_modules():
        if any(t.path == "" or path.startswith(f"{t.path}.") for t in targets):
            continue  # part of a collection
        if isinstance(child, TableModule):
            continue  # already sharded
        for kind in (*collections, nn.EmbeddingBag, nn.Embedding):
            if isinstance(child, kind):
                targets.append(Target(path, child, kind in collections, kind=kind,
                                      is_quantised=kind in quantised))
                break
    return targets


def find_targets(module: nn.Module, wanted: Sequence[str] | None) -> list[Target]:
    """Return the modules to shard: those at the paths `wanted`, or all if None.

    Raises:
        InvalidInputError: there is nothing to shard, a path has no module with tables or a module
            that overrides its embedding class, or modules share parameters.
    """
    found = all_targets(module)
    reasons = {t.path: why for t in found if (why := _own_behaviour(t))}
    if wanted is not None and reasons.keys() & set(wanted):
        raise InvalidInputError(
            "cannot shard a module that does more than look up", "modules",
            {path: why for path, why in reasons.items() if path in wanted},
            "modules that do not override their embedding class",
            "make the embedding a child of the module, or leave the module out of modules=")
    able = [t for t in found if t.path not in reasons]
    targets = [t for t in able if wanted is None or t.path in wanted]
    if wanted is None:
        _warn_of_unsharded(module, reasons)
    done = [path for path, child in module.named_modules() if hasattr(child, "tables")
            and type(child).__module__.startswith("oper.integration")]
    if done and not targets:
        raise InvalidInputError("nothing to shard", "modules", done[:8],
                                "modules that are not sharded yet", "shard a model once")
    known = [t.path for t in able]
    missing = set(wanted or ()) - set(known)
    if missing and known:
        raise InvalidInputError("cannot find modules with tables", "modules", sorted(missing),
                                f"some of the paths {known[:8]}", "name modules of this model")
    if not targets and reasons:
        raise InvalidInputError(
            "nothing to shard", "modules with tables, none of which can be sharded", reasons,
            "at least one that only looks up", "make the embedding a child of the module")
    if not targets:
        raise InvalidInputError(
            "nothing to shard", "modules", type(module).__name__,
            "a model with EmbeddingBagCollection, EmbeddingCollection, nn.EmbeddingBag or "
            "nn.Embedding modules", "pass a model with embedding modules")
    _refuse_shared_parameters(module, targets)
    return targets


def _own_behaviour(target: Target) -> str:
    """Return why a sharded module cannot replace the target's module; "" if it can."""
    kind, module = target.kind, target.module
    assert kind is not None
    for method in ("forward", "__call__"):
        if getattr(type(module), method) is not getattr(kind, method):
            return f"{type(module).__name__} overrides {method}"
    if "forward" in vars(module):  # as some libraries set it, in place of a hook
        return f"this {type(module).__name__} has a forward of its own"
    if not target.is_collection and [n for n, _ in module.named_parameters()] != ["weight"]:
        return f"{type(module).__name__} has parameters besides weight, or computes weight"
    if not target.is_collection and (module._buffers or module._modules):
        return f"{type(module).__name__} has buffers or modules of its own"
    if target.is_collection and not target.is_quantised:
        return _own_tables(module, own_names(target))
    return ""


def _own_tables(collection: nn.Module, names: Sequence[str]) -> str:
    """Return why a sharded collection cannot replace one whose tables the user has changed; "" if
    its tables are the plain modules that TorchRec creates for tables of these `names`."""
    from torch import nn

    held = {parameter.split(".")[1]
            for parameter, _ in collection.named_parameters(remove_duplicate=False)}
    if held != {*names}:
        return f"its tables are {sorted(held)[:8]} instead of {sorted(names)[:8]}"
    for path, table in collection.named_modules():
        if isinstance(table, nn.Embedding | nn.EmbeddingBag):
            kind = nn.EmbeddingBag if isinstance(table, nn.EmbeddingBag) else nn.Embedding
            if (type(table).forward is not kind.forward or "forward" in vars(table)
                    or type(table).__call__ is not kind.__call__):
                return f"its table {path} is a {type(table).__name__} that overrides forward"
            if [*table._parameters] != ["weight"] or table._buffers or table._modules:
                return f"its table {path} has more than a weight, or computes weight"
    return ""


def _warn_of_unsharded(module: nn.Module, reasons: Mapping[str, str]) -> None:
    """Warn of modules whose tables stay unsharded: those with `reasons` (reason by path), and
    TorchRec's fused collections."""
    others = dict(reasons)
    fused = sys.modules.get("torchrec.modules.fused_embedding_modules")
    if fused is not None:
        others |= {path: f"a {type(child).__name__}" for path, child in module.named_modules()
                   if isinstance(child, fused.FusedEmbeddingBagCollection
                                 | fused.FusedEmbeddingCollection)}
    if others:
        warnings.warn(f"modules with tables that stay unsharded: {others}; to suppress this "
                      "warning, pass the paths of the modules to shard as modules=", stacklevel=4)


#: Attributes of a module that hold its hooks and the hooks' flags.
_HOOKS = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
          "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_backward_hooks",
          "_backward_pre_hooks", "_is_full_backward_hook", "_non_full_backward_hooks",
          "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
          "_load_state_dict_post_hooks")


#: Attributes of a parameter that `apply_optimizer_in_backward` sets.
_TAGS = ("_optimizer_classes", "_optimizer_kwargs", "_in_backward_optimizers", "_acc_grad")


def _keep_hooks(old: nn.Module, new: nn.Module) -> None:
    """Give a sharded module the hooks, the training mode, and the parameters' attributes (such as
    marks of optimizer groups) of the module that it replaces."""
    from torch.nn.modules.module import _WrappedHook

    for name in _HOOKS:
        if name in old.__dict__:
            new.__dict__[name] = old.__dict__[name]
    before: Any = new._load_state_dict_pre_hooks
    for number, hook in before.items():
        if getattr(hook, "with_module", False):  # it refers to the old module
            before[number] = _WrappedHook(hook.hook, new)
    for child in new.modules():
        child.training = old.training
    for name, parameter in old.named_parameters():
        own = vars(new.get_parameter(name))
        own.update({k: x for k, x in vars(parameter).items() if k not in own and k not in _TAGS})


def _refuse_shared_parameters(module: nn.Module, targets: list[Target]) -> None:
    """Raise InvalidInputError if a table that trains is also a parameter or buffer of another
    module, or shares its memory with one, as ``from_pretrained(other.weight)`` does."""
    found: list[tuple[int, int, str, torch.Tensor]] = []
    for path, child in module.named_modules(remove_duplicate=False):
        for name, x in chain(child.named_parameters(recurse=False),
                             child.named_buffers(recurse=False)):
            found.append((*_memory_of(x), f"{path}.{name}".strip("."), x))
    found.sort(key=itemgetter(0, 1))
    paths = {t.path for t in targets}
    for k, (_, end, first, x) in enumerate(found):
        for begin, _, second, y in found[k + 1:]:
            if begin >= end:
                break
            names = sorted((first, second))
            ours = any(p in ("", n) or n.startswith(f"{p}.") for n in names for p in paths)
            if first != second and ours and (x is y or x.requires_grad or y.requires_grad):
                raise InvalidInputError("cannot shard a parameter shared between modules",
                                        "parameters", tuple(names), "each table in one module",
                                        "give each module its own parameter or buffer")


def _memory_of(x: torch.Tensor) -> tuple[int, int]:
    """Return the addresses `[begin, end)` of a tensor, and numbers of its own if it has none."""
    import torch

    if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.is_meta or not x.numel() or (
            x.layout != torch.strided):
        return -id(x) - 1, -id(x)
    size = x.numel() if x.is_contiguous() else 1
    return x.data_ptr(), x.data_ptr() + size * x.element_size()


def describe(target: Target, objective: str, default: Optimizer | None) -> None:
    """Set a target's `specs`, with names as in its module, and for training its `optimizers`.

    Args:
        target: the target.
        objective: ``"training"`` or ``"inference"``.
        default: optimizer of tables that `apply_optimizer_in_backward` has not tagged.

    Raises:
        InvalidInputError: training is requested without an optimizer, of quantised tables, or of
            tables with gradient hooks; or the module has unsupported options.
    """
    from torch import nn

    if objective == "training":
        if target.is_quantised:
            raise InvalidInputError("cannot train quantised tables", "module",
                                    target.path or "the model", "a float collection",
                                    "pass objective='inference'")
        # A collection's parameters are <kind>.<table>.weight, a torch module's is weight.
        own = {p.split(".")[1] if target.is_collection else target.path or "weight": parameter
               for p, parameter in target.module.named_parameters()}
        for table, parameter in own.items():
            hooks = [*(parameter._backward_hooks or ()),
                     *(parameter._post_accumulate_grad_hooks or ())]
            if hooks:
                raise InvalidInputError(
                    f"cannot shard table {table!r} for training", "hooks on its gradient",
                    len(hooks),
                    "0, since a sharded table's gradient never exists as a tensor",
                    "remove them, or clip with the optimizer's max_gradient or max_row_norm")
            tagged = None
            if hasattr(parameter, "_optimizer_classes"):
                from oper.integration.optim.tags import tagged_optimizer

                tagged = tagged_optimizer(parameter)
            chosen = tagged or default
            if chosen is None:
                raise InvalidInputError(
                    "cannot shard for training",
                    f"optimizer of table {table!r} in {target.path or 'the model'}", None,
                    "one for every table",
                    "pass optimizer=oper.RowWiseAdagrad(lr=...), or tag the tables with "
                    "torchrec.optim.apply_optimizer_in_backward before sharding")
            target.optimizers[table] = chosen
    names = {t: target.optimizers[t].name if target.optimizers else "none"
             for t in own_names(target)}
    if target.is_collection:
        from oper.integration.torchrec_modules import table_specs

        target.specs = table_specs(target.module, names)
    else:
        from oper.integration.torch_modules import module_spec

        assert isinstance(target.module, nn.EmbeddingBag | nn.Embedding)
        ((name, optimizer),) = names.items()
        target.specs = [module_spec(name, target.module, optimizer)]


def own_names(target: Target) -> list[str]:
    """Return the tables' names in the module's configuration; of a torch module, its path."""
    if not target.is_collection:
        return [target.path or "weight"]
    from oper.integration.torchrec_modules import configs_of

    return [c.name for c in configs_of(target.module)]


def name_tables(targets: list[Target], module: nn.Module) -> None:
    """Rename the targets' tables to their names in statistics and plans of `module`.

    The names are those that `oper.collect` uses; they are unique among all tables of `module`.
    """
    names = plan_names((t.path, name) for t in all_targets(module) for name in own_names(t))
    for target in targets:
        target.names = {s.name: names[target.path, s.name] for s in target.specs}
        target.specs = [replace(s, name=target.names[s.name]) for s in target.specs]


def typed(specs: Sequence[TableSpec], row_dtype: str | Mapping[str, str] | None
          ) -> list[TableSpec]:
    """Return `specs` with the dtypes `row_dtype`: one for all, or by table name; None = unchanged.

    Raises:
        InvalidInputError: a table or dtype is unknown.
    """
    if row_dtype is None:
        return list(specs)
    if isinstance(row_dtype, str):
        return [replace(s, dtype=row_dtype) for s in specs]
    if not isinstance(row_dtype, Mapping):
        raise InvalidInputError("cannot choose row dtypes", "row_dtype", row_dtype,
                                "the name of a dtype, or a mapping from tables to names",
                                "pass for example 'float16', or {'users': 'float16'}")
    unknown = set(row_dtype) - {s.name for s in specs}
    if unknown:
        raise InvalidInputError("cannot choose row dtypes", "tables", sorted(unknown),
                                f"some of {[s.name for s in specs][:8]}",
                                "name tables of this model")
    return [replace(s, dtype=row_dtype.get(s.name, s.dtype)) for s in specs]


def sharded_targets(module: nn.Module) -> list[Target]:
    """Return the modules that `oper.shard` has sharded, with specs for read-only tables.

    Raises:
        InvalidInputError: a table is dynamic.
    """
    found = []
    for path, child in module.named_modules():
        tables = getattr(child, "tables", None)
        if tables is None or not type(child).__module__.startswith("oper.integration"):
            continue
        if getattr(tables, "keys", None) is not None:
            tables.keys.refuse("cannot publish a model", "publish models of static tables")
        is_collection = hasattr(child, "sharded_parameter_names")
        names = dict(child._names) if is_collection else {child._name: child._name}
        specs = [replace(tables.specs[name], optimizer="none") for name in names.values()]
        found.append(Target(path, child, is_collection, specs=specs, names=names))
    return found


def replacement(target: Target, tables: Any) -> nn.Module:
    """Return the sharded module that replaces a target and has the same ``forward`` signature.

    Args:
        target: describes the module to replace.
        tables: `ShardedTables`, or read-only tables with the same lookup interface.
    """
    pooled = target.specs[0].pooling != "none"
    new: nn.Module
    if target.is_collection:
        from oper.integration import torchrec_modules as edge

        new = (edge.ShardedEmbeddingBags if pooled else edge.ShardedEmbeddings)(
            target.module, tables, target.names)
    else:
        from oper.integration import torch_modules as plain

        new = (plain.ShardedEmbeddingBag if pooled else plain.ShardedEmbedding)(
            target.module, tables, target.specs[0].name)
    _keep_hooks(target.module, new)
    return new


def build(target: Target, plan: Plan, objective: str, groups: Group | ReplicaGroups,
          bounds_check: Any, held: Mapping[str, TableSpec]) -> nn.Module:
    """Return the sharded module that replaces a target, with the target's weights. Collective.

    Args:
        target: describes the module to replace.
        plan: a plan that has the target's tables.
        objective: ``"training"`` or ``"inference"``.
        groups: the ranks, or their replica groups.
        bounds_check: see `BoundsCheck`.
        held: the tables by name, with the model's row types.
    """
    import torch

    from oper.integration.checkpoint.table_state import load_weights
    from oper.shmem.by_feature import BoundsCheck
    from oper.shmem.exchange.pull import choose_automatically
    from oper.shmem.replica_groups.groups import ReplicaGroups
    from oper.shmem.replica_groups.synchronizer import Synchronizer
    from oper.shmem.tables import ShardedTables

    # The model's specs replace the plan's: a plan file may have another pooling or optimizer.
    entries = tuple(replace(plan.table(spec.name), table=spec) for spec in target.specs)
    features = [(f, spec.name) for spec in target.specs for f in spec.features]
    optimizers = None
    if objective == "training":
        optimizers = {target.names[table]: o for table, o in target.optimizers.items()}
    plan = replace(plan, tables=entries)
    seed: int | None = None
    if isinstance(groups, ReplicaGroups):
        # Equal seeds of stochastic rounding, so that all groups stay equal with ``every = 1``.
        group, seed = groups.mine, groups.whole.all_gather(torch.initial_seed())[0]
        scale = groups.gradient_scale(_gradient_scale(target, groups.whole))
    else:
        group, scale = groups, _gradient_scale(target, groups)
    device = next((p.device for p in target.module.parameters()), None)  # None if quantised
    tables: ShardedTables
    if device is not None and device.type == "cuda":
        from oper.shmem.device.tables import DeviceTables

        tables = DeviceTables(plan, features, group, optimizers, scale, device=device)
    else:
        tables = ShardedTables(plan, features, group, optimizers, scale, seed)
    tables.name = target.path
    if isinstance(groups, ReplicaGroups):
        Synchronizer(tables, groups)
    tables.bounds = BoundsCheck(bounds_check, features, tables.specs)
    if target.is_quantised:
        _load_codes(tables, target, held)
    else:
        load_weights(tables, _weights(target))
        padding = getattr(target.module, "padding_idx", None)
        if padding is not None and target.module.weight.is_meta:  # torch initializes it to zero
            spec = target.specs[0]
            tables.write(spec.name, torch.zeros(1, spec.dim), padding)
            tables.flush_replicas()
    tables.use_huge_pages()
    if type(tables) is ShardedTables:  # `DeviceTables` chooses for every batch
        choose_automatically(tables)
    return replacement(target, tables)


def _load_codes(tables: ShardedTables, target: Target, held: Mapping[str, TableSpec]) -> None:
    """Copy the rows of a collection quantised by TorchRec, equal on all ranks. Collective."""
    from oper.integration.checkpoint.weights import Weights

    keys = replace(target, path="").keys()
    source = Weights(target.module, keys.values())
    for spec in target.specs:
        for begin, rows in source.rows(keys[spec.name], held[spec.name], spec):
            tables.write(spec.name, rows, begin)
    tables.flush_replicas()


def _weights(target: Target) -> Iterator[tuple[str, torch.Tensor, Any]]:
    """Yield every table's name, its unsharded weight, and its init function or None."""
    if not target.is_collection:
        yield target.specs[0].name, target.module.weight, None
        return
    from oper.integration.torchrec_modules import configs_of

    for config, (_, weight) in zip(
            configs_of(target.module), target.module.named_parameters(), strict=True):
        yield target.names[config.name], weight, config.init_fn


def _gradient_scale(target: Target, group: Group) -> float:
    """Return the factor on summed gradients: 1 / world_size, as in DDP, or 1 if TorchRec's
    `set_gradient_division` is off."""
    if target.is_collection:
        from torchrec.distributed.comm_ops import get_gradient_division

        if not get_gradient_division():
            return 1.0
    return 1.0 / group.world_size
