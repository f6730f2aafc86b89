"""Gradients: not finite, clipped, of per-sample weights."""

import time
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from torch import nn
from torch.autograd import forward_ad

import oper
from oper.errors import InvalidInputError
from oper.plan import uniform_plan
from oper.shmem.batch import Lookup
from oper.shmem.group.groups import SingleGroup
from oper.shmem.optim.optimizers import SGD
from oper.shmem.tables import ShardedTables
from oper.tables import TableSpec
from tests import random_plans as rp, runtime_support as rs
from tests.references import EVERY
from tests.shmem.test_optimizers import assert_close, fbgemm_peer, small_case
from tests.world_support import caught, run_world

pytestmark = pytest.mark.filterwarnings("ignore:no access statistics")


class Bags(nn.Module):
    """A module that concatenates the rows of two tables."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.EmbeddingBag(20, 4, mode="sum") for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.first(ids), self.second(ids)], 1)


IDS = torch.tensor([[1, 2], [3, 4], [5, 6]])


def rows_of(model: nn.Module) -> list[torch.Tensor]:
    return [getattr(value, "full_tensor", value.clone)() for value in model.state_dict().values()]


def sharded(guard: str, model: nn.Module | None = None) -> nn.Module:
    return oper.shard(model or Bags(), optimizer=oper.SGD(lr=0.5), gradient_guard=guard)


def gradient(bad: float | None = None) -> torch.Tensor:
    grad = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    if bad is not None:
        grad[1, 6] = bad  # of the second table
    return grad


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_stop_names_the_table_and_the_update(bad: float) -> None:
    """The passes held back for a refused update are dropped, as they are on the other ranks."""
    model, other = sharded("stop"), sharded("stop")
    for one in (model, other):
        one(IDS).backward(gradient())
    with oper.no_sync(model):
        model(IDS).backward(gradient())
    with pytest.raises(InvalidInputError, match=r"table 'second' in update 2 .*\(1, 2\)="):
        model(IDS).backward(gradient(bad))
    assert torch.equal(rows_of(model)[1], rows_of(other)[1])
    for one in (model, other):
        one(IDS + 7).backward(gradient())
    assert torch.equal(rows_of(model)[1], rows_of(other)[1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_skip_sets_the_samples_gradient_to_zero(bad: float) -> None:
    model, other = sharded("skip"), sharded("off")
    with pytest.warns(UserWarning, match="table 'second' in update 1 .*; 1 of 3 gradient rows"):
        model(IDS).backward(gradient(bad))
    grad = gradient()
    grad[1, 4:] = 0
    other(IDS).backward(grad)
    for mine, want in zip(rows_of(model), rows_of(other), strict=True):
        assert torch.equal(mine, want) and bool(torch.isfinite(mine).all())


@pytest.mark.parametrize("grad", [False, True])
def test_a_tangent_of_weights_is_refused(grad: bool) -> None:
    """Without gradients, it got lost."""
    bag, weights = sharded("off", nn.EmbeddingBag(20, 4, mode="sum")), torch.ones(3, 2)
    with torch.set_grad_enabled(grad), forward_ad.dual_level():
        with pytest.raises(InvalidInputError, match=r"with a tangent.*no forward-mode derivative"):
            bag(IDS, per_sample_weights=forward_ad.make_dual(weights, weights))
        assert bag(IDS, per_sample_weights=weights).shape == (3, 4)


def test_weights_of_a_skipped_sample_get_no_gradient() -> None:
    bag = sharded("skip", nn.EmbeddingBag(20, 4, mode="sum"))
    weights, grad = torch.ones(3, 2, requires_grad=True), torch.ones(3, 4)
    grad[1, 2] = float("nan")
    with pytest.warns(UserWarning, match="in update 1 .*; 1 of 3 gradient rows"):
        bag(IDS, per_sample_weights=weights).backward(grad)
    assert weights.grad is not None
    assert weights.grad.any(dim=1).tolist() == [True, False, True]
    assert bool(torch.isfinite(weights.grad).all())
    bag.tables.guard.choose("stop")
    with pytest.raises(InvalidInputError, match="in update 2"):
        bag(IDS, per_sample_weights=weights).backward(grad)


def test_large_finite_gradients_pass() -> None:
    """Large finite gradients pass although their sum overflows."""
    model = sharded("stop")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(IDS).backward(torch.full((3, 8), 3e38) * torch.tensor([1, 1, -1])[:, None])
    assert bool(torch.isfinite(rows_of(model)[0][1]).all())


def test_unpooled_rows_are_named_by_their_feature() -> None:
    case = rs.Case(tuple(TableSpec(f"t{f}", 9, 4, (f,), "none") for f in "ab"), ("b", "a"))
    tables = rs.open_alone(case, SGD(lr=0.5))
    tables.guard.choose("skip")
    before = rs.read_all(tables)
    ids, lengths = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([2, 1, 0, 2])
    out = tables.lookup(Lookup(ids, lengths, case.key_of, 2, pooled=False))
    grad = torch.ones_like(out)
    grad[4, 0] = float("nan")  # id 3 of feature b, whose rows follow those of a
    with pytest.warns(UserWarning, match="table 'tb' in update 1"):
        out.backward(grad)
    moved = {name: (rows != before[name]).any(dim=1).nonzero().reshape(-1).tolist()
             for name, rows in rs.read_all(tables).items()}
    assert moved == {"ta": [4, 5], "tb": [1, 2]}


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="gradient_guard='on'"):
        sharded("on")


def _ranks(rank: int, world_size: int) -> list[torch.Tensor]:
    model = sharded("skip")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model(IDS + rank).backward(gradient(float("nan") if rank else None))
    assert sum("count as zero" in str(w.message) for w in found) == rank
    return rows_of(model)


def test_a_guard_may_skip_samples_on_one_rank_only() -> None:
    first, second = run_world(2, _ranks)
    model, other = sharded("off"), gradient()
    other[1, 4:] = 0
    model(torch.cat([IDS, IDS + 1])).backward(torch.cat([gradient(), other]) / 2)
    for mine, theirs, want in zip(first, second, rows_of(model), strict=True):
        assert torch.equal(mine, theirs)
        torch.testing.assert_close(mine, want)


def _one_stops(rank: int, world_size: int, how: str) -> tuple[str, float, Any]:
    """Rank 1 has a NaN gradient; returns each rank's error, the seconds until it, and the rows
    before, after it, and after another step."""
    model = sharded("stop")
    bad = gradient(float("nan") if rank else None)
    rows = [rows_of(model)]
    begin = time.monotonic()
    with caught() as errors:
        if how == "parts":
            with oper.micro_batches(model):
                model(IDS + rank).backward(gradient())
                model(IDS + rank).backward(bad)
        else:
            model(IDS + rank).backward(bad)
    took = time.monotonic() - begin
    if how != "hosts":
        rows.append(rows_of(model))
        model(IDS + rank).backward(gradient())
        rows.append(rows_of(model))
    return errors[0], took, rows


@pytest.mark.parametrize("how", ["whole", "parts", "hosts"])
def test_a_stop_on_one_rank_releases_the_others(how: str) -> None:
    (errors, took, rows), (mine, _, others) = run_world(
        2, _one_stops, how, labels="ab" if how == "hosts" else "", env={"OPER_DEADLINE_S": "60"})
    assert mine.startswith("InvalidInputError: the gradient of table 'second' in update 1"), mine
    assert errors.startswith("PeerLostError") and "rank=1" in errors, errors
    assert took < 30
    if how == "hosts":
        return
    assert "refused its batch" in errors
    before, then, after = ([a, b] for a, b in rows)
    assert torch.equal(then[1], before[1]) and not torch.equal(after[1], then[1])
    if how == "parts":
        assert torch.equal(then[0], before[0])
    for a, b in zip(rows, others, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _one_stops_while_accumulating(rank: int, world_size: int) -> tuple[Any, ...]:
    """Rank 1 catches the error of a window's first pass and starts another window; returns each
    rank's errors, and the rows before and after."""
    model, errors = sharded("stop"), []
    before = rows_of(model)
    for window in range(1 + rank):
        with caught() as found:
            with oper.no_sync(model):
                model(IDS + rank).backward(gradient(float("nan") if rank > window else None))
            model(IDS + rank).backward(gradient())
        errors += found
    return errors, before, rows_of(model)


def test_no_rank_makes_an_update_that_lacks_a_pass() -> None:
    """No update mixes gradients of different windows, and no rank waits until the deadline."""
    begin = time.monotonic()
    (errors, before, after), (mine, *_) = run_world(2, _one_stops_while_accumulating,
                                                  env={"OPER_DEADLINE_S": "60"})
    assert time.monotonic() - begin < 50
    assert mine[0].startswith("InvalidInputError: the gradient of table 'second' in update 1"), mine
    assert mine[1].startswith("InvalidInputError: no rank makes this update: error of a pass"), mine
    assert errors[0].startswith("PeerLostError") and "refused its batch" in errors[0], errors
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def _drops(rank: int, world_size: int) -> tuple[list[str], torch.Tensor]:
    """Like the previous program with one collection; gradients are dropped at a window's start."""
    errors = []
    bag = sharded("stop", nn.EmbeddingBag(20, 4, _weight=torch.zeros(20, 4), mode="sum"))
    for window in range(3):
        bad = float("nan") if rank and not window else 1.0
        with caught() as found:
            bag.tables.drop_gradients()
            with oper.no_sync(bag):
                bag(IDS + rank).backward(torch.full((3, 4), bad * window))
            bag(IDS + rank).backward(torch.ones(3, 4))
        errors.append("".join(found).partition(":")[0])
    return errors, rows_of(bag)[0]


def test_dropped_gradients_of_one_rank_end_the_update_of_all() -> None:
    """The other ranks get an error, and all ranks continue with the same window."""
    (errors, rows), (mine, others) = run_world(2, _drops, env={"OPER_DEADLINE_S": "60"})
    assert (errors, mine) == (["PeerLostError", "", ""], ["InvalidInputError", "", ""])
    # Windows 1 and 2: gradients window + 1, averaged over two ranks, at a rate of 0.5.
    want = torch.zeros(20, 4)
    for ids in (IDS, IDS + 1):
        want[ids.reshape(-1)] -= 0.5 * (2 + 3) / 2
    assert torch.equal(rows, want) and torch.equal(others, want)


def test_a_single_rank_skips_an_update_that_lacks_a_pass() -> None:
    bag = sharded("stop", nn.EmbeddingBag(20, 4, mode="sum"))
    before, grad = rows_of(bag)[0], torch.ones(3, 4)
    for drops in (False, True):
        with pytest.raises(InvalidInputError, match="update 1 is not finite"), oper.no_sync(bag):
            bag(IDS).backward(grad * float("nan"))
        if drops:
            bag.tables.drop_gradients()
        else:
            with pytest.raises(InvalidInputError, match="no rank makes this update"):
                bag(IDS).backward(grad)
        assert torch.equal(rows_of(bag)[0], before)
    bag(IDS).backward(grad)
    assert not torch.equal(rows_of(bag)[0], before)


# ---- clipping by element and by the norm of a row's gradient -------------------------------------

ELEMENT, NORM = 0.02, 0.05



@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("limits", [(ELEMENT, None), (None, NORM), (ELEMENT, NORM)],
                         ids=["elements", "rows", "both"])
@pytest.mark.parametrize("base", ["sgd", "rowwise_adagrad", "rowwise_adagrad_l2", "adam_clipped"])
def test_clipping_equals_its_definition(base: str, limits: tuple, world_size: int) -> None:
    """Covers duplicates, ranks, push tiers and column splits; only some values are clipped."""
    optimizer = replace(EVERY[base], max_gradient=limits[0], max_row_norm=limits[1])
    case = small_case(weighted=base == "sgd")
    steps = rs.make_steps(case, world_size, 3)
    want = rs.train_reference(case, steps, optimizer, torch.float64)
    for plan in (rp.mixed_plan(case.tables, world_size, 1),
                 rp.rich_plan(case.tables, world_size, 2, True),
                 rp.in_columns(case.tables, world_size)):
        assert_close(rs.train_virtual(case, plan, steps, optimizer), want, 2e-5)
    free = rs.train_reference(case, steps, replace(
        optimizer, max_gradient=None, max_row_norm=None), torch.float64)
    assert (free.weights["two"] - want.weights["two"]).abs().max() > 1e-3


def test_each_table_has_its_own_limits() -> None:
    """Each table has its own limit, in pooled and unpooled lookups."""
    tables = (TableSpec("a", 9, 4, ("f", "g"), "sum", optimizer="sgd"),
              TableSpec("b", 9, 4, ("f",), "sum", optimizer="sgd"))
    for pooled in (True, False):
        opened = ShardedTables(
            uniform_plan(tables, 1), [("f", "a"), ("g", "a"), ("f", "b")], SingleGroup(),
            {"a": SGD(1.0, max_gradient=0.25), "b": SGD(1.0)}, 1.0)
        batch = Lookup(torch.tensor([1, 2, 3]), torch.tensor([1, 0, 1, 1]), torch.tensor([0, 1, 0]),
                       2, None, pooled)
        out = opened.lookup(batch)
        out.backward(torch.full_like(out, -7.0))
        assert opened.read("a")[:, 0].tolist() == [0, .25, .25, .25, 0, 0, 0, 0, 0], pooled
        assert opened.read("b")[:, 0].tolist() == [0, 7, 0, 0, 0, 0, 0, 0, 0], pooled
        empty = Lookup(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64),
                       torch.tensor([0, 1, 0]), 0, None, pooled)
        opened.lookup(empty).sum().backward()


@pytest.mark.parametrize("mean", [False, True])
def test_equals_fbgemm(mean: bool) -> None:
    """Results equal FBGEMM's operator with gradient_clipping, including the weights' gradient."""
    torch.manual_seed(0)
    case = rs.Case((TableSpec("t", 50, 8, ("f",)),), ("f",))
    theirs = fbgemm_peer(
        case, SGD(lr=0.5), gradient_clipping=True, max_gradient=0.3,
        pooling_mode=PoolingMode.MEAN if mean else PoolingMode.SUM)
    bag = torch.nn.EmbeddingBag(50, 8, mode="mean" if mean else "sum",
                                _weight=rs.initial_weights(case)["t"])
    ours = oper.shard(bag, optimizer=oper.SGD(lr=0.5, max_gradient=0.3))
    ids, offsets = torch.randint(0, 50, (60,)), torch.arange(0, 61, 3)
    scales = [None, None] if mean else [torch.rand(60).requires_grad_()] * 2
    scales = [None if s is None else s.detach().clone().requires_grad_() for s in scales]
    grad = torch.randn(20, 8)
    theirs(ids, offsets, scales[0]).backward(grad)
    ours(ids, offsets[:-1], scales[1]).backward(grad)
    assert torch.allclose(ours.state_dict()["weight"], theirs.split_embedding_weights()[0],
                          rtol=1e-5, atol=1e-6)
    if not mean:
        assert torch.allclose(scales[1].grad, scales[0].grad, rtol=1e-5, atol=1e-6)


# ---- gradients of per-sample weights against autograd --------------------------------------------


def wanted(case: rs.Case, batch: rs.Batch) -> torch.Tensor:
    weights = batch.weights.detach().clone().requires_grad_()
    other = rs.Batch(batch.lengths, batch.ids, weights, batch.target)
    out = rs.reference_forward(case, rs.initial_weights(case), other)
    rs.rank_loss(out, batch.target).backward()
    return weights.grad


@pytest.mark.parametrize("ids", [torch.int64, torch.int32])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_equals_autograd(world_size: int, ids: torch.dtype) -> None:
    """Sum and mean, bags of all lengths and empty ones, empty batches, a key of two tables.

    Each rank's gradient is that of its own loss, whatever W; the rows are those before the update,
    which is the same without gradients of weights.
    """
    case = rs.dlrm_case(weighted=True, id_dtype=ids)
    (batches,) = rs.make_steps(case, world_size, 1)
    plan = rp.mixed_plan(case.tables, world_size, 1)

    def body(group):
        tables = rs.open_tables(case, plan, group, SGD(lr=0.5))
        batch = batches[group.rank]
        rs.rank_loss(tables.lookup(batch.lookup(case)), batch.target).backward()
        return batch.weights.grad, rs.read_all(tables)

    plain = rs.run_ranks(world_size, body)
    for batch in batches:
        batch.weights.requires_grad_()
    got = rs.run_ranks(world_size, body)
    rs.assert_bitwise([rows for _, rows in got], [rows for _, rows in plain], "rows")
    for batch, (gradient, _) in zip(batches, got, strict=True):
        rs.assert_near(gradient, wanted(case, batch), "gradient")
    assert max(g.abs().max() for g, _ in got if g.numel()) > 0.1
    # Keys that no table reads get zeros.
    extra = case.keys.index("extra")
    ends = [0, *batches[0].lengths.view(len(case.keys), -1).sum(1).cumsum(0).tolist()]
    assert ends[extra] < ends[extra + 1]
    assert not got[0][0][ends[extra]:ends[extra + 1]].any()


def test_many_bags_on_several_threads() -> None:
    tables = (TableSpec("t", 500, 24, ("f",), "sum"), TableSpec("m", 70, 5, ("g", "f"), "mean"))
    case = rs.Case(tables, ("g", "f"), weighted=True, max_length=40)
    batch = rs.make_batch(case, 1, 2500)
    batch.weights.requires_grad_()
    results = []
    for threads in (1, 2, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        sharded = rs.open_alone(case, SGD(lr=0.1))
        rs.rank_loss(sharded.lookup(batch.lookup(case)), batch.target).backward()
        torch.set_num_threads(before)
        results.append(batch.weights.grad)
        batch.weights.grad = None
    rs.assert_near(results[0], wanted(case, batch), "gradient")
    rs.assert_bitwise(results[1:], results[:1] * 2, "weight gradients on one and two threads")


def test_rows_that_have_changed_since_the_lookup_are_refused() -> None:
    """One lookup's backward pass updates rows from which another's gradient is computed."""
    case = rs.dlrm_case(weighted=True)
    tables = rs.open_alone(case, SGD(lr=0.5))
    first, second = (replace(rs.make_batch(case, 0, k).lookup(case)) for k in range(2))
    for batch in (first, second):
        batch.weights = batch.weights.clone().requires_grad_()
    one, other = tables.lookup(first).sum(), tables.lookup(second).sum()
    one.backward()
    with pytest.raises(InvalidInputError, match="updates of the rows since the lookup=1"):
        other.backward()
    # One backward pass updates when it has all gradients; one under no_sync changes no row.
    (tables.lookup(first).sum() + tables.lookup(second).sum()).backward()
    with tables.no_sync():
        one, other = tables.lookup(first).sum(), tables.lookup(second).sum()
        one.backward()
        other.backward()


def test_weights_of_read_only_tables_must_not_need_gradients() -> None:
    case = rs.dlrm_case("none", weighted=True)
    tables = ShardedTables(uniform_plan(case.tables, 1), case.features, SingleGroup(), None)
    batch = rs.make_batch(case, 5, 3)
    assert not tables.lookup(batch.lookup(case)).requires_grad
    batch.weights.requires_grad_()
    with pytest.raises(InvalidInputError, match="per-sample weights"):
        tables.lookup(batch.lookup(case))
    with pytest.raises(InvalidInputError, match="per-sample weights"):
        torch.compile(lambda x: tables.lookup(x), backend="aot_eager")(batch.lookup(case))
    with torch.no_grad():
        assert tables.lookup(batch.lookup(case)).shape == (3, case.columns)
