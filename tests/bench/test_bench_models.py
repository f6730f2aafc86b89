"""Recommenders' training, simulator, off-policy and graph benchmarks on small logs."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from oper.bench.core.launch import measured
from oper.bench.core.report import report
from oper.bench.quality import graphs
from oper.bench.quality.graphs import Case, TastesCase, cases, compare, histories_of, simulate
from oper.bench.tables.model_case import ModelCase, _Tables, _with_gradients
from oper.rl_rec.models.autoencoders.cadvae import CaDVAE, CaDVAEConfig
from oper.rl_rec.models.autoencoders.multvae import MultVAE, MultVAEConfig
from oper.rl_rec.models.base import Histories
from oper.train.engines import Engine, dense_optimizer, is_table
from oper.train.reference import SparseTableOptimizer
from oper.train.tasks import RecommenderTask
from tests.bench.helpers import bench
from tests.support import real_data, run_here


@pytest.mark.parametrize(("model", "kinds"), [
    # It has pooled tables, which TorchRec does not shard row-wise on CPU.
    ("cadvae", {"table_wise", "column_wise"}), ("hstu", {"table_wise", "row_wise", "column_wise"})])
def test_training_steps_of_a_recommender(model: str, kinds: set[str], tmp_path: Path) -> None:
    (case,), printed = bench(tmp_path, "train", "--model", model, "--quick")
    assert case["verified"] and max(case["max_relative_diff"].values()) <= 1e-4
    assert set(case["plans"]) == {"oper", "planner"} | kinds
    for phase in ("embedding", "step"):
        best = min(case["plans"][p][phase]["median_ms"] for p in case["plans"] if p != "oper")
        assert case[f"torchrec_{phase}_ms"] == best
    assert "torchrec" in printed


def test_users_of_hstu_have_as_many_items_as_those_of_movielens() -> None:
    task = RecommenderTask(ModelCase("small", "hstu", 500, 4, num_batches=8).config())
    lengths = np.concatenate([b.lengths.numpy() for b, _ in itertools.islice(task.epoch(1), 8)])
    # 200 that are seen, and the one behind them that is predicted.
    assert lengths.max() == 201 and len(set(lengths)) > 8 and lengths.min() < 60


def test_tables_alone_get_batches_without_cached_results() -> None:
    """Results that a KJT caches on first use must not speed up later calls. All tables are updated,
    also those whose optimizers run after the backward pass."""
    task = RecommenderTask(ModelCase("small", "cdt4rec", 500, 4, num_batches=2).config())
    model = task.build()
    tables = SparseTableOptimizer(model, "rowwise_adagrad", 0.5, 1e-8)
    dense = dense_optimizer(task.config.optimizer, model)
    batches = [b for b, _ in itertools.islice(task.epoch(1), 2)]
    alone = _Tables(Engine(model, model, [tables, dense]),
                    [_with_gradients(model, model.lookups(b)) for b in batches])
    seen = []
    for number in range(4):
        before = {name: x.detach().clone() for name, x in model.named_parameters()}
        alone.prepare(number)
        assert all(kjt._length_per_key is None and kjt._jt_dict is None for kjt in alone._kjts)
        alone.step(number)
        seen += alone._kjts
        changed = {name for name, x in model.named_parameters() if not torch.equal(x, before[name])}
        assert changed == {name for name in before if is_table(name)}
    assert len(set(map(id, seen))) == len(seen)


def test_the_simulator(tmp_path: Path) -> None:
    command = ["simulator", "--quick", "--seeds", "1", "--runs", str(tmp_path / "runs")]
    (case, retention), printed = bench(tmp_path, *command)
    # Kept results are used unchanged, so a changed one appears in the record.
    (kept,) = (tmp_path / "runs").iterdir()
    with np.load(kept) as stored:
        arrays = {name: stored[name] for name in stored.files}
    np.savez(kept, **arrays | {"iql": arrays["iql"] + 1})
    (again,), _ = bench(tmp_path, *command, "--only", "retention")
    mean = again["policies"]["iql"]["return"].pop("mean")
    assert mean == pytest.approx(retention["policies"]["iql"]["return"]["mean"] + 1)
    assert again["policies"]["cql"] == retention["policies"]["cql"]
    assert again["asked"] == retention["asked"]
    rates = {name: found["step"]["mean"] for name, found in case["policies"].items()}
    assert rates["random"] < rates["behaviour"] < rates["oracle"] and case["verified"]
    assert {"cdt4rec", "decision transformer", "behaviour cloning", "cql", "iql",
            "td3+bc", "dqn"} < set(retention["policies"]) and retention["verified"]
    clicks = {name: found["return"]["mean"] for name, found in retention["policies"].items()}
    assert clicks["random"] < clicks["behaviour"] < clicks["oracle of clicks and return"]
    for name, found in retention["policies"].items():
        less = clicks["cdt4rec"] - clicks[name]
        # Figures have six significant digits.
        assert found["cdt4rec_less"]["mean"] == pytest.approx(less, abs=2e-4)
    asked = retention["asked"]
    for suffix in ("", "_calibrated"):
        (order,) = asked["spearman" + suffix]
        assert -1 <= order <= 1 and len(asked["relative_error" + suffix]) == 7
    low, high = asked["reach"][0]
    assert low <= high and len(asked["calibrated"][0]) == 7
    controlled = clicks["cdt4rec, estimated returns"]
    assert asked["served"][0][5] == pytest.approx(controlled, abs=1e-3)
    assert "no statement on a real shop" in printed
    assert run_here("bench", "simulator", "--weights", str(tmp_path)).returncode == 1


# ---- graphs over concepts ------------------------------------------------------------------------


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
    scores = compare(graph(4, (0, 1), (1, 2)), found)
    assert (scores["shd"], scores["shd_undirected"]) == (shd, undirected)
    assert scores["true_positive_rate"] == true
    assert scores["false_discovery_rate"] == pytest.approx(false)
    assert scores["false_positive_rate"] == pytest.approx(((found | found.T).sum() / 2
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


def test_labels_of_counts_give_fewer_false_edges_than_shares() -> None:
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


def test_the_codes_of_multvae_are_its_latent_numbers() -> None:
    """Scores depend on the codes only, so another decoder does not change them."""
    histories = Histories(torch.arange(3), torch.tensor([1, 5, 2, 7]), torch.ones(4),
                          torch.tensor([2, 0, 2]))
    model = MultVAE(9, MultVAEConfig(hidden=8, dim=6, decoder_hidden=5)).eval()
    codes = graphs.codes_of(model, histories)
    assert codes.shape == (3, 6, 1)
    torch.nn.init.zeros_(model.decoder[0].weight)  # type: ignore[arg-type, index]
    assert np.array_equal(graphs.codes_of(model, histories), codes)
    decoded = model.decode(torch.from_numpy(codes[..., 0]))
    assert torch.equal(decoded, model.encode(histories))
    concepts = CaDVAE(9, CaDVAEConfig(num_concepts=2, hidden=8, dim=4)).eval()
    assert graphs.codes_of(concepts, histories).shape == (3, 2, 4)


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


# ---- off-policy estimates ------------------------------------------------------------------------


def test_simulated_logs(tmp_path: Path) -> None:
    entries, printed = bench(tmp_path, "off-policy", "--quick", "--samples", "200",
                             OPER_DATA=str(tmp_path))
    assert [e["name"] for e in entries] == ["simulated/rows", "simulated/visitors",
                                            "simulated/recommender"]
    for e in entries:
        assert set(e["coverage"]) == {"ips", "snips", "dm", "dr", "switch-dr", "dros", "mips"}
        assert abs(e["bias"]["ips"]) < e["rmse"]["ips"] and e["rmse"]["dr"] < e["rmse"]["ips"]
    assert "coverage at 95 %" in printed and "on policy" not in printed


def test_open_bandit(tmp_path: Path) -> None:
    log = real_data("open_bandit/random/women/women.csv.gz")
    found, _ = bench(tmp_path, "off-policy", "--only", "open-bandit/*", "--samples", "200",
                     OPER_DATA=str(log.parents[3]))
    entries = {e["name"]: e for e in found}
    assert len(entries) == 4
    same = entries["open-bandit/random-log/random"]  # every estimate is near the logged mean
    rate = same["on_policy"]["mean"]
    assert rate == pytest.approx(same["clicks"] / same["rows"], abs=1e-6)
    assert same["estimates"]["ips"]["mean"] == pytest.approx(rate, rel=1e-4)
    assert same["largest_weight"] == pytest.approx(1.0, rel=1e-4)
    hard = entries["open-bandit/thompson-log/random"]
    assert hard["effective_rows"] < 50  # the weights leave next to nothing
    for e in entries.values():
        for interval in (e["on_policy"], *e["estimates"].values()):
            assert interval["low"] <= interval["mean"] <= interval["high"]
