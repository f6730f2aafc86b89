"""Bitwise equal results between runs, plans, ranks, thread counts, processors and ways to write."""

import functools
import itertools
import random
import time
from dataclasses import replace

import pytest
import torch

from oper.plan import Plan, uniform_plan
from oper.rows.directory import TableDirectory
from oper.shmem.batch import Lookup
from oper.shmem.group.groups import SingleGroup
from oper.shmem.library import load
from oper.shmem.optim.optimizers import SGD
from oper.shmem.tables import ShardedTables
from oper.tables import TableSpec
from tests import random_plans as rp, runtime_support as rs
from tests.support import pushed
from tests.world_support import run_world

STEPS = 8
RWA = rs.OPTIMIZERS["rowwise_adagrad"]


@functools.cache
def baseline(case: rs.Case, world_size: int) -> tuple[list[list[rs.Batch]], rs.Result]:
    steps = rs.make_steps(case, world_size, STEPS, seed=3)
    plan = rp.plans_for(case.tables, world_size)["striped"]
    return steps, rs.train_virtual(case, plan, steps, RWA)


@pytest.mark.parametrize("world_size, weighted", [(1, True), (2, False), (2, True), (4, True)])
def test_plans_of_equal_world_size_are_bitwise_equal(world_size: int, weighted: bool) -> None:
    case = rs.dlrm_case(weighted=weighted)
    steps, want = baseline(case, world_size)
    plans = rp.plans_for(case.tables, world_size)
    plans |= {f"mixed{seed}": rp.mixed_plan(case.tables, world_size, seed) for seed in (11, 12)}
    num_replicas = 0
    for name, plan in plans.items():
        got = rs.train_virtual(case, plan, steps, RWA)
        rs.same_bits(got, want, f"plan {name}")
        num_replicas += check_replicas(case, plan, got)
    assert num_replicas > 0


def check_replicas(case: rs.Case, plan: Plan, got: rs.Result) -> int:
    """Check that replicas equal their master rows bitwise; returns their number."""
    num_replicas = 0
    for t in case.tables:
        entry = plan.table(t.name)
        directory = TableDirectory(entry, plan.world_size)
        for rank in range(plan.world_size):
            at = 0
            for tier in entry.tiers:
                if tier.placement != "replicated" or rank not in tier.ranks:
                    continue
                ids = directory.ids_at(torch.arange(tier.start, tier.stop).numpy())
                copy = got.replicas[t.name, rank][at:at + len(ids)]
                rs.assert_bitwise(copy, got.weights[t.name][ids], f"{t.name}, replica of {rank}")
                at += len(ids)
                num_replicas += len(ids)
            assert at == got.replicas[t.name, rank].shape[0]
    return num_replicas


@pytest.mark.parametrize("world_size", [1, 2])
def test_thread_counts_change_no_bit(world_size: int) -> None:
    case = rs.dlrm_case(weighted=True)
    steps, want = baseline(case, world_size)
    plan = rp.plans_for(case.tables, world_size)["mixed0"]
    rich = rp.rich_plan(case.tables, world_size, 5, columns=True)  # equal to itself alone
    again = rs.train_virtual(case, rich, steps, RWA)
    for threads in (1, 2, 3):
        rs.same_bits(rs.train_virtual(case, plan, steps, RWA, threads), want, f"{threads} threads")
        rs.same_bits(rs.train_virtual(case, rich, steps, RWA, threads), again, f"{threads}, rich")


def _variant(rank: int, world_size: int, cases: list[rs.Case]) -> tuple[str, list[rs.Result]]:
    results = []
    for case in cases:
        steps = rs.make_steps(case, 1, STEPS, seed=3)
        plan = rp.mixed_plan(case.tables, 1, 2)
        results.append(rs.train_rank(case, plan, steps, RWA, SingleGroup()))
    return torch.ops.oper.kernel_name(), results


@pytest.mark.parametrize("kind", ["pull", "push"])
def test_slow_ranks_change_no_bit(kind: str) -> None:
    """Ranks are delayed at random in every phase; two forward passes may be under way."""
    case = rs.dlrm_case()
    steps = rs.make_steps(case, 3, STEPS, seed=3)
    plan = (pushed(uniform_plan(case.tables, 3, "striped")) if kind == "push" else
            rp.mixed_plan(case.tables, 3, 1))

    def body(group, seed: int | None) -> list[torch.Tensor]:
        dawdle = random.Random(None if seed is None else 10 * seed + group.rank)

        def wait() -> None:
            if seed is not None and dawdle.random() < 0.5:
                time.sleep(dawdle.random() * 0.01)

        tables = rs.open_tables(case, plan, group, RWA)
        found = []
        for first, second in itertools.pairwise(step[group.rank] for step in steps):
            outs = []
            for batch in (first, second):
                outs.append(tables.lookup(batch.lookup(case)))
                wait()
            for out, batch in zip(outs, (first, second), strict=True):
                found.append(out.detach().clone())
                rs.rank_loss(out, batch.target).backward()
                wait()
        tables.barrier()
        return [*found, *(tables.read(t.name) for t in case.tables)]

    want = rs.run_ranks(3, lambda group: body(group, None))
    for seed in range(2):
        rs.assert_bitwise(rs.run_ranks(3, lambda group, s=seed: body(group, s)), want, "slow ranks")


def test_sums_of_negative_zeros_are_negative_however_rows_are_exchanged() -> None:
    case = rs.dlrm_case()
    (batches,) = rs.make_steps(case, 2, 1, seed=3)

    def body(group, plan: Plan) -> torch.Tensor:
        tables = rs.open_tables(case, plan, group, RWA)
        tables.barrier()
        for t in case.tables:
            tables.write(t.name, torch.full((t.num_rows, t.dim), -0.0))
        tables.flush_replicas()
        tables.barrier()
        return tables.lookup(batches[group.rank].lookup(case)).detach()

    want = rs.run_ranks(2, lambda group: body(group, uniform_plan(case.tables, 2, "striped")))
    assert any(torch.signbit(out).any() for out in want)
    for plan in (pushed(uniform_plan(case.tables, 2, "striped")),
                 rp.rich_plan(case.tables, 2, 5, columns=True)):
        rs.assert_bitwise(rs.run_ranks(2, lambda group, p=plan: body(group, p)), want, "signs")


def test_kernel_variants_are_bitwise_equal() -> None:
    """All instruction sets give equal bits, for all widths, with weights and with 16-bit rows."""
    plain = rs.dlrm_case()
    narrow = replace(plain, tables=tuple(
        replace(t, dtype=("float16", "bfloat16")[k % 2]) for k, t in enumerate(plain.tables)))
    cases = [plain, rs.dlrm_case(weighted=True), narrow]
    ((name, want),) = run_world(1, _variant, cases, env={"OPER_CPU_KERNELS": "generic"})
    assert name == "generic"
    for variant in ("avx2", ""):
        ((name, got),) = run_world(1, _variant, cases, env={"OPER_CPU_KERNELS": variant})
        for a, b in zip(got, want, strict=True):
            rs.same_bits(a, b, f"kernels {name} and generic")
        if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
            assert name != "generic"


# ---- results too large for the caches are written past them --------------------------------------

SPECS = [TableSpec("a", 50, 64, ("f",), "sum", optimizer="none"),
         TableSpec("b", 70, 16, ("g",), "mean", optimizer="none"),
         TableSpec("c", 30, 48, ("h",), "sum", optimizer="none")]
BATCH, PART = 1 << 18, 1 << 10  # 128 MiB and 512 KiB of output


def _differences() -> int:
    tables = ShardedTables(uniform_plan(SPECS, 1), [("f", "a"), ("g", "b"), ("h", "c")],
                           SingleGroup(), None)
    generator = torch.Generator().manual_seed(0)
    for spec in SPECS:
        tables.write(spec.name, torch.randn(spec.num_rows, spec.dim, generator=generator))
    key_of = torch.arange(3)
    ids = torch.randint(0, 30, (3, BATCH, 2), generator=generator)
    lengths = torch.full((3 * BATCH,), 2)
    large = tables.lookup(Lookup(ids.reshape(-1), lengths, key_of, BATCH))
    row_bytes, cache = large[0].nbytes, torch.ops.oper.last_level_cache_bytes()
    assert PART * row_bytes < cache / 4 < BATCH * row_bytes  # outputs that bypass the caches
    differ = 0
    for at in range(0, BATCH, PART):
        part = ids[:, at:at + PART].reshape(-1)
        small = tables.lookup(Lookup(part, lengths[:3 * PART], key_of, PART))
        differ += int((small.view(torch.int32) != large[at:at + PART].view(torch.int32)).sum())
    return differ


def _wrong_elements(dim: int) -> list[int]:
    """Wrong elements after two steps of one batch; in the second the kernels know that gradients
    will not fit the cache. Small integers make every sum exact."""
    load()
    cache = torch.ops.oper.last_level_cache_bytes()
    num_rows = cache * 5 // 4 // (4 * dim) + 1
    spec = TableSpec("a", num_rows, dim, ("f",), "sum", optimizer="sgd")
    tables = ShardedTables(uniform_plan([spec], 1), [("f", "a")], SingleGroup(), SGD(lr=1.0))
    tables.write("a", torch.zeros(num_rows, dim))
    tables.flush_replicas()
    generator = torch.Generator().manual_seed(0)
    ids = torch.cat([torch.randperm(num_rows, generator=generator),
                     torch.randint(0, num_rows, (num_rows // 2,), generator=generator)])
    gradient = torch.randint(-8, 9, (ids.numel(), dim), generator=generator).float()
    batch = rs.bags_of_one(ids)
    expected = torch.zeros(num_rows, dim).index_add_(0, ids, gradient)
    wrong = []
    for step in (1, 2):
        tables.lookup(batch).backward(gradient)
        found = torch.empty(num_rows, dim)
        tables.gather("a", torch.arange(num_rows).numpy(), "rows", slice(0, dim), found)
        wrong.append(int((found != -step * expected).sum()))
    tables.close()
    return wrong


def _large(rank: int, world_size: int) -> None:
    assert _differences() == 0, "outputs of a large and of small batches"
    for dim in (96, 272):
        assert _wrong_elements(dim) == [0, 0], f"gradients of {dim} columns"


@pytest.mark.parametrize("kernels", ["", "avx2", "generic"])
def test_large_outputs_and_gradients_are_those_of_small_ones(kernels: str) -> None:
    run_world(1, _large, env={"OPER_CPU_KERNELS": kernels})
