"""Compare contenders with the unsharded model before timing.

The unsharded tables are trained with the output gradients that the contender computed, instead of
their own. Otherwise the tables of two correct DLRMs might differ: rounding may move a ReLU's input
across 0, which changes the gradients of one sample's rows by several per cent, and the first steps
of Adagrad amplify small gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from oper.bench.core.workload import CHECKED, NO_ID, Workload, batch_ids, make_batch, make_kjt
from oper.bench.tables.sides import Bfloat16, Dense, Side, make_collection, make_model
from oper.bench.tables.unsharded import EPS, LEARNING_RATE
from oper.train.metrics import gather_rows
from oper.train.model import ranks
from oper.train.reference import SparseTableOptimizer

NUM_STEPS = 2
# A tensor a is equal to its reference b if max|a - b| <= tolerance * max|b|; for dense parameters
# see `Verdict.compare_changes`. For tables, only the order of additions differs; for a DLRM's dense
# part, the shapes of matrix products also differ. In bfloat16, another order of additions may round
# to a neighbouring number, which differs by 2^-8 of it, in each of several layers.
TOLERANCE = {"pooled": 1e-5, "ceiling": 1e-5, "rows": 1e-5, "tables": 1e-5, "logits": 1e-4,
             "dense": 0.01, "logits of bfloat16": 2 ** -5, "dense of bfloat16": 2 ** -4}
_CHUNK_ROWS = 4096
_PROBED_ROWS = 16_384  # touched rows per table that `_compare_rows` looks up, at most


@dataclass(slots=True)
class Verdict:
    """The result of comparing tensors with a reference.

    Attributes:
        tolerance: largest allowed relative difference, by kind of tensor.
        worst: largest relative difference found so far, by kind of tensor.
    """

    tolerance: Mapping[str, float] = field(default_factory=lambda: TOLERANCE)
    worst: dict[str, float] = field(default_factory=dict)

    def compare(self, kind: str, ours: torch.Tensor, reference: torch.Tensor) -> None:
        """Compare a tensor with its reference: max|ours - reference| / max|reference|. A different
        shape, an infinity or a NaN never passes; an empty tensor is not counted."""
        if ours.shape != reference.shape:
            self.worst[kind] = float("inf")
            return
        if not ours.numel():
            return
        # By blocks of rows: allocating temporaries of a table's size takes longer than comparing.
        parts = zip(ours.split(_CHUNK_ROWS), reference.split(_CHUNK_ROWS), strict=True)
        most = [torch.stack([(a - b).abs().max(), b.abs().max()]) for a, b in parts]
        found, scale = torch.stack(most).amax(dim=0).tolist()  # amax propagates NaN
        self._note(kind, found, scale)

    def compare_changes(self, kind: str, ours: torch.Tensor, reference: torch.Tensor,
                        start: torch.Tensor) -> None:
        """Compare a trained parameter with its reference, relative to the change by training:
        |ours - reference| / max(|reference - start|, |reference| / 1000), with Euclidean norms.

        A single ReLU input that rounding moves across 0 changes some elements by much, but the norm
        by little.
        """
        if ours.shape != reference.shape:
            self.worst[kind] = float("inf")
            return
        found, change, size = (torch.linalg.vector_norm(x).item()
                               for x in (ours - reference, reference - start, reference))
        self._note(kind, found, max(change, size / 1000))

    def _note(self, kind: str, found: float, scale: float) -> None:
        ratio = found / max(scale, 1e-30) if math.isfinite(found + scale) else float("inf")
        self.worst[kind] = max(self.worst.get(kind, 0.0), ratio)

    @property
    def passed(self) -> bool:
        """Whether at least one tensor was compared and all of them are within tolerance."""
        return bool(self.worst) and all(
            x <= self.tolerance[k] for k, x in self.worst.items())

    def to_json(self) -> dict[str, Any]:
        """The result for the benchmark record: ``passed``, ``max_relative_diff`` (None = infinite)
        and ``tolerance``."""
        worst = {k: None if x == math.inf else x for k, x in self.worst.items()}
        return {"passed": self.passed, "max_relative_diff": worst,
                "tolerance": {k: self.tolerance[k] for k in self.worst}}


class Checks:
    """Batches for the comparison; every rank knows those of all ranks.

    Attributes:
        work: the workload.
        rank, world_size: this rank and the number of ranks.
        ids: ids of `NUM_STEPS` steps, indexed by step and rank, each int64 [F, B * pooling].
    """

    def __init__(self, work: Workload) -> None:
        self.work = work
        self.rank, self.world_size = ranks()
        self.ids = [[batch_ids(work, r, self.world_size, number, CHECKED)
                     for r in range(self.world_size)] for number in range(NUM_STEPS)]

    def batch(self, step: int, rank: int) -> Any:
        """A rank's batch of a step, with dense features and labels."""
        return make_batch(self.work, self.ids[step][rank], (CHECKED, rank, step))

    def joint_batch(self, step: int) -> Any:
        """The batches of all ranks in a step, concatenated in rank order."""
        from torchrec.datasets.utils import Batch

        parts = [self.batch(step, r) for r in range(self.world_size)]
        return Batch(torch.cat([p.dense_features for p in parts]),
                     make_kjt(self.work, np.concatenate(self.ids[step], axis=1)),
                     torch.cat([p.labels for p in parts]))

    def touched(self, table: int) -> np.ndarray:
        """Distinct ids of a table in all steps of all ranks, ascending, int64 [n]."""
        found = np.unique(np.concatenate([x[table] for step in self.ids for x in step]))
        return found[found != NO_ID]


class Reference:
    """The unsharded model, trained on the batches of all ranks together.

    Args:
        checks: the batches.
        dense: the dense part around the tables; None = the collection alone.
    """

    def __init__(self, checks: Checks, dense: Dense | None = None) -> None:
        self._checks, self._bags = checks, make_collection(checks.work, "cpu")
        self._model = model = make_model(checks.work, self._bags, dense)
        self.weights: dict[str, nn.Parameter] = {
            name: bag.weight for name, bag in self._bags.embedding_bags.items()}
        self._optimizer = SparseTableOptimizer(self._bags, "rowwise_adagrad", LEARNING_RATE, EPS)
        self.dense = {n: p for n, p in model.named_parameters() if "embedding_bag" not in n}
        self._touched = [torch.from_numpy(checks.touched(t)) for t in range(len(self.weights))]
        self._rows = [w.detach()[at] for w, at in zip(self.weights.values(), self._touched,
                                                      strict=True)]
        self.dense_start = {n: p.detach().clone() for n, p in self.dense.items()}

    def reset(self) -> None:
        """Restore the initial weights and optimizer state for the next contender."""
        with torch.no_grad():
            for weight, at, rows in zip(self.weights.values(), self._touched, self._rows,
                                        strict=True):
                weight[at] = rows
            for name, value in self.dense.items():
                value.copy_(self.dense_start[name])
            for sums in self._optimizer.sums or ():
                sums.zero_()

    def step(self, number: int, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Train the dense part with its own gradients, and the tables with `gradient`.

        Args:
            number: index of the step.
            gradient: gradient of each rank's loss with respect to its pooled embeddings,
                concatenated in rank order, float32 [W * B, sum of dims].

        Returns:
            Pooled embeddings [W * B, sum of dims] and logits [W * B] (None without a dense part),
            both from before the tables' update.
        """
        batch = self._checks.joint_batch(number)
        logits = self._dense_step(batch).float() if self.dense else None
        pooled = self._bags(batch.sparse_features).values()
        # OPER and TorchRec average the gradients of the ranks' losses.
        pooled.backward(gradient / self._checks.world_size)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return pooled.detach(), logits

    def _dense_step(self, batch: Any) -> torch.Tensor:
        self._bags.requires_grad_(False)
        loss, (_, logits, _) = self._model(batch)
        loss.backward()
        self._bags.requires_grad_(True)
        sgd = torch.optim.SGD(self.dense.values(), lr=LEARNING_RATE)
        sgd.step()
        sgd.zero_grad()
        return logits.detach()


def verify(side: Side, checks: Checks, reference: Reference | None) -> dict[str, Any]:
    """Train a side for a few steps and compare it with the unsharded model. Collective.

    This compares the pooled embeddings and logits of every step, and then the dense parameters, the
    touched rows (looked up in bags of one id) and, for OPER, all rows of all tables.

    Args:
        side: the contender, with its initial weights.
        checks: the batches.
        reference: the unsharded model on rank 0; None elsewhere.

    Returns:
        `Verdict.to_json` on rank 0, empty elsewhere.
    """
    verdict = Verdict()
    suffix = " of bfloat16" if Bfloat16 in map(type, side.model.modules()) else ""
    for step in range(len(checks.ids)):
        pooled, gradient, logits = side.traced_step(checks.batch(step, checks.rank))
        pooled, gradient = gather_rows(pooled), gather_rows(gradient)
        logits = None if logits is None else gather_rows(logits)
        if reference is None:
            continue
        want_pooled, want_logits = reference.step(step, gradient)
        size = len(side.features)
        for ours, want in zip(pooled.chunk(size, 1), want_pooled.chunk(size, 1), strict=True):
            verdict.compare("pooled", ours, want)
        if logits is not None and want_logits is not None:
            verdict.compare(f"logits{suffix}", logits, want_logits)
    _compare_rows(side, checks, reference, verdict)
    if reference is not None:
        dense = side.dense_parameters()
        for name, value in reference.dense.items():
            verdict.compare_changes(f"dense{suffix}", dense.get(name, torch.empty(0)),
                                    value.detach(), reference.dense_start[name])
    if side.tables is not None and (reference is not None or not side.tables.is_one_domain):
        for name in side.tables.specs:  # `read` is collective if there are several domains
            rows = side.tables.read(name)
            if reference is not None:
                verdict.compare("tables", rows, reference.weights[name].detach())
    if reference is not None:
        reference.reset()
    if dist.is_initialized():
        dist.barrier()
    return {} if reference is None else verdict.to_json()


def _compare_rows(side: Side, checks: Checks, reference: Reference | None, verdict: Verdict
                  ) -> None:
    """Look up the touched rows on rank 0 in bags of one id, and compare them there. Collective: the
    other ranks look up empty bags."""
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    work, dim = checks.work, checks.work.dim
    size = work.batch_size // checks.world_size
    touched = [checks.touched(t) for t in range(len(work.num_rows))]
    touched = [ids[:: -(-ids.size // _PROBED_ROWS)] for ids in touched]
    for begin in range(0, max(t.size for t in touched), size):
        part = [t[begin:begin + size] for t in touched]
        lengths = np.zeros((len(part), size), np.int32)
        if checks.rank == 0:
            for t, ids in enumerate(part):
                lengths[t, :ids.size] = 1
        ids = np.concatenate(part) if checks.rank == 0 else np.zeros(0, np.int64)
        kjt = KeyedJaggedTensor.from_lengths_sync(
            work.features, torch.from_numpy(ids), torch.from_numpy(lengths.reshape(-1)))
        rows = side.lookup(kjt)
        if reference is None:
            continue
        for t, weight in enumerate(reference.weights.values()):
            ours = rows[:part[t].size, t * dim:(t + 1) * dim]
            verdict.compare("rows", ours, weight.detach()[torch.from_numpy(part[t])])
