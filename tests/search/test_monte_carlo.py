"""The model's expected counts compared with counts of random batches."""

from __future__ import annotations

import numpy as np
import pytest
from search_cases import gpus

from oper.plan import Piece, Plan, TablePlan, Tier
from oper.search import evaluate, make_problem
from oper.search.problem.machine import Term
from oper.search.problem.statement import IDS, TOUCHED, TOUCHED_ALL
from oper.stats import AccessStats, TableStats
from oper.tables import TableSpec

WORLD, BATCH, ROWS, DIM, DRAWS = 3, 24, 40, 8, 3000
LENGTHS = {"even": ([4], [1.0]), "rare and long": ([0, 1, 60], [0.9, 0.05, 0.05]),
           "often empty": ([0, 2], [0.8, 0.2])}


def case(kind, hot=1.3, rows=ROWS):
    lengths, share = LENGTHS[kind]
    weight = np.arange(1, rows + 1, dtype=float) ** -hot
    counts = np.rint(weight / weight.sum() * 1e9).astype(np.int64)
    bags = np.rint(np.array(share) * 1e9 / np.dot(lengths, share)).astype(np.int64)
    stats = TableStats.from_counts(rows, np.arange(rows), counts, (np.array(lengths), bags))
    stated = make_problem([TableSpec("t", rows, DIM, ("f",))],
                          AccessStats(int(bags.sum()), {"t": stats}, "drawn", True),
                          gpus(WORLD), batch_size=BATCH)
    return stated, counts / counts.sum(), np.array(lengths), np.array(share)


def batches(kind, probability, lengths, share, seed=0):
    """DRAWS steps: ids looked up by (step, rank, bag, row); int64 [DRAWS, W, B, R] counts."""
    rng = np.random.default_rng(seed)
    size = rng.choice(lengths, (DRAWS, WORLD, BATCH), p=share)
    return rng.multinomial(size, probability)


def close(mean, samples):
    """Whether `mean` is within 5 standard errors of the sampled mean (or too small to be seen)."""
    error = 5 * samples.std() / np.sqrt(samples.size) + 1e-4 * abs(mean) + 1e-9
    assert abs(samples.mean() - mean) <= error, (mean, samples.mean(), error)


@pytest.mark.parametrize("kind", LENGTHS)
def test_features_are_the_means_of_drawn_batches(kind):
    stated, *law = case(kind)
    table, drawn = stated.tables[0], batches(kind, *law)
    for start, stop in ((0, 1), (1, 6), (6, 40), (0, 40)):
        part = drawn[..., start:stop]
        found = table.features(start, stop, True)
        close(found[IDS], part[:, 0].sum(axis=(1, 2)))
        close(found[TOUCHED], (part[:, 0].sum(axis=1) > 0).sum(axis=-1))
        close(found[TOUCHED_ALL], (part.sum(axis=(1, 2)) > 0).sum(axis=-1))
        mass = table.features(start, stop, True)[IDS] / table.total[IDS]
        close(float(table.traffic.bags_touching(mass)), (part[:, 0].sum(axis=-1) > 0).sum(axis=-1))


def test_means_alone_would_count_rare_long_bags_too_often():
    stated, probability, lengths, share = case("rare and long")
    found = stated.tables[0].total[TOUCHED]
    naive = float((1 - (1 - probability) ** (BATCH * np.dot(lengths, share))).sum())
    assert found < 0.85 * naive


@pytest.mark.parametrize("kind", LENGTHS)
def test_bytes_on_every_link_are_the_means_of_drawn_batches(kind):
    """Replicated, striped and pulled, owned and pushed rows: counted id by id."""
    stated, *law = case(kind)
    tiers = (Tier(0, 4, "replicated", (0, 1, 2)), Tier(4, 20, "striped", (1, 2)),
             Tier(20, 40, "owned", (2,), mode="push"))
    plan = Plan(WORLD, (TablePlan(stated.tables[0].spec, (Piece(0, DIM, tiers),)),),
                batch_size=BATCH)
    found = evaluate(plan, stated)
    drawn = batches(kind, *law, seed=1)
    row, grad, slot = DIM * 4, DIM * 4, 4
    own = np.full((3, ROWS), -1)  # owner by (tier, row)
    own[0, :4] = np.arange(4) % 3  # master copies
    own[1, 4:20] = np.where(np.arange(16) % 2 == 0, 1, 2)
    own[2, 20:] = 2
    touched = drawn.sum(axis=2) > 0  # [DRAWS, W, R]
    arrive = {name: np.zeros((DRAWS, WORLD)) for name in ("forward", "backward", "update")}
    leave = {name: np.zeros((DRAWS, WORLD)) for name in arrive}

    def send(phase, source, target, amount):
        if source != target:
            leave[phase][:, source] += amount
            arrive[phase][:, target] += amount

    for reader in range(WORLD):
        for owner in range(WORLD):
            pulled = touched[:, reader][:, own[1] == owner].sum(axis=-1)
            send("forward", owner, reader, pulled * row)
            send("update", reader, owner, pulled * (grad + slot))
            masters = touched[:, reader][:, own[0] == owner].sum(axis=-1)
            send("update", reader, owner, masters * (grad + slot))
            every = touched.any(axis=1)[:, own[0] == owner].sum(axis=-1)
            send("update", owner, reader, every * (row + slot))
            pushed = drawn[:, reader][:, :, own[2] == owner]
            asked = pushed.sum(axis=(1, 2)) * (slot + 1 / 8)  # and a bit for where bags begin
            send("forward", reader, owner, asked)
            sums = (pushed.sum(axis=-1) > 0).sum(axis=-1) * grad
            send("forward", owner, reader, sums)
            send("update", reader, owner, sums)  # the owner reduces them
    for phase in found.phases:
        for rank in range(WORLD):
            close(phase.units[Term.LINK_IN, rank], arrive[phase.name][:, rank])
            close(phase.units[Term.LINK_OUT, rank], leave[phase.name][:, rank])
        assert not phase.units[Term.CROSS_IN].any()
