"""TorchRec's DLRM on read-only tables, with lookup and dot interaction fused into one operator.

TorchRec writes the pooled rows, copies them twice (``SparseArch``, ``InteractionArch``), computes
the products of all pairs of rows and selects half of them. The fused operator computes only this
half, while a block of samples is in the processor's cache, and stores no intermediate results.

Consecutive dense layers before and after it become one operator, which releases Python's
interpreter lock once for all of them, since the threads of a server compete for that lock. Large
layers use oneDNN's kernels where these are faster.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from oper.shmem.publication.reader import PublishedTables, shared_pairs
from oper.support import kernel

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    from oper.shmem.batch import Lookup


class FusedDLRM(nn.Module):
    """A DLRM that computes lookup and interaction by `PublishedTables.lookup_interaction`.

    Args:
        model: a ``torchrec.models.dlrm.DLRM`` that `can_fuse` accepts; its modules are used.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self._bags = (model.sparse_arch.embedding_bag_collection,)  # not registered as a child
        self._before, self._after = _layers(model.dense_arch), _layers(model.over_arch)
        layers = _linear_layers(model.over_arch)
        self._of_users: Any = None if layers is None else _OfUsers(self._bags[0].tables, layers)

    @property
    def shares_bags(self) -> bool:
        """Whether `forward` accepts `first` and `shared_keys`."""
        return self._of_users is not None

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor,
                first: torch.Tensor | None = None, shared_keys: torch.Tensor | None = None) -> Any:
        """Return logits [B, 1], equal to the model's up to rounding in the dot products.

        `first` and `shared_keys` are those of `PublishedTables.lookup_shared_interaction`. With
        them, products of features that all samples of a user share are computed once per user, and
        sums in the first layer after the interaction are also accumulated in another order.
        """
        bags = self._bags[0]
        if first is not None:
            return self._of_users(bags.lookup_of(sparse_features), self._before(dense_features),
                                  first, shared_keys)
        if (sparse_features.variable_stride_per_key()
                or sparse_features.inverse_indices_or_none() is not None
                or torch.is_autocast_enabled("cpu") or dense_features.dtype != torch.float32):
            return self.model(dense_features, sparse_features)
        return self._after(bags.tables.lookup_interaction(
            bags.lookup_of(sparse_features), self._before(dense_features)))


def fuse(model: nn.Module) -> nn.Module:
    """Replace every DLRM in `model` that `can_fuse` accepts by a `FusedDLRM`."""
    if can_fuse(model):
        return FusedDLRM(model)
    for name, child in model.named_children():
        replaced = fuse(child)
        if replaced is not child:
            setattr(model, name, replaced)
    return model


def can_fuse(model: nn.Module) -> bool:
    """Whether `model` is a plain DLRM on read-only tables that the fused interaction supports.

    Its output must be float32, all tables must have the same number of columns, and every feature
    must belong to one table.
    """
    try:
        from torchrec.models.dlrm import DLRM, InteractionArch, SparseArch
    except ImportError:
        return False
    from oper.integration.dense.dlrm import DotInteraction, PooledRows
    from oper.integration.torchrec_modules import ShardedEmbeddingBags

    # Exact types, since subclasses may compute something else.
    if (type(model) is not DLRM or type(model.inter_arch) not in (InteractionArch, DotInteraction)
            or type(model.sparse_arch) not in (SparseArch, PooledRows) or _has_hooks(model)):
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


class _Perceptrons:
    """Linear layers, some followed by ReLU, which share their weights with the model. Consecutive
    small layers are one operator."""

    def __init__(self, layers: list[tuple[nn.Linear, bool]]) -> None:
        self._arguments = ([layer.weight for layer, _ in layers],
                           [layer.bias for layer, _ in layers], [int(relu) for _, relu in layers])
        self._fewest_products = _fewest_products()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weights, biases, relu = self._arguments
        done = 0
        for k, weight in enumerate(weights):
            if _uses_onednn(x, weight, self._fewest_products):
                if done < k:
                    x = torch.ops.oper.perceptrons(x, *(a[done:k] for a in self._arguments))
                x = torch.ops.mkldnn._linear_pointwise(
                    x, weight, biases[k], "relu" if relu[k] else "none", [], "")
                done = k + 1
        return x if done == len(weights) else torch.ops.oper.perceptrons(
            x, *(a[done:] for a in self._arguments))


@functools.cache
def _fewest_products() -> float:
    """Return the number of multiplications in a layer from which oneDNN is faster than MKL, which
    torch uses otherwise; infinite if it never is.

    On AMD processors oneDNN is up to twice as fast, but a call takes 10 us longer. On Intel's, MKL
    is as fast, and its calls are shorter.
    """
    if not torch.backends.mkldnn.is_available():
        return math.inf
    is_intel = kernel.pairs("/proc/cpuinfo").get("vendor_id") == "GenuineIntel"
    return math.inf if is_intel and torch.backends.mkl.is_available() else 5_000_000


def _uses_onednn(x: torch.Tensor, weight: torch.Tensor, fewest_products: float) -> bool:
    """Whether oneDNN should multiply float32 x [B, I] by a weight [O, I]. Exported programs, whose
    batch size may vary, use MKL."""
    return (not torch.compiler.is_exporting() and x.shape[0] * weight.numel() >= fewest_products
            and bool(torch.backends.mkldnn.enabled)
            and x.dtype == weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu"))


class _OfUsers:
    """Interaction and the layers after it, for samples that share features with their user.

    Products of two shared features contribute the same sum to the first layer for all samples of a
    user, so this sum is computed once per user.

    Args:
        tables: the tables to look up in.
        layers: the result of `_linear_layers`.
    """

    def __init__(self, tables: PublishedTables, layers: list[tuple[nn.Linear, bool]]) -> None:
        (self._first, self._has_relu), *rest = layers
        self._tables, self._rest = tables, _Perceptrons(rest)
        self._fewest_products = _fewest_products()
        # Cached: (epoch, key_of, shared_keys, weights of users, weights of samples). Assigned as
        # one tuple, because several threads may call this object.
        self._split: tuple[Any, ...] = (None, None, None)

    def __call__(self, batch: Lookup, dense: torch.Tensor, first: torch.Tensor,
                 shared_keys: torch.Tensor) -> torch.Tensor:
        """Return logits; the arguments are those of `PublishedTables.lookup_shared_interaction`."""
        users, samples, user_of = self._tables.lookup_shared_interaction(
            batch, dense, first, shared_keys)
        of_users, of_samples = self._weights(batch.key_of, shared_keys, dense.shape[1])
        known = torch.addmm(self._first.bias, users, of_users.t())
        if known.shape[0] > 1:
            known = known.index_select(0, user_of)
        sums = (torch.ops.mkldnn._linear_pointwise(samples, known, of_samples, None, "add")
                if _uses_onednn(samples, of_samples, self._fewest_products)
                else torch.addmm(known, samples, of_samples.t()))
        return self._rest(sums.relu_() if self._has_relu else sums)

    def _weights(self, key_of: torch.Tensor, shared_keys: torch.Tensor, dim: int
                 ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the columns of the first layer's weight for the products shared by users and for
        the other inputs, each [outputs, inputs]."""
        split = self._split
        epoch = self._tables.epoch  # a new publication may have changed the weights in place
        if split[0] != epoch or split[1] is not key_of or split[2] is not shared_keys:
            columns = shared_pairs(dim, shared_keys[key_of].tolist())
            self._split = split = (epoch, key_of, shared_keys, *(
                self._first.weight[:, torch.tensor(c, dtype=torch.int64)] for c in columns))
        return split[3], split[4]


def _layers(module: Any) -> Any:
    """Return `module` as one operator, or unchanged if it has layers other than linear ones."""
    found = _linear_layers(module)
    return module if found is None else _Perceptrons(found)


def _linear_layers(module: Any) -> list[tuple[nn.Linear, bool]] | None:
    """Return the linear layers of `module` and whether a ReLU follows each; None if it has a linear
    layer without a bias, or any other layer."""
    from torchrec.models.dlrm import DenseArch, OverArch
    from torchrec.modules.mlp import MLP, Perceptron

    if type(module) is nn.Linear:
        return None if module.bias is None else [(module, False)]
    if type(module) is Perceptron:
        inner = _linear_layers(module._linear)
        return [(inner[0][0], True)] if inner and module._activation_fn is torch.relu else None
    if type(module) is nn.Sequential:
        parts = [_linear_layers(m) for m in module]
        known = [p for p in parts if p is not None]
        return [x for p in known for x in p] if len(known) == len(parts) else None
    if type(module) in (DenseArch, OverArch):
        return _linear_layers(module.model)
    return _linear_layers(module._mlp) if type(module) is MLP else None


def _has_hooks(model: nn.Module) -> bool:
    """Whether a module has forward hooks, whose tensors the fused operators do not create."""
    return any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
