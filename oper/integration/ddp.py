"""Makes DistributedDataParallel ignore sharded tables, whether applied before or after sharding.

DDP broadcasts and averages every parameter that the module it is given does not name in
``_ddp_params_and_buffers_to_ignore``. That module may be a parent that is built after sharding, so
its names are known only when DDP is constructed.
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
    """The DistributedDataParallel objects that contain any of the modules.

    Raises:
        InvalidInputError: one of them would have nothing left to average.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return []
    ours = list(modules)
    inside = {id(m) for m in ours}
    tables = {id(p) for m in ours for p in m.parameters()}
    found = []
    # A model may be given without the wrapper around it, of which it knows nothing.
    for ddp in [x for x in gc.get_objects() if issubclass(type(x), DistributedDataParallel)]:
        if not hasattr(ddp, "module") or not any(id(m) in inside for m in ddp.module.modules()):
            continue
        if not any(p.requires_grad and id(p) not in tables for p in ddp.module.parameters()):
            raise InvalidInputError("cannot shard inside of DistributedDataParallel",
                                    "parameters other than tables", 0,
                                    "at least one for DistributedDataParallel to average",
                                    "shard the module itself: sharded tables need no wrapper")
        found.append(ddp)
    return found


def rebuild(ddp: DistributedDataParallel) -> None:
    """Make `ddp`, built around the unsharded module, ignore the sharded tables. Collective."""
    ddp.parameters_to_ignore = {*ddp.parameters_to_ignore, *_table_names(ddp.module)}
    ddp._module_parameters = [p for name, p in ddp.module.named_parameters()
                              if name not in ddp.parameters_to_ignore]
    hooks, ddp._comm_hooks = ddp._comm_hooks, []
    del ddp.reducer  # with its hooks on the old parameters
    parameters, expect_sparse = ddp._build_params_for_reducer()
    ddp._ddp_init_helper(parameters, expect_sparse,
                         ddp._build_debug_param_to_name_mapping(parameters), ddp.static_graph)
    for hook, state in hooks:
        ddp.register_comm_hook(state, hook)
