"""``oper bench lookup``: lookups and updates, against torch, fbgemm and bare gathers, and at scale.

Lookups are forward passes without gradient on OPER's read-only tables. Updates are backward passes
with the optimizer and are compared with fbgemm's. Unsharded contenders run in one process with as
many threads as all of OPER's processes together.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from oper.bench.core.launch import Progress
from oper.bench.core.measure import (
    Call,
    Case,
    Run,
    Steps,
    aligner,
    nothing,
    on_threads,
    over,
    quick_case,
    summaries,
)
from oper.bench.core.planning import bytes_read, chosen_plan, gather, slowest, total
from oper.bench.core.record import elapsed
from oper.bench.core.workload import EXPONENTS, Workload, make_kjt, timed_ids
from oper.bench.device import suite
from oper.bench.tables.ceiling import Ceiling, UpdateCeiling
from oper.bench.tables.sides import (
    OPTIMIZER,
    PLAN_KINDS,
    build_torchrec,
    make_collection,
    moved_bytes,
)
from oper.bench.tables.unsharded import PEERS, fbgemm_of, make_peers, whole_batches
from oper.bench.tables.verify import NUM_STEPS, Checks, Verdict
from oper.plan import uniform_plan
from oper.train.metrics import gather_rows
from oper.train.model import ranks

WORLD_SIZES = (1, 2)
_CHECKED_BATCHES = 2
_OVERHEAD_CALLS = 65
_LINE = 64  # bytes of a cache line
FIGURES = (
    *suite.FIGURES,
    ("fastest_peer", "oper_forward_ms", *(f"{peer}_forward_ms" for peer in PEERS), "ratio_forward",
     "gather_ceiling_ms", "gather_ceiling_gbps", "forward_fraction_of_ceiling",
     "python_overhead_us", "torch_call_us"),
    ("axis", "table_gigabytes", "oper_step_ms", "bytes_moved.lines", "step_ns_per_line_byte",
     "ceiling_ns_per_line_byte"),
    ("oper_update_ms", "fbgemm_update_ms", "ratio_update"))
NOTE = ("w = OPER's processes; the others: one process; 2 threads in all; medians; ratio = fastest "
        "baseline / OPER\n")


configure = suite.configure


def cases(quick: bool, device: str = "") -> list[Any]:
    """All cases: per world size, lookups at exponent 1.05 for every dim and at dim 64 for every
    exponent; updates; and, unless `quick`, scaling."""
    if device == "cuda":
        return suite.cases(quick, "lookup")
    found: list[Case] = [
        LookupCase(f"lookup-d{dim}-pool{pooling}{suffix}-w{world_size}",
                   Workload(dim=dim, pooling=pooling, exponent=exponent), world_size)
        for world_size, dim, (suffix, exponent), pooling in itertools.product(
            WORLD_SIZES, (16, 64, 128), EXPONENTS.items(), (1, 20)) if dim == 64 or not suffix]
    found += [UpdateCase(f"update-d64-pool{pooling}{suffix}-w2",
                         Workload(pooling=pooling, exponent=exponent), 2)
              for pooling, (suffix, exponent) in itertools.product((1, 20), EXPONENTS.items())]
    if quick:
        return [quick_case(c) for c in found if c.work == Workload(pooling=c.work.pooling)]
    return [*found, *scale_cases()]


# ---- forward passes ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LookupCase(Case):
    """A case of lookups without gradient.

    Attributes:
        torchrec: whether to compare with TorchRec's plans instead of the bare gather.
    """

    torchrec: bool = False

    @torch.no_grad()
    def measure(self, progress: Progress) -> dict[str, Any]:
        """Build, verify and measure; rank 0 returns the record's entry. Collective."""
        from oper.sharding import shard

        run, work = Run(self, progress), self.work
        run.say("drawing batches, planning")
        plan, plan_s = chosen_plan(work, self.num_stats_batches, "inference")
        run.say("building")
        collection = make_collection(work, "cpu")
        model: Any = shard(collection, plan=plan, objective="inference")
        peers = make_peers(work, collection, run.everyones_ids()) if run.rank == 0 else {}
        del collection
        kjts = [make_kjt(work, x) for x in run.ids()]
        align = aligner(model.tables)
        timed: dict[str, Call] = {"oper": over(kjts, lambda kjt: model(kjt).values())}
        checked = dict(timed)
        figures: dict[str, Any] = {}
        if self.torchrec:
            for kind in PLAN_KINDS:
                with torch.enable_grad():  # TorchRec puts its optimizers into the backward pass
                    side = build_torchrec(work, None, kind)[0]
                timed[kind] = over(kjts, lambda kjt, m=side.model: m(kjt).values())  # type: ignore[misc]
                checked[kind] = over(kjts, side.lookup)
        else:
            ceiling = Ceiling(model.tables, run.ids(), work.pooling)
            ceiling.tune(align)
            figures["ceiling"] = ceiling.settings
            timed["ceiling"] = checked["ceiling"] = ceiling.run
        run.say("comparing with the unsharded collection")
        verdicts = verify(checked, peers, len(kjts))
        own = self.threads_per_rank
        runs = {name: on_threads(own, call) for name, call in timed.items()}
        for name in PEERS:
            runs[name] = (on_threads(self.num_threads, peers[name]) if run.rank == 0
                          else on_threads(own, nothing))
        timings = summaries(run.time(runs, align))
        moved = int(total([moved_bytes(work, run.ids())["forward"]])[0])
        if not self.torchrec:
            figures |= _overhead(model, kjts, self)
        return run.finish(model.tables, {
            **figures, **_figures(timings, moved),
            "verified": all(v["passed"] for v in verdicts.values()), "verification": verdicts,
            "bytes_moved": {"forward": moved}, "bytes_read": bytes_read(model.tables),
            "timings": timings, "threads_of_peers": self.num_threads, "plan_seconds": plan_s})


def _overhead(model: Any, kjts: list[Any], case: LookupCase) -> dict[str, float]:
    """Median microseconds that a lookup call spends outside the kernels and, for comparison, that a
    call of torch's ``EmbeddingBag`` for one id takes; maxima over ranks.

    Measured on the case's batches, which evict Python's code from the caches, and on one batch of
    32 samples, which does not.
    """
    work, (_, world_size) = case.work, ranks()
    ids = timed_ids(work, 0, world_size, len(kjts))[0].reshape(len(work.num_rows), -1, work.pooling)
    small = make_kjt(work, ids[:, :32].reshape(len(work.num_rows), -1))
    align, found = aligner(model.tables), []
    bag, one = torch.nn.EmbeddingBag(1, work.dim, mode="sum"), torch.zeros(1, 1, dtype=torch.int64)
    for batches in (kjts, [small]):
        lookup, spent = over(batches, lambda kjt: model(kjt).values()), []
        for k in range(_OVERHEAD_CALLS):
            align()
            call_s = elapsed(functools.partial(lookup, k))
            outside_s = call_s - model.tables.phase_ns()["forward"] / 1e9
            if batches is not kjts:
                align()  # waiting for the other ranks disturbs the caches as before a small lookup
            spent.append((outside_s, elapsed(lambda: bag(one))))
        found += (1e6 * np.median(spent[5:], axis=0)).tolist()
    names = ("python_overhead_us", "torch_call_us", "python_overhead_small_batch_us",
             "torch_call_small_batch_us")
    return dict(zip(names, slowest(found), strict=True))


def _figures(timings: dict[str, Any], moved: int) -> dict[str, Any]:
    """The entry's main figures; `moved` is the bytes that all ranks together move per batch."""
    ms = {name: t["median_ms"] for name, t in timings.items()}
    unsharded = min(PEERS, key=ms.__getitem__)
    ratio = ms[unsharded] / ms["oper"]
    found = {f"{n}_forward_ms": x for n, x in ms.items() if n != "ceiling"}
    if "ceiling" not in ms:
        sharded = min(PLAN_KINDS, key=ms.__getitem__)
        return {"ratio_forward": ms[sharded] / ms["oper"], "ratio_unsharded": ratio,
                "torchrec_best": sharded, "unsharded_best": unsharded, **found}
    return {**found, "fastest_peer": unsharded, "ratio_forward": ratio,
            "gather_ceiling_ms": ms["ceiling"],
            "gather_ceiling_gbps": moved / ms["ceiling"] / 1e6,
            "forward_fraction_of_ceiling": ms["ceiling"] / ms["oper"]}


def verify(lookups: Mapping[str, Call], peers: Mapping[str, Call], num_batches: int
           ) -> dict[str, dict[str, Any]]:
    """Compare all contenders' pooled embeddings with the unsharded collection's. Collective.

    Args:
        lookups: by contender, a function from the index of a batch to this rank's pooled
            embeddings [B, sum of dims], features in the order of the configuration.
        peers: the result of `make_peers` on rank 0, empty elsewhere.
        num_batches: number of batches.

    Returns:
        `Verdict.to_json` by contender on rank 0, empty elsewhere.
    """
    verdicts = {name: Verdict() for name in (*lookups, "nn_embedding_bag", "fbgemm")}
    for k in range(min(_CHECKED_BATCHES, num_batches)):
        found = {name: gather_rows(call(k)) for name, call in lookups.items()}
        if not peers:
            continue
        found["nn_embedding_bag"] = torch.cat(peers["nn_embedding_bag"](k), dim=1)
        found["fbgemm"] = peers["fbgemm"](k)
        for name, values in found.items():
            verdicts[name].compare("pooled", values, peers["ebc"](k))
    return {name: v.to_json() for name, v in verdicts.items()} if peers else {}


# ---- updates -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UpdateCase(Case):
    """A case of backward passes with update; fbgemm runs in one process with `num_threads`."""

    num_batches: int = 16

    def measure(self, progress: Progress) -> dict[str, Any]:
        """Build, verify and measure; rank 0 returns the record's entry. Collective."""
        from oper.sharding import shard

        run, work = Run(self, progress), self.work
        rank, world_size = run.rank, run.world_size
        run.say("drawing batches, planning")
        checks = Checks(work).ids
        plan, _ = chosen_plan(work, self.num_stats_batches, "training")
        run.say("building")
        collection = make_collection(work, "cpu")
        fused = fbgemm_of(collection) if rank == 0 else None
        model: Any = shard(collection, plan=plan, optimizer=OPTIMIZER)
        del collection
        gradient = run.gradient(work.seed, work.batch_size)
        own_gradient = gradient.chunk(world_size)[rank].clone()

        def contenders(batches: list[list[np.ndarray]]) -> dict[str, Steps]:
            """The contenders by name; `batches` is indexed by batch and rank."""
            kjts = [make_kjt(work, x[rank]) for x in batches]
            found = {"oper": Steps(over(kjts, lambda kjt: model(kjt).values()), own_gradient)}
            if fused is not None:
                # OPER averages the gradients of the ranks' losses.
                found["fbgemm"] = Steps(over(whole_batches(work, batches), lambda x: fused(*x)),
                                        gradient / world_size)
            return found

        run.say(f"comparing tables after {NUM_STEPS} steps")
        verification = _compare_tables(model, fused, contenders(checks))
        sides = contenders(run.everyones_ids())
        own = self.threads_per_rank
        threads = {"oper": own, "fbgemm": own if rank else self.num_threads}
        runs, before = (
            {n: on_threads(threads[n], getattr(sides[n], way) if n in sides else nothing)
             for n in threads} for way in ("backward", "forward"))
        timings = summaries(run.time(runs, aligner(model.tables), before=before))
        moved = moved_bytes(work, run.ids())
        oper_ms, fbgemm_ms = (timings[n]["median_ms"] for n in threads)
        return run.finish(model.tables, {
            "oper_update_ms": oper_ms, "fbgemm_update_ms": fbgemm_ms,
            "ratio_update": fbgemm_ms / oper_ms,
            "verified": verification["passed"], "verification": {"oper": verification},
            "bytes_moved": {"update": int(total([moved["step"] - moved["forward"]])[0])},
            "timings": timings, "threads_of_peers": self.num_threads})


def _compare_tables(model: Any, fused: Any, sides: dict[str, Steps]) -> dict[str, Any]:
    """Make the same steps with all contenders; rank 0 returns the verdict on their tables."""
    for number in range(NUM_STEPS):
        for side in sides.values():
            side.forward(number)
            side.backward(number)
    gather(None)  # no rank may read while others update
    verdict = Verdict()
    if fused is not None:
        names = list(model.tables.specs)
        for name, weight in zip(names, fused.split_embedding_weights(), strict=True):
            verdict.compare("tables", model.tables.read(name), weight)
    gather(None)
    return verdict.to_json()


# ---- scaling -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ScaleCase(Case):
    """One point of a scaling experiment; all tables are striped over the ranks.

    Attributes:
        axis: the quantity that varies: ``"rows"``, ``"batch"``, ``"tables"`` or ``"dim"``. Step
            times per byte are compared along it.
    """

    axis: str = ""
    num_batches: int = 8
    rounds: int = 6
    per_round: int = 4

    def measure(self, progress: Progress) -> dict[str, Any]:
        """Build, verify and measure; rank 0 returns the record's entry. Collective."""
        from oper.sharding import shard

        run, work = Run(self, progress), self.work
        run.say("drawing batches, building")
        ids = list(run.ids())
        model: Any = shard(make_collection(work, "meta"), optimizer=OPTIMIZER,
                           plan=uniform_plan(work.tables(), run.world_size, "striped"))
        kjts = [make_kjt(work, x) for x in ids]
        sums, verdict = Ceiling(model.tables, ids, work.pooling), Verdict()
        with torch.no_grad():
            verdict.compare("pooled", model(kjts[0]).values(), sums.run(0))
        gradient = run.gradient(work.seed, work.batch_size // run.world_size)
        align = aligner(model.tables)
        step = over(kjts, lambda kjt: model(kjt).values().backward(gradient))
        timings = summaries(run.time({"oper": step}, align))
        step_ms, limit = timings["oper"]["median_ms"], {}
        lines = int(total([line_bytes(work, moved_bytes(work, ids)["distinct_rows"])])[0])
        if self.axis == "rows":
            sums.tune(align)
            update = UpdateCeiling(model.tables, [run.ids(r) for r in range(run.world_size)])
            bare = summaries(run.time({"gather": sums.run, "update": update.run}, align,
                                      "ceilings"))
            timings |= {f"{n} ceiling": x for n, x in bare.items()}
            ms = {f"{n}_ceiling_ms": x["median_ms"] for n, x in bare.items()}
            limit = {**ms, "ceiling_ns_per_line_byte": _per_byte(sum(ms.values()), lines)}
        return run.finish(model.tables, {
            "axis": self.axis, "oper_step_ms": step_ms,
            "step_ns_per_line_byte": _per_byte(step_ms, lines), **limit,
            "table_gigabytes": sum(work.num_rows) * work.dim * 4 / 1e9,
            "verified": verdict.passed, "verification": {"oper": verdict.to_json()},
            "bytes_moved": {"lines": lines}, "bytes_read": bytes_read(model.tables),
            "timings": timings})


def scale_cases() -> list[ScaleCase]:
    """Return the cases of all axes: memory of the tables, batch size, number of tables, dim.

    Ids follow a power law with exponent 1.05. Bags have 10 ids; on the axes ``batch`` and
    ``tables`` 2, so that the largest cases fit.
    """
    base = Workload(num_rows=(500_000,) * 8, pooling=10)
    points: dict[str, dict[Any, Workload]] = {
        "rows": {f"{size:g}GB": replace(base, num_rows=(int(size * 1e9 / (8 * base.dim * 4)),) * 8)
                 for size in (0.1, 1.0, 4.0, 12.0)},
        "batch": {batch: replace(base, batch_size=batch, pooling=2)
                  for batch in (512, 4096, 16_384, 65_536)},
        "tables": {number: replace(  # the total numbers of ids and rows stay constant
            base, num_rows=(4_000_000 // number,) * number,
            batch_size=512 * 856 // number // 2 * 2, pooling=2) for number in (2, 26, 128, 856)},
        "dim": {dim: replace(base, dim=dim, num_rows=(100_000,) * 8)
                for dim in (4, 16, 64, 256, 1024)}}
    return [ScaleCase(f"scale-{axis}-{label}", work, 2, axis=axis)
            for axis, found in points.items() for label, work in found.items()]


def line_bytes(work: Workload, distinct_rows: int) -> int:
    """Bytes that a rank's step moves, in whole cache lines.

    Counted as by `moved_bytes`, but a row or gradient counts as the cache lines that it occupies,
    and a row's state as one line. In addition, each id counts 8 bytes.
    """
    row = -(-work.dim * 4 // _LINE) * _LINE
    bags = work.batch_size // ranks()[1] * len(work.num_rows)
    return bags * (work.pooling * (2 * row + 8) + row) + distinct_rows * (4 * row + 2 * _LINE)


def _per_byte(ms: float, lines: int) -> float:
    """Nanoseconds per byte of one rank; `lines` is the number of bytes summed over ranks."""
    return ms * 1e6 / lines * ranks()[1]
