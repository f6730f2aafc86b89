"""Updates of sharded tables by backward passes: immediate, accumulated, or in micro-batches."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NoReturn

import torch

from oper.errors import InvalidInputError, OperError
from oper.shmem.batch import Lookup, ResolvedIds, rows_in_order
from oper.shmem.counters.measured import MeasuredTables
from oper.shmem.group.status import PEER_FAILURES, Status
from oper.shmem.group.turns import in_turn
from oper.shmem.micro_batches import refuse_in_parts
from oper.shmem.optim.arguments import KernelArguments, rounding_key
from oper.shmem.optim.clipping import GradientClamp
from oper.shmem.optim.guard import GradientGuard
from oper.shmem.passes import Backward, HeldPasses


class TableUpdates(MeasuredTables):
    """The part of `ShardedTables` that trains them."""

    family: Any
    has_push: bool
    notifies_peers: bool
    frozen: frozenset[str]
    frozen_by_all: bool
    guard: GradientGuard
    seed: int | None
    on_update: list[Callable[[], None]]
    param_groups: list[dict[str, Any]]
    gradient_scale: float
    operators: Any
    _clamp: GradientClamp
    migration: Any
    _arguments: KernelArguments
    _rounding_keys: dict[str, tuple[int, int]]
    _table_of: list[str]
    _backward_op: Any
    held: HeldPasses
    _known: Callable[[Lookup], ResolvedIds | None]
    _raise: Callable[..., Any]

    def apply_all(self, parts: list[Backward]) -> None:
        """Sum the gradients of lookups, exchange them and update the rows once. Collective.

        Tables in `frozen` are not updated. Within `no_sync` the gradients are only held back,
        without communication; within `micro_batches` their exchange is started.

        Raises:
            InvalidInputError: the gradient guard or a bag index refuses a gradient, of these passes
                or of passes held back by `no_sync`; or their frozen tables differ.
            PeerLostError: a peer has ended or refused its batch.
            DeadlineError: a peer did not arrive in time.
        """
        with self.turns.lock:
            if not self.turns.is_alone:
                self.turns.end(parts)
            if os.getpid() != self._process or self._heap is None:
                self._check_process()
            held = self.held
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
            passed: Backward | None = parts[0]
            if held.is_entered or held.passes or len(parts) > 1:
                with self._refusing():
                    passed = held.join(parts)
            if passed is None:
                return
            if self.turns.parts is not None:
                self.turns.parts.send_gradients(passed)
            else:
                self.step(passed)

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        """If the block raises InvalidInputError, make all ranks skip this update.

        The other ranks are notified when they make the update. Within `no_sync` they make it later,
        so the error is stored until then.
        """
        try:
            yield
        except InvalidInputError as error:
            if self.held.holders:
                self.held.refused = error
            else:
                self._leave_out(error)
            raise

    def _leave_out(self, error: Exception) -> None:
        """Make all ranks skip the update in which they wait for this rank. Collective."""
        self.held.drop()  # the other ranks drop their passes, too
        if self.turns.parts is not None:
            self.turns.parts.refuse(error)
        else:
            self.refuse()

    def _refuse_held(self) -> NoReturn:
        error = self.held.refused
        assert error is not None
        self._leave_out(error)
        raise InvalidInputError("no rank makes this update", "error of a pass under no_sync",
                                str(error), "only valid backward passes",
                                "continue with the next batch; or, where the program catches that "
                                "error, call zero_grad() of the fused optimizer") from error

    def refuse(self) -> None:
        """Make all ranks skip this update; called instead of `step` on a rank that cannot take
        part. Collective. Ranks of its memory domain can continue with the next update."""
        self._skip_in_family()  # first, since other ranks may wait in another collection
        torch.ops.oper.lookup_refuse_update(self.handle)
        if self.replicas is not None:
            self.replicas.refuse_update()

    @property
    def _waits(self) -> bool:
        """Whether other ranks wait for this one in collective lookups."""
        return self.has_push or (self._exchange is not None and self._exchange.gathers)

    def _tell_refused(self, collective: bool, trains: bool) -> None:
        """Make the other ranks skip the lookup in which they wait for this rank, or, if none waits
        in lookups, its update."""
        if self._waits or (trains and self._exchange is None and not self.held.holders):
            torch.ops.oper.lookup_refuse(self.handle, collective)
        elif trains and not self.held.holders:
            torch.ops.oper.lookup_refuse_update(self.handle)

    def _refuse_in_groups(self) -> None:
        """Make the other replica groups skip the update of a refused lookup. Within `no_sync` only
        the lookup's gradient is missing from an update that all groups make later."""
        if self.replicas is not None and not self.held.holders:
            self.replicas.refuse_update()

    def _skip_in_family(self) -> None:
        """Skip a batch, which some rank has refused in one collection, in all collections of the
        model, and drop gradients held back for its update.

        Every rank calls this in the collection in which it learns of the refusal. Otherwise a rank
        could wait in another collection for the rank that refused, or be paired with the next
        batch of that rank.
        """
        if not self.notifies_peers:
            return
        self.drop_in_family()
        if self.replicas is not None and not self.held.holders:  # else its update is still made
            self.replicas.note_refused()
        for tables in [t for t in self.family if t._heap is not None]:
            if tables is not self and (tables.has_push or not tables.held.holders):
                torch.ops.oper.lookup_skip(tables.handle)

    def drop_in_family(self) -> None:
        """Drop the gradients held back in all tables of the model, for an update that is skipped.
        """
        for tables in [*self.family]:
            if not tables.held.holders:
                tables.held.drop()

    def step(self, passed: Backward, updates: bool = True) -> None:
        """Reduce and exchange the gradients of a backward pass, and update the tables with them.

        Args:
            passed: the backward pass.
            updates: if False, owners only add the gradients to sums, which the next call with True
                applies; only that call counts as a step. Must be True for dynamic tables without
                replica groups, whose keys this call counts.

        Raises:
            InvalidInputError: a learning rate is invalid, or learning rates, frozen tables,
                `no_sync` or (with Adam) step counts differ between the ranks; no rank updates then.
                For tables in device memory, it is raised after this step or by a later call.
        """
        if self.replicas is not None and self.replicas.takes(passed, updates):
            return
        # Not split into functions: each call would cost about a microsecond per step.
        batch, offsets = passed.batch, passed.offsets
        grads = [*passed.grads]
        for k, grad in enumerate(grads):
            if not grad.is_contiguous():
                grads[k] = rows_in_order(grad, batch.pooled)
        # With replica groups, the `Synchronizer` has done this before gradients are exchanged.
        if self.keys is not None and self.replicas is None:
            self.keys.leave(batch, passed.frozen)
        try:
            optimizers = self._arguments.at(self.num_steps + 1, self._skipped, passed.frozen,
                                            self.param_groups, self._table_of)
        except InvalidInputError:
            self.refuse()
            raise
        known = None if batch.resolved is None else self._known(batch)
        shared = batch.shared
        interrupted: BaseException | None = None
        try:
            code, detail = self._backward_op(
                self.handle, grads, batch.ids, offsets, batch.weights, batch.key_of,
                batch.batch_size, batch.pooled, optimizers, self.gradient_scale,
                known and known.addresses, known and known.order, updates + 2 * passed.accumulates,
                shared and shared.bags, shared and shared.samples)
        except (RuntimeError, OperError):  # of the operator
            raise
        except BaseException as error:
            # Of a signal's handler. Signals do not interrupt the operator: Python calls the handler
            # once it has returned, with the rows updated. The update must be counted.
            code, detail, interrupted = 0, 0, error
        if code:
            if code == Status.OTHER_SETTINGS:
                self._refuse_settings(detail, passed)
            if code not in PEER_FAILURES:
                self._skip_in_family()
            self._raise(code, detail, batch, offsets)
        if not updates:
            if interrupted is not None:
                raise interrupted
            return
        if self.keys is not None:
            self.keys.note_update()
        if passed.frozen:
            self.count_step(passed.frozen)
        else:  # the usual case, without another call
            self.num_steps += 1
            self.frozen_by_all = False
        for notify in self.on_update:
            notify()
        if self.migration is not None:
            self.migration.note(passed.batch, passed.offsets)
            if self.migration.advance():
                self.migration = None
        if interrupted is not None:
            raise interrupted

    def count_step(self, frozen: frozenset[str]) -> None:
        """Count an update, in which tables named `frozen` do not change."""
        self.num_steps += 1
        self.frozen_by_all = len(frozen) == len(self._skipped)
        for name in frozen:
            self._skipped[name] += 1

    def updates(self) -> torch.Tensor:
        """Return what random rounding depends on, for a checkpoint: int64 [3], the number of
        updates, the seed as a signed number, and whether there is one (if not, nothing is rounded
        at random)."""
        seed = self.seed or 0
        return torch.tensor([self.num_steps, seed - (seed >> 63 << 64), self.seed is not None])

    def set_updates(self, saved: torch.Tensor) -> None:
        """Continue from the `updates` of a checkpoint; step counts for bias corrections do not
        change."""
        steps, seed, has_seed = saved.tolist()
        for name in self._skipped:
            self._skipped[name] += steps - self.num_steps
        self.num_steps = steps
        if has_seed and self.seed is not None:
            self.seed = seed % (1 << 64)
            self._rounding_keys = {name: rounding_key(self.seed, name) for name in self._skipped}
            self._arguments = self._arguments.copied(self._rounding_keys)

    def _refuse_settings(self, rank: int, passed: Backward) -> NoReturn:
        self._raise_peer_failure(Status.OTHER_SETTINGS, rank)  # notifies other domains
        self.drop_in_family()  # no collection of the model is updated by this batch
        if self.replicas is not None:
            self.replicas.note_refused(differ=True)
        mine = {"lr": {", ".join(g["tables"][:8]): g["lr"] for g in self.param_groups},
                "frozen": sorted(passed.frozen)[:8], "step": self.num_steps + 1,
                "no_sync": passed.accumulates}
        raise InvalidInputError(
            f"no rank updates the tables, since rank {rank} has other settings than rank 0",
            "learning rates, frozen tables, step and whether no_sync was entered on this rank",
            mine, "the same on all ranks",
            "set lr and requires_grad by the same rule on every rank; enter no_sync on all ranks, "
            "even on one that makes no pass in it")

    def by_bag(self, grad: torch.Tensor, batch: Lookup, offsets: torch.Tensor
               ) -> tuple[torch.Tensor, Lookup]:
        """Sum the gradient rows of samples that share a bag; returns the gradient of the bags, and
        the batch without `shared`."""
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
        """Accumulate the gradients of backward passes inside the block, see `oper.no_sync`.

        Applies to the backward passes of all threads.
        """
        refuse_in_parts(self, "cannot accumulate gradients")
        return self.held.hold()

    @in_turn
    def drop_gradients(self) -> None:
        """Drop the gradients held back by `no_sync`, for ``zero_grad``.

        Collective if a gradient was refused, because the other ranks wait for the update.

        Raises:
            InvalidInputError: within `oper.micro_batches`, after a backward pass.
        """
        if self.turns.parts is not None:
            self.turns.parts.check_drop()
        if self.held.refused is not None and not self.turns.is_alone:
            self._leave_out(self.held.refused)
        self.held.passes, self.held.refused = [], None

    @in_turn
    def weight_gradient(self, grad: torch.Tensor, batch: Lookup, offsets: torch.Tensor,
                        updates: bool) -> torch.Tensor:
        """Return the gradient of the per-sample weights, float32 [N]. Call it before `apply_all`.

        Args:
            grad, batch, offsets: see `Backward`.
            updates: whether `apply_all` with this gradient follows; the gradient guard's error is
                then left to it, because it must reach all ranks.
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
