"""Offline learning: SQN, SA2C, DQN, graded rewards, returning customers."""

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from oper.data import Folder, PreprocessOptions, preprocess
from oper.data.generic import Choice, generic_recipe
from oper.errors import InvalidInputError
from oper.rl_rec.data.interactions import DataOptions, Interactions, load_interactions
from oper.rl_rec.harness import FitOptions, fit
from oper.rl_rec.models.base import Histories, Sequences
from oper.rl_rec.models.cdt4rec import CDT4RecConfig
from oper.rl_rec.models.continuous import Trajectories
from oper.rl_rec.models.sqn import SQN
from oper.rl_rec.registry import WORKLOADS
from oper.rl_rec.simulation import offline
from oper.rl_rec.simulation.actor_critic import (
    CHOICES,
    DQN,
    FOLLOWED,
    METHODS,
    Critics,
    Transitions,
    train_actor_critic,
)
from oper.rl_rec.simulation.shop import (
    ACTION_DIM,
    NUM_FEATURES,
    OBSERVATION_DIM,
    VISITS,
    Returning,
    Shop,
    Visits,
    synthetic_shop,
)
from oper.train.config import TrainConfig
from oper.train.tasks import ClickTask
from tests.rl_rec.rec_support import invented, sequences
from tests.support import run_here

NAMES = ("sqn", "sa2c", "dqn")


def model_of(name: str, num_items: int, seed: int = 0, **changes: Any) -> SQN:
    torch.manual_seed(seed)
    config = WORKLOADS[name].config(**{"dim": 8, "layers": 1, "steps": 7, "window": 5, "dropout": 0,
                                       "negatives": 0} | changes)
    model = WORKLOADS[name].build(config, replace(invented(), num_items=num_items), "cpu")
    assert isinstance(model, SQN)
    return model


@pytest.mark.parametrize("name", NAMES)
def test_losses_are_those_of_their_definition(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare with loops over steps and heads that do not use the model's helpers."""
    lengths, skip, gamma = [4, 1, 6], [1, 0, 2], 0.6
    batch = sequences(lengths, skip, num_items=13)
    model = model_of(name, 13, gamma=gamma, q_weight=0.7, negatives=0)
    model.schedule(9, 10)
    others = torch.randint(12, (8, model.config.q_negatives or 1),
                           generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(torch, "randint", lambda *args, **kwargs: others)
    loss, parts = model(batch)
    with torch.no_grad():
        table = dict(model.items.named_parameters())["embeddings.item.weight"]
        weights = model.critic.weight.view(2, 9, 8)
        biases = model.critic.bias.view(2, 9)
        q_losses, a_losses, step = [], [], 0
        for n, (length, first) in enumerate(zip(lengths, skip, strict=True)):
            begin = sum(lengths[:n])
            items = batch.items[begin:begin + length]
            outputs = model.outputs(table[items][None])[0]

            def q(head: int, t: int, outputs: torch.Tensor = outputs) -> torch.Tensor:
                both = weights[head] @ outputs[t] + biases[head]
                return torch.cat([torch.tensor([-1e9]), table[1:] @ both[:8] + both[8]])

            for t in range(first, length):
                a, r = int(items[t]), float(batch.rewards[begin + t])
                of_step, advantages = 0.0, []
                for mine, other in ((0, 1), (1, 0)):
                    if t == length - 1:
                        wanted = float(batch.returns[begin + t])
                    else:
                        wanted = r + gamma * float(q(other, t + 1)[q(mine, t + 1).argmax()])
                    of_step += (wanted - float(q(mine, t)[a])) ** 2 / 4
                    stays = gamma * float(q(other, t)[q(mine, t).argmax()])
                    compared = [float(q(mine, t)[a])]
                    for i in (others[step] + 1).tolist() if model.config.q_negatives else []:
                        if i != a:
                            of_step += (stays - float(q(mine, t)[i])) ** 2 / 4
                            compared.append(float(q(mine, t)[i]))
                    advantages.append(compared[0] - np.mean(compared))
                q_losses.append(of_step)
                if r > 0:
                    scores = table[1:] @ outputs[t]
                    weight = np.clip(np.mean(advantages), 0, 10) if name == "sa2c" else 1.0
                    a_losses.append(weight * float(scores.logsumexp(0) - scores[a - 1]))
                step += 1
    assert step == 8 and any(a_losses)
    assert float(parts["q"]) == pytest.approx(np.mean(q_losses), rel=1e-4)
    want = 0.7 * np.mean(q_losses)
    if name != "dqn":
        assert float(parts["action"]) == pytest.approx(np.mean(a_losses), rel=1e-4)
        want += np.mean(a_losses)
    assert float(loss.detach()) == pytest.approx(want, rel=1e-4)
    assert set(parts) == ({"q"} if name == "dqn" else {"q", "action"})


def test_advantages_weigh_after_a_third_of_training() -> None:
    model = model_of("sa2c", 13)
    weighs = []
    for step in range(9):
        model.schedule(step, 9)
        weighs.append(model.weigh)
    assert weighs == [False] * 3 + [True] * 6
    never = model_of("sa2c", 13, actor="supervised")  # SNQN
    never.schedule(8, 9)
    assert not never.weigh


BAIT, PATIENT, NOTHING = 1, 2, 3


def world(count: int, steps: int, gamma: float) -> Sequences:
    """Random items: the bait gives 1, then a step without reward; the patient item gives 0.85."""
    items = torch.randint(1, 4, (count, steps))
    rewards, spoilt = torch.zeros(count, steps), torch.zeros(count, dtype=torch.bool)
    for t in range(steps):
        gain = torch.where(items[:, t] == BAIT, 1.0, torch.where(items[:, t] == PATIENT, 0.85, 0.0))
        rewards[:, t] = torch.where(spoilt, 0.0, gain)
        spoilt = (items[:, t] == BAIT) & ~spoilt
    returns = torch.zeros(count, steps + 1)
    for t in reversed(range(steps)):
        returns[:, t] = rewards[:, t] + gamma * returns[:, t + 1]
    return Sequences(torch.arange(count), items.flatten(), rewards.flatten(),
                     torch.full((count,), steps), torch.zeros(count, dtype=torch.int64),
                     returns[:, :-1].flatten())


def shares_of_best(name: str, gamma: float, **changes: Any) -> dict[int, float]:
    """Return how often each item is ranked first after histories without the bait."""
    model = model_of(name, 4, 1, dim=16, gamma=gamma, steps=6, window=0, targets="all",
                     **changes)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(250):
        model.schedule(step, 250)
        optimizer.zero_grad()
        model(world(64, 6, gamma))[0].backward()
        optimizer.step()
    model.eval()
    asked = Histories(torch.arange(4), torch.tensor([2, 2, 2, 3, 2, 3, 2]), torch.ones(7),
                      torch.tensor([1, 2, 2, 2]))
    best = model.scores(model.encode(asked), torch.arange(1, 4)).argmax(dim=1) + 1
    return {item: float((best == item).float().mean()) for item in (BAIT, PATIENT, NOTHING)}


def test_future_rewards_count() -> None:
    """The log is uniform, so only values distinguish the items, and only future rewards distinguish
    the patient item from the bait."""
    assert shares_of_best("dqn", 0.5, q_negatives=0)[PATIENT] == 1
    assert shares_of_best("dqn", 0.0, q_negatives=0)[BAIT] == 1
    assert shares_of_best("sa2c", 0.5, q_negatives=1)[PATIENT] == 1


# ---- graded rewards ------------------------------------------------------------------------------

WHOLE = PreprocessOptions(min_count=1, valid="0", test="0")
RATED = DataOptions(k_core=1, reward_offset=7.0, reward_scale=3.0)
CONFIG = CDT4RecConfig(dim=16, steps=10, window=5, layers=1, negatives=0, reward_loss="mse")


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, int]]:
    """Write a file in which 60 users rate 15 of 30 items; return its path and the rating (1 to 10)
    of each item, which is the same for all users."""
    path = tmp_path_factory.mktemp("graded") / "log.csv"
    rng = np.random.default_rng(0)
    rating = {item: 1 + item % 10 for item in range(30)}
    rows = [(u, int(i), rating[int(i)], 1000 * t + u) for u in range(60)
            for t, i in enumerate(rng.permutation(30)[:15])]
    path.write_text("user,item,rating,time\n" + "".join(
        f"{u},{i},{r},{t}\n" for u, i, r, t in rows))
    return path, rating


def load(log: Path, out: Path, options: DataOptions, **choice: object) -> Interactions:
    recipe = generic_recipe("csv", Choice(["user", "item"], time="time", **choice))  # type: ignore[arg-type]
    preprocess(recipe, [str(log)], out, WHOLE)
    return load_interactions(out, options)


def raw_items(folder: Path, data: Interactions) -> np.ndarray:
    """The item names in the log of `data.items`, as numbers."""
    table = pq.read_table(folder / "vocabulary" / "item.parquet").to_pydict()
    name = dict(zip(table["id"], map(int, table["value"]), strict=True))
    return np.array([name[i] for i in data.item_ids[data.items]])


def test_ratings_become_rewards_and_targets(log: tuple[Path, dict[int, int]], tmp_path: Path
                                            ) -> None:
    path, rating = log
    data = load(path, tmp_path / "graded", RATED, label="rating:number")
    grades = np.array([rating[i] for i in raw_items(tmp_path / "graded", data)])
    np.testing.assert_array_equal(data.rewards, ((grades - 7) / 3).astype(np.float32))
    # The targets are those of a threshold: of reward > 0, or rated 8 or higher.
    binary = load(path, tmp_path / "binary", DataOptions(k_core=1), label="rating", threshold=8.0)
    for one, other in ((data.valid, binary.valid), (data.test, binary.test)):
        assert all(np.array_equal(getattr(one, f.name), getattr(other, f.name))
                   for f in dataclasses.fields(one))
    assert data.test.users.size > 50


def test_the_command_line_and_log1p(log: tuple[Path, dict[int, int]], tmp_path: Path) -> None:
    path, rating = log
    done = run_here("preprocess", "csv", str(path), "-o", str(tmp_path / "out"), "--label",
                    "rating:log1p", "--sparse", "user,item", "--time", "time", "--valid", "0",
                    "--min-count", "1")
    assert done.returncode == 0, done.stderr
    assert Folder.open(tmp_path / "out").has_graded_labels
    data = load_interactions(tmp_path / "out", DataOptions(k_core=1))
    grades = np.array([rating[i] for i in raw_items(tmp_path / "out", data)])
    np.testing.assert_allclose(data.rewards, np.log1p(grades), rtol=1e-6)


def test_the_reward_head_learns_the_grades(log: tuple[Path, dict[int, int]], tmp_path: Path
                                           ) -> None:
    path, rating = log
    data = load(path, tmp_path / "graded", RATED, label="rating:number")
    model = fit("cdt4rec", CONFIG, data, 1, FitOptions(epochs=30, lr=1e-2, batch_size=32,
                                                       eval_every=30)).model
    users = np.arange(1, 11)
    rows, lengths = data.rows_between(data.offsets[users], data.train_stop[users])
    histories = Histories(*(torch.from_numpy(x) for x in (
        users, data.items[rows], data.rewards[rows], lengths)))
    with torch.no_grad():
        found = model.rewards(model.encode(histories), torch.arange(1, data.num_items))
    name = dict(zip(data.items, raw_items(tmp_path / "graded", data), strict=True))
    wanted = np.array([(rating[name[i]] - 7) / 3 for i in range(1, data.num_items)])
    error = np.abs(found.numpy() - wanted).mean()
    assert error < 0.25 * np.abs(wanted - wanted.mean()).mean()


def test_unsuitable_uses_of_grades_are_refused(log: tuple[Path, dict[int, int]], tmp_path: Path
                                               ) -> None:
    path, _ = log
    data = load(path, tmp_path / "graded", RATED, label="rating:number")
    with pytest.raises(InvalidInputError, match="mse"):
        fit("cdt4rec", dataclasses.replace(CONFIG, reward_loss="bce"), data, 1, FitOptions())
    with pytest.raises(InvalidInputError, match=r"model of clicks.*numbers.*0 and 1"):
        ClickTask(TrainConfig(data=str(tmp_path / "graded")))
    with pytest.raises(InvalidInputError, match="no threshold"):
        generic_recipe("csv", Choice(["item"], "rating:number", threshold=4.0))
    with pytest.raises(InvalidInputError, match="reward_scale"):
        DataOptions(reward_scale=0.0)
    for beyond in (DataOptions(reward_scale=1e-45), DataOptions(reward_offset=1e300)):
        with pytest.raises(InvalidInputError, match="expected finite rewards"):
            load_interactions(tmp_path / "graded", beyond)


def test_a_bad_number_is_a_bad_row(tmp_path: Path) -> None:
    """Blocks without any good row do not change the type of the labels."""
    path = tmp_path / "log.csv"
    path.write_text("user,item,rating,time\n1,1,bad,1\n" + "".join(
        f"{u},{i},{i / 4},{i}\n" for u in range(4) for i in range(4)))
    for name in ("first", "second"):
        (tmp_path / f"{name}.csv").write_text("user,item,rating,time\n1,1,bad,1\n")
    recipe = generic_recipe("csv", Choice(["user", "item"], "rating:number", time="time"))
    found = preprocess(recipe, [str(tmp_path / "first.csv"), str(path),
                                str(tmp_path / "second.csv")], tmp_path / "out",
                       dataclasses.replace(WHOLE, max_bad=3))
    assert found["bad_rows"]["count"] == 3 and found["rows"]["train"] == 16
    assert load_interactions(tmp_path / "out", DataOptions(k_core=1)).rewards.max() == 0.75


# ---- returning customers -------------------------------------------------------------------------

SHOP = synthetic_shop(0, Returning())


class OneAnswer(nn.Module):
    """A page network with which every page gets three clicks and the same second attribute."""

    def __init__(self, attribute: int) -> None:
        super().__init__()
        self.logits = torch.full((21,), -1e3)
        self.logits[3] = self.logits[11 + attribute] = 0

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        return self.logits.expand(seen.shape[0], -1)


def shop_of(attribute: int) -> Shop:
    return replace(SHOP, page=OneAnswer(attribute))


def test_satisfaction_is_a_moving_average() -> None:
    visits = Visits(shop_of(9), 50, seed=3)
    want, before = 4.5, visits.observe()
    assert before.shape == (50, OBSERVATION_DIM + 3)
    for _ in range(4):
        here = ~visits.done
        visits.step(torch.zeros(50, ACTION_DIM))
        want = 0.7 * want + 0.3 * 9
        torch.testing.assert_close(visits.satisfaction[here], torch.full((int(here.sum()),), want))
    now = visits.observe()
    assert torch.equal(now[:, :NUM_FEATURES], before[:, :NUM_FEATURES])
    assert torch.equal(now[:, VISITS], visits.visits.float())


def test_customers_return_as_the_parameters_state() -> None:
    """Compare return rates and mean days with the formulas, for visits of one page."""
    count = 20_000
    visits = Visits(shop_of(9), count, seed=3)
    visits._patience[:] = 1
    visits.step(torch.zeros(count, ACTION_DIM))
    discontent = 1 - (0.7 * 4.5 + 0.3 * 9) / 9
    assert float(visits.done.float().mean()) == pytest.approx(0.3 * discontent, abs=0.01)
    back = ~visits.done
    assert float((visits.day[back] - 1).float().mean()) == pytest.approx(1 + 9 * discontent,
                                                                          abs=0.05)
    assert bool((visits.visits[back] == 2).all()) and not visits.page[back].any()
    assert bool((visits.day[~back] == 1).all()) and bool((visits.visits[~back] == 1).all())


def test_shown_pages_decide_how_often_customers_return() -> None:
    def per_customer(shop: Shop) -> float:
        log = offline.collect_episodes(shop, offline.random_policy, 200, 1)
        days = log.steps.states[..., OBSERVATION_DIM][log.steps.valid]
        assert days.min() >= 1 and days.max() <= 30
        assert torch.equal(log.steps.rewards, 3.0 * log.steps.valid)
        return float(log.steps.states[..., VISITS].amax(dim=1).mean())

    assert per_customer(shop_of(9)) > 3 * per_customer(shop_of(0))
    short = replace(SHOP, returning=Returning(horizon=1))
    once = offline.collect_episodes(short, offline.random_policy, 50, 1).steps
    assert not (once.states[..., VISITS] > 1).any()
    with pytest.raises(InvalidInputError, match="horizon"):
        Returning(horizon=0)


def test_maximising_only_clicks_reduces_visits() -> None:
    """For the same customers, maximising each page's clicks gives fewer clicks in total."""
    torch.manual_seed(0)
    oracles = (offline.Oracle(SHOP, 1, 20, weights=(w,)) for w in (0.0, 1.5))
    greedy, patient = (offline.collect_episodes(SHOP, oracle, 60, 5) for oracle in oracles)
    rate = [e.clicks.sum() / e.pages.sum() for e in (greedy, patient)]
    assert rate[0] > rate[1] and patient.clicks.mean() > 1.4 * greedy.clicks.mean()
    assert torch.equal(greedy.steps.states[:, 0], patient.steps.states[:, 0])


def test_the_gymnasium_environment_continues_after_a_visit() -> None:
    from gymnasium.utils.env_checker import check_env

    from oper.rl_rec.simulation.environment import ShopEnvironment

    env = ShopEnvironment(shop_of(9))
    check_env(env, skip_render_check=True)
    first, _ = env.reset(seed=2)
    done, days = False, []
    while not done:
        observation, reward, done, _, info = env.step(np.zeros(ACTION_DIM, np.float32))
        assert env.observation_space.contains(observation) and reward == 3
        assert (observation[:NUM_FEATURES] == first[:NUM_FEATURES]).all()
        days.append(info["day"])
    assert days == sorted(days) and info["visits"] > 3


def log_of(rewards: torch.Tensor, actions: torch.Tensor, states: torch.Tensor) -> offline.Episodes:
    """Make a log with visits of one page, and a second visit of every other customer."""
    count = rewards.shape[0]
    valid = torch.ones(count, 2, dtype=torch.bool)
    valid[::2, 1] = False
    rewards = torch.where(valid, rewards, 0)
    returns = rewards.flip(1).cumsum(1).flip(1)
    return offline.Episodes(Trajectories(states, actions, rewards, returns, valid), "test")


def test_transitions() -> None:
    torch.manual_seed(0)
    states, actions = torch.rand(6, 2, OBSERVATION_DIM), torch.rand(6, 2, ACTION_DIM)
    log = log_of(torch.arange(12.0).view(6, 2), actions, states).steps
    every = Transitions.of(log, 100)
    assert every.states.shape == (9, OBSERVATION_DIM)  # three customers have one page, three two
    torch.testing.assert_close(every.rewards, log.rewards[log.valid] / 10)
    first = log.valid & torch.tensor([True, False])
    goes_on = (first & log.valid[:, 1:])[log.valid]
    assert torch.equal(every.goes_on, goes_on.float()) and int(goes_on.sum()) == 3
    torch.testing.assert_close(every.next_states[goes_on], states[1::2, 1])
    some = Transitions.of(log, 4)
    assert some.states.shape[0] == 4
    assert len({tuple(row) for row in some.states.tolist()}) == 4


def random_steps(count: int = 8) -> Trajectories:
    torch.manual_seed(0)
    return log_of(torch.rand(count, 2), torch.rand(count, 2, ACTION_DIM),
                  torch.rand(count, 2, OBSERVATION_DIM)).steps


@pytest.mark.parametrize("method", METHODS)
def test_losses_have_gradients_for_their_networks_only(method: str) -> None:
    log = random_steps()
    model = METHODS[method](log)
    step = Transitions.of(log, 50)

    def touched(loss: torch.Tensor) -> set[str]:
        model.zero_grad(set_to_none=True)
        loss.backward()
        return {name.split(".")[0] for name, p in model.named_parameters() if p.grad is not None}

    own = {"actor", *(["value"] if method == "iql" else [])} if method != "dqn" else set()
    assert touched(model(log)) == {"critics"} | own
    if own:
        assert {"actor"} <= touched(model.actor_loss(step)) <= own
    assert all(p.requires_grad for p in model.critics.parameters())


def test_target_networks_follow() -> None:
    """Each step moves the target critics by the share `FOLLOWED` towards the trained ones."""
    log = random_steps()
    model = METHODS["td3+bc"](log)
    with torch.no_grad():
        for p in model.critics.parameters():
            p.add_(1)
    before = [p.clone() for p in model.slow_critics.parameters()]
    model(log)
    for old, new in zip(before, model.slow_critics.parameters(), strict=True):
        torch.testing.assert_close(new - old, torch.full_like(old, FOLLOWED), atol=1e-6, rtol=0)


@pytest.mark.parametrize("method", ["cloned", *METHODS])
def test_learned_policies_do_better_than_the_log(method: str) -> None:
    """Clicks grow with the action's first number, whose mean in the log is 0."""
    torch.manual_seed(1)
    states, actions = torch.rand(400, 2, OBSERVATION_DIM), torch.rand(400, 2, ACTION_DIM) * 2 - 1
    log = log_of(5 + 5 * actions[..., 0], actions, states)
    options = offline.OfflineOptions(steps=300, batch_size=128)
    past = log.steps._replace(states=log.steps.states[:, :1])
    policy = (offline.clone_behaviour(log, options, 1) if method == "cloned"
              else train_actor_critic(method, log, options, 1))
    first = float(policy(past)[:, 0].mean().detach())
    assert abs(first) < 0.1 if method == "cloned" else first > 0.2


def test_dqn_is_double_q_learning_over_actions_of_the_log() -> None:
    """Compare with loops over choices; the policy takes the best choice."""
    log = random_steps(60)
    model = DQN(log)
    logged = {tuple(x) for x in log.actions[log.valid].tolist()}
    assert len(model.choices) == CHOICES and {tuple(x) for x in model.choices.tolist()} <= logged
    with torch.no_grad():
        for p in model.slow_critics.parameters():  # another network, that does not choose
            p.copy_(p.flip(0))
        states = log.states[:5, 0]
        found = model.next_value(states)
        for n in range(5):
            fast, slow = ([sum(float(critic(torch.cat([states[n], choice]))) / 2
                               for critic in critics) for choice in model.choices]
                          for critics in (model.critics, model.slow_critics))
            best = int(np.argmax(fast))
            assert best != int(np.argmax(slow))
            assert float(found[n]) == pytest.approx(slow[best], abs=1e-5)
            assert torch.equal(model.best(states[n:n + 1])[0], model.choices[best])
        past = log._replace(states=log.states[:, :1])
        assert torch.equal(model.policy()(past), model.best(offline.normalised(past.states[:, 0])))


def test_dqn_learns_delayed_rewards() -> None:
    """A positive action earns 1 and ends the visit; a negative one earns 0 now and 3 on the next
    page."""
    torch.manual_seed(1)
    states, actions = torch.zeros(400, 2, OBSERVATION_DIM), torch.rand(400, 2, ACTION_DIM) * 2 - 1
    states[:, 1] = 1.0
    at_once = actions[:, 0, 0] > 0
    valid = torch.stack([torch.ones_like(at_once), ~at_once], 1)
    rewards = torch.stack([at_once.float(), 3.0 * ~at_once], 1)
    log = offline.Episodes(Trajectories(states, actions, rewards, rewards, valid), "test")
    policy = train_actor_critic("dqn", log, offline.OfflineOptions(steps=150, batch_size=128), 1)
    chosen = policy(log.steps._replace(states=states[:1, :1]))
    assert float(chosen[0, 0]) < 0


def test_subsequences_of_long_visits() -> None:
    """All positions of a long visit are drawn, and none past its end."""
    torch.manual_seed(0)
    log = offline.offline_dataset(SHOP, "random", 40, seed=1)
    seen = torch.zeros_like(log.steps.valid)
    model = nn.Linear(1, 1)

    def loss_of(batch: Trajectories) -> torch.Tensor:
        assert batch.valid.shape[1] <= 4 and bool(batch.valid[:, 0].all())
        for row, valid in zip(batch.returns, batch.valid, strict=True):
            at = (log.steps.returns.unfold(1, 4, 1) == row).all(-1).nonzero()
            seen[at[:, :1], at[:, 1:] + torch.arange(4)[valid]] = True
        return model(torch.zeros(1)).sum()

    options = offline.OfflineOptions(steps=200, batch_size=16)
    offline.train_offline(model, loss_of, log, options, window=4)
    whole = log.steps.valid & (log.steps.returns > 0)
    assert bool(seen[whole].all())


def test_an_unknown_method_is_refused() -> None:
    log = log_of(torch.rand(4, 2), torch.rand(4, 2, ACTION_DIM),
                 torch.rand(4, 2, OBSERVATION_DIM))
    with pytest.raises(InvalidInputError, match="method"):
        train_actor_critic("ppo", log, offline.OfflineOptions(steps=1), 1)
    for missing in (lambda x: x.policy(), lambda x: x.next_value(log.steps.states)):
        with pytest.raises(NotImplementedError):
            missing(Critics(log.steps))
