"""Every format against bytes from nowhere and changed good files; what fuzzing has found."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from tests.fuzz.native import build
from tests.fuzz.targets import TARGETS, one, remove_files, seeds


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
        one(name, data)
    for _ in range(150):
        data = bytearray(rng.choice(good))
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(data) + 1)
            kind = rng.randrange(3)
            if kind == 0 and at < len(data):
                data[at] = rng.choice((0, 255, 0x7f, rng.randrange(256)))
            elif kind == 1:
                del data[at:at + rng.randint(1, 20)]
            else:
                data[at:at] = data[at:at + rng.randint(1, 20)]
        one(name, bytes(data))


def test_changed_lines_of_text(tmp_path: Path) -> None:
    """The compiled parser, with the sanitizers of addresses and of undefined behaviour."""
    program = build(tmp_path)
    if program is None:
        pytest.skip("no compiler with sanitizers")
    command = [str(program), "100000", "7"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "100000 executions\n"), done.stderr


CASES = [
    ("trained_state", b""),  # an error without a message had no first line
]


@pytest.mark.parametrize("name, data", CASES)
def test_what_fuzzing_found(name: str, data: bytes) -> None:
    one(name, data)
