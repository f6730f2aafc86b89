"""Policies for the simulated shop, logs of their visits, and training from such logs alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from oper.errors import InvalidInputError, fail
from oper.rl_rec.models.cdt4rec import CDT4RecConfig, ContinuousCDT4Rec, Trajectories
from oper.rl_rec.simulation.shop import ACTION_DIM, NUM_FEATURES, OBSERVATION_DIM, Shop, Visits

GRADES = ("random", "medium", "expert")
_PAGE_SCALE = 10.0


class Policy(Protocol):
    """Chooses actions for many visits at once."""

    def __call__(self, past: Trajectories) -> torch.Tensor:
        """Actions float32 [n, 27].

        Args:
            past: everything so far, [n, t, ...]: observations up to now, of which the last is the
                present one; actions and rewards of the pages before it (0 at the present one);
                `valid` says who was there.
        """


@dataclass(frozen=True, slots=True, eq=False)
class Episodes:
    """Logged visits, padded on the right.

    Attributes:
        steps: states float32 [E, T, 91], actions [E, T, 27], rewards [E, T], returns-to-go [E, T]
            (undiscounted), valid bool [E, T].
        policy: what has chosen the actions.
    """

    steps: Trajectories
    policy: str

    @property
    def clicks(self) -> np.ndarray:
        """Clicks of each visit, float64 [E]."""
        return self.steps.rewards.sum(dim=1).double().numpy()

    @property
    def pages(self) -> np.ndarray:
        """Pages of each visit, int64 [E]."""
        return self.steps.valid.sum(dim=1).numpy()


def collect_visits(shop: Shop, policy: Policy, count: int, seed: int, name: str = "") -> Episodes:
    """Let `count` customers be served by a policy until all have left.

    Equal seeds bring equal customers; what the policy draws comes from torch's global generator.
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
    returns = reward.flip(1).cumsum(dim=1).flip(1)
    return Episodes(Trajectories(torch.stack(states, dim=1), torch.stack(actions, dim=1), reward,
                                 returns, torch.stack(valid, dim=1)), name)


def random_policy(past: Trajectories) -> torch.Tensor:
    """Uniform in [-1, 1]."""
    return torch.rand(past.states.shape[0], ACTION_DIM) * 2 - 1


class Oracle:
    """Knows the shop's networks and ascends the expected clicks of the present page.

    Actions change neither the customer nor the length of a visit, so the best page is the best
    policy. Adam from several starts; the best point found counts.

    Args:
        shop: its networks.
        starts, steps: of the ascent.
    """

    def __init__(self, shop: Shop, starts: int = 3, steps: int = 40) -> None:
        self.shop, self.starts, self.steps = shop, starts, steps

    def __call__(self, past: Trajectories) -> torch.Tensor:
        now = past.states[:, -1]
        features = now[:, :NUM_FEATURES].repeat(self.starts, 1)
        page = now[:, -1].repeat(self.starts)
        with torch.enable_grad():
            raw = (torch.randn(features.shape[0], ACTION_DIM) * 0.3).requires_grad_()
            optimizer = torch.optim.Adam([raw], lr=0.2)
            for _ in range(self.steps):
                loss = -self.shop.expected_clicks(features, page, torch.tanh(raw)).sum()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        actions = torch.tanh(raw.detach())
        clicks = self.shop.expected_clicks(features, page, actions).view(self.starts, -1)
        best = clicks.argmax(dim=0)
        return actions.view(self.starts, -1, ACTION_DIM)[best, torch.arange(best.numel())]


class Noisy:
    """Another policy's actions with N(0, std) added; a customer keeps one std for the whole visit,
    drawn from `stds`: some are served well and some badly."""

    def __init__(self, policy: Policy, stds: tuple[float, ...]) -> None:
        self.policy, self.stds = policy, torch.tensor(stds)
        self._std = torch.zeros(0)

    def __call__(self, past: Trajectories) -> torch.Tensor:
        if past.states.shape[1] == 1:
            drawn = torch.randint(0, self.stds.numel(), (past.states.shape[0], 1))
            self._std = self.stds[drawn]
        actions = self.policy(past)
        return actions + self._std * torch.randn_like(actions)


def graded_visits(shop: Shop, grade: str, count: int, seed: int) -> Episodes:
    """A log of the given quality, without any online training.

    Args:
        shop: its networks.
        grade: ``"random"``; ``"medium"``: the oracle with noise of 0.3 to 1.5 that differs from
            visit to visit; ``"expert"``: the oracle with noise of 0.05.
        count: visits.
        seed: of everything; sets torch's generator.
    """
    torch.manual_seed(seed)
    policies: dict[str, Callable[[], Policy]] = {
        "random": lambda: random_policy,
        "medium": lambda: Noisy(Oracle(shop), (0.3, 0.6, 1.0, 1.5)),
        "expert": lambda: Noisy(Oracle(shop), (0.05,))}
    if grade not in policies:
        raise InvalidInputError(fail("no such log", "grade", grade, f"one of {GRADES}",
                                     "choose the behaviour policy of the log"))
    return collect_visits(shop, policies[grade](), count, seed, grade)


def normalised(states: torch.Tensor) -> torch.Tensor:
    """Observations as networks take them: counts and the page number of the order of 1."""
    return torch.cat([states[..., :NUM_FEATURES], states[..., NUM_FEATURES:] / _PAGE_SCALE], dim=-1)


@dataclass(frozen=True, slots=True)
class OfflineOptions:
    """Training from a log.

    Attributes:
        steps: gradient steps.
        batch_size: visits per step.
        lr: Adam's learning rate.
    """

    steps: int = 600
    batch_size: int = 64
    lr: float = 1e-3


def _fit(model: nn.Module, loss_of: Callable[[Trajectories], torch.Tensor], log: Episodes,
         options: OfflineOptions) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    count = log.steps.valid.shape[0]
    model.train()
    for _ in range(options.steps):
        at = torch.randint(0, count, (options.batch_size,))
        longest = int(log.steps.valid[at].sum(dim=1).max())
        loss = loss_of(Trajectories(*(part[at, :longest] for part in log.steps)))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()


def clone_behaviour(log: Episodes, options: OfflineOptions, seed: int) -> Policy:
    """Behaviour cloning: a network from the present observation to the logged action."""
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(OBSERVATION_DIM, 128), nn.GELU(), nn.Linear(128, 128),
                            nn.GELU(), nn.Linear(128, ACTION_DIM), nn.Tanh())

    def loss_of(batch: Trajectories) -> torch.Tensor:
        error = (network(normalised(batch.states)) - batch.actions).square().mean(dim=-1)
        return error[batch.valid].mean()

    _fit(network, loss_of, log, options)
    return lambda past: network(normalised(past.states[:, -1]))


class ReturnPolicy:
    """A `ContinuousCDT4Rec` that is asked for a return.

    Args:
        model: trained.
        target: clicks of the whole visit to ask for; what has been clicked is taken off.
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
    """A `ContinuousCDT4Rec` from logged visits of at most ``config.steps`` pages; longer ones are
    cut there."""
    torch.manual_seed(seed)
    model = ContinuousCDT4Rec(config, OBSERVATION_DIM, ACTION_DIM,
                              returns=max(1.0, float(log.steps.returns.max())), rewards=10.0)
    cut = Trajectories(*(part[:, :config.steps] for part in log.steps))
    cut = cut._replace(states=normalised(cut.states))
    _fit(model, lambda batch: model(batch)[0], Episodes(cut, log.policy), options)
    return model


def high_return(log: Episodes, quantile: float = 0.9) -> float:
    """A quantile of the logged visits' clicks: a return to ask for."""
    return float(np.quantile(log.clicks, quantile))


SIMULATOR_CONFIG: Any = functools.partial(
    CDT4RecConfig, dim=64, layers=2, heads=2, steps=20, dropout=0.0, reward_loss="mse",
    reward_weight=0.3, gamma=1.0)
