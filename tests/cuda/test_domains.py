"""Device tables in several memory domains are bitwise equal to those in one; with virtual ranks."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from oper.errors import InvalidInputError, OperError, PeerLostError
from oper.plan import Plan
from oper.shmem.group.groups import ThreadGroup
from oper.shmem.optim.optimizers import SGD, Optimizer, RowWiseAdagrad
from oper.tables import TableSpec
from tests import runtime_support
from tests.cuda.emulated import both, device_tables, on_devices
from tests.runtime_support import (
    ALL_OPTIMIZERS,
    OPTIMIZERS,
    Case,
    assert_bitwise,
    make_steps,
    mixed_plan,
    plans_for,
    rich_plan,
    run_ranks,
    same_bits,
)
from tests.shmem.test_exchange import lookups


def small_case(optimizer: str, **fields: Any) -> Case:
    """Rows of whole 16-byte parts and others, a shared key, a mean."""
    shapes = [("odd", 9, 6, ("f1",), "sum"), ("two", 300, 12, ("a", "b"), "sum"),
              ("mean", 2000, 24, ("b",), "mean")]
    tables = tuple(TableSpec(n, r, d, f, p, "float32", optimizer) for n, r, d, f, p in shapes)
    return Case(tables, ("b", "f1", "extra", "a"), **{"base_batch": 8, **fields})


def check(patches: pytest.MonkeyPatch, case: Case, plan: Plan, optimizer: Optimizer,
          domains: tuple[int, ...], steps: int = 2) -> None:
    """Compare the host back end in one domain with the device back end in several."""
    host, device = both(patches, case, plan, optimizer, steps, domains)
    same_bits(device, host, replicas=True)


@pytest.mark.parametrize("name, domains", [
    ("striped", (0, 1)), ("replicated", (0, 1, 0, 1)), ("owned", (0, 1, 2, 3)),
    ("mixed0", (0, 1, 1, 1)), ("mixed1", (0, 1, 0, 1))], ids=str)
def test_placements(emulation: pytest.MonkeyPatch, name: str, domains: tuple[int, ...]) -> None:
    case = small_case("rowwise_adagrad")
    check(emulation, case, plans_for(case.tables, len(domains))[name],
          OPTIMIZERS["rowwise_adagrad"], domains)


@pytest.mark.parametrize("optimizer, domains, seed", [
    ("rowwise_adagrad", (0, 1), 1), ("partial_rowwise_adam", (0, 1, 0, 1), 2),
    ("sgd", (0, 0, 1, 1), 1), ("adam", (0, 1), 2)], ids=str)
def test_push_columns_weights_and_optimizers(
        emulation: pytest.MonkeyPatch, optimizer: str, domains: tuple[int, ...], seed: int) -> None:
    odd = list(ALL_OPTIMIZERS).index(optimizer) % 2 == 1
    case = small_case(optimizer, weighted=odd, id_dtype=torch.int32 if odd else torch.int64)
    plan = rich_plan(case.tables, len(domains), seed, columns=True)
    check(emulation, case, plan, ALL_OPTIMIZERS[optimizer], domains)


def test_rows_of_16_bits_and_rows_clipped_by_their_norm(emulation: pytest.MonkeyPatch) -> None:
    case = small_case("rowwise_adagrad")
    case = replace(case, tables=tuple(
        replace(t, dtype=("float16", "bfloat16", "float32")[k % 3])
        for k, t in enumerate(case.tables)))
    plan = rich_plan(case.tables, 2, 1, columns=True)
    check(emulation, case, plan, RowWiseAdagrad(lr=0.05, max_row_norm=0.01), (0, 1))


@pytest.mark.parametrize("pooled, weighted", [(True, True), (False, False)])
def test_lookups_without_gradients_sequences_and_weight_gradients(
        emulation: pytest.MonkeyPatch, pooled: bool, weighted: bool) -> None:
    tables = (TableSpec("t", 900, 16, ("f", "g"), "sum" if pooled else "none", optimizer="sgd"),
              TableSpec("u", 70, 16, ("h",), "mean" if pooled else "none", optimizer="sgd"))
    case = Case(tables, ("g", "f", "h"), weighted)
    (batches,) = make_steps(case, 4, 1)
    for plan in (rich_plan(tables, 4, 3, columns=True), mixed_plan(tables, 4, 4)):
        def body(group: ThreadGroup, plan: Plan = plan) -> Any:
            return lookups(group, case, plan, batches, pooled)

        one = run_ranks(4, body)
        with on_devices(emulation):
            several = run_ranks(4, body, domains=(0, 1, 0, 1))
        for (_, *a), (before, *b) in zip(one, several, strict=True):
            for x, y in zip(a, b, strict=True):
                if x is not None:
                    torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-7)
            assert_bitwise(before, b[0], "without gradients")


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


def test_an_error_on_one_rank_is_reported_to_all(emulation: pytest.MonkeyPatch, on_device: None
                                                 ) -> None:
    """For an id out of range, this rank raises its error in the next phase, peers a lost peer."""
    case = small_case("sgd")
    plan = plans_for(case.tables, 2)["striped"]
    (batches,) = make_steps(case, 2, 1)

    def body(group: ThreadGroup) -> str:
        tables = runtime_support.open_tables(case, plan, group, SGD(lr=0.1))
        batch = batches[0].lookup(case)
        if group.rank == 1:
            batch = replace(batch, ids=torch.full_like(batch.ids, 10**6))
        try:
            tables.lookup(batch).sum().backward()
        except (InvalidInputError, PeerLostError) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    mine, theirs = run_ranks(2, body, domains=(0, 1))
    assert theirs.startswith("InvalidInputError") and "1000000" in theirs
    assert mine.startswith("PeerLostError") and "rank=1" in mine


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
    (1, "has sent invalid data"), (2, "are not where they should be")])
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
