"""One batch of lookups: its data, its checks, and the meaning of the kernels' errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from oper.errors import DeadlineError, InvalidInputError, OperError, PeerLostError
from oper.shmem.group.status import Fault, Status
from oper.shmem.settings import DEADLINE_ENV, OUTBOX_ENV, deadline_s
from oper.tables import TableSpec


@dataclass(eq=False, slots=True, weakref_slot=True)  # not frozen, for the reason below
class SeenKeys:
    """Keys of dynamic tables that a lookup has found, or missed.

    Attributes:
        ids: int64 or int32 [N], as given by the caller.
        version: how often `ids` had been changed in place; -1 = not counted.
        rows: int64 or int32 [N], the rows that the lookup read: for keys their rows, 0 = none; for
            other tables the ids.
        counts: int64 [N], lookups of each key with a row, in the form that the directories take.
        missed: int64 [M], the keys without a row, part by part.
        parts: int64 [P, 6]: number of a dynamic table, its ids [begin, end), number of missed ids,
            and the figures that the directories keep about `counts`.
        updates: number of updates of the directories before the lookup.
    """

    ids: torch.Tensor
    version: int
    rows: torch.Tensor
    counts: torch.Tensor
    missed: torch.Tensor
    parts: torch.Tensor
    updates: int


@dataclass(frozen=True, slots=True, eq=False)
class SharedBags:
    """Which bags the samples of a pooled batch have, if several samples may share a bag.

    Attributes:
        bags: int64 [num_keys], how many of a key's `Lookup.batch_size` bags are used; the rest are
            empty.
        samples: int64 [F, B], the bag of each sample, by feature of the collection.
    """

    bags: torch.Tensor
    samples: torch.Tensor


# Fields are never reassigned; `frozen` would cost a function call per field in every batch.
@dataclass(slots=True)
class Lookup:
    """One batch of lookups.

    Attributes:
        ids: int64 or int32 [N], key-major.
        lengths: int64 or int32 [num_keys * B], bag lengths, key-major.
        key_of: int64 [F], index of the key that carries each feature of the collection.
        batch_size: bags B of each key, one per sample unless samples share them.
        weights: float32 [N], per-sample weights, or None (pooled only).
        pooled: one row per sample with the features side by side, or one row per id, feature after
            feature.
        shared: the bags of samples that share them, in host memory: the lookup's result and its
            gradient have the samples' rows. None: sample b has bag b of each key.
        resolved: the result of `ShardedTables.resolve`, made ahead of the lookup, or None.
        seen: keys that the lookups of dynamic tables have found or missed; `ids` are then rows. Or
            None.
        looked_up: the result of a lookup made ahead, or None.
        apart: whether an unpooled lookup returns a tuple of one tensor per feature, so that the
            gradients need not be concatenated.
    """

    ids: torch.Tensor
    lengths: torch.Tensor
    key_of: torch.Tensor
    batch_size: int
    weights: torch.Tensor | None = None
    pooled: bool = True
    shared: SharedBags | None = None
    resolved: ResolvedIds | None = None
    seen: tuple[SeenKeys, ...] = ()
    looked_up: LookedUp | None = None
    apart: bool = False

    def versions(self) -> tuple[int, int, int]:
        """In-place version counters of ids, weights and the bags of samples.

        -1 for inference tensors, which have none.
        """
        shared = self.shared
        return (version_of(self.ids), version_of(self.weights),
                version_of(None if shared is None else shared.samples))

    def kept(self) -> Lookup:
        """A copy of the batch that the caller's next batch does not overwrite."""
        shared = self.shared
        return Lookup(self.ids.clone(), self.lengths.clone(), self.key_of, self.batch_size,
                      None if self.weights is None else self.weights.detach().clone(), self.pooled,
                      None if shared is None else SharedBags(shared.bags, shared.samples.clone()),
                      seen=self.seen)


def version_of(tensor: torch.Tensor | None) -> int:
    """How often a tensor has been changed in place; -1 if there is none, or it has no counter."""
    return -1 if tensor is None or tensor.is_inference() else tensor._version


@dataclass(frozen=True, slots=True, eq=False)
class LookedUp:
    """The result of a lookup that was made ahead of its turn.

    Attributes:
        by: the micro-batches for which it is valid, see `oper.shmem.micro_batches.Parts`.
        num_published: `num_published` of the tables (see `LogicalRows`) before rows were read.
        given: the caller's batch, in which invalid ids are not replaced.
        versions: `Lookup.versions` before they were read.
        out, offsets: what `ShardedTables.forward` returned.
    """

    by: Any
    num_published: int
    given: Lookup
    versions: tuple[int, int, int]
    out: torch.Tensor
    offsets: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ResolvedIds:
    """The result of `ShardedTables.resolve`, which depends on ids but not on the values of rows.

    Attributes:
        handle: the placement for which it is valid.
        batch: the batch for which it is valid.
        versions: `Lookup.versions` before they were read.
        offsets: int64 [num_keys * B + 1], bounds of the bags.
        addresses: int64 [n + 64], addresses of the rows of all features, feature after feature.
        order: uint8, the ids of every table sorted by owner and slot; empty for read-only tables.
    """

    handle: int
    batch: Lookup
    versions: tuple[int, int, int]
    offsets: torch.Tensor
    addresses: torch.Tensor
    order: torch.Tensor

    def fits(self, handle: int, batch: Lookup) -> bool:
        """Whether it is still valid, for a batch with the same ids (weights may have changed)."""
        of = self.batch
        return (self.handle == handle and of.ids is batch.ids and of.lengths is batch.lengths
                and self.versions[0] == batch.versions()[0]
                and of.key_of is batch.key_of and of.batch_size == batch.batch_size
                and of.pooled == batch.pooled
                and (of.weights is None) == (batch.weights is None))


@dataclass(frozen=True, slots=True)
class FailedBatch:
    """A batch that the kernels refused, with the names for its error message.

    Attributes:
        batch: the batch.
        offsets: int64 [num_keys * B + 1], bounds of its bags.
        features: (feature name, table name) in output order.
        specs: the tables by name.
        device: the tables' device.
    """

    batch: Lookup
    offsets: torch.Tensor
    features: Sequence[tuple[str, str]]
    specs: Mapping[str, TableSpec]
    device: torch.device


def rows_in_order(grad: torch.Tensor, pooled: bool) -> torch.Tensor:
    """`grad` with contiguous columns and rows that do not overlap, as the kernels require."""
    wide = pooled and grad.dim() == 2 and grad.stride(1) == 1 and grad.stride(0) >= grad.shape[1]
    return grad if wide else grad.contiguous()


def is_fit(batch: Lookup, device: torch.device) -> bool:
    """Whether tables on that device take a batch, apart from what its ids and lengths are."""
    fit: bool = torch.ops.oper.is_fit(batch.ids, batch.lengths, batch.weights, batch.key_of,
                                      batch.batch_size, device)
    return fit


def refuse_weight_gradient(batch: Lookup) -> None:
    """Raise InvalidInputError if the gradient of weights is requested from read-only tables."""
    if batch.weights is not None and batch.weights.requires_grad and torch.is_grad_enabled():
        raise InvalidInputError("cannot look up in read-only tables", "per-sample weights",
                                "requires_grad=True", "weights that need no gradient",
                                "detach them; they would not be trained")


def raise_status(code: int, detail: int, outbox_bytes: int, failed: FailedBatch | None) -> NoReturn:
    """Raise the error for a status code of the kernels. `raise_verdict` does so for the codes in
    `PEER_FAILURES`, which a barrier or an exchange reports.

    Args:
        code, detail: values returned by the operator; see `Status`.
        outbox_bytes: size of a rank's outbox.
        failed: the batch that was looked up, unless the call had none.
    """
    peer: PeerLostError | DeadlineError | None = None
    if code == Status.PEER_LATE:
        peer = DeadlineError(
            "a peer did not arrive at the gradient exchange", "rank", detail,
            f"arrival within {DEADLINE_ENV}={deadline_s():g} s",
            "every rank must run the same number of training steps; look at that rank")
    if code == Status.PEER_REFUSED_BATCH:
        peer = PeerLostError("a peer has refused its batch, so no rank has trained", "rank",
                             detail, "a valid batch on every rank",
                             "look at that rank's error; all ranks may continue with the next "
                             "batch")
    if peer is not None:
        peer.rank = detail
        raise peer
    if code == Status.OUTBOX_FULL:
        raise OperError("the gradients of a batch do not fit the outbox", OUTBOX_ENV, outbox_bytes,
                        "room for the batch's distinct rows",
                        f"raise {OUTBOX_ENV} or use a smaller batch")
    assert failed is not None, f"status {code} without a batch"
    batch, offsets = failed.batch, failed.offsets
    if code == Status.BAD_BATCH:
        raise InvalidInputError("cannot look up", *_fault(detail, batch, failed.device))
    if code == Status.BAG_OUT_OF_RANGE:
        assert batch.shared is not None
        bags = batch.shared.samples[detail]
        count = int(batch.shared.bags[batch.key_of[detail]])
        raise InvalidInputError("cannot look up",
                                f"min, max of inverse_indices of {failed.features[detail][0]}",
                                (int(bags.min()), int(bags.max())),
                                f"0 <= bag < {count}, the number of the feature's bags",
                                "number the distinct bags from 0")
    if code == Status.BAD_LENGTHS:
        least = int(batch.lengths.min()) if batch.lengths.numel() else None
        raise InvalidInputError("bag lengths do not fit the ids", "sum(lengths), min(lengths)",
                                (sum(batch.lengths.tolist()), least),
                                f"{batch.ids.numel()} as there are ids, none negative",
                                "correct the batch")
    key = int(torch.searchsorted(offsets, detail, right=True)) - 1
    key //= max(1, batch.batch_size)
    bad = int(batch.ids[detail])
    for feature, carrier in zip(failed.features, batch.key_of.tolist(), strict=True):
        num_rows = failed.specs[feature[1]].num_rows
        if carrier == key and not 0 <= bad < num_rows:
            break  # of a feature's tables the one that lacks the row
    raise InvalidInputError(f"lookup of feature {feature[0]!r} in table {feature[1]!r}", "id", bad,
                            f"0 <= id < {num_rows}", "correct the input or enlarge the table")


def _fault(fault: int, batch: Lookup, device: torch.device) -> tuple[str, Any, str, str]:
    """What of a batch is refused: its name, its value, what is expected, and the remedy."""
    ids, lengths, weights, key_of = batch.ids, batch.lengths, batch.weights, batch.key_of
    if fault == Fault.ELSEWHERE:
        tensors = {"ids": ids, "lengths": lengths, "per-sample weights": weights}
        name, value = next(((name, x) for name, x in tensors.items()
                            if x is not None and x.device != device), ("key_of", key_of))
        return (f"device of {name}", str(value.device), f"the tables' device {device}",
                "move the batch there")
    if fault == Fault.NUM_LENGTHS:
        return ("number of lengths", lengths.numel(),
                f"one per key and sample of batch size {batch.batch_size}", "correct the batch")
    if fault == Fault.KEY_OF:
        return ("key_of", key_of.tolist()[:8], "a key for every feature",
                "add the missing features to the batch")
    if fault == Fault.WEIGHTS:
        assert weights is not None
        return ("per-sample weights", (weights.dtype, tuple(weights.shape)),
                f"contiguous float32 of shape {tuple(ids.shape)}", "convert the batch")
    name, value = ("ids", ids) if fault == Fault.IDS else ("lengths", lengths)
    return (name, (value.dtype, tuple(value.shape)),
            "contiguous int64 or int32, one dimension", "convert the batch")
