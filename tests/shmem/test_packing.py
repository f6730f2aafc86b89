"""Packed slots in messages: the compiled code against a plain loop, with sanitizers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from oper.messages import slot_bits

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


@pytest.mark.parametrize("rows, bits", [(1, 1), (2, 1), (3, 2), (256, 8), (257, 9),
                                        (200_000, 18), (2**31, 31)])
def test_bits_of_a_slot(rows: int, bits: int) -> None:
    assert slot_bits(rows) == bits and rows - 1 < 2**bits
