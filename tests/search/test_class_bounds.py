"""The checker's bounds of pieces whose owners are of several classes."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from oper.search.certificate.tables import Asked, TableCosts

GRID = np.geomspace(1e-7, 1.0, 4800)


def least(share: np.ndarray, go: np.ndarray, mass: np.ndarray) -> float:
    """Bound of a pushed piece whose owners send a byte each, however much they hold; blocks have
    shares [B] of the lookups and cost go [B, C], owners of a class hold at most mass [C]."""
    costs = object.__new__(TableCosts)
    costs.blocks = np.stack([share] * 4, axis=-1)[None]
    costs.total, costs.bags, costs.asks = np.ones(1), np.ones(1), np.zeros(1, bool)
    costs.share, costs.of, costs.grid = np.ones(1), np.zeros(1, np.int64), GRID
    costs.sums = np.minimum(1e6 * GRID, 1.0)[None]
    costs.model = SimpleNamespace(tiers_ns=lambda _: 0.0)  # type: ignore[assignment]
    most = np.minimum(1.0, mass)
    line = share[:, None] * np.where(mass > 0, 1 / np.maximum(most, 1e-9), 0.0)
    asked = Asked({}, np.ones((1, mass.size)), np.zeros(()), 0.0, 0.0, 0.0)
    return float(costs._pushed(np.zeros(1, np.int64), asked, go[None],
                               np.full((1, share.size), np.inf), mass[None],
                               np.zeros((1, share.size), bool),
                               [line[None], line[None].copy()])[0])


SHARE, GO = np.array([0.6, 0.4]), np.array([[0.0, 1e4], [1e4, 0.0]])


def test_owners_who_hold_less_never_cost_less() -> None:
    """The search bounds several widths by the capacity of the narrowest: from nine owners on, the
    bound of a wider piece must not fall below that."""
    found = [least(SHARE, GO, np.array([1.0, x])) for x in np.linspace(0.13, 0.06, 71)]
    assert abs(found[0] - 5) < 1e-6 and np.diff(found).min() > -1e-6


def test_classes_that_may_own_nothing_do_not_weaken_the_bound() -> None:
    for at in range(3):
        go, mass = np.insert(GO, at, np.inf, axis=1), np.insert([1.0, 0.3], at, 0.0)
        assert abs(least(SHARE, go, mass) - least(SHARE, GO, np.array([1.0, 0.3]))) < 1e-9
    assert abs(least(SHARE, GO, np.array([1.0, 0.3])) - 3) < 1e-6
