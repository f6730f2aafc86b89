"""Requests: validation, joining, encoding and batching."""

import math
import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from oper.errors import InvalidInputError
from oper.serve import Request, wire
from oper.serve.batching import Batcher, BatchOptions, PendingRequest
from oper.serve.requests import ServerError, join
from tests.serve_support import SIGNATURE, Sums, as_json, expected, random_request, with_user

ONE = Request(np.array([[0.5, 1]], np.float32), np.array([[1], [0], [2]], np.int32),
              np.array([99, 0, 6]))


def same(a: Request, b: Request) -> bool:
    return all(np.array_equal(getattr(a, n), getattr(b, n)) for n in ("dense", "lengths", "ids"))


@given(st.integers(0, 1 << 30), st.lists(st.integers(0, 5), min_size=1, max_size=6), st.booleans())
def test_joined_requests_score_like_single_ones(seed: int, sizes: list[int], uniform: bool) -> None:
    rng = np.random.default_rng(seed)
    requests = [random_request(rng, size, uniform) for size in sizes]
    joined = join(requests)
    joined.check(SIGNATURE)
    assert np.array_equal(expected(joined), np.concatenate([expected(r) for r in requests]))


@given(st.integers(0, 1 << 30), st.integers(0, 6))
def test_the_wire_keeps_a_request(seed: int, size: int) -> None:
    request = random_request(np.random.default_rng(seed), size)
    request.check(SIGNATURE)
    assert same(wire.decode_request(*wire.encode_request(request), SIGNATURE), request)


@given(st.integers(0, 10**6), st.lists(st.integers(1, 9), min_size=1, max_size=4),
       st.sets(st.integers(0, 2)), st.booleans())
def test_a_users_features_are_those_of_all_candidates(seed: int, sizes: list[int],
                                                      shared: set[int], mixed: bool) -> None:
    rng = np.random.default_rng(seed)
    requests = [with_user(random_request(rng, n), tuple(sorted(shared))) for n in sizes]
    full = [r.expanded() for r in requests]
    for request, whole in zip(requests, full, strict=True):
        whole.check(SIGNATURE)
        bags = {k: request.ids[n:n + request.lengths[k, 0]] for k, n in enumerate(
            np.cumsum([0, *request.lengths.sum(axis=1)])[:-1])}
        ends = np.cumsum(whole.lengths).reshape(whole.lengths.shape)
        for k in shared:
            for end, length in zip(ends[k], whole.lengths[k], strict=True):
                assert np.array_equal(whole.ids[end - length:end], bags[k])
        body, header = wire.encode_request(request, list(SIGNATURE.features))
        found = wire.decode_request(body, header, SIGNATURE)
        assert found.shared == request.shared
        assert same(found, request)
        again = wire.decode_request(*wire.encode_request(request), SIGNATURE)  # without names
        assert not again.shared and same(again, whole)
    if mixed:
        requests.append(random_request(rng, 3))
        full.append(requests[-1])
    found, want = join(requests), join(full)
    assert bool(found.shared) == (bool(shared) and not mixed)
    assert same(found.expanded(), want)


def test_messages_of_numbers_in_json_may_be_large() -> None:
    values = np.arange(200_000, dtype=np.int64)
    body, length = wire.encode({"ids": values}, "inputs", {}, binary=False)
    assert length == len(body) > 1 << 20
    _, tensors = wire.decode(body, None, "inputs")
    assert np.array_equal(tensors["ids"], values)
    with pytest.raises(InvalidInputError, match="header length"):
        wire.decode(body, length, "inputs")


def test_a_users_features_are_checked() -> None:
    request = with_user(random_request(np.random.default_rng(0), 4, uniform=True), (0, 2))
    body, header = wire.encode_request(request, list(SIGNATURE.features))

    def refused(old: bytes, new: bytes, words: str) -> None:
        changed = body[:header].replace(old, new) + body[header:]
        with pytest.raises(InvalidInputError, match=words):
            wire.decode_request(changed, len(changed) - len(body) + header, SIGNATURE)

    refused(b'"a,c"', b'"a,b"', "lengths of user_features='more than one bag'")
    refused(b'"a,c"', b'"a,d"', "unknown features")
    refused(b'"a,c"', b'"a,a"', "features=.*every feature at most once")
    refused(b'"a,c"', b'7', "user_features=7, expected text")
    refused(b'"a,b,c"', b'"c,b,a"', "cannot score")


def changed(**fields: Any) -> Request:
    r = random_request(np.random.default_rng(1), 4, uniform=True)
    return Request(**{"dense": r.dense, "lengths": r.lengths, "ids": r.ids} | fields)


def with_id(at: int, value: int) -> np.ndarray:
    ids = changed().ids.copy()
    ids[at] = value
    return ids


@pytest.mark.parametrize(("request_", "words"), [
    (changed(ids=with_id(0, 100)), r"id of feature 'a'=100, expected in \[0, 100\)"),
    (changed(ids=with_id(4, -1)), r"id of feature 'b'=-1"),
    (changed(ids=with_id(11, 7)), r"id of feature 'c'=7"),
    (changed(ids=np.zeros(11, np.int64)), "number of ids=11, expected 12"),
    (changed(ids=np.zeros(12, np.int32)), "ids='int32"),
    (changed(dense=np.zeros((4, 3), np.float32)), "shape of dense"),
    (changed(dense=np.zeros((4, 2))), "dense='float64"),
    (changed(dense=np.full((4, 2), np.nan, np.float32)), "finite"),
    (changed(lengths=np.ones((2, 4), np.int32)), "shape of lengths"),
    (changed(lengths=np.array([[2, -1, 2, 1], [1] * 4, [1] * 4], np.int32)), "lengths=-1"),
])
def test_bad_requests_are_named(request_: Request, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        request_.check(SIGNATURE)


def test_raw_keys_may_be_any_numbers() -> None:
    ends = np.iinfo(np.int64)
    keys = changed(ids=np.array([ends.min, ends.max, -1, 0, *[49] * 4, *[6] * 4], np.int64))
    keys.check(replace(SIGNATURE, num_rows=(None, 50, 7)))
    with pytest.raises(InvalidInputError, match=r"id of feature 'c'=6, expected in \[0, 6\)"):
        keys.check(replace(SIGNATURE, num_rows=(None, 50, 6)))


@pytest.mark.parametrize(("features", "words"), [
    (["a", "b", "z"], "unknown features"), (["a", "a", "b"], "at most once"),
    (["a", "b"], "rows of lengths"),
])
def test_bad_features_are_named(features: list[str], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        wire.decode_request(*wire.encode_request(changed(), features), SIGNATURE)


def test_sizes_are_checked_before_memory_is_allocated() -> None:
    body, length = wire.encode(
        {"dense": np.zeros((1, 2), np.float32), "ids": np.zeros(0, np.int64),
         "lengths": np.zeros((0, 1 << 40), np.int32)}, "inputs", {"features": ""})
    with pytest.raises(InvalidInputError, match="columns of lengths"):
        wire.decode_request(body, length, SIGNATURE)
    body, length = wire.encode(
        {"dense": np.zeros((1 << 40, 0), np.float32), "ids": np.zeros(0, np.int64),
         "lengths": np.zeros((0, 1 << 40), np.int32)}, "inputs", {"features": ""})
    with pytest.raises(InvalidInputError, match=r"samples without dense numbers.*=1099511627776"):
        wire.decode_request(body, length, replace(SIGNATURE, num_dense=0))


@pytest.mark.parametrize(("name", "data", "words"), [
    ("ids", ["x"], r"data of 'ids'='x', expected integers in INT64's range"),
    ("ids", [True, 0, 6], r"data of 'ids'=True, expected integers in INT64's range"),
    ("ids", [1.5, 0, 6], r"data of 'ids'=1\.5, expected integers in INT64's range"),
    ("ids", [1 << 70, 0, 6], r"data of 'ids'=1180591620717411303424, expected integers in"),
    ("lengths", [1 << 40, 0, 2], r"data of 'lengths'=1099511627776, expected integers in "),
    ("ids", [1, 2], r"data of 'ids'='2 numbers', expected 3, as INT64 \[3\]"),
    ("ids", [[1], [2, 3]], r"data of 'ids'='3 numbers', expected 3, .*lists of equal length"),
    ("ids", None, r"data of 'ids'=None, expected integers in"),
    ("dense", [[0.5, 10 ** 400]], r"data of 'dense'=1000.*numbers in FP32's range"),
    ("dense", [[0.5, "1"]], r"data of 'dense'='1', expected numbers in FP32's range"),
    ("dense", [[[[[[[[[[0.5]]]]]]]]]], r"lists in lists', expected at most 8 deep"),
    ("ids", [99, 1.0, 6], r"data of 'ids'=1\.0, expected integers in"),
    ("ids", [99, None, 6], r"data of 'ids'=None, expected integers in"),
    ("ids", {"0": 1}, r"data of 'ids'=\{'0': 1\}, expected integers in"),
    ("lengths", [1, 1, 0.0], r"data of 'lengths'=0\.0, expected integers in"),
    ("dense", [[True, False]], r"data of 'dense'=True, expected numbers in FP32's range"),
    ("dense", [[1, 1e300]], r"dense='inf or nan', expected finite numbers"),
    ("dense", [[1, float("nan")]], r"dense='inf or nan', expected finite numbers"),
])
def test_wrong_numbers_are_reported_in_terms_of_the_protocol(name: str, data: object, words: str
                                                             ) -> None:
    """Errors avoid NumPy's and Python's terms; no number is truncated, wrapped or parsed."""
    with pytest.raises(InvalidInputError, match=words) as caught:
        wire.decode_request(as_json(ONE, **{name: data}), None, SIGNATURE)
    assert not re.search(r"str\d|int64|float\d|Error|array|ndarray|truth", str(caught.value))


@pytest.mark.parametrize(("header", "words"), [
    (b"{", "expected JSON"), (b"[1]", "expected a JSON object"),
    (b"{}", "inputs, a list of tensors"),
    (b'{"inputs": [{}]}', "name, datatype and shape"), (b'{"inputs": 3}', "a list of tensors"),
    *((b'{"inputs": [{"name": "ids", "datatype": "INT64", "shape": [%s]%s}]}' % (
        b"1%s, 1%s" % (b"0" * 4000, b"0" * 4000), data), "at most 8 numbers in")
      for data in (b"", b', "data": [1]')),
    *((b'{"inputs": [{"name": "ids", "datatype": "INT64", "shape": %s, "data": [1]}]}' % shape,
       "name, datatype and shape") for shape in (b"[1.5]", b'"1"', b"[true]", b"1")),
    (b"[" * 100_000, "JSON"),
])
def test_a_wrong_header_is_reported_in_terms_of_the_protocol(header: bytes, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words) as caught:
        wire.decode_request(header, None, SIGNATURE)
    assert "Error" not in str(caught.value) and "object is not" not in str(caught.value)


# ---- the batcher ---------------------------------------------------------------------------------


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


def test_waiting_requests_are_scored_together_and_exactly(parts: tuple[Noting, Batcher]) -> None:
    model, batcher = parts
    assert batcher.due_s() == math.inf
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


def test_a_request_larger_than_a_batch_is_scored_alone(parts: tuple[Noting, Batcher]) -> None:
    model, batcher = parts
    large, small = [*submit(batcher, many(1, 30)), PendingRequest(many(1)[0], lambda _: None)]
    with pytest.raises(ServerError):
        batcher.submit(small)
    finish(batcher)
    assert model.sizes == [30]
    assert large.result is not None


def test_requests_beyond_the_queue_are_refused_and_do_not_affect_others(
        parts: tuple[Noting, Batcher]) -> None:
    _, batcher = parts
    waiting = submit(batcher, many(6))
    with pytest.raises(ServerError, match="samples waiting=21, expected <= 20"):
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
    for error in (late.error, last.error):
        assert isinstance(error, ServerError) and error.status == 504
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


def test_only_the_failing_request_gets_an_error(parts: tuple[Noting, Batcher]) -> None:
    _, batcher = parts
    requests = many(4, 2)
    requests[2].dense[1, 0] = 13
    pending = submit(batcher, requests)
    finish(batcher)
    assert [p.error is not None for p in pending] == [False, False, True, False]
    assert isinstance(pending[2].error, ValueError)
    for k in (0, 1, 3):
        assert np.array_equal(pending[k].result[0], expected(requests[k]))


@pytest.mark.parametrize("shares", [False, True])
def test_copies_for_a_small_request_cannot_take_all_memory(shares: bool) -> None:
    """A request of 0.5 MB would become one of 2 GB."""
    lengths = np.zeros((3, 5000), np.int32)
    lengths[0, 0] = 50_000
    wide = Request(np.zeros((5000, 2), np.float32), lengths, np.zeros(50_000, np.int64), (0,))
    few = Request(wide.dense[:4], lengths[:, :4], wide.ids, (0,), np.array([0, 0, 2, 2]))
    assert wide.num_expanded == 250_000_000
    assert few.num_expanded == few.expanded().ids.size == few.expanded().num_expanded == 100_000
    model = Noting()
    if shares:
        model.shares_bags = True  # type: ignore[attr-defined]
    batcher = Batcher(model, BatchOptions(max_samples=6000))
    plain = many(2)
    pending = submit(batcher, [plain[0], wide, plain[1]])
    finish(batcher)
    for one, request in zip(pending[::2], plain, strict=True):
        assert one.result is not None and np.array_equal(one.result[0], expected(request))
    if shares:  # its bags need not be copied if it is scored alone
        assert pending[1].result is not None and model.sizes == [3, 5000, 3]
    else:
        assert "ids of all samples=250000000" in str(pending[1].error) and model.sizes == [3, 3]


def test_an_idle_model_waits_for_more_but_not_beyond_a_deadline() -> None:
    batcher = Batcher(Noting(), BatchOptions(max_samples=6, max_wait_ms=20_000))
    submit(batcher, many(1))
    assert 19 < batcher.due_s() <= 20
    submit(batcher, many(1))  # fills the batch: no need to wait longer
    assert batcher.due_s() == 0
    finish(batcher)
    submit(batcher, many(1, 1))
    submit(batcher, many(1, 1), deadline=time.monotonic() + 5)  # later, but with less time
    submit(batcher, many(1, 1), deadline=time.monotonic() + 9)
    assert 4 < batcher.due_s() <= 5
    finish(batcher)
    submit(batcher, many(1, 1))
    assert 19 < batcher.due_s() <= 20


class Changed(Sums):
    """Changes its scores."""

    def __init__(self, change: Callable[[Request, np.ndarray], np.ndarray]) -> None:
        super().__init__()
        self.change = change

    def predict(self, batch: Request) -> tuple[np.ndarray, int]:
        return self.change(batch, super().predict(batch)[0]), 1


def _asking(batch: Request, scores: np.ndarray) -> np.ndarray:
    raise ServerError(503, "the other server is overloaded")


def test_scores_of_other_types_are_answered() -> None:
    """NumPy's default type, and numbers that are not Python's."""
    model = Changed(lambda batch, scores: scores.astype(np.float64))
    predict = model.predict
    model.predict = lambda batch: (predict(batch)[0], np.int64(3))  # type: ignore[method-assign]
    batcher = Batcher(model, BatchOptions())
    pending, = submit(batcher, many(1))
    finish(batcher)
    assert pending.result is not None
    body, length = wire.encode_scores(*pending.result, "sums")
    scores, epoch = wire.decode_scores(body, length)
    assert np.array_equal(scores, expected(pending.request)) and epoch == 3


@pytest.mark.parametrize(("change", "words", "fail"), [
    (lambda batch, scores: scores[1:], "one per sample", [True] * 3),
    (lambda batch, scores: scores[:, None], "one per sample", [True] * 3),
    (_asking, "the other server is overloaded", [True] * 3),
    (lambda batch, scores: np.where(batch.dense[:, 0] == 7, np.nan, scores),
     "scores of epoch 1='inf or nan'", [False, True, False])],
    ids=["too few scores", "a column of scores", "a client of another server", "not finite"])
def test_a_models_errors_are_those_of_its_requests(change: Any, words: str, fail: list[bool]
                                                   ) -> None:
    batcher, requests = Batcher(Changed(change), BatchOptions()), many(3)
    requests[1].dense[2, 0] = 7
    pending = submit(batcher, requests)
    finish(batcher)
    assert [words in str(p.error) for p in pending] == fail
    assert [p.result is None for p in pending] == fail
    assert not any(isinstance(p.error, ServerError) for p in pending)


def test_signature_needs_different_names_and_rows() -> None:
    with pytest.raises(InvalidInputError, match="different names"):
        type(SIGNATURE)("x", ("a", "a"), (1, 2), 0)
    with pytest.raises(InvalidInputError, match="leave out features without rows"):
        type(SIGNATURE)("x", ("a", "b"), (1, 0), 0)
