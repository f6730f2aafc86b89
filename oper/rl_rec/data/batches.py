"""Training batches: subsequences for sequence models, complete histories for other models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from oper.errors import InvalidInputError
from oper.rl_rec.data.interactions import Interactions
from oper.rl_rec.models.base import Histories, Sequences

_POOL = 32  # batches in a pool of trajectories that are sorted by length, see `_parts`


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's share of the global batches: every `world_size`-th trajectory, from `rank` on.

    Attributes:
        batch_size: trajectories (subsequences or users) per rank and step.
        rank, world_size: this rank and the number of ranks.
        seed: seed of the order of trajectories, combined with the epoch.
    """

    batch_size: int
    rank: int = 0
    world_size: int = 1
    seed: int = 0


def returns_to_go(data: Interactions, gamma: float) -> np.ndarray:
    """Compute ``g_t = r_t + gamma g_{t+1}`` up to the end of each user's training interactions.

    Returns:
        float32 [N], one per interaction; 0 for rows that are not for training.
    """
    found = np.zeros(data.users.size + 1)
    stop = data.train_stop
    for back in range(1, int((stop - data.offsets[:-1]).max(initial=0)) + 1):
        at = stop[stop - data.offsets[:-1] >= back] - back
        following = found[at + 1] if back > 1 else 0.0
        found[at] = data.rewards[at] + gamma * following
    return found[:-1].astype(np.float32)


def target_return(data: Interactions, gamma: float, quantile: float) -> tuple[float, float]:
    """Return max(1, largest absolute return-to-go) and a quantile of the training returns."""
    returns = returns_to_go(data, gamma)[data.training_rows()]
    if not returns.size:
        return 1.0, 0.0
    return max(1.0, float(np.abs(returns).max())), float(np.quantile(returns, quantile))


class SequenceBatches:
    """Divides each user's training interactions into subsequences of `steps` interactions.

    Subsequences do not overlap. They are cut from the last interaction backwards, so the earliest
    one may be shorter. Each comes with up to `window` preceding interactions as context. `gamma` is
    the discount factor of returns-to-go.
    """

    def __init__(self, data: Interactions, steps: int, window: int, gamma: float = 1.0) -> None:
        self.data = data
        self._returns = returns_to_go(data, gamma)
        counts = data.train_stop - data.offsets[:-1]
        pieces = -(-counts // steps)
        users = np.repeat(np.arange(data.num_users), pieces)
        back = np.arange(users.size) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        self._users = users
        self._stop = data.train_stop[users] - back * steps
        self._start = np.maximum(self._stop - steps, data.offsets[users])
        self._first = np.maximum(self._start - window, data.offsets[users])

    def __len__(self) -> int:
        return int(self._users.size)

    def epoch(self, number: int, share: Share) -> Iterator[Sequences]:
        """Yield a rank's batches of epoch `number`."""
        for at in _parts(len(self), number, share, self._stop - self._start):
            rows, lengths = self.data.rows_between(self._first[at], self._stop[at])
            yield Sequences(*map(torch.from_numpy, (
                self._users[at], self.data.items[rows], self.data.rewards[rows], lengths,
                self._start[at] - self._first[at], self._returns[rows])), **_rest(self.data, rows))


class HistoryBatches:
    """Batches of all training interactions of users with at least one."""

    def __init__(self, data: Interactions) -> None:
        self.data = data
        self._users = np.flatnonzero(data.train_stop > data.offsets[:-1])

    def __len__(self) -> int:
        return int(self._users.size)

    def epoch(self, number: int, share: Share) -> Iterator[Histories]:
        """Yield a rank's batches of epoch `number`."""
        for at in _parts(len(self), number, share):
            users = self._users[at]
            yield training_histories(self.data, users)


def training_histories(data: Interactions, users: np.ndarray) -> Histories:
    """Return the training interactions of `users`, int64 [B]."""
    return histories_until(data, users, data.train_stop[users])


def histories_until(data: Interactions, users: np.ndarray, stop: np.ndarray) -> Histories:
    """Return the interactions of each user from the first one up to a position.

    Args:
        data: all interactions, user by user.
        users: int64 [B].
        stop: int64 [B], positions in `data` after each user's last interaction to return.
    """
    rows, lengths = data.rows_between(data.offsets[users], stop)
    return Histories(*map(torch.from_numpy, (users, data.items[rows], data.rewards[rows], lengths)),
                     **_rest(data, rows))


def _rest(data: Interactions, rows: np.ndarray) -> dict[str, torch.Tensor]:
    """Return times and, if there are any, actions of the given rows, by field of `Histories`."""
    return {name: torch.from_numpy(column[rows]) for name, column in (
        ("times", data.times), ("actions", data.actions)) if column is not None}


Batches = SequenceBatches | HistoryBatches


def num_batches(count: int, share: Share) -> int:
    """Return the number of steps of an epoch over `count` trajectories; drops an incomplete batch.

    Raises InvalidInputError if there is no complete global batch.
    """
    whole = count // (share.batch_size * share.world_size)
    if not whole:
        raise InvalidInputError("nothing to train on", "global batch size",
                                share.batch_size * share.world_size, f"<= {count} trajectories",
                                "lower batch_size")
    return whole


def _parts(count: int, epoch: int, share: Share, lengths: np.ndarray | None = None
           ) -> Iterator[np.ndarray]:
    """Yield the indices of the trajectories in each of a rank's batches, int64 [batch_size].

    With `lengths`, trajectories are sorted by length within random pools of `_POOL` batches, so
    that batches need less padding.
    """
    rng = np.random.default_rng((share.seed, epoch))
    size, steps = share.batch_size * share.world_size, num_batches(count, share)
    order = rng.permutation(count)[:steps * size]
    if lengths is not None:
        pool = np.arange(order.size) // (_POOL * size)
        order = order[np.lexsort((lengths[order], pool))]
    for step in rng.permutation(steps):
        yield order[step * size + share.rank:(step + 1) * size:share.world_size]
