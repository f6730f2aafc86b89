"""Replayed batches: loads agree with the cost model, and timelines with sums of durations."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from oper.errors import InvalidInputError
from oper.messages import MessageBits
from oper.plan import Piece, Plan, TablePlan, Tier
from oper.rows.traffic import KIND, link_classes
from oper.search.cost.evaluation import Phase
from oper.search.cost.model import evaluate
from oper.search.problem.machine import GROUPS, TERMS, Term, copy_sets
from oper.search.problem.statement import Problem, make_problem
from oper.search.replay.realized import RealizedLoad, StepLoad
from oper.search.replay.simulate import Bags, RankBatch, Replay
from oper.search.replay.timeline import DENSE, LOOKUPS, Schedule, run
from oper.stats import AccessStats
from oper.tables import TableSpec
from oper.topology import Costs, Topology
from tests.search.search_cases import (
    KINDS,
    counted,
    gpus,
    host,
    racked,
    random_plan,
    shared,
    with_host_memory,
)
from tests.support import map_tiers, read_trace

BATCH = 256


def stated(topology: Topology, objective: str = "training") -> tuple[Problem, list[np.ndarray]]:
    """A problem of three tables, and the probability of each row of each."""
    rng = np.random.default_rng(3)
    shapes = ((2000, 16, "sgd", 4), (300, 64, "rowwise_adagrad", 1), (900, 8, "adagrad", 2))
    specs, stats, chances = [], {}, []
    for k, (rows, dim, optimizer, length) in enumerate(shapes):
        specs.append(TableSpec(f"t{k}", rows, dim, (f"f{k}",), optimizer=optimizer))
        stats[f"t{k}"] = counted(rows, 0.9, rng, length=length)
        counts = np.zeros(rows)
        counts[stats[f"t{k}"].head_ids] = stats[f"t{k}"].head_counts
        chances.append(counts / counts.sum())
    every = AccessStats(200_000, stats, "generated", True)
    return make_problem(specs, every, topology, objective=objective, batch_size=BATCH), chances


def draw(problem: Problem, chances: list[np.ndarray], rng: np.random.Generator) -> list[RankBatch]:
    batches = []
    for _ in range(problem.machine.world_size):
        batch = {}
        for t, chance in zip(problem.tables, chances, strict=True):
            lengths = np.full(BATCH, int(t.traffic.lengths[0]))
            ids = rng.choice(chance.size, int(lengths.sum()), p=chance)
            batch[t.spec.features[0]] = Bags(ids, lengths)
        batches.append(batch)
    return batches


def _one_copy_per_host(plan: Plan, problem: Problem, seed: int) -> Plan:
    """A plan in which every other replicated tier is copied to only one rank per host."""
    sets, turn = copy_sets(problem.machine), itertools.count(seed)

    def moved(x: Tier) -> Tier:
        if not sets or x.placement != "replicated" or x.memory == "host" or next(turn) % 2:
            return x
        return replace(x, ranks=sets[seed % len(sets)])

    return map_tiers(plan, moved)


@pytest.mark.parametrize("objective", ["training", "inference"])
@pytest.mark.parametrize(("topology", "bits"), [
    (gpus(4, per_host=2), 32), (gpus(4, per_host=2), (8, 8)), (gpus(4, per_host=2), (16, 32)),
    (host(3), 32), (racked(gpus(4, per_host=1), 9.0, 5.0), 32),
    (shared(racked(gpus(6, per_host=2), 9.0, 5.0)), 32)],
    ids=["hosts", "8 bits", "16 bits", "one memory", "racks", "shared"])
def test_the_mean_of_many_steps_is_what_the_model_predicts(topology: Topology, bits: Any,
                                                           objective: str) -> None:
    costs = Costs(phase_us=2.0, id_ns=1.0, sort_ns=2.0, reduce_ns=3.0, update_ns=4.0, run_ns=5.0,
                  refresh_ns=6.0, tier_ns=7.0, push_ns=8.0, table_us=9.0, warm_share=0.5)
    problem, chances = stated(with_host_memory(replace(topology, costs=costs)), objective)
    problem = replace(problem, message_bits=MessageBits.parse(bits))
    kinds = KINDS if objective == "training" else KINDS[:3]
    rng = np.random.default_rng(11)
    for seed in range(6):
        plan = random_plan(problem, np.random.default_rng(seed), kinds, max_pieces=2,
                           in_host=KINDS)
        plan = _one_copy_per_host(plan, problem, seed)
        predicted = evaluate(plan, problem)
        load = RealizedLoad(plan, problem)
        steps = [load.step(draw(problem, chances, rng)).phases for _ in range(12)]
        for k, phase in enumerate(predicted.phases):
            units = np.mean([s[k].units for s in steps], axis=0)
            for n, term in enumerate(TERMS):
                if bits != 32 and n not in (Term.CROSS_IN, Term.CROSS_OUT):
                    continue  # headers count as numbers, also within a host
                # Host memory is read once per id; the mean of few ids is inaccurate.
                size = max(float(phase.units[n].max()), 1e4 if n == Term.HOST_MEMORY else 1.0)
                assert np.allclose(units[n], phase.units[n], rtol=0.1, atol=0.05 * size), (
                    seed, phase.name, term)
            assert steps[0][k].fixed_us == phase.fixed_us


def test_rows_between_two_gpus_are_the_distinct_ones() -> None:
    problem, _ = stated(gpus(2))
    spec = problem.tables[0].spec
    entries = [TablePlan(t.spec, (Piece(0, t.spec.dim, (
        Tier(0, t.spec.num_rows, "owned", (1,)),)),)) for t in problem.tables]
    plan = Plan(2, tuple(entries))
    one = {"f0": Bags(np.array([5, 5, 7, 9]), np.array([3, 1]))}
    load = RealizedLoad(plan, problem).step([one, {}])
    forward, backward, update = load.phases
    assert forward.units[Term.LINK_IN].tolist() == [3 * spec.row_bytes, 0]
    assert forward.units[Term.LINK_OUT].tolist() == [0, 3 * spec.row_bytes]
    assert update.units[Term.LINK_IN].tolist() == [0, 3 * (4 * spec.dim + 4)]  # with their slots
    assert not backward.units[Term.LINK_IN].any() and not forward.units[Term.CROSS_IN].any()
    counts = Replay(plan).step([one, {}])
    assert counts[0].counts[KIND["rows"], 0].tolist() == [0, 4]
    assert counts[1].counts[KIND["gradient_rows"], 0].tolist() == [3, 0]
    assert counts[0].by_link(gpus(2))["forward"] == {
        "own rank": 0, "memory domain": 0, "host": 4 * spec.row_bytes, "cross host": 0}


def test_links_have_classes() -> None:
    assert link_classes(4, gpus(4, per_host=2))[0].tolist() == [0, 2, 3, 3]
    assert link_classes(2, host(2)).tolist() == link_classes(2).tolist() == [[0, 1], [1, 0]]
    with pytest.raises(InvalidInputError, match="ranks"):
        link_classes(3, gpus(4))


@pytest.mark.parametrize(("bags", "word"), [
    (Bags(np.array([2000]), np.array([1])), "id=2000"),
    (Bags(np.array([-1]), np.array([1])), "id=-1"),
    (Bags(np.array([1, 2]), np.array([1])), "lengths"),
    (Bags(np.array([1]), np.array([2, -1])), "lengths"),
])
def test_bad_batches_are_refused(bags: Bags, word: str) -> None:
    problem, _ = stated(gpus(2))
    plan = random_plan(problem, np.random.default_rng(0))
    with pytest.raises(InvalidInputError, match=word):
        Replay(plan).step([{"f0": bags}, {}])
    with pytest.raises(InvalidInputError, match="one per rank"):
        Replay(plan).step([{}])


def made(name: str, memory_us: list[float], link_us: list[float]) -> Phase:
    seconds = np.zeros((len(TERMS), 2))
    seconds[Term.MEMORY] = np.array(memory_us) * 1e-6
    seconds[Term.LINK_IN] = np.array(link_us) * 1e-6
    return Phase(name, seconds * 1e9, seconds, 1.0, np.zeros(2),
                 np.arange(len(GROUPS)) == 0)


STEP = StepLoad((made("forward", [10, 20], [5, 30]), made("backward", [40, 8], [0, 0]),
                 made("update", [3, 6], [0, 0])), np.array([15.0, 5.0]))


def test_barriers_are_those_of_the_runtime() -> None:
    """There is none between forward and backward, so rank 1 waits less than the phases' sum."""
    timeline = run([STEP, STEP], Schedule(True), 2)
    # Rank 0: 10 + 1 and 40 + 1; rank 1: 30 (its link) + 1 and 8 + 1; then 6 + 1 on rank 1.
    assert timeline.ends_us == pytest.approx([52 + 7, 2 * (52 + 7)])
    waits = [(x.process, x.start_us, x.length_us) for x in timeline.bars
             if x.name == "wait" and x.args["step"] == 0]
    assert waits == [(1, 40, 12), (0, 56, 3)]
    late = run([StepLoad((*STEP.phases, made("refresh", [0, 0], [9, 4])), STEP.ids_us)],
               Schedule(True), 2)
    assert late.ends_us == pytest.approx([52 + 7 + 10])
    pushed = run([STEP], Schedule(True, has_push=True), 2)
    assert pushed.ends_us == pytest.approx([31 + 41 + 7])


def test_ids_run_ahead_beside_dense_compute() -> None:
    alone = run([STEP] * 3, Schedule(True, dense_us=10.0), 2)
    ahead = run([STEP] * 3, Schedule(True, dense_us=10.0, in_flight=2), 2)
    # 10 of rank 0's 15 microseconds of sorting find room; the first step has nobody before it.
    assert alone.ends_us[-1] - ahead.ends_us[-1] == pytest.approx(20.0)
    # If one step has much to sort, two earlier windows help more than one.
    long = [STEP, STEP, replace(STEP, ids_us=np.array([25.0, 5.0]))]
    two, three = (run(long, Schedule(True, dense_us=20.0, in_flight=k), 2) for k in (2, 3))
    done = [sum(x.length_us for x in t.bars if x.name == "ids ahead" and x.process == 0)
            for t in (two, three)]
    assert done == pytest.approx([15 + 20, 15 + 25])
    assert any(x.name == "ids ahead" and x.thread == LOOKUPS for x in ahead.bars)


def test_inference_overlaps_lookups_with_dense_compute() -> None:
    steps = [StepLoad((made("forward", [10, 10], [0, 0]),), np.zeros(2))] * 4
    one = run(steps, Schedule(False, dense_us=20.0, in_flight=1), 2)
    two = run(steps, Schedule(False, dense_us=20.0, in_flight=2), 2)
    assert one.ends_us == pytest.approx([31, 62, 93, 124])
    assert two.ends_us == pytest.approx([31, 51, 71, 91])


@pytest.mark.parametrize("schedule", [
    Schedule(True), Schedule(True, True, 25.0, 3), Schedule(False, False, 25.0, 2)])
def test_the_trace_is_well_formed(schedule: Schedule, tmp_path) -> None:
    timeline = run([STEP] * 5, schedule, 2)
    trace = timeline.to_json()
    lanes: dict[tuple[int, int], float] = {}
    for e in trace["traceEvents"]:
        assert e["ph"] in ("M", "X")
        if e["ph"] == "X":
            at = (e["pid"], e["tid"])
            # Intervals of a lane do not overlap.
            assert e["dur"] > 0 and e["ts"] >= lanes.get(at, 0.0) - 2e-3
            lanes[at] = e["ts"] + e["dur"]
    assert {pid for pid, _ in lanes} == {0, 1}
    assert ((0, DENSE) in lanes) == (schedule.dense_us > 0)
    assert max(lanes.values()) <= timeline.ends_us[-1] + 2e-3
    named = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert "lookups" in named
    timeline.write_trace(tmp_path / "t.json")
    assert read_trace(tmp_path / "t.json") == json.loads(json.dumps(trace))


def test_schedules_are_checked() -> None:
    for bad in ({"dense_us": -1.0}, {"dense_us": float("nan")}, {"in_flight": 0}):
        with pytest.raises(InvalidInputError, match=next(iter(bad))):
            Schedule(True, **bad)


def test_compute_is_counted() -> None:
    problem, chances = stated(replace(gpus(2), costs=Costs(id_ns=3.0)))
    plan = random_plan(problem, np.random.default_rng(1), ("striped",))
    batch = draw(problem, chances, np.random.default_rng(2))
    forward = RealizedLoad(plan, problem).step(batch).phases[0]
    ids = [sum(b.ids.size for b in rank.values()) for rank in batch]
    assert forward.units[Term.COMPUTE] == pytest.approx([3.0 * n for n in ids])
