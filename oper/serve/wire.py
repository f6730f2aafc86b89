"""Encoding of requests and scores in the Open Inference Protocol (KServe V2) over HTTP.

Messages use its binary tensor data extension: a JSON header, then the tensors, little-endian.

A request has the inputs ``dense`` FP32 [B, D], ``lengths`` INT32 [F, B] and ``ids`` INT64 [L], as
in `oper.serve.requests.Request`. If the rows of ``lengths`` are not all features in the model's
order, the parameter ``features`` lists their names, separated by commas. The answer has the output
``scores`` FP32 [B] and the parameter ``epoch``.

If all samples share features, such as those of a user in requests to rank candidates, these can be
sent once, as bags of the first sample; the parameter ``user_features`` lists their names.

Source: https://kserve.github.io/website/docs/concepts/architecture/data-plane/v2-protocol and
Triton's "Binary Tensor Data Extension".
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from oper.errors import OperError
from oper.serve.requests import Request, Signature, bad_request, places, reorder

# Headers: the length of the JSON header in bytes, how long the client will wait for the answer, and
# the process id of the connection's worker.
HEADER_LENGTH, TIMEOUT, WORKER = (
    "inference-header-content-length", "oper-timeout-ms", "oper-worker")
DTYPES: dict[str, np.dtype[Any]] = {
    "FP32": np.dtype("<f4"), "INT32": np.dtype("<i4"), "INT64": np.dtype("<i8")}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
INPUTS = {"dense": "FP32", "lengths": "INT32", "ids": "INT64"}
_MAX_HEADER = 1 << 20  # bytes of JSON in front of binary tensors
_MAX_DIMS, _MAX_SIZE = 8, 1 << 62  # dimensions of a tensor, and size of each
_LARGE = int(np.finfo(np.float64).max)


def encode(tensors: Mapping[str, np.ndarray], direction: str, parameters: Mapping[str, Any],
           binary: bool = True, **fields: Any) -> tuple[bytes, int]:
    """Encode a message; return it and the length of its JSON header in bytes.

    Args:
        tensors: maps names to arrays of dtype float32, int32 or int64.
        direction: ``"inputs"`` or ``"outputs"``.
        parameters: parameters of the message.
        binary: whether the tensors follow the header, instead of being in it as numbers.
        fields: other fields of the header.
    """
    listed, blobs = [], []
    for name, value in tensors.items():
        kind = value.dtype.newbyteorder("<")
        entry: dict[str, Any] = {
            "name": name, "datatype": _NAMES[kind], "shape": list(value.shape)}
        if binary:
            blobs.append(np.ascontiguousarray(value, kind).tobytes())
            entry["parameters"] = {"binary_data_size": len(blobs[-1])}
        else:
            entry["data"] = value.tolist()
        listed.append(entry)
    header = json.dumps({**fields, "parameters": dict(parameters), direction: listed},
                        separators=(",", ":") if binary else None).encode()
    return b"".join([header, *blobs]), len(header)


def encode_request(request: Request, features: Sequence[str] | None = None) -> tuple[bytes, int]:
    """Encode a request; return the message and the length of its JSON header in bytes.

    `features` are the names of the rows of `request.lengths`; None = the model's features, in which
    case shared bags are sent expanded.
    """
    parameters: dict[str, Any] = {"binary_data_output": True}
    if features is None or request.first is not None:
        request = request.expanded()
    if features is not None:
        parameters["features"] = ",".join(features)
        if request.shared:
            parameters["user_features"] = ",".join(features[k] for k in request.shared)
    return encode({"dense": request.dense, "lengths": request.lengths, "ids": request.ids},
                  "inputs", parameters)


def decode(body: bytes, header_length: int | None, direction: str
           ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Decode a message; return its header, and its tensors by name.

    Args:
        body: the message.
        header_length: length of the JSON header in bytes; None = there is nothing else.
        direction: field of the header that lists the tensors, "inputs" or "outputs".

    Raises:
        InvalidInputError: the message is invalid.
    """
    size = len(body) if header_length is None else header_length
    # A message without binary tensors is limited by the server's limit of requests alone.
    most = len(body) if header_length is None else min(len(body), _MAX_HEADER)
    if not 0 < size <= most:
        raise bad_request("header length", size, f"in [1, {most}]")
    try:
        header = json.loads(body[:size])
    except RecursionError:
        raise bad_request("header", "deeply nested JSON", "fewer levels") from None
    except ValueError as error:
        raise bad_request("header", str(error), "JSON") from None
    if not isinstance(header, dict):
        raise bad_request("header", header, "a JSON object")
    try:
        listed = [(str(t["name"]), str(t["datatype"]), _sizes(t["shape"]), t)
                  for t in header[direction]]
        parameters = dict(header.get("parameters") or {})
    except (ValueError, KeyError, TypeError, OverflowError):
        raise bad_request("header", sorted(header), f"{direction}, a list of tensors with name, "
                          "datatype and shape, and parameters by name") from None
    tensors: dict[str, np.ndarray] = {}
    at = size
    for name, datatype, shape, entry in listed:
        if name in tensors:
            raise bad_request("repeated tensor", name, "unique names")
        if datatype not in DTYPES:
            raise bad_request(f"datatype of {name!r}", datatype, f"one of {sorted(DTYPES)}")
        if len(shape) > _MAX_DIMS or not all(0 <= x <= _MAX_SIZE for x in shape):
            raise bad_request(f"shape of {name!r}", shape,
                              f"at most {_MAX_DIMS} numbers in [0, {_MAX_SIZE}]")
        tensors[name], at = _tensor(name, datatype, shape, entry, (body, at))
    if at != len(body):
        raise bad_request("size of the message", len(body), f"{at} bytes, as its header specifies")
    return {**header, "parameters": parameters}, tensors


def _sizes(shape: Any) -> list[int]:
    """Return a tensor's shape if it is a list of integers, else raise TypeError."""
    if not isinstance(shape, list) or any(type(x) is not int for x in shape):
        raise TypeError
    return shape


def _tensor(name: str, datatype: str, shape: list[int], entry: Mapping[str, Any],
            place: tuple[bytes, int]) -> tuple[np.ndarray, int]:
    """Return one tensor, and the offset in the message at which the next one begins."""
    body, at = place
    dtype, count = DTYPES[datatype], math.prod(shape)
    if "data" in entry:
        return _listed(name, datatype, shape, entry["data"]), at
    stated = entry.get("parameters")
    size = stated.get("binary_data_size") if isinstance(stated, Mapping) else None
    if type(size) is not int or size != count * dtype.itemsize:
        raise bad_request(f"binary_data_size of {name!r}", size,
                          f"{count * dtype.itemsize} bytes for {datatype} {shape}")
    if at + size > len(body):
        raise bad_request("size of the message", len(body),
                          f">= {at + size} bytes, as its header specifies")
    try:
        # A copy, since PyTorch requires aligned and writable memory.
        return np.frombuffer(body, dtype, count, at).reshape(shape).copy(), at + size
    except ValueError:  # such as [2**61, 0], which has no elements
        raise bad_request(f"shape of {name!r}", shape, "sizes that an array can have") from None


def _listed(name: str, datatype: str, shape: list[int], data: Any) -> np.ndarray:
    """Convert a tensor given as lists in the header; integer datatypes take integers only."""
    dtype, what = DTYPES[datatype], f"data of {name!r}"
    is_whole = dtype.kind == "i"
    least, most = (np.iinfo(dtype).min, np.iinfo(dtype).max) if is_whole else (-_LARGE, _LARGE)
    count = 0
    for value in _leaves(data, what):
        count += 1
        kind = type(value)  # not isinstance, since bool is a subclass of int
        if (kind is int and least <= value <= most) or (kind is float and not is_whole):
            continue
        raise bad_request(what, value,
                          f"{'integers' if is_whole else 'numbers'} in {datatype}'s range")
    try:
        with np.errstate(over="ignore"):  # Request.check refuses infinity
            return np.array(data, dtype).reshape(shape)
    except (ValueError, TypeError):
        raise bad_request(what, f"{count} numbers", f"{math.prod(shape)}, as {datatype} {shape}, "
                          "in lists of equal length") from None


def _leaves(data: Any, what: str, depth: int = 0) -> Iterator[Any]:
    if not isinstance(data, list):
        yield data
    elif depth == _MAX_DIMS:
        raise bad_request(what, "lists in lists", f"at most {_MAX_DIMS} deep")
    else:
        for item in data:
            yield from _leaves(item, what, depth + 1)


def decode_request(body: bytes, header_length: int | None, signature: Signature) -> Request:
    """Decode and validate a request; raises InvalidInputError."""
    header, tensors = decode(body, header_length, "inputs")
    if set(tensors) != INPUTS.keys():
        raise bad_request("inputs", sorted(tensors), f"{sorted(INPUTS)}")
    features, users = (header["parameters"].get(key) for key in ("features", "user_features"))
    for key, text in (("features", features), ("user_features", users)):
        if text is not None and not isinstance(text, str):
            raise bad_request(key, text, "text, names separated by commas")
    label = header.get("id")
    if label is not None and not isinstance(label, str):
        raise bad_request("id", label, "text, which the answer repeats")
    at, sent = ((), signature) if features is None else _selected(features, signature)
    request = Request(tensors["dense"], tensors["lengths"], tensors["ids"],
                      label=label or "")
    request.check(sent)
    if request.num_samples > len(body):  # those of a model without dense columns may take no bytes
        raise bad_request("samples without dense numbers and bags", request.num_samples,
                          f"at most {len(body)}, the bytes of the request")
    if sent.features != signature.features:
        lengths, ids = reorder(at, request.lengths, request.ids, len(signature.features))
        request = replace(request, lengths=lengths, ids=ids)
    if not users:
        return request
    shared = tuple(sorted(_selected(users, signature)[0]))
    if request.lengths[list(shared), 1:].any():
        raise bad_request("lengths of user_features", "more than one bag",
                          "one, that of the first sample")
    return replace(request, shared=shared)


# Cached, since requests repeat the same names.
@functools.lru_cache(maxsize=64)
def _selected(names: str, signature: Signature) -> tuple[tuple[int, ...], Signature]:
    """Return the indices of these features, and a signature with them only, in their order."""
    features = tuple(names.split(",")) if names else ()
    at = tuple(places(features, signature))
    return at, replace(signature, features=features,
                       num_rows=tuple(signature.num_rows[k] for k in at))


def encode_scores(scores: np.ndarray, epoch: int, model: str, binary: bool = True,
                  label: str = "") -> tuple[bytes, int | None]:
    """Encode an answer with scores, float32 [B], to a request with this `Request.label`.

    Returns:
        The message and the length of its header in bytes. If not `binary`, for clients without the
        binary extension, the header contains the scores and the length is None.
    """
    body, length = encode({"scores": scores}, "outputs", {"epoch": epoch}, binary,
                          model_name=model, model_version=str(epoch),
                          **({"id": label} if label else {}))
    return body, length if binary else None


def decode_scores(body: bytes, header_length: int | None) -> tuple[np.ndarray, int]:
    """Decode an answer; return scores, float32 [B], and the epoch of the weights.

    Raises:
        OperError: the message is not such an answer.
    """
    header, tensors = decode(body, header_length, "outputs")
    scores, epoch = tensors.get("scores"), header["parameters"].get("epoch")
    if scores is None or not isinstance(epoch, int):
        raise OperError("cannot read the answer", "outputs", sorted(tensors), "scores and an epoch",
                        "connect to a server started by oper serve")
    return scores, epoch
