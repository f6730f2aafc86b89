"""Intervals, click-through rates and off-policy estimates: known truths, real logs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from oper.data import PreprocessOptions, load_recipe, preprocess
from oper.errors import InvalidInputError
from oper.rl_rec.intervals import bootstrap, difference, ratio
from oper.rl_rec.off_policy.estimators import action_shares, estimate, reward_model
from oper.rl_rec.off_policy.log import LoggedBandit, load_bandit
from oper.rl_rec.simulation.clicks import click_through_rate
from tests.support import real_data


def test_intervals_cover_the_mean_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    logs = [rng.exponential(2.0, 200) for _ in range(200)]
    inside = [i.low <= 2.0 <= i.high for i in (bootstrap(x, samples=300) for x in logs)]
    assert 0.88 <= np.mean(inside) <= 0.98
    one = bootstrap(logs[0])
    normal = 1.96 * logs[0].std() / np.sqrt(200)
    assert one.high - one.low == pytest.approx(2 * normal, rel=0.15)
    assert one.mean == pytest.approx(logs[0].mean())
    assert one == bootstrap(logs[0])  # the same seed


def test_seeds_widen_and_pairs_narrow_the_interval() -> None:
    rng = np.random.default_rng(1)
    users = rng.normal(0, 1, 300)
    a = users + rng.normal(0, 0.1, (3, 300)) + np.array([[0.5], [0.0], [-0.5]])
    assert (bootstrap(a).high - bootstrap(a).low) > 1.5 * (
        bootstrap(a[:1]).high - bootstrap(a[:1]).low)
    shift = difference(a + 0.05, a)
    assert shift.low == pytest.approx(0.05) and shift.high == pytest.approx(0.05)
    assert difference(a, a[:2]).mean == pytest.approx(float(a.mean() - a[:2].mean()))
    with pytest.raises(InvalidInputError, match="users"):
        difference(a, a[:, 1:])
    for bad in (np.zeros(0), np.array([np.nan]), np.zeros((2, 0))):
        with pytest.raises(InvalidInputError, match="interval"):
            bootstrap(bad)


def test_both_click_through_rates() -> None:
    found = click_through_rate(np.array([10, 0, 30]), np.array([1, 1, 8]))
    assert found["step"].mean == pytest.approx(40 / 100)
    assert found["episode"].mean == pytest.approx((1 + 0 + 30 / 80) / 3)
    assert found["step"].low <= found["step"].mean <= found["step"].high
    for clicks, pages in (([1], [0]), ([11], [1]), ([-1], [1]), ([1, 2], [1])):
        with pytest.raises(InvalidInputError, match="click-through"):
            click_through_rate(np.array(clicks), np.array(pages))
    with pytest.raises(InvalidInputError, match="denominators"):
        ratio(np.ones(2), np.zeros(2))


ACTIONS, CONTEXTS = 5, 3
TRUTH = np.array([[.1, .3, .5, .2, .0], [.6, .1, .2, .3, .4], [.2, .2, .1, .7, .5]])


def synthetic(rows: int, seed: int) -> tuple[LoggedBandit, np.ndarray, float]:
    """A log of a known policy, a target policy [rows, A] and the target's true value."""
    rng = np.random.default_rng(seed)
    behaviour = rng.dirichlet(np.ones(ACTIONS) * 2, CONTEXTS) * 0.8 + 0.2 / ACTIONS
    target = np.full((CONTEXTS, ACTIONS), 0.05) + 0.75 * np.eye(ACTIONS)[TRUTH.argmax(1)]
    context = rng.integers(0, CONTEXTS, rows)
    action = (behaviour[context].cumsum(1) > rng.random((rows, 1))).argmax(1)
    reward = (rng.random(rows) < TRUTH[context, action]).astype(np.float32)
    log = LoggedBandit(context[:, None], action, context, reward, behaviour[context, action],
                       ACTIONS, CONTEXTS, (CONTEXTS,))
    return log, target[context], float((target[context] * TRUTH[context]).sum(1).mean())


def test_estimates_find_the_value_of_a_policy_that_never_acted() -> None:
    errors: dict[str, list[float]] = {"ips": [], "snips": [], "doubly_robust": []}
    covered, narrower = 0, 0
    for seed in range(12):
        log, target, truth = synthetic(2_000, seed)
        assert abs(float(log.rewards.mean()) - truth) > 0.05  # the log's own reward is no answer
        found = estimate(log, target)
        for name, values in errors.items():
            value = getattr(found, name)
            values.append(value.mean - truth)
            covered += value.low <= truth <= value.high
        # A model of the reward takes variance away.
        narrower += (found.doubly_robust.high - found.doubly_robust.low) < (
            found.ips.high - found.ips.low)
        assert 0 < found.effective_rows < 2_000 and found.largest_weight > 1
    assert all(abs(np.mean(v)) < 0.02 for v in errors.values())
    assert covered >= 31  # of 36, at 95 %
    assert narrower == 12


def test_doubly_robust_needs_one_of_the_two() -> None:
    log, target, truth = synthetic(20_000, 1)
    right = TRUTH[log.positions]
    wrong_model = estimate(log, target, np.full_like(right, 0.9))
    assert abs(wrong_model.direct.mean - truth) > 0.2
    assert abs(wrong_model.doubly_robust.mean - truth) < 0.03
    wrong_chance = replace(log, propensities=np.full(log.actions.size, 0.9))
    found = estimate(wrong_chance, target, right)
    assert abs(found.ips.mean - truth) > 0.2
    assert abs(found.doubly_robust.mean - truth) < 0.02


def test_the_logging_policy_itself_earns_what_was_logged() -> None:
    log, _, _ = synthetic(3_000, 2)
    on_policy = np.zeros((3_000, ACTIONS))
    on_policy[np.arange(3_000), log.actions] = 1.0
    found = estimate(replace(log, propensities=np.ones(3_000)), on_policy)
    assert found.ips.mean == pytest.approx(log.rewards.mean())
    assert found.snips.mean == pytest.approx(log.rewards.mean())
    assert found.effective_rows == pytest.approx(3_000)


def test_a_rows_reward_is_not_in_its_own_model() -> None:
    log, _, _ = synthetic(500, 3)
    before = reward_model(log)
    flipped = log.rewards.copy()
    flipped[7] = 1 - flipped[7]
    after = reward_model(replace(log, rewards=flipped))
    assert np.array_equal(before[7], after[7]) and not np.array_equal(before, after)


def test_bad_policies_are_refused() -> None:
    log, target, _ = synthetic(50, 4)
    for bad in (target[:, 1:], target * 2, -target):
        with pytest.raises(InvalidInputError, match="target"):
            estimate(log, bad)
    with pytest.raises(InvalidInputError, match="model"):
        estimate(log, target, np.full(target.shape, np.nan))
    with pytest.raises(InvalidInputError, match="propensities"):
        estimate(replace(log, propensities=np.zeros(50)), target)
    with pytest.raises(InvalidInputError, match="actions"):
        action_shares(log, replace(log, num_actions=9))


def test_open_bandit(tmp_path: Path) -> None:
    """Thompson sampling's clicks, estimated from the random policy's log, beside its own log."""
    files = [str(real_data(f"open_bandit/{p}/women/women.csv.gz")) for p in ("random", "bts")]
    preprocess(load_recipe("open-bandit"), files, tmp_path / "obd",
               PreprocessOptions(min_count=1, valid="0", test="0"))
    both = load_bandit(tmp_path / "obd")
    # One folder in order of time; only the random policy shows every product equally often.
    is_random = np.isclose(both.propensities, 1 / 46)
    random, bts = (replace(both, **{f: getattr(both, f)[s] for f in (
        "context", "actions", "positions", "rewards", "propensities")})
        for s in (is_random, ~is_random))
    # Three of Thompson sampling's records have the random policy's propensity.
    assert (random.actions.size, bts.actions.size) == (10_003, 9_997)
    found = estimate(random, action_shares(random, bts))
    own = bootstrap(bts.rewards)
    for value in (found.snips, found.doubly_robust):
        assert 0 < value.mean < 0.02
        assert value.low <= own.high and own.low <= value.high
    assert found.effective_rows > 1_000
    uniform = np.full((random.actions.size, 46), 1 / 46)
    assert estimate(random, uniform).snips.mean == pytest.approx(random.rewards.mean(), rel=1e-6)
