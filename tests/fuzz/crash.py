"""An execution that crashes; in a module of its own, which a new process imports quickly."""

import os
import signal
from pathlib import Path
from typing import Any


def run(name: str, files: str, last: int, counts: Any, pipe: Any) -> None:
    """Replace `tests.fuzz.changed._run`: leave a file behind and crash."""
    Path(files, "left").write_bytes(b"1")
    os.kill(os.getpid(), signal.SIGKILL)
