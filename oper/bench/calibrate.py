"""``oper calibrate``: this machine's constants of the cost model, measured, with their residuals.

Bandwidths come from bare gathers of rows, fixed and per-id costs from the runtime's own phase clock
over a few workloads, by least squares on relative errors. With ``--check`` the fitted model then
predicts steps under placements that the fit has not seen.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from oper.bench import record
from oper.bench.calibrate_worker import KINDS, plan_of
from oper.bench.launch import run_workers
from oper.bench.workload import Workload
from oper.files import write_text
from oper.search.cost import evaluate
from oper.search.machine import COMPUTE, MEMORY
from oper.search.problem import make_problem
from oper.search.space import EVERYTHING
from oper.stats import AccessStats
from oper.topology import Costs, Topology

_WORKER = "oper.bench.calibrate_worker:measure"
_FITTED = ("striped", "owned, balanced", "replicated")  # placements that the fit sees
_PHASES = ("forward", "backward", "update")
_CONSTANTS = ("phase_us", "id_ns", "sort_ns + reduce_ns", "update_ns")
_CACHE = Path("/sys/devices/system/cpu/cpu0/cache")


@dataclass(frozen=True, slots=True)
class Sample:
    """One workload under one placement, measured.

    Attributes:
        work: the workload.
        kind: one of `calibrate_worker.KINDS`.
        stats: its access statistics, of other batches.
        wall_us: median of the slowest rank's step.
        low_us: its 10th percentile: far below the median on a machine that others use as well.
        outside_us: of a step outside of its working phases: calls and barriers.
        phases_us: float64 [3, W], median microseconds of forward, backward and update, waiting
            left out.
    """

    work: Workload
    kind: str
    stats: AccessStats
    wall_us: float
    low_us: float
    outside_us: float
    phases_us: np.ndarray

    @property
    def name(self) -> str:
        """For a person and for the record."""
        return (f"{self.kind}, pooling {self.work.pooling}, dim {self.work.dim}, "
                f"exponent {self.work.exponent:g}")


@dataclass(frozen=True, slots=True)
class Fit:
    """Constants and how well they fit.

    Attributes:
        topology: the measured topology.
        residuals: by phase the median and the largest relative error of a rank's modelled phase.
        overhead_us: of a step's calls and barriers; a third of it is in ``phase_us``.
    """

    topology: Topology
    residuals: dict[str, tuple[float, float]]
    overhead_us: float


def configure_calibrate(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``oper calibrate``."""
    parser.add_argument("-o", "--output", metavar="TOPOLOGY", required=True,
                        help="topology file (TOML) to write")
    parser.add_argument("--world-size", type=int, default=2, metavar="N",
                        help="processes that share this machine (default 2)")
    parser.add_argument("--quick", action="store_true", help="fewer workloads and steps")
    parser.add_argument("--check", metavar="F", help="predict other placements, execute them, and "
                                                     "write the comparison (JSON)")


def run_calibrate(args: argparse.Namespace) -> int:
    """Measure, fit, write the topology, print constants and residuals."""
    load_before = record.load_average()
    with tempfile.TemporaryDirectory(prefix="oper-calibrate-") as folder:
        kinds = KINDS if args.check else _FITTED
        bandwidth, samples = measure(args.world_size, kinds, args.quick, Path(folder))
    fitted = fit([s for s in samples if s.kind in _FITTED], args.world_size, bandwidth)
    write_text(args.output, as_toml(fitted.topology))
    print(_report(fitted), end="")
    if args.check:
        value = predicted_against_executed(samples, fitted)
        command = ["oper", "calibrate", "-o", args.output, "--world-size", str(args.world_size),
                   *(["--quick"] if args.quick else []), "--check", args.check]
        entry = {"name": f"{args.world_size} processes", **value, "overhead_us": fitted.overhead_us,
                 "topology": as_toml(fitted.topology), "residuals": fitted.residuals}
        record.write(args.check, record.record("calibrate", command, [entry], load_before))
        print(f"predicted against executed, {value['num_plans']} plans: median error "
              f"{100 * value['median_error']:.1f} %, Spearman {value['spearman']:.3f}, measured "
              f"times spread {value['spread']:.1f}x\nrecord: {args.check}")
    print(f"wrote {args.output}", file=sys.stderr)
    return 0


def workloads(quick: bool, world_size: int) -> list[Workload]:
    """Bags of 1 to 20 ids, narrow and wide rows, uniform and skewed."""
    rows = (200_000, 120_000, 60_000, 30_000) if quick else (1_000_000, 400_000, 100_000, 30_000,
                                                             5_000, 500)
    pooling, dims, exponents = ((1, 20), (64,), (0.0, 1.05)) if quick else (
        (1, 4, 20), (32, 128), (0.0, 1.05))
    return [Workload(rows, d, 2048 * world_size, p, e)
            for p in pooling for d in dims for e in exponents]


def measure(world_size: int, kinds: Sequence[str], quick: bool, folder: Path
            ) -> tuple[dict[str, float], list[Sample]]:
    """Bandwidths (GB/s of all ranks together) and samples, from `world_size` processes at once.

    Args:
        world_size: processes.
        kinds: placements.
        quick: fewer workloads and steps.
        folder: for temporary files.
    """
    works = workloads(quick, world_size)
    cases: list[dict[str, Any]] = [{"gather": last_level_cache_bytes()}]
    cases += [{"work": w.to_json(), "kinds": list(kinds), "steps": 12 if quick else 40,
               "stats": str(folder / f"stats-{k}.npz")} for k, w in enumerate(works)]
    bandwidth, *found = run_workers(_WORKER, cases, world_size)
    samples = []
    for work, case, result in zip(works, cases[1:], found, strict=True):
        stats = AccessStats.load(case["stats"])
        for kind, x in result.items():
            forward, reduce, _, update, _, refresh = np.array(x["phases_us"]).T
            phases = np.stack([forward, reduce, update + refresh])
            samples.append(Sample(work, kind, stats, x["wall_us"], x["low_us"],
                                  x["outside_us"], phases))
    return {k: float(v) for k, v in bandwidth.items()}, samples


def last_level_cache_bytes() -> int:
    """Size of the largest cache of the first core; 32 MiB where the kernel does not say."""
    sizes = []
    for path in _CACHE.glob("index*/size"):
        text = path.read_text(encoding="ascii").strip()
        unit = {"K": 10, "M": 20, "G": 30}.get(text[-1:], 0)
        digits = text.rstrip("KMG")
        if digits.isdecimal():
            sizes.append(int(digits) << unit)
    return max(sizes, default=32 << 20)


def _model(sample: Sample, topology: Topology) -> Any:
    """The modelled step of a sample."""
    tables = sample.work.tables()
    problem = make_problem(tables, sample.stats, topology, allow=EVERYTHING,
                           batch_size=sample.work.batch_size // topology.world_size)
    return evaluate(plan_of(sample.kind, tables, sample.stats, topology.world_size), problem)


def fit(samples: Sequence[Sample], world_size: int, bandwidth: Mapping[str, float]) -> Fit:
    """Constants by least squares on relative errors; none is negative.

    Of sorting and reducing only the sum shows in the phase clock; it is split evenly.

    Args:
        samples: measured steps whose tiers are pulled.
        world_size: ranks.
        bandwidth: ``read_gbps`` and ``cache_gbps`` of all ranks together.
    """
    base = Topology.this_host(world_size)
    read, cache = bandwidth["read_gbps"], max(bandwidth["cache_gbps"], bandwidth["read_gbps"])
    domain = replace(base.domains[0], read_gbps=read, cache_gbps=cache, link_gbps=read,
                     cross_gbps=read, cache_bytes=last_level_cache_bytes())
    base = replace(base, name=f"measured-{world_size}", domains=(domain,), source="measured",
                   costs=Costs(phase_us=0.0, id_ns=1.0, sort_ns=1.0, update_ns=1.0))
    rows, memory_us, measured = [], [], []
    for sample in samples:
        for k, phase in enumerate(_model(sample, base).phases):
            for rank in range(world_size):
                row = np.zeros(len(_CONSTANTS))
                row[0], row[k + 1] = 1.0, phase.units[COMPUTE, rank] / 1e3  # ns
                rows.append(row)
                memory_us.append(phase.seconds[MEMORY, rank] * 1e6)
                measured.append(sample.phases_us[k, rank])
    a, memory, y = np.array(rows), np.array(memory_us), np.array(measured)
    x = nonnegative_least_squares(a / y[:, None], (y - memory) / y)
    error = np.abs(a @ x + memory - y) / y
    phase_of = np.tile(np.repeat(np.arange(3), world_size), len(samples))
    overhead = float(np.median([s.outside_us for s in samples]))
    costs = Costs(round(float(x[0]) + max(0.0, overhead) / 3, 2),
                  *(round(float(v), 3) for v in (x[1], x[2] / 2, x[2] / 2, x[3])))
    residuals = {name: (float(np.median(error[phase_of == k])), float(error[phase_of == k].max()))
                 for k, name in enumerate(_PHASES)}
    return Fit(replace(base, costs=costs), residuals, overhead)


def nonnegative_least_squares(a: np.ndarray, y: np.ndarray) -> np.ndarray:
    """x >= 0 with least |a x - y|^2; `a` float64 [n, k] of few columns: every support is tried."""
    best, found = float(y @ y), np.zeros(a.shape[1])
    for support in range(1, 1 << a.shape[1]):
        columns = [k for k in range(a.shape[1]) if support >> k & 1]
        part = np.linalg.lstsq(a[:, columns], y, rcond=None)[0]
        left = a[:, columns] @ part - y
        if (part >= 0).all() and float(left @ left) < best:
            best, found = float(left @ left), np.zeros(a.shape[1])
            found[columns] = part
    return found


def predicted_against_executed(samples: Sequence[Sample], fitted: Fit) -> dict[str, Any]:
    """How well the model predicts steps; `fitted_plans` were seen by the fit, others not.

    Returns:
        ``median_error`` (relative), ``spearman`` (mean over workloads of the order of their
        plans), ``spearman_all``, ``spread`` (largest / smallest measured step),
        ``signed_error_by_kind`` (median of predicted / measured - 1), ``plans``.
    """
    plans = []
    for s in samples:
        model = _model(s, fitted.topology)
        predicted = model.step_us
        plans.append({"name": s.name, "kind": s.kind, "fitted": s.kind in _FITTED,
                      "predicted_us": predicted, "measured_us": s.wall_us,
                      "measured_p10_us": s.low_us,
                      "error": abs(predicted - s.wall_us) / s.wall_us,
                      "predicted_phases_us": [round(p.time_us, 1) for p in model.phases],
                      "measured_phases_us": s.phases_us.max(axis=1).round(1).tolist()})
    us = np.array([[p["predicted_us"], p["measured_us"]] for p in plans])
    by_work = {s.work: [k for k, x in enumerate(samples) if x.work == s.work] for s in samples}
    orders = [spearman(*us[k].T) for k in by_work.values() if len(k) > 2]
    unseen = [p["error"] for p in plans if not p["fitted"]]
    signed = {kind: float(np.median([p["predicted_us"] / p["measured_us"] - 1 for p in plans
                                     if p["kind"] == kind]))
              for kind in dict.fromkeys(p["kind"] for p in plans)}
    return {"num_plans": len(plans), "median_error": float(np.median([p["error"] for p in plans])),
            "median_error_unseen": float(np.median(unseen)) if unseen else None,
            "spearman": float(np.mean(orders)) if orders else None,
            "spearman_all": spearman(*us.T), "spread": float(us[:, 1].max() / us[:, 1].min()),
            "signed_error_by_kind": signed, "plans": plans}


def spearman(x: np.ndarray, y: np.ndarray) -> float:
    """Rank correlation of two float64 [n] without ties."""
    order = [np.argsort(np.argsort(v)).astype(float) for v in (x, y)]
    return float(np.corrcoef(order)[0, 1])


def as_toml(topology: Topology) -> str:
    """A one-domain topology as the text of a topology file."""
    d, costs = topology.domains[0], topology.costs
    fields = {"memory_bytes": d.memory_bytes, "read_gbps": round(d.read_gbps, 2),
              "cache_gbps": round(d.cache_gbps, 2), "cache_bytes": d.cache_bytes,
              "link_gbps": round(d.link_gbps, 2), "cross_gbps": round(d.cross_gbps, 2)}
    lines = [f'name = "{topology.name}"', f'source = "{topology.source}"', "", "[[domain]]",
             f"ranks = {len(d.ranks)}", *(f"{k} = {v}" for k, v in fields.items()), "", "[costs]",
             *(f"{k} = {getattr(costs, k)}" for k in ("phase_us", "id_ns", "sort_ns", "reduce_ns",
                                                      "update_ns"))]
    return "\n".join(lines) + "\n"


def _report(fitted: Fit) -> str:
    rows = [[name, f"{100 * middle:.1f} %", f"{100 * worst:.1f} %"]
            for name, (middle, worst) in fitted.residuals.items()]
    return (as_toml(fitted.topology) + "\n"
            + record.table(["residual", "median", "worst"], rows) + "\n"
            + f"calls and barriers of a step: {fitted.overhead_us:.1f} us\n")
