"""``python -m tests.fuzz.native``: the compiled parser of text against changed lines, sanitized."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

_SOURCE = Path(__file__).with_name("text.cpp")


def build(folder: Path) -> Path | None:
    """The fuzzer, built with sanitizers; None without a compiler that has them."""
    compiler, program = shutil.which("g++") or shutil.which("clang++"), folder / "text"
    if compiler is None:
        return None
    done = subprocess.run(
        [compiler, "-std=c++20", "-O1", "-g", "-fsanitize=address,undefined",
         "-fno-sanitize-recover=all", f"-I{_SOURCE.parents[2] / 'csrc'}", str(_SOURCE), "-o",
         str(program)], capture_output=True, text=True, check=False)
    if done.returncode and "sanitize" not in done.stderr and "asan" not in done.stderr:
        raise RuntimeError(done.stderr)
    return None if done.returncode else program


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.native", description=__doc__)
    parser.add_argument("--runs", type=int, default=10_000_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        program = build(Path(folder))
        if program is None:
            print("no compiler with sanitizers")
            return 1
        command = [str(program), str(args.runs), str(args.seed)]
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
