"""The serving benchmark: its rate search, its client, and shortened cases."""

import contextlib
import http.server
import mmap
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oper.bench.core.child import Child
from oper.bench.core.memory import num_descriptors, pss_bytes, unfiled_pss_bytes
from oper.bench.core.workload import Workload
from oper.bench.serve import loadgen, suite as serve
from oper.bench.serve.client import Seen, _Sender
from oper.bench.serve.delta_case import DeltaCase, _Check, _train
from oper.bench.serve.host import Publication
from oper.bench.serve.live_case import LiveCase, _growth, _overlaps
from oper.bench.serve.models import (
    FLOOR,
    KINDS,
    ServeWork,
    TorchPredictor,
    build,
    make_predictor,
)
from oper.bench.serve.pool import Pool
from oper.bench.serve.rate_search import STEP, Search, search
from oper.bench.serve.server_case import _verify
from oper.bench.serve.tiers_case import TiersCase
from oper.errors import OperError
from oper.serve.options import BatchOptions
from oper.serve.wire import HEADER_LENGTH, encode_scores
from tests.bench.helpers import verified

SMALL = ServeWork(Workload(num_rows=(400, 30, 5), dim=8), candidates=6, num_queries=8,
                  dense_layers=(8,), over_layers=(8,))


def result(valid: bool, rate: float = 1.0) -> loadgen.Result:
    return loadgen.Result(valid, rate, {"p50": 1.0, "p90": 5.0, "p99": 9.0}, [])


# ---- the search ----------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [20.0, 95.0, 400.0])
def test_the_search_finds_the_capacity(first: float) -> None:
    searches = {"a": Search(first), "b": Search(2 * first)}
    capacity = {"a": 100.0, "b": 200.0}
    order: list[str] = []
    again: list[int] = []

    def run(name: str, rate: float, before: int) -> loadgen.Result:
        order.append(name)
        again.append(before)
        return result(rate <= capacity[name], rate)

    search(searches, run)
    for name, found in searches.items():
        rate, last = found.best()
        assert capacity[name] / STEP < rate <= capacity[name]
        assert last.valid
        assert sum(rate_ == rate for rate_, *_ in found.to_json()) == 2  # seen twice
    assert order[:4] == ["a", "b", "b", "a"]
    assert set(again) == {0, 1}  # another seed when a rate is tried again


def searched(run: Callable[[float, int], loadgen.Result], start: float, votes: int = 2) -> Search:
    """Run a single search; `run` gets the rate and its number of earlier runs."""
    found = Search(start, votes)
    search({"a": found}, lambda _, rate, before: run(rate, before))
    return found


@pytest.mark.parametrize("votes", [2, 3])
@pytest.mark.parametrize("offset", range(5))
def test_disturbances_do_not_change_the_result(votes: int, offset: int) -> None:
    """Every fifth run is disturbed at any rate, which does not change the result."""
    count = iter(range(offset, 1000))
    found = searched(lambda rate, _: result(next(count) % 5 > 0 and rate <= 100.0, rate), 60.0,
                     votes)
    assert 100 / STEP < found.best()[0] <= 100, found.to_json()


def test_a_search_ends() -> None:
    found = searched(lambda *_: result(False), 5.0)
    assert found.best()[0] == 0
    assert found.runs[-1][0] == 0  # one query per second
    late = Search(5.0)
    search({"a": late}, lambda *_: result(True), seconds=0)
    assert len(late.runs) == 1  # of the first turn, whatever the time


# ---- LoadGen -------------------------------------------------------------------------------------


def answering(pairs: list[tuple[int, int]]) -> None:
    threading.Timer(0.001, loadgen.complete, ([k for k, _ in pairs],)).start()


def test_results_of_loadgen() -> None:
    found = loadgen.run(loadgen.Settings("Server", 200, 0.5, num_samples=4), answering)
    assert 100 < found.rate < 300
    assert 1.0 < found.latency_ms["p50"] <= found.latency_ms["p99"] <= found.latency_ms["p99.9"]
    late = loadgen.run(loadgen.Settings("Server", 200, 0.5, bound_ms=0.1, num_samples=4), answering)
    assert not late.valid
    assert any("Performance constraints" in n for n in late.notes)
    single = loadgen.run(loadgen.Settings("SingleStream", 400, 0.2, num_samples=4), answering)
    assert single.latency_ms["p50"] > 1.0
    offline = loadgen.run(loadgen.Settings("Offline", 400, 0.2, num_samples=4), answering)
    assert not offline.valid  # far faster than expected, so the run is too short
    assert offline.notes == ["Min duration satisfied: NO"]
    assert loadgen.Settings("Server", 1, 5).to_json()["shortened"]
    assert not loadgen.Settings("Server", 1, 600).to_json()["shortened"]


def test_an_error_while_issuing_is_raised() -> None:
    def broken(pairs: list[tuple[int, int]]) -> None:
        raise ValueError("no worker")

    with pytest.raises(OperError, match="no worker"):
        loadgen.run(loadgen.Settings("SingleStream", 100, 0.1), broken)


def test_other_text_is_not_a_summary() -> None:
    with pytest.raises(OperError, match="LoadGen's summary"):
        loadgen.parse("Result is : VALID")


# ---- what is read off ----------------------------------------------------------------------------


def test_pss_counts_resident_memory() -> None:
    before = pss_bytes(os.getpid(), "oper-pss-test")
    number = os.memfd_create("oper-pss-test")
    try:
        os.ftruncate(number, 4 << 20)
        with mmap.mmap(number, 4 << 20) as area:
            area[:1 << 20] = b"x" * (1 << 20)
            assert (before, pss_bytes(os.getpid(), "oper-pss-test")) == (0, 1 << 20)
            assert num_descriptors(os.getpid()) > 3
            with mmap.mmap(-1, 4 << 20) as more:
                unfiled = unfiled_pss_bytes(os.getpid())
                more[::4096] = bytes(1 << 10)  # one byte of each page
                grown = unfiled_pss_bytes(os.getpid()) - unfiled
                assert 4 << 20 <= grown < 6 << 20
    finally:
        os.close(number)
    assert pss_bytes(os.getpid()) > unfiled_pss_bytes(os.getpid()) > 10 << 20
    with pytest.raises(FileNotFoundError):
        pss_bytes(2 ** 22 + 1)


def test_requests_in_flight_during_a_publication() -> None:
    begin, end = np.array([0.0, 1.0, 2.5, 3.0]), np.array([0.5, 2.1, 2.6, 4.0])
    seen = Seen(result(True), begin, end, np.ones(4), 0, 0, 0, [])
    assert _overlaps(seen, [(2.0, 2.4), (3.9, 5.0)]).tolist() == [
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
        for kind in (*KINDS, FLOOR):
            pools[kind] = Pool(kind, SMALL, BatchOptions(64, 0.0), 1)
        verdicts = _verify(pools, SMALL)
        assert all(v["passed"] for v in verdicts.values()), verdicts
        memory = pools["oper"].memory(1)
        assert memory["tables_pss_bytes_of_publisher"] > 0
        assert memory["total_pss_bytes"] == sum(
            sum(x) if isinstance(x, list) else x for k, x in memory.items() if k[:5] != "total")
        assert "own_pss_bytes_of_publisher" in memory
        for pool in pools.values():
            pool.configure(1, 1, 6, "eager")
            assert pool.run(1, loadgen.Settings("Server", 50, 0.3, min_queries=8,
                                                num_samples=8)).rate > 0
        os.kill(pools["torch"]._workers[0].process.pid, signal.SIGKILL)
        with pytest.raises(OperError, match="a worker failed during the run: contender='to"):
            pools["torch"].run(1, loadgen.Settings("Server", 50, 0.3, num_samples=8))
    finally:
        for pool in pools.values():
            pool.close()


def test_torchrec_keeps_one_copy_of_its_rows() -> None:
    """Its modules keep the quantised rows twice; without the second copy, scores are the same."""
    from torchrec.inference.modules import quantize_inference_model

    predictor = make_predictor("torchrec", SMALL, "")
    copies = [m._table_name_to_quantized_weights for m in predictor._models["eager"].modules()
              if hasattr(m, "_table_name_to_quantized_weights")]
    assert copies == [None]
    shipped = TorchPredictor(quantize_inference_model(
        build(SMALL, "cpu"), fp_weight_dtype=torch.qint8, quantization_dtype=torch.qint8),
        SMALL.signature, ("eager",))
    for variant in predictor.variants:
        predictor.variant = variant
        np.testing.assert_allclose(predictor.predict(SMALL.query(0))[0],
                                   shipped.predict(SMALL.query(0))[0], atol=1e-6)


def test_all_contenders_score_in_inference_mode() -> None:
    """Its operators take less time than those under `torch.no_grad`."""
    modes: list[bool] = []

    def logits(dense: torch.Tensor, _: Any) -> torch.Tensor:
        modes.append(torch.is_inference_mode_enabled())
        return dense[:, 0]

    model: Any = logits
    TorchPredictor(model, SMALL.signature, ("eager",)).predict(SMALL.query(0))
    assert modes == [True]


class _Answering:
    """Stands in for a worker process: a thread that answers each query by a message, or exits at
    the first query."""

    pid = 0

    def __init__(self, exits: bool) -> None:
        self.pipe, theirs = Pipe()
        threading.Thread(target=self._work, args=(theirs, exits), daemon=True).start()

    def _work(self, pipe: Any, exits: bool) -> None:
        with pipe, contextlib.suppress(EOFError):
            while (message := pipe.recv()) and not exits:
                for number, _ in message[1]:
                    pipe.send(number)

    def send(self, *words: Any) -> None:
        self.pipe.send(words)

    def wait(self) -> None:
        pass

    close = wait


def test_a_worker_that_exits_while_all_queues_are_full_ends_the_run(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[_Answering] = []

    def start(*_: Any) -> _Answering:
        started.append(_Answering(exits=not started))
        return started[-1]

    monkeypatch.setattr(Pool, "_start", start)
    failed: list[OperError] = []

    def run() -> None:
        pool = Pool("torch", SMALL, BatchOptions(), 2)
        with contextlib.closing(pool), pytest.raises(OperError, match="a worker failed") as error:
            pool.run(2, loadgen.Settings("Offline", 100_000, 1.0, num_samples=8))
        failed.append(error.value)

    running = threading.Thread(target=run, daemon=True)
    running.start()
    running.join(60)
    assert failed


def test_publications_under_load() -> None:
    case = LiveCase("publish", "publish", SMALL, workers=1, seconds=0.6, swaps=4, run_s=0.3,
                    min_queries=16, votes=1, search_s=2.0, load=0.3)
    entry, = verified(case, figures=serve.FIGURES)
    assert (entry["errors"], entry["swaps"]) == (0, 4)
    assert entry["epochs_seen"] > 1 and entry["requests_during_swaps"] > 0


def test_http_is_compared_with_scoring_in_process() -> None:
    case = LiveCase("http-10ms", "http", SMALL, workers=1, seconds=0.3, run_s=0.3, min_queries=64,
                    votes=1, search_s=2.0, bound_ms=1e-3)
    entry, = verified(case, figures=serve.FIGURES)
    assert entry["queries_per_s"] == 0  # a microsecond is too short, but the entry is complete
    lowest = min(r[0] for r in entry["capacity"]["http"]["search"])
    assert entry["target_qps"] == pytest.approx(case.load * lowest, abs=0.1)
    assert 0 < entry["latency_ms"]["http"]["p50"] <= entry["p99_ms"]
    assert entry["single_ms"] > 0 and 0 < entry["client_cores"] < 2
    # The kernel counts processor time in steps of 10 ms, and so few queries may take less.
    cpu_ms = entry["cpu_ms_per_query"]
    assert entry["ratio_in_process"] == pytest.approx(
        cpu_ms["in_process"] / cpu_ms["http"] if cpu_ms["http"] else 0.0, rel=0.01, abs=1e-3)
    assert entry["torchrec_max_abs_diff"] < 1e-5 and entry["torchrec_single_ms"] > 0
    assert entry["ratio_torchrec"] is None  # no rate of either keeps that bound
    assert set(entry["latency_ms"]) == {"http", "in_process"}  # at one rate
    assert [r["failed"] + r["wrong"] for r in entry["runs"]] == [0] * 3
    assert entry["loadgen"]["min_queries"] == 64 <= min(r["requests"] for r in entry["runs"])


def test_candidates_are_named_once_and_in_full() -> None:
    case = LiveCase("candidates", "candidates", replace(SMALL, user_features=1), workers=1,
                    seconds=0.3, run_s=0.3, min_queries=64, votes=1, search_s=2.0,
                    bound_ms=1e3)
    entry, = verified(case, figures=serve.FIGURES)
    assert entry["max_abs_diff"] < 1e-5 and entry["errors"] == 0, entry
    assert entry["single_ms"] > 0 and entry["full_single_ms"] > 0
    assert {"queries_per_s", "full_queries_per_s", "ratio_full", "cpu_ratio_full"} <= set(entry)
    assert [r["failed"] + r["wrong"] for r in entry["runs"]] == [0] * 6
    assert min(r["requests"] for r in entry["runs"]) >= 64


def test_types_by_hotness_are_compared_with_int8_rows() -> None:
    work = Workload(num_rows=(5000, 300, 40), dim=16, batch_size=512)
    case = TiersCase("tiers", replace(SMALL, work=work, in_order=True), workers=1,
                     error_budget=5e-4, samples=4096, rounds=2, round_s=0.2)
    entry, = verified(case, figures=serve.FIGURES)
    assert 0 < entry["error"] <= 5e-4
    assert set(entry["share_of_rows"]) >= {"int8", "int4"}
    assert 0.5 < entry["bytes_ratio"] < 1
    interval = entry["queries_ratio_interval"]
    assert 0 < interval["low"] <= entry["queries_ratio"] <= interval["high"]
    assert set(entry["queries_ratio_of_equal_sets"]) == {"mean", "low", "high"}
    worse, with_int4 = entry["auc_difference"], entry["auc_difference_int4"]
    assert worse["low"] <= worse["mean"] <= worse["high"]
    assert abs(worse["mean"]) <= abs(with_int4["mean"])
    assert entry["samples"] >= 4096 and 0.6 < entry["auc"]["int8"] < 0.9


def test_ids_in_hotness_order_are_those_that_are_scattered() -> None:
    work = Workload(num_rows=(50, 7), dim=8, pooling=3, lengths=(3, 1))
    scattered, ordered = (ServeWork(work, candidates=40, user_features=1, in_order=x).query(5)
                          for x in (False, True))
    assert np.array_equal(scattered.lengths, ordered.lengths)
    assert ordered.lengths[0].tolist() == [3] + [0] * 39 and (ordered.lengths[1] == 1).all()
    assert ordered.ids.size == 43
    for part in (slice(0, 3), slice(3, 43)):
        pairs = set(zip(scattered.ids[part].tolist(), ordered.ids[part].tolist(), strict=True))
        assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})


def test_deltas_are_served_under_load() -> None:
    case = DeltaCase("delta", SMALL, workers=1, rate=50.0, deltas=9, every_s=0.1, changed=0.1,
                     rounds=2, steps=3, wholes=2)
    entry, = verified(case, figures=serve.FIGURES)
    assert entry["bit_equal"]
    assert (entry["torn"], entry["errors"], entry["deltas"]) == (0, 0, 9)
    assert entry["epochs_seen"] > 1 and entry["least_change_of_scores"] > 0
    for key in ("bytes_share", "time_share", "peak_ratio", "lag_p99_s", "p99_ratio"):
        assert 0 < entry[key] < float("inf"), key
    for phase, found in entry["latency_ms"].items():
        assert 0 < found["p50"] <= found["p90"] <= found["p99"]
        assert found["p99"] == pytest.approx(np.median(entry["p99_ms_by_round"][phase]), abs=2e-3)
    assert entry["p99_ratio"] == pytest.approx(
        entry["latency_ms"]["deltas"]["p99"] / entry["latency_ms"]["quiet"]["p99"], abs=1e-4)


def test_torn_answers_are_found(tmp_path: Path) -> None:
    """Responses with the scores of another epoch, or with an epoch that did not exist, are torn."""
    case = DeltaCase("delta", SMALL, changed=0.1, deltas=2, rounds=1, steps=2)
    trainer = Child(_train, (case, str(tmp_path / "run")), "the training process")
    try:
        trainer.wait()
        trainer.ask("run", True, 2, 0.0, case.changed)
    finally:
        trainer.close()
    check = _Check(case, tmp_path)
    try:
        scores = check._score(0)
        made = [Publication(step, 0.0, 0.0) for step in (1, 2)]
        seen = [(0, epoch, scores) for epoch in (2, 4, 6, 8)]
        assert check.torn(made, 2, seen) == 3
        assert check.moved > 0
    finally:
        check.close()


def test_queries_are_sent_again_and_failures_are_counted() -> None:
    """A server that breaks connections, is overloaded, closes connections, refuses, and scores."""
    body, length = encode_scores(np.zeros(SMALL.candidates, np.float32), 1, "bench")
    ok = (f"HTTP/1.1 200 OK\r\noper-worker: 7\r\n{HEADER_LENGTH}: {length}\r\ncontent-length: "
          f"{len(body)}\r\n").encode()
    answers = iter([b"", b"HTTP/1.1 503 x\r\ncontent-length: 0\r\n\r\n",
                    ok + b"connection: close\r\n\r\n" + body,
                    b"HTTP/1.1 400 x\r\ncontent-length: 3\r\n\r\nbad"])

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            answer = next(answers, ok + b"\r\n" + body)
            self.wfile.write(answer)
            self.close_connection = not answer or b"connection: close" in answer

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            sender = _Sender(f"127.0.0.1:{server.server_address[1]}", SMALL, 4)
            sender._expected = {1: np.zeros((8, SMALL.candidates), np.float32)}
            seen = sender.run(loadgen.Settings("SingleStream", 500, 0.2, num_samples=8))
            assert (seen.retries, seen.failed, seen.wrong, seen.messages) == (2, 1, 0, ["bad"])
            assert seen.begin.size >= 64 and (seen.epoch == 1).sum() == seen.begin.size - 1
            sender._expected[1][0] += 1
            seen = sender.run(loadgen.Settings("SingleStream", 500, 0.2, num_samples=8))
            assert 0 < seen.wrong < seen.begin.size and not seen.failed
        finally:
            server.shutdown()
            thread.join()

