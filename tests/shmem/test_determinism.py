"""Bitwise equal results between runs, plans, ranks, thread counts and processors."""

from __future__ import annotations

import functools
import itertools
import random
import time
from dataclasses import replace

import pytest
import torch

from oper.plan import Plan, uniform_plan
from oper.rows.directory import TableDirectory
from oper.shmem.group.groups import SingleGroup
from tests.runtime_support import (
    OPTIMIZERS,
    Batch,
    Case,
    Result,
    assert_bitwise,
    dlrm_case,
    make_batch,
    make_steps,
    mixed_plan,
    open_tables,
    plans_for,
    rank_loss,
    rich_plan,
    run_ranks,
    same_bits,
    train_rank,
    train_virtual,
)
from tests.support import pushed
from tests.world_support import run_world

STEPS = 8
RWA = OPTIMIZERS["rowwise_adagrad"]


@functools.cache
def baseline(case: Case, world_size: int) -> tuple[list[list[Batch]], Result]:
    steps = make_steps(case, world_size, STEPS, seed=3)
    return steps, train_virtual(case, plans_for(case.tables, world_size)["striped"], steps, RWA)


@pytest.mark.parametrize("world_size, weighted", [(1, True), (2, False), (2, True), (4, True)])
def test_plans_of_equal_world_size_are_bitwise_equal(world_size: int, weighted: bool) -> None:
    case = dlrm_case(weighted=weighted)
    steps, want = baseline(case, world_size)
    plans = plans_for(case.tables, world_size)
    plans |= {f"mixed{seed}": mixed_plan(case.tables, world_size, seed) for seed in (11, 12)}
    num_replicas = 0
    for name, plan in plans.items():
        got = train_virtual(case, plan, steps, RWA)
        same_bits(got, want, f"plan {name}")
        num_replicas += check_replicas(case, plan, got)
    assert num_replicas > 0


def check_replicas(case: Case, plan: Plan, got: Result) -> int:
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
                assert_bitwise(copy, got.weights[t.name][ids], f"{t.name}, replica of rank {rank}")
                at += len(ids)
                num_replicas += len(ids)
            assert at == got.replicas[t.name, rank].shape[0]
    return num_replicas


@pytest.mark.parametrize("world_size", [1, 2])
def test_thread_counts_change_no_bit(world_size: int) -> None:
    case = dlrm_case(weighted=True)
    steps, want = baseline(case, world_size)
    plan = plans_for(case.tables, world_size)["mixed0"]
    rich = rich_plan(case.tables, world_size, 5, columns=True)  # equal to itself alone
    again = train_virtual(case, rich, steps, RWA)
    for threads in (1, 2, 3):
        same_bits(train_virtual(case, plan, steps, RWA, threads), want, f"{threads} threads")
        same_bits(train_virtual(case, rich, steps, RWA, threads), again, f"{threads}, rich")


def _variant(rank: int, world_size: int, cases: list[Case]) -> tuple[str, list[Result]]:
    results = []
    for case in cases:
        steps = make_steps(case, 1, STEPS, seed=3)
        plan = mixed_plan(case.tables, 1, 2)
        results.append(train_rank(case, plan, steps, RWA, SingleGroup()))
    return torch.ops.oper.kernel_name(), results


@pytest.mark.parametrize("kind", ["pull", "push"])
def test_slow_ranks_change_no_bit(kind: str) -> None:
    """Ranks are delayed at random in every phase; two forward passes may be under way."""
    case = dlrm_case()
    steps = make_steps(case, 3, STEPS, seed=3)
    plan = (pushed(uniform_plan(case.tables, 3, "striped")) if kind == "push" else
            mixed_plan(case.tables, 3, 1))

    def body(group, seed: int | None) -> list[torch.Tensor]:
        dawdle = random.Random(None if seed is None else 10 * seed + group.rank)

        def wait() -> None:
            if seed is not None and dawdle.random() < 0.5:
                time.sleep(dawdle.random() * 0.01)

        tables = open_tables(case, plan, group, RWA)
        found = []
        for first, second in itertools.pairwise(step[group.rank] for step in steps):
            outs = []
            for batch in (first, second):
                outs.append(tables.lookup(batch.lookup(case)))
                wait()
            for out, batch in zip(outs, (first, second), strict=True):
                found.append(out.detach().clone())
                rank_loss(out, batch.target).backward()
                wait()
        tables.barrier()
        return [*found, *(tables.read(t.name) for t in case.tables)]

    want = run_ranks(3, lambda group: body(group, None))
    for seed in range(2):
        assert_bitwise(run_ranks(3, lambda group, s=seed: body(group, s)), want, "slow ranks")


def test_kernel_variants_are_bitwise_equal() -> None:
    """All instruction sets give equal bits, for all widths, with weights and with 16-bit rows."""
    plain = dlrm_case()
    narrow = replace(plain, tables=tuple(
        replace(t, dtype=("float16", "bfloat16")[k % 2]) for k, t in enumerate(plain.tables)))
    cases = [plain, dlrm_case(weighted=True), narrow]
    ((name, want),) = run_world(1, _variant, cases, env={"OPER_CPU_KERNELS": "generic"})
    assert name == "generic"
    for variant in ("avx2", ""):
        ((name, got),) = run_world(1, _variant, cases, env={"OPER_CPU_KERNELS": variant})
        for a, b in zip(got, want, strict=True):
            same_bits(a, b, f"kernels {name} and generic")
        if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
            assert name != "generic"


def test_a_bag_does_not_depend_on_its_batch() -> None:
    """A bag's bits are the same in any batch, since pooling is in the order of the bag."""
    case = dlrm_case(max_length=40)
    batch = make_batch(case, 5, 33)
    tables = open_tables(case, plans_for(case.tables, 1)["striped"], SingleGroup(), None)
    out = tables.lookup(batch.lookup(case))
    lengths = batch.lengths.reshape(len(case.keys), 33)
    starts = (batch.lengths.cumsum(0) - batch.lengths).reshape(len(case.keys), 33)
    for b in (0, 7, 32):
        parts = [batch.ids[s:s + n] for s, n in zip(starts[:, b].tolist(), lengths[:, b].tolist(),
                                                    strict=True)]
        one = Batch(lengths[:, b].contiguous(), torch.cat(parts), None, batch.target[:1])
        assert_bitwise(tables.lookup(one.lookup(case))[0], out[b], f"sample {b} alone")
