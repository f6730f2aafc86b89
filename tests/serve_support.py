"""Predictors with known scores, and other helpers for tests of serving."""

import contextlib
import http.client
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from oper.serve import Client, Request, Server, Signature
from oper.shmem.publication.reader import Reader

SIGNATURE = Signature("sums", ("a", "b", "c"), (100, 50, 7), 2)


def expected(request: Request) -> np.ndarray:
    """Exact in float32: sums of small integers."""
    sums = np.zeros(request.num_samples)
    at = 0
    for k, lengths in enumerate(request.lengths):
        for sample, length in enumerate(lengths):
            sums[sample] += (k + 1) * request.ids[at:at + length].sum()
            at += length
    return (sums + 1000 * request.dense.sum(axis=1)).astype(np.float32)


class Sums:
    """A predictor that returns weighted sums of ids, without tables. Certain samples make it
    misbehave."""

    epoch = 1

    def __init__(self, seconds: float = 0.0) -> None:
        self.signature, self.seconds, self.rows = SIGNATURE, seconds, 0

    def predict(self, batch: Request) -> tuple[np.ndarray, int]:
        if self.seconds:
            time.sleep(self.seconds)
        self.rows += batch.ids.size
        if (batch.dense[:, 0] == 13).any():
            raise ValueError("thirteen")
        if (batch.dense[:, 0] == 666).any():
            os._exit(9)
        return expected(batch), 1

    def rows_read(self) -> dict[str, int]:
        return {"local": self.rows, "remote": 0}


def random_request(rng: np.random.Generator, num_samples: int, uniform: bool = False) -> Request:
    """Draw a valid request with bags of several lengths, or all of one id."""
    shape = (len(SIGNATURE.features), num_samples)
    lengths = np.ones(shape) if uniform else rng.integers(0, 4, shape)
    lengths = lengths.astype(np.int32)
    ids = [rng.integers(0, rows, int(row.sum()))
           for rows, row in zip(SIGNATURE.num_rows, lengths, strict=True)]
    return Request(rng.integers(0, 5, (num_samples, 2)).astype(np.float32), lengths,
                   np.concatenate(ids).astype(np.int64))


def with_user(request: Request, shared: tuple[int, ...]) -> Request:
    """Return the request with the first sample's bags of these features shared by all samples."""
    lengths = request.lengths.copy()
    lengths[list(shared), 1:] = 0
    parts = np.split(request.ids, np.cumsum(request.lengths.sum(axis=1))[:-1])
    return Request(request.dense, lengths, np.concatenate(
        [part[:lengths[k].sum()] for k, part in enumerate(parts)]), shared)


def as_json(request: Request, **changes: object) -> bytes:
    """Encode a request with its tensors as numbers in JSON; `changes` replaces some of these."""
    tensors = (("dense", "FP32", request.dense), ("ids", "INT64", request.ids),
               ("lengths", "INT32", request.lengths))
    return json.dumps({"inputs": [
        {"name": name, "datatype": kind, "shape": list(value.shape),
         "data": changes.get(name, value.tolist())} for name, kind, value in tensors]}).encode()


@contextlib.contextmanager
def scoring(client: Client) -> Iterator[list[int]]:
    """Score random requests on six threads until the block ends, and check the scores; yields how
    many each thread has scored."""
    stop, done = threading.Event(), [0] * 6

    def work(k: int) -> None:
        rng = np.random.default_rng(k)
        while not stop.is_set():
            request = random_request(rng, 4)
            assert np.array_equal(client.score_request(request)[0], expected(request))
            done[k] += 1

    with ThreadPoolExecutor(len(done)) as pool:
        threads = [pool.submit(work, k) for k in range(len(done))]
        try:
            yield done
        finally:
            stop.set()
        for thread in threads:
            thread.result()


def post(server: Server, body: bytes, headers: dict[str, str] | None = None,
         path: str = "/v2/models/sums/infer", method: str = "POST") -> tuple[int, Any]:
    """Send one request to the server of `Sums`; return the status and the parsed answer."""
    host, port = server.address.split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    connection.request(method, path, body, headers or {})
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    return answer.status, json.loads(data) if data else None


def bits_of(publication: str) -> dict[str, int]:
    """Return checksums of all published weights."""
    reader = Reader(publication)
    found = reader.sums()
    reader.close()
    return found


def value_of(metrics: str, name: str) -> float:
    """Sum a metric in the text format of Prometheus over all labels."""
    return sum(float(x) for x in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", metrics, re.M))
