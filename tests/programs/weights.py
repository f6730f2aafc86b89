"""Actions on tables as parameters: reading, writing, freezing, replacing, counting."""

from typing import Any

import torch
from torch import nn

from tests.programs.differences import DTYPE
from tests.programs.models import LISTS, tensors_of, whole
from tests.programs.table import Seen, action, is_wrapped
from tests.programs.training import finish, forward, step

HOW = ("attribute", "named", "get")


def _random(side: Any, args: dict[str, Any], number: int | None = None) -> torch.Tensor:
    """Draw new values for a table, in its dtype."""
    table = side.table(args["table"] if number is None else number)
    rng = torch.Generator().manual_seed(args["seed"] + (number or 0))
    values = torch.randn(table.rows, table.dim, generator=rng) * 0.5
    return values.half() if table.half else values


@action(2.0, exact=True, how=HOW)
def read_weight(side: Any, args: dict[str, Any]) -> Seen:
    """Read a table's weights in the ways in which users do."""
    w = side.weight(side.table(args["table"]), args["how"])
    return {"=weight": w.detach().clone(), "=row": w[1].tolist(), "=shape": tuple(w.shape),
            "=dtype": w.dtype, "=device": w.device.type, "=requires_grad": w.requires_grad,
            "sum": w.detach().float().sum(), "=is_leaf": w.is_leaf, "=grad": w.grad is None,
            "=numpy": w.detach().numpy().tolist(), "=len": len(w)}


def _exchange(w: Any, x: torch.Tensor, v: float) -> None:
    """Exchange the data for other values and back, as for evaluating an average."""
    kept = w.data
    w.data = x.clone()
    w.data.add_(v)
    kept[0].add_(1)
    w.data = kept


WRITES = {
    "fill_": lambda w, x, v: w.fill_(v),
    "w[i] = x": lambda w, x, v: w.__setitem__(1, x[1]),
    "w[mask] = x": lambda w, x, v: w.__setitem__(w[:, 0] > 0, v),
    "w[:, j] = x": lambda w, x, v: w.__setitem__((slice(None), 0), v),
    "copy_": lambda w, x, v: w.copy_(x),
    "data.copy_": lambda w, x, v: w.data.copy_(x),
    "data = x": lambda w, x, v: setattr(w, "data", x.clone()),
    "data exchanged": _exchange,
    "data[i] += 1": lambda w, x, v: w.data.__setitem__(2, w.data[2] + 1),
    "data[i] add": lambda w, x, v: w.data[0].add_(1),
    "data mul": lambda w, x, v: w.data.mul_(0.5),
    "mul_": lambda w, x, v: w.mul_(0.5),
    "view": lambda w, x, v: w[:2].zero_(),
    "view of view": lambda w, x, v: w[1:][0].copy_(x[1]),
    "flat view": lambda w, x, v: w.view(-1)[:3].fill_(v),
    "transposed": lambda w, x, v: w.t()[0].fill_(v),
    "detach": lambda w, x, v: w.detach().copy_(x),
    "detach row": lambda w, x, v: w.detach()[1].fill_(v),
    "init zeros": lambda w, x, v: nn.init.zeros_(w),
    "init normal": lambda w, x, v: nn.init.normal_(w),
    "init xavier": lambda w, x, v: nn.init.xavier_uniform_(w),
    "clamp": lambda w, x, v: w.clamp_(-0.1, 0.1),
    "torch.add out": lambda w, x, v: torch.add(x, x, out=w),
    "index_copy_": lambda w, x, v: w.index_copy_(0, torch.tensor([2, 0]), x[:2]),
    "w[a:b:c] = x": lambda w, x, v: w[0::2].fill_(v),
    "negative row": lambda w, x, v: w[-1].zero_(),
    "split": lambda w, x, v: w.split(2)[1].zero_(),
    "itself": lambda w, x, v: w.mul_(w),
    "lerp": lambda w, x, v: torch._foreach_lerp_([w], [x], 0.25),
    "index_fill_": lambda w, x, v: w.index_fill_(0, torch.tensor([1]), v),
    "foreach": lambda w, x, v: torch._foreach_add_([w], 1.0),
    "kept": lambda w, x, v: (w.fill_(v), w[0].add_(1), w[:1].mul_(2)),
}


@action(4.0, exact=True, how=HOW, write=tuple(WRITES), no_grad=(True, True, True, False),
        may_refuse=lambda a: a["write"] in ("torch.add out", "foreach", "lerp"))
def write_weight(side: Any, args: dict[str, Any]) -> Seen:
    """Write a table's weights in the ways in which users do."""
    values = _random(side, args)
    torch.manual_seed(args["seed"])
    with torch.set_grad_enabled(not args["no_grad"] and "init" not in args["write"]):
        weight = side.weight(side.table(args["table"]), args["how"])
        WRITES[args["write"]](weight, values, args["value"])
    return {"=read again": weight.detach().clone()}


@action(1.0)
def write_old_handle(side: Any, args: dict[str, Any]) -> Seen:
    """Get a weight before a training step, then read and write it after the step."""
    table = side.table(args["table"])
    weight = side.weight(table)
    row = weight.detach()[0]
    step(side, args)
    with torch.no_grad():
        seen: Seen = {"old": weight.detach().clone(), "old row": row.clone()}
        weight.fill_(args["value"])
        weight[1] = 0.5
    return seen


@action(1.5, exact=True, how=("hasattr", "isinstance", "parameters", "named", "reset", "tables"))
def initialise(side: Any, args: dict[str, Any]) -> Seen | None:
    """Call ``model.apply(init)`` and similar methods."""
    def init(module: nn.Module) -> None:
        is_table = hasattr(module, "weight") if args["how"] == "hasattr" else (
            isinstance(module, nn.Embedding | nn.EmbeddingBag))
        if is_table:
            nn.init.constant_(module.weight, args["value"])

    if args["how"] in ("hasattr", "isinstance"):
        side.core.apply(init)
    elif args["how"] == "parameters":
        for p in side.core.parameters():
            nn.init.constant_(p, args["value"])
    elif args["how"] == "named":
        for name, p in side.core.named_parameters():
            if not name.endswith("bias"):
                nn.init.constant_(p, args["value"])
    elif args["how"] == "tables":
        for table in side.tables:
            module = side.module(table)
            if table.kind in LISTS:
                module = getattr(module, LISTS[table.kind])
            for p in module.parameters():
                nn.init.constant_(p, args["value"])
    else:
        torch.manual_seed(args["seed"])
        for table in side.tables:
            if table.kind in ("bag", "embedding"):
                side.module(table).reset_parameters()
    return None


# ---- freezing ------------------------------------------------------------------------------------


@action(3.0, how=("parameter", "named", "module", "model", "requires_grad ="),
        on=(False, False, True))
def freeze(side: Any, args: dict[str, Any]) -> Seen:
    """Set ``requires_grad_`` of a table, its module or the model off or on, and make a step."""
    table, on = side.table(args["table"]), args["on"]
    how = args["how"]
    if how == "module":
        side.module(table).requires_grad_(on)
    elif how == "model":
        side.core.requires_grad_(on)
        for p in side.dense():  # which wrappers have to know of
            p.requires_grad_()
    elif how == "requires_grad =":
        side.weight(table).requires_grad = on
    else:
        side.weight(table, "named" if how == "named" else "attribute").requires_grad_(on)
    return step(side, args)


@action(1.5, on=(False, True))
def freeze_between(side: Any, args: dict[str, Any]) -> Seen:
    """Call ``requires_grad_`` between forward and backward pass."""
    table = side.table(args["table"])
    weight = side.weight(table)
    weight.requires_grad_(not args["on"])
    outs, loss = forward(side, side.batches(args))
    side.weight(table).requires_grad_(args["on"])
    return finish(side, outs, loss)


@action(1.5)
def unfreeze_all(side: Any, args: dict[str, Any]) -> Seen:
    """Call ``requires_grad_()`` on the model, and make a step."""
    side.core.requires_grad_(True)
    return step(side, args)


# ---- counting and grouping -----------------------------------------------------------------------


@action(2.0, exact=True)
def count(side: Any, args: dict[str, Any]) -> Seen:
    """Return the contents of the lists of parameters and states."""
    named = dict(side.core.named_parameters())
    return {
        "=names": list(named), "=numel": sum(p.numel() for p in side.core.parameters()),
        "=trained": [n for n, p in named.items() if p.requires_grad],
        "=shapes": {n: tuple(p.shape) for n, p in named.items()},
        "=dtypes": {n: p.dtype for n, p in named.items()},
        "=are parameters": [n for n, p in named.items() if isinstance(p, nn.Parameter)],
        "=state": list(side.core.state_dict()),
        "=state shapes": {n: tuple(x.shape) for n, x in side.core.state_dict().items()},
        "=buffers": [n for n, _ in side.core.named_buffers()],
        "=grads": [n for n, p in named.items() if p.grad is not None]}


@action(1.0, exact=True)
def state_dict(side: Any, args: dict[str, Any]) -> Seen:
    """Return the values of ``state_dict`` as whole tensors."""
    found = side.core.state_dict()
    return {f"={name}": whole(x) for name, x in found.items()}


# ---- replacing -----------------------------------------------------------------------------------


@action(1.0, may_refuse=True, exact=True)
def functional_call(side: Any, args: dict[str, Any]) -> Seen:
    """Call ``torch.func.functional_call`` with other weights for a table."""
    batch = side.batches(args)[side.mine]
    with torch.no_grad():
        out = torch.func.functional_call(
            side.core, {side.table(args["table"]).key: _random(side, args)}, batch.arguments)
        return {f"output {k}": x.clone() for k, x in enumerate(tensors_of(out))}


@action(0.7, may_refuse=True, exact=True)
def swap_tensors(side: Any, args: dict[str, Any]) -> None:
    """Call ``torch.utils.swap_tensors`` on a table and new weights."""
    other = nn.Parameter(_random(side, args))
    torch.utils.swap_tensors(side.weight(side.table(args["table"])), other)


@action(1.5, may_refuse=True, exact=True,
        what=("parameter", "tensor", "delete", "none", "register"))
def assign_weight(side: Any, args: dict[str, Any]) -> None:
    """Assign or delete a weight."""
    owner = side.owner(side.table(args["table"]))
    values = _random(side, args)
    if args["what"] == "parameter":
        owner.weight = nn.Parameter(values)
    elif args["what"] == "tensor":
        owner.weight = values
    elif args["what"] == "delete":
        del owner.weight
    elif args["what"] == "none":
        owner.weight = None
    else:
        owner.register_parameter("weight", nn.Parameter(values))


# A dense layer that torch comes to before it comes to a table is converted by then.
@action(2.0, exact=True, fits=lambda p: not is_wrapped(p) and p.model["dense"] != "before",
        difference=DTYPE, call=("cpu", "to cpu", "float", "half", "double", "to float16", "to meta",
                                "bfloat16", "type", "share", "to_empty"),
        may_refuse=lambda a: a["call"] not in ("cpu", "to cpu"))
def convert(side: Any, args: dict[str, Any]) -> Seen | None:
    """Call ``.to`` and similar methods."""
    model, name = side.core, args["call"]
    if name in ("cpu", "float", "half", "double", "bfloat16"):
        getattr(model, name)()
    elif name == "share":
        model.share_memory()
    elif name == "to_empty":
        model.to_empty(device="meta")
    elif name == "type":
        model.type(torch.float64)
    else:
        model.to({"to cpu": "cpu", "to float16": torch.float16, "to meta": "meta"}[name])
    return {"=dtypes": [p.dtype for p in side.dense()]}
