"""Parts of TorchRec's DLRM that copy less; results differ only in the order of additions."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.autograd import forward_ad
from torchrec.models.dlrm import DLRM, InteractionArch, SparseArch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from oper.shmem.library import load


class PooledRows(SparseArch):
    """TorchRec's ``SparseArch`` without copies if the collection's keys are in config order.

    The keys of OPER's sharded collections are.
    """

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Return pooled rows [B, F, D] in the collection's output dtype."""
        pooled: Any = self.embedding_bag_collection(features)
        names = self.sparse_feature_names
        if pooled.keys() != names:
            by_name = pooled.to_dict()
            return torch.cat([by_name[n] for n in names], dim=1).reshape(-1, self.F, self.D)
        return pooled.values().view(-1, self.F, self.D)


class DotInteraction(InteractionArch):
    """TorchRec's ``InteractionArch``, on CPUs in one pass that does not store the [F + 1, F + 1]
    products of a sample. There, it computes and returns float32 even under autocast."""

    def forward(self, dense_features: torch.Tensor, sparse_features: torch.Tensor) -> torch.Tensor:
        """Return the dense rows followed by the dot products of all pairs of rows. Transforms of
        ``torch.func`` and forward-mode differentiation use TorchRec's code.

        Args:
            dense_features: [B, D].
            sparse_features: [B, F, D].

        Returns:
            [B, D + F + F * (F - 1) / 2].
        """
        if dense_features.device.type != "cpu" or self.F == 0 or _is_transformed():
            return super().forward(dense_features, sparse_features)
        return _dot_interaction()(
            dense_features.float().contiguous(), sparse_features.float().contiguous())


def _is_transformed() -> bool:
    """Whether there is a transform of ``torch.func`` or forward-mode differentiation, for which the
    operator has no rules."""
    return not torch.compiler.is_compiling() and (
        torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0)


def copy_less(model: DLRM) -> DLRM:
    """Change the parts of a ``DLRM`` or ``DLRM_DCN`` in place to `PooledRows` and, if it has an
    ``InteractionArch``, `DotInteraction`; return it. Parameters and their names stay the same."""
    for part, plain, ours in ((model.sparse_arch, SparseArch, PooledRows),
                              (model.inter_arch, InteractionArch, DotInteraction)):
        if type(part) is plain:
            part.__class__ = ours
    return model


@functools.cache
def _dot_interaction() -> Any:
    """Register the operator's shapes and gradient with torch, and return it."""
    load()
    name = "oper::dot_interaction"
    torch.library.register_fake(name, _shape)
    torch.library.register_fake(f"{name}_gradient", _shapes_of_gradients)
    torch.library.register_autograd(name, _gradients, setup_context=_save)
    return torch.ops.oper.dot_interaction


def _shape(dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
    samples, dim = dense.shape
    rows = sparse.shape[1] + 1
    return dense.new_empty(samples, dim + rows * (rows - 1) // 2)


def _shapes_of_gradients(gradient: torch.Tensor, dense: torch.Tensor, sparse: torch.Tensor
                         ) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(dense), torch.empty_like(sparse)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if torch.is_grad_enabled():  # only with create_graph=True
        return _differentiable_gradients(gradient, *ctx.saved_tensors)
    return torch.ops.oper.dot_interaction_gradient(gradient.contiguous(), *ctx.saved_tensors)


def _differentiable_gradients(gradient: torch.Tensor, dense: torch.Tensor, sparse: torch.Tensor
                              ) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute what the operator ``dot_interaction_gradient``, which cannot be differentiated, does.
    """
    rows = torch.cat((dense[:, None], sparse), dim=1)
    size, (samples, dim) = rows.shape[1], dense.shape
    first, second = torch.triu_indices(size, size, 1)
    upper = gradient.new_zeros(samples, size * size).index_copy(
        1, first * size + second, gradient[:, dim:]).view(samples, size, size)
    of_rows = (upper + upper.mT) @ rows
    return of_rows[:, 0] + gradient[:, :dim], of_rows[:, 1:]
