"""iALS: matrix factorisation of implicit feedback by alternating least squares.

Hu, Koren and Volinsky, ICDM 2008, with the regularisation of Rendle, Krichene, Zhang and Koren,
"Revisiting the performance of iALS", RecSys 2022. Users w_u and items h_i minimise, over positives
S and all I items and U users,

    sum_{(u, i) in S} (1 - <w_u, h_i>)^2 + alpha sum_{u, i} <w_u, h_i>^2
        + l2 (sum_u (|S_u| + alpha I)^nu |w_u|^2 + sum_i (|S_i| + alpha U)^nu |h_i|^2)

alternately: with the items fixed, each user's factor solves a system of `dim` linear equations. The
factors of users to recommend for are computed in the same way, also without training interactions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from oper.ranges import Amount, Positive, PositiveAmount
from oper.rl_rec.models.base import Histories, ModelConfig, Recommender
from oper.rl_rec.models.item_to_item import interaction_matrix

_BLOCK = 1024  # systems of equations solved at once


@dataclass(frozen=True, slots=True)
class IALSConfig(ModelConfig):
    """Configuration of iALS; symbols are those of the module docstring.

    Attributes:
        dim: columns of a factor.
        alpha: weight of the term of all pairs, positives included.
        l2: weight of the penalty on the factors.
        nu: exponent with which a row's penalty grows with its number of interactions.
        sweeps: number of alternations between users and items.
        std: root mean square of the norms of initial item factors.
    """

    dim: Positive = 64
    alpha: PositiveAmount = 0.1
    l2: PositiveAmount = 0.003
    nu: Amount = 1.0
    sweeps: Positive = 16
    std: PositiveAmount = 0.1


class IALS(Recommender):
    """The iALS model, fitted on creation; see the module docstring.

    Args:
        config: configuration.
        training: all training interactions.
        num_items: rows, row 0 (padding) included.
    """

    factors: torch.Tensor

    def __init__(self, config: IALSConfig, training: Histories, num_items: int) -> None:
        super().__init__()
        self.config = config
        matrix = interaction_matrix(training, num_items)
        has_any = matrix.sum(1).to_dense() > 0  # users without positives have factors of 0
        items = torch.randn(num_items, config.dim) * config.std / config.dim ** 0.5
        items[0] = 0.0
        for _ in range(config.sweeps):
            users = solve_factors(config, matrix, items, num_items - 1)
            items = solve_factors(config, matrix.T.coalesce(), users, int(has_any.sum()))
        self.register_buffer("factors", items)

    def encode(self, histories: Histories) -> torch.Tensor:
        """Solve for users' factors, float32 [B, dim]."""
        matrix = interaction_matrix(histories, len(self.factors))
        return solve_factors(self.config, matrix, self.factors, len(self.factors) - 1)

    def scores(self, encoded: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Compute ``<w_u, h_i>``, float32 [B, n]."""
        return encoded @ self.factors[items].T


def solve_factors(config: IALSConfig, matrix: torch.Tensor, others: torch.Tensor, count: int
                  ) -> torch.Tensor:
    """Solve for the factors of rows that minimise the objective given the factors of columns.

    Args:
        config: configuration.
        matrix: 1 for positives, sparse, coalesced [N, M].
        others: factors of the columns, float32 [M, dim].
        count: number of columns without padding.

    Returns:
        float32 [N, dim]; 0 for rows without a positive.
    """
    rows, columns = matrix.indices()
    lengths = torch.bincount(rows, minlength=matrix.shape[0])
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    shared = config.alpha * others.T @ others
    found = []
    for first in range(0, len(lengths), _BLOCK):
        mine = lengths[first:first + _BLOCK]
        at = slice(int(offsets[first]), int(offsets[first + len(mine)]))
        known, row = others[columns[at]], rows[at] - first
        # Sums over a row's positives of the factors and of their outer products.
        sums = known.new_zeros(len(mine), config.dim).index_add_(0, row, known)
        outer = torch.stack([part.T @ part for part in known.split(mine.tolist())])
        penalty = config.l2 * (mine + config.alpha * count) ** config.nu
        left = outer + shared + penalty[:, None, None] * torch.eye(config.dim, device=known.device)
        found.append(torch.linalg.solve(left, sums))
    return torch.cat(found) if found else others.new_zeros(0, config.dim)
