"""An execution that crashes; a separate module, which a new process imports fast."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any


def run(name: str, files: str, last: int, counts: Any, told: Any) -> None:
    """In place of `tests.fuzz.changed._run`: leaves a file and dies."""
    Path(files, "left").write_bytes(b"1")
    os.kill(os.getpid(), signal.SIGKILL)
