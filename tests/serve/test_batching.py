"""The batcher: exact scores, order of arrival, bounded queue, isolated failures."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from oper.errors import InvalidInputError, OperError
from oper.serve.batching import (
    Batcher,
    BatchOptions,
    ExpiredError,
    OverloadedError,
    PendingRequest,
)
from oper.serve.requests import Request
from tests.serve_support import SIGNATURE, Sums, expected, random_request


class Noting(Sums):
    """Records the sizes of its batches."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__(seconds)
        self.sizes: list[int] = []

    def predict(self, batch: Request) -> tuple[np.ndarray, int]:
        self.sizes.append(batch.num_samples)
        return super().predict(batch)


@pytest.fixture
def parts() -> tuple[Noting, Batcher]:
    model = Noting()
    return model, Batcher(model, BatchOptions(max_samples=8, max_wait_ms=0, max_queued=20))


def many(count: int, samples: int = 3) -> list[Request]:
    rng = np.random.default_rng(count)
    return [random_request(rng, samples) for _ in range(count)]


def submit(batcher: Batcher, requests: list[Request], **fields: Any) -> list[PendingRequest]:
    pending = [PendingRequest(r, lambda _: None, **fields) for r in requests]
    for one in pending:
        batcher.submit(one)
    return pending


def finish(batcher: Batcher) -> None:
    while batcher.queued:
        batcher.turn()


def test_what_waits_is_scored_together_and_exactly(parts: tuple[Noting, Batcher]) -> None:
    model, batcher = parts
    assert batcher.due_s() is None
    requests = many(6)
    done: list[PendingRequest] = []
    for request in requests:
        batcher.submit(PendingRequest(request, done.append))
    assert (batcher.queued, batcher.due_s()) == (18, 0)
    finish(batcher)
    assert model.sizes == [6, 6, 6]  # at most 8 at a time
    assert [p.request for p in done] == requests
    for pending in done:
        assert pending.result is not None
        assert np.array_equal(pending.result[0], expected(pending.request))
    batcher.turn()  # nothing waits
    assert len(model.sizes) == 3


def test_a_request_beyond_the_batch_is_one_of_its_own(parts: tuple[Noting, Batcher]) -> None:
    model, batcher = parts
    large, small = [*submit(batcher, many(1, 30)), PendingRequest(many(1)[0], lambda _: None)]
    with pytest.raises(OverloadedError):
        batcher.submit(small)
    finish(batcher)
    assert model.sizes == [30]
    assert large.result is not None


def test_too_many_are_refused_and_harm_nobody(parts: tuple[Noting, Batcher]) -> None:
    _, batcher = parts
    waiting = submit(batcher, many(6))
    with pytest.raises(OverloadedError, match="samples waiting=21, expected <= 20"):
        submit(batcher, many(1))
    finish(batcher)
    assert all(p.result is not None for p in waiting)
    submit(batcher, many(1))


def test_expired_requests_are_not_scored(parts: tuple[Noting, Batcher]) -> None:
    model, batcher = parts
    late, = submit(batcher, many(1), deadline=time.monotonic() - 1)
    live, = submit(batcher, many(1))
    last, = submit(batcher, many(1), deadline=time.monotonic() - 1)
    batcher.turn()
    assert isinstance(late.error, ExpiredError) and isinstance(last.error, ExpiredError)
    assert live.result is not None
    assert (model.sizes, batcher.queued) == ([3], 0)


def test_a_batch_is_no_larger_than_its_deadlines_allow() -> None:
    """At the measured time per sample, a batch of both requests would miss the first deadline."""
    model = Noting(0.05)
    batcher = Batcher(model, BatchOptions(max_samples=64))
    submit(batcher, many(1))
    batcher.turn()  # 50 ms for 3 samples
    hasty = submit(batcher, many(1), deadline=time.monotonic() + 0.08)
    patient = submit(batcher, many(4))
    finish(batcher)
    assert model.sizes == [3, 3, 12]
    assert all(p.result is not None for p in hasty + patient)


def test_a_failure_stays_with_its_request(parts: tuple[Noting, Batcher]) -> None:
    _, batcher = parts
    requests = many(4, 2)
    requests[2].dense[1, 0] = 13
    pending = submit(batcher, requests)
    finish(batcher)
    assert [p.error is not None for p in pending] == [False, False, True, False]
    assert isinstance(pending[2].error, ValueError)
    for k in (0, 1, 3):
        assert np.array_equal(pending[k].result[0], expected(requests[k]))


def test_an_idle_model_waits_for_more_but_not_beyond_a_deadline() -> None:
    batcher = Batcher(Noting(), BatchOptions(max_samples=6, max_wait_ms=20_000))
    submit(batcher, many(1))
    assert 19 < (batcher.due_s() or 0) <= 20
    submit(batcher, many(1))  # fills the batch: no need to wait longer
    assert batcher.due_s() == 0
    finish(batcher)
    submit(batcher, many(1), deadline=time.monotonic() + 5)
    assert 4 < (batcher.due_s() or 0) <= 5


def test_a_model_with_too_few_scores_is_noticed() -> None:
    class Broken(Sums):
        def predict(self, batch: Request) -> tuple[np.ndarray, int]:
            return super().predict(batch)[0][1:], 1

    batcher = Batcher(Broken(), BatchOptions())
    pending, = submit(batcher, many(1))
    batcher.turn()
    assert isinstance(pending.error, OperError) and "one per sample" in str(pending.error)


def test_scores_that_are_not_finite_fail_their_request_alone() -> None:
    class Broken(Sums):
        def predict(self, batch: Request) -> tuple[np.ndarray, int]:
            scores, epoch = super().predict(batch)
            scores[batch.dense[:, 0] == 7] = np.nan
            return scores, epoch

    batcher = Batcher(Broken(), BatchOptions())
    requests = many(3)
    requests[1].dense[2, 0] = 7
    pending = submit(batcher, requests)
    batcher.turn()
    assert "scores of epoch 1='inf or nan'" in str(pending[1].error)
    assert pending[0].result is not None and pending[2].result is not None


@pytest.mark.parametrize("fields", [{"max_samples": 0}, {"max_wait_ms": -1},
                                    {"max_wait_ms": float("nan")}, {"max_queued": 0}])
def test_bad_options_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(fields))):
        BatchOptions(**fields)


def test_signature_needs_different_names() -> None:
    with pytest.raises(InvalidInputError, match="different names"):
        type(SIGNATURE)("x", ("a", "a"), (1, 2), 0)
