"""The cluster benchmark: emulated hosts, its cases, and the cleanup after it is killed."""

import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchrec.distributed.planner.types import PlannerError

from oper import cli
from oper.bench.cluster import case, grid, network
from oper.bench.cluster.case import Case
from oper.bench.cluster.comparisons import FewerBits, LinkChange, Overlap, ReplicaGroupsCase
from oper.bench.cluster.contenders import Contender, Planned
from oper.bench.cluster.network import Links, OnHosts, cluster, why_no_quota, why_not
from oper.bench.cluster.quality import LOG, LogQuality
from oper.bench.core import record, workload
from oper.bench.tables.sides import Side
from oper.errors import InvalidInputError
from oper.report.bench_page import bench_page
from oper.topology import Topology
from tests.bench.helpers import verified

emulated = pytest.mark.skipif(bool(why_not()), reason=why_not() or "namespaces can be made")
ROOT = Path(__file__).resolve().parents[2]
TINY = workload.Workload((3000, 400, 30), 16, 256, 4, lengths=(4, 1, 4))
CASE = Case("tiny", Links(2, 50), TINY, num_batches=4, num_stats_batches=4, timed_s=0.1)
# The program of another process, which runs until it is killed.
_BUSY = """
import subprocess, sys, time
from oper.bench.cluster.network import Links, cluster
with cluster(Links(2, 100)) as rank_options:
    child = subprocess.Popen([*rank_options[0].command, "sleep", "600"])
    print(child.pid, flush=True)
    time.sleep(600)
"""


def _namespaces() -> list[str]:
    folder = Path("/run/netns")
    return [p.name for p in folder.glob(f"{network.PREFIX}*")] if folder.is_dir() else []


def _run(*cases: OnHosts) -> list[dict[str, Any]]:
    """Measure cases; their entries must be verified, and can be shown as text and as a page."""
    entries = verified(*cases, figures=grid.FIGURES)
    assert not _namespaces()
    for entry in entries:
        page = bench_page(record.record("cluster", ["oper"], [entry], 0.0) | grid.totals([entry]))
        assert all(name in page for name in (entry["name"], *entry.get("contenders", ())))
    return entries


@emulated
def test_two_hosts_measure_and_verify() -> None:
    entry, = _run(CASE)
    # Both directions at the same time; one direction alone would give half of this.
    assert all(37 < x < 55 for x in entry["measured"]["link_mbits"])
    found = entry["contenders"]
    assert {"oper", "torchrec-table_wise", "torchrec-mixed", "torchrec-column_wise",
            "torchrec-any"} <= set(found)
    assert found["oper"]["step"]["n"] >= 12 and entry["oper_step_ms"] > 0
    names = [n for n, x in found.items() if x["runtime"] == "oper"] + [
        n for x in found.values() for n in x["also"]] + list(entry["left_out"])
    assert {"row-wise", "random", "ugache-lp", "hugectr-split-and-place"} <= set(names)
    timed = [x for n, x in found.items() if not x["is_screened_only"] and n != "oper"]
    assert timed and all(x["over_oper"]["low"] <= x["over_oper"]["mean"] <= x["over_oper"]["high"]
                         for x in timed)
    best = min((x["executed_ms"], n) for n, x in found.items()
               if x["runtime"] == "torchrec" and not x["is_screened_only"])
    assert (entry["torchrec_step_ms"], entry["torchrec_best"]) == best
    assert entry["ratio_step"] == pytest.approx(best[0] / entry["oper_step_ms"], rel=1e-3)
    # The counted bytes are the simulated ones, TCP's headers and acknowledgements, and two
    # barriers.
    assert 1.0 <= entry["bytes_ratio_without_headers"] < entry["bytes_ratio"] < 1.4
    assert entry["dropped_packets"] == 0


@emulated
@pytest.mark.slow
def test_calibrate_measures_the_links_of_hosts(tmp_path: Path) -> None:
    """``oper calibrate`` under torchrun on two hosts measures the bandwidth between them."""
    links, target = Links(2, 50), tmp_path / "hosts.toml"
    with cluster(links) as rank_options:
        network.set_rates(links, True)
        started = [subprocess.Popen(
            [*options.command, sys.executable, "-m", "torch.distributed.run", "--nnodes=2",
             f"--node-rank={k}", "--nproc-per-node=1",
             f"--master-addr={options.environment['MASTER_ADDR']}", "-m", "oper", "calibrate",
             "--quick", "-o", str(target)],
            env={**os.environ, "GLOO_SOCKET_IFNAME": network.INTERFACE}, cwd=ROOT)
            for k, options in enumerate(rank_options)]
        assert [p.wait(timeout=300) for p in started] == [0, 0]
    found = Topology.from_toml(target)
    assert [d.host for d in found.domains] == [0, 1]
    assert all(40 < 8e3 * d.cross_gbps < 50 for d in found.domains)


@emulated
@pytest.mark.slow
def test_a_link_drops_while_a_model_trains() -> None:
    """The host of the slow link waits for its own rows under any plan, so a move gains little, and
    happens only once it has saved its cost. The rows equal those of a run without moves."""
    work = workload.Workload((4_000, 2_000, 800, 40), 64, 513, 4)
    found, = _run(LinkChange("drops", Links(3, 100), work, num_batches=8, num_stats_batches=8))
    event = found["events"][0]
    assert event["kind"] in ("better plan", "no better plan") and 33 <= event["step"] <= 48
    slow, *others = event["link_mbits"]
    assert slow < 28 and all(60 < x < 105 for x in others)
    assert found["step_slow_ms"] > 2 * found["step_before_ms"]
    assert found["ratio_fresh"] < 1.1


@emulated
@pytest.mark.slow
def test_replica_groups_behind_a_slow_uplink() -> None:
    """Two racks whose uplink carries less than a step of one group needs."""
    work = workload.Workload((20_000, 5_000, 800, 40), 64, 2048, 1)
    found, = _run(ReplicaGroupsCase("groups", Links(4, 200, uplink_mbits=10), work, num_batches=8,
                                    num_stats_batches=8))
    assert found["largest_difference"] > 0
    assert set(found["replica_groups"].values()) == {2} and found["ratio_groups"] > 1.2
    assert min(found["ratio_delayed"], found["ratio_rounded"]) > found["ratio_groups"]
    assert (found["bound_delayed_ms"] <= found["predicted_delayed_ms"]
            < found["predicted_groups_ms"] < found["predicted_one_group_ms"])


@emulated
@pytest.mark.slow
def test_fewer_bits_send_fewer_bytes() -> None:
    work = replace(TINY, num_rows=(30_000, 4_000, 300), dim=64)
    found, = _run(FewerBits("fewer", Links(2, 50), work, num_batches=4, num_stats_batches=4,
                            message_variance=1e-3))
    assert 0 < found["largest_rounding"] <= 1 and 0 < found["answers_error"] < 1e-3
    exact, fewer = found["contenders"].values()
    assert exact["message_bits"] == [32, 32] and np.min([*fewer["message_bits"].values()]) < 16
    for x in (exact, fewer):
        assert 1.0 <= x["bytes_ratio_without_headers"] < x["bytes_ratio"] < 1.4
    assert found["fewer_bytes"] == pytest.approx(
        exact["counted_bytes"] / fewer["counted_bytes"], rel=1e-3)
    assert found["fewer_bytes"] > 2 and found["fewer_bits_speedup"] > 1
    assert found["message_variance"]["used"] <= 1e-3


@emulated
@pytest.mark.slow
@pytest.mark.skipif(not workload.data_files(LOG), reason="OPER_DATA has no log of MovieTweetings")
def test_quality_with_fewer_bits() -> None:
    sharded: dict[str, Any] = {"oper": {}, "fewer": {"message_variance": 5e-4}}
    found, = _run(LogQuality("quality", Links(2, 50), sharded, num_seeds=2, max_steps=12))
    assert found["fewer_bytes"] > 1.5 and found["samples"] > 10_000
    for key in ("log_loss_difference", "auc_difference"):
        assert found[key]["low"] <= found[key]["mean"] <= found[key]["high"], key
        assert found[key]["low"] < found[key]["high"]


@emulated
@pytest.mark.slow
def test_the_limit_of_overlap() -> None:
    # The link takes longer than the computation even on a busy machine, but not so much longer that
    # what it cannot hide would be within the error of its measured rate.
    found, = _run(Overlap("overlap", Links(2, 200), CASE.work, num_batches=8, num_stats_batches=8))
    assert len(found["sides"]) == 3 and found["overlap_ratio"] < found["overlap_limit"]
    for side in found["sides"].values():
        sent = max(side["sent_bytes_by_host"])
        assert side["link_ms"] == pytest.approx(8e-3 * sent / 200, rel=0.3)
        assert side["least_ms"] == max(side["link_ms"], side["unlimited_ms"])
        assert side["least_ms"] < side["executed_ms"]


@emulated
@pytest.mark.slow
def test_a_whole_dlrm() -> None:
    entry, = _run(replace(CASE, whole_model=True))
    assert "dense" in entry["contenders"]["oper"]["verification"]["max_relative_diff"]
    assert entry["ratio_step"] > 0 and entry["predicted_step_ms"] is None
    parted = entry["contenders"]["oper-micro-batches"]
    assert {"dense", "tables"} <= set(parted["verification"]["max_relative_diff"])
    assert parted["runtime"] == "oper in parts" and entry["best_peer"] != "oper-micro-batches"
    assert entry["overlap_ratio"] == pytest.approx(
        entry["oper_step_ms"] / parted["executed_ms"], rel=1e-3)
    assert grid.totals([entry])["num_predicted"] == 0


@emulated
@pytest.mark.slow
def test_irregular_clusters_and_inference() -> None:
    links = Links(3, 80, ranks_per_host=2, slow_host_share=0.5, uplink_mbits=60,
                  host_0_cpu=0.9 if not why_no_quota() else 1.0)
    entry, lookups = _run(
        replace(CASE, links=links),
        replace(CASE, name="lookups", links=links, objective="inference", memory_share=0.5))
    for found in (entry, lookups):
        slow, *others = found["measured"]["link_mbits"]
        assert slow < 45 and all(x < 85 for x in others)
        assert all(30 < x < 62 for x in found["measured"]["uplink_mbits"])
    assert lookups["objective"] == "inference" and "ddp-dense" in lookups["left_out"]


@emulated
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_namespace_is_left(number: signal.Signals) -> None:
    busy = subprocess.Popen([sys.executable, "-c", _BUSY], stdout=subprocess.PIPE, text=True,
                            cwd=ROOT, stderr=subprocess.DEVNULL,
                            env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert busy.stdout is not None
    child = os.pidfd_open(int(busy.stdout.readline()))
    with pytest.raises(InvalidInputError, match="process"), cluster(Links(2, 100)):
        pass
    assert _namespaces()
    busy.send_signal(number)
    assert busy.wait(timeout=60) != 0
    busy.stdout.close()
    if number == signal.SIGKILL:
        assert len(_namespaces()) == 3  # two hosts and a switch
        with cluster(Links(4, 100, uplink_mbits=50)) as rank_options:
            assert len(_namespaces()) == 6 and len(rank_options) == 4
    assert not _namespaces()
    assert select.select([child], [], [], 10)[0]  # what ran on a host has ended
    os.close(child)


def test_without_root(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert cli.main(["bench", "cluster", "--quick"]) == 1
    printed = capsys.readouterr().err.strip().splitlines()
    assert len(printed) == 1 and "root" in printed[0] and "sudo" in printed[0]


class _Refused(Contender):
    """A contender whose `build` raises an error."""

    error: Exception

    def build(self, *_: Any) -> Any:
        raise self.error


def _open(name: str, runtime: str, error: Exception) -> str:
    contender = _Refused(name, runtime)
    contender.error = error
    return case._Runner(CASE, lambda text: None)._open(contender, None)


def test_refused_contenders_are_left_out_and_bugs_are_raised() -> None:
    refused = InvalidInputError("no", "x", 1, "2", "none")
    assert _open("peer", "oper", refused).startswith("InvalidInputError: no")
    assert "no memory" in _open("torchrec-any", "torchrec", PlannerError("no memory"))
    for name, runtime, error in (("oper", "oper", refused), ("peer", "oper", TypeError("a bug")),
                                 ("torchrec-any", "torchrec", RuntimeError("a bug"))):
        with pytest.raises(type(error)):
            _open(name, runtime, error)


def test_a_slow_first_step_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(case.dist, "barrier", lambda: None)
    runner, taken = case._Runner(CASE, lambda text: None), dict[str, list[float]]()
    runner.given = [None]

    def opened(contender: Contender, problem: Any) -> str:
        def step(batch: Any) -> None:
            times = taken[contender.name]
            time.sleep(0.2 if contender.name == "slow" or not times else 0.01)
            times.append(0.0)

        taken[contender.name] = []
        runner.sides[contender.name] = Side("", torch.nn.Identity(), torch.nn.Identity(), [], None,
                                            [])
        monkeypatch.setattr(case, "over", lambda given, call: step)
        return ""

    monkeypatch.setattr(runner, "_open", opened)
    every = [Contender(n, "oper") for n in ("oper", "peer", "slow")]
    found = runner._screen(every, Planned([], {}, None, {}, {}), None)
    assert found["oper"] < 100 and found["peer"] < 100 and found["slow"] > 150
    assert all(len(x) >= 2 for x in taken.values())
    assert list(runner.sides) == ["oper", "peer"]


def test_totals_count_predicted_contenders_only() -> None:
    def contender(runtime: str, executed: float, predicted: float | None) -> dict[str, Any]:
        return {"runtime": runtime, "executed_ms": executed, "predicted_ms": predicted}

    entries = [
        {"contenders": {"oper": contender("oper", 100, 90), "a": contender("oper", 200, 150),
                        "b": contender("oper", 202, 140), "c": contender("oper", 300, 145),
                        "t": contender("torchrec", 400, 10), "d": contender("torch", 50, None)}},
        {"skipped": "no cgroup"}]
    found = grid.totals(entries)
    # Errors 0.1, 0.25, 0.307, 0.517; a and b are too close to have an order, a and c have another.
    assert found["median_error"] == pytest.approx((0.25 + 62 / 202) / 2, abs=1e-3)
    assert found["worst_error"] == pytest.approx(155 / 300, abs=1e-3)
    assert found["ordered"] == pytest.approx(4 / 5) and found["num_ordered_pairs"] == 5
    assert grid.totals([])["ordered"] is None
