"""`oper.Replanner`: two emulated hosts whose links change while they train."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import oper
from oper.errors import InvalidInputError, OperError, PlanInfeasibleError
from oper.plan import uniform_plan
from oper.replanning import Event, WatchOptions, decision, watch
from oper.replanning.moves import moves
from oper.stats import AccessStats
from oper.topology import Costs, Domain, Topology
from tests.runtime_support import assert_bitwise
from tests.world_support import run_world

ROWS, DIM, BATCH, WINDOW = 4_000, 16, 32, 4
FAST, SLOW = 0.5, 0.05  # GB/s
STEP_S = {"usual": 0.010, "slow": 0.030}
TOPOLOGY = Topology("two", tuple(
    Domain((r,), r, 1 << 26, 40.0, 80.0, 1 << 20, 40.0, FAST) for r in range(2)), Costs(1.0))


class _Clock:
    """A clock that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class _Run:
    """A sharded bag whose steps take as long as the test specifies; one rank of two hosts.

    Attributes:
        asked: how often the links were measured.
        moves: plans to which the tables were moved.
    """

    def __init__(self, rank: int, links: Callable[[int], Sequence[float]]) -> None:
        os.environ["OPER_DOMAIN"] = str(rank)
        self.rank, self.clock, self.asked = rank, _Clock(), 0
        watch.time = SimpleNamespace(perf_counter=self.clock)  # type: ignore[assignment]
        torch.manual_seed(0)
        bag = nn.EmbeddingBag(ROWS, DIM, mode="sum")
        batches = [{"": (_ids(step, r), torch.full((BATCH,), 4))} for step in range(20)
                   for r in range(2)]
        self.stats: AccessStats = oper.collect(batches, bag)
        self.model = oper.shard(bag, self.stats, topology=TOPOLOGY, batch_size=BATCH,
                                optimizer=oper.RowWiseAdagrad(lr=0.1))
        self._links = links
        self.watch = oper.Replanner(self.model, self.stats, TOPOLOGY, WatchOptions(window=WINDOW),
                                    measure_links=self._measure)
        self.step = 0

    def _measure(self) -> Sequence[float]:
        self.asked += 1
        self.clock.now += 0.05  # the time that measuring takes
        return self._links(self.asked)

    def train(self, kind: str, num_steps: int) -> list[Event]:
        found = []
        for _ in range(num_steps):
            self.model(_ids(self.step, self.rank).view(BATCH, 4)).tanh().sum().backward()
            self.step += 1
            self.clock.now += STEP_S[kind]
            event = self.watch.step()
            found += [] if event is None else [event]
        return found


def _ids(step: int, rank: int) -> torch.Tensor:
    g = np.random.default_rng((step, rank))
    return torch.from_numpy(np.minimum(g.zipf(1.3, 4 * BATCH), ROWS) - 1)


def _name(run: _Run) -> str:
    return run.model.tables.plan.tables[0].table.name


def _told(old_us: float, new_us: float, copy_us: float) -> Callable[..., Any]:
    """Make a stand-in for `replan` that returns stated step times of old and new plan, and the time
    of the move, in us.

    Its plan is a real one, for other links.
    """
    real = decision.replan

    def told(plan: Any, stats: Any, topology: Topology, **options: Any) -> Any:
        found = real(plan, stats, topology, **options)
        return replace(found, old_step_us=old_us, new_step_us=new_us, copy_us=copy_us)

    return told


def _moves_when_it_has_paid(rank: int, world_size: int) -> dict[str, Any]:
    run = _Run(rank, lambda n: [FAST, SLOW])
    # Moving takes 30 ms and saves 2 ms per step: it pays after 15 steps, in the window of steps
    # 12 to 16.
    watch.replan = _told(20e3, 18e3, 30e3)
    first = run.train("usual", 3 * WINDOW + 1)
    before = run.model.tables.read(_name(run))
    seen = run.train("slow", 4 * WINDOW - 1)
    kinds = [(e.kind, e.step) for e in seen]
    early = run.asked
    seen += run.train("slow", WINDOW)
    after = run.train("usual", 4 * WINDOW)
    return {"first": first, "kinds": kinds, "asked": early, "moved": seen[-1].kind,
            "moved_at": seen[-1].step, "links": seen[-1].link_gbps, "after": after,
            "changed": bool((run.model.tables.read(_name(run)) != before).any()),
            "topology": [d.cross_gbps for d in run.watch.topology.domains],
            "events": len(run.watch.events)}


def test_tables_move_when_the_old_plan_has_cost_what_the_move_costs() -> None:
    for found in run_world(2, _moves_when_it_has_paid):
        assert found["first"] == [] and found["changed"]
        # The first slow window triggers a measurement: its 4 steps took 80 ms longer than usual,
        # and measuring is assumed to take 0 s until it has been timed.
        assert found["kinds"] == [("better plan", 4 * WINDOW)]
        assert found["asked"] == 1
        assert (found["moved"], found["moved_at"]) == ("moved", 7 * WINDOW)
        assert found["links"] == pytest.approx((FAST, SLOW)) and found["after"] == []
        assert found["topology"] == pytest.approx([FAST, SLOW]) and found["events"] == 2


def _links_recover(rank: int, world_size: int) -> dict[str, Any]:
    run = _Run(rank, lambda n: [FAST, SLOW])
    watch.replan = _told(20e3, 18e3, 30e3)
    plan = run.model.tables.plan
    run.train("usual", 3 * WINDOW)
    seen = run.train("slow", 2 * WINDOW + 1)
    seen += run.train("usual", 6 * WINDOW)
    return {"kinds": [e.kind for e in seen], "same": run.model.tables.plan is plan,
            "topology": [d.cross_gbps for d in run.watch.topology.domains]}


def test_links_that_recover_in_time_move_nothing() -> None:
    for found in run_world(2, _links_recover):
        assert found["kinds"] == ["better plan"] and found["same"]
        assert found["topology"] == [FAST, FAST]


def _other_programs(rank: int, world_size: int) -> dict[str, Any]:
    run = _Run(rank, lambda n: [FAST, FAST * 0.97])
    run.train("usual", 3 * WINDOW)
    first = run.train("slow", 6 * WINDOW)
    # Measuring has taken 50 ms: a change of 20 ms per step exceeds that within a window again.
    second = run.train("usual", 6 * WINDOW)
    return {"kinds": [e.kind for e in first + second], "asked": run.asked}


def test_steps_that_links_do_not_explain_move_nothing() -> None:
    for found in run_world(2, _other_programs):
        assert found == {"kinds": ["same links"] * 2, "asked": 2}


def _no_plan(rank: int, world_size: int) -> tuple[list[str], int, bool]:
    run = _Run(rank, lambda n: [FAST, SLOW])

    def refuses(*args: Any, **options: Any) -> Any:
        raise PlanInfeasibleError("no plan fits")

    watch.replan = refuses
    plan, raised = run.model.tables.plan, []
    run.train("usual", 3 * WINDOW)
    for _ in range(8 * WINDOW):
        try:
            run.train("slow", 1)
        except PlanInfeasibleError as error:
            raised.append(str(error))
    return raised, run.asked, run.model.tables.plan is plan


def test_all_ranks_learn_once_that_there_is_no_plan() -> None:
    """Only rank 0 plans; the other ranks do not wait for it, and training continues."""
    assert run_world(2, _no_plan) == [(["no plan fits"], 1, True)] * 2


def _fails(rank: int, world_size: int, case: str) -> tuple[str, float]:
    run = _Run(rank, lambda n: [FAST, SLOW])
    replanner: Any = run.watch
    if case == "options":  # only rank 0 uses them
        replanner._plan_options = {"no_such_option": 1}
    elif case == "links":
        run._links = lambda n: [FAST] * 3
    else:  # the ranks measure different speeds; those of rank 0 count
        run._links = lambda n: [FAST, FAST * (0.1 if rank else 0.97)]
    run.train("usual", 3 * WINDOW)
    if case == "differ":
        return run.train("slow", 2 * WINDOW)[0].kind, 0.0
    with pytest.raises(OperError) as raised:
        run.train("slow", 2 * WINDOW)
    return str(raised.value), replanner._last - run.clock.now


@pytest.mark.parametrize("case, word", [
    ("options", "no_such_option"), ("links", "measured links"), ("differ", "same links")])
def test_all_ranks_learn_of_an_error_of_one(case: str, word: str) -> None:
    for text, left in run_world(2, _fails, case, env={"OPER_DEADLINE_S": "20"}):
        assert word in text and left == 0


def _counted(rank: int, world_size: int) -> dict[str, Any]:
    """Return the bytes that a real move sends, and the predicted ones."""
    run = _Run(rank, lambda n: [FAST, SLOW])
    tables = run.model.tables
    old = tables.plan
    slow = replace(TOPOLOGY, domains=tuple(replace(d, cross_gbps=SLOW if d.host else FAST)
                                           for d in TOPOLOGY.domains))
    new = oper.replan(old, run.stats, slow).plan
    transport, sent = tables._exchange._transport, [0]
    exchange = transport.exchange

    def counting(send: Any, send_bytes: list[int], recv: Any, recv_bytes: list[int]) -> None:
        heads = set(send_bytes) == {1024}  # the headers that precede every exchange
        sent[0] += 0 if heads else send_bytes[1 - rank]
        exchange(send, send_bytes, recv, recv_bytes)

    run.train("usual", 3)
    rows = tables.read(_name(run))
    transport.exchange = counting
    oper.migrate(run.model, new)
    del transport.exchange
    predicted = moves(old, new, [0, 1]).between
    assert_bitwise({"rows": tables.read(_name(run))}, {"rows": rows}, "moved")
    return {"sent": sent[0], "predicted": float(predicted[rank].sum())}


def test_a_move_sends_the_bytes_that_are_predicted() -> None:
    found = run_world(2, _counted)
    assert all(x["sent"] > 0 for x in found)
    for x in found:
        assert x["sent"] == pytest.approx(x["predicted"])


def _refused(rank: int, world_size: int) -> list[str]:
    run = _Run(rank, lambda n: [FAST, SLOW])
    messages = []
    for topology in (Topology.this_host(2), Topology.of_domains(range(3))):
        with pytest.raises(InvalidInputError) as raised:
            oper.Replanner(run.model, run.stats, topology)
        messages.append(str(raised.value))
    by_hand = uniform_plan([run.model.tables.plan.tables[0].table], 2)
    oper.migrate(run.model, by_hand)
    with pytest.raises(InvalidInputError) as raised:
        oper.Replanner(run.model, run.stats, TOPOLOGY)
    return [*messages, str(raised.value)]


def test_what_cannot_be_watched_is_refused() -> None:
    for found in run_world(2, _refused):
        for message, word in zip(found, ("hosts", "ranks", "batch_size"), strict=True):
            assert word in message
    for options in ({"window": 0}, {"tolerance": 1.5}, {"copy_gbps": 0.0},
                    {"bytes_per_step": 0}):
        with pytest.raises(InvalidInputError, match=next(iter(options))):
            WatchOptions(**options)  # type: ignore[arg-type]
