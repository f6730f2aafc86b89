"""How a server runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from oper.errors import InvalidInputError, fail
from oper.serve.batching import BatchOptions


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How a server runs.

    Attributes:
        host, port: where it listens; port 0 = any free one.
        workers: processes that score.
        threads: of each worker's model.
        batching: how requests become batches, in each worker.
        max_bytes: of a request's body.
        max_connections: of each worker; another one takes the place of one that has been idle.
        keep_alive_s: how long an idle connection stays open.
        read_s: how long a request may take to arrive.
        drain_s: how long requests in flight may take once the server is told to stop.
        start_s: how long a worker may take until it can serve.
    """

    host: str = "127.0.0.1"
    port: int = 8500
    workers: int = 2
    threads: int = 1
    batching: BatchOptions = field(default_factory=BatchOptions)
    max_bytes: int = 8 << 20
    max_connections: int = 1024
    keep_alive_s: int = 75
    read_s: float = 30.0
    drain_s: float = 30.0
    start_s: float = 300.0

    def __post_init__(self) -> None:
        least = {"port": 0, "workers": 1, "threads": 1, "max_bytes": 1, "max_connections": 1,
                 "keep_alive_s": 1, "read_s": 0.1, "drain_s": 0, "start_s": 0.1}
        for name, value in least.items():
            if not value <= getattr(self, name) < float("inf"):
                raise InvalidInputError(fail("invalid serving options", name, getattr(self, name),
                                             f">= {value}", "correct it"))
        if self.port > 65535:
            raise InvalidInputError(fail("invalid serving options", "port", self.port,
                                         "<= 65535", "correct it"))
