"""The recommenders by name: their configuration, how they are built from data, what they train on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from oper.rl_rec.concepts import concepts_from
from oper.rl_rec.interactions import Interactions
from oper.rl_rec.models.base import Recommender
from oper.rl_rec.models.cadvae import CaDVAE, CaDVAEConfig
from oper.rl_rec.models.macridvae import MacridVAE, MacridVAEConfig
from oper.rl_rec.models.multvae import MultVAE, MultVAEConfig
from oper.rl_rec.models.popularity import Popularity, PopularityConfig


@dataclass(frozen=True, slots=True)
class Workload:
    """A recommender that can be trained.

    Attributes:
        config: its configuration, a frozen dataclass with defaults.
        build: the model from the configuration and the data; draws from torch's generator.
        batches: ``"histories"`` (all of a user's training interactions) or ``"sequences"``.
    """

    config: type
    build: Callable[[Any, Interactions], Recommender]
    batches: str = "histories"


WORKLOADS: dict[str, Workload] = {
    "popularity": Workload(PopularityConfig,
                           lambda c, d: Popularity(torch.from_numpy(d.popularity()))),
    "multvae": Workload(MultVAEConfig, lambda c, d: MultVAE(d.num_items, c)),
    "macridvae": Workload(MacridVAEConfig, lambda c, d: MacridVAE(d.num_items, c)),
    "cadvae": Workload(CaDVAEConfig, lambda c, d: CaDVAE(d.num_items, c, concepts_from(d, c))),
}
