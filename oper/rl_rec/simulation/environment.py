"""The simulated shop as a gymnasium environment; importing this module requires gymnasium."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from oper.errors import needs
from oper.rl_rec.simulation.shop import (
    ACTION_DIM,
    MAX_PAGE,
    NUM_ATTRIBUTES,
    NUM_FEATURES,
    Shop,
    Visits,
)

with needs("cannot make an environment", "oper[rl]"):
    import gymnasium


class ShopEnvironment(gymnasium.Env[np.ndarray, np.ndarray]):
    """Environment with one customer at a time.

    An episode is a visit or, if customers return, all visits of one customer. Observations are
    float32 [91] or [94], see `Visits.observe`; actions are float32 [27] in [-1, 1]; the reward is
    the number of clicks. All random numbers derive from the seed of ``reset``.

    Args:
        shop: the shop's networks.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012

    def __init__(self, shop: Shop) -> None:
        most = [10, 10, MAX_PAGE + 1]
        if shop.returning:
            most += [shop.returning.horizon] * 2 + [NUM_ATTRIBUTES - 1]
        high = np.array([1] * NUM_FEATURES + most, np.float32)
        self.observation_space = gymnasium.spaces.Box(np.zeros_like(high), high, dtype=np.float32)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (ACTION_DIM,), np.float32)
        self._shop = shop
        self._visits: Visits | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None
              ) -> tuple[np.ndarray, dict[str, Any]]:
        """Let the next customer enter; a seed determines all later random numbers."""
        super().reset(seed=seed)
        if self._visits is None or seed is not None:
            start = seed if seed is not None else int(self.np_random.integers(1 << 62))
            self._visits = Visits(self._shop, 1, start)
        else:
            self._visits.enter(torch.ones(1, dtype=torch.bool))
        return self._observe(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Show a page; ``info`` has the customer's page, day and number of visits afterwards."""
        if self._visits is None or bool(self._visits.done):
            raise RuntimeError("the episode has ended or has not begun: call reset() first")
        shown = torch.as_tensor(np.asarray(action, np.float32)).reshape(1, -1)
        clicks = self._visits.step(shown)
        done = bool(self._visits.done)
        info = {name: int(getattr(self._visits, name)) for name in ("page", "day", "visits")}
        return self._observe(), float(clicks), done, False, info

    def _observe(self) -> np.ndarray:
        assert self._visits is not None
        return self._visits.observe()[0].numpy()
