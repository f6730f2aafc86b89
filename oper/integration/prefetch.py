"""Preprocessing of the ids of later batches on a separate thread while a batch is trained.

The thread runs only `ShardedTables.resolve`, which checks, locates and sorts ids but reads no row,
so its results do not depend on the rows that the current batch is going to update.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from oper.shmem.batch import Lookup, version_of
from oper.shmem.tables import ShardedTables

_MOST_QUEUED = 8  # batches retained for `pop`; beyond this, the oldest is dropped


class PrefetchQueue:
    """Resolves batches of one collection in advance of their lookups.

    Args:
        tables: the collection's tables.

    Attributes:
        queued: by id() of the batch's values: the batch, `_versions` of it, and the future of its
            `Lookup`.
    """

    def __init__(self, tables: ShardedTables) -> None:
        self._tables = tables
        self._thread: ThreadPoolExecutor | None = None
        self.queued: OrderedDict[int, tuple[KeyedJaggedTensor, tuple[int, ...], Future[Lookup]]]
        self.queued = OrderedDict()
        self._lock = threading.Lock()  # several threads may prefetch and look up

    def __deepcopy__(self, memo: dict[int, Any]) -> PrefetchQueue:
        return PrefetchQueue(copy.deepcopy(self._tables, memo))

    def start(self, batch: Lookup) -> Future[Lookup]:
        """Start preprocessing a batch; within `oper.micro_batches`, start its entire lookup."""
        parts = self._tables.turns.parts
        if parts is not None:
            return parts.start(batch)
        with self._lock:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="oper-prefetch")
        return self._thread.submit(self._tables.to_resolve(batch))

    def enqueue(self, features: KeyedJaggedTensor, batch: Lookup) -> None:
        """Start preprocessing a batch and retain it, so that `pop` can return it.

        Outside of `oper.micro_batches`, does nothing for tensors of inference mode: they have no
        version counter that would reveal changes.
        """
        if self._tables.turns.parts is None and any(
                x is not None and x.is_inference() for x in _tensors(features)):
            return
        versions = _versions(features)
        started = self.start(batch)
        with self._lock:
            while len(self.queued) >= _MOST_QUEUED:
                self.queued.popitem(last=False)
            self.queued[id(features.values())] = (features, versions, started)

    def pop(self, features: KeyedJaggedTensor) -> Lookup | None:
        """Wait for the preprocessed batch of the same tensor objects, remove it and return it.

        None if there is no such batch, or `_versions` differ, since it has been modified.
        """
        with self._lock:
            known = self.queued.get(id(features.values()))
            if (known is None or not are_same(known[0], features)
                    or known[1] != _versions(features)):
                return None
            del self.queued[id(features.values())]
        return known[2].result()


def are_same(a: KeyedJaggedTensor, b: KeyedJaggedTensor) -> bool:
    """Return whether two batches consist of the same tensor objects under the same keys."""
    return a is b or (
        a.values() is b.values() and a.lengths() is b.lengths()
        and a.weights_or_none() is b.weights_or_none() and a.keys() == b.keys()
        and _inverse(a) is _inverse(b))


def _versions(features: KeyedJaggedTensor) -> tuple[int, ...]:
    """Return `version_of` the tensors whose changes `ResolvedIds` and `LookedUp` do not notice: the
    lengths, the inverse_indices, and ids and weights of which a `Lookup` has a converted copy."""
    values, weights, *others = _tensors(features)
    assert values is not None
    copied = [values] if not values.is_contiguous() else []
    if weights is not None and not (weights.is_contiguous() and weights.dtype == torch.float32):
        copied.append(weights)
    return *map(version_of, others), *map(version_of, copied)


def _tensors(features: KeyedJaggedTensor) -> list[torch.Tensor | None]:
    """Return ids, weights, lengths and inverse_indices of a batch."""
    return [features.values(), features.weights_or_none(), features.lengths(), _inverse(features)]


def _inverse(features: KeyedJaggedTensor) -> torch.Tensor | None:
    found = features.inverse_indices_or_none()
    return None if found is None else found[1]
