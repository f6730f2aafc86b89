"""Optimizers that are applied in the backward pass, exact on duplicates, as FBGEMM defines them."""

from __future__ import annotations

from dataclasses import dataclass

from oper.errors import InvalidInputError, fail


@dataclass(frozen=True, slots=True)
class SGD:
    """``w -= lr * g`` on touched rows (FBGEMM's EXACT_SGD)."""

    lr: float = 0.01

    name = "sgd"
    code = 1
    eps = 0.0

    def __post_init__(self) -> None:
        _check_positive("SGD", "lr", self.lr, zero=True)


@dataclass(frozen=True, slots=True)
class RowWiseAdagrad:
    """``s += mean(g^2); w -= lr / (sqrt(s) + eps) * g`` on touched rows.

    FBGEMM's EXACT_ROWWISE_ADAGRAD, TorchRec's ``RowWiseAdagrad`` without decay.
    """

    lr: float = 0.01
    eps: float = 1e-10

    name = "rowwise_adagrad"
    code = 2

    def __post_init__(self) -> None:
        _check_positive("RowWiseAdagrad", "lr", self.lr, zero=True)
        _check_positive("RowWiseAdagrad", "eps", self.eps, zero=True)


Optimizer = SGD | RowWiseAdagrad


def _check_positive(what: str, name: str, value: float, zero: bool) -> None:
    if not (value >= 0 if zero else value > 0):
        raise InvalidInputError(
            fail(f"invalid {what}", name, value, ">= 0" if zero else "> 0", "correct it"))
