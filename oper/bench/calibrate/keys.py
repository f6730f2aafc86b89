"""Costs of the directories of dynamic tables, measured on one process with one thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from oper.shmem.keys.directories import rule_numbers
from oper.shmem.keys.rules import DynamicTable
from oper.shmem.library import load
from oper.support.numeric import mix64

_SLOTS, _DIM = 1 << 20, 64  # rows and columns of the table
_KEYS = 1 << 14  # keys of a batch, all distinct
_ROUNDS = 16
_SEEN_BYTES = 4 << 20  # space for the keys that a batch passes on to the update


def measure_keys() -> dict[str, float]:
    """Return ``key_ns``, ``key_count_ns`` and ``key_insert_ns`` of `oper.topology.Costs`.

    Medians over batches of distinct keys in a directory of a million rows that is half full, so
    that nearly every key is read from memory. Initialising a new row of 64 columns is included.
    """
    load()
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measure()
    finally:
        torch.set_num_threads(num_threads)


def _measure() -> dict[str, float]:
    operators = torch.ops.oper
    arguments = (torch.tensor([[*rule_numbers("keys", _SLOTS + 1, DynamicTable()), 0, 0, 0]]),
                 torch.zeros(1, 2, dtype=torch.float64))
    _, size = operators.keys_num_bytes(0, 1, _SEEN_BYTES, *arguments)
    arena = torch.zeros(size + 64, dtype=torch.uint8)
    handle = operators.keys_open([arena.data_ptr() + -arena.data_ptr() % 64], 0, _SEEN_BYTES,
                                 *arguments, [0])
    lengths, key_of = torch.tensor([_KEYS]), torch.tensor([0])

    def find(keys: torch.Tensor) -> list[torch.Tensor]:
        return list(operators.keys_find(handle, keys, lengths, key_of, 1, True)[1:4])

    def update(seen: list[torch.Tensor]) -> None:
        operators.keys_leave(handle, *([x] for x in seen))
        operators.keys_update(handle, [])

    try:
        keys = torch.from_numpy(mix64(np.arange(_SLOTS, dtype=np.uint64)).view(np.int64))
        batches = keys.view(-1, _KEYS)
        num_known = batches.shape[0] // 2
        for batch in batches[:num_known]:
            update(find(batch))
        times: dict[str, list[float]] = {"key_ns": [], "key_count_ns": [], "key_insert_ns": []}
        for k in range(_ROUNDS):
            known, new = batches[k % num_known], batches[num_known + k]
            found, seen = _timed(find, known)
            counted, _ = _timed(update, seen)
            inserted, _ = _timed(update, find(new))
            drawn, _ = _timed(operators.keys_draw, new, 0, _DIM, 0.1)
            for name, ns in zip(times, (found, counted, inserted + drawn), strict=True):
                times[name].append(ns)
        return {name: round(float(np.median(x)), 3) for name, x in times.items()}
    finally:
        operators.keys_close(handle)


def _timed(body: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Call `body`; return the nanoseconds per key of a batch, and the result."""
    begin = time.perf_counter()
    result = body(*arguments)
    return (time.perf_counter() - begin) * 1e9 / _KEYS, result
