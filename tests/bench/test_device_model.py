"""Modelled steps on several GPUs: bytes by hand, and a case from plan to seconds."""

from __future__ import annotations

import json

import numpy as np
import pytest

from oper.bench.core.report import report
from oper.bench.device import model as device_model
from oper.plan import uniform_plan
from oper.search.problem.presets import topology_preset
from oper.search.replay.simulate import Bags, Replay
from oper.tables import TableSpec


def test_seconds_are_the_slowest_ranks_bytes_over_published_rates() -> None:
    """Eight ranks each read one row of rank 0."""
    table = TableSpec("t", 8, 4, ("f",), "sum", optimizer="sgd")
    plan = uniform_plan((table,), 8, "owned")
    owner = plan.tables[0].pieces[0].tiers[0].ranks[0]
    batch = {"f": Bags(np.array([3]), np.array([1]))}
    topology = topology_preset("h200-8")
    found = device_model.seconds_of(Replay(plan, training=False).step([batch] * 8), topology)
    forward, domain = found["forward"], topology.domains[0]
    assert (forward["own_bytes"], forward["ingress_bytes"], forward["egress_bytes"]) == (
        16, 0, 7 * 16), owner
    slowest = max(8 * 16 / domain.read_gbps, 7 * 16 / domain.link_gbps) / 1e3
    assert forward["us"] == pytest.approx(topology.costs.phase_us + slowest, abs=0.01)
    assert found["step_us"] == pytest.approx(forward["us"] + found["backward"]["us"])


def test_a_workload_is_modelled_and_says_so() -> None:
    case = device_model.Case("small", (16, 3, 2, 8, "float32", 500), 1.05)
    entry = case.measure(lambda text: None)
    assert json.loads(json.dumps(entry)) == entry
    assert "nothing measured" in entry["modelled"] and entry["torchrec"] == "left out"
    own = entry["plans"]["oper"]
    assert own["step_us"] > 0 and own["cost_model_step_us"] > 0
    assert own["forward"]["own_bytes"] + own["forward"]["ingress_bytes"] >= 3 * 16 * 8 * 4
    assert "small: oper" in report([{"name": "small", **entry}], device_model.FIGURES)
    assert "nothing measured" in device_model.NOTE
