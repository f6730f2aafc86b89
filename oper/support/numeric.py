"""Numerical helpers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def mix64(values: np.ndarray) -> np.ndarray:
    """Apply the finalizer of splitmix64, a fixed bijection of uint64, to integers [n]."""
    x = values.astype(np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def falling_root(falling: Callable[[float], float], low: float, high: float, rounds: int = 60
                 ) -> float:
    """Find the root of a decreasing function in [low, high] by bisection.

    If the root is outside the interval, return the nearer end.

    Args:
        falling: the function.
        low, high: the interval.
        rounds: number of bisections.
    """
    for _ in range(rounds):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return (low + high) / 2
