"""Arrays of a job's own files, written so that a full disk is told for what it is."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import numpy as np


def save(file: BinaryIO | Path, array: np.ndarray) -> None:
    """As `numpy.save`, whose writes do not pass on what the system says of a failure."""
    if isinstance(file, Path):
        with file.open("wb") as opened:
            save(opened, array)
        return
    array = np.ascontiguousarray(array)
    np.lib.format.write_array_header_2_0(file, np.lib.format.header_data_from_array_1_0(array))
    file.write(array.reshape(-1).view(np.uint8).data)
