"""Slots in requests between memory domains: packed bits, and rows that do not exist."""

import shutil
import struct
import subprocess
from pathlib import Path

import pytest
import torch

from oper.errors import OperError
from oper.messages import slot_bits
from oper.shmem.exchange.host import _served
from tests.fuzz.exchange import peer

# ---- packed slots: the compiled code against a plain loop ----------------------------------------

_SOURCE = Path(__file__).with_name("packing.cpp")


def test_slots_of_all_widths(tmp_path: Path) -> None:
    """No byte outside the packed range is read or written."""
    compiler, program = shutil.which("g++") or shutil.which("clang++"), tmp_path / "packing"
    if compiler is None:
        pytest.skip("no compiler")
    command = [compiler, "-std=c++20", "-O1", f"-I{_SOURCE.parents[2] / 'csrc'}", str(_SOURCE),
               "-o", str(program)]
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    if subprocess.run([*command, *sanitizers], capture_output=True, check=False).returncode:
        subprocess.run(command, check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


# ---- requests for rows that do not exist ---------------------------------------------------------
# A rank of another memory domain makes them: an error, never a crash. Messages of training steps
# are fuzzed in tests/fuzz/exchange.py.


@pytest.mark.parametrize("asked", [
    [0, 0, 0, 4, 0, 10], [0, 0, 0, 4, -1], [0, 7, 0, 4, 0], [0, -1, 0, 4, 0], [9, 0, 0, 4, 0],
    [-3, 0, 0, 4, 0], [0, 0, -1, 2, 9], [0, 0, 2, 2, 9], [0, 0, 3, 5, 9], [0, 0, 0, 4], [0, 0]])
def test_requests_for_rows_that_do_not_exist(asked: list[int]) -> None:
    """A request has part, piece, first and last column, and slots."""
    with pytest.raises(OperError, match="that do not exist"):
        _served(served, torch.tensor(asked))


def test_requests_for_rows_that_exist() -> None:
    assert _served(served, torch.tensor([0, 0, 0, 4, 9])).numel() == 16
    assert _served(served, torch.tensor([0, 0, 1, 3, 9])).numel() == 8


def served(part: str, piece: int) -> torch.Tensor:
    assert part == "rows"
    return [torch.zeros(10, 4)][piece]


def test_gradients_of_one_row_twice() -> None:
    """The update merges the ranks' lists of slots, which must ascend."""
    data, bits = bytearray(peer().recorded), slot_bits(30)
    (head,) = (k for k in range(0, len(data) - 1023, 4)  # phase and number of the exchange
               if struct.unpack_from("<3I", data, k) == (3, 3, 0))
    counts = struct.unpack_from("<6I", data, head + 32)
    assert counts[::3] == (1, 4)  # rows of the first two tables
    at = head + 1024 + 4 + 4 * 4  # behind a slot and a row of the first one
    (word,) = struct.unpack_from("<I", data, at)
    second = word >> bits & 2**bits - 1
    struct.pack_into("<I", data, at, word >> bits << bits | second)
    with pytest.raises(OperError, match="has sent invalid data"):
        peer().step(bytes(data))


def test_packed_slots_that_do_not_exist() -> None:
    """Rank 1 requests the first rows of a table of 40 rows, not all of which rank 0 owns."""
    heads, bits = 1024, slot_bits(40)
    peer().step(peer().recorded)
    for slot in (2**bits - 1, 30):
        data = bytearray(peer().recorded)
        word = int.from_bytes(data[heads:heads + 4], "little") >> bits << bits | slot
        data[heads:heads + 4] = word.to_bytes(4, "little")
        with pytest.raises(OperError, match="has sent invalid data"):
            peer().step(bytes(data))
