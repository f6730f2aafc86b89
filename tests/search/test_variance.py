"""Bits of messages chosen by table under a budget of rounding variance."""

from __future__ import annotations

import itertools
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from search_cases import KINDS, examples, gpus, racked, random_plan, shared, tables_and_stats
from test_simulate import draw, stated

from oper import cli
from oper.errors import InvalidInputError, PlanInfeasibleError
from oper.messages import BITS, EXACT, MessageBits, number_bytes
from oper.plan import Piece, Plan, TablePlan, Tier, uniform_plan
from oper.rows.traffic import SENT
from oper.search import EVERYTHING, evaluate, make_plan, make_problem, verify_plan
from oper.search.planner import plan_problem
from oper.search.problem.statement import Problem
from oper.search.replay.wire import WireReplay
from oper.search.variance import (
    choose_bits,
    fewest_bits,
    relative_variance,
    rounding_variance,
)


def with_bits(plan: Plan, problem: Problem, bits: MessageBits) -> tuple[Plan, Problem]:
    return replace(plan, message_bits=bits), replace(problem, message_bits=bits)


def step_us(plan: Plan, problem: Problem, bits: MessageBits) -> float:
    return evaluate(*with_bits(plan, problem, bits)).step_us


def plans_of(problem: Problem) -> list[Plan]:
    """Striped tables: pulled, pushed, and with hot replicas and some tables pushed."""
    world = tuple(range(problem.machine.world_size))
    specs = [t.spec for t in problem.tables]
    mixed = tuple(TablePlan(t, (Piece(0, t.dim, (
        Tier(0, 9, "replicated", world),
        Tier(9, t.num_rows, "striped", world, mode="push" if n % 2 else "pull"))),))
        for n, t in enumerate(specs))
    pulled = uniform_plan(specs, len(world))
    pushed = replace(pulled, tables=tuple(replace(t, pieces=tuple(replace(p, tiers=tuple(
        replace(x, mode="push") for x in p.tiers)) for p in t.pieces)) for t in pulled.tables))
    return [pulled, pushed, replace(pulled, tables=mixed)]


# ---- the variance of a plan ----------------------------------------------------------------------


def test_exact_messages_have_no_variance() -> None:
    problem, _ = stated(gpus(4, per_host=2))
    for plan in plans_of(problem):
        assert rounding_variance(plan, problem) == 0.0
    assert [relative_variance(b, w) for b, w in ((32, 64), (8, 2))] == [0.0, 0.0]
    bits = {"t1": (8, 32)}
    one = rounding_variance(*with_bits(plan, problem, MessageBits.parse(bits)))
    other = rounding_variance(*with_bits(plan, problem, MessageBits.parse({"t1": (32, 8)})))
    both = rounding_variance(*with_bits(plan, problem, MessageBits.parse({"t1": 8})))
    assert one > 0 and both == pytest.approx(one + other, rel=1e-12)


def test_rows_that_stay_on_their_host_are_not_rounded() -> None:
    problem, _ = stated(gpus(4, per_host=2))
    specs, every = [t.spec for t in problem.tables], MessageBits(8, 8)
    copied = uniform_plan(specs, 4, "replicated")
    assert rounding_variance(replace(copied, message_bits=(8, 32)), problem) == 0.0
    # Gradients go to the master copies.
    assert rounding_variance(replace(copied, message_bits=(32, 8)), problem) > 0.0
    together, _ = stated(gpus(4, per_host=4))
    assert rounding_variance(replace(uniform_plan(specs, 4), message_bits=every), together) == 0.0


@pytest.mark.parametrize("which", range(3))
def test_variance_counts_the_rows_that_replays_send(which: int) -> None:
    """With one table of one width, bytes that are sent give the number of rounded numbers."""
    problem, chances = stated(gpus(3, per_host=1))
    problem = replace(problem, tables=(problem.table("t0"),))
    plan = plans_of(problem)[which]
    rng, (spec,) = np.random.default_rng(4), [t.spec for t in problem.tables]
    sent, read, steps = 0.0, 0, 12
    replay = WireReplay(plan, [0, 1, 2], training=True)
    for _ in range(steps):
        batch = draw(problem, chances[:1], rng)
        found = dict(zip(SENT, replay.step(batch).sum(axis=(1, 2)), strict=True))
        read += sum(np.unique(b[spec.features[0]].ids).size for b in batch) * 2 * spec.dim
        # Answers alone: gradients are as many numbers as answers.
        sent += 2 * (found["rows"] + found["partial_sums"]) / 4
    bits = MessageBits.parse({"t0": (8, 8)})
    wanted = relative_variance(8, spec.dim) * sent / read
    assert wanted > 0
    assert rounding_variance(*with_bits(plan, problem, bits)) == pytest.approx(wanted, rel=0.03)


# ---- the choice of bits --------------------------------------------------------------------------


@pytest.mark.parametrize("topology", [gpus(4, per_host=2), shared(gpus(4, per_host=2, slow=1)),
                                      racked(gpus(4, per_host=1), 1, 2)])
def test_no_other_bits_within_the_budget_are_faster(topology: Any) -> None:
    problem, _ = stated(topology)
    problem = replace(problem, tables=(problem.table("t0"), problem.table("t1")))
    pairs = [MessageBits(a, g) for a in BITS for g in BITS]
    every = [MessageBits.by_table({"t0": a, "t1": b}) for a, b in itertools.product(pairs, pairs)]
    for plan in plans_of(problem):
        known = [(rounding_variance(*with_bits(plan, problem, x)), step_us(plan, problem, x))
                 for x in every]
        largest = max(v for v, _ in known)
        for budget in (1e-9, *(largest * x for x in (0.01, 0.1, 0.3, 0.7, 2.0))):
            bits = choose_bits(plan, problem, budget)
            assert rounding_variance(*with_bits(plan, problem, bits)) <= budget * (1 + 1e-6)
            best = min(step for v, step in known if v <= budget)
            assert step_us(plan, problem, bits) <= best * 1.0015


def test_of_equally_fast_bits_the_most_precise_are_chosen() -> None:
    """A phase that another table's own work limits is not shortened by fewer bits."""
    problem, _ = stated(gpus(4, per_host=4))
    assert choose_bits(plans_of(problem)[0], problem, 1.0) == EXACT  # nothing leaves the host
    problem, _ = stated(gpus(4, per_host=2))
    bits = choose_bits(plans_of(problem)[0], problem, 1e9)
    assert bits.of("t1") == bits.of("t2") == MessageBits(4, 4)


# ---- plans ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", ["training", "inference"])
def test_plans_within_a_budget_are_certified(objective: str, tmp_path: Path) -> None:
    specs, stats = tables_and_stats(6, 3, lengths=(1, 4, 20))
    topology = gpus(4, per_host=2)
    # Lookups for inference need no messages if rows are replicated.
    allow = None if objective == "training" else {"striped", "owned", "pull", "push"}
    stated = make_problem(specs, stats, topology, objective=objective, batch_size=1024, allow=allow)
    exact, fewest = (plan_problem(replace(stated, message_bits=x))
                     for x in (EXACT, fewest_bits(stated)))
    steps = []
    for budget in (1e-12, 1e-6, 1e-5, 1e-4, 1.0):
        plan = make_plan(specs, stats, topology, objective=objective, batch_size=1024,
                         message_variance=budget, allow=allow)
        plan.save(tmp_path / "plan.json")
        plan = Plan.load(tmp_path / "plan.json")
        problem = replace(stated, message_bits=plan.message_bits)
        verdict, noted = verify_plan(plan, problem), plan.notes["message_variance"]
        assert verdict.certified, verdict.why
        assert noted["used"] == pytest.approx(rounding_variance(plan, problem), rel=1e-9)
        assert noted["used"] <= budget * (1 + 1e-6)
        assert 0 < noted["any_bits_us"] <= plan.step_us * (1 + 1e-9)
        steps.append(plan.step_us)
    assert steps[0] == pytest.approx(exact.step_us, rel=1e-3)
    assert steps[-1] == pytest.approx(fewest.step_us, rel=1e-3)
    assert steps[0] > 1.05 * steps[2] > 1.05 * steps[-1]


@settings(max_examples=examples(15), deadline=None)
@given(st.integers(0, 10**6), st.booleans(), st.sampled_from([2, 4]))
def test_no_plan_is_below_the_bound_whatever_its_bits(seed: int, trains: bool, world: int
                                                      ) -> None:
    """The bound for the fewest bits holds for uncut plans with any bits by table."""
    rng = np.random.default_rng(seed)
    specs, stats = tables_and_stats(3, seed, max_rows=2000)
    problem = make_problem(specs, stats, gpus(world, per_host=int(rng.integers(1, world))),
                           batch_size=int(rng.integers(1, 2000)), allow=EVERYTHING,
                           objective="training" if trains else "inference")
    with suppress(PlanInfeasibleError):
        bound = plan_problem(replace(problem, message_bits=fewest_bits(problem))).lower_bound_us
        assert bound > 0
        for _ in range(8):
            plan = random_plan(problem, rng, KINDS if trains else KINDS[:3])
            bits = MessageBits.by_table({s.name: MessageBits(*rng.choice(BITS, 2).tolist())
                                         for s in specs})
            if evaluate(plan, problem).fits:
                assert step_us(plan, problem, bits) >= bound * (1 - 1e-9)


def test_fewest_bits_are_the_shortest_messages() -> None:
    problem, _ = stated(gpus(4, per_host=2))
    for t in problem.tables:
        bits = fewest_bits(problem).of(t.spec.name)
        assert number_bytes(bits.answers, t.spec.dim) == min(
            number_bytes(b, t.spec.dim) for b in BITS)


@pytest.mark.parametrize("budget", [0, -1.0, float("nan"), float("inf"), "1e-5"])
def test_a_budget_is_a_positive_number(budget: Any) -> None:
    specs, stats = tables_and_stats(2, 3)
    with pytest.raises(InvalidInputError, match="message_variance"):
        make_plan(specs, stats, gpus(2, per_host=1), batch_size=64, message_variance=budget)


def test_bits_are_given_or_chosen() -> None:
    specs, stats = tables_and_stats(2, 3)
    with pytest.raises(InvalidInputError, match=r"message_bits=\[8, 8\]"):
        make_plan(specs, stats, gpus(2, per_host=1), batch_size=64, message_bits=8,
                  message_variance=1e-5)


def test_verbs_choose_and_explain_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, stats = tables_and_stats(3, 3, lengths=(4, 20, 50))
    stats.save(tmp_path / "stats.npz")
    arguments = [str(tmp_path / "stats.npz"), "--topology", "h100-2x8", "-o",
                 str(tmp_path / "plan.json"), "--batch-size", "1024"]
    assert cli.main(["plan", *arguments, "--message-variance", "1e-4"]) == 0
    printed = capsys.readouterr().out
    assert "of a budget of 0.0001" in printed and "bits of answers / gradients" in printed
    assert "not verified here, see oper verify (for these bits)" in printed
    assert cli.main(["explain", str(tmp_path / "plan.json"), "--stats",
                     str(tmp_path / "stats.npz")]) == 0
    explained = capsys.readouterr().out
    assert "verified: no plan of the searched space is faster with these bits" in explained
    assert "bound whatever the bits, not verified" in explained
    plan = Plan.load(tmp_path / "plan.json")
    noted = plan.notes["message_variance"]
    for edited in ({**noted, "budget": "1e-4"}, {**noted, "any_bits_us": None}, [1.0]):
        replace(plan, notes={**plan.notes, "message_variance": edited}).save(tmp_path / "plan.json")
        assert cli.main(["explain", str(tmp_path / "plan.json"), "--stats",
                         str(tmp_path / "stats.npz")]) == 0
        assert "rounding" not in capsys.readouterr().out
