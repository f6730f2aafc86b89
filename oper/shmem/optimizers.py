"""Optimizers that are applied in the backward pass, exact on duplicates, as FBGEMM defines them.

Duplicates of a row within a global batch are summed before one update, and only rows that the
batch touches change ("lazy" moments: a row's moments do not decay while it is not touched). The
arithmetic stands in csrc/include/oper/optimizer.h. Where torch differs: torch's dense Adagrad and
Adam change rows with a zero gradient too (moments decay, weight decay applies), and its Adam adds
L2 decay to the gradient where FBGEMM adds it to the step. Betas are fp32 numbers, as in FBGEMM.

Every optimizer can clip, element by element (FBGEMM) or by the norm of a row's gradient (torch).
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from oper.errors import InvalidInputError, PlanError, fail
from oper.tables import TableSpec

MAX_DIM = 1024
_LARGEST = float(np.finfo(np.float32).max)
# Names of the state of each optimizer and whether it is one number per row (else one per column).
STATE_PARTS: dict[str, tuple[tuple[str, bool], ...]] = {
    "none": (),
    "sgd": (),
    "rowwise_adagrad": (("momentum1", True),),
    "adagrad": (("momentum1", False),),
    "adam": (("momentum1", False), ("momentum2", False)),
    "partial_rowwise_adam": (("momentum1", False), ("momentum2", True)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Clipping:
    """How an optimizer's gradients are clipped; None = not.

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


@dataclass(frozen=True, slots=True)
class SGD(Clipping):
    """``w -= lr * g`` (FBGEMM's EXACT_SGD)."""

    lr: float = 0.01

    name = "sgd"

    def __post_init__(self) -> None:
        _check(self, lr=self.lr)

    def arguments(self, lr: float, step: int) -> list[float]:
        """The kernel's arguments at learning rate `lr` and step number `step` (from 1)."""
        return [1, 0, lr, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0]


@dataclass(frozen=True, slots=True)
class RowWiseAdagrad(Clipping):
    """``s += mean(g^2); w -= lr / (sqrt(s) + eps) * g``.

    FBGEMM's EXACT_ROWWISE_ADAGRAD, TorchRec's ``RowWiseAdagrad``.

    Attributes:
        weight_decay: 0 = none.
        decoupled: FBGEMM's decoupled decay (``w *= 1 - lr * wd``) instead of L2 (``g += wd * w``).
    """

    lr: float = 0.01
    eps: float = 1e-10
    weight_decay: float = 0.0
    decoupled: bool = False

    name = "rowwise_adagrad"

    def __post_init__(self) -> None:
        _check(self, lr=self.lr, eps=self.eps, weight_decay=self.weight_decay)

    def arguments(self, lr: float, step: int) -> list[float]:
        """The kernel's arguments at learning rate `lr` and step number `step` (from 1)."""
        decay = 0 if self.weight_decay == 0 else 2 if self.decoupled else 1
        return [2, decay, lr, self.eps, self.weight_decay, 0.0, 0.0, 1.0, 1.0]


@dataclass(frozen=True, slots=True)
class Adagrad(Clipping):
    """``s += g^2; w -= lr * g / (sqrt(s) + eps)`` (FBGEMM's EXACT_ADAGRAD)."""

    lr: float = 0.01
    eps: float = 1e-10

    name = "adagrad"

    def __post_init__(self) -> None:
        _check(self, lr=self.lr, eps=self.eps)

    def arguments(self, lr: float, step: int) -> list[float]:
        """The kernel's arguments at learning rate `lr` and step number `step` (from 1)."""
        return [3, 0, lr, self.eps, 0.0, 0.0, 0.0, 1.0, 1.0]


@dataclass(frozen=True, slots=True)
class Adam(Clipping):
    """Adam on touched rows; bias correction by the number of optimizer steps (FBGEMM's ADAM)."""

    lr: float = 0.001
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    name = "adam"
    code = 4

    def __post_init__(self) -> None:
        _check(self, lr=self.lr, eps=self.eps, weight_decay=self.weight_decay)
        what = f"invalid {type(self).__name__}"
        if not isinstance(self.betas, tuple | list) or len(self.betas) != 2:
            raise InvalidInputError(fail(what, "betas", self.betas, "two numbers", "correct it"))
        for k, beta in enumerate(self.betas):
            # As fp32, which the kernel's are: 1 there would divide by 1 - 1^t.
            if not _is_fp32(beta) or not 0 <= np.float32(beta) < 1:
                raise InvalidInputError(fail(what, f"betas[{k}]", beta, "0 <= beta < 1 in fp32",
                                             "correct it"))
        object.__setattr__(self, "betas", tuple(self.betas))  # a list could not be hashed

    def arguments(self, lr: float, step: int) -> list[float]:
        """The kernel's arguments at learning rate `lr` and step number `step` (from 1)."""
        # The kernel's betas are fp32, and 1 - beta in the moments must match 1 - beta^t here: with
        # 0.999 the rounding of beta alone changes 1 - beta by 1.3e-5 of its value.
        b1, b2 = (float(np.float32(b)) for b in self.betas)
        return [self.code, 0, lr, self.eps, self.weight_decay, b1, b2, 1 - b1**step, 1 - b2**step]


@dataclass(frozen=True, slots=True)
class PartialRowWiseAdam(Adam):
    """Adam with one second moment per row, of the mean square (FBGEMM's PARTIAL_ROWWISE_ADAM)."""

    name = "partial_rowwise_adam"
    code = 5


Optimizer = SGD | RowWiseAdagrad | Adagrad | Adam | PartialRowWiseAdam


def _is_fp32(value: Any) -> bool:
    """Whether it is a number that fp32 holds, which the kernels compute in."""
    return isinstance(value, numbers.Real) and abs(float(value)) <= _LARGEST


def _check(optimizer: Clipping, **values: Any) -> None:
    what = f"invalid {type(optimizer).__name__}"
    for name, value in values.items():
        if not _is_fp32(value) or value < 0:
            raise InvalidInputError(fail(what, name, value, "a number >= 0 that fp32 holds",
                                         "correct it"))
    for name in ("max_gradient", "max_row_norm"):
        limit = getattr(optimizer, name)
        if limit is not None and not (_is_fp32(limit) and limit > 0):
            raise InvalidInputError(fail(what, name, limit, "> 0, or None", "correct it"))


def check_supported(tables: Sequence[TableSpec], optimizers: Mapping[str, Optimizer] | None
                    ) -> None:
    """Raise PlanError unless the kernels can run these tables with these optimizers."""
    for t in tables:
        what = f"cannot shard table {t.name!r}"
        if t.dim > MAX_DIM:
            raise PlanError(fail(what, "dim", t.dim, f"<= {MAX_DIM}", "split the table by columns"))
        if optimizers is not None and t.optimizer != optimizers[t.name].name:
            raise PlanError(fail(what, "plan's optimizer", t.optimizer, optimizers[t.name].name,
                                 "plan again for this optimizer"))
