"""``oper bench train --tables dynamic``: steps on raw keys, compared with static tables' steps and
with TorchRec's managed-collision modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from oper.bench.core.launch import Progress
from oper.bench.core.measure import (
    Case,
    Run,
    aligner,
    nothing,
    on_threads,
    over,
    quick_case,
    summaries,
)
from oper.bench.core.planning import chosen_plan, gather
from oper.bench.core.workload import CHECKED, Workload, batch_ids, make_kjt
from oper.bench.tables.sides import OPTIMIZER, make_collection
from oper.bench.tables.unsharded import EPS, LEARNING_RATE, fbgemm_bags
from oper.bench.tables.verify import Verdict
from oper.shmem.keys.rules import DynamicTable
from oper.support.numeric import mix64
from oper.train.reference import SparseTableOptimizer

NUM_TABLES, NUM_KEYS = 26, 50_000
REFERENCE_LOAD = 0.5
# Keys per available row. From 0.95 on, full buckets evict keys; above 1 there are more keys than
# rows.
LOADS = {"pool1": REFERENCE_LOAD, "pool20": REFERENCE_LOAD, "pool1-load95": 0.95,
         "pool1-load100": 1.0, "pool1-full": 1.1}
FIGURES = (("ratio_static", "dynamic_step_ms", "static_step_ms", "planned_step_ms",
            "ratio_planned", "ratio_half", "mch_step_ms", "ratio_mch", "bytes_per_slot", "missed",
            "evicted_per_step"),)
EVICTION_INTERVAL = 10  # steps between two updates of TorchRec's managed-collision modules
_CHECKED_STEPS = 2
# More than steps, since a repeated batch's keys have rows and evict none. The same batches at all
# loads, since repeated batches are faster in static tables, too.
_DISTINCT_BATCHES = 96
_FILL_BAGS = 4096  # keys per table and step while the tables are filled


def cases(quick: bool) -> list[DynamicCase]:
    """The cases in the order of the record; with few repetitions when `quick`."""
    found = [DynamicCase(name, Workload(num_rows=(NUM_KEYS,) * NUM_TABLES,
                                        pooling=20 if name == "pool20" else 1), load=load,
                         num_batches=32 if name == "pool20" else _DISTINCT_BATCHES)
             for name, load in LOADS.items()]
    return [quick_case(c) for c in found] if quick else found


@dataclass(frozen=True, slots=True)
class DynamicCase(Case):
    """Steps on dynamic tables. The workload's ids are rows of the static tables; `keys_of` maps
    them to raw keys.

    Attributes:
        load: distinct keys per row of a dynamic table.
    """

    load: float = 0.5

    @property
    def num_slots(self) -> int:
        """Rows per dynamic table for keys, without the default row."""
        return self.slots_at(self.load)

    def slots_at(self, load: float) -> int:
        """Rows for keys of a table with `load` distinct keys per row."""
        return round(max(self.work.num_rows) / load)

    def make_dynamic(self, load: float, batch_size: int) -> Any:
        """New dynamic tables with `slots_at` this load, for `batch_size` samples per rank.
        Collective."""
        from oper.sharding import shard

        work = replace(self.work, num_rows=(self.slots_at(load) + 1,) * len(self.work.num_rows))
        return shard(make_collection(work, "cpu"), dynamic=DynamicTable(), batch_size=batch_size,
                     optimizer=OPTIMIZER)

    def measure(self, progress: Progress) -> dict[str, Any]:
        """Build, fill, verify and measure; rank 0 returns the record's entry. Collective."""
        from oper.sharding import shard

        run, work = Run(self, progress), self.work
        run.say("drawing batches, planning")
        plan, _ = chosen_plan(work, self.num_stats_batches, "training")
        run.say("building")
        batch_size = work.batch_size // run.world_size
        # Dynamic tables are planned without access statistics, since their keys are not known in
        # advance. The static tables of the comparison are planned without statistics, too.
        static: Any = shard(make_collection(work, "cpu"), batch_size=batch_size,
                            optimizer=OPTIMIZER)
        planned: Any = shard(make_collection(work, "cpu"), plan=plan, optimizer=OPTIMIZER)
        dynamic = self.make_dynamic(self.load, batch_size)
        sides = {"static": static, "planned": planned, "dynamic": dynamic}
        if self.load != REFERENCE_LOAD:  # in the same run, since step times vary more between runs
            sides["half"] = self.make_dynamic(REFERENCE_LOAD, batch_size)
        gradient = run.gradient(work.seed, work.batch_size)
        mine = gradient.chunk(run.world_size)[run.rank].clone()
        mch = None if run.rank else ManagedCollisions(work, self.num_slots, gradient)
        run.say("filling the tables")
        _fill(work, dynamic, mch, run)
        if "half" in sides:
            _fill(work, sides["half"], None, run)
        run.say(f"comparing {_CHECKED_STEPS} steps")
        verification = _verify(work, dynamic, gradient, run)
        before, steps_before = _totals(dynamic.tables), dynamic.tables.num_steps
        steps = _time(self, run, sides, mch, mine)
        counts = _totals(dynamic.tables)
        timed = {name: counts[name] - before[name] for name in ("evicted", "lookups", "missed")}
        for name, side in sides.items():
            if name != "dynamic":
                side.tables.close()
        medians, means = ({n: 1e3 * float(of(s)) for n, s in steps.items()}
                          for of in (np.median, np.mean))
        return run.finish(dynamic.tables, {
            "dynamic_step_ms": medians["dynamic"], "static_step_ms": medians["static"],
            "planned_step_ms": medians["planned"],
            "ratio_static": medians["dynamic"] / medians["static"],
            "ratio_planned": medians["dynamic"] / medians["planned"],
            "ratio_half": medians["dynamic"] / medians.get("half", medians["dynamic"]),
            "mch_step_ms": means["mch"], "ratio_mch": means["mch"] / means["dynamic"],
            "bytes_per_slot": counts["num_bytes"] / counts["rows"],
            "missed": timed["missed"] / timed["lookups"],
            "evicted_per_step": timed["evicted"] / (dynamic.tables.num_steps - steps_before),
            "load": self.load, "num_slots": self.num_slots, "occupied": counts["occupied"],
            "verified": verification["passed"], "verification": verification,
            "timings": summaries(steps), "threads_of_peers": self.num_threads})


def keys_of(ids: np.ndarray) -> np.ndarray:
    """Raw keys, int64 [tables, n], of the row ids `ids`, [tables, n]: hashes of the id and the
    table."""
    table = np.arange(ids.shape[0], dtype=np.uint64)[:, None] << np.uint64(40)
    return mix64(ids.astype(np.uint64) ^ table).view(np.int64)


def _step(model: Any, kjt: Any, gradient: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model(kjt).values()
    out.backward(gradient)
    return out


def _fill(work: Workload, dynamic: Any, mch: ManagedCollisions | None, run: Run) -> None:
    """Look up all keys once, so that dynamic tables and TorchRec's modules assign rows to them.
    Collective.

    Each rank looks up its share of the keys in the dynamic tables, with a gradient of 0.
    """
    flat = replace(work, pooling=1)
    num_keys, columns = max(work.num_rows), len(work.num_rows) * work.dim
    per_rank = -(-num_keys // run.world_size)
    for at in range(0, per_rank, _FILL_BAGS):
        size = min(_FILL_BAGS, per_rank - at)
        first = run.rank * per_rank + at
        ids = np.minimum(np.arange(first, first + size), num_keys - 1)
        keys = keys_of(np.tile(ids, (len(work.num_rows), 1)))
        _step(dynamic, make_kjt(flat, keys), torch.zeros(size, columns))
    if mch is not None:
        everything = keys_of(np.tile(np.arange(num_keys), (len(work.num_rows), 1)))
        mch.learn(make_kjt(flat, everything))


def _verify(work: Workload, dynamic: Any, gradient: torch.Tensor, run: Run) -> dict[str, Any]:
    """Compare outputs and updates of a few steps with the directories and the optimizer's formula;
    returns a verdict on rank 0. Collective."""
    verdict, tables, names = Verdict(), dynamic.tables, list(dynamic.tables.specs)
    gradients = gradient.chunk(run.world_size)
    for number in range(_CHECKED_STEPS):
        everyone = [keys_of(batch_ids(work, r, run.world_size, number, CHECKED))
                    for r in range(run.world_size)]
        before = [State.read(tables, n) for n in names] if run.rank == 0 else []
        gather(None)  # no rank may update while rank 0 reads
        out = _step(dynamic, make_kjt(work, everyone[run.rank]), gradients[run.rank]).detach()
        gather(None)
        for k, state in enumerate(before):
            columns = slice(k * work.dim, (k + 1) * work.dim)
            compare(verdict, work, state, State.read(tables, names[k]),
                    [(keys[k], g[:, columns]) for keys, g in zip(everyone, gradients, strict=True)],
                    out[:, columns])
        gather(None)
    return verdict.to_json()


def _time(case: DynamicCase, run: Run, sides: Mapping[str, Any], mch: ManagedCollisions | None,
          mine: torch.Tensor) -> dict[str, np.ndarray]:
    """Seconds of every call by contender, maximum over ranks. Collective."""
    work, ids = case.work, run.ids()
    rows = [make_kjt(work, x) for x in ids]
    keys = [make_kjt(work, keys_of(x)) for x in ids]
    inputs = {name: keys if name in ("dynamic", "half") else rows for name in sides}
    own = case.threads_per_rank
    runs = {name: on_threads(own, over(
                inputs[name], lambda kjt, m=model: _step(m, kjt, mine)))  # type: ignore[misc]
            for name, model in sides.items()}
    if mch is None:
        runs["mch"] = on_threads(own, nothing)
    else:
        whole = [make_kjt(work, keys_of(np.concatenate(x, axis=1))) for x in run.everyones_ids()]
        runs["mch"] = on_threads(case.num_threads, over(whole, mch.step))
    return run.time(runs, aligner(sides["dynamic"].tables))


def _totals(tables: Any) -> dict[str, int]:
    """Counters summed over all dynamic tables; lookups are this rank's. Collective."""
    found = [tables.keys.counts(name) for name in tables.keys.tables]
    fields: Sequence[str] = ("rows", "occupied", "evicted", "lookups", "missed")
    return {f: sum(getattr(c, f) for c in found) for f in fields} | {
        "num_bytes": tables.keys.num_bytes}


class ManagedCollisions:
    """TorchRec's managed-collision modules in front of fbgemm's tables, in one process.

    Args:
        work: the workload.
        num_slots: rows of each table.
        gradient: output gradient of every step, float32 [B, sum of dims].
    """

    def __init__(self, work: Workload, num_slots: int, gradient: torch.Tensor) -> None:
        from torchrec.modules.embedding_configs import EmbeddingBagConfig
        from torchrec.modules.mc_modules import (
            LRU_EvictionPolicy,
            ManagedCollisionCollection,
            MCHManagedCollisionModule,
        )

        configs = [EmbeddingBagConfig(name=t.name, num_embeddings=num_slots, embedding_dim=t.dim,
                                      feature_names=list(t.features)) for t in work.tables()]
        cpu = torch.device("cpu")
        self._gradient = gradient
        self._maps: Any = ManagedCollisionCollection(
            {c.name: MCHManagedCollisionModule(
                zch_size=num_slots, device=cpu, eviction_policy=LRU_EvictionPolicy(),
                eviction_interval=EVICTION_INTERVAL) for c in configs}, configs)
        self._tables = fbgemm_bags([num_slots] * len(configs), work.dim,
                                   lambda k: torch.zeros(num_slots, work.dim))

    def learn(self, kjt: Any) -> None:
        """Look up keys until the modules have assigned rows to them."""
        for _ in range(EVICTION_INTERVAL):
            self._maps(kjt)

    def step(self, kjt: Any) -> None:
        """Map keys to rows, look them up, run the backward pass and update."""
        mapped = self._maps(kjt)
        out = self._tables(mapped.values(), mapped.offsets())
        out.backward(self._gradient)
        self._maps.evict()


@dataclass(frozen=True, slots=True)
class State:
    """The contents of a dynamic table between two steps.

    Attributes:
        keys: keys with a row, ascending, int64 [n].
        owners: their rows, int64 [n].
        rows: all rows, float32 [R, D].
        squares: row-wise Adagrad's sums, float32 [R].
    """

    keys: np.ndarray
    owners: np.ndarray
    rows: torch.Tensor
    squares: torch.Tensor

    @staticmethod
    def read(tables: Any, name: str) -> State:
        """Read a table's state; no rank may update it meanwhile."""
        records = tables.keys.read(name, "keys", 0, tables.keys.num_records(name, False)).numpy()
        held = np.flatnonzero(records[:, 2] >= 0)
        order = np.argsort(records[held, 0], kind="stable")
        return State(records[held, 0][order], held[order] + 1, tables.read(name),
                     tables.read(name, part="momentum1"))

    def rows_of(self, keys: np.ndarray) -> torch.Tensor:
        """Rows int64 of keys, of the same shape; 0 (the default row) for keys without a row."""
        if not self.keys.size:
            return torch.zeros(keys.shape, dtype=torch.int64)
        at = np.minimum(np.searchsorted(self.keys, keys), self.keys.size - 1)
        return torch.from_numpy(np.where(self.keys[at] == keys, self.owners[at], 0))


def compare(verdict: Verdict, work: Workload, before: State, after: State,
            batches: Sequence[tuple[np.ndarray, torch.Tensor]], out: torch.Tensor) -> None:
    """Compare one table's step with that of an unsharded table. Trains `before`.

    Args:
        verdict: receives the results.
        work: the workload.
        before, after: the table's states.
        batches: by rank, keys int64 [B * pooling] and output gradient float32 [B, D].
        out: rank 0's output, float32 [B, D].
    """
    rows = torch.cat([before.rows_of(keys.reshape(-1, work.pooling)) for keys, _ in batches])
    bag = torch.nn.EmbeddingBag.from_pretrained(before.rows, freeze=False, mode="sum")
    optimizer = SparseTableOptimizer(bag, "rowwise_adagrad", LEARNING_RATE, EPS)
    optimizer.sums = [before.squares]
    expected = bag(rows)
    verdict.compare("pooled", out, expected[:len(out)].detach())
    # The mean of the ranks' losses.
    expected.backward(torch.cat([gradient for _, gradient in batches]) / len(batches))
    optimizer.step()
    touched = rows.unique()
    # Rows that the step has reassigned to other keys were reset.
    kept = np.isin(touched.numpy(), after.owners[~np.isin(after.keys, before.keys)], invert=True)
    touched = touched[torch.from_numpy(kept)]
    verdict.compare("rows", after.rows[touched], bag.weight.detach()[touched])
    verdict.compare("tables", after.squares[touched], before.squares[touched])
