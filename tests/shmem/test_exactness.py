"""Sharded training gives the numbers of the unsharded run, for every plan and world size."""

from __future__ import annotations

import functools

import pytest
import torch

from oper.plan import Plan, uniform_plan
from oper.shmem.group.groups import ProcessGroup, SingleGroup
from oper.shmem.optim.optimizers import SGD
from oper.tables import TableSpec
from tests.runtime_support import (
    OPTIMIZERS,
    OTHER_OPTIMIZERS,
    Batch,
    Case,
    Result,
    assert_bitwise,
    assert_exact,
    dlrm_case,
    initial_weights,
    make_batch,
    make_steps,
    merge_ranks,
    mixed_plan,
    open_tables,
    plans_for,
    rank_loss,
    reference_forward,
    train_rank,
    train_reference,
    train_virtual,
)
from tests.world_support import run_world

STEPS = 20
PLANS = ("replicated", "striped", "owned", "mixed0", "mixed1", "mixed2")


@functools.cache
def references(case: Case, world_size: int, optimizer: str, num_steps: int
               ) -> tuple[list[list[Batch]], Result, Result]:
    steps = make_steps(case, world_size, num_steps)
    args = (case, steps, (OPTIMIZERS | OTHER_OPTIMIZERS)[optimizer])
    return steps, train_reference(*args), train_reference(*args, torch.float64)


def check(case: Case, plan: Plan, optimizer: str, num_steps: int = STEPS) -> Result:
    steps, fp32, fp64 = references(case, plan.world_size, optimizer, num_steps)
    got = train_virtual(case, plan, steps, (OPTIMIZERS | OTHER_OPTIMIZERS)[optimizer])
    assert_exact(case, got, fp32, fp64)
    return got


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_training_equals_the_unsharded_run(world_size: int, plan: str, optimizer: str) -> None:
    case = dlrm_case(optimizer)
    num_steps = STEPS if world_size == 2 else 8  # errors of many add up alike in any world
    check(case, plans_for(case.tables, world_size)[plan], optimizer, num_steps)


def test_the_cases_have_what_they_promise() -> None:
    # The tests above prove little if their batches lack the awkward parts.
    case = dlrm_case()
    steps = make_steps(case, 4, STEPS)
    sizes = {b.size for step in steps for b in step}
    assert 0 in sizes and len(sizes) > 2
    lengths = torch.cat([b.lengths for step in steps for b in step])
    assert (lengths == 0).float().mean() > 0.2 and lengths.max() == case.max_length
    features = [f for f, _ in case.features]
    assert len(set(features)) < len(features) and set(case.keys) - set(features)
    assert [k for k in case.keys if k in features] != list(dict.fromkeys(features))
    start, end = initial_weights(case), references(case, 4, "sgd", STEPS)[1].weights
    untouched = [(start[t] == end[t]).all(1).any().item() for t in start]
    assert any(untouched) and all((start[t] != end[t]).any() for t in start)
    placements = {(x.placement, bool(x.weights)) for seed in range(3)
                  for t in mixed_plan(case.tables, 4, seed).tables for x in t.tiers}
    assert placements == {("replicated", False), ("owned", False), ("striped", False),
                          ("striped", True)}


@pytest.mark.parametrize("weighted", [False, True])
def test_many_bags_and_long_bags(weighted: bool) -> None:
    """More bags than one task takes, and bags longer than one block of resolved ids."""
    tables = (TableSpec("t", 9000, 24, ("f",), "sum"), TableSpec("m", 700, 16, ("g",), "mean"))
    many = Case(tables, ("g", "f"), weighted, max_length=6, base_batch=1500)
    check(many, mixed_plan(tables, 2, 1), "rowwise_adagrad", num_steps=4)
    few = Case(tables, ("f", "g"), weighted, max_length=3000, base_batch=3)
    check(few, mixed_plan(tables, 2, 2), "rowwise_adagrad", num_steps=4)


@pytest.mark.parametrize("weighted", [False, True])
def test_keys_and_bags_that_need_more_than_32_bits(weighted: bool) -> None:
    tables = (TableSpec("t", 1 << 20, 4, ("f", "g"), "sum", optimizer="sgd"),)
    case = Case(tables, ("g", "f"), weighted, max_length=2, base_batch=4100)
    check(case, uniform_plan(tables, 2, "striped"), "sgd", num_steps=3)


def test_dims_that_are_no_multiple_of_four() -> None:
    tables = tuple(TableSpec(f"t{d}", 50, d, (f"f{d}",), "sum") for d in (1, 2, 3, 5, 17, 31, 1023))
    case = Case(tables, tuple(f"f{t.dim}" for t in tables))
    check(case, mixed_plan(tables, 2, 3), "rowwise_adagrad", num_steps=5)


def test_a_backward_pass_uses_its_own_batch() -> None:
    """Two forwards before two backwards: gradient accumulation in the manner of DDP."""
    case = dlrm_case("sgd")
    (first,), (second,) = make_steps(case, 1, 2)
    second = make_batch(case, 99, 9)
    lr = SGD(lr=0.3)
    sharded = open_tables(case, uniform_plan(case.tables, 1), SingleGroup(), lr)
    outs = [sharded.lookup(b.lookup(case)) for b in (first, second)]
    for out, batch in zip(outs, (first, second), strict=True):
        rank_loss(out, batch.target).backward()
    weights = {n: w.requires_grad_() for n, w in initial_weights(case).items()}
    for batch in (first, second):
        rank_loss(reference_forward(case, weights, batch), batch.target).backward()
    for name, w in weights.items():
        want = (w - lr.lr * w.grad).detach()
        assert torch.allclose(sharded.read(name), want, rtol=1e-5, atol=1e-5), name


def _world_body(rank: int, world_size: int, case: Case, plan: Plan, steps: list[list[Batch]],
                optimizer: str) -> Result:
    return train_rank(case, plan, steps, (OPTIMIZERS | OTHER_OPTIMIZERS)[optimizer], ProcessGroup())


@pytest.mark.parametrize("world_size, plan, optimizer", [
    (2, "mixed0", "lamb"), (4, "mixed1", "rowwise_adagrad")])
def test_processes_equal_virtual_ranks(world_size: int, plan: str, optimizer: str) -> None:
    case = dlrm_case(optimizer)
    chosen = plans_for(case.tables, world_size)[plan]
    steps, fp32, fp64 = references(case, world_size, optimizer, STEPS)
    got = merge_ranks(run_world(world_size, _world_body, case, chosen, steps, optimizer))
    assert_exact(case, got, fp32, fp64)
    virtual = train_virtual(case, chosen, steps, (OPTIMIZERS | OTHER_OPTIMIZERS)[optimizer])
    assert_bitwise(got.weights, virtual.weights, "processes and virtual ranks")
    assert_bitwise(got.outputs, virtual.outputs, "outputs of processes and virtual ranks")
