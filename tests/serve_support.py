"""Predictors with known scores, and other helpers for tests of serving."""

import http.client
import json
import os
import re
import time
from typing import Any

import numpy as np

from oper.serve import Request, Server, Signature
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
