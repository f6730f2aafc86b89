"""How a training step grows: with tables' rows, batch size, number of tables, and their width."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from oper.bench.core.launch import Progress
from oper.bench.core.measure import Case, Run, aligner, over, summaries
from oper.bench.core.planning import bytes_read, slowest, total, world
from oper.bench.core.workload import Workload, make_kjt
from oper.bench.tables.ceiling import Ceiling, UpdateCeiling
from oper.bench.tables.sides import OPTIMIZER, make_collection
from oper.bench.tables.verify import Verdict
from oper.plan import uniform_plan

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

    def measure(self, progress: Progress) -> dict[str, Any]:
        """Build, verify and measure; what rank 0 returns stands in the record. Collective."""
        from oper.sharding import shard

        run, work = Run(self, progress), self.work
        run.say("drawing batches, building")
        ids = list(run.ids())
        model: Any = shard(make_collection(work, "meta"), optimizer=OPTIMIZER,
                           plan=uniform_plan(work.tables(), run.world_size, "striped"))
        kjts = [make_kjt(work, x) for x in ids]
        verdict = _verify(model, work, kjts[0], ids[0])
        gradient = run.gradient(work.seed, work.batch_size // run.world_size)
        align = aligner(model.tables)
        step = over(kjts, lambda kjt: model(kjt).values().backward(gradient))
        timings = summaries(run.time({"oper": step}, align))
        step_ms, lines = timings["oper"]["median_ms"], int(total([line_bytes(work, ids)])[0])
        others, limit = dict(run.others), {}
        if self.axis == "rows":
            gather = Ceiling(model.tables, ids, work.pooling)
            gather.tune(align, slowest)
            update = UpdateCeiling(model.tables, [run.ids(r) for r in range(run.world_size)])
            bare = summaries(run.time({"gather": gather.run, "update": update.run}, align,
                                      "ceilings"))
            timings |= {f"{n} ceiling": x for n, x in bare.items()}
            ms = {f"{n}_ceiling_ms": x["median_ms"] for n, x in bare.items()}
            limit = {**ms, "ceiling_ns_per_line_byte": _per_byte(sum(ms.values()), lines)}
        run.others = others
        return run.finish(model.tables, {
            "axis": self.axis, "oper_step_ms": step_ms,
            "step_ns_per_line_byte": _per_byte(step_ms, lines), **limit,
            "table_gigabytes": round(sum(work.num_rows) * work.dim * 4 / 1e9, 3),
            "verified": verdict["passed"], "verification": {"oper": verdict},
            "bytes_moved": {"lines": lines}, "bytes_read": bytes_read(model.tables),
            "timings": timings})


def scale_cases() -> list[ScaleCase]:
    """The points of all axes; exponent 1.05, 10 ids a bag but along batches and tables."""
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
            for axis, found in points.items() for label, work in found]


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


def _per_byte(ms: float, lines: int) -> float:
    """A rank's nanoseconds for each of its bytes, of the `lines` bytes of all ranks."""
    return round(ms * 1e6 / lines * world()[1], 5)


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
