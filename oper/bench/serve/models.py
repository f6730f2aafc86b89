"""Queries and models of the serving benchmark's contenders."""

from __future__ import annotations

import functools
import gc
import hashlib
import logging
import typing
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from oper.bench.core.workload import NUM_DENSE, TIMED, Workload, collect_stats
from oper.data.generate.ids import power_law_ids, scatter_ids
from oper.serve.model import AttachedModel, kjt_of
from oper.serve.options import TieredRows
from oper.serve.requests import Request, Signature
from oper.stats import AccessStats
from oper.support.processes import trim_memory

if TYPE_CHECKING:
    from torch import nn

KINDS = ("oper", "torchrec", "torch")  # published int8 rows; TorchRec's int8 model; float32
VARIANTS = ("eager", "scripted")  # execution modes of TorchRec's model
_STATS_BATCHES = 64  # batches from which the hotness of rows is determined
FLOOR = "floor"  # a fixed amount of computation instead of a model
_SECOND_COPY = "_table_name_to_quantized_weights"  # TorchRec's attribute, see `_drop_copies`
_HASHED = bytes(7 << 10)  # input to hash per sample, which takes about as long as OPER's model


@dataclass(frozen=True, slots=True)
class ServeWork:
    """A DLRM to serve, and queries that each score the candidates of one visit.

    Attributes:
        work: tables and distribution of ids; its batch size is not used.
        candidates: samples per query.
        num_queries: number of distinct queries, from which LoadGen draws.
        user_features: number of leading features that are the user's, with equal ids for all
            candidates of a query.
        dense_layers, over_layers: sizes of the MLPs; by default those of ``oper train``.
        row_dtype: dtype of OPER's rows; TorchRec's are quantised to the same width.
        error_budget: if above 0, OPER's rows have dtypes by hotness instead; see `oper.publish`.
        in_order: whether ids are in hotness order, as ``oper preprocess`` writes them, or permuted.
    """

    work: Workload = field(default_factory=Workload)
    candidates: int = 128
    num_queries: int = 512
    dense_layers: tuple[int, ...] = (128, 64)
    over_layers: tuple[int, ...] = (128, 64)
    row_dtype: str = "int8"
    user_features: int = 0
    error_budget: float = 0.0
    in_order: bool = False

    @property
    def signature(self) -> Signature:
        """Names and shapes of a request's features."""
        return Signature("bench", tuple(self.work.features), self.work.num_rows, NUM_DENSE)

    def query(self, number: int) -> Request:
        """The query with index `number`."""
        work = self.work
        rng = np.random.default_rng((work.seed, TIMED, number, work.pooling, 7))
        lengths = np.repeat(np.array(work.bag_lengths, np.int32)[:, None], self.candidates, 1)
        lengths[:self.user_features, 1:] = 0
        ids = np.concatenate([
            power_law_ids(n, int(of.sum()), work.exponent, rng, scatter=not self.in_order)
            for n, of in zip(work.num_rows, lengths, strict=True)])
        return Request(rng.random((self.candidates, NUM_DENSE), np.float32), lengths, ids,
                       tuple(range(self.user_features)))

    def rows(self) -> str | TieredRows:
        """Dtype of OPER's rows, or their dtypes by hotness."""
        if not self.error_budget:
            return self.row_dtype
        stats = collect_stats(self.work, 0, 1, _STATS_BATCHES)
        if self.in_order:
            found = zip(stats.tables.items(), self.work.num_rows, strict=True)
            stats = AccessStats(stats.num_samples, {
                name: table.renumbered(np.argsort(scatter_ids(np.arange(n), n)))
                for (name, table), n in found}, stats.source, True)
        return TieredRows(stats, self.error_budget)


def build(served: ServeWork, device: str) -> nn.Module:
    """The float32 DLRM on device ``"cpu"``, or without weights on ``"meta"``."""
    import torch
    from torchrec.models.dlrm import DLRM

    from oper.bench.tables.sides import make_collection

    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    dim = served.work.dim
    torch.manual_seed(served.work.seed)
    dense_device = torch.device(device)
    model = DLRM(make_collection(served.work, device), NUM_DENSE, [*served.dense_layers, dim],
                 [*served.over_layers, 1], dense_device=dense_device).eval()
    if device == "cpu":
        _spread(model)
    return typing.cast("nn.Module", model)


def _spread(model: nn.Module) -> None:
    """Scale rows to norms of about 1, so that scores depend on the tables as after training."""
    import torch

    with torch.no_grad():
        for name, value in model.named_parameters():
            if "embedding_bags" in name:
                value.mul_(0.2 / value[:4096].std())


class TorchPredictor:
    """A predictor whose model is in this process's memory.

    Attributes:
        variants: the supported `VARIANTS`; TorchRec's float models cannot be traced.
        variant: the current one.
    """

    epoch = 1

    def __init__(self, model: nn.Module, signature: Signature, variants: Sequence[str]) -> None:
        self.variants, self._models = variants, {VARIANTS[0]: model}
        self.signature, self.variant = signature, VARIANTS[0]

    def predict(self, batch: Request) -> tuple[np.ndarray, int]:
        """Probabilities float32 [B], and the epoch 1."""
        import torch

        if self.variant not in self._models:  # weights are shared
            self._models[self.variant] = _scripted(self._models[VARIANTS[0]])
        batch = batch.expanded()
        with torch.inference_mode():  # as `oper.inference.ServedModel` does
            logits = self._models[self.variant](torch.from_numpy(batch.dense),
                                                kjt_of(batch, self.signature.features))
            return torch.sigmoid(logits.reshape(-1)).numpy(), 1

    def rows_read(self) -> dict[str, int]:
        """An empty dictionary: rows are not counted."""
        return {}


class FloorPredictor:
    """A predictor with a fixed amount of computation per sample, within a core's caches. It shows
    the limits of the machine and the transport for a model of that duration."""

    epoch = 1

    def __init__(self, signature: Signature) -> None:
        self.signature = signature

    def predict(self, batch: Request) -> tuple[np.ndarray, int]:
        """Zeros float32 [B], and the epoch 1."""
        digest = hashlib.sha256()
        for _ in range(batch.num_samples):
            digest.update(_HASHED)  # other threads may run meanwhile, as in PyTorch's operators
        return np.zeros(batch.num_samples, np.float32), 1


def make_predictor(kind: str, served: ServeWork, publication: str) -> Any:
    """Build a contender's predictor.

    Args:
        kind: one of `KINDS`, or `FLOOR`.
        served: the model.
        publication: name of the publication of OPER's tables; only for kind ``"oper"``.
    """
    if kind == FLOOR:
        return FloorPredictor(served.signature)
    if kind == "oper":
        return AttachedModel(functools.partial(build, served), publication, served.signature)
    model = build(served, "cpu")
    if kind == "torchrec":
        import torch
        from torchrec.inference.modules import quantize_inference_model

        dtype = {"int8": torch.qint8, "int4": torch.quint4x2, "float16": torch.float16}[
            served.row_dtype]
        model = quantize_inference_model(model, fp_weight_dtype=torch.qint8,
                                         quantization_dtype=dtype)
        _drop_copies(model)
    trim_memory()
    return TorchPredictor(model, served.signature, VARIANTS if kind == "torchrec" else VARIANTS[:1])


def _drop_copies(model: nn.Module) -> None:
    """Free the quantised rows that TorchRec's modules keep besides those that they look up, so that
    the measured memory is what scoring needs."""
    for module in model.modules():
        if hasattr(module, _SECOND_COPY):
            setattr(module, _SECOND_COPY, None)


def warm_up(predictor: Any, requests: Sequence[Request]) -> None:
    """Make the first calls of all variants, which create lazily initialized state."""
    # Eager calls come first, because tracing changes the module.
    for variant in getattr(predictor, "variants", VARIANTS[:1]):
        predictor.variant = variant
        for request in requests:
            predictor.predict(request)
    predictor.variant = VARIANTS[0]


def _scripted(model: nn.Module) -> Any:
    """Trace, script and freeze a model as TorchRec does for deployment. (For single queries,
    ``torch.compile`` of the dense parts was slower, with and without freezing.)"""
    import torch
    from torchrec.fx.tracer import symbolic_trace

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about TorchScript's future
        frozen = torch.jit.freeze(torch.jit.script(symbolic_trace(model)).eval())
        return torch.jit.optimize_for_inference(frozen)


def give_back_memory() -> None:
    """Return freed memory to the system, so that it does not count as memory of the tables."""
    gc.collect()
    trim_memory()
