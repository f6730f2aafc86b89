"""Updates of sharded tables from backward passes: at once, accumulated, or in micro-batches."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NoReturn

import torch

from oper.errors import InvalidInputError
from oper.shmem.batch import Lookup, ResolvedIds, rows_in_order
from oper.shmem.group.status import Status
from oper.shmem.group.turns import Turns, in_turn
from oper.shmem.micro_batches import refuse_in_parts
from oper.shmem.optim.arguments import KernelArguments
from oper.shmem.optim.clipping import GradientClamp
from oper.shmem.optim.guard import GradientGuard
from oper.shmem.passes import Backward, HeldPasses


class TableUpdates:
    """The part of `ShardedTables` that trains them."""

    turns: Turns
    frozen: frozenset[str]
    guard: GradientGuard
    num_steps: int
    on_update: list[Callable[[], None]]
    param_groups: list[dict[str, Any]]
    gradient_scale: float
    keys: Any
    handle: int
    operators: Any
    _clamp: GradientClamp
    _process: int
    _heap: Any
    _migration: Any
    _arguments: KernelArguments
    _skipped: dict[str, int]
    _table_of: list[str]
    _backward_op: Any
    _held: HeldPasses
    _check_process: Callable[[], None]
    _known: Callable[[Lookup], ResolvedIds | None]
    _raise: Callable[..., Any]

    def apply_all(self, parts: list[Backward]) -> None:
        """Sum the gradients of lookups, exchange them and update the rows once. Collective.

        For a micro-batch the gradients are only exchanged. Tables frozen now are not updated.

        Raises:
            InvalidInputError: passes held back by `no_sync` had other tables frozen, or one of
                their gradients was refused.
            PeerLostError: a peer has ended.
            DeadlineError: a peer did not arrive in time.
        """
        with self.turns.lock:
            if not self.turns.is_alone:
                self.turns.end(parts)
            if os.getpid() != self._process or self._heap is None:
                self._check_process()
            held = self._held
            for part in parts:
                part.frozen |= self.frozen
                if part.batch.shared is not None and (
                        len(parts) > 1 or held.holders or held.passes
                        or self._clamp.is_active or self.guard.mode != "off"):
                    with self._refusing():
                        part.grad, part.batch = self.by_bag(part.grad, part.batch, part.offsets)
                if self.guard.mode != "off":
                    with self._refusing():
                        part.grad = self.guard.apply(part.grad, part.batch, part.offsets,
                                                     self.num_steps + 1)
                if self._clamp.is_active:
                    part.grad = self._clamp.apply(part.grad, part.batch, part.offsets)
            if held.refused is not None and not held.holders:
                self._refuse_held()
            passed = (held.join(parts) if held.holders or held.passes or len(parts) > 1
                      else parts[0])
            if passed is None:
                return
            if self.turns.parts is not None:
                self.turns.parts.leave(passed)
            else:
                self.step(passed)

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        """If the block refuses the gradient of a pass, no rank makes this update. The other ranks
        are told when they make it; within `no_sync` that is later, so the refusal is kept."""
        try:
            yield
        except InvalidInputError as error:
            if self._held.holders:
                self._held.refused = error
            else:
                self._leave_out(error)
            raise

    def _leave_out(self, error: Exception) -> None:
        """Make all ranks skip the update for which they wait for this rank. Collective."""
        self._held.drop()  # as on the other ranks
        if self.turns.parts is not None:
            self.turns.parts.refuse(error)
        else:
            self.refuse()

    def _refuse_held(self) -> NoReturn:
        error = self._held.refused
        assert error is not None
        self._leave_out(error)
        raise InvalidInputError("no rank makes this update", "a backward pass under no_sync",
                                str(error), "backward passes that are all valid",
                                "continue with the next batch, or call zero_grad() of the fused "
                                "optimizer where that error is caught") from error

    def refuse(self) -> None:
        """Called instead of `step` on a rank that cannot take part, so that no rank makes this
        update.

        Ranks of its memory domain can continue with the next one. Collective.
        """
        torch.ops.oper.lookup_refuse_update(self.handle)

    def step(self, passed: Backward, updates: bool = True) -> None:
        """Reduce and exchange the gradients of a backward pass, and update the tables with them.

        Args:
            passed: the backward pass.
            updates: if False, owners keep the sums for the next call that updates, which counts as
                the step; not for dynamic tables
        """
        # One function, since each one more costs a microsecond in every step.
        batch, offsets = passed.batch, passed.offsets
        grads = [*passed.grads]
        for k, grad in enumerate(grads):
            if not grad.is_contiguous():
                grads[k] = rows_in_order(grad, batch.pooled)
        if self.keys is not None:
            self.keys.leave(batch, passed.frozen)
        optimizers = self._arguments.at(self.num_steps + 1, self._skipped, passed.frozen,
                                        self.param_groups, self._table_of)
        known = None if batch.resolved is None else self._known(batch)
        shared = batch.shared
        code, detail = self._backward_op(
            self.handle, grads, batch.ids, offsets, batch.weights, batch.key_of, batch.batch_size,
            batch.pooled, optimizers, self.gradient_scale, known and known.addresses,
            known and known.order, updates,
            shared and shared.bags, shared and shared.samples)
        if code:
            self._raise(code, detail, batch, offsets)
        if not updates:
            return
        if self.keys is not None:
            self.keys.take()
        self.num_steps += 1
        for name in passed.frozen:
            self._skipped[name] += 1
        for notify in self.on_update:
            notify()
        if self._migration is not None:
            self._migration.note(passed.batch, passed.offsets)
            if self._migration.advance():
                self._migration = None

    def by_bag(self, grad: torch.Tensor, batch: Lookup, offsets: torch.Tensor
               ) -> tuple[torch.Tensor, Lookup]:
        """Convert the gradient of samples that share bags to that of the bags; returns it with the
        batch of bags."""
        shared = batch.shared
        if shared is None:
            return grad, batch
        grad, outside = torch.ops.oper.sum_by_bag(
            self.handle, rows_in_order(grad, True), shared.bags, shared.samples, batch.key_of,
            batch.batch_size)
        if outside >= 0:
            self._raise(Status.BAG_OUT_OF_RANGE, outside, batch, offsets)
        return grad, replace(batch, shared=None)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Hold back the gradients of backward passes inside; the first pass outside applies the
        sum.

        Like DistributedDataParallel's ``no_sync``: k backward passes give one update, bitwise equal
        to that of one batch with all their samples. Inside, no backward pass is collective. It
        holds for the backward passes of all threads.
        """
        refuse_in_parts(self, "cannot accumulate gradients")
        return self._held.hold()

    @property
    def holds_gradients(self) -> bool:
        """Whether a thread is within `no_sync`."""
        return self._held.holders > 0

    @property
    def refused(self) -> Exception | None:
        """Why the gradients held back by `no_sync` must not be applied, or None."""
        return self._held.refused

    @refused.setter
    def refused(self, error: Exception | None) -> None:
        self._held.refused = error

    @in_turn
    def drop_gradients(self) -> None:
        """Drop the gradients held back by `no_sync`, as ``zero_grad`` does.

        Collective if one of them was refused, since the other ranks wait for the update.

        Raises:
            InvalidInputError: within `oper.micro_batches`, after a backward pass.
        """
        if self.turns.parts is not None:
            self.turns.parts.check_drop()
        if self._held.refused is not None and not self.turns.is_alone:
            self._leave_out(self._held.refused)
        self._held.drop()

    @in_turn
    def weight_gradient(self, grad: torch.Tensor, batch: Lookup, offsets: torch.Tensor,
                        updates: bool) -> torch.Tensor:
        """Gradient of the per-sample weights, float32 [N]; before `apply_all`.

        Args:
            grad, batch, offsets: see `Backward`.
            updates: whether an update with this gradient follows; its guard then raises on all
                ranks.
        """
        with self._refusing() if updates else contextlib.nullcontext():
            grad, batch = self.by_bag(grad, batch, offsets)
        if self.guard.mode != "off" and not (updates and self.guard.mode == "stop"):
            grad = self.guard.apply(grad, batch, offsets, self.num_steps + 1)
        grad = self._clamp.apply(grad, batch, offsets)
        gradient, code, detail = self.operators.lookup_weight_gradient(
            self.handle, grad.contiguous(), batch.ids, offsets, batch.weights, batch.key_of,
            batch.batch_size)
        if code:
            self._raise(code, detail, batch, offsets)
        return gradient
