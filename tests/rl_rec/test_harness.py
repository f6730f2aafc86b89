"""The harness on real interactions, its rankings and metrics, and sharded models in it."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from oper.errors import FileFormatError, InvalidInputError
from oper.integration.table_tensor import TableParameter
from oper.rl_rec import harness
from oper.rl_rec.concepts import concepts_from, item_clusters
from oper.rl_rec.data.batches import training_histories
from oper.rl_rec.data.interactions import DataOptions, Interactions, Log, from_log
from oper.rl_rec.harness import FitOptions, fit, run_seeds
from oper.rl_rec.models.autoencoders.cadvae import CaDVAE, CaDVAEConfig, Concepts
from oper.rl_rec.models.autoencoders.causal_graph import is_acyclic
from oper.rl_rec.models.autoencoders.multvae import MultVAE, MultVAEConfig
from oper.rl_rec.models.base import Histories, Recommender, Sequences
from oper.rl_rec.models.cdt4rec import CDT4Rec, CDT4RecConfig
from oper.rl_rec.models.hstu import HSTU, HSTUConfig
from oper.rl_rec.models.sasrec import SASRec, SASRecConfig
from oper.rl_rec.ranking.evaluate import evaluate_ranking
from oper.rl_rec.ranking.metrics import NOTHING, Jagged, MetricOptions, RankingMetrics, top_k
from oper.rl_rec.registry import RECOMMENDERS
from oper.train.config import OptimizerConfig, TrainConfig
from oper.train.engines import is_table, unsharded, with_oper
from tests.rl_rec.rec_support import tastes
from tests.world_support import run_world

KINDS = 3


@pytest.fixture(scope="module")
def data() -> Interactions:
    return tastes(KINDS, disliked=0.1)


class Oracle(Recommender):
    """Ranks a given item first for each user."""

    def __init__(self, wanted: dict[int, int]) -> None:
        super().__init__()
        self.wanted = wanted

    def encode(self, histories: Histories) -> torch.Tensor:
        return torch.tensor([self.wanted[int(u)] for u in histories.users])

    def scores(self, encoded: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        return (items == encoded.unsqueeze(1)).float()


def test_targets_are_ranked_and_histories_are_not(data: Interactions) -> None:
    held = data.held_out("test")
    assert (held.target_lengths == 1).all()
    knows = Oracle(dict(zip(held.users.tolist(), held.targets.tolist(), strict=True)))
    found = evaluate_ranking(knows, data, "test", block=7, batch_size=13)
    assert found.summary()["ndcg@5"] == found.summary()["mrr@20"] == 1.0
    assert np.array_equal(found.users, held.users)
    stale = Oracle({int(u): int(data.items[s - 1])
                    for u, s in zip(held.users, held.stop, strict=True)})
    assert evaluate_ranking(stale, data, "test").summary()["hit_rate@5"] < 0.9
    share = evaluate_ranking(knows, data, "test", users=np.array([4, 2]))
    assert share.users.tolist() == held.users[[4, 2]].tolist()


def test_clusters_recover_the_tastes(data: Interactions) -> None:
    shares = item_clusters(data, KINDS)
    assert torch.allclose(shares.sum(1), torch.ones(data.num_items))
    again = item_clusters(data, KINDS)
    assert torch.equal(shares, again)
    popular = torch.arange(1, 31)
    batch = training_histories(data, np.arange(1, data.num_users))
    best = torch.zeros(data.num_items, KINDS)
    for user, items in zip(batch.users, batch.items.split(batch.lengths.tolist()), strict=True):
        best[items, int(torch.bincount(shares[items].argmax(1), minlength=KINDS).argmax())] += 1
        assert user > 0
    agree = (best.argmax(1) == shares.argmax(1))[popular].float().mean()
    assert agree > 0.9
    known = concepts_from(data, CaDVAEConfig(num_concepts=KINDS))
    assert known.graph is not None and is_acyclic(known.graph != 0)


def test_models_beat_popularity_and_their_runs_can_be_compared(data: Interactions) -> None:
    options = FitOptions(epochs=16, batch_size=32, lr=0.01)
    popular = run_seeds("popularity", None, data, [1], options)
    config = MultVAEConfig(hidden=16, dim=8, decoder_hidden=0)
    mult = run_seeds("multvae", config, data, [1, 2], options)
    assert mult.per_user["ndcg@10"].shape == (2, data.held_out("test").users.size)
    assert mult.intervals()["ndcg@10"].low > popular.intervals()["ndcg@10"].high
    gain = mult.against(popular)["ndcg@10"]
    assert 0 < gain.low <= gain.mean <= gain.high
    again = fit("multvae", config, data, 2, options)
    assert np.array_equal(again.test.per_user["ndcg@10"], mult.per_user["ndcg@10"][1])
    assert again.valid == evaluate_ranking(again.model, data, "valid").summary()["ndcg@10"]
    assert not np.array_equal(mult.per_user["ndcg@10"][0], mult.per_user["ndcg@10"][1])


@pytest.mark.parametrize(("name", "changes", "chosen"), [
    ("sa2c", {}, 3), ("sa2c", {"actor": "supervised"}, 1),
    ("cdt4rec", {"returns": "estimated"}, 3), ("cdt4rec", {}, 1)])
def test_weights_before_the_final_loss_are_not_selected(
        name: str, changes: dict[str, Any], chosen: int, data: Interactions,
        monkeypatch: pytest.MonkeyPatch) -> None:
    """Validations that become worse and worse select the first weights they may."""
    config = RECOMMENDERS[name].config(dim=8, layers=1, negatives=8, **changes)
    validated: list[float] = []

    def validate(*_: object) -> float:
        validated.append(1 / (1 + len(validated)))
        return validated[-1]

    monkeypatch.setattr(harness, "_validate", validate)
    # The final loss begins with the third of the six epochs.
    found = fit(name, config, data, 1, FitOptions(epochs=6, batch_size=64, eval_every=1,
                                                  patience=2))
    assert (found.epochs, found.valid, len(validated)) == (chosen, 1.0, 3)


@pytest.mark.parametrize("name", ["multvae", "gru4rec"])
def test_an_interrupted_training_continues(name: str, data: Interactions, tmp_path: Path,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is bit-identical, also that of a run that has ended by early stopping."""
    options, state = FitOptions(epochs=6, batch_size=16, eval_every=2, patience=2), tmp_path / "a"
    whole = fit(name, None, data, 1, options)
    validated: list[float] = []

    def validate(*args: object) -> float:
        if len(validated) == 2:
            raise KeyboardInterrupt
        validated.append(original(*args))  # type: ignore[arg-type]
        return validated[-1]

    original = harness._validate
    monkeypatch.setattr(harness, "_validate", validate)
    with pytest.raises(KeyboardInterrupt):
        fit(name, None, data, 1, options, resume=state)
    other = dataclasses.replace(data, items=data.items[::-1].copy())  # as many users and rows
    for changed, seed in ((data, 2), (other, 1)):
        with pytest.raises(InvalidInputError, match="cannot resume"):
            fit(name, None, changed, seed, options, resume=state)
    stored = torch.load(state, weights_only=True)
    torch.save(stored | {"seconds": stored["seconds"] + 1000}, state)
    validated = []
    found = fit(name, None, data, 1, options, resume=state)
    assert len(validated) == 1 and not state.exists()
    assert 1000 < found.seconds < 1000 + 60
    assert (found.valid, found.epochs) == (whole.valid, whole.epochs)
    for metric, values in whole.test.per_user.items():
        assert np.array_equal(found.test.per_user[metric], values)
    for content in (b"of another program", b".", b""):
        state.write_bytes(content)
        with pytest.raises(FileFormatError, match="delete this file"):
            fit(name, None, data, 1, options, resume=state)


def test_bad_runs_are_refused(data: Interactions) -> None:
    with pytest.raises(InvalidInputError, match="popularity"):
        fit("nobody", None, data, 1, FitOptions())
    with pytest.raises(InvalidInputError, match="seeds"):
        run_seeds("popularity", None, data, [])
    with pytest.raises(InvalidInputError, match="epochs"):
        FitOptions(epochs=0)
    with pytest.raises(InvalidInputError, match="chosen_by"):
        FitOptions(chosen_by="ndcg@100")
    disliked = from_log(Log(*(np.repeat(np.arange(1, 4), 3), np.tile(np.arange(1, 4), 3),
                              np.zeros(9, np.float32), np.arange(9))), DataOptions(k_core=1))
    with pytest.raises(InvalidInputError, match="valid users"):
        fit("popularity", None, disliked, 1, FitOptions())
    with pytest.raises(InvalidInputError, match="positive training"):
        item_clusters(disliked, 2)
    with pytest.raises(InvalidInputError, match="loss"):
        fit("multvae", MultVAEConfig(), data, 1, FitOptions(epochs=4, batch_size=8, lr=1e30))


# ---- rankings and metrics ------------------------------------------------------------------------


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
def test_top_k_of_any_shards_equals_plain_sorting(case: dict[str, Any]) -> None:
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


def test_metrics_computed_by_hand() -> None:
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
    with pytest.raises(InvalidInputError, match="recall"):
        MetricOptions(recall="half")
    for bad in ((), (0, 5)):
        with pytest.raises(InvalidInputError, match="ks"):
            MetricOptions(bad)


# ---- the same losses under oper.shard ------------------------------------------------------------

NUM_ITEMS, NUM_USERS, STEPS = 400, 40, 24
AUTOENCODERS = ("cadvae", "cadvae-learned", "multvae")


def rule_of(kind: str, scale: float = 1.0) -> OptimizerConfig:
    tables_lr = 0.1 if kind in AUTOENCODERS else 0.05
    return OptimizerConfig(tables_lr=tables_lr * scale, dense="adagrad", dense_lr=0.02 * scale)


def build(kind: str) -> Recommender:
    """Build a model with the same weights on every rank."""
    torch.manual_seed(5)
    if kind == "multvae":
        return MultVAE(NUM_ITEMS, MultVAEConfig(hidden=24, dim=8, decoder_hidden=12, sampled=40))
    if kind == "sasrec":
        return SASRec(SASRecConfig(dim=16, steps=6, window=4, negatives=50), NUM_ITEMS)
    if kind == "hstu":
        return HSTU(HSTUConfig(dim=16, steps=6, window=4, negatives=50, rank_weight=0.5), NUM_ITEMS)
    if kind == "hstu-features":
        content = torch.stack([torch.randint(0, n, (NUM_ITEMS,)) for n in (9, 30)])
        return HSTU(HSTUConfig(dim=16, steps=6, window=4, negatives=50, rank_weight=0.5), NUM_ITEMS,
                    content=content, num_actions=4)
    if kind not in AUTOENCODERS:
        config = CDT4RecConfig(dim=16, user_dim=8, steps=6, window=4, negatives=50,
                               tied=kind != "untied")
        return CDT4Rec(config, NUM_USERS, NUM_ITEMS, (4.0, 3.0))
    common = {"num_concepts": 3, "hidden": 24, "dim": 8, "temperature": 0.5, "sampled": 40}
    if kind == "cadvae-learned":  # gradients reach the weights of the bags
        return CaDVAE(NUM_ITEMS, CaDVAEConfig(**common))
    shares = torch.softmax(3 * torch.randn(NUM_ITEMS, 3), 1)
    graph = torch.tensor([[0.0, 0.6, 0.0], [0.0, 0.0, -0.5], [0.0, 0.0, 0.0]])
    return CaDVAE(NUM_ITEMS, CaDVAEConfig(**common, layer="nonlinear"),
                  Concepts(shares, graph, torch.zeros(3), torch.ones(3)))


def batch_of(kind: str, step: int, rank: int) -> Histories | Sequences:
    """Make batches with skewed items, of different sizes by rank, with users without items."""
    g = torch.Generator().manual_seed(1000 * step + rank)
    size = 12 - rank
    skip = torch.randint(0, 5, (size,), generator=g)
    lengths = skip + torch.randint(0, 7, (size,), generator=g)
    lengths[0] = skip[0] + 6
    total = int(lengths.sum())
    items = 1 + (torch.rand(total, generator=g) ** 3 * (NUM_ITEMS - 1)).long()
    users = torch.randint(1, NUM_USERS, (size,), generator=g)
    rewards = (torch.rand(total, generator=g) > 0.3).float()
    if kind in AUTOENCODERS:
        return Histories(users, items, rewards, lengths)
    return Sequences(users, items, rewards, lengths, skip, 4 * torch.rand(total, generator=g),
                     times=torch.randint(0, 100_000, (total,), generator=g).cumsum(0),
                     actions=torch.randint(0, 4, (total,), generator=g))


def unsharded_losses(kind: str, world_size: int, scale: float = 1.0) -> list[float]:
    """Compute the mean losses over ranks' batches in one process, with scaled learning rates."""
    engine = unsharded(build(kind).train(), rule_of(kind, scale))
    losses = []
    for step in range(STEPS):
        engine.bare.schedule(step, STEPS)
        for optimizer in engine.optimizers:
            optimizer.zero_grad()
        total = torch.zeros(())
        for rank in range(world_size):
            torch.manual_seed(7 * step + rank)  # dropout, noise and candidates of that rank
            total = total + engine.module(batch_of(kind, step, rank))[0] / world_size
        total.backward()
        for optimizer in engine.optimizers:
            optimizer.step()
        losses.append(total.item())
    return losses


def sharded_losses(rank: int, world_size: int, kind: str) -> tuple[list[float], list[str]]:
    import torch.distributed as dist

    import oper

    model = build(kind)
    torch.manual_seed(0)
    stats = oper.collect((model.lookups(batch_of(kind, 1000 + k, 0)) for k in range(8)), model)
    engine = with_oper(model, TrainConfig(data="-", batch_size=12, optimizer=rule_of(kind)),
                       stats=stats)
    left = [n for n, p in engine.bare.named_parameters()
            if is_table(n) and not isinstance(p, TableParameter)]
    losses = []
    for step in range(STEPS):
        engine.bare.schedule(step, STEPS)
        torch.manual_seed(7 * step + rank)
        mean = engine.step(batch_of(kind, step, rank))[0] / world_size
        dist.all_reduce(mean)
        losses.append(float(mean))
    engine.bare.eval()
    with torch.no_grad():  # one rank can use the model alone
        if rank == 0:
            encoded = engine.bare.encode(batch_of(kind, 0, 0))
            scores = engine.bare.scores(encoded, torch.arange(1, NUM_ITEMS))
            assert scores.shape == (12, NUM_ITEMS - 1)
    return losses, left


@pytest.mark.parametrize("kind", [
    "cadvae", "cadvae-learned", "multvae", "causal", "untied", "sasrec", "hstu", "hstu-features"])
def test_losses_equal_the_unsharded_ones(kind: str) -> None:
    want = unsharded_losses(kind, 2)
    for losses, left in run_world(2, sharded_losses, kind):
        assert left == []  # OPER has replaced all tables
        assert losses == pytest.approx(want, rel=1e-5, abs=1e-5)
    # Without updates of the tables, the last loss would differ.
    assert abs(unsharded_losses(kind, 2, scale=1e-9)[-1] - want[-1]) > 0.01
