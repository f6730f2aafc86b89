"""The signals of a server and their effects."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any, Self

# Only the supervisor handles these signals. Workers ignore them, since a terminal or a service
# manager may send them to the entire process group.
OURS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)

_EFFECTS: dict[int, str] = {signal.SIGHUP: "reload", signal.SIGUSR1: "trace"}


class Signals:
    """Records signals within a block of the main thread.

    Until a server checks `stop`, a stop signal raises KeyboardInterrupt.

    Attributes:
        stop: whether the server should stop (SIGTERM, SIGINT).
        reload: whether the weights should be published again (SIGHUP); the server resets it.
        trace: whether a trace should be recorded (SIGUSR1); the server resets it.
        interrupts: whether a stop signal raises KeyboardInterrupt; the server sets it to False.
    """

    def __init__(self) -> None:
        self.stop = self.reload = self.trace = False
        self.interrupts = True
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._on_signal) for number in OURS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        setattr(self, _EFFECTS.get(number, "stop"), True)
        if self.stop and self.interrupts:
            raise KeyboardInterrupt
