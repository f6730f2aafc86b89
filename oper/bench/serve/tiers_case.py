"""Compare rows with dtypes by hotness with int8 rows: bytes, queries per second, AUC.

Workers score LoadGen's queries in process, alternating between the sets of tables. There are two
sets of int8 rows, since even equal sets differ by their processes and pages. For the AUC, labels
are drawn from the scores of the same model with float32 rows, which therefore has the highest
expected AUC.
"""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from oper.bench.core.launch import Progress
from oper.bench.core.measure import paired
from oper.bench.core.record import interleave
from oper.bench.serve import loadgen
from oper.bench.serve.models import ServeWork
from oper.bench.serve.pool import Pool
from oper.rl_rec.intervals import difference
from oper.serve.options import BatchOptions
from oper.train.metrics import auc

_BLOCKS = 32  # blocks of samples, from whose AUCs the interval is computed
_SPREAD, _BIAS = 1.3, -1.3  # std and mean of the labels' logits: AUC of about 0.77, 27 % clicks
_AGAIN = "int8-again"
_NAMES = ("int8", "tiers", _AGAIN, "int4", "float32")


@dataclass(frozen=True, slots=True)
class TiersCase:
    """Comparison of a model with different dtypes of rows.

    Attributes:
        name: the case's name in the record.
        served: the model and its queries.
        error_budget: error budget of the rows with dtypes by hotness, see `oper.publish`.
        workers: number of scoring processes.
        samples: number of samples for the AUC.
        rounds, round_s: number and duration (s) of the runs that measure queries per second.
    """

    name: str
    served: ServeWork = field(default_factory=ServeWork)
    error_budget: float = 1.5e-4
    workers: int = 2
    samples: int = 1 << 20
    rounds: int = 48
    round_s: float = 0.5

    def measure(self, progress: Progress) -> dict[str, Any]:
        """Score and time; returns the record's entry."""
        scores: dict[str, np.ndarray] = {}
        pools: dict[str, Pool] = {}
        published: dict[str, dict[str, Any]] = {}
        try:
            # The sets that are timed come first, because huge pages may run out.
            for name in _NAMES:
                progress(f"{self.samples} samples with {name} rows")
                served = replace(self.served, **{"error_budget": self.error_budget}
                                 if name == "tiers" else {"row_dtype": name.partition("-")[0]})
                pools[name] = pool = Pool("oper", served, BatchOptions(
                    served.candidates, 0.0, 1 << 40), self.workers)
                published[name] = pool.published()
                if name != _AGAIN:
                    scores[name] = _scores(self, pool)
                if name in ("int4", "float32"):
                    pools.pop(name).close()
            rates, latency = _rates(self, pools, progress)
            memory = {name: p.memory(self.workers)["total_pss_bytes"] for name, p in pools.items()}
        finally:
            for pool in pools.values():
                pool.close()
        labels = _labels(self, scores.pop("float32"))
        ratio = paired(rates["tiers"], np.sqrt(rates["int8"] * rates[_AGAIN]))
        chosen = published["tiers"]
        quality = {name: _difference(labels, scores[name], scores["int8"])
                   for name in ("tiers", "int4")}
        return {
            "bytes_ratio": chosen["tables"] / published["int8"]["tables"],
            "memory_ratio": memory["tiers"] / memory["int8"],
            "queries_ratio": ratio.pop("mean"), "queries_ratio_interval": ratio,
            "queries_ratio_of_equal_sets": paired(rates[_AGAIN], rates["int8"]),
            "queries_per_s": {n: np.median(r) for n, r in rates.items()},
            "single_ms": latency, "auc_difference": quality["tiers"],
            "auc_difference_int4": quality["int4"],
            "auc": {name: auc(s, labels) for name, s in scores.items()},
            "samples": labels.size, "error": chosen["row_error"],
            "error_budget": self.error_budget,
            "share_of_rows": chosen["share_of_rows"], "memory_bytes": memory,
            "page_kinds": {name: found["page_kind"] for name, found in published.items()},
            "verified": bool(0 < chosen["row_error"] <= self.error_budget
                             and scores["tiers"].std() > 0 and labels.size >= self.samples),
            "case": asdict(self)}


def _scores(case: TiersCase, pool: Pool) -> np.ndarray:
    """Logits of at least `samples` samples of untimed queries, float64 [n]."""
    first = case.served.num_queries
    found = pool.scores(range(first, first - (-case.samples // case.served.candidates)))
    wide = found.astype(np.float64).reshape(-1)
    return np.log(wide) - np.log1p(-wide)


def _labels(case: TiersCase, teacher: np.ndarray) -> np.ndarray:
    """Labels drawn from the float32 model's logits `teacher`, rescaled to `_SPREAD` and `_BIAS`;
    bool [samples]."""
    logits = _BIAS + _SPREAD * (teacher - teacher.mean()) / teacher.std()
    rng = np.random.default_rng((case.served.work.seed, 11))
    return rng.random(teacher.size) < 1 / (1 + np.exp(-logits))


def _difference(labels: np.ndarray, scores: np.ndarray, other: np.ndarray) -> dict[str, float]:
    """AUC of `scores` minus that of `other`: mean over blocks of samples, with bootstrap
    interval."""
    parts = [np.array_split(x, _BLOCKS) for x in (labels, scores, other)]
    each = np.array([(auc(s, y), auc(o, y)) for y, s, o in zip(*parts, strict=True)])
    return asdict(difference(*each.T))


def _rates(case: TiersCase, pools: dict[str, Pool], progress: Progress
           ) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """By set of tables: queries per second of each round, and median latency (ms) of single
    queries."""
    base = loadgen.Settings("Offline", 300, case.round_s, num_samples=case.served.num_queries)

    def run(name: str, settings: loadgen.Settings) -> loadgen.Result:
        return pools[name].run(case.workers, settings)

    single = {name: run(name, replace(base, scenario="SingleStream", expected_qps=1000))
              for name in pools}
    guess = {name: run(name, replace(base, min_duration_s=0.5)).rate for name in pools}
    progress(f"queries per second, {case.rounds} rounds")

    def rate(turn: int, name: str) -> float:
        return run(name, replace(base, expected_qps=1.4 * guess[name], seed=base.seed + turn)).rate

    rates = interleave({name: functools.partial(rate, name=name) for name in pools}, lambda: None,
                       case.rounds, 1, lead_in=0, measure=lambda call: call())
    return rates, {n: r.latency_ms["p50"] for n, r in single.items()}
