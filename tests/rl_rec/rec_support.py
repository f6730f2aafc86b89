"""Small synthetic logs and batches for tests of recommenders."""

from typing import Any

import numpy as np
import torch

from oper.rl_rec.data.interactions import DataOptions, Interactions, Log, from_log
from oper.rl_rec.models.base import Sequences
from oper.rl_rec.models.cdt4rec import CDT4Rec, CDT4RecConfig

SMALL: dict[str, Any] = {"dim": 16, "user_dim": 4, "layers": 2, "heads": 2, "steps": 7,
                         "window": 5, "dropout": 0.0, "negatives": 0}


def invented(num_users: int = 30, num_items: int = 40, seed: int = 0, mean: int = 14
             ) -> Interactions:
    """Draw histories of 3 to about 2 * mean distinct items with skewed popularity, rewards 0 or 1.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for user in range(1, num_users + 1):
        count = min(num_items, 3 + int(rng.integers(0, 2 * mean)))
        weight = 1 / np.arange(1, num_items + 1)
        items = rng.choice(num_items, count, replace=False, p=weight / weight.sum()) + 1
        rows += [(user, i, float(rng.random() < 0.6), 100 * k) for k, i in enumerate(items)]
    users, items, rewards, times = zip(*rows, strict=True)
    return from_log(Log(np.array(users), np.array(items), np.array(rewards, np.float32),
                        np.array(times)), DataOptions(k_core=1))


def tastes(num_kinds: int, disliked: float = 0.0) -> Interactions:
    """Make interactions of 150 users of `num_kinds` kinds.

    User u prefers the items n with n modulo `num_kinds` equal to the user's kind; one item in ten
    is of another kind. `disliked`: share of rows with reward 0.
    """
    rng = np.random.default_rng(0)
    rows = [(u + 1, 1 + num_kinds * int(i) + (
        u % num_kinds if rng.random() < 0.9 else rng.integers(num_kinds)),
             float(rng.random() < 1 - disliked), t) for u in range(150)
            for t, i in enumerate((rng.random(12) ** 2 * 20).astype(int))]
    users, items, rewards, times = (np.array(x) for x in zip(*rows, strict=True))
    return from_log(Log(users, items, rewards.astype(np.float32), times), DataOptions(k_core=3))


@torch.no_grad()
def with_large_rows(model: Any, *others: str) -> Any:
    """Draw the rows of a model's tables, and the parameters with names that end with one of
    `others`, large enough to affect outputs."""
    for name, p in model.named_parameters():
        if "embedding" in name or name.endswith(others):
            p.normal_(0, 0.5)
    return model


def cdt(num_users: int = 31, num_items: int = 41, seed: int = 0, **changes: Any) -> CDT4Rec:
    """Make a small model whose item rows are large enough to affect outputs."""
    torch.manual_seed(seed)
    return with_large_rows(CDT4Rec(CDT4RecConfig(**SMALL | changes), num_users, num_items,
                                   (4.0, 3.0)))


def next_items(rng: np.random.Generator, is_far: np.ndarray, num_items: int, times: np.ndarray
               ) -> Log:
    """Make a log in which item i is followed by i + 7 where `is_far` [users, length], else by
    i + 1."""
    users, length = is_far.shape
    steps = np.where(is_far, 7, 1)[:, :-1]
    items = rng.integers(0, num_items, (users, 1)) + np.concatenate(
        [np.zeros((users, 1), np.int64), np.cumsum(steps, axis=1)], axis=1)
    return Log(np.repeat(np.arange(1, users + 1), length), (items % num_items + 1).reshape(-1),
               np.ones(items.size, np.float32), times.reshape(-1))


def sequences(lengths: list[int], skip: list[int], seed: int = 0, num_items: int = 41
              ) -> Sequences:
    """Draw random subsequences of the given lengths."""
    g = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    rewards = (torch.rand(total, generator=g) < 0.5).float()
    return Sequences(
        torch.arange(1, len(lengths) + 1), torch.randint(1, num_items, (total,), generator=g),
        rewards, torch.tensor(lengths), torch.tensor(skip), torch.rand(total, generator=g) * 4)
