"""Training batches: subsequences of trajectories for sequence models, else whole histories."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from oper.errors import InvalidInputError
from oper.rl_rec.data.interactions import Interactions
from oper.rl_rec.models.base import Histories, Sequences

_POOL = 32


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's part of every global batch: every `world_size`-th trajectory.

    Attributes:
        batch_size: trajectories per rank and step.
        rank, world_size: this rank and the number of ranks.
        seed: seed of the order, together with the epoch.
    """

    batch_size: int
    rank: int = 0
    world_size: int = 1
    seed: int = 0


def returns_to_go(data: Interactions, gamma: float) -> np.ndarray:
    """``g_t = r_t + gamma g_{t+1}`` to the end of each user's training interactions.

    Returns:
        float32 [N]; 0 where a row does not train.
    """
    found = np.zeros(data.users.size + 1)
    stop = data.train_stop
    for back in range(1, int((stop - data.offsets[:-1]).max(initial=0)) + 1):
        at = stop[stop - data.offsets[:-1] >= back] - back
        following = found[at + 1] if back > 1 else 0.0
        found[at] = data.rewards[at] + gamma * following
    return found[:-1].astype(np.float32)


def target_return(data: Interactions, gamma: float, quantile: float) -> tuple[float, float]:
    """The scale of returns (the largest one, at least 1), and the return at the quantile."""
    returns = returns_to_go(data, gamma)[data.training_rows()]
    if not returns.size:
        return 1.0, 0.0
    return max(1.0, float(np.abs(returns).max())), float(np.quantile(returns, quantile))


class SequenceBatches:
    """A user's training interactions in subsequences of `steps`, counted from the last one.

    Subsequences do not overlap; each comes with the `window` interactions before it. `gamma`
    discounts the returns-to-go, for models that use them.
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
        """Subsequences."""
        return int(self._users.size)

    def epoch(self, number: int, share: Share) -> Iterator[Sequences]:
        """A rank's batches of one epoch."""
        for at in _parts(len(self), number, share, self._stop - self._start):
            rows, lengths = self.data.rows_between(self._first[at], self._stop[at])
            yield Sequences(*_tensors(
                self._users[at], self.data.items[rows], self.data.rewards[rows], lengths,
                self._start[at] - self._first[at], self._returns[rows]),
                times=torch.from_numpy(self.data.times[rows]))


class HistoryBatches:
    """The whole training interactions of users that have some."""

    def __init__(self, data: Interactions) -> None:
        self.data = data
        self._users = np.flatnonzero(data.train_stop > data.offsets[:-1])

    def __len__(self) -> int:
        """Users."""
        return int(self._users.size)

    def epoch(self, number: int, share: Share) -> Iterator[Histories]:
        """A rank's batches of one epoch."""
        for at in _parts(len(self), number, share):
            users = self._users[at]
            yield training_histories(self.data, users)


def training_histories(data: Interactions, users: np.ndarray) -> Histories:
    """Training interactions of int64 [B] users."""
    return histories_until(data, users, data.train_stop[users])


def histories_until(data: Interactions, users: np.ndarray, stop: np.ndarray) -> Histories:
    """Rows ``offsets[u]:stop`` of int64 [B] users."""
    rows, lengths = data.rows_between(data.offsets[users], stop)
    return Histories(*_tensors(users, data.items[rows], data.rewards[rows], lengths),
                     times=torch.from_numpy(data.times[rows]))


Batches = SequenceBatches | HistoryBatches


def num_batches(count: int, share: Share) -> int:
    """Steps of an epoch over `count` trajectories: incomplete global batches are left out."""
    whole = count // (share.batch_size * share.world_size)
    if not whole:
        raise InvalidInputError("nothing to train on", "global batch size",
                                share.batch_size * share.world_size, f"<= {count} trajectories",
                                "lower batch_size")
    return whole


def _parts(count: int, epoch: int, share: Share, lengths: np.ndarray | None = None
           ) -> Iterator[np.ndarray]:
    """Trajectories of a rank's batches, int64 [batch_size] each, in random order.

    With `lengths`, trajectories of similar length are put into one batch, within pools of `_POOL`
    batches, so that batches contain less padding.
    """
    rng = np.random.default_rng((share.seed, epoch))
    size, steps = share.batch_size * share.world_size, num_batches(count, share)
    order = rng.permutation(count)[:steps * size]
    if lengths is not None:
        pool = np.arange(order.size) // (_POOL * size)
        order = order[np.lexsort((lengths[order], pool))]
    for step in rng.permutation(steps):
        yield order[step * size + share.rank:(step + 1) * size:share.world_size]


def _tensors(*arrays: np.ndarray) -> tuple[torch.Tensor, ...]:
    return tuple(torch.from_numpy(np.ascontiguousarray(a)) for a in arrays)
