"""``oper bench train``: training steps of OPER and of TorchRec side by side."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from oper.bench.core.workload import Workload
from oper.bench.device import suite
from oper.bench.dynamic import case as dynamic, drift
from oper.bench.tables import model_case
from oper.bench.tables.sides import Dense
from oper.bench.tables.train_case import TrainCase
from oper.data.generate.published import CRITEO_1TB_DISTINCT, MLPERF_CAP, MLPERF_MULTI_HOT
from oper.train.config import DLRMConfig

# MLPerf's models: layers of its reference implementations, ids per bag of its multi-hot data, rows
# of its tables up to a hundredth of its own limit.
MLPERF = {
    "dlrm": DLRMConfig(dense_layers=(512, 256), over_layers=(1024, 1024, 512, 256)),
    "dlrm-dcnv2": DLRMConfig(dense_layers=(512, 256), over_layers=(1024, 1024, 512, 256),
                             cross_layers=3, cross_rank=512)}
_MAX_ROWS = MLPERF_CAP // 100
FIGURES = (
    *suite.FIGURES, *model_case.FIGURES, *drift.FIGURES, *dynamic.FIGURES,
    ("exchange", "oper_step_ms", "torchrec_step_ms", "ratio_step", "oper_forward_ms",
     "torchrec_forward_ms", "ratio_forward", "torchrec_best", "gather_ceiling_ms",
     "gather_ceiling_gbps", "forward_fraction_of_ceiling", "dense.dtype",
     "samples_per_core_s.oper", "loopback_bytes_per_step", "simulated_bytes_per_step",
     "simulated_equals_sent"))
NOTE = ("2 processes, 1 thread each; medians of the slower rank; ratio = TorchRec's best plan / "
        "OPER, of dynamic tables / static ones; embedding = the collections alone; benchmarks/"
        "README.md has the meaning of every figure\n")


def cases(quick: bool, device: str = "", model: str = "", tables: str = "",
          exchange: str = "shared") -> list[Any]:
    """The cases in the order of the record; the main ones only when `quick`."""
    if device == "cuda":
        return suite.cases(quick, "train")
    if model and model not in MLPERF:
        return model_case.cases(quick, model)
    if tables:
        return (drift if tables == "drift" else dynamic).cases(quick)
    return [replace(case, exchange=exchange)
            for case in (mlperf_cases(quick, model) if model else criteo_cases(quick))]


def criteo_cases(quick: bool) -> list[TrainCase]:
    """The collection alone under three skews, and a whole DLRM under one."""
    found = []
    exponents = {"": 1.05} if quick else {"": 1.05, "-alpha0.6": 0.6, "-uniform": 0.0}
    for suffix, exponent in exponents.items():
        for whole in (False, True):
            for pooling in (1, 20):
                if whole and suffix:
                    continue  # other skews are reported for the collection alone
                case = TrainCase(f"{'dlrm' if whole else 'ebc'}-pool{pooling}{suffix}",
                                 Workload(pooling=pooling, exponent=exponent),
                                 dense=Dense() if whole else None)
                if whole:
                    case = replace(case, rounds=10, per_round=3)
                if quick:
                    case = replace(case, num_stats_batches=8, rounds=3 if whole else 6,
                                   per_round=2 if whole else 3)
                found.append(case)
    return found


def mlperf_cases(quick: bool, model: str) -> list[TrainCase]:
    """One of `MLPERF` with matrix products of float32 and of bfloat16; small when `quick`."""
    most, batch_size = (2_000, 64) if quick else (_MAX_ROWS, 1024)
    work = Workload(tuple(min(n, most) for n in CRITEO_1TB_DISTINCT), dim=128,
                    batch_size=batch_size, pooling=max(MLPERF_MULTI_HOT), lengths=MLPERF_MULTI_HOT)
    rounds, per_round, batches = (2, 1, 4) if quick else (6, 2, 8)
    return [TrainCase(f"{model}-{dtype}", work, num_batches=batches, num_stats_batches=batches,
                      rounds=rounds, per_round=per_round, dense=Dense(MLPERF[model], dtype))
            for dtype in ("float32", "bfloat16")]


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments beside those of every benchmark."""
    suite.configure(parser)
    parser.add_argument("--model", choices=(*MLPERF, *model_case.MODELS), default="",
                        help="instead: a DLRM or DLRM-DCNv2 of MLPerf's layers, or a recommender "
                             "over a synthetic catalogue, see docs/how-to/recommenders.md")
    parser.add_argument("--tables", choices=("dynamic", "drift"), default="",
                        help="dynamic: of raw keys, beside OPER's static ones and TorchRec's "
                             "managed-collision modules; drift: their quality on logs whose ids "
                             "come and go, beside hashing and a fixed vocabulary")
    parser.add_argument("--exchange", choices=("shared", "collective"), default="shared",
                        help="collective: OPER's ranks act as separate hosts")
