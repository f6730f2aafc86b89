"""Arguments of the kernels that describe features and optimizers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from oper.errors import InvalidInputError, PlanError
from oper.rows.directory import TableDirectory
from oper.shmem.optim.optimizers import (
    SGD,
    Adam,
    LarsSGD,
    Optimizer,
    RowWiseAdagrad,
    is_fp32,
)
from oper.tables import OPTIMIZERS, TableSpec

_RATE, _TABLES = itemgetter("lr"), itemgetter("tables")
# Errors of float(group["lr"]); RuntimeError: a tensor of several numbers.
_NO_NUMBER = (TypeError, ValueError, ArithmeticError, RuntimeError, LookupError)
# Settings that torch's optimizers read from parameter groups, and those of OPER's optimizers.
_SETTINGS = frozenset({
    "alpha", "amsgrad", "beta1", "beta2", "betas", "dampening", "decoupled", "eps", "eta",
    "initial_accumulator_value", "learning_rate", "lr_decay", "max_gradient", "max_row_norm",
    "maximize", "momentum", "nesterov", "weight_decay"})


def rounding_key(seed: int, table: str) -> tuple[int, int]:
    """Return the key of a table's random numbers for stochastic rounding: two 32-bit numbers.

    A value x between neighbouring 16-bit values a < b is rounded to b with probability
    ``(x - a) / (b - a)``, so the expected value is x (Gupta et al., "Deep learning with limited
    numerical precision", ICML 2015). Random numbers are Philox4x32-10 (Salmon et al., SC 2011) of
    seed, table name, step, row id and column: they do not depend on the plan, the number of ranks
    or threads, or the instruction set.
    """
    digest = hashlib.blake2b(f"{seed}/{table}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def _column(o: Optimizer, lr: float, step: int) -> list[float]:
    """Return the first entries of ``OptimizerColumn`` in csrc/common/description.h: an optimizer's
    constants at learning rate `lr` in step number `step` (from 1)."""
    decay = getattr(o, "weight_decay", 0.0)
    kind = 0  # Decay in csrc/common/optimizer.h: none, of the gradient (L2), of the row
    if decay and isinstance(o, SGD | RowWiseAdagrad):
        kind = 2 if getattr(o, "decoupled", False) else 1
    if isinstance(o, LarsSGD):
        lr *= o.eta
    first, second = getattr(o, "momentum", 0.0), 0.0
    bias = 1.0, 1.0
    if isinstance(o, Adam):
        # Kernels use fp32 betas, so 1 - beta^t must be computed from the rounded values: rounding
        # 0.999 to fp32 changes 1 - beta by a relative 1.3e-5.
        first, second = (float(np.float32(b)) for b in o.betas)
        bias = 1 - first**step, 1 - second**step
    return [OPTIMIZERS[o.name].code, kind, lr, getattr(o, "eps", 0.0), decay, first, second, *bias]


def rate_of(group: Mapping[str, Any]) -> float:
    """Return the learning rate of a parameter group; NaN if it is missing or not a number."""
    try:
        return float(group["lr"])
    except _NO_NUMBER:
        return math.nan


def _names(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the names of a group's tables, or another value in their place."""
    names = group.get("tables")
    return tuple(names) if isinstance(names, list | tuple) else (names,)


def _check_rates(rates: Sequence[float], groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise InvalidInputError for the first learning rate that optimizers do not accept."""
    for rate, group in zip(rates, groups, strict=True):
        if not (is_fp32(rate) and rate >= 0):
            raise InvalidInputError("no rank updates the tables", f"lr of tables "
                                    f"{list(_names(group)[:8])}", group.get("lr"),
                                    "a number >= 0 that fp32 holds",
                                    "correct param_groups or the schedule that sets them")


def _check_settings(groups: Sequence[Mapping[str, Any]], optimizers: Mapping[str, Optimizer]
                    ) -> None:
    """Raise InvalidInputError for a setting in a group, other than lr, that is not the setting of
    the optimizers of its tables."""
    for group in groups:
        for name in sorted(_SETTINGS.intersection(group)):
            for table in _names(group):
                own, given = getattr(optimizers.get(table), name, None), group[name]
                if isinstance(given, list):
                    given = tuple(given)  # betas
                if given != own and (given or own):  # settings that `own` lacks may be 0 or False
                    raise InvalidInputError(
                        "no rank updates the tables", f"{name} of table {table!r}", given,
                        f"{own}, since only lr can be changed after sharding",
                        f"remove {name!r} from param_groups; to change it, shard the model again")


class KernelArguments:
    """Builds and caches the kernels' argument that describes all optimizers at a step.

    Args:
        optimizers: optimizers by table name.
        rounding_keys: `rounding_key` by table name.
        is_rounded: whether stochastic rounding of rows, or of gradients in messages, needs the step
            number. If not, it is not updated in every step, since this would run torch code that
            evicts the kernels' data from the caches.
    """

    def __init__(self, optimizers: Mapping[str, Optimizer],
                 rounding_keys: Mapping[str, tuple[int, int]], is_rounded: bool) -> None:
        self._optimizers = optimizers
        self._rounding_keys = rounding_keys
        self._is_rounded = is_rounded
        self._by_step = any(OPTIMIZERS[o.name].counts_steps for o in optimizers.values())
        self._known: tuple[Any, torch.Tensor] | None = None

    def copied(self, rounding_keys: Mapping[str, tuple[int, int]] | None = None
               ) -> KernelArguments:
        """Return a copy with its own cache, for tables at another step or, if given, with other
        `rounding_keys`."""
        return KernelArguments(self._optimizers, rounding_keys or self._rounding_keys,
                               self._is_rounded)

    def at(self, step: int, skipped: Mapping[str, int], frozen: frozenset[str],
           groups: Sequence[Mapping[str, Any]], tables: Sequence[str]) -> torch.Tensor:
        """Return the argument, float64 [T, 13] (``OptimizerColumn`` in csrc/common/description.h).

        The tensor is reused, so it is valid until the next call.

        Args:
            step: number of the step, from 1.
            skipped: by table name, number of earlier steps in which the table was frozen.
            frozen: names of tables that are not updated.
            groups: parameter groups ``{"lr": ..., "tables": (names)}``; each table is in one group.
            tables: table name of each row of the result; names may repeat.

        Raises:
            InvalidInputError: a learning rate is not a finite number >= 0, a table is not in one
                group, or a group has another setting than its tables' optimizer.
        """
        if not all(map(_SETTINGS.isdisjoint, groups)):
            _check_settings(groups, self._optimizers)
        try:  # without calls, which cost time in every step
            rates = [*map(float, map(_RATE, groups))]
        except _NO_NUMBER:
            rates = [*map(rate_of, groups)]
        try:
            named = [*map(tuple, map(_TABLES, groups))]
        except (TypeError, LookupError):
            named = [*map(_names, groups)]
        key = (rates, named, tables, frozen, (step, *skipped.values()) if self._by_step else 0)
        if self._known is None or self._known[0] != key:
            _check_rates(rates, groups)
            if sorted(chain(*named), key=str) != sorted(self._optimizers):
                raise InvalidInputError("no rank updates the tables", "tables of param_groups",
                                        named, f"{sorted(self._optimizers)[:8]}, each in one group",
                                        "move tables between groups, but leave none out")
            rate = {name: r for r, names in zip(rates, named, strict=True) for name in names}
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
    """Return the output columns of the features' embeddings.

    Args:
        features: (feature name, table name) in output order.
        specs: the tables by name.
        directories: one per column piece of each table.
        pieces: indices of the directories of each table, in column order.

    Returns:
        int64 [n, 4], one row per feature and column piece of its table: index of the directory,
        first output column, index of the feature, first column of the piece; and the number of
        output columns.

    Raises:
        PlanError: a feature belongs to a table that the plan lacks.
    """
    column, rows = 0, []
    for number, (name, table) in enumerate(features):
        if table not in specs:
            raise PlanError("a feature names a table that the plan lacks", "feature, table",
                            (name, table), f"one of the tables {list(specs)[:8]}",
                            "make a plan for this model")
        for k in pieces[table]:
            start = directories[k].column
            rows.append([k, column + start, number, start])
        column += specs[table].dim
    return torch.tensor(rows, dtype=torch.int64), column
