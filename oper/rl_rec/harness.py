"""Train any model of the package with several seeds and test it on the same users.

Training uses one process, unsharded tables and Adam, to compare models with each other; ``oper
train`` trains in several processes with sharded tables.
"""

from __future__ import annotations

import copy
import os
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch

from oper.errors import FileFormatError, InvalidInputError, require_fields
from oper.ranges import Amount, Positive, PositiveAmount, rules_of
from oper.rl_rec.data.batches import Batches, Share, num_batches
from oper.rl_rec.data.interactions import Interactions
from oper.rl_rec.intervals import Interval, bootstrap, difference
from oper.rl_rec.models.base import Recommender
from oper.rl_rec.ranking.evaluate import RankingResult, evaluate_ranking
from oper.rl_rec.ranking.metrics import MetricOptions
from oper.rl_rec.registry import RECOMMENDERS
from oper.support.files import atomic_write


@dataclass(frozen=True, slots=True)
class FitOptions:
    """Options of training and early stopping.

    Attributes:
        epochs: maximum number of epochs.
        batch_size: users, or subsequences of sequence models, per step.
        lr: Adam's learning rate.
        weight_decay: Adam's L2 penalty.
        max_norm: maximum norm to which the gradient of all weights is clipped.
        eval_every: epochs between validations.
        patience: number of validations without improvement after which training stops.
        metrics: options of the metrics.
        chosen_by: name of the validation metric that selects the best weights.
    """

    epochs: Positive = 100
    batch_size: Positive = 256
    lr: PositiveAmount = 1e-3
    weight_decay: Amount = 0.0
    max_norm: PositiveAmount = 5.0
    eval_every: Positive = 4
    patience: Positive = 5
    metrics: MetricOptions = field(default_factory=MetricOptions)
    chosen_by: str = "ndcg@10"

    def __post_init__(self) -> None:
        require_fields(self, "invalid options", "change this field of FitOptions", *rules_of(self),
                       ("chosen_by", self.chosen_by in self.metrics.names(),
                        f"one of the measured {self.metrics.names()}"))


@dataclass(frozen=True, slots=True)
class Fitted:
    """A trained model with the weights of its best validation.

    Attributes:
        model: the model, in evaluation mode.
        test: metrics of the test users.
        valid: value of the metric `chosen_by` on the validation users.
        epochs: number of epochs that led to these weights; 0 for models without training.
        seconds: processor time of building, training and validating the model; in a resumed
            training, including that of the interrupted process up to its last stored state.
        chosen_by: name of the validation metric, see `FitOptions`.
    """

    model: Recommender
    test: RankingResult
    valid: float
    epochs: int
    seconds: float
    chosen_by: str


def fit(name: str, config: Any, data: Interactions, seed: int, options: FitOptions,
        build: Callable[[Any, Interactions, str], Recommender] | None = None,
        resume: str | os.PathLike[str] | None = None) -> Fitted:
    """Train and test one model; seeds torch's global generator.

    Early stopping uses only the validation targets; the test targets are ranked once. It begins
    after the model's `Recommender.warm_up`, so that all selected weights are of the final loss,
    except that the weight of a KL term may still be rising (`anneal`).

    Args:
        name: key of `RECOMMENDERS`.
        config: the model's configuration; None = its defaults.
        data: the interactions.
        seed: seed of initial weights, batches and all other draws.
        options: options of training.
        build: builds the model, as `Workload.build` does; None = that of the registry.
        resume: file to which the state of training is written after every validation. If it exists,
            training continues from it, with the same result as without an interruption; it is
            deleted after training. None = an interrupted training starts anew.

    Raises:
        InvalidInputError: no such model, no validation or test users, a non-finite loss, or
            `resume` is the state of a run with other arguments.
        FileFormatError: `resume` is another file.
    """
    if name not in RECOMMENDERS:
        raise InvalidInputError("no such recommender", "name", name,
                                f"one of {sorted(RECOMMENDERS)}", "correct the name")
    for split in ("valid", "test"):
        if not data.held_out(split).users.size:
            raise InvalidInputError("cannot test a model", f"{split} users", 0,
                                    "at least one", "lower k_core, or use a longer log")
    begin = time.process_time()
    workload = RECOMMENDERS[name]
    torch.manual_seed(seed)
    config = workload.config() if config is None else config
    model = (build or workload.build)(config, data, "cpu")
    best, best_epoch, earlier = -1.0, 0, 0.0
    if workload.trains:
        batches = workload.batches(config, data)
        share = Share(min(options.batch_size, len(batches)), seed=seed)
        state = None if resume is None else _State(
            Path(resume), repr((name, config, seed, options, data.digest())))
        best, best_epoch, earlier = _train(model, data, options, batches, share, state, begin)
    model.eval()
    if not best_epoch:
        best = _validate(model, data, options)
    seconds = earlier + time.process_time() - begin
    test = evaluate_ranking(model, data, "test", metrics=options.metrics)
    return Fitted(model, test, best, best_epoch, seconds, options.chosen_by)


def _validate(model: Recommender, data: Interactions, options: FitOptions) -> float:
    return evaluate_ranking(model, data, "valid",
                            metrics=options.metrics).summary()[options.chosen_by]


@dataclass(frozen=True, slots=True)
class _State:
    """The file of an unfinished training; `about` identifies the run."""

    path: Path
    about: str

    def read(self) -> dict[str, Any] | None:
        if not self.path.exists():
            return None
        try:
            found = dict(torch.load(self.path, weights_only=True))
        except (OSError, RuntimeError, ValueError, TypeError, EOFError, LookupError, AttributeError,
                struct.error, UnpicklingError) as error:
            raise FileFormatError("cannot resume the training", "file", str(self.path),
                                  "the state of a training", "delete this file") from error
        if found.get("about") != self.about:
            raise InvalidInputError("cannot resume the training", str(self.path),
                                    found.get("about"), self.about,
                                    "give another file, or delete this one")
        return found

    def write(self, **parts: Any) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(self.path) as file:
            torch.save({"about": self.about, **parts}, file)


def _train(model: Recommender, data: Interactions, options: FitOptions, batches: Batches,
           share: Share, state: _State | None, begin: float) -> tuple[float, int, float]:
    """Train a model and load the weights of its best validation.

    Args:
        model, data, options, batches: see `fit`.
        share: the process's share of the batches.
        state: file of the unfinished training; None = do not store it.
        begin: processor time of this process when the training began, in seconds.

    Returns:
        The best validation metric, the number of epochs that led to it, and the processor time in
        seconds of the interrupted process whose training was resumed (0 if there was none).
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr,
                                 weight_decay=options.weight_decay)
    per_epoch = num_batches(len(batches), share)
    best, best_epoch, best_state, waited, done = -1.0, 0, model.state_dict(), 0, 0
    earlier = 0.0
    if state is not None and (stored := state.read()) is not None:
        model.load_state_dict(stored["model"])
        optimizer.load_state_dict(stored["optimizer"])
        torch.set_rng_state(stored["random"])
        best, best_epoch, waited, done = stored["progress"]
        earlier = stored.get("seconds", 0.0)
        best_state = stored["best"]
    step = done * per_epoch
    for epoch in range(done + 1, options.epochs + 1):
        if waited >= options.patience:
            break
        model.train()
        for batch in batches.epoch(epoch - 1, share):
            model.schedule(step, options.epochs * per_epoch)
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
        if step > model.warm_up(options.epochs * per_epoch):
            found = _validate(model, data, options)
            waited += 1
            if found > best:
                best, best_epoch, waited = found, epoch, 0
                best_state = copy.deepcopy(model.state_dict())
        if state is not None:
            state.write(model=model.state_dict(), optimizer=optimizer.state_dict(),
                        random=torch.get_rng_state(), best=best_state,
                        progress=(best, best_epoch, waited, epoch),
                        seconds=earlier + time.process_time() - begin)
    model.load_state_dict(best_state)
    if state is not None:
        state.path.unlink(missing_ok=True)
    return best, best_epoch, earlier


@dataclass(frozen=True, slots=True)
class Runs:
    """Results of one model over S seeds, on the same U test users.

    Attributes:
        name: name of the model.
        seeds: seeds of the runs.
        per_user: by metric, its values, float64 [S, U].
        fitted: seed, epochs, seconds and mean metrics of each run, JSON-serializable.
    """

    name: str
    seeds: tuple[int, ...]
    per_user: dict[str, np.ndarray]
    fitted: tuple[dict[str, Any], ...]

    def intervals(self) -> dict[str, Interval]:
        """Return the mean of each metric, with a bootstrap interval over users and seeds."""
        return {name: bootstrap(values) for name, values in self.per_user.items()}

    def against(self, other: Runs) -> dict[str, Interval]:
        """Return the mean paired difference of each metric, this model minus `other`."""
        return {name: difference(values, other.per_user[name])
                for name, values in self.per_user.items()}


def run_seeds(name: str, config: Any, data: Interactions, seeds: Sequence[int],
              options: FitOptions | None = None) -> Runs:
    """Train and test the model `name` once per seed; for arguments and errors see `fit`."""
    if not seeds:
        raise InvalidInputError("nothing to run", "seeds", [], "one or more", "pass a seed")
    return join_runs([as_runs(name, seed, fit(name, config, data, seed, options or FitOptions()))
                      for seed in seeds])


def as_runs(name: str, seed: int, fitted: Fitted) -> Runs:
    """Convert one training run to `Runs`, without its model."""
    about = {"seed": seed, "epochs": fitted.epochs, "seconds": round(fitted.seconds, 1),
             f"valid_{fitted.chosen_by}": round(fitted.valid, 6),
             f"test_{fitted.chosen_by}": round(fitted.test.summary()[fitted.chosen_by], 6)}
    return Runs(name, (seed,), {m: v[np.newaxis] for m, v in fitted.test.per_user.items()},
                (about,))


def join_runs(runs: Sequence[Runs]) -> Runs:
    """Concatenate runs of one model with different seeds and the same test users."""
    return Runs(runs[0].name, tuple(s for r in runs for s in r.seeds),
                {m: np.concatenate([r.per_user[m] for r in runs]) for m in runs[0].per_user},
                tuple(f for r in runs for f in r.fitted))
