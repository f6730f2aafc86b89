"""Are the numbers the same? Contenders against the unsharded model, before anything is timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from oper.bench.sides import EPS, LEARNING_RATE, Side
from oper.bench.workload import CHECKED, Workload, batch_ids, make_batch, make_kjt

NUM_STEPS = 2
# max|a - b| <= tolerance * max|b| per tensor. A gradient that is given differs by the order of its
# sums only; one that went through a DLRM also by the shapes of its matrix products.
TOLERANCE = {"bags": 1e-5, "dlrm": 1e-4}
_PROBED_ROWS = 16_384  # per table, of the touched ones


@dataclass(slots=True)
class Verdict:
    """What a comparison has found.

    Attributes:
        tolerance: allowed max|a - b| / max|b| per tensor.
        worst: largest such ratio by kind of tensor.
    """

    tolerance: float
    worst: dict[str, float] = field(default_factory=dict)

    def compare(self, kind: str, ours: torch.Tensor, reference: torch.Tensor) -> None:
        """Take one tensor into account; NaN and wrong shapes never pass."""
        if ours.shape != reference.shape:
            self.worst[kind] = float("inf")
            return
        if not ours.numel():
            return
        scale = max(float(reference.abs().max()), 1e-30)
        found = float((ours - reference).abs().max()) / scale
        if not found <= self.worst.get(kind, 0.0):
            self.worst[kind] = found if found == found else float("inf")
        self.worst.setdefault(kind, 0.0)

    @property
    def passed(self) -> bool:
        """Whether something was compared and all of it agrees."""
        return bool(self.worst) and all(x <= self.tolerance for x in self.worst.values())

    def to_json(self) -> dict[str, Any]:
        """For the record."""
        worst = {k: None if x == float("inf") else float(f"{x:.3g}") for k, x in self.worst.items()}
        return {"passed": self.passed, "tolerance": self.tolerance, "max_relative_diff": worst}


class Reference:
    """The unsharded model, trained on the batches of all ranks together.

    Args:
        model: `BagsOnly` or `DLRMTrain` with an `EmbeddingBagCollection` on CPU.
        collection: that collection.
        gradient: output gradients of all ranks, float32 [W * B, sum of dims]; None for a DLRM.
        world_size: table gradients are divided by it, as data parallelism averages them.
    """

    def __init__(self, model: Any, collection: Any, gradient: torch.Tensor | None,
                 world_size: int) -> None:
        self._model = model
        self._gradient = None if gradient is None else gradient / world_size
        self.weights: dict[str, torch.nn.Parameter] = {}
        for name, bag in collection.embedding_bags.items():
            bag.sparse = True
            self.weights[name] = bag.weight
        self._state = {n: torch.zeros(w.shape[0]) for n, w in self.weights.items()}

    def step(self, batch: Any) -> torch.Tensor:
        """One step; returns the pooled embeddings or the logits before it."""
        self._model.zero_grad(set_to_none=True)
        if self._gradient is not None:
            out = self._model(batch.sparse_features).values()
            out.backward(self._gradient)
        else:
            loss, (_, out, _) = self._model(batch)
            loss.backward()
        with torch.no_grad():
            for name, weight in self.weights.items():
                self._update(self._state[name], weight)
            for value in self.dense_parameters().values():
                assert value.grad is not None
                value -= LEARNING_RATE * value.grad
        return out.detach()

    @staticmethod
    def _update(state: torch.Tensor, weight: torch.nn.Parameter) -> None:
        """Row-wise Adagrad on the touched rows."""
        assert weight.grad is not None
        gradient = weight.grad.coalesce()
        rows, values = gradient.indices()[0], gradient.values()
        state[rows] += values.pow(2).mean(dim=1)
        weight[rows] -= LEARNING_RATE * values / (state[rows].sqrt() + EPS)[:, None]

    def dense_parameters(self) -> dict[str, torch.Tensor]:
        """Parameters outside the tables, by name."""
        return {n: p for n, p in self._model.named_parameters() if "embedding_bag" not in n}


@dataclass(frozen=True, slots=True)
class Checks:
    """Input of the comparison, made alike by all ranks.

    Attributes:
        work: the workload.
        rank, world_size: who we are.
        ids: ids by step and rank, int64 [F, B * pooling] each.
    """

    work: Workload
    rank: int
    world_size: int
    ids: list[list[np.ndarray]]

    @staticmethod
    def make(work: Workload, rank: int, world_size: int) -> Checks:
        """The batches of `NUM_STEPS` steps of all ranks."""
        return Checks(work, rank, world_size, [
            [batch_ids(work, r, world_size, number, CHECKED) for r in range(world_size)]
            for number in range(NUM_STEPS)])

    def batch(self, step: int, rank: int) -> Any:
        """The batch of a rank."""
        return make_batch(self.work, self.ids[step][rank], (CHECKED, rank, step))

    def joint_batch(self, step: int) -> Any:
        """The batches of all ranks as one, in rank order."""
        from torchrec.datasets.utils import Batch

        parts = [self.batch(step, r) for r in range(self.world_size)]
        return Batch(torch.cat([p.dense_features for p in parts]),
                     make_kjt(self.work, np.concatenate(self.ids[step], axis=1)),
                     torch.cat([p.labels for p in parts]))

    def touched(self, table: int) -> np.ndarray:
        """Ids that the steps touch in a table, at most `_PROBED_ROWS`, evenly taken."""
        ids = np.unique(np.concatenate([x[table] for step in self.ids for x in step]))
        return ids[:: -(-ids.size // _PROBED_ROWS)]


def verify(sides: Sequence[Side], checks: Checks, reference: Reference | None,
           progress: Callable[[str], None]) -> dict[str, dict[str, Any]]:
    """Train every side for a few steps and compare with the unsharded model. Collective.

    Compared are the outputs of every step, afterwards the dense parameters, the touched rows (as
    lookups of single rows) and, on OPER's side, all rows of all tables.

    Args:
        sides: the contenders, freshly built.
        checks: the input.
        reference: on rank 0; None elsewhere.
        progress: told what is going on.

    Returns:
        By side on rank 0: ``passed``, ``tolerance``, ``max_relative_diff``. Elsewhere empty.
    """
    expected = []
    if reference is not None:
        progress("training the unsharded model")
        expected = [reference.step(checks.joint_batch(k)) for k in range(len(checks.ids))]
    verdicts = {}
    for side in sides:
        progress(f"comparing {side.name}")
        kind = "dlrm" if side.gradient is None else "bags"
        verdict = Verdict(TOLERANCE[kind])
        for step in range(len(checks.ids)):
            batch = checks.batch(step, checks.rank)
            mine = side.in_order(side.step(batch), batch).detach().contiguous()
            for rank, out in enumerate(_to_rank_0(mine)):
                size = out.shape[0]
                verdict.compare("outputs", out, expected[step][rank * size:(rank + 1) * size])
        _compare_rows(side, checks, reference, verdict)
        if reference is not None:
            dense = side.dense_parameters()
            for name, value in reference.dense_parameters().items():
                verdict.compare("dense", dense.get(name, torch.empty(0)), value)
            if side.tables is not None:
                for name, weight in reference.weights.items():
                    verdict.compare("tables", side.tables.read(name), weight.detach())
            verdicts[side.name] = verdict.to_json()
        if dist.is_initialized():
            dist.barrier()
    return verdicts


def _to_rank_0(value: torch.Tensor) -> list[torch.Tensor]:
    """Every rank's tensor of the same shape, by rank, on rank 0; empty elsewhere."""
    if not dist.is_initialized():
        return [value]
    if dist.get_rank():
        dist.gather(value)
        return []
    found = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.gather(value, found)
    return found


def _compare_rows(side: Side, checks: Checks, reference: Reference | None, verdict: Verdict
                  ) -> None:
    """Look the touched rows up one by one; rank 0 compares, the others look nothing up."""
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    work, dim = checks.work, checks.work.dim
    size = work.batch_size // checks.world_size
    touched = [checks.touched(t) for t in range(len(work.num_rows))]
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
