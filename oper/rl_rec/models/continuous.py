"""CDT4Rec and its ablations for simulators, in which states and actions are vectors."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from oper.rl_rec.models.cdt4rec import CDT4RecConfig, Heads, make_backbone, reward_loss


class Trajectories(NamedTuple):
    """Trajectories of a simulator, padded on the right."""

    states: torch.Tensor   # observations, float32 [B, T, S]
    actions: torch.Tensor  # float32 [B, T, A]
    rewards: torch.Tensor  # float32 [B, T]
    returns: torch.Tensor  # returns-to-go, float32 [B, T]
    valid: torch.Tensor    # bool [B, T], false for padding


class ContinuousCDT4Rec(nn.Module):
    """CDT4Rec for actions in [-1, 1]^A, which it predicts with a squared error.

    ``e^s_t = W_s x_t + b_s``, ``e^a_t = W_a a_t + b_a``, and ``a^_t = tanh(W_o q_t + b_o)``.

    Args:
        config: configuration; fields about items are ignored.
        state_dim, action_dim: S and A.
        returns: divisor of returns-to-go.
        rewards: divisor of rewards.
    """

    def __init__(self, config: CDT4RecConfig, state_dim: int, action_dim: int, *,
                 returns: float = 1.0, rewards: float = 1.0) -> None:
        super().__init__()
        self.config, self.return_scale, self.reward_scale = config, returns, rewards
        self.state = nn.Linear(state_dim, config.dim)
        self.action = nn.Linear(action_dim, config.dim)
        self.backbone = make_backbone(config)
        self.heads = Heads(config)
        self.out = nn.Linear(config.dim, action_dim)

    def phi(self, batch: Trajectories) -> torch.Tensor:
        """Compute phi, float32 [B, T, D]."""
        found: torch.Tensor = self.backbone(
            self.state(batch.states), self.action(batch.actions),
            batch.rewards / self.reward_scale, batch.returns / self.return_scale)
        return found

    def forward(self, batch: Trajectories) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss, float32 [], and its terms ``action`` and ``reward``."""
        phi, valid = self.phi(batch), batch.valid
        error = (self._actions(phi, batch.returns) - batch.actions).square().mean(dim=-1)
        action = error[valid].mean()
        estimates = self.heads.rewards(phi, self.action(batch.actions))
        reward = reward_loss(self.config, estimates, batch.rewards / self.reward_scale)[valid]
        loss = action + self.config.reward_weight * reward.mean()
        return loss, {"action": action.detach(), "reward": reward.mean().detach()}

    def act(self, batch: Trajectories) -> torch.Tensor:
        """Predict the actions of all steps, float32 [B, T, A], given ``batch.returns``."""
        return self._actions(self.phi(batch), batch.returns)

    def _actions(self, phi: torch.Tensor, returns: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.out(self.heads.queries(phi, returns / self.return_scale)))
