"""Plans for a latency bound, compared with an event simulation and the theory of M/D/1."""

from __future__ import annotations

import heapq
import math
from collections import deque

import numpy as np
import pytest

from oper.errors import InvalidInputError, PlanInfeasibleError
from oper.search.explain import latency
from oper.search.explain.latency import LatencyGoal, plan_latency, simulate_queue
from oper.stats import AccessStats, TableStats
from oper.tables import TableSpec
from oper.topology import Domain, Topology

ROWS = 20_000


def stats() -> AccessStats:
    ids = np.arange(ROWS)
    counts = np.maximum(1, (1e6 / (ids + 1) ** 1.1).astype(np.int64))
    lengths = (np.array([20], np.int64), np.array([100_000], np.int64))
    table = TableStats.from_counts(ROWS, ids, counts, lengths)
    return AccessStats(100_000, {"t": table})


def topology(num_domains: int, memory: float = 1e9) -> Topology:
    return Topology("test", tuple(
        Domain((k,), 0, int(memory), 20.0, 60.0, 1 << 20, 1.0, 0.5)
        for k in range(num_domains)))


TABLES = [TableSpec("t", ROWS, 64, ("f",), optimizer="none")]


def events(service: np.ndarray, rate: float, max_batch: int, wait_ms: float, num: int, seed: int
           ) -> np.ndarray:
    """Latencies (ms) of one rank's queue, simulated event by event."""
    random = np.random.default_rng(seed)
    arrivals = np.cumsum(random.exponential(1e6 / rate, num)).tolist()
    agenda = [(t, 0, k) for k, t in enumerate(arrivals)]  # 0 = arrival, 1 = timer, 2 = end
    heapq.heapify(agenda)
    queue: deque[int] = deque()
    latency = np.zeros(num)
    busy = False
    while agenda:
        now, kind, what = heapq.heappop(agenda)
        if kind == 0:
            queue.append(what)
            heapq.heappush(agenda, (now + wait_ms * 1e3, 1, what))
        elif kind == 2:
            busy = False
        oldest = arrivals[queue[0]] if queue else np.inf
        if not busy and (len(queue) >= max_batch or oldest + wait_ms * 1e3 <= now):
            batch = [queue.popleft() for _ in range(min(max_batch, len(queue)))]
            end = now + float(service[len(batch)])
            for k in batch:
                latency[k] = end - arrivals[k]
            busy = True
            heapq.heappush(agenda, (end, 2, -1))
    return latency[num // 10:] / 1e3


@pytest.mark.parametrize(("load", "max_batch", "wait_ms"), [
    (0.3, 1, 0.0), (0.9, 1, 0.0), (0.5, 16, 0.0), (0.5, 16, 1.0), (0.9, 64, 2.0), (0.2, 64, 5.0)])
def test_percentiles_are_those_of_an_event_simulation(load: float, max_batch: int, wait_ms: float
                                                      ) -> None:
    service = 200.0 + 20.0 * np.arange(max_batch + 1)
    rate = load * max_batch / service[max_batch] * 1e6
    found = simulate_queue(service, rate, max_batch, wait_ms)
    seen = events(service, rate, max_batch, wait_ms, 40_000, seed=7)
    # Different arrivals: both are estimates of a tail, which is long at high load.
    assert found.p99_ms == pytest.approx(np.quantile(seen, 0.99), rel=0.15)


def test_batches_of_one_are_m_d_1() -> None:
    service = np.array([0.0, 100.0])
    found = simulate_queue(service, 6000.0, 1, 0.0)
    assert found.utilisation == pytest.approx(0.6, rel=0.02)
    assert found.mean_batch == 1
    # The exact tail of waiting in M/D/1 is C exp(-x t), t in services: x from the load, then C.
    x = 1.0
    for _ in range(100):
        x = math.log1p(x / 0.6)
    wait = math.log((1 - 0.6) / (0.6 * math.exp(x) - 1) / 0.01) / x
    assert found.p99_ms == pytest.approx(0.1 * (wait + 1), rel=0.05)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the simulated queues, of which one plan needs hundreds."""
    monkeypatch.setattr(latency, "_NUM_SAMPLES", 20_000)


@pytest.mark.usefixtures("short")
def test_least_memory_that_meets_the_bound() -> None:
    slow, fast = (plan_latency(TABLES, stats(), topology(4),
                               LatencyGoal(20_000, bound, max_batch=64)) for bound in (50.0, 0.9))
    for plan, serving in (slow, fast):
        assert serving.p99_ms <= plan.notes["latency"]["bound_ms"]
    # A loose bound needs no replicas; a tight one buys latency with memory.
    assert slow[1].replica_share < 0.05
    assert fast[1].memory_bytes >= slow[1].memory_bytes


@pytest.mark.usefixtures("short")
def test_one_domain_needs_one_copy() -> None:
    plan, serving = plan_latency(TABLES, stats(), topology(1), LatencyGoal(1000, 20.0))
    assert serving.replica_share == 0
    assert plan.objective == "inference"


@pytest.mark.usefixtures("short")
def test_infeasible_bound_names_remedies() -> None:
    with pytest.raises(PlanInfeasibleError, match=r"a bound of [\d.]+ ms") as told:
        plan_latency(TABLES, stats(), topology(2), LatencyGoal(1000, 0.001, max_batch=8))
    bound = float(str(told.value).split("a bound of ")[1].split(" ms")[0])
    plan_latency(TABLES, stats(), topology(2), LatencyGoal(1000, bound, max_batch=8))
    for bad in ({"request_rate": 0.0}, {"bound_ms": -1.0}, {"max_batch": 0},
                {"dense_us": (1.0, -1.0)}):
        with pytest.raises(InvalidInputError):
            LatencyGoal(**{"request_rate": 1.0, "bound_ms": 1.0, **bad})  # type: ignore[arg-type]
