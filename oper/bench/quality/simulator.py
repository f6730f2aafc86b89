"""``oper bench simulator``: policies learned from a log and tested in a simulated shop."""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from oper.bench.calibrate.calibrate import spearman
from oper.bench.core.launch import Progress
from oper.bench.quality import kept
from oper.rl_rec.intervals import bootstrap, difference
from oper.rl_rec.simulation.actor_critic import METHODS, train_actor_critic
from oper.rl_rec.simulation.clicks import click_through_rate
from oper.rl_rec.simulation.offline import (
    SIMULATOR_CONFIG,
    Episodes,
    OfflineOptions,
    Oracle,
    Policy,
    ReturnPolicy,
    calibrated_target,
    clone_behaviour,
    collect_episodes,
    graded_policy,
    high_return,
    offline_dataset,
    random_policy,
    train_cdt4rec,
)
from oper.rl_rec.simulation.shop import (
    VISITS,
    Returning,
    Shop,
    load_virtual_taobao,
    synthetic_shop,
)
from oper.support.flags import whole

LOG_SEED, CUSTOMERS_SEED, CALIBRATION_SEED = 5, 1_000_003, 2_000_003
_QUANTILES = (0.1, 0.5, 0.9)  # quantiles of the logged visits' clicks requested from CDT4Rec
# For returning customers: the log's grade; the quantiles of its returns that are requested from
# CDT4Rec; and the quantile at which CDT4Rec and the Decision Transformer are compared.
GRADE, QUANTILES, ASKED = "mixed", (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.99), 0.9
_CDT4REC, _CONTROLLED = "cdt4rec", "cdt4rec, estimated returns"
# Arrays by seed: requested returns; mean clicks achieved for them, without and with calibrated
# targets; least and highest mean clicks of the customers that were served for the calibration.
_CONTROL = ("asked", "served", "calibrated", "reach")
FIGURES = (
    ("policies.*.return", "policies.*.visits", "policies.*.cdt4rec_less", "policies.*.by_seed",
     "asked.spearman", "asked.spearman_calibrated"),
    ("policies.*.step", "policies.*.episode", "policies.*.by_seed"))
NOTE = ("step: clicks per shown item (ten to a page); episode: its mean over visits; return: "
        "clicks per returning customer\nbootstrap over customers and seeds; simulated customers: "
        "no statement on a real shop\n")


@dataclass(frozen=True, slots=True)
class Case:
    """Policies learned from one log of visits.

    Attributes:
        name: the case's name in the record.
        grade: grade of the logging policy.
        num_logged: number of logged visits.
        num_served: number of visits served by every policy, with the same customers.
        steps: gradient steps per training.
        num_seeds: number of trainings, with seeds from 1.
        weights: folder of VirtualTaobao's weights; None = a shop of random networks.
    """

    name: str
    grade: str
    num_logged: int = 2000
    num_served: int = 500
    steps: int = 600
    num_seeds: int = 3
    weights: str | None = None

    def measure(self, progress: Progress) -> dict[str, Any]:
        """Collect, train and serve; returns the record's entry."""
        shop = shop_of(self.weights)

        def serve(policy: Policy) -> Episodes:
            return collect_episodes(shop, policy, self.num_served, CUSTOMERS_SEED)

        progress(f"logging {self.num_logged} visits")
        log = offline_dataset(shop, self.grade, self.num_logged, LOG_SEED)
        served: dict[str, list[Episodes]] = {"behaviour": [log], "random": [serve(random_policy)],
                                             "oracle": [serve(Oracle(shop))]}
        options = OfflineOptions(steps=self.steps)
        targets = {f"cdt4rec, return of quantile {q}": high_return(log, q) for q in _QUANTILES}
        repeated = True
        for seed in range(1, self.num_seeds + 1):
            progress(f"behaviour cloning, seed {seed}")
            served.setdefault("behaviour cloning", []).append(
                serve(clone_behaviour(log, options, seed)))
            progress(f"CDT4Rec, seed {seed}")
            model = train_cdt4rec(log, SIMULATOR_CONFIG(), options, seed)
            for name, target in targets.items():
                served.setdefault(name, []).append(serve(ReturnPolicy(model, target)))
            again = serve(ReturnPolicy(model, target))
            repeated &= bool((again.clicks == served[name][-1].clicks).all())
        return {"shop": shop.name, "case": asdict(self), "seeds": self.num_seeds,
                "config": asdict(SIMULATOR_CONFIG()), "fit": asdict(options), "targets": targets,
                "policies": {name: _rates(e) for name, e in served.items()}, "verified": repeated}


def cases(quick: bool, seeds: int = 3, weights: str | None = None, runs: str | None = None
          ) -> list[Any]:
    """A case per grade, and one with returning customers; if `quick`, small ones for one grade."""
    found: list[Any] = [*(Case(grade, grade) for grade in ("random", "medium", "expert")),
                        RetentionCase("retention", GRADE, 1000, 300, runs=runs)]
    if quick:
        found = [Case("medium", "medium", 120, 60, 40),
                 RetentionCase("retention", GRADE, 60, 30, 20, short_steps=20, runs=runs)]
    return [replace(case, num_seeds=seeds, weights=weights) for case in found]


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=whole(1), default=3, metavar="N",
                        help="train from seeds 1..N (default 3)")
    parser.add_argument("--weights", metavar="DIR",
                        help="folder of VirtualTaobao's three weight files (default: a shop of "
                             "random networks)")
    parser.add_argument("--runs", metavar="DIR",
                        help="save the results of each seed of the case retention in this "
                             "folder, and reuse saved results of the same source files")


def _rates(served: Sequence[Episodes]) -> dict[str, Any]:
    """Click-through rates of all seeds, with intervals over customers and seeds, and of each seed.
    """
    clicks, pages = (np.stack([getattr(e, n) for e in served]) for n in ("clicks", "pages"))
    joint = {kind: x.to_json() for kind, x in click_through_rate(clicks, pages).items()}
    return {**joint, "by_seed": [e.clicks.sum() / e.pages.sum() / 10 for e in served],
            "visits": pages.size, "pages_per_visit": pages.mean()}


# ---- returning customers -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RetentionCase(Case):
    """Policies learned from a log of returning customers: numbers are of customers, not visits.

    Attributes:
        short_steps: training steps of all methods except CDT4Rec and the Decision Transformer;
            their steps take a fraction of the time, with half as many customers per batch.
        runs: folder in which every seed's outcomes are stored; None = store nothing.
    """

    short_steps: int = 1500
    runs: str | None = None

    def measure(self, progress: Progress) -> dict[str, Any]:
        """Log, train and serve, with a separate log for each seed; returns the record's entry."""
        shop = shop_of(self.weights, Returning())

        def serve(policy: Policy, customers: int = CUSTOMERS_SEED) -> np.ndarray:
            torch.manual_seed(customers)
            return _outcome(collect_episodes(shop, policy, self.num_served, customers))

        progress("policies that learn nothing")
        served = {"random": [serve(random_policy)],
                  "behaviour": [serve(graded_policy(shop, self.grade))],
                  "oracle of clicks": [serve(Oracle(shop, 1))],
                  "oracle of clicks and return": [serve(Oracle(shop, 1, weights=(1.5,)))]}
        control: dict[str, list[list[float]]] = {}
        repeated = True
        for seed in range(1, self.num_seeds + 1):
            found = kept.once(self._place(seed), functools.partial(
                self._learn, shop, serve, seed, progress))
            for name in _CONTROL:
                control.setdefault(name, []).append(found.pop(name).tolist())
            repeated &= bool(found.pop("repeated"))
            for name, outcome in found.items():
                served.setdefault(name, []).append(outcome)
        assert shop.returning is not None
        return {"shop": shop.name, "returning": asdict(shop.returning),
                "case": asdict(replace(self, runs=None)), "seeds": self.num_seeds,
                "config": asdict(SIMULATOR_CONFIG()),
                "policies": _figures(served, self.num_seeds), "asked": _control(control),
                "verified": repeated}

    def _learn(self, shop: Shop, serve: Callable[..., np.ndarray], seed: int,
               progress: Progress) -> dict[str, np.ndarray]:
        """Return outcomes by policy learned from a seed's log; for CDT4Rec with estimated returns,
        the arrays named in `_CONTROL`; and ``repeated`` (whether serving again gave equal clicks).
        """
        estimated = SIMULATOR_CONFIG()
        logged = replace(estimated, returns="logged")
        plain = replace(logged, backbone="interleaved", reward_weight=0.0)
        options, short = OfflineOptions(self.steps), OfflineOptions(self.short_steps, batch_size=32)
        progress(f"log {seed}")
        log = offline_dataset(shop, self.grade, self.num_logged, LOG_SEED + 1000 * seed)
        asked = [high_return(log, q) for q in QUANTILES]
        chosen = QUANTILES.index(ASKED)
        progress(f"{_CONTROLLED}, seed {seed}")
        model = train_cdt4rec(log, estimated, options, seed)
        answers = [serve(ReturnPolicy(model, target)) for target in asked]
        again = serve(ReturnPolicy(model, asked[chosen]))
        # Calibrate on other customers than those who are served afterwards.
        targets = [0.0, *asked]
        before = [float(serve(ReturnPolicy(model, target), CALIBRATION_SEED)[CLICKS].mean())
                  for target in targets]
        calibrated = [serve(ReturnPolicy(model, calibrated_target(wanted, targets, before)))
                      for wanted in asked]
        found = {_CONTROLLED: answers[chosen]}
        for name, other in ((_CDT4REC, logged), ("decision transformer", plain)):
            progress(f"{name}, seed {seed}")
            found[name] = serve(ReturnPolicy(train_cdt4rec(log, other, options, seed),
                                             asked[chosen]))
        progress(f"behaviour cloning and critics, seed {seed}")
        found["behaviour cloning"] = serve(clone_behaviour(log, short, seed))
        for method in METHODS:
            found[method] = serve(train_actor_critic(method, log, short, seed))
        return found | {
            "asked": np.array(asked), "served": np.array([x[CLICKS].mean() for x in answers]),
            "calibrated": np.array([x[CLICKS].mean() for x in calibrated]),
            "reach": np.array([min(before), max(before)]),
            "repeated": np.array((again[CLICKS] == answers[chosen][CLICKS]).all())}

    def _place(self, seed: int) -> Path | None:
        """The file of a seed's outcomes; None without a folder."""
        about = {**asdict(self), "num_seeds": seed, "runs": None}
        return kept.place(self.runs, f"{self.name}-{seed}",
                          json.dumps(about, sort_keys=True).encode(),
                          Path(__file__).read_bytes())


CLICKS, VISITED, PAGES = range(3)  # rows of an outcome


def _outcome(episodes: Episodes) -> np.ndarray:
    """Clicks, visits and pages by customer, float64 [3, N]."""
    counted = torch.where(episodes.steps.valid, episodes.steps.states[..., VISITS], 0)
    return np.stack([episodes.clicks, counted.amax(dim=1).double().numpy(), episodes.pages])


def _figures(served: Mapping[str, Sequence[np.ndarray]], num_seeds: int) -> dict[str, Any]:
    """By policy: clicks and visits per customer, with intervals over customers and seeds. The
    single outcome of a policy without training is used for every seed."""
    every = {name: np.stack(runs, axis=1) for name, runs in served.items()}  # [3, seeds, N]
    clicks = {name: np.tile(x[CLICKS], (num_seeds // x.shape[1], 1)) for name, x in every.items()}
    return {name: {"return": bootstrap(clicks[name]).to_json(),
                   "visits": bootstrap(x[VISITED]).to_json(),
                   "cdt4rec_less": difference(clicks[_CDT4REC], clicks[name]).to_json(),
                   "pages": x[PAGES].mean(), "by_seed": x[CLICKS].mean(axis=1)}
            for name, x in every.items()}


def _control(found: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, Any]:
    """Return the arrays named in `_CONTROL` by seed, the rank correlation of requested and achieved
    returns by seed, and the mean relative errors by quantile."""
    asked = np.array(found["asked"])
    result: dict[str, Any] = {"quantiles": QUANTILES} | {name: found[name] for name in _CONTROL}
    for name, suffix in (("served", ""), ("calibrated", "_calibrated")):
        got = np.array(found[name])
        orders = []
        for wanted, achieved in zip(asked, got, strict=True):
            _, at = np.unique(wanted, return_index=True)  # small logs have quantiles that are equal
            orders.append(spearman(wanted[at], achieved[at]))
        result["spearman" + suffix] = orders
        result["relative_error" + suffix] = (np.abs(got - asked) / asked.clip(min=1)).mean(0)
    return result


def shop_of(weights: str | None, law: Returning | None = None) -> Shop:
    """VirtualTaobao's shop from the networks in the file `weights`, or, with None, a synthetic shop
    of random networks. `law`: when customers return; None = they do not."""
    return load_virtual_taobao(weights, law) if weights else synthetic_shop(returning=law)
