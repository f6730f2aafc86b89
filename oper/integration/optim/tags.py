"""Conversion of optimizers attached by ``apply_optimizer_in_backward`` to OPER's optimizers."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch

from oper.errors import InvalidInputError
from oper.shmem.optim.optimizers import (
    LAMB,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    LarsSGD,
    Optimizer,
    PartialRowWiseAdam,
    PartialRowWiseLAMB,
    RowWiseAdagrad,
)

_ADAM = ("lr", "betas", "eps", "weight_decay")
# By name of the torch or TorchRec class: OPER's optimizer, and the arguments that both have.
# Arguments missing in a tag get OPER's defaults, which equal FBGEMM's, not those of the tagged
# class (such as eps=1e-10): TorchRec, too, passes only the tag's arguments to FBGEMM.
_KNOWN: dict[str, tuple[Callable[..., Optimizer], tuple[str, ...]]] = {
    "SGD": (SGD, ("lr", "momentum", "weight_decay")),
    "LarsSGD": (LarsSGD, ("lr", "momentum", "weight_decay", "eta")),
    "RowWiseAdagrad": (RowWiseAdagrad, ("lr", "eps", "weight_decay", "initial_accumulator_value")),
    "Adagrad": (Adagrad, ("lr", "eps", "initial_accumulator_value")),
    "Adam": (Adam, _ADAM),
    "AdamW": (AdamW, _ADAM),
    "PartialRowWiseAdam": (PartialRowWiseAdam, _ADAM),
    "LAMB": (LAMB, _ADAM),
    "PartialRowWiseLAMB": (PartialRowWiseLAMB, _ADAM),
}
_CLIPPING = ("max_gradient", "max_row_norm")
# Arguments of torch's and TorchRec's classes that OPER's lack, with the values that have no effect.
_NEUTRAL = {"weight_decay": 0, "dampening": 0, "nesterov": False, "lr_decay": 0, "maximize": False,
            "amsgrad": False, "decoupled_weight_decay": True, "foreach": None, "fused": None,
            "capturable": False, "differentiable": False}
_FBGEMM_LR = 0.01  # for TorchRec's classes whose constructor has no lr argument
_WHAT = "cannot use the optimizer of apply_optimizer_in_backward"


def tagged_optimizer(parameter: torch.Tensor) -> Optimizer | None:
    """Return the optimizer that ``apply_optimizer_in_backward`` has attached to a table, or None.

    Raises:
        InvalidInputError: the optimizer, or one of its arguments, is not supported.
    """
    classes = getattr(parameter, "_optimizer_classes", None)
    if not classes:
        return None
    given = dict(getattr(parameter, "_optimizer_kwargs", [{}])[0]) | _changed_since(parameter)
    name = classes[0].__name__
    home = classes[0].__module__.split(".")[0]
    if len(classes) != 1 or name not in _KNOWN or home not in ("torch", "torchrec"):
        raise InvalidInputError(
            _WHAT, "optimizer", [f"{c.__module__}.{c.__name__}" for c in classes],
            f"one of torch's or TorchRec's {sorted(_KNOWN)}", "tag the tables with one of these")
    make, arguments = _KNOWN[name]
    chosen = _in_our_names(name, given)
    for key in [k for k in chosen if k not in {*arguments, *_CLIPPING, "decoupled"}]:
        value = chosen.pop(key)
        if key not in _NEUTRAL or value != _NEUTRAL[key]:
            raise InvalidInputError(_WHAT, f"{name}.{key}", value,
                                    f"{_NEUTRAL.get(key, 'not given')}", "leave that argument out")
    if "lr" not in chosen:
        own = inspect.signature(classes[0].__init__).parameters.get("lr")
        chosen["lr"] = _FBGEMM_LR if own is None else own.default
    return make(**chosen)


def _changed_since(parameter: torch.Tensor) -> dict[str, Any]:
    """Return the settings of the tagged optimizer that were changed after it was made, for instance
    by a schedule; warns if it has a state, which sharded tables do not take over."""
    # Some of TorchRec's classes are only tags: no optimizers, without parameter groups.
    optimizer = next(iter(getattr(parameter, "_in_backward_optimizers", ())), None)
    if getattr(optimizer, "state", {}).get(parameter):
        warnings.warn(
            "sharded tables begin with new optimizer states: those of training before oper.shard, "
            "in the optimizers of apply_optimizer_in_backward, are not taken over", stacklevel=5)
    defaults = getattr(optimizer, "defaults", {})
    return {name: value for group in getattr(optimizer, "param_groups", ())[:1]
            for name, value in group.items()
            if name in defaults and value is not defaults[name] and value != defaults[name]}


def _in_our_names(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the tag's arguments `given`, with FBGEMM's names replaced by OPER's."""
    given = dict(given)
    for ours, theirs in (("lr", {"learning_rate"}), ("betas", {"beta1", "beta2"})):
        twice = sorted(theirs & given.keys())
        if ours in given and twice:
            raise InvalidInputError(_WHAT, f"{name}: {ours} together with {twice}", given[ours],
                                    "either torch's or FBGEMM's name of an argument",
                                    f"leave out {twice}")
    if not given.pop("gradient_clipping", False):
        given.pop("max_gradient", None)
    if "learning_rate" in given:
        given["lr"] = given.pop("learning_rate")
    if "beta1" in given or "beta2" in given:
        given["betas"] = (given.pop("beta1", 0.9), given.pop("beta2", 0.999))
    mode = getattr(given.get("weight_decay_mode"), "name", None)
    if name == "RowWiseAdagrad" and mode in ("NONE", "L2", "DECOUPLE"):
        del given["weight_decay_mode"]
        given["decoupled"] = mode == "DECOUPLE"
        if mode == "NONE":
            given["weight_decay"] = 0.0
    elif "decoupled" in given:
        raise InvalidInputError(_WHAT, f"{name}.decoupled", given["decoupled"], "no such argument",
                                "use FBGEMM's weight_decay_mode=WeightDecayMode.DECOUPLE")
    return given

