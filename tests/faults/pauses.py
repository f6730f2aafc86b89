"""Detects that this program itself was stopped, which makes its time measurements invalid."""

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
_TRIES = 4  # of what a stop may have spoiled


class Pauses:
    """Counts stops of this process: it was continued (SIGCONT), or its clock has jumped.

    Attributes:
        count: stops so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._ended = threading.Event()

    @contextlib.contextmanager
    def watched(self) -> Iterator[Pauses]:
        """Count within the block; only in the main thread, which gets the signals."""
        def told(number: int, frame: FrameType | None) -> None:
            self.count += 1

        before = signal.signal(signal.SIGCONT, told)
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
    """A test with time limits, repeated if it fails while this process was stopped.

    A machine that was stopped does not show which process is late.
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
