"""HSTU: attention against loops, masks, features, candidates, learning; devices of all models."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import binary_cross_entropy, cross_entropy
from torch.overrides import TorchFunctionMode

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
from oper.rl_rec.models.base import Histories, Sequences, last
from oper.rl_rec.models.hstu import HSTU, HSTUConfig
from oper.rl_rec.registry import RECOMMENDERS, WORKLOADS
from oper.train.config import load_config
from tests.data.loader_support import ids_of
from tests.rl_rec.rec_support import SMALL, invented, sequences

SIZES: dict[str, Any] = {key: value for key, value in SMALL.items() if key != "user_dim"}
DIM, CONTEXT = SIZES["dim"], SIZES["steps"] + SIZES["window"] - 1


def make(kind: str = "hstu", **changes: Any) -> Any:
    """Make a small next-item model whose biases and rows are large enough to affect outputs."""
    torch.manual_seed(0)
    config = WORKLOADS[kind].config
    sizes = {key: value for key, value in (SIZES | changes).items() if hasattr(config(), key)}
    model = WORKLOADS[kind].build(config(**sizes), replace(invented(), num_items=41), "cpu").eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("position", "time")) or "embedding" in name:
                p.normal_(0, 0.5)
    return model


def timed(lengths: list[int], skip: list[int] | None = None) -> Sequences:
    """Draw random subsequences with gaps from seconds to weeks."""
    batch = sequences(lengths, skip or [0] * len(lengths))
    g = torch.Generator().manual_seed(1)
    gaps = torch.exp(14 * torch.rand(batch.items.numel(), generator=g)).long()
    return replace(batch, times=1_400_000_000 + gaps.cumsum(0))


def inputs(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return item rows, float64 [B, P, D], and times, int64 [B, P]."""
    g = torch.Generator().manual_seed(2)
    gaps = torch.exp(14 * torch.rand(*shape, generator=g)).long()
    return torch.randn(*shape, DIM, generator=g, dtype=torch.float64), gaps.cumsum(1)


def part(batch: Histories, first: int, stop: int) -> Histories:
    """Return the interactions ``first:stop`` of a batch of one user."""
    assert batch.times is not None
    return Histories(torch.tensor([1]), batch.items[first:stop], batch.rewards[first:stop],
                     torch.tensor([stop - first]), times=batch.times[first:stop])


def by_loops(model: HSTU, items: torch.Tensor, times: list[int]) -> torch.Tensor:
    """Compute the layers' output for a sequence [P, D] by loops over tokens and heads."""
    size, heads = DIM, model.config.heads

    def norm(v: torch.Tensor) -> torch.Tensor:
        apart = v - v.sum() / size
        return apart / (apart.square().sum() / size + 1e-6).sqrt()

    def silu(v: torch.Tensor) -> torch.Tensor:
        return v / (1 + torch.exp(-v))

    x = [model.start, *items]
    for layer in model.layers:
        parts = [silu(layer.project.weight @ norm(v) + layer.project.bias).split(size) for v in x]
        after = []
        for i, (gate, query, _, _) in enumerate(parts):
            found = torch.zeros_like(gate)
            for j, (_, _, key, value) in enumerate(parts[:i + 1]):
                bias = layer.position[i - j]
                if layer.time is not None:
                    seconds = times[i - 1] - times[j - 1] if j else 0
                    # floor(2 log2(1 + seconds)), computed with integers
                    bucket = ((1 + seconds) ** 2).bit_length() - 1
                    bias = bias + layer.time[min(bucket, layer.time.numel() - 1)]
                for h in range(heads):
                    at = slice(h * size // heads, (h + 1) * size // heads)
                    found[at] += silu(query[at] @ key[at] + bias) / (CONTEXT + 1) * value[at]
            out = layer.out[1]
            after.append(x[i] + out.weight @ (norm(found) * gate) + out.bias)
        x = after
    return torch.stack([model.norm(v) for v in x])


@torch.no_grad()
@pytest.mark.parametrize("time_buckets", [0, 20, 64])
def test_layers_are_those_of_their_definition(time_buckets: int) -> None:
    model = make(time_buckets=time_buckets).double()
    items, times = inputs(2, CONTEXT)
    found = model.outputs(items, times)
    assert found.shape == (2, CONTEXT + 1, DIM)
    for b in range(2):
        torch.testing.assert_close(found[b], by_loops(model, items[b], times[b].tolist()))
    other = model.outputs(items, 7 * times)
    assert torch.equal(found, other) == (time_buckets == 0)


@torch.no_grad()
def test_no_query_depends_on_anything_later() -> None:
    model = make().double()
    items, times = inputs(3, 8)
    before = model.outputs(items, times)
    for changed in ((items + (torch.arange(8) >= 5)[:, None], times),
                    (items, times + 10 ** 6 * (torch.arange(8) >= 5))):
        after = model.outputs(*changed)
        assert torch.equal(before[:, :6], after[:, :6])
        assert not any(torch.equal(before[:, k], after[:, k]) for k in range(6, 9))


@torch.no_grad()
def test_padding_reaches_no_query() -> None:
    model = make().double()
    items, times = inputs(3, 8)
    lengths = [8, 3, 0]
    padding = torch.arange(8) >= torch.tensor(lengths)[:, None]
    junk = model.outputs(items.masked_fill(padding[..., None], 1e3), times.masked_fill(padding, 0))
    together = model.outputs(items, times)
    for b, length in enumerate(lengths):
        assert torch.equal(junk[b, :length + 1], together[b, :length + 1])
        alone = model.outputs(items[b:b + 1, :length], times[b:b + 1, :length])
        torch.testing.assert_close(alone[0], together[b, :length + 1])


@torch.no_grad()
@pytest.mark.parametrize("kind", ["gru4rec", "sasrec", "hstu"])
def test_losses_of_histories_equal_those_of_single_steps(kind: str) -> None:
    """A batch's losses are the means over its steps, each evaluated alone."""
    ranks = kind == "hstu"
    model = make(kind, rank_weight=0.5) if ranks else make(kind)
    lengths, skip = [9, CONTEXT + 1, 1], [2, 5, 0]
    batch = timed(lengths, skip)
    actions, rewards, first = [], [], 0
    for begin, length in zip(skip, lengths, strict=True):
        for k in range(first + begin, first + length):
            before, item, reward = part(batch, first, k), batch.items[k:k + 1], batch.rewards[k]
            if reward > 0:
                scores = model.scores(model.encode(before), torch.arange(1, 41))
                actions.append(float(cross_entropy(scores, item - 1)))
            if ranks:
                estimate = model.rewards(model.cache(before), item[None])
                rewards.append(float(binary_cross_entropy(estimate, reward.view(1, 1))))
        first += length
    loss, parts = model(batch)
    assert float(parts["action"]) == pytest.approx(np.mean(actions), rel=1e-4)
    if ranks:
        assert float(parts["reward"]) == pytest.approx(np.mean(rewards), rel=1e-4)
    ranked = 0.5 * np.mean(rewards) if ranks else 0.0
    assert float(loss) == pytest.approx(np.mean(actions) + ranked, rel=1e-4)


@torch.no_grad()
def test_only_the_recent_history_counts() -> None:
    model = make(rank_weight=1.0)
    batch = timed([30])
    items = torch.arange(1, 41)
    recent = part(batch, 30 - CONTEXT, 30)
    torch.testing.assert_close(model.encode(batch), model.encode(recent))
    torch.testing.assert_close(model.rewards(model.cache(batch), items[None]),
                               model.rewards(model.cache(recent), items[None]))
    assert not torch.allclose(model.encode(recent), model.encode(part(batch, 20, 30)))


@torch.no_grad()
def test_candidates_score_as_in_passes_of_their_own() -> None:
    """Compare with one pass per candidate, which is appended to the user's history."""
    model = make(rank_weight=1.0)
    lengths = [0, 3, CONTEXT, 20]
    batch = timed(lengths)
    assert batch.times is not None
    items = torch.randint(1, 41, (4, 6), generator=torch.Generator().manual_seed(3))
    ran: list[tuple[int, ...]] = []
    for layer in model.layers:
        layer.register_forward_hook(lambda _, args, out: ran.append(tuple(args[0].shape[:2])))
    cache = model.cache(batch)
    found = model.rewards(cache, items)
    assert ran == 2 * [(4, CONTEXT + 1)] + 2 * [(4, 6)]  # the history once, then candidates alone
    table = model.items.embeddings["item"].weight
    end = 0
    for b, length in enumerate(lengths):
        end += length
        seen = slice(end - min(length, CONTEXT), end)
        history = table[batch.items[seen]] + model.reward_token(batch.rewards[seen, None])
        times = batch.times[seen]
        now = times[-1:] if length else torch.zeros(1, dtype=torch.int64)
        for n, item in enumerate(items[b]):
            states = model.outputs(torch.cat([history, table[item][None]])[None],
                                   torch.cat([times, now])[None])
            torch.testing.assert_close(found[b, n],
                                       torch.sigmoid(model.rank_head(states[0, -1]))[0])
    assert float(found.std()) > 0.01
    blocks = torch.cat([model.rewards(cache, items[:, :2]), model.rewards(cache, items[:, 2:])], 1)
    torch.testing.assert_close(blocks, found)


@pytest.mark.parametrize("rank_weight", [0.0, 0.5])
def test_every_distance_is_trained(rank_weight: float) -> None:
    data = invented(num_users=20, num_items=60, mean=25)
    torch.manual_seed(0)
    model = HSTU(HSTUConfig(**SIZES, rank_weight=rank_weight), data.num_items)
    for batch in SequenceBatches(data, SIZES["steps"], SIZES["window"]).epoch(0, Share(4)):
        model(batch)[0].backward()
    for layer in model.layers:
        assert layer.position.numel() == CONTEXT + 1 + (rank_weight > 0)
        assert layer.position.grad is not None and bool((layer.position.grad != 0).all())
    assert all(p.grad is not None for p in model.parameters())


def test_users_without_interactions() -> None:
    loss, _ = make(rank_weight=1.0)(timed([0, 0]))
    loss.backward()
    assert float(loss.detach()) == 0


def test_times_predict_the_next_item() -> None:
    """The next item is i + 1 after a short pause, i + 7 after a long one."""
    rng = np.random.default_rng(0)
    users, length = 400, 14
    is_long = rng.random((users, length)) < 0.5
    times = np.cumsum(np.where(is_long, 700_000, 60), axis=1)
    steps = np.where(is_long, 7, 1)[:, :-1]
    items = rng.integers(0, 100, (users, 1)) + np.concatenate(
        [np.zeros((users, 1), np.int64), np.cumsum(steps, axis=1)], axis=1)
    log = Log(np.repeat(np.arange(1, users + 1), length), (items % 100 + 1).reshape(-1),
              np.ones(items.size, np.float32), times.reshape(-1))
    data = from_log(log, DataOptions(k_core=1))
    options = FitOptions(epochs=40, batch_size=32, lr=0.01, eval_every=8)
    config = HSTUConfig(dim=32, layers=2, steps=12, window=1, dropout=0.0, negatives=0)
    found, without = (fit("hstu", replace(config, time_buckets=buckets), data, 1,
                          options).test.summary()["ndcg@10"] for buckets in (64, 0))
    # Only times determine which of two items is next: without them half of the targets are
    # ranked second, which gives 1 / log2(3).
    assert without < 0.87 < 0.93 < found


def test_what_a_model_lacks_is_named() -> None:
    batch = timed([3, 4])
    with pytest.raises(InvalidInputError, match="rank_weight"):
        make().cache(batch)
    with pytest.raises(InvalidInputError, match="time_buckets=64"):
        make()(replace(batch, times=None))
    make(time_buckets=0)(replace(batch, times=None))[0].backward()
    data = replace(invented(), rewards=5 * invented().rewards)
    with pytest.raises(InvalidInputError, match="rank_weight"):
        WORKLOADS["hstu"].build(HSTUConfig(rank_weight=1.0), data, "cpu")
    WORKLOADS["hstu"].build(HSTUConfig(), data, "cpu")


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
        told = event[item, str(int(data.times[row]))]
        assert raw["event"].get(int(data.actions[row]), "") == told
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
    """A model with large rows in all tables."""
    torch.manual_seed(0)
    model: HSTU = WORKLOADS["hstu"].build(TINY, data, "cpu").eval()  # type: ignore[assignment]
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "embedding" in name:
                p.normal_(0, 0.5)
    return model


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
    steps = np.where(actions == 2, 7, 1)[:, :-1]
    items = rng.integers(0, 60, (users, 1)) + np.concatenate(
        [np.zeros((users, 1), np.int64), np.cumsum(steps, axis=1)], axis=1)
    log = Log(np.repeat(np.arange(1, users + 1), length), (items % 60 + 1).reshape(-1),
              np.ones(items.size, np.float32), np.tile(np.arange(length), users),
              actions=actions.reshape(-1))
    config = replace(TINY, dim=32, steps=10, window=1, time_buckets=0)
    options = FitOptions(epochs=12, batch_size=32, lr=0.01, eval_every=4)
    told = fit("hstu", config, from_log(log, DataOptions(k_core=1, action="a")), 1, options)
    untold = fit("hstu", config, from_log(log._replace(actions=None), DataOptions(k_core=1)), 1,
                 options)
    # Without actions one of the two is second, 1 / log2(3).
    assert untold.test.summary()["ndcg@10"] < 0.87 < 0.93 < told.test.summary()["ndcg@10"]


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


# ---- tensors are created on the device of the inputs ---------------------------------------------

FACTORIES = {torch.arange, torch.zeros, torch.ones, torch.full, torch.eye, torch.rand, torch.randn,
             torch.randint, torch.tensor, torch.empty, torch.linspace}
SEQUENCES = {key: SMALL[key] for key in ("dim", "layers", "steps", "window", "negatives")}
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "gru4rec": [SEQUENCES], "sasrec": [SEQUENCES, SEQUENCES | {"loss": "gbce", "negatives": 9}],
    "sqn": [SEQUENCES], "sa2c": [SEQUENCES], "dqn": [SEQUENCES | {"negatives": 9}],
    "hstu": [SEQUENCES, SEQUENCES | {"rank_weight": 0.5}],
    "dt": [SMALL], "cdt4rec": [SMALL, SMALL | {"tied": False, "negatives": 9,
                                               "returns": "estimated"}],
    "multvae": [{"sampled": 0}, {"sampled": 9}], "macridvae": [{"sampled": 0}, {"sampled": 9}],
    "cadvae": [{"sampled": 9}, {"graph": "free", "sampled": 0}, {"concepts": "learned"},
               {"layer": "nonlinear"}]}


class Watch(TorchFunctionMode):
    """Records the package's calls of tensor factories without a device."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        caller = sys._getframe(1)
        if (func in FACTORIES and kwargs.get("device") is None
                and "/rl_rec/models/" in caller.f_code.co_filename):
            self.found.append(f"{caller.f_code.co_filename}:{caller.f_lineno}")
        return func(*args, **kwargs)


@pytest.mark.parametrize(("name", "changes"), [
    (name, changes) for name in RECOMMENDERS if name != "popularity"
    for changes in SETTINGS.get(name, [{}])])
def test_no_tensor_without_a_device(name: str, changes: dict[str, Any]) -> None:
    data = invented()
    workload = RECOMMENDERS[name]
    config = workload.config(**changes)
    model = workload.build(config, data, "cpu")
    batch = next(iter(workload.batches(config, data).epoch(0, Share(8))))
    with Watch() as watch:
        if workload.trains:
            model.schedule(1, 2)
            model(batch)[0].backward()
            if name != "recvae":
                model.lookups(batch)
        model.eval()
        model.scores(model.encode(batch), torch.arange(1, 5))
        if getattr(config, "rank_weight", 0):
            candidates = torch.arange(1, 5).expand(batch.num_users, -1)
            model.rewards(model.cache(batch), candidates)
    assert watch.found == []


def test_a_tensor_without_a_device_is_noticed() -> None:
    source = "import torch\ndef f():\n    return torch.arange(3)\n"
    space: dict[str, Any] = {}
    exec(compile(source, "/x/rl_rec/models/new.py", "exec"), space)
    with Watch() as watch:
        space["f"]()
        torch.zeros(2)
    assert watch.found == ["/x/rl_rec/models/new.py:3"]
