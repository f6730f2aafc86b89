"""Choice of the number of replica groups (`oper.shmem.replica_groups`).

For every number of groups G that divides the number of hosts, the planner makes a plan for the
ranks of one group. A synchronization takes s microseconds after every K updates, of which h are not
hidden by the d updates that are made meanwhile (`synchronize_delay`). With the plan's step time p,

    modelled step time = ((K - d) p + max(d p + h, s)) / K,

where h is the time on the links of hosts and processors, which these updates use as well; uplinks
between racks are hidden. With the plan's certified bound b, and the least time of a synchronization
for s, ((K - d) b + max(d b, s)) / K is a lower bound. With d = 0 these are p + s / K and b + s / K.

Numbers take the bits that are given for messages between groups. A row takes at least as many
bytes in column pieces as it does whole, so that the bound holds with fewer bits, too.

If groups differ in memory or bandwidth, p and b are those of a group of the slowest hosts, see
`oper.topology.Topology.divided`.

The G with the least modelled step time is chosen. The smallest of the lower bounds holds for all G
that were compared.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from oper.errors import InvalidInputError, PlanInfeasibleError, require
from oper.messages import number_bytes
from oper.plan import Plan, check_synchronization
from oper.search.cost.load_vector import owned_features, row_bytes
from oper.search.cost.model import is_ordered
from oper.search.problem.machine import TERMS, Term, make_machine
from oper.search.problem.statement import TOUCHED_ALL, TableProblem, make_table
from oper.stats import AccessStats
from oper.tables import OPTIMIZERS
from oper.topology import Topology

_SLOT_BYTES = 4  # size of a row's slot in a synchronization


def plan_groups(topology: Topology, interval: tuple[int, int], bits: int,
                stats: AccessStats | None, make: Callable[[Topology, float], Plan]) -> Plan:
    """Return a plan for the ranks of one group, for the best number of groups.

    Args:
        topology: all hosts.
        interval: number of updates between two synchronizations, and number of updates during which
            rows are sent, see `oper.shard`.
        bits: bits per number in messages between groups, see `oper.shard`.
        stats: access statistics; None = all rows of a table are equally hot.
        make: returns a training plan for (a topology, the share of the time that it may take).

    Returns:
        The plan, with `replica_groups`, `synchronize_every`, `synchronize_delay` and
        `synchronize_bits`. Its `step_us` and `lower_bound_us` exclude synchronization. The note
        ``replica_groups`` lists ``groups`` (their number), ``step_us`` and ``bound_us`` with
        synchronization, and ``synchronization_us``. A warning names numbers of groups that were
        not compared, because groups would have other shapes or constraints do not apply to them.

    Raises:
        InvalidInputError: `interval` or `bits` is not valid, or `make` raises this for one group.
        PlanInfeasibleError: no plan fits, whatever the number of groups.
    """
    every, delay = interval
    what = "cannot plan replica groups"
    require(what, "pass an integer >= 1",
            ("synchronize_every", every, type(every) is int and every >= 1, ">= 1"))
    check_synchronization(what, max(2, topology.num_hosts), every, delay, bits)  # 1 host: not used
    plans: dict[int, Plan] = {}
    compared: list[dict[str, Any]] = []
    infeasible: PlanInfeasibleError | None = None
    left_out: list[str] = []
    counts = [k for k in range(1, topology.num_hosts + 1) if topology.num_hosts % k == 0]
    for count in counts:
        try:
            plan = make(topology.divided(count), 1 / len(counts))
        except PlanInfeasibleError as error:
            infeasible = infeasible or error
            continue
        except InvalidInputError as error:
            if count == 1:
                raise
            # Groups of other shapes, or constraints that name ranks outside a group.
            left_out.append(f"{count} groups: {error}")
            continue
        took_us, shared_us, least_us = synchronization_us(plan, topology, (count, every, bits),
                                                          stats)
        plans[count] = plan
        compared.append({
            "groups": count, "synchronization_us": took_us,
            "step_us": _with_synchronization(plan.step_us, took_us, shared_us, interval),
            "bound_us": plan.lower_bound_us and _with_synchronization(
                plan.lower_bound_us, least_us, 0.0, interval)})
    if not compared:
        assert infeasible is not None
        raise infeasible
    if left_out:
        warnings.warn(f"the plan is not compared with {'; '.join(left_out)}", stacklevel=3)
    best = min(compared, key=lambda x: x["step_us"])["groups"]
    plan = plans[best]
    return replace(plan, topology=topology.name, replica_groups=best,
                   synchronize_every=every if best > 1 else 1,
                   synchronize_delay=delay if best > 1 else 0,
                   synchronize_bits=bits if best > 1 else 32,
                   notes={**plan.notes, "replica_groups": compared})


def _with_synchronization(step_us: float, took_us: float, shared_us: float,
                          interval: tuple[int, int]) -> float:
    """Return the mean time of a step with synchronization, see the module.

    Args:
        step_us: time of a step without synchronization.
        took_us, shared_us: time of a synchronization, and the part of it that is not hidden.
        interval: see `plan_groups`.
    """
    every, delay = interval
    hidden = delay * step_us
    return step_us + (max(hidden + shared_us, took_us) - hidden) / every


def synchronization_us(plan: Plan, topology: Topology, groups: tuple[int, int, int],
                       stats: AccessStats | None) -> tuple[float, float, float]:
    """Return the modelled microseconds of a synchronization with this plan, the part of them during
    which links of hosts or processors are busy, and the least time of a synchronization with any
    plan.

    A rank sends to each counterpart the expected number of distinct rows that it owns and that its
    group updates between two synchronizations, and receives as many; with ``every = 1``, their
    gradients. The time is that of the slowest link, the processor time per byte, and the fixed cost
    of the exchanges. With one group, all times are 0.

    Args:
        plan: the plan of a group.
        topology: all hosts.
        groups: ``(count, every, bits)``: number of groups, of updates between two
            synchronizations, and of bits per number in messages between groups.
        stats: access statistics; None = all rows of a table are equally hot.
    """
    count, every, bits = groups
    if count == 1:
        return 0.0, 0.0, 0.0
    size = plan.world_size
    sent, total = np.zeros(size), 0.0
    for entry in plan.tables:
        t = make_table(entry.table, stats, _samples(plan, entry.table.optimizer, count, every),
                       size)
        ordered = is_ordered(t, entry)
        total += float(t.total[TOUCHED_ALL]) * _bytes(t, t.spec.dim, every, bits)
        for piece in entry.pieces:
            width = _bytes(t, piece.stop - piece.start, every, bits)
            for tier in piece.tiers:
                sent += owned_features(t, tier, size, ordered)[TOUCHED_ALL] * width
    within_racks = replace(topology, racks=())
    return (_time_us(sent, topology, count, every),
            _time_us(sent, within_racks, count, every),
            _time_us(np.full(size, total / size), topology, count, every, True))


def _samples(plan: Plan, optimizer: str, count: int, every: int) -> int:
    """Return the number of samples per rank of a group whose distinct rows a synchronization sends:
    those of all groups if rows are averaged over all groups, see `Synchronizer.synchronize`."""
    union = count if every > 1 and OPTIMIZERS[optimizer].is_proportional else 1
    return plan.batch_size * every * union


def _bytes(t: TableProblem, width: int, every: int, bits: int) -> float:
    """Return the bytes of `width` columns of one row, and of its slot, in a synchronization."""
    weights, gradient, state = row_bytes(t, width)
    if every == 1:
        return _SLOT_BYTES + (gradient if bits == 32 else number_bytes(bits, width))
    if t.spec.dtype == "float32" and bits < 32:
        weights = number_bytes(bits, width)
    return _SLOT_BYTES + weights + state


def _time_us(sent: np.ndarray, topology: Topology, count: int, every: int,
             is_bound: bool = False) -> float:
    """Return the microseconds of a synchronization in which the ranks of a group send `sent` bytes,
    float64 [W / count], to each of their counterparts.

    With `is_bound`, return the least time over all distributions of the same bytes among the ranks:
    the slowest link takes at least as long as if bytes were divided in proportion to bandwidth.
    """
    machine = make_machine(topology)
    units = np.zeros((len(TERMS), machine.world_size))
    units[Term.CROSS_OUT] = np.tile(sent, count) * (count - 1)
    links = [Term.CROSS_OUT]
    if machine.has_racks:
        racks = machine.rack.reshape(count, -1)  # by group and rank
        outside = (racks[:, None] != racks).sum(axis=1)  # counterparts in other racks
        if is_bound:  # all bytes on a rank with which the racks together send least
            least = np.arange(sent.size) == outside.sum(axis=0).argmin()
            sent = np.where(least, sent.sum(), 0.0)
        units[Term.RACK_OUT] = (sent * outside).ravel()
        links.append(Term.RACK_OUT)
    if is_bound:
        slowest = max(units[x].sum() / (1 / machine.seconds_per_unit[x]).sum() for x in links)
    else:
        slowest = machine.seconds(units)[links].max()
    # One `phase_us` is two exchanges. Gradients: counts and data, and an update within the group
    # that is a separate phase. Rows: counts, slots and data.
    phases = 2.0 if every == 1 else 1.5
    costs = topology.costs
    return (float(slowest) * 1e6 + 2 * float(units[Term.CROSS_OUT].max()) * costs.wire_ns * 1e-3
            + phases * costs.phase_us)
