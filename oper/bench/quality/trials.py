"""Random search for the settings of recommenders, with the same number of trials for every
model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from oper.rl_rec.harness import FitOptions

SEED = 0  # seed of all trials; results have seeds from 1 on, which have no part in the choice


@dataclass(frozen=True, slots=True)
class Between:
    """Numbers from `low` to `high`, drawn log-uniformly and rounded to three digits."""

    low: float
    high: float

    def draw(self, random: np.random.Generator) -> float:
        """Draw a number."""
        drawn = math.exp(random.uniform(math.log(self.low), math.log(self.high)))
        return float(f"{drawn:.3g}")


@dataclass(frozen=True, slots=True)
class OneOf:
    """A choice among `values`, which are equally likely."""

    values: tuple[Any, ...]

    def draw(self, random: np.random.Generator) -> Any:
        """Draw a value."""
        return self.values[int(random.integers(len(self.values)))]


Space = Mapping[str, Between | OneOf]  # ranges of settings by name
_AUTOENCODER: Space = {
    "fit.lr": Between(5e-4, 5e-3), "hidden": OneOf((120, 200, 400)), "dim": OneOf((40, 100, 200)),
    "dropout": OneOf((0.3, 0.5, 0.7))}
_CONCEPTS: Space = {
    **_AUTOENCODER, "dim": OneOf((20, 40, 80)), "num_concepts": OneOf((2, 4, 7)),
    "temperature": Between(0.05, 0.2), "beta_eps": Between(0.05, 0.5)}
_SEQUENCE: Space = {
    "fit.lr": Between(5e-4, 5e-3), "dim": OneOf((32, 64, 96)), "layers": OneOf((1, 2)),
    "dropout": OneOf((0.1, 0.2, 0.3, 0.5)), "negatives": OneOf((0, 256, 1024))}
_RETURNS: Space = {
    **_SEQUENCE, "gamma": OneOf((0.1, 0.3, 0.6, 0.9)), "target_quantile": OneOf((0.5, 0.7, 0.9))}
_VALUES: Space = {
    **_SEQUENCE, "gamma": OneOf((0.1, 0.3, 0.5, 0.9)), "q_weight": Between(0.1, 1.0)}
# By model, the ranges of settings: ``fit.X`` is field X of `FitOptions`, others of the model's
# configuration. The widths, depths, losses and learning rates of related models are the same.
SPACES: dict[str, Space] = {
    "itemknn": {"neighbours": OneOf((20, 50, 100, 200, 500)), "shrink": Between(1, 300)},
    "ease": {"l2": Between(20, 3000)},
    "ials": {"dim": OneOf((32, 64, 128)), "alpha": Between(0.05, 2), "l2": Between(1e-3, 0.1),
             "nu": OneOf((0.5, 1.0))},
    "multvae": {**_AUTOENCODER, "beta": Between(0.05, 0.5), "decoder_hidden": OneOf((0, 200, 400))},
    "recvae": {**_AUTOENCODER, "gamma": Between(1e-3, 0.02)},
    "macridvae": _CONCEPTS,
    "cadvae": {**_CONCEPTS, "sharpness": OneOf((1.0, 4.0)), "beta_z": Between(5e-3, 0.2),
               "concepts": OneOf(("clusters", "axes"))},
    "gru4rec": _SEQUENCE,
    "sasrec": _SEQUENCE,
    "hstu": {**_SEQUENCE, "time_buckets": OneOf((0, 64))},
    "sqn": _VALUES, "sa2c": _VALUES, "dqn": _VALUES,
    "dt": _RETURNS,
    "cdt4rec": {**_RETURNS, "backbone": OneOf(("causal", "interleaved")),
                "reward_weight": OneOf((0.0, 0.1, 0.3, 1.0)),
                "state": OneOf(("mean", "last", "gru"))},
}


def settings(model: str, trial: int) -> dict[str, Any]:
    """The settings that a model's trial 0, 1, ... changes, whatever the number of trials; trial 0
    changes none."""
    random = np.random.default_rng([trial, *model.encode()])
    return {name: values.draw(random) for name, values in SPACES[model].items()} if trial else {}


def with_settings(config: Any, fit: FitOptions, changes: Mapping[str, Any]
                  ) -> tuple[Any, FitOptions]:
    """A model's configuration and training options with changed settings."""
    of_fit = {name.removeprefix("fit."): value for name, value in changes.items()
              if name.startswith("fit.")}
    return (dataclasses.replace(config, **{name: value for name, value in changes.items()
                                           if not name.startswith("fit.")}),
            dataclasses.replace(fit, **of_fit))
