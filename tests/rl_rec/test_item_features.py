"""HSTU with actions and features of items."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from oper.data import PreprocessOptions, preprocess
from oper.data.generic import Choice, generic_recipe
from oper.errors import InvalidInputError
from oper.rl_rec.data.batches import SequenceBatches, Share, training_histories
from oper.rl_rec.data.interactions import (
    DataOptions,
    Interactions,
    Log,
    from_log,
    load_interactions,
)
from oper.rl_rec.harness import FitOptions, fit
from oper.rl_rec.models.base import last
from oper.rl_rec.models.hstu import HSTU, HSTUConfig
from oper.rl_rec.registry import WORKLOADS
from oper.train.config import load_config
from tests.data.loader_support import ids_of
from tests.rl_rec.rec_support import next_items, with_large_rows

# ---- actions and features of items ---------------------------------------------------------------

NAMED = DataOptions(k_core=1, action="event", content=("brand", "kind"))
TINY = HSTUConfig(dim=16, layers=1, steps=8, window=4, dropout=0.0, negatives=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A preprocessed log of 40 users with 12 events each; brand and kind depend on the item."""
    place = tmp_path_factory.mktemp("features")
    rng = np.random.default_rng(0)
    rows = [(u, int(i), ("view", "cart", "buy", "")[int(rng.integers(4))], f"b{i % 5}",
             "" if i == 3 else f"k{i // 10}", 1000 * t + u)
            for u in range(40) for t, i in enumerate(rng.permutation(30)[:12])]
    (place / "log.csv").write_text("user,item,event,brand,kind,time\n" + "".join(
        ",".join(map(str, row)) + "\n" for row in rows))
    recipe = generic_recipe("csv", Choice(["user", "item", "event", "brand", "kind"], time="time"))
    preprocess(recipe, [str(place / "log.csv")], place / "out",
               PreprocessOptions(min_count=1, valid="0", test="0"))
    return place / "out"


def test_features_belong_to_their_events_and_items(folder: Path) -> None:
    data = load_interactions(folder, NAMED)
    raw = {column: {i: v for v, i in ids_of(folder, column).items()}
           for column in ("user", "item", "event", "brand", "kind")}
    lines = (folder.parent / "log.csv").read_text().splitlines()[1:]
    event = {tuple(line.split(",")[k] for k in (1, 5)): line.split(",")[2] for line in lines}
    assert data.actions is not None and data.content.shape == (2, 31)
    for row in range(data.users.size):
        item = raw["item"][int(data.item_ids[data.items[row]])]
        written = event[item, str(int(data.times[row]))]
        assert raw["event"].get(int(data.actions[row]), "") == written
        assert raw["brand"][int(data.content[0, data.items[row]])] == f"b{int(item) % 5}"
        kind = raw["kind"].get(int(data.content[1, data.items[row]]), "")
        assert kind == ("" if item == "3" else f"k{int(item) // 10}")
    assert (data.content[:, 0] == 0).all() and (data.actions == 0).any()
    plain = load_interactions(folder, DataOptions(k_core=1))
    assert plain.actions is None and not plain.content.size
    assert np.array_equal(plain.items, data.items) and np.array_equal(plain.users, data.users)
    # Batches and the latest interactions carry the actions of their rows.
    for batch in SequenceBatches(data, 4, 2).epoch(0, Share(8)):
        assert batch.actions is not None and batch.actions.shape == batch.items.shape
    users = np.arange(1, 6)
    found = last(training_histories(data, users), 3)
    wanted = [data.actions[s - 3:s] for s in data.train_stop[users]]
    assert found.actions is not None
    assert found.actions.tolist() == np.concatenate(wanted).tolist()


def features_only(data: Interactions) -> HSTU:
    torch.manual_seed(0)
    return with_large_rows(WORKLOADS["hstu"].build(TINY, data, "cpu").eval())


def test_tokens_and_scores_are_sums_of_rows(folder: Path) -> None:
    data = load_interactions(folder, NAMED)
    model = features_only(data)
    assert data.actions is not None
    item, brand, kind = (model.items.embeddings[name].weight for name in (
        "item", "content_0", "content_1"))
    assert model.actions is not None
    action = model.actions.embeddings["action"].weight
    assert [len(x) for x in (item, brand, kind, action)] == [
        31, *(1 + data.content.max(1)), 1 + data.actions.max()]
    batch = training_histories(data, np.arange(1, 9))
    vector = item + brand[data.content[0]] + kind[data.content[1]]
    recent, tokens, _ = model.recent(batch)
    assert recent.actions is not None
    flat = torch.cat([row[:n] for row, n in zip(tokens, recent.lengths, strict=True)])
    torch.testing.assert_close(flat, vector[recent.items] + action[recent.actions])
    encoded, items = model.encode(batch), torch.arange(1, 31)
    torch.testing.assert_close(model.scores(encoded, items), encoded @ vector[1:].T)
    # Training counts every lookup of every table.
    assert [kjt.keys() for kjt in model.lookups(batch)] == [
        ["seen", "drawn", "seen_0", "drawn_0", "seen_1", "drawn_1"], ["action"]]
    loss, _ = model(next(iter(SequenceBatches(data, 8, 4).epoch(0, Share(20)))))
    loss.backward()
    for table in (item, brand, kind, action):
        assert table.grad is not None and bool(table.grad.any())
    with pytest.raises(InvalidInputError, match="actions"):
        model.encode(replace(batch, actions=None))


def test_actions_predict_the_next_item() -> None:
    """The next item is i + 1 after action 1, i + 7 after action 2."""
    rng = np.random.default_rng(0)
    users, length = 300, 12
    actions = rng.integers(1, 3, (users, length))
    log = next_items(rng, actions == 2, 60, np.tile(np.arange(length), (users, 1)))._replace(
        actions=actions.reshape(-1))
    config = replace(TINY, dim=32, steps=10, window=1, time_buckets=0)
    options = FitOptions(epochs=12, batch_size=32, lr=0.01, eval_every=4)
    with_actions = fit("hstu", config, from_log(log, DataOptions(k_core=1, action="a")), 1, options)
    without = fit("hstu", config, from_log(log._replace(actions=None), DataOptions(k_core=1)), 1,
                 options)
    # Without actions one of the two is second, 1 / log2(3).
    assert without.test.summary()["ndcg@10"] < 0.87 < 0.93 < with_actions.test.summary()["ndcg@10"]


def test_unsuitable_features_are_refused(folder: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"brands.*interactions.content"):
        load_interactions(folder, replace(NAMED, content=("brands",)))
    with pytest.raises(InvalidInputError, match=r"'event'.*one value in all rows of an item"):
        load_interactions(folder, replace(NAMED, content=("event",)))
    with pytest.raises(InvalidInputError, match="every column once"):
        replace(NAMED, content=("brand", "brand"))
    log = Log(*(np.ones(3, np.int64) for _ in range(4)))
    with pytest.raises(InvalidInputError, match=r"Log.content"):
        from_log(log, NAMED)
    found = load_config(None, {"data": str(folder), "model.name": "hstu",
                               "interactions.content": "brand, kind"})
    assert found.interactions.content == ("brand", "kind")
