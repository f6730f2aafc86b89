"""Programs: a model, an optimizer, a plan and a list of actions, all plain data."""

import pprint
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np

# Importing these modules registers their actions.
from tests.programs import copies, training, weights
from tests.programs.models import Spec, draw_model
from tests.programs.optimizers import draw_optimizer
from tests.programs.table import ACTIONS

assert copies and training and weights
MIN_ACTIONS, MAX_ACTIONS = 4, 14


@dataclass(frozen=True)
class Program:
    """A program; its ``repr`` is Python code that creates it.

    Attributes:
        model: see `models.draw_model`.
        optimizer: see `optimizers.draw_optimizer`.
        actions: names and arguments.
        plan: seed of the plan.
        world_size: number of ranks.
        wrapper: "", "ddp before", "ddp after" or "dmp".
        dist: whether there is a process group with one rank.
    """

    model: Spec
    optimizer: dict[str, Any]
    actions: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    plan: int = 0
    world_size: int = 1
    wrapper: str = ""
    dist: bool = False

    def text(self) -> str:
        """Format the program as a Python expression, one action per line."""
        rest = {"model": self.model, "optimizer": self.optimizer, "plan": self.plan,
                "world_size": self.world_size, "wrapper": self.wrapper, "dist": self.dist}
        lines = [f"    {k}={pprint.pformat(v, width=92, compact=True, sort_dicts=False)},"
                 for k, v in rest.items()]
        actions = [f"        {a!r}," for a in self.actions]
        return "\n".join(["Program(", *lines, "    actions=[", *actions, "    ])"])


def draw_program(seed: int, world_size: int, only: str | None = None,
                 skip: Collection[str] = ()) -> Program:
    """Draw the program of a seed.

    Args:
        seed: seed of all choices.
        world_size: number of ranks.
        only: an action that is drawn as often as all others together.
        skip: actions that are not drawn.
    """
    rng = np.random.default_rng([seed, world_size])
    model = draw_model(rng)
    optimizer = draw_optimizer(rng)
    wrapper, dist = "", world_size > 1
    if model["dense"] and rng.random() < (0.3 if world_size > 1 else 0.1):
        choices = ["ddp before", "ddp after"] + ["dmp"] * (world_size > 1)
        wrapper = str(rng.choice(choices))
    dist |= bool(wrapper) or rng.random() < 0.15
    program = Program(model, optimizer, [], int(rng.integers(0, 1 << 20)), world_size, wrapper,
                      dist)
    fitting = [a for a in ACTIONS.values() if a.fits(program) and a.name not in skip]
    chance = np.array([a.weight for a in fitting])
    if only in [a.name for a in fitting]:
        chance[[a.name == only for a in fitting]] = chance.sum()
    chance /= chance.sum()
    for _ in range(int(rng.integers(MIN_ACTIONS, MAX_ACTIONS + 1))):
        action = fitting[int(rng.choice(len(fitting), p=chance))]
        program.actions.append((action.name, action.draw(rng, world_size)))
    return program
