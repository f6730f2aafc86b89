"""Returning customers: their model, the gymnasium environment, and offline learning."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from oper.errors import InvalidInputError
from oper.rl_rec.models.continuous import Trajectories
from oper.rl_rec.simulation.actor_critic import (
    CHOICES,
    DQN,
    FOLLOWED,
    METHODS,
    Critics,
    Transitions,
    train_actor_critic,
)
from oper.rl_rec.simulation.offline import (
    Episodes,
    OfflineOptions,
    Oracle,
    clone_behaviour,
    collect_visits,
    graded_visits,
    normalised,
    random_policy,
    train_offline,
)
from oper.rl_rec.simulation.shop import (
    ACTION_DIM,
    NUM_FEATURES,
    OBSERVATION_DIM,
    VISITS,
    Returning,
    Shop,
    Visits,
    synthetic_shop,
)

SHOP = synthetic_shop(0, Returning())


class OneAnswer(nn.Module):
    """A page network with which every page gets three clicks and the same second attribute."""

    def __init__(self, attribute: int) -> None:
        super().__init__()
        self.logits = torch.full((21,), -1e3)
        self.logits[3] = self.logits[11 + attribute] = 0

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        return self.logits.expand(seen.shape[0], -1)


def shop_of(attribute: int) -> Shop:
    return replace(SHOP, page=OneAnswer(attribute))


def test_satisfaction_is_a_moving_average() -> None:
    visits = Visits(shop_of(9), 50, seed=3)
    want, before = 4.5, visits.observe()
    assert before.shape == (50, OBSERVATION_DIM + 3)
    for _ in range(4):
        here = ~visits.done
        visits.step(torch.zeros(50, ACTION_DIM))
        want = 0.7 * want + 0.3 * 9
        torch.testing.assert_close(visits.satisfaction[here], torch.full((int(here.sum()),), want))
    now = visits.observe()
    assert torch.equal(now[:, :NUM_FEATURES], before[:, :NUM_FEATURES])
    assert torch.equal(now[:, VISITS], visits.visits.float())


def test_the_law_of_return() -> None:
    """Compare return rates and mean days with the formulas, for visits of one page."""
    count = 20_000
    visits = Visits(shop_of(9), count, seed=3)
    visits._patience[:] = 1
    visits.step(torch.zeros(count, ACTION_DIM))
    discontent = 1 - (0.7 * 4.5 + 0.3 * 9) / 9
    assert float(visits.done.float().mean()) == pytest.approx(0.3 * discontent, abs=0.01)
    back = ~visits.done
    assert float((visits.day[back] - 1).float().mean()) == pytest.approx(1 + 9 * discontent,
                                                                          abs=0.05)
    assert bool((visits.visits[back] == 2).all()) and not visits.page[back].any()
    assert bool((visits.day[~back] == 1).all()) and bool((visits.visits[~back] == 1).all())


def test_shown_pages_decide_how_often_customers_return() -> None:
    def per_customer(shop: Shop) -> float:
        log = collect_visits(shop, random_policy, 200, 1)
        days = log.steps.states[..., OBSERVATION_DIM][log.steps.valid]
        assert days.min() >= 1 and days.max() <= 30
        assert torch.equal(log.steps.rewards, 3.0 * log.steps.valid)
        return float(log.steps.states[..., VISITS].amax(dim=1).mean())

    assert per_customer(shop_of(9)) > 3 * per_customer(shop_of(0))
    short = replace(SHOP, returning=Returning(horizon=1))
    once = collect_visits(short, random_policy, 50, 1).steps
    assert not (once.states[..., VISITS] > 1).any()
    with pytest.raises(InvalidInputError, match="horizon"):
        Returning(horizon=0)


def test_short_sight_costs_visits() -> None:
    """For the same customers, maximising each page's clicks gives fewer clicks in total."""
    torch.manual_seed(0)
    greedy, patient = (collect_visits(SHOP, Oracle(SHOP, 1, 20, weights=(w,)), 60, 5)
                       for w in (0.0, 1.5))
    rate = [e.clicks.sum() / e.pages.sum() for e in (greedy, patient)]
    assert rate[0] > rate[1] and patient.clicks.mean() > 1.4 * greedy.clicks.mean()
    assert torch.equal(greedy.steps.states[:, 0], patient.steps.states[:, 0])


def test_the_gymnasium_face_goes_on_after_a_visit() -> None:
    from gymnasium.utils.env_checker import check_env

    from oper.rl_rec.simulation.environment import ShopEnvironment

    env = ShopEnvironment(shop_of(9))
    check_env(env, skip_render_check=True)
    first, _ = env.reset(seed=2)
    done, days = False, []
    while not done:
        observation, reward, done, _, told = env.step(np.zeros(ACTION_DIM, np.float32))
        assert env.observation_space.contains(observation) and reward == 3
        assert (observation[:NUM_FEATURES] == first[:NUM_FEATURES]).all()
        days.append(told["day"])
    assert days == sorted(days) and told["visits"] > 3


def log_of(rewards: torch.Tensor, actions: torch.Tensor, states: torch.Tensor) -> Episodes:
    """Make a log with visits of one page, and a second visit of every other customer."""
    count = rewards.shape[0]
    valid = torch.ones(count, 2, dtype=torch.bool)
    valid[::2, 1] = False
    rewards = torch.where(valid, rewards, 0)
    returns = rewards.flip(1).cumsum(1).flip(1)
    return Episodes(Trajectories(states, actions, rewards, returns, valid), "test")


def test_transitions() -> None:
    torch.manual_seed(0)
    states, actions = torch.rand(6, 2, OBSERVATION_DIM), torch.rand(6, 2, ACTION_DIM)
    log = log_of(torch.arange(12.0).view(6, 2), actions, states).steps
    every = Transitions.of(log, 100)
    assert every.states.shape == (9, OBSERVATION_DIM)  # three customers have one page, three two
    torch.testing.assert_close(every.rewards, log.rewards[log.valid] / 10)
    first = log.valid & torch.tensor([True, False])
    goes_on = (first & log.valid[:, 1:])[log.valid]
    assert torch.equal(every.goes_on, goes_on.float()) and int(goes_on.sum()) == 3
    torch.testing.assert_close(every.next_states[goes_on], states[1::2, 1])
    some = Transitions.of(log, 4)
    assert some.states.shape[0] == 4
    assert len({tuple(row) for row in some.states.tolist()}) == 4


def random_steps(count: int = 8) -> Trajectories:
    torch.manual_seed(0)
    return log_of(torch.rand(count, 2), torch.rand(count, 2, ACTION_DIM),
                  torch.rand(count, 2, OBSERVATION_DIM)).steps


@pytest.mark.parametrize("method", METHODS)
def test_losses_reach_their_own_networks(method: str) -> None:
    log = random_steps()
    model = METHODS[method](log)
    step = Transitions.of(log, 50)

    def touched(loss: torch.Tensor) -> set[str]:
        model.zero_grad(set_to_none=True)
        loss.backward()
        return {name.split(".")[0] for name, p in model.named_parameters() if p.grad is not None}

    own = {"actor", *(["value"] if method == "iql" else [])} if method != "dqn" else set()
    assert touched(model(log)) == {"critics"} | own
    if own:
        assert {"actor"} <= touched(model.actor_loss(step)) <= own
    assert all(p.requires_grad for p in model.critics.parameters())


def test_slow_networks_follow() -> None:
    log = random_steps()
    model = METHODS["td3+bc"](log)
    with torch.no_grad():
        for p in model.critics.parameters():
            p.add_(1)
    before = [p.clone() for p in model.slow_critics.parameters()]
    model(log)
    for old, new in zip(before, model.slow_critics.parameters(), strict=True):
        torch.testing.assert_close(new - old, torch.full_like(old, FOLLOWED), atol=1e-6, rtol=0)


@pytest.mark.parametrize("method", ["cloned", *METHODS])
def test_learned_policies_do_better_than_the_log(method: str) -> None:
    """Clicks grow with the action's first number, whose mean in the log is 0."""
    torch.manual_seed(1)
    states, actions = torch.rand(400, 2, OBSERVATION_DIM), torch.rand(400, 2, ACTION_DIM) * 2 - 1
    log = log_of(5 + 5 * actions[..., 0], actions, states)
    options = OfflineOptions(steps=300, batch_size=128)
    past = log.steps._replace(states=log.steps.states[:, :1])
    policy = (clone_behaviour(log, options, 1) if method == "cloned"
              else train_actor_critic(method, log, options, 1))
    first = float(policy(past)[:, 0].mean().detach())
    assert abs(first) < 0.1 if method == "cloned" else first > 0.2


def test_dqn_is_double_q_learning_over_actions_of_the_log() -> None:
    """Compare with loops over choices; the policy takes the best choice."""
    log = random_steps(60)
    model = DQN(log)
    logged = {tuple(x) for x in log.actions[log.valid].tolist()}
    assert len(model.choices) == CHOICES and {tuple(x) for x in model.choices.tolist()} <= logged
    with torch.no_grad():
        for p in model.slow_critics.parameters():  # another network, that does not choose
            p.copy_(p.flip(0))
        states = log.states[:5, 0]
        found = model.next_value(states)
        for n in range(5):
            fast, slow = ([sum(float(critic(torch.cat([states[n], choice]))) / 2
                               for critic in critics) for choice in model.choices]
                          for critics in (model.critics, model.slow_critics))
            best = int(np.argmax(fast))
            assert best != int(np.argmax(slow))
            assert float(found[n]) == pytest.approx(slow[best], abs=1e-5)
            assert torch.equal(model.best(states[n:n + 1])[0], model.choices[best])
        past = log._replace(states=log.states[:, :1])
        assert torch.equal(model.policy()(past), model.best(normalised(past.states[:, 0])))


def test_dqn_learns_what_is_worth_more_later() -> None:
    """A positive action earns 1 and ends the visit; a negative one earns 0 now and 3 on the next
    page."""
    torch.manual_seed(1)
    states, actions = torch.zeros(400, 2, OBSERVATION_DIM), torch.rand(400, 2, ACTION_DIM) * 2 - 1
    states[:, 1] = 1.0
    at_once = actions[:, 0, 0] > 0
    valid = torch.stack([torch.ones_like(at_once), ~at_once], 1)
    rewards = torch.stack([at_once.float(), 3.0 * ~at_once], 1)
    log = Episodes(Trajectories(states, actions, rewards, rewards, valid), "test")
    policy = train_actor_critic("dqn", log, OfflineOptions(steps=150, batch_size=128), 1)
    chosen = policy(log.steps._replace(states=states[:1, :1]))
    assert float(chosen[0, 0]) < 0


def test_subsequences_of_long_visits() -> None:
    """All positions of a long visit are drawn, and none past its end."""
    torch.manual_seed(0)
    log = graded_visits(SHOP, "random", 40, seed=1)
    seen = torch.zeros_like(log.steps.valid)
    model = nn.Linear(1, 1)

    def loss_of(batch: Trajectories) -> torch.Tensor:
        assert batch.valid.shape[1] <= 4 and bool(batch.valid[:, 0].all())
        for row, valid in zip(batch.returns, batch.valid, strict=True):
            at = (log.steps.returns.unfold(1, 4, 1) == row).all(-1).nonzero()
            seen[at[:, :1], at[:, 1:] + torch.arange(4)[valid]] = True
        return model(torch.zeros(1)).sum()

    train_offline(model, loss_of, log, OfflineOptions(steps=200, batch_size=16), window=4)
    whole = log.steps.valid & (log.steps.returns > 0)
    assert bool(seen[whole].all())


def test_an_unknown_method_is_refused() -> None:
    log = log_of(torch.rand(4, 2), torch.rand(4, 2, ACTION_DIM),
                 torch.rand(4, 2, OBSERVATION_DIM))
    with pytest.raises(InvalidInputError, match="method"):
        train_actor_critic("ppo", log, OfflineOptions(steps=1), 1)
    for missing in (lambda x: x.policy(), lambda x: x.next_value(log.steps.states)):
        with pytest.raises(NotImplementedError):
            missing(Critics(log.steps))
