"""The HTTP server under LoadGen: capacity, publications under load, and a soak test."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from oper.bench.core.launch import Progress
from oper.bench.core.memory import cpu_seconds, num_descriptors, pss_bytes
from oper.bench.serve import loadgen
from oper.bench.serve.client import TOLERANCE, LoadClient, Seen
from oper.bench.serve.host import BATCHING, Host, Swap, client_of
from oper.bench.serve.models import ServeWork
from oper.bench.serve.pool import Pool
from oper.bench.serve.rate_search import Search, search

_GROWTH_BYTES = 16 << 20  # allowed growth of all processes: allocators retain varying memory
_SOAK_SWAPS = 20
_ROUNDS = 3  # runs of each contender at the common rate
_KEPT = 0.97  # minimum completed / requested rate, since arrivals are random
_SEED = 20240229  # seed of the first run at a rate
_SUSTAINED_MS = 100.0  # p99 bound of a sustained rate, at which the server's queues do not grow


@dataclass(frozen=True, slots=True)
class LiveCase:
    """A case with the HTTP server.

    Attributes:
        name: the case's name in the record.
        kind: ``"http"``: highest rates at the latency bound, over HTTP and in process;
            ``"candidates"``: highest rates of requests with their user's features once and of full
            requests; ``"publish"``: new weights under load; ``"soak"``: a long run in which a
            worker is killed. The capacity is the highest rate at the latency bound; for the last
            two kinds, the highest sustained rate.
        served: the model and its queries.
        workers: worker processes of the server.
        seconds: duration (s) of the main runs.
        load: rate of the main runs as a share of the capacity.
        swaps: number of publications for ``"publish"``.
        run_s, min_queries: minimum duration (s) and queries of the runs of the rate search.
        votes: number of VALID runs required for a rate: 2 (of 3) or 3 (of 5).
        search_s: time limit (s) of the search.
        bound_ms: latency bound (ms) of 99 % of the queries.
    """

    name: str
    kind: str
    served: ServeWork = field(default_factory=ServeWork)
    workers: int = 2
    seconds: float = 10.0
    load: float = 0.7
    swaps: int = 50
    run_s: float = 2.5
    min_queries: int = 1000
    votes: int = 3
    search_s: float = 90.0
    bound_ms: float = 10.0

    def measure(self, progress: Progress) -> dict[str, Any]:
        """Start, load and compare; returns the record's entry."""
        progress("starting the server")
        host = Host(self.served, self.workers)
        with client_of(host, self.name, self.served) as client:
            first = client.learn()
            host.ask("publish")
            # The minimum over queries of the sets' largest score difference.
            separation = float(np.abs(first - client.learn()).max(axis=1).min())
            host.ask("publish")
            entry = {"http": _http, "candidates": _candidates, "publish": _publish,
                     "soak": _soak}[self.kind](_Live(self, host, client, progress, first))
            memory, std = host.ask("memory"), float(first.std())
        entry["verified"] = bool(entry["verified"] and separation > 1e-2 and std > 0)
        return {**entry, "server_memory_bytes": memory, "separation_of_sets": separation,
                "std_of_scores": std, "case": asdict(self), "niceness": os.nice(0),
                "cores": f"the client shares {os.cpu_count()} with the server"}


Run = Callable[[loadgen.Settings], loadgen.Result]
Side = tuple[Run, Callable[[], float]]  # runs LoadGen; processor time (s) so far


@dataclass(frozen=True, slots=True)
class _Live:
    """A server and its client."""

    case: LiveCase
    host: Host
    client: LoadClient
    progress: Progress
    first: np.ndarray  # scores of set A

    def at(self, rate: float, seconds: float, **changes: Any) -> loadgen.Settings:
        """Settings of a run of `seconds` or more, with Poisson arrivals at `rate` queries/s, and
        `changes` of them."""
        return replace(loadgen.Settings("Server", rate, seconds, bound_ms=self.case.bound_ms,
                                        num_samples=self.case.served.num_queries), **changes)

    def search(self, runs: Mapping[str, Run], first: float, **changes: Any
               ) -> tuple[dict[str, loadgen.Result], dict[str, Search]]:
        """Run single queries one after another, and search each contender's highest rate.

        Args:
            runs: the contenders: functions that run LoadGen.
            first: first rate of the search relative to that of single queries.
            changes: changes of the settings of the search's runs.
        """
        case = self.case
        single = {name: run(self.at(300, case.run_s, scenario="SingleStream"))
                  for name, run in runs.items()}
        searches = {name: Search(first * x.rate, case.votes) for name, x in single.items()}
        search(searches, lambda name, rate, before: runs[name](self.at(
            rate, case.run_s, min_queries=case.min_queries, seed=_SEED + before, **changes)),
            case.search_s)
        return single, searches


def _summary(seen: Seen) -> dict[str, Any]:
    return {**seen.result.to_json(), "requests": seen.begin.size, "wrong": seen.wrong,
            "failed": seen.failed, "retries": seen.retries, "messages": seen.messages,
            "client_cores": seen.cores}


def _errors(*runs: Seen) -> int:
    return sum(s.wrong + s.failed for s in runs)


def _compared(live: _Live, sides: dict[str, Side], clients: Sequence[LoadClient],
              only_searched: str = "") -> dict[str, Any]:
    """Compare contenders on the same queries, with equal arrivals and alternating runs.

    Measures each one's highest rate at the latency bound, its latency of single queries, and runs
    at a common rate, which is a share of the first contender's highest rate.

    Args:
        live: the server.
        sides: the contenders by name.
        clients: clients of the contenders over HTTP.
        only_searched: name of a contender without runs at the common rate.
    """
    case, first, *others = live.case, *sides
    live.progress("looking for the capacity")
    single, searches = live.search({name: run for name, (run, _) in sides.items()}, 0.5)
    rates = {name: found.best()[0] for name, found in searches.items()}
    # If no rate keeps the bound, report the figures of the lowest one.
    target = case.load * (rates[first] or min(r[0] for r in searches[first].to_json()))
    settings = live.at(target, case.seconds, min_queries=case.min_queries)
    timed = [name for name in sides if name != only_searched]
    runs: dict[str, list[loadgen.Result]] = {name: [] for name in timed}
    busy = dict.fromkeys(timed, 0.0)  # processor time (s)
    for turn in range(_ROUNDS):
        live.progress(f"{target:.0f} queries/s, {turn + 1} of {_ROUNDS}")
        for name in timed[::1 - 2 * (turn % 2)]:
            run, cpu = sides[name]
            before = cpu()
            runs[name].append(run(replace(settings, seed=settings.seed + turn)))
            busy[name] += cpu() - before
    seen = [x for client in clients for x in client.seen[-_ROUNDS:]]
    queries = sum(x.begin.size for x in seen) / len(clients)  # equal seeds: of every way
    latency = {name: {p: np.median([r.latency_ms[p] for r in found])
                      for p in ("p50", "p90", "p99")} for name, found in runs.items()}
    errors = _errors(*(x for client in clients for x in client.seen))
    entry = {"queries_per_s": rates[first], "single_ms": single[first].latency_ms["p50"],
             "p99_ms": latency[first]["p99"], "latency_ms": latency,
             "client_cores": np.mean([x.cores for x in seen]),
             "cpu_ms_per_query": {n: b / queries * 1e3 for n, b in busy.items()},
             "target_qps": target, "capacity_qps": rates[first],
             "capacity": {name: {"single_stream": single[name].to_json(), "search": x.to_json()}
                          for name, x in searches.items()},
             "errors": errors, "loadgen": settings.to_json(), "runs": list(map(_summary, seen))}
    for name in others:
        entry |= {f"{name}_queries_per_s": rates[name],
                  f"{name}_single_ms": single[name].latency_ms["p50"],
                  f"ratio_{name}": rates[first] / rates[name] if rates[name] else None}
    for name in timed[1:]:  # queries per second of processor time
        entry[f"cpu_ratio_{name}"] = busy[name] / busy[first] if busy[first] else 0.0
    return entry


def _http(live: _Live) -> dict[str, Any]:
    """Compare scoring over HTTP with scoring in process and with TorchRec's quantised model behind
    the same HTTP front end."""
    case = live.case
    # The same weights, batches and messages without a network: an upper limit for the server, whose
    # requests are already in the workers' memory. LoadGen only sends their indices.
    with contextlib.closing(Pool("oper", case.served, BATCHING, case.workers,
                                 live.host.ask("publication"))) as beside:
        peer = Host(case.served, case.workers, kind="torchrec")
        with client_of(peer, case.name, case.served) as client:
            differ = float(np.abs(client.learn() - live.first).max())
            entry = _compared(live, {
                "http": (live.client.run, live.host.cpu_seconds),
                "in_process": (functools.partial(beside.run, case.workers), beside.cpu_seconds),
                "torchrec": (client.run, peer.cpu_seconds)}, [live.client], "torchrec")
    entry["ratio_in_process"] = entry.pop("cpu_ratio_in_process")
    errors = entry["errors"] + _errors(*client.seen)
    return {**entry, "torchrec_max_abs_diff": differ, "errors": errors,
            "verified": not errors and differ <= TOLERANCE}


def _candidates(live: _Live) -> dict[str, Any]:
    """Compare requests that name their user's features once with requests that repeat them for
    every candidate."""
    with contextlib.closing(LoadClient(live.host.address, live.case.served, once=True)) as once:
        # Only the newest set of weights is in service from here on.
        differ = float(np.abs(once.learn() - live.client.learn()).max())
        entry = _compared(live, {
            "once": (once.run, live.host.cpu_seconds),
            "full": (live.client.run, live.host.cpu_seconds)}, [once, live.client])
    return {**entry, "max_abs_diff": differ,
            "verified": differ <= TOLERANCE and not entry["errors"]}


def _share(live: _Live) -> tuple[loadgen.Settings, dict[str, Any]]:
    """Find the highest sustained rate of Poisson arrivals, starting from the rate of sequential
    queries times the workers; returns settings of a run at a share of it, and the search."""
    case = live.case
    live.progress("looking for the rate that can be sustained")
    single, searches = live.search({"server": live.client.run}, case.workers,
                                   bound_ms=_SUSTAINED_MS)
    found = searches["server"]
    rate, result = found.best()
    # If no rate is valid on a busy machine, use the lowest; the record then has capacity_qps 0.
    target = case.load * (rate or min(r[0] for r in found.to_json()))
    return live.at(target, case.seconds), {
        "capacity_qps": rate, "target_qps": target, "capacity": {
            "single_stream": single["server"].to_json(), "search": found.to_json(),
            "p99_bound_ms": _SUSTAINED_MS, "server": {"target_qps": rate, **result.to_json()}}}


def _publish(live: _Live) -> dict[str, Any]:
    """Compare a run with publications throughout with quiet runs before and after it."""
    case = live.case
    settings, share = _share(live)
    target = settings.expected_qps
    live.progress(f"{target:.0f} queries/s, quiet")
    live.client.run(settings)
    quiet = live.client.seen[-1:]
    swaps: list[Swap] = []
    during: list[Seen] = []
    while len(swaps) < case.swaps:
        live.progress(f"{target:.0f} queries/s, {len(swaps)} of {case.swaps} swaps")
        live.client.start(settings)
        until = time.monotonic() + case.seconds
        while time.monotonic() < until and len(swaps) < case.swaps:
            swaps.append(live.host.ask("publish"))
            time.sleep(0.05)
        during.append(live.client.finish(case.seconds))
    live.progress(f"{target:.0f} queries/s, quiet again")
    live.client.run(settings)
    quiet.append(live.client.seen[-1])
    touched = np.concatenate([s.latency_ms[_overlaps(s, swaps)] for s in during])
    still = np.concatenate([s.latency_ms for s in quiet])
    p99, quiet_p99 = np.percentile(touched, 99), np.percentile(still, 99)
    took_ms = [1e3 * (end - begin) for begin, end in swaps]
    epochs = {int(e) for s in during for e in s.epoch}
    errors = _errors(*quiet, *during)
    return {"p99_ms": p99, "quiet_p99_ms": quiet_p99, "ratio_p99": p99 / quiet_p99,
            "errors": errors, "swaps": len(swaps),
            "verified": not errors and len(swaps) >= case.swaps,
            "swap_ms": {"median": np.median(took_ms), "max": max(took_ms)},
            "requests_during_swaps": touched.size, "epochs_seen": len(epochs),
            **share, "quiet": [_summary(s) for s in quiet],
            "during": [_summary(s) for s in during], "loadgen": settings.to_json()}


def _overlaps(seen: Seen, swaps: list[Swap]) -> np.ndarray:
    """Requests in flight during any publication, bool [N]."""
    found = np.zeros(seen.begin.size, bool)
    for begin, end in swaps:
        found |= (seen.begin < end) & (seen.end > begin)
    return found


def _soak(live: _Live) -> dict[str, Any]:
    """One long run with occasional publications, in which a worker is killed after a quarter of the
    time."""
    case = live.case
    settings, share = _share(live)
    target = settings.expected_qps
    live.client.start(settings)
    begin, killed, swaps = time.monotonic(), 0, 0
    samples: list[tuple[float, ...]] = []
    busy: dict[int, float] = {}  # processor time of workers at 60 %
    while (done := (time.monotonic() - begin) / case.seconds) < 1:
        live.progress(f"{target:.0f} queries/s, {int(done * 10) * 10} %")
        if not killed and done > 0.25:
            killed = live.host.ask("pids")[0]
            os.kill(killed, signal.SIGKILL)
        if done > (swaps + 0.5) / _SOAK_SWAPS:
            live.host.ask("publish")
            swaps += 1
        with contextlib.suppress(OSError):  # a worker may end while it is inspected
            if live.host.ask("counts")["workers"] == case.workers:
                pids = live.host.ask("pids")
                samples.append((done, *(sum(map(of, [*pids, live.host.pid]))
                                        for of in (pss_bytes, num_descriptors))))
                if done > 0.6 and not busy:
                    busy = {pid: cpu_seconds(pid) for pid in pids}
        time.sleep(min(1.0, case.seconds / 60))
    spent = sorted((cpu_seconds(pid) - before for pid, before in busy.items()), reverse=True)
    seen = live.client.finish(case.seconds)
    counts, pids = live.host.ask("counts"), live.host.ask("pids")
    replaced = counts["worker_restarts"] == 1 and killed not in pids
    growth = _growth(samples)
    errors = _errors(seen)
    kept = seen.begin.size / float(seen.end.max() - seen.begin.min()) / target
    return {"p99_ms": seen.result.latency_ms["p99"], "errors": errors,
            "verified": not errors and replaced and not growth["grows"] and kept >= _KEPT, **growth,
            "killed_worker_replaced": replaced, "share_of_rate_kept": kept,
            "shares_of_workers_after_the_kill": [s / (sum(spent) or 1.0) for s in spent],
            "seconds": case.seconds, "swaps": swaps, **share, "run": _summary(seen),
            "loadgen": settings.to_json()}


def _growth(samples: list[tuple[float, ...]]) -> dict[str, Any]:
    """Growth of memory and descriptors from the middle fifth of the run to the last one."""
    table = np.array(samples, np.float64).reshape(-1, 3)
    middle = table[(table[:, 0] >= 0.4) & (table[:, 0] < 0.6)]
    last = table[table[:, 0] >= 0.8]
    if not middle.size or not last.size:
        return {"grows": True, "samples": len(samples)}
    pss = [float(np.median(part[:, 1])) for part in (middle, last)]
    descriptors = [float(np.median(part[:, 2])) for part in (middle, last)]
    return {"grows": pss[1] > pss[0] + _GROWTH_BYTES or descriptors[1] > descriptors[0] + 2,
            "pss_bytes": {"middle": pss[0], "last": pss[1]},
            "descriptors": {"middle": descriptors[0], "last": descriptors[1]},
            "samples": len(samples)}
