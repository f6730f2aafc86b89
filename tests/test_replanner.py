"""`oper.replan` and `oper.Replanner`: drift is detected, priced, and compared with a move."""

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
from oper.analysis import distance
from oper.errors import InvalidInputError, OperError, PlanInfeasibleError
from oper.plan import Piece, Plan, TablePlan, Tier, uniform_plan
from oper.replanning import Event, WatchOptions, decision, step_us, watch
from oper.replanning.moves import Moves, moves
from oper.rows.directory import TableDirectory
from oper.stats import AccessStats, TableStats
from oper.tables import TableSpec
from oper.topology import Costs, Domain, Rack, Topology
from tests.runtime_support import assert_bitwise
from tests.world_support import run_world

# ---- oper.replan ---------------------------------------------------------------------------------

ROWS = 20_000
TABLES = [TableSpec("a", ROWS, 64, ("fa",), optimizer="none"),
          TableSpec("b", ROWS, 32, ("fb",), optimizer="none")]
# Each rank has its own memory with space for a few replicas, and links are slow, so that hot rows
# should be replicated.
TOPOLOGY = Topology("two", tuple(
    Domain((r,), 0, 6_000_000, 400.0, 800.0, 1 << 20, 20.0, 20.0) for r in range(2)),
    Costs(0.1))


def stats(shift: int) -> AccessStats:
    """Make skewed access statistics whose hot rows begin at `shift`."""
    counts = (1e6 / np.arange(1, ROWS + 1) ** 1.2).astype(np.int64)
    ids = (np.arange(ROWS) * 7919 + shift) % ROWS
    lengths = (np.array([4]), np.array([int(counts.sum()) // 4]))
    table = TableStats.from_counts(ROWS, ids, counts, lengths)
    return AccessStats(table.num_bags, {t.name: table for t in TABLES})


@pytest.fixture(scope="module")
def old_plan() -> Plan:
    return oper.make_plan(TABLES, stats(0), TOPOLOGY, batch_size=64, objective="inference")


# ---- distance ------------------------------------------------------------------------------------


def test_distance_is_total_variation() -> None:
    a, b = (stats(s).tables["a"] for s in (0, 1))
    shares = np.zeros((2, ROWS))
    for k, s in enumerate((a, b)):
        shares[k, s.head_ids] = s.head_counts / s.num_accesses
    assert distance(a, b) == pytest.approx(np.abs(shares[0] - shares[1]).sum() / 2)
    assert distance(a, b) == pytest.approx(distance(b, a))
    for n in range(3, 40):  # rounded shares add up to more than 1, too
        same = TableStats.from_counts(n, np.arange(n), np.arange(n, 0, -1), (np.array([1]),
                                      np.array([n * (n + 1) // 2])))
        assert 0.0 <= distance(same, same) < 1e-12
    one, other = (TableStats.from_counts(9, np.array([k]), np.array([5]), (np.array([1]),
                  np.array([5]))) for k in (2, 3))
    assert distance(one, other) == pytest.approx(1.0)


def test_distance_of_cut_tails() -> None:
    """Rows outside a head are assumed equal; the shares of the head count exactly."""
    table = stats(0).tables["a"]
    cut = replace(table, head_ids=table.head_ids[:100], head_counts=table.head_counts[:100],
                  tail_values=np.array([int(table.head_counts[100:].mean())]),
                  tail_num_rows=np.array([ROWS - 100]))
    assert distance(cut, cut) == pytest.approx(0.0, abs=1e-9)
    assert 0.0 < distance(table, cut) < 0.3
    with pytest.raises(InvalidInputError, match="equal numbers of rows"):
        distance(table, replace(table, num_rows=ROWS + 1,
                                tail_values=np.array([0]), tail_num_rows=np.array([1])))


# ---- the decision --------------------------------------------------------------------------------


def test_without_drift_no_new_plan_saves_time(old_plan: Plan) -> None:
    found = oper.replan(old_plan, stats(0), TOPOLOGY, old_stats=stats(0))
    assert max(found.distance.values()) == pytest.approx(0.0, abs=1e-12)
    assert found.moved_bytes == 0
    assert found.new_step_us == pytest.approx(found.old_step_us)
    assert found.break_even_steps == float("inf")
    # The step time is the one that was planned.
    assert found.old_step_us == pytest.approx(old_plan.step_us, rel=0.05)


def test_tables_that_one_of_the_statistics_lacks_have_no_distance(old_plan: Plan) -> None:
    known = stats(0)
    found = oper.replan(old_plan, known, TOPOLOGY,
                        old_stats=AccessStats(known.num_samples, {}, known.source))
    assert found.distance == {}


def test_after_drift_a_new_plan_saves_time(old_plan: Plan) -> None:
    assert len(old_plan.table("a").tiers) > 1, "the case has a hot tier"
    found = oper.replan(old_plan, stats(11), TOPOLOGY, old_stats=stats(0), copy_gbps=2.0)
    assert min(found.distance.values()) > 0.5
    assert found.old_step_us > 2 * old_plan.step_us, "hot rows have left their tiers"
    assert found.new_step_us == pytest.approx(old_plan.step_us, rel=0.05)
    assert found.moved_bytes > 0
    # The link between the two ranks' memories has 20 GB/s; each sends half of the bytes read.
    assert 0 < found.network_bytes / 2 / 20e3 <= found.copy_us - found.copied_bytes / 2e3
    gain = found.old_step_us - found.new_step_us
    assert found.break_even_steps * gain == pytest.approx(found.copy_us)


def test_dense_compute_hides_phases_of_both_plans(old_plan: Plan) -> None:
    hidden = {"forward": 3 * old_plan.step_us}  # as long as the old plan's step after the drift
    shown = oper.replan(old_plan, stats(11), TOPOLOGY)
    for plan, options in ((old_plan, {"overlap": hidden}),
                          (replace(old_plan, notes={**old_plan.notes, "overlap_us": hidden}), {})):
        found = oper.replan(plan, stats(11), TOPOLOGY, options=options)
        assert found.plan.notes["overlap_us"] == hidden
        assert found.new_step_us == pytest.approx(found.plan.step_us, abs=0.1)
        for step, without in ((found.old_step_us, shown.old_step_us),
                              (found.new_step_us, shown.new_step_us)):
            assert step == pytest.approx(max(0.0, without - hidden["forward"]), abs=0.1)


def test_ids_in_hotness_order_that_no_longer_are() -> None:
    """With preprocessed ids, the order of the plan is the id itself, which drift invalidates, too.
    """
    counts = (1e6 / np.arange(1, ROWS + 1) ** 1.2).astype(np.int64)
    lengths = (np.array([4]), np.array([int(counts.sum()) // 4]))

    def ordered(ids: np.ndarray, in_order: bool) -> AccessStats:
        table = TableStats.from_counts(ROWS, ids, counts, lengths)
        return AccessStats(table.num_bags, {t.name: table for t in TABLES},
                           ids_in_hotness_order=in_order)

    before = ordered(np.arange(ROWS), True)
    plan = oper.make_plan(TABLES, before, TOPOLOGY, batch_size=64, objective="inference")
    still = step_us(plan, before, TOPOLOGY)
    gone = step_us(plan, ordered(np.arange(ROWS)[::-1].copy(), False), TOPOLOGY)
    assert still == pytest.approx(plan.step_us, rel=0.05) and gone > 1.1 * still


def _moves(old: TablePlan, new: TablePlan, domain_of: list[int]) -> Moves:
    return moves(*(Plan(len(domain_of), (t,)) for t in (old, new)), domain_of)


def test_moved_bytes_are_those_whose_owner_changes() -> None:
    spec = replace(TABLES[0], optimizer="rowwise_adagrad")
    striped = uniform_plan([spec], 2).tables[0]
    owned = TablePlan(spec, (Piece(0, 16, (Tier(0, ROWS, "owned", (0,)),)),
                             Piece(16, 64, (Tier(0, ROWS, "owned", (1,)),))))
    assert _moves(striped, striped, [0, 1]).owner_bytes == 0
    # Half of the rows of both pieces move, each with its copy of a row-wise state.
    assert _moves(striped, owned, [0, 1]).owner_bytes == ROWS // 2 * ((16 + 48) * 4 + 4 + 4)
    large = replace(spec, num_rows=10_000_000)
    before = uniform_plan([large], 2).tables[0]
    after = TablePlan(large, (Piece(0, 64, (Tier(0, large.num_rows, "owned", (1,)),)),))
    assert _moves(before, after, [0, 1]).owner_bytes == pytest.approx(5_000_000 * 260, rel=0.01)


def test_bytes_between_domains_are_counted_by_row() -> None:
    """Compare with a loop over rows, ranks and domains."""
    spec = replace(TABLES[0], num_rows=300, dim=8, optimizer="rowwise_adagrad")
    head = np.random.default_rng(0).permutation(300)[:40]
    old = TablePlan(spec, (Piece(0, 8, (Tier(0, 40, "replicated", (0, 1, 2)),
                                        Tier(40, 300, "owned", (3,)))),), head)
    tiers = Tier(0, 90, "replicated", (0, 1, 2, 3)), Tier(90, 300, "striped", (0, 1, 2, 3))
    new = TablePlan(spec, (Piece(0, 8, tiers),), head[::-1].copy())
    domain_of = [0, 0, 1, 1]
    want = np.zeros((2, 2))
    before, after = TableDirectory(old, 4), TableDirectory(new, 4)
    for row in np.arange(300)[:, None]:
        was, now = before.position_of(row), after.position_of(row)
        source = domain_of[int(before.locate(was)[0][0])]
        owner = int(after.locate(now)[0][0])
        readers = [(owner, 32), (owner, 4), *((r, 32) for r in range(4) if now[0] < 90)]
        for rank, num_bytes in readers:
            target = domain_of[rank]
            has_replica = was[0] < 40 and num_bytes == 32  # both domains hold some
            if source != target and not has_replica:
                want[source, target] += num_bytes
                want[target, source] += 8
    found = _moves(old, new, domain_of)
    np.testing.assert_allclose(found.between, want)
    links = Topology("two", tuple(Domain((2 * h, 2 * h + 1), h, 1 << 20, 1.0, 1.0, 0, 1.0, 0.5)
                                  for h in range(2)))
    busiest = max(want.sum(0).max(), want.sum(1).max())
    assert found.transfer_us(links) == pytest.approx(busiest / (2 * 0.5 * 1e3))
    racked = replace(links, racks=(Rack((0,), 0.1), Rack((1,), 0.2)))
    assert found.transfer_us(racked) == pytest.approx(busiest / (0.1 * 1e3))


def test_rows_that_are_only_read_move_without_optimizer_state(old_plan: Plan) -> None:
    trained = replace(old_plan, tables=tuple(
        replace(t, table=replace(t.table, optimizer="adam")) for t in old_plan.tables))
    read, adam = (oper.replan(x, stats(11), TOPOLOGY) for x in (old_plan, trained))
    assert read.moved_bytes > 0 and adam.new_step_us == pytest.approx(read.new_step_us)
    for name in ("moved_bytes", "network_bytes", "copied_bytes"):
        assert getattr(adam, name) == getattr(read, name), name


def test_a_new_plan_keeps_the_constraints_and_groups_of_the_old_one() -> None:
    held = {"tables": {"a": {"replicate": False}}, "keep_together": [["a", "b"]]}
    old = oper.make_plan(TABLES, stats(0), TOPOLOGY, batch_size=64, constraints=held)
    old = replace(old, replica_groups=2, synchronize_every=4, synchronize_bits=8)
    found = oper.replan(old, stats(11), TOPOLOGY)
    assert found.plan.notes["constraints"] == old.notes["constraints"]
    assert not any(x.placement == "replicated" for x in found.plan.table("a").tiers)
    assert (found.plan.replica_groups, found.plan.synchronize_every, found.plan.synchronize_bits
            ) == (2, 4, 8)
    free = oper.replan(old, stats(11), TOPOLOGY, options={"constraints": None})
    assert free.new_step_us < 0.9 * found.new_step_us
    # A model's collection keeps the notes of the plan of all tables.
    part = oper.replan(replace(old, tables=old.tables[:1]), stats(11), TOPOLOGY)
    assert part.plan.notes["constraints"] == {"tables": old.notes["constraints"]["tables"]}


def test_plans_that_cannot_be_priced_are_refused(old_plan: Plan) -> None:
    by_hand = replace(old_plan, batch_size=0, step_us=0.0, lower_bound_us=0.0)
    with pytest.raises(InvalidInputError, match="batch_size"):
        oper.replan(by_hand, stats(0), TOPOLOGY)
    with pytest.raises(InvalidInputError, match="batch_size=0"):
        step_us(by_hand, stats(0), TOPOLOGY)
    with pytest.raises(InvalidInputError, match="copy_gbps"):
        oper.replan(old_plan, stats(0), TOPOLOGY, copy_gbps=0.0)


# ---- oper.Replanner ------------------------------------------------------------------------------

HOST_ROWS, DIM, BATCH, WINDOW = 4_000, 16, 32, 4
FAST, SLOW = 0.5, 0.05  # GB/s
STEP_S = {"usual": 0.010, "slow": 0.030}
TWO_HOSTS = Topology("two", tuple(
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
        bag = nn.EmbeddingBag(HOST_ROWS, DIM, mode="sum")
        batches = [{"": (_ids(step, r), torch.full((BATCH,), 4))} for step in range(20)
                   for r in range(2)]
        self.stats: AccessStats = oper.collect(batches, bag)
        self.model = oper.shard(bag, self.stats, topology=TWO_HOSTS, batch_size=BATCH,
                                optimizer=oper.RowWiseAdagrad(lr=0.1))
        self._links = links
        self.watch = oper.Replanner(self.model, self.stats, TWO_HOSTS, WatchOptions(window=WINDOW),
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
    return torch.from_numpy(np.minimum(g.zipf(1.3, 4 * BATCH), HOST_ROWS) - 1)


def _name(run: _Run) -> str:
    return run.model.tables.plan.tables[0].table.name


def _recording_replan(old_us: float, new_us: float, copy_us: float) -> Callable[..., Any]:
    """Make a stand-in for `replan` that returns stated step times of old and new plan, and the time
    of the move, in us.

    Its plan is a real one, for other links.
    """
    real = decision.replan

    def recording(plan: Any, stats: Any, topology: Topology, **options: Any) -> Any:
        found = real(plan, stats, topology, **options)
        return replace(found, old_step_us=old_us, new_step_us=new_us, copy_us=copy_us)

    return recording


def _moves_when_it_has_paid(rank: int, world_size: int) -> dict[str, Any]:
    run = _Run(rank, lambda n: [FAST, SLOW])
    # Moving takes 30 ms and saves 2 ms per step: it pays after 15 steps, in the window of steps
    # 12 to 16.
    watch.replan = _recording_replan(20e3, 18e3, 30e3)
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


def test_tables_move_once_the_time_lost_equals_the_cost_of_the_move() -> None:
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
    watch.replan = _recording_replan(20e3, 18e3, 30e3)
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


def test_slow_steps_on_unchanged_links_move_nothing() -> None:
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
def test_an_error_on_one_rank_is_raised_on_all(case: str, word: str) -> None:
    for text, left in run_world(2, _fails, case, env={"OPER_DEADLINE_S": "20"}):
        assert word in text and left == 0


def _counted(rank: int, world_size: int) -> dict[str, Any]:
    """Return the bytes that a real move sends, and the predicted ones."""
    run = _Run(rank, lambda n: [FAST, SLOW])
    tables = run.model.tables
    old = tables.plan
    slow = replace(TWO_HOSTS, domains=tuple(replace(d, cross_gbps=SLOW if d.host else FAST)
                                            for d in TWO_HOSTS.domains))
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
        # The four numbers at the start of a request are not predicted: one of rows, one of states.
        assert x["sent"] == x["predicted"] + 2 * 4 * 8


@pytest.mark.parametrize("bits", [{"a": 8, "b": (16, 8)}, {"b": 16}, 8])
def test_tables_of_all_collections_keep_their_message_bits(bits: Any) -> None:
    """A plan with other bits would be refused when the tables are moved to it."""
    whole = replace(uniform_plan([TableSpec(n, 64, 8, (n,)) for n in "abc"], 2), message_bits=bits)
    parts = [replace(whole, tables=tuple(map(whole.table, names))) for names in ("a", "bc")]
    watched: Any = object.__new__(oper.Replanner)
    watched._tables = [SimpleNamespace(plan=p, specs=[t.table.name for t in p.tables])
                       for p in parts]
    assert watched._plan().to_text() == whole.to_text()


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
        oper.Replanner(run.model, run.stats, TWO_HOSTS)
    return [*messages, str(raised.value)]


def test_models_that_cannot_be_watched_are_refused() -> None:
    for found in run_world(2, _refused):
        for message, word in zip(found, ("hosts", "ranks", "batch_size"), strict=True):
            assert word in message
    for options in ({"window": 0}, {"tolerance": 1.5}, {"copy_gbps": 0.0},
                    {"bytes_per_step": 0}):
        with pytest.raises(InvalidInputError, match=next(iter(options))):
            WatchOptions(**options)  # type: ignore[arg-type]
