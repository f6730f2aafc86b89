"""Logs of the shop as Minari data sets, checked with Minari."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oper.errors import FileFormatError, InvalidInputError
from oper.rl_rec.simulation.actor_critic import train_actor_critic
from oper.rl_rec.simulation.offline import OfflineOptions, offline_dataset
from oper.rl_rec.simulation.shop import ACTION_DIM, Returning, synthetic_shop

minari = pytest.importorskip("minari")
from oper.rl_rec.simulation.environment import ShopEnvironment  # noqa: E402
from oper.rl_rec.simulation.minari_logs import read_minari, write_minari  # noqa: E402


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))


@pytest.mark.parametrize("law", [None, Returning(horizon=8)])
def test_a_log_is_read_back_bit_for_bit(law: Returning | None) -> None:
    shop = synthetic_shop(0, law)
    log = offline_dataset(shop, "random", 12, seed=3)
    write_minari(log, shop, "oper/shop-v0")
    dataset = minari.load_dataset("oper/shop-v0")
    assert (dataset.total_episodes, dataset.total_steps) == (12, int(log.pages.sum()))
    for n, episode in enumerate(dataset.iterate_episodes()):
        assert episode.rewards.sum() == log.clicks[n]
        assert episode.terminations.tolist() == [False] * (len(episode) - 1) + [True]
        assert all(map(dataset.observation_space.contains, episode.observations))
    back = read_minari("oper/shop-v0")
    for name in ("states", "actions", "rewards", "returns"):
        kept, found = (torch.where(
            x.steps.valid.view(*x.steps.valid.shape, *(1,) * (getattr(x.steps, name).ndim - 2)),
            getattr(x.steps, name), 0) for x in (log, back))
        assert torch.equal(kept, found)
    assert torch.equal(back.steps.valid, log.steps.valid) and back.policy == "random"
    assert back.last is not None and log.last is not None and torch.equal(back.last, log.last)
    options, past = OfflineOptions(steps=2, batch_size=4), log.steps
    assert torch.equal(*(train_actor_critic("iql", x, options, 1)(past) for x in (log, back)))


def test_a_log_of_the_environment() -> None:
    """Read a data set that Minari's DataCollector wrote."""
    env, rng, buffers = ShopEnvironment(synthetic_shop(1)), np.random.default_rng(0), []
    for seed in range(3):
        seen, actions, rewards, done = [env.reset(seed=seed)[0]], [], [], False
        while not done:
            actions.append(rng.uniform(-1, 1, ACTION_DIM).astype(np.float32))
            observation, reward, done, _, _ = env.step(actions[-1])
            seen.append(observation)
            rewards.append(reward)
        buffers.append(minari.data_collector.EpisodeBuffer(
            observations=np.stack(seen), actions=np.stack(actions), rewards=rewards,
            terminations=[False] * (len(rewards) - 1) + [True],
            truncations=[False] * len(rewards)))
    minari.create_dataset_from_buffers("agent-v1", buffers, env=env)
    log = read_minari("agent-v1")
    assert log.pages.tolist() == [len(b.rewards) for b in buffers]
    for n, buffer in enumerate(buffers):
        count = len(buffer.rewards)
        assert np.array_equal(log.steps.states[n, :count], buffer.observations[:-1])
        assert np.array_equal(log.steps.actions[n, :count], buffer.actions)
        wanted = np.cumsum(buffer.rewards[::-1])[::-1]
        assert np.array_equal(log.steps.returns[n, :count], wanted)


def cut_off(buffer: Any) -> Any:
    return replace(buffer, terminations=[False, False], truncations=[False, True])


def of_other_actions(buffer: Any) -> Any:
    return replace(buffer, actions=buffer.actions[:, :3])


def of_numbered_actions(buffer: Any) -> Any:
    return replace(buffer, actions=np.array([0, 1]))


@pytest.mark.parametrize(("change", "message"), [
    (cut_off, "terminated episodes"), (of_other_actions, "shapes of observations"),
    (of_numbered_actions, "shapes of observations")])
def test_data_sets_of_other_environments_are_refused(change: Callable[[Any], Any], message: str
                                                     ) -> None:
    from gymnasium.spaces import Box, Discrete

    env = ShopEnvironment(synthetic_shop(1))
    buffer = change(minari.data_collector.EpisodeBuffer(
        observations=np.zeros((3, 91), np.float32), actions=np.zeros((2, ACTION_DIM), np.float32),
        rewards=[0.0, 1.0], terminations=[False, True], truncations=[False, False]))
    minari.create_dataset_from_buffers(
        "odd-v0", [buffer], observation_space=env.observation_space,
        action_space=Box(-1, 1, buffer.actions.shape[1:], np.float32)
        if buffer.actions.ndim > 1 else Discrete(2))
    with pytest.raises(InvalidInputError, match=message):
        read_minari("odd-v0")


def test_names_that_are_taken_or_missing() -> None:
    shop = synthetic_shop(0)
    log = offline_dataset(shop, "random", 2, seed=3)
    write_minari(log, shop, "twice-v0")
    with pytest.raises(InvalidInputError, match="already exists"):
        write_minari(log, shop, "twice-v0")
    with pytest.raises(InvalidInputError, match=r"log\.last"):
        write_minari(replace(log, last=None), shop, "once-v0")
    with pytest.raises(FileFormatError, match="minari list local"):
        read_minari("nowhere-v0")
