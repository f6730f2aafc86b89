"""Invented interactions over a catalogue of any size, for load tests: nothing real is in them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from oper.data.generate.popularity import power_law
from oper.errors import require_fields
from oper.rl_rec.data.interactions import HeldOut, Interactions


@dataclass(frozen=True, slots=True)
class Catalogue:
    """What is generated.

    Attributes:
        num_items: items of the catalogue; 0 = no catalogue.
        num_users: users, each with `length` interactions.
        length: interactions of a user, the last two of which are held out.
        exponent: of the items' bounded power law.
        again: probability that an interaction is near the one before it (the next ids), so that
            there is an order to learn.
        clicked: probability of a reward of 1, else 0.
        seed: of all random numbers.
    """

    num_items: int = 0
    num_users: int = 10_000
    length: int = 40
    exponent: float = 1.05
    again: float = 0.3
    clicked: float = 0.7
    seed: int = 1

    def __post_init__(self) -> None:
        require_fields(
            self, "invalid catalogue", "choose a value in that range",
            ("num_items", self.num_items == 0 or self.num_items >= 2, "0 or >= 2"),
            ("num_users", self.num_users >= 1, ">= 1"), ("length", self.length >= 3, ">= 3"),
            ("exponent", 0 <= self.exponent <= 10, "0..10"),
            ("again", 0 <= self.again <= 1, "0..1"), ("clicked", 0 < self.clicked <= 1, "0..1"),
            ("seed", self.seed >= 0, ">= 0"))


def invent(catalogue: Catalogue) -> Interactions:
    """Interactions with item ids 1..num_items in order of popularity.

    Every user ends with two positive interactions, the validation and the test target. Items may
    repeat. The table has rows for items that nobody has had: that is what makes it large.
    """
    c = catalogue
    rng = np.random.default_rng((c.seed, 7))
    shape = (c.num_users, c.length)
    items = power_law(c.num_items, c.exponent).draw(c.num_users * c.length, rng).reshape(shape) + 1
    near = rng.random(shape) < c.again
    step = rng.integers(1, 4, shape)
    for k in range(1, c.length):
        moved = np.minimum(items[:, k - 1] + step[:, k], c.num_items)
        items[:, k] = np.where(near[:, k], moved, items[:, k])
    rewards = (rng.random(shape) < c.clicked).astype(np.float32)
    rewards[:, -2:] = 1
    offsets = np.concatenate([[0], np.arange(c.num_users + 1) * c.length])
    users = np.arange(1, c.num_users + 1)
    ones = np.ones(c.num_users, np.int64)
    valid, test = (HeldOut(users, offsets[2:] - back, items[:, -back].copy(), ones)
                   for back in (2, 1))
    train_stop = np.concatenate([[0], offsets[2:] - 2])
    times = np.tile(60 * np.arange(c.length, dtype=np.int64), c.num_users)
    return Interactions(
        np.repeat(users, c.length), items.reshape(-1), rewards.reshape(-1), times, offsets,
        train_stop, c.num_users + 1, c.num_items + 1, np.arange(c.num_items + 1), valid, test,
        "synthetic catalogue")
