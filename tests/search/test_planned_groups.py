"""The planner's choice of replica groups."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oper.cli import main
from oper.errors import InvalidInputError, PlanError
from oper.plan import Plan, uniform_plan
from oper.search import make_plan, verify_plan
from oper.search.problem.statement import make_problem
from oper.search.replica_groups import synchronization_us
from oper.stats import AccessStats, TableStats
from oper.tables import TableSpec
from oper.topology import Rack, Topology

ROWS, BATCH = 20_000, 256
TABLES = [TableSpec(f"t{k}", ROWS, 32, (f"f{k}",), "sum", optimizer="rowwise_adagrad")
          for k in range(2)]


def skewed() -> AccessStats:
    counts = (1e6 / np.arange(1, ROWS + 1) ** 1.2).astype(np.int64) + 1
    values, rows = np.unique(counts, return_counts=True)
    of = TableStats(ROWS, tail_values=values, tail_num_rows=rows)
    return AccessStats(int(counts.sum()), {t.name: of for t in TABLES})


def racks(uplink_gbps: float) -> Topology:
    """Four hosts in two racks."""
    return replace(Topology.of_domains([0, 1, 2, 3]),
                   racks=(Rack((0, 1), uplink_gbps), Rack((2, 3), uplink_gbps)))


@pytest.mark.parametrize(("uplink", "every", "groups"), [(0.005, 16, 2), (10.0, 1, 1)])
def test_slow_uplinks_separate_groups(uplink: float, every: int, groups: int) -> None:
    stats, topology = skewed(), racks(uplink)
    plan = make_plan(TABLES, stats, topology, batch_size=BATCH, synchronize_every=every)
    compared = {x["groups"]: x for x in plan.notes["replica_groups"]}
    assert compared.keys() == {1, 2, 4} and plan.replica_groups == groups
    assert plan.synchronize_every == (every if groups > 1 else 1)
    assert plan.world_size == 4 // groups
    for count, x in compared.items():
        alone = make_plan(TABLES, stats, topology.divided(count), batch_size=BATCH)
        assert x["step_us"] == alone.step_us + x["synchronization_us"] / every
        assert alone.lower_bound_us <= x["bound_us"] <= x["step_us"]
    assert min(x["step_us"] for x in compared.values()) == compared[groups]["step_us"]
    part = make_problem(TABLES, stats, topology.divided(groups), batch_size=BATCH)
    assert verify_plan(plan, part).certified
    again = Plan.from_text(plan.to_text())
    assert (again.replica_groups, again.synchronize_every) == (groups, plan.synchronize_every)


@pytest.mark.parametrize(("optimizer", "samples"), [("rowwise_adagrad", 2), ("sgd", 4)])
def test_a_synchronization_sends_the_expected_rows(optimizer: str, samples: int) -> None:
    """Compared with draws of ids: every rank sends what it owns of its group's updated rows; with
    SGD, of all groups' updated rows."""
    table = replace(TABLES[0], optimizer=optimizer)
    counts = (1e6 / np.arange(1, ROWS + 1) ** 1.2).astype(np.int64) + 1
    stats = skewed()
    topology = Topology.of_domains([0, 1, 2, 3])
    costs = replace(topology.costs, phase_us=0.0, wire_ns=0.0)
    topology = replace(topology, costs=costs)
    plan = replace(uniform_plan([table], 2, "striped"), batch_size=BATCH)
    every, rng = 8, np.random.default_rng(1)
    drawn = [np.unique(rng.choice(ROWS, BATCH * every * samples, p=counts / counts.sum()))
             for _ in range(20)]
    owned = [max((ids % 2 == r).sum() for r in range(2)) for ids in drawn]
    row_bytes = 4 * 32 + 4 + (4 if optimizer == "rowwise_adagrad" else 0)
    want_us = float(np.mean(owned)) * row_bytes / 1.25 * 1e-3
    took_us, shared_us, least_us = synchronization_us(plan, topology, (2, every, 32), stats)
    assert took_us == pytest.approx(want_us, rel=0.03)
    assert 0.8 * took_us < least_us <= took_us == shared_us


@pytest.mark.parametrize(("every", "bits"), [(8, 8), (8, 16), (1, 8)])
def test_fewer_bits_shorten_a_synchronization(every: int, bits: int) -> None:
    """In proportion to the bytes of a row, its slot and its state; in pieces a row has a step each.
    """
    topology = Topology.of_domains([0, 1, 2, 3])
    topology = replace(topology, costs=replace(topology.costs, phase_us=0.0, wire_ns=0.0))
    whole = replace(uniform_plan(TABLES[:1], 2, "striped"), batch_size=BATCH)
    halves = replace(whole, tables=(replace(whole.tables[0], pieces=tuple(
        replace(p, start=at, stop=at + 16) for p in whole.tables[0].pieces for at in (0, 16))),))
    rest = 4 + 4 * (every > 1)
    for plan, pieces in ((whole, 1), (halves, 2)):
        exact, fewer = (synchronization_us(plan, topology, (2, every, b), skewed())
                        for b in (32, bits))
        row = (4 * 32 if bits == 16 else 2 * (32 + 8 * pieces)) // 2
        assert fewer[0] / exact[0] == pytest.approx(
            (row + rest * pieces) / (4 * 32 + rest * pieces))
        assert fewer[2] <= fewer[0] * (1 + 1e-9) and fewer[2] < exact[2] / 1.5
    plan = make_plan(TABLES, skewed(), racks(0.005), batch_size=BATCH, synchronize_every=8,
                     synchronize_bits=bits)
    assert (plan.replica_groups, plan.synchronize_bits) == (2, bits)
    assert Plan.from_text(plan.to_text()).synchronize_bits == bits
    alone = make_plan(TABLES, skewed(), Topology.of_domains([0]), batch_size=BATCH,
                      synchronize_every=every, synchronize_bits=bits)  # not used, like the interval
    assert (alone.replica_groups, alone.synchronize_every, alone.synchronize_bits) == (1, 1, 32)
    with pytest.raises(InvalidInputError, match="synchronize_bits=4, expected one of"):
        make_plan(TABLES, skewed(), racks(0.005), batch_size=BATCH, synchronize_every=8,
                  synchronize_bits=4)


def test_some_ranks_have_their_counterparts_in_their_own_rack() -> None:
    """A plan may store all rows on them: nothing then passes the slow uplinks."""
    topology = replace(Topology.of_domains([*range(8)]), racks=(
        Rack((0, 1, 4, 5), 1e-3), Rack((2, 3), 1e-3), Rack((6, 7), 1e-3)))
    assert topology.divided(2).racks == (Rack((0, 1), 1e-3), Rack((2, 3), 1e-3))
    for placement in ("owned", "striped"):
        plan = replace(uniform_plan(TABLES[:1], 4, placement), batch_size=BATCH)
        took_us, shared_us, least_us = synchronization_us(plan, topology, (2, 8, 32), skewed())
        assert 0 < least_us <= took_us
        assert (took_us == shared_us) == (placement == "owned")


def test_uplinks_are_hidden_by_the_steps_made_meanwhile() -> None:
    """The modelled time of K steps: K - d, and d others, which take at least as long as what is
    sent meanwhile."""
    stats, topology, every = skewed(), racks(0.005), 8
    steps = []
    for delay in (0, 3, 8):
        plan = make_plan(TABLES, stats, topology, batch_size=BATCH, synchronize_every=every,
                         synchronize_delay=delay)
        assert (plan.replica_groups, plan.synchronize_delay) == (2, delay)
        assert Plan.from_text(plan.to_text()).synchronize_delay == delay
        took_us, shared_us, least_us = synchronization_us(plan, topology, (2, every, 32), stats)
        assert shared_us < took_us / 50  # the hosts' links are 250 times as fast
        x = {x["groups"]: x for x in plan.notes["replica_groups"]}[2]
        step, bound = plan.step_us, plan.lower_bound_us
        assert x["step_us"] == pytest.approx(
            ((every - delay) * step + max(delay * step + shared_us, took_us)) / every)
        assert x["bound_us"] == pytest.approx(
            ((every - delay) * bound + max(delay * bound, least_us)) / every)
        steps.append(x["step_us"])
    assert steps[0] > steps[1] > steps[2]
    with pytest.raises(InvalidInputError, match="synchronize_delay=9, expected an integer from 0"):
        make_plan(TABLES, stats, topology, batch_size=BATCH, synchronize_every=8,
                  synchronize_delay=9)
    with pytest.raises(InvalidInputError, match="give synchronize_every as well"):
        make_plan(TABLES, stats, topology, batch_size=BATCH, synchronize_delay=1)


def test_divided_topologies() -> None:
    topology = racks(2.0)
    half = topology.divided(2)
    assert half.world_size == 2 and half.num_hosts == 2 and half.racks == ()
    assert topology.divided(1) is topology
    assert replace(topology, racks=(Rack((0, 2), 1.0), Rack((1, 3), 1.0))).divided(2).racks == (
        Rack((0,), 1.0), Rack((1,), 1.0))
    with pytest.raises(InvalidInputError, match="a divisor of 4 hosts"):
        topology.divided(3)
    unequal = replace(topology, domains=(replace(topology.domains[0], cross_gbps=9.0),
                                         *topology.domains[1:]))
    with pytest.raises(InvalidInputError, match="equal groups"):
        unequal.divided(2)


def test_plan_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    skewed().save(tmp_path / "stats.npz")
    arguments: list[Any] = ["plan", tmp_path / "stats.npz", "-o", tmp_path / "plan.json", "--dim",
                            32, "--topology", "h100-2x8", "--synchronize-every", 4, "--json"]
    assert main([str(x) for x in arguments]) == 0
    plan = Plan.load(tmp_path / "plan.json")
    assert json.loads(capsys.readouterr().out)["plan"]
    assert {x["groups"] for x in plan.notes["replica_groups"]} == {1, 2}
    assert main(["explain", str(tmp_path / "plan.json"), "--stats", str(tmp_path / "stats.npz")]
                ) == 0
    assert "2 replica groups: step" in capsys.readouterr().out
    assert main([str(x) for x in [*arguments[:-1], "--objective", "inference"]]) == 2
    assert main([str(x) for x in [*arguments, "--synchronize-delay", 2]]) == 0
    assert Plan.load(tmp_path / "plan.json").synchronize_delay == 2
    assert main([str(x) for x in [*arguments, "--synchronize-bits", 8]]) == 0
    assert Plan.load(tmp_path / "plan.json").synchronize_bits in (8, 32)
    alone = [x for x in arguments if x not in ("--synchronize-every", 4)]
    assert main([str(x) for x in [*alone, "--synchronize-delay", 2]]) == 2
    assert main([str(x) for x in [*alone, "--synchronize-bits", 8]]) == 2
    with pytest.raises(PlanError, match="replica_groups=0"):
        replace(plan, replica_groups=0)
