"""Training tasks: a DLRM on a click log, or a recommender on users' interactions."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
from tqdm import tqdm

import oper
from oper.data import Folder, Loader, LoaderOptions
from oper.errors import InvalidInputError, require
from oper.rl_rec.data.batches import Share, num_batches
from oper.rl_rec.data.catalogue import synthetic_interactions
from oper.rl_rec.data.interactions import Interactions, load_interactions
from oper.rl_rec.models.base import Recommender
from oper.rl_rec.ranking.evaluate import RankingResult, evaluate_ranking
from oper.rl_rec.registry import WORKLOADS
from oper.stats import AccessStats
from oper.tables import TableSpec
from oper.train.config import TrainConfig
from oper.train.engines import Engine, make_engine, table_optimizer
from oper.train.meters import KeyMeter
from oper.train.metrics import BinaryMetrics, gather_rows
from oper.train.model import build_dlrm, describe, ranks

_WINDOW = 1 << 18  # size of the shuffling window, rows
_STATS_BATCHES = 64  # training batches for a recommender's access statistics


class Task(Protocol):
    """The interface between the training loop and a task.

    Attributes:
        steps_per_epoch: number of global batches per epoch.
    """

    steps_per_epoch: int

    def about(self) -> dict[str, Any]:
        """Return a JSON-serializable description of the model, for ``config.json``."""

    def samples(self) -> dict[str, str]:
        """Return what identifies the samples, for checkpoints: ``numbering`` of rows that the
        data's folder does not determine, and ``interactions``, a digest; for a click log ``data``,
        a digest of its folder and the training split."""

    def engine(self) -> Engine:
        """Build and shard the model. Collective."""

    def epoch(self, number: int, start: int = 0) -> Iterator[tuple[Any, int]]:
        """Yield this rank's (training batch, number of samples) of an epoch, from step `start`."""

    def before_step(self, engine: Engine, step: int, num_steps: int) -> None:
        """Prepare for step `step` of `num_steps`, counted from 0."""

    def evaluate(self, engine: Engine, show_progress: bool = False) -> dict[str, Any]:
        """Return metrics over the validation split, on all ranks. Collective."""


def make_task(config: TrainConfig) -> Task:
    """Create the task of a configuration; raises OperError if its data cannot be read."""
    return ClickTask(config) if config.model_name == "dlrm" else RecommenderTask(config)


class ClickTask:
    """A DLRM, on the click log of a preprocessed folder."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        is_dynamic = config.dynamic.is_on
        self.folder = Folder.open(config.data, allow_raw=is_dynamic)
        if is_dynamic and not self.folder.raw_ids:
            raise InvalidInputError(
                "cannot train dynamic tables", "data", config.data, "a folder of raw ids",
                "preprocess with --raw-ids, or leave [dynamic] out of the configuration")
        require("cannot train a model of clicks",
                "preprocess with a label of parse 'binary', 'threshold' or 'among', or train a "
                "recommender with graded rewards",
                (f"labels in {self.folder.label!r}", "numbers",
                 not self.folder.has_graded_labels, "0 and 1"))
        self.splits = {split: click_batches(config, split) for split in ("train", "valid")}
        self.steps_per_epoch = len(self.splits["train"])
        if not self.steps_per_epoch:
            raise InvalidInputError(
                "nothing to train on", "global batch size", config.batch_size * ranks()[1],
                f"<= {self.folder.rows['train']} rows of the training split", "lower batch_size")

    def about(self) -> dict[str, Any]:
        return describe(self._tables(), len(self.folder.dense)) | {
            "numbering": str(self.folder.manifest.get("numbering", ""))}

    def samples(self) -> dict[str, str]:
        return {"data": str(self.splits["train"].state_dict(0)["folder"])}

    def _tables(self) -> tuple[TableSpec, ...]:
        dim, optimizer = self.config.model.dim, self.config.optimizer
        rows = self.config.dynamic.rows_of(self.folder.sparse, dim, table_optimizer(optimizer))
        return self.folder.tables(dim, rows, optimizer=optimizer.tables)

    def engine(self) -> Engine:
        config, tables = self.config, self._tables()
        return make_engine(build_dlrm(tables, len(self.folder.dense), config.model, config.seed,
                                      config.tables_on), config)

    def epoch(self, number: int, start: int = 0) -> Iterator[tuple[Any, int]]:
        loader = self.splits["train"]
        loader.set_epoch(number)
        loader.load_state_dict(loader.state_dict(start))
        for batch in loader:
            yield batch, batch.labels.numel()

    def before_step(self, engine: Engine, step: int, num_steps: int) -> None:
        """Do nothing."""

    def evaluate(self, engine: Engine, show_progress: bool = False) -> dict[str, Any]:
        return evaluate_clicks(engine, self.splits["valid"], show_progress)


def click_batches(config: TrainConfig, split: str, of: tuple[int, int] | None = None) -> Loader:
    """Return this rank's batches of a split of a click log; `of`: another rank, and the number of
    ranks.

    Global batches of the same size contain the same samples for any number of ranks.
    """
    rank, world_size = of or (None, None)
    training = split == "train"
    return Loader(config.data, split, LoaderOptions(
        config.batch_size, window=_WINDOW if training and config.shuffle else 0, seed=config.seed,
        drop_last=training, share="batches", rank=rank, world_size=world_size))


def evaluate_clicks(engine: Engine, data: Loader, show_progress: bool = False) -> dict[str, Any]:
    """Return ``{"auc", "log_loss", "samples"}`` over a split, on all ranks, and for dynamic tables
    ``"default_share"``, the share of the lookups that read the default row, by table. Collective.
    """
    metrics, keys = BinaryMetrics(), KeyMeter(engine.bare)
    with progress_bar(len(data), "validation", show_progress) as bar:
        for batch in data:
            bar.update()
            if batch.labels.numel() or engine.collective:
                metrics.update(engine.logits(batch), batch.labels)
    shares = {name: of["default_share"] for name, of in keys.read().items()}
    return metrics.compute() | ({"default_share": shares} if shares else {})


class RecommenderTask:
    """A recommender of `oper.rl_rec`, on the interactions of a preprocessed folder or a synthetic
    catalogue."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.workload = WORKLOADS[config.model_name]
        self.data: Interactions = (
            synthetic_interactions(config.catalogue) if config.catalogue.num_items
            else load_interactions(config.data, config.interactions))
        rank, world_size = ranks()
        self.share = Share(config.batch_size, rank, world_size, config.seed)
        self.batches = self.workload.batches(config.model, self.data)
        self.steps_per_epoch = (num_batches(len(self.batches), self.share)
                                if self.workload.trains else 0)

    def about(self) -> dict[str, Any]:
        return {"num_users": self.data.num_users, "num_items": self.data.num_items,
                "source": self.data.source, "left_out": self.data.left_out}

    def samples(self) -> dict[str, str]:
        return {"numbering": self.data.numbering, "interactions": self.data.digest()}

    def engine(self) -> Engine:
        model = self.build()
        if not self.workload.trains:
            return Engine(model, model, [])
        return make_engine(model, self.config, lambda: self.stats(model))

    def build(self) -> Recommender:
        """Build the unsharded model; equal seeds give equal weights."""
        torch.manual_seed(self.config.seed)
        return self.workload.build(self.config.model, self.data, self.config.tables_on)

    def stats(self, model: Recommender) -> AccessStats:
        """Collect access statistics of the model's tables from rank 0's first training batches."""
        share = Share(self.share.batch_size, 0, self.share.world_size, self.share.seed)
        some = itertools.islice(self.batches.epoch(0, share), _STATS_BATCHES)
        return oper.collect((tuple(model.lookups(batch)) for batch in some), model,
                            source=f"{self.data.source}, training batches")

    def epoch(self, number: int, start: int = 0) -> Iterator[tuple[Any, int]]:
        for batch in itertools.islice(self.batches.epoch(number, self.share), start, None):
            yield batch, batch.num_users

    def before_step(self, engine: Engine, step: int, num_steps: int) -> None:
        # Random numbers depend only on seed, rank and step, so checkpoints need no generator state.
        drawn = np.random.SeedSequence((self.config.seed, self.share.rank, step))
        torch.manual_seed(int(drawn.generate_state(1, np.uint64)[0] >> np.uint64(1)))
        if isinstance(engine.bare, Recommender):
            engine.bare.schedule(step, num_steps)

    def evaluate(self, engine: Engine, show_progress: bool = False) -> dict[str, Any]:
        rank, world_size = ranks()
        users = np.arange(self.data.valid.users.size)
        if 0 < self.config.eval_users < users.size:
            users = np.linspace(0, users.size - 1, self.config.eval_users).astype(np.int64)
        if not engine.collective:  # otherwise all ranks must evaluate the same users
            users = users[rank::world_size]
        model: Any = engine.bare
        found = evaluate_ranking(model, self.data, "valid", users=users).per_user
        joint = {name: gather_rows(torch.from_numpy(np.ascontiguousarray(values))).numpy()
                 for name, values in found.items()}
        count = next(iter(joint.values())).size // (world_size if engine.collective else 1)
        return {**RankingResult(users, joint).summary(), "users": count}


def progress_bar(total: int, what: str, show: bool, done: int = 0) -> Any:
    """Return a progress bar on stderr, visible on rank 0 only.

    The speed does not count the first `done` steps, which an earlier process has made.
    """
    terminal = sys.stderr.isatty()
    return tqdm(total=total, initial=done, desc=what, unit=" steps",
                leave=terminal or what == "training", mininterval=0.2 if terminal else 10.0,
                disable=not show or ranks()[0] > 0)
