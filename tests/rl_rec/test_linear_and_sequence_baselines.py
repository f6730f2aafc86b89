"""Linear models, iALS, RecVAE, GRU4Rec and losses against direct formulas."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from rec_support import invented, tastes

from oper.errors import InvalidInputError
from oper.rl_rec.data.batches import training_histories
from oper.rl_rec.data.interactions import DataOptions, Log, from_log
from oper.rl_rec.harness import FitOptions, fit
from oper.rl_rec.models.autoencoders.recvae import RecVAE, RecVAEConfig, log_prior
from oper.rl_rec.models.base import Histories, NegativeSampler
from oper.rl_rec.models.ials import IALS, IALSConfig, solve_factors
from oper.rl_rec.models.item_to_item import (
    EASEConfig,
    ItemKNNConfig,
    ItemToItem,
    interaction_matrix,
)
from oper.rl_rec.models.popularity import PopularityConfig
from oper.rl_rec.ranking.evaluate import evaluate_ranking
from oper.rl_rec.registry import RECOMMENDERS, WORKLOADS


def training(seed: int = 0) -> tuple[Histories, int, np.ndarray]:
    """Return histories, rows of the item table, and the dense binary matrix float64 [users, items].
    """
    data = invented(num_users=60, num_items=25, seed=seed)
    histories = training_histories(data, np.arange(1, data.num_users))
    dense = np.zeros((data.num_users - 1, data.num_items))
    at = 0
    for user, length in enumerate(histories.lengths.tolist()):
        for item, reward in zip(histories.items[at:at + length].tolist(),
                                histories.rewards[at:at + length].tolist(), strict=True):
            if reward > 0:
                dense[user, item] = 1.0
        at += length
    return histories, data.num_items, dense


def test_ease_is_ridge_regression_of_every_item_on_the_others() -> None:
    histories, num_items, x = training()
    l2 = 7.0
    model = ItemToItem(EASEConfig(l2=l2), histories, num_items)
    for j in range(1, num_items):
        others = [i for i in range(num_items) if i != j]
        stacked = np.concatenate([x[:, others], math.sqrt(l2) * np.eye(len(others))])
        wanted = np.concatenate([x[:, j], np.zeros(len(others))])
        weights = np.linalg.lstsq(stacked, wanted, rcond=None)[0]
        np.testing.assert_allclose(model.weights[others, j].numpy(), weights, atol=1e-5)
        assert model.weights[j, j] == 0
    scores = model.scores(model.encode(histories), torch.arange(num_items))
    np.testing.assert_allclose(scores.numpy(), x @ model.weights.double().numpy(), atol=1e-5)


def test_neighbours_are_the_nearest_by_the_shrunk_cosine() -> None:
    histories, num_items, x = training()
    model = ItemToItem(ItemKNNConfig(neighbours=4, shrink=2.5), histories, num_items)
    for j in range(1, num_items):
        similar = np.array([0.0 if i == j else float(x[:, i] @ x[:, j]) / (
            np.linalg.norm(x[:, i]) * np.linalg.norm(x[:, j]) + 2.5) for i in range(num_items)])
        kept = model.weights[:, j].numpy()
        assert (kept > 0).sum() == min(4, (similar > 0).sum())
        np.testing.assert_allclose(np.sort(kept)[-4:], np.sort(similar)[-4:], atol=1e-6)
        np.testing.assert_allclose(kept[kept > 0], similar[kept > 0], atol=1e-6)


@pytest.mark.parametrize("nu", [0.0, 1.0])
def test_ials_solves_for_users_and_items_alternately(nu: float) -> None:
    """Compare with sums over all pairs of users and items, without the Gram matrix."""
    histories, num_items, x = training(1)
    config = IALSConfig(dim=6, alpha=0.2, l2=0.05, nu=nu, sweeps=1)
    dense = torch.from_numpy(x)[:, 1:]
    kept = dense.sum(1) > 0

    def objective(users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        predicted = users @ items.T
        penalties = (
            ((dense.sum(1) + config.alpha * (num_items - 1)) ** nu * users.square().sum(1))[kept],
            (dense.sum(0) + config.alpha * kept.sum()) ** nu * items.square().sum(1))
        return ((dense * (1 - predicted).square()).sum() + config.alpha * predicted.square().sum()
                + config.l2 * sum(p.sum() for p in penalties))

    values = []
    for sweeps in (1, 3, 20):
        torch.manual_seed(0)
        model = IALS(replace(config, sweeps=sweeps), histories, num_items)
        users = model.encode(histories).double().requires_grad_()
        items = model.factors[1:].double()
        value = objective(users, items)
        (gradient,) = torch.autograd.grad(value, users)
        assert float(gradient[kept].abs().max()) < 1e-4 and not bool(users[~kept].any())
        values.append(float(value))
        matrix = interaction_matrix(histories, num_items).T.coalesce()
        solved = solve_factors(config, matrix, users.detach().float(), int(kept.sum()))
        best = solved[1:].double().requires_grad_()
        (gradient,) = torch.autograd.grad(objective(users.detach(), best), best)
        assert float(gradient[dense.sum(0) > 0].abs().max()) < 1e-4
    assert values[0] > values[1] > values[2] > 0
    alone = Histories(torch.tensor([1]), torch.tensor([3, 5]), torch.ones(2), torch.tensor([2]))
    none = Histories(torch.tensor([1]), torch.zeros(0).long(), torch.zeros(0), torch.tensor([0]))
    assert torch.isfinite(model.encode(alone)).all() and not model.encode(none).any()


def test_a_sampled_gbce_is_that_of_its_definition() -> None:
    g = torch.Generator().manual_seed(0)
    queries, rows = torch.randn(5, 4, generator=g), torch.randn(11, 4, generator=g)
    targets, drawn = torch.tensor([1, 2, 3, 4, 9]), torch.tensor([3, 7, 7])
    sampler = NegativeSampler(11, 3, uniform=True)
    found = sampler.gbce_loss(queries, targets, rows[targets], drawn, rows[drawn],
                              calibration=0.75)
    alpha = 3 / 9  # 3 negatives out of the 9 other items
    beta = alpha * (0.75 * (1 - 1 / alpha) + 1 / alpha)
    for n, y in enumerate(targets.tolist()):
        s = [float(queries[n] @ rows[i]) for i in range(11)]
        sigma = [1 / (1 + math.exp(-x)) for x in s]
        want = -beta * math.log(sigma[y]) - sum(
            math.log(1 - sigma[j]) for j in drawn.tolist() if j != y)
        assert float(found[n]) == pytest.approx(want / 4, rel=1e-5)
    plain = sampler.gbce_loss(queries, targets, rows[targets], drawn, rows[drawn],
                              calibration=0.0)
    binary = torch.nn.functional.binary_cross_entropy_with_logits(
        torch.cat([(queries * rows[targets]).sum(1)[:, None], queries @ rows[drawn].T], 1)[0],
        torch.tensor([1.0, 0, 0, 0]))
    assert float(plain[0]) == pytest.approx(float(binary), rel=1e-5)  # no calibration
    ids = torch.cat([sampler.draw(torch.device("cpu")) for _ in range(2000)])
    assert ids.min() == 1 and ids.max() == 10
    assert torch.allclose(torch.bincount(ids, minlength=11)[1:] / 6000.0,
                          torch.full((10,), 0.1), atol=0.02)
    assert torch.allclose(sampler.log_expected(ids[:4]).exp(), torch.full((4,), 0.3))


def test_the_prior_of_recvae_is_a_density() -> None:
    """Each column integrates to 1; far from the old posterior, the wide component dominates."""
    z = torch.linspace(-1500, 1500, 300_001, dtype=torch.float64)[:, None]
    found = log_prior(z, torch.full_like(z, 2.0), torch.full_like(z, -1.0))
    assert float(found.exp().sum() * 3000 / 300_000) == pytest.approx(1.0, abs=1e-6)
    wide = math.log(0.1) - 0.5 * (10 + 500 ** 2 / math.exp(10) + math.log(2 * math.pi))
    assert float(log_prior(z[:1] * 0 + 500, z[:1] * 0, z[:1] * 0)) == pytest.approx(wide)


def test_recvae_trains_encoder_and_decoder_alternately() -> None:
    histories, num_items, _ = training()
    torch.manual_seed(0)
    model = RecVAE(num_items, RecVAEConfig(hidden=16, dim=6, rounds=2)).train()
    turns: list[str] = []
    for step in range(16):
        model.schedule(step, 16)
        model.zero_grad()
        model(histories)[0].backward()
        moved = {name.split(".")[0] for name, p in model.named_parameters()
                 if p.grad is not None and bool(p.grad.any())}
        assert len(moved) == 1
        turns += moved
        old = model.old.state_dict()
        same = all(torch.equal(v, old[k]) for k, v in model.encoder.state_dict().items())
        assert same == (step % 8 >= 6 or step % 8 == 0)  # copied in the decoder's steps
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.sub_(0.05 * p.grad)
    assert turns == (["encoder"] * 6 + ["item_out"] * 2) * 2


def test_popularity_counts_positive_interactions() -> None:
    """Targets are positive, so an item that many users dislike is not a good recommendation."""
    users, times = np.repeat(np.arange(1, 9), 6), np.tile(np.arange(6), 8)
    items = np.tile(np.arange(1, 7), 8)
    items[(times >= 4) & (users % 2 == 1)] += 2  # the last two are for validation and test
    rewards = (items != 1).astype(np.float32)
    data = from_log(Log(users, items, rewards, times), DataOptions(k_core=1))
    model = RECOMMENDERS["popularity"].build(PopularityConfig(), data, "cpu")
    best = model.scores(model.encode(training_histories(data, np.arange(1, 3))),
                        torch.arange(1, data.num_items))
    disliked = int(np.flatnonzero(data.item_ids == 1)[0])
    assert best.shape[0] == 2 and (best[:, disliked - 1] == 0).all() and best.max() == 8
    assert data.popularity()[disliked] == 8


@pytest.mark.parametrize("name", [n for n in RECOMMENDERS if n not in WORKLOADS])
def test_baselines_beat_popularity(name: str) -> None:
    """With users of three tastes; equal seeds give equal results."""
    data = tastes(3)
    config = RecVAEConfig(hidden=32, dim=8, rounds=10) if name == "recvae" else None
    options = FitOptions(epochs=30, batch_size=32, lr=0.01)
    found, again = (fit(name, config, data, 1, options) for _ in range(2))
    floor = fit("popularity", None, data, 1, options).test.summary()["ndcg@10"]
    assert found.test.summary()["ndcg@10"] > 1.5 * floor
    assert np.array_equal(found.test.per_user["ndcg@10"], again.test.per_user["ndcg@10"])
    other = evaluate_ranking(found.model, data, "test", block=7, batch_size=11).summary()
    assert other["ndcg@10"] == pytest.approx(found.test.summary()["ndcg@10"], abs=1e-6)


@pytest.mark.parametrize(("model", "wrong"), [
    ("ease", {"l2": 0.0}), ("itemknn", {"neighbours": 0}), ("itemknn", {"shrink": -1}),
    ("ials", {"alpha": 0.0}), ("ials", {"dim": 0}), ("recvae", {"dropout": 1.0}),
    ("recvae", {"rounds": 0}), ("multvae", {"hidden": 0}), ("macridvae", {"dropout": 1.0}),
    ("multvae", {"anneal": float("nan")}), ("multvae", {"beta": -1.0}),
    *(("sasrec", x) for x in ({"heads": 3}, {"heads": 0}, {"loss": "mse"}, {"targets": "none"},
                              {"window": -1})),
    *(("hstu", x) for x in ({"heads": 3}, {"time_buckets": -1}, {"rank_weight": -1.0},
                            {"rank_weight": float("inf")})),
    *(("sqn", x) for x in ({"gamma": 1.0}, {"q_weight": 0.0}, {"q_negatives": -1}, {"actor": "x"},
                           {"heads": 3})), ("sa2c", {"q_negatives": 0}),
    ("gru4rec", {"calibration": 2.0}), ("gru4rec", {"steps": 1, "window": 0}),
    *(("cadvae", x) for x in ({"layer": "cubic"}, {"dim": 0}, {"temperature": 0.0}, {"sampled": -1},
                              {"graph": "some"}, {"sharpness": float("inf")},
                              {"layer": "nonlinear", "graph": "free"})),
    *(("cdt4rec", x) for x in (
        {"dim": 0}, {"heads": 3}, {"state": "first"}, {"dropout": 1.0}, {"backbone": "x"},
        {"gamma": 0.0}, {"negatives": -1}, {"reward_loss": "x"}, {"window": 0},
        {"target_quantile": 2.0},
        {"backbone": "interleaved", "returns": "estimated"},
        {"reward_weight": 0.0, "returns": "estimated"}))])
def test_bad_configurations_are_refused(model: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=rf"model\.{list(wrong)[-1]}="):
        RECOMMENDERS[model].config(**wrong)
