"""``oper bench lookup|train --device cuda``: OPER's, torch's and fbgemm's kernels on one GPU.

Times are measured by CUDA events. The floor of a phase is its minimum memory traffic over the
bandwidth of a copy measured in the same run. Exchanges between GPUs are not measured.
"""

from __future__ import annotations

import argparse
import functools
import gc
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from oper.bench.core.launch import Progress
from oper.bench.core.measure import Call, Steps, over
from oper.bench.core.workload import Workload
from oper.bench.device.cases import (
    Clock,
    DeviceCase,
    Inputs,
    copy_gbps,
    draw_inputs,
    floor_bytes,
    host_tail_plan,
    interleave,
    with_head_plan,
)
from oper.bench.device.contenders import (
    Reference,
    Side,
    fbgemm_side,
    has_fbgemm,
    open_tables,
    oper_side,
    torch_side,
)
from oper.errors import OperError
from oper.plan import uniform_plan

_CHECKED_STEPS = 2
_IN_A_ROW = 50  # consecutive launches of a small batch
SHAPES = {  # batch, tables, pooling, dim, dtype, rows per table: several times the L2 cache
    "b8192-t26-pool1-d128": (8192, 26, 1, 128, "float32", 1_000_000),
    "b8192-t26-pool10-d128": (8192, 26, 10, 128, "float32", 1_000_000),
    "b8192-t26-pool20-d64": (8192, 26, 20, 64, "float32", 2_000_000),
    "b4096-t100-pool20-d128-fp16": (4096, 100, 20, 128, "float16", 400_000),
}
EXPONENTS = {"uniform": 0.0, "zipf1.05": 1.05}
SMALL, HOST = "b256-t26-pool1-d128-graph", "host-b8192-t26-pool1-d128-zipf1.05"
PHASES = ("forward", "update", "step")
FIGURES = ((
    "device.name",
    *(f"{who}_{phase}_ms" for phase in PHASES
      for who in ("oper", "torch", "fbgemm", "fbgemm-managed", "fbgemm-caching")),
    *(f"{phase}_fraction_of_floor" for phase in PHASES), *(f"ratio_{phase}" for phase in PHASES),
    "location_overhead", "peer_overhead", "staging_overhead", "resolve_ms", "copy_gbps",
    "forward_us_launched", "forward_us_replayed", "forward_us_launched_in_a_row",
    "forward_us_replayed_in_a_row"),)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add ``--device``, the argument of benchmarks that also have cases for a GPU."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="",
                        help="cuda: benchmark one GPU, compared with torch and fbgemm")


def cases(quick: bool, prefix: str) -> list[Case]:
    """The shapes with uniform and skewed ids, a case with rows in host memory and, for lookups, a
    small batch under a CUDA graph; `prefix` is ``"lookup"`` or ``"train"``."""
    found = []
    for shape, (batch, tables, pooling, dim, dtype, rows) in SHAPES.items():
        for name, exponent in EXPONENTS.items():
            if quick and name != "uniform":
                continue
            work = Workload((rows,) * tables, dim, batch, pooling, exponent)
            case = Case(f"{prefix}-{shape}-{name}", work, dtype)
            found.append(replace(case, rounds=4, per_round=3) if quick else case)
    if prefix == "lookup":
        found.append(GraphCase(f"lookup-{SMALL}", Workload((1_000_000,) * 26, 128, 256, 1, 0.0)))
    if not quick:
        found.append(HostCase(f"{prefix}-{HOST}",
                              Workload((1_000_000,) * 26, 128, 8192, 1, 1.05)))
    return found


@dataclass(frozen=True, slots=True)
class Case(DeviceCase):
    """A case with all rows in device memory."""

    def measure(self, progress: Progress) -> dict[str, Any]:
        """Verify and measure; returns the record's entry. Raises OperError without a GPU."""
        where = torch.device(self.device)
        if where.type == "cuda":
            if not torch.cuda.is_available():
                raise OperError("cannot measure on a GPU", "--device", self.device,
                                "a CUDA device that torch finds",
                                "run on a machine with a GPU and a CUDA build of torch")
            where = torch.device("cuda", torch.cuda.current_device())
        progress("building and comparing")
        entry = {**self.figures(where), "device": _describe(where), "case": asdict(self)}
        gc.collect()
        if where.type == "cuda":
            torch.cuda.empty_cache()
        return entry

    def figures(self, device: torch.device) -> dict[str, Any]:
        """Measure the case.

        Returns:
            Times of all contenders by phase, floors (least times, from memory traffic), their
            ratios and, for uniform ids, the overheads of `_overheads`; times in ms.
        """
        clock, inputs = Clock(device), self.inputs(device)
        tables = open_tables(self, device, uniform_plan(self.tables(), 1))
        sides = {"oper": oper_side(tables, self.tables()), "torch": torch_side(self, device)}
        if has_fbgemm():
            sides["fbgemm"] = fbgemm_side(self, device)
        found = _compared(self, device, clock, inputs, sides)
        timings = found["timings"]
        ahead = interleave(self, clock, {
            "resolve": lambda k: tables.resolve(inputs[k % len(inputs)].lookup)})
        tables.close()
        sides.clear()
        bandwidth = copy_gbps(self, device, clock)
        moved = floor_bytes(self, sum(x.distinct_rows for x in inputs) / len(inputs))
        floors = {phase: count / bandwidth / 1e6 for phase, count in moved.items()}
        overheads = {}
        if self.work.exponent == 0:
            overheads = _overheads(self, device, clock, inputs, timings["forward"]["oper"])
        return {
            **found, "copy_gbps": bandwidth, "floor_ms": floors, **_ratios(timings, floors),
            "resolve_ms": ahead["resolve"]["median_ms"], **overheads,
            "timings": {**timings, "ahead": ahead},
            "bytes_moved": {k: int(v) for k, v in moved.items()}}

    def inputs(self, device: torch.device) -> list[Inputs]:
        """Draw the timed batches."""
        return [draw_inputs(self, device, k) for k in range(self.num_batches)]


@dataclass(frozen=True, slots=True)
class HostCase(Case):
    """A case with most rows in host memory, compared with fbgemm's managed memory with and
    without cache."""

    def figures(self, device: torch.device) -> dict[str, Any]:
        """Times of all contenders by phase, and OPER's memory (bytes)."""
        tables = open_tables(self, device, host_tail_plan(self))
        sides = {"oper": oper_side(tables, self.tables())}
        if has_fbgemm():
            sides["fbgemm-managed"] = fbgemm_side(self, device, "MANAGED")
            sides["fbgemm-caching"] = fbgemm_side(self, device, "MANAGED_CACHING")
        found = _compared(self, device, Clock(device), self.inputs(device), sides)
        memory = tables.memory_bytes()
        tables.close()
        return {**found, "memory_bytes": memory, **_ratios(found["timings"], {})}


@dataclass(frozen=True, slots=True)
class GraphCase(Case):
    """A case that compares launching a small forward pass with replaying it from a CUDA graph."""

    def figures(self, device: torch.device) -> dict[str, Any]:
        """Times (us) of a pass launched and replayed, alone and `_IN_A_ROW` in succession."""
        clock, inputs = Clock(device), draw_inputs(self, device, 0)
        tables = open_tables(self, device, uniform_plan(self.tables(), 1), trained=False)
        side = oper_side(tables, self.tables())
        verdict = Reference(self, device, [inputs], torch.zeros(
            self.work.batch_size, self.work.dim * len(self.work.num_rows), device=device)
        ).check_lookup(side, inputs)
        runs: dict[str, Callable[[int], Any]] = {"launched": lambda k: side.lookup(inputs)}
        if device.type == "cuda":
            graph = torch.cuda.CUDAGraph()
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                side.lookup(inputs)
            clock.wait()
            with torch.cuda.graph(graph, stream=stream):
                replayed = side.lookup(inputs)
            graph.replay()
            clock.wait()
            verdict["passed"] &= torch.equal(replayed, side.lookup(inputs))
            runs["replayed"] = lambda k: graph.replay()
        timings = interleave(self, clock, runs)
        in_a_row = {f"forward_us_{name}_in_a_row": 1e6 * clock.seconds_in_a_row(
            functools.partial(call, 0), _IN_A_ROW) for name, call in runs.items()}
        tables.close()
        return {"verified": verdict["passed"], "verification": {"oper": verdict},
                "timings": timings, **in_a_row,
                **{f"forward_us_{n}": 1e3 * t["median_ms"] for n, t in timings.items()}}


def _describe(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"name": "cpu, kernels emulated"}
    p = torch.cuda.get_device_properties(device)
    return {"name": p.name, "memory_bytes": p.total_memory, "processors": p.multi_processor_count,
            "l2_bytes": p.L2_cache_size, "cuda": torch.version.cuda}


def _compared(case: DeviceCase, device: torch.device, clock: Clock, inputs: Sequence[Inputs],
              sides: dict[str, Side]) -> dict[str, Any]:
    """Verify all contenders and time them; returns ``verified``, ``verification``, ``timings``."""
    generator = torch.Generator(device=device).manual_seed(case.work.seed)
    gradient = torch.randn(case.work.batch_size, case.work.dim * len(case.work.num_rows),
                           device=device, generator=generator) * 1e-3
    verification = _verify(case, device, sides, inputs[:_CHECKED_STEPS], gradient)
    trained = {n: Steps(over(inputs, s.forward), gradient)
               for n, s in sides.items() if s.rows is not None}
    runs: dict[str, dict[str, Call]] = {
        "forward": {n: over(inputs, s.lookup) for n, s in sides.items()},
        "update": {n: s.backward for n, s in trained.items()},
        "step": {n: s.step for n, s in trained.items()}}
    before = {"update": {n: s.forward for n, s in trained.items()}}
    return {
        "verified": all(v["passed"] for v in verification.values()), "verification": verification,
        "timings": {phase: interleave(case, clock, of, before.get(phase))
                    for phase, of in runs.items()}}


def _verify(case: DeviceCase, device: torch.device, sides: dict[str, Side],
            checks: Sequence[Inputs], gradient: torch.Tensor) -> dict[str, Any]:
    reference = Reference(case, device, checks, gradient)
    found = {f"{n} forward": reference.check_lookup(s, checks[0]) for n, s in sides.items()}
    for name, side in sides.items():
        if side.rows is None:
            continue
        for x in checks:
            side.forward(x).backward(gradient)
        found[f"{name} rows"] = reference.check_rows(side)
    return found


def _ratios(timings: dict[str, Any], floors: dict[str, float]) -> dict[str, Any]:
    """Median times (ms) by phase, floor / OPER, and fastest peer / OPER."""
    found: dict[str, Any] = {}
    for phase in PHASES:
        medians = {n: t["median_ms"] for n, t in timings[phase].items()}
        own = medians.pop("oper")
        found[f"oper_{phase}_ms"] = own
        if phase in floors:
            found[f"{phase}_fraction_of_floor"] = floors[phase] / own
        for name, value in medians.items():
            found[f"{name}_{phase}_ms"] = value
        if medians:
            found[f"ratio_{phase}"] = min(medians.values()) / own
        if "fbgemm" in medians:
            found[f"ratio_{phase}_fbgemm"] = medians["fbgemm"] / own
    return found


def _overheads(case: DeviceCase, device: torch.device, clock: Clock, inputs: Sequence[Inputs],
               plain: dict[str, float]) -> dict[str, float]:
    """Additional time of a forward pass, as a share of the time in `plain`, if rows are elsewhere.

    ``location_overhead``: rows are found through a directory with an explicit head.
    ``peer_overhead``: rows are read from eight ranks. ``staging_overhead``: as before, but the
    distinct rows of other ranks are first copied. All ranks are on the same device, so that this
    measures finding rows, not a link between devices.

    Args:
        case, device, clock, inputs: as for `_compared`.
        plain: `record.summary` of OPER's forward pass with all rows on this rank.
    """
    found = {}
    tables = open_tables(case, device, with_head_plan(case), trained=False)
    times = interleave(case, clock, {
        "head": lambda k: tables.lookup(inputs[k % len(inputs)].lookup)})
    found["location_overhead"] = times["head"]["median_ms"] / plain["median_ms"] - 1
    tables.close()
    peers = _open_peers(case, device, 8)
    for name, once in (("peer_overhead", False), ("staging_overhead", True)):
        peers[0].deduplicate = once
        times = interleave(case, clock, {
            name: lambda k: peers[0].lookup(inputs[k % len(inputs)].lookup)})
        found[name] = times[name]["median_ms"] / plain["median_ms"] - 1
    for t in peers:
        t.close()
    return found


def _open_peers(case: DeviceCase, device: torch.device, world_size: int) -> list[Any]:
    from oper.shmem.group.groups import ThreadGroup

    groups = ThreadGroup.create(world_size, deadline_s=300.0)
    plan = uniform_plan(case.tables(), world_size)
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(lambda g: open_tables(case, device, plan, g, trained=False), groups))
