"""Every optimizer of tables by its formula, in plain torch; shares no code with the runtime."""

from __future__ import annotations

import torch

from oper.shmem.optim.optimizers import (
    LAMB,
    SGD,
    STATE_PARTS,
    Adagrad,
    Adam,
    LarsSGD,
    Optimizer,
    PartialRowWiseAdam,
    PartialRowWiseLAMB,
    RowWiseAdagrad,
)

Tensors = dict[str, torch.Tensor]


def first_states(optimizer: Optimizer, weight: torch.Tensor) -> Tensors:
    """The state of a table of these weights before the first step, in their dtype."""
    first = getattr(optimizer, "initial_accumulator_value", 0.0)
    return {part: torch.full(weight.shape[:1] if per_row else weight.shape, first,
                             dtype=weight.dtype)
            for part, per_row in STATE_PARTS[optimizer.name]}


def update_rows(optimizer: Optimizer, w: torch.Tensor, state: Tensors, g: torch.Tensor, lr: float,
                step: int) -> None:
    """One optimizer step of some rows in place: weights `w`, their `state` and gradients `g`."""
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
