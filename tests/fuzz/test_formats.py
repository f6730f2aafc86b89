"""Every format against bytes from nowhere and changed good files; what fuzzing has found."""

from __future__ import annotations

import io
import pickle
import random
import resource
import struct
import subprocess
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from torch.distributed.checkpoint.metadata import Metadata

from tests.faults.pauses import Pauses
from tests.fuzz import changed, crash
from tests.fuzz.native import build
from tests.fuzz.targets import MEMORY, TARGETS, change, one, remove_files, seeds


@pytest.fixture(scope="module", autouse=True)
def _clean() -> object:
    yield
    remove_files()


@pytest.mark.parametrize("name", sorted(TARGETS))
@settings(max_examples=40, deadline=None)
@given(data=st.binary(max_size=300))
def test_bytes_from_nowhere(name: str, data: bytes) -> None:
    one(name, data)


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_changed_files(name: str) -> None:
    """A good file with some bytes changed, cut out or doubled."""
    rng = random.Random(name)
    good = seeds(name)
    for data in good:
        assert one(name, data), "what is changed must be good to begin with"
    for _ in range(150):
        one(name, change(rng.choice(good), rng))


def test_a_crash_is_a_defect_and_leaves_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changed, "_run", crash.run)
    before = set(Path(MEMORY or tempfile.gettempdir()).glob("fuzz-*"))
    case: dict[str, Any] = {"executions": 0, "accepted": 0, "defects": [], "seconds": 0.0}
    changed.run("arrays", 1, case, Pauses())
    assert [d["what"] for d in case["defects"]] == ["ended with -9"] and case["executions"] == 1
    assert set(Path(MEMORY or tempfile.gettempdir()).glob("fuzz-*")) == before


def test_changed_lines_of_text(tmp_path: Path) -> None:
    """The compiled parser, with the sanitizers of addresses and of undefined behaviour."""
    program = build(tmp_path)
    if program is None:
        pytest.skip("no compiler with sanitizers")
    command = [str(program), "10000", "7"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "10000 executions\n"), done.stderr


def _archive(header: bytes) -> bytes:
    """An array file whose member has a header of its own."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(seeds("arrays")[0])) as before, \
            zipfile.ZipFile(out, "w") as after:
        for name in before.namelist():
            after.writestr(name, b"\x93NUMPY\2\0" + struct.pack("<I", len(header)) + header
                           if name.endswith(".npy") else before.read(name))
    return out.getvalue()


CASES: list[tuple[str, bytes]] = [
    ("trained_state", b""),  # an error without a message had no first line
    ("arrays", _archive(b"{'descr': '<i2', 'shape': (2,")),  # raised what the tokenizer raises
    ("checkpoint", pickle.dumps(Metadata({}, storage_data={}))),  # nobody had looked for its parts
    # Made Python's unpickler ask for 16 GB: an entry of the memo, an array of bytes to be filled.
    ("checkpoint", b"\x80\x02Nr\xff\xff\xff\x7f."),
    ("checkpoint", b"\x80\x05\x96" + struct.pack("<Q", 1 << 34) + b"."),
]


# Of many levels: the parsers' own recursion, and the values of a message.
NESTED = {"json": lambda n: b'{"kind": ' + b"[" * n + b"]" * n + b"}",
          "toml": lambda n: b"name = " + b"[" * n + b"]" * n + b"\n"}
CASES += [(name, NESTED[kind](n)) for n in (300, 900, 980, 100_000) for kind, names in (
    ("json", ("plan", "manifest", "constraints", "request")),
    ("toml", ("topology", "recipe", "configuration", "workload"))) for name in names]
CASES += [("workload", b"table = [1]"), ("workload", b"[[table]]\nname = 'a'\nrows = inf\n")]


@pytest.mark.parametrize("name, data", CASES)
def test_what_fuzzing_found(name: str, data: bytes) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    one(name, data)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20, "KiB"


@pytest.mark.parametrize("value", [0x7fffffff, 0xfffffffe, 3])
def test_every_word_of_a_peer(value: int) -> None:
    """Numbers of ids that no memory holds were a MemoryError, and nobody was told."""
    (good,) = seeds("exchange")
    for at in range(0, len(good) - 3, 4):
        one("exchange", good[:at] + struct.pack("<I", value) + good[at + 4:])
