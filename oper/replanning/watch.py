"""Re-planning during training: detects changed links, and migrates once this pays.

How long a link stays slow is unknown. Training with the old plan costs a little in every step;
migration has a large cost once. This is the ski rental problem, and the rule is the classic one:
migrate when the time lost with the old plan, compared with the new one since the change, equals the
cost of the migration. The total is then at most twice the cost of the best decision in hindsight.
By the same rule, links are measured once the time lost in slower steps equals the cost of a
measurement.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from oper.errors import OperError, require, require_fields
from oper.messages import MessageBits
from oper.plan import Plan
from oper.ranges import Positive, PositiveAmount, Rule, rules_of
from oper.replanning.decision import Replanning, check_batch, replan
from oper.sharding import migrate, tables_of
from oper.stats import AccessStats
from oper.topology import Topology

if TYPE_CHECKING:
    from torch import nn

    from oper.shmem.group.groups import Group

_WHAT = "cannot plan again while training"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, eq=False)
class Event:
    """Something that a `Replanner` has detected or done.

    Attributes:
        step: number of training steps so far.
        kind: ``"same links"`` (steps changed, links did not), ``"no better plan"`` (links changed),
            ``"better plan"`` (links changed; migration follows if this pays) or ``"moved"`` (with
            `WatchOptions.bytes_per_step`, the migration has begun and continues in later steps).
        step_s: seconds per step in the last window.
        link_gbps: last measured GB/s of each host, in ascending order of hosts.
        seconds: time that `Replanner.step` spent on the event, on the slowest rank.
        replanning: the better plan with its costs and savings; None if there is none.
    """

    step: int
    kind: str
    step_s: float
    link_gbps: tuple[float, ...]
    seconds: float
    replanning: Replanning | None = None


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """Options of a `Replanner`.

    Attributes:
        window: number of steps whose median duration is compared with the usual one.
        tolerance: relative difference of steps, and of links, above which they count as changed.
        bytes_per_step: as for `oper.migrate`; None = move everything in one call.
        copy_gbps: rate at which a rank copies rows into its new arena, in GB/s.

    Raises:
        InvalidInputError: a value is out of range.
    """

    window: Positive = 16
    tolerance: Annotated[float, Rule(lambda x: 0 < x < 1, "between 0 and 1")] = 0.1
    bytes_per_step: Positive | None = None
    copy_gbps: PositiveAmount = 1.0

    def __post_init__(self) -> None:
        require_fields(self, _WHAT, "pass a value in this range, or omit it for the default",
                       *rules_of(self))


class Replanner:
    """Watches the steps of a sharded model, and migrates its tables once a new plan pays.

    Creation and `step` are collective. Steps may also be slowed down by other programs; this causes
    no migration, because links are measured first.

    Args:
        model: the result of `oper.shard`, or a model that contains it; on several hosts.
        stats: access statistics of its tables; rank 0's are used.
        topology: the machine at the time when the current plan was made.
        options: how steps are compared and rows are moved.
        plan_options: keyword arguments of `oper.make_plan`.
        measure_links: returns GB/s of each host in ascending order of hosts; collective, and rank
            0's result is used. Default: all ranks exchange bytes for a few seconds.

    Attributes:
        topology: the machine that the current plan is for.
        events: the events so far, in order.

    Raises:
        InvalidInputError: there is only one host, the topology has another number of ranks, the
            tables use several process groups or are in replica groups, or the plan does not state
            its batch size.

    Example::

        watch = oper.Replanner(model, stats, topology)
        for batch in batches:
            train(model, batch)
            watch.step()
    """

    def __init__(self, model: nn.Module, stats: AccessStats, topology: Topology,
                 options: WatchOptions = WatchOptions(), *,
                 plan_options: Mapping[str, Any] | None = None,
                 measure_links: Callable[[], Sequence[float]] | None = None) -> None:
        from oper.shmem.group.desync import register_of

        self._tables = tables_of(model, "nothing to plan again")
        for t in self._tables:
            if t.replicas is not None:
                t.replicas.refuse(_WHAT, "make a plan for one group, and call oper.migrate")
        self._group: Group = self._tables[0].group
        _check(topology, self._group.world_size)
        require(_WHAT, "create a Replanner for each part of the model that uses one group", (
            "process groups of the tables", [t.group.world_size for t in self._tables],
            len({register_of(t.group) for t in self._tables}) == 1, "one for all tables"))
        self._model, self._stats = model, stats
        self._options, self._plan_options = options, plan_options
        check_batch(self._plan())
        self._measure_links = measure_links or self._probe
        self.topology = topology
        self.events: list[Event] = []
        self._num_steps = 0
        self._times: list[float] = []  # durations of the steps of this window, seconds
        self._last: float | None = None  # end of the previous step
        self._is_settling = True  # the next window is not compared, because its caches are cold
        self._usual_s = 0.0  # usual step time with this plan and topology; 0 = not yet known
        self._measuring_s = 0.0  # duration of the last measurement of links
        self._changed_s = 0.0  # step time since it changed; 0 = it has not changed
        self._num_changed = 0  # number of steps since then
        self._better: tuple[Replanning, Topology] | None = None

    def step(self) -> Event | None:
        """Compare step times, and measure, plan or migrate if that pays; call it on all ranks after
        every training step.

        Returns:
            The event that this call has caused, or None; the same on all ranks.

        Raises:
            PlanError: no plan fits the changed links; the old plan stays in use, and watching
                continues.
            OperError: there is not enough memory for the arenas of both plans, or planning failed;
                the old plan stays in use as well.
            InvalidInputError: `measure_links` did not return a positive number for every host.
        """
        now = time.perf_counter()
        if self._last is not None:
            self._num_steps += 1
            self._times.append(now - self._last)
        event = None
        try:
            if len(self._times) >= self._options.window:
                step_s = max(self._group.all_gather(statistics.median(self._times)))
                self._times = []
                event = self._weigh(step_s)
                if event is not None:
                    self.events.append(event)
        finally:
            self._last = time.perf_counter()  # excludes the time of this call
        return event

    def _weigh(self, step_s: float) -> Event | None:
        """Decide what to do about a window whose median step took `step_s` seconds."""
        if any(tables.migration is not None for tables in self._tables):
            return None
        if self._is_settling or self._usual_s == 0:
            self._usual_s = 0.0 if self._is_settling else step_s
            self._is_settling = False
            return None
        if self._is_like(step_s, self._usual_s):
            self._forget()
            return None
        if self._changed_s and not self._is_like(step_s, self._changed_s):
            self._forget()  # changed again, so that the last measurement is outdated
        self._changed_s = self._changed_s or step_s
        self._num_changed += self._options.window
        if self._better is not None:
            found, topology = self._better
            saved_us = (found.old_step_us - found.new_step_us) * self._num_changed
            return self._move(found, topology, step_s) if saved_us >= found.copy_us else None
        if self._num_changed * abs(step_s - self._usual_s) < self._measuring_s:
            return None
        return self._check_links(step_s)

    def _is_like(self, one: float, other: float) -> bool:
        return max(one, other) <= (1 + self._options.tolerance) * min(one, other)

    def _forget(self) -> None:
        self._changed_s, self._num_changed, self._better = 0.0, 0, None

    def _check_links(self, step_s: float) -> Event:
        """Measure the links, and make a new plan if they have changed."""
        links, self._measuring_s = self._timed(self._measured)
        known = _link_gbps(self.topology)
        if all(self._is_like(a, b) for a, b in zip(links, known, strict=True)):
            self._usual_s = step_s
            self._forget()
            return self._event("same links", step_s, links, self._measuring_s)
        topology = _with_links(self.topology, links)
        try:
            found, seconds = self._timed(lambda: self._planned(topology))
        except OperError:
            self._keep_plan(topology, step_s)
            raise
        if found.break_even_steps == float("inf"):
            self._keep_plan(topology, step_s)
            return self._event("no better plan", step_s, links, seconds)
        self._better = found, topology
        return self._event("better plan", step_s, links, seconds, found)

    def _keep_plan(self, topology: Topology, step_s: float) -> None:
        """Keep the current plan on changed links, with `step_s` as the new usual step time."""
        self.topology, self._usual_s = topology, step_s
        self._forget()

    def _measured(self) -> tuple[float, ...]:
        """Measured GB/s of each host, the same on all ranks."""
        links = self._group.all_gather(tuple(self._measure_links()))[0]
        num_hosts = self.topology.num_hosts
        require(_WHAT, "return one positive number per host from measure_links", (
            "measured links", links,
            len(links) == num_hosts and all(0 < x < float("inf") for x in links),
            f"{num_hosts} numbers > 0, GB/s of each host"))
        return links

    def _planned(self, topology: Topology) -> Replanning:
        """Rank 0's comparison of a new plan for a topology with the current plan. Collective."""
        made: Replanning | OperError | None = None
        if self._group.rank == 0:
            try:
                made = replan(self._plan(), self._stats, topology, options=self._plan_options,
                              copy_gbps=self._options.copy_gbps)
            except OperError as error:
                made = error
            except Exception as error:  # must reach the other ranks, which wait for this one
                made = OperError(_WHAT, "error", f"{type(error).__name__}: {error}", "a plan",
                                 "check plan_options and the statistics")
        found = self._group.all_gather(made)[0]
        if isinstance(found, OperError):
            raise found
        return found

    def _plan(self) -> Plan:
        """A plan with the tables of all collections of the model."""
        entries = {t.table.name: t for tables in self._tables for t in tables.plan.tables}
        # The plan of each collection has the bits of its own tables only.
        bits = {name: tables.plan.message_bits.of(name) for tables in self._tables
                for name in tables.specs}
        same, *others = set(bits.values())
        return replace(self._tables[0].plan, tables=tuple(entries.values()),
                       message_bits=MessageBits.by_table(bits) if others else same)

    def _move(self, found: Replanning, topology: Topology, step_s: float) -> Event:
        try:
            _, seconds = self._timed(lambda: migrate(self._model, found.plan,
                                                    self._options.bytes_per_step))
        except OperError:
            self._keep_plan(topology, step_s)
            raise
        self.topology, self._usual_s, self._is_settling = topology, 0.0, True
        self._forget()
        return self._event("moved", step_s, _link_gbps(topology), seconds, found)

    def _event(self, kind: str, step_s: float, links: Sequence[float], seconds: float,
               found: Replanning | None = None) -> Event:
        return Event(self._num_steps, kind, step_s, tuple(links), seconds, found)

    def _timed(self, body: Callable[[], _T]) -> tuple[_T, float]:
        """Return the result of `body`, and its duration in seconds on the slowest rank. Collective.
        """
        begin = time.perf_counter()
        found = body()
        return found, max(self._group.all_gather(time.perf_counter() - begin))

    def _probe(self) -> list[float]:
        from oper.shmem.group.links import link_gbps

        hosts = _hosts(self.topology)
        host_of = [hosts.index(d.host) for d in self.topology.domains for _ in d.ranks]
        racks = {h: k for k, rack in enumerate(self.topology.racks) for h in rack.hosts}
        with contextlib.ExitStack() as stack:  # other threads' lookups use the same connections
            for tables in self._tables:
                stack.enter_context(tables.turns.lock)
            return link_gbps(self._group, host_of, [racks.get(h, 0) for h in hosts])


def _check(topology: Topology, world_size: int) -> None:
    require(_WHAT, "pass the topology that the model was sharded for",
            ("ranks of the topology", topology.world_size, topology.world_size == world_size,
             f"{world_size}, as many as the model has"),
            ("hosts of the topology", topology.num_hosts, topology.num_hosts > 1,
             ">= 2, because the links between hosts are watched"))


def _hosts(topology: Topology) -> list[int]:
    """The host numbers, ascending."""
    return sorted({d.host for d in topology.domains})


def _link_gbps(topology: Topology) -> tuple[float, ...]:
    """GB/s of each host's link, in ascending order of hosts."""
    return tuple(sum(d.cross_gbps * len(d.ranks) for d in topology.domains if d.host == host)
                 for host in _hosts(topology))


def _with_links(topology: Topology, gbps: Sequence[float]) -> Topology:
    """The topology with other GB/s per host; a host's ranks share it in the same ratio as before.
    """
    factor = {host: new / old for host, new, old in zip(
        _hosts(topology), gbps, _link_gbps(topology), strict=True)}
    return replace(topology, domains=tuple(
        replace(d, cross_gbps=d.cross_gbps * factor[d.host]) for d in topology.domains))
