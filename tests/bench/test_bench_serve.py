"""The serving benchmark: its search, its clients, and short forms of what it measures."""

from __future__ import annotations

import json
import mmap
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oper.bench import loadgen, serve
from oper.bench.memory import num_descriptors, pss_bytes
from oper.bench.rate_search import Bracket, confirm, search
from oper.bench.serve_case import ServerCase, _verify
from oper.bench.serve_client import Seen
from oper.bench.serve_host import Swap
from oper.bench.serve_live import LiveCase, _growth, _overlaps, run_live_case
from oper.bench.serve_models import KINDS, ServeWork
from oper.bench.serve_pool import Pool
from oper.bench.workload import Workload
from oper.errors import OperError
from oper.serve.batching import BatchOptions

SMALL = ServeWork(Workload(num_rows=(400, 30, 5), dim=8), candidates=6, num_queries=8,
                  dense_layers=(8,), over_layers=(8,))


def result(valid: bool, rate: float = 1.0) -> loadgen.Result:
    return loadgen.Result(valid, rate, {"p99": 1.0}, [])


# ---- the search ----------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [30.0, 95.0, 400.0])
def test_the_search_finds_the_capacity(first: float) -> None:
    brackets = {"a": Bracket(first), "b": Bracket(2 * first)}
    capacity = {"a": 100.0, "b": 200.0}
    order: list[str] = []

    def run(name: str, rate: float) -> loadgen.Result:
        order.append(name)
        return result(rate <= capacity[name], rate)

    search(brackets, run, 12)
    for name, bracket in brackets.items():
        assert 0.95 * capacity[name] <= bracket.valid <= capacity[name]
    assert order[:4] == ["a", "b", "b", "a"]
    found = confirm(brackets, run, 3)
    assert all(r.valid for _, r in found.values())


def test_a_rate_that_does_not_hold_is_lowered() -> None:
    bracket = Bracket(0, valid=100.0)
    rate, last = confirm({"a": bracket}, lambda _, r: result(r < 90), 4)["a"]
    assert last.valid
    assert rate == pytest.approx(100 * 0.94 ** 2)
    _, last = confirm({"a": bracket}, lambda _, r: result(False), 3)["a"]
    assert not last.valid


def test_a_valid_run_above_an_invalid_one_counts() -> None:
    bracket = Bracket(50.0)
    bracket.take(50.0, False)
    bracket.take(60.0, True)
    assert (bracket.valid, bracket.invalid) == (60.0, 0.0)


# ---- LoadGen -------------------------------------------------------------------------------------


def answering(pairs: list[tuple[int, int]]) -> None:
    threading.Timer(0.001, loadgen.complete, ([k for k, _ in pairs],)).start()


def test_loadgen_says_what_it_saw() -> None:
    found = loadgen.run(loadgen.Settings("Server", 200, 0.5, num_samples=4), answering)
    assert 100 < found.rate < 300
    assert 1.0 < found.latency_ms["p50"] <= found.latency_ms["p99"] <= found.latency_ms["p99.9"]
    late = loadgen.run(loadgen.Settings("Server", 200, 0.5, bound_ms=0.1, num_samples=4), answering)
    assert not late.valid
    assert any("Performance constraints" in n for n in late.notes)
    single = loadgen.run(loadgen.Settings("SingleStream", 400, 0.2, num_samples=4), answering)
    assert single.latency_ms["p50"] > 1.0
    offline = loadgen.run(loadgen.Settings("Offline", 400, 0.2, num_samples=4), answering)
    assert not offline.valid  # far too fast for what was expected: the run is too short
    assert offline.notes == ["Min duration satisfied: NO"]


def test_an_error_while_issuing_comes_out() -> None:
    def broken(pairs: list[tuple[int, int]]) -> None:
        raise ValueError("no worker")

    with pytest.raises(OperError, match="no worker"):
        loadgen.run(loadgen.Settings("SingleStream", 100, 0.1), broken)


def test_other_text_is_no_summary() -> None:
    with pytest.raises(OperError, match="LoadGen's summary"):
        loadgen.parse("Result is : VALID")


def test_short_runs_are_marked() -> None:
    assert loadgen.Settings("Server", 1, 5).to_json()["shortened"]
    assert not loadgen.Settings("Server", 1, 600).to_json()["shortened"]


# ---- what is read off ----------------------------------------------------------------------------


def test_pss_counts_what_is_resident() -> None:
    before = pss_bytes(os.getpid(), "oper-pss-test")
    number = os.memfd_create("oper-pss-test")
    try:
        os.ftruncate(number, 4 << 20)
        with mmap.mmap(number, 4 << 20) as area:
            area[:1 << 20] = b"x" * (1 << 20)
            assert (before, pss_bytes(os.getpid(), "oper-pss-test")) == (0, 1 << 20)
            assert num_descriptors(os.getpid()) > 3
    finally:
        os.close(number)
    assert pss_bytes(os.getpid()) > 10 << 20
    with pytest.raises(OperError, match="pid"):
        pss_bytes(2 ** 22 + 1)


def test_requests_that_meet_a_publication() -> None:
    begin, end = np.array([0.0, 1.0, 2.5, 3.0]), np.array([0.5, 2.1, 2.6, 4.0])
    seen = Seen(result(True), begin, end, np.ones(4), 0, 0, 0, [])
    assert _overlaps(seen, [Swap(2.0, 2.4, 2), Swap(3.9, 5.0, 3)]).tolist() == [
        False, True, False, True]


@pytest.mark.parametrize(("last", "grows"), [((100 << 20, 9), False), ((150 << 20, 9), True),
                                             ((100 << 20, 19), True)])
def test_growth_is_noticed(last: tuple[int, int], grows: bool) -> None:
    samples = [(0.1, 10, 1), (0.5, 100 << 20, 9), (0.9, *last)]
    assert _growth(samples)["grows"] == grows
    assert _growth(samples[:2])["grows"]  # nothing seen is nothing shown


# ---- short forms ---------------------------------------------------------------------------------


def test_contenders_score_alike_and_answer_every_query() -> None:
    pools: dict[str, Pool] = {}
    try:
        for kind in KINDS:  # by this thread: the processes end with the one that started them
            pools[kind] = Pool(kind, SMALL, BatchOptions(64, 0.0))
            pools[kind].grow(1)
        verdicts = _verify(pools, SMALL)
        assert all(v["passed"] for v in verdicts.values()), verdicts
        memory = pools["oper"].memory(1)
        assert memory["tables_pss_bytes_of_publisher"] > 0
        for pool in pools.values():
            pool.set_threads(1, 1)
            with pool.issuing(1) as issue:
                found = loadgen.run(loadgen.Settings("Server", 50, 0.3, min_queries=8,
                                                     num_samples=8), issue)
            assert found.rate > 0
    finally:
        for pool in pools.values():
            pool.close()


def test_publications_under_load() -> None:
    case = LiveCase("publish", "publish", SMALL, workers=1, seconds=1.0, swaps=4, search_s=0.3,
                    steps=1, load=0.3)
    entry = run_live_case(case, lambda _: None)
    assert entry["errors"] == 0
    assert entry["verified"], entry
    assert entry["swaps"] == 4
    assert entry["epochs_seen"] > 1
    assert entry["requests_during_swaps"] > 0
    json.dumps(entry)


def test_cases_have_the_names_that_are_asked_for() -> None:
    for quick in (False, True):
        names = [c.name for c in serve.cases(quick)]
        assert {"forward-pool1", "forward-pool20", "server-10ms", "publish", "soak"} <= set(names)
    full: Any = {c.name: c for c in serve.cases(False)}
    assert full["soak"].seconds == 600
    assert full["publish"].swaps >= 50
    case = ServerCase("x")
    assert ServeWork.from_json(json.loads(json.dumps(case.to_json()))["served"]) == case.served


def test_the_report_reads_a_record() -> None:
    path = Path(__file__).parents[2] / "benchmarks" / "serve.json"
    if not path.exists():
        pytest.skip("no record yet")
    entries = json.loads(path.read_text())["cases"]
    text = serve.report(entries)
    for entry in entries:
        assert entry["name"] in text


def test_forwards_are_measured_and_verified_beside_torchrecs_plans() -> None:
    from oper.bench.launch import run_workers
    from oper.bench.serve_forward import ForwardCase
    from oper.bench.torchrec_peer import PLAN_KINDS
    from oper.bench.workload import Workload

    work = Workload(num_rows=(40, 12_000), dim=16, batch_size=64, pooling=3)
    case = ForwardCase("forward-small", work, num_batches=4, num_stats_batches=4, rounds=2,
                       per_round=2)
    entry, = run_workers("oper.bench.serve_forward:run_forward_case", [case.to_json()], 2)
    assert entry["verified"] is True, entry["verification"]
    assert set(entry["verification"]) == {"oper", *PLAN_KINDS, "nn_embedding_bag", "fbgemm"}
    best = min(entry[f"{kind}_forward_ms"] for kind in PLAN_KINDS)
    assert entry["ratio_forward"] == pytest.approx(best / entry["oper_forward_ms"], rel=1e-2)
