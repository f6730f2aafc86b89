"""Serialization of the threads of one rank that use the same tables.

Lookups without gradients share no state and run concurrently. Lookups whose backward pass updates
the tables, these backward passes, and all collective calls share workspaces, send buffer and
counters, so a lock serializes them. Code that holds the lock never waits for another thread of this
rank, so autograd's threads may acquire it without deadlock.

With several ranks, all ranks must make the same collective calls in the same order. Two threads
that train at the same time would break this order, so the second thread gets an error.
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
from oper.support.processes import in_child

_Method = TypeVar("_Method", bound=Callable[..., Any])
_MANY = 32  # number of recorded lookups at which those that were garbage-collected are removed


class Turns:
    """The lock of one rank's tables, and the lookups that await their backward passes.

    Args:
        world_size: number of ranks that share the tables.

    Attributes:
        lock: re-entrant; held by a thread that changes the tables or waits for other ranks.
        resolving: held by `ShardedTables.resolve` on another thread, so that its kernel context is
            not closed meanwhile.
        is_alone: whether there is a single rank, whose threads may train in any order.
        parts: the active `oper.shmem.micro_batches.Parts`, whose thread holds the lock; or None.
    """

    def __init__(self, world_size: int) -> None:
        self.lock, self.resolving = threading.RLock(), threading.Lock()
        self.is_alone = world_size == 1
        self.parts: Any = None
        # Lookups that await their backward passes, by id() of their offsets: the thread, and a weak
        # reference to the offsets, which is dead once the graph has been dropped.
        self._awaited: dict[int, tuple[int, weakref.ref[torch.Tensor]]] = {}
        self._thread_of_parts: ThreadPoolExecutor | None = None
        in_child(self, Turns._release)

    def thread_of_parts(self) -> ThreadPoolExecutor:
        """Return the thread that makes the collective calls of micro-batches; reused by all steps.

        When a thread exits, the C library returns its memory to the system, so with a new thread in
        every step the kernel would have to clear that memory each time.
        """
        if self._thread_of_parts is None:
            self._thread_of_parts = ThreadPoolExecutor(1, thread_name_prefix="oper-parts")
        return self._thread_of_parts

    def check(self) -> None:
        """Check that this thread may start a lookup with gradients.

        Raises:
            InvalidInputError: there are several ranks, and a lookup of another thread awaits its
                backward pass.
        """
        # Lookups repeated within a backward pass (checkpointing) run on a thread of autograd.
        if self.is_alone or not self._awaited or torch._C._current_graph_task_id() != -1:
            return
        me = threading.get_ident()
        other = next((t for t, held in self._awaited.values() if t != me and held() is not None),
                     None)
        if other is None:
            return
        names = {t.ident: t.name for t in threading.enumerate()}
        raise InvalidInputError(
            "cannot train from two threads at once", "thread", names.get(me, me),
            f"only {names.get(other, other)!r}, which has yet to run a lookup's backward pass",
            "with several ranks train from one thread, since all ranks must make the same calls in "
            "the same order, and look up under torch.no_grad() in other threads")

    def begin(self, offsets: torch.Tensor) -> None:
        """Record a lookup with gradients, identified by its `offsets`."""
        if self.is_alone or torch._C._current_graph_task_id() != -1:
            return
        if len(self._awaited) >= _MANY:
            self._awaited = {k: x for k, x in self._awaited.items() if x[1]() is not None}
        self._awaited[id(offsets)] = threading.get_ident(), weakref.ref(offsets)

    def end(self, parts: list[Backward]) -> None:
        """Remove the records of lookups whose backward passes have begun."""
        for part in parts:
            self._awaited.pop(id(part.offsets), None)

    def _release(self) -> None:
        """Release the locks that other threads held at a fork: a forked child lacks these threads.
        A turn of the thread that has forked continues in the child."""
        lock: Any = self.lock
        resolving: Any = self.resolving
        if not lock._is_owned():
            lock._at_fork_reinit()  # keeps the object, which others refer to
        resolving._at_fork_reinit()
        self.parts = self._thread_of_parts = None


def in_turn(method: _Method) -> _Method:
    """Decorate a method of tables: it first acquires `turns.lock` and waits until all queued calls
    of micro-batches are done."""
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        turns: Turns = self.turns
        with turns.lock:
            if turns.parts is not None:
                turns.parts.settle()
            return method(self, *args, **kwargs)
    return call  # type: ignore[return-value]
