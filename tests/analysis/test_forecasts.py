"""Forecasts of a dynamic table's lookups, rows and evictions."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import oper
from oper import analysis
from oper.analysis.presence import Lookups
from oper.errors import InvalidInputError
from oper.rows.capacity import DynamicRows, rows_of_keys, stats_of_rows
from oper.search import make_problem, topology_preset
from oper.shmem.keys.directories import KeyCounts
from oper.stats import AccessStats, TableStats
from oper.tables import TableSpec
from tests.integration import module_support

# ---- forecasts -----------------------------------------------------------------------------------

LOOKUPS, BATCH_SIZE = 60_000, 40


def log_of(num_keys: int, exponent: float = 0.9, seed: int = 0, size: int = LOOKUPS) -> np.ndarray:
    """Draw independent keys from a power law over scattered 64-bit values."""
    rng = np.random.default_rng(seed)
    p = np.arange(1, num_keys + 1) ** -exponent
    ranks = np.minimum(np.searchsorted(np.cumsum(p / p.sum()), rng.random(size)), num_keys - 1)
    return (ranks + 1) * 0x5851F42D4C957F2D


def counted(keys: np.ndarray, **fields: int) -> TableStats:
    counter = analysis.KeyCounter(**fields)
    for at in range(0, keys.size, 10_000):
        counter.add([Lookups(keys[at:at + 10_000])], f"hour {at // 20_000}")
    return counter.finish()


def replayed(keys: np.ndarray, num_rows: int, rule: oper.DynamicTable) -> tuple[KeyCounts, int]:
    """Process the log with a dynamic table; return the table's counts, and how many keys have a row
    and have not expired."""
    bag = module_support.shard(nn.EmbeddingBag(num_rows, 1, mode="sum"), dynamic=rule,
                               optimizer=oper.SGD(lr=0.0))
    for at in range(0, keys.size, BATCH_SIZE):
        bag(torch.from_numpy(keys[at:at + BATCH_SIZE])[:, None]).sum().backward()
    counts = bag.tables.keys.counts("weight")
    return counts, counts.occupied - bag.tables.keys.expired("weight", -1).numel()


@pytest.mark.parametrize(("num_keys", "num_rows", "admit_after", "eviction"), [
    (5_000, 10_001, 1, "lru"), (5_000, 10_001, 3, "lru"), (5_000, 4_001, 1, "lru"),
    (20_000, 2_001, 1, "lru"), (20_000, 2_001, 1, "lfu"), (20_000, 2_001, 1, "distance_lfu"),
    (5_000, 4_001, 2, "distance_lfu")])
def test_a_table_has_the_predicted_lookups(num_keys: int, num_rows: int, admit_after: int,
                                           eviction: str) -> None:
    keys = log_of(num_keys)
    found = analysis.forecast(counted(keys), num_rows, admit_after, eviction)
    rule = oper.DynamicTable(admit_after=admit_after, eviction=eviction)
    true, _ = replayed(keys, num_rows, rule)
    assert found.keys == np.unique(keys).size and found.rows == true.rows
    assert found.occupied == pytest.approx(true.occupied, rel=0.03)
    # LFU eviction also keeps keys that came early: the forecast is the best case.
    slack = 0.05 if eviction == "lru" else 0.25
    assert found.default_share == pytest.approx(true.default_share, rel=slack)
    assert found.inserts_per_lookup == pytest.approx(true.admitted / LOOKUPS, rel=slack)
    assert found.evictions_per_lookup == pytest.approx(true.evicted / LOOKUPS, rel=slack, abs=2e-3)


@pytest.mark.parametrize(("num_rows", "admit_after", "eviction", "half_life", "time_to_live"), [
    (10_001, 1, "lru", None, 50), (10_001, 2, "lru", None, 100), (1_001, 1, "lru", None, 10),
    (1_001, 1, "lru", None, 100), (1_001, 1, "lfu", 50, None), (4_001, 1, "lfu", 200, None),
    (1_001, 1, "lfu", 50, 200), (1_001, 2, "distance_lfu", 50, 300)])
def test_keys_expire_and_counts_decay_as_predicted(
        num_rows: int, admit_after: int, eviction: str, half_life: int | None,
        time_to_live: int | None) -> None:
    keys = log_of(20_000)
    rule = oper.DynamicTable(admit_after=admit_after, eviction=eviction, half_life=half_life,
                             time_to_live=time_to_live)
    times = [None if x is None else float(x * BATCH_SIZE) for x in (half_life, time_to_live)]
    found = analysis.forecast(counted(keys), num_rows, admit_after, eviction, *times)
    true, num_live = replayed(keys, num_rows, rule)
    assert found.occupied == pytest.approx(num_live, rel=0.1)
    assert found.default_share == pytest.approx(true.default_share, rel=0.04)
    if admit_after > 1:
        return  # not all keys that wait for a row can be counted
    assert found.inserts_per_lookup == pytest.approx(true.admitted / LOOKUPS, rel=0.04)
    kinds = found.evictions_per_lookup, found.expirations_per_lookup
    assert min(kinds) == 0 < max(kinds) <= found.inserts_per_lookup
    assert (kinds[1] > 0) is (true.expired > true.evicted)


@pytest.mark.parametrize(("num_rows", "admit_after"), [
    (10_001, 1), (10_001, 2), (1_001, 1), (2, 1)])
def test_rows_have_the_lookups_of_their_keys(num_rows: int, admit_after: int) -> None:
    table = counted(log_of(5_000))
    rows = rows_of_keys(table, DynamicRows(num_rows, admit_after))
    found = analysis.forecast(table, num_rows, admit_after)
    assert rows.num_rows == num_rows and rows.head_ids.tolist() == [0]
    assert rows.head_counts[0] == pytest.approx(found.default_share * LOOKUPS, abs=1)
    assert rows.num_accesses == pytest.approx(LOOKUPS, rel=0.01)
    hot, _ = table.count_histogram()
    if num_rows > 2:
        assert rows.tail_values[-1] == pytest.approx(hot[0] - admit_after, rel=0.02, abs=2)
    assert rows.pooling_factor == pytest.approx(1, rel=0.01)


def test_empty_statistics() -> None:
    empty = analysis.KeyCounter().finish()
    assert (empty.num_accesses, empty.num_touched_rows) == (0, 0)
    found = analysis.forecast(empty, 10)
    assert (found.keys, found.occupied, found.default_share) == (0, 0.0, 0.0)
    assert rows_of_keys(empty, DynamicRows(10)).tail_num_rows.tolist() == [10]


@pytest.mark.parametrize(("fields", "name"), [
    ({"num_rows": 1}, "num_rows"), ({"num_rows": 9.5}, "num_rows"),
    ({"num_rows": 10**30}, "num_rows"),
    ({"num_rows": 9, "admit_after": 0}, "admit_after"),
    ({"num_rows": 9, "admit_after": 1.5}, "admit_after"),
    ({"num_rows": 9, "half_life": "2"}, "half_life"),
    ({"num_rows": 9, "eviction": "fifo"}, "eviction"),
    ({"num_rows": 9, "half_life": 0}, "half_life"),
    ({"num_rows": 9, "time_to_live": -1.0}, "time_to_live")])
def test_refused_arguments(fields: dict[str, object], name: str) -> None:
    with pytest.raises(InvalidInputError, match=f"cannot forecast a dynamic table: {name}"):
        analysis.forecast(counted(log_of(50, size=100)), **fields)  # type: ignore[arg-type]


def test_sketches_stand_for_all_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """With sketches, total accesses are exact; hot keys and the number of keys nearly so."""
    for kind in (analysis.HeavyHitters, analysis.DistinctSample):
        monkeypatch.setattr(analysis.counting, kind.__name__, functools.partial(kind, 4096))
    keys = log_of(40_000, size=400_000)
    exact, sketched = counted(keys), counted(keys, budget_bytes=1 << 16)
    assert sketched.num_accesses == pytest.approx(exact.num_accesses, rel=0.05)
    assert sketched.num_touched_rows == pytest.approx(exact.num_touched_rows, rel=0.1)
    assert int(sketched.new_ids.sum()) == pytest.approx(int(exact.new_ids.sum()), rel=0.1)
    assert sketched.coverage(100) == pytest.approx(exact.coverage(100), rel=0.1)
    one, other = (analysis.forecast(t, 8_001) for t in (exact, sketched))
    assert other.default_share == pytest.approx(one.default_share, rel=0.1)


def test_a_table_takes_statistics_of_its_keys() -> None:
    """If each key occurs once, all lookups read row 0; with a few hot keys, hardly any do."""
    shares = {}
    for name, keys in (("new", np.arange(LOOKUPS) * 7), ("hot", log_of(50))):
        table = rows_of_keys(counted(keys), DynamicRows(4_097))
        shares[name] = table.head_counts[0] / table.num_accesses
        stats = AccessStats(LOOKUPS, {"weight": counted(keys)})
        bag = module_support.shard(nn.EmbeddingBag(4_097, 8, mode="sum"), stats=stats,
                                   dynamic=oper.DynamicTable(), batch_size=256)
        bag(torch.from_numpy(keys[:256])[:, None]).sum().backward()
        assert bag.tables.keys.counts("weight").occupied == np.unique(keys[:256]).size
    assert shares["new"] == 1.0 and shares["hot"] < 0.01


def test_merged_statistics_of_rows_remain_those_of_a_dynamic_table() -> None:
    """Merging keeps the share of misses, from which the cost of the directory follows."""
    lengths = np.ones(1, np.int64), np.ones(1, np.int64)
    one, other, static = (replace(TableStats.from_counts(
        9, np.arange(2), np.array([n, n]), lengths), default_share=share)
        for n, share in ((1, 0.5), (3, 0.1), (1, None)))
    assert one.merge(other).default_share == pytest.approx(0.2)
    assert static.merge(one).default_share == 0.5 and static.merge(static).default_share is None


@pytest.mark.parametrize("num_rows", [1_000, 4_000])
def test_presence_of_rows_is_that_of_replayed_lookups(num_rows: int) -> None:
    """It once subtracted every miss, so that large windows touched hardly any row."""
    keys = log_of(1 << 15, 1.0, size=200_000)
    rows = rows_of_keys(counted(keys, presence_samples=(512, 4096, 16384)),
                        DynamicRows(num_rows, eviction="lfu"))
    distinct, inverse, counts = np.unique(keys, return_inverse=True, return_counts=True)
    held = np.argsort(-counts, kind="stable")[:rows.num_touched_rows - 1]
    row = np.where(np.isin(np.arange(distinct.size), held), np.arange(distinct.size), -1)[inverse]
    for n, found in zip(rows.presence_samples, rows.presence_rows, strict=True):
        windows = row[:row.size // n * n].reshape(-1, n)
        assert found == pytest.approx(np.mean([np.unique(x).size for x in windows]), rel=0.06)


def test_presence_of_rows_does_not_depend_on_how_lookups_are_divided_into_bags() -> None:
    keys = log_of(1 << 12) & ((1 << 20) - 1)
    as_features = [{"a": keys[k:k + 2_000:2], "b": keys[k + 1:k + 2_000:2]}
                   for k in range(0, keys.size, 2_000)]
    as_bags = [{"a": (keys[k:k + 2_000], np.full(1_000, 2))} for k in range(0, keys.size, 2_000)]
    found = [rows_of_keys(analysis.collect(batches, [TableSpec("t", 1 << 20, 8, features)]).tables[
        "t"], DynamicRows(500)) for batches, features in (
            (as_features, ("a", "b")), (as_bags, ("a",)))]
    assert found[0].presence_rows.size and found[0].default_share == found[1].default_share
    assert found[0].presence_rows == pytest.approx(found[1].presence_rows)


def test_equally_hot_rows_of_a_dynamic_table_keep_the_bag_lengths() -> None:
    """They once had one id per bag if row numbers stood for hotness."""
    lengths = np.array([0, 20]), np.array([100, 300])
    table = TableStats.from_counts(100, np.arange(60), np.full(60, 100), lengths)
    spec, topology = TableSpec("t", 41, 16, ("f",)), topology_preset("h100-8")
    traffic = []
    for in_order in (False, True):
        rows = stats_of_rows(AccessStats(400, {"t": table}, "", in_order),
                             {"t": DynamicRows(41)}, 512)
        problem = make_problem([spec], rows, topology, batch_size=64).tables[0]
        traffic.append(problem.traffic)
        assert problem.default_share is not None
    assert traffic[0].num_ids == traffic[1].num_ids == 64 * 15
    share = problem.cumulative / problem.total[:, None]  # of the table in hotness order
    assert share == pytest.approx(np.tile(problem.edges / 41, (len(share), 1)))


def test_an_infinite_half_life_equals_none() -> None:
    """An infinite half-life once made the forecast NaN."""
    keys = counted(log_of(50, size=100))
    for eviction in ("lfu", "distance_lfu"):
        endless = analysis.forecast(keys, 20, 1, eviction, np.inf, np.inf)
        assert endless.default_share == pytest.approx(
            analysis.forecast(keys, 20, 1, eviction).default_share)


def test_statistics_of_keys_have_no_distance_and_no_sum() -> None:
    """They do not show whether two days have the same keys."""
    table = counted(log_of(500))
    with pytest.raises(InvalidInputError, match="ids='raw keys'"):
        analysis.distance(table, table)
    stats = AccessStats(500, {"t": table})
    with pytest.raises(InvalidInputError, match=r"'t': ids='raw keys'.*as one log"):
        analysis.merge_stats([stats, stats])
