"""The cost model: seconds of every phase on every rank, from bytes and calibrated constants.

A plan is first reduced to a *load vector*: for every rank, numbers (`load_vector.Row`) that add up
over tables and are linear in the features of the rows that a rank owns, replicates or reads.
`loads` converts a load vector to units (bytes, nanoseconds) per phase, term and rank. Everything
that the planner computes uses these two steps: evaluation of a plan, columns of the lower bound,
and moves of the search.

`oper.search.cost.evaluation` lists the phases of a step and the ranks' work in each.

Ranks of one memory domain read each other's rows as if they were local; no bytes use a link.
Rows in host memory are read in place by the ranks of their host, each over its own link to that
memory; the owner updates them over its link, and sends them to other hosts. A phase takes the
slowest rank's max(memory + compute, each direction of each link class, the link to host memory),
minus the dense compute that was declared to overlap with it (`overlap`; none by default), plus a
fixed cost. Ranks of a host read each other's memory while they compute. Hosts exchange messages
between two parts of that work, so each direction between hosts takes memory + compute + its bytes.
Ranks that share a link (of a host or rack) wait for all of its bytes. Inference is the forward
phase alone (after request, between hosts), with one replica per memory domain.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from oper.errors import PlanError
from oper.plan import Piece, Plan, TablePlan, Tier
from oper.rows.traffic import ROW_WISE
from oper.search.cost.caching import Caching
from oper.search.cost.columns import SQUARE_BYTES, expected_squares
from oper.search.cost.evaluation import Evaluation as Evaluation, Phase as Phase, phases_of
from oper.search.cost.links import broadcast, owner_exchange, subset_reads, transfer
from oper.search.cost.load_vector import (
    GENERAL_LOOP_PASSES,
    GRAD_BYTES,
    KERNEL_WIDTHS,
    NUM_ROWS,
    SLOT_BYTES,
    SUM_ROWS,
    LoadVector,
    Messages,
    Row,
    key_rows,
    owned_features,
    row_bytes,
)
from oper.search.problem.machine import REFRESH, REQUEST, TERMS, Term, add_wire, by_group
from oper.search.problem.overlap import RESOLVE
from oper.search.problem.statement import IDS, ROWS, TOUCHED, TOUCHED_ALL, Problem, TableProblem

ID_BYTES = 8  # one id in memory
REQUEST_BYTES = SLOT_BYTES + 1 / 8  # size of a pushed id sent to an owner on the same host
PUSH_PASSES = 3  # passes of a reader over the ids of a table with pushed rows, per direction


class CostModel:
    """The cost model of one problem; caches constants of tables."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.machine = problem.machine
        self.costs = problem.topology.costs
        self.messages = Messages(problem.message_bits)
        #: Rows of a load vector for time per table in each phase; `passes` are those that read ids.
        self.every_pass = (Row.FORWARD_NS, Row.BACKWARD_NS, Row.UPDATE_NS)[
            :3 if problem.training else 1]
        self.passes = self.every_pass[:2]
        self.training = problem.training
        self.phases = phases_of(problem)
        none = (0.0,) * self.machine.world_size
        #: float64 [num_phases, W], seconds of dense compute that overlap with each phase.
        self.hidden = np.array([problem.overlap.get(p, none) for p in self.phases]) * 1e-6
        self.caching = Caching(problem)
        #: Phase in which requests are sent to other hosts.
        self.request_phase = self.phases.index(
            REQUEST if REQUEST in self.phases else "forward")
        #: Index of the update phase (training), and of the phase in which hosts send changed rows.
        self.update_phase = self.phases.index("forward") + 2
        self.refresh_phase = len(self.phases) - 1
        #: Microseconds that a plan pays for pushing anything. One `phase_us` is two exchanges: of
        #: headers, and of the data whose sizes they announce. On one host, pushing adds a wait for
        #: partial sums. Hosts exchange headers, requests and rows even if nothing is pushed, so
        #: that pushing adds only the headers of partial sums.
        self.push_us = self.costs.phase_us * (0.5 if REQUEST in self.phases else 1.0)
        m = self.machine
        self._one_host = bool((m.num_host == m.world_size).all())
        #: Microseconds that a plan pays for exchanging any sums of squares: two exchanges (headers
        #: and sums), and between hosts a third (totals).
        self.split_us = self.costs.phase_us * (1.0 if self._one_host else 1.5)
        #: bool [num_phases, 8], which groups include a rank's own memory and compute time: links
        #: between hosts, in the phases in which hosts exchange messages.
        self.has_local = m.local_groups(self.phases)
        #: float64 [W], nanoseconds per id of a pulled tier; 0 if one domain holds all ranks.
        self._per_remote_id = self.costs.far_ns * (m.num_domain < m.world_size)

    # -- per-table rows, linear in the features: owner is float64 [..., 4, W] ---------------------

    def shard_rows(self, t: TableProblem, width: int, owner: np.ndarray) -> np.ndarray:
        """The load vector of a striped or owned tier that is pulled.

        Args:
            width: columns of the piece.
            owner: float64 [..., 4, W], features of the rows that each rank owns.

        Returns:
            float64 [..., 23, W], with the rows of a load vector (`Row`).
        """
        row, _, state = row_bytes(t, width)
        out = np.zeros((*owner.shape[:-2], NUM_ROWS, owner.shape[-1]))
        out[..., Row.SERVED, :] = owner[..., TOUCHED, :] * row
        out[..., Row.ANSWERS, :] = owner[..., TOUCHED, :] * self.messages.answer_bytes(t, width)
        out[..., Row.HELD, :] = owner[..., ROWS, :] * row
        if self.training:
            out[..., Row.HELD, :] += owner[..., ROWS, :] * state
        self._add_reader(out, t, width, owner)
        # Readers in other domains find each distinct row once more before requesting it.
        out[..., Row.FORWARD_NS, :] += out[..., Row.FORWARD_IDS, :] * self._per_remote_id
        self._add_update(out, t, width, owner)
        return out

    def replica_rows(self, t: TableProblem, width: int, master: np.ndarray) -> np.ndarray:
        """The load vector of a tier replicated on all ranks; `master` (float64 [..., 4, W]) gives
        the features of the rows whose master copies each rank holds."""
        row, _, state = row_bytes(t, width)
        out = np.zeros((*master.shape[:-2], NUM_ROWS, master.shape[-1]))
        total = master.sum(axis=-1)
        out[..., Row.HELD, :] = total[..., ROWS, None] * row
        if self.training:
            out[..., Row.BROADCAST, :] = master[..., TOUCHED_ALL, :] * (row + SLOT_BYTES)
            # Masters are stored in addition to the copies.
            out[..., Row.HELD, :] += master[..., ROWS, :] * (row + state)
            out[..., Row.UPDATE_NS, :] = total[..., TOUCHED_ALL, None] * self.costs.refresh_ns
        else:
            out[..., Row.HELD, :] /= self.machine.num_domain  # one copy per domain
        self._add_reader(out, t, width, master)
        self._add_update(out, t, width, master)
        return out

    def push_rows(self, t: TableProblem, width: int, owner: np.ndarray) -> np.ndarray:
        """The load vector of a striped or owned tier that is pushed, without partial sums, which
        are concave in the mass of an owner: see `partial_bytes`. Arguments and result as for
        `shard_rows`."""
        row, grad, state = row_bytes(t, width)
        world = self.machine.world_size
        again = self.caching.again(t, True)
        out = np.zeros((*owner.shape[:-2], NUM_ROWS, owner.shape[-1]))
        ids, every = owner[..., IDS, :] * world, owner[..., TOUCHED_ALL, :]
        mine = owner[..., IDS, :].sum(axis=-1)[..., None]
        out[..., Row.PUSH_IDS, :] = owner[..., IDS, :] * REQUEST_BYTES
        out[..., Row.REQUESTS, :] = owner[..., IDS, :] * self.messages.request_bytes(t)
        first = self.caching.first(t)
        out[..., Row.FORWARD_BYTES, :] = ((every * first + (ids - every) * again) * row
                                      + ID_BYTES * (ids + mine))
        out[..., Row.FORWARD_IDS, :] = ids + mine  # pooled at the owner, resolved at the reader
        out[..., Row.HELD, :] = owner[..., ROWS, :] * (row + (state if self.training else 0))
        # Own ids are left out, as for an owner of all rows; `own_requests` charges other owners.
        asked = mine - owner[..., IDS, :]
        out[..., Row.FORWARD_NS, :] = asked * self.costs.push_ns + ids * self.odd_ns(t, width, 0)
        if self.training:
            # Owners reduce the gradients of all readers: work per id, and per row and reader.
            runs = owner[..., TOUCHED, :] * world
            out[..., Row.BACKWARD_NS, :] = asked * self.costs.push_ns
            out[..., Row.UPDATE_BYTES, :] = ids * again * grad
            out[..., Row.UPDATE_NS, :] = (ids * (self.costs.sort_ns + self.costs.reduce_ns
                                             + self.odd_ns(t, width, 1))
                                      + runs * self.costs.run_ns)
        self._add_update(out, t, width, owner)
        return out

    def cut_rows(self, t: TableProblem, once: np.ndarray, twice: np.ndarray) -> np.ndarray:
        """The part of a column piece's load vector that does not depend on its width; float64
        [..., 23, W].

        It includes the squared norms that the owners of a row's columns exchange, once per piece.
        A table of n pieces exchanges them n - 1 times, so the caller subtracts them once per table.

        Args:
            once, twice: load vectors of the same rows in a piece, and in a piece twice as wide.
        """
        out = 2 * once - twice
        if self.exchanges_squares(t) and self.problem.may_split(t):
            out[..., Row.UPDATE_BYTES, :] += SQUARE_BYTES * out[..., Row.UPDATE_ROWS, :]
        return out

    def host_rows(self, t: TableProblem, width: int, owner: np.ndarray) -> np.ndarray:
        """The load vector of rows in host memory; arguments and result as for `shard_rows`."""
        return self._in_host(self.shard_rows(t, width, owner), t, width, owner, "pull")

    def tier_rows(self, t: TableProblem, width: int, tier: Tier, owner: np.ndarray) -> np.ndarray:
        """The load vector of one tier of a column piece, without partial sums. With replicas on
        some ranks only, it has the messages and memory of replicas on all ranks, which
        `subset_load_vector` corrects. Arguments and result as for `shard_rows`."""
        kind = tier.placement if tier.placement == "replicated" else tier.mode
        out = {"replicated": self.replica_rows, "pull": self.shard_rows,
               "push": self.push_rows}[kind](t, width, owner)
        if tier.memory == "host":
            self._in_host(out, t, width, owner, kind)
        if kind == "replicated" and len(tier.ranks) < self.machine.world_size:
            holds = np.isin(np.arange(self.machine.world_size), tier.ranks)
            out[..., [Row.UPDATE_NS, Row.HOST_UPDATE], :] *= holds  # others have nothing to update
        return out

    def _in_host(self, out: np.ndarray, t: TableProblem, width: int, owner: np.ndarray,
                 kind: str) -> np.ndarray:
        """Move the memory of rows, their reads, and the bytes that updates read and write, to host
        memory, whose rows are not in the caches of device memory.

        `kind` is ``"replicated"``, or the exchange mode. Returns `out`, changed in place.
        """
        row, _, state = row_bytes(t, width)
        out[..., Row.HOST_HELD, :] = out[..., Row.HELD, :]
        out[..., Row.HELD, :] = 0.0
        if self.training:
            update = owner[..., TOUCHED_ALL, :] * 2 * (row + state)
            out[..., Row.UPDATE_BYTES, :] = np.maximum(out[..., Row.UPDATE_BYTES, :] - update, 0.0)
            out[..., Row.HOST_UPDATE, :] = update
            if kind == "replicated":  # all copies
                out[..., Row.HOST_UPDATE, :] += owner.sum(axis=-1)[..., TOUCHED_ALL, None] * row
        if kind == "push":
            rows, ids = owner[..., TOUCHED_ALL, :], owner[..., IDS, :] * self.machine.world_size
        else:
            rows, ids = (owner[..., f, :].sum(axis=-1)[..., None] for f in (TOUCHED, IDS))
        again = self.caching.again(t, kind == "push")
        saved = (rows * self.caching.first(t) + (ids - rows) * again) * row
        out[..., Row.FORWARD_BYTES, :] = np.maximum(out[..., Row.FORWARD_BYTES, :] - saved, 0.0)
        if kind == "pull":
            out[..., Row.HOST_SERVED, :] = owner[..., IDS, :] * row
            out[..., Row.HOST_SENT, :] = out[..., Row.SERVED, :]
            out[..., Row.SERVED, :] = 0.0
        else:
            out[..., Row.HOST_FORWARD, :] = ids * row
        return out

    def own_requests(self, own: np.ndarray, has_all: np.ndarray) -> np.ndarray:
        """Nanoseconds that ranks spend on requests for their own pushed rows; float64 [W].

        Only the owner of a whole table leaves its own ids out of the exchange. `push_rows`, and
        with it the bound, assumes this for all owners, which never overestimates their load.

        Args:
            own: float64 [W], ids that each rank pushes to itself.
            has_all: bool [W], whether it owns all rows of the table.
        """
        return np.where(has_all, 0.0, own) * self.costs.push_ns

    def num_sums(self, t: TableProblem, ids: np.ndarray) -> np.ndarray:
        """Partial sums that an owner of `ids` (float64 [...], ids per rank) sends to each reader.
        """
        if t.spec.pooling == "none":
            return ids
        return t.traffic.bags_touching(ids / max(t.total[IDS], 1e-300))

    def partial_bytes(self, t: TableProblem, width: int, ids: np.ndarray) -> np.ndarray:
        """Bytes of the `num_sums(t, ids)` partial sums, each with `width` float32 columns; float64
        [...], like `ids`."""
        return self.num_sums(t, ids) * (width * GRAD_BYTES)

    def _add_reader(self, out: np.ndarray, t: TableProblem, width: int, owner: np.ndarray) -> None:
        """Add the work of a tier's readers, and the gradients that they send to its owners."""
        row, grad, _ = row_bytes(t, width)
        again = self.caching.again(t)
        total = owner.sum(axis=-1)
        ids, distinct = total[..., IDS, None], total[..., TOUCHED, None]
        first, buffers = self.caching.first(t), self.caching.buffers
        out[..., Row.FORWARD_BYTES, :] += (distinct * first + (ids - distinct) * again) * row
        out[..., Row.FORWARD_IDS, :] += ids
        out[..., Row.FORWARD_NS, :] += ids * self.odd_ns(t, width, 0)
        if self.training:
            # Gradients of a bag are read once from memory (`table_rows`), then from cache per id.
            per_id = 0.0 if t.spec.pooling == "none" else grad * again
            out[..., Row.BACKWARD_BYTES, :] += distinct * grad * buffers + ids * per_id
            out[..., Row.BACKWARD_IDS, :] += ids
            out[..., Row.BACKWARD_NS, :] += (distinct * self.costs.run_ns
                                             + ids * self.odd_ns(t, width, 1))
            mine = owner[..., TOUCHED, :]
            out[..., Row.GRADS, :] = mine * (grad + SLOT_BYTES)
            out[..., Row.RETURNED, :] = mine * self.messages.gradient_bytes(t, width)

    def _add_update(self, out: np.ndarray, t: TableProblem, width: int, owner: np.ndarray) -> None:
        """Add the owners' work of reading, updating and writing touched rows and their states."""
        if self.training:
            row, _, state = row_bytes(t, width)
            out[..., Row.UPDATE_BYTES, :] += owner[..., TOUCHED_ALL, :] * 2 * (row + state)
            out[..., Row.UPDATE_ROWS, :] += owner[..., TOUCHED_ALL, :]
            out[..., Row.UPDATE_NS, :] += owner[..., TOUCHED_ALL, :] * self.odd_ns(t, width, 2)

    def odd_ns(self, t: TableProblem, width: int, phase: int) -> float:
        """Additional nanoseconds per id or row if the table's dim has no specialised kernel; a
        piece of `width` columns is charged its share. `phase`: 0 forward, 1 backward, 2 update."""
        if t.spec.dim in KERNEL_WIDTHS:
            return 0.0
        vectors = -(-t.spec.dim // 16) / t.spec.dim  # vectors per column; the last may be partial
        return GENERAL_LOOP_PASSES[phase] * width * vectors * self.costs.odd_ns

    def table_rows(self, t: TableProblem, num_outputs: np.ndarray | None = None) -> np.ndarray:
        """The part of a table's load vector that does not depend on the plan: outputs, bag
        gradients, memory of the send buffer; float64 [23, W].

        Args:
            num_outputs: float64 [W], rows of each rank's output; default: their expected number.
        """
        out = np.zeros((NUM_ROWS, self.machine.world_size))
        if num_outputs is None:
            num_outputs = np.full(self.machine.world_size, t.num_outputs)
        out[Row.FORWARD_BYTES] = num_outputs * t.spec.dim * GRAD_BYTES * self.caching.buffers
        if self.training:
            out[Row.BACKWARD_BYTES] = out[Row.FORWARD_BYTES]
            out[Row.HELD] = min(t.traffic.num_ids, t.spec.num_rows) * t.spec.dim * GRAD_BYTES
        out[list(self.every_pass)] += self.costs.table_us * 1e3
        if self.training:
            out[Row.BACKWARD_NS] += self.costs.sort_table_us * 1e3
        return out

    # -- plans ------------------------------------------------------------------------------------

    def base(self) -> LoadVector:
        """The sum of `table_rows` and `key_rows` over all tables, which every plan has."""
        rows = sum((self.table_rows(t) + key_rows(t, self.problem) for t in self.problem.tables),
                   np.zeros((NUM_ROWS, self.machine.world_size)))
        return LoadVector(rows)

    def load_vector(self, t: TableProblem, pieces: tuple[Piece, ...], ordered: bool) -> LoadVector:
        """Load vector of one table's placement, without `table_rows`.

        Args:
            pieces: its column pieces.
            ordered: whether positions are hotness ranks; else they are ids.
        """
        total = LoadVector(np.zeros((NUM_ROWS, self.machine.world_size)))
        for piece in pieces:
            total = total.plus(self.piece_load_vector(t, piece, ordered))
        split = len(pieces) > 1 and self.exchanges_squares(t)
        rows = self.whole_table(pieces, total.rows, float(t.total[IDS]), t.num_bags, split)
        units = total.units
        if self.sends_squares(t) and len(pieces) > 1:
            sent = expected_squares(t, pieces, self.machine.world_size, ordered, self._one_host)
            squares = np.zeros((len(self.phases), len(TERMS), self.machine.world_size))
            transfer(squares[self.update_phase], sent, sent, self.machine, False)
            add_wire(squares, self.machine)
            units = units + squares
        return replace(total, rows=rows, units=units, num_split=(len(pieces) - 1) * split)

    def exchanges_squares(self, t: TableProblem) -> bool:
        """Whether owners of the columns of a row exchange the sums of their squared gradients."""
        return self.training and t.spec.optimizer in ROW_WISE

    def sends_squares(self, t: TableProblem) -> bool:
        """Whether these owners send the sums in messages, because ranks are in several memory
        domains; within one domain they read each other's."""
        return self.exchanges_squares(t) and bool((self.machine.num_domain
                                                   < self.machine.world_size).any())

    def whole_table(self, pieces: tuple[Piece, ...], rows: np.ndarray, ids: np.ndarray | float,
                    bags: np.ndarray | float, exchanges_squares: bool) -> np.ndarray:
        """The load vector of all pieces of a table including charges for the table as a whole.

        Args:
            pieces: its column pieces.
            rows: float64 [23, W], the sum over pieces.
            ids: ids per rank and batch, or float64 [W].
            bags: bags per rank and batch, or float64 [W].
            exchanges_squares: whether owners of the columns of a row exchange the sums of their
                squared gradients.
        """
        rows = rows.copy()
        rows[list(self.every_pass)] += (len(pieces) - 1) * self.costs.table_us * 1e3
        if any(len(p.tiers) > 1 for p in pieces):
            pushes = any(x.mode == "push" for p in pieces for x in p.tiers)
            rows[list(self.passes)] += ids * self.tiers_ns(pushes) * len(pieces)
            if pushes:
                rows[Row.FORWARD_NS] += bags * self.costs.push_bag_ns * len(pieces)
        if exchanges_squares:
            rows[Row.UPDATE_BYTES] += SQUARE_BYTES * rows[Row.UPDATE_ROWS]
        return rows

    def tiers_ns(self, pushes: bool) -> float:
        """Nanoseconds per id and pass for a table of several tiers, some of which are pushed if
        `pushes`. A reader of pushed rows passes over its ids three times: to count them, to write
        requests, and to add up sums."""
        return PUSH_PASSES * self.costs.push_tier_ns if pushes else self.costs.tier_ns

    def piece_load_vector(self, t: TableProblem, piece: Piece, ordered: bool, alone: bool = True
                          ) -> LoadVector:
        """Load vector of the tiers of one column piece.

        Args:
            piece: its columns, and tiers of all or some of its rows.
            ordered: whether positions are hotness ranks; else they are ids.
            alone: whether no other rows of the table are pushed. If False, partial sums and own
                requests, which are concave in the mass of an owner, are left out; the caller adds
                them for the table as a whole.
        """
        width, world = piece.stop - piece.start, self.machine.world_size
        rows, num_pushed = np.zeros((NUM_ROWS, world)), 0
        units: np.ndarray | float = 0.0
        pushed_ids, pushed_rows = np.zeros((2, world))
        for tier in piece.tiers:
            if tier.memory == "host" and not self.machine.host_capacity_bytes.any():
                raise PlanError(f"cannot evaluate a plan of table {t.spec.name!r}", "memory",
                                tier.memory, "device, on a topology without host memory",
                                "state host_memory_bytes and host_gbps in the topology")
            owner = owned_features(t, tier, world, ordered)
            if tier.mode == "push":
                num_pushed += 1
                pushed_ids += owner[IDS]
                pushed_rows += owner[ROWS]
            if tier.placement != "replicated" or len(tier.ranks) == world:
                rows += self.tier_rows(t, width, tier, owner)
            else:
                part = self.subset_load_vector(t, width, tier, owner)
                rows += part.rows
                units = units + part.units
        if num_pushed and alone:
            # One partial sum per bag and owner, however many tiers the owner holds.
            sums = self.num_sums(t, pushed_ids)
            rows[SUM_ROWS] += np.outer(self.messages.sum_rows(t, width), sums)
            has_all = pushed_rows >= t.spec.num_rows * (1 - 1e-12)
            rows[list(self.passes)] += self.own_requests(pushed_ids, has_all)
        return LoadVector(rows, units, num_pushed)

    def subset_load_vector(self, t: TableProblem, width: int, tier: Tier, owner: np.ndarray
                           ) -> LoadVector:
        """The load vector of a tier replicated on some of the ranks; arguments as for
        `tier_rows`."""
        rows = self.tier_rows(t, width, tier, owner)
        row, _, state = row_bytes(t, width)
        holds = np.isin(np.arange(self.machine.world_size), tier.ranks).astype(float)
        units = np.zeros((len(self.phases), len(TERMS), holds.size))
        each = np.array([row, self.messages.answer_bytes(t, width)])
        subset_reads(self.machine, units[self.phases.index("forward")], tier.ranks,
                     owner[TOUCHED].sum() * each)
        if self.training:
            broadcast(self.machine, units[self.update_phase], units[self.refresh_phase],
                      rows[Row.BROADCAST], holds)
        add_wire(units, self.machine)
        rows[Row.BROADCAST] = 0.0
        copies = owner[ROWS].sum() * row * holds
        held = Row.HOST_HELD if tier.memory == "host" else Row.HELD
        if self.training:
            rows[held] = copies + owner[ROWS] * (row + state)
        else:
            rows[held] = copies / np.maximum(self.machine.domain_sum(holds), 1.0)
        return LoadVector(rows, units)

    def loads(self, rows: np.ndarray) -> np.ndarray:
        """Convert a load vector to units per phase, term and rank.

        Args:
            rows: float64 [..., 23, W].

        Returns:
            float64 [..., num_phases, 9, W]: bytes, or nanoseconds of compute.
        """
        costs, world = self.costs, float(self.machine.world_size)
        shape = (*rows.shape[:-2], len(self.phases), len(TERMS), rows.shape[-1])
        out = np.zeros(shape)
        first = self.phases.index("forward")
        forward = out[..., first, :, :]
        forward[..., Term.MEMORY, :] = rows[..., Row.FORWARD_BYTES, :]
        forward[..., Term.COMPUTE, :] = (rows[..., Row.FORWARD_IDS, :] * costs.id_ns
                                    + rows[..., Row.FORWARD_NS, :])
        ids, sums, sent = (rows[..., x, :] for x in (Row.PUSH_IDS, Row.PARTIALS, Row.ANSWERS))
        owner_exchange(self.machine, forward, rows[..., Row.SERVED, :] + sums, sent)
        none = np.zeros_like(ids)
        owner_exchange(self.machine, forward, ids, none, receives=True)
        owner_exchange(self.machine, out[..., self.request_phase, :, :], none,
                       rows[..., Row.REQUESTS, :], receives=True)
        forward[..., Term.MEMORY, :] += 2 * sums.sum(axis=-1, keepdims=True)
        # Ranks of a host read its host memory over their own links; owners read for other hosts.
        forward[..., Term.HOST_MEMORY, :] = (rows[..., Row.HOST_FORWARD, :]
                                        + self.machine.host_sum(rows[..., Row.HOST_SERVED, :])
                                        + rows[..., Row.HOST_SENT, :]
                                        * (world - self.machine.num_host))
        if self.training:
            backward, update = out[..., first + 1, :, :], out[..., first + 2, :, :]
            backward[..., Term.MEMORY, :] = rows[..., Row.BACKWARD_BYTES, :]
            backward[..., Term.COMPUTE, :] = (rows[..., Row.BACKWARD_IDS, :] * costs.reduce_ns
                                         + rows[..., Row.BACKWARD_NS, :])
            # Ids are sorted in the resolve phase, if there is one, else in backward.
            sorts = out[..., 0 if RESOLVE in self.phases else first + 1, :, :]
            sorts[..., Term.COMPUTE, :] += rows[..., Row.BACKWARD_IDS, :] * costs.sort_ns
            update[..., Term.MEMORY, :] = rows[..., Row.UPDATE_BYTES, :]
            update[..., Term.COMPUTE, :] = (rows[..., Row.UPDATE_ROWS, :] * costs.update_ns
                                       + rows[..., Row.UPDATE_NS, :])
            update[..., Term.HOST_MEMORY, :] = rows[..., Row.HOST_UPDATE, :]
            gradients = rows[..., Row.GRADS, :]
            update[..., Term.MEMORY, :] += gradients * self.machine.num_domain
            # `sums`: gradients of bags are as large as the partial sums, and go the other way.
            owner_exchange(self.machine, update, gradients + sums, rows[..., Row.RETURNED, :], True)
            update[..., Term.MEMORY, :] += sums * world
            broadcast(self.machine, update, out[..., self.refresh_phase, :, :],
                      rows[..., Row.BROADCAST, :], np.ones(int(world)))
        add_wire(out, self.machine)
        return out

    def group_us(self, units: np.ndarray) -> np.ndarray:
        """Convert units to microseconds by group of terms that run concurrently;
        float64 [..., num_phases, 9, W] -> [..., num_phases, 8, W]."""
        return by_group(self.machine.seconds(units) * 1e6, self.has_local)

    def units(self, vector: LoadVector) -> np.ndarray:
        """Units per phase, term and rank of a whole load vector; float64 [num_phases, 9, W]."""
        return np.asarray(self.loads(vector.rows) + vector.units)

    def fixed_us(self, vector: LoadVector) -> list[float]:
        """Fixed microseconds of each phase: a call and a barrier, and another barrier if the phase
        waits for partial sums or for squared gradients of column pieces. Fetching rows from other
        hosts takes three exchanges, one of which belongs to the request phase."""
        phase = self.costs.phase_us
        fixed = [{RESOLVE: 0.0, REQUEST: phase / 2, REFRESH: 0.0}.get(p, phase)
                 for p in self.phases]
        fixed[self.request_phase] += self.push_us * (vector.num_pushed > 0)
        if self.training:
            fixed[self.update_phase] += self.split_us * (vector.num_split > 0)
        return fixed

    def evaluation(self, vector: LoadVector) -> Evaluation:
        """The modelled step time, from the load vector of an entire plan (`base` included)."""
        units = self.units(vector)
        seconds = self.machine.seconds(units)
        fixed = self.fixed_us(vector)
        phases = tuple(Phase(name, units[k], seconds[k], fixed[k], self.hidden[k],
                             self.has_local[k])
                       for k, name in enumerate(self.phases))
        m, held, host_held = self.machine, vector.rows[Row.HELD], vector.rows[Row.HOST_HELD]
        return Evaluation(phases, held, m.per_domain(held), m.capacity_bytes, m.per_host(host_held),
                          m.host_capacity_bytes, m.memory_used(held, host_held))


def is_ordered(t: TableProblem, entry: TablePlan) -> bool:
    """Whether a table's positions in the plan are its hotness ranks in the problem."""
    return t.ids_are_positions or entry.head_ids.size > 0


def evaluate(plan: Plan, problem: Problem) -> Evaluation:
    """Evaluate the cost model for `plan`: units and seconds per phase, term and rank, and memory.

    Raises:
        PlanError: the plan is for other tables or another number of ranks, or uses host memory on
            a topology that has none.
    """
    plan.check_for([t.spec for t in problem.tables], problem.machine.world_size)
    model = CostModel(problem)
    total = model.base()
    for t in problem.tables:
        entry = plan.table(t.spec.name)
        total = total.plus(model.load_vector(t, entry.pieces, is_ordered(t, entry)))
    return model.evaluation(total)
