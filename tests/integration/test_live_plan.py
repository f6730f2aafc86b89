"""`oper.migrate` changes the plan of several collections during training on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import oper
from oper.errors import InvalidInputError, PlanError
from oper.plan import uniform_plan
from oper.tables import TableSpec
from tests.checkpoint_support import Model, flat, sharded, state_of, train
from tests.runtime_support import assert_bitwise
from tests.world_support import run_world


def _trained(rank: int, world_size: int, move_to: str | None) -> dict[str, torch.Tensor]:
    model = sharded(world_size, 1)
    if move_to is not None:
        train(model, rank, world_size, range(2))
        kinds = [module.tables.page_kind for module in _sharded(model)]
        tables = [t.table for module in _sharded(model) for t in module.tables.plan.tables]
        plan = uniform_plan(tables, world_size, move_to)
        with pytest.raises(PlanError):  # the last collection's table is missing: none moves
            oper.migrate(model, uniform_plan(tables[:-1], world_size))
        assert all(module.tables.migration is None for module in _sharded(model))
        oper.migrate(model, plan, bytes_per_step=36_000)
        train(model, rank, world_size, range(2, 8))
        for module in _sharded(model):
            assert module.tables.migration is None, "the move has ended"
            entries = module.tables.plan.tables
            assert {x.placement for t in entries for x in t.tiers} == {move_to}
        assert [module.tables.page_kind for module in _sharded(model)] == kinds
        oper.migrate(model, uniform_plan(tables, world_size, "owned"))
    else:
        train(model, rank, world_size, range(8))
    train(model, rank, world_size, range(8, 10))
    return flat(state_of(model))


def _sharded(model: Model) -> list[Any]:
    return [model.bags, model.items, model.places]


@pytest.mark.parametrize("move_to", ["striped", "replicated"])
def test_training_goes_on_bitwise(move_to: str) -> None:
    for got, want in zip(run_world(2, _trained, move_to), run_world(2, _trained, None),
                         strict=True):
        assert_bitwise(got, want, f"moved to {move_to}")


def test_models_without_sharded_tables_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="nothing to move"):
        oper.migrate(nn.Linear(2, 2), uniform_plan([TableSpec("t", 3, 4)], 1))
