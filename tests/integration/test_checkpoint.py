"""Checkpoints through torch.distributed.checkpoint: any plan, any number of ranks, and TorchRec.

Weights and optimizer state are saved in logical order; what loads them need not know who saved.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import oper
from oper.errors import InvalidInputError
from oper.integration.checkpoint.on_demand import TableRows
from oper.integration.checkpoint.weights import extra_value
from tests.checkpoint_support import (
    CHUNK,
    Model,
    batch_of,
    flat,
    go_on,
    read,
    restore,
    run_ranks,
    sharded,
)
from tests.runtime_support import assert_bitwise, assert_near
from tests.world_support import RankFailedError, run_world


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """Return a checkpoint of two ranks after three steps, and its contents."""
    folder = tmp_path_factory.mktemp("saved") / "two"
    return folder, run_ranks(go_on, 2, 1, range(3), None, str(folder), None)


@pytest.fixture(scope="module")
def unbroken() -> dict[str, torch.Tensor]:
    """Return the state of the two ranks after six steps."""
    return run_ranks(go_on, 2, 1, range(6))


@pytest.fixture(scope="module")
def in_chunks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """Return the same, saved by `oper.save_checkpoint` under a plan with push and columns."""
    folder = tmp_path_factory.mktemp("in_chunks") / "two"
    return folder, run_ranks(go_on, 2, 101, range(3), None, str(folder))


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
    (of_items,) = model.items.fused_optimizer.state_dict()["state"].values()
    assert {k: tuple(v.shape) for k, v in of_items.items()} == {"ts.momentum1": (60, 8)}


def test_the_state_dict_helpers_of_torch() -> None:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    model, other = sharded(1, 0), sharded(1, 1, seed=5)
    state = get_model_state_dict(model)
    assert list(state) == list(model.state_dict())
    set_model_state_dict(other, state)
    assert_bitwise(dict(other.state_dict()), dict(model.state_dict()), "state")


# ---- training goes on ----------------------------------------------------------------------------


@pytest.mark.parametrize("how, plan, others", [("saved", 1, (1, 3)), ("in_chunks", 101, (101,))])
def test_two_ranks_resume_bitwise(how: str, plan: int, others: tuple[int, ...],
                                  request: pytest.FixtureRequest) -> None:
    folder, _ = request.getfixturevalue(how)
    chunk = CHUNK if how == "in_chunks" else None
    want = (request.getfixturevalue("unbroken") if plan == 1
            else run_ranks(go_on, 2, plan, range(6)))
    for other in others:
        got = run_ranks(go_on, 2, other, range(3, 6), str(folder), None, chunk)
        assert_bitwise(got, want, f"plan {other}")


@pytest.mark.parametrize("how, world_size, plan", [
    ("saved", 1, 5), ("saved", 4, 2), ("in_chunks", 1, 2), ("in_chunks", 4, 103)])
def test_another_world_size_resumes(how: str, world_size: int, plan: int, tmp_path: Path,
                                    request: pytest.FixtureRequest) -> None:
    folder, held = request.getfixturevalue(how)
    chunk, place = CHUNK if how == "in_chunks" else None, str(tmp_path / "there")
    there = run_ranks(go_on, world_size, plan, range(3, 3), str(folder), place, chunk)
    assert_bitwise(there, held, "loaded by another world")
    back = run_ranks(go_on, 2, 1, range(3, 3), place, None, chunk)
    assert_bitwise(back, held, "and back")
    if how == "saved":
        assert_near(run_ranks(go_on, world_size, plan, range(3, 6), str(folder), None, None),
                    request.getfixturevalue("unbroken"), "training")


def test_a_chunked_checkpoint_is_readable_without_oper(in_chunks: Any) -> None:
    folder, held = in_chunks
    found = read(folder)
    stored = dcp.FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    chunks = stored["model.bags.embedding_bags.tc.weight"].chunks
    assert sorted(c.sizes[0] for c in chunks) == [4] + 31 * [16]
    assert not [p for p in folder.parent.iterdir() if p != folder]
    names = {"/" + k.replace(".", "/"): v for k, v in found.items()}
    for name, value in held.items():
        # `places` is a bare module: its state stands under "tables" and its path.
        key = name.replace("/places/", "/tables/places/").replace(".", "/")
        assert_bitwise(names["/" + key.lstrip("/")], value, name)


# ---- the unsharded model -------------------------------------------------------------------------


def _plain_weights(rank: int, world_size: int, load: str, save: str) -> dict[str, torch.Tensor]:
    """``dcp.save(model.state_dict())`` without OPER's planners."""
    model = sharded(world_size, 4, seed=7)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=load)
    model.load_state_dict(state)
    dcp.save(model.state_dict(), checkpoint_id=save)
    return flat(dict(model.state_dict()))


def _with_planners(rank: int, world_size: int, load: str, save: str) -> dict[str, torch.Tensor]:
    """Checkpoints of torch.distributed.checkpoint from and to programs without OPER."""
    model = sharded(world_size, 102, seed=7)
    with oper.rows_on_demand(512):  # bytes: most tables are several chunks
        state = model.state_dict()
        assert isinstance(state["places.weight"], TableRows)
        dcp.load(state, checkpoint_id=load, planner=oper.LoadPlanner())
        model.load_state_dict(state)
        dcp.save(model.state_dict(), checkpoint_id=save, planner=oper.SavePlanner())
    return flat(dict(model.state_dict()))


@pytest.mark.parametrize("body", [_plain_weights, _with_planners])
@pytest.mark.parametrize("world_size", [1, 2])
def test_weights_from_and_to_the_unsharded_model(world_size: int, body: Callable[..., Any],
                                                 tmp_path: Path) -> None:
    plain, other = Model(seed=3), Model(seed=4)
    dcp.save(plain.state_dict(), checkpoint_id=str(tmp_path / "in"), no_dist=True)
    want = flat(dict(plain.state_dict()))
    for got in run_world(world_size, body, str(tmp_path / "in"), str(tmp_path / "out")):
        assert_bitwise(got, want, "loaded from the unsharded model")
    state = other.state_dict()
    dcp.load(state, checkpoint_id=str(tmp_path / "out"), no_dist=True)
    other.load_state_dict(state)
    assert_bitwise(flat(dict(other.state_dict())), want, "loaded by the unsharded model")


def test_optimizer_state_from_and_to_an_unsharded_optimizer(saved: Any) -> None:
    """torch's Adagrad and TorchRec's row-wise one continue from OPER's state, and vice versa."""
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    folder, _ = saved
    found = read(folder)
    plain, model = Model(seed=8), sharded(1, 0, seed=9)
    plain.load_state_dict({n: found[f"model.{n}"] for n in plain.state_dict()})
    restore(model, str(folder))
    ta, places = plain.bags.embedding_bags["ta"].weight, plain.places.weight
    rowwise = RowWiseAdagrad([ta], lr=0.1, eps=1e-8)
    adagrad = torch.optim.Adagrad([places], lr=0.1, eps=1e-2)
    key = "optimizer.state.bags.embedding_bags.ta.weight.ta.momentum1"
    rowwise.state[ta]["sum"].copy_(found[key].view_as(rowwise.state[ta]["sum"]))
    adagrad.state[places]["sum"].copy_(found["places.state.weight.weight.momentum1"])
    for m in (plain, model):
        m(batch_of(3, 0, 1)).backward()
    rowwise.step()
    adagrad.step()
    assert_near({"ta": model.state_dict()["bags.embedding_bags.ta.weight"],
                 "places": model.state_dict()["places.weight"],
                 "ta state": model.bags.fused_optimizer.state_dict()["state"][
                     "embedding_bags.ta.weight"]["ta.momentum1"],
                 "places state": model.places.optimizer_state_dict()["state"]["weight"][
                     "weight.momentum1"]},
                {"ta": ta.detach(), "places": places.detach(),
                 "ta state": rowwise.state[ta]["sum"].flatten(),
                 "places state": adagrad.state[places]["sum"]}, "OPER and torch")


# ---- what is refused -----------------------------------------------------------------------------


def test_ranks_survive_a_failed_load(saved: Any) -> None:
    with pytest.raises((RankFailedError, InvalidInputError)):
        run_ranks(go_on, 2, 1, range(0), str(saved[0]) + "-none", None, None)
    run_ranks(go_on, 2, 1, range(0), str(saved[0]), None, None)


def test_extra_values_of_damaged_checkpoints_are_none(tmp_path: Path) -> None:
    """torch raises a BaseException, which would end a server that watches the folder."""
    folder = tmp_path / "one"
    dcp.save({"extra": {"numbering": "abc"}}, checkpoint_id=folder, no_dist=True)
    assert extra_value(folder, "numbering") == "abc"
    assert extra_value(folder, "step") is None
    for path in folder.glob("*.distcp"):
        path.write_bytes(bytes(path.stat().st_size))
    assert extra_value(folder, "numbering") is None
    assert extra_value(tmp_path / "missing", "numbering") is None
