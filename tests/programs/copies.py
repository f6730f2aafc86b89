"""Actions that save, load, copy and move whole models."""

import copy
import io
import pickle
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import oper
from tests.programs.differences import SNAPSHOTS
from tests.programs.models import Batch, tensors_of, whole
from tests.programs.table import Seen, action, is_wrapped
from tests.programs.training import step


def _new_state(side: Any, args: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return new numbers for the whole model, as plain tensors."""
    rng = torch.Generator().manual_seed(args["seed"])
    shapes = {t.key: ((t.rows, t.dim), torch.float16 if t.half else torch.float32)
              for t in side.tables}
    shapes |= {n: (tuple(p.shape), p.dtype) for n, p in side.core.named_parameters()
               if n.startswith("dense.")}
    return {n: (torch.randn(shape, generator=rng) * 0.5).to(dtype)
            for n, (shape, dtype) in shapes.items()}


LOADS = ("all", "all", "missing", "unexpected", "shape", "dtype", "none", "parameters")


@action(3.0, exact=True, what=LOADS, strict=(True, False), assign=(False, False, False, True))
def load_state_dict(side: Any, args: dict[str, Any]) -> Seen:
    """Call ``load_state_dict`` with states that fit the model, and with others."""
    state = _new_state(side, args)
    key = side.table(args["table"]).key
    if args["what"] == "missing":
        del state[key]
    elif args["what"] == "unexpected":
        state["first.embedding_bags.none.weight"] = torch.zeros(2)
        state[f"{key}.more"] = torch.zeros(2)
    elif args["what"] == "shape":
        state[key] = torch.zeros(state[key].shape[0] + 1, state[key].shape[1])
    elif args["what"] == "dtype":
        state[key] = state[key].double()
    elif args["what"] == "none":
        state = {}
    elif args["what"] == "parameters":
        state = {n: torch.nn.Parameter(x) for n, x in state.items()}
    # A wrapper would keep the old parameters; another dtype is difference `DTYPE`.
    assign = args["assign"] and not side.wrapper and args["what"] != "dtype"
    found = side.core.load_state_dict(state, strict=args["strict"], assign=assign)
    return {"=missing": sorted(found.missing_keys), "=unexpected": sorted(found.unexpected_keys)}


@action(1.0, exact=True, difference=SNAPSHOTS)
def write_state_dict(side: Any, args: dict[str, Any]) -> None:
    """Write into the values of ``state_dict``, which changes an unsharded model."""
    if side.is_sharded:
        value = side.core.state_dict()[side.table(args["table"]).key]
        with torch.no_grad():
            getattr(value, "to_local", lambda: value)().fill_(args["value"])


@action(1.5, exact=True)
def save_and_load(side: Any, args: dict[str, Any]) -> Seen:
    """Keep a state_dict, continue training, and load the state back."""
    kept = {n: whole(x) for n, x in side.core.state_dict().items()}
    seen = step(side, args)
    side.core.load_state_dict(kept)
    return seen


@action(2.0, exact=True, plan=tuple(range(40)), by=("state_dict", "torch.save", "checkpoint"),
        optimizer=(True, True, False), fits=lambda p: not is_wrapped(p))
def move_to_fresh(side: Any, args: dict[str, Any]) -> None:
    """Load the state into a newly sharded model with another plan, which continues."""
    side.restart(args)


@action(1.5, exact=lambda a: a["budget"] is None, plan=tuple(range(40)),
        budget=(None, 64, 4096))
def migrate(side: Any, args: dict[str, Any]) -> Seen | None:
    """Move tables to another plan, at once or while two steps are trained."""
    if side.is_sharded:
        plans = side.new_plan(args["plan"])
        oper.migrate(side.core, plans, args["budget"])
    seen = None
    if args["budget"] is not None:
        step(side, args)
        seen = step(side, args, 1)
    if side.is_sharded:
        for module in side.sharded_modules():
            module.tables.finish_migration()
    return seen


@action(1.5)
def optimizer_state(side: Any, args: dict[str, Any]) -> Seen:
    """Keep the optimizer's state, continue training, and load the state back."""
    kept = side.keep_optimizer()
    seen = step(side, args)
    side.load_optimizer(kept)
    return seen | step(side, args, 1)


@action(1.5, factor=(0.5, 2.0))
def set_lr(side: Any, args: dict[str, Any]) -> Seen:
    """Set another learning rate for the tables."""
    side.set_lr(side.clock.param_groups[0]["lr"] * args["factor"])
    return step(side, args)


@action(1.0, factor=(0.5, 1.5), steps=(1, 2))
def schedule(side: Any, args: dict[str, Any]) -> Seen:
    """Run a LambdaLR over the tables' optimizer."""
    side.schedule(args["factor"], args["steps"])
    return step(side, args)


# ---- copies --------------------------------------------------------------------------------------


def _state_of(model: Any) -> Seen:
    return {f"copy's state {n}": whole(x) for n, x in model.state_dict().items()}


def _outputs_of(model: Any, batch: Batch) -> Seen:
    with torch.no_grad():
        return {f"copy's output {k}": x.clone()
                for k, x in enumerate(tensors_of(model(*batch.arguments)))}


@action(2.0, may_refuse=lambda a: False, fits=lambda p: not is_wrapped(p),
        write=("copy", "original", "none"))
def deepcopy(side: Any, args: dict[str, Any]) -> Seen:
    """Check that a copy keeps its numbers while the original is trained, and vice versa."""
    other = copy.deepcopy(side.core)
    seen = step(side, args)
    batch = side.batches(args)[side.mine]
    if args["write"] == "copy":
        with torch.no_grad():
            for p in other.parameters():
                p.fill_(args["value"])
    elif args["write"] == "original":
        with torch.no_grad():
            side.weight(side.table(args["table"])).fill_(args["value"])
    seen |= _state_of(other)
    if all(x is None or x.numel() for x in batch.lengths):
        seen |= _outputs_of(other, batch)
    _close(side, other)
    return seen


def _close(side: Any, model: Any) -> None:
    """Release the tables of a copy if they are sharded."""
    for module in model.modules() if side.is_sharded else []:
        tables = getattr(module, "tables", None)
        if tables is not None and tables is not getattr(side.module(side.tables[0]), "tables", 0):
            tables.close()


@action(2.0, fits=lambda p: not is_wrapped(p), steps=(1, 2, 3), ema=(False, True))
def average(side: Any, args: dict[str, Any]) -> Seen:
    """Average several steps by ``AveragedModel``, with equal or exponential weights."""
    averaged = AveragedModel(side.core, multi_avg_fn=get_ema_multi_avg_fn(0.75)
                             if args["ema"] else None)
    seen: Seen = {}
    for k in range(args["steps"]):
        seen |= {f"step {k} {n}": x for n, x in step(side, args, k).items()}
        averaged.update_parameters(side.core)
    seen |= _state_of(averaged.module)
    _close(side, averaged)
    return seen


@action(1.5, may_refuse=True, fits=lambda p: not is_wrapped(p),
        by=("pickle", "torch.save", "copy", "jit.trace"))
def serialise(side: Any, args: dict[str, Any]) -> Seen:
    """Pickle and unpickle, copy, or trace the whole model."""
    return _other_model(side, args)


@action(0.1, may_refuse=True, fits=lambda p: not is_wrapped(p), by=("jit.script",))
def script(side: Any, args: dict[str, Any]) -> Seen:
    """Compile the model by TorchScript, which takes a while."""
    return _other_model(side, args)


def _other_model(side: Any, args: dict[str, Any]) -> Seen:
    batch = side.batches(args | {"shapes": ["usual"] * side.world_size})[side.mine]
    by = args["by"]
    if by == "pickle":
        other = pickle.loads(pickle.dumps(side.core))
    elif by == "torch.save":
        file = io.BytesIO()
        torch.save(side.core, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    elif by == "copy":
        other = copy.copy(side.core)
    elif by == "jit.trace":
        other = torch.jit.trace(side.core, tuple(x for x in batch.arguments if x is not None),
                                check_trace=False)
    else:
        other = torch.jit.script(side.core)
    seen = step(side, args)
    if by != "jit.trace":
        seen |= _state_of(other)
    return seen | (_outputs_of(other, batch) if batch.ids[0].numel() else {})


@action(8.0, fits=lambda p: p.model["dense"] and p.wrapper == "" and p.dist)
def wrap(side: Any, args: dict[str, Any]) -> Seen:
    """Make two steps inside DistributedDataParallel, then continue without it."""
    if side.is_sharded:
        side.wrap("ddp after")
    seen = step(side, args) | {f"second {n}": x for n, x in step(side, args, 1).items()}
    if side.is_sharded:
        side.net, side.wrapper = side.core, ""
    return seen


@action(0.3, exact=True)
def checkpoint(side: Any, args: dict[str, Any]) -> Seen:
    """Write a checkpoint, continue training, and load the checkpoint."""
    seen: Seen = {}
    side.checkpoint(lambda: seen.update(step(side, args)))
    return seen
