"""Training a batch in parts, so that exchanges of one part overlap dense layers of another.

The rows are updated once, after all parts. While the dense layers of one part compute, the next
part can therefore be looked up and the gradients of an earlier part exchanged; the rows' owners
accumulate the gradients until the update. A worker thread makes these collective calls in the order
in which the program requests them, which must be the same on all ranks.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any

import torch

from oper.errors import InvalidInputError
from oper.shmem.batch import LookedUp, Lookup, version_of
from oper.shmem.passes import Backward
from oper.shmem.protocol import Tables


@contextlib.contextmanager
def in_parts(tables: Sequence[Tables], num_passes: int | None = None) -> Iterator[None]:
    """Train a batch in parts inside the block, for all tables of a model.

    The tables are updated once, with the sum of the gradients of all backward passes inside the
    block: after pass number `num_passes`, or at the end of the block if it is None. If an error
    leaves the block before the update, the gradients are discarded. Entering, leaving and the
    passes inside are collective. While one thread is in the block, passes of other threads wait.

    Args:
        tables: the model's tables.
        num_passes: number of backward passes inside the block, or None.

    Raises:
        InvalidInputError: the tables cannot be trained in parts.
    """
    with contextlib.ExitStack() as locks:
        for x in tables:
            locks.enter_context(x.turns.lock)
            _check(x)
        worker = _Worker(tables[0].turns.thread_of_parts())
        parts = [Parts(x, worker, num_passes) for x in tables]
        is_updated = False
        try:
            for x, own in zip(tables, parts, strict=True):
                x.turns.parts = own
            try:
                yield
            finally:
                try:
                    worker.settle()
                finally:
                    for x in tables:
                        x.turns.parts = None
            worker.raise_failed()
            for own in parts:
                own.update()
            is_updated = True
        finally:
            if not is_updated:
                for own in parts:
                    own.forget()


class _Worker:
    """Makes the collective calls of all tables on one thread, in order.

    After a call has failed, later calls are not made, since the ranks' calls may no longer match.
    """

    def __init__(self, thread: ThreadPoolExecutor) -> None:
        self._thread = thread
        self._submitted: list[Future[Any]] = []
        self._identity: int | None = None  # ident of the worker thread, after its first call

    def submit(self, call: Any, argument: Any) -> Future[Any]:
        """Queue ``call(argument)`` on the worker thread; returns the future of its result."""
        future = self._thread.submit(self._run, call, argument)
        self._submitted.append(future)
        return future

    def _run(self, call: Any, argument: Any) -> Any:
        self._identity = threading.get_ident()
        self.raise_failed()
        return call(argument)

    def settle(self) -> None:
        """Wait until all queued calls are done; returns immediately on the worker thread itself.

        What a signal's handler raises meanwhile is raised afterwards, since the worker thread uses
        the tables until then.
        """
        interrupted: BaseException | None = None
        while threading.get_ident() != self._identity:
            try:
                wait(self._submitted)
                break
            except BaseException as error:
                interrupted = error
        if interrupted is not None:
            raise interrupted

    def raise_failed(self) -> None:
        """Raise the error of the first call that has failed so far."""
        for future in self._submitted:
            if future.done():
                future.result()


class Parts:
    """The state of one collection's tables while a batch is trained in parts.

    Args:
        tables: the tables.
        worker: the thread that makes the collective calls.
        num_passes: number of backward passes, the last of which updates the rows; None = the rows
            are updated by a call of `update`.
    """

    def __init__(self, tables: Tables, worker: _Worker, num_passes: int | None) -> None:
        self._tables, self._worker, self._num_passes = tables, worker, num_passes
        self.settle = worker.settle
        self._num_sent = 0  # parts whose gradients `send_gradients` has received
        self._last: Backward | None = None  # the last of them

    # ---- called by the program's thread ----------------------------------------------------------

    def start(self, batch: Lookup) -> Future[Lookup]:
        """Start a lookup on the worker thread; returns the future of the batch with its result,
        which `ShardedTables.lookup` accepts."""
        return self._worker.submit(self._look_up, batch)

    def looked_up(self, batch: Lookup) -> Lookup:
        """Return the batch with the result of its lookup, made now unless `start` has made it."""
        self._refuse_more()
        if batch.looked_up is None or batch.looked_up.by is not self:
            return self.start(batch).result()
        return batch

    def send_gradients(self, passed: Backward) -> None:
        """Start the exchange of a part's gradients, and after the last part the update."""
        self._worker.raise_failed()
        self._refuse_more()
        if self._last is not None and self._last.frozen != passed.frozen:
            raise InvalidInputError("cannot add up gradients", "frozen tables",
                                    [sorted(self._last.frozen), sorted(passed.frozen)],
                                    "the same in all parts of a batch",
                                    "freeze and unfreeze between batches")
        self._last = passed
        self._num_sent += 1
        is_last = self._num_sent == self._num_passes
        self._worker.submit(self._pass_back, (passed, _versions(passed), is_last))

    def refuse(self, error: BaseException) -> None:
        """Make all ranks skip the update; called instead of `send_gradients` if the backward pass
        fails."""
        self._worker.submit(self._refuse, error)

    def check_drop(self) -> None:
        """Raise InvalidInputError if gradients of this batch have been sent already.

        The rows' owners have added them to their sums, which one rank alone cannot undo.
        """
        if self._num_sent:
            raise InvalidInputError(
                "cannot drop gradients", "backward passes of this batch", self._num_sent,
                "0, because gradients of earlier parts have been sent to the rows' owners",
                "call zero_grad() before the first part, or after oper.micro_batches")

    def _refuse_more(self) -> None:
        if self._num_sent == self._num_passes:
            raise InvalidInputError("cannot train another part of this batch", "num_passes",
                                    self._num_passes, "at least the number of backward passes",
                                    "pass the number of parts, or leave num_passes out")

    def update(self) -> None:
        """Update the rows with the gradients of all parts, unless the last part has done so."""
        if self._last is None or self._num_sent == self._num_passes:
            return
        self._tables.step(self._last.without_samples())

    def forget(self) -> None:
        """Discard the gradients that the rows' owners have added up."""
        torch.ops.oper.lookup_forget(self._tables.handle)

    # ---- on the worker thread --------------------------------------------------------------------

    def _look_up(self, batch: Lookup) -> Lookup:
        given, versions, num_flushes = batch, batch.versions(), self._tables.num_flushes
        batch = self._tables.bounds.repair(batch, self._tables.device)
        out, offsets = self._tables.forward(replace(batch, looked_up=None), True)
        return replace(batch, looked_up=LookedUp(
            self, num_flushes, given, versions, out, offsets))

    def _refuse(self, error: BaseException) -> None:
        self._tables.refuse()
        raise error

    def _pass_back(self, of: tuple[Backward, tuple[int, ...], bool]) -> None:
        passed, versions, is_last = of
        try:
            check_unchanged(versions, _versions(passed))
        except InvalidInputError:
            self._tables.refuse()
            raise
        self._tables.step(passed, updates=is_last)
        check_unchanged(versions, _versions(passed))


def _versions(passed: Backward) -> tuple[int, ...]:
    """Return the in-place version counters of the batch's tensors and of the gradients."""
    return *passed.batch.versions(), *map(version_of, passed.grads)


def check_unchanged(before: tuple[int, ...], now: tuple[int, ...]) -> None:
    """Raise InvalidInputError if tensors were written to while the worker thread used them."""
    if before != now:
        raise InvalidInputError("cannot train a part of a batch", "changed in place",
                                "ids, per-sample weights, inverse_indices or a lookup's gradient",
                                "no change before the update",
                                "use other tensors for the next part")


def why_not_in_parts(tables: Tables) -> str:
    """Return the reason why tables cannot be trained in parts now; empty if they can."""
    reasons = {
        "are read-only": tables.optimizers is None,
        "are in device memory": tables.on_device,
        "are dynamic": tables.keys is not None,
        "are in replica groups": tables.replicas is not None,
        "are trained in parts already": tables.turns.parts is not None,
        "accumulate gradients (no_sync)": tables.held.holders > 0,
        "move to another plan": tables.migration is not None}
    return next((text for text, holds in reasons.items() if holds), "")


def _check(tables: Tables) -> None:
    """Raise InvalidInputError if tables cannot be trained in parts now."""
    reason = why_not_in_parts(tables)
    if reason:
        raise InvalidInputError("cannot train a batch in parts", "tables",
                                f"{list(tables.specs)[:8]} {reason}",
                                "static tables in host memory with an optimizer, outside of "
                                "replica groups, no_sync, micro_batches and migrations",
                                "train complete batches, or leave that state first")


def refuse_in_parts(tables: Any, what: str) -> None:
    """Raise InvalidInputError, with a message that begins with `what`, while a batch is trained in
    parts."""
    if tables.turns.parts is not None:
        raise InvalidInputError(what, "tables", f"{list(tables.specs)[:8]} are trained in parts",
                                "tables outside of oper.micro_batches",
                                "make the call before or after that block")
