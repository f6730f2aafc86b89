"""The load of real batches under the cost model: actual counts instead of expected ones.

Where the model uses the expected number of distinct rows in a rank's batch, this module counts
them. So a prediction and a replay differ only as far as statistics and data do. Bytes between ranks
are counted per pair of ranks, while the model treats all readers alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from oper.messages import owners_pool
from oper.plan import Piece, Plan
from oper.search.cost.links import transfer
from oper.search.cost.load_vector import (
    NUM_RELATIONAL,
    NUM_ROWS,
    SUM_ROWS,
    LoadVector,
    Row,
    key_rows,
)
from oper.search.cost.model import CostModel, Phase
from oper.search.problem.machine import Machine, Term, add_wire
from oper.search.problem.statement import (
    IDS,
    NUM_FEATURES,
    TOUCHED,
    TOUCHED_ALL,
    Problem,
    TableProblem,
)
from oper.search.replay.simulate import Placed, RankBatch, TableBatch, table_batch
from oper.search.replay.wire import sent_squares


@dataclass(frozen=True, slots=True, eq=False)
class StepLoad:
    """The load of one step.

    Attributes:
        phases: the phases of the cost model.
        ids_us: float64 [W], the part of backward that needs only ids (sorting), which may run ahead
            of the step; microseconds.
    """

    phases: tuple[Phase, ...]
    ids_us: np.ndarray


class RealizedLoad:
    """Computes the phases of a step from real batches.

    Exchanged bytes are arrays float64 [10, W, W]: by row of a load vector that concerns pairs of
    ranks, by sender, and by receiver. Bag gradients take as many bytes as partial sums, in the
    other direction. Entries that cannot occur, or whose bytes are counted in another row, are
    ignored: reads of host memory by ranks of another host, messages within a host, and changed rows
    sent to copies in the same domain.

    Args:
        problem: machine and cost constants, and the plan's tables in the plan's order.
    """

    def __init__(self, plan: Plan, problem: Problem) -> None:
        plan.check_for([t.spec for t in problem.tables], problem.machine.world_size)
        self.plan, self.problem = plan, problem
        self.model = CostModel(problem)
        self.world_size = problem.machine.world_size
        self._pools = owners_pool([t.spec for t in problem.tables], problem.training,
                                  problem.topology.num_hosts)
        self.placed = {e.table.name: [Placed(e, self.world_size, k, not self._pools)
                                      for k in range(len(e.pieces))] for e in plan.tables}
        self.fixed_us = self.model.fixed_us(reduce(LoadVector.plus, (
            self.model.load_vector(problem.table(e.table.name), e.pieces, True)
            for e in plan.tables)))
        self.has_push = any(p.pushes.any() for ps in self.placed.values() for p in ps)

    def step(self, ranks: Sequence[RankBatch]) -> StepLoad:
        """The load of one step on batches `ranks`, one per rank; raises InvalidInputError if a
        batch is invalid."""
        rows = np.zeros((NUM_ROWS, self.world_size))
        exchange = np.zeros((NUM_RELATIONAL, self.world_size, self.world_size))
        squares = np.zeros((self.world_size, self.world_size))
        for entry in self.plan.tables:
            t = self.problem.table(entry.table.name)
            batches = [table_batch(entry.table, b) for b in ranks]
            own = self.model.table_rows(t, np.array(
                [b.num_bags * t.traffic.samples_per_bag for b in batches], float))
            if t.default_share is not None:  # the ids of a dynamic table are rows; 0 = no row
                keys = key_rows(t, self.problem, np.array(
                    [(b.ids.size, np.unique(b.ids[b.ids > 0]).size, (b.ids == 0).sum())
                     for b in batches], float).T)
                own += _own(keys)
                exchange += keys[:NUM_RELATIONAL, :, None]  # a rank sends the same to all others
            pieces = self.placed[t.spec.name]
            for piece, placed in zip(entry.pieces, pieces, strict=True):
                own += self._piece(t, piece, placed, batches, exchange)
            split = len(pieces) > 1 and self.model.exchanges_squares(t)
            if split:
                squares += sent_squares(pieces, np.unique(np.concatenate([b.ids for b in batches])),
                                        self.problem.topology.num_hosts == 1)
            rows += self.model.whole_table(
                entry.pieces, own, np.array([b.ids.size for b in batches], float),
                np.array([b.num_bags for b in batches], float), split)
        units = self.model.loads(rows)
        if squares.any():
            transfer(units[self.model.update_phase], squares, squares, self.problem.machine, False)
        self._exchange(units, exchange)
        seconds = self.problem.machine.seconds(units)
        phases = tuple(Phase(name, units[k], seconds[k], self.fixed_us[k],
                             self.model.hidden[k], self.model.has_local[k])
                       for k, name in enumerate(self.model.phases))
        return StepLoad(phases, rows[Row.BACKWARD_IDS] * self.model.costs.sort_ns / 1e3)

    def _piece(self, t: TableProblem, piece: Piece, placed: Placed,
               batches: Sequence[TableBatch], exchange: np.ndarray) -> np.ndarray:
        """Add a piece's bytes to `exchange`; return each rank's counts (`Row`), float64 [23, W]."""
        width, world = piece.stop - piece.start, self.world_size
        messages = self.model.messages
        features = self._features(len(piece.tiers), placed, batches)
        rows, own = np.zeros((NUM_ROWS, world)), np.zeros(world)
        for k, tier in enumerate(piece.tiers):
            owner = features[k]
            out = self.model.tier_rows(t, width, tier, owner)  # [W readers, 23, W owners]
            if tier.mode == "push" and self._pools:
                rows += _own(out.mean(axis=0))  # the model multiplies the mean by W readers
                for asked in (Row.PUSH_IDS, Row.REQUESTS):
                    exchange[asked] += out[:, asked]
                own += np.diagonal(owner[:, IDS])
            elif tier.placement == "replicated":
                rows += _own(np.diagonal(out, axis1=0, axis2=2))
                holds = np.isin(np.arange(world), tier.ranks)
                exchange[Row.BROADCAST] += out[0, Row.BROADCAST][:, None] * holds
                # As in `links.broadcast`: ranks that share a memory read and write for themselves.
                near = self.problem.machine.domain_sum(holds.astype(float))
                rows[Row.UPDATE_BYTES] += 2 * self.problem.machine.domain_sum(
                    out[0, Row.BROADCAST]) * holds * (near > 1)
                # A rank without a copy in its domain reads one on its host, else on any host.
                read = _nearest(holds, self.problem.machine) * owner[:, TOUCHED].sum(axis=1)
                exchange[Row.SERVED] += read * (t.spec.row_bytes * width / t.spec.dim)
                exchange[Row.ANSWERS] += read * messages.answer_bytes(t, width)
            else:
                rows += _own(np.diagonal(out, axis1=0, axis2=2))
                for served in (Row.SERVED, Row.ANSWERS, Row.HOST_SERVED, Row.HOST_SENT):
                    exchange[served] += out[:, served].T
            if tier.mode != "push":
                for returned in (Row.GRADS, Row.RETURNED):
                    exchange[returned] += out[:, returned]
        if placed.pushes.any():
            sums = np.stack([placed.pooled(b)[1] for b in batches], axis=1)  # by owner and reader
            for row, size in zip(SUM_ROWS, messages.sum_rows(t, width), strict=True):
                exchange[row] += size * (sums.T if row == Row.RETURNED else sums)
            owners = {r for tier in piece.tiers
                      for r in (tier.ranks if tier.mode == "push" else (-1,))}
            has_all = np.array([owners == {r} for r in range(world)])
            rows[[Row.FORWARD_NS, Row.BACKWARD_NS]] += self.model.own_requests(own, has_all)
        return rows

    def _features(self, num_tiers: int, placed: Placed, batches: Sequence[TableBatch]
                  ) -> np.ndarray:
        """Features by tier, float64 [tiers, W readers, 4, W owners]; ROWS is unused and 0."""
        world = self.world_size
        out = np.zeros((num_tiers, world, NUM_FEATURES, world))
        distinct = [np.unique(b.ids, return_counts=True) for b in batches]
        for reader, (ids, number) in enumerate(distinct):
            tier, owner = placed.resolve(ids)
            at = tier * world + owner
            size = num_tiers * world
            out[:, reader, IDS] = np.bincount(at, number, minlength=size).reshape(-1, world)
            out[:, reader, TOUCHED] = np.bincount(at, minlength=size).reshape(-1, world)
        tier, owner = placed.resolve(np.unique(np.concatenate([ids for ids, _ in distinct])))
        every = np.bincount(tier * world + owner, minlength=num_tiers * world)
        out[:, :, TOUCHED_ALL] = every.reshape(num_tiers, 1, world)
        return out

    def _exchange(self, units: np.ndarray, x: np.ndarray) -> None:
        machine = self.problem.machine
        near = machine.domain[:, None] == machine.domain[None, :]
        forward = units[self.model.phases.index("forward")]
        transfer(forward, x[Row.SERVED] + x[Row.PARTIALS], x[Row.ANSWERS], machine)
        same = machine.host[:, None] == machine.host[None, :]
        sent = x[Row.HOST_SENT] * ~same
        forward[Term.HOST_MEMORY] += (x[Row.HOST_SERVED] * same).sum(axis=0) + sent.sum(axis=1)
        ids, none = x[Row.PUSH_IDS], np.zeros_like(x[Row.PUSH_IDS])
        transfer(forward, ids, none, machine)
        transfer(units[self.model.request_phase], none, x[Row.REQUESTS], machine)
        forward[Term.MEMORY] += 2 * x[Row.PARTIALS].sum(axis=0)
        if self.problem.training:
            update, gradients = (units[self.model.update_phase],
                                 x[Row.GRADS] + x[Row.PARTIALS].T)
            update[Term.MEMORY] += x[Row.PARTIALS].sum(axis=1)
            update[Term.MEMORY] += (x[Row.GRADS] * near).sum(axis=0)
            transfer(update, gradients, x[Row.RETURNED], machine)
            update[Term.MEMORY] += (x[Row.BROADCAST] * ~near).sum(axis=0)
            transfer(update, x[Row.BROADCAST], none, machine, reads_source=False)
            transfer(units[self.model.refresh_phase], none, x[Row.BROADCAST], machine)
        add_wire(units, machine)


def _nearest(holds: np.ndarray, machine: Machine) -> np.ndarray:
    """Share of a copied tier that each reader reads from each rank with a copy (`holds`, bool [W]);
    float64 [W, W] by holder and reader; 0 if there is a copy in the reader's domain."""
    same, far = (x[:, None] == x[None, :] for x in (machine.host, machine.domain))
    on_host = same & holds[:, None]
    near = (far & holds[:, None]).any(axis=0)
    share = np.where(on_host.any(axis=0), on_host, holds[:, None]).astype(float)
    return share / share.sum(axis=0) * ~near


def _own(rows: np.ndarray) -> np.ndarray:
    """Copy of load-vector rows with those that concern pairs of ranks set to 0; float64 [23, W]."""
    out = rows.copy()
    out[:NUM_RELATIONAL] = 0.0
    return out
