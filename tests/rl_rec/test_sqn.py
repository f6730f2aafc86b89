"""SQN, SA2C and DQN: losses against loops over steps, and learning in a small world."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from rec_support import invented, sequences

from oper.rl_rec.models.base import Histories, Sequences
from oper.rl_rec.models.sqn import SQN
from oper.rl_rec.registry import WORKLOADS

NAMES = ("sqn", "sa2c", "dqn")


def model_of(name: str, num_items: int, seed: int = 0, **changes: Any) -> SQN:
    torch.manual_seed(seed)
    config = WORKLOADS[name].config(**{"dim": 8, "layers": 1, "steps": 7, "window": 5, "dropout": 0,
                                       "negatives": 0} | changes)
    model = WORKLOADS[name].build(config, replace(invented(), num_items=num_items), "cpu")
    assert isinstance(model, SQN)
    return model


@pytest.mark.parametrize("name", NAMES)
def test_losses_are_those_of_their_definition(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare with loops over steps and heads that do not use the model's helpers."""
    lengths, skip, gamma = [4, 1, 6], [1, 0, 2], 0.6
    batch = sequences(lengths, skip, num_items=13)
    model = model_of(name, 13, gamma=gamma, q_weight=0.7, negatives=0)
    model.schedule(9, 10)
    others = torch.randint(12, (8, model.config.q_negatives or 1),
                           generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(torch, "randint", lambda *args, **kwargs: others)
    loss, parts = model(batch)
    with torch.no_grad():
        table = dict(model.items.named_parameters())["embeddings.item.weight"]
        weights = model.critic.weight.view(2, 9, 8)
        biases = model.critic.bias.view(2, 9)
        q_losses, a_losses, step = [], [], 0
        for n, (length, first) in enumerate(zip(lengths, skip, strict=True)):
            begin = sum(lengths[:n])
            items = batch.items[begin:begin + length]
            outputs = model.outputs(table[items][None])[0]

            def q(head: int, t: int, outputs: torch.Tensor = outputs) -> torch.Tensor:
                both = weights[head] @ outputs[t] + biases[head]
                return torch.cat([torch.tensor([-1e9]), table[1:] @ both[:8] + both[8]])

            for t in range(first, length):
                a, r = int(items[t]), float(batch.rewards[begin + t])
                of_step, advantages = 0.0, []
                for mine, other in ((0, 1), (1, 0)):
                    if t == length - 1:
                        wanted = float(batch.returns[begin + t])
                    else:
                        wanted = r + gamma * float(q(other, t + 1)[q(mine, t + 1).argmax()])
                    of_step += (wanted - float(q(mine, t)[a])) ** 2 / 4
                    stays = gamma * float(q(other, t)[q(mine, t).argmax()])
                    compared = [float(q(mine, t)[a])]
                    for i in (others[step] + 1).tolist() if model.config.q_negatives else []:
                        if i != a:
                            of_step += (stays - float(q(mine, t)[i])) ** 2 / 4
                            compared.append(float(q(mine, t)[i]))
                    advantages.append(compared[0] - np.mean(compared))
                q_losses.append(of_step)
                if r > 0:
                    scores = table[1:] @ outputs[t]
                    weight = np.clip(np.mean(advantages), 0, 10) if name == "sa2c" else 1.0
                    a_losses.append(weight * float(scores.logsumexp(0) - scores[a - 1]))
                step += 1
    assert step == 8 and any(a_losses)
    assert float(parts["q"]) == pytest.approx(np.mean(q_losses), rel=1e-4)
    want = 0.7 * np.mean(q_losses)
    if name != "dqn":
        assert float(parts["action"]) == pytest.approx(np.mean(a_losses), rel=1e-4)
        want += np.mean(a_losses)
    assert float(loss.detach()) == pytest.approx(want, rel=1e-4)
    assert set(parts) == ({"q"} if name == "dqn" else {"q", "action"})


def test_advantages_weigh_after_a_third_of_training() -> None:
    model = model_of("sa2c", 13)
    told = []
    for step in range(9):
        model.schedule(step, 9)
        told.append(model.weigh)
    assert told == [False] * 3 + [True] * 6
    never = model_of("sa2c", 13, actor="supervised")  # SNQN
    never.schedule(8, 9)
    assert not never.weigh


BAIT, PATIENT, NOTHING = 1, 2, 3


def world(count: int, steps: int, gamma: float) -> Sequences:
    """Random items: the bait gives 1, then a step without reward; the patient item gives 0.85."""
    items = torch.randint(1, 4, (count, steps))
    rewards, spoilt = torch.zeros(count, steps), torch.zeros(count, dtype=torch.bool)
    for t in range(steps):
        gain = torch.where(items[:, t] == BAIT, 1.0, torch.where(items[:, t] == PATIENT, 0.85, 0.0))
        rewards[:, t] = torch.where(spoilt, 0.0, gain)
        spoilt = (items[:, t] == BAIT) & ~spoilt
    returns = torch.zeros(count, steps + 1)
    for t in reversed(range(steps)):
        returns[:, t] = rewards[:, t] + gamma * returns[:, t + 1]
    return Sequences(torch.arange(count), items.flatten(), rewards.flatten(),
                     torch.full((count,), steps), torch.zeros(count, dtype=torch.int64),
                     returns[:, :-1].flatten())


def shares_of_best(name: str, gamma: float, **changes: Any) -> dict[int, float]:
    """Return how often each item is ranked first after histories without the bait."""
    model = model_of(name, 4, 1, dim=16, gamma=gamma, steps=6, window=0, targets="all",
                     **changes)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(250):
        model.schedule(step, 250)
        optimizer.zero_grad()
        model(world(64, 6, gamma))[0].backward()
        optimizer.step()
    model.eval()
    asked = Histories(torch.arange(4), torch.tensor([2, 2, 2, 3, 2, 3, 2]), torch.ones(7),
                      torch.tensor([1, 2, 2, 2]))
    best = model.scores(model.encode(asked), torch.arange(1, 4)).argmax(dim=1) + 1
    return {item: float((best == item).float().mean()) for item in (BAIT, PATIENT, NOTHING)}


def test_the_rewards_to_come_count() -> None:
    """The log is uniform, so only values distinguish the items, and only future rewards distinguish
    the patient item from the bait."""
    assert shares_of_best("dqn", 0.5, q_negatives=0)[PATIENT] == 1
    assert shares_of_best("dqn", 0.0, q_negatives=0)[BAIT] == 1
    assert shares_of_best("sa2c", 0.5, q_negatives=1)[PATIENT] == 1
