"""Additional processes for a preprocessing job, on this machine or a Ray cluster."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Iterator
from dataclasses import replace

from oper.data.preprocessing.job import Job
from oper.errors import needs
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


@contextlib.contextmanager
def on_ray(job: Job, count: int) -> Iterator[None]:
    """Run `count` Ray tasks that take part in `job` while the block runs.

    They use the running cluster if there is one (see RAY_ADDRESS), otherwise one started on this
    machine. Inputs and output must have the same paths on all machines.

    Raises:
        MissingDependencyError: Ray is not installed.
    """
    if not count:
        yield
        return
    with needs("cannot use a Ray cluster", "oper[data]"):
        import ray
    mine = not ray.is_initialized()
    if mine:
        ray.init(log_to_driver=False, configure_logging=False)
    remote = ray.remote(num_cpus=1, max_retries=0)(run_quietly)
    absolute = replace(job, target=job.target.absolute(), options=replace(
        job.options, show_progress=False))
    tasks = [remote.remote(absolute) for _ in range(count)]
    try:
        yield
    except BaseException:
        for task in tasks:
            ray.cancel(task, force=True)
        raise
    finally:
        with contextlib.suppress(Exception):
            ray.wait(tasks, num_returns=len(tasks), timeout=60)
        if mine:
            ray.shutdown()


def run_quietly(job: Job) -> None:
    """Run the job in a worker; the main process runs the failed tasks again and raises errors."""
    with contextlib.suppress(Exception, KeyboardInterrupt), job.joined():
        job.run()


def _take_part(job: Job, parent: int) -> None:
    end_with_parent(parent)
    run_quietly(job)
