"""TorchRec's managed-collision modules on several ranks: one map of ids, the same on all.

Such a module learns from the ids that it sees which of them get rows of their own. Each rank sees
its own share of a batch, so that every rank is given the ids of all, in rank order, to learn from;
each then maps its own. The maps are those of one process that sees the whole batch.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from oper.shmem.group import Group


def share_maps(module: nn.Module, group: Group) -> None:
    """Let the managed-collision modules within `module` learn from the ids of all ranks.

    Training forwards of such modules are collective from then on.
    """
    from torchrec.modules.mc_modules import ManagedCollisionModule, MCHManagedCollisionModule

    for name, child in module.named_modules():
        if not isinstance(child, ManagedCollisionModule):
            continue
        if isinstance(child, MCHManagedCollisionModule):
            learn = child.profile
            child.profile = functools.partial(_learn_from_all, child, learn, group)
        elif child.training:
            warnings.warn(f"{name}: a {type(child).__name__} keeps a map of ids on every rank, and "
                          "maps that learn from different batches disagree: freeze it with eval()",
                          stacklevel=3)


def _learn_from_all(module: nn.Module, learn: Any, group: Group, features: Mapping[str, Any]
                    ) -> Mapping[str, Any]:
    """`MCHManagedCollisionModule.profile` with the ids of all ranks; returns this rank's."""
    from torchrec.sparse.jagged_tensor import JaggedTensor

    if not module.training:
        return features
    everyone = group.all_gather({k: f.values().cpu().numpy() for k, f in features.items()})
    joint = {}
    for key, feature in features.items():
        ids = torch.cat([torch.from_numpy(x[key]) for x in everyone]).to(feature.values().device)
        joint[key] = JaggedTensor(values=ids, lengths=torch.ones_like(ids))
    learn(joint)
    return features
