"""HSTU: attention compared with loops, masks, candidates, losses, learning."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import binary_cross_entropy, cross_entropy

from oper.errors import InvalidInputError
from oper.rl_rec.data.batches import SequenceBatches, Share
from oper.rl_rec.data.interactions import (
    DataOptions,
    from_log,
)
from oper.rl_rec.harness import FitOptions, fit
from oper.rl_rec.models.base import Histories, Sequences
from oper.rl_rec.models.hstu import HSTU, HSTUConfig
from oper.rl_rec.registry import WORKLOADS
from tests.rl_rec.rec_support import SMALL, invented, next_items, sequences, with_large_rows

SIZES: dict[str, Any] = {key: value for key, value in SMALL.items() if key != "user_dim"}
DIM, CONTEXT = SIZES["dim"], SIZES["steps"] + SIZES["window"] - 1


def make(kind: str = "hstu", **changes: Any) -> Any:
    """Make a small next-item model whose biases and rows are large enough to affect outputs."""
    torch.manual_seed(0)
    config = WORKLOADS[kind].config
    sizes = {key: value for key, value in (SIZES | changes).items() if hasattr(config(), key)}
    model = WORKLOADS[kind].build(config(**sizes), replace(invented(), num_items=41), "cpu").eval()
    return with_large_rows(model, "position", "time")


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
def test_candidates_score_as_in_separate_passes() -> None:
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
    data = from_log(next_items(rng, is_long, 100, times), DataOptions(k_core=1))
    options = FitOptions(epochs=40, batch_size=32, lr=0.01, eval_every=8)
    config = HSTUConfig(dim=32, layers=2, steps=12, window=1, dropout=0.0, negatives=0)
    found, without = (fit("hstu", replace(config, time_buckets=buckets), data, 1,
                          options).test.summary()["ndcg@10"] for buckets in (64, 0))
    # Only times determine which of two items is next: without them half of the targets are
    # ranked second, which gives 1 / log2(3).
    assert without < 0.87 < 0.93 < found


def test_missing_inputs_are_named() -> None:
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
