"""DLRM models and KJT batches for integration tests; import this module inside tests (torchrec)."""

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.datasets.utils import Batch
from torchrec.models.dlrm import DLRM, DLRMTrain

import oper
from oper.integration.torchrec_modules import table_specs
from oper.plan import Plan, uniform_plan
from tests.random_plans import mixed_plan

NUM_DENSE = 5
EBC = "model.sparse_arch.embedding_bag_collection"


def configs(dim: int = 16) -> list[EmbeddingBagConfig]:
    """Return a one-row table, a shared feature, a table with two features, and both mean and sum.
    """
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
    """Make a DLRM without t3, since a shared feature would count twice in the interaction."""
    torch.manual_seed(seed)
    tables = [c for c in configs() if c.name != "t3"]
    return DLRMTrain(DLRM(
        EmbeddingBagCollection(tables=tables, device=torch.device(device)), NUM_DENSE, [8, 16],
        [8, 1], dense_device=torch.device("cpu")))


def make_kjt(seed: int, size: int, weighted: bool = False) -> KeyedJaggedTensor:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 4, (len(KEYS), size))
    values = np.concatenate(
        [(ROWS[k] * rng.random(int(n)) ** 3).astype(np.int64)
         for k, n in zip(KEYS, lengths.sum(1), strict=True)])
    weights = torch.from_numpy(rng.normal(1, 0.3, values.size).astype(np.float32))
    return KeyedJaggedTensor.from_lengths_sync(
        KEYS, torch.from_numpy(values), torch.from_numpy(lengths.reshape(-1)),
        weights if weighted else None)


def make_batch(seed: int, size: int = 12) -> Batch:
    rng = np.random.default_rng(seed + 7_000)
    return Batch(
        dense_features=torch.from_numpy(rng.normal(size=(size, NUM_DENSE)).astype(np.float32)),
        sparse_features=make_kjt(seed, size),
        labels=torch.from_numpy(rng.integers(0, 2, size)))


def plan_for(collection: EmbeddingBagCollection, world_size: int, kind: str = "striped") -> Plan:
    """Make a plan by name; ``mixed<seed>`` has tiers of all kinds."""
    tables = table_specs(collection)
    if kind.startswith("mixed"):
        return mixed_plan(tables, world_size, int(kind[5:]))
    return uniform_plan(tables, world_size, kind)


def sharded_dlrm(world_size: int, kind: str = "striped", **options: Any) -> Any:
    """Make a DLRM and shard it by `plan_for`; `options`: arguments of `oper.shard`."""
    model = make_dlrm(3)
    return oper.shard(model, plan=plan_for(model.get_submodule(EBC), world_size, kind), **options)


@contextmanager
def virtual_ranks() -> Iterator[threading.local]:
    """Let `oper.shard` find the virtual rank of its thread: set ``.group`` of the yielded object.
    """
    local = threading.local()
    with mock.patch("oper.shmem.group.groups.default_group",
                    lambda process_group=None: local.group):
        yield local


def copies(model: torch.nn.Module, count: int) -> list[torch.nn.Module]:
    return [copy.deepcopy(model) for _ in range(count)]
