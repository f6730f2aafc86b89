"""The recommenders by name: their configuration, how they are built from data, what they train on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from oper.errors import InvalidInputError, fail
from oper.rl_rec.concepts import concepts_from
from oper.rl_rec.interactions import Interactions
from oper.rl_rec.models.base import Recommender
from oper.rl_rec.models.cadvae import CaDVAE, CaDVAEConfig
from oper.rl_rec.models.cdt4rec import CDT4Rec, CDT4RecConfig, DecisionTransformerConfig
from oper.rl_rec.models.macridvae import MacridVAE, MacridVAEConfig
from oper.rl_rec.models.multvae import MultVAE, MultVAEConfig
from oper.rl_rec.models.popularity import Popularity, PopularityConfig
from oper.rl_rec.models.sasrec import SASRec, SASRecConfig
from oper.rl_rec.sequences import target_return


@dataclass(frozen=True, slots=True)
class Workload:
    """A recommender that can be trained.

    Attributes:
        config: its configuration, a frozen dataclass with defaults.
        build: the model from the configuration, the data and the device of its tables (``"cpu"``
            or ``"meta"``); draws from torch's generator.
        batches: ``"histories"`` (all of a user's training interactions) or ``"sequences"``.
        trains: whether there is anything to train.
    """

    config: type
    build: Callable[[Any, Interactions, str], Recommender]
    batches: str = "histories"
    trains: bool = True


def _cdt4rec(config: CDT4RecConfig, data: Interactions, device: str) -> CDT4Rec:
    low, high = data.rewards.min(initial=0), data.rewards.max(initial=0)
    if config.reward_loss == "bce" and not 0 <= low <= high <= 1:
        raise InvalidInputError(fail("cannot train on these rewards", "rewards", (low, high),
                                     "0..1 with reward_loss='bce'", "set model.reward_loss='mse'"))
    return CDT4Rec(config, data.num_users, data.num_items,
                   target_return(data, config.gamma, config.target_quantile), device)


WORKLOADS: dict[str, Workload] = {
    "popularity": Workload(PopularityConfig,
                           lambda c, d, device: Popularity(torch.from_numpy(d.popularity())),
                           trains=False),
    "sasrec": Workload(SASRecConfig, lambda c, d, device: SASRec(c, d.num_items, device),
                       "sequences"),
    "dt": Workload(DecisionTransformerConfig, _cdt4rec, "sequences"),
    "cdt4rec": Workload(CDT4RecConfig, _cdt4rec, "sequences"),
    "multvae": Workload(MultVAEConfig, lambda c, d, device: MultVAE(d.num_items, c, device)),
    "macridvae": Workload(MacridVAEConfig, lambda c, d, device: MacridVAE(d.num_items, c, device)),
    "cadvae": Workload(CaDVAEConfig, lambda c, d, device: CaDVAE(
        d.num_items, c, concepts_from(d, c), device)),
}
