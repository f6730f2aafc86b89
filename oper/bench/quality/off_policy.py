"""``oper bench off-policy``: off-policy estimators, tested where the policy's value is known."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from oper.bench.core.launch import Progress
from oper.bench.core.workload import data_files
from oper.data import PreprocessOptions, load_recipe, preprocess
from oper.data.recipe import Column, Join, Layout
from oper.rl_rec.intervals import bootstrap
from oper.rl_rec.models.base import Histories
from oper.rl_rec.models.item_to_item import EASEConfig, ItemToItem
from oper.rl_rec.off_policy.estimators import Groups, estimate
from oper.rl_rec.off_policy.log import BanditColumns, LoggedBandit, load_bandit
from oper.rl_rec.off_policy.policies import action_shares, recommender_policy, softmax_policy
from oper.rl_rec.off_policy.simulated import SimulatedLog, simulate_log
from oper.support.flags import whole

_CATEGORY = "item_feature_1"
_LOGS = {"random": "open_bandit/random/women/women.csv*",
         "thompson": "open_bandit/bts/women/women.csv*"}
COVERAGE = (0.93, 0.97)  # allowed share of logs whose 95 % interval covers the true value
_RECOMMENDER = "simulated/recommender"
FIGURES = (("coverage.*", "bias.*", "rmse.*"), ("estimates.*", "on_policy", "effective_rows"))
NOTE = ("coverage at 95 %; dm, switch-dr and dros use a model of the reward: its bias is not "
        "in their intervals; bootstrap over visitors of equal features\n")


@dataclass(frozen=True, slots=True)
class Case:
    """Logs of one policy, from which the value of another policy is estimated.

    Attributes:
        name: ``simulated/...`` or ``open-bandit/LOG-log/TARGET``; in ``simulated/recommender`` the
            evaluated policy is EASE.
        log, target: logging and evaluated policy of Open Bandit, each ``"random"`` or
            ``"thompson"``; ``""`` = simulated.
        num_logs: number of simulated logs.
        rows: rows per simulated log.
        per_visitor: rows per simulated visitor.
        samples: bootstrap samples per interval.
    """

    name: str
    log: str = ""
    target: str = ""
    num_logs: int = 1000
    rows: int = 2000
    per_visitor: int = 1
    samples: int = 1000

    def measure(self, progress: Progress) -> dict[str, Any]:
        """Estimate; returns the record's entry."""
        return {"case": dataclasses.asdict(self), "samples": self.samples,
                **(_open_bandit(self) if self.log else _simulated(self, progress))}


def cases(quick: bool, samples: int = 1000) -> list[Case]:
    """Cases for simulated logs and, if the files exist, Open Bandit's logs."""
    found = [Case("simulated/rows"), Case("simulated/visitors", per_visitor=5),
             Case(_RECOMMENDER)]
    if quick:
        found = [dataclasses.replace(case, num_logs=20, rows=500) for case in found]
    if all(map(data_files, _LOGS.values())):
        found += [Case(f"open-bandit/{log}-log/{target}", log, target)
                  for log in _LOGS for target in _LOGS]
    return [dataclasses.replace(case, samples=samples) for case in found]


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--samples", type=whole(1), default=1000, metavar="N",
                        help="bootstrap samples of an interval (default 1000)")
    parser.epilog = ("Open Bandit's logs are read from the folder in OPER_DATA; without "
                     "them, only simulated logs are used.")


def _simulated(case: Case, progress: Progress) -> dict[str, Any]:
    covered: dict[str, list[bool]] = {}
    errors: dict[str, list[float]] = {}
    value = 0.0
    for seed in range(case.num_logs):
        if seed % 100 == 0:
            progress(f"log {seed} of {case.num_logs}")
        s = (served_users(case.rows, seed) if case.name == _RECOMMENDER else
             simulate_log(case.rows, seed, case.per_visitor))
        value = s.value
        found = estimate(s.log, s.target, groups=s.groups, clusters=s.visitors,
                         samples=case.samples)
        for name, i in found.intervals.items():
            covered.setdefault(name, []).append(i.low <= value <= i.high)
            errors.setdefault(name, []).append(i.mean - value)
    shares = {name: float(np.mean(inside)) for name, inside in covered.items()}
    # With few logs, allow three standard deviations of a share of 0.95 beyond the limits.
    slack = 3 * (0.95 * 0.05 / case.num_logs) ** 0.5 if case.num_logs < 1000 else 0.0
    return {"value": value, "coverage": shares,
            "bias": {n: np.mean(e) for n, e in errors.items()},
            "rmse": {n: np.sqrt(np.mean(np.square(e))) for n, e in errors.items()},
            "verified": all(COVERAGE[0] - slack <= share <= COVERAGE[1] + slack
                            for share in shares.values())}


@functools.cache
def _shop_of_tastes() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For 300 users and 12 products: 1 where a product suits a user's taste, EASE's policy, and a
    logging policy by popularity; float64 [300, 12] each."""
    rng = np.random.default_rng(0)
    users, products, tastes = 300, 12, 3
    suits = (np.arange(users)[:, None] % tastes == np.arange(products) % tastes).astype(float)
    bought = rng.random((users, products)) < 0.1 + 0.4 * suits
    rows, items = np.nonzero(bought)
    histories = Histories(torch.arange(users), torch.from_numpy(items + 1), torch.ones(items.size),
                          torch.from_numpy(np.bincount(rows, minlength=users)))
    model = ItemToItem(EASEConfig(l2=20.0), histories, products + 1)
    target = recommender_policy(model, histories, torch.arange(1, products + 1), 0.1, 0.1)
    popular = softmax_policy(np.tile(bought.mean(0), (users, 1)), 0.1, 0.3)
    return suits, target, popular


def served_users(rows: int, seed: int) -> SimulatedLog:
    """Simulate a log of the popularity policy, with EASE as the evaluated policy and the products'
    tastes as action groups."""
    suits, target, popular = _shop_of_tastes()
    users, products = suits.shape
    chances = 0.05 + 0.4 * suits
    rng = np.random.default_rng((seed, 2))
    user = rng.integers(0, users, rows)
    action = (popular[user].cumsum(1) > rng.random((rows, 1))).argmax(1)
    rewards = rng.random(rows) < chances[user, action]
    taste = user % 3
    log = LoggedBandit(taste[:, None], action, taste, rewards.astype(np.float32),
                       popular[user, action], products, 3, (3,))
    return SimulatedLog(log, target[user], float((target * chances).sum(1).mean()),
                        chances[user], Groups(np.arange(products) % 3, popular[user]), user)


def _open_bandit(case: Case) -> dict[str, Any]:
    logs = open_bandit()
    log, own = logs[case.log], logs[case.target]
    assert log.action_groups is not None
    policies = {name: (np.full((log.actions.size, log.num_actions), 1 / log.num_actions)
                       if name == "random" else action_shares(log, of))
                for name, of in logs.items()}
    # The log has no visitor ids, so rows with equal features form a cluster.
    visitors, own_visitors = (np.unique(x.context, axis=0, return_inverse=True)[1].reshape(-1)
                              for x in (log, own))
    found = estimate(log, policies[case.target], clusters=visitors, samples=case.samples,
                     groups=Groups(log.action_groups, policies[case.log]))
    # The target's click rate in its own log: IPS with propensity 1 for each shown action.
    shown = np.zeros((own.actions.size, own.num_actions))
    shown[np.arange(own.actions.size), own.actions] = 1.0
    truth = estimate(dataclasses.replace(own, propensities=np.ones(own.actions.size)), shown,
                     clusters=own_visitors, samples=case.samples).intervals["ips"]

    def number(x: float) -> float | None:
        return x if np.isfinite(x) else None  # None: infinite, which equals plain DR

    return {"rows": int(log.actions.size), "clicks": int(log.rewards.sum()),
            "clusters": int(visitors.max()) + 1, "on_policy": truth.to_json(),
            "on_policy_by_row": bootstrap(own.rewards, case.samples).to_json(),
            "estimates": {name: i.to_json() for name, i in found.intervals.items()},
            "threshold": number(found.threshold), "shrinkage": number(found.shrinkage),
            "effective_rows": found.effective_rows, "largest_weight": found.largest_weight,
            "verified": all(np.isfinite([i.low, i.mean, i.high]).all()
                            for i in found.intervals.values())}


@functools.cache
def open_bandit() -> dict[str, LoggedBandit]:
    """Open Bandit's two logs by policy, with common numbering of actions, features and positions;
    an action's group is its item's category."""
    recipe = load_recipe("open-bandit")
    files = [file for pattern in _LOGS.values() for file in data_files(pattern)]
    items = str(Path(files[0]).parent / "item_context.csv")
    recipe = dataclasses.replace(recipe, joins=(*recipe.joins, Join(items, "item_id", Layout(
        "items", (Column("item_id", "sparse", "uint64"), Column(_CATEGORY, "sparse", "string")),
        separator=",", header=True))))
    with tempfile.TemporaryDirectory() as folder:
        preprocess(recipe, files, Path(folder) / "data",
                   PreprocessOptions(min_count=1, valid="0", test="0"))
        both = load_bandit(Path(folder) / "data", BanditColumns(group=_CATEGORY))
    # The random policy's rows are those with uniform propensity. A few rows of Thompson sampling
    # have that propensity, too, and are attributed to the random policy.
    is_random = np.isclose(both.propensities, 1 / both.num_actions)
    return {"random": both.rows(is_random), "thompson": both.rows(~is_random)}

