"""The batcher: exact, in order of arrival, bounded; failures stay where they belong."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from oper.errors import InvalidInputError, OperError
from oper.serve.batching import (
    Batcher,
    BatchOptions,
    ExpiredError,
    OverloadedError,
    Ticket,
)
from oper.serve.requests import Request
from tests.serve_support import SIGNATURE, Sums, expected, random_request


class Gate(Sums):
    """Stands still until told; notes the sizes of its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.go, self.busy, self.sizes = threading.Event(), threading.Event(), []

    def predict(self, batch: Request) -> tuple[np.ndarray, int]:
        self.busy.set()
        assert self.go.wait(20)
        self.sizes.append(batch.num_samples)
        return super().predict(batch)


@pytest.fixture
def gate() -> Iterator[tuple[Gate, Batcher]]:
    gate = Gate()
    batcher = Batcher(gate, BatchOptions(max_samples=8, max_wait_ms=0, max_queued=20))
    yield gate, batcher
    gate.go.set()
    batcher.close()


def many(count: int, samples: int = 3) -> list[Request]:
    rng = np.random.default_rng(count)
    return [random_request(rng, samples) for _ in range(count)]


def submit(batcher: Batcher, requests: list[Request], **fields: Any) -> list[Ticket]:
    tickets = [Ticket(r, lambda _: None, **fields) for r in requests]
    for ticket in tickets:
        batcher.submit(ticket)
    return tickets


def finish(gate: Gate, batcher: Batcher) -> None:
    gate.go.set()
    batcher.close()


def test_what_waits_is_scored_together_and_exactly(gate: tuple[Gate, Batcher]) -> None:
    model, batcher = gate
    requests = many(6)
    tickets = submit(batcher, requests[:1])
    assert model.busy.wait(20)
    tickets += submit(batcher, requests[1:])
    assert batcher.queued == 15
    finish(model, batcher)
    assert model.sizes == [3, 6, 6, 3]  # at most 8 at a time
    for ticket, request in zip(tickets, requests, strict=True):
        assert ticket.result is not None
        assert np.array_equal(ticket.result[0], expected(request))


def test_a_request_beyond_the_batch_is_one_of_its_own(gate: tuple[Gate, Batcher]) -> None:
    model, batcher = gate
    ticket, = submit(batcher, many(1, 30))
    finish(model, batcher)
    assert model.sizes == [30]
    assert ticket.result is not None


def test_too_many_are_refused_and_harm_nobody(gate: tuple[Gate, Batcher]) -> None:
    model, batcher = gate
    first = submit(batcher, many(1))
    assert model.busy.wait(20)
    waiting = submit(batcher, many(6))
    with pytest.raises(OverloadedError, match="samples waiting=21, expected <= 20"):
        submit(batcher, many(1))
    finish(model, batcher)
    assert all(t.result is not None for t in first + waiting)
    with pytest.raises(OverloadedError, match="shutting down"):
        submit(batcher, many(1))


def test_expired_requests_are_not_scored(gate: tuple[Gate, Batcher]) -> None:
    model, batcher = gate
    submit(batcher, many(1))
    assert model.busy.wait(20)
    late, = submit(batcher, many(1), deadline=time.monotonic() - 1)
    live, = submit(batcher, many(1))
    finish(model, batcher)
    assert isinstance(late.error, ExpiredError)
    assert live.result is not None
    assert model.sizes == [3, 3]


def test_a_failure_stays_with_its_request(gate: tuple[Gate, Batcher]) -> None:
    model, batcher = gate
    requests = many(4, 2)
    requests[2].dense[1, 0] = 13
    submit(batcher, many(1))
    assert model.busy.wait(20)
    tickets = submit(batcher, requests)
    finish(model, batcher)
    assert [t.error is not None for t in tickets] == [False, False, True, False]
    assert isinstance(tickets[2].error, ValueError)
    for k in (0, 1, 3):
        assert np.array_equal(tickets[k].result[0], expected(requests[k]))


def test_an_idle_model_waits_for_more() -> None:
    model = Gate()
    model.go.set()
    batcher = Batcher(model, BatchOptions(max_samples=6, max_wait_ms=20_000))
    submit(batcher, many(2))  # fills the batch: no need to wait longer
    batcher.close()
    assert model.sizes == [6]


def test_threads_get_their_own_scores() -> None:
    batcher = Batcher(Sums(), BatchOptions(max_samples=16, max_wait_ms=0.2))
    requests = many(200)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(batcher.score, requests))
    batcher.close()
    for (scores, epoch), request in zip(found, requests, strict=True):
        assert epoch == 1
        assert np.array_equal(scores, expected(request))


def test_a_model_with_too_few_scores_is_noticed() -> None:
    class Broken(Sums):
        def predict(self, batch: Request) -> tuple[np.ndarray, int]:
            return super().predict(batch)[0][1:], 1

    batcher = Batcher(Broken(), BatchOptions())
    with pytest.raises(OperError, match="one per sample"):
        batcher.score(many(1)[0])
    batcher.close()


@pytest.mark.parametrize("fields", [{"max_samples": 0}, {"max_wait_ms": -1},
                                    {"max_wait_ms": float("nan")}, {"max_queued": 0}])
def test_bad_options_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(fields))):
        BatchOptions(**fields)


def test_signature_needs_different_names() -> None:
    with pytest.raises(InvalidInputError, match="different names"):
        type(SIGNATURE)("x", ("a", "a"), (1, 2), 0)
