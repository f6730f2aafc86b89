"""Optimizers of the programs, given to OPER by tag or argument, and to the oracle as formulas.

A row of `KINDS` adds an optimizer: OPER's class, the class for ``apply_optimizer_in_backward``
(None = there is none), and the arguments from which to draw. The formula is that of
`tests.references.update_rows`.
"""

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.optim import RowWiseAdagrad, optimizers as theirs

import oper

# eps is never tiny: a gradient of nearly 0 would make steps of any sign.
KINDS: dict[str, tuple[Any, Any, dict[str, list[Any]]]] = {
    "sgd": (oper.SGD, torch.optim.SGD, {"lr": [0.25, 0.1]}),
    "rowwise_adagrad": (oper.RowWiseAdagrad, RowWiseAdagrad,
                        {"lr": [0.1], "eps": [1e-2], "weight_decay": [0.0, 0.0, 0.1]}),
    "adagrad": (oper.Adagrad, torch.optim.Adagrad, {"lr": [0.1], "eps": [1e-2]}),
    "adam": (oper.Adam, torch.optim.Adam, {"lr": [0.05], "eps": [1e-2],
                                           "betas": [(0.9, 0.999), (0.5, 0.75)]}),
    "partial_rowwise_adam": (oper.PartialRowWiseAdam, theirs.PartialRowWiseAdam,
                             {"lr": [0.05], "eps": [1e-2], "weight_decay": [0.0, 0.1]}),
}


def draw_optimizer(rng: np.random.Generator) -> dict[str, Any]:
    """Draw an optimizer, as data: its kind, how it is given to OPER, and its arguments."""
    kind = str(rng.choice(list(KINDS)))
    _, peer, choices = KINDS[kind]
    by = "tag" if peer is not None and rng.random() < 0.5 else "argument"
    arguments = {name: values[int(rng.integers(len(values)))] for name, values in choices.items()}
    return {"kind": kind, "by": by, "arguments": arguments}


def make(optimizer: dict[str, Any]) -> Any:
    """Create OPER's optimizer."""
    return KINDS[optimizer["kind"]][0](**optimizer["arguments"])


def tag(optimizer: dict[str, Any], model: nn.Module, keys: set[str]) -> None:
    """Tag a model's tables as users of TorchRec do."""
    tables = [p for name, p in model.named_parameters() if name in keys]
    _apply_optimizer_in_backward(KINDS[optimizer["kind"]][1], tables, dict(optimizer["arguments"]))
