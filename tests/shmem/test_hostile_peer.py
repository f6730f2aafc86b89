"""A rank of another memory domain that sends anything: an error or other numbers, never a crash."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
import torch

from oper.errors import OperError
from oper.shmem.exchange.host import _served
from oper.shmem.group.desync import Spot, Verdict
from oper.shmem.group.groups import ThreadGroup
from tests.runtime_support import (
    OPTIMIZERS,
    OTHER_OPTIMIZERS,
    dlrm_case,
    make_steps,
    mixed_plan,
    open_tables,
    rank_loss,
    rich_plan,
    run_ranks,
)

ALL_OPTIMIZERS = OPTIMIZERS | OTHER_OPTIMIZERS


class Hostile:
    """A transport whose n-th message is not what the kernels have written."""

    spot = Spot(0, 0)

    def __init__(self, inner: Any, at: int, words: dict[int, int] | None) -> None:
        self._inner, self._at, self._words = inner, at, words
        self.calls = 0

    def exchange(self, send: torch.Tensor, *sizes: Any) -> None:
        self.calls += 1
        words = send.numel() // 4
        if self.calls == self._at and words:
            send = send.clone()
            numbers = send[:4 * words].view(torch.int32)
            if self._words is None:
                numbers[:] = -1
            for place, value in (self._words or {}).items():
                numbers[place % words] = value
        self._inner.exchange(send, *sizes)

    def blame(self, verdict: Verdict) -> Verdict:
        return verdict

    def give_up(self, verdict: Verdict) -> None:
        pass


def run(optimizer: str, seed: int, at: int, words: dict[int, int] | None) -> tuple[int, str]:
    """Two training steps in which rank 1 is hostile; its messages, and rank 0's error."""
    case = dlrm_case(optimizer)
    plan = (rich_plan(case.tables, 2, seed, columns=True) if seed % 2 else
            mixed_plan(case.tables, 2, seed))
    steps = make_steps(case, 2, 2)
    calls, told = [0], [""]

    def body(group: ThreadGroup) -> None:
        tables = open_tables(case, plan, group, ALL_OPTIMIZERS[optimizer])
        assert tables._exchange is not None
        if group.rank == 1:
            hostile = Hostile(tables._exchange._transport, at, words)
            tables._exchange._transport = hostile
        try:
            for batches in steps:
                batch = batches[group.rank]
                rank_loss(tables.lookup(batch.lookup(case)), batch.target).backward()
        except OperError as error:
            if group.rank == 0:
                told[0] = str(error)
            raise
        finally:
            if group.rank == 1:
                calls[0] = hostile.calls

    with contextlib.suppress(OperError, RuntimeError, AssertionError):
        run_ranks(2, body, domains=(0, 1))
    return calls[0], told[0]


@pytest.mark.parametrize("optimizer, seed", [("rowwise_adagrad", 1), ("sgd", 2)])
def test_slots_beyond_all_tables_are_refused(optimizer: str, seed: int) -> None:
    """Every message in turn with all bits set: numbers of rows and of bags are among them."""
    total, _ = run(optimizer, seed, 0, None)
    assert total >= 8
    refused = [run(optimizer, seed, at, None)[1] for at in range(1, total + 1)]
    told = "what no rank of this job can send: rank=1"
    assert sum(told in text for text in refused) >= 3, refused


def test_random_words_crash_nothing() -> None:
    rng = random.Random(5)
    total, _ = run("rowwise_adagrad", 1, 0, None)
    for _ in range(40):
        words = {rng.randrange(1 << 20): rng.choice([rng.randrange(-2**31, 2**31),
                                                     rng.randrange(0, 300)])
                 for _ in range(rng.randrange(1, 6))}
        run("rowwise_adagrad", rng.choice([1, 3]), rng.randrange(1, total + 1), words)


@pytest.mark.parametrize("part, piece, slots", [
    (b"rows", 0, [0, 10]), (b"rows", 0, [-1]), (b"rows", 7, [0]), (b"\xff", 0, [0])])
def test_requests_for_rows_that_there_are_not(part: bytes, piece: int, slots: list[int]) -> None:
    shards = [torch.zeros(10, 4)]

    def serve(name: str, number: int) -> torch.Tensor:
        assert name == "rows"
        return shards[number]

    with pytest.raises(OperError, match="that there are not"):
        _served(serve, part, piece, torch.tensor(slots))
    assert _served(serve, b"rows\0\0", 0, torch.tensor([9])).numel() == 16
