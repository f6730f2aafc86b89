"""Modelled, not measured: steps of the device benchmarks' workloads on 8 GPUs of one host.

    python -m oper.bench.device_model OUT.json [--only GLOB] [--torchrec-seconds S]

A batch of each workload is replayed through OPER's plan and through TorchRec's; the bytes that
every rank reads by kind and peer are the runtime's counters, exactly. Seconds follow from the
published rates of the ``h200-8`` preset: a phase of a rank takes the longest of its own memory's,
its ingress' and its egress' bytes over their rates, a phase ends with its slowest rank. No latency,
no congestion, nothing measured on several GPUs goes in.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from oper.bench.core import record
from oper.bench.device.suite import EXPONENTS, SHAPES
from oper.bench.plan.torchrec_planner import TorchRecPlanner
from oper.bench.plan.workloads import power_law
from oper.data.generate.ids import power_law_ids
from oper.plan import Plan
from oper.rows.traffic import KINDS, Traffic
from oper.search.cost.model import evaluate
from oper.search.planner import plan_problem
from oper.search.problem.presets import topology_preset
from oper.search.problem.statement import make_problem
from oper.search.replay.simulate import Bags, Replay
from oper.stats import AccessStats
from oper.support.flags import number
from oper.tables import TableSpec
from oper.topology import Topology

_NUM_SAMPLES = 100_000_000  # behind `power_law`


def main() -> int:
    """Write the record and print it as a table; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", help="file to write")
    parser.add_argument("--only", default="*", metavar="GLOB", help="cases by name")
    parser.add_argument("--torchrec-seconds", type=number(), default=10.0, metavar="S",
                        help="time limit of TorchRec's planner per case (0 = leave it out)")
    args = parser.parse_args()
    topology = topology_preset("h200-8")
    entries: list[dict[str, Any]] = []
    load = record.load_average()
    with_torchrec = args.torchrec_seconds > 0 and importlib.util.find_spec("torchrec")
    for shape in SHAPES:
        for ids, exponent in EXPONENTS.items():
            name = f"modelled-8-{shape}-{ids}"
            if not fnmatch.fnmatch(name, args.only):
                continue
            print(name, file=sys.stderr, flush=True)
            entries.append(model(name, SHAPES[shape], exponent, topology,
                                 args.torchrec_seconds if with_torchrec else 0.0))
            record.write(args.out, record.record("device-model", [
                "python", "-m", "oper.bench.device_model", args.out], entries, load))
    print(report(entries))
    return 0


def model(name: str, shape: tuple[int, int, int, int, str, int], exponent: float,
          topology: Topology, torchrec_s: float) -> dict[str, Any]:
    """One workload: `shape` is batch per rank, tables, pooling, dim, dtype and rows per table."""
    batch_size, num_tables, pooling, dim, dtype, rows = shape
    tables = [TableSpec(f"t{k}", rows, dim, (f"f{k}",), "sum", dtype) for k in range(num_tables)]
    stats = AccessStats(_NUM_SAMPLES, dict.fromkeys((t.name for t in tables), power_law(
        rows, exponent, pooling)), "the distribution")
    problem = make_problem(tables, stats, topology, objective="training", batch_size=batch_size)
    plans: dict[str, Plan] = {"oper": plan_problem(problem)}
    torchrec = "left out"
    if torchrec_s:
        with TorchRecPlanner(torchrec_s) as planner:
            found = planner.propose(problem)
        torchrec = "planned" if found else f"no plan within {torchrec_s:g} s"
        if found:
            best = min(found, key=lambda n: evaluate(found[n], problem).step_us)
            plans[f"torchrec: {best}"] = found[best]
    lengths = np.full(batch_size, pooling, np.int64)
    ranks = [{t.features[0]: Bags(_draw(rank, k, rows, batch_size * pooling, exponent), lengths)
              for k, t in enumerate(tables)} for rank in range(topology.world_size)]
    return {"name": name, "modelled": f"published rates of {topology.name}, nothing measured",
            "torchrec": torchrec,
            "plans": {n: {**seconds_of(Replay(p).step(ranks), topology),
                          "cost_model_step_us": round(evaluate(p, problem).step_us, 2)}
                      for n, p in plans.items()}}


def _draw(rank: int, table: int, rows: int, count: int, exponent: float) -> np.ndarray:
    """Ids in hotness order, int64 [count]."""
    return power_law_ids(rows, count, exponent, np.random.default_rng((rank, table)),
                         scatter=False)


def seconds_of(traffic: Sequence[Traffic], topology: Topology) -> dict[str, Any]:
    """Bytes and modelled microseconds by phase of the slowest rank."""
    # [reader, kind, peer]
    size = np.stack([t.num_bytes.sum(axis=1) for t in traffic])
    found: dict[str, Any] = {}
    domain = topology.domains[0]
    for phase in ("forward", "backward"):
        moved = size[:, [k for k, p in enumerate(KINDS.values()) if p == phase]].sum(axis=1)
        own = moved.diagonal()
        ingress, egress = moved.sum(axis=1) - own, moved.sum(axis=0) - own
        # What others read of a rank leaves its memory as well.
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


def report(entries: Sequence[dict[str, Any]]) -> str:
    """The entries for a person."""
    rows = []
    for e in entries:
        own = e["plans"]["oper"]["step_us"]
        for name, p in e["plans"].items():
            rows.append([e["name"], name, f"{p['forward']['us']:.0f} us",
                         f"{p['backward']['us']:.0f} us", f"{p['step_us']:.0f} us",
                         f"{p['forward']['ingress_bytes'] / 1e6:.1f} MB",
                         f"{p['backward']['ingress_bytes'] / 1e6:.1f} MB",
                         "" if name == "oper" else f"{p['step_us'] / own:.2f}x"])
    headers = ["MODELLED, 8 H200", "plan", "forward", "backward", "step", "in, forward",
               "in, backward", "over OPER's"]
    return record.table(headers, rows) + "\nmodelled from counted bytes and published rates\n"


if __name__ == "__main__":
    sys.exit(main())
