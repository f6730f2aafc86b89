"""The table of actions: what a user may do, and what the oracle allows.

An action is a function of a side and of drawn arguments, which returns what a user would see. It is
written once and run on both sides.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.programs.models import SHAPES, Spec

Seen = dict[str, Any]  # what an action has shown; names that begin with "=" are compared exactly


@dataclass(frozen=True)
class Action:
    """One kind of action.

    Attributes:
        name: name in programs and reports.
        run: called as ``run(side, args)``.
        weight: relative frequency with which it is drawn.
        choices: arguments in addition to the common ones, each drawn from a sequence.
        may_refuse: whether OPER may raise an `OperError` where torch does not, by arguments.
        exact: whether rows must agree bit for bit afterwards, by arguments.
        fits: whether a program may contain it, by program.
        otherwise: what OPER may do instead if torch refuses: another ``run``, or None.
        difference: number of the difference in `differences.DIFFERENCES` that `run` expects.
    """

    name: str
    run: Callable[[Any, dict[str, Any]], Seen | None]
    weight: float
    choices: Mapping[str, Sequence[Any]]
    may_refuse: Callable[[dict[str, Any]], bool]
    exact: Callable[[dict[str, Any]], bool]
    fits: Callable[[Any], bool]
    otherwise: Callable[[Any, dict[str, Any]], Seen | None] | None = None
    difference: int | None = None

    def draw(self, rng: np.random.Generator, world_size: int) -> dict[str, Any]:
        """Draw arguments, as plain data."""
        args: dict[str, Any] = {
            "seed": int(rng.integers(0, 1 << 20)),
            "shapes": [str(rng.choice(SHAPES)) for _ in range(world_size)],
            "table": int(rng.integers(0, 6)), "value": int(rng.integers(-8, 9)) / 8}
        for name, values in self.choices.items():
            args[name] = values[int(rng.integers(len(values)))]
        return args


ACTIONS: dict[str, Action] = {}


def action(weight: float = 1.0, may_refuse: bool | Callable[[dict[str, Any]], bool] = False,
           exact: bool | Callable[[dict[str, Any]], bool] = False,
           fits: Callable[[Any], bool] = lambda program: True,
           otherwise: Any = None, difference: int | None = None, **choices: Sequence[Any]) -> Any:
    """Register a function in the table under its own name."""
    def enter(run: Any) -> Any:
        allowed, bitwise = (f if callable(f) else _always(f) for f in (may_refuse, exact))
        assert run.__name__ not in ACTIONS, run.__name__
        ACTIONS[run.__name__] = Action(run.__name__, run, weight, choices, allowed, bitwise, fits,
                                       otherwise, difference)
        return run

    return enter


def _always(value: bool) -> Callable[[dict[str, Any]], bool]:
    return lambda args: value


def is_wrapped(program: Any) -> bool:
    """Whether the sharded model is inside a data-parallel wrapper."""
    return bool(program.wrapper)


def has_dense(program: Any) -> bool:
    """Whether there is a dense layer."""
    return bool(program.model["dense"])


def has_weights(program: Any) -> bool:
    """Whether a module takes per-sample weights as a tensor that the program can access."""
    model: Spec = program.model
    return any(e.get("weighted") for e in model["embs"]) and (
        model["container"] != "sequential" or model["embs"][0]["kind"] == "ebc")
