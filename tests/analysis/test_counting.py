"""Counts against a brute-force count: ids, presence, published value counts, skew and drift."""

import gzip
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from oper.analysis import CountOptions, PresenceSampler, TableCounter, describe, drift, skew
from oper.analysis.presence import Lookups
from oper.analysis.summary import bucket_distances
from oper.analysis.value_counts import ValueCountOptions, stats_from_value_counts
from oper.errors import FileFormatError, InvalidInputError
from oper.stats import AccessStats, TableStats, TimeBucket
from tests.support import counts_by, real_data


def random_bags(rng: np.random.Generator, rows: int, bags: int) -> Lookups:
    lengths = rng.integers(0, 5, bags)
    return Lookups(rng.integers(0, rows, int(lengths.sum())), lengths)


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint64])
def test_counts_lengths_and_buckets_are_exact(dense: bool, dtype: type) -> None:
    rng = np.random.default_rng(1)
    counter = TableCounter("t", 50, dense, presence_samples=(4,))
    ids_of: dict[str, Counter[int]] = {}
    lengths: Counter[int] = Counter()
    for label in ("mon", "mon", "tue", "wed", "mon"):
        parts = [random_bags(rng, 50, 20) for _ in range(2)]
        counter.add([Lookups(p.ids.astype(dtype), p.lengths) for p in parts], label)
        for part in parts:
            ids_of.setdefault(label, Counter()).update(part.ids.tolist())
            lengths.update(part.lengths.tolist() if part.lengths is not None else [])
    stats = counter.finish()
    assert counts_by(stats.head_ids, stats.head_counts) == dict(sum(ids_of.values(), Counter()))
    assert counts_by(stats.length_values, stats.length_counts) == {
        k: v for k, v in lengths.items() if v}
    assert [b.label for b in stats.buckets] == ["mon", "tue", "wed"]
    for bucket in stats.buckets:
        assert counts_by(bucket.ids, bucket.counts) == dict(ids_of[bucket.label])
        assert (np.diff(bucket.ids) > 0).all()
    assert stats.num_bags == 5 * 2 * 20


def test_dense_and_sparse_agree_and_spilling_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from oper.analysis import counting

    monkeypatch.setattr(counting, "_UINT32_MAX", 150)
    rng = np.random.default_rng(2)
    both = [TableCounter("t", 30, dense) for dense in (True, False)]
    total: Counter[int] = Counter()
    for _ in range(20):
        ids = rng.integers(0, 30, 100)
        total.update(ids.tolist())
        for counter in both:
            counter.add([Lookups(ids)])
    for stats in (c.finish() for c in both):
        assert counts_by(stats.head_ids, stats.head_counts) == dict(total)


@given(st.lists(st.lists(st.integers(0, 9), max_size=30), min_size=2, max_size=6))
def test_parts_merge_to_the_whole(batches: list[list[int]]) -> None:
    whole = TableCounter("t", 10, presence_samples=(2,))
    parts = []
    for k, batch in enumerate(batches):
        lookups = [Lookups(np.array(batch, np.int64))]
        part = TableCounter("t", 10, dense=k % 2 == 0, presence_samples=(2,))
        for counter in (whole, part):
            counter.add(lookups, f"day {k % 2}")
        parts.append(part.finish())
    merged = parts[0]
    for part_stats in parts[1:]:
        merged = merged.merge(part_stats)
    expected = whole.finish()
    assert counts_by(merged.head_ids, merged.head_counts) == counts_by(
        expected.head_ids, expected.head_counts)
    assert merged.length_counts.tolist() == expected.length_counts.tolist()
    # A bucket exists from its first id; buckets are in the order of the log.
    assert [b.label for b in merged.buckets] == [b.label for b in expected.buckets]
    for a, b in zip(merged.buckets, expected.buckets, strict=True):
        assert a.ids.tolist() == b.ids.tolist() and a.counts.tolist() == b.counts.tolist()


@pytest.mark.parametrize(("ids", "lengths", "words"), [
    ([0, 10], None, ["'clicks'", "10", "num_rows=10"]),
    ([0, -1], None, ["'clicks'", "-1", "num_rows=10"]),
    ([0, 1], [1, 2], ["sum(lengths)", "3", "len(ids)=2"]),
    ([0, 1], [3, -1], ["min(lengths)", "-1", ">= 0"]),
    ([0.5, 1.0], None, ["float64", "integer"]),
])
def test_bad_lookups_are_one_clear_error(ids: list[float], lengths: list[int] | None,
                                         words: list[str]) -> None:
    counter = TableCounter("clicks", 10)
    lookups = Lookups(np.array(ids), None if lengths is None else np.array(lengths))
    with pytest.raises(InvalidInputError) as error:
        counter.add([lookups])
    assert all(word in str(error.value) for word in words), str(error.value)
    assert counter.finish().num_accesses == 0


def test_features_of_a_table_must_have_the_same_samples() -> None:
    counter = TableCounter("t", 10)
    with pytest.raises(InvalidInputError, match="same samples"):
        counter.add([Lookups(np.array([1, 2])), Lookups(np.array([1]))])


def test_dense_budget_goes_to_the_smallest_tables_first() -> None:
    options = CountOptions(dense_budget_bytes=4 * 1100)
    assert options.dense_tables([1000, 10, 90, 50_000]) == [True, True, True, False]
    assert options.dense_tables([1001, 10, 90]) == [False, True, True]


# ---- presence ------------------------------------------------------------------------------------


def brute_force(bags: list[list[int]], block: int, sizes: tuple[int, ...]) -> dict[int, float]:
    """Compute the mean distinct rows per window, over the complete windows of every second block.
    """
    means = {}
    for n in sizes:
        found = []
        for start in range(0, len(bags), 2 * block):
            inside = bags[start:start + block]
            found += [len({i for bag in inside[k:k + n] for i in bag})
                      for k in range(0, len(inside) - n + 1, n)]
        if found:
            means[n] = float(np.mean(found))
    return means


@pytest.mark.parametrize("num_rows", [40, 2**40])
@pytest.mark.parametrize("batch", [1, 7, 16, 100])
@pytest.mark.parametrize("num_samples", [5, 16, 90, 333])
def test_presence_equals_brute_force(num_rows: int, batch: int, num_samples: int) -> None:
    rng = np.random.default_rng(num_samples)
    sizes = (3, 8, 16)
    sampler = PresenceSampler(num_rows, sizes)
    # Two features share the table: a sample's bag is both bags together.
    both = [[rng.integers(0, 40, rng.integers(0, 4)).tolist() for _ in range(num_samples)]
            for _ in range(2)]
    for start in range(0, num_samples, batch):
        lookups = []
        for bags in both:
            part = bags[start:start + batch]
            ids = np.array([i for bag in part for i in bag], np.int64)
            lookups.append(Lookups(ids, np.array([len(bag) for bag in part], np.int64)))
        sampler.add(lookups)
    samples, means, windows = sampler.result()
    expected = brute_force([a + b for a, b in zip(*both, strict=True)], 16, sizes)
    assert counts_by(samples, means) == pytest.approx(expected)
    assert (windows > 0).all()


def test_lengths_of_one_equal_no_lengths() -> None:
    rng = np.random.default_rng(3)
    ids = rng.integers(0, 1000, 50_000)
    with_lengths, without = PresenceSampler(1000), PresenceSampler(1000)
    with_lengths.add([Lookups(ids, np.ones(ids.size, np.int64))])
    without.add([Lookups(ids)])
    for a, b in zip(with_lengths.result(), without.result(), strict=True):
        assert a.tolist() == b.tolist()
    assert without.result()[0].tolist() == [512, 2048, 4096, 8192, 16384]


def test_a_thinned_log_stays_close_to_the_full_one() -> None:
    rng = np.random.default_rng(4)
    sampler = PresenceSampler(100_000, (64, 256))
    ids = np.minimum((100_000 * rng.random(400_000) ** 4).astype(np.int64), 99_999)
    for start in range(0, ids.size, 1000):
        sampler.add([Lookups(ids[start:start + 1000])])
    samples, means, windows = sampler.result()
    truth = np.mean([np.unique(ids[k:k + 256]).size for k in range(0, ids.size, 256)])
    assert samples.tolist() == [64, 256]
    assert means[1] == pytest.approx(truth, rel=0.02)
    assert windows.tolist() == [400_000 // 64, 400_000 // 256]


def test_presence_of_merged_parts_is_that_of_the_whole_log() -> None:
    """Also if they differ in length: of a long part, few windows are measured."""
    rng = np.random.default_rng(5)
    parts = []
    for num_samples, num_ids in ((300_000, 40), (3_000, 4_000)):
        counter = TableCounter("t", 4_000, presence_samples=(64, 256))
        for _ in range(num_samples // 1_000):
            counter.add([Lookups(rng.integers(0, num_ids, 1_000))])
        parts.append(counter.finish())
    both = parts[0].merge(parts[1])
    assert both.presence_windows[1] == 300_000 // 256 + 3_000 // 256
    truth = [(300 * a + 3 * b) / 303 for a, b in zip(*(p.presence_rows for p in parts),
                                                     strict=True)]
    assert both.presence_rows == pytest.approx(truth, rel=0.01)


def test_window_sizes_are_checked() -> None:
    with pytest.raises(InvalidInputError, match="num_samples"):
        PresenceSampler(10, (0, 4))
    PresenceSampler(1 << 40, (1 << 23,))
    with pytest.raises(InvalidInputError, match="smaller windows"):  # they once overflowed
        PresenceSampler(1 << 40, (1 << 23, (1 << 23) + 1))


# ---- published value counts ----------------------------------------------------------------------


def write(path: Path, rows: list[tuple[str, str, int]], header: str = "Field,Value,Total") -> Path:
    path.write_text(header + "\n" + "".join(f"{f},{v},{c}\n" for f, v, c in rows))
    return path


def test_complete_counts_are_exact(tmp_path: Path) -> None:
    path = write(tmp_path / "counts.csv", [("a", "x", 5), ("b", "x", 9), ("a", "y", 7)])
    (tmp_path / "counts.csv.gz").write_bytes(gzip.compress(path.read_bytes()))
    for file in (path, tmp_path / "counts.csv.gz"):
        stats = stats_from_value_counts(file, ValueCountOptions(num_samples=12, min_count=1))
        a = stats.tables["a"]
        assert (a.head_ids.tolist(), a.head_counts.tolist(), a.num_rows) == ([1, 2], [7, 5], 3)
        assert a.is_exact and stats.ids_in_hotness_order and stats.num_samples == 12
        assert stats.tables["b"].num_accesses == 12, "the missing ones are values seen once"


@pytest.mark.parametrize("exponent", [1.0, 1.3])
def test_cut_tails_are_continued(tmp_path: Path, exponent: float) -> None:
    """For power-law counts cut at 50, the model's rows and coverage are close to the uncut ones."""
    ranks = np.arange(1, 200_001)
    counts = np.maximum(0, np.round(4e6 * (ranks + 3.0) ** -exponent)).astype(int)
    counts = counts[counts > 0]
    path = write(tmp_path / "c.csv", [("f", str(k), int(c)) for k, c in enumerate(counts)
                                      if c >= 50])
    total = int(counts.sum())
    for known in (None, {"f": counts.size}):
        stats = stats_from_value_counts(path, ValueCountOptions(total, 50, known))
        table = stats.tables["f"]
        assert table.num_accesses == total and "modelled" in stats.source
        # Counts are integers: small counts are the least accurate.
        assert table.num_touched_rows == pytest.approx(counts.size, rel=0.02 if known else 0.35)
        sizes = np.array([10, 1000, 20_000, 60_000])
        exact = np.array([counts[:n].sum() / total for n in sizes])
        np.testing.assert_allclose(table.coverage(sizes), exact, atol=0.02)


def test_facts_of_avazu() -> None:
    path = real_data("avazu_value_counts/avazu_train_value_counts_ge50.csv.gz")
    stats = stats_from_value_counts(path, ValueCountOptions(min_count=50,
                                                            num_rows={"device_ip": 6_730_000}))
    assert stats.num_samples == 40_428_967 and len(stats.tables) == 21
    assert sum(t.head_ids.size for t in stats.tables.values()) == 105_906
    assert all(t.num_accesses == 40_428_967 for t in stats.tables.values())
    device = stats.tables["device_id"]
    assert device.head_counts[0] / 40_428_967 == pytest.approx(0.825, abs=5e-4)
    assert device.head_counts.sum() / 40_428_967 == pytest.approx(1 - 0.157, abs=5e-4)
    ip = stats.tables["device_ip"]
    assert ip.head_counts.sum() / 40_428_967 == pytest.approx(0.467, abs=5e-4)
    assert ip.num_touched_rows == pytest.approx(6_730_000, rel=0.001)
    assert stats.tables["site_id"].head_counts[0] / 40_428_967 == pytest.approx(0.36, abs=0.005)


@pytest.mark.parametrize(("text", "words"), [
    ("", "header"), ("a,b\n1,2\n", "header"), ("field,value,count\n", "rows"),
    ("field,value,count\na,b\n", "line 2"), ("field,value,count\na,b,0\n", "line 2"),
    ("field,value,count\na,b,1.5\n", "line 2"), ("field,value,count\na,b,1\na,b,2\n", "line 3"),
    ("field,value,count\na,b,99999999999999999999\n", "line 2"),
])
def test_bad_files(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "c.csv"
    path.write_text(text)
    with pytest.raises(FileFormatError, match=words):
        stats_from_value_counts(path)


def test_bad_options_and_damage(tmp_path: Path) -> None:
    path = write(tmp_path / "c.csv", [("a", "x", 5)])
    for options, word in ((ValueCountOptions(num_samples=4), "num_samples"),
                          (ValueCountOptions(num_rows={"b": 3}), "num_rows"),
                          (ValueCountOptions(num_rows={"a": 2}), r"num_rows of 'a'=2.*1\.\.1"),
                          (ValueCountOptions(9, num_rows={"a": 1}), r"num_rows of 'a'=1.*2\.\.5"),
                          (ValueCountOptions(40, 4, {"a": 12}), r"num_rows of 'a'=12.*13\.\."),
                          (ValueCountOptions(9, num_rows={"a": 6}), "num_rows of 'a'=6")):
        with pytest.raises(InvalidInputError, match=word):
            stats_from_value_counts(path, options)
    path.write_bytes(gzip.compress(b"field,value,count\n" + b"a,b,1\n" * 100)[:-9])
    with pytest.raises(FileFormatError):
        stats_from_value_counts(path)


# ---- skew and drift ------------------------------------------------------------------------------


def table(counts: list[int], num_rows: int = 1000, buckets: tuple[TimeBucket, ...] = ()
          ) -> TableStats:
    ids = np.arange(len(counts))
    return TableStats.from_counts(num_rows, ids, np.array(counts),
                                  (np.array([1]), np.array([sum(counts)])), buckets=buckets)


def bucket(label: str, **counts: int) -> TimeBucket:
    ids = [int(row.removeprefix("r")) for row in counts]
    return TimeBucket(label, np.array(ids), np.array(list(counts.values())))


def test_skew_of_known_counts() -> None:
    # 200 touched rows: 2 are the hottest 1 %, 20 the hottest 10 %.
    found = skew(table([300, 100] + [10] * 18 + [2] * 30 + [1] * 150))
    total = 300 + 100 + 180 + 60 + 150
    assert found.num_touched_rows == 200 and found.num_accesses == total
    assert found.hottest == pytest.approx(300 / total)
    assert found.top_1pct == pytest.approx(400 / total)
    assert found.top_10pct == pytest.approx(580 / total)
    assert found.unseen_mass == pytest.approx(150 / total)
    assert found.rows_for_half == 2  # 395 accesses are within the first two rows' 400
    assert found.rows_for_90pct == 121  # 711 = 640 + 71 of the rows touched once, after 50 rows
    assert math.isnan(found.drift)


def test_uniform_rows() -> None:
    found = skew(table([3] * 100, 100))
    assert (found.hottest, found.top_1pct, found.rows_for_half) == (0.01, 0.01, 50)
    assert found.unseen_mass == 0


def test_drift_is_the_mean_total_variation() -> None:
    same, moved, gone = bucket("1", r0=2, r1=2), bucket("2", r0=3, r1=1), bucket("3", r5=9)
    assert drift(table([1], buckets=(same, same))) == 0
    assert drift(table([1], buckets=(same, moved))) == pytest.approx(0.25)
    assert drift(table([1], buckets=(same, moved, gone))) == pytest.approx((0.25 + 1) / 2)


def test_drift_ignores_the_few_samples_of_a_bucket_that_has_just_begun() -> None:
    first, moved = bucket("1", r0=200, r1=200), bucket("2", r0=300, r1=100)
    begun = bucket("3", r5=1)
    assert drift(table([1], buckets=(first, moved, begun))) == pytest.approx(0.25)
    assert bucket_distances(table([1], buckets=(begun,))) == []


def test_describe_is_json_and_has_no_nan() -> None:
    import json

    stats = AccessStats(4, {"t": table([3, 1])}, "a test")
    text = json.dumps(describe(stats), allow_nan=False)
    assert json.loads(text)["tables"]["t"]["drift"] is None
    assert json.loads(text)["num_accesses"] == 4


def test_empty_table() -> None:
    found = skew(table([]))
    assert (found.num_accesses, found.hottest, found.rows_for_half) == (0, 0.0, 0)
