"""Conversion of plans to and from TorchRec's, and OPER as a planner for TorchRec.

A TorchRec plan gives every table one of a few sharding types. Export loses features of OPER's plans
that TorchRec lacks (tiers, rows out of id order, partial replicas, pulled rows), which
`lost_in_torchrec` lists. Import loses nothing: OPER can express every TorchRec plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Annotated, Any

import numpy as np
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
    ShardingPlanner,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from oper.errors import (
    InvalidInputError,
    OperError,
    PlanError,
    PlanInfeasibleError,
    require_fields,
)
from oper.integration.torchrec_modules import configs_of, table_specs
from oper.plan import MAX_PATTERN, Piece, Plan, TablePlan, Tier
from oper.ranges import one_of, rules_of
from oper.search.cost.model import evaluate
from oper.search.planner import plan_problem
from oper.search.problem.constraints import Constraints, violations
from oper.search.problem.space import EVERYTHING, EXECUTABLE
from oper.search.problem.statement import make_problem
from oper.shmem.group.groups import default_group
from oper.stats import AccessStats
from oper.tables import TableSpec, plan_names
from oper.topology import Topology

ROW_RANGES = ("even", "proportional")
KINDS = frozenset({"data_parallel", "table_wise", "column_wise", "row_wise", "table_row_wise"})
# OperPlanner exports a plan from each of these spaces and returns the best export. Plans from the
# narrow spaces lose little on export.
_SPACES: tuple[frozenset[str], ...] = (
    frozenset({"owned", "push"}), frozenset({"owned", "replicated", "push"}),
    frozenset({"owned", "push", "columns"}), EXECUTABLE, EVERYTHING)


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """Options of exporting a plan.

    Attributes:
        device_type: ``"cpu"`` or ``"cuda"``, for the shards' placement.
        local_size: ranks per host; None = all ranks on one host.
        row_ranges: sizes of row-wise shards. ``"even"``: ceil(rows / W) rows each, for W ranks;
            TorchRec's training uses this size whatever the plan states. ``"proportional"``:
            proportional to each rank's rows in the OPER plan; TorchRec's inference modules follow
            it.
        kinds: sharding types that may be used; ``"table_wise"`` must be among them.

    Raises:
        InvalidInputError: `row_ranges` or `kinds` is invalid.
    """

    device_type: str = "cpu"
    local_size: int | None = None
    row_ranges: Annotated[str, one_of(*ROW_RANGES)] = "even"
    kinds: frozenset[str] = KINDS

    def __post_init__(self) -> None:
        require_fields(self, "cannot export a plan", "correct this option", *rules_of(self),
                       ("kinds", "table_wise" in self.kinds, "a set that contains 'table_wise'"))


@dataclass(frozen=True, slots=True)
class _Choice:
    """The TorchRec sharding closest to one table's plan.

    Attributes:
        kind: TorchRec's sharding type.
        shards: (rank, (row, num_rows, column, num_columns)) of every shard; empty if data-parallel.
        lost: properties of the table's plan that the export cannot express.
    """

    kind: str
    shards: tuple[tuple[int, tuple[int, int, int, int]], ...]
    lost: tuple[str, ...]


# -- export ----------------------------------------------------------------------------------------


def to_torchrec(plan: Plan, module: nn.Module, options: ExportOptions | None = None
                ) -> ShardingPlan:
    """Return the TorchRec plan closest to `plan`, for the collections of `module`.

    Tables with one owner become table-wise; tables replicated on all ranks data-parallel; column
    shards with one owner each column-wise; tables whose rows are all on one of several hosts
    table-row-wise; and all others row-wise. `lost_in_torchrec` lists what the export loses.

    Args:
        plan: a plan for the tables of `module`, named as by `oper.collect`.
        module: a model or a collection; its tables may be on the meta device.
        options: see `ExportOptions`; None = the defaults.

    Raises:
        PlanError: `plan` lacks a table of `module`, or has it with another size.
    """
    options = options or ExportOptions()
    choices = _choices(plan, options)
    names = _names(module)
    tables = [t.table for t in plan.tables]
    known = {t.name: t for t in tables}
    for spec in _specs(module):
        held = known.get(spec.name)
        if held is None or (held.num_rows, held.dim) != (spec.num_rows, spec.dim):
            raise PlanError("the plan is for another model",
                            "table of the model (name, rows, columns)",
                            (spec.name, spec.num_rows, spec.dim), "one of the plan's tables "
                            f"{[(t.name, t.num_rows, t.dim) for t in tables][:8]}",
                            "make a plan for this model")
    out = {}
    for path, child in collections_of(module):
        entries = EmbeddingModuleShardingPlan()
        for config in configs_of(child):
            entries[config.name] = _parameter_sharding(
                choices[names[path, config.name]], plan, options)
        out[path] = entries
    return ShardingPlan(out)


def lost_in_torchrec(plan: Plan, options: ExportOptions | None = None) -> list[str]:
    """List what `to_torchrec` cannot express, one line per table and loss; empty if nothing."""
    choices = _choices(plan, options or ExportOptions())
    return [f"{name}: {text}" for name, c in choices.items() for text in c.lost]


def collections_of(module: nn.Module) -> list[tuple[str, Any]]:
    """Return path and module of every unsharded collection, except instances of subclasses."""
    return [(path, m) for path, m in module.named_modules()
            if type(m) in (EmbeddingBagCollection, EmbeddingCollection)]


def _names(module: nn.Module) -> dict[tuple[str, str], str]:
    """Map (path of the collection, table name) to the table's name in plans."""
    return plan_names(
        (path, c.name) for path, child in collections_of(module) for c in configs_of(child))


def _specs(module: nn.Module) -> list[TableSpec]:
    """Return the tables of the collections of `module`, named as in plans."""
    names = _names(module)
    return [replace(spec, name=names[path, spec.name])
            for path, child in collections_of(module) for spec in table_specs(child)]


def _choices(plan: Plan, options: ExportOptions) -> dict[str, _Choice]:
    filled = np.zeros(plan.world_size)  # elements placed per rank; breaks ties between owners
    return {t.table.name: _nearest(t, plan.world_size, options, filled) for t in plan.tables}


def _nearest(entry: TablePlan, world_size: int, options: ExportOptions, filled: np.ndarray
             ) -> _Choice:
    spec = entry.table
    tiers = [x for piece in entry.pieces for x in piece.tiers]
    held = np.stack([_held_rows(p, world_size) for p in entry.pieces])
    everywhere = all(x.placement == "replicated" and len(x.ranks) == world_size for x in tiers)
    owners = [int(h.argmax()) if np.count_nonzero(h) == 1 else -1 for h in held]
    width = np.array([p.stop - p.start for p in entry.pieces])
    if everywhere and "data_parallel" in options.kinds:
        kind, shards = "data_parallel", []
    elif min(owners) >= 0 and (len(set(owners)) == 1 or "column_wise" in options.kinds):
        columns = _merged_columns(entry.pieces, owners)
        kind = "table_wise" if len(columns) == 1 else "column_wise"
        shards = [(r, (0, spec.num_rows, a, b - a)) for a, b, r in columns]
    else:
        kind, shards = _by_rows(spec, width @ held, options, filled)
    for rank, (_, rows, _, columns_wide) in shards:
        filled[rank] += rows * columns_wide
    return _Choice(kind, tuple(shards), tuple(_losses(entry, kind, width @ held, options)))


def _held_rows(piece: Piece, world_size: int) -> np.ndarray:
    """Return the non-replicated rows per rank, float64 [W]. If all rows are replicated, return the
    rows whose master copy a rank has."""
    held, masters = np.zeros(world_size), np.zeros(world_size)
    for x in piece.tiers:
        into = masters if x.placement == "replicated" else held
        pattern = x.pattern()
        np.add.at(into, np.array(pattern), (x.stop - x.start) / len(pattern))
    return held if held.any() else masters


def _merged_columns(pieces: Sequence[Piece], owners: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return columns `[start, stop)` and owner, with adjacent pieces of the same owner merged."""
    runs = [list(run) for _, run in groupby(zip(owners, pieces, strict=True), itemgetter(0))]
    return [(run[0][1].start, run[-1][1].stop, run[0][0]) for run in runs]


def _by_rows(spec: TableSpec, held: np.ndarray, options: ExportOptions, filled: np.ndarray
             ) -> tuple[str, list[tuple[int, tuple[int, int, int, int]]]]:
    """Return the sharding type and shards of a table split by rows. If neither row-wise type is
    allowed, the table is placed on the rank with most of its rows."""
    world_size = held.size
    local = options.local_size or world_size
    holders = np.flatnonzero(held)
    host = int(holders[0]) // local
    # Hosts may be unequal; TorchRec's sharding uses `local` ranks.
    one_host = local < world_size and (host + 1) * local <= world_size and bool(
        (holders // local == host).all())
    if one_host and "table_row_wise" in options.kinds:
        kind, ranks = "table_row_wise", np.arange(host * local, (host + 1) * local)
    elif "row_wise" in options.kinds:
        kind, ranks = "row_wise", np.arange(world_size)
    else:
        best = np.lexsort((filled, -held))[0]
        return "table_wise", [(int(best), (0, spec.num_rows, 0, spec.dim))]
    if options.row_ranges == "even":
        block = -(-spec.num_rows // ranks.size)
        ends = np.minimum(np.arange(1, ranks.size + 1) * block, spec.num_rows)
    else:
        share = np.cumsum(held[ranks]) / held[ranks].sum()
        ends = np.rint(share * spec.num_rows).astype(np.int64)
    starts = np.concatenate([[0], ends[:-1]])
    return kind, [(int(r), (int(a), int(b - a), 0, spec.dim))
                  for r, a, b in zip(ranks, starts, ends, strict=True)]


def _losses(entry: TablePlan, kind: str, held: np.ndarray, options: ExportOptions
            ) -> Iterator[str]:
    tiers = [x for piece in entry.pieces for x in piece.tiers]
    most = max(len(p.tiers) for p in entry.pieces)
    copies = [x for x in tiers if x.placement == "replicated"]
    rest = [x for x in tiers if x.placement != "replicated"]
    if most > 1:
        yield f"{most} tiers become one {kind} sharding"
    if copies and kind != "data_parallel":
        rows = sum(x.stop - x.start for x in copies)
        word = "replicas" if all(len(x.ranks) == held.size for x in copies) else "partial replicas"
        yield f"{word} of {rows} rows"
    if len(entry.pieces) > 1 and kind not in ("column_wise", "data_parallel"):
        yield f"{len(entry.pieces)} column pieces"
    by_rows = kind in ("row_wise", "table_row_wise")
    if by_rows or any(x.placement == "striped" for x in rest):
        order = "rows striped in hotness order" if entry.head_ids.size else "rows striped by id"
        yield f"{order} become " + ("ranges of ids" if by_rows else "one owner")
    if by_rows and options.row_ranges == "even" and held.max() - held.min() > 1e-6 * held.max() + 1:
        yield "uneven shares of the ranks become even ones"
    if any(x.mode == "pull" for x in rest):
        yield "pulled rows are pooled by their owner and pushed"
    if any(x.memory == "host" for x in tiers):
        yield "rows in host memory"


def _parameter_sharding(choice: _Choice, plan: Plan, options: ExportOptions) -> ParameterSharding:
    kernel = "fused" if plan.objective == "training" else "quant"
    if choice.kind == "data_parallel":
        return ParameterSharding(sharding_type="data_parallel", compute_kernel="dense",
                                 ranks=list(range(plan.world_size)), sharding_spec=None)
    local = options.local_size or plan.world_size
    shards = []
    for rank, (row, num_rows, column, num_columns) in choice.shards:
        device = "cpu" if options.device_type == "cpu" else (
            f"{options.device_type}:{rank % local}")
        shards.append(ShardMetadata(shard_offsets=[row, column],
                                    shard_sizes=[num_rows, num_columns],
                                    placement=f"rank:{rank}/{device}"))
    return ParameterSharding(sharding_type=choice.kind, compute_kernel=kernel,
                             ranks=[rank for rank, _ in choice.shards],
                             sharding_spec=EnumerableShardingSpec(shards))


# -- import ----------------------------------------------------------------------------------------


def from_torchrec(sharding_plan: ShardingPlan, tables: Iterable[TableSpec], world_size: int,
                  *, scattered: bool = False, **plan_fields: Any) -> Plan:
    """Convert a TorchRec plan to an OPER plan, to evaluate, compare or execute it.

    Row ranges become owned tiers in id order. Bags are pooled by the owner and pushed, as in
    TorchRec. Data-parallel tables become replicated.

    Args:
        sharding_plan: a plan with any sharding types.
        tables: the tables, named as in the plan or ``<path of the module>.<name in the plan>``.
        world_size: number of ranks.
        scattered: for statistics ordered by hotness and ids that are not: row ranges become
            stripes, so that each owner gets a proportional share of the hot rows.
        plan_fields: other fields of `Plan`.

    Raises:
        PlanError: a table has no sharding or several, or its shards do not cover it.
    """
    found: dict[str, list[Any]] = {}
    for path, module_plan in sharding_plan.plan.items():
        for name, sharding in module_plan.items():
            for key in {name, f"{path}.{name}"}:
                found.setdefault(key, []).append(sharding)
    entries = []
    for spec in tables:
        shardings = found.get(spec.name, [])
        if len(shardings) != 1:
            raise PlanError("cannot import a TorchRec plan", f"entries for table {spec.name!r}",
                            len(shardings), "1", "name tables as in the plan, and as "
                            "'<module path>.<table>' where two tables have the same name")
        pieces = _pieces(spec, shardings[0], world_size)
        if scattered:
            pieces = tuple(replace(p, tiers=_as_stripe(p.tiers)) for p in pieces)
        entries.append(TablePlan(spec, pieces))
    return Plan(world_size, tuple(entries), **plan_fields)


def _pieces(spec: TableSpec, sharding: Any, world_size: int) -> tuple[Piece, ...]:
    if sharding.sharding_type == "data_parallel":
        every = Tier(0, spec.num_rows, "replicated", tuple(range(world_size)))
        return (Piece(0, spec.dim, (every,)),)
    spans = []  # (first row, end row, first column, end column, rank)
    for k, shard in enumerate(sharding.sharding_spec.shards):
        (row, column), (rows, columns) = shard.shard_offsets, shard.shard_sizes
        rank = sharding.ranks[k] if sharding.ranks else shard.placement.rank()
        if rows and columns:
            spans.append((row, row + rows, column, column + columns, int(rank)))
    out: list[Piece] = []
    for a, b in pairwise(sorted({x for s in spans for x in s[2:4]} | {0, spec.dim})):
        tiers: list[Tier] = []
        for row, end, _, _, rank in sorted(s for s in spans if s[2] <= a and b <= s[3]):
            if tiers and tiers[-1].ranks == (rank,) and tiers[-1].stop == row:
                tiers[-1] = replace(tiers[-1], stop=end)
            else:
                tiers.append(Tier(row, end, "owned", (rank,), mode="push"))
        if out and out[-1].tiers == tuple(tiers):
            out[-1] = replace(out[-1], stop=b)
        else:
            out.append(Piece(a, b, tuple(tiers)))
    return tuple(out)


def _as_stripe(tiers: tuple[Tier, ...]) -> tuple[Tier, ...]:
    """Replace row ranges by one stripe in which every owner has about as many rows as before."""
    if len(tiers) == 1:
        return tiers
    rows: dict[int, int] = {}
    for x in tiers:
        rows[x.ranks[0]] = rows.get(x.ranks[0], 0) + x.stop - x.start
    sizes, total = np.array(list(rows.values()), float), tiers[-1].stop
    weights: tuple[int, ...] = ()
    if sizes.max() - sizes.min() > sizes.size:  # larger than the rounding of even blocks
        scale = min(1.0, (MAX_PATTERN - sizes.size) / total)
        weights = tuple(np.maximum(np.rint(sizes * scale), 1).astype(int).tolist())
    return (Tier(0, total, "striped", tuple(rows), weights, mode="push"),)


# -- OPER as TorchRec's planner --------------------------------------------------------------------


@dataclass(eq=False)
class OperPlanner(ShardingPlanner):
    """A planner for ``DistributedModelParallel(..., plan=planner.collective_plan(...))``.

    It makes a plan in each of several spaces of placements, exports it, and evaluates the export as
    TorchRec would execute it; of the exports that fit and keep the constraints, it returns the one
    with the least modelled step time.

    Args:
        stats: access statistics; None = plan from table sizes.
        topology: the machine; None = this host with the ranks of the default process group.
        batch_size: samples per rank and step.
        constraints: see `oper.search.problem.constraints.parse_constraints`.
        device_type: where TorchRec runs, ``"cpu"`` or ``"cuda"``.

    Attributes:
        oper_plan: after `plan`, the returned plan as an OPER plan with its modelled step time.
        lost: after `plan`, what the export of the chosen plan lost; see `lost_in_torchrec`.
    """

    stats: AccessStats | None = None
    topology: Topology | None = None
    _: KW_ONLY
    batch_size: int = 4096
    constraints: Mapping[str, Any] | None = None
    device_type: str = "cpu"
    oper_plan: Plan | None = field(default=None, init=False)
    lost: list[str] = field(default_factory=list, init=False)

    def plan(self, module: nn.Module, sharders: Sequence[Any] | None = None) -> ShardingPlan:
        """Plan all collections of `module`, with the sharding types that their `sharders` support.

        `sharders` None allows all sharding types.

        Raises:
            InvalidInputError: `module` has no collection, or `sharders` has none for its class.
            PlanInfeasibleError: the tables do not fit the topology.
            PlanError: OPER's plans fit and keep the constraints, but their exports do not.
        """
        offered = _offered(module, sharders, self.device_type)
        specs = _specs(module)
        topology = self.topology or Topology.this_host(default_group().world_size)
        hosts = [len(d.ranks) for d in topology.domains if d.host == topology.domains[0].host]
        options = ExportOptions(self.device_type, sum(hosts), kinds=offered)
        best: tuple[float, ShardingPlan, Plan, list[str]] | None = None
        refused: OperError | None = None
        broken: list[str] = []
        for space in _SPACES:
            try:
                problem = make_problem(specs, self.stats, topology, batch_size=self.batch_size,
                                       allow=space, constraints=self.constraints)
                made = plan_problem(problem)
            # InvalidInputError: constraints allow nothing in this space, or are invalid in each.
            except (PlanInfeasibleError, InvalidInputError) as error:
                refused = error
                continue
            exported = to_torchrec(made, module, options)
            again = from_torchrec(exported, specs, topology.world_size,
                                  batch_size=self.batch_size, topology=topology.name)
            found = evaluate(again, problem)
            violated = _violations(again, problem.constraints)
            broken = broken or violated
            if found.fits and not violated and (best is None or found.step_us < best[0]):
                best = (found.step_us, exported, replace(again, step_us=found.step_us),
                        lost_in_torchrec(made, options))
        if best is None and broken:
            raise PlanError("no exported plan keeps the constraints", "violated", broken[:4],
                            "none", "remove constraints, or run OPER's plan with oper.shard")
        if best is None and refused is not None:
            raise refused
        if best is None:
            raise PlanError("no exported plan fits the topology", "memory_bytes",
                            [d.memory_bytes for d in topology.domains][:8],
                            "enough for entire tables or equal row ranges",
                            "run OPER's plan with oper.shard, which can place individual rows")
        _, result, self.oper_plan, self.lost = best
        return result

    def collective_plan(self, module: nn.Module, sharders: Sequence[Any] | None = None,
                        pg: dist.ProcessGroup | None = None) -> ShardingPlan:
        """Call `plan` on the first rank of `pg`; return or raise the same on all. Collective."""
        parts: list[Any] = [None]
        first = dist.get_process_group_ranks(pg)[0] if pg is not None else 0
        if dist.get_rank() == first:
            try:
                parts = [(self.plan(module, sharders), self.oper_plan, self.lost)]
            except Exception as error:  # sent to the other ranks, which wait for the result
                parts = [error]
        dist.broadcast_object_list(parts, first, group=pg)
        if isinstance(parts[0], Exception):
            raise parts[0]
        result, self.oper_plan, self.lost = parts[0]
        return result


def _violations(plan: Plan, held: Constraints) -> list[str]:
    """Return the constraints that an imported plan violates, whatever the exchange modes of its
    tiers: TorchRec has no modes, so that imported tiers always have the same one."""
    pulled = replace(plan, tables=tuple(
        replace(t, pieces=tuple(replace(p, tiers=tuple(
            replace(x, mode="pull") if x.placement != "replicated" else x for x in p.tiers))
            for p in t.pieces)) for t in plan.tables))
    either = violations(pulled, held)
    return [x for x in violations(plan, held) if x in either]


def _offered(module: nn.Module, sharders: Sequence[Any] | None, device_type: str
             ) -> frozenset[str]:
    """Return the sharding types that the sharders of all collections in `module` support."""
    found = [type(child) for _, child in collections_of(module)]
    if not found:
        raise InvalidInputError("nothing to plan", "module", type(module).__name__,
                                "a model with an EmbeddingBagCollection or EmbeddingCollection",
                                "pass the model before sharding")
    if sharders is None:
        return KINDS
    offered = KINDS
    for kind in set(found):
        able = [s for s in sharders if s.module_type is kind]
        if not able:
            raise InvalidInputError(f"cannot plan a {kind.__name__}", "sharders",
                                    [type(s).__name__ for s in sharders],
                                    f"a sharder of {kind.__name__}", "add it to the list")
        offered &= frozenset(able[0].sharding_types(device_type))
    return offered
