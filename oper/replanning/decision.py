"""Whether a new plan pays: drift of the accesses, cost of each plan now, cost of the migration.

Uses only plans and statistics; `oper.migrate` executes the decision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from oper.analysis import distance
from oper.errors import InvalidInputError
from oper.plan import Plan, TablePlan
from oper.replanning.moves import moves
from oper.rows.directory import TableDirectory
from oper.search import evaluate, make_plan, make_problem
from oper.search.problem.constraints import noted_constraints
from oper.search.problem.statement import with_overlap
from oper.stats import AccessStats, TableStats, hotness_order
from oper.tables import OPTIMIZERS
from oper.topology import Topology


@dataclass(frozen=True, slots=True, eq=False)
class Replanning:
    """Costs and savings of changing to a new plan; all times are modelled.

    Attributes:
        plan: the plan for the new statistics.
        distance: by table, total variation distance between the statistics that the old plan was
            made from and the new ones, 0 to 1; only tables that both have.
        old_step_us, new_step_us: step time of the old and of the new plan on the new statistics.
        moved_bytes: bytes of rows and optimizer state whose owner changes.
        network_bytes: bytes that memory domains send each other for the migration, including
            replicas and requests.
        copied_bytes: bytes that the busiest rank copies; `oper.migrate` writes its entire new
            arena.
        copy_us: duration of the migration: the busiest link's time plus the copy's time.
    """

    plan: Plan
    distance: dict[str, float]
    old_step_us: float
    new_step_us: float
    moved_bytes: int
    network_bytes: int
    copied_bytes: int
    copy_us: float

    @property
    def break_even_steps(self) -> float:
        """Number of steps after which the time saved exceeds `copy_us`; infinite if the new plan is
        not faster."""
        gain = self.old_step_us - self.new_step_us
        return self.copy_us / gain if gain > 0 else float("inf")


def replan(plan: Plan, stats: AccessStats, topology: Topology, *,
           old_stats: AccessStats | None = None, copy_gbps: float = 1.0,
           options: Mapping[str, Any] | None = None) -> Replanning:
    """Make a plan for new statistics and compare it with the current plan.

    Both step times are modelled on the new statistics, with each row where the plan places it.
    The current plan's step time thus includes the cost of its outdated hotness order. In larger
    tables, the 65,536 hottest rows are modelled one by one, and all others as equally hot.

    Args:
        plan: the plan in use.
        stats: recent access statistics of its tables.
        topology: the machine, with as many ranks as `plan`; of replica groups, the machine of one.
            The new plan keeps the plan's replica groups.
        old_stats: the statistics that `plan` was made from, for `distance`; None = no distances.
        copy_gbps: rate at which a rank copies rows into its new arena, in GB/s.
        options: keyword arguments of `oper.make_plan`. Constraints and message bits are by default
            those of `plan`, as is ``overlap``, which applies to both plans' steps.

    Raises:
        InvalidInputError: the plan does not state its batch size, a rate is not positive, or the
            statistics are for different vocabularies.
        PlanError: the topology or the statistics are for other ranks or tables.
    """
    check_batch(plan)
    if old_stats is not None:
        old_stats.check_same_rows("cannot compare another plan", stats)
    if not copy_gbps > 0:
        raise InvalidInputError("cannot compare another plan", "copy_gbps", copy_gbps, "> 0",
                                "pass the rate at which a rank copies rows, in GB/s")
    tables = [t.table for t in plan.tables]
    given: dict[str, Any] = {"message_bits": plan.message_bits,
                             "constraints": noted_constraints(plan),
                             "overlap": plan.notes.get("overlap_us"), **dict(options or {})}
    new = make_plan(tables, stats, topology, objective=plan.objective, batch_size=plan.batch_size,
                    **given)
    new = replace(new, replica_groups=plan.replica_groups,
                  synchronize_every=plan.synchronize_every,
                  synchronize_delay=plan.synchronize_delay, synchronize_bits=plan.synchronize_bits)
    found = {} if old_stats is None else {
        t.name: distance(old_stats.tables[t.name], stats.tables[t.name]) for t in tables
        if t.name in old_stats.tables and t.name in stats.tables}
    copied, moved = _copied_bytes(new), moves(plan, new, topology.domain_of())
    before, after = (step_us(x, stats, topology, given["overlap"] or {}) for x in (plan, new))
    return Replanning(
        new, found, before, after, round(moved.owner_bytes), round(moved.between.sum()), copied,
        moved.transfer_us(topology) + copied / (copy_gbps * 1e3))


def check_batch(plan: Plan) -> None:
    """Raise InvalidInputError if a plan does not state its batch size."""
    if plan.batch_size < 1:
        raise InvalidInputError("cannot compare another plan", "plan.batch_size", plan.batch_size,
                                ">= 1, the samples per rank and step",
                                "set batch_size in the plan, or use a plan made by oper plan")


def step_us(plan: Plan, stats: AccessStats, topology: Topology,
            overlap: Mapping[str, Any] | None = None) -> float:
    """Modelled step time, in microseconds, of a plan on statistics that it was not made from.

    Args:
        plan: the plan.
        stats: access statistics of its tables.
        topology: the machine.
        overlap: dense compute during which a phase can run, as for `oper.make_plan`; None = as the
            plan was made with.

    Raises:
        InvalidInputError: the plan does not state its batch size, or `overlap` is invalid.
    """
    check_batch(plan)
    relabelled, entries = {}, []
    for entry in plan.tables:
        found = stats.tables.get(entry.table.name)
        if found is not None:
            relabelled[entry.table.name] = _by_position(found, entry, plan.world_size)
        entries.append(replace(entry, head_ids=np.zeros(0, np.int64)))
    moved = AccessStats(stats.num_samples, relabelled, stats.source,
                        samples_per_bag=stats.samples_per_bag)
    stated = make_problem([t.table for t in plan.tables], moved, topology,
                          objective=plan.objective, batch_size=plan.batch_size)
    problem = replace(with_overlap(
        stated, plan.notes.get("overlap_us") if overlap is None else overlap),
        message_bits=plan.message_bits)
    return evaluate(replace(plan, tables=tuple(entries)), problem).step_us


def _by_position(stats: TableStats, entry: TablePlan, world_size: int) -> TableStats:
    """The statistics with every row's id replaced by its position in the plan's order."""
    directory = TableDirectory(entry, world_size)
    ids = directory.position_of(stats.head_ids)
    order = hotness_order(ids, stats.head_counts)
    return replace(stats, head_ids=ids[order], head_counts=stats.head_counts[order], buckets=())


def _copied_bytes(plan: Plan) -> int:
    """Bytes of rows, replicas and optimizer states on the rank that holds most."""
    held = np.zeros(plan.world_size, np.int64)
    for entry in plan.tables:
        for piece in range(len(entry.pieces)):
            d = TableDirectory(entry, plan.world_size, piece)
            state = OPTIMIZERS[d.table.optimizer].state_bytes(d.dim)
            held += d.num_slots * (d.row_bytes + state * (plan.objective == "training"))
            held += d.num_replica_rows * d.row_bytes
    return int(held.max())
