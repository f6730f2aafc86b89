"""The planning problem: curves over hotness, presence, stripes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from search_cases import counted, gpus, host, problem, tables_and_stats

from oper.errors import InvalidInputError
from oper.search.problem.statement import IDS, ROWS, TOUCHED, TOUCHED_ALL, make_problem, make_table
from oper.stats import AccessStats, TableStats
from oper.tables import TableSpec


def one_table(num_rows: int = 5000, exponent: float = 1.05, length: int = 2, world: int = 4,
              in_order: bool = True, batch: int = 128):
    rng = np.random.default_rng(3)
    stats = AccessStats(200_000, {"t": counted(num_rows, exponent, rng, length=length,
                                               in_order=in_order)}, "", in_order)
    return make_table(TableSpec("t", num_rows, 16, ("f",)), stats, batch, world), stats


def test_features_add_up_to_what_presence_says_of_every_row():
    table, stats = one_table()
    found = stats.tables["t"]
    num_ids = 128 * 2
    p = np.zeros(5000)
    p[found.head_ids] = found.head_counts / found.num_accesses
    # Every row was seen, so that unseen rows have no mass.
    assert (p > 0).all()
    assert table.total[ROWS] == 5000
    assert table.total[IDS] == pytest.approx(num_ids)
    assert table.total[TOUCHED] == pytest.approx((1 - (1 - p) ** num_ids).sum(), rel=1e-9)
    assert table.total[TOUCHED_ALL] == pytest.approx((1 - (1 - p) ** (4 * num_ids)).sum(), rel=1e-9)


def test_simulated_batches_touch_as_many_rows_as_the_problem_expects():
    table, stats = one_table(exponent=1.2)
    found = stats.tables["t"]
    rng = np.random.default_rng(0)
    p = found.head_counts / found.num_accesses
    drawn = [np.unique(rng.choice(found.head_ids, 256, p=p)).size for _ in range(400)]
    assert np.mean(drawn) == pytest.approx(table.total[TOUCHED], rel=0.02)


def test_blocks_are_few_and_cover_the_table():
    table, _ = one_table(num_rows=200_000)
    assert 10 <= table.blocks.shape[0] <= 100
    assert table.edges[0] == 0 and table.edges[-1] == 200_000
    assert (np.diff(table.edges) > 0).all()
    heat = table.blocks[:, IDS] / table.blocks[:, ROWS]
    assert (np.diff(heat) <= 1e-12).all()


def test_a_billion_rows_need_no_dense_array():
    values = np.array([0, 1, 2, 50])
    rows = np.array([10**9 - 1_100_100, 10**6, 10**5, 0])
    stats = TableStats(10**9, np.arange(100), np.full(100, 1000), values, rows,
                       np.array([1]), np.array([2_300_000]))
    table = make_table(TableSpec("t", 10**9, 64, ("f",)),
                       AccessStats(1_300_000, {"t": stats}, "", True), 4096, 8)
    assert table.cumulative.size < 1000
    assert table.total[ROWS] == pytest.approx(1e9)


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("period", [1, 3, 8])
def test_stripes_add_up_to_their_tier(in_order, period):
    table, _ = one_table(num_rows=300, in_order=in_order)
    for ordered in ({True, in_order} if in_order else {True, False}):
        shares = table.shares(5, 211, period, ordered)
        assert shares.shape == (4, period)
        assert shares.sum(axis=1) == pytest.approx(table.features(5, 211, ordered))
        expected = [len(range(5 + k, 211, period)) for k in range(period)]
        assert shares[ROWS] == pytest.approx(expected)


def test_stripes_of_hot_rows_are_exact_row_by_row():
    table, stats = one_table(num_rows=300)
    found = stats.tables["t"]
    p = found.head_counts / found.num_accesses
    shares = table.shares(0, 8, 4, True)  # the hottest rows are blocks of their own
    for k in range(4):
        assert shares[IDS, k] == pytest.approx(256 * (p[k] + p[k + 4]))


def test_ids_without_order_are_followed_by_id():
    table, stats = one_table(num_rows=300, in_order=False)
    found = stats.tables["t"]
    hottest = found.head_counts / found.num_accesses
    p = np.zeros(300)  # each row is as hot as the mean of its block in the order of hotness
    for first, stop in itertools.pairwise(table.edges):
        p[found.head_ids[first:stop]] = hottest[first:stop].sum() / (stop - first)
    shares = table.shares(10, 200, 7, False)
    for k in range(7):
        assert shares[IDS, k] == pytest.approx(256 * p[10 + k:200:7].sum())


def test_measured_presence_replaces_independence():
    rng = np.random.default_rng(1)
    base = counted(2000, 1.0, rng)
    independent = make_table(TableSpec("t", 2000, 8, ("f",)),
                             AccessStats(200_000, {"t": base}, "", True), 128, 1)
    half = independent.total[TOUCHED] / 2
    found = TableStats.from_counts(2000, base.head_ids, base.head_counts,
                                   (base.length_values, base.length_counts),
                                   (np.array([128]), np.array([half]), np.array([9])))
    measured = make_table(TableSpec("t", 2000, 8, ("f",)),
                          AccessStats(200_000, {"t": found}, "", True), 128, 1)
    assert measured.total[TOUCHED] == pytest.approx(half, rel=1e-3)
    assert measured.total[IDS] == independent.total[IDS]
    assert measured.blocks[0, TOUCHED] <= 1.0


def test_without_statistics_one_warning_and_equal_rows():
    specs, _ = tables_and_stats(3, 0)
    with pytest.warns(UserWarning, match="no access statistics") as seen:
        stated = make_problem(specs, None, host(2), batch_size=64)
    assert len(seen) == 1
    table = stated.tables[0]
    heat = table.blocks[:, IDS] / table.blocks[:, ROWS]
    assert heat == pytest.approx(np.full(heat.size, 64 / table.spec.num_rows))


@pytest.mark.parametrize(("change", "word"), [
    ({"objective": "fun"}, "objective"), ({"batch_size": 0}, "batch_size"),
    ({"batch_size": 2**62}, "batch_size"),
    ({"allow": {"striped"}}, "allow"), ({"allow": {"sideways", "pull"}}, "allow"),
])
def test_bad_arguments_are_named(change, word):
    specs, stats = tables_and_stats(2, 0)
    arguments = {"objective": "training", "batch_size": 8, **change}
    with pytest.raises(InvalidInputError, match=word):
        make_problem(specs, stats, gpus(2), **arguments)


def test_statistics_of_another_model_are_refused():
    specs, stats = tables_and_stats(2, 0)
    wrong = TableSpec("t0", specs[0].num_rows + 1, 8)
    with pytest.raises(InvalidInputError, match="num_rows"):
        make_problem([wrong], stats, gpus(2), batch_size=8)


def test_a_row_zero_for_rare_ids_comes_first_whatever_its_count():
    stats = TableStats.from_counts(4, np.arange(4), np.array([5, 100, 50, 10]),
                                   (np.array([1]), np.array([165])))
    table = make_table(TableSpec("t", 4, 8, ("f",)), AccessStats(165, {"t": stats}, "", True),
                       165, 1)
    assert table.blocks[:, IDS] == pytest.approx([5, 100, 50, 10])


def test_problem_names_its_tables():
    stated = problem(2, 0, host(2))
    assert stated.table("t1").spec.name == "t1"
    with pytest.raises(InvalidInputError, match="nope"):
        stated.table("nope")
