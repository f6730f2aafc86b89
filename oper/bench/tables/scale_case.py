"""How a training step grows: with tables' rows, batch size, number of tables, and their width."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from oper.bench.core import record
from oper.bench.core.planning import bytes_read, slowest, total, world
from oper.bench.core.workload import Workload, make_kjt, timed_ids
from oper.bench.tables.ceiling import Ceiling, UpdateCeiling
from oper.bench.tables.lookup_case import Case, aligner
from oper.bench.tables.sides import EPS, LEARNING_RATE, make_collection
from oper.bench.tables.train_case import Progress
from oper.bench.tables.verify import Verdict
from oper.plan import uniform_plan
from oper.shmem.optim.optimizers import RowWiseAdagrad

_LINE = 64  # bytes that memory moves at least
_CHECKED_BAGS, _CHECKED_TABLES = 32, 8


@dataclass(frozen=True, slots=True)
class ScaleCase(Case):
    """One point of one axis; all tables striped over the ranks.

    Attributes:
        axis: what is varied; step times per byte are compared along it.
    """

    axis: str = ""
    num_batches: int = 8
    rounds: int = 6
    per_round: int = 4


def scale_cases(quick: bool) -> list[ScaleCase]:
    """The points of all axes, those between the ends left out when `quick`; ids of exponent 1.05,
    pooling factor 10 but for wide rows and many tables."""
    def many(num_tables: int, rows: int) -> tuple[int, ...]:
        return (rows,) * num_tables

    base = Workload(num_rows=many(8, 500_000), pooling=10)
    points: dict[str, list[tuple[str, Workload]]] = {
        "rows": [], "batch": [], "tables": [], "dim": []}
    for size in (0.1, 1.0, 4.0, 12.0):
        rows = int(size * 1e9 / (8 * base.dim * 4))
        points["rows"].append((f"{size:g}GB", replace(base, num_rows=many(8, rows))))
    for batch in (512, 4096, 16_384, 65_536):
        points["batch"].append((str(batch), replace(base, batch_size=batch, pooling=2)))
    for number in (2, 26, 128, 856):
        # As many ids and rows in all.
        batch = 512 * 856 // number // 2 * 2
        points["tables"].append((str(number), replace(
            base, num_rows=many(number, 4_000_000 // number), batch_size=batch, pooling=2)))
    for dim in (4, 16, 64, 256, 1024):
        points["dim"].append((str(dim), replace(base, dim=dim, num_rows=many(8, 100_000))))
    return [ScaleCase(f"scale-{axis}-{label}", work, 2, axis=axis)
            for axis, found in points.items()
            for label, work in (found[::len(found) - 1] if quick else found)]


def line_bytes(work: Workload, ids: list[np.ndarray]) -> int:
    """Bytes of whole cache lines that a rank's step moves, mean over batches.

    As `moved_bytes`, a row or gradient counted as the lines that it takes, its state as one line;
    and each id once (8 bytes).
    """
    row = -(-work.dim * 4 // _LINE) * _LINE
    found = 0
    for batch in ids:
        distinct = sum(np.unique(x).size for x in batch)
        bags = batch.size // work.pooling
        found += batch.size * (2 * row + 8) + bags * row + distinct * (4 * row + 2 * _LINE)
    return found // len(ids)


def run_scale_case(value: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Build, verify and measure one case; the worker function. Collective.

    Returns:
        The case's entry of the record on rank 0, nothing elsewhere.
    """
    from oper.sharding import shard

    case = ScaleCase.from_json(value)
    work, (rank, world_size) = case.work, world()
    load_before = record.load_average()
    progress(f"{case.name}: drawing batches, building")
    ids = list(timed_ids(work, rank, world_size, case.num_batches))
    collection = make_collection(work, "meta")
    model: Any = shard(collection, plan=uniform_plan(work.tables(), world_size, "striped"),
                       optimizer=RowWiseAdagrad(lr=LEARNING_RATE, eps=EPS))
    kjts = [make_kjt(work, x) for x in ids]
    verdict = _verify(model, work, kjts[0], ids[0])
    gradient = torch.randn(work.batch_size // world_size, work.dim * len(work.num_rows),
                           generator=torch.Generator().manual_seed(work.seed)) * 1e-3

    def step(number: int) -> None:
        model(kjts[number % len(kjts)]).values().backward(gradient)

    gc.collect()
    progress(f"{case.name}: measuring, {case.rounds} rounds of {case.per_round}")
    align = aligner(model.tables)
    record.interleave({"oper": step}, align, 2, 4)
    clock = record.BusyClock()
    mine = record.interleave({"oper": step}, align, case.rounds, case.per_round)["oper"]
    others = clock.others(total)
    timing = record.summary(np.array(slowest(mine.tolist())))
    lines = int(total([line_bytes(work, ids)])[0])
    limits = _ceilings(case, model.tables, ids) if case.axis == "rows" else {}
    limit = {} if not limits else {
        "gather_ceiling_ms": limits["gather"]["median_ms"],
        "update_ceiling_ms": limits["update"]["median_ms"],
        "ceiling_ns_per_line_byte": _per_byte(
            limits["gather"]["median_ms"] + limits["update"]["median_ms"], lines)}
    page_kind, read = model.tables.page_kind, bytes_read(model.tables)
    if dist.is_initialized():
        dist.barrier()
    model.tables.close()
    if rank:
        return {}
    return {
        "name": case.name, "axis": case.axis, "oper_step_ms": timing["median_ms"],
        "step_ns_per_line_byte": _per_byte(timing["median_ms"], lines), **limit,
        "table_gigabytes": round(sum(work.num_rows) * work.dim * 4 / 1e9, 3),
        "verified": verdict["passed"], "verification": {"oper": verdict},
        "bytes_moved": {"lines": lines}, "bytes_read": read,
        "timings": {"oper": timing, **{f"{n} ceiling": x for n, x in limits.items()}},
        "page_kind": page_kind, "workload": work.to_json(), "world_size": world_size,
        "threads_per_rank": case.num_threads // world_size, "num_batches": case.num_batches,
        "other_busy_cores": round(others, 2), "load_before": load_before,
        "load_after": record.load_average()}


def _per_byte(ms: float, lines: int) -> float:
    """A rank's nanoseconds for each of its bytes, of the `lines` bytes of all ranks."""
    return round(ms * 1e6 / lines * world()[1], 5)


def _ceilings(case: ScaleCase, tables: Any, ids: list[np.ndarray]) -> dict[str, dict[str, float]]:
    """Timings of the bare gather and the bare rewrite of the same rows, the slower rank's.
    Collective."""
    rank, world_size = world()
    align = aligner(tables)
    gather = Ceiling(tables, ids, case.work.pooling)
    gather.tune(align, slowest)
    update = UpdateCeiling(tables, [
        ids if r == rank else list(timed_ids(case.work, r, world_size, case.num_batches))
        for r in range(world_size)])
    runs = {"gather": gather.run, "update": update.run}
    record.interleave(runs, align, 1, 4)
    mine = record.interleave(runs, align, case.rounds, case.per_round)
    return {n: record.summary(np.array(slowest(s.tolist()))) for n, s in mine.items()}


def _verify(model: Any, work: Workload, kjt: Any, ids: np.ndarray) -> dict[str, Any]:
    """Sums of some bags against rows that are read one by one."""
    verdict = Verdict()
    with torch.no_grad():
        out = model(kjt).values()
    for t in range(min(_CHECKED_TABLES, len(work.num_rows))):
        bags = ids[t][:_CHECKED_BAGS * work.pooling]
        rows = torch.empty(bags.size, work.dim)
        model.tables.gather(f"t{t}", bags, "rows", slice(0, work.dim), rows)
        expected = rows.reshape(-1, work.pooling, work.dim).double().sum(dim=1)
        found = out[:expected.shape[0], t * work.dim:(t + 1) * work.dim]
        verdict.compare("pooled", found, expected.float())
    return verdict.to_json()


def scale_table(entries: list[dict[str, Any]]) -> str:
    """Time per byte along every axis over that of the best point, of steps and of bare ceilings."""
    rows = []
    for e in entries:
        axis = [x for x in entries if x["axis"] == e["axis"]]
        rows.append([e["name"], f"{e['table_gigabytes']:.2f} GB", f"{e['oper_step_ms']:.2f} ms",
                     f"{e['bytes_moved']['lines'] / 1e6:.0f} MB",
                     f"{1e3 * e['step_ns_per_line_byte']:.1f} ps",
                     _over_best(e, axis, "step_ns_per_line_byte"),
                     _over_best(e, axis, "ceiling_ns_per_line_byte"),
                     "yes" if e["verified"] else "NO"])
    headers = ["step", "tables", "OPER", "lines moved", "rank's time per byte", "of the axis' best",
               "bare ceilings", "verified"]
    return record.table(headers, rows) + "\n" if rows else ""


def _over_best(entry: dict[str, Any], axis: list[dict[str, Any]], key: str) -> str:
    if key not in entry:
        return ""
    return f"{entry[key] / min(x[key] for x in axis):.2f}x"
