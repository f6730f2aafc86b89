"""AUC and log loss against their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from oper.train.metrics import BinaryMetrics, auc, log_loss


def auc_by_pairs(scores: list[float], labels: list[int]) -> float:
    wins = [(p > n) + 0.5 * (p == n)
            for p, y in zip(scores, labels, strict=True) if y
            for n, z in zip(scores, labels, strict=True) if not z]
    return sum(wins) / len(wins) if wins else float("nan")


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 1)), max_size=40))
def test_auc_counts_pairs(samples: list[tuple[int, int]]) -> None:
    scores, labels = [s / 2 for s, _ in samples], [y for _, y in samples]
    got, want = auc(np.array(scores), np.array(labels)), auc_by_pairs(scores, labels)
    assert got == pytest.approx(want, abs=1e-15) or (math.isnan(got) and math.isnan(want))


def test_log_loss_by_its_definition_and_at_extremes() -> None:
    rng = np.random.default_rng(2)
    logits, labels = rng.normal(size=1000), rng.integers(0, 2, 1000)
    p = 1 / (1 + np.exp(-logits))
    want = -np.mean(labels * np.log(p) + (1 - labels) * np.log(1 - p))
    assert log_loss(logits, labels) == pytest.approx(want, rel=1e-12)
    assert log_loss(np.array([1000.0, -1000.0]), np.array([1, 1])) == 500.0
    assert math.isnan(log_loss(np.zeros(0), np.zeros(0)))


def test_collected_batches_equal_the_whole_and_may_be_empty() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(300), torch.randint(0, 2, (300,)).float()
    metrics = BinaryMetrics()
    for part in torch.split(torch.arange(300), 64):
        metrics.update(logits[part], labels[part])
    metrics.update(logits[:0], labels[:0])
    assert metrics.compute() == {
        "auc": auc(logits.numpy(), labels.numpy()),
        "log_loss": log_loss(logits.numpy(), labels.numpy()), "samples": 300}
    assert BinaryMetrics().compute()["samples"] == 0


@pytest.mark.parametrize("scores", [[np.nan] * 4, [0.1, np.nan, 0.3, 0.2]])
def test_the_auc_of_a_diverged_model_is_undefined(scores: list[float]) -> None:
    assert np.isnan(auc(np.array(scores), np.array([0, 1, 1, 0])))
