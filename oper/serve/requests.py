"""Scoring requests and batches of them: dense features and bags of ids.

Lengths and ids are stored feature by feature, as in TorchRec's ``KeyedJaggedTensor``.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from oper.errors import InvalidInputError, OperError


def check_name(name: str) -> None:
    """Raise InvalidInputError unless `name` is a valid model name."""
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name):
        raise InvalidInputError("invalid signature", "name", name,
                                "1 to 64 characters of A-Z a-z 0-9 . _ -, for use in URLs",
                                "choose another name")


@dataclass(frozen=True, slots=True)
class Signature:
    """The inputs of a model.

    Attributes:
        name: the model's name, part of a server's URLs.
        features: names of the features, in the order of requests.
        num_rows: number of rows of each feature's table; ids are in [0, num_rows). None = ids are
            raw keys, any int64.
        num_dense: number of dense features of a sample.

    Raises:
        InvalidInputError: the name is invalid, a feature is repeated, the lengths of `features`
            and `num_rows` differ, or a table has no rows.
    """

    name: str
    features: tuple[str, ...]
    num_rows: tuple[int | None, ...]
    num_dense: int

    @property
    def key_features(self) -> tuple[str, ...]:
        """The features whose ids are raw keys."""
        return tuple(f for f, n in zip(self.features, self.num_rows, strict=True) if n is None)

    def __post_init__(self) -> None:
        for name in ("features", "num_rows"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if len(self.features) != len(self.num_rows) or len(set(self.features)) != len(
                self.features):
            raise InvalidInputError("invalid signature", "features", self.features,
                                    f"{len(self.num_rows)} different names, as in num_rows",
                                    "name every feature once")
        if any(n is not None and n < 1 for n in self.num_rows):
            raise InvalidInputError("invalid signature", "num_rows", self.num_rows,
                                    "each >= 1, or None for raw keys",
                                    "leave out features without rows")
        check_name(self.name)


@dataclass(frozen=True, slots=True)
class Request:
    """Samples to score, in the order of a `Signature`.

    Attributes:
        dense: float32 [B, num_dense].
        lengths: ids of each bag, int32 [F, B].
        ids: int64 [sum of lengths], bags of the first feature first.
        shared: indices of features, such as those of a user, that several samples share: sample b
            uses the bags of sample ``first[b]``. Their bags in all other samples are empty.
        first: int64 [B], ascending; None = all zeros.
        label: the client's ``id`` of the request, which the answer repeats; "" = none.
    """

    dense: np.ndarray
    lengths: np.ndarray
    ids: np.ndarray
    shared: tuple[int, ...] = ()
    first: np.ndarray | None = None
    label: str = ""

    @property
    def num_samples(self) -> int:
        return int(self.dense.shape[0])

    def firsts(self) -> np.ndarray:
        """Return `first`, or zeros if it is None; int64 [B]."""
        return np.zeros(self.num_samples, np.int64) if self.first is None else self.first

    @property
    def num_expanded(self) -> int:
        """Number of ids in `expanded`."""
        if not self.shared:
            return self.ids.size
        of_users = self.lengths[list(self.shared)]
        return self.ids.size + int(of_users[:, self.firsts()].sum(dtype=np.int64)) - int(
            of_users.sum(dtype=np.int64))

    def expanded(self) -> Request:
        """Return the same samples, each with its own copy of shared bags."""
        if not self.shared:
            return self
        at = np.tile(np.arange(self.num_samples), (self.lengths.shape[0], 1))
        at[list(self.shared)] = self.firsts()
        begins = np.cumsum(self.lengths).reshape(self.lengths.shape) - self.lengths
        lengths = np.take_along_axis(self.lengths, at, 1)
        begins, counts = np.take_along_axis(begins, at, 1).reshape(-1), lengths.reshape(-1)
        shift = np.repeat(begins - (np.cumsum(counts, dtype=np.int64) - counts), counts)
        return Request(self.dense, lengths, self.ids[np.arange(shift.size) + shift])

    def check(self, signature: Signature) -> None:
        """Raise InvalidInputError unless the request fits the model."""
        for name, dtype, ndim in (("dense", np.float32, 2), ("lengths", np.int32, 2),
                                  ("ids", np.int64, 1)):
            value = np.asarray(getattr(self, name))
            if value.dtype != dtype or value.ndim != ndim:
                raise bad_request(name, f"{value.dtype} {list(value.shape)}",
                                  f"{np.dtype(dtype).name} with {ndim} dimensions")
        num_features = len(signature.features)
        for name, shape, axes in (
                ("dense", (self.num_samples, signature.num_dense), "samples by columns"),
                ("lengths", (num_features, self.num_samples),
                 "rows of lengths are features, columns of lengths are samples")):
            if getattr(self, name).shape != shape:
                raise bad_request(f"shape of {name}", getattr(self, name).shape,
                                  f"{shape}; {axes}")
        if not np.isfinite(self.dense).all():
            raise bad_request("dense", "inf or nan", "finite numbers")
        # Viewed as unsigned, a negative length is huge, so the sum differs from the number of ids.
        totals = self.lengths.view(np.uint32).sum(axis=1, dtype=np.int64)
        if int(totals.sum()) != self.ids.size:
            if (low := int(self.lengths.min(initial=0))) < 0:
                raise bad_request("lengths", low, ">= 0")
            raise bad_request("number of ids", self.ids.size,
                              f"{int(totals.sum())}, the sum of lengths")
        # A negative id is huge, too.
        wrong = self.ids.view(np.uint64) > np.repeat(_last_ids(signature), totals)
        if wrong.any():
            at = int(np.argmax(wrong))
            k = int(np.searchsorted(np.cumsum(totals), at, "right"))
            raise bad_request(f"id of feature {signature.features[k]!r}", int(self.ids[at]),
                              f"in [0, {signature.num_rows[k]})")


@functools.lru_cache(maxsize=64)
def _last_ids(signature: Signature) -> np.ndarray:
    """Largest valid id of each feature, uint64 [F]; for raw keys 2^64 - 1, which is -1 viewed as
    unsigned."""
    return np.array([-1 if n is None else n - 1 for n in signature.num_rows],
                    np.int64).view(np.uint64)


def places(features: Sequence[str], signature: Signature) -> list[int]:
    """Return the indices of `features` in the signature.

    Raises:
        InvalidInputError: a feature is unknown or repeated.
    """
    known = {name: k for k, name in enumerate(signature.features)}
    unknown = [name for name in features if name not in known]
    if unknown:
        raise bad_request("unknown features", unknown, f"among {list(signature.features)}")
    if len(set(features)) != len(features):
        raise bad_request("features", list(features), "every feature at most once")
    return [known[name] for name in features]


def reorder(to: Sequence[int], lengths: np.ndarray, ids: np.ndarray, num_features: int
            ) -> tuple[np.ndarray, np.ndarray]:
    """Make feature k of valid lengths and ids feature ``to[k]`` of `num_features`; the others get
    empty bags."""
    out = np.zeros((num_features, lengths.shape[1]), np.int32)
    out[list(to)] = lengths
    parts = _by_feature(lengths, ids)
    return out, np.concatenate([ids[:0], *(parts[k] for k in np.argsort(to))])


def _by_feature(lengths: np.ndarray, ids: np.ndarray) -> list[np.ndarray]:
    """Split ids by feature, in a tenth of the time of `np.split`."""
    ends = np.cumsum(lengths.sum(axis=1, dtype=np.int64)).tolist()
    return [ids[a:b] for a, b in itertools.pairwise([0, *ends])]


def join(requests: Sequence[Request]) -> Request:
    """Join several requests into one, with samples in the order of the requests."""
    if len(requests) == 1:
        return requests[0]
    shared = requests[0].shared
    if any(r.shared != shared for r in requests):
        requests, shared = [r.expanded() for r in requests], ()
    first = None
    if shared:
        begins = np.cumsum([0, *(r.num_samples for r in requests[:-1])])
        first = np.concatenate([r.firsts() + b for r, b in zip(requests, begins, strict=True)])
    dense = np.concatenate([r.dense for r in requests])
    lengths = np.concatenate([r.lengths for r in requests], axis=1)
    if lengths.size and (lengths == lengths[0, 0]).all():
        # All bags have the same size, so ids are a matrix with a row per feature.
        ids = np.concatenate([r.ids.reshape(len(lengths), -1) for r in requests], axis=1)
        return Request(dense, lengths, ids.reshape(-1), shared, first)
    parts = zip(*(_by_feature(r.lengths, r.ids) for r in requests), strict=True)
    ids = np.concatenate([requests[0].ids[:0], *itertools.chain.from_iterable(parts)])
    return Request(dense, lengths, ids, shared, first)


class Predictor(Protocol):
    """The model with which a worker scores requests.

    If it has an attribute ``shares_bags`` that is True, batches may have shared bags
    (`Request.shared`); otherwise all batches are expanded. If it has a method ``keys_read``, this
    returns by feature of raw keys the numbers of keys looked up and of unknown ones among them, for
    the server's metrics. If it has methods ``trace_lookups(most)`` and ``take_lookups()``, the
    server's traces contain its lookups: ``trace_lookups`` starts recording (0 = stop), and
    ``take_lookups`` returns begin and end of up to `most` lookups since its last call, in seconds
    of `time.monotonic`.
    """

    signature: Signature

    @property
    def epoch(self) -> int:
        """Version of the weights with which the next batch is scored."""
        ...

    def predict(self, batch: Request) -> tuple[np.ndarray, int]:
        """Return scores, float32 [B], and the version of the weights used for all of them."""
        ...

    def rows_read(self) -> dict[str, int]:
        """Return the embedding rows read so far by memory domain, ``"local"`` and ``"remote"``."""
        ...


def check_model(model: Any, what: str = "cannot serve") -> None:
    """Raise InvalidInputError unless `model` is a `Predictor` or an `oper.serve.server.Source`.

    `what` is the beginning of the error message.
    """
    wanted = ["opener", "prepare", "close"] if hasattr(model, "opener") else [
        "epoch", "predict", "rows_read"]
    missing = [name for name in wanted if not hasattr(model, name)]
    if missing or not isinstance(getattr(model, "signature", None), Signature):
        raise InvalidInputError(
            what, "model", type(model).__name__, "a PublishedModel, or a predictor with a "
            "Signature as signature, epoch, predict(batch) and rows_read()",
            f"it lacks {', '.join(missing)}" if missing else "give it an oper.serve.Signature")


def bad_request(name: str, value: object, expected: str) -> InvalidInputError:
    """Return the error of a request that does not fit the model."""
    return InvalidInputError("cannot score the request", name, value, expected,
                             "see the model's inputs at GET /v2/models/NAME")


class ServerError(OperError, RuntimeError):
    """A request that the server refuses or fails on; ``status`` is the HTTP status code.

    The server raises it for its client, which raises it again.
    """

    def __init__(self, status: int, *message: Any) -> None:
        super().__init__(*message)
        self.status = status
