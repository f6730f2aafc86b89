"""CaD-VAE, MultVAE and MacridVAE: equations, losses, interventions and learning."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from oper.errors import InvalidInputError
from oper.rl_rec.models.autoencoders.cadvae import (
    CaDVAE,
    CaDVAEConfig,
    Concepts,
    MacridVAEConfig,
    log_counts,
    solve,
    tags,
)
from oper.rl_rec.models.autoencoders.item_tables import (
    Candidates,
    ItemBags,
    bag_weights,
    gaussian_kl,
    multinomial_nll,
)
from oper.rl_rec.models.autoencoders.multvae import MultVAE, MultVAEConfig
from oper.rl_rec.models.base import Histories, Recommender

NUM_ITEMS, K, CPU = 60, 4, torch.device("cpu")
# 0 -> 1 -> 3, 0 -> 2; roots: 0; leaves: 2 and 3.
GRAPH = torch.tensor([[0, .7, -.4, 0], [0, 0, 0, .9], [0, 0, 0, 0], [0, 0, 0, 0.]])


def histories(users: int = 9, seed: int = 0, empty: bool = True) -> Histories:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0 if empty else 2, 12, (users,), generator=g)
    items = torch.cat([1 + torch.randperm(NUM_ITEMS - 1, generator=g)[:int(n)] for n in lengths])
    return Histories(torch.arange(users), items, torch.ones(len(items)), lengths)


def make(layer: str = "linear", trained: bool = True, **config: Any) -> CaDVAE:
    torch.manual_seed(1)
    shares = torch.softmax(2 * torch.randn(NUM_ITEMS, K), 1)
    model = CaDVAE(NUM_ITEMS, CaDVAEConfig(num_concepts=K, hidden=20, dim=6, layer=layer, **config),
                   Concepts(shares, GRAPH, torch.zeros(K), torch.ones(K)))
    if trained:  # the masks begin as the identity
        for p in model.parameters():
            torch.nn.init.normal_(p, std=0.5) if p.shape != GRAPH.shape else None
    return model.eval()


def test_the_linear_layer_solves_its_equations() -> None:
    model = make().double()
    eps = torch.randn(5, K, 6, dtype=torch.float64)
    z = model.structure(eps)
    residual = torch.einsum("jk,bjd->bkd", torch.eye(K, dtype=torch.float64)
                            - model.adjacency, z)  # (I - A') z
    assert torch.allclose(residual, eps, atol=1e-12)
    assert torch.equal(solve(torch.zeros(K, K, dtype=torch.float64), eps), eps)


def test_the_nonlinear_layer_solves_its_equations_and_begins_as_the_linear_one() -> None:
    model = make("nonlinear")
    eps = torch.randn(5, K, 6)
    z = model.structure(eps)
    assert model.masks is not None
    inflow = torch.einsum("jk,bjd->bkd", model.adjacency, z)
    for k in range(K):
        effect = model.masks[k](inflow[:, k]) if GRAPH[:, k].any() else 0.0
        assert torch.allclose(z[:, k], effect + eps[:, k], atol=1e-5)
    fresh, linear = make("nonlinear", trained=False), make(trained=False)
    assert torch.allclose(fresh.structure(eps), linear.structure(eps), atol=1e-6)
    assert not torch.allclose(z, solve(model.adjacency, eps), atol=1e-2)


@pytest.mark.parametrize("layer", ["linear", "nonlinear"])
def test_an_intervention_changes_only_the_concept_and_its_descendants(layer: str) -> None:
    model = make(layer)
    with torch.no_grad():
        z = model.encode(histories())
        for k in range(K):
            after = model.intervene(z, k, torch.full((6,), 3.0))
            assert after is not z and after.shape == z.shape
            changed = {j for j in range(K) if not torch.equal(after[:, j], z[:, j])}
            assert changed == [{0, 1, 2, 3}, {1, 3}, {2}, {3}][k]
            assert torch.equal(after[:, k], torch.full_like(z[:, k], 3.0))
            # Setting a concept to its own value changes nothing.
            assert torch.allclose(model.intervene(z, k, z[:, k]), z, atol=1e-5)
    with pytest.raises(InvalidInputError, match="cannot intervene: concept=4"):
        model.intervene(z, K, z[:, 0])


def test_a_linear_intervention_has_the_effect_that_algebra_gives() -> None:
    model = make()
    with torch.no_grad():
        z = model.encode(histories())
        value = z[:, 0] + 1.0
        after = model.intervene(z, 0, value)
        a = model.adjacency
        total = torch.linalg.inv(torch.eye(K) - a.T)  # the total effect of each concept
        assert torch.allclose(after - z, total[:, 0].view(1, K, 1).expand_as(z), atol=1e-5)


def test_an_intervention_moves_the_ranking_towards_its_concept() -> None:
    """If a leaf's z is set to the direction of an item, the item gains on the concept's other
    items."""
    shares = torch.nn.functional.one_hot(torch.arange(NUM_ITEMS) % K, K).float()
    torch.manual_seed(2)
    model = CaDVAE(NUM_ITEMS, CaDVAEConfig(num_concepts=K, hidden=20, dim=6),
                   Concepts(shares, GRAPH, torch.zeros(K), torch.ones(K))).eval()
    items = torch.arange(1, NUM_ITEMS)
    with torch.no_grad():
        z = model.encode(histories())
        before = model.scores(z, items)
        wanted = 3 + 4 * K  # of concept 3, a leaf
        after = model.scores(model.intervene(z, 3, model.item_out(torch.tensor([wanted]))[0]),
                             items)
    mine, others = items % K == 3, items % K != 3
    assert bool((after[:, mine].argmax(1) == mine.nonzero()[:, 0].tolist().index(
        wanted - 1)).all())
    assert torch.allclose(before[:, others], after[:, others], atol=1e-5)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("sampled", [0, 15])
def test_one_concept_without_causes_is_multvae(training: bool, sampled: bool) -> None:
    torch.manual_seed(3)
    mult = MultVAE(NUM_ITEMS, MultVAEConfig(hidden=20, dim=6, decoder_hidden=0, item_bias=False,
                                            sampled=sampled))
    cad = CaDVAE(NUM_ITEMS, CaDVAEConfig(
        num_concepts=1, hidden=20, dim=6, similarity="dot", temperature=1.0, graph="none",
        beta_eps=0.2, beta_z=0.0, unit_mean=False, prior_std=1.0, sampled=sampled),
        Concepts(torch.ones(NUM_ITEMS, 1), torch.zeros(1, 1)))
    cad.load_state_dict(mult.state_dict(), strict=False)
    with torch.no_grad():
        for p in (mult.bias, cad.bias):
            p.copy_(torch.linspace(-1, 1, 20))
    batch = histories()
    for model in (mult, cad):
        model.train(training)
        model.schedule(5, 10)
    losses = []
    for model in (mult, cad):
        torch.manual_seed(4)
        losses.append(model(batch)[0])
    assert torch.equal(losses[0], losses[1])  # to the last bit
    torch.autograd.backward(losses)
    ours, theirs = dict(cad.named_parameters()), dict(mult.named_parameters())
    for name, p in theirs.items():
        torch.testing.assert_close(ours[name].grad, p.grad, rtol=1e-5, atol=1e-6, msg=name)
    with torch.no_grad():
        items = torch.arange(1, NUM_ITEMS)
        scores = [m.eval().scores(m.encode(batch), items) for m in (mult, cad)]
    assert torch.equal(*scores)


def test_bags_are_the_dense_product_with_the_multi_hot() -> None:
    batch = histories(empty=True)
    bags = ItemBags(NUM_ITEMS, 8, 3, "cpu")
    weights = torch.rand(3, batch.items.numel())
    out = bags(batch.items, batch.lengths, weights)
    row = torch.repeat_interleave(torch.arange(9), batch.lengths)
    table = bags.bags.state_dict()["embedding_bags.item_in.weight"]
    for k in range(3):
        dense = torch.zeros(9, NUM_ITEMS)
        dense[row, batch.items] = weights[k]
        assert torch.allclose(out[:, k], dense @ table, atol=1e-6)
    assert torch.allclose(bag_weights(batch.lengths, 0.0, True).square(),
                          1 / batch.lengths[row].float())


def test_sampling_every_item_once_is_the_full_softmax() -> None:
    batch = histories()
    scores = torch.randn(9, NUM_ITEMS - 1, requires_grad=True)
    row = torch.repeat_interleave(torch.arange(9), batch.lengths)
    full = Candidates(NUM_ITEMS, 0, CPU)
    want = multinomial_nll(scores[:0], scores, batch.items, batch.lengths, full)
    once = Candidates(NUM_ITEMS, 5, CPU)
    once.items = torch.randperm(NUM_ITEMS - 1) + 1
    once.log_expected = torch.zeros(NUM_ITEMS - 1)
    got = multinomial_nll(scores[row, batch.items - 1], scores[:, once.items - 1], batch.items,
                          batch.lengths, once)
    assert torch.allclose(got, want, rtol=1e-6)
    grads = [torch.autograd.grad(x, scores)[0] for x in (want, got)]
    assert torch.allclose(*grads, atol=1e-6)


def test_divergences_are_those_of_torch() -> None:
    mean, log_var, prior = torch.randn(50), torch.randn(50), torch.randn(50)
    q = torch.distributions.Normal(mean, (0.5 * log_var).exp())
    want = torch.distributions.kl_divergence(q, torch.distributions.Normal(prior, 0.7))
    assert torch.allclose(gaussian_kl(mean, log_var, prior, 0.7), want, atol=1e-5)


def test_the_divergence_of_z_is_that_of_its_marginals() -> None:
    model = make(beta_eps=0.0, beta_z=1.0, label_weight=0.0, unit_mean=False)
    model.anneal = 1.0
    mean, log_var = torch.randn(3, K, 6), torch.randn(3, K, 6) * 0.3
    labels = torch.randn(3, K)
    parts: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        model._divergences(mean, log_var, labels, parts)
    g = torch.Generator().manual_seed(0)
    eps = mean + (0.5 * log_var).exp() * torch.randn(20_000, 3, K, 6, generator=g)
    z = solve(model.adjacency.detach(), eps.view(-1, K, 6)).view(20_000, 3, K, 6)
    q = torch.distributions.Normal(z.mean(0), z.std(0))
    want = torch.distributions.kl_divergence(
        q, torch.distributions.Normal(labels.unsqueeze(2), 1.0)).sum((1, 2)).mean()
    assert float(parts["kl_z"]) == pytest.approx(float(want), rel=0.02)


def test_labels_are_log_counts_without_activity() -> None:
    shares = torch.tensor([[1.0, 0, 0], [0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0, 0.4, 0.6],
                           [0.5, 0.5, 0]])
    assert torch.equal(tags(shares), torch.tensor([[1.0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1],
                                                   [0.5, 0.5, 0]]))
    items, lengths = torch.tensor([1, 2, 2, 3]), torch.tensor([3, 0, 1])
    found = log_counts(tags(shares), items, lengths)
    want = torch.tensor([[1.5, 2.5, 0.5], [0.5, 0.5, 0.5], [0.5, 0.5, 1.5]]).log()
    assert torch.allclose(found, want)
    weights, mean, std = torch.tensor([0.2, 0.3, 0.1]), torch.randn(3), torch.tensor([1.0, 2, 3])
    model = CaDVAE(5, CaDVAEConfig(num_concepts=3, hidden=4, dim=4),
                   Concepts(shares, torch.zeros(3, 3), mean, std, weights))
    labels = model.labels(items, lengths)
    assert labels is not None
    activity = (want * weights).sum(1, keepdim=True)
    assert torch.allclose(labels, (want - activity - mean) / std)


def test_a_free_graph_becomes_acyclic_and_finds_the_order_of_labels() -> None:
    """With other terms off, the joint loss alone fits A to the labels."""
    torch.manual_seed(0)
    model = CaDVAE(NUM_ITEMS, CaDVAEConfig(num_concepts=3, hidden=8, dim=4, graph="free"))
    truth = torch.tensor([[0, 1.0, 0], [0, 0, -0.8], [0, 0, 0]])
    labels = solve(truth, torch.randn(4000, 3, 1))[:, :, 0]
    optimizer = torch.optim.Adam([model.weights], lr=0.02)
    for step in range(600):
        model.schedule(step, 600)
        once = model.lagrange.clone()
        model.schedule(step, 600)  # as a run that resumes from this step does
        assert torch.equal(model.lagrange, once)
        optimizer.zero_grad()
        parts: dict[str, torch.Tensor] = {}
        model._causal_terms(torch.zeros(1, 3, 4), labels, parts).backward()
        optimizer.step()
    assert float(parts["acyclicity"].detach()) < 1e-3
    assert torch.equal(model.support(), truth != 0)
    with torch.no_grad():
        z = torch.randn(2, 3, 4)
        after = model.intervene(z, 1, torch.zeros(4))
    assert torch.equal(after[:, 0], z[:, 0]) and not torch.equal(after[:, 2], z[:, 2])


MODELS = {
    "multvae": lambda: MultVAE(NUM_ITEMS, MultVAEConfig(hidden=20, dim=8, decoder_hidden=10)),
    "macridvae": lambda: CaDVAE(NUM_ITEMS, MacridVAEConfig(num_concepts=3, hidden=24, dim=8),
                                Concepts(graph=torch.zeros(3, 3))),
    "cadvae": lambda: make(trained=False),
    "nonlinear": lambda: make("nonlinear", trained=False),
    "learned": lambda: CaDVAE(NUM_ITEMS, CaDVAEConfig(num_concepts=3, hidden=20, dim=8,
                                                      concepts="learned")),
}


@pytest.mark.parametrize("sampled", [0, 25])
@pytest.mark.parametrize("name", MODELS)
def test_models_learn_which_users_are_similar(name: str, sampled: int) -> None:
    """With two kinds of users and items, a new user gets items of the same kind."""
    torch.manual_seed(0)
    model: Recommender = MODELS[name]()
    model.config = replace(model.config, sampled=sampled)
    half, g = NUM_ITEMS // 2, torch.Generator().manual_seed(1)
    kinds = torch.arange(40) % 2
    items = torch.cat([1 + k * (half - 1) + torch.randperm(half - 1, generator=g)[:8]
                       for k in kinds.tolist()])
    batch = Histories(torch.arange(40), items, torch.ones(320), torch.full((40,), 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    model.train()
    first = last = 0.0
    for step in range(60):
        model.schedule(step, 60)
        optimizer.zero_grad()
        loss, parts = model(batch)
        loss.backward()
        if step == 0:
            assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
            first = float(parts["nll"])
        optimizer.step()
        last = float(parts["nll"])
    assert last < 0.9 * first
    model.eval()
    new = Histories(torch.tensor([40, 41]), torch.tensor([2, 5, 9, half + 3, half + 8]),
                    torch.ones(5), torch.tensor([3, 2]))
    with torch.no_grad():
        scores = model.scores(model.encode(new), torch.arange(1, NUM_ITEMS - 1))
    mean = scores.view(2, 2, half - 1).mean(2)
    assert mean[0, 0] > mean[0, 1] and mean[1, 1] > mean[1, 0]
    blocks = torch.cat([model.scores(model.encode(new), b) for b in
                        torch.arange(1, NUM_ITEMS - 1).split(13)], 1)
    assert torch.allclose(blocks, scores, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_positive_items_count_once_and_users_may_have_none(name: str) -> None:
    model: Recommender = MODELS[name]().eval()
    items = torch.arange(1, NUM_ITEMS)
    liked = Histories(torch.tensor([0, 1]), torch.tensor([3, 4]), torch.ones(2),
                      torch.tensor([2, 0]))
    mixed = Histories(torch.tensor([0, 1]), torch.tensor([9, 3, 4, 3, 7]),
                      torch.tensor([0.0, 1, 1, 1, 0]), torch.tensor([4, 1]))
    with torch.no_grad():
        scores = [model.scores(model.encode(h), items) for h in (liked, mixed)]
        assert torch.equal(*scores) and bool(scores[0].isfinite().all())
        assert bool(model(mixed)[0].isfinite())


def test_bad_concepts_are_refused() -> None:
    config = CaDVAEConfig(num_concepts=2, hidden=4, dim=4)
    good = torch.full((NUM_ITEMS, 2), 0.5)
    for concepts, match in (
            (Concepts(good[1:]), "concepts of items"), (Concepts(good * 2), "sum to 1"),
            (Concepts(good, torch.zeros(3, 3)), "graph"),
            (Concepts(good, torch.tensor([[0, 1.0], [1.0, 0]])), "cycle"),
            (Concepts(good, torch.zeros(2, 2), torch.zeros(3), torch.ones(2)), "label_mean"),
            (Concepts(good, torch.zeros(2, 2), activity=torch.zeros(3)), "activity")):
        with pytest.raises(InvalidInputError, match=match):
            CaDVAE(NUM_ITEMS, config, concepts)
