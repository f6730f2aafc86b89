"""``oper bench plan``: the planner's gaps and times, and peers' plans, on modelled machines."""

from __future__ import annotations

import argparse
import importlib.util
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from oper.bench.core import memory
from oper.bench.core.launch import Progress
from oper.bench.plan import workloads as plan_workloads
from oper.bench.plan.torchrec_planner import propose
from oper.bench.plan.workloads import Workload
from oper.plan import OBJECTIVES
from oper.search.certificate.carried import not_certified
from oper.search.certificate.check import verify_plan
from oper.search.cost.model import evaluate
from oper.search.peers.baselines import score_peers
from oper.search.planner import plan_problem, tighten_bound
from oper.search.problem.space import EVERYTHING
from oper.search.problem.statement import make_problem
from oper.support.flags import number, whole
from oper.topology import Topology

_WORKLOADS: dict[str, Callable[[int], Workload | None]] = {
    "criteo-kaggle": plan_workloads.criteo_kaggle,
    "mlperf-dlrm-v2": plan_workloads.mlperf_dlrm_v2,
    "avazu": plan_workloads.avazu,
    "synthetic-100": lambda seed: plan_workloads.synthetic(100, seed),
    "synthetic-850": lambda seed: plan_workloads.synthetic(850, seed),
    "flat-100": lambda seed: plan_workloads.synthetic(100, seed, 0.6),
    "giant": plan_workloads.giant,
    "few-tables": plan_workloads.few_tables,
    "unequal-100": lambda seed: plan_workloads.synthetic(100, seed),
    "drawn": plan_workloads.drawn,
}
CONSTANTS = ("published", "measured")
TARGET_GAP, TARGET_SECONDS = 0.03, 10.0  # targets for every case
_TORCHREC = "torchrec: "  # prefix of TorchRec's proposers among the peers' names
_QUICK = {"criteo-kaggle/8", "synthetic-100/8", "few-tables/16"}
_GROUP = ("num_cases", "certified", "median_gap", "worst_gap", "median_proved_gap",
          "worst_proved_gap", "median_seconds", "worst_seconds", "peers_ahead",
          "median_ratio_vs_torchrec", "least_ratio_vs_torchrec")
FIGURES = (("modelled_step_us", "gap", "proved_gap", "seconds", "peak_rss_mb", "best_peer",
            "ratio_vs_best_peer", "ratio_vs_torchrec"), tuple(f"groups.*.{key}" for key in _GROUP))
NOTE = "steps are modelled; ratio = a peer's step / OPER's\n"


@dataclass(frozen=True, slots=True)
class Case:
    """One workload on one machine for one objective.

    Attributes:
        constants: ``"published"``: GPU machines with published constants; ``"measured"``: CPU
            clusters with constants measured by ``oper calibrate``.
        workload, num_ranks, objective: see `cases`.
        seed: seed of tables, machine and search.
        torchrec_s: time limit (s) of TorchRec's planner; 0 = without TorchRec.
        prove_s: time limit (s) for raising the lower bound of a plan whose gap is above the target;
            0 = do not raise it.
    """

    constants: str
    workload: str
    num_ranks: int
    objective: str
    seed: int
    torchrec_s: float = 0.0
    prove_s: float = 0.0

    @property
    def name(self) -> str:
        """``CONSTANTS/WORKLOAD/RANKS/OBJECTIVE/SEED``."""
        return (f"{self.constants}/{self.workload}/{self.num_ranks}/{self.objective}/"
                f"{self.seed}")

    @property
    def topology(self) -> Topology:
        """The modelled machine."""
        if self.constants == "measured":
            return plan_workloads.cluster(self.num_ranks, self.seed)
        return plan_workloads.machine(self.num_ranks, self.workload.startswith("unequal"))

    def measure(self, progress: Progress) -> dict[str, Any]:
        """Plan and compare; returns the record's entry. If a case's data is missing, the entry has
        the reason as ``skipped`` and is verified."""
        workload = _workload(self.workload, self.seed)
        return run_case(self, workload) if workload is not None else {
            "verified": True, "skipped": "its data is not in the folder named by OPER_DATA"}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=_seeds, default="0", metavar="A-B",
                        help="seeds of tables, machines and search: one number, or a range "
                             "including both ends (default 0)")
    parser.add_argument("--constants", choices=CONSTANTS, default="published",
                        help="GPU machines with published constants, or CPU clusters with "
                             "measured ones (default published)")
    parser.add_argument("--torchrec-seconds", type=number(), default=10.0, metavar="S",
                        help="time limit of TorchRec's planner per case (default 10; 0 = leave "
                             "that planner out)")
    parser.add_argument("--prove-seconds", type=number(), default=20.0, metavar="S",
                        help="seconds to raise the bound after planning, for cases above the "
                             "target gap (default 20; 0 = none)")


def _seeds(text: str) -> str:
    """`text` if it is a valid range of seeds, ``FIRST`` or ``FIRST-LAST``."""
    first, _, last = text.partition("-")
    whole(whole(0)(first))(last or first)
    return text


def cases(quick: bool, constants: str = "published", seeds: str = "0",
          torchrec_seconds: float = 0.0, prove_seconds: float = 0.0) -> list[Case]:
    """Every workload on 8, 16, 64 and 128 ranks for training and inference; fewer if `quick`. The
    remaining arguments are the values of the flags."""
    first, _, last = seeds.partition("-")
    return [Case(constants, w, n, o, seed, torchrec_seconds, prove_seconds)
            for seed in range(int(first), int(last or first) + 1)
            for w in _WORKLOADS
            for n in (8, 16, 64, 128) for o in OBJECTIVES
            if (not quick or f"{w}/{n}" in _QUICK)
            # The links of machines with measured constants are unequal for some seeds anyway.
            and not (constants == "measured" and w.startswith("unequal"))]


@lru_cache(maxsize=1)
def _workload(name: str, seed: int) -> Workload | None:
    """Tables and statistics, cached for all machines and objectives of a seed."""
    return _WORKLOADS[name](seed)


def run_case(case: Case, workload: Workload) -> dict[str, Any]:
    """Plan a case, verify the plan and its certificate, and score the peers' plans."""
    topology = case.topology
    has_torchrec = case.torchrec_s > 0 and importlib.util.find_spec("torchrec") is not None
    begin = time.perf_counter()
    problem = make_problem(workload.tables, workload.stats, topology, objective=case.objective,
                           batch_size=workload.batch_size, allow=EVERYTHING)
    plan = plan_problem(problem, seed=case.seed)
    seconds = time.perf_counter() - begin
    peak_rss_mb = memory.peak_rss_mb()
    found, better = evaluate(plan, problem), plan
    why = not_certified(plan, problem)
    verdict = verify_plan(plan, problem)
    if not plan.gap <= TARGET_GAP and case.prove_s > 0:
        better = tighten_bound(plan, problem, goal_gap=TARGET_GAP, time_budget_s=case.prove_s)
    begin = time.perf_counter()
    theirs = propose(problem, case.torchrec_s) if has_torchrec else {}
    torchrec_seconds = time.perf_counter() - begin
    peers = score_peers(problem, case.seed, {_TORCHREC + k: p for k, p in theirs.items()})
    best = min(peers, key=lambda n: (peers[n], n), default=None)
    own = min((us for n, us in peers.items() if n.startswith(_TORCHREC)), default=None)
    return {
        "modelled": topology.source, "gap": None if why else plan.gap,
        "not_certified": why or None, "certificate_checked": verdict.certified,
        "uncapped_bound_us": verdict.bound_us if math.isfinite(verdict.bound_us) else None,
        "bound_method": plan.notes["bound_method"], "seconds": seconds,
        "modelled_step_us": found.step_us,
        "lower_bound_us": plan.lower_bound_us,
        "proved_gap": None if math.isnan(better.gap) else better.gap,
        "proved_nodes": better.notes["bnb_nodes"], "best_peer": best,
        "best_peer_step_us": None if best is None else peers[best],
        "ratio_vs_best_peer": None if best is None else peers[best] / found.step_us,
        "ratio_vs_torchrec": None if own is None else own / found.step_us,
        "torchrec_step_us": own, "torchrec_seconds": torchrec_seconds,
        "torchrec": None if not has_torchrec else "best of its proposers" if own is not None else (
            "its plans do not fit" if theirs else "no plan within the time limit"),
        "peers_step_us": peers, "imbalance": found.imbalance, "peak_rss_mb": peak_rss_mb,
        "verified": bool(found.fits and verdict.certified
                         and (better is plan or verify_plan(better, problem).certified)
                         and (best is None or found.step_us <= peers[best] * (1 + 1e-9))),
    }


def totals(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Summary figures by ``CONSTANTS/OBJECTIVE``, since gaps differ too much for one median."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for e in entries:
        if "skipped" not in e and "failed" not in e:
            constants, _, _, objective, _ = e["name"].split("/")
            groups.setdefault(f"{constants}/{objective}", []).append(e)
    return {"groups": {name: _figures(groups[name]) for name in sorted(groups)}}


def _figures(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {
        "num_cases": len(entries),
        "certified": sum(bool(e["certificate_checked"]) for e in entries),
        "peers_ahead": sum(us < e["modelled_step_us"] * (1 - 1e-9)
                           for e in entries for us in e["peers_step_us"].values())}
    for key in ("gap", "proved_gap", "seconds"):
        values = [math.inf if e[key] is None else e[key] for e in entries]
        for word, value in (("median", statistics.median(values)), ("worst", max(values))):
            out[f"{word}_{key}"] = value if math.isfinite(value) else None
    ratios = [e["ratio_vs_torchrec"] for e in entries if e["ratio_vs_torchrec"]]
    return out | {"median_ratio_vs_torchrec": statistics.median(ratios) if ratios else None,
                  "least_ratio_vs_torchrec": min(ratios, default=None)}


def remarks(entries: Sequence[Mapping[str, Any]]) -> str:
    """Text: the cases that miss a target or whose plan is slower than a peer's."""
    done = [e for e in entries if "modelled_step_us" in e]
    missed: dict[str, Callable[[Mapping[str, Any]], bool]] = {
        f"gap above {100 * TARGET_GAP:.0f} %": lambda e: e["gap"] is None or e["gap"] > TARGET_GAP,
        f"not proved within {100 * TARGET_GAP:.0f} %":
            lambda e: e["proved_gap"] is None or e["proved_gap"] > TARGET_GAP,
        f"slower than {TARGET_SECONDS:.0f} s": lambda e: e["seconds"] > TARGET_SECONDS,
        "a baseline is faster": lambda e: (e["ratio_vs_best_peer"] or 1.0) < 1.0 - 1e-9}
    text = ""
    for what, is_so in missed.items():
        names = [e["name"] for e in done if is_so(e)]
        text += f"{what}: {len(names)} of {len(done)}{': ' * bool(names)}{', '.join(names)}\n"
    return text
