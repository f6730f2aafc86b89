"""Numerical helpers."""

from __future__ import annotations

from collections.abc import Callable


def falling_root(falling: Callable[[float], float], low: float, high: float, rounds: int = 60
                 ) -> float:
    """Where a falling function changes its sign in [low, high], or the nearer end, by bisection.

    Args:
        falling: the function.
        low, high: the interval.
        rounds: halvings of the interval.
    """
    for _ in range(rounds):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return (low + high) / 2
