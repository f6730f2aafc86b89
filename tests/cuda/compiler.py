"""The CUDA library, compiled for all architectures beside the other tests.

It takes minutes of one core, while most tests wait for their processes half of the time. So it
starts when tests have been collected, at the lowest priority, and the tests that look at it are the
last to run (see the hooks in `tests/conftest.py`).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ARCHS = ("80", "90")
_OUT = ROOT / "build" / "cuda-check"


def find_nvcc() -> str | None:
    """The path of nvcc, from PATH, CUDA_HOME or /usr/local/cuda."""
    homes = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    return shutil.which("nvcc") or shutil.which(
        "nvcc", path=os.pathsep.join(f"{home}/bin" for home in homes))


class Compilation:
    """One build of the CUDA library from this tree, in processes of its own."""

    def __init__(self) -> None:
        _OUT.mkdir(parents=True, exist_ok=True)
        self._log = _OUT / "compiler.log"
        environment = os.environ | {"OPER_CUDA": "1", "OPER_CUDA_ARCHS": ";".join(ARCHS)}
        low = [path, "-n", "19"] if (path := shutil.which("nice")) else []
        # A group of its own, so that the compilers end with it; not a session of its own, beside
        # which its priority would not count.
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*low, sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(_OUT)],
                cwd=ROOT, env=environment, process_group=0, stdin=subprocess.DEVNULL,
                stdout=log, stderr=log)

    def library(self) -> Path:
        """The library, once it is built."""
        status = self._process.wait()
        assert status == 0, self._log.read_text(encoding="utf-8", errors="replace")[-4000:]
        return _OUT / "oper" / "_lib" / "liboper_cuda.so"

    def end(self) -> None:
        """End it if it still runs."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


_running: list[Compilation] = []


def start() -> Compilation | None:
    """The build of this session, begun if it was not; None without a compiler."""
    if not _running and find_nvcc() is not None:
        _running.append(Compilation())
    return _running[0] if _running else None


def end() -> None:
    """End the build of this session, if there is one."""
    while _running:
        _running.pop().end()
