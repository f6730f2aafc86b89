"""Trains any model of the package over several seeds and tests it on the same users.

One process, unsharded, Adam on all weights: for comparing models with each other. Training in
several processes with sharded tables is ``oper train``'s.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from oper.errors import InvalidInputError, require_fields
from oper.ranges import Positive, PositiveAmount, rules_of
from oper.rl_rec.data.batches import Batches, Share, num_batches
from oper.rl_rec.data.interactions import Interactions
from oper.rl_rec.intervals import Interval, bootstrap, difference
from oper.rl_rec.models.base import Recommender
from oper.rl_rec.ranking.evaluate import RankingResult, evaluate_ranking
from oper.rl_rec.ranking.metrics import MetricOptions
from oper.rl_rec.registry import RECOMMENDERS


@dataclass(frozen=True, slots=True)
class FitOptions:
    """How a model is trained and when training ends.

    Attributes:
        epochs: passes over the training users, at most.
        batch_size: users per step.
        lr: Adam's learning rate.
        weight_decay: Adam's L2 penalty.
        max_norm: the gradient of all weights together is scaled to at most this norm.
        eval_every: epochs between validations.
        patience: number of validations without a better value of `chosen_by` after which training
            ends.
        metrics: what is measured.
        chosen_by: the validation metric by which the best weights are chosen.
    """

    epochs: Positive = 100
    batch_size: Positive = 256
    lr: PositiveAmount = 1e-3
    weight_decay: float = 0.0
    max_norm: PositiveAmount = 5.0
    eval_every: Positive = 4
    patience: Positive = 5
    metrics: MetricOptions = field(default_factory=MetricOptions)
    chosen_by: str = "ndcg@10"

    def __post_init__(self) -> None:
        require_fields(self, "invalid options", "change this field of FitOptions", *rules_of(self),
                       ("chosen_by", self.chosen_by in self.metrics.names(),
                        f"one of {self.metrics.names()}, which are measured"))


@dataclass(frozen=True, slots=True)
class Fitted:
    """A trained model: its weights are those of the best validation.

    Attributes:
        model: the model, in evaluation mode.
        test: result of ranking for the test users.
        valid: value of `FitOptions.chosen_by` on the validation users, with these weights.
        epochs: epochs after which these weights were reached.
        seconds: time of building, training and validation together.
        chosen_by: the name of `valid`.
    """

    model: Recommender
    test: RankingResult
    valid: float
    epochs: int
    seconds: float
    chosen_by: str


def fit(name: str, config: Any, data: Interactions, seed: int, options: FitOptions) -> Fitted:
    """Train `name` of the registry with `config` (None = its defaults) from a seed.

    Early stopping looks at the validation targets only; the test targets are ranked once.
    Sets torch's generator.

    Raises:
        InvalidInputError: no such model, or its loss is no longer a number.
    """
    if name not in RECOMMENDERS:
        raise InvalidInputError("no such recommender", "name", name,
                                f"one of {sorted(RECOMMENDERS)}", "choose one")
    for split in ("valid", "test"):
        if not data.held_out(split).users.size:
            raise InvalidInputError("cannot compare models", f"{split} users", 0,
                                    "some with a target", "lower k_core, or take more data")
    begin = time.perf_counter()
    workload = RECOMMENDERS[name]
    torch.manual_seed(seed)
    config = workload.config() if config is None else config
    model = workload.build(config, data, "cpu")
    best, best_epoch = -1.0, 0
    if workload.trains:
        batches = workload.batches(config, data)
        share = Share(min(options.batch_size, len(batches)), seed=seed)
        best, best_epoch = _train(model, data, options, batches, share)
    model.eval()
    if not best_epoch:
        best = _validate(model, data, options)
    seconds = time.perf_counter() - begin
    test = evaluate_ranking(model, data, "test", metrics=options.metrics)
    return Fitted(model, test, best, best_epoch, seconds, options.chosen_by)


def _validate(model: Recommender, data: Interactions, options: FitOptions) -> float:
    return evaluate_ranking(model, data, "valid",
                            metrics=options.metrics).summary()[options.chosen_by]


def _train(model: Recommender, data: Interactions, options: FitOptions, batches: Batches,
           share: Share) -> tuple[float, int]:
    """The best validation and the epochs it took; the model holds those weights."""
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr,
                                 weight_decay=options.weight_decay)
    step, num_steps = 0, options.epochs * num_batches(len(batches), share)
    best, best_epoch, best_state, waited = -1.0, 0, model.state_dict(), 0
    for epoch in range(1, options.epochs + 1):
        model.train()
        for batch in batches.epoch(epoch - 1, share):
            model.schedule(step, num_steps)
            optimizer.zero_grad()
            loss, _ = model(batch)
            if not bool(loss.isfinite()):
                raise InvalidInputError("cannot train", "loss", loss.item(), "a finite number",
                                        "lower the learning rate")
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), options.max_norm)
            optimizer.step()
            step += 1
        if epoch % options.eval_every and epoch < options.epochs:
            continue
        found = _validate(model, data, options)
        if found > best:
            best, best_epoch, waited = found, epoch, 0
            best_state = copy.deepcopy(model.state_dict())
        else:
            waited += 1
            if waited >= options.patience:
                break
    model.load_state_dict(best_state)
    return best, best_epoch


@dataclass(frozen=True, slots=True)
class Runs:
    """Results of one model over several seeds, on the same test users.

    Attributes:
        name: name of the model.
        seeds: seeds of the runs.
        per_user: float64 [S, U] by metric.
        fitted: further facts about each run, JSON-serializable.
    """

    name: str
    seeds: tuple[int, ...]
    per_user: dict[str, np.ndarray]
    fitted: tuple[dict[str, Any], ...]

    def intervals(self) -> dict[str, Interval]:
        """Bootstrap over users and seeds, by metric."""
        return {name: bootstrap(values) for name, values in self.per_user.items()}

    def against(self, other: Runs) -> dict[str, Interval]:
        """Paired differences, this model minus the other, by metric."""
        return {name: difference(values, other.per_user[name])
                for name, values in self.per_user.items()}


def run_seeds(name: str, config: Any, data: Interactions, seeds: Sequence[int],
              options: FitOptions | None = None) -> Runs:
    """Train and test `name` from each seed; the arguments are those of `fit`."""
    if not seeds:
        raise InvalidInputError("nothing to run", "seeds", [], "one or more", "name a seed")
    return join_runs([as_runs(name, seed, fit(name, config, data, seed, options or FitOptions()))
                      for seed in seeds])


def as_runs(name: str, seed: int, fitted: Fitted) -> Runs:
    """One training run as `Runs`, without its model."""
    about = {"seed": seed, "epochs": fitted.epochs, "seconds": round(fitted.seconds, 1),
             f"valid_{fitted.chosen_by}": round(fitted.valid, 6),
             f"test_{fitted.chosen_by}": round(fitted.test.summary()[fitted.chosen_by], 6)}
    return Runs(name, (seed,), {m: v[np.newaxis] for m, v in fitted.test.per_user.items()},
                (about,))


def join_runs(runs: Sequence[Runs]) -> Runs:
    """Runs of one model from other seeds, tested on the same users, as one."""
    return Runs(runs[0].name, tuple(s for r in runs for s in r.seeds),
                {m: np.concatenate([r.per_user[m] for r in runs]) for m in runs[0].per_user},
                tuple(f for r in runs for f in r.fitted))
