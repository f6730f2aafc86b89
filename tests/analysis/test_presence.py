"""Measured presence compared with distinct rows counted window by window."""

from __future__ import annotations

import numpy as np
import pytest

from oper.analysis import PresenceSampler
from oper.analysis.presence import Lookups
from oper.errors import InvalidInputError
from tests.support import counts_by


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


def test_a_long_log_is_thinned_and_stays_close_to_the_truth() -> None:
    rng = np.random.default_rng(4)
    sampler = PresenceSampler(100_000, (64, 256))
    ids = np.minimum((100_000 * rng.random(400_000) ** 4).astype(np.int64), 99_999)
    for start in range(0, ids.size, 1000):
        sampler.add([Lookups(ids[start:start + 1000])])
    samples, means, windows = sampler.result()
    truth = np.mean([np.unique(ids[k:k + 256]).size for k in range(0, ids.size, 256)])
    assert samples.tolist() == [64, 256]
    assert means[1] == pytest.approx(truth, rel=0.02)
    assert 8 <= windows[1] <= 17 and windows[0] >= 4 * (windows[1] - 1)


def test_window_sizes_are_checked() -> None:
    with pytest.raises(InvalidInputError, match="num_samples"):
        PresenceSampler(10, (0, 4))
