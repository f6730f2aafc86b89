"""Replay of real batches through a plan without executing it: exact counts of ranks' reads.

`Replay` computes in NumPy, from the plan and the ids alone, the counts of the runtime's counters
(`oper.rows.traffic`); both are equal, unit for unit. The functions of `oper.search.replay.timeline`
convert the same batches to seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from oper.errors import InvalidInputError, require
from oper.messages import owners_pool
from oper.plan import Plan, TablePlan
from oper.rows.directory import TableDirectory, nearest_replica
from oper.rows.traffic import KIND, KINDS, ROW_WISE, Traffic, squares_read
from oper.tables import TableSpec


@dataclass(frozen=True, slots=True, eq=False)
class Bags:
    """The bags of one feature in one rank's batch.

    Attributes:
        ids: int64 [N].
        lengths: int64 [B], number of ids of each bag.
        weighted: whether each id has a per-sample weight.
        trains_weights: whether the loss has gradients with respect to these weights.
    """

    ids: np.ndarray
    lengths: np.ndarray
    weighted: bool = False
    trains_weights: bool = False


#: One rank's batch by feature.
RankBatch = Mapping[str, Bags]


@dataclass(frozen=True, slots=True, eq=False)
class TableBatch:
    """One rank's lookups in one table.

    Attributes:
        ids: int64 [N], over all features of the table.
        bags: int64 [N], bag of each id, numbered consecutively over the features. Every id of an
            unpooled table is a bag.
        num_bags: number of bags.
        weighted, trains_weights: as in `Bags`, for any of the features.
    """

    ids: np.ndarray
    bags: np.ndarray
    num_bags: int
    weighted: bool
    trains_weights: bool


def table_batch(table: TableSpec, batch: RankBatch) -> TableBatch:
    """Collect the lookups of `table` in one rank's batch; features may be missing in the batch.

    Raises:
        InvalidInputError: an id is outside the table, or lengths do not add up to the ids.
    """
    parts = [batch[f] for f in table.features if f in batch]
    ids = np.concatenate([p.ids for p in parts]) if parts else np.zeros(0, np.int64)
    lengths = np.concatenate([p.lengths for p in parts]) if parts else np.zeros(0, np.int64)
    for feature, part in zip([f for f in table.features if f in batch], parts, strict=True):
        total = int(part.lengths.sum())
        require(f"cannot replay feature {feature!r}", "pass one length >= 0 per bag", (
            "sum(lengths)", total, total == part.ids.size and bool((part.lengths >= 0).all()),
            f"{part.ids.size}, the number of ids, and no negative length"))
    if ids.size and not 0 <= ids.min() <= ids.max() < table.num_rows:
        bad = ids[(ids < 0) | (ids >= table.num_rows)][0]
        raise InvalidInputError(f"cannot replay lookups in table {table.name!r}", "id", int(bad),
                                f"0 <= id < {table.num_rows}",
                                "replay data of the tables that the plan was made for")
    if table.pooling == "none":  # as in the runtime
        lengths = np.ones(ids.size, np.int64)
    return TableBatch(ids, np.repeat(np.arange(lengths.size), lengths), int(lengths.size),
                      any(p.weighted for p in parts), any(p.trains_weights for p in parts))


def require_batches(ranks: Sequence[RankBatch], world_size: int) -> None:
    """Raise InvalidInputError unless there is one batch per rank."""
    require("cannot replay a step", "pass a batch for every rank",
            ("batches", len(ranks), len(ranks) == world_size, f"one per rank, {world_size}"))


class Placed:
    """Where the rows of one column piece are stored.

    Args:
        plan: placement of the table.
        world_size: number of ranks W.
        piece: index of the column piece.
        one_sided: treat all tiers as pulled, see `oper.messages.owners_pool`.

    Attributes:
        pushes: bool [tiers], whether each tier is pushed.
        holds: bool [W, tiers], whether each rank has a copy of all rows of each tier.
    """

    def __init__(self, plan: TablePlan, world_size: int, piece: int,
                 one_sided: bool = False) -> None:
        self.directory = TableDirectory(plan, world_size, piece)
        tiers = plan.pieces[piece].tiers
        self._starts = np.array([x.start for x in tiers])
        self._num_rows = plan.table.num_rows
        self.pushes = np.array([x.mode == "push" and not one_sided for x in tiers])
        self.holds = np.zeros((world_size, len(tiers)), bool)
        for k, x in enumerate(tiers):
            if x.placement == "replicated":
                self.holds[list(x.ranks), k] = True

    def resolve(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Index of the tier, and owner, of each of `ids` (int64 [n]); int64 [n] each."""
        positions = self.directory.position_of(ids)
        owner, _ = self.directory.locate(positions)
        return np.searchsorted(self._starts, positions, side="right") - 1, owner

    def pushed_by(self, reader: int, tier: np.ndarray) -> np.ndarray:
        """Whether `reader` requests pooled rows of the tiers with the given indices (int64 [n]);
        bool [n].

        It does not if it owns all rows of a pushed piece; it then reads them like pulled rows.
        """
        alone = self.pushes.all() and self.directory.num_slots[reader] == self._num_rows
        return self.pushes[tier] & (not alone)

    def pooled(self, batch: TableBatch, reader: int | None = None
               ) -> tuple[np.ndarray, np.ndarray]:
        """Number of ids of a batch that each owner pools, and of bags with such ids; int64 [W]
        each.

        All pushed ids count; if `reader` is given, only those that it requests from an owner.
        """
        tier, owner = self.resolve(batch.ids)
        pushed = self.pushes[tier] if reader is None else self.pushed_by(reader, tier)
        world, num_bags = len(self.holds), max(1, batch.num_bags)
        pairs = np.unique(owner[pushed] * num_bags + batch.bags[pushed])
        return (np.bincount(owner[pushed], minlength=world),
                np.bincount(pairs // num_bags, minlength=world))


class Replay:
    """Counts the reads of ranks that process batches under a plan.

    Args:
        plan: the plan.
        training: whether backward and update follow a lookup; default: whether the plan's objective
            is training.
        deduplicates: whether lookups read a row of another rank once per batch
            (`oper.shmem.exchange.pull`), except in tables that the reader pushes.
        clipped: names of tables whose rows' gradients are clipped to a norm.
        domain_of: index of each rank's memory domain; default: all ranks are in one.
    """

    def __init__(self, plan: Plan, training: bool | None = None, deduplicates: bool = False,
                 clipped: Collection[str] = (), domain_of: Sequence[int] = ()) -> None:
        self.plan, self.deduplicates, self.clipped = plan, deduplicates, clipped
        self.training = plan.objective == "training" if training is None else training
        domains = np.asarray(domain_of or [0] * plan.world_size)
        self._local = domains[:, None] == domains[None, :]  # bool [W, W], by two ranks
        self._pools = owners_pool([t.table for t in plan.tables], self.training,
                                  np.unique(domains).size)
        self.pieces = [(t.table, p.start, p.stop) for t in plan.tables for p in t.pieces]
        self._placed = [[Placed(t, plan.world_size, k, not self._pools)
                         for k in range(len(t.pieces))] for t in plan.tables]
        # By table and piece: the replica that each rank reads, int64 [W, tiers]; -1 = none.
        self._replicas = [[np.array([[nearest_replica(x, rank, local)
                                      for x in placed.directory.tiers]
                                     for rank, local in enumerate(self._local)])
                           for placed in pieces] for pieces in self._placed]

    def empty(self) -> list[Traffic]:
        """Counts that are all 0, one per rank."""
        return [Traffic.empty(r, self.plan.world_size, self.pieces)
                for r in range(self.plan.world_size)]

    def step(self, ranks: Sequence[RankBatch]) -> list[Traffic]:
        """Counts of what every rank reads in one step on these batches, by rank.

        Raises:
            InvalidInputError: there is not one batch per rank, or a batch is invalid.
        """
        found = self.empty()
        for t, counts in enumerate(self.counts(ranks)):
            for rank, traffic in enumerate(found):
                traffic.counts[:, t] = counts[:, rank]
        return [replace(t, num_forward=1, num_backward=int(self.training)) for t in found]

    def counts(self, ranks: Sequence[RankBatch]) -> Iterator[np.ndarray]:
        """Yield, for each column piece of each table, the counts by kind (`KINDS`), reader and
        peer; int64 [13, W, W]."""
        world = self.plan.world_size
        require_batches(ranks, world)
        for entry, pieces, replicas in zip(self.plan.tables, self._placed, self._replicas,
                                           strict=True):
            batches = [table_batch(entry.table, b) for b in ranks]
            clips = len(pieces) > 1 and entry.table.name in self.clipped
            sums = len(pieces) > 1 and entry.table.optimizer in ROW_WISE
            # Exchanges of squares: clipping needs one. A row-wise optimizer needs one. With both,
            # the optimizer needs the squares of clipped gradients, so clipping is repeated: three.
            squares = 3 if clips and sums else int(clips or sums)
            touched = np.unique(np.concatenate([b.ids for b in batches]))
            if squares:
                positions = pieces[0].directory.position_of(touched)
                owners = np.stack([p.resolve(touched)[1] for p in pieces])
            for k, placed in enumerate(pieces):
                counts = np.zeros((len(KINDS), world, world), np.int64)
                for reader, batch in enumerate(batches):
                    self._count(counts, placed, replicas[k][reader], reader, batch,
                                1 + clips + sums)
                if self.training:
                    _count_update(counts, placed, touched)
                    if squares:
                        counts[KIND["squares"]] += squares_read(
                            owners, k, positions, clips + sums, squares, world,
                            bool(self._local.all()))
                yield counts

    def _count(self, counts: np.ndarray, placed: Placed, replicas: np.ndarray, reader: int,
               batch: TableBatch, passes: int) -> None:
        """Count one rank's lookups in a column piece and, in training, its gradients; owners read
        those of rows in `passes` passes. `replicas`: the reader's replica of each tier, or -1."""
        world = counts.shape[1]
        ids, number = np.unique(batch.ids, return_counts=True)
        tier, owner = placed.resolve(ids)
        seen = np.where(replicas[tier] >= 0, replicas[tier], owner)
        pulled = ~placed.pushed_by(reader, tier)
        pushes = placed.pushed_by(reader, np.arange(len(placed.directory.tiers))).any()
        again = pushes or not self.deduplicates  # whether rows of other ranks are read repeatedly
        reads = np.where(again | (seen == reader), number, 1)
        counts[KIND["rows"], reader] += np.bincount(
            seen[pulled], reads[pulled], world).astype(np.int64)
        asked, bags = placed.pooled(batch, reader)
        counts[KIND["pooled_rows"]] += np.diag(asked)
        counts[KIND["partial_sums"], reader] += bags
        kinds = ["ids"] + ["id_weights"] * batch.weighted
        if self.training:
            kinds += ["gradient_ids", "bag_gradients"] + ["gradient_id_weights"] * batch.weighted
            counts[KIND["gradient_rows"], :, reader] += passes * np.bincount(
                owner[pulled], minlength=world)
            if batch.trains_weights:
                counts[KIND["weight_rows"], reader] += np.bincount(
                    seen, number, world).astype(np.int64)
        for kind in kinds:
            counts[KIND[kind], :, reader] += asked


def _count_update(counts: np.ndarray, placed: Placed, touched: np.ndarray) -> None:
    """Count updated and refreshed rows; `touched` (int64 [n]) are the distinct ids in all ranks'
    batches."""
    world = counts.shape[1]
    tier, owner = placed.resolve(touched)
    updated = np.bincount(owner, minlength=world)
    np.fill_diagonal(counts[KIND["updated_rows"]], updated)
    for rank in range(world):
        held = placed.holds[rank, tier]
        counts[KIND["refreshed_rows"], rank] += np.bincount(owner[held], minlength=world)
