"""TorchRec's managed-collision modules on several ranks: one map of ids, the same on all.

Such a module learns from the ids that it sees which of them get rows of their own. Each rank sees
its own share of a batch, so that every rank is given the ids of all, in rank order, to learn from;
each then maps its own. The maps are those of one process that sees the whole batch.

That needs a module whose learning and mapping are apart, as in `MCHManagedCollisionModule`.
Others, such as `HashZchManagedCollisionModule`, learn while they map: on several ranks their
maps would disagree, so that they map with what they know and refuse to learn.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from oper.errors import InvalidInputError
from oper.shmem.group.groups import Group


def share_maps(module: nn.Module, group: Group) -> None:
    """Let the managed-collision modules within `module` learn from the ids of all ranks.

    Training forwards of `MCHManagedCollisionModule`s are collective from then on; those of other
    kinds raise InvalidInputError.
    """
    from torchrec.modules.mc_modules import ManagedCollisionModule, MCHManagedCollisionModule

    for name, child in module.named_modules():
        if not isinstance(child, ManagedCollisionModule):
            continue
        if isinstance(child, MCHManagedCollisionModule):
            learn = child.profile
            child.profile = functools.partial(_learn_from_all, child, learn, group)
        else:
            child.forward = functools.partial(_frozen, child, name, child.forward)


def _frozen(module: nn.Module, name: str, forward: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward pass of a module that must not learn."""
    if module.training:
        raise InvalidInputError(
            "cannot learn a map of ids on several ranks", f"{name}, mode",
            f"{type(module).__name__}, training",
            "an MCHManagedCollisionModule, or a module in eval mode",
            f"call {name}.eval() after every train() of the model, so that it maps ids without "
            "learning; or train in one process")
    return forward(*args, **kwargs)


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
