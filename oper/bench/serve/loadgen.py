"""MLPerf LoadGen: one run, its settings and its result.

``pip install mlcommons-loadgen`` provides the module ``mlperf_loadgen``. A run's verdict (VALID or
INVALID) and its percentiles are read from LoadGen's own summary. MLPerf asks for runs of 10
minutes; shorter ones are marked.

Source: https://github.com/mlcommons/inference/tree/master/loadgen
"""

from __future__ import annotations

import contextlib
import gc
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from oper.errors import OperError, needs

MLPERF_MIN_DURATION_S = 600.0
PERCENTILES = ("50.00", "90.00", "99.00", "99.90")
Issue = Callable[[list[tuple[int, int]]], None]  # pairs of query id and sample index


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one LoadGen run.

    Attributes:
        scenario: ``"Offline"``, ``"Server"`` (Poisson arrivals) or ``"SingleStream"``.
        expected_qps: queries per second: Server's target rate; in other scenarios an estimate, from
            which LoadGen generates the queries in advance.
        min_duration_s, min_queries: minimum duration (s) and queries of the run.
        bound_ms: Server's latency bound (ms), which 99 % of the queries must meet.
        num_samples: number of distinct samples, from which LoadGen draws indices.
        seed: seed of sample indices and arrivals.
    """

    scenario: str
    expected_qps: float
    min_duration_s: float = 3.0
    min_queries: int = 64
    bound_ms: float = 10.0
    num_samples: int = 512
    seed: int = 20240229

    def to_json(self) -> dict[str, Any]:
        """The settings as an entry of the benchmark record."""
        return {**asdict(self), "shortened": self.min_duration_s < MLPERF_MIN_DURATION_S}


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a run of LoadGen.

    Attributes:
        valid: whether LoadGen's verdict is VALID for the minimum duration of the settings.
        rate: completed queries (LoadGen's samples) per second.
        latency_ms: latency (ms) by percentile, e.g. ``"p99"``, and ``"mean"``.
        notes: LoadGen's messages about constraints that were not satisfied.
    """

    valid: bool
    rate: float
    latency_ms: dict[str, float]
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        """The result as an entry of the benchmark record."""
        return {"verdict": "VALID" if self.valid else "INVALID",
                "queries_per_s": self.rate, "latency_ms": self.latency_ms, "notes": self.notes}


def library() -> Any:
    """The module ``mlperf_loadgen``; raises MissingDependencyError."""
    with needs("cannot generate load", "oper[bench]"):
        import mlperf_loadgen
    return mlperf_loadgen


def complete(ids: list[int]) -> None:
    """Report answered queries to LoadGen; may be called from any thread."""
    lg = library()
    lg.QuerySamplesComplete([lg.QuerySampleResponse(k, 0, 0) for k in ids])


def run(settings: Settings, issue: Issue) -> Result:
    """Run LoadGen with `issue`, after which `complete` must be called for every query.

    Raises:
        OperError: `issue` raised an exception (which LoadGen suppresses), or LoadGen wrote no
            summary.
    """
    lg = library()
    failures: list[Exception] = []

    def issue_all(samples: Any) -> None:
        pairs = [(s.id, s.index) for s in samples]
        try:
            issue(pairs)
        except Exception as error:
            failures.append(error)
            complete([k for k, _ in pairs])

    sut = lg.ConstructSUT(issue_all, lambda: None)
    # Every contender has the samples in memory before the run, as MLPerf's rules require.
    qsl = lg.ConstructQSL(settings.num_samples, settings.num_samples, lambda _: None,
                          lambda _: None)
    with tempfile.TemporaryDirectory(prefix="oper-loadgen-") as folder:
        try:
            with _no_collector():
                lg.StartTestWithLogSettings(sut, qsl, _test_settings(lg, settings),
                                            _log_settings(lg, folder), "")
        finally:
            lg.DestroyQSL(qsl)
            lg.DestroySUT(sut)
        summary = Path(folder) / "mlperf_log_summary.txt"
        text = summary.read_text() if summary.exists() else ""
    if failures:
        raise OperError("a query could not be issued", "error", failures[0], "none",
                        "look at the log of the system under test") from failures[0]
    return parse(text)


@contextlib.contextmanager
def _no_collector() -> Iterator[None]:
    """Disable garbage collection, which would delay queries in the issuing process."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _test_settings(lg: Any, settings: Settings) -> Any:
    test = lg.TestSettings()
    test.scenario = getattr(lg.TestScenario, settings.scenario)
    test.mode = lg.TestMode.PerformanceOnly
    test.min_duration_ms = round(settings.min_duration_s * 1e3)
    test.min_query_count = 1 if settings.scenario == "Offline" else settings.min_queries
    test.server_target_qps = settings.expected_qps
    test.server_target_latency_ns = round(settings.bound_ms * 1e6)
    test.server_target_latency_percentile = 0.99
    test.offline_expected_qps = settings.expected_qps
    test.single_stream_expected_latency_ns = round(1e9 / settings.expected_qps)
    for name in ("qsl", "sample_index", "schedule"):
        setattr(test, f"{name}_rng_seed", settings.seed)
    return test


def _log_settings(lg: Any, folder: str) -> Any:
    log, output = lg.LogSettings(), lg.LogOutputSettings()
    output.outdir, output.copy_summary_to_stdout = folder, False
    log.log_output, log.enable_trace = output, False
    return log


def parse(text: str) -> Result:
    """Parse LoadGen's summary; raises OperError if a field is missing."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, colon, value = line.strip().partition(":")
        if colon:
            fields.setdefault(name.strip(), value.strip())
    try:
        found = {f"p{p.rstrip('0').rstrip('.')}": float(fields[f"{p} percentile latency (ns)"])
                 for p in PERCENTILES}
        found["mean"] = float(fields["Mean latency (ns)"])
        rate = next(float(fields[k]) for k in (
            "Completed samples per second", "Samples per second", "QPS w/ loadgen overhead")
            if k in fields)
        valid = fields["Result is"] == "VALID"
    except (KeyError, ValueError, StopIteration) as error:
        print(text, file=sys.stderr)
        raise OperError("cannot read LoadGen's summary", "field", str(error),
                        "a summary of version 5 or later", "see the summary above") from None
    notes = [re.sub(r"\s+", " ", f"{k}: {v}") for k, v in fields.items()
             if k.endswith("satisfied") and v.upper() == "NO"]
    return Result(valid, rate, {k: v / 1e6 for k, v in found.items()}, notes)
