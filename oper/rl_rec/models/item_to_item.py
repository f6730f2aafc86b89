"""Linear item-to-item models: EASE and nearest neighbours.

The score of item j for a user is the sum of weights B[i, j] over the user's items i. With the
binary users-by-items matrix X and the Gram matrix G = X'X:

    EASE      min_B ||X - X B||^2 + l2 ||B||^2 with diag(B) = 0, solved by P = (G + l2 I)^(-1) as
              B[i, j] = -P[i, j] / P[j, j]                  (Steck, WWW 2019)
    ItemKNN   B[i, j] = G[i, j] / (sqrt(G[i, i] G[j, j]) + shrink) for the nearest items i of j

Both store a dense matrix over pairs of items, which limits catalogues to about 30,000 items.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from oper.ranges import Amount, Positive, PositiveAmount
from oper.rl_rec.models.autoencoders.item_tables import positives
from oper.rl_rec.models.base import Histories, ModelConfig, Recommender


@dataclass(frozen=True, slots=True)
class EASEConfig(ModelConfig):
    """Configuration of EASE.

    Attributes:
        l2: weight of the penalty on the squared weights B, see the module docstring.
    """

    l2: PositiveAmount = 250.0


@dataclass(frozen=True, slots=True)
class ItemKNNConfig(ModelConfig):
    """Configuration of ItemKNN.

    Attributes:
        neighbours: number of largest weights kept for each item j.
        shrink: term that shrinks the similarity of rare items towards 0.
    """

    neighbours: Positive = 100
    shrink: Amount = 10.0


def interaction_matrix(histories: Histories, num_items: int) -> torch.Tensor:
    """Make X, sparse float32 [B, num_items]: 1 if a user has an item with a positive reward."""
    items, lengths = positives(histories)
    pairs = torch.stack([torch.repeat_interleave(lengths), items])
    return torch.sparse_coo_tensor(pairs, torch.ones(pairs.shape[1], device=pairs.device),
                                   (lengths.numel(), num_items), check_invariants=True).coalesce()


def ease_weights(config: EASEConfig, gram: torch.Tensor) -> torch.Tensor:
    """Compute EASE's B from G, [num_items, num_items] each; see the module docstring."""
    inverse = torch.linalg.inv(gram.double() + config.l2 * torch.eye(len(gram)).double())
    weights = -inverse / inverse.diagonal()
    return weights.fill_diagonal_(0.0).float()


def knn_weights(config: ItemKNNConfig, gram: torch.Tensor) -> torch.Tensor:
    """Compute ItemKNN's B from G, [num_items, num_items] each; see the module docstring."""
    length = gram.diagonal().sqrt()
    similar = gram / (length[:, None] * length + config.shrink).clamp(min=1e-12)
    similar.fill_diagonal_(0.0)
    best, at = similar.topk(min(config.neighbours, len(gram)), dim=0)
    return torch.zeros_like(similar).scatter_(0, at, best)


class ItemToItem(Recommender):
    """EASE or ItemKNN, fitted on creation.

    Args:
        config: configuration, which chooses the model.
        training: all training interactions.
        num_items: rows, row 0 (padding) included.
    """

    weights: torch.Tensor

    def __init__(self, config: EASEConfig | ItemKNNConfig, training: Histories, num_items: int
                 ) -> None:
        super().__init__()
        users = interaction_matrix(training, num_items)
        gram = torch.sparse.mm(users.T, users).to_dense()
        self.register_buffer("weights", ease_weights(config, gram)
                             if isinstance(config, EASEConfig) else knn_weights(config, gram))

    def encode(self, histories: Histories) -> torch.Tensor:
        """Compute the scores of all items, float32 [B, num_items]."""
        return torch.sparse.mm(interaction_matrix(histories, len(self.weights)), self.weights)

    def scores(self, encoded: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        return encoded[:, items]
