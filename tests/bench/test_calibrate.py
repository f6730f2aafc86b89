"""Calibration: the fit recovers known costs, real processes are measured, files are read back."""

import json
import os
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from oper.bench.calibrate import calibrate
from oper.bench.calibrate.calibrate import (
    Sample,
    fit,
    last_level_cache_bytes,
)
from oper.bench.calibrate.network import across_hosts, measure_network, of_hosts
from oper.bench.calibrate.worker import KINDS, gather, plan_of
from oper.bench.core.workload import Workload, collect_stats
from oper.errors import InvalidInputError
from oper.search import topology_preset
from oper.topology import Costs, Rack, Topology
from tests.support import run_command

TRUE = Costs(phase_us=40.0, id_ns=3.0, sort_ns=4.0, reduce_ns=4.0, update_ns=20.0, run_ns=2.0,
             refresh_ns=6.0, tier_ns=1.5, push_tier_ns=5.0, push_ns=10.0, push_bag_ns=30.0,
             odd_ns=1.0, table_us=2.0, sort_table_us=5.0, warm_share=0.5)
_SC_LEVEL3_CACHE_SIZE = 194  # of glibc; Python has no name for it
BANDWIDTH = {"read_gbps": 50.0}


def works() -> list[Workload]:
    return [Workload((5000, 300), dim, 512, pooling, exponent)
            for pooling in (1, 20) for dim in (16, 40, 64) for exponent in (0.0, 1.05)]


def true_topology() -> Topology:
    base = Topology.this_host(2)
    domain = replace(base.domains[0], read_gbps=50.0, cache_gbps=150.0,
                     cache_bytes=calibrate.last_level_cache_bytes())
    return replace(base, domains=(domain,), costs=TRUE)


def modelled(work: Workload, kind: str, noise: float = 0.0) -> Sample:
    """A sample of a machine that behaves exactly as modelled."""
    stats = collect_stats(work, 0, 2, 2)
    sample = Sample(work, kind, stats, 0.0, np.zeros((3, 2)),
                    quality={"interval": 0.0, "delayed": 0.0})
    made = true_topology()
    found, = calibrate._modelled(calibrate._stated([sample], made), made)
    clock = np.stack([p.groups.max(axis=0) * 1e6 for p in found.phases])
    shaken = clock * (1 + noise * np.random.default_rng(work.pooling).standard_normal(clock.shape))
    return replace(sample, phases_us=shaken, wall_us=found.step_us)


KINDS_FITTED = ("striped", "replicated", "head replicated", "pushed",
                "head replicated, tail pushed")


@pytest.fixture(autouse=True, scope="module")
def small_cache():
    """A cache that the small workloads of these tests do not fit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrate, "last_level_cache_bytes", lambda: 1 << 18)
        yield


@pytest.fixture(scope="module")
def samples(small_cache) -> list[Sample]:
    return [modelled(w, kind) for w in works() for kind in (*KINDS_FITTED, "owned on one rank")]


def test_the_fit_finds_the_constants_of_the_model(samples) -> None:
    found, residuals = fit([s for s in samples if s.kind in KINDS_FITTED], 2, BANDWIDTH)
    costs = found.costs
    assert costs.sort_ns == costs.reduce_ns  # only their sum shows
    for field in fields(Costs):
        assert getattr(costs, field.name) == pytest.approx(getattr(TRUE, field.name), rel=2e-2)
    assert found.domains[0].read_gbps == pytest.approx(50.0, rel=1e-2)
    assert all(worst < 1e-6 for _, worst in residuals.values())
    assert found.source == "measured"
    # Plans outside the fit are predicted as well, since the samples follow the model.
    value = calibrate.predicted_against_executed(samples, found)
    assert value["median_error"] < 1e-3 and value["spearman_all"] > 0.999
    assert value["num_plans"] == len(samples)


def test_a_wrong_bandwidth_is_found_by_the_fit(samples) -> None:
    """A bare gather on a disturbed machine: the level comes from the steps."""
    half = {k: v / 2 for k, v in BANDWIDTH.items()}
    found, _ = fit([s for s in samples if s.kind in KINDS_FITTED], 2, half)
    assert found.domains[0].read_gbps == pytest.approx(50.0, rel=1e-2)
    assert found.domains[0].cache_gbps == pytest.approx(150.0, rel=1e-2)


def test_noise_shows_in_the_residuals() -> None:
    noisy = [modelled(w, "striped", 0.2) for w in works()]
    _, residuals = fit(noisy, 2, BANDWIDTH)
    assert max(worst for _, worst in residuals.values()) > 0.05


def test_wrong_predictions_show(samples) -> None:
    found, _ = fit([s for s in samples if s.kind in KINDS_FITTED], 2, BANDWIDTH)
    turned = [replace(s, wall_us=1e6 / s.wall_us) for s in samples]
    value = calibrate.predicted_against_executed(turned, found)
    assert value["spearman"] < -0.9 and value["median_error"] > 0.1
    slow = [replace(s, wall_us=2 * s.wall_us) if s.kind == "pushed" else s for s in samples]
    by_kind = calibrate.predicted_against_executed(slow, found)["signed_error_by_kind"]
    assert by_kind["pushed"] == pytest.approx(-0.5, abs=1e-3)
    assert by_kind["striped"] == pytest.approx(0.0, abs=1e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_placement_is_a_valid_plan(kind: str, world_size: int) -> None:
    work = Workload((5000, 30, 2), 16, 24 * world_size, 2)
    plan = plan_of(kind, work.tables(), collect_stats(work, 0, world_size, 1), world_size)
    assert plan.world_size == world_size and len(plan.tables) == 3


def test_the_verb_measures_real_processes(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(calibrate, "workloads", lambda quick, world_size: [
        Workload((3000, 200), 16, 128, p) for p in (1, 5)])
    monkeypatch.setattr(calibrate, "held_out", lambda quick, world_size: [
        Workload((2000, 100), 32, 128, 3)])
    monkeypatch.setattr(calibrate, "last_level_cache_bytes", lambda: 1 << 20)
    target, check = tmp_path / "mine.toml", tmp_path / "check.json"
    assert run_command("calibrate", "-o", target, "--quick", "--check", check) == 0
    made = topology_preset(str(target))
    assert made.world_size == 2 and made.source == "measured"
    d = made.domains[0]
    assert 0.1 < d.read_gbps <= d.cache_gbps < 10_000 and d.cache_bytes == 1 << 20
    case, = json.loads(check.read_text())["cases"]
    assert case["num_plans"] == len(KINDS) >= 10 and case["spread"] > 1
    assert {p["kind"] for p in case["plans"]} == set(KINDS)
    assert all(p["measured_us"] > 0 and p["predicted_us"] > 0 for p in case["plans"])
    assert -1 <= case["spearman"] <= 1
    assert set(case["signed_error_by_kind"]) == set(KINDS)
    assert all(len(p["predicted_phases_us"]) == len(p["measured_phases_us"]) == 3
               for p in case["plans"])
    out = capsys.readouterr().out
    assert "residual" in out and "update_ns" in out and "median error" in out


@pytest.mark.parametrize("words", [["--world-size", "0"], ["--world-size", "100000"],
                                   ["--world-size", "1", "--exchange", "collective"],
                                   ["--check", "{}"], ["-o", "{}"], ["-o", "{}/a.json/b"]])
def test_impossible_measurements_and_outputs_fail_before_work(words: list[str], tmp_path: Path,
                                                              monkeypatch: pytest.MonkeyPatch
                                                              ) -> None:
    monkeypatch.setattr(calibrate, "measure_and_fit", lambda *_: pytest.fail("measured"))
    (tmp_path / "a.json").touch()
    words = ["-o", str(tmp_path / "out.toml"), *(w.format(tmp_path) for w in words)]
    with pytest.raises((InvalidInputError, SystemExit)) as error:
        run_command("calibrate", *words)
    assert error.value.args == (2,) or any(words in str(error.value) for words in (
        "cannot write the result", "--world-size=1, expected >= 2"))


def test_exchanges_between_hosts_are_charged(tmp_path: Path) -> None:
    """The costs of an exchange are measured between real processes and read back from the file."""
    network = measure_network(2)
    assert 1.0 < network["phase_us"] < 1e6
    assert 0.0 < network["ns_per_byte"] < 1e3
    again = read_back(across_hosts(true_topology(), network), tmp_path)
    assert [d.ranks for d in again.domains] == [(0,), (1,)] and again.num_hosts == 2
    assert again.costs.wire_ns == pytest.approx(network["ns_per_byte"], abs=1e-3)


def test_bytes_to_several_ranks_wait_for_no_acknowledgement() -> None:
    """40 ms each, where little may be under way on an interface of large segments: 40 ns a byte."""
    assert measure_network(4)["ns_per_byte"] < 10


def test_a_single_rank_is_measured() -> None:
    assert gather(lambda text: None, 1 << 20)["read_gbps"] > 0


def read_back(made: Topology, folder: Path) -> Topology:
    """A topology as its file has it, without what `oper calibrate` does not measure."""
    path = folder / "made.toml"
    path.write_text(calibrate.as_toml(made))
    again = Topology.from_toml(path)
    assert again.costs == made.costs and again.source == made.source and again.racks == made.racks
    return again


def test_unequal_hosts_are_read_back(tmp_path: Path) -> None:
    """Means of costs, every host's own bandwidths, and a link's share for each rank."""
    here, one = replace(true_topology(), source="measured"), Topology.this_host(1)
    again = read_back(here, tmp_path)
    assert replace(again.domains[0], link_gbps=40.0, cross_gbps=40.0) == here.domains[0]
    made = of_hosts([here, replace(one, costs=replace(TRUE, id_ns=5.0))], [0.05, 0.0125],
                    {"phase_us": 80.0, "ns_per_byte": 0.25},
                    (Rack((0,), 0.02), Rack((1,), 0.01)))
    again = read_back(made, tmp_path)
    assert [d.ranks for d in again.domains] == [(0, 1), (2,)] and again.num_hosts == 2
    assert [d.cross_gbps for d in again.domains] == [0.025, 0.0125]
    assert again.hosts_share_links and [d.read_gbps for d in again.domains] == [50.0, 40.0]
    assert (again.costs.id_ns, again.costs.phase_us, again.costs.wire_ns) == (4.0, 80.0, 0.25)


@pytest.mark.parametrize("words", [["--check", "a.json"], ["--exchange", "collective"]])
def test_options_of_one_host_are_refused_under_torchrun(words: list[str], tmp_path: Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInputError, match="neither under torchrun"):
        run_command("calibrate", "-o", str(tmp_path / "out.toml"), *words)


def test_the_cache_is_limited_by_the_cores_and_by_the_reported_size() -> None:
    cores = os.sysconf("SC_NPROCESSORS_ONLN")
    found = last_level_cache_bytes()
    assert 0 < found <= cores * (4 << 20)
    assert found <= (os.sysconf(_SC_LEVEL3_CACHE_SIZE) or 32 << 20)


def test_rank_correlation_of_equal_values() -> None:
    rising = np.arange(4.0)
    assert calibrate.spearman(rising, rising ** 3) == pytest.approx(1)
    # Ranks 0, 2, 2, 2: the order of equal values does not count as found.
    assert calibrate.spearman(rising, np.array([1.0, 5.0, 5.0, 5.0])) == pytest.approx(0.6 ** 0.5)
    assert calibrate.spearman(rising, np.ones(4)) == 0
