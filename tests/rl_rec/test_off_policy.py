"""Off-policy estimates: intervals, known truths, real logs; the simulated shop."""

import hashlib
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from oper.data import PreprocessOptions, load_recipe, preprocess
from oper.errors import FileFormatError, InvalidInputError
from oper.rl_rec.intervals import bootstrap, difference, ratio
from oper.rl_rec.models.base import Histories
from oper.rl_rec.models.cdt4rec import CDT4RecConfig
from oper.rl_rec.models.continuous import Trajectories
from oper.rl_rec.models.popularity import Popularity
from oper.rl_rec.off_policy.estimators import estimate, reward_model
from oper.rl_rec.off_policy.feedback import from_feedback, to_feedback
from oper.rl_rec.off_policy.log import BanditColumns, load_bandit
from oper.rl_rec.off_policy.policies import action_shares, recommender_policy, softmax_policy
from oper.rl_rec.off_policy.simulated import simulate_log
from oper.rl_rec.simulation import offline, shop as simulator
from oper.rl_rec.simulation.clicks import click_through_rate
from oper.rl_rec.simulation.shop import (
    GROUPS,
    MAX_PAGE,
    Shop,
    Visits,
    load_virtual_taobao,
    synthetic_shop,
)
from tests.support import real_data


def test_intervals_cover_the_mean_as_often_as_stated() -> None:
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


def test_visits_of_the_same_customers_are_not_independent() -> None:
    """Repeating the visits for other seeds adds no information on customers."""
    rng = np.random.default_rng(3)
    pages = rng.integers(1, 9, 80)
    clicks = rng.binomial(10 * pages, rng.uniform(0.1, 0.9, 80))
    one = click_through_rate(clicks, pages)
    same = click_through_rate(np.tile(clicks, (6, 1)), np.tile(pages, (6, 1)))
    for kind, alone in one.items():
        assert (same[kind].mean, same[kind].low, same[kind].high) == pytest.approx(
            (alone.mean, alone.low, alone.high))
    # Policies that differ widen the interval.
    fewer = np.stack([clicks, clicks // 2, clicks // 4])
    differ = click_through_rate(fewer, np.tile(pages, (3, 1)))
    assert differ["step"].high - differ["step"].low > 1.5 * (one["step"].high - one["step"].low)
    assert differ["step"].mean == pytest.approx(fewer.sum() / (30 * pages.sum()))
    wrong = np.tile(clicks, (2, 1))
    wrong[1, 3] = 1000
    with pytest.raises(InvalidInputError, match=r"visit 83=\(1000"):
        click_through_rate(wrong, np.tile(pages, (2, 1)))


def test_estimates_find_the_value_of_a_policy_that_never_acted() -> None:
    """95 % intervals cover the true value as often as expected over 300 simulated logs; those of DM
    nearly so."""
    num_logs = 300
    covered: Counter[str] = Counter()
    errors, narrower = [], 0
    for seed in range(num_logs):
        s = simulate_log(1_000, seed)
        assert s.value - float(s.log.rewards.mean()) > 0.03  # the log's mean reward is wrong
        found = estimate(s.log, s.target, groups=s.groups, samples=400)
        covered.update(n for n, i in found.intervals.items() if i.low <= s.value <= i.high)
        errors.append([found.intervals[n].mean - s.value
                       for n in ("ips", "snips", "dr", "mips", "switch-dr", "dros", "dm")])
        width = {n: i.high - i.low for n, i in found.intervals.items()}
        narrower += width["mips"] < width["ips"] and width["dr"] < width["ips"]
        assert 0 < found.effective_rows < 1_000 and found.largest_weight > 1
    assert np.abs(np.mean(errors, axis=0)[:4]).max() < 0.006
    for name in ("ips", "snips", "dr", "mips", "switch-dr", "dros"):
        # 0.93 to 0.97, widened by two standard deviations for this number of logs
        assert 0.905 <= covered[name] / num_logs <= 0.995, (name, covered)
    assert covered["dm"] / num_logs > 0.85  # 0.05 if the error of the fitted model is ignored
    ips, _, dr, _, switched, shrunk, _ = np.sqrt(np.square(errors).mean(axis=0))
    assert max(switched, shrunk) < 1.1 * dr and dr < ips
    assert narrower > 0.8 * num_logs  # less variance than importance weights of single actions


def test_rows_of_one_visitor_are_drawn_together() -> None:
    alone = together = 0
    for seed in range(100):
        s = simulate_log(2_000, seed, per_visitor=40)
        for clusters in (None, s.visitors):
            found = estimate(s.log, s.target, clusters=clusters, samples=300).intervals["snips"]
            inside = found.low <= s.value <= found.high
            alone, together = (alone + inside, together) if clusters is None else (
                alone, together + inside)
    assert together >= 87 and alone < together - 8
    with pytest.raises(InvalidInputError, match="clusters"):
        estimate(s.log, s.target, clusters=s.visitors[1:])


def test_doubly_robust_needs_correct_propensities_or_a_correct_model() -> None:
    s = simulate_log(20_000, 1)
    wrong_model = estimate(s.log, s.target, model=np.full_like(s.rewards, 0.9)).intervals
    assert abs(wrong_model["dm"].mean - s.value) > 0.2
    assert abs(wrong_model["dr"].mean - s.value) < 0.03
    wrong_chance = replace(s.log, propensities=np.full(s.log.actions.size, 0.9))
    found = estimate(wrong_chance, s.target, model=s.rewards).intervals
    assert abs(found["ips"].mean - s.value) > 0.2
    assert abs(found["dr"].mean - s.value) < 0.02


def test_every_estimate_is_that_of_its_formula() -> None:
    """Compare with the formulas row by row, with a large weight that Switch-DR and DRos reduce."""
    s = simulate_log(400, 5)
    propensities = s.log.propensities.copy()
    propensities[3] = 1e-4
    log = replace(s.log, propensities=propensities)
    found = estimate(log, s.target, model=s.rewards, groups=s.groups)
    sums = dict.fromkeys(found.intervals, 0.0)
    weights = 0.0
    for n, action in enumerate(log.actions):
        pi, q, r = s.target[n], s.rewards[n], float(log.rewards[n])
        w = pi[action] / propensities[n]
        direct = sum(p * x for p, x in zip(pi, q, strict=True))
        of = s.groups.of_action
        v = (sum(p for p, g in zip(pi, of, strict=True) if g == of[action])
             / sum(p for p, g in zip(s.groups.behaviour[n], of, strict=True) if g == of[action]))
        weights += w
        for name, x in (("ips", w * r), ("snips", w * r), ("dm", direct), ("mips", v * r),
                        ("dr", direct + w * (r - q[action])),
                        ("switch-dr", direct + (w <= found.threshold) * w * (r - q[action])),
                        ("dros", direct + found.shrinkage * w / (w * w + found.shrinkage)
                         * (r - q[action]))):
            sums[name] += x
    for name, total in sums.items():
        assert found.intervals[name].mean == pytest.approx(
            total / (weights if name == "snips" else 400))
    assert found.threshold < found.largest_weight and np.isfinite(found.shrinkage)
    widths = {n: i.high - i.low for n, i in found.intervals.items()}
    assert widths["switch-dr"] < 0.1 * widths["dr"] and widths["dros"] < widths["dr"]


def test_weights_of_the_logging_policy_are_not_shrunk() -> None:
    """For the logging policy, all weights are 1 and all estimates are the mean reward."""
    s = simulate_log(3_000, 2)
    found = estimate(s.log, s.groups.behaviour, groups=s.groups)
    for name in ("ips", "snips", "mips"):
        assert found.intervals[name].mean == pytest.approx(s.log.rewards.mean())
    for name in ("switch-dr", "dros"):
        assert found.intervals[name].mean == pytest.approx(found.intervals["dr"].mean, abs=1e-3)
    assert found.effective_rows == pytest.approx(3_000)


def test_policies_of_scores_and_of_recommenders() -> None:
    scores = np.array([[0.0, 2.0, 1.0, -np.inf], [3.0, 3.0, 0.0, 0.0]])
    policy = softmax_policy(scores, 0.5, 0.2)
    wanted = np.exp(scores / 0.5)
    np.testing.assert_allclose(policy, 0.8 * wanted / wanted.sum(1, keepdims=True) + 0.05)
    best = np.array([[0, 1, 0, 0], [.5, .5, 0, 0]])
    np.testing.assert_allclose(softmax_policy(scores, 0.0), best)
    for bad, text in ((np.array([[np.nan, 1.0], [0.0, 1.0]]), "in 1 rows"),
                      (np.array([[-np.inf, -np.inf]]), "in 1 rows"), (np.zeros(3), r"\(3,\)")):
        with pytest.raises(InvalidInputError, match=text):
            softmax_policy(bad)
    for wrong in ({"temperature": -1.0}, {"uniform": 1.5}):
        with pytest.raises(InvalidInputError, match=next(iter(wrong))):
            softmax_policy(scores, **wrong)
    model = Popularity(torch.tensor([0, 5, 3, 1])).train()
    histories = Histories(torch.tensor([1, 2]), torch.tensor([1]), torch.ones(1),
                          torch.tensor([1, 0]))
    found = recommender_policy(model, histories, torch.tensor([3, 1]), temperature=2.0)
    np.testing.assert_allclose(found, np.tile(softmax_policy(np.array([[1, 5]]), 2.0), (2, 1)))
    assert model.training


def test_the_reward_model_of_a_row_excludes_its_reward() -> None:
    log = simulate_log(500, 3).log
    before = reward_model(log)
    flipped = log.rewards.copy()
    flipped[7] = 1 - flipped[7]
    after = reward_model(replace(log, rewards=flipped))
    assert np.array_equal(before[7], after[7]) and not np.array_equal(before, after)


def test_bad_policies_are_refused() -> None:
    s = simulate_log(50, 4)
    for bad in (s.target[:, 1:], s.target * 2, -s.target):
        with pytest.raises(InvalidInputError, match="target"):
            estimate(s.log, bad)
        with pytest.raises(InvalidInputError, match="behaviour"):
            estimate(s.log, s.target, groups=replace(s.groups, behaviour=bad))
    with pytest.raises(InvalidInputError, match="of_action"):
        estimate(s.log, s.target, groups=replace(s.groups, of_action=np.zeros(3, int)))
    with pytest.raises(InvalidInputError, match="model"):
        estimate(s.log, s.target, model=np.full(s.target.shape, np.nan))
    with pytest.raises(InvalidInputError, match="propensities"):
        estimate(replace(s.log, propensities=np.zeros(50)), s.target)
    with pytest.raises(InvalidInputError, match="actions"):
        action_shares(s.log, replace(s.log, num_actions=9))


def test_a_log_as_feedback_and_back() -> None:
    """Ids of the context become one-hot columns with the same information."""
    log = replace(simulate_log(300, 1).log, context=np.stack([np.arange(300) % 4,
                                                              np.arange(300) % 3], 1),
                  context_rows=(4, 5), action_groups=np.arange(8) % 3)
    found = to_feedback(log)
    assert set(found) == {"n_rounds", "n_actions", "context", "action_context", "action",
                          "position", "reward", "pscore"}
    assert (found["n_rounds"], found["n_actions"]) == (300, 8)
    assert found["context"].shape == (300, 9) and (found["context"].sum(1) == 2).all()
    assert (found["context"][:, :4].argmax(1) == log.context[:, 0]).all()
    assert found["action_context"].tolist() == np.eye(3)[np.arange(8) % 3].tolist()
    assert to_feedback(replace(log, action_groups=None))["action_context"].shape == (8, 8)
    back = from_feedback(found)
    for name in ("actions", "positions", "rewards", "propensities"):
        assert np.array_equal(getattr(back, name), getattr(log, name))
    assert (back.num_actions, back.num_positions) == (log.num_actions, log.num_positions)
    assert back.context_rows == (2,) * 7 + (1,) * 2  # ids 3 and 4 of five do not occur
    kinds = [np.unique(x.context, axis=0, return_inverse=True)[1] for x in (back, log)]
    assert len(np.unique(np.stack(kinds, 1), axis=0)) == 12  # both have the same equal rows
    least = {k: found[k] for k in ("n_actions", "action", "reward", "pscore")}
    bare = from_feedback(least | {"position": None})
    assert bare.num_positions == 1 and bare.context.shape == (300, 0) == (300, len(
        bare.context_rows))
    for key, wrong in (("pscore", None), ("pscore", found["pscore"] * 0), ("reward", np.ones(4)),
                       ("action", found["action"] + 4), ("position", found["position"] - 1),
                       ("context", np.ones(300)), ("action", np.zeros(0))):
        with pytest.raises(InvalidInputError, match=key if wrong is not None else "propensities"):
            from_feedback(found | {key: wrong})


def test_estimates_equal_those_of_open_bandit_pipeline() -> None:
    """Compare with obp's estimators, if obp is installed."""
    ope = pytest.importorskip("obp.ope")
    s = simulate_log(500, 4)
    feedback, ours = to_feedback(s.log), estimate(s.log, s.target, model=s.rewards, samples=1)
    dist = s.target[:, :, None].repeat(s.log.num_positions, axis=2)
    guesses = s.rewards[:, :, None].repeat(s.log.num_positions, axis=2)
    given = {key: feedback[key] for key in ("reward", "action", "position", "pscore")}
    for name, kind in (("ips", "InverseProbabilityWeighting"),
                       ("snips", "SelfNormalizedInverseProbabilityWeighting"),
                       ("dm", "DirectMethod"), ("dr", "DoublyRobust")):
        theirs = getattr(ope, kind)().estimate_policy_value(
            **given, action_dist=dist, estimated_rewards_by_reg_model=guesses)
        assert ours.intervals[name].mean == pytest.approx(theirs, rel=1e-6)


def test_open_bandit(tmp_path: Path) -> None:
    """Estimate Thompson sampling's click rate from the random policy's log, and compare."""
    files = [str(real_data(f"open_bandit/{p}/women/women.csv.gz")) for p in ("random", "bts")]
    preprocess(load_recipe("open-bandit"), files, tmp_path / "obd",
               PreprocessOptions(min_count=1, valid="0", test="0"))
    both = load_bandit(tmp_path / "obd")
    # The folder mixes both logs in order of time. Only the random policy has propensities 1 / 46.
    is_random = np.isclose(both.propensities, 1 / 46)
    random, bts = both.rows(is_random), both.rows(~is_random)
    # Three of Thompson sampling's records have the random policy's propensity.
    assert (random.actions.size, bts.actions.size) == (10_003, 9_997)
    assert (both.num_actions, both.num_positions, both.context.shape) == (46, 3, (20_000, 4))
    found = estimate(random, action_shares(random, bts))
    own = bootstrap(bts.rewards)
    for value in (found.intervals[n] for n in ("snips", "dr", "switch-dr", "dros")):
        assert 0 < value.mean < 0.02
        assert value.low <= own.high and own.low <= value.high
    assert found.effective_rows > 1_000
    uniform = np.full((random.actions.size, 46), 1 / 46)
    assert estimate(random, uniform).intervals["snips"].mean == pytest.approx(
        random.rewards.mean(), rel=1e-6)
    with pytest.raises(InvalidInputError, match="groups of action"):
        load_bandit(tmp_path / "obd", BanditColumns(group="user_feature_0"))
    for wrong in (BanditColumns(action="x"), BanditColumns(propensity="x")):
        with pytest.raises(InvalidInputError, match="column"):
            load_bandit(tmp_path / "obd", wrong)


# ---- the simulated shop --------------------------------------------------------------------------

SHOP = synthetic_shop(0)


def rate(clicks: np.ndarray, pages: np.ndarray) -> float:
    return float(clicks.sum() / pages.sum() / 10)


def test_visits() -> None:
    """Features are constant and one-hot by group; counters increase; customers do not return."""
    torch.manual_seed(0)
    visits = Visits(SHOP, 200, seed=3)
    before = visits.observe()
    for group in before[:, :88].split(GROUPS, dim=1):
        assert torch.equal(group.sum(1), torch.ones(200)) and bool((group.max(1).values == 1).all())
    assert not before[:, 88:].any()
    pages = torch.zeros(200)
    while not bool(visits.done.all()):
        here = ~visits.done
        clicks = visits.step(random_policy_actions(200))
        pages += here
        now = visits.observe()
        assert torch.equal(now[:, :88], before[:, :88])
        assert torch.equal(now[here, 88], clicks[here].float()) and not clicks[~here].any()
        assert torch.equal(now[:, 90], pages) and int(clicks.max()) <= 10
    assert torch.equal(pages, visits._patience.clamp(min=1).float())
    assert 1 <= pages.min() < pages.max() <= MAX_PAGE
    again = Visits(SHOP, 200, seed=3)
    assert torch.equal(again.observe(), before)
    visits.enter(torch.arange(200) < 50)
    assert (~visits.done).sum() == 50 and torch.equal(visits.observe()[50:, :88], before[50:, :88])
    with pytest.raises(InvalidInputError, match="actions"):
        visits.step(torch.zeros(200, 3))
    with pytest.raises(InvalidInputError, match="count"):
        Visits(SHOP, 0, 1)


def random_policy_actions(count: int) -> torch.Tensor:
    return torch.rand(count, 27) * 2 - 1


def test_clicks_follow_the_network() -> None:
    """Click frequencies of a page against the softmax of its logits."""
    visits = Visits(SHOP, 1, seed=1)
    features, action = visits.features.clone(), torch.full((1, 27), 0.2)
    seen = torch.cat([features, torch.zeros(1, 1), action], dim=1)
    want = SHOP.page(seen)[0, :11].softmax(0)
    many = Visits(SHOP, 20_000, seed=2)
    many.features[:] = features
    clicks = many.step(action.expand(20_000, -1))
    share = torch.bincount(clicks, minlength=11) / 20_000
    assert (share - want).abs().max() < 0.02
    mean = SHOP.expected(features, torch.tensor([0.0]), action)[0]
    assert float(clicks.float().mean()) == pytest.approx(float(mean), abs=0.1)


def test_the_gymnasium_environment() -> None:
    from gymnasium.utils.env_checker import check_env

    from oper.rl_rec.simulation.environment import ShopEnvironment

    env = ShopEnvironment(SHOP)
    check_env(env, skip_render_check=True)
    first, _ = env.reset(seed=5)
    rewards, done, pages = [], False, 0
    while not done:
        observation, reward, done, truncated, info = env.step(np.full(27, 0.1, np.float32))
        rewards.append(reward)
        pages += 1
        # The last observation is still this customer's.
        assert (observation[:88] == first[:88]).all() and observation[90] == pages == info["page"]
        assert not truncated and env.observation_space.contains(observation)
    with pytest.raises(RuntimeError, match="reset"):
        env.step(np.zeros(27, np.float32))
    other, _ = env.reset()
    assert not (other[:88] == first[:88]).all()
    again, _ = env.reset(seed=5)
    assert (again == first).all()
    assert [env.step(np.full(27, 0.1, np.float32))[1] for _ in rewards] == rewards


def test_weights_are_checked_before_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                  ) -> None:
    with pytest.raises(FileFormatError, match=r"generator_model\.pt"):
        load_virtual_taobao(tmp_path)
    networks = {"generator_model.pt": SHOP.customer, "leave_model.pt": SHOP.patience,
                "action_model.pt": SHOP.page}
    for name, network in networks.items():
        torch.save(network.state_dict(), tmp_path / name)
    with pytest.raises(FileFormatError, match="SHA-256"):
        load_virtual_taobao(tmp_path)
    monkeypatch.setattr(simulator, "WEIGHTS", {
        name: hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in networks})
    loaded = load_virtual_taobao(tmp_path)
    assert isinstance(loaded, Shop)
    mine, theirs = (Visits(s, 50, 1) for s in (SHOP, loaded))
    for _ in range(3):
        assert torch.equal(mine.step(torch.zeros(50, 27)), theirs.step(torch.zeros(50, 27)))


def test_virtual_taobao() -> None:
    """With the released weights: published click rates are .019 (random) and .055 (zeros)."""
    shop = load_virtual_taobao(real_data("virtual_taobao"))
    torch.manual_seed(0)
    log = offline.collect_episodes(shop, offline.random_policy, 1000, 1)
    assert rate(log.clicks, log.pages) == pytest.approx(0.019, abs=0.006)


def test_graded_logs_are_graded() -> None:
    rates = {}
    for grade in ("random", "medium", "expert"):
        log = offline.offline_dataset(SHOP, grade, 60, seed=1)
        rates[grade] = rate(log.clicks, log.pages)
        s = log.steps
        assert torch.equal(s.valid.sum(1), torch.from_numpy(log.pages))
        assert not s.rewards[~s.valid].any()
        torch.testing.assert_close(s.returns[:, 0], s.rewards.sum(1))
        torch.testing.assert_close(s.returns[:, :-1] - s.returns[:, 1:], s.rewards[:, :-1])
        assert s.actions.abs().max() <= 1
        again = offline.offline_dataset(SHOP, grade, 60, seed=1)
        assert torch.equal(again.steps.actions, s.actions)
    assert rates["random"] + 0.2 < rates["medium"] < rates["expert"] - 0.1
    with pytest.raises(InvalidInputError, match="grade"):
        offline.offline_dataset(SHOP, "good", 1, 1)


def test_the_oracle_is_best() -> None:
    """Random search finds no page with more expected clicks."""
    torch.manual_seed(0)
    visits = Visits(SHOP, 20, seed=4)
    log = offline.collect_episodes(SHOP, offline.random_policy, 20, 4).steps
    now = log._replace(states=log.states[:, :1])
    page = torch.zeros(20)
    found = SHOP.expected(visits.features, page, offline.Oracle(SHOP)(now))[0]
    for _ in range(300):
        tried = SHOP.expected(visits.features, page, random_policy_actions(20))[0]
        assert bool((tried <= found + 0.3).all())


def test_a_high_return_beats_the_behaviour_policy() -> None:
    """After training on the log of medium quality, a higher target return gives more clicks."""
    log = offline.offline_dataset(SHOP, "medium", 500, seed=1)
    config = CDT4RecConfig(dim=32, layers=1, steps=16, dropout=0.0, reward_loss="mse",
                           reward_weight=0.3, gamma=1.0)
    model = offline.train_cdt4rec(log, config, offline.OfflineOptions(steps=200, lr=3e-3), seed=1)
    policies = {q: offline.ReturnPolicy(model, offline.high_return(log, q)) for q in (0.05, 0.95)}
    served = {q: offline.collect_episodes(SHOP, p, 300, seed=9) for q, p in policies.items()}
    behaviour = click_through_rate(log.clicks, log.pages)["step"]
    high = click_through_rate(served[0.95].clicks, served[0.95].pages)["step"]
    low = click_through_rate(served[0.05].clicks, served[0.05].pages)["step"]
    assert high.low > behaviour.high and high.low > low.high
    clone = offline.clone_behaviour(log, offline.OfflineOptions(steps=100), 1)
    cloned = offline.collect_episodes(SHOP, clone, 200, seed=9)
    nobody = offline.collect_episodes(SHOP, offline.random_policy, 200, seed=9)
    assert rate(cloned.clicks, cloned.pages) > rate(nobody.clicks, nobody.pages) + 0.1


def test_logs_without_customers_are_refused() -> None:
    """On a log without customers no policy can be trained and no target return chosen."""
    steps = offline.offline_dataset(SHOP, "random", 3, seed=1).steps
    absent = steps.valid & (torch.arange(3) != 1)[:, None]
    for wrong, message in ((Trajectories(*(part[:0] for part in steps)), "'0 of 0'"),
                        (Trajectories(*(part[:, :0] for part in steps)), "'0 of 3'"),
                        (steps._replace(valid=absent), "'2 of 3'")):
        with pytest.raises(InvalidInputError, match=f"{message}, expected all .* customer"):
            offline.Episodes(wrong, "nobody")
    log = offline.Episodes(steps, "random")
    for quantile in (-0.1, 1.1, float("nan")):
        with pytest.raises(InvalidInputError, match="quantile"):
            offline.high_return(log, quantile)
    for options in ({"steps": 0}, {"batch_size": 0}, {"lr": 0.0}):
        with pytest.raises(InvalidInputError, match=next(iter(options))):
            offline.OfflineOptions(**options)


def test_calibrated_targets_interpolate_achieved_returns() -> None:
    """Targets that achieved no more than a lower one do not count; the best one is the last."""
    targets, achieved = [0.0, 10.0, 20.0, 40.0, 80.0], [5.0, 15.0, 12.0, 35.0, 35.0]
    found = [offline.calibrated_target(x, targets, achieved) for x in (1.0, 10.0, 25.0, 99.0)]
    assert found == pytest.approx([0.0, 5.0, 25.0, 40.0])
    assert offline.calibrated_target(7.0, [1.0, 2.0], [7.0, 7.0]) == 1.0


@pytest.mark.parametrize(("name", "wanted", "targets", "achieved"), [
    ("wanted", math.nan, [1.0, 2.0], [3.0, 4.0]), ("targets", 3.0, [], []),
    ("targets", 3.0, [2.0, 1.0], [3.0, 4.0]), ("achieved", 3.0, [1.0, 2.0], [3.0, math.nan]),
    ("achieved", 3.0, [1.0, 2.0], [3.0])])
def test_a_calibration_without_data_is_refused(name: str, wanted: float, targets: list[float],
                                               achieved: list[float]) -> None:
    with pytest.raises(InvalidInputError, match=rf"calibrate a target: {name}="):
        offline.calibrated_target(wanted, targets, achieved)
