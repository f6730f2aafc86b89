"""CDT4Rec: dependencies, equations, losses, and learning of rewards of unlogged actions."""

import dataclasses
import functools
import math
from typing import Any

import numpy as np
import pytest
import torch
from rec_support import SMALL, cdt, invented, sequences  # type: ignore[import-not-found]
from torch import nn

from oper.rl_rec.data.batches import (
    HistoryBatches,
    SequenceBatches,
    Share,
    returns_to_go,
    target_return,
)
from oper.rl_rec.data.interactions import Interactions
from oper.rl_rec.models.base import Histories, NegativeSampler, Sequences, look_up
from oper.rl_rec.models.cdt4rec import CDT4Rec, CDT4RecConfig, Steps
from oper.rl_rec.models.continuous import ContinuousCDT4Rec, Trajectories, censored_loss
from oper.rl_rec.models.sasrec import SASRec, SASRecConfig
from oper.rl_rec.models.state import STATES, ItemState
from oper.rl_rec.models.transformer import Attention, Block


def steps_of(model: CDT4Rec, batch: Sequences) -> Steps:
    kjts = model.lookups(batch)
    return model._steps(batch, model.items(kjts[0])["seen"].values(), kjts, batch.skip,
                        batch.lengths - batch.skip)


def inside(model: CDT4Rec, batch: Sequences) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return phi and q, float32 [B, T, D], and the mask of valid steps, bool [B, T]."""
    steps = steps_of(model, batch)
    returns = model._as_input(batch.returns[steps.at] / model.scale)
    phi = model.backbone(steps.states, steps.actions, steps.rewards, returns)
    return phi, model.heads.queries(phi, returns), steps.valid


def with_change(batch: Sequences, name: str, at: int, value: float) -> Sequences:
    changed = getattr(batch, name).clone()
    changed[at] = value
    return dataclasses.replace(batch, **{name: changed})


# ---- what may depend on what ---------------------------------------------------------------------


@pytest.mark.parametrize("backbone", ["causal", "interleaved"])
@pytest.mark.parametrize("name, value", [("items", 3), ("rewards", 7.0), ("returns", 9.0)])
def test_outputs_do_not_depend_on_the_future(backbone: str, name: str, value: float) -> None:
    """Outputs are bitwise equal at every step of every trajectory."""
    model = cdt(backbone=backbone).eval()
    batch = sequences([9, 6], [2, 0])  # steps 2..8 of the first trajectory are rows 2..8
    before = inside(model, batch)[:2]
    for row in (4, 8):
        after = inside(model, with_change(batch, name, row, value))[:2]
        step = row - 2
        for a, b in zip(before, after, strict=True):
            assert torch.equal(a[0, :step], b[0, :step])
            assert torch.equal(a[1], b[1])
            sees = {"items": True, "rewards": backbone == "causal"}.get(
                name, backbone == "interleaved")
            if row == 4 and sees:
                assert not torch.equal(a[0, step + 1:], b[0, step + 1:])  # later ones see it


def test_phi_depends_neither_on_the_action_nor_on_any_return() -> None:
    model = cdt().eval()
    batch = sequences([9, 6], [2, 0])
    phi, queries, _ = inside(model, batch)
    other = dataclasses.replace(batch, returns=torch.rand(15) * 100)
    assert torch.equal(inside(model, other)[0], phi)
    assert not torch.equal(inside(model, other)[1], queries)  # the action head does know
    for step in range(7):
        for name, value in (("items", 1), ("rewards", 5.0)):
            changed = inside(model, with_change(batch, name, 2 + step, value))[0]
            assert torch.equal(changed[0, :step + 1], phi[0, :step + 1])
    # The phi of the interleaved ablation depends on the return: it is no outcome model.
    leaky = cdt(backbone="interleaved").eval()
    assert not torch.equal(inside(leaky, other)[0], inside(leaky, batch)[0])


@pytest.mark.parametrize("backbone", ["causal", "interleaved"])
def test_padding_changes_nothing(backbone: str) -> None:
    """Compare a trajectory alone with the same one in a batch of longer ones."""
    model = cdt(backbone=backbone).eval()
    batch = sequences([9, 2, 6, 1], [2, 0, 1, 0])
    phi, queries, valid = inside(model, batch)
    assert valid.sum(1).tolist() == [7, 2, 5, 1]
    ends = torch.cumsum(batch.lengths, 0).tolist()
    for b, (end, length) in enumerate(zip(ends, batch.lengths.tolist(), strict=True)):
        rows = slice(end - length, end)
        alone = Sequences(batch.users[b:b + 1], batch.items[rows], batch.rewards[rows],
                          batch.lengths[b:b + 1], batch.skip[b:b + 1], batch.returns[rows])
        for got, want in zip(inside(model, alone)[:2], (phi, queries), strict=True):
            torch.testing.assert_close(got[0], want[b, :int(valid[b].sum())], atol=1e-6, rtol=1e-5)
    whole = float(model(batch)[0].detach())
    wider = dataclasses.replace(batch, users=torch.cat([batch.users, torch.tensor([5])]),
                                lengths=torch.cat([batch.lengths, torch.tensor([0])]),
                                skip=torch.cat([batch.skip, torch.tensor([0])]))
    # A user without history does not change the loss.
    assert float(model(wider)[0].detach()) == pytest.approx(whole, rel=1e-6)


def test_states_are_of_the_items_before_a_step() -> None:
    """States equal their definition and do not depend on later items."""
    torch.manual_seed(0)
    rows, place = torch.randn(2, 6, 8), torch.tensor([[0, 1, 4], [2, 3, 6]])
    for kind in STATES:
        state = ItemState(kind, 8, 3, 6, heads=2).eval()
        found = state(rows, place)
        assert found.shape == (2, 3, 8)
        later = rows.clone()
        later[:, 4:] = 9
        torch.testing.assert_close(state(later, place)[:, :2], found[:, :2])
        for b, k in ((0, 2), (1, 1), (1, 2)):
            before = rows[b, :int(place[b, k])]
            start = torch.cat([torch.zeros(1, 8), before])
            want = {"mean": lambda x=before: x[-3:].mean(0), "last": lambda x=before: x[-1],
                    "gru": lambda s=start, net=state: net.network(s)[0][-1],
                    "transformer": lambda s=start, net=state: net.network(
                        (s + net.position[:len(s)])[None])[0, -1]}[kind]()
            torch.testing.assert_close(found[b, k], want, atol=1e-6, rtol=1e-5)
        if kind in ("mean", "last"):
            assert not found[0, 0].any()


def test_models_without_returns_need_no_target() -> None:
    model, batch = cdt(returns="none").eval(), sequences([9, 6], [2, 0])
    plain = model(batch)[0]
    other = dataclasses.replace(batch, returns=batch.returns + 3)
    assert torch.equal(model(other)[0], plain)
    history = Histories(batch.users, batch.items, batch.rewards, batch.lengths)
    before = model.encode(history).queries
    model.target = 50.0
    assert torch.equal(model.encode(history).queries, before)
    asks = cdt().eval()
    assert not torch.equal(asks(other)[0], asks(batch)[0])


def test_the_action_loss_may_be_binary() -> None:
    model, batch = cdt(loss="gbce", reward_weight=0.0).eval(), sequences([9, 6], [2, 0])
    _, queries, valid = inside(model, batch)
    items = torch.cat([batch.items[2:9], batch.items[9:]])
    every = torch.arange(1, 41)
    rows = look_up(model.items, model.features, {"drawn": every})["drawn"].values()
    want = NegativeSampler(41, 0, True).gbce_loss(
        queries[valid], items, rows[items - 1], every, rows, calibration=0.75).mean()
    torch.testing.assert_close(model(batch)[0], want, atol=1e-6, rtol=1e-5)


# ---- its parts -----------------------------------------------------------------------------------


def test_blocks_equal_torch_encoder_layers() -> None:
    ours, theirs = Block(16, 2, 0.0), nn.TransformerEncoderLayer(
        16, 2, 64, 0.0, activation="gelu", batch_first=True, norm_first=True)
    a = ours.attention
    with torch.no_grad():
        theirs.self_attn.in_proj_weight.copy_(torch.cat([a.query.weight, a.key_value.weight]))
        theirs.self_attn.in_proj_bias.copy_(torch.cat([a.query.bias, a.key_value.bias]))
        for mine, other in ((a.out[0], theirs.self_attn.out_proj), (ours.norm_1, theirs.norm1),
                            (ours.feed_forward[0], theirs.linear1), (ours.norm_2, theirs.norm2),
                            (ours.feed_forward[2], theirs.linear2)):
            nn.init.normal_(mine.weight)
            other.weight.copy_(mine.weight)
            other.bias.copy_(mine.bias)
    x = torch.randn(3, 9, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(9)
    torch.testing.assert_close(ours(x), theirs(x, src_mask=mask, is_causal=True), atol=1e-4,
                               rtol=1e-4)
    cross = Attention(16, 2, 0.0)
    seen = torch.randn(3, 9, 16)
    assert torch.equal(cross(x, seen)[:, :4], cross(x, torch.cat(
        [seen[:, :4], torch.randn(3, 5, 16)], dim=1))[:, :4])


def test_the_loss_is_the_exact_cross_entropy_and_squared_error() -> None:
    for tied in (True, False):
        model = cdt(reward_loss="mse", reward_weight=0.5, tied=tied).eval()
        batch = sequences([9, 6], [2, 0])
        phi, queries, valid = inside(model, batch)
        items = torch.cat([batch.items[2:9], batch.items[9:]])
        every = torch.arange(1, 41)
        found = look_up(model.items, model.features, {"drawn": every, "seen": items})
        logits = queries[valid] @ found["drawn"].values().T
        action = nn.functional.cross_entropy(logits, items - 1)
        rows = model.action(found["seen"].values())
        rewards = torch.cat([batch.rewards[2:9], batch.rewards[9:]])
        reward = (model.heads.rewards(phi[valid], rows) - rewards).square().mean()
        loss, parts = model(batch)
        torch.testing.assert_close(loss, action + 0.5 * reward, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(parts["action"], action.detach(), atol=1e-5, rtol=1e-5)


def test_drawn_candidates_estimate_the_normaliser() -> None:
    """The estimated normaliser is unbiased, and the loss converges to the exact one."""
    torch.manual_seed(3)
    num_items, queries = 60, torch.randn(5, 8)
    rows, targets = torch.randn(num_items, 8) * 0.7, torch.tensor([1, 2, 9, 30, 59])
    scores = queries @ rows[1:].T
    exact = nn.functional.cross_entropy(scores, targets - 1, reduction="none")
    few = NegativeSampler(num_items, 40)
    share = torch.log1p(1 / torch.arange(1, num_items).double()) / np.log(num_items)
    assert float(share.sum()) == pytest.approx(1)
    draws = torch.cat([few.draw(torch.device("cpu")) for _ in range(2000)])
    assert draws.min() == 1 and draws.max() == num_items - 1
    seen = torch.bincount(draws, minlength=num_items)[1:] / draws.numel()
    assert (seen - share).abs().max() < 0.01
    torch.testing.assert_close(few.log_expected(torch.arange(1, num_items)),
                               torch.log(40 * share).float())
    wanted = scores.gather(1, targets[:, None] - 1)[:, 0]
    totals = []
    for _ in range(4000):
        drawn = few.draw(torch.device("cpu"))
        losses = few.softmax_loss(queries, targets, rows[targets], drawn, rows[drawn])
        totals.append(torch.exp(losses + wanted))
    mean = torch.stack(totals).mean(dim=0)
    torch.testing.assert_close(mean, torch.exp(scores).sum(1), rtol=0.03, atol=0)
    many = NegativeSampler(num_items, 200_000)
    drawn = many.draw(torch.device("cpu"))
    near = many.softmax_loss(queries, targets, rows[targets], drawn, rows[drawn])
    torch.testing.assert_close(near, exact, rtol=0.01, atol=0.01)


def test_the_reward_loss_reaches_its_layers_and_the_backbone() -> None:
    model = cdt(reward_weight=1.0)
    batch = sequences([9, 6], [2, 0])
    phi, _, valid = inside(model, batch)
    asked = torch.full((int(valid.sum()),), 4)
    rows = model.action(look_up(model.items, model.features, {"seen": asked})["seen"].values())
    model.heads.rewards(phi[valid], rows).sum().backward()
    for layer in (model.heads.w_4, model.heads.w_2, model.backbone.merge, model.action):
        assert float(layer.weight.grad.abs().max()) > 0
    assert model.heads.action[0].weight.grad is None


def test_estimated_returns_replace_the_logged_rewards() -> None:
    """Compare g^_t with its definition: estimated rewards in the subsequence, logged ones after it.
    """
    model = cdt(returns="estimated", gamma=0.8).eval()
    model.schedule(1, 10)
    assert not model.estimate_returns
    model.schedule(4, 10)
    assert model.estimate_returns
    batch = sequences([5, 3], [1, 0])
    after, g = torch.tensor([2.0, 0.5]), torch.zeros(8)
    for first, stop, rest in ((0, 5, after[0]), (5, 8, after[1])):
        for k in reversed(range(first, stop)):
            g[k] = batch.rewards[k] + 0.8 * (g[k + 1] if k + 1 < stop else rest)
    batch = dataclasses.replace(batch, returns=g)
    steps = steps_of(model, batch)
    estimates = torch.randn(2, 4)
    found = model._estimated(g[steps.at] / model.scale, estimates, steps) * model.scale
    for b, (count, rest) in enumerate(((4, 2.0), (3, 0.5))):
        want = rest
        for k in reversed(range(count)):
            want = float(torch.sigmoid(estimates[b, k])) + 0.8 * want
            assert float(found[b, k]) == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("backbone", ["causal", "interleaved"])
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("returns", ["logged", "none"])
def test_recommending_is_the_step_after_the_last(backbone: str, state: str, returns: str) -> None:
    """`encode` gives the query that training has for the next step at the target return-to-go."""
    model = cdt(backbone=backbone, state=state, returns=returns, gamma=1.0).eval()
    batch = sequences([6], [0])
    batch.returns[5] = model.target
    for k in reversed(range(5)):
        batch.returns[k] = batch.rewards[k] + batch.returns[k + 1]
    phi, queries, _ = inside(model, batch)
    history = Histories(batch.users, batch.items[:5], batch.rewards[:5], torch.tensor([5]))
    encoded = model.encode(history)
    torch.testing.assert_close(encoded.phi[0], phi[0, 5], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(encoded.queries[0], queries[0, 5], atol=1e-6, rtol=1e-5)
    rewards = model.rewards(encoded, torch.arange(1, 41))
    assert rewards.shape == (1, 40) and 0 < rewards.min() < rewards.max() < 1


@pytest.mark.parametrize("make", [
    *(functools.partial(cdt, state=state) for state in STATES),
    lambda: SASRec(SASRecConfig(dim=16, steps=7, window=5, dropout=0.0), 41).eval()])
def test_histories_of_every_length(make: Any) -> None:
    """Histories that are empty, short or longer than the context, alone and in a batch."""
    model = make().eval()
    lengths = [0, 3, 40, 0, 1]
    batch = sequences(lengths, [0] * 5)
    histories = Histories(batch.users, batch.items, batch.rewards, batch.lengths)
    items = torch.arange(1, 41)
    together = model.scores(model.encode(histories), items)
    assert together.shape == (5, 40) and bool(together.isfinite().all())
    at = 0
    for b, length in enumerate(lengths):
        rows = slice(at, at + length)
        alone = Histories(batch.users[b:b + 1], batch.items[rows], batch.rewards[rows],
                          batch.lengths[b:b + 1])
        torch.testing.assert_close(model.scores(model.encode(alone), items)[0], together[b],
                                   atol=1e-5, rtol=1e-4)
        at += length
    cut = Histories(batch.users[2:3], batch.items[13:43], batch.rewards[13:43], torch.tensor([30]))
    torch.testing.assert_close(model.scores(model.encode(cut), items)[0], together[2], atol=1e-5,
                               rtol=1e-4)
    torch.testing.assert_close(model.scores(model.encode(histories), items[5:9]),
                               together[:, 5:9], atol=1e-5, rtol=1e-4)


def made_for(kind: str, data: Interactions) -> CDT4Rec | SASRec:
    """Make a small sequence model with 7 steps and a window of 5."""
    torch.manual_seed(0)
    if kind == "sasrec":
        return SASRec(SASRecConfig(dim=16, steps=7, window=5, dropout=0.0), data.num_items)
    return CDT4Rec(CDT4RecConfig(**SMALL | {"backbone": kind}), data.num_users, data.num_items,
                   (4.0, 3.0))


@pytest.mark.parametrize("kind", ["causal", "interleaved", "sasrec"])
def test_users_are_queried_at_positions_that_were_trained(kind: str) -> None:
    """Training gives every position a gradient; histories of any length are encoded at one of them.
    """
    data = invented(num_users=20, num_items=60, mean=25)
    model = made_for(kind, data)
    positions = model.position if isinstance(model, SASRec) else model.backbone.time
    config = model.config
    for batch in SequenceBatches(data, config.steps, config.window).epoch(0, Share(4)):
        model(batch)[0].backward()
    assert positions.grad is not None
    trained = positions.grad.abs().sum(dim=1) > 0
    assert bool(trained.all()), f"rows without a gradient: {(~trained).nonzero().tolist()}"
    for length in (1, 4, 11, 12, 13, 40):
        positions.grad = None
        history = sequences([length], [0], num_items=data.num_items)
        model.scores(model.encode(history), torch.arange(1, data.num_items)).sum().backward()
        asked = positions.grad.abs().sum(dim=1) > 0 if positions.grad is not None else ~trained
        assert bool((asked <= trained).all())
        assert int(asked.sum()) == min(length + (kind != "sasrec"), positions.shape[0])


# ---- batches -------------------------------------------------------------------------------------


def test_subsequences_cover_every_training_interaction_once() -> None:
    data = invented()
    returns = returns_to_go(data, 0.8)
    for user in range(1, data.num_users):
        g = 0.0
        for row in reversed(range(data.offsets[user], data.train_stop[user])):
            g = data.rewards[row] + 0.8 * g
            assert returns[row] == pytest.approx(g, rel=1e-5)
    scale, target = target_return(data, 0.8, 0.9)
    assert scale == pytest.approx(max(1.0, returns.max())) and 0 < target <= scale
    batches = SequenceBatches(data, 4, 3, 0.8)
    size = len(batches)
    seen: list[tuple[int, int, float]] = []
    (whole,) = batches.epoch(0, Share(size))
    ends = torch.cumsum(whole.lengths, 0).tolist()
    for user, end, n, skip in zip(whole.users.tolist(), ends, whole.lengths.tolist(),
                                  whole.skip.tolist(), strict=True):
        assert n - skip <= 4 and skip <= 3
        seen += [(user, int(whole.items[k]), round(float(whole.returns[k]), 4))
                 for k in range(end - n + skip, end)]
    rows = data.training_rows()
    assert sorted(seen) == sorted(zip(data.users[rows].tolist(), data.items[rows].tolist(),
                                      [round(float(g), 4) for g in returns[rows]], strict=True))
    for kind in (batches, HistoryBatches(data)):
        for epoch in (0, 1):
            one = [set(b.users.tolist()) for b in kind.epoch(epoch, Share(8, seed=5))]
            two = [[set(b.users.tolist()) for b in kind.epoch(epoch, Share(4, r, 2, 5))]
                   for r in range(2)]
            assert one == [a | b for a, b in zip(*two, strict=True)]
    assert sum(b.items.numel() for b in HistoryBatches(data).epoch(0, Share(10))) == rows.size


# ---- causes --------------------------------------------------------------------------------------


def test_rewards_of_actions_that_were_never_logged() -> None:
    """A randomised log of users with one of two tastes.

    The reward head's estimates for items that a user never had correlate with their true rewards
    above 0.9. Items that the model ranks first for a high return earn more than those of the
    logging policy would show next.
    """
    rng = np.random.default_rng(1)
    num_items, length, size = 20, 12, 64
    taste = rng.random((2, num_items + 1))

    def log() -> tuple[Sequences, np.ndarray, np.ndarray]:
        """Trajectories, the items of each and the true reward of each item."""
        truth = taste[rng.integers(0, 2, size)]
        items = rng.permuted(np.tile(np.arange(1, num_items + 1), (size, 1)), axis=1)[:, :length]
        noise = 0.1 * rng.standard_normal(items.shape)
        rewards = np.take_along_axis(truth, items, axis=1) + noise
        returns = rewards.copy()
        for k in reversed(range(length - 1)):
            returns[:, k] += 0.3 * returns[:, k + 1]
        return Sequences(
            torch.ones(size, dtype=torch.int64), torch.from_numpy(items.reshape(-1)),
            torch.from_numpy(rewards.reshape(-1)).float(), torch.full((size,), length),
            torch.zeros(size, dtype=torch.int64),
            torch.from_numpy(returns.reshape(-1)).float()), items, truth[:, 1:]

    torch.manual_seed(0)
    config = CDT4RecConfig(**SMALL | {
        "steps": length, "window": length, "user_dim": 0, "gamma": 0.3, "reward_loss": "mse",
        "reward_weight": 5.0})
    model = CDT4Rec(config, 2, num_items + 1, (1.4, 1.3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(300):
        loss, _ = model(log()[0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    batch, items, truth = log()
    with torch.no_grad():
        encoded = model.encode(batch)
        estimated = model.rewards(encoded, torch.arange(1, num_items + 1)).numpy()
        scores = model.scores(encoded, torch.arange(1, num_items + 1)).numpy()
    unlogged = np.ones_like(truth, bool)
    np.put_along_axis(unlogged, items - 1, False, axis=1)
    assert np.corrcoef(estimated[unlogged], truth[unlogged])[0, 1] > 0.9
    scores[~unlogged] = -np.inf
    best = truth[np.arange(size), scores.argmax(1)]
    assert best.mean() > truth[unlogged].mean() + 0.1


# ---- continuous actions --------------------------------------------------------------------------


def trajectories() -> Trajectories:
    g = torch.Generator().manual_seed(0)
    return Trajectories(torch.randn(4, 6, 5, generator=g), torch.rand(4, 6, 3, generator=g) * 2 - 1,
                        torch.rand(4, 6, generator=g) * 10, torch.rand(4, 6, generator=g) * 50,
                        torch.arange(6) < torch.tensor([6, 3, 1, 4])[:, None])


@pytest.mark.parametrize("backbone", ["causal", "interleaved"])
def test_continuous_actions(backbone: str) -> None:
    """Actions are causal and in [-1, 1]; padding is ignored."""
    torch.manual_seed(0)
    config = CDT4RecConfig(**SMALL | {"backbone": backbone, "reward_loss": "mse"})
    model = ContinuousCDT4Rec(config, 5, 3, returns=50.0, rewards=10.0).eval()
    batch = trajectories()
    acted, phi = model.act(batch), model.phi(batch)
    assert acted.shape == (4, 6, 3) and float(acted.detach().abs().max()) <= 1
    changed = batch._replace(states=batch.states.clone(), actions=batch.actions.clone())
    changed.states[:, 4:] = 9.0
    changed.actions[:, 3:] = 1.0
    assert torch.equal(model.act(changed)[:, :4], acted[:, :4])
    if backbone == "causal":
        assert torch.equal(model.phi(batch._replace(returns=batch.returns * 3)), phi)
    junk = batch._replace(actions=torch.where(batch.valid[..., None], batch.actions, 0.7),
                          rewards=torch.where(batch.valid, batch.rewards, 99.0))
    whole, other = (float(model(b)[0].detach()) for b in (batch, junk))
    assert other == pytest.approx(whole, rel=1e-6)
    without = ContinuousCDT4Rec(dataclasses.replace(config, returns="none"), 5, 3).eval()
    lower = batch._replace(returns=batch.returns - 9)
    assert torch.equal(without.act(lower), without.act(batch))
    assert not torch.equal(model.act(lower), acted)


def test_the_likelihood_of_clamped_actions_finds_their_mean() -> None:
    """A squared error would find the mean of the clamped actions, 0.59 here."""
    torch.manual_seed(0)
    actions = (0.8 + 0.6 * torch.randn(20_000, 1)).clamp(-1, 1)
    predicted = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.Adam([predicted], lr=0.1)
    for _ in range(150):
        optimizer.zero_grad()
        censored_loss(predicted.expand(len(actions), 2), actions).mean().backward()
        optimizer.step()
    mean, spread = predicted.detach()
    assert float(mean) == pytest.approx(0.8, abs=0.02)
    assert float(torch.nn.functional.softplus(spread)) + 0.05 == pytest.approx(0.6, abs=0.02)
    inside, low = (float(censored_loss(torch.tensor([[0.2, 0.5]]), torch.tensor([[x]])))
                   for x in (0.1, -1.0))
    normal = torch.distributions.Normal(0.2, float(torch.nn.functional.softplus(
        torch.tensor(0.5))) + 0.05)
    assert inside == pytest.approx(-float(normal.log_prob(torch.tensor(0.1))), abs=1e-5)
    assert low == pytest.approx(-math.log(float(normal.cdf(torch.tensor(-1.0)))), abs=1e-5)
    assert censored_loss(torch.zeros(1, 2), torch.tensor([[math.nan]])).isnan()


def test_estimated_returns_exclude_luck() -> None:
    """The return of an action a is 10 + 5 a plus chance.

    Conditioned on logged returns g, the mean action would be 0.1 (g - 10), since chance has a
    variance of 9; conditioned on estimated returns it is 0.2 (g - 10).
    """
    torch.manual_seed(1)
    config = CDT4RecConfig(dim=16, layers=1, heads=1, steps=1, dropout=0.0, reward_loss="mse",
                           gamma=1.0, returns="estimated")
    model = ContinuousCDT4Rec(config, 2, 1, returns=5.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    states, valid = torch.zeros(256, 1, 2), torch.ones(256, 1, dtype=torch.bool)
    for step in range(150):
        model.schedule(step, 150)
        actions = torch.rand(256, 1, 1) * 2 - 1
        gained = 10 + 5 * actions[..., 0] + 3 * torch.randn(256, 1)
        loss, terms = model(Trajectories(states, actions, gained, gained, valid))
        assert set(terms) == {"action", "reward", "value"}
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    wanted = torch.tensor([[7.5], [12.5]])
    found = model.act(Trajectories(states[:2], torch.zeros(2, 1, 1), 0 * wanted, wanted,
                                   valid[:2])).flatten()
    assert found.tolist() == pytest.approx([-0.5, 0.5], abs=0.15)
