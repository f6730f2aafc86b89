"""``oper bench graphs``: accuracy of concept graphs, and of representations of users' tastes, that
are learned from the histories of simulated users."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from oper.bench.core.launch import Progress
from oper.rl_rec.concepts import activity_weights, concepts_from, standardised
from oper.rl_rec.data.batches import training_histories
from oper.rl_rec.data.interactions import DataOptions, Interactions, Log, from_log
from oper.rl_rec.disentanglement import disentanglement
from oper.rl_rec.harness import FitOptions, fit
from oper.rl_rec.intervals import bootstrap
from oper.rl_rec.models.autoencoders.cadvae import (
    CaDVAE,
    CaDVAEConfig,
    MacridVAEConfig,
    log_of,
    without,
)
from oper.rl_rec.models.autoencoders.causal_graph import fit_graph, is_acyclic
from oper.rl_rec.models.autoencoders.item_tables import positives
from oper.rl_rec.models.autoencoders.multvae import MultVAE, MultVAEConfig
from oper.rl_rec.models.base import Histories, Recommender

# Labels to which a graph is fitted: CaD-VAE's, and each concept's share of a user's items. Shares
# sum to 1 and are therefore correlated even for independent tastes.
LABELS = ("log_counts", "shares")
_WEIGHTS = (0.6, 1.2)  # range of an edge's absolute weight; its sign is random
BETAS = (0.0, 0.2, 2.0)  # beta_z of the ablations; the default is 0.02
FALSE_POSITIVES = 0.05  # limit of the false positive rate for independent concepts
FIGURES = (tuple(f"*.{key}" for key in (
    "shd", "shd_undirected", "true_positive_rate", "false_discovery_rate",
    "false_positive_rate")), tuple(f"*.{key}" for key in (
        "disentanglement", "completeness", "informativeness", "sap", "ndcg@10")))
NOTE = ("shd: edges to add, remove or reverse; rates without directions, which "
        "standardised labels do not determine; bootstrap over graphs\n"
        "disentanglement to sap: of users' codes for their tastes; bootstrap over seeds\n")


@dataclass(frozen=True, slots=True)
class Case:
    """Simulated users who choose items by their taste for each concept and by their activity.

    A user's tastes u [K] are linear in their causes: ``u = A'u + e``, with a random graph A and
    independent noise e. A user with activity a chooses ``Poisson(mean exp(u_k + a))`` items of
    concept k.

    Attributes:
        name: name of the case.
        num_edges: mean number of edges of a graph; 0 = independent concepts.
        num_concepts: number of concepts K.
        num_graphs: number of random graphs, each with its own users.
        num_users: users per graph.
        mean: items of a concept that a user with u = a = 0 takes on average.
        activity: standard deviation of a.
        noise: range of the standard deviations of e by concept.
    """

    name: str
    num_edges: float = 0.0
    num_concepts: int = 8
    num_graphs: int = 50
    num_users: int = 4000
    mean: float = 6.0
    activity: float = 0.6
    noise: tuple[float, float] = (0.5, 0.5)

    def measure(self, progress: Progress) -> dict[str, Any]:
        """Fit and compare; returns the record's entry: the figures of `compare` for each of
        `LABELS`, means over graphs with bootstrap intervals."""
        scores: dict[str, list[dict[str, float]]] = {kind: [] for kind in LABELS}
        acyclic = True
        progress(f"{self.num_graphs} graphs")
        for seed in range(self.num_graphs):
            truth, counts = simulate(self, seed)
            for kind in LABELS:
                found = fitted(counts, kind) != 0
                acyclic &= is_acyclic(found)
                scores[kind].append(compare(truth != 0, found.numpy()))
        entry: dict[str, Any] = {"case": asdict(self)}
        for kind in LABELS:
            entry[kind] = {
                key: _interval([s[key] for s in scores[kind] if np.isfinite(s[key])])
                for key in scores[kind][0]}
        mine, theirs = entry["log_counts"], entry["shares"]
        entry["ratio_shd"] = (mine["shd"]["mean"] / theirs["shd"]["mean"]
                              if theirs["shd"]["mean"] else None)
        entry["verified"] = acyclic and (
            self.num_edges > 0 or mine["false_positive_rate"]["mean"] <= FALSE_POSITIVES)
        return entry


@dataclass(frozen=True, slots=True)
class TastesCase:
    """Compares the representations that models learn of simulated users with known tastes.

    CaD-VAE is trained in several variants. One learns the items' concepts and the graph itself. The
    others are given the true concepts, and learn the graph, are given the true one, or have none.
    The variant with the true graph is also trained with other weights of the labels in the loss
    (`beta_z`).

    The number of items of concept k that a user chooses is drawn as in `Case`. The items depend on
    the user's taste v_k, which is normal and independent of all other variables: an item at
    position p is chosen with probability proportional to ``exp(-(p - v_k)^2 / (2 width^2))``. The
    v_k are the factors that the representations should recover.

    Attributes:
        name: name of the case.
        users: how users are simulated: the graph, their number and their activity. Models are
            trained with `users.num_graphs` seeds, each with its own graph and users.
        num_items: items per concept; their positions are quantiles of the normal distribution.
        width: width of a taste.
        epochs: epochs of training.
    """

    name: str
    users: Case
    num_items: int = 100
    width: float = 0.4
    epochs: int = 40

    def measure(self, progress: Progress) -> dict[str, Any]:
        """Train all models; returns the record's entry: DCI, SAP and nDCG@10 by model, with
        bootstrap intervals over seeds, and the graphs of models that have one."""
        scores: dict[str, list[dict[str, float]]] = {}
        graphs: dict[str, list[np.ndarray]] = {}
        for seed in range(self.users.num_graphs):
            data, tastes, places = histories_of(self, seed)
            known = true_concepts(self, seed, data)
            scores.setdefault("mean places", []).append(disentanglement(places[..., None], tastes))
            for name, (workload, config) in _models(self.users.num_concepts).items():
                progress(f"{name}, seed {seed}")
                given = [x for what, x in known.items() if f"true {what}" in name]
                done = fit(workload, config, data, seed, FitOptions(
                    epochs=self.epochs, lr=2e-3, eval_every=4, patience=3),
                    functools.partial(_given, given) if given else None)
                histories = training_histories(data, np.arange(1, data.num_users))
                found = disentanglement(codes_of(done.model, histories), tastes)
                scores.setdefault(name, []).append(
                    found | {"ndcg@10": done.test.summary()["ndcg@10"]})
                if isinstance(done.model, CaDVAE) and config.graph != "none":
                    graphs.setdefault(name, []).append(done.model.adjacency.detach().numpy())
        return {"case": asdict(self), "graphs": graphs,
                **{name: {key: _interval([s[key] for s in of_seeds]) for key in of_seeds[0]}
                   for name, of_seeds in scores.items()},
                "verified": all(np.isfinite(list(s.values())).all()
                                for of_seeds in scores.values() for s in of_seeds)}


def _models(num_concepts: int) -> dict[str, tuple[str, Any]]:
    """Workload and configuration by model. Models have one code per concept, except for MultVAE,
    where each latent number is a code."""
    sizes: Any = {"num_concepts": num_concepts, "hidden": 64, "dim": 16}
    return {"cadvae": ("cadvae", CaDVAEConfig(**sizes)),
            "cadvae, axes": ("cadvae", CaDVAEConfig(**sizes, concepts="axes")),
            "cadvae, no graph": ("cadvae", CaDVAEConfig(**sizes, graph="none")),
            "cadvae, true concepts": ("cadvae", CaDVAEConfig(**sizes)),
            "cadvae, true concepts, true graph": ("cadvae", CaDVAEConfig(**sizes)),
            "cadvae, true concepts, no graph": ("cadvae", CaDVAEConfig(**sizes, graph="none")),
            **{f"cadvae, true concepts, true graph, beta_z {weight}": (
                "cadvae", CaDVAEConfig(**sizes, beta_z=weight)) for weight in BETAS},
            "macridvae": ("macridvae", MacridVAEConfig(**sizes)),
            "multvae": ("multvae", MultVAEConfig(hidden=64, dim=16 * num_concepts,
                                                 decoder_hidden=64))}


@torch.no_grad()
def codes_of(model: Recommender, histories: Histories) -> np.ndarray:
    """The users' codes, float32 [N, C, d]: the vector of each concept or, for MultVAE, each latent
    number (its `encode` returns the decoder's hidden layer)."""
    if isinstance(model, MultVAE):
        return model.infer(*positives(histories))[0].unsqueeze(2).numpy()
    codes: np.ndarray = model.encode(histories).numpy()
    return codes


def true_concepts(case: TastesCase, seed: int, data: Interactions) -> dict[str, torch.Tensor]:
    """The true ``concepts`` of the items of `data`, float32 [num_items, K], uniform for padding;
    and the true ``graph``, bool [K, K]."""
    concept = torch.from_numpy((data.item_ids - 1) // case.num_items)
    shares = torch.nn.functional.one_hot(concept.clamp(min=0), case.users.num_concepts).float()
    shares[0] = 1 / case.users.num_concepts
    return {"concepts": shares, "graph": torch.from_numpy(simulate(case.users, seed)[0] != 0)}


def _given(known: Sequence[torch.Tensor], config: CaDVAEConfig, data: Interactions, device: str
           ) -> CaDVAE:
    return CaDVAE(data.num_items, config, concepts_from(data, config, *known), device)


def histories_of(case: TastesCase, seed: int) -> tuple[Interactions, np.ndarray, np.ndarray]:
    """Users' interactions; the tastes of users 1, 2, ..., float64 [N, K]; and the mean positions of
    their items of each concept, 0 if they have none, float64 [N, K]."""
    rng = np.random.default_rng((seed, 12))
    counts = np.minimum(simulate(case.users, seed)[1], case.num_items)
    tastes = rng.normal(size=counts.shape)
    grid = (np.arange(case.num_items) + 0.5) / case.num_items
    places = np.sort(torch.special.ndtri(torch.from_numpy(grid)).numpy())
    # Gumbel top-k: the largest log-probabilities plus Gumbel noise are a draw without replacement.
    score = rng.gumbel(size=(*counts.shape, case.num_items)) - (
        (places - tastes[..., None]) / case.width) ** 2 / 2
    ranks = score.argsort(axis=2)[..., ::-1].argsort(axis=2)
    taken = ranks < counts[..., None]
    user, concept, item = taken.nonzero()
    order = rng.permutation(user.size)
    user, item = user[order], (concept * case.num_items + item)[order]
    data = from_log(Log(user + 1, item + 1, np.ones(user.size, np.float32), user),
                    DataOptions(k_core=3))
    # `from_log` renumbers users; the time of each interaction is its user's original index.
    kept = data.times[data.offsets[1:-1]]
    mean = np.divide((taken * places).sum(2), counts, out=np.zeros(counts.shape), where=counts > 0)
    return data, tastes[kept], mean[kept]


def cases(quick: bool) -> list[Any]:
    """Cases with independent concepts, random graphs and users with tastes; smaller if `quick`."""
    found = [Case("independent"), Case("sparse", 6.0), Case("dense", 12.0),
             Case("unequal-noise", 8.0, noise=(0.4, 0.9)), Case("rare-items", 8.0, mean=1.0)]
    tastes = [TastesCase(f"tastes-{name}", Case(name, edges, 4, num_graphs=5, num_users=2000))
              for name, edges in (("independent", 0.0), ("graph", 3.0))]
    if not quick:
        return [*found, *tastes]
    few: dict[str, Any] = {"num_graphs": 2, "num_users": 300}
    return [*(replace(c, num_edges=c.num_edges / 2, num_concepts=5, **few | {"num_graphs": 4})
              for c in found[:2]),
            *(replace(c, users=replace(c.users, **few), epochs=4) for c in tastes[1:])]


def simulate(case: Case, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A random graph (edge weights from causes to effects, float64 [K, K]) and the users' numbers
    of items per concept, int64 [N, K]."""
    rng = np.random.default_rng((seed, 11))
    k, n = case.num_concepts, case.num_users
    order = rng.permutation(k)
    pairs = np.triu(rng.random((k, k)) < 2 * case.num_edges / (k * (k - 1)), 1)
    sizes = rng.uniform(*_WEIGHTS, (k, k)) * rng.choice([-1.0, 1.0], (k, k))
    graph = np.zeros((k, k))
    graph[np.ix_(order, order)] = pairs * sizes
    noise = rng.normal(size=(n, k)) * rng.uniform(*case.noise, k)
    likes = np.linalg.solve(np.eye(k) - graph.T, noise.T).T
    activity = case.activity * rng.normal(size=(n, 1))
    return graph, rng.poisson(case.mean * np.exp(np.minimum(likes + activity, 5.0)))


def fitted(counts: np.ndarray, kind: str) -> torch.Tensor:
    """The graph that CaD-VAE fits before training; float64 [K, K].

    Args:
        counts: number of items by user and concept, int64 [N, K].
        kind: kind of labels, one of `LABELS`.
    """
    held = torch.from_numpy(counts[counts.sum(1) > 0])
    if kind == "shares":
        labels = held / held.sum(1, keepdim=True)
    else:
        logs = log_of(held)
        labels = without(activity_weights(logs), logs)
    return fit_graph(standardised(labels)[2], threshold=CaDVAEConfig().threshold)


def compare(truth: np.ndarray, found: np.ndarray) -> dict[str, float]:
    """Compare a graph with the true one; both bool [K, K], from causes to effects.

    Returns:
        ``shd``: structural Hamming distance, the number of edges to add, remove or reverse;
        ``shd_undirected``: without reversals; ``true_positive_rate``: share of the true edges that
        were found; ``false_discovery_rate``: share of the found edges that are not true;
        ``false_positive_rate``: share of the pairs without a true edge for which one was found.
        Rates ignore directions and are nan if the denominator is 0.
    """
    true_pairs, pairs = (np.triu(a | a.T, 1) for a in (truth, found))
    wrong = int((true_pairs ^ pairs).sum())
    turned = int((found & truth.T & ~truth & ~found.T).sum())
    both, free = int((true_pairs & pairs).sum()), np.triu(np.ones_like(truth), 1) & ~true_pairs
    return {"shd": wrong + turned, "shd_undirected": wrong,
            "true_positive_rate": _share(both, int(true_pairs.sum())),
            "false_discovery_rate": _share(int((pairs & ~true_pairs).sum()), int(pairs.sum())),
            "false_positive_rate": _share(int((pairs & free).sum()), int(free.sum()))}


def _share(part: int, whole: int) -> float:
    return part / whole if whole else float("nan")


def _interval(values: Sequence[float]) -> Mapping[str, float] | None:
    return bootstrap(np.asarray(values, np.float64)).to_json() if values else None

