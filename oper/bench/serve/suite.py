"""``oper bench serve``: inference under MLPerf LoadGen, compared with TorchRec and plain torch."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from oper.bench.core.measure import quick_case
from oper.bench.core.workload import Workload
from oper.bench.serve.delta_case import DeltaCase
from oper.bench.serve.live_case import LiveCase
from oper.bench.serve.models import ServeWork
from oper.bench.serve.server_case import ServerCase
from oper.bench.serve.tiers_case import TiersCase
from oper.bench.tables.lookup import LookupCase
from oper.data.generate.published import CRITEO_KAGGLE_ROWS
from oper.support.flags import number

_USER_FEATURES = 18  # of all 26 features; the other 8 are the candidate's
# A third of the user features are histories of 20 ids; the remaining features have one id.
_HISTORY = tuple(20 if k < 6 else 1 for k in range(len(CRITEO_KAGGLE_ROWS)))
# Smaller tables for cases that publish, since publishing 50 times should take about a minute.
_PUBLISHED_ROWS = tuple(min(n, 250_000) for n in CRITEO_KAGGLE_ROWS)
_SHORTER: dict[type, dict[str, Any]] = {  # changes of the cases with --quick
    TiersCase: {"samples": 1 << 15, "rounds": 3, "round_s": 0.7},
    DeltaCase: {"deltas": 25, "rounds": 2, "steps": 10, "rate": 100.0},
    ServerCase: {"run_s": 0.7, "min_queries": 64, "search_s": 60.0, "other_s": 0.5},
    LiveCase: {"seconds": 3.0, "run_s": 0.7, "min_queries": 64, "votes": 2, "search_s": 15.0}}
FIGURES = (
    ("ratio_unsharded", "oper_forward_ms", "table_wise_forward_ms", "mixed_forward_ms",
     "ratio_forward", "torchrec_best", "unsharded_best"),
    ("contenders.*.server.target_qps",
     *(f"contenders.*.{key}" for key in (
         "server.verdict", "server.latency_ms.p50", "server.latency_ms.p99",
         "offline.queries_per_s", "offline.verdict", "single_stream.latency_ms.p90",
         "memory.total_pss_bytes")),
     "ratio_throughput", "ratio_memory", "floor.server.target_qps"),
    ("capacity_qps", "target_qps", "p99_ms", "errors", "queries_per_s", "torchrec_queries_per_s",
     "ratio_torchrec", "in_process_queries_per_s", "ratio_in_process", "full_queries_per_s",
     "ratio_full", "cpu_ratio_full", "single_ms", "client_cores", "swaps", "swap_ms.median",
     "quiet_p99_ms", "seconds", "killed_worker_replaced"),
    ("bytes_ratio", "memory_ratio", "queries_ratio", "auc_difference", "auc_difference_int4",
     "samples", "error"),
    ("bytes_share", "deltas", "time_share", "peak_ratio", "lag_p99_s", "p99_ratio", "torn",
     "errors"))
NOTE = ("forward: 2 threads; server: queries/s at the latency bound, runs shorter than MLPerf's "
        "600 s; floor: no model; tiers: rows of int8 = 1; deltas: a whole publication = 1\n")


def cases(quick: bool, soak_seconds: float | None = None) -> list[Any]:
    """The cases in the order of the record; shorter if `quick`. `soak_seconds` is the flag."""
    found: list[Any] = [LookupCase(
        f"forward-pool{p}", Workload(pooling=p), torchrec=True, rounds=10) for p in (1, 20)]
    found.append(ServerCase("server-10ms"))
    # Equal numbers of queries, since LoadGen allows a smaller share of late ones in shorter runs.
    found.append(LiveCase("http-10ms", "http", load=0.9, min_queries=3000, search_s=400.0))
    for name, work in (("candidates", Workload(pooling=max(_HISTORY), lengths=_HISTORY)),
                       ("candidates-single", Workload())):
        found.append(LiveCase(name, "candidates", ServeWork(work, user_features=_USER_FEATURES),
                              load=0.9, min_queries=3000, search_s=300.0))
    found += [TiersCase("tiers", ServeWork(in_order=True)), TiersCase("tiers-scattered")]
    served = ServeWork(Workload(num_rows=_PUBLISHED_ROWS))
    found.append(LiveCase("publish", "publish", served, load=0.3, votes=2))
    found += [DeltaCase("delta", served), DeltaCase("delta-apart", served, workers=1, apart=True)]
    found.append(LiveCase("soak", "soak", served, seconds=600.0, votes=2))
    if quick:
        found = [_shorter(c) for c in found]
    if soak_seconds:
        found[-1] = replace(found[-1], seconds=soak_seconds)
    return found


def _shorter(case: Any) -> Any:
    if isinstance(case, LookupCase):
        return replace(quick_case(case), work=_small(case.work))
    served = replace(case.served, work=_small(case.served.work), num_queries=64)
    changes = _SHORTER[type(case)] | ({"seconds": 20.0} if case.name == "soak" else {})
    return replace(case, served=served, **changes)


def _small(work: Workload) -> Workload:
    return replace(work, num_rows=tuple(min(n, 20_000) for n in work.num_rows))


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--soak-seconds", type=number(above=True), metavar="S",
                        help="length of the soak test (default 600, as MLPerf requires)")
