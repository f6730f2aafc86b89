"""TorchRec's managed-collision maps in front of fbgemm's table-batched bags, in one process."""

from __future__ import annotations

from typing import Any

import torch

from oper.bench.core.workload import Workload
from oper.bench.tables.unsharded import fbgemm_bags

EVICTION_INTERVAL = 10  # steps after which a map learns what it has seen


class ManagedCollisions:
    """Maps that learn in every call, and the tables behind them.

    Args:
        work: the workload, in keys.
        num_slots: rows of each table.
        gradient: of a whole batch's output, float32 [B, sum of dims].
    """

    def __init__(self, work: Workload, num_slots: int, gradient: torch.Tensor) -> None:
        from torchrec.modules.embedding_configs import EmbeddingBagConfig
        from torchrec.modules.mc_modules import (
            LRU_EvictionPolicy,
            ManagedCollisionCollection,
            MCHManagedCollisionModule,
        )

        configs = [EmbeddingBagConfig(name=t.name, num_embeddings=num_slots, embedding_dim=t.dim,
                                      feature_names=list(t.features)) for t in work.tables()]
        cpu = torch.device("cpu")
        self._gradient = gradient
        self._maps: Any = ManagedCollisionCollection(
            {c.name: MCHManagedCollisionModule(
                zch_size=num_slots, device=cpu, eviction_policy=LRU_EvictionPolicy(),
                eviction_interval=EVICTION_INTERVAL) for c in configs}, configs)
        self._tables = fbgemm_bags([num_slots] * len(configs), work.dim,
                                   lambda k: torch.zeros(num_slots, work.dim))

    def learn(self, kjt: Any) -> None:
        """Show the maps keys until they have learnt them."""
        for _ in range(EVICTION_INTERVAL):
            self._maps(kjt)

    def step(self, kjt: Any) -> None:
        """Map, look up, update."""
        mapped = self._maps(kjt)
        out = self._tables(mapped.values(), mapped.offsets())
        out.backward(self._gradient)
        self._maps.evict()
