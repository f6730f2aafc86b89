"""Offline reinforcement learning with two critics and (except for DQN) an actor.

The methods are TD3+BC, IQL, CQL and DQN. An actor maps the current observation to an action in
[-1, 1]^A; critics map observation and action to the value Q(s, a) of future rewards. They are
trained only on the transitions of a log, with the papers' constants unless stated otherwise.
Rewards are divided by `REWARD_SCALE` and discounted by `GAMMA`.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
from torch import nn

from oper.errors import InvalidInputError
from oper.rl_rec.models.continuous import Trajectories, perceptron
from oper.rl_rec.simulation.offline import (
    REWARD_SCALE,
    Episodes,
    NormalActor,
    OfflineOptions,
    Policy,
    acting,
    actor,
    normalised,
    train_offline,
)
from oper.rl_rec.simulation.shop import ACTION_DIM

GAMMA = 0.99
FOLLOWED = 0.005  # rate of the moving average that updates target networks per step
TRANSITIONS = 256  # transitions per gradient step
CHOICES = 32  # number of actions that DQN chooses from


@dataclass(frozen=True, slots=True, eq=False)
class Transitions:
    """N transitions of a log.

    Attributes:
        states, next_states: observations before and after the action, float32 [N, S].
        actions: float32 [N, A].
        rewards: rewards divided by `REWARD_SCALE`, float32 [N].
        goes_on: 0 if the episode ends after the step, else 1, float32 [N].
    """

    states: torch.Tensor
    actions: torch.Tensor
    rewards: torch.Tensor
    next_states: torch.Tensor
    goes_on: torch.Tensor

    @staticmethod
    def of(batch: Trajectories, count: int) -> Transitions:
        """Draw up to `count` transitions from a batch of trajectories."""
        trajectory, step = batch.valid.nonzero(as_tuple=True)
        if step.numel() > count:
            at = torch.randperm(step.numel())[:count]
            trajectory, step = trajectory[at], step[at]
        after = (step + 1).clamp(max=batch.valid.shape[1] - 1)
        goes_on = batch.valid[trajectory, after] & (after > step)
        return Transitions(batch.states[trajectory, step], batch.actions[trajectory, step],
                           batch.rewards[trajectory, step] / REWARD_SCALE,
                           batch.states[trajectory, after], goes_on.float())


class Critics(nn.Module):
    """Base class of the methods, which fit ``Q(s, a)`` to ``r + gamma V(s')``.

    Args:
        steps: the logged trajectories.
    """

    def __init__(self, steps: Trajectories) -> None:
        super().__init__()
        self.critics = nn.ModuleList(
            perceptron(steps.states.shape[-1] + ACTION_DIM, 1) for _ in range(2))
        self.slow_critics = copy.deepcopy(self.critics).requires_grad_(False)

    def forward(self, batch: Trajectories) -> torch.Tensor:
        """Return the sum of all networks' losses, a scalar; each trains its own network only."""
        self.follow()
        step = Transitions.of(batch, TRANSITIONS)
        with torch.no_grad():
            target = step.rewards + GAMMA * step.goes_on * self.next_value(step.next_states)
        critic = (values(self.critics, step.states, step.actions) - target).square().mean()
        return critic + self.regulariser(step) + self.actor_loss(step)

    def follow(self) -> None:
        """Update the target networks by a moving average of the trained ones."""
        _follow(self.slow_critics, self.critics)

    def next_value(self, states: torch.Tensor) -> torch.Tensor:
        """Estimate V(s'), float32 [N], of states [N, S]."""
        raise NotImplementedError

    def regulariser(self, step: Transitions) -> torch.Tensor:
        """Return the term that is added to the critics' loss, a scalar."""
        return step.rewards.new_zeros(())

    def actor_loss(self, step: Transitions) -> torch.Tensor:
        """Return the actor's loss, a scalar; 0 without an actor."""
        return step.rewards.new_zeros(())

    def policy(self) -> Policy:
        raise NotImplementedError


@torch.no_grad()
def _follow(slow: nn.Module, fast: nn.Module) -> None:
    for mine, theirs in zip(slow.parameters(), fast.parameters(), strict=True):
        mine.lerp_(theirs, FOLLOWED)


class DQN(Critics):
    """Double Q-learning (van Hasselt, Guez and Silver 2016) over `CHOICES` actions of the log.

    ``V(s') = Q'(s', argmax_a Q(s', a))`` with target critics Q'; Q and Q' are means of two critics.
    There is no pessimism: values of actions that the log does not have in s' may be too high.
    """

    choices: torch.Tensor

    def __init__(self, steps: Trajectories) -> None:
        super().__init__(steps)
        logged = steps.actions[steps.valid]
        self.register_buffer("choices", logged[torch.randperm(len(logged))[:CHOICES]])

    def best(self, states: torch.Tensor) -> torch.Tensor:
        """Select the choice with the highest value in each state [N, S]; actions [N, A]."""
        shape = len(states), len(self.choices), -1
        found = values(self.critics, states[:, None].expand(shape), self.choices.expand(shape))
        return self.choices[found.mean(dim=0).argmax(dim=1)]

    def next_value(self, states: torch.Tensor) -> torch.Tensor:
        return values(self.slow_critics, states, self.best(states)).mean(dim=0)

    def policy(self) -> Policy:
        return lambda past: self.best(normalised(past.states[:, -1]))


class ActorCritic(Critics):
    """Critics with an actor; for arguments see `Critics`."""

    def __init__(self, steps: Trajectories) -> None:
        super().__init__(steps)
        self.actor: nn.Module = actor(steps.states.shape[-1])
        self.slow_actor: nn.Module = copy.deepcopy(self.actor).requires_grad_(False)

    def follow(self) -> None:
        super().follow()
        _follow(self.slow_actor, self.actor)

    def next_value(self, states: torch.Tensor) -> torch.Tensor:
        """Estimate V(s') by the least target critic at the target actor's noisy action; [N]."""
        actions: torch.Tensor = self.slow_actor(states)
        noise = (0.2 * torch.randn_like(actions)).clamp(-0.5, 0.5)
        return values(self.slow_critics, states, (actions + noise).clamp(-1, 1)).amin(dim=0)

    def value_of(self, states: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """Compute the first critic's Q, [N], with gradients to `actions` but not to the critic."""
        critic = self.critics[:1].requires_grad_(False)
        found = values(critic, states, actions)[0]
        critic.requires_grad_(True)
        return found

    def policy(self) -> Policy:
        return acting(self.actor)


def values(critics: nn.ModuleList, states: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
    """Compute Q of each critic, [critics, ...], for states [..., S] and actions [..., A]."""
    seen = torch.cat([states, actions], dim=-1)
    return torch.stack([critic(seen).squeeze(-1) for critic in critics])


class TD3BC(ActorCritic):
    """TD3+BC (Fujimoto and Gu 2021): the actor maximises Q and stays close to the log's actions.

    The actor's loss is ``-alpha Q(s, pi(s)) / mean |Q(s, a)| + |pi(s) - a|^2``. Unlike in the
    paper, the actor is updated in every step, not in every other step.
    """

    alpha = 2.5

    def actor_loss(self, step: Transitions) -> torch.Tensor:
        chosen = self.actor(step.states)
        scale = self.alpha / self.value_of(step.states, step.actions).abs().mean().clamp(min=1e-6)
        gain = scale.detach() * self.value_of(step.states, chosen).mean()
        return (chosen - step.actions).square().mean() - gain


class IQL(ActorCritic):
    """Implicit Q-learning (Kostrikov, Nair and Levine 2021): training evaluates Q at logged actions
    only.

    V(s) is an upper expectile of Q(s, a) over the log's actions; the actor maximises the likelihood
    of the log's actions with weights ``exp(beta (Q(s, a) - V(s)))``, at most 100.
    """

    expectile, beta = 0.7, 3.0
    actor: NormalActor

    def __init__(self, steps: Trajectories) -> None:
        super().__init__(steps)
        self.actor = NormalActor(steps.states.shape[-1])
        self.slow_actor = copy.deepcopy(self.actor).requires_grad_(False)
        self.value = perceptron(steps.states.shape[-1], 1)

    def next_value(self, states: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.value(states).squeeze(-1)
        return found

    def regulariser(self, step: Transitions) -> torch.Tensor:
        gap = self._advantage(step)
        weight = torch.where(gap > 0, self.expectile, 1 - self.expectile)
        return (weight * gap.square()).mean()

    def actor_loss(self, step: Transitions) -> torch.Tensor:
        weight = (self.beta * self._advantage(step)).exp().clamp(max=100).detach()
        return (weight * self.actor.loss(step.states, step.actions)).mean()

    def _advantage(self, step: Transitions) -> torch.Tensor:
        with torch.no_grad():
            value = values(self.slow_critics, step.states, step.actions).amin(dim=0)
        return value - self.value(step.states).squeeze(-1)


class CQL(ActorCritic):
    """Conservative Q-learning (Kumar, Zhou, Tucker and Levine 2020): penalises values of actions
    that are not in the log.

    ``alpha (log mean_i exp Q(s, a_i) - Q(s, a))`` is added to the critics' loss; half of the a_i
    are uniform, half are the actor's actions with noise. The actor is deterministic, maximises Q.
    """

    alpha, actions, noise = 5.0, 8, 0.2

    def regulariser(self, step: Transitions) -> torch.Tensor:
        half = self.actions // 2
        states = step.states.expand(half, -1, -1)
        with torch.no_grad():
            near = self.actor(states)
            near = (near + self.noise * torch.randn_like(near)).clamp(-1, 1)
            tried = torch.cat([torch.rand_like(near) * 2 - 1, near])
        found = values(self.critics, step.states.expand(2 * half, -1, -1), tried)
        high = found.logsumexp(dim=1) - math.log(2 * half)
        return self.alpha * (high - values(self.critics, step.states, step.actions)).mean()

    def actor_loss(self, step: Transitions) -> torch.Tensor:
        return -self.value_of(step.states, self.actor(step.states)).mean()


METHODS: dict[str, type[Critics]] = {"cql": CQL, "iql": IQL, "td3+bc": TD3BC, "dqn": DQN}


def train_actor_critic(method: str, log: Episodes, options: OfflineOptions, seed: int) -> Policy:
    """Train a policy on a log by `method`, a key of `METHODS`; seeds torch's global generator.

    Raises InvalidInputError for other methods.
    """
    if method not in METHODS:
        raise InvalidInputError("cannot train a policy", "method", method,
                                f"one of {list(METHODS)}", "correct the name of the method")
    torch.manual_seed(seed)
    model = METHODS[method](log.steps)
    train_offline(model, model, log, options)
    return model.policy()
