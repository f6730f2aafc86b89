"""Worker processes of ``oper demo``: train OPER and TorchRec, or the unsharded model."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from oper.bench.core import record
from oper.bench.core.launch import Progress
from oper.bench.core.measure import over
from oper.bench.core.planning import slowest, total
from oper.bench.tables.sides import PLAN_KINDS, Side, collections_of, sharding_types
from oper.bench.tables.unsharded import step_on_shares
from oper.data import Folder, Loader
from oper.train.config import DLRMConfig, OptimizerConfig, TrainConfig
from oper.train.engines import Engine, unsharded, with_oper, with_torchrec
from oper.train.metrics import gather_rows
from oper.train.model import build_dlrm, full_state, ranks, save_state
from oper.train.tasks import click_batches, evaluate_clicks

# SGD for the dense part: Adagrad's first step is lr times the sign of the gradient, so that the
# rounding of a gradient near 0 may change a parameter by 2 lr.
OPTIMIZERS = OptimizerConfig(tables="rowwise_adagrad", tables_lr=0.05, tables_eps=1e-8,
                             dense="sgd", dense_lr=0.1)
MODEL = DLRMConfig(dim=64, dense_layers=(128,), over_layers=(128, 64))
PER_TURN = 8   # consecutive steps of one side; the first is not timed
_NUM_BATCHES = 32  # distinct batches for timing the embedding collections alone


@dataclass(frozen=True, slots=True)
class Training:
    """The demo's training runs: the unsharded model in one process; OPER and TorchRec's plans, on
    the same batches and from the same weights, in `world_size` processes.

    Attributes:
        folder: the demo's folder, to which logits and weights are written for comparison.
        seed: seed of the initial weights and of the order of samples.
        world_size: number of ranks of the sharded models.
        checked_steps: number of steps after which logits and weights are compared.
        num_steps: total number of steps.
        batch_size, checked_batch_size: samples per rank and step after and during `checked_steps`.
        rounds: rounds of timing the embedding collections alone.
    """

    folder: str
    seed: int
    world_size: int
    checked_steps: int
    num_steps: int
    batch_size: int
    checked_batch_size: int
    rounds: int
    dim: ClassVar[int] = MODEL.dim

    @property
    def data(self) -> str:
        """Folder of the preprocessed log."""
        return str(Path(self.folder) / "data")

    @property
    def plan(self) -> str:
        """File of OPER's plan."""
        return str(Path(self.folder) / "plan.json")


def train_sharded(progress: Progress, case: Training) -> dict[str, Any]:
    """Train, validate and time OPER and TorchRec's plans. Collective.

    Returns:
        ``sides``: for ``"oper"``, ``"table_wise"`` and ``"mixed"``, validation AUC and log loss,
        and summaries of ``train_step`` (the whole DLRM), ``step`` and ``forward`` (the embedding
        collection alone). ``page_kind``. ``other_busy_cores``: see `BusyClock`.
    """
    progress("building the models: OPER, TorchRec table-wise, TorchRec mixed")
    sides = {kind: _side(case, kind) for kind in ("oper", *PLAN_KINDS)}
    clock = record.BusyClock()
    timed = _train_in_turns(sides, case, progress)
    results: dict[str, Any] = {}
    for name, (engine, _) in sides.items():
        progress(f"validating {name}")
        results[name] = evaluate_clicks(engine, click_batches(_config(case), "valid"))
    progress("timing the embedding collections alone")
    taken = {"train_step": timed, **_time_collections(sides, case)}
    others = clock.others(total)
    for what, by_name in taken.items():
        for name, seconds in by_name.items():
            results[name][what] = record.summary(np.array(slowest(seconds.tolist())))
    bags = sides["oper"][1]
    return {"sides": results, "page_kind": bags.tables.page_kind,
            "other_busy_cores": others}


def train_unsharded(progress: Progress, case: Training) -> dict[str, Any]:
    """Train and validate the unsharded model; returns validation AUC and log loss. A step uses the
    mean loss of the batches that all ranks have in `train_sharded`."""
    engine = unsharded(_model(case), OPTIMIZERS)
    logits = []
    shares = [_training_batches(case, rank) for rank in range(case.world_size)]
    for step, batches in enumerate(zip(*shares, strict=True), 1):
        logits.append(torch.cat([rest[1] for _, rest in step_on_shares(engine, batches)]))
        if step == case.checked_steps:
            _write(case, "unsharded", logits, engine.module)
        if step % 50 == 0:
            progress(f"unsharded: step {step} of {case.num_steps}")
    progress("validating the unsharded model")
    return evaluate_clicks(engine, click_batches(_config(case), "valid"))


def _model(case: Training) -> nn.Module:
    folder = Folder.open(case.data)
    return build_dlrm(folder.tables(MODEL.dim), len(folder.dense), MODEL, case.seed)


def _side(case: Training, kind: str) -> tuple[Engine, Any]:
    """The model of ``"oper"`` or of one of TorchRec's `PLAN_KINDS`, and its embedding bags."""
    if kind == "oper":
        engine = with_oper(_model(case), _config(case), plan=case.plan, stats=None)
    else:
        engine = with_torchrec(_model(case), _config(case),
                               lambda table: sharding_types(kind, table.num_embeddings))
    bags, = collections_of(engine.bare)
    return engine, bags


def _config(case: Training, batch_size: int = 0) -> TrainConfig:
    """The training configuration; `batch_size`: other than the case's."""
    return TrainConfig(data=case.data, batch_size=batch_size or case.batch_size, seed=case.seed,
                       optimizer=OPTIMIZERS)


def _epochs(loader: Loader) -> Iterator[Any]:
    """The batches of an unlimited number of epochs."""
    for epoch in itertools.count():
        loader.set_epoch(epoch)
        yield from loader


def _training_batches(case: Training, rank: int) -> Iterator[Any]:
    """A rank's batches of all steps, over as many epochs as necessary.

    The checked steps come first and have few samples, ``checked_batch_size``. This makes it
    unlikely that a ReLU's input is within rounding of 0, where two sides may have different
    gradients. Row-wise Adagrad would amplify these: it updates a cold row by a full first step.
    """
    for steps, size in ((case.checked_steps, case.checked_batch_size),
                        (case.num_steps - case.checked_steps, case.batch_size)):
        loader = click_batches(_config(case, size), "train", (rank, case.world_size))
        yield from itertools.islice(_epochs(loader), steps)


def _train_in_turns(sides: dict[str, tuple[Engine, Any]], case: Training,
                    progress: Progress) -> dict[str, np.ndarray]:
    """Train all contenders, interleaved; returns this rank's step times (s), float64 [n] each."""
    logits: dict[str, list[torch.Tensor]] = {name: [] for name in sides}
    batches = dict(zip(sides, itertools.tee(_training_batches(case, ranks()[0]), len(sides)),
                       strict=True))

    def step(k: int, name: str) -> None:
        logits[name].append(sides[name][0].step(next(batches[name]))[1][1])
        if k + 1 == case.checked_steps:
            _write(case, name, logits[name], sides[name][0].module)
        if name == "oper" and k % 32 == 31:
            progress(f"training in two processes: step {k + 1} of {case.num_steps}")

    taken = record.interleave({n: functools.partial(step, name=n) for n in sides}, dist.barrier,
                              case.num_steps // PER_TURN, PER_TURN - 1)
    untimed = case.checked_steps // PER_TURN * (PER_TURN - 1)
    return {name: seconds[untimed:] for name, seconds in taken.items()}


def _write(case: Training, name: str, logits: list[torch.Tensor], module: nn.Module) -> None:
    """Write all ranks' logits and the full weights after the checked steps. Collective."""
    state = full_state(module)
    joined = [gather_rows(x) for x in logits]
    if ranks()[0] == 0:
        save_state(Path(case.folder) / f"{name}.pt",
                   {"logits": torch.stack(joined)} | {f"weights/{k}": v for k, v in state.items()})


def _time_collections(sides: dict[str, tuple[Engine, Any]], case: Training
                      ) -> dict[str, dict[str, np.ndarray]]:
    """Times (s) of each collection's ``step`` (forward, backward, update) and ``forward``. The ids
    are those of the validation split, which the plan's statistics do not include; the output
    gradient is random."""
    data = click_batches(_config(case), "valid")
    full = (b for b in data if b.labels.numel() == case.batch_size)
    batches = list(itertools.islice(full, _NUM_BATCHES))
    torch.manual_seed(case.seed + ranks()[0])
    gradient = torch.randn(case.batch_size, MODEL.dim * len(data.folder.sparse)) * 1e-3
    # The last optimizer is that of the dense layers; TorchRec has another one for data-parallel
    # tables.
    alone = {name: Side(name, bags, bags, engine.optimizers[:-1], gradient, [])
             for name, (engine, bags) in sides.items()}
    return {phase: record.interleave(
        {name: over(batches, getattr(side, phase)) for name, side in alone.items()}, dist.barrier,
        case.rounds, PER_TURN, lead_in=2) for phase in ("step", "forward")}
