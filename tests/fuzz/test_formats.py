"""Every format, read from random bytes and modified valid files; defects that fuzzing has found."""

import functools
import json
import pickle
import random
import re
import resource
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from torch.distributed.checkpoint.metadata import Metadata

from oper.data import Loader, LoaderOptions
from oper.errors import FileFormatError, OperError
from tests.faults.pauses import Pauses
from tests.fuzz import changed, crash
from tests.fuzz.exchange import peer
from tests.fuzz.targets import (
    MEMORY,
    TARGETS,
    change,
    one,
    place,
    remove_files,
    rewritten,
    seeds,
)


@pytest.fixture(scope="module", autouse=True)
def _clean() -> object:
    yield
    remove_files()


@pytest.mark.parametrize("name", sorted(TARGETS))
@settings(max_examples=40, deadline=None)
@given(data=st.binary(max_size=300))
def test_random_bytes(name: str, data: bytes) -> None:
    one(name, data)


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_changed_files(name: str) -> None:
    """Read a valid file with some bytes changed, cut out or doubled."""
    rng = random.Random(name)
    good = seeds(name)
    for data in good:
        assert one(name, data), "the unchanged file is invalid"
    for _ in range(150):
        one(name, change(rng.choice(good), rng))


def test_a_crash_is_a_defect_and_leaves_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changed, "_run", crash.run)
    before = set(Path(MEMORY or tempfile.gettempdir()).glob("fuzz-*"))
    case: dict[str, Any] = {"executions": 0, "accepted": 0, "defects": [], "seconds": 0.0}
    changed.run("arrays", 1, case, Pauses())
    assert [d["what"] for d in case["defects"]] == ["ended with -9"] and case["executions"] == 1
    assert set(Path(MEMORY or tempfile.gettempdir()).glob("fuzz-*")) == before


def _archive(header: bytes) -> bytes:
    """Return an array file whose member has the given header."""
    return rewritten(seeds("arrays")[0], lambda name, data: (
        b"\x93NUMPY\2\0" + struct.pack("<I", len(header)) + header
        if name.endswith(".npy") else data))


CASES: list[tuple[str, bytes]] = [
    ("trained_state", b""),  # an error without a message had no first line
    ("arrays", _archive(b"{'descr': '<i2', 'shape': (2,")),  # raised what the tokenizer raises
    ("checkpoint", pickle.dumps(Metadata({}, storage_data={}))),  # its parts were not looked up
    # Made Python's unpickler ask for 16 GB: an entry of the memo, an array of bytes to be filled.
    ("checkpoint", b"\x80\x02Nr\xff\xff\xff\x7f."),
    ("checkpoint", b"\x80\x05\x96" + struct.pack("<Q", 1 << 34) + b"."),
]


# Deeply nested: the parsers' own recursion, and the values of a message.
NESTED = {"json": lambda n: b'{"kind": ' + b"[" * n + b"]" * n + b"}",
          "toml": lambda n: b"name = " + b"[" * n + b"]" * n + b"\n"}
CASES += [(name, NESTED[kind](n)) for n in (300, 900, 980, 100_000) for kind, names in (
    ("json", ("plan", "manifest", "constraints", "request")),
    ("toml", ("topology", "recipe", "configuration", "workload"))) for name in names]
CASES += [("workload", b"table = [1]"), ("workload", b"[[table]]\nname = 'a'\nrows = inf\n")]
# A few bytes that declare very many columns, ranks or tables, or a very long number.
_COLUMN = "name = 'r'\n[[column]]\nname = '{}'\nkind = 'sparse'\n"
_DOMAIN = "name = 't'\n[[domain]]\nmemory_bytes = 5\nread_gbps = "
_TABLE = "[[table]]\nname = 'a'\nrows = "
CASES += [(name, text.encode()) for name, text in (
    ("recipe", _COLUMN + "first = 0\nlast = 1000000000\n"),
    ("recipe", _COLUMN + "[split]\nvalid = '1e-9999999'\n"),
    ("topology", _DOMAIN + "1.0\ncopies = 1000000000\n"),
    ("topology", _DOMAIN + "1.0\nranks = 1000000000\n"),
    ("workload", _TABLE + "9\ncount = 1000000000\n"))]
# Values of another type, or beyond the range of a reader's integers.
CASES += [(name, text.encode()) for name, text in (
    *(("recipe", _COLUMN + line) for line in (
        "source = 3", "threshold = 'x'", "threshold = [1]", f"threshold = 1{'0' * 400}")),
    ("recipe", "name = 'r'\n[[column]]\nname = 'a'\nkind = []\n"),
    ("topology", _DOMAIN + "1" + "0" * 400),
    ("workload", _TABLE + "1" + "0" * 30),
    ("configuration", "data = 'd'\n[model]\nname = []\n"),
    ("configuration", f"data = 'd'\ndense_lr = 1{'0' * 400}\n"))]


def _with_value(name: str, key: str, value: str) -> bytes:
    """Return a valid JSON file with the number of a key replaced."""
    return re.sub(rf'("{key}": ?)[-0-9.e]+'.encode(), rb"\g<1>" + value.encode(), seeds(name)[0])


def _with_header(name: str, change: dict[str, Any]) -> bytes:
    """Return a valid array file with a changed header."""
    def changed_header(member: str, data: bytes) -> bytes:
        if member != "header.json":
            return data
        header = json.loads(data)
        return json.dumps(header | {"meta": header["meta"] | change}).encode()

    return rewritten(seeds(name)[0], changed_header)


CHANGED: list[tuple[str, Callable[[], bytes]]] = [
    *(("manifest", functools.partial(_with_value, "manifest", key, value))
      for key, value in (("num_rows", "Infinity"), ("num_rows", "-5"), ("num_rows", "3.7"),
                         ("buckets", "1000000000000"), ("train", '"40"'))),
    ("manifest", lambda: seeds("manifest")[0].replace(b'"tags"\n  ],\n  "bucket"',
                                                      b'"nobody"\n  ],\n  "bucket"')),
    ("plan", lambda: _with_value("plan", "step_us", "1" + "0" * 400)),
    ("stats", lambda: _with_header("stats", {"num_samples": "many"})),
    *(("checksums", functools.partial(_with_header, "checksums", {"files": {name: [0, 0]}}))
      for name in ("\0", "x" * 300, "..", ""))]


@pytest.mark.parametrize("name, make", CHANGED)
def test_defects_found_by_changed_values(name: str, make: Callable[[], bytes]) -> None:
    """These inputs once raised errors other than OperError."""
    assert make() != seeds(name)[0]
    assert not one(name, make())


@pytest.mark.parametrize("name, data", CASES)
def test_defects_found_by_fuzzing(name: str, data: bytes) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    one(name, data)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20, "KiB"


def test_a_manifest_that_calls_bags_single_ids() -> None:
    """This once raised an error of NumPy."""
    seeds("parquet")
    path = place() / "parquet" / "manifest.json"
    good = path.read_bytes()
    path.write_bytes(json.dumps(json.loads(good) | {"columns": json.loads(good)["columns"]
                                                    | {"multi_hot": []}}).encode())
    try:
        with pytest.raises(FileFormatError, match="integers, none null"):
            list(Loader(path.parent, "train", LoaderOptions(8, window=0)))
    finally:
        path.write_bytes(good)


@pytest.mark.parametrize("value", [0x7fffffff, 0xfffffffe, 3])
def test_every_word_of_a_peer(value: int) -> None:
    """Numbers of ids beyond any memory once raised MemoryError, of which no peer was notified."""
    (good,) = seeds("exchange")
    changed_words = (good[:at] + struct.pack("<I", value) + good[at + 4:]
                     for at in range(0, len(good) - 3, 4))
    refused = [data for data in changed_words if not one("exchange", data)]
    if value > 3:  # which may be a number of rows
        assert len(refused) >= 3
        with pytest.raises(OperError, match="has sent invalid data: rank=1"):
            TARGETS["exchange"](refused[-1])


@pytest.mark.parametrize("change", [-1, 1])
def test_one_sum_of_squares_too_few_or_too_many(change: int) -> None:
    """Both are possible for the plan, so that only the rows with gradients tell."""
    good, squares, sequence = peer().recorded, 4, 4  # their phase, the fourth of this step
    (at,) = (k for k in range(0, len(good) - 1023, 4)
             if struct.unpack_from("<3I", good, k) == (squares, sequence, 0))
    counts = struct.unpack_from("<12I", good, at + 32)[::3]
    end = at + 1024 + 4 * sum(counts)
    last = at + 32 + 12 * max(t for t, n in enumerate(counts) if n)
    (n,) = struct.unpack_from("<I", good, last)
    lie = bytearray(good)
    lie[end + min(4 * change, 0):end] = b"\0\0\0\0" * max(change, 0)
    struct.pack_into("<I", lie, last, n + change)
    with pytest.raises(OperError, match="has sent invalid data: rank=1"):
        peer().step(bytes(lie))
