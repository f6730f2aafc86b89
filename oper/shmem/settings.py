"""Numbers set by environment variables (see `oper doctor`)."""

from __future__ import annotations

import os

from oper.support.environment import setting

DEADLINE_ENV = "OPER_DEADLINE_S"
SEND_BUFFER_ENV = "OPER_SEND_BUFFER_BYTES"


def deadline_s() -> float:
    """Return the seconds that a rank waits for its peers: ``OPER_DEADLINE_S``, by default 300."""
    return _number(DEADLINE_ENV, 300.0)


def send_buffer_bytes(default: int | None = None) -> int:
    """Return the limit on a rank's send buffer, in bytes of address space (memory is used when
    written).

    ``OPER_SEND_BUFFER_BYTES`` if set; else `default`, or a quarter of the machine's memory if None.
    """
    if default is None:
        default = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    return int(_number(SEND_BUFFER_ENV, default))


def _number(name: str, default: float) -> float:
    """Return a variable's number > 0; raises InvalidInputError for other values."""
    text = setting(name, "cannot shard")
    return float(text) if text else default
