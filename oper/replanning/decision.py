"""Whether a new plan pays: how accesses have drifted, what each plan costs now, what a move costs.

Works on plain data from analysis and search; `oper.migrate` carries a decision out.
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
from oper.stats import AccessStats, TableStats, hotness_order
from oper.tables import OPTIMIZERS
from oper.topology import Topology


@dataclass(frozen=True, slots=True, eq=False)
class Replanning:
    """What a change of plan would cost and save; all times are modelled.

    Attributes:
        plan: the plan for the new statistics.
        distance: by table, total variation distance between the accesses that the old plan was made
            for and the new ones, 0 to 1; only of tables that both statistics have.
        old_step_us, new_step_us: a step of the old and of the new plan on the new statistics.
        moved_bytes: bytes of rows and optimizer state that change their rank.
        network_bytes: bytes that the memory domains send each other for the move, replicas and
            requests included.
        copied_bytes: bytes that the busiest rank copies, since `oper.migrate` fills the whole of
            its new arena.
        copy_us: time of the move: that of the busiest link plus that of the copy.
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
        """Steps after which the saved time exceeds that of the move; infinite if the new plan is no
        faster."""
        gain = self.old_step_us - self.new_step_us
        return self.copy_us / gain if gain > 0 else float("inf")


def replan(plan: Plan, stats: AccessStats, topology: Topology, *,
           old_stats: AccessStats | None = None, copy_gbps: float = 1.0,
           options: Mapping[str, Any] | None = None) -> Replanning:
    """Make a plan for new statistics and compare it with the present one.

    Args:
        plan: the plan in use.
        stats: recent access statistics of its tables.
        topology: the machine, with as many ranks as `plan`.
        old_stats: the statistics that `plan` was made from; they give `distance`.
        copy_gbps: rate at which a rank copies rows into its new arena, in GB/s.
        options: keyword arguments of `oper.make_plan`.

    Both plans' steps are modelled on the new statistics with each row where the plan puts it, so
    that an outdated hotness order is charged for. In larger tables the 65,536 hottest rows are
    followed one by one and the others are treated as equally hot.

    Raises:
        InvalidInputError: the plan does not state its batch size, or a rate is not positive.
        PlanError: the topology or the statistics are for other ranks or tables.
    """
    check_batch(plan)
    if not copy_gbps > 0:
        raise InvalidInputError("cannot price another plan", "copy_gbps", copy_gbps, "> 0",
                                "state the rate at which a rank copies rows")
    tables = [t.table for t in plan.tables]
    new = make_plan(tables, stats, topology, objective=plan.objective, batch_size=plan.batch_size,
                    **{"message_bits": plan.message_bits, **dict(options or {})})
    found = {} if old_stats is None else {
        t.name: distance(old_stats.tables[t.name], stats.tables[t.name]) for t in tables
        if t.name in old_stats.tables and t.name in stats.tables}
    copied, moved = _copied_bytes(new), moves(plan, new, topology.domain_of())
    return Replanning(
        new, found, step_us(plan, stats, topology), step_us(new, stats, topology),
        round(moved.owner_bytes), round(moved.between.sum()), copied,
        moved.transfer_us(topology) + copied / (copy_gbps * 1e3))


def check_batch(plan: Plan) -> None:
    """Raise InvalidInputError for a plan that does not state its batch size."""
    if plan.batch_size < 1:
        raise InvalidInputError("cannot price another plan", "plan.batch_size", plan.batch_size,
                                ">= 1, the samples per rank and step that both are priced for",
                                "state it in the plan, or use one that oper plan has made")


def step_us(plan: Plan, stats: AccessStats, topology: Topology) -> float:
    """Modelled step of a plan on statistics other than those of its hotness order.

    Raises:
        InvalidInputError: the plan does not state its batch size.
    """
    check_batch(plan)
    relabelled, entries = {}, []
    for entry in plan.tables:
        found = stats.tables.get(entry.table.name)
        if found is not None:
            relabelled[entry.table.name] = _by_position(found, entry, plan.world_size)
        entries.append(replace(entry, head_ids=np.zeros(0, np.int64)))
    moved = AccessStats(stats.num_samples, relabelled, stats.source)
    stated = make_problem([t.table for t in plan.tables], moved, topology,
                          objective=plan.objective, batch_size=plan.batch_size)
    problem = replace(stated, message_bits=plan.message_bits)
    return evaluate(replace(plan, tables=tuple(entries)), problem).step_us


def _by_position(stats: TableStats, entry: TablePlan, world_size: int) -> TableStats:
    """The statistics with every row named by its position in the plan's order."""
    directory = TableDirectory(entry, world_size)
    ids = directory.position_of(stats.head_ids)
    order = hotness_order(ids, stats.head_counts)
    return replace(stats, head_ids=ids[order], head_counts=stats.head_counts[order], buckets=())


def _copied_bytes(plan: Plan) -> int:
    """Bytes of rows, replicas and states of the rank that holds most."""
    held = np.zeros(plan.world_size, np.int64)
    for entry in plan.tables:
        for piece in range(len(entry.pieces)):
            d = TableDirectory(entry, plan.world_size, piece)
            state = OPTIMIZERS[d.table.optimizer].state_bytes(d.dim)
            held += d.num_slots * (d.row_bytes + state)
            held += d.num_replica_rows * d.row_bytes
    return int(held.max())
