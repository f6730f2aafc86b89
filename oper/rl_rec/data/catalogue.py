"""Synthetic interactions over a catalogue of any size, for load tests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from oper.data.generate.popularity import power_law
from oper.errors import require_fields
from oper.ranges import Count, Positive, PositiveShare, Share, rules_of
from oper.rl_rec.data.interactions import HeldOut, Interactions


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Parameters of synthetic interactions.

    Attributes:
        num_items: number of items; 0 = no catalogue (the configuration reads a log instead).
        num_users: number of users.
        length: interactions per user, the last two of which are held out. If `spread` > 0, the mean
            of a log-normal distribution, which is rounded and clipped below at 3.
        spread: standard deviation of the log of a user's number of interactions; 0 = all users have
            `length` interactions.
        exponent: exponent of the bounded power law of item popularity.
        again: probability that an item's id exceeds that of the user's previous item by 1 to 3,
            which is a sequential pattern to learn.
        clicked: probability that a reward is 1 (otherwise 0).
        seed: seed of all random numbers.
    """

    num_items: Count = 0
    num_users: Positive = 10_000
    length: int = 40
    spread: float = 0.0
    exponent: float = 1.05
    again: Share = 0.3
    clicked: PositiveShare = 0.7
    seed: Count = 1

    def __post_init__(self) -> None:
        require_fields(
            self, "invalid catalogue", "choose a value in this range", *rules_of(self),
            ("num_items", self.num_items == 0 or self.num_items >= 2, "0 or >= 2"),
            ("length", self.length >= 3, ">= 3"),
            ("spread", 0 <= self.spread <= 3, "0..3"),
            ("exponent", 0 <= self.exponent <= 10, "0..10"))


def synthetic_interactions(catalogue: Catalogue) -> Interactions:
    """Draw interactions with item ids 1..num_items, which are in order of the drawn popularity.

    Every user ends with two positive interactions, the validation and the test target. A user may
    have an item repeatedly. Rankings leave out the history, so a target that is in it counts as
    missed: a quarter of the targets of 40 interactions with 100,000 items, more with fewer items.
    Items without interactions have ids too.
    """
    c = catalogue
    rng = np.random.default_rng((c.seed, 7))
    lengths = np.full(c.num_users, c.length)
    if c.spread:
        logs = rng.normal(np.log(c.length) - c.spread ** 2 / 2, c.spread, c.num_users)
        lengths = np.maximum(3, np.exp(logs).round().astype(np.int64))
    offsets = np.concatenate([[0, 0], np.cumsum(lengths)])
    first, stop, count = offsets[1:-1], offsets[2:], int(offsets[-1])
    items = power_law(c.num_items, c.exponent).draw(count, rng) + 1
    near = rng.random(count) < c.again
    step = rng.integers(1, 4, count)
    for k in range(1, int(lengths.max())):
        at = first[lengths > k] + k
        moved = np.minimum(items[at - 1] + step[at], c.num_items)
        items[at] = np.where(near[at], moved, items[at])
    rewards = (rng.random(count) < c.clicked).astype(np.float32)
    rewards[stop - 1] = rewards[stop - 2] = 1
    users = np.arange(1, c.num_users + 1)
    ones = np.ones(c.num_users, np.int64)
    valid, test = (HeldOut(users, stop - back, items[stop - back].copy(), ones)
                   for back in (2, 1))
    train_stop = np.concatenate([[0], stop - 2])
    times = 60 * (np.arange(count) - np.repeat(first, lengths))
    return Interactions(
        np.repeat(users, lengths), items, rewards, times, offsets,
        train_stop, c.num_users + 1, c.num_items + 1, np.arange(c.num_items + 1), valid, test,
        "synthetic catalogue")
