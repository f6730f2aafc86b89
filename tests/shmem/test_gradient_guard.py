"""Gradients that are not finite: an error that names them, or zero gradients per sample."""

from __future__ import annotations

import time
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import oper
from oper.errors import InvalidInputError, OperError
from tests.world_support import run_world

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
    model = sharded("stop")
    model(IDS).backward(gradient())
    second = rows_of(model)[1]
    with pytest.raises(InvalidInputError, match=r"table 'second' in update 2 .*\(1, 2\)="):
        model(IDS).backward(gradient(bad))
    assert torch.equal(rows_of(model)[1], second)


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
    configs = pytest.importorskip("torchrec.modules.embedding_configs")
    modules = pytest.importorskip("torchrec.modules.embedding_modules")
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    model = sharded("skip", modules.EmbeddingCollection([configs.EmbeddingConfig(
        name=f"t{f}", num_embeddings=9, embedding_dim=4, feature_names=[f]) for f in "ab"]))
    before = rows_of(model)
    kjt = KeyedJaggedTensor(["b", "a"], torch.tensor([1, 2, 3, 4, 5]),
                            lengths=torch.tensor([2, 1, 0, 2]))
    out = model(kjt)
    grads = [torch.ones_like(out[f].values()) for f in "ab"]
    grads[1][2, 0] = float("nan")  # id 3 of feature b
    with pytest.warns(UserWarning, match="table 'tb' in update 1"):
        torch.autograd.backward([out[f].values() for f in "ab"], grads)
    after = rows_of(model)
    moved = [(a != b).any(dim=1).nonzero().reshape(-1).tolist()
             for a, b in zip(after, before, strict=True)]
    assert moved == [[4, 5], [1, 2]]


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
    model, told = sharded("stop"), ""
    bad = gradient(float("nan") if rank else None)
    rows = [rows_of(model)]
    begin = time.monotonic()
    try:
        if how == "parts":
            with oper.micro_batches(model):
                model(IDS + rank).backward(gradient())
                model(IDS + rank).backward(bad)
        else:
            model(IDS + rank).backward(bad)
    except OperError as error:
        told = f"{type(error).__name__}: {error}"
    took = time.monotonic() - begin
    if how != "hosts":
        rows.append(rows_of(model))
        model(IDS + rank).backward(gradient())
        rows.append(rows_of(model))
    return told, took, rows


@pytest.mark.parametrize("how", ["whole", "parts", "hosts"])
def test_a_stop_on_one_rank_releases_the_others(how: str) -> None:
    (told, took, rows), (mine, _, others) = run_world(
        2, _one_stops, how, labels="ab" if how == "hosts" else "", env={"OPER_DEADLINE_S": "60"})
    assert mine.startswith("InvalidInputError: the gradient of table 'second' in update 1"), mine
    assert told.startswith("PeerLostError") and "rank=1" in told, told
    assert took < 30
    if how == "hosts":
        return
    assert "refused its batch" in told
    before, then, after = ([a, b] for a, b in rows)
    assert torch.equal(then[1], before[1]) and not torch.equal(after[1], then[1])
    if how == "parts":
        assert torch.equal(then[0], before[0])
    for a, b in zip(rows, others, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_stop_drops_accumulated_gradients() -> None:
    """After a refused pass, the passes held back are dropped, as they are on the other ranks."""
    weight, grad = torch.randn(20, 4), torch.ones(3, 4)
    model, other = (sharded("stop", nn.EmbeddingBag.from_pretrained(
        weight.clone(), freeze=False, mode="sum")) for _ in range(2))
    with oper.no_sync(model):
        model(IDS).backward(grad)
    with pytest.raises(InvalidInputError, match="in update 1"):
        model(IDS).backward(grad * float("nan"))
    for bag in (model, other):
        bag(IDS + 7).backward(grad)
    assert torch.equal(rows_of(model)[0], rows_of(other)[0])


def _one_stops_while_accumulating(rank: int, world_size: int) -> tuple[Any, ...]:
    """Rank 1 catches the error of a window's first pass and starts another window; returns each
    rank's errors, and the rows before and after."""
    model, told = sharded("stop"), []
    before = rows_of(model)
    for window in range(1 + rank):
        try:
            with oper.no_sync(model):
                model(IDS + rank).backward(gradient(float("nan") if rank > window else None))
            model(IDS + rank).backward(gradient())
            told.append("")
        except OperError as error:
            told.append(f"{type(error).__name__}: {error}")
    return told, before, rows_of(model)


def test_no_rank_makes_an_update_that_lacks_a_pass() -> None:
    """No update mixes gradients of different windows, and no rank waits until the deadline."""
    begin = time.monotonic()
    (told, before, after), (mine, *_) = run_world(2, _one_stops_while_accumulating,
                                                  env={"OPER_DEADLINE_S": "60"})
    assert time.monotonic() - begin < 50
    assert mine[0].startswith("InvalidInputError: the gradient of table 'second' in update 1"), mine
    assert mine[1].startswith("InvalidInputError: no rank makes this update: error of a pass"), mine
    assert told[0].startswith("PeerLostError") and "refused its batch" in told[0], told
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def _drops(rank: int, world_size: int) -> tuple[list[str], torch.Tensor]:
    """Like the previous program with one collection; gradients are dropped at a window's start."""
    bag, told = sharded("stop", nn.EmbeddingBag(20, 4, _weight=torch.zeros(20, 4), mode="sum")), []
    for window in range(3):
        bad = float("nan") if rank and not window else 1.0
        try:
            bag.tables.drop_gradients()
            with oper.no_sync(bag):
                bag(IDS + rank).backward(torch.full((3, 4), bad * window))
            bag(IDS + rank).backward(torch.ones(3, 4))
            told.append("")
        except OperError as error:
            told.append(type(error).__name__)
    return told, rows_of(bag)[0]


def test_dropped_gradients_of_one_rank_end_the_update_of_all() -> None:
    """The other ranks get an error, and all ranks continue with the same window."""
    (told, rows), (mine, others) = run_world(2, _drops, env={"OPER_DEADLINE_S": "60"})
    assert (told, mine) == (["PeerLostError", "", ""], ["InvalidInputError", "", ""])
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
