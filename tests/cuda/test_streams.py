"""Steps contain every event wait that they need: emulated streams are ordered only by events."""

from __future__ import annotations

import pytest
import torch

from oper.errors import OperError
from tests.cuda import streams
from tests.cuda.emulated import has_gpu
from tests.runtime_support import (
    OPTIMIZERS,
    Case,
    Result,
    assert_bitwise,
    dlrm_case,
    make_steps,
    plans_for,
    rich_plan,
    train_virtual,
)

pytestmark = pytest.mark.skipif(has_gpu(), reason="the emulation delays")
OPTIMIZER = OPTIMIZERS["rowwise_adagrad"]


def check(patch: pytest.MonkeyPatch, case: Case, plan: str, size: int, ahead: str | None) -> None:
    """Compare the host back end with ranks whose streams run as late as possible."""
    chosen = rich_plan(case.tables, size, 1, True) if plan == "rich" else (
        plans_for(case.tables, size)[plan])
    steps = make_steps(case, size, 3)
    host: Result = train_virtual(case, chosen, steps, OPTIMIZER)
    with patch.context() as inner, streams.in_use(inner, ahead):
        device = train_virtual(case, chosen, steps, OPTIMIZER)
    assert_bitwise(vars(host), vars(device), "result")


@pytest.mark.parametrize("ahead", [None, "early", "late"])
@pytest.mark.parametrize("plan, size", [("mixed1", 1), ("mixed1", 4), ("rich", 2)])
def test_streams_that_work_late_give_the_hosts_bits(
        emulation: pytest.MonkeyPatch, plan: str, size: int, ahead: str | None) -> None:
    check(emulation, dlrm_case("rowwise_adagrad"), plan, size, ahead)


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
        # Owners that read an outbox too early find other settings there.
        with pytest.raises((AssertionError, OperError), match=r"bits differ|different learning"):
            check(emulation, dlrm_case("rowwise_adagrad"), "mixed1", size, ahead)
    finally:
        torch.ops.oper_emulated.ignore_waits(False)
