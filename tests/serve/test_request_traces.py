"""Traces of a server: every request with its stages, batches, limits, refused arguments."""

from __future__ import annotations

import json
import multiprocessing
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oper.errors import InvalidInputError
from oper.serve import Client, ServeOptions, Server, metrics, tracing
from oper.serve.signals import Signals
from oper.support.trace_events import write_trace
from tests.serve_support import Sums, random_request
from tests.support import read_trace, run_here

STAGES = list(metrics.STAGES)


def test_every_request_has_its_stages(tmp_path: Path) -> None:
    """Requests of several clients that overlap, on two workers."""
    path = tmp_path / "trace.json"
    with Server(Sums(0.005), ServeOptions(port=0, workers=2)) as server:
        client = Client(server.address, timeout_s=30)
        until = time.monotonic() + 1.0

        def flow(seed: int) -> list[tuple[float, float]]:
            request, found = random_request(np.random.default_rng(seed), 3), []
            while (begin := time.monotonic()) < until:
                client.score_request(request)
                found.append((begin, time.monotonic()))
            return found

        with ThreadPoolExecutor(6) as pool:
            flows = [pool.submit(flow, k) for k in range(6)]
            time.sleep(0.2)
            begin = time.monotonic()
            count = server.trace(path, 0.4)
            with pytest.raises(InvalidInputError, match="folder"):
                server.trace(tmp_path)
            asked = [x for f in flows for x in f.result()]
        client.close()
    with pytest.raises(InvalidInputError, match="state='stopped'"):
        server.trace(path)
    # Requests answered in the middle of the recording are in it for certain.
    certain = sum(begin + 0.1 < end < begin + 0.3 for _, end in asked)
    trace = read_trace(path)
    bars = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert trace["otherData"] == {"workers": 2, "lost_records": 0}
    lines = defaultdict(list)
    for e in bars:
        lines[e["pid"], e["tid"]].append(e)
    requests = 0
    for (_, thread), found in lines.items():
        if not thread:
            assert {e["name"] for e in found} == {"batch"}
            continue
        for k in range(0, len(found), 6):  # a request, then its stages, one after the other
            whole, *stages = found[k:k + 6]
            assert [whole["name"], *(e["name"] for e in stages)] == ["request", *STAGES]
            assert sum(e["dur"] for e in stages) == pytest.approx(whole["dur"], abs=0.01)
            assert (whole["args"]["samples"], whole["args"]["epoch"]) == (3, 1)
            assert k == 0 or whole["ts"] >= found[k - 6]["ts"] + found[k - 6]["dur"] - 0.002
        requests += len(found) // 6
    assert certain <= requests == count
    assert max(thread for _, thread in lines) > 1  # lines: requests of a worker overlap
    batched = sum(e["args"]["samples"] for e in bars if e["name"] == "batch")
    assert abs(batched - 3 * requests) <= 3 * 6 * 2  # but for those under way at begin or end


class _Worker:
    """A worker's metrics with a tracer, in one process."""

    def __init__(self, predictor: Any = None) -> None:
        shared = metrics.Shared(multiprocessing.get_context("spawn"), 1)
        self.counts = shared.counts
        self.metrics = metrics.WorkerMetrics(shared, 0, predictor or Sums())
        self.tracer = tracing.Tracer(shared)

    def request(self, k: int) -> None:
        self.metrics.observe_request(k, (k + 0.1, k + 0.2, k + 0.3, k + 0.4, k + 0.5), 1, 1)


def test_what_a_ring_cannot_hold_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                            ) -> None:
    """The oldest record of a full ring is not used, since the worker may be replacing it."""
    monkeypatch.setattr(metrics, "_RECORDS", 8)
    worker = _Worker()
    worker.request(0)  # before it

    def write() -> bool:
        assert worker.counts.is_tracing
        for k in range(20):
            worker.request(k)
        return True  # ends the recording

    assert worker.tracer.record(tmp_path / "t.json", 60.0, write) == 7
    trace = json.loads((tmp_path / "t.json").read_text())
    assert trace["otherData"]["lost_records"] == 13 and worker.counts.is_tracing == 0
    starts = [e["ts"] for e in trace["traceEvents"] if e["name"] == "request"]
    assert starts == [k * 1e6 for k in range(7)]


def test_a_recording_ends_before_it_takes_too_much_memory(tmp_path: Path,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_MOST", 10)
    worker = _Worker()

    def write() -> bool:
        for k in range(6):
            worker.request(k)
        return False

    assert worker.tracer.record(tmp_path / "t.json", 60.0, write) == 12


class _Failing(Sums):
    """Its lookups cannot be recorded."""

    def trace_lookups(self, most: int) -> None:
        if self.seconds:
            raise ValueError("no memory")

    def take_lookups(self) -> list[Any]:
        return [(1.0,)]


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_lookups_that_cannot_be_recorded_fail_no_batch(
        seconds: float, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    worker = _Worker(_Failing(seconds))

    def write() -> bool:
        for k in range(3):
            worker.metrics.observe_batch(1, 1, k, k + 0.5)
        return True

    worker.tracer.record(tmp_path / "t.json", 60.0, write)
    names = [e["name"] for e in read_trace(tmp_path / "t.json")["traceEvents"] if e["ph"] == "X"]
    assert names == ["batch"] * 3
    assert caplog.text.count("the predictor cannot record them") == 1


def test_a_recording_leaves_the_publications_of_the_last_one(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next recording may begin while a trace is being written."""
    tracer, join = _Worker().tracer, tracing._joined

    def join_late(*arguments: Any) -> Any:
        monkeypatch.setattr(tracing, "_joined", join)
        tracer.record(tmp_path / "next.json", 0.01, lambda: False)
        return join(*arguments)

    def publish() -> bool:
        tracer.add_publication(1.0, 2.0, 7)
        return True

    monkeypatch.setattr(tracing, "_joined", join_late)
    tracer.record(tmp_path / "t.json", 60.0, publish)
    for name, number in (("t.json", 1), ("next.json", 0)):
        assert (tmp_path / name).read_text().count('"publication"') == number


def test_a_stopping_server_finishes_its_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                              ) -> None:
    server = Server(Sums(), ServeOptions(trace=str(tmp_path / "t.json"), trace_s=60.0))
    signals, worker = Signals(), _Worker()

    def write_late(*arguments: Any) -> None:
        time.sleep(0.3)
        write_trace(*arguments)

    monkeypatch.setattr(tracing, "write_trace", write_late)
    server._thread, server._tracer = threading.Thread(target=server._stop.wait), worker.tracer
    server._thread.start()
    signals.trace = True

    def stop_soon() -> None:
        signals.stop = bool(worker.counts.is_tracing)

    server.serve_until_signalled(stop_soon, signals)
    assert read_trace(tmp_path / "t.json")["otherData"]["lost_records"] == 0


@pytest.mark.parametrize("seconds", [0.0, -1.0, 601.0, float("nan")])
def test_bad_lengths_are_refused(seconds: float, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="above 0, at most 600"):
        ServeOptions(trace=str(tmp_path / "t.json"), trace_s=seconds)


def test_a_length_without_a_file_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"trace_s=.*, expected None without trace"):
        ServeOptions(trace_s=5.0)
    done = run_here("serve", "model", "--trace-s", "5")
    assert done.returncode == 2 and "no value without --trace; add" in done.stderr


@pytest.mark.parametrize("path", ["", "pages"])
def test_files_that_cannot_be_written_are_refused(
        path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pages").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInputError, match="writable folder"):
        tracing.check_trace(path, 5.0)


def test_a_server_that_was_not_started_has_no_trace(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="not started"):
        Server(Sums()).trace(tmp_path / "t.json")
