"""Makes DistributedDataParallel ignore sharded tables, whether applied before or after sharding.

DDP broadcasts and averages every parameter of its module that the module does not list in
``_ddp_params_and_buffers_to_ignore``. This module may be created after sharding, as a parent of the
sharded one, so the names of the tables in it are known only when DDP is constructed.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterable
from typing import Any

from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from oper.errors import InvalidInputError
from oper.integration.table_tensor import TableParameter


def ignore_tables() -> None:
    """Make every DistributedDataParallel constructed from now on ignore sharded tables."""
    construct = DistributedDataParallel.__init__
    if getattr(construct, "ignores_tables", False):
        return

    @functools.wraps(construct)
    def ignoring(self: DistributedDataParallel, module: nn.Module, *args: Any, **kwargs: Any
                 ) -> None:
        names = _table_names(module)
        if names:
            known = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
                module, sorted({*known, *names}))
        construct(self, module, *args, **kwargs)

    ignoring.ignores_tables = True  # type: ignore[attr-defined]
    DistributedDataParallel.__init__ = ignoring  # type: ignore[method-assign]


def _table_names(module: nn.Module) -> set[str]:
    return {name for name, p in module.named_parameters()
            if isinstance(p, TableParameter)}


def wrappers_of(modules: Iterable[nn.Module]) -> list[DistributedDataParallel]:
    """Return the DistributedDataParallel objects that contain any of `modules`.

    Raises:
        InvalidInputError: one of these objects trains no parameters except those of `modules`.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return []
    ours = list(modules)
    inside = {id(m) for m in ours}
    tables = {id(p) for m in ours for p in m.parameters()}
    found = []
    # A module does not refer to the wrapper around it, so look among all objects.
    for ddp in [x for x in gc.get_objects() if issubclass(type(x), DistributedDataParallel)]:
        if not hasattr(ddp, "module") or not any(id(m) in inside for m in ddp.module.modules()):
            continue
        if not any(p.requires_grad and id(p) not in tables for p in ddp.module.parameters()):
            raise InvalidInputError("cannot shard inside DistributedDataParallel",
                                    "trainable parameters other than tables", 0, ">= 1",
                                    "shard the model without wrapping it: sharded tables need no "
                                    "DistributedDataParallel")
        found.append(ddp)
    return found


def rebuild(ddp: DistributedDataParallel) -> None:
    """Make `ddp`, created around the unsharded module, ignore the sharded tables. Collective."""
    ddp.parameters_to_ignore = {*ddp.parameters_to_ignore, *_table_names(ddp.module)}
    ddp._module_parameters = [p for name, p in ddp.module.named_parameters()
                              if name not in ddp.parameters_to_ignore]
    hooks, ddp._comm_hooks = ddp._comm_hooks, []
    del ddp.reducer  # with its hooks on the old parameters
    parameters, expect_sparse = ddp._build_params_for_reducer()
    ddp._ddp_init_helper(parameters, expect_sparse,
                         ddp._build_debug_param_to_name_mapping(parameters), ddp.static_graph)
    if ddp.static_graph:  # which the new reducer does not know
        ddp._static_graph_delay_allreduce_enqueued = False
        for part in (ddp.reducer, ddp.logger):
            part._set_static_graph()  # type: ignore[union-attr]
    for hook, state in hooks:
        ddp.register_comm_hook(state, hook)
