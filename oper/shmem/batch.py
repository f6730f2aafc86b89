"""One batch of lookups: its data, its checks, and the errors for the kernels' status codes."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad

from oper.errors import DeadlineError, InvalidInputError, OperError, PeerLostError
from oper.shmem.group.status import Fault, Status
from oper.shmem.settings import DEADLINE_ENV, SEND_BUFFER_ENV, deadline_s


@dataclass(eq=False, slots=True, weakref_slot=True)  # not frozen: see the comment at `Lookup`
class SeenKeys:
    """The result of looking up keys of dynamic tables in their directories.

    Attributes:
        ids: int64 or int32 [N], keys (for other tables row numbers) as given by the caller.
        version: in-place version counter of `ids` at the lookup; -1 if it has none.
        rows: int64 or int32 [N], the rows that the lookup read: the key's row, or 0 for a key
            without one; for other tables equal to `ids`.
        found: data that the back end's kernels need for the update, see `Keys` and `DeviceKeys`.
        updates: number of updates of the directories before the lookup.
    """

    ids: torch.Tensor
    version: int
    rows: torch.Tensor
    found: tuple[torch.Tensor, ...]
    updates: int


@dataclass(slots=True, eq=False)  # not frozen: see the comment at `Lookup`
class SharedBags:
    """The mapping from samples to bags of a pooled batch in which several samples may share a bag.

    Attributes:
        bags: int64 [num_keys], number of used bags of each key; its other bags, up to
            `Lookup.batch_size`, are empty.
        samples: int64 [F, B], index of each sample's bag, by feature of the collection.
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
        pooled: if True, the output has one row per sample with the features concatenated along
            the columns; if False, one row per id, feature after feature.
        shared: mapping from samples to bags, in host memory; output and gradient then have one row
            per sample. None = sample b has bag b of each key.
        resolved: the result of `ShardedTables.resolve` for this batch, or None.
        seen: results of the key lookups in dynamic tables, in which case `ids` are rows; else
            empty.
        looked_up: the result of the lookup if it was made in advance, or None.
        apart: whether an unpooled lookup returns a tuple with one tensor per feature, so that the
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
        """Return `version_of` the ids, the weights and `shared.samples`."""
        shared = self.shared
        return (version_of(self.ids), version_of(self.weights),
                version_of(None if shared is None else shared.samples))

    def kept(self) -> Lookup:
        """Return a copy that stays valid if the caller overwrites the tensors of this batch."""
        shared = self.shared
        return Lookup(self.ids.clone(), self.lengths.clone(), self.key_of, self.batch_size,
                      None if self.weights is None else self.weights.detach().clone(), self.pooled,
                      None if shared is None else SharedBags(shared.bags, shared.samples.clone()),
                      seen=self.seen)


def version_of(tensor: torch.Tensor | None) -> int:
    """Return a tensor's in-place version counter; -1 for None and for inference tensors."""
    return -1 if tensor is None or tensor.is_inference() else tensor._version


@dataclass(frozen=True, slots=True, eq=False)
class LookedUp:
    """The result of a lookup made before the program requests it (`prefetch`).

    Attributes:
        by: the `oper.shmem.micro_batches.Parts` within which the result is valid.
        num_flushes: `LogicalRows.num_flushes` of the tables before the rows were read.
        given: the caller's batch, before `BoundsCheck` replaced invalid ids.
        versions: `given.versions()` before the tensors were read; compared when the result is
            used, since the program must not write to them meanwhile.
        out, offsets: the result of `ShardedTables.forward`.
    """

    by: Any
    num_flushes: int
    given: Lookup
    versions: tuple[int, int, int]
    out: torch.Tensor
    offsets: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ResolvedIds:
    """The result of `ShardedTables.resolve`: row addresses, which do not depend on row values.

    Attributes:
        handle: `ShardedTables.handle` of the placement for which it is valid.
        batch: the batch for which it is valid.
        versions: `batch.versions()` before its tensors were read.
        offsets: int64 [num_keys * B + 1], bounds of the bags.
        addresses: int64 [n + 64], addresses of the rows of the n ids of all features, feature after
            feature; kernels read up to 64 elements ahead, so the last 64 are padding.
        order: uint8, opaque to Python: the ids of every table sorted by owner and slot; empty for
            read-only tables.
    """

    handle: int
    batch: Lookup
    versions: tuple[int, int, int]
    offsets: torch.Tensor
    addresses: torch.Tensor
    order: torch.Tensor

    def fits(self, handle: int, batch: Lookup) -> bool:
        """Return whether the result is valid for this placement and batch; weights may differ."""
        of = self.batch
        return (self.handle == handle and of.ids is batch.ids and of.lengths is batch.lengths
                and self.versions[0] == batch.versions()[0]
                and of.key_of is batch.key_of and of.batch_size == batch.batch_size
                and of.pooled == batch.pooled
                and (of.weights is None) == (batch.weights is None))


def rows_in_order(grad: torch.Tensor, pooled: bool) -> torch.Tensor:
    """Return `grad`, copied unless each row is contiguous and rows do not overlap."""
    wide = pooled and grad.dim() == 2 and grad.stride(1) == 1 and grad.stride(0) >= grad.shape[1]
    return grad if wide else grad.contiguous()


def is_fit(batch: Lookup, device: torch.device) -> bool:
    """Return whether a batch's devices, dtypes, shapes and keys are valid for tables on `device`;
    the values of ids and lengths are not checked."""
    return torch.ops.oper.is_fit(batch.ids, batch.lengths, batch.weights, batch.key_of,
                                 batch.batch_size, device)


def needs_weight_gradient(batch: Lookup) -> bool:
    """Return whether a lookup would have to compute the gradient of its per-sample weights."""
    return batch.weights is not None and batch.weights.requires_grad and torch.is_grad_enabled()


def refuse_weight_gradient(batch: Lookup) -> None:
    """Raise InvalidInputError if the weights of a lookup in read-only tables require a gradient."""
    if needs_weight_gradient(batch):
        raise InvalidInputError("cannot look up in read-only tables", "per-sample weights",
                                "requires_grad=True", "weights that need no gradient",
                                "detach them, since read-only tables compute no gradients")


def refuse_tangent(weights: torch.Tensor) -> None:
    """Raise InvalidInputError if the per-sample weights of a lookup have a tangent of forward-mode
    differentiation, which the result would lack."""
    if (forward_ad._current_level >= 0
            and forward_ad.unpack_dual(weights).tangent is not None):
        raise InvalidInputError("cannot look up", "per-sample weights", "with a tangent",
                                "without one, since lookups have no forward-mode derivative",
                                "differentiate in reverse mode, or look up with "
                                "torch.autograd.forward_ad.unpack_dual(weights).primal")


def refuse_transforms() -> None:
    """Raise InvalidInputError if called within a transform of ``torch.func``, for which the kernels
    have no rules. For lookups that have failed."""
    if torch._C._are_functorch_transforms_active():
        raise InvalidInputError("cannot look up within a transform of torch.func", "transform",
                                torch._C._functorch.peek_interpreter_stack().key().name.lower(),
                                "none around lookups in sharded tables",
                                "look up first, and transform the rest of the model")


#: Returns what records the operators that are called, as ``make_fx`` does; None if nothing does.
recorder = functools.partial(torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.PROXY)


def refuse_recording() -> NoReturn:
    """Raise InvalidInputError for a lookup that is recorded, see `recorder`: the results of the
    kernels would be recorded as constants."""
    raise InvalidInputError("cannot record lookups in sharded tables", "tracer", "make_fx",
                            "torch.compile or torch.export", "use one of these")


def raise_status(code: int, detail: int, send_buffer_bytes: int, batch: Lookup | None = None,
                 offsets: torch.Tensor | None = None, tables: Any = None) -> NoReturn:
    """Raise the error for a status code of the kernels.

    Codes in `PEER_FAILURES`, which a barrier or an exchange reports, belong to `raise_verdict`.

    Args:
        code, detail: values returned by the operator; see `Status`.
        send_buffer_bytes: size of a rank's send buffer.
        batch: the batch of the failed operator; None if the operator had no batch.
        offsets: int64 [num_keys * B + 1], bounds of the batch's bags.
        tables: the tables that were to look up the batch.
    """
    if code == Status.PEER_LATE:
        raise DeadlineError(
            "a peer did not arrive at the gradient exchange", "rank", detail,
            f"arrival within {DEADLINE_ENV}={deadline_s():g} s",
            "every rank must run the same number of training steps; look at that rank")
    if code == Status.PEER_REFUSED_BATCH:
        raise PeerLostError("a peer has refused its batch, so no rank has trained", "rank",
                            detail, "a valid batch on every rank",
                            "see that rank's error; all ranks can continue with the next batch")
    if code == Status.OTHER_SETTINGS:  # device memory; else `TableUpdates` raises it
        raise InvalidInputError(
            "ranks update the tables with different learning rates, frozen tables or step counts "
            "of Adam", "rank that differs", detail, "the same on all ranks",
            "set lr and requires_grad by the same rule on every rank; no rank has updated its rows")
    if code == Status.SEND_BUFFER_FULL:
        raise OperError("the gradients of a batch do not fit the send buffer", SEND_BUFFER_ENV,
                        send_buffer_bytes,
                        "enough bytes for the gradients of the batch's distinct rows",
                        f"raise {SEND_BUFFER_ENV} or use a smaller batch")
    assert batch is not None and offsets is not None, f"status {code} without a batch"
    if code == Status.BAD_BATCH:
        raise InvalidInputError("cannot look up", *_fault(detail, batch, tables.device))
    if code == Status.BAG_OUT_OF_RANGE:
        assert batch.shared is not None
        bags = batch.shared.samples[detail]
        count = int(batch.shared.bags[batch.key_of[detail]])
        raise InvalidInputError("cannot look up",
                                f"min, max of inverse_indices of {tables.features[detail][0]}",
                                (int(bags.min()), int(bags.max())),
                                f"0 <= bag < {count}, the number of bags of the feature",
                                "number the distinct bags consecutively from 0")
    if code == Status.BAD_LENGTHS:
        least = int(batch.lengths.min()) if batch.lengths.numel() else None
        raise InvalidInputError("the lengths of a batch do not match its ids",
                                "sum(lengths), min(lengths)",
                                (sum(batch.lengths.tolist()), least),
                                f"a sum of {batch.ids.numel()}, the number of ids, and a minimum "
                                ">= 0",
                                "pass the lengths of the bags that contain these ids, not offsets")
    key = int(torch.searchsorted(offsets, detail, right=True)) - 1
    key //= max(1, batch.batch_size)
    bad = int(batch.ids[detail])
    for feature, carrier in zip(tables.features, batch.key_of.tolist(), strict=True):
        num_rows = tables.specs[feature[1]].num_rows
        if carrier == key and not 0 <= bad < num_rows:
            break  # several features may share the key; this one's table lacks the row
    raise InvalidInputError(f"lookup of feature {feature[0]!r} in table {feature[1]!r}", "id", bad,
                            f"0 <= id < {num_rows}", "correct the input or enlarge the table")


def _fault(fault: int, batch: Lookup, device: torch.device) -> tuple[str, Any, str, str]:
    """Describe a `Fault` of a batch: name, value, constraint and remedy of the error message."""
    ids, lengths, weights, key_of = batch.ids, batch.lengths, batch.weights, batch.key_of
    if fault == Fault.ELSEWHERE:
        tensors = {"ids": ids, "lengths": lengths, "per-sample weights": weights}
        name, value = next(((name, x) for name, x in tensors.items()
                            if x is not None and x.device != device), ("key_of", key_of))
        return (f"device of {name}", str(value.device), f"the tables' device {device}",
                "move the batch there")
    if fault == Fault.NUM_LENGTHS:
        return ("number of lengths", lengths.numel(),
                f"a length for each of {batch.batch_size} samples of every key that a feature uses",
                "pass num_keys * batch_size lengths, key by key")
    if fault == Fault.KEY_OF:
        return ("key of each feature (key_of)", key_of.tolist()[:8],
                "for every feature of the tables, the index of a key in the batch",
                "add the missing features to the batch")
    if fault == Fault.WEIGHTS:
        assert weights is not None
        return ("per-sample weights", (weights.dtype, tuple(weights.shape)),
                f"contiguous float32 of shape {tuple(ids.shape)}", "convert the batch")
    name, value = ("ids", ids) if fault == Fault.IDS else ("lengths", lengths)
    return (name, (value.dtype, tuple(value.shape)),
            "contiguous int64 or int32, one dimension", "convert the batch")
