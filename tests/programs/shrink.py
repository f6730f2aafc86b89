"""Makes a failing program small: fewer actions, a plainer model, plainer arguments."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tests.programs.program import Program
from tests.programs.table import ACTIONS


def shrink(program: Program, fails: Callable[[Program], bool], budget: int = 250) -> Program:
    """The smallest program found that fails in the same way.

    Args:
        program: fails.
        fails: whether a program does.
        budget: programs tried at most.
    """
    tries = 0
    improved = True
    while improved and tries < budget:
        improved = False
        for candidate in _smaller(program):
            tries += 1
            if tries > budget:
                break
            if fails(candidate):
                program, improved = candidate, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    """Programs that are a little simpler, the greatest steps first."""
    actions = program.actions
    for size in (len(actions) // 2, len(actions) // 4, 2, 1):
        for begin in range(0, len(actions), size) if size else ():
            yield replace(program, actions=actions[:begin] + actions[begin + size:])
    for name, plain in (("wrapper", ""), ("dist", False), ("plan", 0)):
        if getattr(program, name) != plain:
            yield replace(program, **{name: plain})
    plain_sgd = {"kind": "sgd", "by": "argument", "arguments": {"lr": 0.25}}
    for optimizer in (plain_sgd, program.optimizer | {"by": "argument"}):
        if program.optimizer != optimizer:
            yield replace(program, optimizer=optimizer)
    for model in _plainer_models(program.model):
        yield replace(program, model=model)
    for k, (name, args) in enumerate(actions):
        for plainer in _plainer_arguments(name, args):
            yield replace(program, actions=[*actions[:k], (name, plainer), *actions[k + 1:]])


def _plainer_models(model: dict[str, Any]) -> Iterator[dict[str, Any]]:
    embs = model["embs"]
    for k in range(len(embs)) if len(embs) > 1 else ():
        yield model | {"embs": [embs[k]]}
    if model["dense"]:
        yield model | {"dense": ""}
    if len(embs) == 1 and not model["dense"] and model["container"] != "bare":
        yield model | {"container": "bare"}
    for k, emb in enumerate(embs):
        for plainer in _plainer_embeddings(emb):
            yield model | {"embs": [*embs[:k], plainer, *embs[k + 1:]]}


def _plainer_embeddings(emb: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name, plain in (("half", False), ("padding", None), ("weighted", False), ("last", False),
                        ("mode", "sum"), ("subclass", ""), ("need_indices", False), ("rows", 4),
                        ("dim", 1)):
        if emb.get(name, plain) != plain:
            yield emb | {name: plain}
    tables = emb.get("tables", [])
    for k in range(len(tables)) if len(tables) > 1 else ():
        yield emb | {"tables": tables[:k] + tables[k + 1:]}
    for k, table in enumerate(tables):
        for name, plain in (("features", table["features"][:1]), ("mode", "sum"), ("rows", 4)):
            if table[name] != plain:
                changed = copy.deepcopy(tables)
                changed[k][name] = plain
                yield emb | {"tables": changed}
    if tables and any(t["dim"] > 1 for t in tables):
        yield emb | {"tables": [t | {"dim": 1} for t in tables]}


def _plainer_arguments(name: str, args: dict[str, Any]) -> Iterator[dict[str, Any]]:
    plain: dict[str, Any] = {"table": 0, "seed": 1, "shapes": ["usual"] * len(args["shapes"])}
    plain |= {n: values[0] for n, values in ACTIONS[name].choices.items()}
    for key, value in plain.items():
        if args[key] != value:
            yield args | {key: value}
    if args["shapes"] != ["one"] * len(args["shapes"]):
        yield args | {"shapes": ["one"] * len(args["shapes"])}
