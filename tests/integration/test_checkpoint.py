"""Checkpoints through torch.distributed.checkpoint: any plan, any number of ranks, and TorchRec.

Weights and optimizer state are saved in logical order; what loads them need not know who saved.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import oper
from oper.errors import InvalidInputError
from tests.runtime_support import assert_bitwise, mixed_plan
from tests.world_support import RankFailedError, run_world

configs = pytest.importorskip("torchrec.modules.embedding_configs")
from torchrec.modules.embedding_modules import (  # noqa: E402
    EmbeddingBagCollection,
    EmbeddingCollection,
)
from torchrec.optim.keyed import CombinedOptimizer  # noqa: E402
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor  # noqa: E402

from oper.integration.torch_modules import module_spec  # noqa: E402
from oper.integration.torchrec_modules import table_specs  # noqa: E402

BATCH = 8  # samples of all ranks together
ROWS = {"a": 37, "b": 1, "c": 500, "s": 60}
# What a tag of apply_optimizer_in_backward becomes is tested elsewhere; here one of each kind.
OPTIMIZERS = {"ta": oper.RowWiseAdagrad(lr=0.1), "tb": oper.Adam(lr=0.01, eps=1e-3),
              "tc": oper.PartialRowWiseAdam(lr=0.01, eps=1e-3), "ts": oper.SGD(lr=0.1)}


class Model(nn.Module):
    """Bags, sequences, a bare embedding and a dense layer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.bags = EmbeddingBagCollection([configs.EmbeddingBagConfig(
            name=f"t{f}", num_embeddings=ROWS[f], embedding_dim=8, feature_names=[f])
            for f in "abc"])
        self.items = EmbeddingCollection([configs.EmbeddingConfig(
            name="ts", num_embeddings=ROWS["s"], embedding_dim=8, feature_names=["s"])])
        self.places = nn.Embedding(5, 8)
        self.dense = nn.Linear(24, 1)

    def forward(self, kjt: KeyedJaggedTensor) -> torch.Tensor:
        size = kjt.stride()
        score = self.dense(self.bags(kjt).values()).tanh().sum()
        rows = self.items(kjt)["s"].values()
        return (score + rows.square().sum() + self.places(kjt.values() % 5).sin().sum()) / size


def batch_of(step: int, rank: int, world_size: int) -> KeyedJaggedTensor:
    """This rank's share of the step's samples, which do not depend on the number of ranks."""
    g = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 4, (len(ROWS), BATCH), generator=g)
    ids = [torch.randint(0, rows, (int(n.sum()),), generator=g)
           for rows, n in zip(ROWS.values(), lengths, strict=True)]
    mine = slice(rank * BATCH // world_size, (rank + 1) * BATCH // world_size)
    parts = [torch.cat(torch.split(i, n.tolist())[mine]) for i, n in zip(ids, lengths, strict=True)]
    return KeyedJaggedTensor(list(ROWS), torch.cat(parts), lengths=lengths[:, mine].reshape(-1))


def sharded(world_size: int, plan_seed: int, seed: int = 0) -> Model:
    model = Model(seed)
    kinds = {n: o.name for n, o in OPTIMIZERS.items()}
    specs = [*table_specs(model.bags, kinds), *table_specs(model.items, kinds),
             module_spec("places", model.places, "adagrad")]
    for name, parameter in model.named_parameters():
        table = name.split(".")[-2]
        if table in OPTIMIZERS:
            tag(parameter, OPTIMIZERS[table])
    return oper.shard(model, plan=mixed_plan(specs, world_size, plan_seed),
                      optimizer=oper.Adagrad(lr=0.1, eps=1e-2))


def tag(parameter: torch.Tensor, optimizer: Any) -> None:
    """What ``apply_optimizer_in_backward`` leaves behind."""
    parameter._optimizer_classes = [type(optimizer)]
    parameter._optimizer_kwargs = [
        {k: getattr(optimizer, k) for k in ("lr", "eps", "betas") if hasattr(optimizer, k)}]


def state_of(model: Model) -> dict[str, Any]:
    """What a user saves: everything, under TorchRec's names."""
    fused = CombinedOptimizer([("bags", model.bags.fused_optimizer),
                               ("items", model.items.fused_optimizer)])
    return {"model": model.state_dict(), "optimizer": fused.state_dict(),
            "places": model.places.optimizer_state_dict()}


def restore(model: Model, folder: str) -> None:
    state = state_of(model)
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    CombinedOptimizer([("bags", model.bags.fused_optimizer),
                       ("items", model.items.fused_optimizer)]).load_state_dict(state["optimizer"])
    model.places.load_optimizer_state_dict(state["places"])


def flat(state: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """Whole tensors by path."""
    if isinstance(state, dict):
        return {k: v for name, value in state.items()
                for k, v in flat(value, f"{prefix}/{name}").items()}
    full = getattr(state, "full_tensor", None)
    return {prefix: (full() if full else state).detach().clone()}


def run(rank: int, world_size: int, plan_seed: int, steps: range, load: str | None = None,
        save: str | None = None) -> dict[str, torch.Tensor]:
    """Load, train, save; everything as whole tensors. With an empty range: only convert."""
    # Another seed, so that what is not loaded shows.
    model = sharded(world_size, plan_seed, seed=0 if load is None else 99)
    if load is not None:
        restore(model, load)
    for step in steps:
        model.dense.zero_grad()
        model(batch_of(step, rank, world_size)).backward()
        with torch.no_grad():
            for p in model.dense.parameters():
                if world_size > 1:
                    torch.distributed.all_reduce(p.grad)
                p -= 0.1 * p.grad / world_size
    state = state_of(model)
    if save is not None:
        dcp.save(state, checkpoint_id=save)
    return flat(state)


def run_alone(plan_seed: int, steps: range, load: str | None = None, save: str | None = None
              ) -> dict[str, torch.Tensor]:
    return run(0, 1, plan_seed, steps, load, save)


def run_ranks(world_size: int, *args: Any) -> dict[str, torch.Tensor]:
    first, *others = run_world(world_size, run, *args)
    for other in others:
        assert_bitwise(other, first, "two ranks")
    return first


def close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name].shape == value.shape, name
        gap = (got[name] - value).abs().max()
        assert gap <= 1e-5 * value.abs().max(), f"{name}: {gap}"


def read(folder: Path) -> dict[str, torch.Tensor]:
    """A checkpoint without OPER, into plain tensors of the global shapes."""
    metadata = dcp.FileSystemReader(str(folder)).read_metadata()
    state = {name: torch.full(item.size, torch.nan) for name, item
             in metadata.state_dict_metadata.items() if hasattr(item, "size")}
    dcp.load(state, checkpoint_id=str(folder), no_dist=True)
    return state


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """Two ranks, three steps: the checkpoint and what it holds."""
    folder = tmp_path_factory.mktemp("saved") / "two"
    return folder, run_ranks(2, 1, range(3), None, str(folder))


# ---- names and shapes ----------------------------------------------------------------------------


def test_names_and_shapes_are_the_unsharded_ones() -> None:
    plain, model = Model(), sharded(1, 0)
    assert list(model.state_dict()) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        assert_bitwise(model.state_dict()[name], value, name)
    fused = model.bags.fused_optimizer.state_dict()["state"]
    assert {name: {k: tuple(v.shape) for k, v in part.items()} for name, part in fused.items()} == {
        "embedding_bags.ta.weight": {"ta.momentum1": (37,)},
        "embedding_bags.tb.weight": {"tb.momentum1": (1, 8), "tb.exp_avg_sq": (1, 8),
                                     "tb.step": ()},
        "embedding_bags.tc.weight": {"tc.momentum1": (500, 8), "tc.exp_avg_sq": (500,),
                                     "tc.step": ()}}
    assert model.items.fused_optimizer.state_dict()["state"] == {"embeddings.ts.weight": {}}


def test_a_checkpoint_reads_without_oper(saved: Any) -> None:
    folder, held = saved
    found = read(folder)
    values = {f"/{k.replace('.', '/')}": v for k, v in found.items()}
    wanted = {k.replace(".", "/"): v for k, v in held.items()}
    assert wanted.keys() == values.keys()
    assert_bitwise(values, wanted, "checkpoint")


def test_torch_save_and_load() -> None:
    model = sharded(1, 0)
    model(batch_of(0, 0, 1)).backward()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = sharded(1, 2, seed=5)
    other.load_state_dict(torch.load(file))
    assert_bitwise(dict(other.state_dict()), dict(model.state_dict()), "state")


def test_the_state_dict_helpers_of_torch() -> None:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    model, other = sharded(1, 0), sharded(1, 1, seed=5)
    state = get_model_state_dict(model)
    assert list(state) == list(model.state_dict())
    set_model_state_dict(other, state)
    assert_bitwise(dict(other.state_dict()), dict(model.state_dict()), "state")


# ---- training goes on ----------------------------------------------------------------------------


def test_one_rank_goes_on_bitwise(tmp_path: Path) -> None:
    """Under the same plan and under another one."""
    want = run_alone(1, range(6))
    half = run_alone(1, range(3), None, str(tmp_path))
    assert not torch.equal(half["/model/bags.embedding_bags.ta.weight"],
                           want["/model/bags.embedding_bags.ta.weight"])
    for plan in (1, 2):
        assert_bitwise(run_alone(plan, range(3, 6), str(tmp_path)), want, f"plan {plan}")


def test_two_ranks_go_on_bitwise(saved: Any) -> None:
    want = run_ranks(2, 1, range(6))
    for plan in (1, 3):
        assert_bitwise(run_ranks(2, plan, range(3, 6), str(saved[0])), want, f"plan {plan}")


@pytest.mark.parametrize("world_size, plan", [(1, 5), (4, 2)])
def test_another_world_goes_on(saved: Any, world_size: int, plan: int, tmp_path: Path) -> None:
    folder, held = saved
    there = run_ranks(world_size, plan, range(0), str(folder), str(tmp_path / "there"))
    assert_bitwise(there, held, "loaded by another world")
    back = run_ranks(2, 1, range(0), str(tmp_path / "there"))
    assert_bitwise(back, held, "and back")
    close(run_ranks(world_size, plan, range(3, 6), str(folder)), run_ranks(2, 1, range(6)))


# ---- the unsharded model -------------------------------------------------------------------------


def _plain_weights(rank: int, world_size: int, load: str, save: str) -> dict[str, torch.Tensor]:
    """``dcp.save(model.state_dict())``, nothing more."""
    model = sharded(world_size, 4, seed=7)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=load)
    model.load_state_dict(state)
    dcp.save(model.state_dict(), checkpoint_id=save)
    return flat(dict(model.state_dict()))


@pytest.mark.parametrize("world_size", [1, 2])
def test_weights_from_and_to_the_unsharded_model(world_size: int, tmp_path: Path) -> None:
    plain, other = Model(seed=3), Model(seed=4)
    dcp.save(plain.state_dict(), checkpoint_id=str(tmp_path / "in"), no_dist=True)
    want = flat(dict(plain.state_dict()))
    for got in run_world(world_size, _plain_weights, str(tmp_path / "in"), str(tmp_path / "out")):
        assert_bitwise(got, want, "loaded from the unsharded model")
    state = other.state_dict()
    dcp.load(state, checkpoint_id=str(tmp_path / "out"), no_dist=True)
    other.load_state_dict(state)
    assert_bitwise(flat(dict(other.state_dict())), want, "loaded by the unsharded model")


def test_optimizer_state_from_and_to_an_unsharded_optimizer(saved: Any) -> None:
    """torch's Adagrad and TorchRec's row-wise one go on from OPER's state, and back."""
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    folder, _ = saved
    found = read(folder)
    plain, model = Model(seed=8), sharded(1, 0, seed=9)
    plain.load_state_dict({n: found[f"model.{n}"] for n in plain.state_dict()})
    restore(model, str(folder))
    ta, places = plain.bags.embedding_bags["ta"].weight, plain.places.weight
    rowwise = RowWiseAdagrad([ta], lr=0.1)
    adagrad = torch.optim.Adagrad([places], lr=0.1, eps=1e-2)
    key = "optimizer.state.bags.embedding_bags.ta.weight.ta.momentum1"
    rowwise.state[ta]["sum"].copy_(found[key].view_as(rowwise.state[ta]["sum"]))
    adagrad.state[places]["sum"].copy_(found["places.state.weight.weight.momentum1"])
    for m in (plain, model):
        m(batch_of(3, 0, 1)).backward()
    rowwise.step()
    adagrad.step()
    close({"ta": model.state_dict()["bags.embedding_bags.ta.weight"],
           "places": model.state_dict()["places.weight"],
           "ta state": model.bags.fused_optimizer.state_dict()["state"][
               "embedding_bags.ta.weight"]["ta.momentum1"],
           "places state": model.places.optimizer_state_dict()["state"]["weight"][
               "weight.momentum1"]},
          {"ta": ta.detach(), "places": places.detach(),
           "ta state": rowwise.state[ta]["sum"].flatten(),
           "places state": adagrad.state[places]["sum"]})


# ---- what is refused -----------------------------------------------------------------------------


def test_another_shape_is_refused() -> None:
    model = sharded(1, 0)
    state = dict(model.state_dict())
    before = state["bags.embedding_bags.ta.weight"]
    state["bags.embedding_bags.ta.weight"] = torch.zeros(38, 8)
    with pytest.raises(RuntimeError, match=r"'ta'.*\(38, 8\).*\(37, 8\)"):
        model.load_state_dict(state)
    assert_bitwise(model.state_dict()["bags.embedding_bags.ta.weight"], before, "unchanged")
    del state["bags.embedding_bags.ta.weight"]
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(state)
    state["bags.embedding_bags.new.weight"] = torch.zeros(3, 8)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert missing == ["bags.embedding_bags.ta.weight"]
    assert unexpected == ["bags.embedding_bags.new.weight"]


def test_a_failed_load_on_all_ranks_leaves_them_alive(saved: Any) -> None:
    with pytest.raises((RankFailedError, InvalidInputError)):
        run_ranks(2, 1, range(0), str(saved[0]) + "-none")
    run_ranks(2, 1, range(0), str(saved[0]))
