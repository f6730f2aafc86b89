"""Properties of the directory arithmetic, and its agreement with the kernels."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings, strategies as st

from oper.errors import PlanError
from oper.plan import Piece, Plan, TablePlan, Tier
from oper.rows.directory import TableDirectory, summing_piece
from oper.shmem.optim.optimizers import SGD
from oper.shmem.tables import ShardedTables
from oper.tables import TableSpec
from tests.runtime_support import assert_bitwise, bags_of_one, run_ranks

FAST = settings(max_examples=150, deadline=None, derandomize=True)
SLOW = settings(max_examples=25, deadline=None, derandomize=True)


@st.composite
def tiers(draw, start: int, stop: int, world_size: int) -> Tier:
    placement = draw(st.sampled_from(["replicated", "striped", "owned"]))
    ranks = draw(st.permutations(range(world_size)))
    count = 1 if placement == "owned" else draw(st.integers(1, world_size))
    weights = ()
    if placement == "striped" and draw(st.booleans()):
        weights = tuple(draw(st.lists(st.integers(1, 9), min_size=count, max_size=count)))
    return Tier(start, stop, placement, tuple(ranks[:count]), weights)


@st.composite
def table_plans(draw, max_rows: int = 300, max_world: int = 5, dim: int = 4
                ) -> tuple[TablePlan, int]:
    world_size = draw(st.integers(1, max_world))
    rows = draw(st.integers(1, max_rows))
    cuts = draw(st.lists(st.integers(0, rows), max_size=5))
    ends = sorted({0, rows, *cuts})
    parts = tuple(draw(tiers(a, b, world_size)) for a, b in itertools.pairwise(ends))
    head = draw(st.permutations(range(rows)))[: draw(st.integers(0, rows))]
    spec = TableSpec("t", rows, dim, ("f",), "sum", optimizer="sgd")
    return TablePlan(spec, (Piece(0, dim, parts),), np.array(head, np.int64)), world_size


@FAST
@given(table_plans())
def test_positions_are_head_ids_then_ids_in_order(case: tuple[TablePlan, int]) -> None:
    plan, world_size = case
    directory = TableDirectory(plan, world_size)
    if len(plan.tiers) == 1:
        assert not directory.head_ids.size  # nothing depends on the order then
        return
    rest = np.setdiff1d(np.arange(plan.table.num_rows), plan.head_ids)
    order = directory.ids_at(np.arange(plan.table.num_rows))
    assert order.tolist() == [*plan.head_ids.tolist(), *rest.tolist()]


@FAST
@given(table_plans())
def test_positions_at_inverts_locate(case: tuple[TablePlan, int]) -> None:
    plan, world_size = case
    directory = TableDirectory(plan, world_size)
    owner, slot = directory.locate(np.arange(plan.table.num_rows))
    for rank in range(world_size):
        count = int(directory.num_slots[rank])
        back = directory.positions_at(rank, np.arange(0, count))
        assert np.array_equal(back[slot[owner == rank]], np.flatnonzero(owner == rank))
        middle = directory.positions_at(rank, np.arange(count // 3, count - count // 4))
        assert np.array_equal(middle, back[count // 3: count - count // 4])


@FAST
@given(table_plans())
def test_rows_of_a_tier_follow_its_ranks_and_weights(case: tuple[TablePlan, int]) -> None:
    plan, world_size = case
    directory = TableDirectory(plan, world_size)
    replicas = np.zeros(world_size, np.int64)
    for tier in plan.tiers:
        owner, _ = directory.locate(np.arange(tier.start, tier.stop))
        assert set(owner.tolist()) <= set(tier.ranks)
        weights = tier.weights or (1,) * len(tier.ranks)
        turns, rest = divmod(tier.stop - tier.start, sum(weights))
        for rank, weight in zip(tier.ranks, weights, strict=True):
            # Whole turns give each rank its weight; the rest at most one more weight.
            assert 0 <= (owner == rank).sum() - turns * weight <= min(weight, rest)
        if tier.placement == "replicated":
            replicas[list(tier.ranks)] += tier.stop - tier.start
    assert np.array_equal(directory.num_replica_rows, replicas)


@pytest.mark.parametrize("rows", [10**9 + 7, 2**32 - 1])
def test_large_tables_need_no_memory(rows: int) -> None:
    spec = TableSpec("t", rows, 64, ("f",), "sum")
    parts = (Tier(0, 1000, "replicated", (0, 1, 2)),
             Tier(1000, rows, "striped", (2, 0, 1), (3, 5, 2)))
    directory = TableDirectory(TablePlan(spec, (Piece(0, 64, parts),)), 3)
    any_rows = np.random.default_rng(0).integers(0, rows, 1000)
    some = np.unique([*any_rows.tolist(), 0, 999, 1000, rows - 1])
    owner, slot = directory.locate(some)
    for rank in range(3):  # dealt in order: within a rank slots grow with the position
        assert (np.diff(slot[owner == rank]) > 0).all()
        assert slot[owner == rank].max() < directory.num_slots[rank]
    assert int(directory.num_slots.sum()) == rows


def test_more_rows_than_32_bit_home_keys_are_refused() -> None:
    # Linear indices of a whole table are 32-bit numbers, not only the slots of one shard.
    spec = TableSpec("giant", 5 * 10**9, 4, ("f",), "sum")
    plan = TablePlan(spec, (Piece(0, 4, (Tier(0, spec.num_rows, "striped", (0, 1)),)),))
    with pytest.raises(PlanError, match="giant"):
        TableDirectory(plan, 2)


def test_rows_of_host_memory_have_the_last_slots() -> None:
    spec = TableSpec("mine", 100, 8, ("f",), "sum")
    tiers = (Tier(0, 10, "owned", (1,), memory="host"), Tier(10, 20, "replicated", (0, 1)),
             Tier(20, 50, "striped", (0, 1), memory="host"), Tier(50, 100, "owned", (1,)))
    directory = TableDirectory(TablePlan(spec, (Piece(0, 8, tiers),)), 2)
    assert directory.num_slots.tolist() == [20, 80]
    assert directory.num_host_slots.tolist() == [15, 25]
    assert directory.num_host_replica_rows.tolist() == [0, 0]
    owner, slot = directory.locate(np.arange(100))
    in_host = np.zeros(100, bool)
    in_host[:10] = in_host[20:50] = True
    for rank, device in enumerate((5, 55)):
        assert ((slot >= device) == in_host)[owner == rank].all()
        assert sorted(slot[owner == rank]) == list(range(directory.num_slots[rank]))


# ---- what C++ makes of it ------------------------------------------------------------------------


def _rows_found(group, plan: Plan, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    rows = plan.tables[0].table.num_rows
    tables = ShardedTables(plan, [("f", "t")], group, SGD(lr=1.0), 1.0)
    own = torch.arange(rows, dtype=torch.float32)
    tables.write("t", torch.stack([own, -own, own + 0.5, own * 2], 1))
    tables.flush_replicas()
    batch = bags_of_one(ids)
    with torch.no_grad():
        found = tables.lookup(batch).clone()
    # Only this rank sends a gradient to row `id`: 1000 * (id + 1), to be found there afterwards.
    grad = torch.zeros(ids.numel(), 4)
    grad[:, group.rank % 4] = 1000 * (ids + 1).float()
    tables.lookup(batch).backward(grad)
    tables.barrier()
    with torch.no_grad():
        read_back = tables.lookup(batch).clone()
    return {"found": found, "after": read_back, "read": tables.read("t")}


def long_stripes(weights: tuple[int, ...]) -> tuple[TablePlan, int]:
    tier = Tier(0, 20011, "striped", (2, 0, 1), weights)
    return TablePlan(TableSpec("t", 20011, 4, ("f",), "sum", optimizer="sgd"),
                     (Piece(0, 4, (tier,)),)), 3


def many_tiers() -> tuple[TablePlan, int]:
    """More tiers than a vector register has lanes, with a head over most of them."""
    cuts = [0, 1, 2, 40, 41, 90, 200, 201, 300, 450, 451, 700, 800, 997]
    kinds = itertools.cycle(("owned", "striped", "replicated"))
    parts = tuple(Tier(a, b, kind, (1,) if kind == "owned" else (2, 0, 1))
                  for (a, b), kind in zip(itertools.pairwise(cuts), kinds, strict=False))
    head = np.random.default_rng(3).permutation(997)[:800]
    return TablePlan(TableSpec("t", 997, 4, ("f",), "sum", optimizer="sgd"),
                     (Piece(0, 4, parts),), head.astype(np.int64)), 3


@SLOW
@given(table_plans(max_rows=200, max_world=4), st.integers(0, 2**31))
@example(many_tiers(), 1)
@example(long_stripes((1, 1, 1)), 0)
@example(long_stripes((7, 3, 1)), 0)
@example(long_stripes((1000, 999, 2097)), 0)
@example(long_stripes((1, 4094, 1)), 0)
def test_kernels_and_numpy_agree_on_the_place_of_every_row(case: tuple[TablePlan, int], seed: int
                                                           ) -> None:
    entry, world_size = case
    rows = entry.table.num_rows
    plan = Plan(world_size, (entry,))
    ids = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    ranks = run_ranks(world_size, lambda group: _rows_found(group, plan, ids))
    own = ids.float()
    want = torch.stack([own, -own, own + 0.5, own * 2], 1)
    after = want.clone()
    for rank in range(world_size):
        after[:, rank % 4] -= 1000 * (own + 1)
    for result in ranks:
        assert_bitwise(result["found"], want, "rows before the update")
        assert_bitwise(result["after"], after, "rows after the update")
        assert_bitwise(result["read"][ids], after, "rows read in logical order")


@pytest.mark.parametrize("pieces", range(2, 9))
def test_every_owner_adds_up_its_share_of_the_hottest_rows(pieces: int) -> None:
    """Owners of every p-th row, as stripes have them: as even as a random choice of pieces."""
    for period, rows in itertools.product(range(1, 65), (200, 1000, 20_000)):
        n = rows // period
        if n < 5 * pieces:
            continue
        count = np.zeros((period, pieces))
        positions = np.arange(n * period)
        np.add.at(count, (positions % period, summing_piece(positions, pieces)), 1)
        spread = count.var(axis=1).mean() / (n / pieces * (1 - 1 / pieces))
        assert spread < 1 + 6 / np.sqrt(period * (pieces - 1) / 2), (period, rows, spread)
