"""``oper bench simulator``: policies of the simulated shop, learned from a log alone."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from oper.bench.core.launch import Progress
from oper.bench.quality.retention import CUSTOMERS_SEED, LOG_SEED, RetentionCase, shop_of
from oper.rl_rec.simulation.clicks import click_through_rate
from oper.rl_rec.simulation.offline import (
    SIMULATOR_CONFIG,
    Episodes,
    OfflineOptions,
    Oracle,
    Policy,
    ReturnPolicy,
    clone_behaviour,
    collect_visits,
    graded_visits,
    high_return,
    random_policy,
    train_cdt4rec,
)
from oper.support.flags import whole

_QUANTILES = (0.1, 0.5, 0.9)  # of the logged visits' clicks that CDT4Rec is asked for
FIGURES = (
    ("policies.*.return", "policies.*.visits", "policies.*.cdt4rec_less", "policies.*.by_seed",
     "asked.spearman"),
    ("policies.*.step", "policies.*.episode", "policies.*.by_seed"))
NOTE = ("clicks per page and per visit, of customers who come back per customer; bootstrap over "
        "visits or customers and seeds; simulated customers: no statement on a real shop\n")


@dataclass(frozen=True, slots=True)
class Case:
    """One log.

    Attributes:
        name: ``SHOP-GRADE``.
        grade: of the log.
        num_logged: visits in it.
        num_served: visits of every policy, by the same customers.
        steps: gradient steps of a training.
        num_seeds: trainings.
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
        """Collect, train and serve; what stands in the record."""
        shop = shop_of(self.weights)

        def serve(policy: Policy) -> Episodes:
            return collect_visits(shop, policy, self.num_served, CUSTOMERS_SEED)

        progress(f"logging {self.num_logged} visits")
        log = graded_visits(shop, self.grade, self.num_logged, LOG_SEED)
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


def cases(quick: bool, seeds: int = 3, weights: str | None = None) -> list[Any]:
    """A case per grade, and customers who come back; small ones, of a grade, when `quick`."""
    found: list[Any] = [*(Case(grade, grade) for grade in ("random", "medium", "expert")),
                        RetentionCase()]
    if quick:
        found = [Case("medium", "medium", 120, 60, 40),
                 RetentionCase(num_logged=60, num_served=30, steps=20, short_steps=20)]
    return [replace(case, num_seeds=seeds, weights=weights) for case in found]


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments beside those of every benchmark."""
    parser.add_argument("--seeds", type=whole(1), default=3, metavar="N",
                        help="train from seeds 1..N (default 3)")
    parser.add_argument("--weights", metavar="DIR",
                        help="VirtualTaobao's three weight files; without it a shop of random "
                             "networks")


def _rates(served: Sequence[Episodes]) -> dict[str, Any]:
    """Click-through rates of the visits of all seeds together, and seed by seed."""
    clicks, pages = (np.concatenate([getattr(e, n) for e in served]) for n in ("clicks", "pages"))
    joint = {kind: x.to_json() for kind, x in click_through_rate(clicks, pages).items()}
    each = [round(float(e.clicks.sum() / e.pages.sum() / 10), 6) for e in served]
    return {**joint, "by_seed": each, "visits": int(pages.size),
            "pages_per_visit": round(float(pages.mean()), 3)}

