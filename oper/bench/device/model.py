"""``oper bench device-model``: modelled steps of the GPU benchmarks' workloads on 8 GPUs.

Modelled, not measured. A batch of each workload is replayed through OPER's plan and TorchRec's,
which counts the bytes that every rank reads by kind and peer exactly as the runtime would. Times
follow from the published rates of the ``h200-8`` preset: a rank's phase takes max(bytes / rate)
over its memory, its ingress and its egress, and a phase takes the maximum over ranks plus the
preset's ``phase_us``. Congestion is not modelled, and nothing was measured on several GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from oper.bench.core.launch import Progress
from oper.bench.device.suite import EXPONENTS, SHAPES
from oper.bench.plan.torchrec_planner import configure_torchrec, torchrec_planner
from oper.bench.plan.workloads import NUM_SAMPLES, power_law
from oper.data.generate.ids import power_law_ids
from oper.plan import Plan
from oper.rows.traffic import KINDS, Traffic
from oper.search.cost.model import evaluate
from oper.search.planner import plan_problem
from oper.search.problem.presets import topology_preset
from oper.search.problem.statement import make_problem
from oper.search.replay.simulate import Bags, Replay
from oper.stats import AccessStats
from oper.tables import TableSpec
from oper.topology import Topology

FIGURES = (tuple(f"plans.*.{key}" for key in (
    "step_us", "forward.us", "backward.us", "forward.ingress_bytes", "backward.ingress_bytes")),)
NOTE = "MODELLED for 8 H200 from counted bytes and published rates, nothing measured\n"

configure = configure_torchrec


@dataclass(frozen=True, slots=True)
class Case:
    """A modelled workload.

    Attributes:
        name: the case's name in the record.
        shape: batch size per rank, number of tables, pooling, dim, dtype, rows per table.
        exponent: exponent of the ids' power law; 0 = uniform.
        torchrec_s: time limit (s) of TorchRec's planner; 0 = without TorchRec.
    """

    name: str
    shape: tuple[int, int, int, int, str, int]
    exponent: float
    torchrec_s: float = 0.0

    def measure(self, progress: Progress) -> dict[str, Any]:
        """Plan and replay; returns the record's entry."""
        topology = topology_preset("h200-8")
        batch_size, num_tables, pooling, dim, dtype, rows = self.shape
        tables = [TableSpec(f"t{k}", rows, dim, (f"f{k}",), "sum", dtype)
                  for k in range(num_tables)]
        stats = AccessStats(NUM_SAMPLES, dict.fromkeys((t.name for t in tables), power_law(
            rows, self.exponent, pooling)), "the distribution")
        problem = make_problem(tables, stats, topology, objective="training",
                               batch_size=batch_size)
        plans: dict[str, Plan] = {"oper": plan_problem(problem)}
        torchrec, planner = "left out", torchrec_planner(self.torchrec_s)
        if planner is not None:
            found = planner.propose(problem)
            torchrec = "planned" if found else f"no plan within {self.torchrec_s:g} s"
            if found:
                best = min(found, key=lambda n: evaluate(found[n], problem).step_us)
                plans[f"torchrec: {best}"] = found[best]
        lengths = np.full(batch_size, pooling, np.int64)
        ranks = [{f"f{k}": Bags(power_law_ids(
            rows, batch_size * pooling, self.exponent, np.random.default_rng((rank, k)),
            scatter=False), lengths) for k in range(num_tables)}
            for rank in range(topology.world_size)]
        return {"torchrec": torchrec,
                "modelled": f"published rates of {topology.name}, nothing measured",
                "plans": {n: {**seconds_of(Replay(p).step(ranks), topology),
                              "cost_model_step_us": round(evaluate(p, problem).step_us, 2)}
                          for n, p in plans.items()}}


def cases(quick: bool, torchrec_seconds: float = 0.0) -> list[Case]:
    """All shapes and exponents of the GPU benchmarks; only uniform ids if `quick`."""
    return [Case(f"modelled-8-{shape}-{ids}", SHAPES[shape], exponent, torchrec_seconds)
            for shape in SHAPES for ids, exponent in EXPONENTS.items() if not (quick and exponent)]


def seconds_of(traffic: Sequence[Traffic], topology: Topology) -> dict[str, Any]:
    """Modelled time (us) and bytes of the slowest rank by phase, and ``step_us``. `traffic` has the
    bytes read by each rank."""
    # [reader, kind, peer]
    size = np.stack([t.num_bytes.sum(axis=1) for t in traffic])
    found: dict[str, Any] = {}
    domain = topology.domains[0]
    for phase in ("forward", "backward"):
        moved = size[:, [k for k, p in enumerate(KINDS.values()) if p == phase]].sum(axis=1)
        own = moved.diagonal()
        ingress, egress = moved.sum(axis=1) - own, moved.sum(axis=0) - own
        # A rank's memory also serves the reads of its peers.
        us = np.maximum.reduce([(own + ingress + egress) / domain.read_gbps,
                                ingress / domain.link_gbps, egress / domain.link_gbps]) / 1e3
        slowest = int(us.argmax())
        found[phase] = {
            "us": round(float(us[slowest]) + topology.costs.phase_us, 2),
            "own_bytes": int(own[slowest]), "ingress_bytes": int(ingress[slowest]),
            "egress_bytes": int(egress[slowest]),
            "imbalance": round(float(us.max() / max(us.mean(), 1e-9)), 3)}
    found["step_us"] = round(found["forward"]["us"] + found["backward"]["us"], 2)
    return found
