"""Replica groups that send rows and gradients with fewer bits."""


import pytest
import torch

from oper.errors import OperError
from oper.messages import number_bytes
from oper.plan import uniform_plan
from oper.shmem.optim.optimizers import SGD, RowWiseAdagrad
from oper.shmem.replica_groups import synchronizer
from oper.shmem.tables import ShardedTables
from oper.tables import TableSpec
from tests import runtime_support as rs
from tests.replica_groups_support import PLANS, run_groups, simulated, trained

# ---- fewer bits per number -----------------------------------------------------------------------

ROWS, DIM, LR = 40, 16, 0.1
CASE = rs.Case([TableSpec("t", ROWS, DIM, ("f",), "sum", optimizer="sgd")], (2,))


def gradient(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids, and the gradients of their rows, which do not depend on the rows."""
    g = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(0, ROWS, (6,), generator=g), torch.randn(6, DIM, generator=g)


def train(tables: ShardedTables, step: int, rank: int) -> None:
    ids, of = gradient(step, rank)
    tables.lookup(rs.bags_of_one(ids)).backward(of)


def unsharded(steps: int, ranks: int) -> torch.Tensor:
    rows = rs.initial_weights(CASE)["t"].clone()
    for step in range(steps):
        for rank in range(ranks):
            ids, of = gradient(step, rank)
            rows.index_add_(0, ids, of, alpha=-LR / ranks)
    return rows


@pytest.mark.parametrize(("plan", "optimizer", "delay", "bits"), [
    ("mixed", "sgd", 0, 8), ("striped", "rowwise_adagrad", 2, 8), ("mixed", "adam", 0, 16)])
def test_rounded_rows_are_averaged(plan: str, optimizer: str, delay: int, bits: int,
                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that lies between two codes may be rounded differently in plain torch."""
    monkeypatch.setattr(synchronizer, "CHUNK_BYTES", 1 << 18)  # several exchanges
    case = rs.dlrm_case(optimizer)
    steps, chosen = rs.make_steps(case, 4, 8), rs.ALL_OPTIMIZERS[optimizer]
    with rs.default_dtype(torch.bfloat16):  # must not become the dtype of sums
        got = trained(case, PLANS[plan](case), steps, chosen, 3, delay=delay, bits=bits)
    rounded, exact = (simulated(case, steps, chosen, 3, 2, delay, b) for b in (bits, 32))

    def share_off(name: str, want: torch.Tensor) -> float:
        found = (got.weights | got.states)[name]
        return float(((found - want).abs() > 2e-5 * want.abs().max()).float().mean())

    assert all(share_off(n, x) < 0.01 for n, x in (rounded.weights | rounded.states).items())
    assert any(share_off(n, x) > 0.1 for n, x in exact.weights.items())


@pytest.mark.parametrize("delay", [0, 2])
def test_rounding_errors_are_fed_back(delay: int) -> None:
    """The mean over the groups stays exact, and the groups differ by about a step of the codes."""
    def body(tables: ShardedTables, rank: int) -> tuple[torch.Tensor, ...]:
        for step in range(6):
            train(tables, step, rank)
        before = rs.read_all(tables)["t"]
        with pytest.raises(OperError, match="updates since the last"):
            tables.write("t", before)
        tables.replicas.synchronize()
        tables.barrier()
        found = before, tables.read("t")
        tables.write("t", found[1])
        tables.flush_replicas()
        return found

    ranks = run_groups(CASE, uniform_plan(CASE.tables, 2, "striped"), SGD(lr=LR), 3, body,
                       delay=delay, bits=8)
    want = unsharded(6, 4)
    assert all(torch.allclose(rows, want, rtol=0, atol=1e-6) for _, rows in ranks)
    if not delay:
        ours, theirs = ranks[0][0], ranks[2][0]
        apart = (ours - theirs).abs() / ((ours.amax(1) - ours.amin(1))[:, None] / 255)
        assert 0.1 < apart.max() < 1.1


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_only_groups_that_updated_a_row_contribute_to_its_average(dtype: str) -> None:
    """Covers a row that another group has sent rounded before, and whose error it has kept."""
    case = rs.Case([TableSpec("t", ROWS, DIM, ("f",), "sum", optimizer="rowwise_adagrad",
                              dtype=dtype)], (1,))

    def body(tables: ShardedTables, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        for row in ((0, 1), (2, 2), (1, 0)):  # by group; synchronized after the second update
            out = tables.lookup(rs.bags_of_one(torch.tensor([row[rank]])))
            out.backward(torch.linspace(0.2, 1, DIM)[None])
        tables.replicas.synchronize()
        return tables.read("t").float(), tables.read("t", part="momentum1")

    exact, fewer = (run_groups(case, uniform_plan(case.tables, 1), RowWiseAdagrad(lr=LR), 2, body,
                               bits=bits) for bits in (32, 8))
    assert all(torch.equal(x, y) for x, y in zip(*fewer, strict=True))
    (rows, squares), (want, want_squares) = fewer[0], exact[0]
    assert torch.equal(squares, want_squares)
    step = (want.amax(1) - want.amin(1)).max() / 255
    assert float((rows - want).abs().max()) <= (step if dtype == "float32" else 0)


@pytest.mark.parametrize(("every", "bits"), [(1, 8), (1, 16), (2, 8), (2, 16)])
def test_bytes_sent(every: int, bits: int) -> None:
    """Slots, and rows or gradients in the form of messages; what else is sent has a fixed size."""
    def body(tables: ShardedTables, rank: int) -> int:
        before = tables.replicas.sent_bytes
        for step in range(every):
            train(tables, step, rank)
        sent: int = tables.replicas.sent_bytes - before
        return sent

    exact, fewer = (run_groups(CASE, uniform_plan(CASE.tables, 1), SGD(lr=LR), every, body,
                               bits=b)[0] for b in (32, bits))
    # With SGD, groups send the rows that any group has changed, but gradients of their own.
    distinct = torch.cat([gradient(step, rank)[0] for step in range(every)
                          for rank in range(2 if every > 1 else 1)]).unique().numel()
    assert exact - fewer == distinct * (number_bytes(32, DIM) - number_bytes(bits, DIM)) > 0


@pytest.mark.parametrize("bits", [8, 16])
def test_rounded_gradients_give_all_groups_the_same_rows(bits: int) -> None:
    """With 8 bits rounding is stochastic, so that errors of many steps average out."""
    steps = 64

    def body(tables: ShardedTables, rank: int) -> torch.Tensor:
        for _ in range(steps):
            train(tables, 0, rank)
        return rs.read_all(tables)["t"]

    start = rs.initial_weights(CASE)["t"]
    ranks = run_groups(CASE, uniform_plan(CASE.tables, 2, "striped"), SGD(lr=LR), 1, body,
                       bits=bits)
    assert all(torch.equal(rows, ranks[0]) for rows in ranks)
    mean, want = (ranks[0] - start) / steps, unsharded(1, 4) - start
    assert not torch.equal(mean, want)
    # A step of the codes of a row's gradient, times the learning rate and the mean over ranks.
    step = LR / 4 * 8 / 255
    limit = 5 * step / (4 * steps) ** 0.5 if bits == 8 else 2**-8 * float(want.abs().max())
    assert float((mean - want).abs().max()) < limit


@pytest.mark.parametrize(("every", "delay", "bits"), [(1, 0, 8), (2, 0, 32), (2, 2, 8)])
def test_an_infinite_gradient_reaches_one_number(every: int, delay: int, bits: int) -> None:
    """As in the unsharded table, all other numbers of its row stay finite."""
    def body(tables: ShardedTables, rank: int) -> torch.Tensor:
        for step in range(5):
            of = torch.ones(1, DIM)
            of[0, 3] = float("inf") if step == rank == 0 else 1
            tables.lookup(rs.bags_of_one(torch.tensor([7]))).backward(of)
        tables.replicas.synchronize()
        return tables.read("t")

    ranks = run_groups(CASE, uniform_plan(CASE.tables, 1), SGD(lr=LR), every, body, delay=delay,
                       bits=bits)
    for rows in ranks:
        assert torch.equal((~rows.isfinite()).nonzero(), torch.tensor([[7, 3]]))
        assert rows[7, 3] == -float("inf") and torch.equal(rows[:7], ranks[0][:7])
