"""Sharded tables of one collection: lookups and updates under a plan."""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from oper.errors import InvalidInputError
from oper.messages import owners_pool
from oper.plan import Plan
from oper.rows.directory import directories_of
from oper.shmem.autograd import CollectedPasses, trained_lookup
from oper.shmem.batch import (
    Lookup,
    ResolvedIds,
    needs_weight_gradient,
    raise_status,
    recorder,
    refuse_recording,
    refuse_tangent,
    refuse_transforms,
    refuse_weight_gradient,
)
from oper.shmem.by_feature import BoundsCheck, by_feature
from oper.shmem.compiled import lookup_in_graph, register
from oper.shmem.exchange.host import Exchange
from oper.shmem.exchange.pull import PullCosts, choose_pull
from oper.shmem.group.agreement import check_agreement
from oper.shmem.group.desync import MIGRATION, phase_of, register_of
from oper.shmem.group.domains import DomainGroup, find_domains
from oper.shmem.group.groups import Group
from oper.shmem.group.status import NOT_BEGUN, PEER_FAILURES, Status
from oper.shmem.group.turns import Turns, in_turn
from oper.shmem.keys.directories import Keys
from oper.shmem.keys.rules import DynamicTable
from oper.shmem.library import load
from oper.shmem.memory.host_heap import HostHeap
from oper.shmem.micro_batches import check_unchanged, refuse_in_parts
from oper.shmem.migration import Migration, check_memory, copied
from oper.shmem.optim.arguments import KernelArguments, feature_rows, rounding_key
from oper.shmem.optim.clipping import GradientClamp
from oper.shmem.optim.guard import GradientGuard
from oper.shmem.optim.optimizers import Optimizer, check_supported
from oper.shmem.passes import HeldPasses
from oper.shmem.placement.layout import ArenaLayout, context_arguments
from oper.shmem.placement.send_buffer import reserved_bytes
from oper.shmem.protocol import Tables
from oper.shmem.replica_groups.moves import begin_move
from oper.shmem.settings import deadline_s
from oper.shmem.updates import TableUpdates
from oper.support.processes import when_dropped


class ShardedTables(TableUpdates):
    """The tables of one collection, placed by a plan and shared by a group of ranks.

    Args:
        plan: placement of all tables.
        features: (feature name, table name) in output order. The pooled output of `lookup` has
            `dim` columns of the feature's table for each feature.
        group: the ranks; construction is collective.
        optimizers: applied in the backward pass, one for all tables or by table name; None =
            read-only tables.
        gradient_scale: factor on table gradients (1 / W for the mean of the ranks' losses).
        seed: seed of stochastic rounding (16-bit rows, 8-bit messages); rank 0's value is used, by
            default its torch seed.
        is_new: whether to initialise optimizer states; False if states will be copied in.

    Raises:
        PlanError: the plan does not fit the number of ranks or cannot be executed here.
        InvalidInputError: the arguments differ between the ranks.
        OperError: there is not enough memory for the arenas.
    """

    pull: bool | PullCosts = False  # see `choose_pull`
    shares_bags = True  # whether lookups support `Lookup.shared`
    takes_parts = True  # whether backward passes take a gradient per feature, see `Lookup.apart`
    operators: Any = torch.ops.oper  # namespace of the operators on batches
    tracker: object = None  # the token of the `ChangedRows` that owns the marks of changed rows
    # Attributes that depend on the plan; `take_over` replaces them.
    _plan_attributes: tuple[str, ...] = ("plan", "directories", "_table_of", "has_push", "pieces",
                                     "_layout", "_heap", "handle", "_addresses", "_exchange")

    def __init__(self, plan: Plan, features: Sequence[tuple[str, str]], group: Group,
                 optimizers: Optimizer | Mapping[str, Optimizer] | None,
                 gradient_scale: float = 1.0, seed: int | None = None, is_new: bool = True
                 ) -> None:
        load()
        # Without `.default`, torch would search for the overload in every call.
        self._forward_op: Any = self.operators.lookup_forward.default
        self._backward_op: Any = self.operators.lookup_backward.default
        self.plan, self.group = plan, group
        self.features = list(features)
        tables = [t.table for t in plan.tables]
        if optimizers is not None and not isinstance(optimizers, Mapping):
            optimizers = {t.name: optimizers for t in tables}
        self.optimizers = None if optimizers is None else dict(optimizers)
        self.num_steps = 0  # updates so far
        # By table: updates in which the table was frozen, see `table_steps`.
        self._skipped = dict.fromkeys((t.name for t in tables), 0)
        #: Names of tables that are currently not updated; must be the same on all ranks.
        self.frozen: frozenset[str] = frozenset()
        self.frozen_by_all = False  # whether all ranks had frozen all tables at the last update
        self.on_update: list[Callable[[], None]] = []  # called after rows have changed
        # One per distinct optimizer: learning rate, which schedulers may change, and tables.
        self.param_groups: list[dict[str, Any]] = [
            {"lr": o.lr, "tables": tuple(n for n, x in (optimizers or {}).items() if x == o)}
            for o in dict.fromkeys((optimizers or {}).values())]
        self.gradient_scale = gradient_scale
        plan.check_for(tables, group.world_size)
        check_supported(tables, self.optimizers)
        check_agreement(group, plan, {"feature": self.features,
                                      "optimizer": list((self.optimizers or {}).items()),
                                      "gradient_scale": [gradient_scale]})
        self.specs = {t.name: t for t in tables}
        self.turns = Turns(group.world_size)
        # Whether this rank can notify others of a batch that it refuses, see `_skip_in_family`.
        self.notifies_peers = self.is_watched and group.world_size > 1
        # The collections of the model that has these tables, see `_skip_in_family`.
        self.family: weakref.WeakSet[ShardedTables] = weakref.WeakSet([self])
        self.collection = register_of(group).add(self)
        self.directories = directories_of(plan)
        self._table_of = [d.table.name for d in self.directories]
        self.has_push = any(x.tier.mode == "push" for d in self.directories for x in d.tiers)
        # The directories of each table, in column order.
        self.pieces: dict[str, list[int]] = {name: [] for name in self.specs}
        for k, d in enumerate(self.directories):
            self.pieces[d.table.name].append(k)
        domains = find_domains(group)
        trains, num_domains = self.optimizers is not None, len(set(domains))
        self._exchange = self._open_exchange(domains) if num_domains > 1 else None
        # Whether owners pool rows for other domains, and whether ranks write to their send buffers.
        self._pools_for_domains = num_domains > 1 and owners_pool(tables, trains, num_domains)
        self._uses_send_buffers = trains or (self._pools_for_domains and self.has_push)
        bits = [plan.message_bits.of(t.name) for t in tables]
        rounds = num_domains > 1 and any(x.gradients <= 8 for x in bits)
        rounds |= any(t.dtype != "float32" for t in tables)
        if rounds:
            seed = group.all_gather(torch.initial_seed() if seed is None else seed)[0]
        self.seed = seed
        self._rounding_keys = {t.name: rounding_key(seed or 0, t.name) for t in tables}
        self._arguments = KernelArguments(self.optimizers or {}, self._rounding_keys, rounds)
        self._clamp = GradientClamp(self.features, self.specs, optimizers or {}, gradient_scale)
        self._heap: HostHeap | None = None
        self._open_heap()
        self.handle = self._create_context()
        self.migration: Migration | None = None  # the move that is under way
        self._release_when_dropped()
        self.bounds = BoundsCheck("fatal", self.features, self.specs)
        self.guard = GradientGuard(self.features, self.specs)
        self.held = HeldPasses(self.turns.lock)
        with torch.inference_mode(False):  # no inference tensor, which could not be trained
            # Makes autograd run the lookups' backward pass although the tables are not parameters.
            self.anchor = torch.zeros(0, requires_grad=True, device=self.device)
            self.collected = CollectedPasses(self)
        self.number = register(self)
        self._process = os.getpid()
        if is_new and self._begin_states(self.optimizers or {}):
            self.barrier()

    def _release_when_dropped(self) -> None:
        """Arrange that tables without references are released even if `close` was not called."""
        self._release: Any = when_dropped(self, _release, os.getpid(), self.handle,
                                          self._check_open())

    def _open_exchange(self, domain_of: Sequence[int]) -> Exchange:
        return Exchange(self.group, domain_of, self.collection, self.plan.message_bits)

    def _open_heap(self) -> None:
        """Lay out and map the arenas."""
        group, members = self.group, list(self.members)
        # Even a single rank's update passes its gradients through the send buffer.
        self._layout = ArenaLayout.build(
            self.directories, group.world_size,
            reserved_bytes(self.directories, self._uses_send_buffers), self._row_clipped())
        self._heap = HostHeap(
            DomainGroup(group, members) if self._exchange else group,
            [self._layout.num_bytes[r] for r in members],
            [self._layout.host_ranges[r] for r in members], self._layout.send_buffer_bytes)
        self._addresses = [0] * group.world_size
        for rank, address in zip(members, self._heap.addresses, strict=True):
            self._addresses[rank] = address

    def _row_clipped(self) -> list[str]:
        """Return the tables whose optimizer has `max_row_norm`."""
        return [n for n, o in (self.optimizers or {}).items() if o.max_row_norm is not None]

    def _context_arguments(self) -> tuple[Any, ...]:
        """Return the operators' arguments that describe the plan and the features."""
        features, self.output_columns = feature_rows(self.features, self.specs, self.directories,
                                                     self.pieces)
        return context_arguments(self.directories, self._layout, self._addresses, self.group.rank,
                                 features, self.device)

    def _create_context(self) -> int:
        heap = self._check_open()
        handle = int(torch.ops.oper.context_create(*self._context_arguments()))
        if len(self.members) > 1:
            torch.ops.oper.context_set_barrier(handle, heap.control, self.members, heap.pidfds,
                                               int(deadline_s() * 1000))
        if self._exchange is not None:
            self._exchange.attach(handle, self.directories)
        return handle

    # ---- lookups ---------------------------------------------------------------------------------

    def lookup(self, batch: Lookup, has_rows: bool = False) -> Any:
        """Return the embeddings of a batch.

        With gradients enabled and an optimizer, the backward pass of the result updates the tables,
        and both passes are collective over the group. Without gradients a lookup is not collective
        within a memory domain; with several domains it is, unless replicas of all rows make
        requests unnecessary.

        Args:
            batch: the ids, or the keys of dynamic tables.
            has_rows: whether keys of dynamic tables are already replaced by rows.

        Returns:
            Pooled: float32 [B, sum of the features' dims]. Unpooled: float32 [N, D], or, if
            `batch.apart`, a tuple with float32 [ids of the feature, D] for each feature.

        Raises:
            InvalidInputError: an id is out of range (see `BoundsCheck`), lengths do not add up to
                the number of ids, a bag index of a sample is out of range, or the lookup is within
                a transform of ``torch.func``.
        """
        if batch.weights is not None and self.optimizers is None and needs_weight_gradient(batch):
            with torch.no_grad():  # between memory domains, the other ranks wait for this lookup
                self.lookup(batch, has_rows)
            refuse_weight_gradient(batch)
        if self.keys is not None and not has_rows:
            return self.keys.lookup(self.lookup, batch)
        if torch.compiler.is_compiling() and self.bounds.mode == "fatal":
            return lookup_in_graph(self, batch)
        if recorder() is not None:
            refuse_recording()
        looked_up = batch.looked_up
        if looked_up is not None:
            if (looked_up.by is self.turns.parts
                    and looked_up.num_flushes == self.num_flushes):
                check_unchanged(looked_up.versions, looked_up.given.versions())
            else:
                batch = replace(batch, looked_up=None)  # the rows have changed since
        if self.bounds.mode != "fatal" and batch.looked_up is None and self._known(batch) is None:
            batch = self.bounds.repair(batch, self.device)
        try:
            if batch.weights is not None:
                refuse_tangent(batch.weights)
            if self.optimizers is not None and torch.is_grad_enabled():
                # The first condition is the usual case, which needs no call.
                trains = len(self.frozen) < len(self.specs) or self.is_trained()
                if trains or (batch.weights is not None and batch.weights.requires_grad):
                    if os.getpid() != self._process or self._heap is None:
                        self._check_process()
                    if self.collected.parts:
                        self.collected.forget_failed()
                    if self.turns.parts is not None:
                        batch = self.turns.parts.looked_up(batch)
                    return trained_lookup(self.anchor if trains else self.anchor.detach(),
                                          batch.weights, self, batch)
            if self.collected.began and torch._C._current_graph_task_id() != -1:
                self.collected.check_repeated(self.num_steps)
            out, offsets = self.forward_alone(batch)
        except RuntimeError:
            refuse_transforms()
            raise
        return by_feature(out, batch, offsets) if batch.apart else out

    def forward_alone(self, batch: Lookup) -> tuple[torch.Tensor, torch.Tensor]:
        """`forward` without gradients, while other threads may train or move the tables."""
        if self._exchange is not None or self.on_device:  # there, lookups share workspaces
            with self.turns.lock:
                return self.forward(batch)
        handle = self.handle
        try:
            return self.forward(batch)
        except RuntimeError:
            if handle == self.handle:
                raise
            return self.forward(batch)  # another thread has moved the tables, closing the old ones

    def is_trained(self) -> bool:
        """Whether lookups need a backward pass: to update tables or, until all ranks are known to
        have frozen all tables, to compare which tables are frozen."""
        return len(self.frozen) < len(self.specs) or (
            self.notifies_peers and not self.frozen_by_all)

    def forward(self, batch: Lookup, collective: bool = False
                ) -> tuple[torch.Tensor, torch.Tensor]:
        """Look up a batch without autograd.

        A caller must hold `turns.lock` if other threads may look up or update at the same time.

        Args:
            batch: the batch.
            collective: whether all ranks make this call, and owners pool the tiers in push mode; if
                False, rows are read directly. Treated as True if owners pool for other memory
                domains (`owners_pool`).

        Returns:
            The embeddings, not split by feature, and the offsets of the bags, int64
            [num_keys * B + 1].
        """
        if batch.looked_up is not None:
            return batch.looked_up.out, batch.looked_up.offsets
        if self.turns.parts is not None:
            self.turns.parts.settle()
        trains, collective = collective, collective or self._pools_for_domains
        if trains and self.replicas is not None:
            self.replicas.begin_batch()
        known = None if batch.resolved is None else self._known(batch)
        shared = batch.shared
        out, offsets, code, detail = self._forward_op(
            self.handle, batch.ids, batch.lengths, batch.weights, batch.key_of, batch.batch_size,
            batch.pooled, collective, known and known.offsets, known and known.addresses,
            shared and shared.bags, shared and shared.samples)
        if code:
            if collective and code not in PEER_FAILURES:
                self._skip_in_family()
            # If ranks wait in lookups, the kernels have reported an invalid id themselves.
            if code in NOT_BEGUN or (code == Status.ID_OUT_OF_RANGE and not self._waits):
                self._tell_refused(collective, trains)
            if trains:
                self._refuse_in_groups()
            self._raise(code, detail, batch, offsets)
        return out, offsets

    def refuse_lookup(self, error: Exception) -> None:
        """Make all ranks skip the current batch, because `error` kept this rank from making a
        `Lookup` of it; `lookup` does the same for an invalid `Lookup`."""
        collective = self.optimizers is not None and (
            torch.is_grad_enabled() and self.is_trained())
        if self.turns.parts is not None:
            self.turns.parts.refuse(error)
            return
        with self.turns.lock:
            if collective:
                self._skip_in_family()
            self._tell_refused(collective or self._pools_for_domains, collective)
            if collective:
                self._refuse_in_groups()

    def resolve(self, batch: Lookup) -> Lookup:
        """Compute row addresses in advance; returns the batch, whose lookup is then faster.

        Locates the ids and, unless the tables are read-only, sorts them. May run on another thread
        while earlier batches are trained: it reads no rows and is not collective. Results are
        bitwise the same. If the ids or the plan change before the lookup, the lookup resolves the
        batch again. The batch is returned unchanged with several domains of host memory, with
        dynamic tables, and if the batch is invalid or has ids that `BoundsCheck` will replace,
        since the lookup must report these.
        """
        # In host memory, rows of other domains have no addresses. Keys may get other rows before
        # the lookup.
        if (self.keys is not None or not (self.is_one_domain or self.on_device)
                or self.bounds.replaces(batch, self.device)):
            return batch
        versions = batch.versions()  # before the ids are read: they may change meanwhile
        with self.turns.resolving:
            handle = self.handle
            offsets, addresses, order, code, _ = self.operators.lookup_resolve(
                handle, batch.ids, batch.lengths, batch.weights, batch.key_of, batch.batch_size,
                batch.pooled, self.optimizers is not None)
        if code:
            return batch
        return replace(batch, resolved=ResolvedIds(handle, batch, versions, offsets, addresses,
                                                   order))

    def to_resolve(self, batch: Lookup) -> Callable[[], Lookup]:
        """Return a function without arguments that calls `resolve`, for another thread."""
        return lambda: self.resolve(batch)

    def _known(self, batch: Lookup) -> ResolvedIds | None:
        known = batch.resolved
        return known if known is not None and known.fits(self.handle, batch) else None

    def _raise(self, code: int, detail: int, batch: Lookup, offsets: torch.Tensor) -> None:
        code, detail = self._raise_peer_failure(code, detail)
        raise_status(code, detail, self._layout.send_buffer_bytes, batch, offsets, self)

    @in_turn
    def barrier(self) -> None:
        """Wait for all ranks; raises PeerLostError, DeadlineError or DesyncError."""
        self._check_process()
        code, detail = torch.ops.oper.context_barrier(self.handle, self.phase)
        if code:
            self._raise_peer_failure(code, detail)
        if self._exchange is not None:
            self._exchange.barrier(self.phase)

    # ---- another plan ----------------------------------------------------------------------------

    def migrate(self, plan: Plan) -> None:
        """Move to another plan now: `start_migration` and `finish_migration`. Collective."""
        self.start_migration(plan)
        self.finish_migration()

    @in_turn
    def start_migration(self, plan: Plan, bytes_per_step: int | None = None) -> None:
        """Start to move rows, replicas and optimizer states to another plan. Collective.

        From now on each update also copies a limited number of bytes on each rank; the update that
        copies the last rows switches to the new plan. Until then all lookups and updates follow the
        old plan, and the arenas of both plans exist.

        Args:
            plan: the new plan, for the same number of ranks; it may contain other tables as well.
            bytes_per_step: maximum number of bytes that a rank copies per update, in addition to
                rows that updates change after they were copied; None = no limit.

        Raises:
            PlanError: the plan does not fit, or cannot be executed here; the old plan stays in use.
            OperError: there is not enough memory for the new arenas; the old plan stays in use.
            InvalidInputError: another move is under way, `micro_batches` is active, or in replica
                groups `bytes_per_step` is not None or the groups' plans differ.
        """
        refuse_in_parts(self, "cannot move tables to another plan")
        if self.migration is not None:
            raise InvalidInputError("cannot move tables to another plan", "plan",
                                    "a move is under way", "one at a time",
                                    "wait until `migration` is None, or stop_migration()")
        make = partial(self._begin_migration, plan, bytes_per_step)
        self.migration = make() if self.replicas is None else begin_move(
            self, plan, bytes_per_step, make)

    def _begin_migration(self, plan: Plan, bytes_per_step: int | None) -> Migration:
        with phase_of(self, MIGRATION):
            self.barrier()
            return Migration(self, plan, bytes_per_step)

    @in_turn
    def finish_migration(self) -> None:
        """Copy all remaining rows of a move now and switch to the new plan. Collective."""
        if self.migration is not None:
            self.migration.finish()
            self.migration = None
            if self.replicas is not None:
                self.replicas.restart_changes()

    @in_turn
    def stop_migration(self) -> None:
        """Cancel a move that is under way and stay with the old plan. Every rank must call it."""
        if self.migration is not None:
            self.migration.stop()
            self.migration = None

    def like(self, plan: Plan) -> ShardedTables:
        """Return tables like these under another plan, with uninitialised arenas. Collective."""
        return ShardedTables(plan, self.features, self.group, self.optimizers, self.gradient_scale,
                             is_new=False)

    def check_memory(self) -> None:
        """Raise OperError unless there is enough free memory for this memory domain's arenas."""
        check_memory([self._layout.used_bytes[r] for r in self.members])

    def take_over(self, other: ShardedTables) -> None:
        """Replace plan and arenas by those of `other`, which must not be used afterwards."""
        with self.turns.resolving:
            release = self._release
            other._release.detach()
            for name in self._plan_attributes:
                setattr(self, name, getattr(other, name))
            release()  # now that lookups on other threads begin with the new plan
            if self.pull is not False:
                choose_pull(self, self.pull)
            self.trace_phases(self._most_spans)
            other._heap = None
            self._release_when_dropped()

    @in_turn
    def flush_replicas(self) -> None:
        if self.replicas is not None:
            self.replicas.check_synchronized("cannot make written rows visible")
        super().flush_replicas()
        if self.replicas is not None:
            self.replicas.agree(super().flush_replicas)
        if self.migration is not None:
            self.migration.restart()

    # ---- memory ----------------------------------------------------------------------------------

    def open_keys(self, rules: Mapping[str, DynamicTable]) -> None:
        """Make tables dynamic, by name; raises InvalidInputError if one cannot be. Collective."""
        self.keys = Keys(self, rules)

    def view(self, part: str, piece: int, rank: int) -> torch.Tensor:
        if self.turns.parts is not None:
            self.turns.parts.settle()  # an update may be under way
        return super().view(part, piece, rank)

    def use_huge_pages(self) -> str:
        """Request huge pages for the rows, which must be written; returns `page_kind`. Collective.
        """
        heap = self._check_open()
        heap.collapse([self._layout.used_bytes[r] for r in self.members], self.barrier)
        return heap.page_kind

    @in_turn
    def close(self) -> None:
        """Release the arenas on this rank. Their memory is freed when no peer maps it any more."""
        self.stop_migration()
        with self.turns.resolving:
            self._release()
        self._heap = None
        for held in (self._exchange, self.keys, self.replicas):
            if held is not None:
                held.close()
        self._forward_op = self._backward_op = self._refuse

    def continue_from(self, other: ShardedTables, memo: dict[int, Any]) -> None:
        """Copy step counts, learning rates, bounds and guard settings, frozen tables and passes
        held back by `no_sync` from `other`."""
        for name in ("num_steps", "frozen", "frozen_by_all", "seed", "_rounding_keys", "name"):
            setattr(self, name, getattr(other, name))
        self._arguments = other._arguments.copied()
        self._skipped = dict(other._skipped)
        self.held.passes, self.held.refused = list(other.held.passes), other.held.refused
        self.bounds = copy.deepcopy(other.bounds, memo)
        self.guard.mode = other.guard.mode
        self.param_groups = [{k: copy.deepcopy(v, memo) for k, v in group.items() if k != "params"}
                             for group in other.param_groups]
        self.family = memo.setdefault(id(other.family), weakref.WeakSet())
        self.family.add(self)
        if other.pull is not False:
            choose_pull(self, other.pull)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tables:
        """Return a copy with its own rows, optimizer states and step counts. Collective."""
        if self.replicas is not None:
            self.replicas.refuse("cannot copy sharded tables", "save and load a checkpoint")
        other = memo[id(self)] = copied(self, memo)
        return other


def _release(process: int, handle: int, heap: HostHeap) -> None:
    if os.getpid() == process:  # a forked child would wait for lookups of its parent's threads
        torch.ops.oper.context_close(handle)
        heap.close()
