"""Checkpoints between TorchRec's shardings and OPER: weights and row-wise Adagrad's state."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward
from torchrec.modules import embedding_configs as configs
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import oper
from oper.integration.torchrec_modules import table_specs
from tests.checkpoint_support import random_kjt, read
from tests.random_plans import mixed_plan
from tests.runtime_support import assert_bitwise, assert_near
from tests.world_support import RankFailedError, run_world

ROWS = {"a": 38, "b": 200}
KINDS = ("table_wise", "row_wise", "column_wise")
LR = 0.1


class Model(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.bags = EmbeddingBagCollection([configs.EmbeddingBagConfig(
            name=f"t{f}", num_embeddings=n, embedding_dim=16, feature_names=[f])
            for f, n in ROWS.items()])

    def forward(self, kjt: KeyedJaggedTensor) -> torch.Tensor:
        found = self.bags(kjt).to_dict()
        return torch.cat([found[f] for f in ROWS], 1)


def batch_of(step: int, rank: int) -> KeyedJaggedTensor:
    return random_kjt(ROWS, 6, 10 * step + rank)


def by_torchrec(kind: str, seed: int, **tag: float) -> tuple[nn.Module, Any]:
    """The model and its fused optimizer; `tag`: arguments of the optimizer's tag."""
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.sharding_plan import (
        column_wise,
        construct_module_sharding_plan,
        row_wise,
        table_wise,
    )
    from torchrec.distributed.types import ShardingPlan
    class Sharder(EmbeddingBagCollectionSharder):
        def sharding_types(self, compute_device_type: str) -> list[str]:
            return [*KINDS, "data_parallel"]  # the stock one hides row_wise on CPU

    model = Model(seed)
    _apply_optimizer_in_backward(RowWiseAdagrad, model.bags.parameters(),
                                 dict(tag or {"lr": LR, "eps": 1e-8}))
    make = {"table_wise": lambda k: table_wise(rank=k % 2), "row_wise": lambda k: row_wise(),
            "column_wise": lambda k: column_wise(ranks=[0, 1])}[kind]
    sharder = Sharder()
    plan = construct_module_sharding_plan(
        model.bags, {f"t{f}": make(k) for k, f in enumerate(ROWS)}, sharder=sharder,
        local_size=2, world_size=2, device_type="cpu")
    wrapped = DistributedModelParallel(model, device=torch.device("cpu"),
                                       plan=ShardingPlan({"bags": plan}), sharders=[sharder])
    return wrapped, wrapped.fused_optimizer


def by_oper(world_size: int, seed: int) -> tuple[nn.Module, Any]:
    model = Model(seed)
    oper.shard(model, plan=mixed_plan(table_specs(model.bags), world_size, 3),
               optimizer=oper.RowWiseAdagrad(lr=LR, eps=1e-8))
    return model, CombinedOptimizer([("bags", model.bags.fused_optimizer)])


def run(rank: int, world_size: int, kind: str, load: str | None, save: str, parts: str
        ) -> tuple[torch.Tensor, torch.Tensor]:
    """Load, save, then outputs now and after two more steps of training.

    A fresh model trains two steps before it saves. `parts`: "both", or "model" without state.
    """
    seed = 0 if load is None else 50
    model, optimizer = by_oper(world_size, seed) if kind == "oper" else by_torchrec(kind, seed)
    if load is not None:
        state = _state(model, optimizer, parts)
        dcp.load(state, checkpoint_id=load)
        model.load_state_dict(state["model"])
        if parts == "both":
            optimizer.load_state_dict(state["optimizer"])
    else:
        _train(model, rank, range(2))
    dcp.save(_state(model, optimizer, parts), checkpoint_id=save)
    with torch.no_grad():
        now = model(batch_of(9, rank)).clone()
    _train(model, rank, range(2, 4))
    with torch.no_grad():
        return now, model(batch_of(9, rank)).clone()


def _state(model: nn.Module, optimizer: Any, parts: str) -> dict[str, Any]:
    state = {"model": model.state_dict()}
    return state | ({"optimizer": optimizer.state_dict()} if parts == "both" else {})


def _train(model: nn.Module, rank: int, steps: range) -> None:
    for step in steps:
        (model(batch_of(step, rank)) - 0.2).square().sum().backward()


# TorchRec keeps one state per column piece under column_wise, see below.
@pytest.mark.parametrize("kind, parts", [
    ("table_wise", "both"), ("row_wise", "both"), ("column_wise", "model")])
def test_checkpoints_between_torchrec_and_oper(kind: str, parts: str, tmp_path: Path) -> None:
    """OPER continues TorchRec's training with equal results; TorchRec loads OPER's checkpoint."""
    first, second, third = (str(tmp_path / n) for n in ("torchrec", "oper", "back"))
    theirs = run_world(2, run, kind, None, first, parts)
    ours = run_world(2, run, "oper", first, second, parts)
    back = run_world(2, run, kind, second, third, parts)
    assert_bitwise(read(second), read(first), "TorchRec to OPER")
    assert_bitwise(read(third), read(first), "OPER to TorchRec")
    assert_near([o[:1] for o in ours], [o[:1] for o in theirs], "outputs")
    if parts == "both":  # then training goes on alike as well
        assert_near(ours, theirs, "OPER")
        assert_near(back, theirs, "back")
        assert (ours[0][0] - ours[0][1]).abs().max() > 1e-2
    one = str(tmp_path / "one")
    run_world(1, run, "oper", first, one, parts)
    assert_bitwise(read(one), read(first), "TorchRec on two ranks to OPER on one")


def _step(model: nn.Module, rank: int) -> None:
    """Train on output gradients that do not depend on the rows and differ between columns."""
    out = model(batch_of(0, rank))
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(rank)))


def _planned(rank: int, world_size: int, kind: str, load: str | None, save: str) -> torch.Tensor:
    """Like `run` with OPER's planner, but without training after a load; return the outputs."""
    model, optimizer = by_oper(world_size, 0) if kind == "oper" else by_torchrec(kind, 0)
    if load is None:
        _step(model, rank)
    elif kind == "oper":
        oper.load_checkpoint(load, model, optimizer)
    else:
        state = _state(model, optimizer, "both")
        dcp.load(state, checkpoint_id=load, planner=oper.LoadPlanner())
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    dcp.save(_state(model, optimizer, "both"), checkpoint_id=save)
    with torch.no_grad():
        return model(batch_of(9, rank)).clone()


def test_column_wise_state_is_converted_both_ways(tmp_path: Path) -> None:
    """TorchRec's state of column shards becomes the state of the row, and vice versa."""
    first, second, third, fourth = (str(tmp_path / n) for n in ("cw", "oper", "back", "again"))
    theirs = run_world(2, _planned, "column_wise", None, first)
    ours = run_world(2, _planned, "oper", first, second)
    assert_bitwise(ours, theirs, "outputs")
    before, after = read(first), read(second)
    for table, n in (("ta", 38), ("tb", 200)):
        name = f"optimizer.state.bags.embedding_bags.{table}.weight.{table}.momentum1"
        pieces = before[name].view(2, n)  # of 8 columns each
        assert (pieces[0] - pieces[1]).abs().max() > 0
        torch.testing.assert_close(after[name], pieces.double().mean(0).float(), rtol=0, atol=0)
    back = run_world(2, _planned, "column_wise", second, third)
    assert_bitwise(back, theirs, "outputs")
    for name, value in read(third).items():
        want = after[name].repeat(2) if "momentum" in name else after[name]
        assert_bitwise(value, want, name)
    run_world(1, _planned, "oper", third, fourth)
    assert_bitwise(read(fourth), after, "there and back, on one rank")


def test_converted_column_wise_state_equals_table_wise_state(tmp_path: Path) -> None:
    """After one step from the same rows, the momentum of column-wise training, loaded into OPER,
    equals that of table-wise training."""
    folders = [str(tmp_path / n) for n in ("tw", "cw", "oper")]
    for kind, folder in zip(("table_wise", "column_wise"), folders, strict=False):
        run_world(2, _planned, kind, None, folder)
    run_world(2, _planned, "oper", folders[1], folders[2])
    want, got = read(folders[0]), read(folders[2])
    for name, value in want.items():
        if "momentum" in name:
            torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-9)
            assert value.abs().max() > 1e-3


def test_other_shapes_of_states_are_refused(tmp_path: Path) -> None:
    """States whose sizes do not match are refused, also by torch's planner."""
    first, second = str(tmp_path / "torchrec"), str(tmp_path / "oper")
    run_world(2, run, "column_wise", None, first, "both")
    with pytest.raises(RankFailedError, match="Size mismatch"):
        run_world(2, run, "oper", first, second, "both")
    odd = str(tmp_path / "odd")  # three states a row, of rows that are a third as many
    dcp.save({"model.x.t.weight": torch.zeros(10, 4), "state.x.t.weight.m": torch.zeros(60)},
             checkpoint_id=odd)
    with pytest.raises(CheckpointException, match="numbers per row"):
        dcp.load({"state.x.t.weight.m": torch.zeros(20)}, checkpoint_id=odd,
                 planner=oper.LoadPlanner())


def _small_gradients(rank: int, world_size: int) -> list[torch.Tensor]:
    """Return the changes of the outputs by two steps with gradients of the size of the default eps.

    They are of TorchRec's sharded tables (whose initial rows differ), of OPER's with a tag and with
    an argument, all without an eps, and of unsharded tables under TorchRec's class with FBGEMM's
    eps.
    """
    theirs, _ = by_torchrec("table_wise", 0, lr=LR)
    ours = Model(0)
    _apply_optimizer_in_backward(RowWiseAdagrad, ours.bags.parameters(), {"lr": LR})
    plan = mixed_plan(table_specs(ours.bags), world_size, 3)
    oper.shard(ours, plan=plan)
    argument, unsharded = Model(0), Model(0)
    oper.shard(argument, plan=plan, optimizer=oper.RowWiseAdagrad(lr=LR))
    rule = RowWiseAdagrad(unsharded.bags.parameters(), lr=LR, eps=1e-8)
    changes = []
    for model in (theirs, ours, argument, unsharded):
        with torch.no_grad():
            before = model(batch_of(0, rank)).clone()
        for step in range(2):
            rule.zero_grad()
            (model(batch_of(step, rank)).sum() * 1e-8).backward()
            if model is unsharded:  # the mean of the ranks' gradients, as the others take it
                for p in unsharded.bags.parameters():
                    torch.distributed.all_reduce(p.grad)
                    p.grad /= world_size
                rule.step()
        with torch.no_grad():
            changes.append(model(batch_of(0, rank)) - before)
    return changes


def test_the_default_eps_is_torchrecs() -> None:
    for theirs, tagged, argument, unsharded in run_world(2, _small_gradients):
        for other in (tagged, argument, unsharded):
            torch.testing.assert_close(other, theirs, rtol=1e-4, atol=1e-6)
        assert torch.equal(tagged, argument)
        assert theirs.abs().max() > 1e-2


def _load_directly(rank: int, world_size: int) -> None:
    theirs, _ = by_torchrec("row_wise", 0)
    ours, _ = by_oper(world_size, 50)
    with pytest.raises(RuntimeError,
                       match=r"(?s)(?=.*ShardedTensor).*torch\.distributed\.checkpoint"):
        ours.load_state_dict(theirs.state_dict())


def test_a_sharded_tensor_is_refused_by_name() -> None:
    run_world(2, _load_directly)
