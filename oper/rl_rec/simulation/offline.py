"""Policies for the simulated shop, logs of their visits, and offline training on such logs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from oper.errors import InvalidInputError, require, require_fields
from oper.ranges import Positive, PositiveAmount, rules_of
from oper.rl_rec.models.cdt4rec import CDT4RecConfig
from oper.rl_rec.models.continuous import (
    ContinuousCDT4Rec,
    Trajectories,
    censored_loss,
    perceptron,
)
from oper.rl_rec.simulation.shop import ACTION_DIM, NUM_FEATURES, PAGE, Shop, Visits

_STDS = (0.3, 0.6, 1.0, 1.5)  # standard deviations of the noise in medium and mixed logs
_PAGE_SCALE = 10.0
REWARD_SCALE = 10.0  # most clicks of a page


class Policy(Protocol):
    """Chooses actions for n customers at once."""

    def __call__(self, past: Trajectories) -> torch.Tensor:
        """Return actions, float32 [n, 27].

        Args:
            past: trajectories so far, [n, t, ...]. The last of the t observations is the current
                one, for which action and reward are 0; `valid` is false where a customer has left.
        """


@dataclass(frozen=True, slots=True, eq=False)
class Episodes:
    """E logged episodes: a visit each or, if customers return, all visits of a customer.

    Attributes:
        steps: trajectories [E, T, ...], padded on the right, with undiscounted returns-to-go.
        policy: name of the policy that chose the actions.
        last: observation after the last step, float32 [E, S]; None = not known.

    Raises:
        InvalidInputError: there is no episode, or one has no first step.
    """

    steps: Trajectories
    policy: str
    last: torch.Tensor | None = None

    def __post_init__(self) -> None:
        valid = self.steps.valid
        begun = int(valid[:, :1].sum())
        require("invalid log of visits", "serve customers, and log from the first page on",
                ("episodes with a first step", f"{begun} of {len(valid)}",
                 0 < begun == len(valid), "all of them, and at least one"))

    @property
    def clicks(self) -> np.ndarray:
        """Number of clicks in each episode, float64 [E]."""
        return self.steps.rewards.sum(dim=1).double().numpy()

    @property
    def pages(self) -> np.ndarray:
        """Number of pages in each episode, int64 [E]."""
        return self.steps.valid.sum(dim=1).numpy()


def collect_episodes(shop: Shop, policy: Policy, count: int, seed: int, name: str = "") -> Episodes:
    """Serve `count` customers by a policy until all have left, and log the episodes.

    Equal seeds give equal customers; the policy draws from torch's global generator. `name` is
    recorded as `Episodes.policy`.
    """
    visits = Visits(shop, count, seed)
    states: list[torch.Tensor] = []
    actions: list[torch.Tensor] = []
    rewards: list[torch.Tensor] = []
    valid: list[torch.Tensor] = []
    while not bool(visits.done.all()):
        states.append(visits.observe())
        valid.append(~visits.done)
        none = torch.zeros(count, 1)
        past = Trajectories(
            torch.stack(states, dim=1),
            torch.cat([*(a[:, None] for a in actions), none[..., None].expand(-1, 1, ACTION_DIM)],
                      dim=1),
            torch.cat([*(r[:, None] for r in rewards), none], dim=1),
            torch.zeros(count, len(states)), torch.stack(valid, dim=1))
        with torch.no_grad():
            actions.append(policy(past).clamp(-1, 1))
        rewards.append(visits.step(actions[-1]).float())
    reward = torch.stack(rewards, dim=1)
    return Episodes(Trajectories(torch.stack(states, dim=1), torch.stack(actions, dim=1), reward,
                                 to_go(reward), torch.stack(valid, dim=1)), name, visits.observe())


def to_go(rewards: torch.Tensor) -> torch.Tensor:
    """Compute undiscounted returns-to-go [E, T] of rewards [E, T]."""
    return rewards.flip(1).cumsum(dim=1).flip(1)


def random_policy(past: Trajectories) -> torch.Tensor:
    """Choose uniformly random actions in [-1, 1], float32 [n, 27]."""
    return torch.rand(past.states.shape[0], ACTION_DIM) * 2 - 1


class DrawPerCustomer:
    """Draws one of several numbers for each customer at the first page, and caches it."""

    def __init__(self, choices: tuple[float, ...]) -> None:
        self.choices = torch.tensor(choices)
        self._kept = torch.zeros(0)

    def __call__(self, past: Trajectories) -> torch.Tensor:
        if past.states.shape[1] == 1:
            shape = past.states.shape[0], 1
            one_only = self.choices.numel() == 1
            drawn = torch.zeros(shape, dtype=torch.int64) if one_only else torch.randint(
                0, self.choices.numel(), shape)
            self._kept = self.choices[drawn]
        return self._kept


class Oracle:
    """Policy that uses the shop's networks to maximise the expected clicks of the current page.

    Adam optimises the action from several starting points; the best result is used. Without
    returning customers, actions affect neither customers nor the length of a visit, so this is the
    best policy. With returning ones it is myopic unless the second attribute has a weight.

    Args:
        shop: the shop's networks.
        starts, steps: number of starting points, and of Adam's steps.
        weights: weights of the expected second attribute in the objective, one drawn per customer.
    """

    def __init__(self, shop: Shop, starts: int = 3, steps: int = 40,
                 weights: tuple[float, ...] = (0.0,)) -> None:
        self.shop, self.starts, self.steps = shop, starts, steps
        self._weight = DrawPerCustomer(weights)

    def __call__(self, past: Trajectories) -> torch.Tensor:
        now = past.states[:, -1]
        features = now[:, :NUM_FEATURES].repeat(self.starts, 1)
        page = now[:, PAGE].repeat(self.starts)
        weight = self._weight(past)[:, 0].repeat(self.starts)

        def objective(actions: torch.Tensor) -> torch.Tensor:
            clicks, other = self.shop.expected(features, page, actions)
            return clicks + weight * other

        with torch.enable_grad():
            raw = (torch.randn(features.shape[0], ACTION_DIM) * 0.3).requires_grad_()
            optimizer = torch.optim.Adam([raw], lr=0.2)
            for _ in range(self.steps):
                loss = -objective(torch.tanh(raw)).sum()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        actions = torch.tanh(raw.detach())
        best = objective(actions).view(self.starts, -1).argmax(dim=0)
        return actions.view(self.starts, -1, ACTION_DIM)[best, torch.arange(best.numel())]


class Noisy:
    """Adds normal noise to a policy's actions, with a standard deviation per customer, drawn from
    `stds`, so that the quality of service differs between customers."""

    def __init__(self, policy: Policy, stds: tuple[float, ...]) -> None:
        self.policy, self._std = policy, DrawPerCustomer(stds)

    def __call__(self, past: Trajectories) -> torch.Tensor:
        std, actions = self._std(past), self.policy(past)
        return actions + std * torch.randn_like(actions)


def graded_policy(shop: Shop, grade: str) -> Policy:
    """Make the behaviour policy of a log of the given quality.

    Args:
        shop: the shop's networks.
        grade: ``"random"``; ``"medium"``: `Oracle` with normal noise, whose standard deviation
            is drawn per customer from 0.3 to 1.5; ``"expert"``: `Oracle` with noise of standard
            deviation 0.05; ``"mixed"``: as medium, with the weight of the second attribute in
            `Oracle` also drawn per customer.

    Raises:
        InvalidInputError: another grade.
    """
    policies: dict[str, Callable[[], Policy]] = {
        "random": lambda: random_policy,
        "medium": lambda: Noisy(Oracle(shop), _STDS),
        "expert": lambda: Noisy(Oracle(shop), (0.05,)),
        "mixed": lambda: Noisy(Oracle(shop, 1, 15, weights=(0.0, 0.5, 2.0)), _STDS)}
    if grade not in policies:
        raise InvalidInputError("unknown behaviour policy", "grade", grade,
                                f"one of {list(policies)}", "correct the name")
    return policies[grade]()


def offline_dataset(shop: Shop, grade: str, count: int, seed: int) -> Episodes:
    """Log `count` customers served by the `graded_policy` `grade`.

    `seed` determines the entire log and seeds torch's global generator.
    """
    torch.manual_seed(seed)
    return collect_episodes(shop, graded_policy(shop, grade), count, seed, grade)


def normalised(states: torch.Tensor) -> torch.Tensor:
    """Scale observations [..., S] as network inputs: counts, page and day become of order 1."""
    return torch.cat([states[..., :NUM_FEATURES], states[..., NUM_FEATURES:] / _PAGE_SCALE], dim=-1)


@dataclass(frozen=True, slots=True)
class OfflineOptions:
    """Options of offline training.

    Attributes:
        steps: number of gradient steps.
        batch_size: episodes per step.
        lr: Adam's learning rate.
    """

    steps: Positive = 600
    batch_size: Positive = 64
    lr: PositiveAmount = 1e-3

    def __post_init__(self) -> None:
        require_fields(self, "invalid options", "change this field of OfflineOptions",
                       *rules_of(self))


def train_offline(model: nn.Module, loss_of: Callable[[Trajectories], torch.Tensor], log: Episodes,
                  options: OfflineOptions, window: int = 0) -> None:
    """Train a model on logged episodes, with observations scaled by `normalised`.

    Args:
        model: the model; it is in evaluation mode afterwards.
        loss_of: computes the loss of a batch.
        log: the episodes.
        options: options of training.
        window: maximum number of steps of an episode in a batch, from a random position on; 0 = no
            limit.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    steps = log.steps._replace(states=normalised(log.steps.states))
    count = steps.valid.shape[0]
    model.train()
    for step in range(options.steps):
        if isinstance(model, ContinuousCDT4Rec):
            model.schedule(step, options.steps)
        at = torch.randint(0, count, (options.batch_size,))
        loss = loss_of(_subsequences(steps, at, window))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()


def _subsequences(steps: Trajectories, at: torch.Tensor, window: int) -> Trajectories:
    sizes = steps.valid[at].sum(dim=1)
    longest = int(sizes.max())
    if not window or longest <= window:
        return Trajectories(*(part[at, :longest] for part in steps))
    first = (torch.rand(at.numel()) * (sizes - window + 1).clamp(min=1)).long()
    place = first[:, None] + torch.arange(window)
    return Trajectories(*(part[at[:, None], place] for part in steps))


def actor(state_dim: int) -> nn.Sequential:
    """Make a network from an observation [..., S] to an action in [-1, 1]^27."""
    return nn.Sequential(perceptron(state_dim, ACTION_DIM), nn.Tanh())


class NormalActor(nn.Module):
    """Network from an observation to the mean and standard deviation of an action.

    Args:
        state_dim: length S of an observation.
    """

    def __init__(self, state_dim: int) -> None:
        super().__init__()
        self.network = perceptron(state_dim, ACTION_DIM + 1)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return mean actions, clamped to [-1, 1], float32 [..., 27], for states [..., S]."""
        found: torch.Tensor = self.network(states)[..., :-1].clamp(-1, 1)
        return found

    def loss(self, states: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """Compute `censored_loss`, float32 [...], of logged actions [..., 27]."""
        return censored_loss(self.network(states), actions)


def acting(network: nn.Module) -> Policy:
    """Return the policy that applies `network` to the latest observation, after `normalised`."""
    return lambda past: network(normalised(past.states[:, -1]))


def clone_behaviour(log: Episodes, options: OfflineOptions, seed: int) -> Policy:
    """Train a policy by behaviour cloning: maximise the likelihood of logged actions."""
    torch.manual_seed(seed)
    network = NormalActor(log.steps.states.shape[-1])
    train_offline(network, lambda batch: network.loss(batch.states, batch.actions)[
        batch.valid].mean(), log, options)
    return acting(network)


class ReturnPolicy:
    """Policy of a `ContinuousCDT4Rec` conditioned on a target return.

    Args:
        model: the trained model.
        target: target number of clicks in an episode, from which clicks so far are subtracted.
    """

    def __init__(self, model: ContinuousCDT4Rec, target: float) -> None:
        self.model, self.target = model, target

    def __call__(self, past: Trajectories) -> torch.Tensor:
        clicked = past.rewards.cumsum(dim=1) - past.rewards
        recent = -self.model.config.steps
        asked = past._replace(states=normalised(past.states), returns=self.target - clicked)
        return self.model.act(Trajectories(*(part[:, recent:] for part in asked)))[:, -1]


def train_cdt4rec(log: Episodes, config: CDT4RecConfig, options: OfflineOptions, seed: int
                  ) -> ContinuousCDT4Rec:
    """Train a `ContinuousCDT4Rec` on subsequences of ``config.steps`` pages of logged episodes.

    Seeds torch's global generator."""
    torch.manual_seed(seed)
    model = ContinuousCDT4Rec(config, log.steps.states.shape[-1], ACTION_DIM,
                              returns=max(1.0, float(log.steps.returns.max())),
                              rewards=REWARD_SCALE)
    train_offline(model, lambda batch: model(batch)[0], log, options, config.steps)
    return model


def high_return(log: Episodes, quantile: float = 0.9) -> float:
    """Return a quantile of the clicks per logged episode, for `ReturnPolicy.target`.

    Raises InvalidInputError if `quantile` is not in 0..1.
    """
    require("cannot choose a target return", "choose a quantile of the logged returns",
            ("quantile", quantile, 0 <= quantile <= 1, "in 0..1"))
    return float(np.quantile(log.clicks, quantile))


def calibrated_target(wanted: float, targets: Sequence[float], achieved: Sequence[float]) -> float:
    """Return the `ReturnPolicy.target` that is expected to achieve the return `wanted`.

    Interpolates linearly between pairs (target, mean achieved return) of customers who were served
    before. Targets that achieved no more than a lower target are left out. If `wanted` is below the
    range of achieved returns, returns the first target; if above, the target that achieved most.

    Args:
        wanted: the return to achieve.
        targets: targets in increasing order.
        achieved: mean return of customers who were served with each target.

    Raises:
        InvalidInputError: not one finite return for every target, or targets that do not increase.
    """
    asked, got = np.array(targets, float), np.array(achieved, float)
    require("cannot calibrate a target", "serve customers with each of some increasing targets",
            ("wanted", wanted, np.isfinite(wanted), "a finite return"),
            ("targets", targets, asked.size > 0 and np.isfinite(asked).all()
             and bool((np.diff(asked) > 0).all()), "at least one, finite, in increasing order"),
            ("achieved", achieved, got.shape == asked.shape and np.isfinite(got).all(),
             "a finite return for every target"))
    more = np.diff(np.maximum.accumulate(got), prepend=-np.inf) > 0
    return float(np.interp(wanted, got[more], asked[more]))


SIMULATOR_CONFIG: Any = functools.partial(
    CDT4RecConfig, dim=64, layers=2, heads=2, steps=20, dropout=0.0, reward_loss="mse",
    reward_weight=0.3, gamma=1.0, returns="estimated")
