"""DLRM models and KJT batches for the integration tests; import it inside tests (torchrec)."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.datasets.utils import Batch
from torchrec.models.dlrm import DLRM, DLRMTrain

from oper.integration.torchrec_modules import table_specs
from oper.plan import Plan, uniform_plan
from oper.shmem.group.groups import ThreadGroup
from oper.shmem.optim.optimizers import Optimizer
from tests.runtime_support import apply_optimizer, mixed_plan

NUM_DENSE = 5
EBC = "model.sparse_arch.embedding_bag_collection"


def configs(dim: int = 16) -> list[EmbeddingBagConfig]:
    """A one-row table, a shared feature, a table of two features, mean beside sum."""
    mean = PoolingType.MEAN
    shapes: list[tuple[str, int, list[str], PoolingType]] = [
        ("t0", 200, ["a"], PoolingType.SUM), ("t1", 60, ["b", "c"], mean),
        ("t2", 1, ["d"], PoolingType.SUM), ("t3", 80, ["a"], mean),
        ("t4", 3000, ["e"], PoolingType.SUM)]
    return [EmbeddingBagConfig(name=n, num_embeddings=r, embedding_dim=dim, feature_names=f,
                               pooling=p) for n, r, f, p in shapes]


KEYS = ["e", "unused", "c", "a", "d", "b"]
ROWS = {"a": 80, "b": 60, "c": 60, "d": 1, "e": 3000, "unused": 10**9}


def make_collection(seed: int = 0, device: str = "cpu", **fields: Any) -> EmbeddingBagCollection:
    torch.manual_seed(seed)
    return EmbeddingBagCollection(tables=configs(), device=torch.device(device), **fields)


def make_dlrm(seed: int = 0, device: str = "cpu") -> DLRMTrain:
    """DLRM with a shared feature would count it twice in the interaction: leave t3 out."""
    torch.manual_seed(seed)
    tables = [c for c in configs() if c.name != "t3"]
    return DLRMTrain(DLRM(
        EmbeddingBagCollection(tables=tables, device=torch.device(device)), NUM_DENSE, [8, 16],
        [8, 1], dense_device=torch.device("cpu")))


def make_kjt(seed: int, size: int, weighted: bool = False, int32: bool = False
             ) -> KeyedJaggedTensor:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 4, (len(KEYS), size))
    values = np.concatenate(
        [(ROWS[k] * rng.random(int(n)) ** 3).astype(np.int64)
         for k, n in zip(KEYS, lengths.sum(1), strict=True)])
    weights = torch.from_numpy(rng.normal(1, 0.3, values.size).astype(np.float32))
    kind = torch.int32 if int32 else torch.int64
    return KeyedJaggedTensor.from_lengths_sync(
        KEYS, torch.from_numpy(values).to(kind), torch.from_numpy(lengths.reshape(-1)).to(kind),
        weights if weighted else None)


def make_batch(seed: int, size: int = 12) -> Batch:
    rng = np.random.default_rng(seed + 7_000)
    return Batch(
        dense_features=torch.from_numpy(rng.normal(size=(size, NUM_DENSE)).astype(np.float32)),
        sparse_features=make_kjt(seed, size),
        labels=torch.from_numpy(rng.integers(0, 2, size)))


def plan_for(collection: EmbeddingBagCollection, world_size: int, kind: str = "striped") -> Plan:
    """A plan by name; ``mixed<seed>`` has tiers of all kinds."""
    tables = table_specs(collection)
    if kind.startswith("mixed"):
        return mixed_plan(tables, world_size, int(kind[5:]))
    return uniform_plan(tables, world_size, kind)


@contextmanager
def virtual_ranks() -> Iterator[threading.local]:
    """Lets `oper.shard` find the virtual rank of its thread: set ``.group`` of what this yields."""
    local = threading.local()
    with mock.patch("oper.shmem.group.groups.default_group",
                    lambda process_group=None: local.group):
        yield local


# ---- the unsharded model, and the same on virtual ranks ------------------------------------------


def train_unsharded(model: torch.nn.Module, batches: Sequence[Sequence[Batch]],
                    optimizer: Optimizer, dense_lr: float) -> list[list[torch.Tensor]]:
    """Train on the mean of the ranks' losses; outputs by step and rank.

    Tables by `apply_optimizer`, everything else by plain SGD.
    """
    tables = {n: p for n, p in model.named_parameters() if "embedding_bags" in n}
    states = {n: {"momentum1": torch.zeros(p.shape[0], dtype=p.dtype)} for n, p in tables.items()}
    outputs = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for step, parts in enumerate(batches, 1):
        model.zero_grad()
        results = [model(b) for b in parts]
        (torch.stack([loss for loss, _ in results]).sum() / len(parts)).backward()
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name in tables:
                    touched = (p.grad != 0).any(1)
                    apply_optimizer(optimizer, step, p.data, states[name], p.grad, touched)
                else:
                    p -= dense_lr * p.grad
        outputs.append([logits.detach() for _, (_, logits, _) in results])
    torch.set_num_threads(threads)
    return outputs


def train_sharded_rank(model: torch.nn.Module, batches: Sequence[Sequence[Batch]],
                       group: ThreadGroup, dense_lr: float) -> list[torch.Tensor]:
    """One virtual rank of data-parallel training: dense gradients are averaged in rank order."""
    outputs = []
    for parts in batches:
        model.zero_grad()
        loss, (_, logits, _) = model(parts[group.rank])
        loss.backward()
        dense = [p for p in model.parameters() if p.grad is not None]
        grads = group.all_gather([p.grad for p in dense])
        with torch.no_grad():
            for k, p in enumerate(dense):
                p -= dense_lr * torch.stack([g[k] for g in grads]).sum(0) / group.world_size
        group.all_gather(None)  # gradients are read by all before they are zeroed
        outputs.append(logits.detach().clone())
    return outputs


def copies(model: torch.nn.Module, count: int) -> list[torch.nn.Module]:
    return [copy.deepcopy(model) for _ in range(count)]


def assert_close(got: torch.Tensor, want: torch.Tensor, what: str, best: torch.Tensor | None = None
                 ) -> None:
    """The project's criterion, as in `runtime_support.assert_exact`, for one tensor."""
    largest = want.abs().max().item()
    gap = (got - want).abs().max().item()
    assert gap <= 1e-5 * largest, f"{what}: differs by {gap}, largest value {largest}"
    if best is not None:
        error = (got.double() - best).abs().max().item()
        allowed = 4 * (want.double() - best).abs().max().item() + largest * 2.0**-24
        assert error <= allowed, f"{what}: {error} from float64, allowed {allowed}"
