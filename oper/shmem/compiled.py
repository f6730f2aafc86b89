"""Lookups as operators that torch.compile and torch.export can put into a graph.

In eager mode tables call their kernels directly. In a graph, a lookup is the operator
``oper::lookup`` and its backward pass ``oper::lookup_update``, which updates the tables. Operators
take no Python objects, so they identify tables by a number that is valid in this process while the
tables exist.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch._library.effects import EffectType

from oper.errors import InvalidInputError, OperError
from oper.shmem.autograd import check_rows
from oper.shmem.batch import Lookup
from oper.shmem.passes import Backward
from oper.shmem.protocol import Tables

_NUMBERS = itertools.count(1)
_LIVE: weakref.WeakValueDictionary[int, Tables] = weakref.WeakValueDictionary()


def lookup_in_graph(tables: Tables, batch: Lookup) -> torch.Tensor:
    """Perform `ShardedTables.lookup` in a graph that is being compiled; returns the embeddings."""
    trained = tables.optimizers is not None and torch.is_grad_enabled() and tables.is_trained()
    columns = tables.output_columns if batch.pooled else tables.directories[0].table.dim
    rows = batch.batch_size if batch.pooled else _num_rows(tables, batch)
    frozen = [k for k, name in enumerate(tables.specs) if name in tables.frozen] if (
        tables.frozen) else []
    return lookup_op(
        tables.anchor if trained else tables.anchor.detach(), batch.ids, batch.lengths,
        batch.weights, batch.key_of, tables.number, batch.batch_size, batch.pooled, rows, columns,
        trained, frozen)[0]


def _num_rows(tables: Tables, batch: Lookup) -> int:
    """Return the number of rows that an unpooled lookup in a graph returns."""
    names = {feature for feature, _ in tables.features}  # different ones have different keys
    if len(names) == len(tables.features) and (
            batch.lengths.shape[0] == len(names) * batch.batch_size):
        return batch.ids.shape[0]  # there are no other keys
    # The operator that looks up cannot have results of unknown sizes: for operators with effects
    # and several results, torch 2.13's Inductor confuses such sizes.
    return rows_op(batch.lengths, batch.key_of, batch.batch_size)


def register(tables: Tables) -> int:
    """Return a new number by which operators identify these tables.

    It is a count, plus a checksum of the tables' shapes and features. Without the checksum, a
    program exported in another process would read whichever tables have the same count here.
    """
    shapes = [(name, t.num_rows, t.dim) for name, t in tables.specs.items()]
    checksum = zlib.crc32(repr((shapes, tables.features)).encode())
    number = checksum >> 1 << 32 | next(_NUMBERS)  # at most 63 bits
    _LIVE[number] = tables
    return number


def _tables(number: int) -> Tables:
    tables = _LIVE.get(number)
    if tables is None:
        raise OperError("a graph looks up tables that no longer exist", "number of the tables",
                        number, "tables of this process that are still open",
                        "run the graph in the process that compiled it, and keep the model alive")
    return tables


@torch.library.custom_op("oper::num_rows", mutates_args=())
def rows_op(lengths: torch.Tensor, key_of: torch.Tensor, batch_size: int) -> int:
    """Return the number of ids of the keys `key_of`; 0 if the lookup will refuse the lengths. Waits
    for the device that has the lengths."""
    if batch_size == 0 or lengths.numel() % batch_size:
        return 0
    return max(0, int(lengths.view(-1, batch_size)[key_of].sum()))


@rows_op.register_fake
def _(lengths: torch.Tensor, key_of: torch.Tensor, batch_size: int) -> int:
    return torch.library.get_ctx().new_dynamic_size()  # type: ignore[return-value]


# Replaying a recorded CUDA graph would skip the Python code of these operators.
_TAGS = (torch.Tag.cudagraph_unsafe,)


@torch.library.custom_op("oper::lookup", mutates_args=(), tags=_TAGS)
def lookup_op(anchor: torch.Tensor, ids: torch.Tensor, lengths: torch.Tensor,
              weights: torch.Tensor | None, key_of: torch.Tensor, tables: int, batch_size: int,
              pooled: bool, rows: int, columns: int, trained: bool, frozen: Sequence[int]
              ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Look up a batch.

    Args:
        anchor: float32 [0]; requires a gradient if the backward pass is to update the tables.
        ids, lengths, weights, key_of, batch_size, pooled: as in `Lookup`.
        tables: the number that identifies the tables, from `register`.
        rows, columns: shape of the output.
        trained: whether a backward pass follows; the forward pass is then collective.
        frozen: positions, among the tables, of those that the backward pass must not update.

    Returns:
        The embeddings, float32 [rows, columns]; the offsets of the bags, int64 [num_keys * B + 1];
        and, with weights, int64 [2] for `check_rows`, else int64 [0].
    """
    batch = Lookup(ids.contiguous(), lengths.contiguous(), key_of, batch_size,
                   None if weights is None else weights.contiguous(), pooled)
    opened = _tables(tables)
    opened.collected.forget_failed()
    if torch._C._current_graph_task_id() != -1:
        opened.collected.check_repeated(opened.num_steps)
    elif trained:  # others may run while another thread trains
        opened.collected.began.clear()
    at_once = not trained and not opened.on_device and opened.is_one_domain
    with contextlib.nullcontext() if at_once else opened.turns.lock:
        if trained:
            opened.turns.check()
        versions = [] if weights is None else [opened.num_steps, opened.num_flushes]
        out, offsets = opened.forward(batch, True) if trained else opened.forward_alone(batch)
        if trained:
            opened.turns.begin(offsets)
    return out, offsets, torch.tensor(versions, dtype=torch.int64)


@lookup_op.register_fake
def _(anchor: torch.Tensor, ids: torch.Tensor, lengths: torch.Tensor,
      weights: torch.Tensor | None, key_of: torch.Tensor, tables: int, batch_size: int,
      pooled: bool, rows: int, columns: int, trained: bool, frozen: Sequence[int]
      ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # Here, since Dynamo does not trace the error, but passes it on from a fake kernel.
    if trained and torch.compiler.is_exporting():
        raise InvalidInputError("cannot export a lookup that trains", "gradients", "enabled",
                                "none, since an exported program could not update the tables",
                                "export under torch.no_grad()")
    return (anchor.new_empty(rows, columns),
            lengths.new_empty(lengths.numel() + 1, dtype=torch.int64),
            torch.empty(0 if weights is None else 2, dtype=torch.int64))


@torch.library.custom_op("oper::lookup_update", mutates_args=(), tags=_TAGS)
def update_op(grad: torch.Tensor, ids: torch.Tensor, offsets: torch.Tensor,
              rows: torch.Tensor, weights: torch.Tensor | None, key_of: torch.Tensor, tables: int,
              batch_size: int, pooled: bool, frozen: Sequence[int], updates: bool,
              weights_need_gradient: bool
              ) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the gradient of a lookup's output to `CollectedPasses`.

    The tables are updated by a hook on `anchor` (see `lookup_op`), once its gradient is complete.

    Args:
        grad: gradient of the output, float32 [rows, columns].
        ids, offsets, weights, key_of, batch_size, pooled: the batch, see `Lookup`.
        rows: the third result of `lookup_op`.
        tables: the number that identifies the tables, see `register`.
        frozen: as in `lookup_op`.
        updates: whether the tables are to be updated.
        weights_need_gradient: whether to compute the gradient of `weights`.

    Returns:
        The gradient of the anchor, which is empty, and that of the weights: float32 [N], or empty
        if they need none.
    """
    opened = _tables(tables)
    # Copies, since a compiled graph reuses the memory of an operator's arguments after their last
    # use, but the tables are updated when the graph has ended.
    grad, offsets = grad.clone(), offsets.clone()
    kept = torch.contiguous_format
    batch = Lookup(ids.clone(memory_format=kept), offsets.diff(), key_of.clone(), batch_size,
                   None if weights is None else weights.clone(memory_format=kept), pooled)
    of_weights = grad.new_empty(0)
    if weights_need_gradient:
        check_rows(opened, rows.tolist())
        of_weights = opened.weight_gradient(grad, batch, offsets, updates)
    if updates:
        _, parts = opened.collected.parts.setdefault(torch._C._current_graph_task_id(),
                                                     (threading.get_ident(), []))
        names = [*opened.specs]
        parts.append(Backward((grad,), batch, offsets, frozenset(names[k] for k in frozen)))
    return grad.new_empty(0), of_weights


@update_op.register_fake
def _(grad: torch.Tensor, ids: torch.Tensor, offsets: torch.Tensor,
      rows: torch.Tensor, weights: torch.Tensor | None, key_of: torch.Tensor, tables: int,
      batch_size: int, pooled: bool, frozen: Sequence[int], updates: bool,
      weights_need_gradient: bool
      ) -> tuple[torch.Tensor, torch.Tensor]:
    return grad.new_empty(0), grad.new_empty(ids.shape[0] if weights_need_gradient else 0)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    _, ids, _, weights, key_of, ctx.tables, ctx.batch_size, ctx.pooled, *_, ctx.frozen = inputs
    ctx.save_for_backward(ids, *output[1:], weights, key_of)
    ctx.mark_non_differentiable(*output[1:])


def _update(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
    ids, offsets, rows, weights, key_of = ctx.saved_tensors
    wanted = weights is not None and ctx.needs_input_grad[3]
    anchor, of_weights = update_op(grad, ids, offsets, rows, weights, key_of, ctx.tables,
                                   ctx.batch_size, ctx.pooled, ctx.frozen,
                                   ctx.needs_input_grad[0], wanted)
    return anchor, None, None, of_weights if wanted else None, *(None,) * 8


lookup_op.register_autograd(_update, setup_context=_save)
# Without effects, torch would merge equal calls of an operator into one and lose gradients.
for _operator in (lookup_op, update_op):
    _operator.register_effect(EffectType.ORDERED)
