"""The running server of the serving benchmark, in a process of its own, and how to command it."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from oper.bench.core.child import Child, obey
from oper.bench.core.memory import cpu_seconds, num_descriptors, pss_bytes
from oper.bench.serve.models import ServeWork, build, give_back_memory
from oper.serve.options import BatchOptions


@dataclass(frozen=True, slots=True)
class Swap:
    """One publication, on the clock of `time.monotonic` (the same in all processes).

    Attributes:
        begin, end: when.
        epoch: which.
    """

    begin: float
    end: float
    epoch: int


class Host:
    """``oper.serve.Server`` with a published model, which two sets of weights take turns in.

    Odd epochs are set A, the float32 model; even ones set B: all rows negated and the last bias
    moved, so that scores of one set with a part of the other are neither set's.

    Args:
        served: the model.
        workers: of the server.
        batching: of each worker.
        spin_us: of each worker.
    """

    def __init__(self, served: ServeWork, workers: int, batching: BatchOptions,
                 spin_us: float = 0.0) -> None:
        self._child = Child(_host, (served, workers, batching, spin_us),
                            "the server of the benchmark", daemon=False)
        self.address: str = self._child.wait()

    def publish(self) -> Swap:
        """Publish the other set of weights."""
        swap: Swap = self._child.ask("publish")
        return swap

    def worker_pids(self) -> list[int]:
        """Workers that take requests."""
        return list(self._child.ask("pids"))

    def counts(self) -> dict[str, int]:
        """See `oper.serve.Server.counts`."""
        return dict(self._child.ask("counts"))

    def memory(self) -> dict[str, int]:
        """See `oper.serve.PublishedModel.memory_bytes`."""
        return dict(self._child.ask("memory"))

    def publication(self) -> str:
        """The name of its weights, for `oper.attach`."""
        return str(self._child.ask("publication"))

    def cpu_seconds(self) -> float:
        """Processor time (s) of supervisor and present workers so far."""
        return sum(map(cpu_seconds, [*self.worker_pids(), self._child.pid]))

    def usage(self) -> tuple[int, int]:
        """PSS in bytes and open descriptors of supervisor and workers together."""
        pids: Sequence[int] = [*self.worker_pids(), self._child.pid]
        return sum(pss_bytes(p) for p in pids), sum(num_descriptors(p) for p in pids)

    def close(self) -> int:
        """Drain and end; the exit code."""
        return self._child.close(90)


def _host(control: Any, served: ServeWork, workers: int, batching: BatchOptions,
          spin_us: float) -> None:
    """What the process does until the other end of `control` closes."""
    from oper.serve.model import PublishedModel
    from oper.serve.options import ServeOptions
    from oper.serve.server import Server

    sets = {"a": build(served, "cpu").state_dict()}
    sets["b"] = {name: -w if "embedding_bags" in name else w for name, w in sets["a"].items()}
    last = [name for name in sets["b"] if name.endswith("bias")][-1]
    sets["b"][last] = sets["b"][last] + 0.5
    model = PublishedModel(functools.partial(build, served), sets["a"], served.signature,
                           served.row_dtype, keep_spare=True)
    give_back_memory()
    options = ServeOptions(port=0, workers=workers, batching=batching, spin_us=spin_us)
    with Server(model, options) as server:
        control.send(server.address)
        commands: dict[str, Callable[[], Any]] = {
            "pids": lambda: server.worker_pids, "counts": lambda: server.counts,
            "memory": model.memory_bytes, "publication": lambda: model.publication_name,
            "publish": lambda: _swap(server, sets)}
        while obey(control, commands):
            pass


def _swap(server: Any, sets: dict[str, Any]) -> Swap:
    """Publish the set that is not being served."""
    even = (server.counts["publications"] + 1) % 2 == 1  # the first publication is set A
    begin = time.monotonic()
    epoch = server.publish(sets["b" if even else "a"])
    return Swap(begin, time.monotonic(), epoch)
