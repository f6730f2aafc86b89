"""All optimizers of tables, as formulas in plain torch, which share no code with the runtime."""

from __future__ import annotations

import torch

from oper.shmem.optim.optimizers import (
    LAMB,
    SGD,
    STATE_PARTS,
    Adagrad,
    Adam,
    AdamW,
    LarsSGD,
    Optimizer,
    PartialRowWiseAdam,
    PartialRowWiseLAMB,
    RowWiseAdagrad,
)

Tensors = dict[str, torch.Tensor]

EVERY: dict[str, Optimizer] = {
    "sgd": SGD(lr=0.3),
    "rowwise_adagrad": RowWiseAdagrad(lr=0.05, eps=1e-8),
    "rowwise_adagrad_l2": RowWiseAdagrad(lr=0.05, eps=1e-8, weight_decay=0.2),
    "rowwise_adagrad_decoupled": RowWiseAdagrad(
        lr=0.05, eps=1e-8, weight_decay=0.5, decoupled=True),
    "adagrad": Adagrad(lr=0.05, eps=1e-3),
    "adam": Adam(lr=0.02),
    "adam_decay": Adam(lr=0.02, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.3),
    "partial_rowwise_adam": PartialRowWiseAdam(lr=0.02),
    "partial_rowwise_adam_decay": PartialRowWiseAdam(
        lr=0.02, betas=(0.7, 0.95), eps=1e-6, weight_decay=0.3),
    "adamw": AdamW(lr=0.02, weight_decay=0.1),
    "sgd_decay": SGD(lr=0.3, weight_decay=0.2),
    "momentum_sgd": SGD(lr=0.1, momentum=0.8),
    "momentum_sgd_decay": SGD(lr=0.1, momentum=0.7, weight_decay=0.2),
    "rowwise_adagrad_begun": RowWiseAdagrad(lr=0.05, initial_accumulator_value=0.25),
    "adagrad_begun": Adagrad(lr=0.05, initial_accumulator_value=0.25),
    "sgd_clipped": SGD(lr=0.3, max_gradient=0.02, max_row_norm=0.05),
    "rowwise_adagrad_clipped": RowWiseAdagrad(
        lr=0.05, eps=1e-8, weight_decay=0.2, max_gradient=0.02, max_row_norm=0.05),
    # Clipped gradients may cancel out. A large eps keeps Adam from making a full step of the
    # rounding error that remains.
    "adam_clipped": Adam(lr=0.02, eps=1e-3, max_gradient=0.02, max_row_norm=0.05),
    "lars_sgd": LarsSGD(lr=0.2, eta=0.1),
    "lars_sgd_decay": LarsSGD(lr=0.2, momentum=0.6, weight_decay=0.5, eta=0.2),
    "lamb": LAMB(lr=0.02),
    "lamb_decay": LAMB(lr=0.02, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.3),
    "partial_rowwise_lamb": PartialRowWiseLAMB(lr=0.02),
    "partial_rowwise_lamb_decay": PartialRowWiseLAMB(
        lr=0.02, betas=(0.7, 0.95), eps=1e-6, weight_decay=0.3),
}


def first_states(optimizer: Optimizer, weight: torch.Tensor) -> Tensors:
    """Return the state of a table with these weights before the first step, in their dtype."""
    first = getattr(optimizer, "initial_accumulator_value", 0.0)
    return {part: torch.full(weight.shape[:1] if per_row else weight.shape, first,
                             dtype=weight.dtype)
            for part, per_row in STATE_PARTS[optimizer.name]}


def update_rows(optimizer: Optimizer, w: torch.Tensor, state: Tensors, g: torch.Tensor, lr: float,
                step: int) -> None:
    """Make one optimizer step of some rows in place: weights `w`, their `state` and gradients `g`.
    """
    row_mean = (g * g).mean(1)
    match optimizer:
        case SGD(momentum=momentum, weight_decay=decay):
            g = g + decay * w
            if momentum:
                state["momentum1"].mul_(momentum).add_(g)
                g = state["momentum1"]
            w -= lr * g
        case LarsSGD(momentum=momentum, weight_decay=decay, eta=eta):
            norm = w.norm(dim=1)
            below = g.norm(dim=1) + decay * norm
            rate = torch.where(below > 0, lr * eta * norm / below, 0)[:, None]
            state["momentum1"].mul_(momentum).add_(rate * (g + decay * w))
            w -= state["momentum1"]
        case RowWiseAdagrad(eps=eps, weight_decay=decay, decoupled=decoupled):
            if decay and not decoupled:
                g = g + decay * w
                row_mean = (g * g).mean(1)
            state["momentum1"] += row_mean
            if decay and decoupled:
                w *= 1 - lr * decay
            w -= lr * g / (state["momentum1"].sqrt() + eps)[:, None]
        case Adagrad(eps=eps):
            state["momentum1"] += g * g
            w -= lr * g / (state["momentum1"].sqrt() + eps)
        case Adam(betas=betas, eps=eps, weight_decay=decay):  # and all that derive from it
            b1, b2 = torch.tensor(betas).tolist()  # fp32 numbers, by definition
            by_row = isinstance(optimizer, PartialRowWiseAdam | PartialRowWiseLAMB)
            m, s = state["momentum1"], state["momentum2"]
            m.copy_(b1 * m + (1 - b1) * g)
            s.copy_(b2 * s + (1 - b2) * (row_mean if by_row else g * g))
            root = (s / (1 - b2**step)).sqrt() + eps
            r = m / (1 - b1**step) / (root[:, None] if by_row else root) + decay * w
            if isinstance(optimizer, LAMB):
                ratio = w.norm(dim=1) / r.norm(dim=1)
                r = r * torch.where(r.norm(dim=1) > 0, ratio, 0)[:, None]
            w -= lr * r
