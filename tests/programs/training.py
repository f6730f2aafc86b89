"""Actions that run the model: training, evaluation, hooks, errors in the middle."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import KeyedOptimizerWrapper

from tests.programs.differences import BATCH, ENDS
from tests.programs.models import Batch, names_of, tensors_of
from tests.programs.table import Seen, action, has_dense, has_weights, is_wrapped


def step(side: Any, args: dict[str, Any], offset: int = 0,
         between: Callable[[Batch], Any] | None = None, dense: bool = True,
         batches: list[Batch] | None = None) -> Seen:
    """Make a training step; `between` is called with every batch between forward and backward pass.
    """
    batches = side.batches(args, offset) if batches is None else batches
    outs, loss = forward(side, batches, args.get("square", 0.0))
    seen = shown(outs[side.mine])
    for batch in batches if between else []:
        between(batch)
    finish(side, outs, loss, dense)
    return seen


def forward(side: Any, batches: list[Batch], square: float = 0.0
            ) -> tuple[list[list[torch.Tensor]], torch.Tensor]:
    """Return the outputs of each batch, and their loss."""
    outs = [side.outputs(b) for b in batches]
    return outs, side.loss(outs, batches, square)


def finish(side: Any, outs: list[list[torch.Tensor]], loss: torch.Tensor, dense: bool = True
           ) -> Seen:
    """Make the backward pass and the dense step; return what this rank has seen."""
    if loss.requires_grad:
        loss.backward()
    if dense:
        side.step_dense()
    return shown(outs[side.mine])


def shown(outs: list[torch.Tensor]) -> Seen:
    """Return outputs, and whether they carry gradients."""
    seen: Seen = {f"output {k}": x.detach().clone() for k, x in enumerate(outs)}
    # Of all: tables of one collection that are frozen share an output with those that are not.
    return seen | {"=requires_grad": any(x.requires_grad for x in outs)}


@action(8.0, square=(0.0, 0.0, 0.25))
def train(side: Any, args: dict[str, Any]) -> Seen:
    """Make a training step."""
    return step(side, args)


@action(2.0)
def forward_only(side: Any, args: dict[str, Any]) -> Seen:
    """Make a forward pass with gradients and no backward pass."""
    result = [side.call(b) for b in side.batches(args)][side.mine]
    return shown(tensors_of(result)) | {"=names": names_of(result)}


@action(2.0, mode=("no_grad", "inference_mode"), evals=(True, False))
def evaluate(side: Any, args: dict[str, Any]) -> Seen:
    """Make a forward pass without gradients, in eval or train mode."""
    side.net.train(not args["evals"])
    with getattr(torch, args["mode"])():
        result = [side.call(b) for b in side.batches(args)][side.mine]
        seen = {f"output {k}": x.clone() for k, x in enumerate(tensors_of(result))}
    side.net.train()
    return seen | {"=names": names_of(result)}


@action(2.0, may_refuse=True, difference=BATCH,
        otherwise=lambda side, args: step(side, args, batches=_all_with_ids(side, args)),
        # Torch stops in the middle of what it updates, OPER between two modules.
        fits=lambda p: len(p.model["embs"]) == 1 and not is_wrapped(p),
        what=("ids", "ids", "lengths", "weights"), by=("add", "fill", "view"))
def change_inputs(side: Any, args: dict[str, Any]) -> Seen:
    """Change ids, lengths or weights in place between forward and backward pass."""
    def change(batch: Batch) -> None:
        for k, rows in enumerate(batch.rows):
            x = getattr(batch, args["what"])[k]
            if x is None or not x.numel():
                continue
            if args["what"] == "weights":
                x.mul_(2.0)
            elif args["what"] == "lengths":
                x.zero_()
            elif args["by"] == "fill":
                x.fill_((int(x.reshape(-1)[0]) + 1) % rows)
            else:
                part = x.view(-1)[:1] if args["by"] == "view" and x.is_contiguous() else x
                part.add_(1).remainder_(rows)

    # All ranks or none: one that refuses leaves the others waiting for it.
    return step(side, args, between=change, batches=_all_with_ids(side, args))


@action(1.0, what=("ids", "lengths", "weights"))
def reuse_inputs(side: Any, args: dict[str, Any]) -> Seen:
    """Refill the tensors of a batch after its backward pass, as input pipelines do."""
    seen = step(side, args)
    for batch in side.batches(args):
        forward(side, [batch])
        for x in getattr(batch, args["what"]):
            if x is not None:
                x.zero_()
    return seen


def _need_gradients(batches: list[Batch]) -> None:
    for batch in batches:
        for w in batch.weights:
            if w is not None:
                w.requires_grad_()


@action(1.5, fits=has_weights)
def weight_gradients(side: Any, args: dict[str, Any]) -> Seen:
    """Compute gradients of per-sample weights."""
    batches = side.batches(args)
    _need_gradients(batches)
    seen = finish(side, *forward(side, batches))
    for k, w in enumerate(batches[side.mine].weights):
        if w is not None:
            grad = torch.zeros(w.shape) if w.grad is None else w.grad.float()
            seen[f"gradient of weights {k}"] = grad * len(batches)
    return seen


@action(1.5, may_refuse=True)
def two_lookups(side: Any, args: dict[str, Any]) -> Seen:
    """Make two forward passes, and one backward pass through both."""
    (first, loss), (second, other) = (forward(side, side.batches(args, k)) for k in (0, 1))
    return finish(side, [a + b for a, b in zip(first, second, strict=True)], loss + other)


@action(0.7, may_refuse=True, fits=lambda p: not is_wrapped(p))
def backward_twice(side: Any, args: dict[str, Any]) -> Seen:
    """Retain a graph and make a second backward pass through it."""
    outs, loss = forward(side, side.batches(args))
    if loss.requires_grad:
        loss.backward(retain_graph=True)
    return finish(side, outs, loss)


@action(1.0, may_refuse=True, of=("dense", "weights"),
        fits=lambda p: not is_wrapped(p))
def autograd_grad(side: Any, args: dict[str, Any]) -> Seen:
    """Call ``torch.autograd.grad``, which accumulates no gradients and so trains nothing.

    Not with respect to a table, which has no gradient (difference `NO_GRAD`).
    """
    batches = side.batches(args)
    if args["of"] == "weights":
        _need_gradients(batches)
    _, loss = forward(side, batches)
    of = {"dense": side.dense(),
          "weights": [w for w in batches[side.mine].weights if w is not None]}[args["of"]]
    if not of or not loss.requires_grad:
        return {}
    grads = torch.autograd.grad(loss, of, allow_unused=True)
    if args["of"] == "dense" and side.world_size > 1:
        return {"=given": [g is not None for g in grads]}
    return {f"gradient {k}": None if g is None else g.to_dense().float() * len(batches)
            for k, g in enumerate(grads)}


@action(1.5, passes=(1, 2), zero=(False, False, True))
def accumulate(side: Any, args: dict[str, Any]) -> Seen:
    """Make passes under ``no_sync``, some followed by a ``zero_grad`` that may discard the tables'
    gradients, and one outside."""
    seen: Seen = {}
    with side.no_sync():
        for k in range(args["passes"]):
            seen |= {f"pass {k} {n}": x for n, x in step(side, args, k, dense=False).items()
                     if n != "=requires_grad"}
    if args["zero"]:
        side.drop_gradients()
    return seen | step(side, args, args["passes"])


@action(1.5, fits=has_dense, by=("norm", "value", "torchrec norm", "torchrec value"))
def clip(side: Any, args: dict[str, Any]) -> Seen:
    """Clip gradients before the dense step, when tables are already updated."""
    seen = step(side, args, dense=False)
    side.average_dense()
    parameters = list(side.core.parameters())
    if args["by"] == "norm":
        seen["norm"] = nn.utils.clip_grad_norm_(parameters, 0.1).detach()
    elif args["by"] == "value":
        nn.utils.clip_grad_value_(parameters, 0.05)
    if args["by"] in ("norm", "value"):
        torch.optim.SGD(side.dense(), lr=0.05).step()
    else:
        named = {f"dense.{k}": p for k, p in enumerate(side.dense())}
        clipping = getattr(GradientClipping, args["by"].split()[1].upper())
        GradientClippingOptimizer(
            KeyedOptimizerWrapper(named, lambda ps: torch.optim.SGD(ps, lr=0.05)),
            clipping=clipping, max_gradient=0.05).step()
    for p in side.dense():
        p.grad = None
    return seen


@action(1.0, fits=has_dense, kind=("SGD", "Adam", "AdamW"))
def step_all_parameters(side: Any, args: dict[str, Any]) -> Seen:
    """Step a dense optimizer over ``model.parameters()`` with weight decay; tables have no
    gradients."""
    optimizer = getattr(torch.optim, args["kind"])(side.core.parameters(), lr=0.05,
                                                   weight_decay=0.1)
    seen = step(side, args, dense=False)
    side.average_dense()
    optimizer.step()
    optimizer.zero_grad()
    return seen


@action(0.7, to_none=(True, False))
def zero_grad(side: Any, args: dict[str, Any]) -> Seen:
    """Call the model's ``zero_grad`` between the passes."""
    outs, loss = forward(side, side.batches(args))
    side.net.zero_grad(set_to_none=args["to_none"])
    return finish(side, outs, loss)


@action(1.0, may_refuse=True, how=("attribute", "named"), fits=lambda p: not is_wrapped(p))
def regulariser(side: Any, args: dict[str, Any]) -> Seen:
    """Use a loss on the weight itself."""
    outs, loss = forward(side, side.batches(args))
    weight = side.weight(side.table(args["table"]), args["how"])
    return finish(side, outs, loss + 0.125 * weight.square().sum())


# ---- hooks ---------------------------------------------------------------------------------------


@action(2.0, kind=("forward", "forward change", "forward pre", "backward", "backward pre change",
                   "tensor change", "tensor retain"), where=("module", "model"),
        fits=lambda p: not is_wrapped(p))
def hooks(side: Any, args: dict[str, Any]) -> Seen:
    """Register hooks that record or change values."""
    # An unsharded collection has no forward pass for no samples.
    args = args | {"shapes": ["usual" if s == "empty_batch" else s for s in args["shapes"]]}
    module = side.core if args["where"] == "model" else side.module(side.table(args["table"]))
    count = [0]
    seen: list[torch.Tensor] = []

    def record(values: Any) -> None:
        count[0] += 1
        with contextlib.suppress(AttributeError, TypeError):
            seen.extend(x.detach().clone() for x in values if isinstance(x, torch.Tensor))

    kind = args["kind"]
    if kind == "forward":
        handle = module.register_forward_hook(lambda m, i, o: record(tensors_of(o)))
    elif kind == "forward change":
        handle = module.register_forward_hook(
            lambda m, i, o: o * 0.5 if isinstance(o, torch.Tensor) else None)
    elif kind == "forward pre":
        handle = module.register_forward_pre_hook(lambda m, i: record(()))
    elif kind == "backward":
        handle = module.register_full_backward_hook(lambda m, i, o: record(o))
    elif kind == "backward pre change":
        handle = module.register_full_backward_pre_hook(
            lambda m, o: tuple(x if x is None else x * 0.5 for x in o))
    else:
        handle = module.register_forward_pre_hook(lambda m, i: None)
    try:
        batches = side.batches(args)
        outs, loss = forward(side, batches)
        for out in outs if kind.startswith("tensor") else []:
            for x in out:
                if x.requires_grad:
                    x.register_hook(lambda g: g * 0.5)
                    x.retain_grad()
        seen_outputs = finish(side, outs, loss)
    finally:
        handle.remove()
    gradients = {} if kind == "forward pre" or len(batches) > 1 or side.world_size > 1 else {
        f"hook {k}": x for k, x in enumerate(seen)}
    # Outputs of frozen tables have none, where a collection has several outputs.
    if kind == "tensor retain" and all(e["kind"] != "ec" for e in side.spec["embs"]):
        gradients |= {f"gradient {k}": x.grad * len(batches) for k, x in enumerate(outs[side.mine])
                 if x.grad is not None}
    return seen_outputs | gradients | {"=calls": count[0] // len(batches)}


@action(0.7, may_refuse=True, fits=lambda p: not is_wrapped(p), what=("hook", "accumulated"))
def weight_hook(side: Any, args: dict[str, Any]) -> Seen:
    """Register a hook on a table's weight, which receives its gradient."""
    weight = side.weight(side.table(args["table"]))
    calls: list[int] = []
    if args["what"] == "hook":
        handle = weight.register_hook(lambda g: calls.append(1))
    else:
        handle = weight.register_post_accumulate_grad_hook(lambda p: calls.append(1))
    try:
        seen = step(side, args)
    finally:
        handle.remove()
    return seen | {"=calls": len(calls)}


# ---- errors in the middle ------------------------------------------------------------------------


# Some of torch's lookups take ids of type bool.
@action(2.0, what=("too large", "negative", "float", "bool", "offsets"), difference=ENDS,
        may_refuse=lambda a: a["what"] == "bool")
def bad_batch(side: Any, args: dict[str, Any]) -> Seen:
    """Pass an id outside of its table, or inputs of another type."""
    inputs = []
    for batch in _all_with_ids(side, args):
        features, offsets, weights = (*batch.inputs[0], None, None)[:3]
        changed = batch.ids[0].clone()
        what = args["what"]
        if what == "offsets" and offsets is not None:
            offsets = offsets.clone().fill_(changed.numel() + 5)
        elif what in ("too large", "offsets"):
            changed.view(-1)[-1] = 1000
        elif what == "negative":
            changed.view(-1)[0] = -1
        else:
            changed = changed.to(getattr(torch, what))
        if hasattr(features, "keys"):
            batch.inputs[0] = (type(features)(
                features.keys(), changed, features.weights_or_none(), lengths=features.lengths(),
                stride=features.stride()),)
        else:
            batch.inputs[0] = (changed, offsets, weights)[:len(batch.inputs[0])]
        inputs.append(batch)
    return finish(side, *forward(side, inputs))


def _all_with_ids(side: Any, args: dict[str, Any]) -> list[Batch]:
    """Return batches of a step with at least one id each for the first module."""
    return [next(b for k in range(1000)
                 if (b := Batch(side.spec, args["seed"] + 101 * rank + k, "usual")).ids[0].numel())
            for rank in side.computed_ranks()]


@action(1.0, fits=lambda p: not is_wrapped(p))
def raise_in_backward(side: Any, args: dict[str, Any]) -> Seen:
    """Register a hook that raises before the gradients reach the tables."""
    def refuse(grad: torch.Tensor) -> None:
        raise ArithmeticError("a user's hook")

    outs, loss = forward(side, side.batches(args))
    for out in outs:
        for x in out:
            if x.requires_grad:
                x.register_hook(refuse)
    return finish(side, outs, loss, dense=False)


@action(0.7)
def raise_after_forward(side: Any, args: dict[str, Any]) -> Seen:
    """Raise an error between the passes and discard the graph."""
    outs = [side.outputs(b) for b in side.batches(args)]
    raise ArithmeticError(f"a user's error after {len(outs) > 0}")
