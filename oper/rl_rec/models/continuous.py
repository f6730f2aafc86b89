"""CDT4Rec and its ablations for simulators, in which states and actions are vectors."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from oper.rl_rec.models.cdt4rec import CDT4RecConfig, Heads, make_backbone, reward_loss


class Trajectories(NamedTuple):
    """Trajectories of a simulator, padded on the right."""

    states: torch.Tensor   # observations, float32 [B, T, S]
    actions: torch.Tensor  # float32 [B, T, A]
    rewards: torch.Tensor  # float32 [B, T]
    returns: torch.Tensor  # returns-to-go, float32 [B, T]
    valid: torch.Tensor    # bool [B, T], false for padding


# Weight of the loss of estimated returns: their squared errors are small, about 0.02, since returns
# are divided by their maximum.
_VALUE_WEIGHT = 10.0
_LEAST_STD = 0.05  # lower limit of sigma in `censored_loss`


def perceptron(inputs: int, outputs: int) -> nn.Sequential:
    """Make an MLP with two hidden layers of 128 units and GELU, [..., inputs] -> [..., outputs]."""
    return nn.Sequential(nn.Linear(inputs, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(),
                         nn.Linear(128, outputs))


def censored_loss(predicted: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
    """Compute the negative log-likelihood of censored normal actions, float32 [...], the mean over
    an action's A columns.

    Logged actions are modelled as ``clamp(x, -1, 1)`` with ``x ~ N(mu, sigma^2)``. The likelihood
    of a value inside the range is the density of x, that of a bound the probability of the tail
    beyond it (a Tobit model). A squared error would bias the mean towards 0, because the bounds cut
    off noise.

    Args:
        predicted: mu and, in the last column, sigma before `softplus`, float32 [..., A + 1].
        actions: float32 [..., A], in [-1, 1].
    """
    mean = predicted[..., :-1]
    std = F.softplus(predicted[..., -1:]) + _LEAST_STD
    inside = -0.5 * (((actions - mean) / std).square() + math.log(2 * math.pi)) - std.log()
    tail = torch.special.log_ndtr((actions.sign() * mean - 1) / std)
    return -torch.where(actions.abs() >= 1, tail, inside).mean(dim=-1)  # NaN stays NaN


class ContinuousCDT4Rec(nn.Module):
    """CDT4Rec for actions in [-1, 1]^A, modelled as censored normal (`censored_loss`).

    ``e^s_t = W_s x_t + b_s``, ``e^a_t = W_a a_t + b_a``, and
    ``(mu_t, sigma_t) = W_o q_t + b_o``; it acts by ``clamp(mu_t, -1, 1)``.

    With ``returns="estimated"`` a third head estimates the return-to-go of any action,
    ``g^_t(a) = MLP [ phi_t ; x_t ; a ]``. After the first third of training, its estimates
    for the logged actions replace logged returns. A logged return also contains chance, which no
    action can repeat; an estimate contains only what history, state and action explain.

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
        self.out = nn.Linear(config.dim, action_dim + 1)
        self.value = (perceptron(config.dim + state_dim + action_dim, 1)
                      if config.returns == "estimated" else None)
        self.estimate_returns = False

    def schedule(self, step: int, num_steps: int) -> None:
        """With ``returns="estimated"``, use estimated returns after the first third of training."""
        self.estimate_returns = self.value is not None and 3 * step >= num_steps

    def phi(self, batch: Trajectories) -> torch.Tensor:
        """Compute the backbone's output phi (`cdt4rec`) before each action, float32 [B, T, D]."""
        found: torch.Tensor = self.backbone(
            self.state(batch.states), self.action(batch.actions),
            batch.rewards / self.reward_scale, self._as_input(batch.returns))
        return found

    def forward(self, batch: Trajectories) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss, float32 [], and its terms ``action``, ``reward`` and, with
        ``returns="estimated"``, ``value``."""
        phi, valid, returns = self.phi(batch), batch.valid, batch.returns
        terms, value_loss = {}, returns.new_zeros(())
        if self.value is not None:
            estimates = self.value(torch.cat([phi, batch.states, batch.actions], -1)).squeeze(-1)
            error = (estimates - returns / self.return_scale).square()[valid]
            value_loss = terms["value"] = error.mean()
            if self.estimate_returns:
                returns = estimates.detach() * self.return_scale
        action = terms["action"] = censored_loss(
            self._predicted(phi, returns), batch.actions)[valid].mean()
        rewards = self.heads.rewards(phi, self.action(batch.actions))
        reward = terms["reward"] = reward_loss(
            self.config, rewards, batch.rewards / self.reward_scale)[valid].mean()
        loss = action + self.config.reward_weight * reward + _VALUE_WEIGHT * value_loss
        return loss, {name: term.detach() for name, term in terms.items()}

    def act(self, batch: Trajectories) -> torch.Tensor:
        """Predict the actions of all steps, float32 [B, T, A], given ``batch.returns``."""
        return self._predicted(self.phi(batch), batch.returns)[..., :-1].clamp(-1, 1)

    def _predicted(self, phi: torch.Tensor, returns: torch.Tensor) -> torch.Tensor:
        """Parameters of the actions' distributions, [B, T, A + 1], see `censored_loss`."""
        found: torch.Tensor = self.out(self.heads.queries(phi, self._as_input(returns)))
        return found

    def _as_input(self, returns: torch.Tensor) -> torch.Tensor:
        """Scale returns-to-go as the model's input; they are 0 with ``returns="none"``."""
        return returns * (self.config.returns != "none") / self.return_scale
