"""The GPU benchmarks end to end, on a GPU or with emulated kernels on small cases."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from oper.bench.core.workload import Workload
from oper.bench.device import suite as device
from oper.bench.device.cases import draw_inputs, floor_bytes
from oper.bench.device.contenders import Reference, open_tables, oper_side
from oper.plan import uniform_plan
from oper.shmem import library
from tests.bench.helpers import verified
from tests.cuda import emulated

WHERE = "cuda" if emulated.has_gpu() else "cpu"
GIVEN: dict[str, Any] = {"num_batches": 2, "rounds": 1, "per_round": 1, "copy_bytes": 1 << 20,
                         "device": WHERE}
WORK = Workload((300, 7), 8, 16, 3, 1.05)
CASE = device.Case("small", WORK, **GIVEN)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "load_device", emulated.load)
    monkeypatch.setenv("OPER_SEND_BUFFER_BYTES", str(1 << 20))


@pytest.mark.parametrize("dtype, exponent", [("float32", 0.0), ("float16", 1.05)])
def test_a_case_is_measured_and_verified(kernels: None, dtype: str, exponent: float) -> None:
    case = replace(CASE, dtype=dtype, work=replace(CASE.work, exponent=exponent))
    entry, = verified(case, figures=device.FIGURES)
    assert {"oper forward", "oper rows", "torch forward"} <= set(entry["verification"])
    for phase in ("forward", "update", "step"):
        assert entry[f"{phase}_fraction_of_floor"] == pytest.approx(
            entry["floor_ms"][phase] / entry[f"oper_{phase}_ms"], rel=0.05, abs=1e-4)
    assert ("location_overhead" in entry) == (exponent == 0)


def test_a_small_batch_is_replayed(kernels: None) -> None:
    case = device.GraphCase("small-graph", WORK, **GIVEN)
    entry, = verified(case, figures=device.FIGURES)
    assert ("forward_us_replayed" in entry) == emulated.has_gpu()


def test_rows_in_host_memory_are_a_case(kernels: None) -> None:
    case = device.HostCase("lookup-host-small", WORK, **GIVEN)
    entry, = verified(case, figures=device.FIGURES)
    assert entry["memory_bytes"]["host"][0] > 0


def test_wrong_rows_are_found(kernels: None) -> None:
    where = torch.device(WHERE)
    inputs = draw_inputs(CASE, where, 0)
    gradient = torch.ones(16, 16, device=where)
    reference = Reference(CASE, where, [inputs], gradient)
    tables: Any = open_tables(CASE, where, uniform_plan(CASE.tables(), 1))
    side = oper_side(tables, CASE.tables())
    assert reference.check_lookup(side, inputs)["passed"]
    assert not reference.check_rows(side)["passed"], "rows that were not trained"
    side.forward(inputs).backward(gradient)
    assert reference.check_rows(side)["passed"]
    assert not reference.check_lookup(side, inputs)["passed"], "the rows have changed"
    tables.close()


def test_floors_count_every_byte_once() -> None:
    # 32 bags of 3 ids, dim 8; 50 distinct rows.
    found = floor_bytes(CASE, 50)
    assert found["forward"] == 50 * 32 + 8 * 96 + 4 * 32 * 8
    assert found["update"] == 4 * 32 * 8 + 8 * 96 + 2 * 50 * 32 + 8 * 50
    assert found["step"] == found["forward"] + found["update"]


def test_cases_have_different_names() -> None:
    for prefix in ("lookup", "train"):
        names = [c.name for c in device.cases(False, prefix)]
        assert len(names) == len(set(names)) == (10 if prefix == "lookup" else 9)
        assert {c.name for c in device.cases(True, prefix)} <= set(names)
    for case in device.cases(False, "lookup"):
        rows = sum(case.work.num_rows) * case.work.dim
        assert rows * (2 if case.dtype == "float16" else 4) > 8e9
