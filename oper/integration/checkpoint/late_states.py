"""Optimizers that create the state of a parameter in their first step, such as `torch.optim.Adam`.

``torch.distributed.checkpoint`` reads only values that the present state contains. For an optimizer
that has not made a step, it would silently skip the saved states of all parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from oper.errors import InvalidInputError

_STATE = ("optimizer", "state")  # in a checkpoint, followed by the key of a parameter


def missing_states(state: dict[str, Any], saved: Iterable[Sequence[Any]], optimizer: Any
                   ) -> list[Sequence[Any]]:
    """Return the paths of the saved states of those parameters that have no state yet.

    Args:
        state: the present state, as `state_of` returns it.
        saved: paths of saved values.
        optimizer: the optimizer to load.

    Raises:
        InvalidInputError: there are such states, and the optimizer is one of TorchRec's, which
            load only into a state that exists.
    """
    own = state.get("optimizer")
    if not isinstance(own, dict) or not isinstance(own.get("state"), dict):
        return []
    names = getattr(optimizer, "params", None)
    keyed = list(names) if isinstance(names, dict) else []
    known = {*keyed, *_numbers(own)} - {str(k) for k in own["state"]}
    found = [p for p in saved if len(p) > 3 and tuple(p[:2]) == _STATE and str(p[2]) in known]
    if found and keyed:
        raise InvalidInputError(
            "cannot load the state of the optimizer", "parameters that have no state yet",
            sorted({str(p[2]) for p in found})[:8], "none, since TorchRec's optimizers load only "
            "into a state that exists",
            "before loading, call init_state() of the KeyedOptimizer of these parameters, or make "
            "a step")
    return found


def add_missing(state: dict[str, Any], metadata: Metadata, optimizer: Any) -> None:
    """Add placeholders to `state` for the `missing_states` of a checkpoint."""
    paths = {tuple(keys): name for name, keys in (metadata.planner_data or {}).items()}
    for path in missing_states(state, paths, optimizer):
        set_element(state, tuple(path), placeholder(metadata, paths[tuple(path)]))


def placeholder(metadata: Metadata, name: str) -> Any:
    """Return a tensor to load the value `name` of a checkpoint into, or None if it is no tensor."""
    item = metadata.state_dict_metadata[name]
    return (torch.empty(item.size, dtype=item.properties.dtype)
            if isinstance(item, TensorStorageMetadata) else None)


def restore_numbers(state: dict[str, Any]) -> None:
    """Turn the parameters' numbers in the state of a torch optimizer, which a checkpoint stores as
    text, into integers again."""
    own = state.get("optimizer")
    numbers = _numbers(own) if isinstance(own, dict) else {}
    if not numbers or not isinstance(own, dict) or not isinstance(own.get("state"), dict):
        return
    merged: dict[Any, dict[str, Any]] = {}
    for key, values in own["state"].items():
        merged.setdefault(numbers.get(str(key), key), {}).update(values)
    own["state"] = merged


def _numbers(own: dict[str, Any]) -> dict[str, int]:
    """Map the text of the parameters' numbers to the numbers, for torch's optimizers; empty for
    others, which have names instead."""
    groups = own.get("param_groups") or ()
    return {str(k): k for group in groups for k in group["params"] if type(k) is int}
