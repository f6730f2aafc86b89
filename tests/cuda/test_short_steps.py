"""A step on a device launches few kernels, and makes no more Python calls than one on the host."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from oper.plan import Piece, Plan, TablePlan, Tier, uniform_plan
from oper.shmem.batch import Lookup
from oper.shmem.group.groups import SingleGroup, ThreadGroup
from oper.shmem.optim.optimizers import RowWiseAdagrad
from oper.shmem.passes import Backward
from oper.tables import TableSpec
from tests import runtime_support
from tests.cuda.compiler import ROOT
from tests.cuda.emulated import device_tables, has_gpu
from tests.runtime_support import Case, bags_of_one, open_tables, run_ranks
from tests.support import frames_of

OPTIMIZER = RowWiseAdagrad(lr=0.1)
pytestmark = pytest.mark.skipif(has_gpu(), reason="the emulation counts")


def one_class(num_rows: int = 2**18) -> Case:
    """Two tables whose rows have the same shape."""
    tables = tuple(TableSpec(n, num_rows, 16, (n,), "sum", "float32", "rowwise_adagrad")
                   for n in ("a", "b"))
    return Case(tables, ("a", "b"))


def batch_of(case: Case, size: int, seed: int = 0) -> Lookup:
    """Bags of four random ids; the batch has more ids than one chunk of a long run."""
    g = torch.Generator().manual_seed(seed)
    return Lookup(torch.randint(0, 2**18, (8 * size,), generator=g),
                  torch.full((2 * size,), 4), case.key_of, size)


def launches(size: int) -> list[tuple[int, int]]:
    """Kernels that the second step launches, by rank; the host must not wait for any of them."""
    case = one_class()
    plan = uniform_plan(case.tables, size, "striped")
    ops = torch.ops.oper_emulated

    def body(group: ThreadGroup) -> tuple[int, int]:
        tables: Any = open_tables(case, plan, group, OPTIMIZER)
        batch = batch_of(case, 64, group.rank)
        found = (0, 0)
        for _ in range(2):
            ops.take_waits()  # the first step waits for the map of the features' keys
            ops.take_launches()
            out, offsets = tables.forward(batch, collective=True)
            forward = ops.take_launches()
            tables.apply_all([Backward((torch.ones_like(out),), batch, offsets)])
            found = forward, ops.take_launches()
        assert ops.take_waits() == 0
        batch = replace(batch, key_of=torch.zeros(2, dtype=torch.int64),
                        lengths=torch.full((64,), 8))
        # Other keys have a map of their own; two features share a key: its ids must be counted.
        tables.resolve(batch)
        assert ops.take_waits() == 2
        tables.barrier()
        tables.close()
        return found

    return run_ranks(size, body)


def test_few_kernels_on_one_rank(on_device: None) -> None:
    ((forward, backward),) = launches(1)
    assert 0 < forward <= 3
    assert 0 < backward <= 14


@pytest.mark.parametrize("size", [2, 8])
def test_few_kernels_on_several_ranks(on_device: None, size: int) -> None:
    """Without the two barriers, which virtual ranks do not launch."""
    for forward, backward in launches(size):
        assert 0 < forward + backward + 2 <= 30


def passes_of(plan: Plan) -> tuple[int, int, list[str]]:
    """Kernels of the forward and the backward pass of one rank, and the ranges of both."""
    case = Case(tuple(t.table for t in plan.tables), tuple(t.table.name for t in plan.tables))
    tables: Any = open_tables(case, plan, SingleGroup(), OPTIMIZER)
    batch = bags_of_one(torch.zeros(48 * len(case.keys), dtype=torch.int64), len(case.keys))
    ops = torch.ops.oper_emulated
    ops.take_launches()
    ops.take_ranges()
    out, offsets = tables.forward(batch, collective=True)
    forward = ops.take_launches()
    tables.apply_all([Backward((torch.ones_like(out),), batch, offsets)])
    names = bytes(ops.take_ranges().tolist()).decode().splitlines()
    tables.close()
    return forward, ops.take_launches(), names


def test_no_kernels_for_shapes_of_rows_that_do_not_need_them(on_device: None) -> None:
    """A second shape has a kernel in the lookup, and in reduction and update, but none for pushed
    rows or column pieces, which only the first has."""
    tables = [TableSpec(f"t{d}", 40, d, (f"t{d}",), "sum", "float32", "rowwise_adagrad")
              for d in (16, 64)]
    pushed = Tier(0, 40, "striped", (0,), mode="push")
    first = TablePlan(tables[0], (Piece(0, 8, (pushed,)), Piece(8, 16, (pushed,))))
    second = uniform_plan(tables[1:], 1).tables[0]
    alone, both = (passes_of(Plan(1, x)) for x in ((first,), (first, second)))
    assert both[0] - alone[0] == 1
    # And a third kernel, since more than 32 ids can have a run that is long.
    assert both[1] - alone[1] == 3
    assert both[2] == alone[2]


def test_phases_have_ranges(on_device: None) -> None:
    tables = one_class(num_rows=40).tables
    *_, names = passes_of(uniform_plan(tables, 1))
    assert names == ["oper bounds", "oper pooling", "oper plan", "oper reduction"]
    *_, names = passes_of(uniform_plan(tables, 1, "replicated"))
    assert names[-2:] == ["oper reduction", "oper exchange and update"]


def step_of(case: Case) -> tuple[list[tuple[str, str]], list[str]]:
    """OPER's Python functions and operators that a step of one rank calls."""
    tables = open_tables(case, uniform_plan(case.tables, 1, "striped"), SingleGroup(), OPTIMIZER)
    batch = batch_of(case, 64)

    def step() -> None:
        tables.lookup(batch).sum().backward()

    step()
    _, called = frames_of(step)
    with torch.autograd.profiler.profile() as profile:
        step()
    tables.close()
    return called, [e.name for e in profile.function_events if e.name.startswith("oper")]


def test_as_little_python_as_on_the_host(emulation: pytest.MonkeyPatch) -> None:
    case = one_class()
    host, host_ops = step_of(case)
    emulation.setattr(runtime_support, "ShardedTables", device_tables)
    device, device_ops = step_of(case)
    assert len(host) > 5 and len(host_ops) >= 2, "both are seen"
    assert len(device) <= len(host) + 2, device
    assert len(device_ops) <= len(host_ops) + 2, device_ops


def test_the_benchmarks_look_at_kernels_runs(
        emulation: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It completes without a GPU, but then lists no kernels."""
    text = (ROOT / "benchmarks/gpu.py").read_text(encoding="utf-8")
    script = text.split('_KERNELS = """')[1].split('"""')[0]
    found = tmp_path / "kernels.json"
    emulation.setattr(sys, "argv", ["script", str(found), "2", "50", "cpu", "10"])
    exec(compile(script, "kernels", "exec"), {})
    assert json.loads(found.read_text()) == {"kernels": [], "per_step": 0}
