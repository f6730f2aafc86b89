"""``oper bench simulator``: policies of the simulated shop, learned from a log alone."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from oper.bench.core import record
from oper.bench.quality import retention
from oper.bench.quality.retention import CUSTOMERS_SEED, LOG_SEED, RetentionCase
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
from oper.rl_rec.simulation.shop import Returning, Shop, load_virtual_taobao, synthetic_shop
from oper.support.flags import whole

_QUANTILES = (0.1, 0.5, 0.9)  # of the logged visits' clicks that CDT4Rec is asked for


@dataclass(frozen=True, slots=True)
class Case:
    """One log.

    Attributes:
        name: ``SHOP-GRADE``.
        grade: of the log.
        num_logged: visits in it.
        num_served: visits of every policy, by the same customers.
        steps: gradient steps of a training.
    """

    name: str
    grade: str
    num_logged: int = 2000
    num_served: int = 500
    steps: int = 600


def cases(quick: bool) -> list[Case | RetentionCase]:
    """A case per grade, and customers who come back; small ones, of a grade, when `quick`."""
    if quick:
        return [Case("medium", "medium", 120, 60, 40),
                RetentionCase(num_logged=60, num_served=30, steps=20, short_steps=20)]
    return [*(Case(grade, grade) for grade in ("random", "medium", "expert")), RetentionCase()]


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments beside those of every benchmark."""
    parser.add_argument("--seeds", type=whole(1), default=3, metavar="N",
                        help="train from seeds 1..N (default 3)")
    parser.add_argument("--weights", metavar="DIR",
                        help="VirtualTaobao's three weight files; without it a shop of random "
                             "networks")


def run(args: argparse.Namespace, chosen: Sequence[Case | RetentionCase]
        ) -> Iterator[dict[str, Any]]:
    """Collect, train and serve; yields an entry per case."""
    for case in chosen:
        law = Returning() if isinstance(case, RetentionCase) else None
        shop = (load_virtual_taobao(args.weights, law) if args.weights
                else synthetic_shop(returning=law))
        if isinstance(case, RetentionCase):
            yield retention.run_case(case, shop, args.seeds)
        else:
            yield _run_case(case, shop, args.seeds)


def _run_case(case: Case, shop: Shop, num_seeds: int) -> dict[str, Any]:
    def serve(policy: Policy) -> Episodes:
        return collect_visits(shop, policy, case.num_served, CUSTOMERS_SEED)

    def say(text: str) -> None:
        print(f"  {case.name}: {text}", file=sys.stderr, flush=True)

    say(f"logging {case.num_logged} visits")
    log = graded_visits(shop, case.grade, case.num_logged, LOG_SEED)
    served: dict[str, list[Episodes]] = {"behaviour": [log], "random": [serve(random_policy)],
                                         "oracle": [serve(Oracle(shop))]}
    options = OfflineOptions(steps=case.steps)
    targets = {f"cdt4rec, return of quantile {q}": high_return(log, q) for q in _QUANTILES}
    repeated = True
    for seed in range(1, num_seeds + 1):
        say(f"behaviour cloning, seed {seed}")
        served.setdefault("behaviour cloning", []).append(
            serve(clone_behaviour(log, options, seed)))
        say(f"CDT4Rec, seed {seed}")
        model = train_cdt4rec(log, SIMULATOR_CONFIG(), options, seed)
        for name, target in targets.items():
            served.setdefault(name, []).append(serve(ReturnPolicy(model, target)))
        again = serve(ReturnPolicy(model, target))
        repeated &= bool((again.clicks == served[name][-1].clicks).all())
    return {"name": case.name, "shop": shop.name, "case": asdict(case), "seeds": num_seeds,
            "config": asdict(SIMULATOR_CONFIG()), "fit": asdict(options), "targets": targets,
            "policies": {name: _rates(e) for name, e in served.items()}, "verified": repeated}


def _rates(served: Sequence[Episodes]) -> dict[str, Any]:
    """Click-through rates of the visits of all seeds together, and seed by seed."""
    clicks, pages = (np.concatenate([getattr(e, n) for e in served]) for n in ("clicks", "pages"))
    joint = {kind: x.to_json() for kind, x in click_through_rate(clicks, pages).items()}
    each = [round(float(e.clicks.sum() / e.pages.sum() / 10), 6) for e in served]
    return {**joint, "by_seed": each, "visits": int(pages.size),
            "pages_per_visit": round(float(pages.mean()), 3)}


def report(entries: Sequence[dict[str, Any]]) -> str:
    """The entries for a person."""
    single = [e for e in entries if "returning" not in e]
    rows = [[f"{e['name']}: {name}", record.interval(found["step"]),
             record.interval(found["episode"]), ", ".join(f"{x:.3f}" for x in found["by_seed"])]
            for e in single for name, found in e["policies"].items()]
    text = record.table(["log: policy", "CTR by page [95 %]", "CTR by visit [95 %]", "by seed"],
                        rows) + "\n" if rows else ""
    text += retention.report([e for e in entries if "returning" in e])
    return text + (f"{entries[0]['shop']}; percentile bootstrap over visits; simulated customers: "
                   "no statement on a real shop\n")
