"""Numerical helpers."""

from __future__ import annotations

from collections.abc import Callable


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
