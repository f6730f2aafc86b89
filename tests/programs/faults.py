"""Faults planted in OPER, each of which the fuzzer has to find within its quick seeds.

Most remove code that makes a sharded module behave like the unsharded one.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn

from oper.integration import (
    ddp,
    table_module,
    table_tensor,
    targets,
    torch_modules,
    torchrec_modules as edge,
)
from oper.shmem import autograd, tables as runtime

_TABLES = runtime.ShardedTables
Fault = Callable[[], contextlib.AbstractContextManager[Any]]
# By name: the actions that should meet it, and the patch.
FAULTS: dict[str, tuple[tuple[str, ...], Fault]] = {}


@contextlib.contextmanager
def planted(name: str | None) -> Iterator[None]:
    """A fault of `FAULTS` inside the block; nothing for None."""
    if name is None:
        yield
        return
    with FAULTS[name][1]():
        yield


def fault(*actions: str) -> Any:
    """Enter a function that returns a patch into the table, under its name in words."""
    def enter(make: Fault) -> Fault:
        FAULTS[make.__name__.replace("_", " ")] = actions, make
        return make

    return enter


def _around(owner: Any, name: str, changed: Callable[..., Any]) -> Any:
    """Patch a function by ``changed(original, *args)``."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return changed(original, *args, **kwargs)

    return mock.patch.object(owner, name, call)


# ---- tables as parameters ------------------------------------------------------------------------


@fault("freeze", "freeze_between")
def frozen_tables_are_trained() -> Any:
    """``requires_grad_(False)`` is forgotten by the tables."""
    return mock.patch.object(_TABLES, "frozen", property(
        lambda self: frozenset(), lambda self, value: None), create=True)


@fault("freeze", "freeze_between")
def steps_of_frozen_tables_count() -> Any:
    """Adam's bias correction counts steps while a table is frozen."""
    return mock.patch.object(_TABLES, "_skipped", property(
        lambda self: dict.fromkeys(self.specs, 0), lambda self, value: None), create=True)


@fault("freeze_between")
def freezing_counts_in_the_forward_pass_only() -> Any:
    """A table that is frozen between the passes is trained."""
    def changed(original: Any, self: Any, *args: Any) -> Any:
        before, self.frozen = self.frozen, frozenset()
        try:
            return original(self, *args)
        finally:
            self.frozen = before

    return _around(_TABLES, "apply_all", changed)


@fault("write_weight", "initialise")
def writes_are_lost() -> Any:
    """In-place writes to a weight reach a copy only."""
    return mock.patch.object(table_tensor._Copy, "write_back", lambda self: None)


@fault("write_weight", "initialise")
def writes_do_not_reach_replicas() -> Any:
    """Rows are written, and their copies are not."""
    def changed(original: Any, self: Any) -> Any:
        with mock.patch.object(_TABLES, "publish", lambda self: None):
            return original(self)

    return _around(table_tensor._Copy, "write_back", changed)


@fault("write_weight")
def writes_to_views_go_to_the_first_rows() -> Any:
    """A slice ignores its start."""
    def changed(original: Any, self: Any) -> Any:
        begin, end = original(self)
        return (0, end - begin) if end - begin < self._rows.shape[0] else (begin, end)

    return _around(table_tensor.TableTensor, "_window", changed)


@fault("assign_weight", "functional_call")
def assigned_weights_are_forgotten() -> Any:
    """Assignment and deletion are accepted and do nothing."""
    return mock.patch.object(table_module, "_refuse_replacement", lambda name, value: None)


@fault("regulariser")
def gradients_of_weights_are_forgotten() -> Any:
    """A gradient that reaches a weight other than through a lookup does nothing."""
    return mock.patch.object(table_tensor, "_refuse_gradient", lambda parameter: None)


@fault("convert")
def conversions_are_ignored() -> Any:
    """``half()`` and similar methods do nothing."""
    return mock.patch.object(table_module.TableModule, "_apply",
                             lambda self, fn, recurse=True: self)


@fault("deepcopy", "average")
def copies_share_their_rows() -> Any:
    """``copy.deepcopy`` gives the same tables."""
    return mock.patch.object(_TABLES, "__deepcopy__", lambda self, memo: self)


@fault("deepcopy")
def copies_lose_their_rows() -> Any:
    """``copy.deepcopy`` gives empty tables."""
    return mock.patch.object(_TABLES, "__deepcopy__", lambda self, memo: self.like(self.plan))


# ---- batches -------------------------------------------------------------------------------------


@fault("change_inputs")
def changed_ids_are_trained() -> Any:
    """The backward pass reads the tensors' current contents."""
    return mock.patch.object(autograd, "_refuse_changes", lambda watched, versions: None)


@fault("train")
def padding_is_trained() -> Any:
    """``padding_idx`` is forgotten."""
    return mock.patch.object(torch_modules.ShardedEmbeddingBag, "_drop_padding",
                             lambda self, ids, lengths, weights: (ids, lengths, weights))


@fault("accumulate")
def passes_under_no_sync_update_at_once() -> Any:
    """``oper.no_sync`` does nothing."""
    return mock.patch.object(_TABLES, "no_sync", lambda self: contextlib.nullcontext())


@fault("accumulate")
def zero_grad_forgets_nothing() -> Any:
    """Passes under ``no_sync`` cannot be undone."""
    return mock.patch.object(_TABLES, "drop_gradients", lambda self: None)


@fault("weight_gradients")
def gradients_of_weights_are_of_other_rows() -> Any:
    """Gradients of per-sample weights are too small."""
    return _around(_TABLES, "weight_gradient", lambda original, *args: original(*args) * 0.5)


@fault("two_lookups")
def every_lookup_updates() -> Any:
    """Two lookups of one backward pass make two updates."""
    def changed(original: Any, self: Any, parts: list[Any]) -> None:
        for part in parts:
            original(self, [part])

    return _around(_TABLES, "apply_all", changed)


@fault("autograd_grad")
def gradients_asked_for_train() -> Any:
    """``torch.autograd.grad`` updates what it passes."""
    def changed(original: Any, ctx: Any, *grads: Any) -> Any:
        found = original(ctx, *grads)
        tables = ctx.call[0]
        _, parts = tables.collected.parts.pop(torch._C._current_graph_task_id(), (0, []))
        if parts:
            tables.apply_all(parts)
        return found

    patches = contextlib.ExitStack()
    patches.enter_context(mock.patch.object(torch._C, "_will_engine_execute_node",
                                            lambda node: True))
    patches.enter_context(_around(autograd._Lookup, "backward", changed))
    return patches


# ---- modules, optimizers, state ------------------------------------------------------------------


@fault("shard")
def subclasses_are_taken_apart() -> Any:
    """The bags inside a subclass of a collection are sharded one by one."""
    def changed(original: Any, module: Any) -> list[Any]:
        found: list[Any] = []
        for target in original(module):
            if target.is_collection and type(target.module) is not target.kind:
                dot = f"{target.path}." if target.path else ""
                found += [targets.Target(f"{dot}{path}", child, False, kind=nn.EmbeddingBag)
                          for path, child in target.module.named_modules()
                          if isinstance(child, nn.EmbeddingBag)]
            else:
                found.append(target)
        return found

    return _around(targets, "all_targets", changed)


@fault("train", "wrap")
def wrappers_wait_for_the_tables() -> Any:
    """DistributedDataParallel keeps using the parameters that sharding has replaced."""
    return mock.patch.object(ddp, "rebuild", lambda wrapper: None)


@fault("set_lr", "schedule")
def learning_rates_stay() -> Any:
    """The groups that schedules write to belong to no optimizer."""
    def changed(original: Any, self: Any, passed: Any) -> Any:
        groups = [dict(g, lr=self.optimizers[g["tables"][0]].lr) if g["tables"] else g
                  for g in self.param_groups]
        with mock.patch.object(self, "param_groups", groups):
            return original(self, passed)

    return _around(_TABLES, "step", changed)


@fault("optimizer_state", "move_to_fresh")
def optimizer_states_are_not_loaded() -> Any:
    """Loaded optimizer states are ignored."""
    patches = contextlib.ExitStack()
    for module in (torch_modules, edge):
        patches.enter_context(mock.patch.object(module, "load_optimizer_entries",
                                                lambda *args: None))
    return patches


@fault("load_state_dict")
def unexpected_keys_are_taken() -> Any:
    """``load_state_dict`` reports no unexpected key of a table's module."""
    def changed(original: Any, *args: Any) -> Any:
        *rest, _, errors = args
        return original(*rest, [], errors)

    return _around(table_module, "load_tables", changed)


@fault("load_state_dict", "save_and_load")
def loaded_rows_do_not_reach_replicas() -> Any:
    """``load_state_dict`` forgets the copies."""
    def changed(original: Any, self: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(_TABLES, "publish", lambda self: None):
            return original(self, state, *args, **kwargs)

    return _around(torch.nn.Module, "load_state_dict", changed)
