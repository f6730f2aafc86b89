"""Registry of recommenders by name: configurations, constructors and training batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from oper.errors import InvalidInputError
from oper.rl_rec.concepts import concepts_from
from oper.rl_rec.data.batches import (
    Batches,
    HistoryBatches,
    SequenceBatches,
    target_return,
    training_histories,
)
from oper.rl_rec.data.interactions import Interactions
from oper.rl_rec.models.autoencoders.cadvae import CaDVAE, CaDVAEConfig, MacridVAEConfig
from oper.rl_rec.models.autoencoders.multvae import MultVAE, MultVAEConfig
from oper.rl_rec.models.autoencoders.recvae import RecVAE, RecVAEConfig
from oper.rl_rec.models.base import Histories, Recommender
from oper.rl_rec.models.cdt4rec import CDT4Rec, CDT4RecConfig, DecisionTransformerConfig
from oper.rl_rec.models.gru4rec import GRU4Rec, GRU4RecConfig
from oper.rl_rec.models.hstu import HSTU, HSTUConfig
from oper.rl_rec.models.ials import IALS, IALSConfig
from oper.rl_rec.models.item_to_item import EASEConfig, ItemKNNConfig, ItemToItem
from oper.rl_rec.models.popularity import Popularity, PopularityConfig
from oper.rl_rec.models.sasrec import SASRec, SASRecConfig
from oper.rl_rec.models.sqn import SQN, DQNConfig, SA2CConfig, SQNConfig


@dataclass(frozen=True, slots=True)
class Workload:
    """A recommender in the registry.

    Attributes:
        config: type of its configuration, a frozen dataclass with defaults.
        build: builds the model from configuration, data and the device of its tables (``"cpu"`` or
            ``"meta"``); draws from torch's global generator.
        batches: makes its training batches from configuration and data: complete histories or
            subsequences.
        trains: whether the model is trained by gradient steps.
    """

    config: type
    build: Callable[[Any, Interactions, str], Recommender]
    batches: Callable[[Any, Interactions], Batches] = lambda config, data: HistoryBatches(data)
    trains: bool = True


def _need_binary(data: Interactions, key: str, remedy: str) -> None:
    """Raise InvalidInputError unless rewards are in 0..1, as the setting `key` requires."""
    low, high = float(data.rewards.min()), float(data.rewards.max())
    if not 0 <= low <= high <= 1:
        raise InvalidInputError("cannot train on these rewards", "rewards", (low, high),
                                f"0..1 with {key}", remedy)


def _cdt4rec(config: CDT4RecConfig, data: Interactions, device: str) -> CDT4Rec:
    if config.reward_loss == "bce":
        _need_binary(data, "reward_loss='bce'", "set model.reward_loss='mse'")
    return CDT4Rec(config, data.num_users, data.num_items,
                   target_return(data, config.gamma, config.target_quantile), device)


def _hstu(config: HSTUConfig, data: Interactions, device: str) -> HSTU:
    if config.rank_weight:
        _need_binary(data, "rank_weight > 0", "set model.rank_weight=0")
    return HSTU(config, data.num_items, device, torch.from_numpy(data.content),
                0 if data.actions is None else int(data.actions.max(initial=0)) + 1)


def _cadvae(config: CaDVAEConfig, data: Interactions, device: str) -> CaDVAE:
    return CaDVAE(data.num_items, config, concepts_from(data, config), device)


def _steps(config: Any, data: Interactions) -> SequenceBatches:
    return SequenceBatches(data, config.steps, config.window, getattr(config, "gamma", 1.0))


def _of_items(model: Callable[[Any, int, str], Recommender]
              ) -> Callable[[Any, Interactions, str], Recommender]:
    """Make a `Workload.build` for a model of configuration, number of items and device."""
    return lambda c, d, device: model(c, d.num_items, device)


def _of_training(model: Callable[[Any, Histories, int], Recommender]
                 ) -> Callable[[Any, Interactions, str], Recommender]:
    """Make a `Workload.build` for a model that is fitted to all training interactions at once."""
    return lambda c, d, device: model(
        c, training_histories(d, np.arange(1, d.num_users)), d.num_items)


# Recommenders that ``oper train`` supports, sharded or not.
WORKLOADS: dict[str, Workload] = {
    "popularity": Workload(
        PopularityConfig,
        lambda c, d, device: Popularity(torch.from_numpy(d.popularity(positive=True))),
        trains=False),
    "gru4rec": Workload(GRU4RecConfig, _of_items(GRU4Rec), _steps),
    "sasrec": Workload(SASRecConfig, _of_items(SASRec), _steps),
    "sqn": Workload(SQNConfig, _of_items(SQN), _steps),
    "sa2c": Workload(SA2CConfig, _of_items(SQN), _steps),
    "dqn": Workload(DQNConfig, _of_items(SQN), _steps),
    "hstu": Workload(HSTUConfig, _hstu, _steps),
    "dt": Workload(DecisionTransformerConfig, _cdt4rec, _steps),
    "cdt4rec": Workload(CDT4RecConfig, _cdt4rec, _steps),
    "multvae": Workload(MultVAEConfig, lambda c, d, device: MultVAE(d.num_items, c, device)),
    "macridvae": Workload(MacridVAEConfig, _cadvae),
    "cadvae": Workload(CaDVAEConfig, _cadvae),
}
# Additional baselines for a single process; most have no tables to shard.
RECOMMENDERS: dict[str, Workload] = WORKLOADS | {
    "itemknn": Workload(ItemKNNConfig, _of_training(ItemToItem), trains=False),
    "ease": Workload(EASEConfig, _of_training(ItemToItem), trains=False),
    "ials": Workload(IALSConfig, _of_training(IALS), trains=False),
    "recvae": Workload(RecVAEConfig, lambda c, d, device: RecVAE(d.num_items, c)),
}
