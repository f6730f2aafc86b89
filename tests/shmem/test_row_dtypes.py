"""Rows of 16 bits: exact reads, fp32 arithmetic, stochastic rounding independent of plans."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch

from oper.plan import Plan, uniform_plan
from oper.shmem.group.groups import SingleGroup
from oper.shmem.optim.arguments import rounding_key
from oper.shmem.optim.optimizers import SGD, Optimizer
from oper.shmem.tables import ShardedTables
from oper.tables import TableSpec
from tests import random_plans as rp, runtime_support as rs
from tests.references import EVERY, philox4x32, round_stochastically, rounding_bits
from tests.shmem.test_determinism import check_replicas
from tests.support import pushed

NARROW = {"float16": torch.float16, "bfloat16": torch.bfloat16}
SEED = 11


def train(case: rs.Case, plan: Plan, steps: list, optimizer: Optimizer, dtype: str = "",
          start: torch.dtype | None = None, num_threads: int = 1) -> rs.Result:
    """Train tables of `dtype` ("" = their own dtypes) on virtual ranks, from initial weights that
    are rounded to `start`, if given."""
    def between(tables: ShardedTables, step: int) -> None:
        if step == 0 and start is not None:
            for name, weight in rs.initial_weights(case).items():
                tables.write(name, weight.to(start))
            tables.flush_replicas()

    torch.manual_seed(SEED)
    own = replace(case, tables=tuple(replace(t, dtype=dtype or t.dtype) for t in case.tables))
    return rs.train_virtual(own, plan, steps, optimizer, num_threads, between)


# ---- the generator and the rounding --------------------------------------------------------------


@pytest.mark.parametrize("counter, key, want", [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
])
def test_philox_known_answers(counter, key, want) -> None:
    """Known answers of Random123 for philox4x32-10."""
    assert philox4x32(np.array(counter, np.uint32), key).tolist() == list(want)


def test_random_numbers_are_all_different() -> None:
    rows = np.arange(64)
    draws = {(step, name): rounding_bits(rounding_key(3, name), step, rows, 40)
             for step in (1, 2, 2**33 + 1) for name in "ab"}
    flat = np.stack([d.reshape(-1) for d in draws.values()])
    for a in range(len(flat)):
        for b in range(a):
            assert (flat[a] == flat[b]).mean() < 0.01
    every = flat.reshape(-1)
    assert abs(every.mean() / 32767.5 - 1) < 0.02 and len(np.unique(every)) > 0.2 * 65536
    wide = rounding_bits(rounding_key(3, "a"), 1, rows, 56)
    assert (wide[:, :40] == draws[1, "a"]).all(), "a draw depends on its column, not on the width"


AWKWARD = [0.0, 1.0, -1.0, 1 + 2**-9, 1 + 2**-12, -3.14159, 1e-3, 65504.0, 65503.9, 70000.0, 1e30,
           2.0**-14, 2.0**-14 * 1.00001, 2.0**-15 * 1.37, -(2.0**-20) * 1.5, 2.0**-24 * 0.25,
           2.0**-24 * 5.125, 3.3e38, -3.4e38, 1e-38, float("inf"), float("-inf"), float("nan")]


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("value", AWKWARD)
def test_rounding_is_to_a_neighbour_and_unbiased(dtype: str, value: float) -> None:
    """Covers all 2^16 random values; torch's conversion determines the neighbours."""
    value = float(np.float32(value))
    draws = np.arange(65536, dtype=np.uint32)
    found = round_stochastically(np.full(65536, value, np.float32), draws, dtype)
    info = torch.finfo(NARROW[dtype])
    nearest = torch.tensor([value]).to(NARROW[dtype]).float().item()
    if nearest == value or not np.isfinite(value):
        np.testing.assert_array_equal(found, np.float32(value))
        return
    if abs(value) >= info.max:
        assert (found == np.copysign(info.max, value)).all()
        return
    around = torch.tensor([nearest]).to(NARROW[dtype])
    other = torch.nextafter(around, torch.tensor([float(np.copysign(np.inf, value - nearest))]).to(
        around.dtype)).float().item()
    assert set(found.tolist()) <= {nearest, other}
    assert abs(found.astype(np.float64).mean() - value) <= abs(other - nearest) * 2.0**-16


# ---- the kernels ---------------------------------------------------------------------------------


@functools.cache
def first_bits(name: str, num_rows: int, dim: int) -> np.ndarray:
    """The random bits of a table's first step."""
    return rounding_bits(rounding_key(SEED, name), 1, np.arange(num_rows), dim)


def rounded_step(case: rs.Case, wide: dict, dtype: str) -> dict[str, torch.Tensor]:
    """The rows expected after a first step whose fp32 result is `wide`."""
    found = {}
    for t in case.tables:
        bits = first_bits(t.name, t.num_rows, t.dim)
        found[t.name] = torch.from_numpy(
            round_stochastically(wide[t.name].numpy(), bits, dtype)).to(NARROW[dtype])
    return found


@pytest.mark.parametrize("optimizer", EVERY)
@pytest.mark.parametrize("dtype", NARROW)
def test_one_step_is_the_fp32_step_rounded(dtype: str, optimizer: str) -> None:
    """For every optimizer and kind of plan, a step is bitwise the rounded fp32 step."""
    case = rs.dlrm_case(EVERY[optimizer].name, weighted=True)
    plans = ((1, rp.mixed_plan(case.tables, 1, 5)), (3, rp.in_columns(case.tables, 3))) if (
        dtype == "float16") else ((2, rp.mixed_plan(case.tables, 2, 1)),
                                  (2, pushed(uniform_plan(case.tables, 2))))
    for world_size, plan in plans:
        steps = rs.make_steps(case, world_size, 1, seed=2)
        wide = train(case, plan, steps, EVERY[optimizer], start=NARROW[dtype])
        got = train(case, plan, steps, EVERY[optimizer], dtype)
        rs.assert_bitwise(got.outputs, wide.outputs, "pooled in fp32")
        rs.assert_bitwise(got.weights, rounded_step(case, wide.weights, dtype), "rows")
        large, start = got.weights["large"], rs.initial_weights(case)["large"]
        assert not torch.equal(large, start.to(large.dtype))
        assert not torch.equal(large, wide.weights["large"].to(large.dtype)), "rounded to nearest"


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("world_size", [1, 3])
def test_plans_are_bitwise_equal(world_size: int, dtype: str) -> None:
    case = rs.dlrm_case()
    steps = rs.make_steps(case, world_size, 3, seed=3)
    striped, *plans = (uniform_plan(case.tables, world_size, "striped"),
                       uniform_plan(case.tables, world_size, "replicated"),
                       *(rp.mixed_plan(case.tables, world_size, s) for s in range(3)))
    want = train(case, striped, steps, EVERY["rowwise_adagrad_l2"], dtype)
    for plan in plans:
        got = train(case, plan, steps, EVERY["rowwise_adagrad_l2"], dtype)
        rs.same_bits(got, want)
        check_replicas(case, plan, got)


@pytest.mark.parametrize("dtype", NARROW)
def test_threads_and_repeated_runs_change_no_bit(dtype: str) -> None:
    case = rs.dlrm_case()
    steps = rs.make_steps(case, 2, 3, seed=3)
    first, *others = (train(case, rp.mixed_plan(case.tables, 2, 2), steps, EVERY["adam"], dtype,
                            num_threads=n) for n in (1, 1, 3))
    for other in others:
        rs.same_bits(other, first, replicas=True)


def one_table(dtype: str, rows: torch.Tensor, lr: float) -> ShardedTables:
    """Open a table with these rows on one rank."""
    table = TableSpec("t", *rows.shape, ("f",), "sum", dtype, "sgd")
    tables = ShardedTables(uniform_plan([table], 1), [("f", "t")], SingleGroup(), SGD(lr), 1.0, 0)
    tables.write("t", rows)
    tables.flush_replicas()
    return tables


@pytest.mark.parametrize("dtype", NARROW)
def test_every_16_bit_value_is_read_exactly(dtype: str) -> None:
    """Covers all 65,536 values as read by the kernels, and updates of rows that are not finite."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(NARROW[dtype]).view(-1, 64)
    tables = one_table(dtype, every, 0.0)
    out = tables.lookup(rs.bags_of_one(torch.arange(1024)))
    out.backward(torch.zeros_like(out))
    torch.testing.assert_close(out.detach(), every.float(), rtol=0, atol=0, equal_nan=True)
    after = tables.read("t")
    kept = (after.view(torch.int16) == every.view(torch.int16)) | after.isnan()
    assert kept.all() and torch.equal(after.isnan(), every.isnan())


def test_small_updates_are_not_lost() -> None:
    """1,000 steps of a hundredth of a bfloat16 step each: nearest rounding would never change w."""
    tables, batch = one_table("bfloat16", torch.full((512, 16), 1.5), 1.0), rs.bags_of_one(
        torch.arange(512))
    for _ in range(1000):
        tables.lookup(batch).backward(torch.full((512, 16), -(2.0**-7) / 100))
    rows = tables.read("t").float()
    moved = 1000 * 2.0**-7 / 100
    # One element's deviation: sqrt(steps * p (1 - p)) steps of 2^-7; 8,192 elements.
    deviation = (1000 * 0.01 * 0.99) ** 0.5 * 2.0**-7
    assert abs(rows.mean().item() - 1.5 - moved) < 5 * deviation / 8192**0.5
    assert 0.9 * deviation < rows.std().item() < 1.1 * deviation


def test_dtypes_mixed_in_one_collection() -> None:
    case = rs.dlrm_case()
    mixed = replace(case, tables=tuple(
        replace(t, dtype=d) for t, d in zip(
            case.tables, ("float32", "bfloat16", "float16") * 3, strict=True)))
    steps = rs.make_steps(case, 2, 1, seed=5)
    plan = rp.mixed_plan(case.tables, 2, 1)
    got = train(mixed, plan, steps, SGD(0.5))
    for t in mixed.tables:
        alone = train(case, plan, steps, SGD(0.5), t.dtype)
        assert torch.equal(got.weights[t.name], alone.weights[t.name]), t.name
