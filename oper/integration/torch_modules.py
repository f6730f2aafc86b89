"""The adapter to PyTorch: sharded ``nn.EmbeddingBag`` and ``nn.Embedding``, without torchrec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from oper.errors import InvalidInputError, require
from oper.integration.checkpoint.table_state import (
    check_optimizer_entries,
    load_optimizer_entries,
    optimizer_entries,
)
from oper.integration.table_module import TableModule, refuse_lookup, refuse_script
from oper.shmem.batch import Lookup
from oper.shmem.tables import ShardedTables
from oper.tables import DTYPE_BYTES, TableSpec


def module_spec(name: str, module: nn.EmbeddingBag | nn.Embedding, optimizer: str) -> TableSpec:
    """Return the `TableSpec` of an ``nn.EmbeddingBag`` or ``nn.Embedding`` named `name`.

    Raises:
        InvalidInputError: the module has an option that sharded tables do not support.
    """
    what = f"cannot shard {type(module).__name__} {name!r}"
    pooling = getattr(module, "mode", "none")
    dtype = str(module.weight.dtype).removeprefix("torch.")
    scales = module.scale_grad_by_freq
    require(what, "leave this module out of modules=",
            ("max_norm", module.max_norm, module.max_norm is None, "None"),
            ("scale_grad_by_freq", scales, not scales, "False"),
            ("mode", pooling, pooling in ("sum", "mean", "none"), "sum or mean"),
            ("weight.dtype", dtype, dtype in DTYPE_BYTES, " or ".join(DTYPE_BYTES)))
    return TableSpec(name, module.num_embeddings, module.embedding_dim, (name,), pooling,
                     dtype, optimizer)


class _ShardedModule(TableModule):
    """Base class of sharded torch modules; has the ``state_dict`` of an unsharded module."""

    def __init__(self, module: nn.EmbeddingBag | nn.Embedding, tables: ShardedTables, name: str
                 ) -> None:
        super().__init__(tables, name, module.weight.requires_grad)
        self.padding_idx = module.padding_idx
        self.max_norm: float | None = None
        self.norm_type = module.norm_type
        self.scale_grad_by_freq, self.sparse = False, module.sparse
        self.dtype = module.weight.dtype
        self.tables = tables
        self._key_of = torch.zeros(1, dtype=torch.int64)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("max_norm", "scale_grad_by_freq") and value:
            raise InvalidInputError(f"cannot change sharded table {self._name!r}", name, value,
                                    "None or False, which sharded tables support",
                                    "to use this option, leave the module out of modules=")
        if name == "mode" and value != self.__dict__.get("mode", value):
            raise InvalidInputError(f"cannot change sharded table {self._name!r}", name, value,
                                    f"{self.mode!r}, the pooling that it was sharded with",
                                    "set the mode before sharding")
        if name == "padding_idx" and value is not None:
            rows = self.num_embeddings
            if not -rows <= value < rows:
                raise InvalidInputError(f"cannot set the padding of table {self._name!r}", name,
                                        value, f"-{rows} <= padding_idx < {rows}, or None",
                                        "set padding_idx to a row of the table")
            value %= rows  # torch counts negative numbers from the end, too
        super().__setattr__(name, value)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups; a new ``["lr"]`` takes effect in the next backward."""
        return self.tables.param_groups

    def optimizer_state_dict(self) -> dict[str, Any]:
        """Return the state as ``{"state": {"weight": {"weight.momentum1": ...}}}``. Collective."""
        return {"state": {"weight": optimizer_entries(self.tables, self._name, "weight")}}

    def load_optimizer_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load an `optimizer_state_dict` saved under any plan and world size. Collective.

        Raises:
            InvalidInputError: a rank's state is not one of this table and optimizer; no rank loads
                any of it.
        """
        self.tables.barrier()  # peers may still be reading
        state = state_dict.get("state") if isinstance(state_dict, Mapping) else None
        check_optimizer_entries(self.tables, {"weight": self._name}, state)
        load_optimizer_entries(self.tables, self._name, "weight", state_dict["state"]["weight"])
        self.tables.flush_replicas()


def _refuse(module: _ShardedModule, ids: Any) -> NoReturn:
    """Raise the error for `ids` that `module` cannot look up, or for tracing."""
    if torch._C._get_tracing_state() is not None:
        refuse_script(module)
    if not isinstance(ids, torch.Tensor):
        raise InvalidInputError("cannot look up", "ids", ids, "an int64 or int32 tensor",
                                "pass a tensor")
    raise InvalidInputError("cannot look up", "shape of ids", tuple(ids.shape),
                            "[B, L], or [N] with offsets",
                            "flatten the extra dimensions")


class ShardedEmbeddingBag(_ShardedModule, nn.EmbeddingBag):
    """An ``nn.EmbeddingBag`` sharded according to a plan; same call, same ``state_dict``.

    Args:
        bag: the unsharded module; only its configuration is used.
        tables: the collection that holds the table, already filled.
        name: name of the table in `tables`.
    """

    def __init__(self, bag: nn.EmbeddingBag, tables: ShardedTables, name: str) -> None:
        super().__init__(bag, tables, name)
        self.mode = bag.mode
        self.include_last_offset = bag.include_last_offset

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mode={self.mode!r}"

    def forward(self, input: torch.Tensor, offsets: torch.Tensor | None = None,
                per_sample_weights: torch.Tensor | None = None) -> torch.Tensor:
        """Return pooled rows [B, dim], summed in float32 and converted to the table's dtype.

        Args:
            input: ids int64 or int32, [B, L], or [N] with `offsets`.
            offsets: int64 or int32 [B] (or [B + 1] with ``include_last_offset``).
            per_sample_weights: float32 or the table's dtype, shape of `input`; mode ``"sum"`` only.

        Raises:
            InvalidInputError: an argument has another shape or dtype, or weights are given with
                another mode.
        """
        try:
            batch = self._lookup_of(input, offsets, per_sample_weights)
        except Exception as error:
            refuse_lookup(self.tables, error, input)
            raise
        return self.tables.lookup(batch).to(self.dtype)

    def _lookup_of(self, input: torch.Tensor, offsets: torch.Tensor | None,
                   per_sample_weights: torch.Tensor | None) -> Lookup:
        if torch._C._get_tracing_state() is not None or not isinstance(
                input, torch.Tensor) or input.dim() not in (1, 2):
            _refuse(self, input)
        if per_sample_weights is not None and self.mode != "sum":
            raise InvalidInputError("cannot look up", "mode", self.mode,
                                    "sum with per_sample_weights", "leave the weights out")
        if per_sample_weights is not None and per_sample_weights.shape != input.shape:
            raise InvalidInputError("cannot look up", "shape of per_sample_weights",
                                    tuple(per_sample_weights.shape),
                                    f"{tuple(input.shape)}, the shape of input",
                                    "pass one weight per id")
        if input.dim() == 2:
            if offsets is not None:
                raise InvalidInputError("cannot look up", "offsets", tuple(offsets.shape),
                                        "None with two-dimensional ids [B, L]",
                                        "leave offsets out, or flatten the ids")
            lengths = torch.full((input.shape[0],), input.shape[1], dtype=torch.int64,
                                 device=input.device)
            input = input.reshape(-1)
        else:
            if offsets is None:
                raise InvalidInputError("cannot look up", "offsets", None,
                                        "offsets [B] with one-dimensional ids [N]",
                                        "pass offsets, or ids [B, L]")
            if offsets.dim() != 1 or offsets.dtype not in (torch.int64, torch.int32):
                raise InvalidInputError("cannot look up", "offsets",
                                        (offsets.dtype, tuple(offsets.shape)),
                                        "int64 or int32, one dimension",
                                        "convert or flatten offsets")
            ends = offsets[1:] if self.include_last_offset else torch.cat(
                [offsets[1:], offsets.new_full((1,), input.numel())])
            lengths = ends - (offsets[:-1] if self.include_last_offset else offsets)
        if per_sample_weights is not None:
            per_sample_weights = per_sample_weights.reshape(-1).contiguous()
            if per_sample_weights.dtype == self.dtype:
                per_sample_weights = per_sample_weights.float()
        if self.padding_idx is not None:
            input, lengths, per_sample_weights = self._drop_padding(
                input, lengths, per_sample_weights)
        return Lookup(input.contiguous(), lengths.contiguous(), self._key_of, lengths.numel(),
                      per_sample_weights)

    def _drop_padding(self, ids: torch.Tensor, lengths: torch.Tensor,
                      weights: torch.Tensor | None
                      ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Remove ids equal to `padding_idx`, which neither count in the mean nor get a gradient. On
        a GPU, synchronizes once to get the number of remaining ids."""
        num_bags = lengths.numel()
        # Invalid lengths are passed on unchanged, with all ids, so that the lookup refuses them.
        fit = (lengths >= 0).all() & (lengths.sum() == ids.numel())
        at = ((ids != self.padding_idx) | ~fit).nonzero()[:, 0]
        bags = torch.searchsorted(lengths.cumsum(0), at, right=True)
        left = lengths.new_zeros(num_bags + 1).index_add_(0, bags, lengths.new_ones(at.numel()))
        return (ids[at], torch.where(fit, left[:num_bags], lengths),
                None if weights is None else weights[at])


class ShardedEmbedding(_ShardedModule, nn.Embedding):
    """An ``nn.Embedding`` sharded according to a plan; same call, same ``state_dict``.

    Args:
        module: the unsharded module; only its configuration is used.
        tables: the collection that holds the table, already filled.
        name: name of the table in `tables`.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return rows [*input.shape, dim] in the table's dtype; `input` is int64 or int32.

        The row of ``padding_idx`` gets no gradient and no update.
        """
        try:
            if torch._C._get_tracing_state() is not None or not isinstance(input, torch.Tensor):
                _refuse(self, input)
            ids = input.reshape(-1).contiguous()
        except Exception as error:
            refuse_lookup(self.tables, error, input)
            raise
        rows = self._rows(ids) if self.padding_idx is None else self._padded_rows(ids)
        return rows.view(*input.shape, self.embedding_dim).to(self.dtype)

    def _rows(self, ids: torch.Tensor) -> torch.Tensor:
        lengths = torch.full((1,), ids.numel(), dtype=torch.int64, device=ids.device)
        return self.tables.lookup(Lookup(ids, lengths, self._key_of, 1, pooled=False))

    def _padded_rows(self, ids: torch.Tensor) -> torch.Tensor:
        assert self.padding_idx is not None
        with torch.no_grad():
            padding = self._rows(torch.full((1,), self.padding_idx, device=ids.device))
        at = (ids != self.padding_idx).nonzero()[:, 0]
        return padding.expand(ids.numel(), -1).index_copy(0, at, self._rows(ids[at]))
