"""The harness on real interactions: metrics, early stopping and comparisons."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from rec_support import tastes  # type: ignore[import-not-found]

from oper.errors import FileFormatError, InvalidInputError
from oper.rl_rec import harness
from oper.rl_rec.concepts import concepts_from, item_clusters
from oper.rl_rec.data.batches import training_histories
from oper.rl_rec.data.interactions import DataOptions, Interactions, Log, from_log
from oper.rl_rec.harness import FitOptions, fit, run_seeds
from oper.rl_rec.models.autoencoders.cadvae import CaDVAEConfig
from oper.rl_rec.models.autoencoders.causal_graph import is_acyclic
from oper.rl_rec.models.autoencoders.multvae import MultVAEConfig
from oper.rl_rec.models.base import Histories, Recommender
from oper.rl_rec.models.popularity import Popularity
from oper.rl_rec.ranking.evaluate import evaluate_ranking

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


def test_blocks_and_batches_change_nothing(data: Interactions) -> None:
    model = Popularity(torch.from_numpy(data.popularity()))
    one, other = (evaluate_ranking(model, data, "valid", block=b, batch_size=n).per_user
                  for b, n in ((65536, 256), (5, 7)))
    assert all(np.array_equal(one[m], other[m]) for m in one)


def test_clusters_are_the_tastes(data: Interactions) -> None:
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


@pytest.mark.parametrize("name", ["multvae", "gru4rec"])
def test_an_interrupted_training_goes_on(name: str, data: Interactions, tmp_path: Path,
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
        fit("multvae", MultVAEConfig(beta=float("nan")), data, 1, FitOptions(epochs=1))
