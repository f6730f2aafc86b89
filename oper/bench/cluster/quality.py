"""Measure how much approximations between hosts (fewer bits, rarer synchronization) change a
trained model's log loss and AUC on a log."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from oper.bench.cluster.constants import limit, measured_topology
from oper.bench.cluster.network import OnHosts
from oper.bench.core.launch import Progress
from oper.bench.core.planning import gather, total
from oper.bench.core.workload import data_files
from oper.data import Folder, PreprocessOptions, analyze_folder, load_recipe, preprocess
from oper.integration.checkpoint.saving import synchronize
from oper.plan import Plan
from oper.rl_rec.intervals import bootstrap, difference
from oper.sharding import tables_of
from oper.topology import Topology
from oper.train.config import DLRMConfig, TrainConfig
from oper.train.engines import with_oper
from oper.train.metrics import auc, gather_rows
from oper.train.model import build_dlrm, ranks
from oper.train.tasks import click_batches

LOG = "movietweetings*/ratings.dat*"
_BLOCKS = 32  # validation sample k is in block k % _BLOCKS, whose AUC is one observation


@dataclass(frozen=True, slots=True)
class LogQuality(OnHosts):
    """AUC and log loss of a DLRM on MovieTweetings that is sharded in several ways.

    All models are trained from equal weights on equal batches, once per seed, and then score the
    last tenth of the log.

    Attributes:
        sharded: by model, arguments of `oper.shard`; other models are compared with the first.
        num_seeds: number of runs of each model.
        epochs: number of passes over the training part of the log in a run.
        batch_size: samples per rank and step.
        dim: columns of the tables.
        max_steps: maximum number of steps of a run; 0 = no limit.
    """

    sharded: Mapping[str, Mapping[str, Any]]
    num_seeds: int = 5
    epochs: int = 2
    batch_size: int = 256
    dim: int = 64
    max_steps: int = 0

    def measure(self, progress: Progress) -> dict[str, Any]:
        """Train and score; rank 0 returns the record's entry. Collective."""
        progress("measuring the links")
        topology, measured = measured_topology(self.links, self.constants)
        limit(self.links, False)  # quality does not depend on the speed of links
        # All ranks have read the folder when rank 0 deletes it, since scoring is collective.
        place: contextlib.AbstractContextManager[str] = (
            contextlib.nullcontext("") if ranks()[0] else
            tempfile.TemporaryDirectory(prefix="oper-cluster-"))
        with place as folder:
            data = gather(folder)[0]
            if folder:
                progress("preprocessing the log")
                preprocess(load_recipe("movietweetings"), data_files(LOG), data,
                           PreprocessOptions(test="0"))
                analyze_folder(data).save(Path(data) / "stats.npz")
            gather(None)
            runs = _Runs(self, topology, TrainConfig(
                data=data, stats=f"{data}/stats.npz", batch_size=self.batch_size,
                max_steps=self.max_steps, epochs=self.epochs, model=DLRMConfig(dim=self.dim)))
            for seed in range(1, self.num_seeds + 1):
                for name in self.sharded:
                    progress(f"{name}, seed {seed} of {self.num_seeds}")
                    runs.logits[name].append(runs.train(name, seed))
            progress("repeating a run")
            last = [*self.sharded][-1]
            repeated = runs.train(last, 1)
        return {} if ranks()[0] else {
            "objective": "training", "hosts": self.links.num_hosts, "in_grid": False,
            **runs.figures(), "verified": bool((repeated == runs.logits[last][0]).all()),
            "num_seeds": self.num_seeds, "epochs": self.epochs, "batch_size": self.batch_size,
            "dim": self.dim, "max_steps": self.max_steps, "links": asdict(self.links),
            "measured": measured}


class _Runs:
    """The training runs of `LogQuality`.

    Attributes:
        logits: by model, the logits of the validation samples in each run, float32 [N].
    """

    def __init__(self, case: LogQuality, topology: Topology, config: TrainConfig) -> None:
        self._given: dict[str, dict[str, Any]] = {
            name: {"topology": topology, **given} for name, given in case.sharded.items()}
        self._config, self._folder = config, Folder.open(config.data)
        self._plans: dict[str, Plan] = {}
        self.logits: dict[str, list[np.ndarray]] = {name: [] for name in self._given}
        self._sent, self._labels = dict.fromkeys(self._given, 0.0), np.zeros(0)

    def train(self, name: str, seed: int) -> np.ndarray:
        """Train a model and return its logits of the validation part, float32 [N]. Collective."""
        config = replace(self._config, seed=seed)
        engine = with_oper(build_dlrm(
            self._folder.tables(config.model.dim, optimizer=config.optimizer.tables),
            len(self._folder.dense), config.model, seed), config,
            **self._given[name], plan=self._plans.get(name))
        tables, = tables_of(engine.bare, "cannot measure")
        self._plans[name] = tables.plan  # reused for the next seeds
        batches, step = click_batches(config, "train"), 0
        for epoch in range(config.epochs):
            batches.set_epoch(epoch)
            for batch in batches:
                if not config.max_steps or step < config.max_steps:
                    engine.step(batch)
                step += 1
        synchronize(engine.bare)
        sent = sum(sum(x) for x in tables.sent_bytes(reset=True).values())
        sent += 0 if tables.replicas is None else tables.replicas.sent_bytes
        self._sent[name] = total([sent])[0]
        scored = [(engine.logits(b), b.labels) for b in click_batches(config, "valid")]
        logits, labels = (gather_rows(torch.cat(x)).numpy() for x in zip(*scored, strict=True))
        dist.barrier()
        tables.close()
        self._labels = labels
        return logits

    def figures(self) -> dict[str, Any]:
        """Return metrics of all models, and their differences from the first, paired by seed and
        sample (for the AUC, by seed and block); for two models, those of the second."""
        y = self._labels
        losses = {n: np.stack([np.logaddexp(0.0, z.astype(float)) - y * z for z in runs])
                  for n, runs in self.logits.items()}
        areas = {n: np.array([[auc(z[k::_BLOCKS], y[k::_BLOCKS]) for k in range(_BLOCKS)]
                              for z in runs]) for n, runs in self.logits.items()}
        first, *others = self.logits
        found = {name: {
            "log_loss_difference": difference(losses[name], losses[first]).to_json(),
            "auc_difference": difference(areas[name], areas[first]).to_json(),
            "fewer_bytes": self._sent[first] / self._sent[name],
            "message_bits": self._plans[name].message_bits.to_json(),
            **{k: v for k, v in self._given[name].items() if k != "topology"}}
            for name in others}
        return {
            **(found[others[0]] if len(others) == 1 else {"models": found}),
            "log_loss": {n: bootstrap(x).to_json() for n, x in losses.items()},
            "auc": {n: np.mean([auc(z, y) for z in runs]) for n, runs in self.logits.items()},
            "samples": y.size, "sent_bytes": self._sent}
