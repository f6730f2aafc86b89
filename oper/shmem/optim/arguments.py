"""The kernels' arguments that describe the tables' features and optimizers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from oper.errors import PlanError
from oper.rows.directory import TableDirectory
from oper.shmem.optim.optimizers import SGD, Adam, LarsSGD, Optimizer, RowWiseAdagrad
from oper.tables import OPTIMIZERS, TableSpec

_RATE = itemgetter("lr")


def rounding_key(seed: int, table: str) -> tuple[int, int]:
    """The key of a table's random numbers for stochastic rounding: two 32-bit numbers.

    An element of a 16-bit row is rounded up with a probability equal to the part of the step
    between its two neighbours that lies below it, so that the expected value is exact (Gupta et
    al., "Deep learning with limited numerical precision", ICML 2015). The draw is Philox4x32-10
    (Salmon et al., SC 2011) of seed, table name, step, logical row and column: it does not depend
    on the plan, the number of ranks or threads, or the instruction set.
    """
    digest = hashlib.blake2b(f"{seed}/{table}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def _column(o: Optimizer, lr: float, step: int) -> list[float]:
    """The leading entries of ``OptimizerColumn`` in csrc/common/description.h: an optimizer's
    constants at learning rate `lr` and step number `step` (from 1)."""
    decay = getattr(o, "weight_decay", 0.0)
    kind = 0  # Decay in csrc/common/optimizer.h: none, of the gradient (L2), of the row
    if decay and isinstance(o, SGD | RowWiseAdagrad):
        kind = 2 if getattr(o, "decoupled", False) else 1
    if isinstance(o, LarsSGD):
        lr *= o.eta
    first, second = getattr(o, "momentum", 0.0), 0.0
    bias = 1.0, 1.0
    if isinstance(o, Adam):
        # The kernel's betas are fp32, and 1 - beta in the moments must match 1 - beta^t here: with
        # 0.999 the rounding of beta alone changes 1 - beta by 1.3e-5 of its value.
        first, second = (float(np.float32(b)) for b in o.betas)
        bias = 1 - first**step, 1 - second**step
    return [OPTIMIZERS[o.name].code, kind, lr, getattr(o, "eps", 0.0), decay, first, second, *bias]


class KernelArguments:
    """The kernels' argument that describes all tables' optimizers at a step.

    Args:
        optimizers: optimizers by table.
        rounding_keys: two numbers by table, see `rounding_key`.
        is_rounded: whether rows, or gradients in messages, are rounded with the number of the step.
            If not, that number is not updated after creation: updating it would run torch code that
            evicts the kernels' data from the caches.
    """

    def __init__(self, optimizers: Mapping[str, Optimizer],
                 rounding_keys: Mapping[str, tuple[int, int]], is_rounded: bool) -> None:
        self._optimizers = optimizers
        self._rounding_keys = rounding_keys
        self._is_rounded = is_rounded
        self._by_step = any(OPTIMIZERS[o.name].counts_steps for o in optimizers.values())
        self._known: tuple[Any, torch.Tensor] | None = None

    def copied(self) -> KernelArguments:
        """A copy for other tables, which may be at another step."""
        return KernelArguments(self._optimizers, self._rounding_keys, self._is_rounded)

    def at(self, step: int, skipped: Mapping[str, int], frozen: frozenset[str],
           groups: Sequence[Mapping[str, Any]], tables: Sequence[str]) -> torch.Tensor:
        """float64 [T, 13] (``OptimizerColumn`` in csrc/common/description.h); valid until the next
        call. Rebuilt only if more than the number of the step has changed.

        Args:
            step: number of the step, from 1.
            skipped: by table, number of steps that its optimizer has not taken part in.
            frozen: tables that are not updated.
            groups: ``{"lr": ..., "tables": [names]}``.
            tables: table of each row of the result; names may repeat.
        """
        rates = [*map(float, map(_RATE, groups))]
        key = (rates, tables, frozen, (step, *skipped.values()) if self._by_step else 0)
        if self._known is None or self._known[0] != key:
            rate = {name: r for r, g in zip(rates, groups, strict=True) for name in g["tables"]}
            own = {name: [*_column(o, rate[name], step - skipped[name]), o.max_row_norm or 0.0,
                          *self._rounding_keys[name], step]
                   for name, o in self._optimizers.items()}
            own |= {name: [0.0] * len(own[name]) for name in frozen}  # Optimizer::kNone
            self._known = key, torch.tensor([own[name] for name in tables], dtype=torch.float64)
        found = self._known[1]
        if self._is_rounded:
            found[:, -1] = step
        return found


def feature_rows(features: Sequence[tuple[str, str]], specs: Mapping[str, TableSpec],
                 directories: Sequence[TableDirectory], pieces: Mapping[str, Sequence[int]]
                 ) -> tuple[torch.Tensor, int]:
    """Places of the features' embeddings in the output.

    Args:
        features: (feature name, table name) in output order.
        specs: the tables by name.
        directories: one per column piece of each table.
        pieces: the directories of each table, in column order.

    Returns:
        int64 [F, 4]: directory, output column, feature and first column of the piece, of every
        column piece of every feature; and the number of output columns.

    Raises:
        PlanError: a feature belongs to a table that the plan lacks.
    """
    column, rows = 0, []
    for number, (name, table) in enumerate(features):
        if table not in specs:
            raise PlanError("a feature names a table that the plan lacks", "feature, table",
                            (name, table), f"one of {list(specs)[:8]}", "plan for this model")
        for k in pieces[table]:
            start = directories[k].column
            rows.append([k, column + start, number, start])
        column += specs[table].dim
    return torch.tensor(rows, dtype=torch.int64), column
