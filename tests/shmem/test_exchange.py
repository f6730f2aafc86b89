"""Virtual ranks without shared memory give bitwise the results of ranks with shared memory."""

import functools
import itertools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from oper.plan import Piece, Plan, TablePlan, Tier, uniform_plan
from oper.rows.traffic import SENT
from oper.search import EVERYTHING, evaluate, make_problem
from oper.shmem.group.groups import ThreadGroup
from oper.shmem.group.transport import CollectiveTransport, ThreadTransport
from oper.shmem.optim.optimizers import SGD, RowWiseAdagrad
from oper.tables import TableSpec
from oper.topology import Topology
from tests import random_plans as rp, runtime_support as rs
from tests.cuda.emulated import emulate, on_devices, small_case
from tests.world_support import caught

DOMAINS = [(0, 1), (0, 1, 1, 1), (0, 1, 0, 1), (0, 1, 2, 3)]
Planner = Callable[[rs.Case, int], Plan]


class BackEnd(NamedTuple):
    """Where tables of several domains are: in host memory, or on devices, which are emulated.

    Attributes:
        case: makes the case of an optimizer; a small one for devices.
        steps: number of training steps.
        active: within its block, tables are opened there.
    """

    case: Callable[..., rs.Case]
    steps: int
    active: Callable[[], AbstractContextManager[None]]


HOST = BackEnd(rs.dlrm_case, 4, nullcontext)


@pytest.fixture
def back_end(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> BackEnd:
    if request.param == "host":
        return HOST
    emulate(monkeypatch)
    return BackEnd(small_case, 2, lambda: on_devices(monkeypatch))


def on_both(names: str, host: Iterable[Any], device: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by `names`: values for each back end."""
    return pytest.mark.parametrize(f"back_end, {names}", [
        (kind, *(x if names.count(",") else [x])) for kind, values in
        (("host", host), ("device", device)) for x in values], ids=str, indirect=["back_end"])


@functools.cache
def in_one_domain(case: rs.Case, planner: Planner, world_size: int, optimizer: str, num_steps: int
                  ) -> rs.Result:
    """The reference result of the host back end in a single domain, which is also compared with the
    unsharded run."""
    steps, fp32, fp64 = rs.references(case, world_size, optimizer, num_steps)
    one = rs.train_virtual(case, planner(case, world_size), steps, rs.ALL_OPTIMIZERS[optimizer])
    rs.assert_exact(case, one, fp32, fp64)
    return one


def check(back_end: BackEnd, case: rs.Case, planner: Planner, optimizer: str,
          domains: tuple[int, ...]) -> None:
    """Check that several domains give bitwise the results of one, close to the unsharded run."""
    size = len(domains)
    steps, _, _ = rs.references(case, size, optimizer, back_end.steps)
    with back_end.active():
        several = rs.train_virtual(case, planner(case, size), steps, rs.ALL_OPTIMIZERS[optimizer],
                                   domains=domains)
    one = in_one_domain(case, planner, size, optimizer, back_end.steps)
    rs.same_bits(several, one, replicas=True)


@functools.cache
def placed(name: str) -> Planner:
    return lambda case, world_size: rp.plans_for(case.tables, world_size)[name]


@functools.cache
def rich(seed: int) -> Planner:
    return lambda case, world_size: rp.rich_plan(case.tables, world_size, seed, columns=True)


PLACED = [("striped", (0, 1)), ("replicated", (0, 1, 0, 1)), ("owned", (0, 1, 2, 3)),
          ("mixed0", (0, 1, 1, 1)), ("mixed1", (0, 1, 0, 1))]


@on_both("name, domains", [*PLACED, *itertools.product(["mixed2"], DOMAINS)], PLACED)
def test_placements(back_end: BackEnd, name: str, domains: tuple[int, ...]) -> None:
    check(back_end, back_end.case("rowwise_adagrad"), placed(name), "rowwise_adagrad", domains)


# The optimizers that exchange squares go through all domains.
@on_both("optimizer, domains, seeds", [
    *itertools.product(["rowwise_adagrad", "partial_rowwise_adam"], DOMAINS, [(1, 2)]),
    ("sgd", (0, 1, 0, 1), (1, 2)), ("adagrad", (0, 1), (1, 2)), ("adam", (0, 0, 1, 1), (1, 2)),
    ("momentum_sgd", (0, 1), (1, 2)), ("lars_sgd", (0, 1, 1, 1), (1, 2)),
    ("lamb", (0, 1), (1, 2)), ("partial_rowwise_lamb", (0, 1, 0, 1), (1, 2))], [
    ("rowwise_adagrad", (0, 1), (1,)), ("partial_rowwise_adam", (0, 1, 0, 1), (2,)),
    ("sgd", (0, 0, 1, 1), (1,)), ("adam", (0, 1), (2,))])
def test_push_columns_weights_and_optimizers(back_end: BackEnd, optimizer: str,
                                             domains: tuple[int, ...], seeds: tuple[int, ...]
                                             ) -> None:
    """Covers sum and mean pooling; weights and 32-bit ids for every second optimizer."""
    odd = list(rs.ALL_OPTIMIZERS).index(optimizer) % 2 == 1
    case = replace(back_end.case(optimizer), weighted=odd,
                   id_dtype=torch.int32 if odd else torch.int64)
    for seed in seeds:
        check(back_end, case, rich(seed), optimizer, domains)


@on_both("domains", [(0, 1), (0, 1, 0, 1)], [(0, 1)])
def test_rows_of_16_bits_and_two_rounds_of_squares(back_end: BackEnd, domains: tuple[int, ...]
                                                   ) -> None:
    """16-bit rows are sent exactly; stochastic rounding does not depend on the updating rank.
    Clipping by row norm and a row-wise optimizer each exchange squares of column pieces."""
    case = back_end.case("rowwise_adagrad")
    case = replace(case, tables=tuple(
        replace(t, dtype=("float16", "bfloat16", "float32")[k % 3])
        for k, t in enumerate(case.tables)))
    steps = rs.make_steps(case, len(domains), back_end.steps)
    for plan, chosen in (
            (rp.rich_plan(case.tables, len(domains), 1, columns=True),
             RowWiseAdagrad(lr=0.05, max_row_norm=0.01)),
            (rp.mixed_plan(case.tables, len(domains), 1), rs.OPTIMIZERS["rowwise_adagrad"])):
        one = rs.train_virtual(case, plan, steps, chosen)
        with back_end.active():
            several = rs.train_virtual(case, plan, steps, chosen, domains=domains)
        rs.same_bits(several, one, replicas=True)


def lookups(group: ThreadGroup, case: rs.Case, plan: Plan, batches: list[rs.Batch], pooled: bool
            ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Results of a lookup without gradients and of a training step: weight gradients, a table."""
    tables = rs.open_tables(case, plan, group, SGD(lr=0.5))
    batch = batches[group.rank]
    weights = None if batch.weights is None else batch.weights.clone().requires_grad_()
    call = replace(batch.lookup(case), weights=weights, pooled=pooled)
    with torch.no_grad():
        before = tables.lookup(call).clone()
    out = tables.lookup(tables.resolve(call) if group.rank % 2 else call)  # ahead, on some ranks
    (out.sin().sum() / 7).backward()
    found = tables.read("t")
    tables.barrier()
    tables.close()
    return before, out.detach().clone(), None if weights is None else weights.grad, found


@on_both("domains, pooled, weighted", [
    (d, *x) for d in [(0, 1), (0, 0, 1, 1), (0, 1, 2, 3)]
    for x in [(True, True), (True, False), (False, False)]], [
    ((0, 1, 0, 1), True, True), ((0, 1, 0, 1), False, False)])
def test_lookups_without_gradients_sequences_and_weight_gradients(
        back_end: BackEnd, domains: tuple[int, ...], pooled: bool, weighted: bool) -> None:
    tables = (TableSpec("t", 900, 16, ("f", "g"), "sum" if pooled else "none", optimizer="sgd"),
              TableSpec("u", 70, 16, ("h",), "mean" if pooled else "none", optimizer="sgd"))
    case = rs.Case(tables, ("g", "f", "h"), weighted)
    size = len(domains)
    (batches,) = rs.make_steps(case, size, 1)
    for plan in (rp.rich_plan(tables, size, 3, columns=True), rp.mixed_plan(tables, size, 4)):
        def body(group: ThreadGroup, plan: Plan = plan) -> Any:
            return lookups(group, case, plan, batches, pooled)

        one = rs.run_ranks(size, body)
        with back_end.active():
            several = rs.run_ranks(size, body, domains=domains)
        for (before, *a), (far_before, *b) in zip(one, several, strict=True):
            for x, y in zip(a, b, strict=True):
                if x is not None and back_end is HOST:
                    rs.assert_bitwise(x, y, "one domain and several")
                elif x is not None:
                    torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-7)
            # Between domains owners pool pushed tiers without gradients too.
            rs.assert_bitwise(far_before, b[0], "without gradients")
            torch.testing.assert_close(far_before, before, rtol=1e-5, atol=1e-6)


def test_rows_are_sent_once_and_bytes_are_counted() -> None:
    """Two ranks, one table striped over both: bytes sent equal a calculation by hand."""
    dim, rows = 8, 100
    table = TableSpec("t", rows, dim, ("f",), "sum", optimizer="sgd")
    tiers = (Tier(0, 20, "replicated", (0, 1)), Tier(20, rows, "striped", (0, 1)))
    plan = Plan(2, (TablePlan(table, (Piece(0, dim, tiers),)),))
    case = rs.Case((table,), ("f",))
    # Rank 0 asks rank 1 for rows 21 and 23 (23 three times), reads 22 at home and 4 in its copy.
    ids = [torch.tensor([23, 21, 23, 22, 4, 23]), torch.tensor([5, 21])]

    def body(group: ThreadGroup) -> dict[str, list[int]]:
        tables = rs.open_tables(case, plan, group, SGD(lr=0.5))
        tables.sent_bytes(reset=True)
        tables.lookup(rs.bags_of_one(ids[group.rank])).sum().backward()
        return tables.sent_bytes()

    zero, one = rs.run_ranks(2, body, domains=(0, 1))
    assert tuple(zero) == SENT
    row = 4 * dim
    slots = 4  # two of 7 bits, in whole words
    assert zero["row_ids"] == [0, slots] and one["row_ids"] == [0, 0]
    assert one["rows"] == [2 * row, 0] and zero["rows"] == [0, 0]
    # Masters of the replicated rows 4 and 5 are on ranks 0 and 1, and both were touched.
    assert zero["gradient_rows"] == [0, slots + 2 * row] and one["gradient_rows"] == [0, 0]
    assert zero["refreshed_rows"] == [0, 4 + 4 + row] and one["refreshed_rows"] == [8 + row, 0]
    assert zero["headers"] == one["headers"][::-1] and sum(zero["headers"]) == 3 * 1024
    for kind in ("ids", "id_weights", "partial_sums", "bag_gradients", "squares"):
        assert sum(zero[kind] + one[kind]) == 0
    assert rs.run_ranks(2, body) == [{}, {}], "one domain sends nothing"


@pytest.mark.filterwarnings("ignore:no access statistics")
@pytest.mark.parametrize("mode, num_pieces, num_forward, num_backward", [
    ("pull", 1, 3, 2), ("push", 1, 4, 2), ("push", 2, 4, 5)])
def test_number_of_exchanges_is_that_of_the_cost_model(
        monkeypatch: pytest.MonkeyPatch, mode: str, num_pieces: int, num_forward: int,
        num_backward: int) -> None:
    """One wait of the cost model (`phase_us`) is two exchanges: headers, then data. Sums of squares
    are headers, sums and totals."""
    chosen = rs.OPTIMIZERS["rowwise_adagrad"]
    spec = TableSpec("t", 60, 16, ("f",), "sum", optimizer=chosen.name)
    case = rs.Case((spec,), ("f",))
    width = 16 // num_pieces
    plan = Plan(2, (TablePlan(spec, tuple(
        Piece(a, a + width, (Tier(0, 60, "owned", ((a + width) // 16,), mode=mode),))
        for a in range(0, 16, width))),))
    made, exchange = [0, 0], ThreadTransport.exchange

    def counted(self: ThreadTransport, *arguments: Any) -> None:
        made[self._group.rank] += 1
        exchange(self, *arguments)

    def body(group: ThreadGroup) -> tuple[int, int]:
        tables = rs.open_tables(case, plan, group, chosen)
        tables.barrier()
        before = made[group.rank]
        found = tables.lookup(rs.make_batch(case, 3, 5).lookup(case))
        asked = made[group.rank]
        found.sum().backward()
        return asked - before, made[group.rank] - asked

    monkeypatch.setattr(ThreadTransport, "exchange", counted)
    assert rs.run_ranks(2, body, domains=(0, 1)) == [(num_forward, num_backward)] * 2
    topology = Topology.of_domains([0, 1])
    found = evaluate(plan, make_problem([spec], None, topology, batch_size=5, allow=EVERYTHING))
    waits = {p.name: p.fixed_us / topology.costs.phase_us for p in found.phases}
    assert 2 * (waits["request"] + waits["forward"]) == num_forward
    assert 2 * waits["update"] == num_backward


@on_both("domains", [(0, 0, 1, 1)], [(0, 0, 1, 1)])
def test_an_id_out_of_range_releases_the_other_ranks(back_end: BackEnd, domains: tuple[int, ...]
                                                     ) -> None:
    case = back_end.case("sgd")
    plan = uniform_plan(case.tables, 4, "striped")

    def body(group: ThreadGroup) -> str:
        tables = rs.open_tables(case, plan, group, SGD(lr=0.5))
        batch = rs.make_batch(case, group.rank, 8)
        if group.rank == 2:
            batch.ids[batch.lengths.reshape(len(case.keys), -1)[:3].sum()] = 10**9
        with caught() as errors:
            tables.lookup(batch.lookup(case)).sum().backward()
        return errors[0]

    with back_end.active():
        found = rs.run_ranks(4, body, domains=domains)
    assert found[2].startswith("InvalidInputError") and "1000000000" in found[2]
    for rank in (0, 1, 3):
        assert found[rank].startswith("PeerLostError") and "rank=2," in found[rank]


def test_data_on_another_device_passes_through_a_staging_buffer() -> None:
    class Memory:
        def __init__(self, index: int) -> None:
            self.device = torch.device("cuda", index)

        def numel(self) -> int:
            return 8

        def __getitem__(self, part: slice) -> "Memory":
            return self

    transport: Any = object.__new__(CollectiveTransport)
    transport._device, transport._staging = torch.device("cuda", 0), [Memory(0)]
    own, other = Memory(0), Memory(1)
    assert transport._on_device(0, own) is own
    assert transport._on_device(0, other) is transport._staging[0]
