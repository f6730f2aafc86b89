"""FBGEMM's gradient clipping, which clamps elements of the gradient of a lookup's output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from oper.shmem.batch import Lookup
from oper.shmem.optim.optimizers import Optimizer
from oper.tables import TableSpec


class GradientClamp:
    """Clamps the gradient of a lookup's output with the limit of each table.

    Args:
        features: (feature name, table name) in output order.
        specs: the tables by name.
        optimizers: optimizers by table name; ``max_gradient`` is the limit, None = no limit.
        gradient_scale: factor by which gradients are multiplied after clamping. Limits are for the
            scaled gradient, so they are divided by it here.
    """

    def __init__(self, features: Sequence[tuple[str, str]], specs: Mapping[str, TableSpec],
                 optimizers: Mapping[str, Optimizer], gradient_scale: float) -> None:
        limits = []
        for _, table in features:
            o = optimizers.get(table)
            limit = None if o is None else o.max_gradient
            limits.append(float("inf") if limit is None else limit / gradient_scale)
        self._limits = torch.tensor(limits, dtype=torch.float32)  # [F]
        self.is_active = bool(torch.isfinite(self._limits).any())
        self._of_columns = torch.cat([  # [columns]
            x.expand(specs[table].dim) for x, (_, table) in zip(self._limits, features, strict=True)
        ]) if self.is_active else self._limits
        # Clamping with one limit for all columns, the usual case, is faster.
        self._common = limits[0] if self.is_active and len(set(limits)) == 1 else None

    def apply(self, grad: torch.Tensor, batch: Lookup, offsets: torch.Tensor) -> torch.Tensor:
        """Return the clamped gradient; `grad` itself if no table has a limit.

        Args:
            grad: float32 [B, columns] (pooled) or [N, D] (unpooled).
            batch: the batch of the forward pass.
            offsets: int64 [num_keys * B + 1], bounds of its bags.
        """
        if not self.is_active or not grad.shape[0]:
            return grad
        if self._common is not None:
            return grad.clamp(-self._common, self._common)
        limits = self._of_columns.to(grad.device)
        if not batch.pooled:
            rows = offsets[::batch.batch_size].diff()[batch.key_of]
            limits = self._limits.to(grad.device).repeat_interleave(rows)[:, None]
        return torch.minimum(torch.maximum(grad, -limits), limits)
