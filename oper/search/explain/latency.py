"""Plans for a latency bound: replicas and batching that meet it with the least memory.

The queueing model: samples arrive as a Poisson process of the given rate and are split at random
over the ranks, each of which serves its own queue. A rank starts a batch as soon as it is free and
either `max_batch` samples wait or the oldest has waited `max_wait_ms`. It takes up to `max_batch`
samples in order, and is busy for the modelled time of a lookup of that many samples plus the
declared dense compute. This is a queue with Poisson arrivals and bulk service with a timer, whose
duration is a deterministic function of the batch size (M/D/1 for batches of one). Its percentiles
have no closed form; they are simulated batch by batch with fixed random numbers. All times are
modelled; they do not include the operating system, the network or a server. One queue shared by all
ranks would have a slightly lower latency than the random split.
"""

from __future__ import annotations

import math
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import numpy as np

from oper.errors import PlanInfeasibleError, require_fields
from oper.messages import EXACT, MessageBits
from oper.plan import Plan
from oper.ranges import PositiveAmount, Rule, rules_of, within
from oper.search.cost.model import evaluate
from oper.search.planner import plan_problem
from oper.search.problem.constraints import Constraints
from oper.search.problem.machine import make_machine
from oper.search.problem.statement import Problem, make_problem
from oper.stats import AccessStats
from oper.tables import TableSpec, format_bytes
from oper.topology import Topology

_NUM_SAMPLES = 60_000  # samples simulated; the 99th percentile then varies by a few per cent
_WARM_UP = 0.1  # share of the samples that is left out, because the queue started empty
_WAITS = (0.0, 0.05, 0.1, 0.2, 0.4)  # values of max_wait_ms that are tried, relative to the bound
_STEPS = 5  # steps of the bisection over memory; the last interval is 1/32 of the replicas
_TRIES = 5  # bounds tried before an error names one that is met
_QUANTILE = 0.99


@dataclass(frozen=True, slots=True)
class LatencyGoal:
    """A request rate and a latency bound.

    Attributes:
        request_rate: samples per second, over all ranks.
        bound_ms: upper limit of the 99th percentile of the time from arrival to answer.
        dense_us: dense compute of a batch, microseconds: (fixed, per sample).
        max_batch: largest batch to consider, samples.
    """

    request_rate: Annotated[float, Rule(lambda x: 1e-6 <= x <= 1e12, "1e-6..1e12 per second")]
    bound_ms: PositiveAmount
    dense_us: tuple[float, float] = (0.0, 0.0)
    max_batch: Annotated[int, within(1, 1 << 16)] = 1024

    def __post_init__(self) -> None:
        require_fields(
            self, "invalid latency goal", "pass the request rate in samples per second, the bound "
            "in milliseconds, and dense compute in microseconds as (fixed, per sample)",
            *rules_of(self),
            ("dense_us", len(self.dense_us) == 2 and all(0 <= x < math.inf for x in self.dense_us),
             "two numbers >= 0: fixed, per sample"))


@dataclass(frozen=True, slots=True)
class Serving:
    """Batching parameters for a plan, and its modelled performance.

    Attributes:
        max_batch, max_wait_ms: a batch starts when `max_batch` samples wait or the oldest has
            waited `max_wait_ms`.
        p99_ms: modelled 99th percentile of the latency.
        mean_batch: mean number of samples of a batch.
        utilisation: share of the time that a rank is busy.
        memory_bytes: bytes of tables and buffers in all memory domains.
        replica_share: bytes of replicas beyond the first copy, per byte of the tables.
    """

    max_batch: int
    max_wait_ms: float
    p99_ms: float
    mean_batch: float
    utilisation: float
    memory_bytes: int = 0
    replica_share: float = 0.0


def plan_latency(tables: Iterable[TableSpec], stats: AccessStats | None, topology: Topology,
                 goal: LatencyGoal, constraints: Constraints | Mapping[str, Any] | None = None,
                 message_bits: MessageBits = EXACT) -> tuple[Plan, Serving]:
    """Return the inference plan with the least memory whose modelled latency meets the bound.

    Args:
        tables, stats, topology: as for `make_plan`; every rank serves requests.
        goal: request rate and latency bound.
        constraints, message_bits: as for `make_plan`.

    Returns:
        The plan and its batching parameters, which the plan's notes also have under ``"latency"``.

    Raises:
        PlanInfeasibleError: the bound cannot be met with the given memory and rate; the message
            names a bound that is met at this rate and the largest rate possible with this bound.
    """
    specs = list(tables)

    def state(batch_size: int) -> Problem:
        stated = make_problem(specs, stats, topology, objective="inference",
                              batch_size=batch_size, constraints=constraints)
        return replace(stated, message_bits=message_bits)

    made: dict[int, tuple[Problem, Plan]] = {}

    def fastest(goal: LatencyGoal) -> tuple[Problem, Plan]:
        """The problem and the plan for the number of samples that a rank receives in half the
        bound, without a limit of memory."""
        likely = goal.request_rate / topology.world_size * goal.bound_ms / 2e3
        size = max(1, int(min(goal.max_batch, likely)))
        if size not in made:
            problem = state(size)
            made[size] = problem, plan_problem(problem)
        return made[size]

    problem, most = fastest(goal)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # missing statistics: warned of above
        powers = (1 << k for k in range(goal.max_batch.bit_length()))
        problems = {n: state(n) for n in sorted({*powers, goal.max_batch})}
        best = _serving(most, problems, goal)
        if best is None or best.p99_ms > goal.bound_ms:
            raise _infeasible(most, problems, goal, _attained_ms(fastest, problems, goal, best))
    high = float(evaluate(most, problem).domain_bytes.max())
    low = sum(t.spec.num_rows * t.spec.row_bytes for t in problem.tables) / len(topology.domains)
    plan, found = most, best
    for step in range(_STEPS if len(topology.domains) > 1 and low < high else 0):
        cap = low if step == 0 else (low + high) / 2
        lean = _within(problem, cap)
        serving = None if lean is None else _serving(lean, problems, goal)
        if lean is not None and serving is not None and serving.p99_ms <= goal.bound_ms:
            plan, found, high = lean, serving, cap
            if step == 0:
                break
        else:
            low = cap
    notes = {**plan.notes, "latency": {
        **asdict(found), "request_rate": goal.request_rate, "bound_ms": goal.bound_ms,
        "dense_us": list(goal.dense_us), "model": "Poisson arrivals, one queue per rank, "
        "deterministic bulk service with a timer; modelled"}}
    return replace(plan, notes=notes), found


def _within(problem: Problem, domain_bytes: float) -> Plan | None:
    """A plan in which no domain holds more than `domain_bytes`; None if no plan fits."""
    m = problem.machine  # its capacities contain the limits of the constraints
    limits = np.minimum(m.capacity_bytes, domain_bytes).clip(0.0)[m.domain] / m.num_domain
    each = tuple(limits.astype(np.int64).tolist())
    held = replace(problem.constraints, memory_bytes=each[0] if len(set(each)) == 1 else each)
    machine = make_machine(problem.topology, held.reserve_bytes, held.memory_bytes)
    try:
        # Host memory must not replace device memory here: the aim is less memory in total.
        return plan_problem(replace(problem, machine=machine, constraints=held,
                                    fallback=frozenset()))
    except PlanInfeasibleError:
        return None


def service_us(plan: Plan, problems: Mapping[int, Problem], goal: LatencyGoal) -> np.ndarray:
    """Modelled microseconds of a batch by its number of samples, float64 [max_batch + 1]; element 0
    is unused.

    Args:
        problems: the problem for some batch sizes; times for sizes in between are interpolated.
        goal: gives the dense compute and the largest batch.
    """
    sizes = sorted(problems)
    lookup = [evaluate(plan, problems[n]).step_us for n in sizes]
    at = np.arange(goal.max_batch + 1)
    fixed, per_sample = goal.dense_us
    return np.asarray(np.interp(at, sizes, lookup) + fixed + per_sample * at)


def _serving(plan: Plan, problems: Mapping[int, Problem], goal: LatencyGoal) -> Serving | None:
    """The batching with the lowest 99th percentile; None if no batching sustains the rate."""
    largest = problems[max(problems)]
    service = service_us(plan, problems, goal)
    rate = goal.request_rate / largest.topology.world_size
    options: list[Serving] = []
    for size in sorted(problems):
        # Only if the rank is busy for less than all the time does the queue stay finite.
        if rate * service[size] * 1e-6 / size < 1:
            options += [simulate_queue(service, rate, size, share * goal.bound_ms)
                        for share in _WAITS if size > 1 or share == 0]
    if not options:
        return None
    found = min(options, key=lambda s: (s.p99_ms, s.max_batch, s.max_wait_ms))
    # Buffers grow with the batch size, so memory is evaluated for the chosen batch.
    need = float(evaluate(plan, problems[found.max_batch]).domain_bytes.sum())
    return replace(found, memory_bytes=int(need), replica_share=_replica_share(plan, largest))


def simulate_queue(service: np.ndarray, rate: float, max_batch: int, max_wait_ms: float
                   ) -> Serving:
    """Simulate one rank's queue, batch by batch, always with the same random numbers.

    Args:
        service: float64 [at least max_batch + 1], microseconds of a batch by its number of samples.
        rate: samples per second at this rank.
        max_batch, max_wait_ms: an idle rank starts a batch when `max_batch` samples wait or the
            oldest has waited `max_wait_ms`.

    Returns:
        Latency, mean batch and utilisation; the fields about memory are 0.
    """
    gaps = np.random.default_rng(0).exponential(1e6 / rate, _NUM_SAMPLES)
    arrived = np.cumsum(gaps)
    times = arrived.tolist()
    ends = np.empty(_NUM_SAMPLES)
    wait_us, free, busy, begin, batches = max_wait_ms * 1e3, 0.0, 0.0, 0, 0
    while begin < _NUM_SAMPLES:
        last = begin + max_batch - 1
        ready = times[begin] + wait_us
        if last < _NUM_SAMPLES:
            ready = min(ready, times[last])
        start = max(free, ready)
        end = bisect_right(times, start, begin + 1, min(begin + max_batch, _NUM_SAMPLES))
        took = float(service[end - begin])
        free = start + took
        busy += took
        ends[begin:end] = free
        begin = end
        batches += 1
    latency = (ends - arrived)[int(_WARM_UP * _NUM_SAMPLES):]
    return Serving(max_batch, max_wait_ms, float(np.quantile(latency, _QUANTILE)) / 1e3,
                   _NUM_SAMPLES / batches, busy / free)


def _replica_share(plan: Plan, problem: Problem) -> float:
    """Bytes of copies in further memory domains, per byte of the tables."""
    domain = problem.machine.domain
    extra = total = 0.0
    for entry in plan.tables:
        for piece in entry.pieces:
            width = entry.table.row_bytes * (piece.stop - piece.start) / entry.table.dim
            for tier in piece.tiers:
                size = (tier.stop - tier.start) * width
                total += size
                if tier.placement == "replicated":
                    extra += size * (len({int(domain[r]) for r in tier.ranks}) - 1)
    return extra / total if total else 0.0


def _attained_ms(fastest: Callable[[LatencyGoal], tuple[Problem, Plan]],
                 problems: Mapping[int, Problem], goal: LatencyGoal, best: Serving | None
                 ) -> float | None:
    """A bound that is met at the rate of `goal`, given what the plan for `goal` attains; None if
    none is found. The bound determines the plan and the waits that are tried, so that the
    percentile attained with one bound may be missed if it is the bound itself."""
    for _ in range(_TRIES):
        if best is None:
            return None
        bound_ms = math.ceil(best.p99_ms * 1e3) / 1e3
        now = replace(goal, bound_ms=bound_ms)
        best = _serving(fastest(now)[1], problems, now)
        if best is not None and best.p99_ms <= bound_ms:
            return bound_ms
    return None


def _infeasible(plan: Plan, problems: Mapping[int, Problem], goal: LatencyGoal,
                bound_ms: float | None) -> PlanInfeasibleError:
    """The error for a bound that the fastest plan misses; names `bound_ms`, which is met at this
    rate, and the largest rate at this bound."""
    service = service_us(plan, problems, goal)
    ranks = problems[1].topology.world_size
    # A rank that always serves full batches attains the highest rate.
    low, high = 0.0, min(goal.request_rate, max(ranks * n / service[n] * 1e6 for n in problems))
    for _ in range(8):
        middle = (low + high) / 2
        found = _serving(plan, problems, replace(goal, request_rate=middle))
        if found is not None and found.p99_ms <= goal.bound_ms:
            low = middle
        else:
            high = middle
    ways = [] if bound_ms is None else [f"a bound of {bound_ms} ms"]
    if low > 0:
        ways.append(f"{math.floor(low)} samples per second")
    ways.append("more ranks, or less dense compute")
    held = format_bytes(float(evaluate(plan, problems[max(problems)]).domain_bytes.sum()))
    return PlanInfeasibleError(
        "no plan meets the latency bound (modelled)", "request_rate, bound_ms",
        (goal.request_rate, goal.bound_ms),
        f"smallest sufficient change: {', or '.join(ways)} (with {held} of tables and buffers)",
        "make one of these changes")
