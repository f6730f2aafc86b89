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
from dataclasses import dataclass, field, fields, replace
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
#: Placements that the fit sees: what each constant shows in.
_FITTED = ("striped", "owned on one rank", "replicated", "head replicated", "pushed",
           "head replicated, tail pushed")
_PHASES = ("forward", "backward", "update")
#: Costs that the fit finds, in nanoseconds of compute. Of sorting and reducing only the sum shows
#: in the phase clock; it is split evenly.
_COMPUTE: tuple[dict[str, float], ...] = (
    {"id_ns": 1.0}, {"sort_ns": 0.5, "reduce_ns": 0.5}, {"update_ns": 1.0}, {"run_ns": 1.0},
    {"refresh_ns": 1.0}, {"tier_ns": 1.0}, {"push_tier_ns": 1.0}, {"push_ns": 1.0},
    {"table_us": 1.0})
_WARM_SHARES = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)  # that are tried
_SLOWER = (0.5, 4.0)
_STEP_WEIGHT = 2.0  # of a whole step beside one phase of one rank
_IDLE_US = 5.0  # phases below this have done nothing
_CACHE = Path("/sys/devices/system/cpu/cpu0/cache")


@dataclass(frozen=True, slots=True)
class Sample:
    """One workload under one placement, measured.

    Attributes:
        work: the workload.
        kind: one of `calibrate_worker.KINDS`.
        stats: its access statistics, of other batches.
        wall_us: lower quartile of the slowest rank's steps: what disturbs a step makes it longer.
        median_us: their median: far above the quartile on a machine that others use as well.
        outside_us: of a step outside of its working phases: calls and barriers.
        phases_us: float64 [3, W], lower quartiles of forward, backward and update in microseconds,
            waiting left out.
        bytes_read: of all ranks per pass, by phase and link; see `planning.bytes_read`.
    """

    work: Workload
    kind: str
    stats: AccessStats
    wall_us: float
    median_us: float
    outside_us: float
    phases_us: np.ndarray
    bytes_read: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """For a person and for the record."""
        return f"{self.kind}, {self.work.name}"


@dataclass(frozen=True, slots=True)
class Fit:
    """Constants and how well they fit.

    Attributes:
        topology: the measured topology.
        residuals: median and largest relative error of a rank's modelled phase, by phase, and of
            the modelled step.
    """

    topology: Topology
    residuals: dict[str, tuple[float, float]]


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
        fitting = workloads(args.quick, args.world_size)
        checking = held_out(args.quick, args.world_size) if args.check else []
        works = [(w, _FITTED) for w in fitting] + [(w, KINDS) for w in checking]
        bandwidth, samples = measure(args.world_size, works, 4 if args.quick else 8, Path(folder))
    fitted = fit([s for s in samples if s.work in fitting], args.world_size, bandwidth)
    write_text(args.output, as_toml(fitted.topology))
    print(_report(fitted), end="")
    if args.check:
        value = predicted_against_executed([s for s in samples if s.work in checking], fitted)
        command = ["oper", "calibrate", "-o", args.output, "--world-size", str(args.world_size),
                   *(["--quick"] if args.quick else []), "--check", args.check]
        entry = {"name": f"{args.world_size} processes", **value,
                 "topology": as_toml(fitted.topology), "residuals": fitted.residuals}
        record.write(args.check, record.record("calibrate", command, [entry], load_before))
        print(f"predicted against executed, {value['num_plans']} plans: median error "
              f"{100 * value['median_error']:.1f} %, Spearman {value['spearman']:.3f}, measured "
              f"times spread {value['spread']:.1f}x\nrecord: {args.check}")
    print(f"wrote {args.output}", file=sys.stderr)
    return 0


def workloads(quick: bool, world_size: int) -> list[Workload]:
    """What the fit sees: bags of 1 to 20 ids, narrow and wide rows, few and many tables, uniform
    and skewed."""
    def make(num_rows: tuple[int, ...], dim: int, pooling: int, exponent: float) -> Workload:
        return Workload(num_rows, dim, 2048 * world_size, pooling, exponent)

    few, many = (400_000, 120_000, 60_000, 30_000), (100_000, 20_000, 5_000, 1_000, 200, 50) * 3
    found = [make(few, 64, 1, 0.0), make(few, 64, 1, 1.05), make(few, 32, 20, 0.0),
             make(few, 64, 20, 1.05), make(many, 32, 1, 1.05)]
    if not quick:
        found += [make(few, 32, 4, 1.05), make(few, 128, 4, 0.0), make(few, 128, 1, 1.05),
                  make(few, 32, 1, 0.0), make(many, 64, 4, 1.05)]
    return found


def held_out(quick: bool, world_size: int) -> list[Workload]:
    """What the comparison uses, and the fit never sees: other tables, batches, bags and skews."""
    rows = (250_000, 150_000, 80_000, 40_000, 10_000, 1_000, 100, 10)
    found = [Workload(rows, 64, 1536 * world_size, 8, 0.9)]
    if not quick:
        found += [Workload(rows, 96, 3072 * world_size, 1, 0.6),
                  Workload(rows, 48, 1024 * world_size, 12, 1.2)]
    return found


def measure(world_size: int, works: Sequence[tuple[Workload, Sequence[str]]], rounds: int,
            folder: Path) -> tuple[dict[str, float], list[Sample]]:
    """Bandwidths (GB/s of all ranks together) and samples, from `world_size` processes at once.

    Args:
        world_size: processes.
        works: workloads and placements of each.
        rounds: see `calibrate_worker`.
        folder: for temporary files.
    """
    cases: list[dict[str, Any]] = [{"gather": last_level_cache_bytes()}]
    cases += [{"work": w.to_json(), "kinds": list(kinds), "rounds": rounds,
               "stats": str(folder / f"stats-{k}.npz")} for k, (w, kinds) in enumerate(works)]
    bandwidth, *found = run_workers(_WORKER, cases, world_size)
    samples = []
    for (work, _), case, result in zip(works, cases[1:], found, strict=True):
        stats = AccessStats.load(case["stats"])
        for kind, x in result.items():
            forward, reduce, _, update, _, refresh = np.array(x["phases_us"]).T
            phases = np.stack([forward, reduce, update + refresh])
            samples.append(Sample(work, kind, stats, x["wall_us"], x["median_us"],
                                  x["outside_us"], phases, x["bytes_read"]))
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
    """Constants by least squares on relative errors of phases and steps; none is negative.

    The bandwidths keep their measured ratio; their level is fitted with the other constants, since
    a lookup that stores, too, gets less than a bare gather does. The share of the cache that stays
    warm between batches is the best of a few.

    Args:
        samples: measured steps.
        world_size: ranks.
        bandwidth: ``read_gbps`` and ``cache_gbps`` of all ranks together.
    """
    base = Topology.this_host(world_size)
    read, cache = bandwidth["read_gbps"], max(bandwidth["cache_gbps"], bandwidth["read_gbps"])
    domain = replace(base.domains[0], read_gbps=read, cache_gbps=cache, link_gbps=read,
                     cross_gbps=read, cache_bytes=last_level_cache_bytes())
    base = replace(base, name=f"measured-{world_size}", domains=(domain,), source="measured",
                   costs=Costs(phase_us=0.0))
    clock = _Clock.of(samples)
    compute = [_columns(samples, base, Costs(phase_us=0.0, **c))[1] for c in _COMPUTE]
    best: tuple[float, float, np.ndarray] | None = None
    for share in _WARM_SHARES:
        memory, _ = _columns(samples, base, Costs(phase_us=0.0, warm_share=share))
        a = np.array([clock.rows(memory), *(clock.rows(c) for c in compute), clock.barriers()])
        x = _solve(a * clock.weight / clock.measured, clock.weight)
        off = a.T @ x / clock.measured - 1.0
        left = float(np.square(off * clock.weight).sum())
        if best is None or left < best[0]:
            best, error = (left, share, x), np.abs(off)
    assert best is not None
    _, share, x = best
    costs: dict[str, float] = {"warm_share": share, "phase_us": round(float(x[-1]), 2)}
    for value, sets in zip(x[1:], _COMPUTE, strict=False):
        costs |= {name: round(float(value) * part, 3) for name, part in sets.items()}
    level = 1.0 / float(x[0])
    domain = replace(domain, read_gbps=read * level, cache_gbps=cache * level,
                     link_gbps=read * level, cross_gbps=read * level)
    residuals = {name: (float(np.median(error[at])), float(error[at].max()))
                 for name, at in clock.parts()}
    return Fit(replace(base, domains=(domain,), costs=Costs(**costs)), residuals)


def _solve(a: np.ndarray, y: np.ndarray) -> np.ndarray:
    """x >= 0 with least |x @ a - y|^2; `a` float64 [k, n]. x[0], by which memory takes longer than
    in a bare gather, is held within `_SLOWER`: small workloads do not show it."""
    x = nonnegative_least_squares(a.T, y)
    x[0] = np.clip(x[0], *_SLOWER)
    x[1:] = nonnegative_least_squares(a[1:].T, y - x[0] * a[0])
    return x


def _columns(samples: Sequence[Sample], base: Topology, costs: Costs
             ) -> tuple[np.ndarray, np.ndarray]:
    """Microseconds of memory and of compute under `costs`; float64 [S, 3, W] each."""
    found = [_model(s, replace(base, costs=costs)).phases for s in samples]
    return (np.array([[p.seconds[MEMORY] * 1e6 for p in phases] for phases in found]),
            np.array([[p.seconds[COMPUTE] * 1e6 for p in phases] for phases in found]))


@dataclass(frozen=True, slots=True, eq=False)
class _Clock:
    """What was measured, as the rows of a least-squares problem: all busy phases of all ranks, then
    whole steps.

    Attributes:
        busy: bool [S, 3, W], phases that have done something.
        slowest: int64 [S, 3], rank that each phase ended with.
        num_fixed: float64 [S], calls and barriers of a step.
        measured, weight: float64 [n], microseconds and weight of each row.
    """

    busy: np.ndarray
    slowest: np.ndarray
    num_fixed: np.ndarray
    measured: np.ndarray
    weight: np.ndarray

    @staticmethod
    def of(samples: Sequence[Sample]) -> _Clock:
        """The rows of `samples`."""
        phases = np.array([s.phases_us for s in samples])
        busy = phases > _IDLE_US
        pushes = np.array(["push" in s.kind for s in samples])
        measured = np.concatenate([phases[busy], [s.wall_us for s in samples]])
        weight = np.where(np.arange(measured.size) < busy.sum(), 1.0, _STEP_WEIGHT)
        return _Clock(busy, phases.argmax(axis=2), len(_PHASES) + 1.0 * pushes, measured, weight)

    def rows(self, column: np.ndarray) -> np.ndarray:
        """float64 [n], the rows' entries of a column given by phase and rank, float64 [S, 3, W]."""
        steps = np.take_along_axis(column, self.slowest[:, :, None], axis=2).sum(axis=(1, 2))
        return np.concatenate([column[self.busy], steps])

    def barriers(self) -> np.ndarray:
        """float64 [n], fixed costs: outside of the phases' clocks, so that only steps have them."""
        return np.concatenate([np.zeros(int(self.busy.sum())), self.num_fixed])

    def parts(self) -> list[tuple[str, np.ndarray]]:
        """Name and rows (int64 [k]) of each phase and of whole steps."""
        number = np.broadcast_to(np.arange(len(_PHASES))[None, :, None], self.busy.shape)
        of_row = np.concatenate([number[self.busy], np.full(self.num_fixed.size, len(_PHASES))])
        return [(name, np.flatnonzero(of_row == k)) for k, name in enumerate((*_PHASES, "step"))]


def nonnegative_least_squares(a: np.ndarray, y: np.ndarray) -> np.ndarray:
    """x >= 0 with least |a x - y|^2; `a` float64 [n, k] of few columns: every support is tried."""
    gram, right = a.T @ a, a.T @ y
    best, found = 0.0, np.zeros(a.shape[1])
    for support in range(1, 1 << a.shape[1]):
        columns = [k for k in range(a.shape[1]) if support >> k & 1]
        part = np.linalg.lstsq(gram[np.ix_(columns, columns)], right[columns], rcond=None)[0]
        gain = float(part @ right[columns])  # of |y|^2 - |a x - y|^2 at the unconstrained minimum
        if (part >= 0).all() and gain > best:
            best, found = gain, np.zeros(a.shape[1])
            found[columns] = part
    return found


def predicted_against_executed(samples: Sequence[Sample], fitted: Fit) -> dict[str, Any]:
    """How well the model predicts steps.

    Returns:
        ``median_error`` (relative), ``spearman`` (mean over workloads of the order of their
        plans), ``spearman_all``, ``spread`` (largest / smallest measured step),
        ``signed_error_by_kind`` (median of predicted / measured - 1), ``plans``.
    """
    plans = []
    for s in samples:
        model = _model(s, fitted.topology)
        predicted = model.step_us
        plans.append({"name": s.name, "kind": s.kind, "placement_fitted": s.kind in _FITTED,
                      "predicted_us": predicted, "measured_us": s.wall_us,
                      "measured_median_us": s.median_us, "bytes_read": s.bytes_read,
                      "error": abs(predicted - s.wall_us) / s.wall_us,
                      "predicted_phases_us": [round(p.time_us, 1) for p in model.phases],
                      "measured_phases_us": s.phases_us.max(axis=1).round(1).tolist()})
    us = np.array([[p["predicted_us"], p["measured_us"]] for p in plans])
    by_work = {s.work: [k for k, x in enumerate(samples) if x.work == s.work] for s in samples}
    orders = [spearman(*us[k].T) for k in by_work.values() if len(k) > 2]
    unseen = [p["error"] for p in plans if not p["placement_fitted"]]
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
    domain = {"memory_bytes": d.memory_bytes, "read_gbps": round(d.read_gbps, 2),
              "cache_gbps": round(d.cache_gbps, 2), "cache_bytes": d.cache_bytes,
              "link_gbps": round(d.link_gbps, 2), "cross_gbps": round(d.cross_gbps, 2)}
    lines = [f'name = "{topology.name}"', f'source = "{topology.source}"', "", "[[domain]]",
             f"ranks = {len(d.ranks)}", *(f"{k} = {v}" for k, v in domain.items()), "", "[costs]",
             *(f"{f.name} = {getattr(costs, f.name)}" for f in fields(costs))]
    return "\n".join(lines) + "\n"


def _report(fitted: Fit) -> str:
    rows = [[name, f"{100 * middle:.1f} %", f"{100 * worst:.1f} %"]
            for name, (middle, worst) in fitted.residuals.items()]
    return (as_toml(fitted.topology) + "\n"
            + record.table(["residual", "median", "worst"], rows) + "\n")
