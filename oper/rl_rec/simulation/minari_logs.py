"""Write and read logs of the simulated shop as Minari data sets; requires the package minari.

An episode of a Minari data set (minari.farama.org) has one observation more than steps, the one
after the last step. Data sets are in Minari's folder, ``MINARI_DATASETS_PATH`` or
``~/.minari/datasets``.
"""

from __future__ import annotations

import warnings

import torch
from torch.nn.utils.rnn import pad_sequence

from oper.errors import FileFormatError, InvalidInputError, needs
from oper.rl_rec.models.continuous import Trajectories
from oper.rl_rec.simulation.environment import ShopEnvironment
from oper.rl_rec.simulation.offline import Episodes, to_go
from oper.rl_rec.simulation.shop import ACTION_DIM, OBSERVATION_DIM, RETURNING_DIM, Shop

with needs("cannot read or write Minari data sets", "oper[rl]"):
    import minari


def write_minari(log: Episodes, shop: Shop, dataset_id: str) -> None:
    """Write a log as a new data set.

    Args:
        log: a log from `collect_episodes`.
        shop: the shop of the log, which defines the spaces as in `ShopEnvironment`.
        dataset_id: id of the data set, ``name-vN`` or ``namespace/name-vN``.

    Raises:
        InvalidInputError: the log lacks last observations, or Minari refuses the id.
    """
    what, steps = f"cannot write the Minari data set {dataset_id!r}", log.steps
    if log.last is None:
        raise InvalidInputError(what, "log.last", None, "an observation after each episode",
                                "pass a log from collect_episodes")
    episodes = []
    for n, count in enumerate(log.pages.tolist()):
        ended = [False] * (count - 1) + [True]
        episodes.append(minari.data_collector.EpisodeBuffer(
            id=n, observations=torch.cat([steps.states[n, :count], log.last[n, None]]).numpy(),
            actions=steps.actions[n, :count].numpy(), rewards=steps.rewards[n, :count].tolist(),
            terminations=ended, truncations=[False] * count))
    env = ShopEnvironment(shop)
    with warnings.catch_warnings():  # about empty fields, such as the author
        warnings.simplefilter("ignore", UserWarning)
        try:
            minari.create_dataset_from_buffers(
                dataset_id, episodes, observation_space=env.observation_space,
                action_space=env.action_space, algorithm_name=log.policy or None,
                description=f"Visits to OPER's simulated shop ({shop.name})")
        except ValueError as error:
            raise InvalidInputError(what, "dataset_id", dataset_id, f"a valid new id ({error})",
                                    "choose another name or version") from error


def read_minari(dataset_id: str) -> Episodes:
    """Read a local data set written by `write_minari`, or by ``minari.DataCollector`` in a
    `ShopEnvironment`.

    Raises:
        FileFormatError: there is no such local data set.
        InvalidInputError: the data set is empty, its spaces are not those of the shop, or it has
            truncated episodes, whose returns are unknown.
    """
    what = f"cannot read the Minari data set {dataset_id!r}"
    try:
        dataset = minari.load_dataset(dataset_id)
    except (FileNotFoundError, ValueError) as error:
        raise FileFormatError(what, "data set", dataset_id, f"a local one ({error})",
                              "see `minari list local`") from error
    shapes = dataset.observation_space.shape, dataset.action_space.shape
    if shapes not in [((width,), (ACTION_DIM,)) for width in (OBSERVATION_DIM, RETURNING_DIM)]:
        raise InvalidInputError(what, "shapes of observations and actions", shapes,
                                f"({OBSERVATION_DIM},) or ({RETURNING_DIM},), and ({ACTION_DIM},)",
                                "read a log of the simulated shop")
    found = list(dataset.iterate_episodes())
    whole = [bool(e.terminations[-1]) and not e.terminations[:-1].any() for e in found]
    if not found or not all(whole):
        raise InvalidInputError(what, "terminated episodes", f"{sum(whole)} of {len(found)}",
                                "all of them, and at least one",
                                "remove truncated episodes (MinariDataset.filter_episodes)")
    states, actions, rewards = (
        [torch.as_tensor(getattr(e, name)).float() for e in found]
        for name in ("observations", "actions", "rewards"))
    reward = pad_sequence(rewards, batch_first=True)
    lengths = torch.tensor([len(r) for r in rewards])
    return Episodes(Trajectories(
        pad_sequence([s[:-1] for s in states], batch_first=True),
        pad_sequence(actions, batch_first=True), reward, to_go(reward),
        torch.arange(reward.shape[1]) < lengths[:, None]),
        str(dataset.storage.metadata.get("algorithm_name", "")),
        torch.stack([s[-1] for s in states]))
