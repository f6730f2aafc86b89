"""Threads of one rank that use the same tables: which operations run concurrently, and which one at
a time.

Lookups without gradients share nothing and run concurrently. A lookup whose backward pass updates
the tables, that backward pass, and all collective calls use the same workspaces, outbox and
counters, so they run one at a time. Waiting for the lock releases Python's GIL, and nothing that it
guards waits for another thread of this rank, so autograd's threads may take it too.

With several ranks, every rank must make the same collective calls in the same order. Two threads
that train at the same time would break this order, so the second one is refused.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from oper.errors import InvalidInputError
from oper.shmem.passes import Backward

_Method = TypeVar("_Method", bound=Callable[..., Any])
_MANY = 32  # lookups that await their backward passes, from which on dropped ones are looked for


class Turns:
    """The lock that threads hold to change the tables of one rank.

    Args:
        world_size: ranks that share them.

    Attributes:
        lock: held by a thread that changes them or waits for other ranks; re-entrant.
        is_alone: whether there is a single rank, whose threads may train concurrently.
        parts: the micro-batches of the current batch, whose thread holds the lock; or None.
    """

    def __init__(self, world_size: int) -> None:
        self.lock = threading.RLock()
        self.is_alone = world_size == 1
        self.parts: Any = None  # `oper.shmem.micro_batches.Parts`, which take turns themselves
        # Lookups that await their backward passes: thread and what tells whether anybody still
        # holds them, by the identity of their offsets.
        self._awaited: dict[int, tuple[int, weakref.ref[torch.Tensor]]] = {}
        self._thread_of_parts: ThreadPoolExecutor | None = None

    def thread_of_parts(self) -> ThreadPoolExecutor:
        """The thread that makes the collective calls of micro-batches, kept as long as the tables.

        Memory that a thread allocates is returned by the C library when it ends, so a new thread
        per step would make the kernel clear that memory every time.
        """
        if self._thread_of_parts is None:
            self._thread_of_parts = ThreadPoolExecutor(1, thread_name_prefix="oper-parts")
        return self._thread_of_parts

    def check(self) -> None:
        """Refuse a lookup with gradients while another thread has lookups whose backward passes are
        due.

        Raises:
            InvalidInputError: there is such a lookup, and there are several ranks.
        """
        # What a backward pass looks up again (checkpointing) runs in a thread of autograd's choice.
        if self.is_alone or torch._C._current_graph_task_id() != -1:
            return
        me = threading.get_ident()
        other = next((t for t, held in self._awaited.values() if t != me and held() is not None),
                     None)
        if other is None:
            return
        names = {t.ident: t.name for t in threading.enumerate()}
        raise InvalidInputError(
            "cannot train from two threads at once", "thread", names.get(me, me),
            f"the only one: a lookup of {names.get(other, other)!r} awaits its backward pass",
            "with several ranks let one thread train, which keeps their calls in one order, "
            "and look up under torch.no_grad() in others")

    def begin(self, offsets: torch.Tensor) -> None:
        """Note a lookup with gradients whose backward pass is expected; `offsets` identifies it."""
        if self.is_alone or torch._C._current_graph_task_id() != -1:
            return
        if len(self._awaited) >= _MANY:
            self._awaited = {k: x for k, x in self._awaited.items() if x[1]() is not None}
        self._awaited[id(offsets)] = threading.get_ident(), weakref.ref(offsets)

    def end(self, parts: list[Backward]) -> None:
        """Note that the backward passes of lookups have begun."""
        for part in parts:
            self._awaited.pop(id(part.offsets), None)


def in_turn(method: _Method) -> _Method:
    """Decorate a method of tables so that it takes its turn under the lock."""
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        turns: Turns = self.turns
        with turns.lock:
            if turns.parts is not None:
                turns.parts.settle()
            return method(self, *args, **kwargs)
    return call  # type: ignore[return-value]
