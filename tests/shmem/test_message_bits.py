"""Messages of fewer bits: rounding errors, no bias, the same bits in every run."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from oper.errors import OperError, PlanError
from oper.messages import MessageBits
from oper.plan import Piece, Plan, TablePlan, Tier, uniform_plan
from oper.search.variance import relative_variance
from oper.shmem.group.groups import ThreadGroup
from oper.shmem.optim.optimizers import SGD, RowWiseAdagrad
from oper.shmem.tables import ShardedTables
from oper.tables import TableSpec
from tests import random_plans as rp, runtime_support as rs

LEVELS = 255  # of 8 bits


def one_table(rows: int, dim: int, bits: Any, world_size: int, mode: str = "pull") -> Plan:
    """A plan with all rows of one table on rank 0."""
    table = TableSpec("t", rows, dim, ("f",), "sum", optimizer="sgd")
    tier = Tier(0, rows, "owned", (0,), mode=mode)
    return Plan(world_size, (TablePlan(table, (Piece(0, dim, (tier,)),)),), message_bits=bits)


def opened(group: ThreadGroup, plan: Plan, weights: torch.Tensor, seed: int = 0) -> ShardedTables:
    tables = ShardedTables(plan, [("f", "t")], group, SGD(lr=1.0), 1.0, seed)
    tables.write("t", weights)
    tables.flush_replicas()
    return tables


def received(gradient: torch.Tensor, bits: Any, *, domains: Sequence[int] = (0, 1),
             senders: Sequence[int] = (1,), mode: str = "pull", seed: int = 0, steps: int = 1,
             num_threads: int = 1) -> list[torch.Tensor]:
    """The gradients that the owner of all rows receives from `senders` in each step.

    Args:
        gradient: float32 [R, D].
    """
    rows, dim = gradient.shape
    plan = one_table(rows, dim, bits, len(domains), mode)

    def body(group: ThreadGroup) -> list[torch.Tensor]:
        tables = opened(group, plan, torch.zeros(rows, dim), seed)
        ids = torch.arange(rows if group.rank in senders else 0)
        seen = [torch.zeros(rows, dim)]
        for _ in range(steps):
            tables.lookup(rs.bags_of_one(ids)).backward(gradient[:ids.numel()])
            seen.append(-tables.read("t"))
        return [b - a for a, b in pairwise(seen)]

    found: list[torch.Tensor] = rs.run_ranks(len(domains), body, num_threads, domains=domains)[0]
    return found


def looked_up(weights: torch.Tensor, bits: Any, domains: Sequence[int] = (0, 1),
              mode: str = "pull") -> list[torch.Tensor]:
    """The rows of a table on rank 0, as every rank reads them in a training step."""
    rows, dim = weights.shape
    plan = one_table(rows, dim, bits, len(domains), mode)

    def body(group: ThreadGroup) -> torch.Tensor:
        tables = opened(group, plan, weights)
        out = tables.lookup(rs.bags_of_one(torch.arange(rows))).detach().clone()
        return out

    found: list[torch.Tensor] = rs.run_ranks(len(domains), body, domains=domains)
    return found


def rows_of(rows: int, dim: int, seed: int = 1) -> torch.Tensor:
    """Random rows whose magnitudes differ widely."""
    g = torch.Generator().manual_seed(seed)
    scale = 10.0 ** torch.randint(-9, 4, (rows, 1), generator=g)
    return torch.randn(rows, dim, generator=g) * scale + torch.randn(rows, 1, generator=g) * scale


def step_of(rows: torch.Tensor, bits: int = 8) -> torch.Tensor:
    """The quantisation step of each row, [R, 1]."""
    low, high = torch.aminmax(rows, dim=1, keepdim=True)
    return (high - low) / (2**bits - 1)


# ---- how far off ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize("dim, bits", [(3, 8), (8, 8), (13, 8), (64, 8), (200, 8), (4, 4), (22, 4),
                                       (64, 4), (130, 4)])
def test_answers_are_the_nearest_codes(dim: int, bits: int, mode: str) -> None:
    weights = rows_of(300, dim)
    exact, rounded = looked_up(weights, bits, mode=mode)
    rs.assert_bitwise(exact, weights, "rows at their owner")
    # Half a step, and the rounding of float32.
    error = (rounded - weights).abs()
    largest = weights.abs().amax(dim=1, keepdim=True)
    assert (error <= 0.5001 * step_of(weights, bits) + 2.0**-22 * largest).all()
    assert (error > 0.4 * step_of(weights, bits)).any()


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize("dim, bits", [(3, 8), (13, 8), (64, 8), (6, 4), (64, 4), (66, 4)])
def test_gradients_are_one_of_the_two_adjacent_codes(dim: int, bits: int, mode: str) -> None:
    gradient = rows_of(300, dim)
    (got,) = received(gradient, (32, bits), mode=mode)
    step, low = step_of(gradient, bits).double(), gradient.amin(dim=1, keepdim=True).double()
    code = (got.double() - low) / step
    largest = gradient.abs().amax(dim=1, keepdim=True).double()
    slack = 1e-3 + 2.0**-22 * largest / step
    assert ((code - code.round()).abs() <= slack).all()
    assert ((got - gradient).double().abs() <= (1 + slack) * step).all()
    below, above = got < gradient - 0.1 * step, got > gradient + 0.1 * step
    assert below.any() and above.any()


def test_16_bits_are_bfloat16_to_nearest() -> None:
    rows = rows_of(200, 24)
    wanted = rows.bfloat16().float()
    _, answers = looked_up(rows, (16, 32))
    (gradients,) = received(rows, (32, 16))
    for got in (answers, gradients):  # ties aside, of which random numbers have none
        rs.assert_bitwise(got, wanted, "bfloat16")


NAN, INF, MOST = float("nan"), float("inf"), torch.finfo(torch.float32).max
# Numbers of a row, and whether they arrive exactly, or as those of any row.
SPECIAL: dict[str, tuple[list[float], bool]] = {
    "constant": ([0.1] * 5, True), "zero": ([0.0] * 5, True),
    "codes": ([0.0, 17.0, 119.0, 238.0, 255.0], True),
    "large": ([1e38, -1e38, 0.0, 1.0, 2.0], False),
    "least": ([0.0, 1e-45, 3e-42, 1e-40, 0.0], False),
    "wider than float32": ([3e38, -3e38, 0.0, 1e38, 2.0], False),
    "widest": ([MOST, -MOST, 0.0, 1e36, -1e37], False),
    "half of that": ([MOST, 0.0, 1e38, 1.0, 2.0], False),
    "nan": ([0.0, 1.0, NAN, 3.0, 4.0], False), "inf": ([INF, 0.1, 0.2, 0.3, -INF], False),
    "wide and infinite": ([3e38, -3e38, INF, 1e38, NAN], False),
    "infinite only": ([-INF, INF, NAN, INF, -INF], True), "nan and zero": ([NAN] + [0.0] * 4, True)}


@pytest.mark.parametrize("name", sorted(SPECIAL))
def test_codes_and_nonfinite_numbers_are_exact(name: str) -> None:
    """Numbers equal to codes are exact, and so are those that are not finite."""
    numbers, is_exact = SPECIAL[name]
    odd = torch.tensor([numbers])
    even = torch.cat([odd, odd[:, :1]], dim=1)  # for 4 bits
    for row, bits, got in (
            (odd, 8, looked_up(odd, 8)[1]), (odd, 8, received(odd, (32, 8))[0]),
            (even, 4, looked_up(even, 4)[1]), (even, 4, received(even, (32, 4))[0])):
        wide, some = row.double(), row.isfinite()
        if is_exact:
            assert torch.equal(got.nan_to_num(1.5), row.nan_to_num(1.5))
            continue
        assert torch.equal(got[~some].nan_to_num(1.5), row[~some].nan_to_num(1.5))
        # Numbers may be so near to each other that float32 hardly tells them apart.
        finer = 1 if some.all() else (2**bits - 1) / (2**bits - 4)
        step = step_of(wide[some][None], bits) * finer
        assert ((got - wide)[some].abs() <= 1.001 * step + 3e-36).all()


@pytest.mark.parametrize("num_rows, dim", [(50, 1), (50, 2), (1, 1)])
def test_rows_of_few_columns_are_exact(num_rows: int, dim: int) -> None:
    """The message of one row of one column takes a whole word, as many bytes as without packing."""
    rows = rows_of(num_rows, dim)
    rs.assert_bitwise(looked_up(rows, 8)[1], rows, "answers")
    rs.assert_bitwise(received(rows, 8)[0], rows, "gradients")
    rs.assert_bitwise(looked_up(rows, 16)[1], rows.bfloat16().float(), "answers of 16 bits")


def test_messages_within_a_domain_are_exact() -> None:
    """Ranks 0 and 1 share memory; numbers that rank 1 reads and sends are not rounded."""
    rows = rows_of(100, 32)
    owner, neighbour, far = looked_up(rows, 8, domains=(0, 0, 1))
    rs.assert_bitwise(owner, rows, "owner")
    rs.assert_bitwise(neighbour, rows, "neighbour")
    assert not torch.equal(far, rows)
    for sender, is_exact in ((1, True), (2, False)):
        (got,) = received(rows, 8, domains=(0, 0, 1), senders=(sender,))
        assert torch.equal(got, rows) == is_exact


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_a_table_has_its_own_bits(mode: str) -> None:
    """Rows and gradients of an exact table stay exact; those of another are rounded as alone."""
    rows, bits = rows_of(60, 16), {"coded": 8, "rounded": (16, 32)}
    names = ("coded", "exact", "rounded")
    plan = Plan(2, tuple(TablePlan(
        TableSpec(n, 60, 16, (n,), "sum", optimizer="sgd"),
        (Piece(0, 16, (Tier(0, 60, "owned", (0,), mode=mode),)),)) for n in names),
        message_bits=bits)

    def body(group: ThreadGroup) -> list[torch.Tensor]:
        tables = ShardedTables(plan, [(n, n) for n in names], group, SGD(lr=1.0), 1.0, 0)
        for name in names:
            tables.write(name, rows)
        tables.flush_replicas()
        number = 60 * group.rank  # rank 1 looks all rows up and sends gradients
        ids = torch.arange(number).repeat(3)
        out = tables.lookup(rs.bags_of_one(ids, 3))
        out.backward(rows[:number].repeat(1, 3))
        found = [out.detach().clone(), *(tables.read(n) for n in names)]
        return found

    out, *left = rs.run_ranks(2, body, domains=(0, 1))[1]
    coded, exact, rounded = out.split(16, dim=1)
    rs.assert_bitwise(exact, rows, "answers of the exact table")
    rs.assert_bitwise(rounded, rows.bfloat16().float(), "answers of 16 bits")
    rs.assert_bitwise(coded, looked_up(rows, 8, mode=mode)[1], "answers of 8 bits")
    for name, after in zip(names, left, strict=True):
        assert torch.equal(after, torch.zeros_like(rows)) == (name != "coded"), name


# ---- without bias --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode, bits", [("pull", 8), ("push", 8), ("push", 4)])
def test_the_mean_of_rounded_gradients_is_the_gradient(mode: str, bits: int) -> None:
    """The mean over rows and seeds is within five standard errors, as is the share rounded up."""
    rows, seeds = 1500, 4
    g = torch.Generator().manual_seed(3)
    one = torch.randn(1, 40, generator=g)
    got = torch.cat([received(one.repeat(rows, 1), (32, bits), mode=mode, seed=s)[0]
                     for s in range(seeds)]).double()
    step, count = float(step_of(one, bits)), rows * seeds
    code = (one - one.min()).double() / step
    up = code - code.floor()
    spread = step * (up * (1 - up)).sqrt()
    off = (got.mean(dim=0) - one.double()).abs()
    assert (off <= 5 * spread / count**0.5 + 2.0**-14 * step).all()
    assert torch.allclose(got.std(dim=0), spread[0], rtol=0.1, atol=0.02 * step)
    # Rounding to nearest would be off by up to half a step.
    assert (torch.minimum(up, 1 - up) * step).max() > 10 * off.max()
    # Neither rows nor columns share their draws.
    ups = ((got - one.min()) / step - code.floor()).round()
    mixed = (up[0] > 0.3) & (up[0] < 0.7)
    ups = (ups - ups.mean(dim=0))[:, mixed]
    pairs = torch.corrcoef(ups.T)
    pairs.fill_diagonal_(0)
    assert pairs.abs().max() < 6 / count**0.5
    by_row = torch.corrcoef(torch.stack([ups[:-1].flatten(), ups[1:].flatten()]))
    assert by_row[0, 1].abs() < 6 / ups.numel() ** 0.5


def squared_error(got: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Squared error of each row relative to its squared norm, [R]."""
    wide = rows.double()
    return (got.double() - wide).square().sum(dim=1) / wide.square().sum(dim=1)


@pytest.mark.parametrize("dim, bits", [(3, 8), (16, 8), (64, 8), (16, 4), (64, 4)])
def test_the_planners_variance_limits_that_of_every_row(dim: int, bits: int) -> None:
    """Includes rows that nearly reach it: two extremes, and numbers halfway between two codes."""
    worst = torch.zeros(100, dim)  # 127.5 (7.5) steps above the least number
    worst[:, 0], worst[:, 1] = 1.0, -1.0
    rows = torch.cat([rows_of(300, dim), worst])
    limit = relative_variance(bits, dim)
    nearest = squared_error(looked_up(rows, bits)[1], rows)
    assert (nearest <= limit * 1.001 + 2.0**-44 * dim).all()
    up = squared_error(received(rows, (32, bits))[0], rows)[300:]
    assert (up <= limit * 1.001).all() and (up >= limit * 0.99 * (dim - 2) / dim).all()
    for got in (looked_up(rows, (16, 32))[1], received(rows, (32, 16))[0]):
        assert (squared_error(got, rows) <= relative_variance(16, dim)).all()


def test_senders_use_different_random_numbers() -> None:
    """Two hosts send the same gradient: with equal random numbers the sum would be twice a code."""
    one = torch.linspace(0, 1, 256)[None] + 0.5 / LEVELS
    one[0, 0], one[0, -1] = 0.0, 1.0
    (got,) = received(one.repeat(40, 1), (32, 8), domains=(0, 1, 2), senders=(1, 2))
    odd = (got * LEVELS).round().long() % 2
    assert 0.45 < odd[:, 1:-1].float().mean() < 0.55


# ---- repeatable ----------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [8, 4])
def test_random_numbers_depend_only_on_seed_and_step(bits: int) -> None:
    gradient = rows_of(500, 24)
    first, second = received(gradient, bits, steps=2)
    again = received(gradient, bits, steps=2, num_threads=3)
    rs.assert_bitwise([first, second], again, "two runs, one and three threads")
    assert not torch.equal(first, received(gradient, bits, seed=1)[0])
    # The sum of two steps has been rounded to float32; most codes are others all the same.
    step = step_of(gradient, bits)
    assert ((first - second).abs() > 0.5 * step).float().mean() > 0.2


@pytest.mark.parametrize("bits", [16, 8, 4, (8, 32), (32, 8)], ids=str)
def test_runs_repeat_bit_by_bit(bits: Any) -> None:
    """Runs repeat bitwise under any placement, with push and columns; all ranks read equal rows."""
    case = rs.dlrm_case("rowwise_adagrad")
    steps = rs.make_steps(case, 4, 3)
    chosen = RowWiseAdagrad(lr=0.05, eps=1e-8)
    plans = [rp.rich_plan(case.tables, 4, 1, columns=True), rp.plans_for(case.tables, 4)["mixed1"]]
    for plan in plans:
        plan = replace(plan, message_bits=bits)
        one, two = (rs.train_virtual(case, plan, steps, chosen, threads, domains=(0, 1, 0, 2))
                    for threads in (1, 3))
        for part in ("outputs", "weights", "states", "replicas"):
            rs.assert_bitwise(getattr(one, part), getattr(two, part), part)


# ---- all alike -----------------------------------------------------------------------------------


def refusals(body: Callable[[ThreadGroup], Any], error: type[OperError]) -> list[str]:
    """The messages of the errors that two hosts raise."""
    def caught(group: ThreadGroup) -> str:
        with pytest.raises(error) as found:
            body(group)
        return str(found.value)

    return rs.run_ranks(2, caught, domains=(0, 1))


def test_kernels_with_different_bits_raise_errors() -> None:
    """Headers contain the bits, so differing ranks raise errors instead of misreading messages."""
    def body(group: ThreadGroup) -> None:
        tables = opened(group, one_table(9, 4, 32, 2), torch.zeros(9, 4))
        assert tables._exchange is not None
        tables._exchange.bits = MessageBits(16, 32) if group.rank else MessageBits(32, 16)
        tables.handle = tables._create_context()
        tables.lookup(rs.bags_of_one(torch.arange(9)))

    for message in refusals(body, OperError):
        assert "with the same message_bits" in message


def test_a_move_keeps_message_bits() -> None:
    case = rs.dlrm_case("sgd")
    plans = [replace(uniform_plan(case.tables, 2, "striped"), message_bits=b) for b in (8, 32)]

    def body(group: ThreadGroup) -> None:
        rs.open_tables(case, plans[0], group, SGD(lr=0.5)).start_migration(plans[1], None)

    for message in refusals(body, PlanError):
        assert "plan.message_bits=[32, 32], expected [8, 8]" in message

    def moved(group: ThreadGroup) -> None:
        tables = rs.open_tables(case, plans[0], group, SGD(lr=0.5))
        same = replace(plans[1], message_bits={t.name: 8 for t in case.tables})
        tables.start_migration(same, None)

    rs.run_ranks(2, moved, domains=(0, 1))


def test_lookups_for_inference_are_rounded_too() -> None:
    case = rs.dlrm_case("none")
    plan = replace(uniform_plan(case.tables, 2, "striped"), message_bits=8)
    (batches,) = rs.make_steps(case, 2, 1)

    def body(group: ThreadGroup) -> torch.Tensor:
        tables = rs.open_tables(case, plan, group, None)
        return tables.lookup(batches[group.rank].lookup(case)).clone()

    one, far = rs.run_ranks(2, body), rs.run_ranks(2, body, domains=(0, 1))
    for a, b in zip(one, far, strict=True):
        if a.numel():
            assert 0 < (a - b).abs().max() < 0.05
