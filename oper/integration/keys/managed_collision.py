"""TorchRec's managed-collision modules, as they are or replaced by dynamic tables.

Such a module learns from ids which of them get their own rows. On several ranks, every rank here
learns from the ids of all ranks, concatenated in rank order, and then maps only its own ids. The
map equals that of a single process that trains on the entire batch.

This requires a module with separate methods for learning and mapping, as in
`MCHManagedCollisionModule`. Other modules, such as `HashZchManagedCollisionModule`, learn while
they map, so their maps would differ between ranks; they can only be used in eval mode.

A dynamic table needs no such module: `rule_of` converts a module's settings to those of a dynamic
table, and `RawKeys` takes the module's place and leaves ids as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from oper.errors import InvalidInputError, require
from oper.shmem.group.groups import Group
from oper.shmem.keys.rules import DynamicTable

if TYPE_CHECKING:
    from oper.integration.targets import Target

_WHAT = "cannot make a dynamic table of a managed-collision module"
_OR_A_RULE = "pass dynamic={table: oper.DynamicTable(...)} with the settings that you want"
_NO_KEY = torch.iinfo(torch.int64).max  # marks unused entries of MCHManagedCollisionModule


def share_maps(module: nn.Module, group: Group) -> None:
    """Make the managed-collision modules in `module` learn from the ids of all ranks of `group`.

    From then on, the forward pass in training mode is collective for `MCHManagedCollisionModule`s,
    and raises InvalidInputError for managed-collision modules of other classes.
    """
    from torchrec.modules.mc_modules import ManagedCollisionModule, MCHManagedCollisionModule

    for name, child in module.named_modules():
        if not isinstance(child, ManagedCollisionModule):
            continue
        if isinstance(child, MCHManagedCollisionModule):
            learn = child.profile
            child.profile = functools.partial(_learn_from_all, child, learn, group)
        else:
            child.forward = functools.partial(_frozen, child, name, child.forward)


def _frozen(module: nn.Module, name: str, forward: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `forward` of a module that must not learn; raises InvalidInputError in training mode."""
    if module.training:
        raise InvalidInputError(
            "cannot learn a map of ids on several ranks", f"class, mode of {name}",
            f"{type(module).__name__}, training",
            "an MCHManagedCollisionModule, or a module in eval mode",
            f"call {name}.eval() after every train() of the model, so that the module maps ids "
            "without learning; or train in one process")
    return forward(*args, **kwargs)


def _learn_from_all(module: nn.Module, learn: Any, group: Group, features: Mapping[str, Any]
                    ) -> Mapping[str, Any]:
    """Call `learn`, a `MCHManagedCollisionModule.profile`, with all ranks' ids. Returns `features`,
    the ids of this rank."""
    from torchrec.sparse.jagged_tensor import JaggedTensor

    if not module.training:
        return features
    everyone = group.all_gather({k: f.values().cpu().numpy() for k, f in features.items()})
    joint = {}
    for key, feature in features.items():
        ids = torch.cat([torch.from_numpy(x[key]) for x in everyone]).to(feature.values().device)
        joint[key] = JaggedTensor(values=ids, lengths=torch.ones_like(ids))
    learn(joint)
    return features


# ---- dynamic tables ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Managed:
    """A table behind a managed-collision module.

    Attributes:
        modules: the managed-collision modules of its collection, by table name.
        table: its name there.
        config: its configuration, an ``EmbeddingBagConfig`` or ``EmbeddingConfig``.
    """

    modules: nn.ModuleDict
    table: str
    config: Any

    def rule(self) -> DynamicTable:
        return rule_of(self.config, self.modules[self.table])

    def raw_keys(self) -> RawKeys:
        """Return the module that replaces the table's managed-collision module; see `RawKeys`."""
        return RawKeys(self.modules[self.table], self.table)


def managed_tables(module: nn.Module, targets: Sequence[Target]) -> dict[str, Managed]:
    """Return the tables of `targets` in `module` behind managed-collision modules, by name."""
    by_path = {t.path: t for t in targets}
    found = {}
    for path, child in module.named_modules():
        maps: Any = getattr(child, "_managed_collision_collection", None)
        target = by_path.get(f"{path}._embedding_module".removeprefix("."))
        if maps is not None and target is not None:
            found.update({target.names[c.name]: Managed(
                maps._managed_collision_modules, c.name, c)
                for c in maps.embedding_configs()})
    return found


def rule_of(config: Any, module: nn.Module) -> DynamicTable:
    """Return the settings of a dynamic table in place of a managed-collision module.

    Args:
        config: the table's ``EmbeddingBagConfig`` or ``EmbeddingConfig``.
        module: the ``MCHManagedCollisionModule`` or ``HashZchManagedCollisionModule``.

    Raises:
        InvalidInputError: a setting has no counterpart in `oper.DynamicTable`.
    """
    from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
    from torchrec.modules.mc_modules import MCHManagedCollisionModule

    if isinstance(module, MCHManagedCollisionModule):
        fields = _fields_of_mch(config.name, module)
    elif isinstance(module, HashZchManagedCollisionModule):
        fields = _fields_of_hash_zch(config, module)
    else:
        raise InvalidInputError(_WHAT, f"module of {config.name!r}", type(module).__name__,
                                "MCHManagedCollisionModule or HashZchManagedCollisionModule",
                                _OR_A_RULE)
    return DynamicTable(**fields, init_bound=_bound_of(config.name, config.init_fn))


def _fields_of_mch(table: str, module: Any) -> dict[str, Any]:
    from torchrec.modules.mc_modules import (
        DistanceLFU_EvictionPolicy,
        LFU_EvictionPolicy,
        LRU_EvictionPolicy,
        probabilistic_threshold_filter,
    )

    policy = module._eviction_policy
    exponent = getattr(policy, "_decay_exponent", 0)
    # An LRU order does not depend on the exponent; distances to the power of 0 are 1.
    known = [(LFU_EvictionPolicy, True, "lfu"), (LRU_EvictionPolicy, exponent > 0, "lru"),
             (DistanceLFU_EvictionPolicy, exponent == 0, "lfu"),
             (DistanceLFU_EvictionPolicy, exponent == 1, "distance_lfu")]
    evictions = [name for kind, fits, name in known if type(policy) is kind and fits]
    if not evictions:
        raise InvalidInputError(
            _WHAT, f"eviction policy, decay exponent of {table!r}",
            (type(policy).__name__, exponent), "LFU_EvictionPolicy, LRU_EvictionPolicy with an "
            "exponent > 0, or DistanceLFU_EvictionPolicy with exponent 0 or 1", _OR_A_RULE)
    admits = policy._threshold_filtering_func
    probability = 1.0
    if admits is not None:
        fields = admits.keywords if isinstance(admits, functools.partial) else {}
        inner = admits.func if isinstance(admits, functools.partial) else admits
        if inner is not probabilistic_threshold_filter or (
                isinstance(admits, functools.partial) and admits.args):
            raise InvalidInputError(
                _WHAT, f"threshold_filtering_func of {table!r}", admits,
                "None or probabilistic_threshold_filter, since others compare counts of a batch",
                _OR_A_RULE)
        probability = fields.get("per_id_probability", 0.01)  # TorchRec's default
    return {"eviction": evictions[0], "admit_probability": probability}


def _fields_of_hash_zch(config: Any, module: Any) -> dict[str, Any]:
    from torchrec.modules.hash_mc_evictions import HashZchEvictionPolicyName

    policy, percent = module._eviction_policy_name, module._opt_in_prob
    is_read = [name for name in (config.name, *config.feature_names)
               if name.lower().endswith(module.readable_suffix)]
    tracked, of = (module._write_runtime_meta_dim, module._track_id_freq), f"of {config.name!r}"
    require(_WHAT, _OR_A_RULE,
            (f"eviction_policy_name {of}", policy,
             policy is HashZchEvictionPolicyName.LRU_EVICTION,
             "LRU_EVICTION, since dynamic tables measure a time to live in updates and always "
             "evict from full buckets"),
            (f"disable_fallback {of}", module._disable_fallback, not module._disable_fallback,
             "False, since keys without a row read the default row"),
            (f"write_runtime_meta_dim, track_id_freq {of}", tracked, not any(tracked), "0, False"),
            (f"read-only names {of}", is_read, not is_read, "none, since all lookups count keys"))
    return {"admit_probability": percent / 100 if percent > 0 else 1.0}


def _bound_of(table: str, init_fn: Any) -> float:
    """Return b if `init_fn` draws uniformly from [-b, b)."""
    fields = getattr(init_fn, "keywords", {})
    if getattr(init_fn, "func", None) is not nn.init.uniform_ or fields.keys() != {"a", "b"} or (
            fields["a"] != -fields["b"]):
        raise InvalidInputError(_WHAT, f"init_fn of {table!r}", init_fn, "uniform in [-b, b), as "
                                "by default or with weight_init_min = -weight_init_max", _OR_A_RULE)
    return float(fields["b"])


class RawKeys(nn.Module):
    """Takes the place of a managed-collision module in front of a dynamic table; it returns the
    ids themselves, or their hashes by the module's ``input_hash_func``.

    Args:
        module: the managed-collision module.
        table: name of the table, for error messages.

    Raises:
        InvalidInputError: the module has learned keys, which would be lost.
    """

    def __init__(self, module: Any, table: str) -> None:
        super().__init__()
        state = dict(module.named_buffers()) | dict(module.named_parameters())
        num_keys = sum(int((state[name] != free).sum()) for name, free in (
            ("_mch_sorted_raw_ids", _NO_KEY), ("_hash_zch_identities", -1))
            if name in state and not state[name].is_meta)
        if num_keys:
            raise InvalidInputError(
                _WHAT, f"learned keys of {table!r}", num_keys, "0",
                "shard a model whose module has learned no keys, and load the keys' rows with "
                "oper.KeyedRows.of_managed_collision(state, table).entries(...)")
        self._hash, self._hash_size = getattr(module, "_input_hash_func", None), module.input_size()
        self._size, self._buckets = module.output_size(), module.buckets()

    def forward(self, features: dict[str, Any], mutate_miss_lengths: bool = True) -> dict[str, Any]:
        """Return `features`, a JaggedTensor of raw ids by table, with the ids' keys instead."""
        if self._hash is None:
            return features
        from torchrec.sparse.jagged_tensor import JaggedTensor

        return {name: JaggedTensor(values=self._hash(f.values(), self._hash_size),
                                   lengths=f.lengths(), weights=f.weights_or_none())
                for name, f in features.items()}

    def evict(self) -> None:
        """Return None: nothing was evicted."""

    def input_size(self) -> int:
        return int(self._hash_size)

    def output_size(self) -> int:
        return int(self._size)

    def buckets(self) -> int:
        return int(self._buckets)

    def open_slots(self) -> torch.Tensor:
        """Return 0: the table's directory counts its rows, see `Keys.counts`."""
        return torch.tensor([0])
