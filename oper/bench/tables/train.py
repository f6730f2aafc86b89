"""``oper bench train``: training steps of OPER compared with TorchRec's."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch.distributed as dist

from oper.bench.core import record
from oper.bench.core.launch import Progress
from oper.bench.core.measure import Case, Run, median_phases, over, quick_case
from oper.bench.core.planning import bytes_read, chosen_plan, total
from oper.bench.core.workload import EXPONENTS, Workload
from oper.bench.device import suite
from oper.bench.dynamic import case as dynamic, drift
from oper.bench.tables import model_case
from oper.bench.tables.ceiling import Ceiling
from oper.bench.tables.sides import (
    PLAN_KINDS,
    Dense,
    Side,
    build_oper,
    build_torchrec,
    moved_bytes,
)
from oper.bench.tables.verify import Checks, Reference, Verdict, verify
from oper.data.generate.published import CRITEO_1TB_DISTINCT, MLPERF_CAP, MLPERF_MULTI_HOT
from oper.errors import UsageError, require
from oper.plan import Plan
from oper.shmem.group.domains import DOMAIN_ENV
from oper.train.config import DLRMConfig

_PHASE_STEPS = 16
# MLPerf's models, with the layers of its reference implementations. Their workload has the bag
# lengths of MLPerf's multi-hot data, and tables of at most a hundredth of its row limit
# (`_MAX_ROWS`).
MLPERF = {
    "dlrm": DLRMConfig(dense_layers=(512, 256), over_layers=(1024, 1024, 512, 256)),
    "dlrm-dcnv2": DLRMConfig(dense_layers=(512, 256), over_layers=(1024, 1024, 512, 256),
                             cross_layers=3, cross_rank=512)}
_MAX_ROWS = MLPERF_CAP // 100
# The contenders whose DLRM has only TorchRec's modules, by their plan. The other DLRMs, TorchRec's
# and OPER's, have OPER's modules between tables and layers, so that only the tables differ.
SHIPPED = {kind: f"{kind} as shipped" for kind in PLAN_KINDS}
FIGURES = (
    *suite.FIGURES, *model_case.FIGURES, *drift.FIGURES, *dynamic.FIGURES,
    ("exchange", "oper_step_ms", "torchrec_step_ms", "ratio_step", "ratio_shipped",
     "oper_forward_ms",
     "torchrec_forward_ms", "ratio_forward", "torchrec_best", "torchrec_best_forward",
     "gather_ceiling_ms", "gather_ceiling_gbps", "forward_fraction_of_ceiling", "dense.dtype",
     "samples_per_core_s.oper", "loopback_bytes_per_step", "simulated_bytes_per_step",
     "simulated_equals_sent"))
NOTE = ("2 processes, 1 thread each; medians of the slower rank; ratio = TorchRec's best plan / "
        "OPER (shipped: a DLRM whose parts are all TorchRec's), of dynamic tables / static ones; "
        "embedding = the collections alone; benchmarks/README.md has the meaning of every figure\n")


def cases(quick: bool, device: str = "", model: str = "", tables: str = "",
          exchange: str = "shared") -> list[Any]:
    """The cases in the order of the record; only the main ones if `quick`.

    Args:
        quick: whether to leave out all but the main cases, and to repeat those less often.
        device, model, tables, exchange: the values of the flags, see `configure`.

    Raises:
        UsageError: flags are combined, each of which chooses other cases.
    """
    chosen = {"--device cuda": device == "cuda", f"--model {model}": bool(model),
              f"--tables {tables}": bool(tables), "--exchange collective": exchange != "shared"}
    given = [flag for flag, is_given in chosen.items() if is_given]
    if len(given) > 1 and (model not in MLPERF or device == "cuda" or tables):
        raise UsageError("cannot choose cases", "flags", " ".join(given),
                         "one of these, or --exchange collective with --model "
                         + " or ".join(MLPERF), "run them one after another")
    if device == "cuda":
        return suite.cases(quick, "train")
    if model and model not in MLPERF:
        return model_case.cases(quick, model)
    if tables:
        return (drift if tables == "drift" else dynamic).cases(quick)
    return [replace(case, exchange=exchange)
            for case in (mlperf_cases(quick, model) if model else criteo_cases(quick))]


def check_resumed(known: Mapping[str, Mapping[str, Any]], chosen: Sequence[Any]) -> None:
    """Raise InvalidInputError if a resumed record has a chosen case with the other --exchange,
    since both have the same name."""
    for case in chosen:
        mine = getattr(case, "exchange", None)
        theirs = known.get(case.name, {}).get("exchange", mine)
        require("cannot resume from a record", "give the same --exchange as for the record",
                (f"exchange of {case.name}", theirs, bool(theirs == mine), str(mine)))


def criteo_cases(quick: bool) -> list[TrainCase]:
    """Cases of the collection alone with each of `EXPONENTS`, and of a whole DLRM with the
    default exponent."""
    found = [TrainCase(f"ebc-pool{pooling}{suffix}", Workload(pooling=pooling, exponent=exponent))
             for suffix, exponent in EXPONENTS.items() for pooling in (1, 20)]
    found[2:2] = [TrainCase(f"dlrm-pool{pooling}", Workload(pooling=pooling), dense=Dense(),
                            rounds=10, per_round=3) for pooling in (1, 20)]
    return [quick_case(case) for case in found[:4]] if quick else found


def mlperf_cases(quick: bool, model: str) -> list[TrainCase]:
    """Cases of a model of `MLPERF` with float32 and with bfloat16; small tables if `quick`."""
    most, batch_size = (2_000, 64) if quick else (_MAX_ROWS, 1024)
    work = Workload(tuple(min(n, most) for n in CRITEO_1TB_DISTINCT), dim=128,
                    batch_size=batch_size, pooling=max(MLPERF_MULTI_HOT), lengths=MLPERF_MULTI_HOT)
    rounds, per_round, batches = (2, 1, 4) if quick else (6, 2, 8)
    return [TrainCase(f"{model}-{dtype}", work, num_batches=batches, num_stats_batches=batches,
                      rounds=rounds, per_round=per_round, dense=Dense(MLPERF[model], dtype))
            for dtype in ("float32", "bfloat16")]


def configure(parser: argparse.ArgumentParser) -> None:
    suite.configure(parser)
    parser.add_argument("--model", choices=(*MLPERF, *model_case.MODELS), default="",
                        help="model to train instead of tables alone: a DLRM or DLRM-DCNv2 with "
                             "MLPerf's layers, or a recommender over a synthetic catalogue (see "
                             "docs/how-to/recommenders.md)")
    parser.add_argument("--tables", choices=("dynamic", "drift"), default="",
                        help="dynamic: compare dynamic tables with static tables and TorchRec's "
                             "managed-collision modules; drift: compare their AUC on drifting "
                             "ids with hashing and a fixed vocabulary")
    parser.add_argument("--exchange", choices=("shared", "collective"), default="shared",
                        help="collective: OPER's ranks act as separate hosts, for tables alone and "
                             "for --model dlrm or dlrm-dcnv2 (default shared)")


@dataclass(frozen=True, slots=True)
class TrainCase(Case):
    """Training steps of a workload.

    Attributes:
        dense: the dense part of a whole DLRM; None = the collection alone.
        exchange: ``"shared"``: OPER's ranks share memory. ``"collective"``: each rank acts as a
            separate host and exchanges messages, as TorchRec's ranks do over gloo.
    """

    dense: Dense | None = None
    exchange: str = "shared"
    rounds: int = 20

    def measure(self, progress: Progress) -> dict[str, Any]:
        """Build, verify and measure; rank 0 returns the record's entry. Collective."""
        if self.exchange == "collective":
            os.environ[DOMAIN_ENV] = str(dist.get_rank())
        else:
            os.environ.pop(DOMAIN_ENV, None)
        return _TrainRun(self, progress).measure()


class _TrainRun(Run):
    """Measures a `TrainCase`; `sides` are the contenders, OPER first."""

    def __init__(self, case: TrainCase, progress: Progress) -> None:
        super().__init__(case, progress)
        self.sides: list[Side] = []
        self.is_shared = case.exchange == "shared"

    def measure(self) -> dict[str, Any]:
        """Build, verify and measure; rank 0 returns the record's entry. Collective."""
        self.say("drawing batches")
        ids, batches = self.ids(), self.batches()
        self.say("collecting statistics and planning")
        plan, plan_s = chosen_plan(self.work, self.case.num_stats_batches, "training",
                                   self.is_shared)
        self._build(plan)
        verdicts = self._verify()
        # The bare gather reads the arenas of all ranks directly, which needs shared memory.
        ceiling = Ceiling(self._tables, ids, self.work.pooling) if self.is_shared else None
        timings = self._time(batches, ceiling)
        if ceiling is not None:
            verdict = Verdict()  # compares the bare gather's sums with a lookup's
            verdict.compare("ceiling", ceiling.run(0),
                            self.sides[0].lookup(batches[0].sparse_features))
            if self.rank == 0:
                verdicts["ceiling"] = verdict.to_json()
        sent = {} if self.is_shared else self._sent_bytes(batches)
        phases = self._phases(batches)
        return self.finish(self._tables, {
            **self._figures(timings, verdicts, ids), "oper_phases_ms": phases,
            "bytes_read": bytes_read(self._tables), "exchange": self.case.exchange, **sent,
            **self._throughput(timings["step"]),
            "ceiling": ceiling.settings if ceiling else None, "plan_seconds": plan_s})

    @property
    def _tables(self) -> Any:
        assert self.sides[0].tables is not None
        return self.sides[0].tables

    def _build(self, plan: Plan) -> None:
        """Build all contenders."""
        dense = self.case.dense
        self.say("building OPER's side")
        self.sides = [build_oper(self.work, dense, plan)]
        peers = dict.fromkeys(PLAN_KINDS, dense)
        if dense is not None:
            peers |= dict.fromkeys(SHIPPED.values(), replace(dense, as_shipped=True))
        for name, layers in peers.items():
            self.say(f"building TorchRec's {name} side")
            side, _ = build_torchrec(self.work, layers, name.split()[0])
            self.sides.append(replace(side, name=name))

    def _verify(self) -> dict[str, dict[str, Any]]:
        """Compare all contenders with the unsharded model; see `verify`."""
        checks, found = Checks(self.work), dict[str, dict[str, Any]]()
        if self.case.dense is None:
            self.set_gradient(self.sides, checks.batch(0, self.rank))
        reference = None if self.rank else Reference(checks, self.case.dense)
        for side in self.sides:
            self.say(f"comparing {side.name} with the unsharded model")
            found[side.name] = verify(side, checks, reference)
        return found

    def _time(self, batches: Sequence[Any], ceiling: Ceiling | None
              ) -> dict[str, dict[str, np.ndarray]]:
        """Seconds of every call by phase and contender, maximum over ranks."""
        align = self._tables.barrier
        if ceiling is not None:
            self.say("finding the gather ceiling's best settings")
            ceiling.tune(align)
        found = {}
        for phase in ("step", "forward"):
            runs = {}
            for side in self.sides:
                side.model.train(phase == "step")
                runs[side.name] = over(batches, side.step if phase == "step" else side.forward)
            if phase == "forward" and ceiling is not None:
                runs["ceiling"] = ceiling.run
            found[phase] = self.time(runs, align, phase)
        return found

    def _sent_bytes(self, batches: Sequence[Any]) -> dict[str, Any]:
        """Bytes that all ranks together send per training step. Collective.

        Counted in three ways: on the loopback interface for each contender, with TCP headers; by
        OPER's runtime for each kind of message; and simulated from OPER's plan.
        """
        found: dict[str, Any] = {}
        self._tables.sent_bytes(reset=True)
        for side in self.sides:
            side.model.train()
            dist.barrier()
            before = record.interface_counters("lo")[0]
            for k in range(_PHASE_STEPS):
                side.step(batches[k % len(batches)])
            dist.barrier()
            found[side.name] = (record.interface_counters("lo")[0] - before) / _PHASE_STEPS
        sent = {kind: sum(to) for kind, to in self._tables.sent_bytes().items()}
        joint = total(list(sent.values()))
        simulated = sum(self.simulated_bytes(self._tables.plan, range(self.world_size), True,
                                             _PHASE_STEPS))
        return {"loopback_bytes_per_step": found, "oper_sent_bytes_per_step": {
            kind: round(x / _PHASE_STEPS) for kind, x in zip(sent, joint, strict=True)},
            "simulated_bytes_per_step": round(simulated / _PHASE_STEPS),
            "simulated_equals_sent": simulated == round(sum(joint))}

    def _phases(self, batches: Sequence[Any]) -> dict[str, float]:
        """Median milliseconds of each phase of OPER's step, mean over ranks."""
        tables = self._tables
        taken = []
        self.sides[0].model.train()
        tables.traffic(reset=True)
        for batch in batches[:_PHASE_STEPS]:
            tables.barrier()
            self.sides[0].step(batch)
            taken.append(list(tables.phase_ns().values()))
        return median_phases(tables, taken)

    def _throughput(self, seconds: dict[str, np.ndarray]) -> dict[str, Any]:
        """Samples trained per second and core by contender; empty without a dense part."""
        dense = self.case.dense
        if dense is None:
            return {}
        cores = max(self.case.num_threads, self.world_size)
        per_core = {name: self.work.batch_size / float(np.median(s)) / cores
                    for name, s in seconds.items()}
        return {"dense": {"dtype": dense.dtype, **asdict(dense.over(self.work))},
                "samples_per_core_s": per_core}

    def _figures(self, timings: dict[str, dict[str, np.ndarray]],
                 verdicts: dict[str, dict[str, Any]], ids: Sequence[np.ndarray]) -> dict[str, Any]:
        moved = moved_bytes(self.work, ids)
        joint = {k: int(x) for k, x in zip(moved, total(list(moved.values())), strict=True)}
        plans: dict[str, Any] = {
            side.name: {**{phase: record.summary(timings[phase][side.name]) for phase in timings},
                        "plan": side.plan, "verification": verdicts.get(side.name)}
            for side in self.sides}
        median = {phase: {n: float(np.median(s)) for n, s in found.items()}
                  for phase, found in timings.items()}
        # A plan with the fastest steps need not have the fastest forward passes.
        best = {phase: min(PLAN_KINDS, key=s.__getitem__) for phase, s in median.items()}
        figures: dict[str, Any] = {}
        for phase, s in median.items():
            figures |= {f"ratio_{phase}": s[best[phase]] / s["oper"],
                        f"oper_{phase}_ms": plans["oper"][phase]["median_ms"],
                        f"torchrec_{phase}_ms": plans[best[phase]][phase]["median_ms"]}
        if shipped := [median["step"][name] for name in SHIPPED.values() if name in plans]:
            figures["ratio_shipped"] = min(shipped) / median["step"]["oper"]
        if self.is_shared:
            plans["ceiling"] = {"forward": record.summary(timings["forward"]["ceiling"]),
                                "verification": verdicts.get("ceiling")}
            ceiling = median["forward"]["ceiling"]
            figures |= {
                "gather_ceiling_ms": plans["ceiling"]["forward"]["median_ms"],
                "gather_ceiling_gbps": joint["forward"] / ceiling / 1e9,
                "forward_fraction_of_ceiling": ceiling / median["forward"]["oper"]}
        return {**figures, "torchrec_best": best["step"], "torchrec_best_forward": best["forward"],
                "bytes_moved": joint, "plans": plans,
                "verified": all(v.get("passed") for v in verdicts.values())}
