"""Pinned rows and rows without replicas: satisfied by every search; contradictions are named."""

from __future__ import annotations

from itertools import pairwise

import pytest
from search_cases import gpus, tables_and_stats, with_host_memory

from oper.errors import InvalidInputError, PlanError, PlanInfeasibleError
from oper.plan import Tier
from oper.search import evaluate, make_problem
from oper.search.cost.model import CostModel
from oper.search.cost.tally import Row
from oper.search.planner import plan_problem
from oper.search.problem.constraints import TableConstraint, parse_constraints, violations
from oper.search.problem.pins import impose
from oper.search.problem.space import EVERYTHING, EXECUTABLE

OWNED = {"rows": [3, 40], "place": "owned", "ranks": [2]}
COLD = {"rows": [60, 100], "place": "striped", "ranks": [0, 1], "memory": "host"}


def stated(held, *, in_order=True, allow=None, memory=80e9, **more):
    specs, stats = tables_and_stats(4, 7, in_order=in_order, max_rows=4000)
    big = max(specs, key=lambda s: s.num_rows).name
    value = {"tables": {big: held}} if held else None
    return big, make_problem(specs, stats, with_host_memory(gpus(4, memory_bytes=memory)),
                             batch_size=256, constraints=value, allow=allow, **more)


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("allow", [EXECUTABLE, EVERYTHING])
def test_one_tier_of_several_is_pinned_and_the_others_are_planned(in_order, allow):
    big, problem = stated({"pinned": [OWNED, COLD]}, in_order=in_order, allow=allow)
    plan = plan_problem(problem, time_budget_s=1.0)
    for piece in plan.table(big).pieces:
        assert {(x.start, x.stop) for x in piece.tiers} >= {(3, 40), (60, 100)}
        assert Tier(3, 40, "owned", (2,)) in piece.tiers
        assert Tier(60, 100, "striped", (0, 1), memory="host") in piece.tiers
    assert not violations(plan, problem.constraints)
    assert evaluate(plan, problem).fits
    assert plan.lower_bound_us <= plan.step_us == pytest.approx(
        evaluate(plan, problem).step_us)
    read = parse_constraints(plan.notes["constraints"], [t.spec.name for t in problem.tables], 4)
    assert read == problem.constraints


def test_some_rows_without_replicas():
    _, free = stated(None, objective="inference")
    big, problem = stated({"replicate": [[5, 50]]}, objective="inference")
    assert any(x.placement == "replicated" and x.start < 50
               for x in plan_problem(free).table(big).tiers)
    plan = plan_problem(problem, time_budget_s=1.0)
    for x in plan.table(big).tiers:
        assert x.placement != "replicated" or x.stop <= 5 or x.start >= 50
    assert any(x.placement == "replicated" for x in plan.table(big).tiers), "there is room"


@pytest.mark.parametrize(("held", "word"), [
    ({"pinned": [OWNED, {**OWNED, "rows": [39, 50]}]}, "do not overlap"),
    ({"pinned": [{**OWNED, "rows": [3, 10**7]}]}, "within 0"),
    ({"pinned": [{**OWNED, "rows": [5, 5]}]}, "do not overlap"),
    ({"pinned": [{**OWNED, "ranks": [9]}]}, "ranks"),
    ({"pinned": [{**OWNED, "ranks": [0, 1]}]}, "one rank"),
    ({"pinned": [OWNED], "ranks": [0, 1]}, "pinned rows 3:40, ranks"),
    ({"pinned": [OWNED], "placements": ["striped"]}, "placements"),
    ({"pinned": [{**OWNED, "mode": "push"}], "modes": ["pull"]}, "modes"),
    ({"pinned": [COLD], "memories": ["device"]}, "memories"),
    ({"pinned": [{"rows": [0, 9], "place": "replicated", "ranks": [0, 1, 2, 3]}],
      "replicate": [[4, 6]]}, "replicate"),
    ({"pinned": [OWNED], "tiers": [{"rows": [0, 5], "place": "owned", "ranks": [0]}]}, "both"),
    ({"pinned": 3}, "pinned=3, expected a list"),
    ({"pinned": [{"rows": [0, 5]}]}, r"missing keys=.*pinned\[0\]\.place"),
    ({"replicate": [[1, 2.5]]}, r"replicate\[0\]\[1\]=2\.5, expected an integer"),
    ({"replicate": [[7, 3]]}, "replicate"),
])
def test_contradictions_are_named(held, word):
    with pytest.raises((InvalidInputError, PlanError), match=word):
        stated(held)


def test_a_pin_that_does_not_fit_is_named():
    big, free = stated(None)
    spec = free.table(big).spec
    buffers = CostModel(free).base().rows[Row.HELD].max()
    pin = {"rows": [1, spec.num_rows], "place": "owned", "ranks": [1]}
    with pytest.raises(PlanInfeasibleError, match="constraints on some rows of tables"):
        plan_problem(stated({"pinned": [pin]}, memory=buffers + spec.num_bytes / 2)[1])


def test_a_violated_pin_is_listed():
    big, free = stated(None)
    plan = plan_problem(free)
    held = parse_constraints({"tables": {big: {"pinned": [OWNED]}}}, [big], 4)
    assert "pinned on rows 3:40" in violations(plan, held)[0]


def test_what_is_imposed_covers_the_same_rows():
    _, problem = stated(None)
    plan = plan_problem(problem)
    held = TableConstraint(pinned=(Tier(3, 40, "owned", (2,)),), unreplicated=((0, 1), (50, 60)))
    for entry in plan.tables:
        if entry.table.num_rows < 60:
            continue
        for piece in impose(held, entry.pieces):
            ends = [(x.start, x.stop) for x in piece.tiers]
            assert ends[0][0] == 0 and ends[-1][1] == entry.table.num_rows
            assert all(a[1] == b[0] for a, b in pairwise(ends))
