"""Weights of stripes of pulled rows: as good as the best on a grid, and never worse than before."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from oper.plan import MAX_PATTERN, Piece, Tier
from oper.search.pricing.master import lower_bound
from oper.search.problem.statement import Problem, make_problem
from oper.search.relaxation.relaxation import Relaxation
from oper.search.rounding.placing import Placement, evaluated
from oper.search.rounding.weights import weigh_stripes
from oper.stats import AccessStats
from oper.tables import TableSpec
from oper.topology import Topology
from tests.search.search_cases import counted, gpus, host, shared


def _problem(topology: Topology, num_tables: int, seed: int, few_rows: int = 0,
             **more: object) -> Problem:
    """Tables of at least 4,000 rows with bags of 1 to 30 ids; the first two with `few_rows` rows,
    unless that is 0."""
    rng = np.random.default_rng(seed)
    specs, stats = [], {}
    for k in range(num_tables):
        rows = few_rows if few_rows and k < 2 else int(rng.integers(4000, 30_000))
        specs.append(TableSpec(f"t{k}", rows, int(rng.choice([16, 64])), (f"f{k}",),
                               optimizer=str(rng.choice(["sgd", "rowwise_adagrad"]))))
        stats[f"t{k}"] = counted(rows, float(rng.uniform(0.3, 1.1)), rng,
                                 length=int(rng.integers(1, 31)))
    return make_problem(specs, AccessStats(200_000, stats, "generated", True), topology,
                        objective="training", batch_size=256, **more)  # type: ignore[arg-type]


def _stripe(stated: Problem, k: int, ranks: tuple[int, ...], weights: tuple[int, ...] = ()
            ) -> Placement:
    spec = stated.tables[k].spec
    return (Piece(0, spec.dim, (Tier(0, spec.num_rows, "striped", ranks, weights),)),)


def _pushed(stated: Problem, k: int, rank: int) -> Placement:
    spec = stated.tables[k].spec
    return (Piece(0, spec.dim, (Tier(0, spec.num_rows, "owned", (rank,), (), "push"),)),)


def _step(relaxation: Relaxation, placements: list[Placement]) -> float:
    return evaluated(relaxation, placements).step_us


@pytest.mark.parametrize("seed", range(4))
def test_weights_are_as_good_as_the_best_on_a_grid(seed: int) -> None:
    """Two stripes beside two tables that the first host owns."""
    stated = _problem(gpus(2, per_host=1), 4, seed)
    relaxation = lower_bound(stated).relaxation
    pushed = [_pushed(stated, 0, 0), _pushed(stated, 1, 0)]
    before = [*pushed, *(_stripe(stated, k, (0, 1)) for k in (2, 3))]
    found = weigh_stripes(relaxation, before)
    assert found[:2] == before[:2]
    least = min(_step(relaxation, [*pushed, *(
        _stripe(stated, k, (0, 1), (w, 64 - w)) for k, w in zip((2, 3), of, strict=True))])
        for of in product((1, *range(4, 64, 4), 63), repeat=2))
    assert least < 0.999 * _step(relaxation, before)
    assert _step(relaxation, found) <= 1.002 * least


@pytest.mark.parametrize("topology", [
    gpus(4, per_host=2), gpus(8, per_host=2), shared(gpus(6, per_host=3)), host(4),
    gpus(6, per_host=3, slow=3)], ids=["hosts", "more", "links", "host", "unequal"])
def test_no_plan_gets_slower_and_ranks_stay_in_their_class(topology: Topology) -> None:
    world = topology.world_size
    stated = _problem(topology, 8, world)
    relaxation = lower_bound(stated).relaxation
    rng, classes = np.random.default_rng(world), relaxation.classes
    gains = []
    for _ in range(4):
        before = []
        for k in range(8):
            ranks = classes.ranks[int(rng.integers(len(classes.ranks)))]
            some = tuple(rng.permutation(ranks)[:max(2, ranks.size - 1)].tolist())
            before.append(_pushed(stated, k, int(rng.integers(world))) if k % 3 == 0 else
                          _stripe(stated, k, some, tuple(rng.integers(1, 9, len(some)).tolist())))
        found = weigh_stripes(relaxation, before)
        old, new = (evaluated(relaxation, x) for x in (before, found))
        assert new.step_us <= old.step_us and new.fits
        gains.append(old.step_us / new.step_us)
        for (was,), (now,) in zip(before, found, strict=True):
            a, b = was.tiers[0], now.tiers[0]
            assert (a.start, a.stop, a.placement, a.mode) == (b.start, b.stop, b.placement, b.mode)
            assert len(set(b.ranks)) == len(b.ranks) and sum(b.weights) <= MAX_PATTERN
            assert set(classes.of_rank[list(b.ranks)]) == set(classes.of_rank[list(a.ranks)])
    assert max(gains) > 1.01


def test_no_memory_gets_fuller_than_it_may() -> None:
    """Rank 0 has pushed tables with few rows, so it would own few of the pulled rows."""
    stated = _problem(gpus(2, per_host=1), 4, 1, few_rows=500)
    relaxation = lower_bound(stated).relaxation
    before = [_pushed(stated, 0, 0), _pushed(stated, 1, 0), *(
        _stripe(stated, k, (0, 1)) for k in (2, 3))]
    free = evaluated(relaxation, weigh_stripes(relaxation, before))
    old = evaluated(relaxation, before)
    assert free.held_bytes[1] > 1.1 * old.held_bytes.max()
    most = int((old.held_bytes.max() + free.held_bytes[1]) / 2)
    relaxation = lower_bound(_problem(gpus(2, per_host=1, memory_bytes=most), 4, 1, few_rows=500)
                             ).relaxation
    found = evaluated(relaxation, weigh_stripes(relaxation, before))
    assert found.fits and free.step_us < found.step_us < old.step_us


def test_tables_with_few_rows_or_constraints_keep_their_ranks() -> None:
    stated = _problem(gpus(3, per_host=1), 4, 2, constraints={
        "tables": {"t2": {"ranks": [0, 1]}}})
    relaxation = lower_bound(stated).relaxation
    spec = stated.tables[1].spec
    small = (Piece(0, spec.dim, (Tier(0, 500, "striped", (0, 1, 2)),
                                 Tier(500, spec.num_rows, "owned", (0,), (), "push"))),)
    before = [_pushed(stated, 0, 0), small, _stripe(stated, 2, (0, 1)),
              _stripe(stated, 3, (0, 1, 2))]
    found = weigh_stripes(relaxation, before)
    assert found[1] == small
    assert set(found[2][0].tiers[0].ranks) == {0, 1} and found[2] != before[2]
    assert found[3] == before[3], "its ranks are not equal: only two of them may own rows of t2"
