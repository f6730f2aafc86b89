"""Faults planted in OPER, each of which the fuzzer must find within its quick seeds.

Most of them remove code that makes a sharded module behave like the unsharded one.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from oper.integration import ddp, table_module, table_tensor, torch_modules
from oper.shmem import autograd, tables as runtime

_TABLES = runtime.ShardedTables
Fault = Callable[[], contextlib.AbstractContextManager[Any]]
# By name: the actions that should meet it, and the patch.
FAULTS: dict[str, tuple[tuple[str, ...], Fault]] = {}


@contextlib.contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Plant a fault of `FAULTS` inside the block; None = no fault."""
    if name is None:
        yield
        return
    with FAULTS[name][1]():
        yield


def fault(*actions: str) -> Any:
    """Register a function that returns a patch in the table, under its name with spaces."""
    def enter(make: Fault) -> Fault:
        FAULTS[make.__name__.replace("_", " ")] = actions, make
        return make

    return enter


def _around(owner: Any, name: str, changed: Callable[..., Any]) -> Any:
    """Replace a function by ``changed(original, *args)``."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return changed(original, *args, **kwargs)

    return mock.patch.object(owner, name, call)


# ---- tables as parameters ------------------------------------------------------------------------


@fault("freeze", "freeze_between")
def frozen_tables_are_trained() -> Any:
    """The tables ignore ``requires_grad_(False)``."""
    return mock.patch.object(_TABLES, "frozen", property(
        lambda self: frozenset(), lambda self, value: None), create=True)


@fault("write_weight", "initialise")
def writes_are_lost() -> Any:
    """In-place writes to a weight reach a copy only."""
    return mock.patch.object(table_tensor._Copy, "write_back", lambda self: None)


@fault("convert")
def conversions_are_ignored() -> Any:
    """``half()`` and similar methods do nothing."""
    return mock.patch.object(table_module.TableModule, "_apply",
                             lambda self, fn, recurse=True: self)


@fault("deepcopy", "average")
def copies_share_their_rows() -> Any:
    """``copy.deepcopy`` gives the same tables."""
    return mock.patch.object(_TABLES, "__deepcopy__", lambda self, memo: self)


# ---- batches -------------------------------------------------------------------------------------


@fault("change_inputs")
def changed_ids_are_trained() -> Any:
    """The backward pass reads the tensors' current contents."""
    return mock.patch.object(autograd, "_refuse_changes", lambda watched, versions: None)


@fault("train")
def padding_is_trained() -> Any:
    """``padding_idx`` is ignored."""
    return mock.patch.object(torch_modules.ShardedEmbeddingBag, "_drop_padding",
                             lambda self, ids, lengths, weights: (ids, lengths, weights))


@fault("accumulate")
def passes_under_no_sync_update_at_once() -> Any:
    """``oper.no_sync`` does nothing."""
    return mock.patch.object(_TABLES, "no_sync", lambda self: contextlib.nullcontext())


@fault("weight_gradients")
def gradients_of_weights_are_of_other_rows() -> Any:
    """Gradients of per-sample weights are too small."""
    return _around(_TABLES, "weight_gradient", lambda original, *args: original(*args) * 0.5)


# ---- modules, optimizers, state ------------------------------------------------------------------


@fault("train", "wrap")
def wrappers_wait_for_the_tables() -> Any:
    """DistributedDataParallel keeps using the parameters that sharding has replaced."""
    return mock.patch.object(ddp, "rebuild", lambda wrapper: None)


@fault("set_lr", "schedule")
def learning_rates_stay() -> Any:
    """The parameter groups to which schedules write belong to no optimizer."""
    def changed(original: Any, self: Any, passed: Any) -> Any:
        groups = [dict(g, lr=self.optimizers[g["tables"][0]].lr) if g["tables"] else g
                  for g in self.param_groups]
        with mock.patch.object(self, "param_groups", groups):
            return original(self, passed)

    return _around(_TABLES, "step", changed)
