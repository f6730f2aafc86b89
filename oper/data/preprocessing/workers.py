"""Additional processes for a preprocessing job."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Iterator
from dataclasses import replace

from oper.data.preprocessing.job import Job
from oper.support.processes import end_with_parent


@contextlib.contextmanager
def local(job: Job, count: int) -> Iterator[None]:
    """Run `count` more local processes that take part in `job`, and join them after the block.

    If the block raises, they are killed. The task of a process that dies is run by another one.
    """
    context = multiprocessing.get_context("spawn")
    quiet = replace(job, options=replace(job.options, show_progress=False))
    processes = [context.Process(target=_take_part, args=(quiet, os.getpid()), daemon=True)
                 for _ in range(count)]
    try:
        for process in processes:
            process.start()
        yield
    except BaseException:
        for process in processes:
            if process.pid is not None:
                process.kill()
        raise
    finally:
        for process in processes:
            if process.pid is not None:
                process.join()


def _take_part(job: Job, parent: int) -> None:
    """Run the job; the main process runs the failed tasks again and raises errors."""
    end_with_parent(parent)
    with contextlib.suppress(Exception, KeyboardInterrupt), job.joined():
        job.run()
