"""Optimizers of tables, applied in the backward pass, with FBGEMM's exact update rules.

Gradients of all lookups of a row in a global batch are summed before a single update of the row.
Rows that the batch does not look up do not change, and their moments do not decay ("lazy" moments).
The arithmetic is in csrc/common/optimizer.h; `oper.tables.OPTIMIZERS` lists the states. Differences
from torch: its dense SGD with momentum, Adagrad and Adam also change rows with a zero gradient
(moments decay, weight decay applies), and its Adam adds L2 decay to the gradient, whereas FBGEMM
adds it to the step. Betas are rounded to fp32, as in FBGEMM.

In the formulas, w is a row, g its summed gradient, wd the weight decay. Every optimizer can clip
gradients, by element (FBGEMM) or by the norm of a row's gradient (torch); see `Clipping`.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from oper.errors import PlanError, require
from oper.tables import OPTIMIZERS, TableSpec

MAX_DIM = 1024
_LARGEST = float(np.finfo(np.float32).max)
# (name, whether it has one number per row) of the state arrays of each optimizer.
STATE_PARTS = {name: kind.state for name, kind in OPTIMIZERS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Clipping:
    """Gradient clipping; a field of None = no clipping.

    Attributes:
        max_gradient: limit to which the absolute value of each element of an output row's gradient
            is clamped, after division by the number of ranks and before division by the bag length
            in mean pooling (FBGEMM's ``gradient_clipping=True, max_gradient=...``).
        max_row_norm: a row's gradient, summed over all its lookups in all ranks' batches, is scaled
            by ``min(1, max_row_norm / (|g| + 1e-6))`` (``torch.nn.utils.clip_grad_norm_`` of one
            row), before weight decay.
    """

    max_gradient: float | None = None
    max_row_norm: float | None = None

    def __post_init__(self) -> None:
        what = f"invalid {type(self).__name__}"
        others = ("max_gradient", "max_row_norm", "betas", "decoupled")
        settings = {f.name: getattr(self, f.name) for f in fields(self)}
        require(what, "pass a finite number >= 0", *(
            (name, value, is_fp32(value) and value >= 0, "a number >= 0 that fp32 holds")
            for name, value in settings.items() if name not in others))
        require(what, "pass a positive number, or None for no limit", *(
            (name, limit, limit is None or (is_fp32(limit) and limit > 0), "> 0, or None")
            for name, limit in settings.items() if name in others[:2]))


@dataclass(frozen=True, slots=True)
class SGD(Clipping):
    """``g += wd * w; m = momentum * m + g; w -= lr * m``; without momentum ``w -= lr * g``.

    ``torch.optim.SGD`` on looked-up rows, without dampening and Nesterov momentum; FBGEMM's
    EXACT_SGD has neither momentum nor decay.

    Attributes:
        momentum: factor of the previous `m`; 0 = no momentum and no state.
        weight_decay: L2 factor wd.
    """

    lr: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0

    @property
    def name(self) -> str:
        """Name of the optimizer in plans; SGD with momentum, which has a state, is separate."""
        return "momentum_sgd" if self.momentum else "sgd"


@dataclass(frozen=True, slots=True)
class LarsSGD(Clipping):
    """``m = momentum * m + lr * eta * |w| / (|g| + wd * |w|) * (g + wd * w); w -= m``.

    FBGEMM's LARS_SGD, TorchRec's ``LarsSGD``: norms are per row (per layer in You et al., 2017). If
    ``|g| + wd * |w|`` is 0, where FBGEMM divides 0 by 0, the fraction counts as 0.
    """

    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 0.0
    eta: float = 0.001

    name = "lars_sgd"


@dataclass(frozen=True, slots=True)
class RowWiseAdagrad(Clipping):
    """``s += mean(g^2); w -= lr / (sqrt(s) + eps) * g``.

    FBGEMM's EXACT_ROWWISE_ADAGRAD, TorchRec's ``RowWiseAdagrad``.

    Attributes:
        eps: the default is that of FBGEMM and of TorchRec's fused tables (TorchRec's unsharded
            class has 1e-10).
        weight_decay: factor wd; 0 = no decay.
        decoupled: whether to use FBGEMM's decoupled decay, ``w *= 1 - lr * wd``, instead of L2
            decay, ``g += wd * w``.
        initial_accumulator_value: initial value of every `s`.
    """

    lr: float = 0.01
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False
    initial_accumulator_value: float = 0.0

    name = "rowwise_adagrad"


@dataclass(frozen=True, slots=True)
class Adagrad(Clipping):
    """``s += g^2; w -= lr * g / (sqrt(s) + eps)`` (FBGEMM's EXACT_ADAGRAD).

    Attributes:
        eps: the default is FBGEMM's (``torch.optim.Adagrad`` has 1e-10).
        initial_accumulator_value: initial value of every `s`.
    """

    lr: float = 0.01
    eps: float = 1e-8
    initial_accumulator_value: float = 0.0

    name = "adagrad"


@dataclass(frozen=True, slots=True)
class Adam(Clipping):
    """Adam on looked-up rows; bias correction by the number of optimizer steps (FBGEMM's ADAM).

    Weight decay is added to the step, so this equals `AdamW` except for the default decay.
    """

    lr: float = 0.001
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    name = "adam"

    def __post_init__(self) -> None:
        Clipping.__post_init__(self)
        what = f"invalid {type(self).__name__}"
        require(what, "pass a pair such as (0.9, 0.999)", (
            "betas", self.betas, isinstance(self.betas, tuple | list) and len(self.betas) == 2,
            "two numbers"))
        # A beta that fp32 rounds to 1 would make the bias correction 1 - beta^t zero.
        require(what, "choose a smaller value", *(
            (f"betas[{k}]", beta, is_fp32(beta) and bool(0 <= np.float32(beta) < 1),
             "0 <= beta < 1 in fp32") for k, beta in enumerate(self.betas)))
        object.__setattr__(self, "betas", tuple(self.betas))  # a list could not be hashed


@dataclass(frozen=True, slots=True)
class AdamW(Adam):
    """`Adam` with the default decay of ``torch.optim.AdamW``; named ``adam`` in plans and
    checkpoints.

    torch's ``w *= 1 - lr * wd`` before the step is equivalent to adding ``lr * wd * w`` to the
    step, since Adam's step does not depend on w.
    """

    weight_decay: float = 0.01


@dataclass(frozen=True, slots=True)
class PartialRowWiseAdam(Adam):
    """Adam with one second moment per row, of mean(g^2) (FBGEMM's PARTIAL_ROWWISE_ADAM)."""

    name = "partial_rowwise_adam"


@dataclass(frozen=True, slots=True)
class LAMB(Adam):
    """``r = Adam's step + wd * w; w -= lr * |w| / |r| * r`` (FBGEMM's LAMB; You et al., ICLR 2020).

    Norms are per row, as in FBGEMM, so a row of zeros never changes. If ``|r|`` is 0, by which
    FBGEMM divides, the row does not change.
    """

    lr: float = 0.01

    name = "lamb"


@dataclass(frozen=True, slots=True)
class PartialRowWiseLAMB(LAMB):
    """LAMB with one second moment per row, of mean(g^2) (FBGEMM's PARTIAL_ROWWISE_LAMB)."""

    name = "partial_rowwise_lamb"


Optimizer = (SGD | LarsSGD | RowWiseAdagrad | Adagrad | Adam | AdamW | PartialRowWiseAdam | LAMB
             | PartialRowWiseLAMB)


def initial_state(optimizer: Optimizer) -> float:
    """Return the initial value of the optimizer's ``momentum1`` state."""
    return float(getattr(optimizer, "initial_accumulator_value", 0.0))


def is_fp32(value: Any) -> bool:
    """Return whether `value` is a number within the range of float32."""
    return isinstance(value, numbers.Real) and abs(float(value)) <= _LARGEST


def check_supported(tables: Sequence[TableSpec], optimizers: Mapping[str, Optimizer] | None,
                    verb: str = "shard") -> None:
    """Raise PlanError unless the kernels can run these tables with these optimizers; `verb` says in
    the message what cannot be done."""
    for t in tables:
        what = f"cannot {verb} table {t.name!r}"
        if t.dim > MAX_DIM:
            raise PlanError(what, "dim", t.dim, f"<= {MAX_DIM}, the kernels' limit",
                            "divide its columns among several tables, or leave the module out of "
                            "modules=")
        if optimizers is not None and t.optimizer != optimizers[t.name].name:
            raise PlanError(what, "plan's optimizer", t.optimizer,
                            f"{optimizers[t.name].name!r}, the optimizer of the table",
                            "plan again for this optimizer")
