"""The optimizers of a sharded TorchRec collection, as TorchRec's ``fused_optimizer``."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torchrec.optim.fused import FusedOptimizer

from oper.errors import require
from oper.integration.checkpoint.on_demand import rows_on_demand
from oper.integration.checkpoint.table_state import (
    Entries,
    States,
    all_ranks,
    check_optimizer_entries,
    load_optimizer_entries,
    optimizer_entries,
    refuse_state,
    refuse_states,
)
from oper.shmem.group.agreement import errors_of_all
from oper.shmem.tables import ShardedTables


class TableOptimizer(FusedOptimizer):
    """Gives schedulers and checkpoints access to the tables' optimizers. Updates happen in the
    backward pass, so `step` does nothing. ``state_dict()`` has TorchRec's form, ``{"state":
    {"<table parameter>": {"<table>.momentum1": ...}}}``, which does not depend on the plan."""

    def __init__(self, tables: ShardedTables, names: Mapping[str, str],
                 parameters: Mapping[str, str], weights: Mapping[str, torch.Tensor]) -> None:
        self._tables = tables
        self._names, self._weights = dict(names), dict(weights)
        self._parameters_of = dict(parameters)
        self._others: dict[torch.Tensor, Any] = {}  # see `States`
        own = {full: table for table, full in names.items()}
        for group in tables.param_groups:
            group["params"] = [weights[own[t]] for t in group["tables"]]
        self._shown: weakref.WeakValueDictionary[str, Entries] = weakref.WeakValueDictionary()
        self._loading: dict[str, Entries] | None = None
        super().__init__({parameters[t]: x for t, x in self._weights.items()}, {},
                         tables.param_groups)
        # `tables` holds the groups, they hold the weights, and a weight refers to `tables`: a cycle
        # that would keep shared memory until the next garbage collection.
        weakref.finalize(self, _forget_weights, tables.param_groups).atexit = False

    def __deepcopy__(self, memo: dict[int, Any]) -> TableOptimizer:
        return TableOptimizer(copy.deepcopy(self._tables, memo), self._names, self._parameters_of,
                               {t: copy.deepcopy(x, memo) for t, x in self._weights.items()})

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the tables; a new ``["lr"]`` takes effect in the next backward.
        """
        return self._tables.param_groups

    @param_groups.setter
    def param_groups(self, groups: Iterable[dict[str, Any]]) -> None:
        self._tables.param_groups[:] = groups

    @property
    def state(self) -> Mapping[torch.Tensor, Any]:
        """Map each table parameter to a copy of its optimizer state, made at every access.

        `post_load_state_dict` writes copies that the caller still references back to the tables.
        """
        return States({x: table for table, x in self._weights.items()}, self._show, self._others)

    @state.setter
    def state(self, value: Mapping[Any, Any]) -> None:
        """Ignore the state that the base class assigns at construction; later, refuse others."""
        if "params" in self.__dict__:  # which it assigns next
            refuse_state(", ".join([*self._weights][:8]))

    def _show(self, table: str) -> Entries:
        if self._loading is None:
            entries = Entries(optimizer_entries(self._tables, self._names[table], table))
            self._shown[table] = entries
        elif table in self._loading:
            entries = self._loading[table]
        else:
            with rows_on_demand():  # loading into such entries writes directly to the tables
                entries = Entries(optimizer_entries(self._tables, self._names[table], table))
            self._loading[table] = self._shown[table] = entries
        return entries

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a `state_dict` saved under any plan and world size. Collective. If a rank cannot
        load it, all ranks raise an error and none loads it."""
        self._tables.barrier()  # peers may still be reading
        # Checked on all ranks first, because reading the present state is collective.
        state = state_dict.get("state") if isinstance(state_dict, Mapping) else None
        found = state if isinstance(state, Mapping) else {}
        mine = {t: found[p] for t, p in self._parameters_of.items() if p in found}
        check_optimizer_entries(self._tables, {t: self._names[t] for t in self._weights}, mine)
        loading: dict[str, Entries] = {}  # keeps entries alive until they are written to the tables
        self._loading = loading
        failed: Exception | None = None
        try:
            super().load_state_dict(state_dict)
        except Exception as error:
            failed = error
        finally:
            self._loading = None
        errors = errors_of_all(all_ranks(self._tables), [], [str(failed)] if failed else [])
        if failed is not None:
            raise failed
        refuse_states(errors)
        self.post_load_state_dict()

    def post_load_state_dict(self) -> None:
        if self._loading is not None:  # by the base class; loading may still fail on a rank
            return
        self._tables.barrier()  # peers may still be reading
        shown = [(t, self._shown.pop(t, None)) for t in self._weights]
        found = {t: entries for t, entries in shown if entries is not None}
        names = {t: self._names[t] for t in found}
        check_optimizer_entries(self._tables, names, found)
        for table, entries in found.items():
            load_optimizer_entries(self._tables, names[table], table, entries)
        self._tables.flush_replicas()

    def step(self, closure: Any = None) -> None:
        """Do nothing: the backward pass has already updated the tables.

        Raises:
            InvalidInputError: a program has assigned ``weight.grad``, which updates would not use.
        """
        found = [table for table, x in self._weights.items() if x.grad is not None]
        require("cannot update tables", "subtract it yourself, weight.data -= lr * gradient, or "
                "step a torch optimizer of these weights; then set weight.grad to None",
                ("tables with an assigned weight.grad", found[:8], not found,
                 "none, since gradients of lookups are applied in the backward pass"))

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Drop gradients: accumulated under `oper.no_sync`, or assigned to ``weight.grad``."""
        self._tables.drop_gradients()
        for x in self._weights.values():
            x.grad = None


def _forget_weights(groups: list[dict[str, Any]]) -> None:
    for group in groups:
        group["params"] = []
