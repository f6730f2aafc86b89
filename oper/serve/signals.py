"""The signals of a server and their effects."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any, Self

# Only the supervisor handles these signals. Workers ignore them, since a terminal or a service
# manager may send them to the entire process group.
OURS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


class Signals:
    """Records SIGTERM and SIGINT (stop), SIGHUP (reload) and SIGUSR1 (trace) within a block of the
    main thread.

    Until a server checks `stop`, a stop signal raises KeyboardInterrupt.

    Attributes:
        stop: whether the server should stop.
        reload: whether the weights should be published again; the server resets it.
        trace: whether a trace should be recorded; the server resets it.
        interrupts: whether a stop signal raises KeyboardInterrupt; the server sets it to False.
    """

    def __init__(self) -> None:
        self.stop = self.reload = self.trace = False
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
        if number == signal.SIGUSR1:
            self.trace = True
            return
        self.stop = True
        if self.interrupts:
            raise KeyboardInterrupt
