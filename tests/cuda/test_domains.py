"""Messages of device tables between memory domains; shmem/test_exchange.py has their results."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from oper.errors import InvalidInputError, OperError
from oper.plan import Plan
from oper.shmem.group.groups import ThreadGroup
from oper.shmem.optim.optimizers import SGD
from tests import runtime_support
from tests.cuda.emulated import device_tables, on_devices, small_case
from tests.runtime_support import (
    make_steps,
    mixed_plan,
    plans_for,
    rich_plan,
    run_ranks,
)

HEADER_BYTES = 1024  # of a phase of few tables


@pytest.mark.parametrize("bits", [32, 16, (32, 16), (16, 32)], ids=str)
def test_as_many_bytes_as_between_hosts(emulation: pytest.MonkeyPatch, bits: Any) -> None:
    """Compares all bytes of pulled tiers, and those of the forward pass of pushed ones."""
    case = small_case("sgd")
    steps = make_steps(case, 4, 2)
    domains = (0, 1, 0, 1)
    for plan, kinds in ((mixed_plan(case.tables, 4, 1), None),
                        (rich_plan(case.tables, 4, 1, columns=False),
                         ("row_ids", "rows", "ids", "partial_sums", "refreshed_rows"))):
        plan = replace(plan, message_bits=bits)

        def body(group: ThreadGroup, plan: Plan = plan) -> dict[str, list[int]]:
            tables = runtime_support.open_tables(case, plan, group, SGD(lr=0.1))
            tables.sent_bytes(reset=True)
            for batches in steps:
                out = tables.lookup(batches[group.rank].lookup(case))
                runtime_support.rank_loss(out, batches[group.rank].target).backward()
            return tables.sent_bytes()

        host = run_ranks(4, body, domains=domains)
        with on_devices(emulation):
            device = run_ranks(4, body, domains=domains)
        for a, b in zip(host, device, strict=True):
            for kind in kinds or a:
                assert a[kind] == b[kind], kind
            assert sum(itertools.chain(*b.values())) > 0
            # Devices ask for rows and for sums one after the other: a phase more of every step.
            more = 0 if kinds is None else len(steps) * HEADER_BYTES
            assert b["headers"] == [x + more * (x > 0) for x in a["headers"]]


class _Liar:
    """A transport that corrupts numbers in this rank's first or second message."""

    def __init__(self, inner: Any, wrong: int) -> None:
        self._inner, self._wrong, self._count = inner, wrong, 0
        self.at = inner.at

    def exchange(self, send: torch.Tensor, there: list[int], recv: torch.Tensor, back: list[int]
                 ) -> None:
        self._count += 1
        if self._count == self._wrong:  # behind what heads begin with, or all slots
            send = send.clone()
            send[32 if self._count == 1 else 0:there[0]] = 0x7F
        self._inner.exchange(send, there, recv, back)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.mark.parametrize("wrong, problem", [
    (1, "has sent invalid data"), (2, "row number from another memory domain is invalid")])
def test_what_no_rank_can_send_is_refused(emulation: pytest.MonkeyPatch, on_device: None,
                                          wrong: int, problem: str) -> None:
    """Invalid counts are refused before memory is allocated, slots before rows are read."""
    case = small_case("sgd")
    plan = plans_for(case.tables, 2)["striped"]
    (batches,) = make_steps(case, 2, 1)

    def body(group: ThreadGroup) -> str:
        tables = runtime_support.open_tables(case, plan, group, SGD(lr=0.1))
        if group.rank == 1:
            tables._exchange._transport = _Liar(tables._exchange._transport, wrong)
        try:
            tables.lookup(batches[group.rank].lookup(case)).sum().backward()
        except OperError as error:
            group.abort()
            return str(error)
        return "nothing"

    victim, _ = run_ranks(2, body, domains=(0, 1))
    assert problem in victim


def test_codes_are_for_host_memory(emulation: pytest.MonkeyPatch) -> None:
    case = small_case("sgd")
    plan = replace(mixed_plan(case.tables, 2, 1), message_bits=(32, 8))
    emulation.setattr(runtime_support, "ShardedTables", device_tables)
    with pytest.raises(InvalidInputError, match=r"message_bits=\[32, 8\], expected 32 or 16"):
        run_ranks(2, lambda g: runtime_support.open_tables(case, plan, g, SGD(lr=0.1)),
                  domains=(0, 1))
