"""A batch trained in parts: the exchange of one part hides behind the dense layers of the others.

Rows stand still until the update, which all parts share. The lookup of the next part can therefore
run while the dense layers of this one compute, and so can the exchange of an earlier part's
gradients, whose owners keep the sums until the update. A thread makes these calls in the order in
which the program asks for them, which is the same on all ranks; the program's thread waits for
nobody meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch

from oper.errors import InvalidInputError
from oper.shmem.batch import LookedUp, Lookup
from oper.shmem.passes import Backward
from oper.shmem.protocol import Tables


class MicroBatches:
    """The parts of one batch, for all tables of a model: a context in which they are trained.

    Leaving it, or the last of `num_passes` backward passes inside, updates the tables once, with
    the sum of the gradients of all passes; where an error leaves it before, these are forgotten.
    Collective, as are the passes inside. It belongs to the thread that enters it, and other
    threads' passes wait.

    Args:
        tables: of the model.
        num_passes: backward passes inside, where that is known.

    Raises:
        InvalidInputError: on entering, tables that cannot be trained in parts now.
    """

    def __init__(self, tables: Sequence[Tables], num_passes: int | None = None) -> None:
        self._tables, self._num_passes = list(tables), num_passes

    def __enter__(self) -> MicroBatches:
        self._taken: list[Tables] = []
        try:
            for tables in self._tables:
                tables.turns.lock.acquire()
                self._taken.append(tables)
                _check(tables)
        except BaseException:
            self._give_back()
            raise
        self._worker = _Worker(self._tables[0].turns.thread_of_parts())
        for tables in self._tables:
            tables.turns.parts = Parts(tables, self._worker, self._num_passes)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        parts: list[Parts] = [tables.turns.parts for tables in self._tables]
        is_updated = False
        try:
            try:
                self._worker.end()
            finally:
                for tables in self._tables:
                    tables.turns.parts = None
            if error is None:
                self._worker.raise_failed()
                for x in parts:
                    x.update()
                is_updated = True
        finally:
            if not is_updated:
                for x in parts:
                    x.forget()
            self._give_back()

    def _give_back(self) -> None:
        for tables in reversed(self._taken):
            tables.turns.lock.release()


class _Worker:
    """Has a thread make the collective calls of all tables, in order; none after one that has
    failed, since the ranks no longer agree on what comes next."""

    def __init__(self, thread: ThreadPoolExecutor) -> None:
        self._thread = thread
        self._asked: list[Future[Any]] = []
        self._identity: int | None = None  # of the thread, once it has begun

    def ask(self, call: Any, argument: Any) -> Future[Any]:
        """Have a call made behind those before it."""
        asked = self._thread.submit(self._run, call, argument)
        self._asked.append(asked)
        return asked

    def _run(self, call: Any, argument: Any) -> Any:
        self._identity = threading.get_ident()
        self.raise_failed()
        return call(argument)

    def settle(self) -> None:
        """Wait until all that was asked for is done, on any thread but this."""
        if threading.get_ident() != self._identity:
            wait(self._asked)

    def raise_failed(self) -> None:
        """Raise the first error met so far."""
        for asked in self._asked:
            if asked.done():
                asked.result()

    def end(self) -> None:
        """End when all that was asked for is done."""
        wait(self._asked)


class Parts:
    """The parts of a batch as one collection's tables see them.

    Args:
        tables: the tables.
        worker: makes the collective calls.
        num_passes: backward passes until the update; None = until `update`.
    """

    def __init__(self, tables: Tables, worker: _Worker, num_passes: int | None) -> None:
        self._tables, self._worker, self._num_passes = tables, worker, num_passes
        self._num_left = 0
        self._last: Backward | None = None

    # ---- what the program's thread asks for ------------------------------------------------------

    def start(self, batch: Lookup) -> Future[Lookup]:
        """Begin a lookup; the same batch, which `ShardedTables.lookup` goes on with."""
        return self._worker.ask(self._look_up, batch)

    def looked_up(self, batch: Lookup) -> Lookup:
        """A batch with what its lookup has found, begun now unless it was before."""
        self._refuse_more()
        if batch.looked_up is None or batch.looked_up.by is not self:
            return self.start(batch).result()
        return batch

    def leave(self, passed: Backward) -> None:
        """Begin to exchange the gradients of a part, and with those of the last one to update."""
        self._worker.raise_failed()
        self._refuse_more()
        if self._last is not None and self._last.frozen != passed.frozen:
            raise InvalidInputError("cannot add up gradients", "frozen tables",
                                    [sorted(self._last.frozen), sorted(passed.frozen)],
                                    "the same in all parts of a batch",
                                    "freeze and unfreeze between batches")
        self._last = passed
        self._num_left += 1
        is_last = self._num_left == self._num_passes
        self._worker.ask(self._pass_back, (passed, _versions(passed), is_last))

    def refuse(self, error: BaseException) -> None:
        """In the place of `leave` on a rank that cannot take part: no rank updates."""
        self._worker.ask(self._refuse, error)

    def check_drop(self) -> None:
        """Raise InvalidInputError where gradients of these parts would have to be forgotten."""
        if self._num_left:
            raise InvalidInputError(
                "cannot forget gradients", "backward passes of this batch", self._num_left,
                "0, as their owners have them",
                "call zero_grad() before the first part, or behind oper.micro_batches")

    def _refuse_more(self) -> None:
        if self._num_left == self._num_passes:
            raise InvalidInputError("cannot train another part of this batch", "num_passes",
                                    self._num_passes, "as many backward passes",
                                    "pass their number, or leave it out")

    def settle(self) -> None:
        """Wait until all that was asked for is done, on any thread but the one that does it."""
        self._worker.settle()

    def update(self) -> None:
        """Update with the gradients of all parts, unless that is done."""
        if self._last is None or self._num_left == self._num_passes:
            return
        batch, grad, last = self._last.batch, self._last.grad, self._last
        nothing = Lookup(batch.ids[:0], batch.lengths[:0], batch.key_of, 0,
                         None if batch.weights is None else batch.weights[:0], batch.pooled)
        self._tables.step(Backward(grad.new_empty(0, grad.shape[-1]), nothing,
                                   last.offsets.new_zeros(1), last.frozen))

    def forget(self) -> None:
        """Forget the gradients that owners keep."""
        torch.ops.oper.lookup_forget(self._tables.handle)

    # ---- what the thread does --------------------------------------------------------------------

    def _look_up(self, batch: Lookup) -> Lookup:
        given, versions, num_published = batch, batch.versions(), self._tables.num_published
        if self._tables.bounds.mode != "fatal":
            batch = self._tables.in_bounds(batch)
        out, offsets = self._tables.forward(replace(batch, looked_up=None), True)
        return replace(batch, looked_up=LookedUp(
            self, num_published, given, versions, out, offsets))

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
    """As `Lookup.versions`, of the gradient too."""
    return *passed.batch.versions(), -1 if passed.grad.is_inference() else passed.grad._version


def check_unchanged(before: tuple[int, ...], now: tuple[int, ...]) -> None:
    """Raise InvalidInputError for tensors that were written to while the thread used them."""
    if before != now:
        raise InvalidInputError("cannot train a part of a batch", "changed in place",
                                "ids, per-sample weights or the gradient of a lookup",
                                "the same until the parts' update",
                                "write the next part into other tensors")


def why_not_in_parts(tables: Tables) -> str:
    """Why tables cannot be trained in parts now; empty where they can."""
    reasons = {
        "are read-only": tables.optimizers is None,
        "are in device memory": not tables.trains_in_parts,
        "are dynamic": tables.keys is not None,
        "are trained in parts already": tables.turns.parts is not None,
        "accumulate gradients (no_sync)": tables.holds_gradients,
        "move to another plan": tables.migration is not None}
    return next((text for text, holds in reasons.items() if holds), "")


def _check(tables: Tables) -> None:
    """Raise InvalidInputError for tables that cannot be trained in parts now."""
    reason = why_not_in_parts(tables)
    if reason:
        raise InvalidInputError("cannot train a batch in parts", "tables",
                                f"{list(tables.specs)[:8]} {reason}",
                                "tables in host memory with an optimizer, between two batches",
                                "train whole batches, or wait until that has ended")


def refuse_in_parts(tables: Any, what: str) -> None:
    """Raise InvalidInputError, which begins with `what`, while a batch is trained in parts."""
    if tables.turns.parts is not None:
        raise InvalidInputError(what, "tables", f"{list(tables.specs)[:8]} are trained in parts",
                                "no batch under way", "do it before or after oper.micro_batches")
