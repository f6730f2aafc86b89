"""``oper bench graphs``: fitted graphs over concepts compared with the true ones."""

from __future__ import annotations

import numpy as np
import pytest

from oper.bench.core.launch import measured
from oper.bench.core.report import report
from oper.bench.quality import graphs
from oper.bench.quality.graphs import Case, TastesCase, cases, compare, histories_of, simulate


def graph(k: int, *edges: tuple[int, int]) -> np.ndarray:
    found = np.zeros((k, k), bool)
    for cause, effect in edges:
        found[cause, effect] = True
    return found


@pytest.mark.parametrize("found, shd, undirected, true, false", [
    (graph(4, (0, 1), (1, 2)), 0, 0, 1.0, 0.0),
    (graph(4, (1, 0), (1, 2)), 1, 0, 1.0, 0.0),             # one turned round
    (graph(4, (0, 1)), 1, 1, 0.5, 0.0),                     # one missing
    (graph(4, (0, 1), (1, 2), (2, 3)), 1, 1, 1.0, 1 / 3),   # one too many
    (graph(4, (2, 1), (0, 3)), 3, 2, 0.5, 0.5)])
def test_a_graph_is_compared_edge_by_edge(found: np.ndarray, shd: int, undirected: int,
                                          true: float, false: float) -> None:
    told = compare(graph(4, (0, 1), (1, 2)), found)
    assert (told["shd"], told["shd_undirected"]) == (shd, undirected)
    assert told["true_positive_rate"] == true
    assert told["false_discovery_rate"] == pytest.approx(false)
    assert told["false_positive_rate"] == pytest.approx(((found | found.T).sum() / 2
                                                         - 2 * true) / 4)


def test_users_follow_their_graph() -> None:
    """Effects depend only on their causes; equal seeds give equal users, different ones do not."""
    case = Case("x", num_edges=2.0, num_concepts=4, num_users=20_000, activity=0.0)
    for seed in range(5):
        truth, counts = simulate(case, seed)
        assert np.array_equal(counts, simulate(case, seed)[1])
        assert not np.array_equal(counts, simulate(case, seed + 5)[1])
        order = np.argsort((np.linalg.inv(np.eye(4) - (truth != 0)) != 0).sum(0), kind="stable")
        assert not np.tril(truth[np.ix_(order, order)]).any()  # no cycle
        logs = np.log(counts + 0.5)
        related = np.linalg.inv(np.eye(4) - truth.T)
        expected = related @ related.T != 0  # by a path, or by a cause in common
        measured = np.abs(np.corrcoef(logs.T)) > 0.03
        assert not (measured & ~expected).any()


def test_counts_find_what_shares_invent() -> None:
    independent, sparse = measured([
        Case(name, edges, num_concepts=5, num_graphs=3, num_users=1500)
        for name, edges in (("independent", 0.0), ("sparse", 3.0))])
    assert independent["verified"] and sparse["verified"]
    assert independent["log_counts"]["false_positive_rate"]["mean"] <= 0.05
    assert independent["shares"]["false_positive_rate"]["mean"] > 0.5
    assert independent["log_counts"]["true_positive_rate"] is None
    assert sparse["ratio_shd"] < 0.7
    assert "nan" not in report([independent, sparse], graphs.FIGURES)


def test_users_choose_by_their_tastes() -> None:
    """Tastes, mean positions and histories belong to the same users after renumbering."""
    case = TastesCase("x", Case("x", num_concepts=3, num_users=400, mean=8.0), num_items=50)
    data, tastes, places = histories_of(case, 1)
    assert tastes.shape == places.shape == (data.num_users - 1, 3)
    for concept in range(3):
        assert np.corrcoef(tastes[:, concept], places[:, concept])[0, 1] > 0.8
        assert abs(np.corrcoef(tastes[:, concept], places[:, concept - 1])[0, 1]) < 0.2
    shares = graphs.true_concepts(case, 1, data)["concepts"][data.items].argmax(1).numpy()
    assert np.array_equal(shares, (data.item_ids[data.items] - 1) // 50)
    # From the histories themselves: what is taken first to last of a concept, by user.
    raw = data.item_ids[data.items] - 1
    for concept in range(3):
        mine = raw // 50 == concept
        total = np.bincount(data.users[mine], weights=raw[mine] % 50, minlength=data.num_users)
        count = np.bincount(data.users[mine], minlength=data.num_users)
        some = count[1:] > 2
        found = (total / count.clip(1))[1:][some]
        assert np.corrcoef(found, tastes[some, concept])[0, 1] > 0.8
    assert data.test.users.size > 300


def test_codes_of_models_are_scored() -> None:
    quick = [case for case in cases(True) if isinstance(case, TastesCase)]
    (entry,) = measured(quick)
    assert entry["verified"] and set(entry["graphs"]) == {
        name for name in entry if name.startswith("cadvae") and "no graph" not in name}
    assert np.array(entry["graphs"]["cadvae"]).shape == (2, 4, 4)
    best = entry["mean places"]
    models = [name for name in entry if name.startswith(("cadvae", "macridvae", "multvae"))]
    assert len(models) == 11
    for model in models:
        for name in ("disentanglement", "completeness", "informativeness", "sap"):
            found = entry[model][name]
            assert 0 <= found["low"] <= found["high"] <= best[name]["mean"] + 0.01
        assert entry[model]["ndcg@10"]["mean"] > 0
    # A graph that is given is the one in the record, with other weights.
    truth = [simulate(quick[0].users, seed)[0] != 0 for seed in range(2)]
    given = np.array(entry["graphs"]["cadvae, true concepts, true graph"])
    assert np.array_equal(given != 0, truth) and np.array(truth).any()
    text = report([entry], graphs.FIGURES)
    assert "tastes-graph: cadvae, no graph" in text and "sap" in text
