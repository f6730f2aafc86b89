"""Contenders under LoadGen's Offline, SingleStream and (latency-bounded) Server scenarios."""

from __future__ import annotations

import contextlib
import itertools
import os
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from oper.bench.core.launch import Progress
from oper.bench.serve import loadgen
from oper.bench.serve.models import FLOOR, VARIANTS, ServeWork
from oper.bench.serve.pool import Pool
from oper.bench.serve.rate_search import Search, search
from oper.serve.options import BatchOptions

FLOOR_NAME = "floor-2p"
# By contender: kind of model and number of worker processes. A worker has one thread, except for
# peers in a single process, which use one or two threads, whichever is faster.
CONTENDERS = {
    "oper-1w": ("oper", 1), "oper-2w": ("oper", 2), "oper-4w": ("oper", 4),
    "torchrec-1p": ("torchrec", 1), "torchrec-2p": ("torchrec", 2), "torch-1p": ("torch", 1),
    FLOOR_NAME: (FLOOR, 2),  # a fixed amount of work instead of a model
}
_COMPARED = ("oper-2w", "torchrec-2p", FLOOR_NAME)
_TUNED = ("torchrec-1p", "torch-1p")
_EQUAL = 1e-6  # max difference of scores on equally quantised rows: dense layers may round
_NEAR = {"int8": 5e-3, "int4": 5e-2, "float16": 1e-4}  # ... and of scores on float32 rows
_CHECKED = 16
_MOST_QUERIES = (1, 4)  # limits of the queries per batch that are tried for each contender


@dataclass(frozen=True, slots=True)
class ServerCase:
    """Comparison of all contenders without a network.

    Attributes:
        name: the case's name in the record.
        served: the model and its queries.
        run_s, min_queries: minimum duration (s) and queries of a Server run. The fewer queries a
            run has, the larger the share that LoadGen requires within the bound: all of 460, 99.5 %
            of 2,000 and, in the limit, 99 %.
        search_s: time limit (s) of all rate searches together. The rates of contenders whose ratio
            is reported are decided by 3 of 5 runs, the remaining ones by 2 of 3.
        other_s: minimum duration (s) of Offline and SingleStream runs.
    """

    name: str
    served: ServeWork = field(default_factory=ServeWork)
    run_s: float = 2.5
    min_queries: int = 2000
    search_s: float = 900.0
    other_s: float = 1.5

    def measure(self, progress: Progress) -> dict[str, Any]:
        """Measure all contenders; returns the record's entry."""
        batching = BatchOptions(self.served.candidates, 0.0, 1 << 40)
        with contextlib.ExitStack() as stack:
            progress("starting the processes")
            counts = {"oper": 2, "torchrec": 2, "torch": 1, FLOOR: 2}
            pools = {kind: stack.enter_context(contextlib.closing(
                Pool(kind, self.served, batching, count))) for kind, count in counts.items()}
            memory = {name: pools[kind].memory(count)
                      for name, (kind, count) in CONTENDERS.items() if count <= 2}
            pools["oper"].grow(4)
            memory["oper-4w"] = pools["oper"].memory(4)
            progress("comparing scores")
            verification = _verify(pools, self.served)
            entry = _measure(self, pools, progress)
        for name, found in entry["contenders"].items():
            found["memory"] = memory[name]
        mine, theirs = (memory[n]["total_pss_bytes"] for n in ("oper-2w", "torchrec-2p"))
        return {"ratio_throughput": entry.pop("ratio_throughput"),
                "ratio_memory": theirs / mine, "p99_ms": entry.pop("p99_ms"),
                "verified": all(v["passed"] for v in verification.values()),
                "verification": verification, **entry, "case": asdict(self)}


class _Runner:
    """Runs LoadGen against a contender with its setting in `ways`, which `tune` chooses."""

    def __init__(self, case: ServerCase, pools: dict[str, Pool], progress: Progress) -> None:
        self._case, self._pools, self._progress = case, pools, progress
        # By contender: threads of a worker, queries per batch, variant of the model.
        self.ways = dict.fromkeys(CONTENDERS, (1, _MOST_QUERIES[0], VARIANTS[0]))

    def __call__(self, name: str, settings: loadgen.Settings) -> loadgen.Result:
        """Run LoadGen once against contender `name`."""
        self._progress(f"{settings.scenario} {name}, {settings.expected_qps:.0f}/s")
        kind, count = CONTENDERS[name]
        threads, most, variant = self.ways[name]
        self._pools[kind].configure(count, threads, most * self._case.served.candidates, variant)
        return self._pools[kind].run(count, settings)

    def tune(self, offline: loadgen.Settings, server: loadgen.Settings
             ) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
        """Choose for each contender the setting with the lowest p99 (mean of two runs) at 0.6 times
        its rate in LoadGen's Offline scenario.

        Returns:
            The Offline rates (queries/s) by contender, and the p99 (ms) by contender and setting.
        """
        rates = {name: self(name, offline).rate for name in CONTENDERS}
        tried = {}
        for name, (kind, _) in CONTENDERS.items():
            at, p99 = replace(server, expected_qps=0.6 * rates[name]), {}
            for way in itertools.product((1, 2) if name in _TUNED else (1,), _MOST_QUERIES,
                                         VARIANTS if kind == "torchrec" else VARIANTS[:1]):
                self.ways[name] = way
                found = [self(name, replace(at, seed=at.seed + k)) for k in range(2)]
                p99[way] = sum(r.latency_ms["p99"] for r in found) / 2
            self.ways[name] = min(p99, key=p99.__getitem__)
            tried[name] = {"{} threads, {} queries, {}".format(*way): x
                           for way, x in p99.items()}
        return rates, tried


def _measure(case: ServerCase, pools: dict[str, Pool], progress: Progress
             ) -> dict[str, Any]:
    base = loadgen.Settings("Offline", 300, case.other_s, num_samples=case.served.num_queries)
    server = replace(base, scenario="Server", min_duration_s=case.run_s,
                     min_queries=case.min_queries)
    run = _Runner(case, pools, progress)
    guess, tried = run.tune(replace(base, min_duration_s=0.5), server)
    # LoadGen generates all queries in advance from the expected rate; with too few, a run would be
    # too short to be VALID.
    offline = {name: run(name, replace(base, expected_qps=2 * guess[name]))
               for name in CONTENDERS}
    single = {name: run(name, replace(base, scenario="SingleStream",
                                      expected_qps=2 * max(50.0, guess[name])))
              for name in CONTENDERS}
    searches = {name: Search(0.5 * found.rate, 3 if name in _COMPARED else 2)
                for name, found in offline.items()}
    # The k-th run at a rate has the same seed, and so the same arrivals, for every contender.
    search(searches, lambda name, rate, before: run(
        name, replace(server, expected_qps=rate, seed=server.seed + before)),
        case.search_s)
    best = {name: s.best() for name, s in searches.items()}
    found = {name: {
        "kind": kind, "workers": count,
        **dict(zip(("threads", "max_queries", "variant"), run.ways[name], strict=True)),
        "server": {"target_qps": best[name][0], **best[name][1].to_json()},
        "search": searches[name].to_json(),
        "offline": offline[name].to_json(), "single_stream": single[name].to_json(),
        "samples_per_s_at_bound": best[name][0] * case.served.candidates}
        for name, (kind, count) in CONTENDERS.items()}
    (ours, run_at_it), (theirs, _) = best["oper-2w"], best["torchrec-2p"]
    return {
        "ratio_throughput": ours / theirs if theirs else None,
        "p99_ms": run_at_it.latency_ms["p99"],
        "queries_per_s_at_bound": {n: rate for n, (rate, _) in best.items()},
        "floor": found.pop(FLOOR_NAME), "contenders": found,
        "tried": tried,
        "loadgen": {"server": server.to_json(), "offline_and_single_stream": base.to_json(),
                    "client_cores": f"none of its own: LoadGen shares {os.cpu_count()} cores with "
                                    "the contender, which may use all of them"}}


def _verify(pools: dict[str, Pool], served: ServeWork) -> dict[str, dict[str, Any]]:
    """Compare OPER's scores with TorchRec's on equally quantised rows, and both with float32."""
    queries = range(min(_CHECKED, served.num_queries))
    scores = {kind: pool.scores(queries) for kind, pool in pools.items() if kind != FLOOR}
    found = {}
    for name, ours, reference, tolerance in (
            ("oper-torchrec", "oper", "torchrec", _EQUAL),
            ("oper-float32", "oper", "torch", _NEAR[served.row_dtype]),
            ("torchrec-float32", "torchrec", "torch", _NEAR[served.row_dtype])):
        diff = float(np.abs(scores[ours] - scores[reference]).max())
        spread = float(scores[reference].std())
        found[name] = {"passed": diff <= tolerance and spread > 0, "max_abs_diff": diff,
                       "tolerance": tolerance, "std_of_scores": spread}
    return found
