"""How a server runs and how requests become batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from oper.errors import require_fields
from oper.stats import AccessStats


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """How requests become batches.

    Attributes:
        max_samples: most samples of a batch; a larger single request is a batch of its own.
        max_wait_ms: how long the oldest request of a batch may wait for others to join it while the
            model is idle; 0 = never (as Triton's ``max_queue_delay_microseconds`` by default):
            requests that arrive while the model is busy are scored together in any case.
        max_queued: most samples that may wait; further requests are refused at once.
    """

    max_samples: int = 1024
    max_wait_ms: float = 0.0
    max_queued: int = 16_384

    def __post_init__(self) -> None:
        _check(self, "invalid batching", max_samples=1, max_wait_ms=0, max_queued=1)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How a server runs.

    Attributes:
        host, port: address to listen at; port 0 = any free one.
        workers: processes that score.
        threads: threads of each worker's model.
        batching: how requests become batches, in each worker.
        spin_us: how long a worker polls for new requests after an answer before it sleeps,
            microseconds. A sleeping core takes long to wake and is slow at first; a polling one is
            busy.
        max_bytes: largest body of a request.
        max_connections: connections of each worker; a further one replaces an idle one.
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
    spin_us: float = 0.0

    def __post_init__(self) -> None:
        what = "invalid serving options"
        _check(self, what, port=0, workers=1, threads=1, max_bytes=1, max_connections=1,
               keep_alive_s=1, read_s=0.1, drain_s=0, start_s=0.1, spin_us=0)
        require_fields(self, what, "choose a lower port, or 0 for any free one",
                       ("port", self.port <= 65535, "<= 65535"))


def _check(options: BatchOptions | ServeOptions, what: str, **least: float) -> None:
    require_fields(options, what, "choose a value in this range", *(
        (n, x <= getattr(options, n) < float("inf"), f">= {x}") for n, x in least.items()))


@dataclass(frozen=True, slots=True)
class TieredRows:
    """Types of rows by how hot they are; see `oper.publish`.

    Attributes:
        stats: how often rows are looked up.
        error_budget: expected squared error of what lookups read, as a share of its squares.
    """

    stats: AccessStats
    error_budget: float


def publish_options(row_dtype: str | TieredRows | None) -> dict[str, Any]:
    """The arguments of `oper.publish` for the types of rows."""
    if isinstance(row_dtype, TieredRows):
        return {"stats": row_dtype.stats, "error_budget": row_dtype.error_budget}
    return {"row_dtype": row_dtype}
