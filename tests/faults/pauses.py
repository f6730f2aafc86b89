"""Detect that this program itself was stopped, which invalidates its time measurements."""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_BEAT_S, _MISSED_S = 0.05, 1.0
_TRIES = 4  # of a test that a stop may have invalidated


class Pauses:
    """Counts how often this process was stopped: it received SIGCONT, or its clock jumped.

    Attributes:
        count: stops so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._ended = threading.Event()

    @contextlib.contextmanager
    def watched(self) -> Iterator[Pauses]:
        """Count inside the block; only in the main thread, which receives signals."""
        def resumed(number: int, frame: FrameType | None) -> None:
            self.count += 1

        before = signal.signal(signal.SIGCONT, resumed)
        thread = threading.Thread(target=self._beat, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._ended.set()
            thread.join()
            signal.signal(signal.SIGCONT, before)

    def _beat(self) -> None:
        last = time.monotonic()
        while not self._ended.wait(_BEAT_S):
            now = time.monotonic()
            if now - last > _MISSED_S:
                self.count += 1
            last = now


def timed(test: Callable[..., None]) -> Callable[..., None]:
    """Decorate a test with time limits: repeat it if it fails and this process was stopped
    meanwhile.

    If the entire machine was stopped, it is unknown which process was late.
    """
    @functools.wraps(test)
    def again(*args: Any, **kwargs: Any) -> None:
        for left in reversed(range(_TRIES)):
            with Pauses().watched() as pauses:
                try:
                    return test(*args, **kwargs)
                except AssertionError:
                    if not pauses.count or not left:
                        raise

    return again
