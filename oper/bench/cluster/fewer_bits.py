"""Measure messages of fewer bits: steps and bytes of a workload, and a model's quality."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from oper.bench.cluster.case import paired, wire
from oper.bench.cluster.constants import limit, measured_topology
from oper.bench.cluster.contenders import build_plan
from oper.bench.cluster.network import OnHosts, WithWorkload
from oper.bench.core import record
from oper.bench.core.launch import Progress
from oper.bench.core.measure import Run, over
from oper.bench.core.planning import gather, joint, joint_stats, planned, total
from oper.bench.core.workload import data_files
from oper.bench.tables.sides import Side, make_collection
from oper.bench.tables.torchrec_peer import BagsOnly
from oper.bench.tables.verify import Checks, Reference, verify
from oper.data import Folder, PreprocessOptions, analyze_folder, load_recipe, preprocess
from oper.plan import Plan
from oper.rl_rec.intervals import bootstrap, difference
from oper.sharding import tables_of
from oper.topology import Topology
from oper.train.config import DLRMConfig, TrainConfig
from oper.train.engines import with_oper
from oper.train.metrics import auc, gather_rows
from oper.train.model import build_dlrm, ranks
from oper.train.tasks import click_batches

EXACT, FEWER = "oper", "oper-fewer-bits"
_ROUNDS = (6, 4)  # rounds, and steps per contender and round
# By bits: largest rounding error of a number, relative to the largest magnitude in its row.
_ERROR = {32: 0.0, 16: 2.0**-8, 8: 1 / 255, 4: 1 / 15}
_ADDITIONS = 1e-5  # relative error due to another order of additions
LOG = "movietweetings*/ratings.dat*"
_BLOCKS = 32  # blocks of validation samples; the AUC of each block is one observation


@dataclass(frozen=True, slots=True)
class FewerBits(WithWorkload):
    """OPER's plan with exact messages against its plan under a variance budget, in training.

    Attributes:
        message_variance: the budget, see `oper.search.variance`.
    """

    message_variance: float = 5e-4

    def measure(self, progress: Progress) -> dict[str, Any]:
        """Make, compare and time both plans; rank 0 returns the record's entry. Collective."""
        progress("measuring the links")
        topology, measured = measured_topology(self.links, self.constants)
        run = Run(self, progress)
        given, stats = run.batches(), joint_stats(self.work, self.num_stats_batches)
        progress("planning")
        plans = {name: planned(self.work, stats, "training", topology, message_variance=budget)[0]
                 for name, budget in ((EXACT, None), (FEWER, self.message_variance))}
        sides = {name: build_plan(self.work, plan) for name, plan in plans.items()}
        run.set_gradient(sides.values(), given[0])
        progress("comparing answers, and the exact side with the unsharded model")
        limit(self.links, False)
        checks = Checks.make(self.work, *ranks())
        error, largest = _rounding(sides, checks, plans[FEWER])
        reference = Reference(BagsOnly(make_collection(self.work, "cpu")), checks) if (
            run.rank == 0) else None
        verdict = verify([sides[EXACT]], checks, reference, lambda text: None)
        limit(self.links)
        steps = {name: over(given, side.step) for name, side in sides.items()}
        times = run.time(steps, dist.barrier, rounds=_ROUNDS)
        sent = {n: wire(run, self.links, steps[n], plan, True) for n, plan in plans.items()}
        for side in sides.values():
            side.close()
        if run.rank:
            return {}
        found = {name: {
            "runtime": name, "predicted_ms": round(plan.step_us / 1e3, 3),
            "executed_ms": round(float(np.median(times[name])) * 1e3, 3),
            "step": record.summary(times[name]), "message_bits": plan.message_bits.to_json(),
            "lower_bound_ms": plan.lower_bound_us / 1e3, **sent[name]}
            for name, plan in plans.items()}
        found[FEWER]["over_oper"] = paired(times[FEWER], times[EXACT])
        bytes_of = {name: x["counted_bytes"] for name, x in found.items()}
        return {
            "objective": "training", "hosts": self.links.num_hosts, "in_grid": self.in_grid,
            "fewer_bytes": round(bytes_of[EXACT] / bytes_of[FEWER], 4),
            "fewer_bits_speedup": round(1 / found[FEWER]["over_oper"]["mean"], 4),
            "message_variance": plans[FEWER].notes["message_variance"],
            "answers_error": error, "largest_rounding": largest,
            "verified": verdict["oper"]["passed"] and largest <= 1, "verification": verdict["oper"],
            "contenders": found, "links": asdict(self.links), "workload": asdict(self.work),
            "measured": measured, "other_busy_cores": run.others[""]}


def _rounding(sides: Mapping[str, Side], checks: Checks, plan: Plan) -> tuple[float, float]:
    """Compare lookups of both sides before training, when their rows are equal. Collective.

    Returns:
        The squared difference of all pooled rows relative to their squares; and the largest
        difference of a number relative to its limit. In a bag of L ids whose rows have magnitudes
        of at most m, the limit is L m / 255 with 8 bits and L m / 15 with 4 bits: a step is at most
        2 m / 255 or 2 m / 15, and a number in an answer is off by at most half a step.
    """
    ours, exact = (joint(sides[n].lookup(checks.batch(0, checks.rank).sparse_features))
                   for n in (FEWER, EXACT))
    off, size, worst = (ours - exact).double(), len(checks.work.num_rows), 0.0
    tables = sides[EXACT].tables
    assert tables is not None
    for part, table, length in zip(off.chunk(size, 1), checks.work.tables(),
                                   checks.work.bag_lengths, strict=True):
        most = length * float(tables.read(table.name).abs().max())
        allowed = most * (_ERROR[plan.message_bits.of(table.name).answers] + _ADDITIONS)
        worst = max(worst, float(part.abs().max()) / allowed)
    return float(off.square().sum() / exact.double().square().sum()), worst


@dataclass(frozen=True, slots=True)
class LogQuality(OnHosts):
    """AUC and log loss of a DLRM on MovieTweetings, with exact messages and under a budget.

    Both models are trained from equal weights on equal batches, once per seed, and then score the
    last tenth of the log.

    Attributes:
        message_variance: the budget, see `oper.search.variance`.
        num_seeds: number of runs of each model.
        epochs: number of passes over the training part of the log in a run.
        batch_size: samples per rank and step.
        dim: columns of the tables.
        max_steps: maximum number of steps of a run; 0 = no limit.
    """

    message_variance: float = 5e-4
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
        folder = tempfile.TemporaryDirectory(prefix="oper-cluster-") if ranks()[0] == 0 else None
        try:
            data = gather(folder and folder.name)[0]
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
                for name in (EXACT, FEWER):
                    progress(f"{name}, seed {seed} of {self.num_seeds}")
                    runs.logits[name].append(runs.train(name, seed))
            progress("repeating a run")
            repeated = runs.train(FEWER, 1)
        finally:  # all ranks have read the folder, since scoring is collective
            if folder:
                folder.cleanup()
        return {} if ranks()[0] else {
            "objective": "training", "hosts": self.links.num_hosts, "in_grid": False,
            **runs.figures(), "verified": bool((repeated == runs.logits[FEWER][0]).all()),
            "num_seeds": self.num_seeds, "epochs": self.epochs, "batch_size": self.batch_size,
            "dim": self.dim, "max_steps": self.max_steps, "links": asdict(self.links),
            "measured": measured}


class _Runs:
    """Runs of `LogQuality`: logits [N] of each run, and the bytes that all ranks have sent in the
    last run of each model."""

    def __init__(self, case: LogQuality, topology: Topology, config: TrainConfig) -> None:
        self._given: dict[str, dict[str, Any]] = {
            name: {"topology": topology, "message_variance": budget}
            for name, budget in ((EXACT, None), (FEWER, case.message_variance))}
        self._config, self._folder = config, Folder.open(config.data)
        self.logits: dict[str, list[np.ndarray]] = {EXACT: [], FEWER: []}
        self._sent, self._labels = dict.fromkeys(self._given, 0.0), np.zeros(0)

    def train(self, name: str, seed: int) -> np.ndarray:
        """Train a model and return its logits of the validation part, float32 [N]. Collective."""
        config = replace(self._config, seed=seed)
        engine = with_oper(build_dlrm(
            self._folder.tables(config.model.dim, optimizer=config.optimizer.tables),
            len(self._folder.dense), config.model, seed), config, **self._given[name])
        tables, = tables_of(engine.bare, "cannot measure")
        self._given[name] = {"plan": tables.plan}  # reused for the next seeds
        batches, step = click_batches(config, "train"), 0
        for epoch in range(config.epochs):
            batches.set_epoch(epoch)
            for batch in batches:
                if not config.max_steps or step < config.max_steps:
                    engine.step(batch)
                step += 1
        sent = sum(sum(x) for x in tables.sent_bytes(reset=True).values())
        self._sent[name] = total([sent])[0]
        scored = [(engine.logits(b), b.labels) for b in click_batches(config, "valid")]
        logits, labels = (gather_rows(torch.cat(x)).numpy() for x in zip(*scored, strict=True))
        dist.barrier()
        tables.close()
        self._labels = labels
        return logits

    def figures(self) -> dict[str, Any]:
        """Return metrics of both models, and their differences paired by seed and sample (for the
        AUC, by seed and block)."""
        y = self._labels
        losses = {n: np.stack([np.logaddexp(0.0, z.astype(float)) - y * z for z in runs])
                  for n, runs in self.logits.items()}
        areas = {n: np.stack([_areas(z, y) for z in runs]) for n, runs in self.logits.items()}
        bits = {n: x["plan"].message_bits.to_json() for n, x in self._given.items()}
        return {
            "log_loss_difference": difference(losses[FEWER], losses[EXACT]).to_json(),
            "auc_difference": difference(areas[FEWER], areas[EXACT]).to_json(),
            "fewer_bytes": round(self._sent[EXACT] / self._sent[FEWER], 4),
            "log_loss": {n: bootstrap(x).to_json() for n, x in losses.items()},
            "auc": {n: round(float(np.mean([auc(z, y) for z in runs])), 6)
                    for n, runs in self.logits.items()},
            "samples": y.size, "sent_bytes": self._sent, "message_bits": bits[FEWER],
            "message_variance": self._given[FEWER]["plan"].notes["message_variance"]}


def _areas(scores: np.ndarray, labels: np.ndarray) -> Sequence[float]:
    """Return the AUC of each block; block k has the samples k, k + _BLOCKS, k + 2 _BLOCKS, ..."""
    return [auc(scores[k::_BLOCKS], labels[k::_BLOCKS]) for k in range(_BLOCKS)]
