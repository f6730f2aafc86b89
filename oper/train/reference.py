"""The unsharded reference: tables as plain torch modules, updated by plain PyTorch.

Shares no code with the sharded runtime, so that it is an independent reference.
"""

from __future__ import annotations

import torch
from torch import nn


class SparseTableOptimizer:
    """Row-wise Adagrad or SGD on the touched rows of unsharded tables.

    Row-wise Adagrad has one accumulator s per row: ``s += mean(g^2); w -= lr * g / (sqrt(s) +
    eps)``, where g is the row's gradient, summed over its occurrences in the batch.

    Args:
        model: its ``nn.EmbeddingBag`` and ``nn.Embedding`` modules are the tables; they are
            switched to sparse gradients.
        kind: ``"rowwise_adagrad"`` or ``"sgd"``.
        lr: learning rate.
        eps: epsilon of row-wise Adagrad.
    """

    def __init__(self, model: nn.Module, kind: str, lr: float, eps: float) -> None:
        self.lr, self.eps = lr, eps
        self.weights: list[torch.Tensor] = []
        for module in model.modules():
            if isinstance(module, nn.EmbeddingBag | nn.Embedding):
                module.sparse = True
                self.weights.append(module.weight)
        adagrad = kind == "rowwise_adagrad"
        self.sums = [w.new_zeros(w.shape[0]) for w in self.weights] if adagrad else None

    def zero_grad(self) -> None:
        for weight in self.weights:
            weight.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Apply the gradients of the last backward pass."""
        for k, weight in enumerate(self.weights):
            if weight.grad is None:
                continue
            grad = weight.grad.coalesce()
            rows, values = grad.indices()[0], grad.values()
            if self.sums is not None:
                total = self.sums[k][rows] + values.square().mean(dim=1)
                self.sums[k][rows] = total
                values = values / (total.sqrt() + self.eps).unsqueeze(1)
            weight.index_add_(0, rows, values, alpha=-self.lr)

