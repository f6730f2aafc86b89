"""``oper calibrate``: measure the cost model's constants on this machine, and report residuals.

Bandwidths are measured by bare gathers of rows. Fixed costs and costs per id are fitted, by least
squares on relative errors, to the runtime's phase timers over several workloads. With ``--check``
the fitted model then predicts steps of workloads and placements that the fit did not use.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from oper.bench.calibrate.keys import measure_keys
from oper.bench.calibrate.network import across_hosts, measure_hosts, measure_network
from oper.bench.calibrate.worker import INTERVAL, KINDS, Placements, gather, plan_of
from oper.bench.core import record
from oper.bench.core.launch import Task, run_workers
from oper.bench.core.report import table
from oper.bench.core.workload import Workload
from oper.errors import UsageError
from oper.plan import Plan
from oper.search.cost.model import Evaluation, evaluate
from oper.search.problem.machine import Term, make_machine
from oper.search.problem.space import EVERYTHING
from oper.search.problem.statement import Problem, make_problem
from oper.stats import AccessStats
from oper.support.files import check_target, write_text
from oper.support.flags import whole
from oper.topology import Costs, Topology

#: Placements of the fit; each constant affects at least one of them.
_FITTED = ("striped", "owned on one rank", "replicated", "head replicated", "pushed",
           "head replicated, tail pushed")
_PHASES = ("forward", "backward", "update")
#: Compute costs that the fit determines: fields of `Costs` and their share of the fitted value. The
#: phase timers only show the sum of sorting and reducing, which is split evenly.
_COMPUTE: tuple[dict[str, float], ...] = (
    {"id_ns": 1.0}, {"sort_ns": 0.5, "reduce_ns": 0.5}, {"update_ns": 1.0}, {"run_ns": 1.0},
    {"refresh_ns": 1.0}, {"tier_ns": 1.0}, {"push_tier_ns": 1.0}, {"push_ns": 1.0},
    {"push_bag_ns": 1.0}, {"odd_ns": 1.0}, {"table_us": 1.0}, {"sort_table_us": 1.0})
_WARM_SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75, 1.0)  # candidates of Costs.warm_share
_SLOWER = (0.5, 4.0)  # range of the fitted cost of a byte from memory / that in the bare gather
_FASTEST_CACHE = 50.0  # upper limit of cache bandwidth / memory bandwidth
_LARGE = 0.1  # relative errors above this count linearly instead of quadratically
_IDLE_US = 5.0  # a rank that was busy for a shorter time counts as idle in that phase
_QUALITY = ("interval", "num_steps", "num_undisturbed", "delayed")  # keys of `Sample.quality`
Residuals = dict[str, tuple[float, float]]  # by phase: median and largest relative error


@dataclass(frozen=True, slots=True)
class Sample:
    """Measured steps of one workload under one placement.

    Attributes:
        work: the workload.
        kind: the placement, one of `worker.KINDS`.
        stats: access statistics of the workload, from batches that are not measured.
        wall_us: median time (us) of the undisturbed steps, each that of its slowest rank.
        phases_us: median time (us) of forward, backward and update by rank without waiting, float64
            [3, W].
        bytes_read: bytes read by all ranks per pass, see `planning.bytes_read`.
        quality: ``interval``, ``num_steps``, ``num_undisturbed``, ``delayed``; see
            `worker._summary`.
    """

    work: Workload
    kind: str
    stats: AccessStats
    wall_us: float
    phases_us: np.ndarray
    bytes_read: dict[str, dict[str, int]] = field(default_factory=dict)
    quality: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The label of this sample in printouts and in the record."""
        return f"{self.kind}, {self.work.name}"


def configure_calibrate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", metavar="TOPOLOGY", required=True,
                        help="topology file (TOML) to write")
    parser.add_argument("--world-size", type=whole(1, 1024), default=2, metavar="N",
                        help="processes that share this machine (default 2); ignored under "
                             "torchrun, which sets the number per host")
    parser.add_argument("--exchange", choices=("shared", "collective"), default="shared",
                        help="collective: treat every process as a host, and measure the costs "
                             "of exchanges over this machine's network stack")
    parser.add_argument("--hosts-per-rack", type=whole(1), metavar="N", default=0,
                        help="under torchrun: each N successive hosts, in the order of their "
                             "ranks, share an uplink, which is measured (default: all hosts are "
                             "connected equally)")
    parser.add_argument("--quick", action="store_true", help="use fewer workloads and steps")
    parser.add_argument("--check", metavar="F", help="predict other placements, execute them, and "
                                                     "write the comparison (JSON)")


def run_calibrate(args: argparse.Namespace) -> int:
    """Measure, fit and write the topology, print its constants and the residuals; returns 0."""
    for path in filter(None, (args.output, args.check)):
        check_target(path)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # torchrun has started several processes
        return _run_on_hosts(args)
    if args.hosts_per_rack:
        raise UsageError("cannot calibrate racks", "--hosts-per-rack", args.hosts_per_rack,
                         "several hosts, started by torchrun",
                         "leave it out, or run on the hosts themselves")
    if args.exchange == "collective" and args.world_size < 2:
        raise UsageError("cannot calibrate exchanges", "--world-size", args.world_size,
                         ">= 2 processes, which exchange messages",
                         "raise it, or leave --exchange out")
    load_before = record.load_average()
    checking = held_out(args.quick, args.world_size) if args.check else []
    fitted, residuals, samples = measure_and_fit(args.quick, args.world_size, checking)
    topology = fitted if args.exchange == "shared" else across_hosts(
        fitted, measure_network(args.world_size))
    write_text(args.output, as_toml(topology))
    print(as_toml(topology))
    print(table(["residual", "median", "worst"], [
        [name, f"{100 * middle:.1f} %", f"{100 * worst:.1f} %"]
        for name, (middle, worst) in residuals.items()]))
    if args.check:
        value = predicted_against_executed(samples, fitted)
        entry = record.rounded({"name": f"{args.world_size} processes", **value,
                                "topology": as_toml(fitted), "residuals": residuals})
        record.write(args.check, record.record(
            "calibrate", record.command_line(args, "oper", "calibrate"), [entry], load_before))
        print(f"predicted against executed, {value['num_plans']} plans: median error "
              f"{100 * value['median_error']:.1f} %, Spearman {value['spearman']:.3f}, measured "
              f"times spread {value['spread']:.1f}x; ranks waited for their core in "
              f"{100 * value['delayed'][0]:.1f} % of the time\nrecord: {args.check}")
    print(f"wrote {args.output}", file=sys.stderr)
    return 0


def _run_on_hosts(args: argparse.Namespace) -> int:
    """Calibrate as one of the ranks started by torchrun; rank 0 writes the topology."""
    import torch.distributed as dist

    if args.check or args.exchange != "shared":
        raise UsageError("cannot calibrate several hosts", "options", "--check or --exchange",
                         "neither under torchrun", "leave them out, or run without torchrun")
    dist.init_process_group("gloo")
    topology = measure_hosts(lambda num_ranks: measure_and_fit(args.quick, num_ranks, [])[0],
                             args.hosts_per_rack)
    if dist.get_rank() == 0:
        write_text(args.output, as_toml(topology))
        print(as_toml(topology), end="")
        print(f"wrote {args.output}", file=sys.stderr)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def measure_and_fit(quick: bool, world_size: int, checking: Sequence[Workload]
                    ) -> tuple[Topology, Residuals, list[Sample]]:
    """Measure `world_size` processes that share this machine and fit the cost model to them.

    Returns:
        The fitted topology, the residuals (see `fit`), and the samples of the workloads `checking`,
        which the fit does not use.
    """
    fitting = workloads(quick, world_size)
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory(prefix="oper-calibrate-") as folder:
        cases = [Placements(work, _FITTED if work in fitting else KINDS, 4 if quick else 5,
                            str(Path(folder) / f"stats-{k}.npz"))
                 for k, work in enumerate([*fitting, *checking])]
        bandwidth, *found = run_workers(
            [Task("bandwidth", gather, (last_level_cache_bytes(),)), *cases], world_size)
        for case, result in zip(cases, found, strict=True):
            stats = AccessStats.load(case.stats)
            for kind, x in result.items():
                forward, reduce, _, update, _, refresh = np.array(x["phases_us"]).T
                phases = np.stack([forward, reduce, update + refresh])
                samples.append(Sample(case.work, kind, stats, x["wall_us"], phases,
                                      x["bytes_read"], {k: x[k] for k in _QUALITY}))
    topology, residuals = fit([s for s in samples if s.work in fitting], world_size, bandwidth)
    topology = replace(topology, costs=replace(topology.costs, **measure_keys()))
    return topology, residuals, [s for s in samples if s.work in checking]


def workloads(quick: bool, world_size: int) -> list[Workload]:
    """The workloads of the fit. They cover bags of 1 to 20 ids, dims of 16 to 128 with and without
    specialised kernels, few and many tables, uniform and skewed ids."""
    def make(num_rows: tuple[int, ...], dim: int, pooling: int, exponent: float,
             batch_size: int = 2048) -> Workload:
        return Workload(num_rows, dim, batch_size * world_size, pooling, exponent)

    few, many = (400_000, 120_000, 60_000, 30_000), (100_000, 20_000, 5_000, 1_000, 200, 50) * 3
    some = (200_000, 50_000, 10_000, 2_000, 300, 20)
    found = [make(few, 64, 1, 0.0), make(few, 64, 1, 1.05), make(few, 32, 20, 0.0),
             make(few, 64, 20, 1.05), make(many, 32, 1, 1.05), make(some, 80, 6, 0.8, 1024)]
    if not quick:
        found += [make(few, 32, 4, 1.05), make(few, 128, 4, 0.0), make(few, 128, 1, 1.05),
                  make(few, 32, 1, 0.0), make(many, 64, 4, 1.05), make(some, 96, 1, 0.8, 4096),
                  make(some, 112, 10, 1.1, 1024), make(some, 16, 3, 0.5, 3072),
                  make(few, 80, 1, 0.7, 1024)]
    return found


def held_out(quick: bool, world_size: int) -> list[Workload]:
    """The workloads of ``--check``: other tables, batch and bag sizes and skews than the fit's."""
    rows = (250_000, 150_000, 80_000, 40_000, 10_000, 1_000, 100, 10)
    found = [Workload(rows, 64, 1536 * world_size, 8, 0.9)]
    if not quick:
        others = (300_000, 70_000, 30_000, 6_000, 600, 60)
        found += [Workload(rows, 96, 3072 * world_size, 1, 0.6),
                  Workload(rows, 48, 1024 * world_size, 12, 1.2),
                  Workload(others, 128, 1024 * world_size, 3, 0.85),
                  Workload(others, 40, 2560 * world_size, 2, 1.0)]
    return found


def last_level_cache_bytes() -> int:
    """Effective size (bytes) of this machine's last-level cache, shared by all processes."""
    import torch

    from oper.shmem.library import load

    load()
    return int(torch.ops.oper.last_level_cache_bytes())


def _stated(samples: Sequence[Sample], topology: Topology) -> list[tuple[Plan, Problem]]:
    """The plan and problem of each sample; samples of a workload share the problem."""
    world, problems, found = topology.world_size, dict[Workload, Problem](), []
    for s in samples:
        tables = s.work.tables()
        if s.work not in problems:
            problems[s.work] = make_problem(tables, s.stats, topology, allow=EVERYTHING,
                                            batch_size=s.work.batch_size // world)
        found.append((plan_of(s.kind, tables, s.stats, world), problems[s.work]))
    return found


def _modelled(stated: Sequence[tuple[Plan, Problem]], topology: Topology) -> list[Evaluation]:
    """The modelled steps on `topology`, whose number of ranks must be that of the plans."""
    machine = make_machine(topology)
    return [evaluate(plan, replace(problem, machine=machine)) for plan, problem in stated]


def fit(samples: Sequence[Sample], world_size: int, bandwidth: Mapping[str, float]
        ) -> tuple[Topology, Residuals]:
    """Fit the cost model's constants by nonnegative least squares on relative errors.

    First, the times of all ranks in each phase determine the costs of bytes, ids, rows and tables;
    a byte from cache costs at most as much as one from memory. Then entire steps determine the cost
    of a barrier and a factor >= 1 for all costs, because a step waits for its slowest rank, which
    takes longer than the medians of the ranks' phases. The share of the cache that stays warm
    between batches is the best of `_WARM_SHARES`.

    Args:
        samples: measured steps.
        world_size: number of ranks.
        bandwidth: ``read_gbps`` (GB/s) of all ranks together in bare gathers.

    Returns:
        The fitted topology; and, by phase and for ``"step"``, the median and largest relative error
        of the modelled times.
    """
    base = Topology.this_host(world_size)
    read = bandwidth["read_gbps"]
    domain = replace(base.domains[0], read_gbps=read, cache_gbps=read, link_gbps=read,
                     cross_gbps=read, cache_bytes=last_level_cache_bytes())
    base = replace(base, name=f"measured-{world_size}", domains=(domain,), source="measured",
                   costs=Costs(phase_us=0.0))
    clock, stated = _Clock.of(samples), _stated(samples, base)
    every, _ = _columns(stated, base)
    compute = [_columns(stated, replace(base, costs=Costs(phase_us=0.0, **c)))[1]
               for c in _COMPUTE]
    far = replace(base, domains=(replace(domain, cache_gbps=read * 1e9),))
    best: tuple[float, float, np.ndarray, np.ndarray] | None = None
    for share in _WARM_SHARES:
        missed, _ = _columns(stated, replace(
            far, costs=Costs(phase_us=0.0, warm_share=share)))
        columns = np.array([every, missed, *compute])
        x, left = _solve(columns[:, clock.busy] / clock.phases, clock.of_phases)
        if best is None or left < best[0]:
            best = left, share, np.tensordot(x, columns, axes=1), x
    assert best is not None
    _, share, phases, x = best
    slower, barrier = _whole_steps(clock, phases)
    x = x * slower
    costs: dict[str, float] = {"warm_share": share, "phase_us": round(barrier, 2)}
    for value, sets in zip(x[2:], _COMPUTE, strict=True):
        costs |= {name: round(float(value) * part, 3) for name, part in sets.items()}
    memory = x[0] + x[1]
    domain = replace(domain, read_gbps=read / memory, link_gbps=read / memory,
                     cross_gbps=read / memory,
                     cache_gbps=read / max(x[0], memory / _FASTEST_CACHE))
    return (replace(base, domains=(domain,), costs=Costs(**costs)),
            clock.residuals(phases * slower, barrier))


def _solve(a: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, float]:
    """The x >= 0, float64 [k], that minimises the weighted loss of x @ a - 1, and that loss.

    The loss is quadratic up to `_LARGE` and linear beyond (Huber 1964), minimised by iterative
    reweighting. The cost of a byte from memory, x[0] + x[1], is clipped to `_SLOWER` times that of
    the bare gather, because small workloads do not determine it.

    Args:
        a: modelled / measured time of each phase per unit of each cost, float64 [k, n].
        weight: square root of each phase's weight in the loss, float64 [n].
    """
    w = weight
    for _ in range(20):
        x = nonnegative_least_squares((a * w).T, w)
        memory = float(np.clip(x[0] + x[1], *_SLOWER))
        if memory != x[0] + x[1]:
            x[0] = min(x[0], memory)
            x[1] = memory - x[0]
            rest = nonnegative_least_squares((a[2:] * w).T, w * (1.0 - x[:2] @ a[:2]))
            x = np.concatenate([x[:2], rest])
        error = np.abs(x @ a - 1.0)
        w = weight * np.sqrt(_LARGE / np.maximum(error, _LARGE))
    loss = np.where(error <= _LARGE, error**2 / 2, _LARGE * (error - _LARGE / 2))
    return x, float(loss @ weight**2)


def _whole_steps(clock: _Clock, phases: np.ndarray) -> tuple[float, float]:
    """Fit the factor >= 1 of all costs, and the time (us) of a barrier, to entire steps."""
    a = np.array([clock.slowest(phases), clock.num_fixed]) / clock.steps
    found = nonnegative_least_squares((a * clock.of_steps).T, clock.of_steps)
    if found[0] >= 1.0:
        return float(found[0]), float(found[1])
    rest = nonnegative_least_squares((a[1:] * clock.of_steps).T, clock.of_steps * (1.0 - a[0]))
    return 1.0, float(rest[0])


def _columns(stated: Sequence[tuple[Plan, Problem]], topology: Topology
             ) -> tuple[np.ndarray, np.ndarray]:
    """Modelled memory and compute times (us) by sample, phase and rank, float64 [S, 3, W] each."""
    found = [m.phases for m in _modelled(stated, topology)]
    return (np.array([[p.seconds[Term.MEMORY] * 1e6 for p in phases] for phases in found]),
            np.array([[p.seconds[Term.COMPUTE] * 1e6 for p in phases] for phases in found]))


@dataclass(frozen=True, slots=True, eq=False)
class _Clock:
    """The measured times of S samples.

    Attributes:
        busy: bool [S, 3, W], phases in which a rank did any work.
        phases: times (us) of those n phases, float64 [n].
        steps: times (us) of entire steps, float64 [S].
        num_fixed: number of barriers per step, float64 [S].
        of_phases, of_steps: weights, float64 [n] and [S]; smaller for less precise measurements.
    """

    busy: np.ndarray
    phases: np.ndarray
    steps: np.ndarray
    num_fixed: np.ndarray
    of_phases: np.ndarray
    of_steps: np.ndarray

    @staticmethod
    def of(samples: Sequence[Sample]) -> _Clock:
        """The measured times of `samples`."""
        phases = np.array([s.phases_us for s in samples])
        busy = phases > _IDLE_US
        pushes = np.array(["push" in s.kind for s in samples])
        width = np.array([s.quality["interval"] for s in samples])
        weight = np.minimum(1.0, INTERVAL / np.maximum(width, 1e-9))
        return _Clock(busy, phases[busy], np.array([s.wall_us for s in samples]),
                      len(_PHASES) + 1.0 * pushes,
                      np.broadcast_to(weight[:, None, None], busy.shape)[busy], weight)

    def slowest(self, phases: np.ndarray) -> np.ndarray:
        """Times of steps without barriers, float64 [S], from those of phases, float64 [S, 3, W]."""
        return np.asarray(phases.max(axis=2).sum(axis=1))

    def residuals(self, phases: np.ndarray, barrier: float) -> dict[str, tuple[float, float]]:
        """Return the median and the largest relative error of predicted times, by phase and for the
        whole ``"step"``.

        Args:
            phases: predicted times, float64 [S, 3, W].
            barrier: time of a barrier, in the same unit.
        """
        error = np.abs(phases[self.busy] / self.phases - 1.0)
        number = np.broadcast_to(np.arange(len(_PHASES))[None, :, None], self.busy.shape)[self.busy]
        found = {name: error[number == k] for k, name in enumerate(_PHASES)}
        found["step"] = np.abs((self.slowest(phases) + barrier * self.num_fixed) / self.steps - 1)
        return {k: (float(np.median(e)), float(e.max())) for k, e in found.items()}


def nonnegative_least_squares(a: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The x >= 0, float64 [k], that minimises |a x - y|^2 for `a` float64 [n, k], `y` float64 [n].

    Uses the active-set method of Lawson and Hanson (Solving Least Squares Problems, 1974, ch. 23).
    """
    scale = np.maximum(np.sqrt(np.square(a).sum(axis=0)), 1e-300)
    gram, right = (a / scale).T @ (a / scale), (a / scale).T @ y
    x, used = np.zeros(a.shape[1]), np.zeros(a.shape[1], bool)
    for _ in range(10 * a.shape[1]):
        slope = np.where(used, -np.inf, right - gram @ x)
        if slope.max() <= 1e-12 * np.abs(right).max():
            break
        used[slope.argmax()] = True
        while True:
            part = np.zeros_like(x)
            part[used] = np.linalg.lstsq(gram[np.ix_(used, used)], right[used], rcond=None)[0]
            bad = used & (part <= 0)
            if not bad.any():
                break
            step = (x[bad] / np.maximum(x[bad] - part[bad], 1e-300)).min()
            x = x + step * (part - x)
            used &= x > 1e-15
        x = part
    return np.asarray(x / scale)


def predicted_against_executed(samples: Sequence[Sample], topology: Topology) -> dict[str, Any]:
    """Accuracy of the step times that the model predicts.

    Returns:
        ``num_plans``; ``median_error`` (relative); ``spearman`` (rank correlation of a workload's
        plans, mean over workloads with at least 3 plans, None without any); ``spearman_all`` (over
        all plans); ``spread`` (largest / smallest measured step); ``signed_error_by_kind`` (median
        of predicted / measured - 1); ``delayed`` (mean and maximum over plans of ``delayed``, see
        `worker._summary`); ``plans`` (figures of each plan).
    """
    models = _modelled(_stated(samples, topology), topology)
    plans = [{"name": s.name, "kind": s.kind, "predicted_us": model.step_us,
              "measured_us": s.wall_us, **s.quality, "bytes_read": s.bytes_read,
              "error": abs(model.step_us - s.wall_us) / s.wall_us,
              "predicted_phases_us": [p.time_us for p in model.phases],
              "measured_phases_us": s.phases_us.max(axis=1)}
             for s, model in zip(samples, models, strict=True)]
    us = np.array([[p["predicted_us"], p["measured_us"]] for p in plans])
    groups = [us[[s.work == work for s in samples]] for work in {s.work for s in samples}]
    orders = [spearman(*group.T) for group in groups if len(group) > 2]
    ratio = us[:, 0] / us[:, 1]
    return {"num_plans": len(plans), "median_error": float(np.median([p["error"] for p in plans])),
            "spearman": float(np.mean(orders)) if orders else None,
            "spearman_all": spearman(*us.T), "spread": float(us[:, 1].max() / us[:, 1].min()),
            "signed_error_by_kind": {
                kind: float(np.median(ratio[[s.kind == kind for s in samples]])) - 1
                for kind in dict.fromkeys(s.kind for s in samples)},
            "delayed": [of(s.quality["delayed"] for s in samples) for of in (statistics.mean, max)],
            "plans": plans}


def spearman(x: np.ndarray, y: np.ndarray) -> float:
    """Spearman's rank correlation of two arrays float64 [n]. Equal values have the mean of their
    ranks; 0 if all values of an array are equal, which determines no order."""
    ranks = [_ranks(v) for v in (x, y)]
    return float(np.corrcoef(ranks)[0, 1]) if all(np.ptp(r) > 0 for r in ranks) else 0.0


def _ranks(values: np.ndarray) -> np.ndarray:
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: np.ndarray = (np.cumsum(counts) - (counts + 1) / 2)[which]
    return ranks


def as_toml(topology: Topology) -> str:
    """The text of a topology file (TOML); each domain of the topology must be one host."""
    lines = [f'name = "{topology.name}"', f'source = "{topology.source}"',
             f"hosts_share_links = {str(topology.hosts_share_links).lower()}"]
    for domain in topology.domains:
        lines += ["", "[[domain]]", *_lines({**asdict(domain), "ranks": len(domain.ranks)})]
    for rack in topology.racks:
        lines += ["", "[[rack]]", *_lines({**asdict(rack), "hosts": list(rack.hosts)})]
    return "\n".join([*lines, "", "[costs]", *_lines(asdict(topology.costs))]) + "\n"


def _lines(values: Mapping[str, Any]) -> list[str]:
    """Lines of a TOML table; bandwidths are rounded to five digits."""
    return [f"{name} = {float(f'{x:.5g}') if name.endswith('_gbps') else x}"
            for name, x in values.items()]
