"""TorchRec's DLRM on tables that are only read, with lookup and dot interaction as one operator.

TorchRec writes the pooled rows, copies them twice (``SparseArch``, ``InteractionArch``), multiplies
all pairs of rows and picks those above the diagonal. Here the pairs are multiplied while a block of
samples is in the processor's cache, and nothing in between is written to memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


class FusedDLRM(nn.Module):
    """A DLRM whose lookup and interaction are `PublishedTables.lookup_interaction`.

    Args:
        model: a ``torchrec.models.dlrm.DLRM`` that `can_fuse` has agreed to; its parts are used.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self._bags = (model.sparse_arch.embedding_bag_collection,)  # no part of its own

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> Any:
        """Logits [B, 1], as the model's but for the rounding of the dot products."""
        if sparse_features.variable_stride_per_key():
            return self.model(dense_features, sparse_features)
        dense = self.model.dense_arch(dense_features)
        if dense.dtype != torch.float32:  # under autocast
            return self.model(dense_features, sparse_features)
        bags = self._bags[0]
        return self.model.over_arch(
            bags.tables.lookup_interaction(bags.lookup_of(sparse_features), dense))


def fuse(model: nn.Module) -> nn.Module:
    """`model` with every DLRM that `can_fuse` as a `FusedDLRM`; the rest as it was."""
    if can_fuse(model):
        return FusedDLRM(model)
    for name, child in model.named_children():
        replaced = fuse(child)
        if replaced is not child:
            setattr(model, name, replaced)
    return model


def can_fuse(model: nn.Module) -> bool:
    """Whether `model` is a plain DLRM on read-only tables, whose rows come as its interaction wants
    them: float32, one width, every feature in one table."""
    try:
        from torchrec.models.dlrm import DLRM, InteractionArch, SparseArch
    except ImportError:
        return False
    from oper.integration.torchrec_modules import ShardedEmbeddingBags
    from oper.shmem.published import PublishedTables

    # Subclasses may do something else.
    if type(model) is not DLRM or type(model.inter_arch) is not InteractionArch or type(
            model.sparse_arch) is not SparseArch or _has_hooks(model):
        return False
    sparse: Any = model.sparse_arch
    bags = sparse.embedding_bag_collection
    tables: Any = getattr(bags, "tables", None)
    if type(bags) is not ShardedEmbeddingBags or not isinstance(tables, PublishedTables):
        return False
    names = [f for f, _ in tables.features]
    return (names == list(sparse.sparse_feature_names) and len(set(names)) == len(names)
            and {s.dim for s in tables.specs.values()} == {sparse.D}
            and bags.output_dtype == torch.float32)


def _has_hooks(model: nn.Module) -> bool:
    """Hooks see tensors that would not be made."""
    return any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
