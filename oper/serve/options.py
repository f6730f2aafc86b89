"""Options of the server and of batching."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from oper.errors import require_fields
from oper.ranges import Amount, Positive, Rule, rules_of, within
from oper.serve.tracing import check_trace
from oper.stats import AccessStats

_TenthsOfSeconds = Annotated[float, Rule(lambda x: 0.1 <= x < float("inf"), "a number >= 0.1")]


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """Options of dynamic batching, per worker.

    Attributes:
        max_samples: maximum samples per batch; a larger request is scored in a separate batch.
        max_wait_ms: maximum time that a batch's oldest request waits for further requests while the
            model is idle, milliseconds; 0 = do not wait (like the default of Triton's
            ``max_queue_delay_microseconds``). Requests that arrive while the model is busy are
            always batched.
        max_queued: maximum number of queued samples; further requests are refused immediately.

    Raises:
        InvalidInputError: a value is out of range.
    """

    max_samples: Positive = 1024
    max_wait_ms: Amount = 0.0
    max_queued: Positive = 16_384

    def __post_init__(self) -> None:
        require_fields(self, "invalid batching", "choose a value in this range", *rules_of(self))


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options of a server.

    Attributes:
        host, port: address to listen on; port 0 = any free port.
        workers: number of worker processes.
        threads: torch threads per worker.
        batching: batching options of each worker.
        max_bytes: maximum size of a request's body.
        max_connections: maximum connections per worker; beyond it, new connections replace idle
            ones, and get status 503 if all have a request in progress.
        keep_alive_s: seconds after which an idle connection is closed.
        read_s: maximum seconds in which a request must arrive, or a client must read an answer.
        drain_s: maximum seconds to finish requests in flight after a stop signal.
        start_s: maximum seconds for a worker to start.
        spin_us: how long an idle worker polls for new requests before it sleeps, microseconds.
            Polling avoids the latency of waking up a core but keeps it busy.
        trace: the file to which SIGUSR1 makes a server record a trace, see `oper.serve.Server.
            trace`; "" = none.
        trace_s: length of such a trace, seconds; None = 5.

    Raises:
        InvalidInputError: a value is out of range.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, within(0, 65535)] = 8500
    workers: Positive = 2
    threads: Positive = 1
    batching: BatchOptions = field(default_factory=BatchOptions)
    max_bytes: Positive = 8 << 20
    max_connections: Positive = 1024
    keep_alive_s: Positive = 75
    read_s: _TenthsOfSeconds = 30.0
    drain_s: Amount = 30.0
    start_s: _TenthsOfSeconds = 300.0
    spin_us: Amount = 0.0
    trace: str = ""
    trace_s: float | None = None

    @property
    def traced_s(self) -> float:
        """`trace_s`, or its default."""
        return 5.0 if self.trace_s is None else self.trace_s

    def __post_init__(self) -> None:
        require_fields(self, "invalid serving options", "choose a value in this range",
                       *rules_of(self), ("trace_s", bool(self.trace) or self.trace_s is None,
                                         "None without trace"))
        if self.trace:
            check_trace(self.trace, self.traced_s)


@dataclass(frozen=True, slots=True)
class TieredRows:
    """Row dtypes by hotness; see `oper.publish`.

    Attributes:
        stats: access statistics.
        error_budget: maximum expected squared error of the values that lookups read, relative to
            the sum of their squares.
    """

    stats: AccessStats
    error_budget: float


def publish_options(row_dtype: str | TieredRows | None) -> dict[str, Any]:
    """Return the arguments of `oper.publish` that select row dtypes."""
    if isinstance(row_dtype, TieredRows):
        return {"stats": row_dtype.stats, "error_budget": row_dtype.error_budget}
    return {"row_dtype": row_dtype}
