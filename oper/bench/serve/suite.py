"""``oper bench serve``: inference under MLPerf LoadGen, beside TorchRec and plain torch."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from oper.bench.core import record
from oper.bench.core.launch import run_workers
from oper.bench.core.workload import Workload
from oper.bench.serve.delta_case import DeltaCase, run_delta_case
from oper.bench.serve.live_case import LiveCase, run_live_case
from oper.bench.serve.models import ServeWork
from oper.bench.serve.server_case import ServerCase, run_server_case
from oper.bench.serve.tiers_case import TiersCase, run_tiers_case
from oper.bench.tables.lookup_case import LookupCase, run_case
from oper.data.generate.published import CRITEO_KAGGLE_ROWS
from oper.support.flags import number

WORLD_SIZE = 2
Case = LookupCase | ServerCase | LiveCase | DeltaCase | TiersCase
_USER_FEATURES = 18  # of the 26: the other 8 are the candidate's
# A third of the user's features list what he has seen; all others have one id.
_HISTORY = tuple(20 if k < 6 else 1 for k in range(len(CRITEO_KAGGLE_ROWS)))
# Publishing 50 times should take a minute, not an hour.
_PUBLISHED_ROWS = tuple(min(n, 250_000) for n in CRITEO_KAGGLE_ROWS)


def cases(quick: bool) -> list[Any]:
    """The cases in the order of the record; shorter ones when `quick`."""
    found: list[Case] = [LookupCase(
        f"forward-pool{p}", Workload(pooling=p), torchrec=True, rounds=10) for p in (1, 20)]
    found.append(ServerCase("server-10ms"))
    found.append(LiveCase("http-10ms", "http", load=0.9, run_s=4.0, search_s=250.0))
    for name, work in (("candidates", Workload(pooling=max(_HISTORY), lengths=_HISTORY)),
                       ("candidates-single", Workload())):
        found.append(LiveCase(name, "candidates", ServeWork(work, user_features=_USER_FEATURES),
                              load=0.9, run_s=4.0, search_s=200.0))
    found += [TiersCase("tiers", ServeWork(in_order=True)), TiersCase("tiers-scattered")]
    served = ServeWork(Workload(num_rows=_PUBLISHED_ROWS))
    found.append(LiveCase("publish", "publish", served, load=0.3, votes=2, max_runs=8))
    found += [DeltaCase("delta", served), DeltaCase("delta-apart", served, workers=1, apart=True)]
    found.append(LiveCase("soak", "soak", served, seconds=600.0, votes=2, max_runs=8))
    return [_shorter(c) for c in found] if quick else found


def _shorter(case: Case) -> Case:
    small = Workload(num_rows=tuple(min(n, 20_000) for n in CRITEO_KAGGLE_ROWS))
    if isinstance(case, LookupCase):
        work = replace(small, pooling=case.work.pooling)
        return replace(case, work=work, num_stats_batches=4, rounds=4, per_round=3)
    work = case.served.work
    small = replace(small, pooling=work.pooling, lengths=work.lengths)
    served = replace(case.served, work=small, num_queries=64)
    if isinstance(case, TiersCase):
        return replace(case, served=served, samples=1 << 15, rounds=3, round_s=0.7)
    if isinstance(case, DeltaCase):
        return replace(case, served=served, deltas=20, quiet_s=2.0, rate=100.0)
    if isinstance(case, ServerCase):
        return replace(case, served=served, run_s=0.7, min_queries=64, max_runs=4, search_s=30.0,
                       other_s=0.5)
    return replace(case, served=served, seconds=20.0 if case.kind == "soak" else 3.0, run_s=0.7,
                   min_queries=64, max_runs=3)


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments beside those of every benchmark."""
    parser.add_argument("--soak-seconds", type=number(above=True), metavar="S",
                        help="length of the soak (600; MLPerf asks for as much)")


def run(args: argparse.Namespace, chosen: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Measure the chosen cases."""
    forward = [c for c in chosen if isinstance(c, LookupCase)]
    measured = run_workers(run_case, forward, WORLD_SIZE)
    for case in chosen:
        if isinstance(case, LookupCase):
            yield next(measured)
        elif isinstance(case, ServerCase):
            yield run_server_case(case, _progress)
        elif isinstance(case, TiersCase):
            yield run_tiers_case(case, _progress)
        elif isinstance(case, DeltaCase):
            yield run_delta_case(case, _progress)
        else:
            if case.kind == "soak" and args.soak_seconds:
                case = replace(case, seconds=args.soak_seconds)
            yield run_live_case(case, _progress)


@functools.lru_cache(maxsize=1)
def _progress(text: str) -> None:
    """Once per different text."""
    print(f"  {text}", file=sys.stderr, flush=True)


def report(entries: Sequence[dict[str, Any]]) -> str:
    """The entries for a person."""
    parts = [_forward([e for e in entries if "ratio_forward" in e])]
    parts += [_server(e) for e in entries if "contenders" in e]
    parts.append(_live([e for e in entries if "capacity" in e]))
    parts.append(_tiers([e for e in entries if "bytes_ratio" in e]))
    parts.append(_delta([e for e in entries if "bytes_share" in e]))
    wrong = "".join(f"{e['name']}: NOT verified: {e.get('verification', e)}\n"
                    for e in entries if not e["verified"])
    return "\n".join(p for p in parts if p) + record.noise_note(entries) + wrong


def _forward(entries: Sequence[dict[str, Any]]) -> str:
    return record.table_of(entries, {
        "forward, 2 threads": "{name}", "OPER": "{oper_forward_ms:.2f} ms",
        "TorchRec": lambda e: f"{e[e['torchrec_best'] + '_forward_ms']:.2f} ms",
        "ratio": "{ratio_forward:.2f}x", "plan": "{torchrec_best}",
        "unsharded": lambda e: f"{e[e['unsharded_best'] + '_forward_ms']:.2f} ms",
        "of unsharded": "{ratio_unsharded:.2f}x", "by": "{unsharded_best}",
        "verified": record.yes})


def _server(entry: dict[str, Any]) -> str:
    headers = [entry["name"], "at bound", "", "p50", "p99", "p99.9", "offline", "", "single p90",
               "memory"]
    rows = []
    for name, found in entry["contenders"].items():
        server, offline, single = found["server"], found["offline"], found["single_stream"]
        memory = found.get("memory")
        rows.append([
            name, f"{server['target_qps']:.0f}/s", server["verdict"],
            *(f"{server['latency_ms'][p]:.2f} ms" for p in ("p50", "p99", "p99.9")),
            f"{offline['queries_per_s']:.0f}/s", offline["verdict"],
            f"{single['latency_ms']['p90']:.2f} ms",
            f"{memory['total_pss_bytes'] / 1e6:.0f} MB" if memory else "-"])
    floor, stalls = entry["floor"]["server"], entry["stalls_of_two_idle_loops"]
    rows.append(["no model", f"{floor['target_qps']:.0f}/s", floor["verdict"],
                 *(f"{floor['latency_ms'][p]:.2f} ms" for p in ("p50", "p99", "p99.9")),
                 "-", "", "-", "-"])
    settings = entry["loadgen"]["server"]
    return (record.table(headers, rows) + f"\nqueries of {entry['case']['served']['candidates']} "
            f"samples, {entry['case']['served']['row_dtype']} rows; oper-2w / torchrec-2p: "
            f"{entry['ratio_throughput'] or 'no'}x queries/s at the bound, "
            f"{entry['ratio_memory']}x less memory; runs of at least "
            f"{settings['min_duration_s']:g} s and {settings['min_queries']} queries"
            f"{' (MLPerf: 600 s)' if settings['shortened'] else ''}; two idle loops stalled "
            f"{stalls['share']:.1%} of the time, {stalls['longest_ms']:.1f} ms at most\n")


def _live(entries: Sequence[dict[str, Any]]) -> str:
    if not entries:
        return ""
    headers = ["server over HTTP", "capacity", "rate", "p99", "errors", "retries", "verified", ""]
    rows = []
    for e in entries:
        runs = [r for k in ("run", "runs", "quiet", "during") if k in e
                for r in (e[k] if isinstance(e[k], list) else [e[k]])]
        more = ""
        if "ratio_in_process" in e:
            more = f"TorchRec's {e.get('ratio_torchrec')}x; " \
                   f"in process {e['in_process_queries_per_s']:.0f}/s, " \
                   f"{e['ratio_in_process']:.2f} of its queries per processor second; single " \
                   f"{e['single_ms']:.2f} ms; the client took {e['client_cores']:.2f} cores"
        if "ratio_full" in e:
            more = f"all rows in full {e['full_queries_per_s']:.0f}/s; " \
                   f"{e['cpu_ratio_full']:.2f} times its queries per processor second"
        if "quiet" in e:
            more = f"{e['swaps']} swaps of {e['swap_ms']['median']:.0f} ms, quiet p99 " \
                   f"{e['quiet_p99_ms']:.2f} ms"
        if "killed_worker_replaced" in e:
            more = f"{e['seconds']:g} s, {e['swaps']} swaps, a worker killed"
        rows.append([e["name"], f"{e['capacity_qps']:.0f}/s", f"{e['target_qps']:.0f}/s",
                     f"{e['p99_ms']:.2f} ms", e["errors"], sum(r["retries"] for r in runs),
                     "yes" if e["verified"] else "NO", more])
    return record.table(headers, rows) + "\n"


def _tiers(entries: Sequence[dict[str, Any]]) -> str:
    return record.table_of(entries, {
        "types of rows by hotness, int8 = 1": "{name}", "bytes": "{bytes_ratio:.3f}",
        "memory of 2 workers": "{memory_ratio:.3f}", "queries/s": "{queries_ratio:.3f}",
        "AUC difference": lambda e: "{mean:+.1e} [{low:+.1e}, {high:+.1e}]".format(
            **e["auc_difference"]),
        "with int4": lambda e: "{mean:+.1e}".format(**e["auc_difference_int4"]),
        "samples": "{samples}", "squared error": "{error:.1e}", "verified": record.yes})


def _delta(entries: Sequence[dict[str, Any]]) -> str:
    return record.table_of(entries, {
        "rows that changed, served": "{name}", "deltas": "{deltas}",
        "bytes of a whole publication": "{bytes_share:.2%}", "time of one": "{time_share:.1%}",
        "peak memory": "{peak_ratio:.2f}x", "lag p99": "{lag_p99_s:.2f} s",
        "p99 / quiet": "{p99_ratio:.2f}", "torn": "{torn}", "errors": "{errors}",
        "verified": record.yes})
