"""``oper bench train --model NAME``: a recommender's training steps, compared with TorchRec's
plans."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from oper.bench.core import record
from oper.bench.core.launch import Progress
from oper.bench.core.measure import Run, over
from oper.bench.core.planning import gather, rows_by_placement, total
from oper.bench.tables.sides import collections_of
from oper.bench.tables.unsharded import step_on_shares
from oper.train.config import TrainConfig, load_config
from oper.train.engines import Engine, unsharded, with_torchrec
from oper.train.tasks import RecommenderTask

MODELS = ("cdt4rec", "sasrec", "hstu", "cadvae")
# Name and items of the large catalogue, where they differ from 2 million: CaD-VAE's tables have 400
# columns in total, and every contender holds a copy of them.
LARGE = {"cadvae": ("500k", 500_000)}
# HSTU sees the last 200 items, as in its authors' MovieLens-1M model. The number of interactions
# per user follows that log: 165 on average, fewer than 100 for half of the users.
SEQUENCES: dict[str, dict[str, Any]] = {"hstu": {
    "model.steps": 200, "model.window": 1, "catalogue.length": 165, "catalogue.spread": 1.0}}
BATCH_SIZE = {"hstu": 64}  # smaller than the default, since its sequences are longer
# Sharding types of all tables in TorchRec's plans, besides the one that its planner chooses.
SHARDING_TYPES = ("table_wise", "row_wise", "column_wise")
# On CPU, TorchRec does not shard pooled tables row-wise, as are CaD-VAE's.
NO_ROW_WISE = ("cadvae",)
TOLERANCE = 1e-4  # relative error of a loss; shapes of matrix products differ between contenders
CHECKED_STEPS = 3
# embedding: lookups, backward and update of the collections alone; step: the entire model's.
FIGURES = (tuple(f"{key}_{phase}{unit}" for phase in ("embedding", "step") for key, unit in (
    ("torchrec", "_ms"), ("oper", "_ms"), ("ratio", ""), ("torchrec_best", ""))),)


def cases(quick: bool, model: str) -> list[ModelCase]:
    """Cases with 100,000 items and with a larger catalogue; if `quick`, one with 20,000."""
    if quick:
        return [ModelCase(f"{model}-20k", model, 20_000, 16, num_batches=4, rounds=2, per_round=1)]
    size, num_items = LARGE.get(model, ("2m", 2_000_000))
    return [ModelCase(f"{model}-{name}", model, items, BATCH_SIZE.get(model, 128))
            for name, items in (("100k", 100_000), (size, num_items))]


@dataclass(frozen=True, slots=True)
class ModelCase:
    """Training steps of one recommender.

    Attributes:
        name: the case's name in the record.
        model: name of a model in `oper.rl_rec.registry`.
        num_items: items of the synthetic catalogue.
        batch_size: trajectories per rank and step.
        num_batches: number of distinct timed batches.
        rounds, per_round: see `record.interleave`.
    """

    name: str
    model: str
    num_items: int
    batch_size: int = 128
    num_batches: int = 32
    rounds: int = 10
    per_round: int = 4
    world_size: ClassVar[int] = 2
    threads_per_rank: ClassVar[int] = 1

    def config(self) -> TrainConfig:
        """Training configuration: SGD for the dense part, and no dropout, which would be timed."""
        drawn = {"model.sampled": 1024} if self.model == "cadvae" else {}
        return load_config(None, drawn | SEQUENCES.get(self.model, {}) | {
            "model.name": self.model, "model.dropout": 0.0, "batch_size": self.batch_size,
            "catalogue.num_items": self.num_items,
            "catalogue.num_users": 2 * self.batch_size * (self.num_batches + 8),
            "optimizer.dense": "sgd"})

    def measure(self, progress: Progress) -> dict[str, Any]:
        """Build, verify and measure; rank 0 returns the record's entry. Collective."""
        run = Run(self, progress)
        run.say("drawing interactions")
        task = RecommenderTask(self.config())
        # Epoch 1, since the access statistics are collected from epoch 0.
        batches = [b for b, _ in itertools.islice(task.epoch(1), self.num_batches)]
        engines = {}
        for name in ("oper", "planner", *SHARDING_TYPES):
            if name == "row_wise" and self.model in NO_ROW_WISE:
                continue
            run.say(f"building {name}")
            engines[name] = _engine(task, name)
        run.say("comparing losses")
        worst = _compare(task, engines, batches)
        # One draw of the candidates, so that all contenders look up the same ids.
        drawing: Any = engines["oper"].bare
        work = [_with_gradients(drawing, drawing.lookups(b)) for b in batches]
        tables = {name: _Tables(engine, work) for name, engine in engines.items()}
        timings = {
            "embedding": run.time({name: t.step for name, t in tables.items()}, dist.barrier,
                                  "embedding", {name: t.prepare for name, t in tables.items()}),
            "step": run.time({name: over(batches, engine.step)
                              for name, engine in engines.items()}, dist.barrier, "step")}
        dist.barrier()
        return {} if run.rank else {
            **_figures(timings), "max_relative_diff": worst,
            "verified": max(worst.values()) <= TOLERANCE, "other_busy_cores": run.others,
            "model": self.config().to_json()["model"], "case": asdict(self),
            "tables": _describe(engines["oper"]), "threads_per_rank": torch.get_num_threads(),
            "world_size": run.world_size}


def _engine(task: RecommenderTask, name: str) -> Engine:
    if name == "oper":
        return task.engine()
    torch.manual_seed(task.config.seed)
    return with_torchrec(task.build(), task.config,
                         None if name == "planner" else lambda table: [name])


def _compare(task: RecommenderTask, engines: dict[str, Engine], batches: Sequence[Any]
             ) -> dict[str, float]:
    """Largest relative error of a step's loss by contender, over `CHECKED_STEPS`. Collective.

    The reference is the unsharded model, trained by rank 0 on the mean loss of all ranks' batches.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    found: dict[str, list[float]] = {}
    for name, engine in engines.items():
        engine.module.train()
        losses = []
        for step in range(CHECKED_STEPS):
            torch.manual_seed(100 * step + rank)
            losses.append(float(engine.step(batches[step])[0]))
        found[name] = [x / world_size for x in total(losses)]
    every = gather(batches[:CHECKED_STEPS])
    worst: dict[str, float] = dict.fromkeys(engines, 0.0)
    if rank == 0:
        torch.manual_seed(task.config.seed)
        plain = unsharded(task.build(), task.config.optimizer)
        for step in range(CHECKED_STEPS):
            results = step_on_shares(plain, [x[step] for x in every], 100 * step)
            mean = sum(float(loss) / world_size for loss, _ in results)
            for name, losses in found.items():
                gap = abs(losses[step] - mean) / abs(mean)
                worst[name] = max(worst[name], gap if gap == gap else float("inf"))
    worst = gather(worst)[0]
    return worst


_Lookups = tuple[list[Any], list[torch.Tensor]]  # KJTs of a batch, and output gradients


class _Tables:
    """Steps of a model's embedding collections alone: lookups, backward pass from given output
    gradients, and update.

    Args:
        engine: the model and its optimizers.
        work: the lookups of each batch.
    """

    def __init__(self, engine: Engine, work: Sequence[_Lookups]) -> None:
        self._collections = collections_of(engine.bare)
        self._optimizers = engine.optimizers[:-1]  # the last one is that of the dense part
        self._work = work
        self._kjts: list[Any] = []

    def prepare(self, number: int) -> None:
        """Rebuild the next call's KJTs without cached offsets, like those of a new batch."""
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        self._kjts = [KeyedJaggedTensor(x.keys(), x.values(), x.weights_or_none(), x.lengths(),
                                        stride=x.stride())
                      for x in self._work[number % len(self._work)][0]]

    def step(self, number: int) -> None:
        """Run one step on the KJTs that `prepare` has built."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        torch.autograd.backward(_outputs(self._collections, self._kjts),
                                self._work[number % len(self._work)][1])
        for optimizer in self._optimizers:
            optimizer.step()


def _outputs(collections: Sequence[nn.Module], kjts: Sequence[Any]) -> list[torch.Tensor]:
    """Outputs of the collections: pooled values of each KJT, or unpooled values per feature."""
    outputs: list[torch.Tensor] = []
    for collection, kjt in zip(collections, kjts, strict=True):
        found: Any = collection(kjt)
        outputs += ([found.values()] if hasattr(found, "length_per_key")
                    else [found[key].values() for key in kjt.keys()])  # noqa: SIM118
    return outputs


@torch.no_grad()
def _with_gradients(model: nn.Module, kjts: list[Any]) -> _Lookups:
    return kjts, [torch.full_like(x, 1e-3) for x in _outputs(collections_of(model), kjts)]


def _figures(timings: dict[str, dict[str, np.ndarray]]) -> dict[str, Any]:
    """The entry's figures: mean times over the same batches.

    Histories differ in length, and step times differ more than tenfold with them, so that a median
    would be the time of whichever batch happens to be in the middle.
    """
    figures: dict[str, Any] = {"plans": {}}
    for phase, by_name in timings.items():
        means = {name: 1e3 * float(np.mean(t)) for name, t in by_name.items()}
        best = min((name for name in means if name != "oper"), key=means.__getitem__)
        figures |= {f"oper_{phase}_ms": means["oper"], f"torchrec_{phase}_ms": means[best],
                    f"ratio_{phase}": means[best] / means["oper"],
                    f"torchrec_best_{phase}": best}
        for name, seconds in by_name.items():
            figures["plans"].setdefault(name, {})[phase] = {
                "mean_ms": means[name], **record.summary(seconds)}
    return figures


def _describe(engine: Engine) -> list[dict[str, Any]]:
    """Each table's name, rows and dim, and its rows by placement, for the benchmark record."""
    modules: list[Any] = collections_of(engine.bare)
    return [{"name": entry.table.name, "num_rows": entry.table.num_rows, "dim": entry.table.dim,
             "rows": rows_by_placement([entry])}
            for module in modules for entry in module.tables.plan.tables]
