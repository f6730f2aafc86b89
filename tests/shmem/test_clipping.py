"""Gradient clipping: by element as in FBGEMM, by the norm of a row's gradient as in torch."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import oper
from oper.errors import InvalidInputError
from oper.plan import Piece, Plan, TablePlan, Tier, uniform_plan
from oper.shmem.batch import Lookup
from oper.shmem.group.groups import SingleGroup
from oper.shmem.optim.optimizers import SGD, Adam, RowWiseAdagrad
from oper.shmem.tables import ShardedTables
from oper.tables import TableSpec
from tests.optimizer_support import assert_close, train_sharded
from tests.runtime_support import (
    Case,
    initial_weights,
    make_steps,
    mixed_plan,
    rich_plan,
    train_reference,
)
from tests.shmem.test_optimizers import fbgemm_peer

ELEMENT, NORM = 0.02, 0.05


def case_of(weighted: bool = False) -> Case:
    shapes = [("narrow", 40, 1, ("n",), "mean"), ("two", 100, 16, ("a", "b"), "sum"),
              ("left", 60, 64, ("shared",), "mean"), ("right", 70, 37, ("shared",), "sum")]
    return Case(tuple(TableSpec(n, r, d, f, p) for n, r, d, f, p in shapes),
                ("b", "unused", "shared", "n", "a"), weighted)


BASES = {"sgd": SGD(lr=0.3), "rowwise": RowWiseAdagrad(lr=0.05, eps=1e-8),
         "rowwise l2": RowWiseAdagrad(lr=0.05, eps=1e-8, weight_decay=0.2), "adam": Adam(lr=0.02)}


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("limits", [(ELEMENT, None), (None, NORM), (ELEMENT, NORM)],
                         ids=["elements", "rows", "both"])
@pytest.mark.parametrize("base", BASES)
def test_clipping_equals_its_definition(base: str, limits: tuple, world_size: int) -> None:
    """Covers duplicates, ranks, push tiers and column splits; only some values are clipped."""
    optimizer = replace(BASES[base], max_gradient=limits[0], max_row_norm=limits[1])
    case = case_of(weighted=base == "sgd")
    steps = make_steps(case, world_size, 3)
    want = train_reference(case, steps, optimizer, torch.float64)
    for plan in (mixed_plan(case.tables, world_size, 1),
                 rich_plan(case.tables, world_size, 2, True),
                 split_plan(case, world_size)):
        assert_close(train_sharded(case, plan, steps, optimizer), want, 2e-5)
    free = train_reference(case, steps, BASES[base], torch.float64)
    assert (free.weights["two"] - want.weights["two"]).abs().max() > 1e-3


def split_plan(case: Case, world_size: int) -> Plan:
    """A plan that splits tables of more than four columns into two pieces on different ranks."""
    entries = []
    for t in case.tables:
        cut = [0, t.dim // 2 // 4 * 4 + 4, t.dim] if t.dim > 4 else [0, t.dim]
        entries.append(TablePlan(t, tuple(
            Piece(a, b, (Tier(0, t.num_rows, "owned", (k % world_size,)),))
            for k, (a, b) in enumerate(itertools.pairwise(cut)))))
    return Plan(world_size, tuple(entries))


def test_each_table_has_its_own_limits() -> None:
    """Each table has its own limit, in pooled and unpooled lookups."""
    tables = (TableSpec("a", 9, 4, ("f", "g"), "sum", optimizer="sgd"),
              TableSpec("b", 9, 4, ("f",), "sum", optimizer="sgd"))
    for pooled in (True, False):
        opened = ShardedTables(
            uniform_plan(tables, 1), [("f", "a"), ("g", "a"), ("f", "b")], SingleGroup(),
            {"a": SGD(1.0, max_gradient=0.25), "b": SGD(1.0)}, 1.0)
        batch = Lookup(torch.tensor([1, 2, 3]), torch.tensor([1, 0, 1, 1]), torch.tensor([0, 1, 0]),
                       2, None, pooled)
        out = opened.lookup(batch)
        out.backward(torch.full_like(out, -7.0))
        assert opened.read("a")[:, 0].tolist() == [0, .25, .25, .25, 0, 0, 0, 0, 0], pooled
        assert opened.read("b")[:, 0].tolist() == [0, 7, 0, 0, 0, 0, 0, 0, 0], pooled
        empty = Lookup(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64),
                       torch.tensor([0, 1, 0]), 0, None, pooled)
        opened.lookup(empty).sum().backward()


@pytest.mark.parametrize("mean", [False, True])
def test_equals_fbgemm(mean: bool) -> None:
    """Results equal FBGEMM's operator with gradient_clipping, including the weights' gradient."""
    common = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_common")
    torch.manual_seed(0)
    case = Case((TableSpec("t", 50, 8, ("f",)),), ("f",))
    theirs = fbgemm_peer(
        case, SGD(lr=0.5), gradient_clipping=True, max_gradient=0.3,
        pooling_mode=common.PoolingMode.MEAN if mean else common.PoolingMode.SUM)
    bag = torch.nn.EmbeddingBag(50, 8, mode="mean" if mean else "sum",
                                _weight=initial_weights(case)["t"])
    ours = oper.shard(bag, optimizer=oper.SGD(lr=0.5, max_gradient=0.3))
    ids, offsets = torch.randint(0, 50, (60,)), torch.arange(0, 61, 3)
    scales = [None, None] if mean else [torch.rand(60).requires_grad_()] * 2
    scales = [None if s is None else s.detach().clone().requires_grad_() for s in scales]
    grad = torch.randn(20, 8)
    theirs(ids, offsets, scales[0]).backward(grad)
    ours(ids, offsets[:-1], scales[1]).backward(grad)
    assert torch.allclose(ours.state_dict()["weight"], theirs.split_embedding_weights()[0],
                          rtol=1e-5, atol=1e-6)
    if not mean:
        assert torch.allclose(scales[1].grad, scales[0].grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("limits", [{"max_gradient": 0.0}, {"max_row_norm": -1.0},
                                    {"max_gradient": math.nan}, {"max_row_norm": "1"}])
def test_invalid_limits_are_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(limits))):
        SGD(**limits)
