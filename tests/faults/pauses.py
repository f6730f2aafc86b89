"""Whether this program itself was stopped, which makes its clocks' readings worthless."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

_BEAT_S, _MISSED_S = 0.05, 1.0


class Pauses:
    """Counts stops of this process: it was told to go on (SIGCONT), or its clock has jumped.

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
