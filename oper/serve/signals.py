"""The signals of a server and their effects."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any, Self

# Meant for the supervisor alone, which passes on what they ask for; of a terminal, or of a service
# manager that stops a whole group, the workers get them too.
OURS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Signals:
    """Records SIGTERM and SIGINT (stop) and SIGHUP (reload) within a block of the main thread.

    Until a server checks `stop`, a stop signal raises KeyboardInterrupt.

    Attributes:
        stop: whether the server is to stop.
        reload: whether weights are to be read again; the reader clears it.
        interrupts: whether a stop raises KeyboardInterrupt; the server clears it.
    """

    def __init__(self) -> None:
        self.stop = self.reload = False
        self.interrupts = True
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._told) for number in OURS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _told(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self.reload = True
            return
        self.stop = True
        if self.interrupts:
            raise KeyboardInterrupt
