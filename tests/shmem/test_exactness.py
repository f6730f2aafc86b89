"""Sharded training equals the unsharded run, for every plan and world size."""

import itertools

import pytest
import torch

from oper.plan import Plan, uniform_plan
from oper.shmem.optim.optimizers import SGD
from oper.tables import TableSpec
from tests import random_plans as rp, runtime_support as rs

STEPS = 20


def check(case: rs.Case, plan: Plan, optimizer: str, num_steps: int = STEPS) -> None:
    steps, fp32, fp64 = rs.references(case, plan.world_size, optimizer, num_steps)
    got = rs.train_virtual(case, plan, steps, rs.ALL_OPTIMIZERS[optimizer])
    rs.assert_exact(case, got, fp32, fp64)


# Plans of one world and one mode are bitwise equal: test_determinism.py.
@pytest.mark.parametrize("world_size, pushes, optimizer", itertools.product(
    (1, 2, 4), (False, True), ("sgd", "rowwise_adagrad")))
def test_training_equals_the_unsharded_run(world_size: int, pushes: bool, optimizer: str) -> None:
    case = rs.dlrm_case(optimizer)
    num_steps = STEPS if world_size == 2 else 8  # errors of many add up alike in any world
    # Tables split by columns on two and four ranks: test_exchange.py.
    plan = (rp.rich_plan(case.tables, world_size, 1, columns=world_size == 1) if pushes
            else rp.mixed_plan(case.tables, world_size, 0))
    check(case, plan, optimizer, num_steps)


@pytest.mark.parametrize("weighted", [False, True])
def test_many_bags_and_long_bags(weighted: bool) -> None:
    """Batches have more bags than a task handles, and bags longer than a block of resolved ids."""
    tables = (TableSpec("t", 9000, 24, ("f",), "sum"), TableSpec("m", 700, 16, ("g",), "mean"))
    many = rs.Case(tables, ("g", "f"), weighted, max_length=6, base_batch=1500)
    check(many, rp.mixed_plan(tables, 2, 1), "rowwise_adagrad", num_steps=4)
    few = rs.Case(tables, ("f", "g"), weighted, max_length=3000, base_batch=3)
    check(few, rp.mixed_plan(tables, 2, 2), "rowwise_adagrad", num_steps=4)


@pytest.mark.parametrize("weighted", [False, True])
def test_keys_and_bags_that_need_more_than_32_bits(weighted: bool) -> None:
    tables = (TableSpec("t", 1 << 20, 4, ("f", "g"), "sum", optimizer="sgd"),)
    case = rs.Case(tables, ("g", "f"), weighted, max_length=2, base_batch=4100)
    check(case, uniform_plan(tables, 2, "striped"), "sgd", num_steps=3)


def test_dims_that_are_not_multiples_of_four() -> None:
    tables = tuple(TableSpec(f"t{d}", 50, d, (f"f{d}",), "sum") for d in (1, 2, 3, 5, 17, 31, 1023))
    case = rs.Case(tables, tuple(f"f{t.dim}" for t in tables))
    check(case, rp.mixed_plan(tables, 2, 3), "rowwise_adagrad", num_steps=5)


def test_a_backward_pass_uses_its_own_batch() -> None:
    """Two forward passes precede two backward passes, as in DDP's gradient accumulation."""
    case = rs.dlrm_case("sgd")
    (first,), (second,) = rs.make_steps(case, 1, 2)
    second = rs.make_batch(case, 99, 9)
    lr = SGD(lr=0.3)
    sharded = rs.open_alone(case, lr)
    outs = [sharded.lookup(b.lookup(case)) for b in (first, second)]
    for out, batch in zip(outs, (first, second), strict=True):
        rs.rank_loss(out, batch.target).backward()
    weights = {n: w.requires_grad_() for n, w in rs.initial_weights(case).items()}
    for batch in (first, second):
        rs.rank_loss(rs.reference_forward(case, weights, batch), batch.target).backward()
    for name, w in weights.items():
        want = (w - lr.lr * w.grad).detach()
        assert torch.allclose(sharded.read(name), want, rtol=1e-5, atol=1e-5), name
