"""Optimizers that create the state of a parameter in their first step, such as `torch.optim.Adam`.

``torch.distributed.checkpoint`` reads only values that the present state contains. For an optimizer
that has not taken a step, it would silently skip the saved states of all parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from oper.errors import InvalidInputError
from oper.integration.checkpoint.on_demand import is_divided
from oper.integration.table_tensor import TableTensor

_Path = tuple[Any, ...]


def missing_states(state: dict[str, Any], saved: Iterable[Sequence[Any]], optimizer: Any
                   ) -> list[_Path]:
    """Return the paths of the saved states of those parameters that have no state yet.

    Args:
        state: the present state, as `state_of` returns it.
        saved: paths of saved values.
        optimizer: the optimizer to load.

    Raises:
        InvalidInputError: there are such states, and the optimizer is one of TorchRec's, which
            load only into a state that exists.
    """
    names = getattr(optimizer, "params", None)
    keyed: dict[str, Any] = names if isinstance(names, dict) else {}
    paths, found = [tuple(path) for path in saved], list[_Path]()
    for at, own in _optimizers(state):
        numbers, present = _numbers(own), {str(k): x for k, x in own["state"].items()}
        n = len(at)
        for path in (p for p in paths if p[:n] == at and len(p) > n):
            key = str(path[n])
            # Torch's optimizers may have values of their own besides those of parameters.
            if numbers and (key in numbers or not key.isdecimal()):
                if not _has(present, (key, *path[n + 1:])):
                    found.append(path)
            elif (key in keyed and not present.get(key) and len(path) > n + 1
                  and not isinstance(keyed[key], TableTensor)):  # tables have no such state
                found.append(path)
        if found and keyed:
            raise InvalidInputError(
                "cannot load the state of the optimizer", "parameters that have no state yet",
                sorted({str(p[n]) for p in found})[:8], "none, since TorchRec's optimizers load "
                "only into a state that exists",
                "use the optimizer of the run that saved; before loading, call init_state() of the "
                "KeyedOptimizer of these parameters, or take a step")
    return found


def _has(values: Any, path: _Path) -> bool:
    """Whether nested dicts and lists have a value at `path`."""
    for key in path:
        if not (key in values if isinstance(values, dict)
                else isinstance(values, list) and key < len(values)):
            return False
        values = values[key]
    return True


def add_missing(state: dict[str, Any], metadata: Metadata, optimizer: Any) -> None:
    """Add placeholders to `state` for the `missing_states` of a checkpoint."""
    paths = {tuple(keys): name for name, keys in (metadata.planner_data or {}).items()}
    parameters = parameters_of(optimizer)
    for path in missing_states(state, paths, optimizer):
        value = placeholder(metadata, paths[tuple(path)])
        number = str(path[2])
        if number.isdecimal() and int(number) < len(parameters):
            like: Any = parameters[int(number)]  # a DTensor, if it is divided among the ranks
            if getattr(value, "shape", None) == like.shape and is_divided(like):
                value = torch.empty_like(like, dtype=value.dtype, requires_grad=False)
        set_element(state, tuple(path), value)


def parameters_of(optimizer: Any) -> list[torch.Tensor]:
    """Return the parameters of an optimizer, numbered as in its state; [] of another object."""
    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else ()
    return [parameter for group in groups for parameter in group["params"]]


def placeholder(metadata: Metadata, name: str) -> Any:
    """Return a tensor to load the value `name` of a checkpoint into, or None if it is not one."""
    item = metadata.state_dict_metadata[name]
    return (torch.empty(item.size, dtype=item.properties.dtype)
            if isinstance(item, TensorStorageMetadata) else None)


def restore_numbers(state: dict[str, Any]) -> None:
    """Turn the parameters' numbers in the states of torch's optimizers, which a checkpoint stores
    as text, into integers again."""
    for _, own in _optimizers(state):
        numbers = _numbers(own)
        merged: dict[Any, Any] = {}
        for key, values in own["state"].items():
            key = numbers.get(str(key), key)
            both = isinstance(values, dict) and isinstance(merged.get(key), dict)
            merged[key] = {**merged[key], **values} if both else values
        own["state"] = merged


def _optimizers(state: Mapping[str, Any], at: _Path = ("optimizer",)
                ) -> Iterator[tuple[_Path, dict[str, Any]]]:
    """Yield the states of the optimizers in `state`, and the paths of the states of their
    parameters, for an optimizer or nested dicts of several."""
    own = state.get(at[-1])
    if not isinstance(own, dict):
        return
    if isinstance(own.get("state"), dict):
        yield (*at, "state"), own
        return
    for key in own:
        yield from _optimizers(own, (*at, key))


def _numbers(own: dict[str, Any]) -> dict[str, int]:
    """Map the text of the parameters' numbers to the numbers, for torch's optimizers; empty for
    others, which have names instead."""
    groups = own.get("param_groups") or ()
    return {str(k): k for group in groups for k in group["params"] if type(k) is int}
