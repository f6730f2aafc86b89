"""Share tasks among processes through a folder.

A process claims a task by locking the task's lock file, which the kernel unlocks if the process
dies, and creates a marker file when the task is done. Each process repeatedly runs a task that is
neither done nor claimed; the number of processes need not be known.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from oper.support.locks import lock_if_free


def share(tasks: Mapping[str, Callable[[], None]], folder: Path,
          tell: Callable[[str], None] = lambda _: None) -> None:
    """Run tasks together with other processes; returns when every task is done.

    Args:
        tasks: functions by name, in the order in which to try them. An interrupted task is run
            again, so it must tolerate files of an earlier attempt.
        folder: folder of lock and marker files, on a file system that the processes share.
        tell: called with the name of each task once it is done, by whichever process.
    """
    left = dict(tasks)
    pause = 0.01
    while left:
        ran = False
        for name in list(left):
            if not is_done(folder, name):
                with (folder / f"{name}.lock").open("wb") as claim:
                    if not lock_if_free(claim):
                        continue
                    if not is_done(folder, name):
                        left[name]()
                        (folder / f"{name}.done").touch()
                        ran = True
            del left[name]
            tell(name)
        pause = 0.01 if ran else min(0.5, pause * 1.5)
        if left and not ran:
            time.sleep(pause)


def is_done(folder: Path, name: str) -> bool:
    """Whether the marker file of a task exists."""
    return (folder / f"{name}.done").exists()
