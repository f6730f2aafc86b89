"""Histograms of phases count every batch in the right bucket, and total times are exact."""

from __future__ import annotations

from collections import defaultdict

import torch

from oper.shmem.counters.phases import BUCKETS_US, PHASES
from tests.runtime_support import OPTIMIZERS, dlrm_case, make_batch, open_alone, rank_loss


def bucket(ns: int) -> int:
    """Return the number of the bucket of a time: the first bound above the time."""
    return next((k for k, us in enumerate(BUCKETS_US) if ns < 1000 * us), len(BUCKETS_US))


def test_every_batch_is_counted() -> None:
    case = dlrm_case("sgd")
    tables = open_alone(case, OPTIMIZERS["sgd"])
    taken: dict[str, list[int]] = defaultdict(list)
    for seed in range(8):
        batch = make_batch(case, seed, 16)
        rank_loss(tables.lookup(batch.lookup(case)), batch.target).backward()
        for name, ns in tables.phase_ns().items():
            taken[name].append(ns)
    found = tables.phase_histograms()
    assert list(found) == list(PHASES)
    for name, (sum_ns, counts) in found.items():
        want = [0] * (len(BUCKETS_US) + 1)
        for ns in taken[name]:
            want[bucket(ns)] += 1
        assert sum_ns == sum(taken[name]) and list(counts) == want, name
    assert tables.phase_histograms(reset=True) == found
    with torch.no_grad():
        tables.lookup(batch.lookup(case))
    assert {name: sum(h.counts) for name, h in tables.phase_histograms().items()} == {
        **dict.fromkeys(PHASES, 0), "forward": 1}
    tables.close()
