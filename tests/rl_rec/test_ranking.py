"""Rankings and metrics against torchmetrics and simple sorting."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from oper.errors import InvalidInputError
from oper.rl_rec.ranking.metrics import NOTHING, Jagged, MetricOptions, RankingMetrics, top_k


def jagged(rows: Sequence[Sequence[int]]) -> Jagged:
    ids = torch.tensor([x for row in rows for x in row], dtype=torch.int64)
    return Jagged(ids, torch.tensor([len(row) for row in rows], dtype=torch.int64))


@st.composite
def catalogues(draw: Any) -> dict[str, Any]:
    """Scores with many ties and some -inf, shards in any order, and excluded items."""
    users, items = draw(st.integers(1, 5)), draw(st.integers(1, 40))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    scores = rng.integers(0, draw(st.sampled_from([2, 5, 1000])), (users, items)).astype(np.float32)
    scores[rng.random(scores.shape) < 0.1] = -np.inf
    cuts = sorted({0, items, *rng.integers(0, items + 1, draw(st.integers(0, 4))).tolist()})
    shards = [(1 + a, torch.from_numpy(scores[:, a:b]))
              for a, b in itertools.pairwise(cuts)]
    rng.shuffle(shards)
    seen = [(1 + rng.permutation(items)[:rng.integers(0, items + 1)]).tolist()
            for _ in range(users)]
    return {"scores": scores, "shards": shards, "seen": seen, "k": draw(st.integers(1, 45))}


@given(catalogues())
def test_top_k_of_any_cut_is_that_of_plain_sorting(case: dict[str, Any]) -> None:
    found = top_k(case["shards"], case["k"], jagged(case["seen"]))
    for row, scores, seen in zip(found.tolist(), case["scores"], case["seen"], strict=True):
        left = [i + 1 for i, s in enumerate(scores) if s > -np.inf and i + 1 not in seen]
        want = sorted(left, key=lambda i: (-scores[i - 1], i))[:case["k"]]
        assert row == want + [NOTHING] * (case["k"] - len(want))


@given(st.integers(1, 6), st.integers(1, 30), st.integers(0, 10**6))
def test_metrics_are_those_of_torchmetrics(users: int, items: int, seed: int) -> None:
    functional = pytest.importorskip("torchmetrics.functional.retrieval")
    g = torch.Generator().manual_seed(seed)
    scores = torch.stack([torch.randperm(items, generator=g).float() for _ in range(users)])
    relevant = torch.rand(users, items, generator=g) < 0.3
    ks = (1, 3, 10)
    metrics = RankingMetrics(MetricOptions(ks))
    positives = jagged([(1 + r.nonzero()[:, 0]).tolist() for r in relevant])
    metrics.update(top_k([(1, scores)], 10), positives)
    found = metrics.per_user()
    asked = [u for u in range(users) if relevant[u].any()]
    assert all(values.size == len(asked) for values in found.values())
    for k in ks:
        short = min(k, items)
        for at, u in enumerate(asked):
            mine = {m: found[f"{m}@{k}"][at] for m in
                    ("precision", "recall", "ndcg", "hit_rate", "mrr")}
            want = {
                "precision": functional.retrieval_precision(scores[u], relevant[u], k),
                "recall": functional.retrieval_recall(scores[u], relevant[u], short),
                "ndcg": functional.retrieval_normalized_dcg(scores[u], relevant[u], short),
                "hit_rate": functional.retrieval_hit_rate(scores[u], relevant[u], short)}
            for name, value in want.items():
                assert mine[name] == pytest.approx(float(value), abs=1e-6), name
            whole = float(functional.retrieval_reciprocal_rank(scores[u], relevant[u]))
            assert mine["mrr"] == pytest.approx(whole if whole >= 1 / k - 1e-9 else 0.0, abs=1e-6)


def test_metrics_by_hand() -> None:
    metrics = RankingMetrics(MetricOptions((2, 3), recall="min"))
    metrics.update(torch.tensor([[4, 9, 7], [1, 2, NOTHING], [5, 6, 8]]),
                   jagged([[7, 9, 20, 30], [3], []]))
    found = {name: v.tolist() for name, v in metrics.per_user().items()}
    assert found["precision@2"] == [0.5, 0] and found["hit_rate@3"] == [1, 0]
    assert found["recall@2"] == [0.5, 0] and found["recall@3"] == pytest.approx([2 / 3, 0])
    assert found["mrr@3"] == [0.5, 0]
    ideal = 1 + 1 / math.log2(3) + 0.5
    assert found["ndcg@3"] == pytest.approx([(1 / math.log2(3) + 0.5) / ideal, 0])
    whole = RankingMetrics(MetricOptions((3,)))
    whole.update(torch.tensor([[4, 9, 7]]), jagged([[7, 9, 20, 30]]))
    assert whole.per_user()["recall@3"].tolist() == [0.5]


def test_bad_rankings_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="NaN"):
        top_k([(1, torch.tensor([[1.0, float("nan")]]))], 1)
    with pytest.raises(InvalidInputError, match="k"):
        top_k([(1, torch.ones(1, 2))], 0)
    with pytest.raises(InvalidInputError, match=r"rows of negative length=\[9\]"):
        Jagged(torch.ones(8), torch.tensor([1] * 9 + [-1]))
    with pytest.raises(InvalidInputError, match="sum of lengths=3, expected 8"):
        Jagged(torch.ones(8), torch.tensor([1, 2]))
    with pytest.raises(InvalidInputError, match="shards"):
        top_k([], 1)
    with pytest.raises(InvalidInputError, match="score the same users"):
        top_k([(1, torch.ones(1, 2)), (3, torch.ones(2, 2))], 1)
    with pytest.raises(InvalidInputError, match="recall"):
        MetricOptions(recall="half")
    for bad in ((), (0, 5)):
        with pytest.raises(InvalidInputError, match="ks"):
            MetricOptions(bad)
    with pytest.raises(InvalidInputError, match="top"):
        RankingMetrics(MetricOptions((5,))).update(
            torch.ones(1, 3, dtype=torch.int64), jagged([[1]]))
