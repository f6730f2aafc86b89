"""`oper.replan`: drift is detected, priced, and compared with the cost of a move."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import oper
from oper.analysis import distance
from oper.errors import InvalidInputError
from oper.plan import Piece, Plan, TablePlan, Tier, uniform_plan
from oper.replanning import step_us
from oper.replanning.moves import Moves, moves
from oper.rows.directory import TableDirectory
from oper.stats import AccessStats, TableStats
from oper.tables import TableSpec
from oper.topology import Costs, Domain, Topology

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


def test_without_drift_nothing_pays(old_plan: Plan) -> None:
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


def test_drift_costs_and_a_new_plan_pays(old_plan: Plan) -> None:
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


def test_positions_of_the_old_plan_are_used(old_plan: Plan) -> None:
    """The relabelled problem has each row at its position in the plan."""
    from oper.replanning.decision import _by_position

    entry, found = old_plan.table("a"), stats(11).tables["a"]
    moved = _by_position(found, entry, 2)
    directory = TableDirectory(entry, 2)
    by_id = dict(zip(directory.position_of(found.head_ids).tolist(), found.head_counts.tolist(),
                     strict=True))
    assert by_id == dict(zip(moved.head_ids.tolist(), moved.head_counts.tolist(), strict=True))


def test_plans_that_cannot_be_priced_are_refused(old_plan: Plan) -> None:
    by_hand = replace(old_plan, batch_size=0, step_us=0.0, lower_bound_us=0.0)
    with pytest.raises(InvalidInputError, match="batch_size"):
        oper.replan(by_hand, stats(0), TOPOLOGY)
    with pytest.raises(InvalidInputError, match="batch_size=0"):
        step_us(by_hand, stats(0), TOPOLOGY)
    with pytest.raises(InvalidInputError, match="copy_gbps"):
        oper.replan(old_plan, stats(0), TOPOLOGY, copy_gbps=0.0)
