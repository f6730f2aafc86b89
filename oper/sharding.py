"""`shard()` and operations on sharded models; combines oper.analysis, search, shmem, integration.
"""

from __future__ import annotations

import contextlib
import os
import warnings
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from oper.errors import InvalidInputError, OperError, require
from oper.messages import EXACT, MessageBits
from oper.plan import EXPECTED_OBJECTIVE, OBJECTIVES, Plan
from oper.rows.capacity import DynamicRows, stats_of_rows
from oper.rows.read_only import one_copy_per_domain
from oper.rows.remap import load_remap
from oper.shmem.keys.rules import DynamicTable
from oper.stats import AccessStats
from oper.support.environment import check_environment
from oper.tables import TableSpec
from oper.topology import Topology

if TYPE_CHECKING:
    import torch
    from torch import nn

    from oper.integration.keys.managed_collision import Managed
    from oper.integration.targets import Target
    from oper.shmem.group.groups import Group
    from oper.shmem.optim.optimizers import Optimizer
    from oper.shmem.tables import ShardedTables

_DEFAULT_BATCH = 4096
_OF_TORCHREC = "torchrec"


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
    bounds_check: Any = "fatal",
    gradient_guard: str = "off",
    row_dtype: str | Mapping[str, str] | None = None,
    message_bits: int | tuple[int, int] | Mapping[str, Any] | None = None,
    message_variance: float | None = None,
    dynamic: DynamicTable | str | Mapping[str, DynamicTable | str] | None = None,
    replica_groups: int | None = None,
    synchronize_every: int | None = None,
    synchronize_delay: int | None = None,
    synchronize_bits: int | None = None,
) -> nn.Module:
    """Shard the embedding tables of a model by their access statistics.

    Replaces every ``EmbeddingBagCollection``, ``EmbeddingCollection``, ``nn.EmbeddingBag`` and
    ``nn.Embedding`` in place by a module with the same call signature, output order and
    ``state_dict`` names and shapes; the tables keep their weights. Other modules are not changed.
    Collective over `process_group`.

    Args:
        module: the model, or a collection itself.
        stats: access statistics or their file (`oper.collect`, ``oper analyze``). Without them the
            plan is made from table sizes, with one warning. For a dynamic table they count keys.
            Rank 0 makes the plan; the statistics of other ranks are not used.
        plan: a plan or plan file to execute; by default a plan is made.
        topology: the machine, its TOML file, or the name of a preset (``oper plan --topology``); by
            default the group's ranks on hosts like this one.
        modules: paths of the modules to shard; all by default. Modules that earlier calls have
            sharded stay as they are.
        objective: ``"training"``, or ``"inference"``: tables are read-only, the ranks of a memory
            domain share one copy, and ranks do not wait for each other in a lookup. Inference also
            takes modules quantised by TorchRec.
        batch_size: samples per rank and step that the plan is made for; by default 4096.
        optimizer: optimizer, applied in the backward pass, of all tables without an
            ``apply_optimizer_in_backward`` tag.
        process_group: the ranks; the default group, or one rank without ``torch.distributed``.
        bounds_check: treatment of ids outside their tables: ``"fatal"`` (an error), ``"warning"``
            or ``"ignore"`` (row 0 is looked up instead), or FBGEMM's ``BoundsCheckMode``; see
            `oper.shmem.by_feature.BoundsCheck`.
        gradient_guard: treatment of gradients that are not finite: ``"off"`` (none), ``"stop"`` (an
            error) or ``"skip"`` (the sample's gradient becomes zero, with a warning). Error and
            warning name the table and the update; see `oper.shmem.optim.guard.GradientGuard`.
        row_dtype: for inference, the storage type of rows, one for all tables or by table name:
            ``"float32"``, ``"float16"``, ``"bfloat16"``, ``"int8"`` or ``"int4"`` (the last two in
            FBGEMM's row-wise quantisation); by default the model's.
        message_bits: bits per number in messages between hosts: 32 (exact), 16 (bfloat16), 8 or 4,
            or a pair (answers to lookups, gradients), or a mapping from table names to either, with
            other tables exact; see `oper.messages`. By default the plan's, or 32 without a plan.
            8 and 4 bits are supported for tables in host memory only.
        message_variance: if given, the planner chooses the bits of messages by table, such that the
            mean relative squared error of rounding is at most this number (float > 0), see
            `oper.search.variance`. Not used with `plan`, which keeps its own bits. 8 and 4 bits are
            supported for tables in host memory only.
        dynamic: settings of tables whose ids are raw keys instead of row numbers, one for all
            tables or by table name; see `oper.DynamicTable`. ``"torchrec"``, for all tables behind
            TorchRec's managed-collision modules or by name, takes the settings of these modules,
            which dynamic tables replace. Only for training; on GPUs, these must be able to address
            each other's memory.
        replica_groups: number of groups of consecutive ranks into which the ranks are divided. Each
            group holds all tables, placed by a plan for its ranks; lookups and updates stay within
            it. By default the plan's, or 1 without a plan. Only for training, of tables in host
            memory; with dynamic tables, `synchronize_every` must be 1.
        synchronize_every: number of updates between two synchronizations of the groups; by default
            the plan's, or 1. With 1, gradients are added up over all groups before every update:
            results are those of one group, up to the order of additions. With more, groups update
            their rows separately, and then average the rows that have changed and their optimizer
            states; docs/how-to/slow-networks.md describes the effect on results.
        synchronize_delay: number of updates during which these rows are sent, at most
            `synchronize_every`, and 0 if that is 1; by default the plan's, or 0. With 0, training
            waits for a synchronization. With more, averages arrive that many updates later, and the
            changes that the group has made meanwhile are added to them.
        synchronize_bits: bits per number of the rows (with an interval of 1, gradients) that groups
            send to each other: 32 (exact), 16 (bfloat16) or 8, see `oper.messages`; by default the
            plan's, or 32. Rounding errors of rows are sent with the next synchronization, and
            `oper.synchronize` sends rows exactly.

    Returns:
        The model (a new module when `module` itself is a collection).

    Raises:
        InvalidInputError: there is nothing to shard, an optimizer is missing, a module has
            unsupported options, an argument is invalid, or tables or plans differ between the
            ranks.
        PlanError: the plan does not fit the model or the number of ranks.

    Example:
        >>> import torch, oper
        >>> bag = torch.nn.EmbeddingBag(100, 8, mode="sum")
        >>> stats = oper.collect([{"": (torch.tensor([1, 2, 2]), torch.tensor([2, 1]))}], bag)
        >>> sharded = oper.shard(bag, stats, optimizer=oper.SGD(lr=0.1))
        >>> sharded(torch.tensor([[1, 2]])).shape
        torch.Size([1, 8])
    """
    import torch

    from oper.integration.ddp import ignore_tables, rebuild, wrappers_of
    from oper.integration.keys.managed_collision import managed_tables, share_maps
    from oper.integration.targets import build, describe, find_targets, name_tables, typed
    from oper.shmem.group.agreement import check_same_arguments
    from oper.shmem.group.groups import default_group
    from oper.shmem.replica_groups.groups import split
    from oper.shmem.replica_groups.late import catch_up

    _check_arguments({"module": module, "stats": stats, "plan": plan, "topology": topology,
                      "modules": modules, "objective": objective, "optimizer": optimizer})
    bits = None if message_bits is None else MessageBits.parse(message_bits)
    require("cannot choose the bits of messages", "give one of the two",
            ("message_variance", message_variance, bits is None or message_variance is None,
             "None, if message_bits is given"))
    check_environment("cannot shard")
    default = torch.get_default_device()
    require("cannot shard", "call torch.set_default_device('cpu'), for training as well, and name "
            "the device where your own tensors are made", (
                "torch's default device", str(default), default.type == "cpu",
                "cpu, where tables keep their buffers"))
    if plan is not None and not isinstance(plan, Plan):
        plan = Plan.load(plan)
    if replica_groups is None:
        replica_groups = 1 if plan is None else plan.replica_groups
    if synchronize_every is None:
        synchronize_every = 1 if plan is None or replica_groups == 1 else plan.synchronize_every
    if synchronize_delay is None:  # the plan's delay is valid for the plan's interval only
        synchronize_delay = 0 if plan is None or synchronize_every != plan.synchronize_every else (
            plan.synchronize_delay)
    if synchronize_bits is None:
        synchronize_bits = 32 if plan is None or replica_groups == 1 else plan.synchronize_bits
    whole = default_group(process_group)
    for tables_before in _held_by(module):
        catch_up(tables_before.family)
    # Ranks that differ in these would make different collective calls below.
    check_same_arguments(whole, "cannot shard", {
        "objective": [objective], "plan": [None if plan is None else "a plan"],
        "topology": [None if plan is not None or topology is None else "a topology"],
        "replica_groups": [replica_groups], "synchronize_every": [synchronize_every],
        "synchronize_delay": [synchronize_delay], "synchronize_bits": [synchronize_bits]})
    groups = split(whole, replica_groups, synchronize_every, synchronize_delay, synchronize_bits)
    maps_keys = any(hasattr(m, "_managed_collision_collection") for m in module.modules())
    if groups is not None and (objective != "training" or maps_keys):
        raise InvalidInputError(
            "cannot shard in replica groups", "objective, managed collision modules",
            (objective, maps_keys), "'training', False", "leave replica_groups out")
    group = whole if groups is None else groups.mine
    targets = find_targets(module, modules)
    for target in targets:
        describe(target, objective, optimizer)
    name_tables(targets, module)
    if row_dtype is not None and objective == "training":
        raise InvalidInputError("cannot shard for training", "row_dtype", row_dtype, "None",
                                "leave it out, or shard with objective='inference'")
    held = {s.name: s for t in targets for s in t.specs}  # with the model's row types
    wanted = {s.name: s for s in typed(list(held.values()), row_dtype)}
    managed = managed_tables(module, targets)
    rules = _dynamic_tables(targets, dynamic, managed)
    raw_keys = [(of, of.raw_keys()) for name, of in managed.items() if name in rules]
    check_same_arguments(whole, "cannot shard", {"dynamic": sorted(rules.items())})
    require("cannot make tables dynamic", "leave synchronize_every or replica_groups out", (
        "synchronize_every", synchronize_every, synchronize_every == 1 or not rules,
        "1, since all replica groups must give a key the same row"))
    for target in targets:
        target.specs = [wanted[s.name] for s in target.specs]
    if group.world_size > 1 and maps_keys:
        share_maps(module, group)
    tables = [s for t in targets for s in t.specs]
    if bits is not None:
        bits.check_for(tables)
    if rules and stats is not None:
        stats = stats_of_rows(
            stats if isinstance(stats, AccessStats) else AccessStats.load(stats),
            {s.name: DynamicRows(s.num_rows, of.admit_after, of.eviction, of.half_life,
                                 of.time_to_live)
             for s in tables if (of := rules.get(s.name))},
            whole.world_size * (_DEFAULT_BATCH if batch_size is None else batch_size))
    made = _the_plan(tables, stats, plan, topology, (whole, group),
                     {"objective": objective, "message_bits": EXACT if bits is None else bits,
                      "message_variance": message_variance,
                      "batch_size": _DEFAULT_BATCH if batch_size is None else batch_size})
    made.check_for(tables, group.world_size)
    if bits is not None and bits != made.message_bits:  # the plan's times are for its own bits
        made = replace(made, message_bits=bits, step_us=0.0, lower_bound_us=0.0)
    if objective == "inference":
        from oper.shmem.group.domains import find_domains

        made = one_copy_per_domain(made, find_domains(group))
    ignore_tables()
    wrappers = wrappers_of(target.module for target in targets)
    # Shard all modules or none: a partly sharded model could be neither used nor sharded again.
    built: list[nn.Module] = []
    try:
        for target in targets:
            built.append(build(target, made, objective, groups or group, bounds_check, held))
            opened: Any = built[-1].tables
            opened.guard.choose(gradient_guard)
            mine = {s.name: rules[s.name] for s in target.specs if s.name in rules}
            if mine:
                opened.open_keys(mine)
    except BaseException:
        for new in built:
            new.tables.close()  # type: ignore[union-attr, operator]
        raise
    _join(_held_by(module), [t for new in built for t in _held_by(new)])
    for place, keys in raw_keys:
        place.modules[place.table] = keys
    for target, new in zip(targets, built, strict=True):
        if target.path == "":
            return new
        parent, _, child = target.path.rpartition(".")
        setattr(module.get_submodule(parent), child, new)
    for wrapper in wrappers:
        rebuild(wrapper)
    return module


def _dynamic_tables(targets: Sequence[Target], dynamic: Any, managed: Mapping[str, Managed]
                    ) -> dict[str, DynamicTable]:
    """Return the `DynamicTable` of each dynamic table by name; raises InvalidInputError if
    `dynamic` has a wrong type or names tables that do not exist or have a padding index."""
    names = [s.name for t in targets for s in t.specs]
    what = "cannot make tables dynamic"
    if dynamic == _OF_TORCHREC and not managed:
        raise InvalidInputError(what, "tables behind managed-collision modules", 0, ">= 1",
                                "pass an oper.DynamicTable")
    if isinstance(dynamic, DynamicTable) or dynamic == _OF_TORCHREC:
        dynamic = dict.fromkeys(managed if dynamic == _OF_TORCHREC else names, dynamic)
    if not isinstance(dynamic, Mapping | None) or any(
            rule != _OF_TORCHREC and not isinstance(rule, DynamicTable)
            for rule in (dynamic or {}).values()):
        raise InvalidInputError(what, "dynamic", dynamic,
                                f"an oper.DynamicTable or {_OF_TORCHREC!r}, or a dict of them by "
                                "table name", "pass for example {table: oper.DynamicTable()}")
    found = dict(dynamic or {})
    from_modules = {name for name, rule in found.items() if rule == _OF_TORCHREC}
    for group, expected in ((set(found), names), (from_modules, list(managed))):
        unknown = sorted(group - set(expected))
        if unknown:
            raise InvalidInputError(what, "unknown tables", unknown, f"some of {expected[:8]}",
                                    "name tables that are sharded")
    rules = {name: managed[name].rule() if name in from_modules else rule
             for name, rule in found.items()}
    for target in targets:
        padding = getattr(target.module, "padding_idx", None)
        if padding is not None and target.specs[0].name in rules:
            raise InvalidInputError(what, f"padding_idx of {target.specs[0].name!r}", padding,
                                    "None, since every integer is a key",
                                    "remove padding_idx, and padding ids from the bags")
    return rules


def _check_arguments(given: Mapping[str, Any]) -> None:
    """Raise InvalidInputError if an argument of `shard` has the wrong type."""
    from torch import nn

    from oper.shmem.optim.optimizers import Optimizer

    file = (str, os.PathLike, type(None))
    for name, kinds, expected in (
            ("module", nn.Module, "a torch.nn.Module"),
            ("stats", (AccessStats, *file), "AccessStats, a file of them, or None"),
            ("plan", (Plan, *file), "a Plan, a plan file, or None"),
            ("topology", (Topology, *file), "a Topology, a topology file or preset, or None"),
            ("optimizer", Optimizer | None, "oper.SGD(lr=...), oper.RowWiseAdagrad(lr=...), "
             "another optimizer of docs/reference/optimizers.md, or None")):
        if not isinstance(given[name], kinds):
            raise InvalidInputError("cannot shard", name, given[name], expected,
                                    f"correct the argument {name}")
    paths = given["modules"]
    # A generator is refused, since it could be read only once.
    if paths is not None and (isinstance(paths, str) or not isinstance(paths, Collection)
                              or not all(isinstance(p, str) for p in paths)):
        raise InvalidInputError("cannot shard", "modules", paths, "a list of paths",
                                f"pass [{paths!r}]" if isinstance(paths, str)
                                else "name modules as named_modules() does")
    if given["objective"] not in OBJECTIVES:
        raise InvalidInputError("cannot shard", "objective", given["objective"], EXPECTED_OBJECTIVE,
                                "correct the argument objective")


def _held_by(model: nn.Module) -> list[ShardedTables]:
    from oper.integration.checkpoint.saving import tables_of as held
    from oper.shmem.tables import ShardedTables

    return [t for t in held(model) if isinstance(t, ShardedTables)]


def _join(earlier: list[ShardedTables], new: list[ShardedTables]) -> None:
    """Join the new tables of a model and those of earlier calls of `shard` for the same ranks and
    objective into one family: if a rank refuses a batch, all tables of a family skip it."""
    from oper.shmem.group.desync import register_of

    some, trains = register_of(new[0].group), new[0].optimizers is not None
    alike = [t for t in earlier
             if register_of(t.group) is some and (t.optimizers is not None) == trains]
    family = weakref.WeakSet(x for t in (*alike, *new) for x in t.family)
    for tables in family:
        tables.family = family
        if tables.replicas is not None:
            tables.replicas.counted = 0
    for tables in sorted(family, key=lambda tables: tables.number):
        if tables.replicas is not None:  # from now on, all synchronize after the same batches
            tables.replicas.synchronize()


def tables_of(model: nn.Module, what: str) -> list[ShardedTables]:
    """Return the sharded tables of a model, one object per collection, in the order of its modules.

    Raises:
        InvalidInputError: the model has no sharded tables; the message begins with `what`.
    """
    found = _held_by(model)
    if not found:
        raise InvalidInputError(what, "model", type(model).__name__,
                                "a model that oper.shard returned", "shard it first")
    return found


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Accumulate gradients: several backward passes, one update of the tables.

    Like DistributedDataParallel's ``no_sync``; use both. Backward passes inside the block keep
    their table gradients on their rank and are not collective. The first backward pass after the
    block adds its own gradients and updates the tables, bitwise as if all samples had been one
    batch. ``zero_grad`` of the fused optimizer drops the accumulated gradients. The block needs
    memory for copies of its batches and their output gradients.

    All ranks must enter the block for the same updates; a rank may make fewer passes inside it than
    others, or none. If only some ranks have entered it, no rank updates tables in host memory, and
    all ranks raise InvalidInputError.

    If ``gradient_guard="stop"`` raises in a backward pass inside the block, no rank makes the
    following update: this rank raises the error again when it attempts the update, and the other
    ranks raise PeerLostError.

    Args:
        model: the result of `shard`, or a model that contains it.

    Example:
        >>> import torch, oper
        >>> bag = oper.shard(torch.nn.EmbeddingBag(9, 4, mode="sum"), optimizer=oper.SGD(lr=0.1))
        >>> with oper.no_sync(bag):
        ...     bag(torch.tensor([[1, 2]])).sum().backward()
        >>> bag(torch.tensor([[3, 4]])).sum().backward()  # updates rows 1, 2, 3 and 4
    """
    found = tables_of(model, "nothing to accumulate")
    with contextlib.ExitStack() as stack:
        for tables in found:
            stack.enter_context(tables.no_sync())
        try:
            yield
        finally:
            # If the gradient guard of one collection has raised, no collection is updated.
            refused = next((t.held.refused for t in found if t.held.refused is not None), None)
            if refused is not None:
                for tables in found:
                    tables.held.refused = refused


def micro_batches(model: nn.Module, num_passes: int | None = None
                  ) -> contextlib.AbstractContextManager[None]:
    """Train one batch in parts: several forward and backward passes, one update of the tables.

    A context manager. Each backward pass inside the block passes its table gradients to a worker
    thread, which exchanges them between ranks while the program continues. The rows are updated
    once, at the end of the block, so a collection's ``prefetch(features)`` inside the block can
    run the entire lookup of a later part. Until the update, the program must not change ids,
    per-sample weights and gradients of the lookups. Collective; all ranks must make the same
    passes. After an error inside the block nothing is updated. Gradients equal those of one
    complete batch up to the order of additions. `MicroBatchPipeline` wraps all this.

    Args:
        model: the result of `shard`, or a model that contains it; tables in host memory.
        num_passes: number of ``backward()`` calls inside the block, if known. The last of them
            then starts the update, and no lookup may follow it in the block.

    Raises:
        InvalidInputError: there are more passes than `num_passes`; or, on entering the block, the
            tables are read-only, in device memory, dynamic, within `no_sync`, within another
            `micro_batches`, or moving to another plan.

    Example:
        >>> import torch, oper
        >>> bag = oper.shard(torch.nn.EmbeddingBag(9, 4, mode="sum"), optimizer=oper.SGD(lr=0.1))
        >>> with oper.micro_batches(bag):
        ...     for part in torch.tensor([[[1, 2]], [[2, 3]]]):
        ...         (bag(part).sum() / 2).backward()  # rows 1 to 3 change after the block
    """
    from oper.shmem.micro_batches import in_parts

    return in_parts(tables_of(model, "nothing to train in parts"), num_passes)


def migrate(model: nn.Module, plan: Plan | str | os.PathLike[str],
            bytes_per_step: int | None = None, *,
            remap: str | os.PathLike[str] | None = None) -> None:
    """Move a model's tables to another plan, immediately or during training steps. Collective.

    Moves rows, replicas and optimizer states. Outputs and updates stay bitwise the same if both
    plans have only replicated and pulled tiers; with pushed tiers or column splits in either plan
    they differ by the order of float32 additions.

    Args:
        model: the result of `shard`, or a model that contains it.
        plan: the new plan or its file, for the same tables and number of ranks.
        bytes_per_step: maximum number of bytes that each rank copies per training step, in addition
            to the rows that this step has just changed; split evenly between several collections.
            None = move everything now.
        remap: folder with a re-map that ``oper vocabulary extend --reorder`` wrote. Rows are
            renumbered by it, and `plan` must be for the new numbers. Must not be combined with
            `bytes_per_step`. For tables that grow, use `oper.load_checkpoint` instead.

    Raises:
        InvalidInputError: the model has no sharded tables, a move is under way, the re-map does not
            fit the tables, or replica groups get `bytes_per_step` or different plans.
        PlanError: the plan does not fit; the old plan stays in use.
        OperError: there is not enough memory for the arenas of both plans; the old plan stays in
            use.
    """
    if not isinstance(plan, Plan):
        if not isinstance(plan, str | os.PathLike):
            raise InvalidInputError("cannot move tables to another plan", "plan", plan,
                                    "a Plan or a plan file",
                                    "pass the plan that oper.replan found, or a plan file")
        plan = Plan.load(plan)
    from oper.shmem.renumbering import check_renumbering, renumber

    found = tables_of(model, "nothing to move to another plan")
    rows = {} if remap is None else load_remap(remap)
    if rows and bytes_per_step is not None:
        raise InvalidInputError("cannot move tables to another plan", "bytes_per_step",
                                bytes_per_step, "None when a re-map is given",
                                "leave it out: all rows are renumbered between two batches")
    for tables in found:
        check_renumbering(tables, rows)
    budget = bytes_per_step
    if isinstance(budget, int) and budget > 0:  # `start_migration` refuses other values
        budget = max(1, budget // len(found))
    started: list[ShardedTables] = []
    try:
        for tables in found:
            tables.start_migration(plan, budget)
            started.append(tables)
    except OperError:
        for tables in started:
            tables.stop_migration()
        raise
    if budget is None:
        for tables in found:
            tables.finish_migration()
            renumber(tables, rows)


def _the_plan(tables: list[TableSpec], stats: Any, plan: Plan | None, topology: Any,
              groups: tuple[Group, Group], options: Mapping[str, Any]) -> Plan:
    """Return the plan to execute. If none is given, rank 0 makes it with the `options` of
    `make_plan` and sends it to all ranks. `groups`: all ranks, and the ranks that the plan is for.
    """
    whole, group = groups
    if plan is not None:
        return plan
    from oper.search.problem.presets import THIS_HOST, topology_preset

    if topology is None:
        from oper.shmem.group.domains import find_domains

        topology = Topology.of_domains(find_domains(group))
    elif not isinstance(topology, Topology) and os.fspath(topology) != THIS_HOST:
        topology = topology_preset(os.fspath(topology))
    if isinstance(topology, Topology) and topology.world_size == whole.world_size:
        topology = topology.divided(whole.world_size // group.world_size)
    if isinstance(topology, Topology) and topology.world_size != group.world_size:
        raise InvalidInputError("cannot plan for another number of ranks", "ranks of the topology",
                                topology.world_size, f"{group.world_size}, the process group's",
                                "pass a topology of that size, or leave it out")
    made: Plan | Exception | None = None
    if whole.rank == 0:
        try:
            made = _make(tables, stats, topology, group.world_size, options)
        except Exception as error:
            made = error
    made = whole.all_gather(made)[0]
    if isinstance(made, Exception):
        raise made
    assert isinstance(made, Plan)
    return made


def _make(tables: list[TableSpec], stats: Any, topology: Any, world_size: int,
          options: Mapping[str, Any]) -> Plan:
    from oper.search import make_plan
    from oper.search.problem.presets import topology_preset

    if stats is not None and not isinstance(stats, AccessStats):
        stats = AccessStats.load(stats)
    if not isinstance(topology, Topology):  # this host
        topology = topology_preset(os.fspath(topology), world_size)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        plan = make_plan(tables, stats, topology, **options)
    for warning in found:  # stacklevel: the line that calls `shard`
        warnings.warn(warning.message, stacklevel=4)
    return plan
