"""Directories of keys: compared with plain dicts, for any ranks and threads, and hostile input."""

import hashlib
import itertools
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from oper.errors import InvalidInputError
from oper.shmem.keys.directories import row_seed, rule_numbers
from oper.shmem.keys.places import (
    buckets_of_keys,
    num_candidates,
    slots_of_buckets,
    slots_of_keys,
)
from oper.shmem.keys.rules import DynamicTable
from oper.shmem.library import load
from tests.references import BUCKET, CANDIDATES, Oracle, first_row, hash_of
from tests.world_support import run_world

load()
OPS = torch.ops.oper
NAME = "items"
SMALLEST, LARGEST = -(1 << 63), (1 << 63) - 1
RULES = [
    DynamicTable(),
    DynamicTable(eviction="lfu", seed=-5),
    DynamicTable(eviction="lfu", half_life=2, admit_after=2),
    DynamicTable(eviction="distance_lfu"),
    DynamicTable(admit_after=3, seed=1 << 62),
    DynamicTable(admit_probability=0.4, time_to_live=2),
    DynamicTable(time_to_live=1, admit_after=255),
    DynamicTable(eviction="lfu", half_life=1, time_to_live=3),
    DynamicTable(eviction="distance_lfu", half_life=2, admit_after=2),
]


class Directory:
    """A directory of W ranks within this process."""

    def __init__(self, slots: int, rule: DynamicTable, world_size: int = 1) -> None:
        self.slots, self.rule, self.size = slots, rule, world_size
        tables = torch.tensor([[*rule_numbers(NAME, slots + 1, rule), 0, 0, 0]])
        arguments = 1 << 22, tables, torch.zeros(1, 2, dtype=torch.float64)
        sizes = [OPS.keys_num_bytes(r, world_size, *arguments) for r in range(world_size)]
        self.num_bytes = sum(of_slots for of_slots, _ in sizes)
        self.arenas = [torch.zeros(n + 64, dtype=torch.uint8) for _, n in sizes]
        at = [a.data_ptr() + -a.data_ptr() % 64 for a in self.arenas]
        self.handles = [OPS.keys_open(at, r, *arguments, [0]) for r in range(world_size)]

    @property
    def clock(self) -> int:
        (clock,) = {OPS.keys_clock(h, 0) for h in self.handles}
        return clock

    @clock.setter
    def clock(self, clock: int) -> None:
        for handle in self.handles:
            OPS.keys_set_clock(handle, 0, clock)

    def find(self, keys: Sequence[int] | torch.Tensor, rank: int) -> tuple[torch.Tensor, ...]:
        """Look up a batch of one bag; returns rows, counts, keys without a row, and parts."""
        *found, code = OPS.keys_find(self.handles[rank], as_keys(keys), as_keys([len(keys)]),
                                     as_keys([0]), 1, True)
        assert code == 0
        return tuple(found)

    def counts(self) -> np.ndarray:
        """Numbers of admitted, evicted, expired and refused keys so far."""
        found: np.ndarray = np.sum([OPS.keys_counts(h, 0)[2:6] for h in self.handles], axis=0)
        return found

    def occupancy(self) -> list[int]:
        """Numbers of rows with a key and of full buckets."""
        found = np.sum([OPS.keys_counts(h, 0)[:2] for h in self.handles], axis=0)
        return [int(n) for n in found]

    def take(self, batches: Sequence[Sequence[int] | torch.Tensor]) -> None:
        """Make one update with one batch per rank."""
        for rank, handle in enumerate(self.handles):
            seen = [self.find(keys, rank) for keys in batches[rank::self.size]]
            left, _ = OPS.keys_leave(handle, *([s[k] for s in seen] for k in (1, 2, 3)))
            assert left == 0
        for handle in self.handles:
            OPS.keys_update(handle, [])

    def update(self, batches: Sequence[Sequence[int]]) -> tuple[dict[int, int], np.ndarray]:
        """Make one update; returns the rows of new keys and the change of the counts."""
        before = self.counts()
        self.take(batches)
        (new, bounds), *others = (OPS.keys_new(h) for h in self.handles)
        assert bounds == [0, new.shape[0]]
        assert all(torch.equal(other, new) for other, _ in others)
        given = new[new[:, 0] > 0]
        assert given[:, 0].unique().numel() == given.shape[0]
        return {key: row for row, key in given.tolist()}, self.counts() - before

    def rows(self, keys: Sequence[int], rank: int = 0) -> list[int]:
        rows, counts, missed, parts = self.find(keys, rank)
        assert missed.tolist() == [k for k, r in zip(keys, rows.tolist(), strict=True) if r == 0]
        counted = len({k for k, r in zip(keys, rows.tolist(), strict=True) if r})
        assert parts.tolist() == ([[0, 0, len(keys), missed.numel(), counted, 0]] if keys else [])
        assert int((counts[:counted] >> 32).sum()) == len(keys) - missed.numel()
        return rows.tolist()

    def read(self, candidates: bool = False) -> torch.Tensor:
        number = self.slots if not candidates else num_candidates(self.slots) * (
            self.rule.admit_after > 1)
        return OPS.keys_read(self.handles[-1], 0, candidates, 0, number)

    def write(self, candidates: bool, records: torch.Tensor) -> list[int]:
        numbers = torch.arange(records.shape[0])
        return [OPS.keys_write(h, 0, candidates, numbers, records) for h in self.handles]

    def records(self) -> dict[int, tuple[int, int, int]]:
        """Records (row, count, clock) by key, as the oracle returns them."""
        return {key: (slot + 1, count, clock) for slot, (key, count, clock) in enumerate(
            self.read().tolist()) if clock >= 0}


def as_keys(keys: Sequence[int] | torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(keys, dtype=torch.int64)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def dealt(keys: Sequence[int], world_size: int) -> list[Sequence[int]]:
    return [keys[r::world_size] for r in range(world_size)]


def colliding(num: int, slots: int, bucket: int, seed: int = 0) -> list[int]:
    """Keys of one bucket, as an attacker with the seed would choose them."""
    oracle = Oracle(slots, DynamicTable(seed=seed))
    keys = (k - (1 << 40) for k in itertools.count())
    return list(itertools.islice((k for k in keys if oracle.bucket_of(k) == bucket), num))


POOL = [SMALLEST, LARGEST, 0, -1, 1, *range(10, 90)]


@given(st.sampled_from(RULES), st.sampled_from([1, 2, 5, 20, 129, 300]),
       st.sampled_from([1, 2, 4]),
       st.lists(st.lists(st.sampled_from(POOL), max_size=40), min_size=1, max_size=10))
def test_directories_equal_dicts(rule: DynamicTable, slots: int, world_size: int,
                                 steps: list[list[int]]) -> None:
    """Rows, admissions, evictions, counts and clocks equal those of plain dicts, for every W."""
    directory = Directory(slots, rule, world_size)
    oracle = Oracle(slots, rule, row_seed(NAME, rule.seed))
    for keys in steps:
        for rank in range(world_size):
            assert directory.rows(POOL, rank) == [oracle.row_of(k) for k in POOL]
        before = set(oracle.held)
        want = oracle.update(keys)
        found, changes = directory.update(dealt(keys, world_size))
        assert found == want
        assert directory.records() == oracle.records()
        admitted, evicted, expired, _ = changes.tolist()
        assert admitted == len(want)
        held = {e.row for e in oracle.held.values()}
        assert directory.occupancy() == [
            len(held), sum(set(oracle.rows_of(b)) <= held for b in range(oracle.buckets))]
        assert len(before) + admitted - evicted - expired == len(oracle.held)
        if rule.admit_after > 1:
            places = [p for b in range(oracle.buckets)
                      for p in oracle.waiting.get(b, [None] * CANDIDATES)]
            assert directory.read(True).tolist() == [
                [0, 0, -1] if p is None else [p[0], p[1].count, p[1].clock] for p in places]


@pytest.mark.parametrize("rule", RULES)
def test_changed_records_reproduce_a_directory(rule: DynamicTable) -> None:
    """Records of all ranks changed since an earlier update, written to another, make it equal;
    keys that have expired since then are listed once."""
    slots = 70
    directory, copy = Directory(slots, rule, 2), Directory(slots, rule)
    rng = np.random.default_rng(1)
    since, gone = 0, set()
    for step in range(12):
        keys = (rng.zipf(1.3, 60) % 90).tolist()
        directory.update(dealt(keys, 2))
        if step % 3:
            continue
        for candidates in (False, True):
            before = copy.read(candidates)
            found = [OPS.keys_changed(h, 0, candidates, since) for h in directory.handles]
            numbers, records = (torch.cat(x) for x in zip(*found, strict=True))
            assert (numbers[1:] > numbers[:-1]).all()
            assert OPS.keys_write(copy.handles[0], 0, candidates, numbers, records) == -1
            assert torch.equal(copy.read(candidates), directory.read(candidates))
            # Nothing else is listed, except what came and went meanwhile.
            same = (before == copy.read(candidates)).all(1)[numbers]
            assert not (same & (records[:, 2] >= 0)).any()
        expired = {k for h in directory.handles for k in OPS.keys_expired(h, 0, since).tolist()}
        assert expired == {s for s, (_, _, clock) in enumerate(directory.read().tolist())
                           if rule.time_to_live and 0 <= clock < directory.clock
                           - rule.time_to_live} - gone
        ever = {k for h in directory.handles for k in OPS.keys_expired(h, 0, -1).tolist()}
        gone, since = ever, directory.clock
    assert max(directory.read(c)[:, 2].max() for c in (False, rule.admit_after > 1)) > 0


@pytest.mark.parametrize("rule", RULES)
def test_evictions_from_full_buckets(rule: DynamicTable) -> None:
    slots = 2 * BUCKET + 5
    directory = Directory(slots, rule)
    oracle = Oracle(slots, rule, row_seed(NAME, rule.seed))
    rng = np.random.default_rng(6)
    for _ in range(15):
        keys = (rng.zipf(1.3, 200) % 500).tolist()
        assert directory.update([keys])[0] == oracle.update(keys)
        assert directory.records() == oracle.records()


def test_most_keys_are_in_their_home_line() -> None:
    """Most keys have a slot in their home line, even after many evictions."""
    slots = 20_000
    directory = Directory(slots, DynamicTable())
    keys = torch.arange(22_000) * 0x5851F42D4C957F2D
    rng = np.random.default_rng(7)
    for size, share in ((slots // 2, 0.95), (22_000, 0.6)):
        for _ in range(40):
            directory.take([keys[rng.integers(0, size, 4096)]])
        rows = directory.find(keys, 0)[0].numpy()
        found = rows > 0
        buckets, hashes = buckets_of_keys(keys.numpy()[found], slots, 0)
        places = rows[found] - 1 - slots_of_buckets(buckets, slots)[0]
        assert np.mean(places % 8 == hashes >> np.uint64(8) & np.uint64(7)) > share
    assert directory.counts()[1] > slots // 2


@given(st.integers(1, 200), st.integers(0, 400), st.integers(SMALLEST, LARGEST))
def test_slots_of_many_keys(slots: int, num: int, seed: int) -> None:
    """Every key has its own slot in its bucket; if slots are scarce, the most frequent keys."""
    rng = np.random.default_rng(num)
    keys, counts = np.arange(num) * 7919 - 10**6, rng.integers(0, 9, num)
    found = slots_of_keys(keys, counts, slots, seed)
    held = found >= 0
    assert np.unique(found[held]).size == held.sum()
    buckets, _ = buckets_of_keys(keys, slots, seed)
    begin, end = slots_of_buckets(buckets, slots)
    assert ((begin <= found) & (found < end))[held].all()
    for bucket in np.unique(buckets):
        mine = buckets == bucket
        assert held[mine].sum() == min(mine.sum(), (end - begin)[mine][0])
        assert counts[mine & ~held].max(initial=-1) <= counts[mine & held].min()


def test_keys_that_collide_while_they_are_numbered() -> None:
    """Keys with equal hashes in the de-duplication of a batch are counted like other keys."""
    rule = DynamicTable(eviction="lfu", seed=4)
    alike = (k for k in itertools.count() if hash_of(k, 4) >> 8 & 255 == 9)
    keys = [k for n, k in enumerate(itertools.islice(alike, 30)) for _ in range(n % 3 + 1)] * 2
    directory, oracle = Directory(1_000, rule), Oracle(1_000, rule)
    for batches in ([keys], [keys, keys[::-1][:7], keys]):
        want = oracle.update([k for batch in batches for k in batch])
        assert directory.update(batches)[0] == want
        assert directory.records() == oracle.records()
    rows, counts, missed, parts = directory.find(keys, 0)
    assert rows.tolist() == [oracle.row_of(k) for k in keys] and not missed.numel()
    number, has_repeats = parts[0, 4:].tolist()
    assert has_repeats == 1 and number > 30 and int((counts[:number] >> 32).sum()) == len(keys)


@pytest.mark.parametrize("rule", RULES[:6])
def test_more_ids_than_one_part_of_a_batch(rule: DynamicTable) -> None:
    """Threads share the parts of a batch, for any number of ranks; rows are evicted."""
    shapes = ((1, 1), (1, 4), (2, 1), (4, 4))  # ranks, threads
    directories = [Directory(1_000, rule, world_size) for world_size, _ in shapes]
    oracle = Oracle(1_000, rule, row_seed(NAME, rule.seed))
    rng, before, changes = np.random.default_rng(5), torch.get_num_threads(), np.zeros(4)
    try:
        for step in range(3):
            keys = (rng.zipf(1.1, 150_001) % 900 + 600 * step - 700).tolist()
            want = oracle.update(keys)
            for directory, (world_size, num_threads) in zip(directories, shapes, strict=True):
                torch.set_num_threads(num_threads)
                found, changed = directory.update(dealt(keys, world_size))
                changes += changed
                assert found == want and directory.records() == oracle.records()
        parts = directory.find(keys, 0)[3]
    finally:
        torch.set_num_threads(before)
    assert parts[:, 1:3].tolist() == [[0, 1 << 16], [1 << 16, 1 << 17], [1 << 17, 150_001]]
    assert changes[0] > 0 and changes[1:3].sum() > 0


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_restored_directory_continues_like_the_original(rule: DynamicTable, world_size: int
                                                          ) -> None:
    """A directory restored from another's records, with another W, continues like the original."""
    rng = np.random.default_rng(2)
    steps = [rng.integers(-400, 400, 300).tolist() for _ in range(8)]
    first, then = Directory(300, rule, 2), Directory(300, rule, world_size)
    for keys in steps[:4]:
        first.update(dealt(keys, 2))
    assert then.write(False, first.read()) == [-1] * world_size
    if rule.admit_after > 1:
        assert then.write(True, first.read(True)) == [-1] * world_size
    then.clock = first.clock
    for keys in steps[4:]:
        assert first.update(dealt(keys, 2))[0] == then.update(dealt(keys, world_size))[0]
    assert torch.equal(first.read(), then.read())
    assert torch.equal(first.read(True), then.read(True))


def test_colliding_keys_stay_in_their_bucket() -> None:
    """Keys of one bucket use only its slots; the remaining keys are refused without a search."""
    slots, num = 10 * BUCKET, 3 * BUCKET
    directory = Directory(slots, DynamicTable())
    keys = colliding(num + BUCKET, slots, 3)
    found, changes = directory.update([keys[:num]])
    assert changes.tolist() == [BUCKET, 0, 0, num - BUCKET]
    assert sorted(found.values()) == list(range(1 + 3 * BUCKET, 1 + 4 * BUCKET))
    found, changes = directory.update([keys[num:]])
    assert changes.tolist() == [BUCKET, BUCKET, 0, 0] and set(found) == set(keys[num:])


def test_colliding_keys_of_one_tag() -> None:
    """In a full bucket with equal tags, every slot is compared, and no other bucket is searched."""
    seed = 3
    alike = (k for k in itertools.count() if hash_of(k, seed) & 255 == 7)
    keys = list(itertools.islice(alike, 2 * BUCKET))
    directory = Directory(BUCKET, DynamicTable(seed=seed))
    found, changes = directory.update([keys])
    assert changes.tolist() == [BUCKET, 0, 0, BUCKET]
    assert directory.rows(keys) == [found.get(k, 0) for k in keys]
    assert sorted(found.values()) == list(range(1, BUCKET + 1))


def test_colliding_candidates_stay_in_their_bucket() -> None:
    """Colliding candidates fill their bucket's entries and displace no candidates of others."""
    slots = 10 * BUCKET
    directory = Directory(slots, DynamicTable(admit_after=2))
    flood, (other,) = colliding(5 * CANDIDATES, slots, 3), colliding(1, slots, 4)
    (victim,) = set(colliding(5 * CANDIDATES + 1, slots, 3)) - set(flood)
    for _ in range(3):
        directory.update([[victim, *flood[:2 * CANDIDATES], other]])
        flood = flood[2 * CANDIDATES:] + flood[:2 * CANDIDATES]
    assert directory.rows([other]) != [0]
    assert int((directory.read(True)[:, 2] >= 0).sum()) <= CANDIDATES
    directory.update([[victim] * 2])
    assert directory.rows([victim]) != [0]


@pytest.mark.parametrize("slots, size, steps", [(10_000, 20_000, 50), (10_000_000, 200_000, 500)])
def test_all_keys_new(slots: int, size: int, steps: int) -> None:
    """With many more distinct keys than slots, memory does not grow and all counts add up."""
    directory = Directory(slots, DynamicTable())
    full = 0
    for step in range(steps):
        if step == steps // 5:
            full = resident_bytes()
        directory.take([(torch.arange(size) + size * step) * 0x5851F42D4C957F2D])
    assert steps // 5 * size >= slots and resident_bytes() - full < 8 << 20
    admitted, evicted, expired, refused = directory.counts().tolist()
    assert admitted + refused == size * steps and expired == 0
    assert admitted - evicted == slots == int((directory.read()[:, 2] >= 0).sum())


def test_clocks_in_the_future() -> None:
    """Records with clocks in the future have age 0: they do not expire, are found and evicted."""
    rule = DynamicTable(time_to_live=1, eviction="lfu", half_life=1)
    directory = Directory(2, rule)
    directory.clock = 1 << 31
    directory.update([[1, 2, 2]])
    directory.clock = 5
    assert sorted(directory.rows([1, 2])) == [1, 2]
    found, changes = directory.update([[3]])
    assert set(found) == {3} and changes.tolist() == [1, 1, 0, 0]
    assert directory.rows([1, 2]) != [0, 0] and directory.rows([1]) == [0]


def test_the_last_clock() -> None:
    directory = Directory(2, DynamicTable(time_to_live=3, eviction="lfu", half_life=7))
    directory.clock = (1 << 32) - 4
    directory.update([[1, 1]])
    directory.update([[2]])
    assert directory.clock == (1 << 32) - 2
    assert {k: v[1:] for k, v in directory.records().items()} == {
        1: (2, (1 << 32) - 3), 2: (1, (1 << 32) - 2)}


@pytest.mark.parametrize("record", [[7, -1, 3], [7, 1 << 32, 3], [7, 1, -2], [7, 1, 1 << 32]])
def test_invalid_records_are_refused(record: list[int]) -> None:
    directory = Directory(10, DynamicTable())
    directory.update([[1, 2, 3]])
    before = directory.read()
    bad = before.clone()
    bad[9] = torch.tensor(record)
    bad[0] = torch.tensor([5, 1, 1])
    assert directory.write(False, bad) == [9]
    assert torch.equal(directory.read(), before)


def test_records_of_another_bucket_are_refused() -> None:
    directory = Directory(300, DynamicTable())
    (key,) = colliding(1, 300, 2)
    records = directory.read()
    own = Oracle(300, DynamicTable()).rows_of(2)[0] - 1
    records[own] = torch.tensor([key, 1, 1])
    assert directory.write(False, records) == [-1]
    records[own], records[0] = torch.tensor([0, 0, -1]), records[own].clone()
    assert directory.write(False, records) == [0]


@pytest.mark.parametrize("admit_after, most", [(1, 17.1), (2, 24.0)])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_bytes_per_slot(admit_after: int, most: float, world_size: int) -> None:
    for slots in (100_000, 1_000_003):
        directory = Directory(slots, DynamicTable(admit_after=admit_after), world_size)
        assert directory.num_bytes / slots <= most


def digest(rank: int, world_size: int) -> tuple[str, str]:
    """Name of the kernels in use, and a digest of all lookups and records of directories."""
    found, changed = hashlib.sha256(), np.zeros(4, np.int64)
    rng = np.random.default_rng(8)
    for rule in RULES:
        directory = Directory(3 * BUCKET + 5, rule)
        for size in (40, 300, 300, 5000, 300, 1, 300):
            keys = torch.from_numpy(rng.zipf(1.3, size) % 700)
            rows, counts, missed, parts = directory.find(keys, 0)
            new, changes = directory.update([keys])
            changed += changes
            for x in (rows, counts[:int(parts[0, 4])], missed, parts, directory.read(),
                      directory.read(True), torch.tensor(list(new.items()))):
                found.update(x.numpy().tobytes())
    assert changed.all()  # keys admitted, evicted, expired, refused
    for dim in (1, 4, 63, 130):
        found.update(OPS.keys_draw(torch.arange(50) * 977, -3, dim, 0.25).numpy().tobytes())
    return OPS.kernel_name(), found.hexdigest()


def test_directories_are_equal_on_every_processor() -> None:
    """Rows, counts, admissions, evictions and new rows do not depend on the vector width."""
    kernels, want = digest(0, 1)
    for other in ("generic", "avx2"):
        ((name, got),) = run_world(1, digest, env={"OPER_CPU_KERNELS": other})
        assert got == want, f"kernels {name} and {kernels}"


@given(st.integers(SMALLEST, LARGEST), st.integers(SMALLEST, LARGEST), st.integers(1, 37))
def test_new_rows(key: int, seed: int, dim: int) -> None:
    got = OPS.keys_draw(torch.tensor([key, key, 17]), seed, dim, 0.25)
    assert np.array_equal(got[0].numpy(), first_row(key, seed, dim, 0.25))
    assert torch.equal(got[0], got[1])  # wherever it is
    assert float(got.abs().max()) <= 0.25


@pytest.mark.parametrize("fields", [
    {"admit_after": 0}, {"admit_after": 256}, {"admit_after": True}, {"admit_after": 2.0},
    {"admit_probability": 0}, {"admit_probability": 1.5}, {"admit_probability": float("nan")},
    {"admit_after": 2, "admit_probability": 0.5}, {"eviction": "fifo"}, {"half_life": 3},
    {"eviction": "lfu", "half_life": 0}, {"time_to_live": -1}, {"seed": 1 << 63}, {"seed": "a"},
    {"init_bound": -1.0}, {"init_bound": float("inf")}, {"init_bound": 1e39}])
def test_refused_configurations(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=f"invalid dynamic table: {list(fields)[-1]}="):
        DynamicTable(**fields)


def test_updates_of_constant_size_allocate_no_memory() -> None:
    """After the first iterations, lookups and updates of constant size touch no new page."""
    directory, keys = Directory(30_000, DynamicTable()), torch.arange(20_000)
    for _ in range(5):
        directory.take([keys])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(40):
        directory.take([keys])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 40
