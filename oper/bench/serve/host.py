"""The server of the serving benchmark in a separate process, and its commands."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oper.bench.core.child import Child, obey
from oper.bench.serve.client import LoadClient
from oper.bench.serve.models import (
    VARIANTS,
    ServeWork,
    build,
    give_back_memory,
    make_predictor,
    warm_up,
)
from oper.errors import OperError
from oper.integration.checkpoint.follow import Change, Follower
from oper.serve.model import PublishedModel
from oper.serve.options import BatchOptions, ServeOptions
from oper.serve.server import FOLLOW_S, Server

BATCHING = BatchOptions(512, 0.0, 16_384)  # options of every worker


Swap = tuple[float, float]  # start and end of a publication (s, clock of `time.monotonic`)


@dataclass(frozen=True, slots=True)
class Publication:
    """One delta that is in service.

    Attributes:
        step: step of the training run.
        seconds: time (s) to read, check and publish the delta.
        lag_s: time (s) from the step until its weights are in service.
    """

    step: int
    seconds: float
    lag_s: float


class Host(Child):
    """``oper.serve.Server`` with a published model whose weights alternate between two sets.

    Odd epochs have set A, the model's weights. Even epochs have set B, with all rows negated and
    the last bias changed, so that a mixture of both sets would give different scores.

    Args:
        served: the model.
        workers: worker processes of the server.
        run: folder of a training run's checkpoints, whose weights are served instead; ``""`` =
            none.
        kind: ``"oper"``, or ``"torchrec"`` for a copy of TorchRec's quantised model (scripted) in
            each worker, to which nothing can be published.

    Commands, see `Child.ask`: ``publish`` publishes the other set of weights, or a checkpoint, and
    returns a `Swap`; ``follow`` starts publishing everything that the training run saves,
    ``followed`` returns a `Publication` for each, and ``stop_following`` ends this and returns the
    same; ``pids`` returns the workers' process ids, ``counts`` the server's counters, ``memory``
    the bytes of its weights and ``publication`` their name.
    """

    def __init__(self, served: ServeWork, workers: int, run: str = "", kind: str = "oper") -> None:
        options = ServeOptions(port=0, workers=workers, batching=BATCHING)
        super().__init__(_host, (served, options, run, kind), "the server of the benchmark")
        self.address: str = self.wait()


@contextlib.contextmanager
def client_of(host: Host, name: str, served: ServeWork) -> Iterator[LoadClient]:
    """Run a client of the server of case `name`; closes both after the block.

    Raises:
        OperError: the server's exit code is not 0.
    """
    try:
        with contextlib.closing(LoadClient(host.address, served)) as client:
            yield client
    finally:
        code = host.close(90.0)  # the server first answers its remaining requests
    if code:
        raise OperError(f"the server of case {name} failed", "exit code", code, "0",
                        "see its log above")


class _Following(Follower):
    """Follows a training run as ``oper serve --watch`` does, and records a `Publication` per
    change in `made`."""

    def __init__(self, run: str) -> None:
        super().__init__(lambda: Path(run), in_service=False)  # starts with all weights
        self.made: list[Publication] = []
        self._began = 0.0

    def changes(self) -> Iterator[Change]:
        """Yield the changes and record when the reading of each starts."""
        self._began = time.time()
        for change in super().changes():
            yield change
            del change
            self._began = time.time()

    def applied(self, change: Change) -> None:
        """Record that a change is in service."""
        now = time.time()
        self.made.append(Publication(change.step, now - self._began, now - change.time_s))
        super().applied(change)


class _Quantised:
    """A `Source` of TorchRec's quantised model; every worker builds a copy."""

    def __init__(self, served: ServeWork) -> None:
        self.signature, self._served = served.signature, served

    def opener(self) -> Callable[[], Any]:
        return functools.partial(_quantised, self._served)

    def prepare(self, weights: Any = None) -> Callable[[], int]:
        raise OperError("cannot publish new weights", "served model", "TorchRec's quantised one",
                        "one of OPER's", "start a server of the new weights")

    def close(self) -> None:
        """Do nothing: workers share no memory."""


def _quantised(served: ServeWork) -> Any:
    """Build a worker's scripted predictor, TorchRec's form for deployment."""
    predictor = make_predictor("torchrec", served, "")
    warm_up(predictor, [served.query(k) for k in range(8)])
    predictor.variant = VARIANTS[1]
    return predictor


def _host(control: Any, served: ServeWork, options: ServeOptions, run: str, kind: str) -> None:
    """Server process: execute commands until the parent closes `control`."""
    if kind == "torchrec":
        with Server(_Quantised(served), options) as server:
            control.send(server.address)
            while obey(control, {"pids": lambda: server.worker_pids}):
                pass
        return
    sets: dict[str, Any] = {"a": Path(run), "b": Path(run)} if run else _two_sets(served)
    model = PublishedModel(functools.partial(build, served), sets["a"], served.signature,
                           served.row_dtype, keep_spare=not run).reads_again(lambda: sets["a"])
    give_back_memory()
    following: list[_Following] = []
    with Server(model, options) as server:
        control.send(server.address)
        commands: dict[str, Callable[..., Any]] = {
            "pids": lambda: server.worker_pids, "counts": lambda: server.counts,
            "memory": model.memory_bytes, "publication": lambda: model.publication_name,
            "publish": lambda weights="": _swap(server, Path(weights) if weights else sets),
            "follow": lambda: following.append(_Following(run)),
            "followed": lambda: following[-1].made,
            "stop_following": lambda: following.pop().made}
        # Like `oper serve --watch`, look for new weights at least every FOLLOW_S seconds.
        while not control.poll(FOLLOW_S if following else None) or obey(control, commands):
            for follower in following:
                server.follow(follower)


def _two_sets(served: ServeWork) -> dict[str, Any]:
    """State dicts of the sets A and B, see `Host`."""
    sets = {"a": build(served, "cpu").state_dict()}
    sets["b"] = {name: -w if "embedding_bags" in name else w for name, w in sets["a"].items()}
    last = [name for name in sets["b"] if name.endswith("bias")][-1]
    sets["b"][last] = sets["b"][last] + 0.5
    return sets


def _swap(server: Server, weights: Any) -> Swap:
    """Publish a checkpoint, or of two sets the one that is not in service."""
    if isinstance(weights, dict):
        even = (server.counts["publications"] + 1) % 2 == 1  # the first publication is set A
        weights = weights["b" if even else "a"]
    begin = time.monotonic()
    server.publish(weights)
    return begin, time.monotonic()
