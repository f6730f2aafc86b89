"""The number of replica groups, planned with the modelled cost of their synchronization.

For every number of groups that divides the hosts, the planner plans one group's ranks, and adds the
time of a synchronization divided by the number of updates between two. Each group's plan has a
certified bound; with a lower bound on its synchronization it holds for that number of groups, and
the least of these sums holds for all numbers that were compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from oper.errors import InvalidInputError, PlanInfeasibleError, require
from oper.plan import Plan
from oper.search.cost.model import is_ordered
from oper.search.cost.tally import owned_features, row_bytes
from oper.search.problem.statement import TOUCHED_ALL, TableProblem, make_table
from oper.stats import AccessStats
from oper.tables import OPTIMIZERS
from oper.topology import Topology

_SLOT_BYTES = 4


def plan_groups(topology: Topology, every: int, stats: AccessStats | None,
                make: Callable[[Topology], Plan]) -> Plan:
    """Return the plan of one group for the number of groups with the shortest modelled step.

    Args:
        topology: all hosts.
        every: number of updates between two synchronizations.
        stats: access statistics; None = equally hot rows.
        make: plans training on a topology.

    Returns:
        The plan, for the ranks of one group, with `replica_groups` and `synchronize_every`. Its
        step and bound are those of a group without synchronization; the note ``replica_groups``
        has both sums for every number of groups.

    Raises:
        InvalidInputError: `every` is below 1.
        PlanInfeasibleError: no plan fits, even with one group.
    """
    require("cannot plan replica groups", "pass an integer >= 1",
            ("synchronize_every", every, type(every) is int and every >= 1, ">= 1"))
    plans: dict[int, Plan] = {}
    compared: list[dict[str, Any]] = []
    infeasible: PlanInfeasibleError | None = None
    for count in (k for k in range(1, topology.num_hosts + 1) if topology.num_hosts % k == 0):
        try:
            plan = make(topology.divided(count))
        except PlanInfeasibleError as error:
            infeasible = infeasible or error
            continue
        except InvalidInputError:
            if count == 1:
                raise
            continue  # groups would not be equal
        took_us, least_us = synchronization_us(plan, topology, count, every, stats)
        plans[count] = plan
        compared.append({
            "groups": count, "step_us": plan.step_us + took_us / every,
            "synchronization_us": took_us,
            "bound_us": plan.lower_bound_us and plan.lower_bound_us + least_us / every})
    if not compared:
        assert infeasible is not None
        raise infeasible
    best = min(compared, key=lambda x: x["step_us"])["groups"]
    plan = plans[best]
    return replace(plan, topology=topology.name, replica_groups=best,
                   synchronize_every=every if best > 1 else 1,
                   notes={**plan.notes, "replica_groups": compared})


def synchronization_us(plan: Plan, topology: Topology, count: int, every: int,
                       stats: AccessStats | None) -> tuple[float, float]:
    """Return the modelled time of a synchronization, and a lower bound over all plans of a group.

    A rank sends the expected distinct rows that it owns and that its group updates between two
    synchronizations to each of its counterparts, and receives as many; the slowest link counts,
    then the processor time per byte, and the exchanges. With ``every = 1`` gradients are sent.

    Args:
        plan: the plan of a group.
        topology: all hosts.
        count: number of groups.
        every: number of updates between two synchronizations.
        stats: access statistics; None = equally hot rows.
    """
    if count == 1:
        return 0.0, 0.0
    size = plan.world_size
    sent, total = np.zeros(size), 0.0
    for entry in plan.tables:
        t = make_table(entry.table, stats, _samples(plan, entry.table.optimizer, count, every),
                       size)
        ordered = is_ordered(t, entry)
        total += float(t.total[TOUCHED_ALL]) * _bytes(t, t.spec.dim, every)
        for piece in entry.pieces:
            width = _bytes(t, piece.stop - piece.start, every)
            for tier in piece.tiers:
                sent += owned_features(t, tier, size, ordered)[TOUCHED_ALL] * width
    return (_time_us(sent, topology, count, every),
            _time_us(np.full(size, total / size), topology, count, every, True))


def _samples(plan: Plan, optimizer: str, count: int, every: int) -> int:
    """Return the samples per rank of a group whose distinct rows a synchronization sends."""
    union = count if every > 1 and OPTIMIZERS[optimizer].is_proportional else 1
    return plan.batch_size * every * union


def _bytes(t: TableProblem, width: int, every: int) -> float:
    """Return the bytes of `width` columns of a row in a synchronization, with its slot."""
    weights, gradient, state = row_bytes(t, width)
    return _SLOT_BYTES + (gradient if every == 1 else weights + state)


def _time_us(sent: np.ndarray, topology: Topology, count: int, every: int,
             is_bound: bool = False) -> float:
    """Return the time of a synchronization in which each rank of a group sends `sent` bytes,
    float64 [W / count], to each counterpart.

    With `is_bound`, the least time for any distribution of the same bytes among the ranks: no
    distribution loads the slowest link less than the mean link.
    """
    everyone = np.tile(sent, count) * (count - 1)
    links: dict[Any, list[float]] = {}  # [bytes, GB/s] by link
    for domain in topology.domains:
        for rank in domain.ranks:
            link = links.setdefault(
                ("host", domain.host) if topology.hosts_share_links else ("rank", rank), [0.0, 0.0])
            link[0] += everyone[rank]
            link[1] += domain.cross_gbps
    uplinks = [list(x) for x in _uplinks(sent, topology, count)]
    slowest = 0.0
    for group in (list(links.values()), uplinks):
        if group and is_bound:
            slowest = max(slowest, sum(x[0] for x in group) / sum(x[1] for x in group))
        elif group:
            slowest = max(slowest, *(b / gbps for b, gbps in group))
    # Gradients take a header and the data, and another phase within the group; rows take one
    # exchange more. One `phase_us` is two exchanges.
    phases = 2.0 if every == 1 else 1.5
    costs = topology.costs
    return (slowest * 1e-3 + 2 * float(everyone.max()) * costs.wire_ns * 1e-3
            + phases * costs.phase_us)


def _uplinks(sent: np.ndarray, topology: Topology, count: int) -> list[tuple[float, float]]:
    """Return the bytes that each rack sends to other racks, and its uplink's bandwidth."""
    rack_of: Mapping[int, int] = {h: k for k, rack in enumerate(topology.racks)
                                  for h in rack.hosts}
    if not rack_of:
        return []
    host = [d.host for d in topology.domains for _ in d.ranks]
    racks = np.array([rack_of[h] for h in host]).reshape(count, -1)  # by group and rank
    leaves = np.zeros(len(topology.racks))
    for group in racks:
        np.add.at(leaves, group, sent * (racks != group).sum(axis=0))
    return [(float(b), rack.uplink_gbps) for b, rack in zip(leaves, topology.racks, strict=True)]
