"""Least cost of partial sums of a table that needs several owners, whose number is whole."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, strategies as st
from search_cases import gpus, tables_and_stats

from oper.search import native
from oper.search.cost.model import CostModel
from oper.search.pricing.node import FREE, PUSHES, STILL
from oper.search.problem.space import EVERYTHING
from oper.search.problem.statement import make_problem
from oper.search.relaxation.pieces import Pieces
from oper.search.relaxation.relaxation import Relaxation


@pytest.fixture(scope="module")
def pieces() -> Pieces:
    specs, stats = tables_and_stats(4, 3, lengths=(4, 20, 50))
    return Relaxation(CostModel(make_problem(specs, stats, gpus(4), batch_size=4096,
                                             allow=EVERYTHING))).pieces


@given(st.integers(0, 10**6), st.floats(0.02, 1.0), st.floats(1e-4, 1.0))
def test_no_owners_of_a_share_send_less(pieces, seed, owner, share):
    rng = np.random.default_rng(seed)
    for k in range(4):
        left, parts = share, []
        while left > 1e-12:
            parts.append(min(left, owner * rng.choice([1.0, rng.uniform(0.05, 1.0)])))
            left -= parts[-1]
        of = np.full(len(parts), k)
        sent = pieces.sum_bytes(of, np.array(parts), np.full(len(parts), owner)).sum()
        least = pieces.sum_bytes(np.array([k]), np.array([share]), np.array([owner]))[0]
        assert least <= sent * (1 + 1e-8)
        # And no fewer bytes than with fractional owners.
        full = pieces.sum_bytes(np.array([k]), np.array([min(share, owner)]), np.array([owner]))[0]
        assert least >= full * max(1.0, share / owner) * (1 - 1e-8)


def test_a_partial_owner_pays_its_first_sums(pieces):
    def sums(share: float, owner: float) -> float:
        return float(pieces.sum_bytes(np.array([0]), np.array([share]), np.array([owner]))[0])

    assert sums(0.6, 0.3) == pytest.approx(2 * sums(0.3, 1.0))
    assert sums(0.7, 0.3) == pytest.approx(2 * sums(0.3, 1.0) + sums(0.1, 1.0))
    assert sums(0.7, 0.3) > sums(0.3, 1.0) * 0.7 / 0.3 * 1.01


@pytest.mark.parametrize("num_options", [1, 2, 3])
@pytest.mark.parametrize("must", [False, True])
def test_no_set_of_blocks_costs_less_than_the_least(num_options, must):
    """All sets of six blocks and classes, for many tables, compared with the library's bound."""
    num_tables, n, num_points = (300 if num_options > 1 else 6000), 6, 200
    rng = np.random.default_rng(num_options)
    grid = np.geomspace(1e-6, 1.0, num_points)
    power = rng.uniform(0.15, 1.0, num_tables)
    sums = grid ** power[:, None] * 10.0 ** rng.uniform(-1, 0.5, (num_tables, 1))
    blocks = num_tables * n
    ids = rng.dirichlet(np.full(n, 0.7), num_tables)
    go = rng.uniform(0, 1, (num_options, blocks)) * ids.ravel()
    stay = np.full(blocks, np.inf) if must else ids.ravel() * rng.uniform(0, 3, blocks)
    mass = rng.uniform(0.05, 0.7, num_tables * num_options)
    price = rng.uniform(0.5, 1.0, num_options) * np.linspace(0.8, 1.25, num_tables)[:, None]
    # One tier costs more than the cheapest tiers by about the charge for several tiers.
    one = stay.reshape(num_tables, n).sum(axis=1) * rng.uniform(1.0, 1.3, num_tables)
    tiers, tiers_pushed = rng.uniform(0, 0.3, (2, num_tables))
    own = rng.uniform(0, 0.1, num_options)
    features = rng.uniform(0, 1, (3, blocks)) * ids.ravel()
    least_sums = rng.uniform(0, 2.0, (num_tables * num_options, 3)) * sums[:, -1].repeat(
        num_options)[:, None]
    states = rng.integers(0, 3, num_tables).astype(np.uint8)
    if must:
        states[states == STILL] = FREE
    heavy = rng.integers(0, 1 if must else 3, num_tables * num_options)
    arrays = {"starts": np.arange(num_tables + 1) * n, "stay": stay, "go": go, "heavy": heavy,
              "stay_more": np.zeros(blocks),
              "more": np.zeros_like(go), "ids": ids.ravel(),
              "features": features, "least_sums": least_sums, "total_ids": np.ones(num_tables),
              "price": price, "first": np.arange(num_tables * num_options + 1),
              "streams": np.ones(mass.size), "mass": mass, "narrowest": np.full(mass.size, 8.0),
              "columns": np.zeros(num_tables, np.int64), "known": np.full(num_tables, np.inf),
              "one": one, "tiers": tiers, "tiers_pushed": tiers_pushed,
              "own": np.tile(own, (num_tables, 1)),
              "pushes": states}
    out = {"value": np.zeros(num_tables), "num_parts": np.zeros(num_tables, np.int64),
           "kind": np.zeros(num_tables, np.int64), "mode": np.zeros(num_tables, np.int64),
           "share": np.zeros(num_tables), "streams": np.zeros(num_tables),
           "chosen": np.zeros(blocks, np.int64)}
    arrays |= {f"out_{n}": x for n, x in out.items()}
    native.call("oper_price", native.Pricing, arrays, num_tables=num_tables,
                num_options=num_options, num_blocks=blocks, step=8, max_parts=1, close=1e-9,
                piece=0.0,
                sums=native.Sums(num_points, grid[0], grid[1] / grid[0], sums.ctypes.data))

    def cost(k, classes):
        """float64 [N], of blocks in `classes` [N, n], 0 where they stay."""
        def sent(share):
            return np.where(share > 0, np.interp(share, np.append(0.0, grid),
                                                 np.append(0.0, sums[k])), 0.0)

        at = slice(k * n, (k + 1) * n)
        out = np.where(classes == 0, stay[at], 0.0).sum(axis=1)
        every, none = (classes > 0).all(axis=1), (classes == 0).all(axis=1)
        out += np.where(every, 0.0, np.where(none, tiers[k], tiers_pushed[k]))
        out[none] = np.minimum(out[none], one[k])
        for m in range(num_options):
            pushed, full = classes == m + 1, mass[k * num_options + m]
            share = pushed @ ids[k]
            owners = np.floor(share / full)
            out += pushed @ go[m, at]
            out += share * own[m]  # no owner holds all ids of a table
            by_mass = owners * sent(full) + sent(np.maximum(0, share - owners * full))
            out += price[k, m] * np.maximum(by_mass, pushed @ (
                features[:, at].T @ least_sums[k * num_options + m]))
        outside = {FREE: none & False, STILL: ~none, PUSHES: none}
        first = heavy.reshape(-1, num_options)[k].min()  # blocks that may not be pushed
        out[outside[states[k]] | (classes[:, :first] > 0).any(axis=1)] = np.inf
        return out

    every = np.array(list(product(range(must, num_options + 1), repeat=n)))
    least = np.array([cost(k, every).min() for k in range(num_tables)])
    chosen = out["chosen"].reshape(num_tables, n)
    mine = np.array([cost(k, chosen[k:k + 1])[0] for k in range(num_tables)])
    assert (out["value"] <= least * (1 + 1e-7)).all()
    assert (mine >= least * (1 - 1e-9)).all()
    assert np.median(out["value"] / least) > 0.95
    assert np.median(mine / least) < 1.01
    assert ((chosen > 0).any(axis=1) & ((chosen == 0).any(axis=1) | must)).sum() > 30
    if not must:  # an arbitrarily small part of a block may be pushed, for the charge alone
        part = stay.reshape(num_tables, n).sum(axis=1) + tiers_pushed
        assert (out["value"] <= part * (1 + 1e-7))[states != STILL].all()
