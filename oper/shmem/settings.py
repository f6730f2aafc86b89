"""Numbers set by environment variables (see `oper doctor`)."""

from __future__ import annotations

import os

from oper.support.environment import setting

DEADLINE_ENV = "OPER_DEADLINE_S"
OUTBOX_ENV = "OPER_OUTBOX_BYTES"


def deadline_s() -> float:
    """Seconds that a rank waits for its peers: ``OPER_DEADLINE_S``, by default 300."""
    return _number(DEADLINE_ENV, 300.0)


def outbox_bytes(default: int | None = None) -> int:
    """Largest size of a rank's outbox in bytes of address space; pages are used only when written.

    ``OPER_OUTBOX_BYTES``, by default `default` or a quarter of the machine's memory.
    """
    if default is None:
        default = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    return int(_number(OUTBOX_ENV, default))


def _number(name: str, default: float) -> float:
    """A number above 0; raises InvalidInputError."""
    text = setting(name, "cannot shard")
    return float(text) if text else default
