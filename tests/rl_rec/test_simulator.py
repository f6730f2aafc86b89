"""The simulated shop: mechanics, gymnasium environment, graded logs, offline learning."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from oper.errors import FileFormatError, InvalidInputError
from oper.rl_rec.models.cdt4rec import CDT4RecConfig
from oper.rl_rec.models.continuous import Trajectories
from oper.rl_rec.simulation import shop as simulator
from oper.rl_rec.simulation.clicks import click_through_rate
from oper.rl_rec.simulation.offline import (
    Episodes,
    OfflineOptions,
    Oracle,
    ReturnPolicy,
    calibrated_target,
    clone_behaviour,
    collect_visits,
    graded_visits,
    high_return,
    random_policy,
    train_cdt4rec,
)
from oper.rl_rec.simulation.shop import (
    GROUPS,
    MAX_PAGE,
    Shop,
    Visits,
    load_virtual_taobao,
    synthetic_shop,
)
from tests.support import real_data

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


def test_the_gymnasium_face() -> None:
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
    log = collect_visits(shop, random_policy, 1000, 1)
    assert rate(log.clicks, log.pages) == pytest.approx(0.019, abs=0.006)


def test_graded_logs_are_graded() -> None:
    rates = {}
    for grade in ("random", "medium", "expert"):
        log = graded_visits(SHOP, grade, 60, seed=1)
        rates[grade] = rate(log.clicks, log.pages)
        s = log.steps
        assert torch.equal(s.valid.sum(1), torch.from_numpy(log.pages))
        assert not s.rewards[~s.valid].any()
        torch.testing.assert_close(s.returns[:, 0], s.rewards.sum(1))
        torch.testing.assert_close(s.returns[:, :-1] - s.returns[:, 1:], s.rewards[:, :-1])
        assert s.actions.abs().max() <= 1
        again = graded_visits(SHOP, grade, 60, seed=1)
        assert torch.equal(again.steps.actions, s.actions)
    assert rates["random"] + 0.2 < rates["medium"] < rates["expert"] - 0.1
    with pytest.raises(InvalidInputError, match="grade"):
        graded_visits(SHOP, "good", 1, 1)


def test_the_oracle_is_best() -> None:
    """Random search finds no page with more expected clicks."""
    torch.manual_seed(0)
    visits = Visits(SHOP, 20, seed=4)
    log = collect_visits(SHOP, random_policy, 20, 4).steps
    now = log._replace(states=log.states[:, :1])
    page = torch.zeros(20)
    found = SHOP.expected(visits.features, page, Oracle(SHOP)(now))[0]
    for _ in range(300):
        tried = SHOP.expected(visits.features, page, random_policy_actions(20))[0]
        assert bool((tried <= found + 0.3).all())


def test_a_high_return_beats_the_behaviour_policy() -> None:
    """Trained on the medium log; a higher target return gives more clicks."""
    log = graded_visits(SHOP, "medium", 500, seed=1)
    config = CDT4RecConfig(dim=32, layers=1, steps=16, dropout=0.0, reward_loss="mse",
                           reward_weight=0.3, gamma=1.0)
    model = train_cdt4rec(log, config, OfflineOptions(steps=200, lr=3e-3), seed=1)
    served = {q: collect_visits(SHOP, ReturnPolicy(model, high_return(log, q)), 300, seed=9)
              for q in (0.05, 0.95)}
    behaviour = click_through_rate(log.clicks, log.pages)["step"]
    high = click_through_rate(served[0.95].clicks, served[0.95].pages)["step"]
    low = click_through_rate(served[0.05].clicks, served[0.05].pages)["step"]
    assert high.low > behaviour.high and high.low > low.high
    cloned = collect_visits(SHOP, clone_behaviour(log, OfflineOptions(steps=100), 1), 200, seed=9)
    nobody = collect_visits(SHOP, random_policy, 200, seed=9)
    assert rate(cloned.clicks, cloned.pages) > rate(nobody.clicks, nobody.pages) + 0.1


def test_logs_without_customers_are_refused() -> None:
    """So no policy can be trained on one, and no target return chosen."""
    steps = graded_visits(SHOP, "random", 3, seed=1).steps
    absent = steps.valid & (torch.arange(3) != 1)[:, None]
    for wrong, told in ((Trajectories(*(part[:0] for part in steps)), "'0 of 0'"),
                        (Trajectories(*(part[:, :0] for part in steps)), "'0 of 3'"),
                        (steps._replace(valid=absent), "'2 of 3'")):
        with pytest.raises(InvalidInputError, match=f"{told}, expected all .* customer"):
            Episodes(wrong, "nobody")
    log = Episodes(steps, "random")
    for quantile in (-0.1, 1.1, float("nan")):
        with pytest.raises(InvalidInputError, match="quantile"):
            high_return(log, quantile)
    for options in ({"steps": 0}, {"batch_size": 0}, {"lr": 0.0}):
        with pytest.raises(InvalidInputError, match=next(iter(options))):
            OfflineOptions(**options)


def test_calibrated_targets_interpolate_what_was_achieved() -> None:
    """Targets that achieved no more than a lower one do not count; the best one is the last."""
    targets, achieved = [0.0, 10.0, 20.0, 40.0, 80.0], [5.0, 15.0, 12.0, 35.0, 35.0]
    found = [calibrated_target(x, targets, achieved) for x in (1.0, 10.0, 25.0, 99.0)]
    assert found == pytest.approx([0.0, 5.0, 25.0, 40.0])
    assert calibrated_target(7.0, [1.0, 2.0], [7.0, 7.0]) == 1.0


@pytest.mark.parametrize(("name", "wanted", "targets", "achieved"), [
    ("wanted", math.nan, [1.0, 2.0], [3.0, 4.0]), ("targets", 3.0, [], []),
    ("targets", 3.0, [2.0, 1.0], [3.0, 4.0]), ("achieved", 3.0, [1.0, 2.0], [3.0, math.nan]),
    ("achieved", 3.0, [1.0, 2.0], [3.0])])
def test_a_calibration_without_data_is_refused(name: str, wanted: float, targets: list[float],
                                               achieved: list[float]) -> None:
    with pytest.raises(InvalidInputError, match=rf"calibrate a target: {name}="):
        calibrated_target(wanted, targets, achieved)
