"""Shrink a failing program: fewer actions, a simpler model, simpler arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tests.programs.program import Program
from tests.programs.table import ACTIONS

_SGD = {"kind": "sgd", "by": "argument", "arguments": {"lr": 0.25}}
# The plainest value of each field of a model; elements of lists are removed where possible.
_PLAIN = {"dense": "", "half": False, "padding": None, "weighted": False, "last": False,
          "mode": "sum", "subclass": "", "need_indices": False, "rows": 4, "dim": 1}


def shrink(program: Program, fails: Callable[[Program], bool], budget: int = 250) -> Program:
    """Return the smallest program found that fails in the same way.

    Args:
        program: a program that fails.
        fails: whether a program fails in that way; false for one that cannot be built.
        budget: maximum number of programs to try.
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
    """Yield slightly simpler programs, the largest simplifications first."""
    actions = program.actions
    for size in (len(actions) // 2, len(actions) // 4, 2, 1):
        for begin in range(0, len(actions), size) if size else ():
            yield replace(program, actions=actions[:begin] + actions[begin + size:])
    model = program.model
    models = list(_plainer(model))
    if len(model["embs"]) == 1 and not model["dense"]:
        models.append(model | {"container": "bare"})
    simpler: dict[str, list[Any]] = {
        "wrapper": [""], "dist": [False], "plan": [0], "model": models,
        "optimizer": [_SGD, program.optimizer | {"by": "argument"}]}
    for name, values in simpler.items():
        for value in values:
            if getattr(program, name) != value:
                yield replace(program, **{name: value})
    for k, (name, args) in enumerate(actions):
        usual = {"table": 0, "seed": 1, "shapes": ["usual"] * len(args["shapes"])} | {
            n: values[0] for n, values in ACTIONS[name].choices.items()}
        one = {"shapes": ["one"] * len(args["shapes"])}
        for change in (*({key: value} for key, value in usual.items()), one):
            if args | change != args:
                yield replace(program, actions=[
                    *actions[:k], (name, args | change), *actions[k + 1:]])


def _plainer(data: Any) -> Iterator[Any]:
    """Yield dictionaries with one value replaced by that of `_PLAIN`, lists without one element,
    and the same for nested values."""
    if isinstance(data, dict):
        for name, value in data.items():
            if value != _PLAIN.get(name, value):
                yield data | {name: _PLAIN[name]}
            for inner in _plainer(value):
                yield data | {name: inner}
    elif isinstance(data, list):
        for k, value in enumerate(data):
            if len(data) > 1:
                yield data[:k] + data[k + 1:]
            for inner in _plainer(value):
                yield [*data[:k], inner, *data[k + 1:]]
