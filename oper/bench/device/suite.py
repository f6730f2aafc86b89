"""``oper bench lookup|train --device cuda``: one GPU, OPER beside torch's and fbgemm's kernels.

Times are of the device (events); a floor is the fewest bytes of the phase over the bandwidth of a
copy measured in the same run. One GPU shows kernels, never the exchange between GPUs.
"""

from __future__ import annotations

import argparse
import functools
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

import torch

from oper.bench.core import record
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
    one_rank_plan,
    with_head_plan,
)
from oper.bench.device.contenders import (
    Side,
    fbgemm_side,
    has_fbgemm,
    open_tables,
    oper_side,
    torch_side,
)
from oper.bench.device.reference import Reference
from oper.errors import OperError, fail

_CHECKED_STEPS = 2
_IN_A_ROW = 50  # launches of a small batch
SHAPES = {  # batch, tables, pooling, dim, dtype, rows per table: several times the L2 cache
    "b8192-t26-pool1-d128": (8192, 26, 1, 128, "float32", 1_000_000),
    "b8192-t26-pool10-d128": (8192, 26, 10, 128, "float32", 1_000_000),
    "b8192-t26-pool20-d64": (8192, 26, 20, 64, "float32", 2_000_000),
    "b4096-t100-pool20-d128-fp16": (4096, 100, 20, 128, "float16", 400_000),
}
EXPONENTS = {"uniform": 0.0, "zipf1.05": 1.05}
SMALL, HOST = "b256-t26-pool1-d128-graph", "host-b8192-t26-pool1-d128-zipf1.05"


def configure(parser: argparse.ArgumentParser) -> None:
    """The argument of benchmarks that have cases for a GPU as well."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="",
                        help="cuda: kernels on one GPU, compared with torch's and fbgemm's")


def cases(quick: bool, prefix: str) -> list[DeviceCase]:
    """The shapes at uniform and skewed ids; for lookups a small batch under a graph as well."""
    found = []
    for shape, (batch, tables, pooling, dim, dtype, rows) in SHAPES.items():
        for name, exponent in EXPONENTS.items():
            if quick and name != "uniform":
                continue
            work = Workload((rows,) * tables, dim, batch, pooling, exponent)
            case = DeviceCase(f"{prefix}-{shape}-{name}", work, dtype)
            found.append(replace(case, rounds=4, per_round=3) if quick else case)
    if prefix == "lookup":
        found.append(DeviceCase(f"lookup-{SMALL}", Workload((1_000_000,) * 26, 128, 256, 1, 0.0)))
    if not quick:
        found.append(DeviceCase(f"{prefix}-{HOST}",
                                Workload((1_000_000,) * 26, 128, 8192, 1, 1.05)))
    return found


def run(chosen: Sequence[DeviceCase], device: str) -> Iterator[dict[str, Any]]:
    """Measure the chosen cases on a device."""
    where = torch.device(device)
    if where.type == "cuda":
        if not torch.cuda.is_available():
            raise OperError(fail("cannot measure on a GPU", "--device", device,
                                 "a CUDA device that torch sees", "run it on a machine with a GPU"))
        where = torch.device("cuda", torch.cuda.current_device())
    for case in chosen:
        print(f"{case.name}: building and comparing", file=sys.stderr, flush=True)
        measure = (_run_graph if case.name.endswith("-graph")
                   else _run_host if "-host-" in case.name else _run_case)
        entry = measure(case, where)
        yield {**entry, "device": _describe(where), "case": asdict(case)}
        gc.collect()
        if where.type == "cuda":
            torch.cuda.empty_cache()


def _describe(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"name": "cpu, kernels emulated"}
    p = torch.cuda.get_device_properties(device)
    return {"name": p.name, "memory_bytes": p.total_memory, "processors": p.multi_processor_count,
            "l2_bytes": p.L2_cache_size, "cuda": torch.version.cuda}


def _run_case(case: DeviceCase, device: torch.device) -> dict[str, Any]:
    clock = Clock(device)
    inputs = [draw_inputs(case, device, k) for k in range(case.num_batches)]
    tables = open_tables(case, device, one_rank_plan(case))
    sides = {"oper": oper_side(tables, case.tables()), "torch": torch_side(case, device)}
    if has_fbgemm():
        sides["fbgemm"] = fbgemm_side(case, device)
    timings, verification = _measure(case, device, clock, inputs, sides)
    ahead = interleave(case, clock, {
        "resolve": lambda k: tables.resolve(inputs[k % len(inputs)].lookup)})
    tables.close()
    sides.clear()
    bandwidth = copy_gbps(case, device, clock)
    moved = floor_bytes(case, sum(x.distinct_rows for x in inputs) / len(inputs))
    floors = {phase: count / bandwidth / 1e6 for phase, count in moved.items()}
    overheads = {}
    if case.work.exponent == 0:
        overheads = _overheads(case, device, clock, inputs, timings["forward"]["oper"])
    return {
        "name": case.name, "verified": all(v["passed"] for v in verification.values()),
        "verification": verification, "copy_gbps": round(bandwidth, 1),
        "floor_ms": {k: round(v, 6) for k, v in floors.items()}, **_ratios(timings, floors),
        "resolve_ms": ahead["resolve"]["median_ms"], **overheads,
        "timings": {**timings, "ahead": ahead},
        "bytes_moved": {k: int(v) for k, v in moved.items()}}


def _run_host(case: DeviceCase, device: torch.device) -> dict[str, Any]:
    """Most rows in host memory, beside fbgemm's managed memory with and without its cache."""
    clock = Clock(device)
    inputs = [draw_inputs(case, device, k) for k in range(case.num_batches)]
    tables = open_tables(case, device, host_tail_plan(case))
    sides = {"oper": oper_side(tables, case.tables())}
    if has_fbgemm():
        sides["fbgemm-managed"] = fbgemm_side(case, device, "MANAGED")
        sides["fbgemm-caching"] = fbgemm_side(case, device, "MANAGED_CACHING")
    timings, verification = _measure(case, device, clock, inputs, sides)
    memory = tables.memory_bytes()
    tables.close()
    return {"name": case.name, "verified": all(v["passed"] for v in verification.values()),
            "verification": verification, "memory_bytes": memory, "timings": timings,
            **_ratios(timings, {})}


def _measure(case: DeviceCase, device: torch.device, clock: Clock, inputs: Sequence[Inputs],
             sides: dict[str, Side]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Timings by phase and contender, and whether their numbers are right."""
    generator = torch.Generator(device=device).manual_seed(case.work.seed)
    gradient = torch.randn(case.work.batch_size, case.work.dim * len(case.work.num_rows),
                           device=device, generator=generator) * 1e-3
    verification = _verify(case, device, sides, inputs[:_CHECKED_STEPS], gradient)
    trained = {n: s for n, s in sides.items() if s.rows is not None}

    def batch(number: int) -> Inputs:
        return inputs[number % len(inputs)]

    return {
        "forward": interleave(case, clock, _calls(sides, lambda s, k: s.lookup(batch(k)))),
        "update": interleave(case, clock, _calls(trained, lambda s, k: s.update(gradient)),
                             _calls(trained, lambda s, k: s.prepare(batch(k)))),
        "step": interleave(case, clock, _calls(trained, lambda s, k: s.step(batch(k), gradient))),
    }, verification


def _calls(sides: dict[str, Side], call: Callable[[Side, int], Any]
           ) -> dict[str, Callable[[int], Any]]:
    return {n: lambda k, s=s: call(s, k) for n, s in sides.items()}  # type: ignore[misc]


def _verify(case: DeviceCase, device: torch.device, sides: dict[str, Side],
            checks: Sequence[Inputs], gradient: torch.Tensor) -> dict[str, Any]:
    reference = Reference(case, device, checks, gradient)
    found = {f"{n} forward": reference.check_lookup(s, checks[0]) for n, s in sides.items()}
    for name, side in sides.items():
        if side.rows is None:
            continue
        for x in checks:
            side.step(x, gradient)
        found[f"{name} rows"] = reference.check_rows(side)
    return found


def _ratios(timings: dict[str, Any], floors: dict[str, float]) -> dict[str, Any]:
    """OPER's times by phase, the share of the floor, and the fastest peer over OPER."""
    found: dict[str, Any] = {}
    for phase in ("forward", "update", "step"):
        medians = {n: t["median_ms"] for n, t in timings[phase].items()}
        own = medians.pop("oper")
        found[f"oper_{phase}_ms"] = own
        if phase in floors:
            found[f"{phase}_fraction_of_floor"] = round(floors[phase] / own, 4)
        for name, value in medians.items():
            found[f"{name}_{phase}_ms"] = value
        if medians:
            found[f"ratio_{phase}"] = round(min(medians.values()) / own, 3)
        if "fbgemm" in medians:
            found[f"ratio_{phase}_fbgemm"] = round(medians["fbgemm"] / own, 3)
    return found


def _overheads(case: DeviceCase, device: torch.device, clock: Clock, inputs: Sequence[Inputs],
               plain: dict[str, float]) -> dict[str, float]:
    """What it adds to a forward pass to find rows by a directory, to read them as peers' rows, and
    to fetch those once (planning the batch, copying its distinct rows).

    Peers are seven more virtual ranks on the same device: this shows the path of the addresses, not
    a link between devices.
    """
    found = {}
    tables = open_tables(case, device, with_head_plan(case), trained=False)
    times = interleave(case, clock, {
        "head": lambda k: tables.lookup(inputs[k % len(inputs)].lookup)})
    found["location_overhead"] = round(times["head"]["median_ms"] / plain["median_ms"] - 1, 4)
    tables.close()
    peers = _open_peers(case, device, 8)
    for name, once in (("peer_overhead", False), ("staging_overhead", True)):
        peers[0].deduplicate = once
        times = interleave(case, clock, {
            name: lambda k: peers[0].lookup(inputs[k % len(inputs)].lookup)})
        found[name] = round(times[name]["median_ms"] / plain["median_ms"] - 1, 4)
    for t in peers:
        t.close()
    return found


def _open_peers(case: DeviceCase, device: torch.device, world_size: int) -> list[Any]:
    from oper.shmem.group.groups import ThreadGroup

    groups = ThreadGroup.create(world_size, deadline_s=300.0)
    plan = one_rank_plan(case, world_size)
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(lambda g: open_tables(case, device, plan, g, trained=False), groups))


def _run_graph(case: DeviceCase, device: torch.device) -> dict[str, Any]:
    """A forward pass of a small batch, launched anew and replayed from a graph."""
    clock = Clock(device)
    inputs = draw_inputs(case, device, 0)
    tables = open_tables(case, device, one_rank_plan(case), trained=False)
    side = oper_side(tables, case.tables())
    reference = Reference(case, device, [inputs],
                          torch.zeros(case.work.batch_size,
                                      case.work.dim * len(case.work.num_rows), device=device))
    verdict = reference.check_lookup(side, inputs)
    runs: dict[str, Callable[[int], Any]] = {"launched": lambda k: side.lookup(inputs)}
    replayed = None
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
    timings = interleave(case, clock, runs)
    in_a_row = {}
    for name, call in runs.items():
        seconds = clock.seconds_in_a_row(functools.partial(call, 0), _IN_A_ROW)
        in_a_row[f"forward_us_{name}_in_a_row"] = round(1e6 * seconds, 2)
    tables.close()
    return {"name": case.name, "verified": verdict["passed"], "verification": {"oper": verdict},
            "timings": timings,
            **{f"forward_us_{n}": round(1e3 * t["median_ms"], 2) for n, t in timings.items()},
            **in_a_row}


def report(entries: Sequence[dict[str, Any]]) -> str:
    """The entries for a person."""
    whole = [e for e in entries if "oper_forward_ms" in e]
    peers = ["torch", "fbgemm", "fbgemm-managed", "fbgemm-caching"]
    text = ""
    for phase in ("forward", "update", "step"):
        shown = [p for p in peers if any(f"{p}_{phase}_ms" in e for e in whole)]
        rows = [[e["name"], f"{e[f'oper_{phase}_ms']:.3f} ms",
                 _share(e, f"{phase}_fraction_of_floor"), *(_times(e, p, phase) for p in shown),
                 "yes" if e["verified"] else "NO"] for e in whole]
        if rows:
            text += record.table([phase, "OPER", "of floor", *shown, "verified"], rows) + "\n\n"
    rows = [[e["name"], _share(e, "location_overhead"), _share(e, "peer_overhead"),
             _share(e, "staging_overhead"), f"{e['resolve_ms']:.3f} ms",
             f"{e['copy_gbps']:.0f} GB/s"]
            for e in whole if "resolve_ms" in e]
    if rows:
        text += record.table(["what it adds to a forward pass", "directory", "peers' addresses",
                              "fetching once", "(resolve and sort)", "(copy)"], rows) + "\n\n"
    text += "".join(f"{e['name']}: " + ", ".join(
        f"{k.removeprefix('forward_us_')} {v:.1f} us" for k, v in e.items()
        if k.startswith("forward_us_")) + f", verified: {'yes' if e['verified'] else 'NO'}\n"
        for e in entries if e not in whole)
    return (text + "medians of device time; x = a peer's time over OPER's; one device: no exchange "
            "between devices is in these numbers\n")


def _share(entry: dict[str, Any], key: str) -> str:
    value = entry.get(key)
    return "-" if value is None else f"{value:.1%}"


def _times(entry: dict[str, Any], peer: str, phase: str) -> str:
    """A peer's time and how often OPER's goes into it."""
    value = entry.get(f"{peer}_{phase}_ms")
    return "-" if value is None else f"{value:.3f} ms {value / entry[f'oper_{phase}_ms']:.2f}x"
