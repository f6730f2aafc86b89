"""Modules whose ``weight`` is a sharded table."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, NoReturn

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from oper.errors import InvalidInputError, OperError
from oper.integration.checkpoint.key_state import key_entries, key_names, load_key_entries
from oper.integration.checkpoint.table_state import (
    load_tables,
    table_entry,
    warn_of_conversions,
    watched,
)
from oper.integration.table_tensor import TableParameter
from oper.shmem.tables import ShardedTables


class FixedEntries(dict[str, Any]):
    """A dict for a module's ``_parameters`` or ``_modules``, of which no entry can be replaced or
    removed: attempts raise InvalidInputError."""

    def __setitem__(self, name: str, value: Any) -> None:
        # torch.export temporarily replaces parameters by fake tensors.
        fake = FakeTensor | FunctionalTensor
        if name in self and self[name] is not value and not isinstance(
                value, fake) and not isinstance(self[name], fake):
            _refuse_replacement(name, type(value).__name__)
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        _refuse_replacement(name, "nothing")

    def pop(self, name: str, *default: Any) -> Any:
        if name in self:
            del self[name]
        return super().pop(name, *default)

    def clear(self) -> None:
        for name in self:
            del self[name]


class FixedParameters(FixedEntries):
    """The parameter ``weight``; others are refused, since ``state_dict`` would not save them."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name != "weight":  # which copy.deepcopy adds
            _refuse_replacement(name, type(value).__name__)
        super().__setitem__(name, value)


def _refuse_replacement(name: str, value: str) -> NoReturn:
    raise InvalidInputError(
        "cannot replace a parameter or child of a sharded module", name, value,
        "no replacement or other parameter, since the plan has placed the table's rows",
        "copy values into weight (weight.data.copy_(values), load_state_dict), or leave this "
        "module out of modules=")


class TableModule(nn.Module):
    """A module whose only parameter, ``weight``, is a sharded table.

    Args:
        tables: the collection that holds the table, already filled.
        name: name of the table in `tables`.
        trains: initial ``weight.requires_grad``.
    """

    weight: Any

    def __init__(self, tables: ShardedTables, name: str, trains: bool) -> None:
        nn.Module.__init__(self)
        self._name = name
        self._parameters = FixedParameters(weight=TableParameter(tables, name, trains))
        self.num_embeddings, self.embedding_dim = self.weight.shape
        skip_in_fully_shard(self)

    def forward(self, *_: Any, **__: Any) -> Any:
        """Refuse a lookup in one table of a collection."""
        raise OperError("cannot call one table of a sharded collection", "table", self._name,
                        "a call of the collection",
                        "call the collection, or use an nn.EmbeddingBag or nn.Embedding instead")

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, dtype={self.weight.dtype}"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
               ) -> TableModule:
        """Refuse conversions by ``to()``, ``half()``, ``cuda()`` and similar methods. Does nothing
        if dtype and device stay the same.

        A parent's `_apply` has already converted its earlier children when it reaches this one,
        and torch has no hook before that.
        """
        weight = self.weight
        probe = torch.empty(1, dtype=weight.dtype, device=weight.device)
        after = fn(probe)
        if after.dtype != probe.dtype or after.device != probe.device:
            raise InvalidInputError(
                f"cannot convert sharded table {self._name!r}", "dtype, device",
                (after.dtype, str(after.device)), f"{probe.dtype}, {probe.device}",
                "convert the model before sharding it, or only its other modules; modules that "
                "come before this one in the model are converted already")
        return self

    def __prepare_scriptable__(self) -> NoReturn:
        refuse_script(self)

    # ---- state -----------------------------------------------------------------------------------

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool
                            ) -> None:
        key = f"{prefix}weight"
        destination[key] = self.weight if keep_vars else watched(
            table_entry(self.weight.tables, self._name), key)
        for part, value in key_entries(self.weight.tables, self._name).items():
            destination[f"{prefix}{part}"] = value

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str,
                              local_metadata: Mapping[str, Any], strict: bool,
                              missing_keys: list[str], unexpected_keys: list[str],
                              error_msgs: list[str]) -> None:
        for hook in self._load_state_dict_pre_hooks.values():
            hook(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys,
                 error_msgs)
        names = {"weight": self._name}
        if local_metadata.get("assign_to_params_buffers"):
            warn_of_conversions(self.weight.tables, state_dict, prefix, names)
        of_keys = {f"{prefix}{part}" for part in key_names(self.weight.tables, self._name)}
        before = len(error_msgs)
        load_key_entries(self.weight.tables, self._name, state_dict, prefix, missing_keys,
                         error_msgs)
        if len(error_msgs) > before:
            return  # without the keys, the rows would belong to other keys
        load_tables(self.weight.tables, {k: v for k, v in state_dict.items() if k not in of_keys},
                    prefix, names, missing_keys, unexpected_keys, error_msgs)


class _TableOfCollection(TableModule):
    """A table of a collection, with the options of the unsharded collection's tables. They cannot
    be changed, since lookups go through the collection."""

    _options: ClassVar[Mapping[str, Any]] = {"padding_idx": None, "max_norm": None,
                                             "scale_grad_by_freq": False}

    def __init__(self, tables: ShardedTables, name: str, trains: bool) -> None:
        super().__init__(tables, name, trains)
        self.norm_type, self.sparse = 2.0, False
        self.__dict__.update(self._options)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._options and value != self.__dict__[name]:
            raise InvalidInputError(
                f"cannot change table {self._name!r} of a sharded collection", name, value,
                f"{self.__dict__[name]!r}, with which it was sharded",
                "leave the option as it is, or leave the module out of modules=")
        super().__setattr__(name, value)


class TableBag(_TableOfCollection, nn.EmbeddingBag):
    """A table of a pooled collection; lookups go through the collection."""

    _options: ClassVar[Mapping[str, Any]] = {
        **_TableOfCollection._options, "mode": "", "include_last_offset": True}

    def __init__(self, tables: ShardedTables, name: str, trains: bool) -> None:
        super().__init__(tables, name, trains)
        self.__dict__["mode"] = tables.specs[name].pooling


class TableEmbedding(_TableOfCollection, nn.Embedding):
    """A table of an unpooled collection; lookups go through the collection."""


class TableModules(nn.ModuleDict):
    """The tables of a collection as modules by table name, with parameters ``<table>.weight``."""

    def __init__(self, modules: Mapping[str, TableModule]) -> None:
        super().__init__(modules)
        self._modules = FixedEntries(self._modules)

    def named_parameters(self, prefix: str = "", recurse: bool = True,
                         remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the tables' parameters, but none to TorchRec's sharders, which call this method to
        find tables to shard."""
        if sys._getframe(1).f_globals.get("__name__", "").startswith("torchrec.distributed."):
            return iter(())
        return super().named_parameters(prefix, recurse, remove_duplicate)


def refuse_lookup(tables: Any, error: Exception, given: Any = None) -> None:
    """Make all ranks skip a forward pass that raises `error` before its lookup of `given`.

    Raises:
        OperError: `given` is a placeholder of ``torch.fx``, on which nothing can be looked up.
    """
    if isinstance(given, torch.fx.Proxy):
        raise OperError("sharded tables cannot be traced", "input", given,
                        "values, which torch.fx.symbolic_trace does not have",
                        "trace with torchrec.fx.Tracer(leaf_modules=[names of their classes]), or "
                        "use torch.compile") from error
    if isinstance(tables, ShardedTables):  # else read-only: lookups are not collective
        tables.refuse_lookup(error)


def skip_in_fully_shard(module: nn.Module) -> None:
    """Make ``fully_shard`` of an enclosing model skip `module`, whose tables are sharded already.

    The module is marked as if torch's ``replicate`` had been applied to it.
    """
    from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem

    module.__dict__[REGISTRY_KEY] = {"replicate": RegistryItem()}


def refuse_script(module: nn.Module) -> NoReturn:
    """Raise OperError: TorchScript cannot store tables in shared memory."""
    raise OperError("sharded tables cannot be scripted or traced", "module", type(module).__name__,
                    "modules without sharded tables",
                    "script only the dense layers, or use torch.compile")
