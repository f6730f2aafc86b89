"""TorchRec's managed-collision modules on several ranks, with the same map of ids on all ranks.

Such a module learns from ids which of them get rows of their own. Here every rank learns from the
ids of all ranks, concatenated in rank order, and then maps only its own ids. The map equals that of
a single process that trains on the entire batch.

This requires a module with separate methods for learning and mapping, as in
`MCHManagedCollisionModule`. Other modules, such as `HashZchManagedCollisionModule`, learn while
they map, so their maps would differ between ranks; they can only be used in eval mode.
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
    """Make the managed-collision modules in `module` learn from the ids of all ranks of `group`.

    From then on, the forward pass in training mode is collective for `MCHManagedCollisionModule`s,
    and raises InvalidInputError for managed-collision modules of other classes.
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
    """Call `forward` of a module that must not learn; raises InvalidInputError in training mode."""
    if module.training:
        raise InvalidInputError(
            "cannot learn a map of ids on several ranks", f"class, mode of {name}",
            f"{type(module).__name__}, training",
            "an MCHManagedCollisionModule, or a module in eval mode",
            f"call {name}.eval() after every train() of the model, so that the module maps ids "
            "without learning; or train in one process")
    return forward(*args, **kwargs)


def _learn_from_all(module: nn.Module, learn: Any, group: Group, features: Mapping[str, Any]
                    ) -> Mapping[str, Any]:
    """Call `learn`, a `MCHManagedCollisionModule.profile`, with all ranks' ids. Returns `features`,
    the ids of this rank."""
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
