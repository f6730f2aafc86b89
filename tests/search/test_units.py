"""Loads of a unit of a table's rows, probed on a few ranks, equal the cost model's on all ranks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from test_branching import TOPOLOGIES, stated

from oper.search.certificate.leaf import Checker
from oper.search.cost.model import CostModel
from oper.search.cost.space import PUSH, REPLICATED, SHARD, row_makers
from oper.search.problem.machine import GROUPS
from oper.search.problem.statement import IDS, NUM_FEATURES
from oper.search.relaxation.relaxation import Relaxation
from oper.search.relaxation.units import ANY, LOCAL, WHOLE

COSTS = {"push_ns": 20.0, "id_ns": 1.0, "far_ns": 5.0, "sort_ns": 2.0, "update_ns": 10.0,
         "run_ns": 3.0, "refresh_ns": 4.0, "wire_ns": 0.3, "odd_ns": 2.0, "warm_share": 0.4}


@pytest.mark.parametrize("name", sorted(TOPOLOGIES))
@pytest.mark.parametrize("kind", [REPLICATED, SHARD, PUSH])
def test_unit_loads_equal_the_cost_model(name, kind):
    relaxation = Relaxation(CostModel(stated(3, name, costs=COSTS)))
    model, units = relaxation.model, relaxation.units
    for by_rank in (False, True):
        found = [units.loads(units.of(kind)[n], by_rank) for n in (WHOLE, ANY)]
        _compare(relaxation, kind, found, (lambda x: x) if by_rank else model.machine.on_links)


def _compare(relaxation: Relaxation, kind: str, found: list[np.ndarray],
             on_links: Callable[[np.ndarray], np.ndarray]) -> None:
    model, units = relaxation.model, relaxation.units
    world, each = model.machine.world_size, np.arange(NUM_FEATURES)
    for c, ranks in enumerate(relaxation.classes.ranks):
        owner = np.zeros((NUM_FEATURES, NUM_FEATURES, world))
        owner[each, each, ranks[0]] = 1.0
        for k, t in enumerate(relaxation.tables):
            once, twice = (model.loads(row_makers(model)[kind](t, w, owner))
                           for w in (t.spec.dim, 2 * t.spec.dim))
            for mine, own in zip(found, (once, 2 * once - twice), strict=True):
                loads = on_links(own)
                assert mine[c, k] == pytest.approx(loads[..., units.seen[c]], rel=1e-9, abs=1e-9)
                # Other ranks have no other load.
                assert mine[c, k].min(axis=-1) == pytest.approx(loads.min(axis=-1), abs=1e-9)
                assert mine[c, k].max(axis=-1) == pytest.approx(loads.max(axis=-1), abs=1e-9)
                local = model.group_us(own)[..., LOCAL, :].min(axis=-1)
                seen = units.group_us(mine)[c, k, ..., LOCAL, :].min(axis=-1)
                assert seen == pytest.approx(local, rel=1e-9, abs=1e-9)


def test_own_work_of_ranks_that_send_is_part_of_rows_about_links():
    """If hosts exchange messages, more own work of all ranks raises such a row further."""
    rows = {}
    for name in ("hosts", "gpus"):
        relaxation = Relaxation(CostModel(stated(1, name, costs={"id_ns": 1.0})))
        far = [x for x in relaxation.inequalities if x.kind == "spread"]
        assert far and all(x.spared > 0 for x in far)
        rows[name] = relaxation.unit[0, relaxation.model.every_pass[0], [x.row for x in far]]
        every = relaxation.every[relaxation.model.every_pass[0], [x.row for x in far]]
        forward = [x.at[0] == relaxation.model.phases.index("forward") for x in far]
        waits = name == "hosts"  # on one host, ranks read each other's memory while they work
        assert every == pytest.approx([waits * f * (1 + x.spared) * 1e-3
                                       for f, x in zip(forward, far, strict=True)])


def test_all_far_loads_of_the_distinguished_host_have_a_row():
    problem = stated(1, "hosts")
    load = 0, GROUPS.index("cross_in")
    relaxation = Relaxation(CostModel(problem), load)
    apart = [x for x in relaxation.inequalities if x.kind == "apart"]
    # Owners receive requests, and send none for their own rows.
    assert {x.at for x in apart} == {load} | {(p, GROUPS.index(g)) for p in (1, 3)
                                              for g in ("cross_in", "cross_out")}
    assert {x.load for x in apart} == {load}


@pytest.mark.parametrize("name", ["gpus", "hosts", "unequal"])
def test_checker_loads_equal_the_relaxation_for_all_widths(name):
    problem = stated(2, name, costs=COSTS)
    relaxation = Relaxation(CostModel(problem))
    costs = Checker(relaxation.model, None).costs
    least = np.zeros(costs.partial.shape[2:])
    implied = costs.implied(least).reshape(least.size, least.size)
    assert np.count_nonzero(implied) > least.size
    for n in np.flatnonzero(costs.width >= 8).tolist():
        blocks = costs.tables[costs.of[n]].blocks
        load = np.einsum("bf,cfpg->bcpg", blocks[:, IDS:], costs.unit[n])
        load = np.maximum(load, 0.0).reshape(-1, least.size)
        assert (implied * load[:, :, None] <= load[:, None] * (1 + 1e-9) + 1e-9).all()
