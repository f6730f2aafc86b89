"""Checks that only the emulation can make: few launches, needed waits, addressable memory."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from oper.errors import OperError
from oper.plan import Piece, Plan, TablePlan, Tier, uniform_plan
from oper.shmem.batch import Lookup
from oper.shmem.group.groups import SingleGroup, ThreadGroup
from oper.shmem.optim.optimizers import RowWiseAdagrad
from oper.shmem.passes import Backward
from oper.tables import TableSpec
from tests import random_plans as rp, runtime_support as rs
from tests.cuda import streams
from tests.cuda.compiler import ROOT
from tests.cuda.emulated import device_tables, has_gpu
from tests.forked import Forked
from tests.support import frames_of

# ---- few launches and Python calls ---------------------------------------------------------------

OPTIMIZER = RowWiseAdagrad(lr=0.1)
pytestmark = pytest.mark.skipif(has_gpu(), reason="the emulation counts, delays and checks")


def one_class(num_rows: int = 2**18) -> rs.Case:
    """Two tables whose rows have the same shape."""
    tables = tuple(TableSpec(n, num_rows, 16, (n,), "sum", "float32", "rowwise_adagrad")
                   for n in ("a", "b"))
    return rs.Case(tables, ("a", "b"))


def batch_of(case: rs.Case, size: int, seed: int = 0) -> Lookup:
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
        tables: Any = rs.open_tables(case, plan, group, OPTIMIZER)
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

    return rs.run_ranks(size, body)


@pytest.mark.parametrize("size", [1, 2, 8])
def test_few_kernels(on_device: None, size: int) -> None:
    """The count is without the two barriers of several ranks, which virtual ranks do not launch."""
    for forward, backward in launches(size):
        assert forward > 0 and backward > 0
        assert (forward <= 3 and backward <= 14) if size == 1 else forward + backward + 2 <= 30


def passes_of(plan: Plan) -> tuple[int, int, list[str]]:
    """Kernels of the forward and the backward pass of one rank, and the ranges of both."""
    case = rs.Case(tuple(t.table for t in plan.tables), tuple(t.table.name for t in plan.tables))
    tables: Any = rs.open_tables(case, plan, SingleGroup(), OPTIMIZER)
    batch = rs.bags_of_one(torch.zeros(48 * len(case.keys), dtype=torch.int64), len(case.keys))
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


def step_of(case: rs.Case) -> tuple[list[tuple[str, str]], list[str]]:
    """OPER's Python functions and operators that a step of one rank calls."""
    tables = rs.open_tables(case, uniform_plan(case.tables, 1, "striped"), SingleGroup(), OPTIMIZER)
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
    emulation.setattr(rs, "ShardedTables", device_tables)
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


# ---- every event wait is there -------------------------------------------------------------------

ADAGRAD = rs.OPTIMIZERS["rowwise_adagrad"]


def check(patch: pytest.MonkeyPatch, case: rs.Case, plan: str, size: int, ahead: str | None
          ) -> None:
    """Compare the host back end with ranks whose streams run as late as possible."""
    chosen = rp.rich_plan(case.tables, size, 1, True) if plan == "rich" else (
        rp.plans_for(case.tables, size)[plan])
    steps = rs.make_steps(case, size, 3)
    host: rs.Result = rs.train_virtual(case, chosen, steps, ADAGRAD)
    with patch.context() as inner, streams.in_use(inner, ahead):
        device = rs.train_virtual(case, chosen, steps, ADAGRAD)
    rs.assert_bitwise(vars(host), vars(device), "result")


@pytest.mark.parametrize("ahead", [None, "early", "late"])
@pytest.mark.parametrize("plan, size", [("mixed1", 1), ("mixed1", 4), ("rich", 2)])
def test_streams_that_work_late_give_the_hosts_bits(
        emulation: pytest.MonkeyPatch, plan: str, size: int, ahead: str | None) -> None:
    check(emulation, rs.dlrm_case("rowwise_adagrad"), plan, size, ahead)


@pytest.mark.parametrize("missing, size, ahead", [
    ("of a rank for others", 2, None), ("of ids resolved ahead for their copy", 1, "early"),
    ("of a lookup for ids resolved ahead", 1, "late")])
def test_a_missing_wait_shows(emulation: pytest.MonkeyPatch, missing: str, size: int,
                              ahead: str | None) -> None:
    in_csrc = missing == "of a lookup for ids resolved ahead"
    if not in_csrc:
        emulation.setattr(streams.Stream, "wait_event", lambda self, event: None)
    torch.ops.oper_emulated.ignore_waits(in_csrc)
    try:
        # Owners that read a send buffer too early find other settings there.
        with pytest.raises((AssertionError, OperError), match=r"bits differ|different learning"):
            check(emulation, rs.dlrm_case("rowwise_adagrad"), "mixed1", size, ahead)
    finally:
        torch.ops.oper_emulated.ignore_waits(False)


def test_a_resolved_batch_that_is_used_on_two_streams(emulation: pytest.MonkeyPatch) -> None:
    """The second one waits for the first, whose lookup makes the batch plan."""
    case = rs.Case((TableSpec("t", 40, 8, ("a",), "none"),), ("a",))
    batch = Lookup(torch.arange(12), torch.full((6,), 2), case.key_of, 6, pooled=False)

    def body(group: ThreadGroup) -> None:
        tables: Any = rs.open_tables(case, uniform_plan(case.tables, 2, "striped"), group, None)
        tables.deduplicate = True  # needs the plan
        tables.barrier()
        mine, side = streams.current_stream(), streams.Stream()
        expected = tables.lookup(batch)
        with streams.stream(side):
            resolved = tables.resolve(batch)
            tables.forward(resolved)
        out, _ = tables.forward(resolved)
        mine.synchronize()
        rs.assert_bitwise(out, expected, "rows")
        tables.barrier()
        tables.close()

    with emulation.context() as patch, streams.in_use(patch, None):
        rs.run_ranks(2, body)


# ---- memory that hardware could not address ------------------------------------------------------

_PROGRAM = """
import os
os.environ["OPER_SEND_BUFFER_BYTES"] = str(1 << 20)
import torch
from dataclasses import replace
from oper.plan import uniform_plan
from oper.shmem.device.tables import DeviceTables
from oper.shmem.optim.optimizers import SGD
from tests import random_plans as rp
from tests import runtime_support as rs
from tests.cuda import emulated
from tests.cuda.test_domains import small_case

emulated.replace_library()
emulated.load()
fault = {fault!r}


def of_device(rank, tensor):
    memory = torch.ops.oper_emulated.memory(rank, False, 8 * tensor.numel()).view(torch.int64)
    return memory.copy_(tensor)


class Planted(DeviceTables):
    opens = False

    def _create_context(self):
        self.opens = fault == "neighbours"
        handle = super()._create_context()
        self.opens = False
        return handle

    @property
    def members(self):
        return [self.group.rank] if self.opens else super().members

    def lookup(self, batch):
        mine, other = self.group.rank, 1 - self.group.rank
        if fault == "ids":
            batch = replace(batch, ids=of_device(other, batch.ids))
        if fault == "keys":
            batch = replace(batch, key_of=of_device(mine, batch.key_of))
        if fault == "none":
            batch = replace(batch, ids=of_device(mine, batch.ids))
        if fault == "alignment":
            copy = torch.frombuffer(bytearray(8 * batch.ids.numel() + 4), dtype=torch.int64,
                                    offset=4)
            batch = replace(batch, ids=copy.copy_(batch.ids))
        return super().lookup(batch)


rs.ShardedTables = lambda *args: Planted(*args, device="cpu")
case = small_case("sgd")
rs.train_virtual(case, uniform_plan(case.tables, 2, "striped"),
                 rs.make_steps(case, 2, 1), SGD(lr=0.1))
print("done")
"""


@pytest.mark.parametrize("fault, message", [
    ("neighbours", "a kernel of device {0} accesses the arena of device {1}"),
    ("ids", "a kernel of device {0} accesses memory of device {1}"),
    ("keys", "host code accesses memory of device {0}"),
    ("alignment", "a misaligned access"), ("none", "")])
def test_impossible_accesses(emulation: pytest.MonkeyPatch, fault: str, message: str) -> None:
    process = Forked([sys.executable, "-c", _PROGRAM.format(fault=fault)], text=True,
                     stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate()
    if fault == "none":
        assert process.returncode == 0 and out == "done\n", err
    else:
        assert process.returncode != 0 and out == ""
        assert any(message.format(a, 1 - a) in err for a in range(2)), err
