"""Bits of messages and types of rows: their costs, and the choice within a budget of error."""

import itertools
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from oper.errors import InvalidInputError, PlanInfeasibleError
from oper.messages import BITS, EXACT, MessageBits, number_bytes
from oper.plan import Piece, Plan, TablePlan, Tier, uniform_plan
from oper.rows.traffic import SENT
from oper.search import EVERYTHING, evaluate, make_plan, make_problem, verify_plan
from oper.search.planner import plan_problem
from oper.search.precision import ROW_TYPES, RowErrors, blocks_of, choose_dtypes
from oper.search.problem.machine import TERMS, Term
from oper.search.problem.statement import Problem
from oper.search.replay.realized import RealizedLoad
from oper.search.replay.wire import WireReplay
from oper.search.variance import choose_bits, fewest_bits, relative_variance, rounding_variance
from oper.stats import AccessStats, TableStats
from oper.tables import TableSpec, bytes_of_row
from tests.search.search_cases import (
    KINDS,
    examples,
    gpus,
    racked,
    random_plan,
    shared,
    tables_and_stats,
)
from tests.search.test_explain import draw, stated
from tests.support import pulled, pushed

PAIRS = [(8, 8), (4, 4), (16, 16), (16, 8), (8, 32), (32, 8)]
CROSS = (Term.CROSS_IN, Term.CROSS_OUT)


def one_table(bits: Any, mode: Callable[[Plan], Plan] = pulled
              ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bytes by term and rank, in request, forward and update, of a table of 64 columns and 300 rows
    on two hosts of two ranks each."""
    problem, _ = stated(gpus(4, per_host=2))
    problem = replace(problem, tables=(problem.table("t1"),), message_bits=MessageBits.parse(bits))
    request, forward, _, update = evaluate(
        mode(uniform_plan([problem.tables[0].spec], 4, "striped")), problem).phases
    return request.units, forward.units, update.units


def test_message_bits_reduce_only_bytes_between_hosts() -> None:
    exact = one_table(32)
    slot = 9 / 8  # bytes of a slot of 300 rows
    for bits, answer, gradient in (((8, 8), 72, 72), ((16, 16), 128, 128), ((8, 32), 72, 256),
                                   ((32, 16), 256, 128)):
        found = one_table(bits)
        for n, term in enumerate(TERMS):
            factor = (1.0, *((answer / 256, (gradient + slot) / (256 + slot)) if n in CROSS
                             else (1.0, 1.0)))
            for was, now, f in zip(exact, found, factor, strict=True):
                assert now[n] == pytest.approx(f * was[n], rel=1e-12), (bits, term)


def test_ids_of_pooled_rows_do_not_shrink() -> None:
    """Two ranks of the other host send an owner 9 bits, and one, for each id that it pools."""
    request, *_ = one_table((8, 8), pushed)
    ids = stated(gpus(4, per_host=2))[0].table("t1").traffic.num_ids
    assert request[Term.CROSS_IN].sum() == pytest.approx(2 * 10 / 8 * ids, rel=1e-9)


# ---- replays -------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [(32, 32), *PAIRS, {"t1": 8, "t2": (16, 8)}], ids=str)
def test_replayed_loads_are_the_messages_that_are_sent(bits: Any) -> None:
    """With one rank per host, bytes between hosts equal those of `WireReplay` except for headers,
    numbers of requested rows, and up to one word per pair of ranks and table."""
    problem, chances = stated(gpus(3, per_host=1))
    problem = replace(problem, message_bits=MessageBits.parse(bits))
    specs = [t.spec for t in problem.tables]
    plain = uniform_plan(specs, 3, "striped")
    tiers = (Tier(0, 9, "replicated", (0, 1, 2)), Tier(9, 300, "striped", (0, 1, 2), mode="push"))
    mixed = replace(plain, tables=tuple(
        TablePlan(t.table, (Piece(0, 64, tiers),)) if t.table.name == "t1" else t
        for t in plain.tables))
    columns = (Piece(0, 24, (Tier(0, 300, "owned", (2,)),)), Piece(24, 64, tiers))
    split = replace(plain, tables=tuple(
        TablePlan(t.table, columns) if t.table.name == "t1" else t for t in plain.tables))
    batch = draw(problem, chances, np.random.default_rng(1))
    for placed in (plain, mixed, split):
        plan = replace(placed, message_bits=problem.message_bits)
        sent = dict(zip(SENT, WireReplay(plan, [0, 1, 2], training=True).step(batch), strict=True))
        request, forward, _, update = RealizedLoad(plan, problem).step(batch).phases
        answers = sent["rows"] + sent["partial_sums"]
        back = (sent["gradient_rows"] + sent["bag_gradients"] + sent["refreshed_rows"]
                + sent["squares"])
        assert (sent["squares"].sum() > 0) == (placed is split)
        for phase, wanted in ((request, sent["ids"]), (forward, answers), (update, back)):
            for axis, term in ((1, Term.CROSS_OUT), (0, Term.CROSS_IN)):
                assert phase.units[term] == pytest.approx(wanted.sum(axis=axis), abs=36)


# ---- the command line ----------------------------------------------------------------------------


def test_plans_state_their_bits_and_are_verified_with_them(stats_file, printed, tmp_path: Path,
                                                           capsys) -> None:
    made, edited = (tmp_path / n for n in ("plan.json", "edited.json"))
    words = ["plan", stats_file, "--topology", "h100-2x8", "--dim", 16, "--batch-size", 64,
             "-o", made, "--message-bits"]
    assert "between hosts: answers of 8 bits, gradients of 16 bits" in printed(*words, "8,16")
    assert Plan.load(made).message_bits == MessageBits(8, 16)
    printed("verify", made, "--stats", stats_file)
    edited.write_text(made.read_text().replace('  "message_bits": [8, 16],\n', ""))
    assert Plan.load(edited).message_bits == EXACT
    assert "message bits differ" in printed("verify", edited, "--stats", stats_file, status=1)
    with pytest.raises(SystemExit) as ended:
        printed(*words, 12)
    assert ended.value.code == 2 and "message_bits=12" in capsys.readouterr().err


# ---- bits by table under a budget of rounding variance -------------------------------------------


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
    plan = uniform_plan(specs, len(world))
    return [plan, pushed(plan), replace(plan, tables=mixed)]


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
    for budget in (1e-12, 1e-5, 1.0):
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
    assert steps[0] > 1.05 * steps[1] > 1.05 * steps[2]


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
    bound = plan_problem(replace(problem, message_bits=fewest_bits(problem))).lower_bound_us
    assert bound > 0
    for _ in range(8):
        plan = random_plan(problem, rng, KINDS if trains else KINDS[:3])
        bits = MessageBits.by_table({s.name: MessageBits(*rng.choice(BITS, 2).tolist())
                                     for s in specs})
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


def test_verbs_choose_and_explain_bits(printed: Callable[..., str], tmp_path: Path) -> None:
    file, out = tmp_path / "stats.npz", tmp_path / "plan.json"
    tables_and_stats(3, 3, lengths=(4, 20, 50))[1].save(file)
    text = printed("plan", file, "--topology", "h100-2x8", "-o", out, "--batch-size", 1024,
                   "--message-variance", "1e-4")
    assert "of a budget of 0.0001" in text and "bits of answers / gradients" in text
    assert "not verified here, see oper verify (for these bits)" in text
    explained = printed("explain", out, "--stats", file)
    assert "verified: no plan of the searched space is faster with these bits" in explained
    assert "bound whatever the bits, not verified" in explained
    plan = Plan.load(out)
    noted = plan.notes["message_variance"]
    for edited in ({**noted, "budget": "1e-4"}, {**noted, "any_bits_us": None}, [1.0]):
        replace(plan, notes={**plan.notes, "message_variance": edited}).save(out)
        assert "rounding" not in printed("explain", out, "--stats", file)


# ---- types of rows by hotness --------------------------------------------------------------------

TABLES = [TableSpec("hot", 4000, 64, ("a",)), TableSpec("flat", 300, 16, ("b",)),
          TableSpec("odd", 50, 7, ("c",))]


def nominal_errors(spec: TableSpec, edges: np.ndarray) -> RowErrors:
    """Approximate errors for rows of normally distributed numbers."""
    blocks, dim = np.random.default_rng(spec.num_rows).uniform(0.9, 1.1, edges.size - 1), spec.dim
    step = {"int8": 4.5 / 255, "int4": 4.5 / 15}
    squared = {"float16": dim * 2.0 ** -22 / 6 * blocks,
               **{d: dim * x ** 2 / 12 * blocks for d, x in step.items()}}
    if dim % 2:
        del squared["int4"]
    return RowErrors(edges, dim * blocks, squared)


def stats() -> AccessStats:
    """Counts like 1/k in the first table, equal ones elsewhere."""
    found = {}
    for t in TABLES:
        ids = np.random.default_rng(t.dim).permutation(t.num_rows)
        counts = np.maximum(1, 40_000 // np.arange(1, t.num_rows + 1)) if t.name == "hot" else \
            np.full(t.num_rows, 100)
        lengths = np.array([1]), np.array([int(counts.sum())])
        found[t.name] = TableStats.from_counts(t.num_rows, ids, counts, lengths)
    return AccessStats(30_000, found)


def errors(given: AccessStats) -> dict[str, RowErrors]:
    return {t.name: nominal_errors(t, blocks_of(t, given).edges) for t in TABLES}


def expected(given: AccessStats, known: dict[str, RowErrors],
             dtypes: dict[str, list[tuple[int, str]]]) -> tuple[float, int]:
    """Error and bytes of types of rows, row by row."""
    lost = energy = num_bytes = 0.0
    for t in TABLES:
        lookups, e = blocks_of(t, given).lookups, known[t.name]
        energy += float(lookups @ e.energy)
        rows = np.diff(e.edges)
        begin = 0
        for end, dtype in dtypes[t.name]:
            lost += float(np.repeat(lookups / rows * e.squared[dtype], rows)[begin:end].sum())
            num_bytes += (end - begin) * bytes_of_row(dtype, t.dim)
            begin = end
    return lost / energy, round(num_bytes)


def test_a_budget_is_kept_and_used() -> None:
    given = stats()
    known = errors(given)
    last = 0
    for budget in (1.0, 3e-3, 1e-3, 3e-4, 1e-4, 1e-5, 1e-6):
        found = choose_dtypes(TABLES, given, known, budget)
        assert found.error <= budget
        if budget <= 1e-3:  # the rest is too little for a block of each table
            assert found.error > 0.93 * budget
        error, num_bytes = expected(given, known, found.dtypes)
        assert error == pytest.approx(found.error)
        assert num_bytes == found.num_bytes >= last
        last = num_bytes
        for t in TABLES:
            ranges = found.dtypes[t.name]
            assert ranges[-1][0] == t.num_rows
            assert [s for s, _ in ranges] == sorted({s for s, _ in ranges})
            order = [ROW_TYPES.index(d) for _, d in ranges]
            assert order == sorted(set(order))
    cheap = choose_dtypes(TABLES, given, known, 1.0).dtypes
    assert cheap == {"hot": [(4000, "int4")], "flat": [(300, "int4")], "odd": [(50, "int8")]}
    middle = choose_dtypes(TABLES, given, known, 1e-3)
    assert len(middle.dtypes["hot"]) > 1


def test_rows_that_were_never_looked_up_get_one_type() -> None:
    """Their order of hotness is unknown, so they are not divided."""
    table = replace(TABLES[0], num_rows=50_000)
    counts = np.maximum(2, 40_000 // np.arange(1, 2001))
    given = AccessStats(30_000, {table.name: TableStats.from_counts(
        table.num_rows, np.arange(2000)[::-1], counts,
        (np.array([1]), np.array([int(counts.sum())])))})
    known = {table.name: nominal_errors(table, blocks_of(table, given).edges)}
    ends = {end for budget in np.geomspace(1e-5, 1e-2, 40)
            for end, _ in choose_dtypes([table], given, known, float(budget)).dtypes[table.name]}
    assert len(ends) > 20 and all(end <= 2000 or end == table.num_rows for end in ends)


def test_no_division_with_less_error_takes_fewer_bytes() -> None:
    """Compared with all divisions of a table into three ranges."""
    table = TABLES[0]
    given = stats()
    known = errors(given)[table.name]
    lookups = blocks_of(table, given).lookups
    rows = np.diff(known.edges)
    blocks = range(rows.size + 1)
    cuts = [(a, b) for a in blocks for b in blocks if a <= b]
    tried = []
    for a, b in cuts:
        parts = [slice(0, a), slice(a, b), slice(b, rows.size)]
        tried.append((
            sum(float(lookups[p] @ known.squared[d][p])
                for p, d in zip(parts, ROW_TYPES, strict=True)),
            sum(int(rows[p].sum()) * bytes_of_row(d, table.dim)
                for p, d in zip(parts, ROW_TYPES, strict=True))))
    energy = float(lookups @ known.energy)
    for budget in (3e-3, 1e-3, 3e-4, 1e-4):
        found = choose_dtypes([table], given, {table.name: known}, budget)
        better = [x for x in tried if x[0] <= found.error * energy * (1 - 1e-9)
                  and x[1] < found.num_bytes]
        assert not better


def test_measured_errors_decide() -> None:
    """Rows that a narrow type stores exactly get it even if they are hot."""
    given = stats()
    known = errors(given)
    exact = {d: 0.0 * x for d, x in known["hot"].squared.items()}
    known["hot"] = RowErrors(known["hot"].edges, known["hot"].energy, exact)
    found = choose_dtypes(TABLES, given, known, 1e-4)
    assert found.dtypes["hot"] == [(4000, "int4")]


def test_invalid_budgets_and_errors_are_refused() -> None:
    given = stats()
    known = errors(given)
    for bad in (0.0, -1.0, float("nan"), float("inf"), "1e-4"):
        with pytest.raises(InvalidInputError, match="error_budget"):
            choose_dtypes(TABLES, given, known, bad)  # type: ignore[arg-type]
    with pytest.raises(PlanInfeasibleError, match="the error of the widest types"):
        choose_dtypes(TABLES, given, known, 1e-12)
    edges = np.array([0, 17, 4000])
    known["hot"] = nominal_errors(TABLES[0], edges)
    with pytest.raises(InvalidInputError, match="the same statistics"):
        choose_dtypes(TABLES, given, known, 1e-3)


def test_a_type_that_cannot_hold_a_row_is_not_given_to_it() -> None:
    """Its measured error is infinite, e.g. that of 1e5 as float16."""
    given = stats()
    known = errors(given)["hot"]
    known.squared["float16"][3] = np.inf
    for budget in (1e-2, 1e-3, 1e-4):
        with warnings.catch_warnings(action="error"):
            found = choose_dtypes(TABLES[:1], given, {"hot": known}, budget)
        begin, end = known.edges[3:5]
        ranges = found.dtypes["hot"]
        starts = [0, *(stop for stop, _ in ranges)]
        assert not any(dtype == "float16" and start < end and stop > begin
                       for start, (stop, dtype) in zip(starts, ranges, strict=False))
        assert found.error <= budget
