"""Optimizers that are applied in the backward pass, exact on duplicates, as FBGEMM defines them.

Duplicates of a row within a global batch are summed before one update, and only rows that the batch
touches change ("lazy" moments: a row's moments do not decay while it is not touched). The
arithmetic is in csrc/common/optimizer.h; the state that each keeps is listed in
`oper.tables.OPTIMIZERS`. Where torch differs: torch's dense SGD with momentum, Adagrad and Adam
change rows with a zero gradient too (moments decay, weight decay applies), and its Adam adds L2
decay to the gradient where FBGEMM adds it to the step. Betas are fp32 numbers, as in FBGEMM.

Every optimizer can clip, element by element (FBGEMM) or by the norm of a row's gradient (torch).
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from oper.errors import InvalidInputError, PlanError, require
from oper.tables import OPTIMIZERS, TableSpec

MAX_DIM = 1024
_LARGEST = float(np.finfo(np.float32).max)
# Parts of the state of each optimizer: name, and whether it is one number per row.
STATE_PARTS = {name: kind.state for name, kind in OPTIMIZERS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Clipping:
    """How an optimizer's gradients are clipped; None = no clipping.

    Attributes:
        max_gradient: elements of the gradient of a bag's or an id's output, after the division by
            the number of ranks and before that of mean pooling, are clamped to +- this (FBGEMM's
            ``gradient_clipping=True, max_gradient=...``).
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
            (name, value, _is_fp32(value) and value >= 0, "a number >= 0 that fp32 holds")
            for name, value in settings.items() if name not in others))
        require(what, "pass a positive number, or None for no limit", *(
            (name, limit, limit is None or (_is_fp32(limit) and limit > 0), "> 0, or None")
            for name, limit in settings.items() if name in others[:2]))


@dataclass(frozen=True, slots=True)
class SGD(Clipping):
    """``g += wd * w; m = momentum * m + g; w -= lr * m``; without momentum ``w -= lr * g``.

    ``torch.optim.SGD`` on touched rows, without dampening and Nesterov's step; FBGEMM's EXACT_SGD
    has neither momentum nor decay.

    Attributes:
        momentum: 0 = none, and no state.
        weight_decay: L2.
    """

    lr: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0

    @property
    def name(self) -> str:
        """Its name in plans, where SGD with momentum, which keeps a state, is a separate optimizer.
        """
        return "momentum_sgd" if self.momentum else "sgd"


@dataclass(frozen=True, slots=True)
class LarsSGD(Clipping):
    """``m = momentum * m + lr * eta * |w| / (|g| + wd * |w|) * (g + wd * w); w -= m``.

    FBGEMM's LARS_SGD, TorchRec's ``LarsSGD``: norms are per row (per layer in You et al., 2017).
    Where FBGEMM divides 0 by 0, the rate is 0.
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
        eps: FBGEMM's default, also that of TorchRec's fused tables (its unsharded class has 1e-10).
        weight_decay: 0 = none.
        decoupled: FBGEMM's decoupled decay (``w *= 1 - lr * wd``) instead of L2 (``g += wd * w``).
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
        eps: FBGEMM's default (``torch.optim.Adagrad`` has 1e-10).
        initial_accumulator_value: initial value of every `s`.
    """

    lr: float = 0.01
    eps: float = 1e-8
    initial_accumulator_value: float = 0.0

    name = "adagrad"


@dataclass(frozen=True, slots=True)
class Adam(Clipping):
    """Adam on touched rows; bias correction by the number of optimizer steps (FBGEMM's ADAM).

    Weight decay is added to the step, so this is `AdamW` with another default decay.
    """

    lr: float = 0.001
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    name = "adam"

    def __post_init__(self) -> None:
        Clipping.__post_init__(self)
        what = f"invalid {type(self).__name__}"
        if not isinstance(self.betas, tuple | list) or len(self.betas) != 2:
            raise InvalidInputError(what, "betas", self.betas, "two numbers",
                                    "pass a pair such as (0.9, 0.999)")
        for k, beta in enumerate(self.betas):
            # As fp32, which the kernel's are: 1 there would divide by 1 - 1^t.
            if not _is_fp32(beta) or not 0 <= np.float32(beta) < 1:
                raise InvalidInputError(what, f"betas[{k}]", beta, "0 <= beta < 1 in fp32",
                                        "choose a smaller value")
        object.__setattr__(self, "betas", tuple(self.betas))  # a list could not be hashed


@dataclass(frozen=True, slots=True)
class AdamW(Adam):
    """`Adam` with the weight decay of ``torch.optim.AdamW``; plans and checkpoints say ``adam``.

    ``w *= 1 - lr * wd`` before the step, as torch has it, and ``lr * wd * w`` within the step are
    the same, since the step does not depend on `w`.
    """

    weight_decay: float = 0.01


@dataclass(frozen=True, slots=True)
class PartialRowWiseAdam(Adam):
    """Adam with one second moment per row, of the mean square (FBGEMM's PARTIAL_ROWWISE_ADAM)."""

    name = "partial_rowwise_adam"


@dataclass(frozen=True, slots=True)
class LAMB(Adam):
    """``r = Adam's step + wd * w; w -= lr * |w| / |r| * r`` (FBGEMM's LAMB; You et al., ICLR 2020).

    Norms are per row, as in FBGEMM, so a row of zeros never changes. Where `r` is 0 and FBGEMM
    divides by it, nothing changes.
    """

    lr: float = 0.01

    name = "lamb"


@dataclass(frozen=True, slots=True)
class PartialRowWiseLAMB(LAMB):
    """LAMB with one second moment per row, of the mean square (FBGEMM's PARTIAL_ROWWISE_LAMB)."""

    name = "partial_rowwise_lamb"


Optimizer = (SGD | LarsSGD | RowWiseAdagrad | Adagrad | Adam | AdamW | PartialRowWiseAdam | LAMB
             | PartialRowWiseLAMB)


def initial_state(optimizer: Optimizer) -> float:
    """Initial value of the optimizer's ``momentum1`` state."""
    return float(getattr(optimizer, "initial_accumulator_value", 0.0))


def _is_fp32(value: Any) -> bool:
    """Whether it is a number that fits float32, in which the kernels compute."""
    return isinstance(value, numbers.Real) and abs(float(value)) <= _LARGEST


def check_supported(tables: Sequence[TableSpec], optimizers: Mapping[str, Optimizer] | None
                    ) -> None:
    """Raise PlanError unless the kernels can run these tables with these optimizers."""
    for t in tables:
        what = f"cannot shard table {t.name!r}"
        if t.dim > MAX_DIM:
            raise PlanError(what, "dim", t.dim, f"<= {MAX_DIM}", "split the table by columns")
        if optimizers is not None and t.optimizer != optimizers[t.name].name:
            raise PlanError(what, "plan's optimizer", t.optimizer, optimizers[t.name].name,
                            "plan again for this optimizer")
